"""`parallelize` lays a tree of parameters out by styles, and gives the plan that arranges values where they stand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fspmd.body import state
from fspmd.collectives import pcast
from fspmd.errors import ArgumentError, AxisError, TreeError
from fspmd.local_view.shard_map import shard_map
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, described, quoted, refuse
from fspmd.modules.paths import leaves_by_name, matches, near, prefixes
from fspmd.modules.styles import ColwiseParallel, Layout, OnBlocks, PrepareInput, Style, laid_out, several
from fspmd.outside import the_mesh
from fspmd.placing.placement import device_put
from fspmd.placing.scatter import PLANNED, lacks_values
from fspmd.redistribution.once import redistribute_once
from fspmd.redistribution.redistribute import to_blocks
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, TensorSpec
from fspmd.wrapping import wraps

# --- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What became of one leaf: its name, the pattern that placed it (None: no one did), and its layout."""

    name: str
    pattern: str | None
    spec: TensorSpec


@dataclass(frozen=True)
class ParallelPlan:
    """Styles by pattern, what became of each leaf, and how values are arranged where the styles stand.

    ``plan["layers.0.mlp.up"]`` is what stands at a path (`Placed`); ``str(plan)`` is a table; ``plan.specs`` the
    layouts by name.
    """

    styles: Mapping[str, Style]
    mesh: Mesh
    rows: tuple[Row, ...]
    _placed: dict[str, Placed | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def specs(self) -> dict[str, P]:
        """The partition of each leaf by name."""
        return {row.name: row.spec.partition for row in self.rows}

    def __getitem__(self, path: str) -> Placed:
        placed = self.at(path)
        if placed is None:
            raise TreeError(f"no style stands at {path!r}{near(path, self.styles)}")
        return placed

    def at(self, path: str) -> Placed | None:
        """What stands at a path, or None."""
        if path not in self._placed:
            found = {pattern: style for pattern, style in self.styles.items() if matches(pattern, path)}
            self._placed[path] = Placed(path, found, self.mesh, self._columns(path)) if found else None
        return self._placed[path]

    def _columns(self, path: str) -> frozenset[str]:
        """The axes by which layers at a path, or below it, are cut by columns."""
        below = [row.pattern for row in self.rows if f"{row.name}.".startswith(f"{path}." if path else "")]
        styles = [self.styles[pattern] for pattern in below if pattern is not None]
        return frozenset([_axis_of(style) for style in styles if isinstance(style, ColwiseParallel)])

    def __str__(self) -> str:
        cells = [("leaf", "layout", "pattern", "style")]
        for row in self.rows:
            style = "" if row.pattern is None else repr(self.styles[row.pattern])
            layout = repr(row.spec).partition(" on ")[0]
            cells.append((row.name, layout, "-" if row.pattern is None else row.pattern or '""', style))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = ["  ".join((*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3])) for line in cells]
        return "\n".join((f"on {self.mesh!r}", *(line.rstrip() for line in lines)))


@dataclass(frozen=True)
class Placed:
    """The styles at one path. Of several the later one decides what it speaks of.

    >>> import torch
    >>> from torch.nn import functional as F
    >>> from fspmd import ColwiseParallel, RowwiseParallel, make_mesh
    >>> params = {"up": torch.ones(8, 6), "down": torch.ones(6, 8)}
    >>> styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    >>> params, plan = parallelize(params, styles, make_mesh((4,), ("x",)))
    >>> up, down = plan["up"](F.linear), plan["down"](F.linear)
    >>> hidden = up(torch.ones(3, 6), params["up"])
    >>> hidden, down(F.gelu(hidden), params["down"])
    (Sharded f32[3, 8@x] on mesh(x=4), Sharded f32[3, 6] on mesh(x=4))
    """

    path: str
    styles: dict[str, Style]
    mesh: Mesh
    columns: frozenset[str] = frozenset()  # axes by which layers are cut by columns, here or below

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` on global shapes, its arguments and results arranged."""

        @wraps(f)
        def arranged(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.inputs(args, kwargs)
            return self.outputs(f(*args, **kwargs))

        return arranged

    def local(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` on this rank's blocks, a body of `shard_map` with arguments and result arranged: no communication but
        at the boundary. What a row-parallel ``f`` gives is summed, so a bias is added to the result, outside.

        Raises:
            ArgumentError: the style does not tell how the result lies; an argument that every rank has would be
                summed once per rank.
        """
        style = self._speaking_of("result")
        if style is None:
            raise ArgumentError(f"the style at {self.path!r} does not tell how a result lies; give it result=")
        axis, result = _axis_of(style), style.result
        maps: dict[Any, Callable[..., Any]] = {}

        @wraps(f)
        def mapped(*args: Any) -> Any:
            args, _ = self.inputs(args, {})
            specs = tuple(_partition_of(x) for x in args)
            found = maps.get(specs)
            if found is None:
                if result == "unreduced":
                    self._check_summands(args[len(several(style.input)) :], axis)
                out = laid_out(_spread(args[0]), args[0].ndim, axis, result)
                found = maps[specs] = shard_map(_body(f, axis, result), mesh=self.mesh, in_specs=specs, out_specs=out)
            return self.outputs(found(*args))

        return mapped

    def _check_summands(self, others: tuple[Any, ...], axis: str) -> None:
        for x in others:
            if isinstance(x, Tensor) and x.is_floating_point() and axis not in _spread(x).axes:
                raise ArgumentError(
                    f"{self.path!r}: what each rank computes there is summed over {axis!r}, but {described(x)} "
                    "is equal on all ranks and would count once per rank; add it to the result"
                )

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, laid out as the styles say."""
        if style := self._speaking_of("input"):
            layouts = several(style.input)
            given = zip(args, layouts, strict=False)
            args = self._each(args, style, tuple([self._gathered(x, to, style) for x, to in given]))
        for style in self.styles.values():
            given = ((key, kwargs[key], layout) for key, layout in style.kwargs.items() if key in kwargs)
            kwargs |= {key: self._arranged(x, self._gathered(x, to, style), style) for key, x, to in given}
        return args, kwargs

    def _gathered(self, x: Any, layout: Layout, style: Style) -> Layout:
        """Where a cut argument goes for layers cut by columns, whose gradients are a sum: it goes back as one."""
        axis = _axis_of(style)
        if layout != "replicated" or axis not in self.columns or not isinstance(x, Sharded):
            return layout
        lies = x.spec.partition
        return "reduced" if axis in lies.axes | lies.reduced and x.spec.dtype.is_floating_point else layout

    def outputs(self, out: Any) -> Any:
        """The result, laid out as the styles say."""
        if style := self._speaking_of("output"):
            if isinstance(out, (tuple, list)):
                return type(out)(self._each(tuple(out), style, several(style.output), flat=True))
            return self._arranged(out, several(style.output)[0], style, flat=True)
        return out

    @property
    def on_blocks(self) -> OnBlocks | None:
        """The style by which a module's forward runs on blocks."""
        return next((style for style in reversed(self.styles.values()) if isinstance(style, OnBlocks)), None)

    def _speaking_of(self, name: str) -> Style | None:
        return next((style for style in reversed(self.styles.values()) if getattr(style, name) is not None), None)

    def _each(
        self, values: tuple[Any, ...], style: Style, layouts: tuple[Layout, ...], *, flat: bool = False
    ) -> tuple[Any, ...]:
        placed = [self._arranged(x, layout, style, flat=flat) for x, layout in zip(values, layouts, strict=False)]
        return *placed, *values[len(layouts) :]

    def _arranged(self, x: Any, layout: Layout, style: Style, *, flat: bool = False) -> Any:
        if layout is None or not isinstance(x, Tensor):
            return x
        if state.body is not None:
            raise ArgumentError(
                f"the styles at {self.path!r} lay out global values, but were used inside {state.body.name}, whose "
                "values are this rank's blocks; use them outside"
            )
        source = x.spec if isinstance(x, Sharded) else TensorSpec(self.mesh, P(), x.shape, x.dtype)
        target = _target(source, _axis_of(style), layout, flat or style.flat)
        if isinstance(x, Sharded):
            return x if target is source else Sharded(redistribute_once(x.local, source, target), target)
        return Sharded(to_blocks(x.to(self.mesh.device), target), target)


@functools.lru_cache(maxsize=4096)
def _target(source: TensorSpec, axis: str, layout: Layout, flat: bool) -> TensorSpec:
    return source.with_partition(laid_out(source.partition, len(source.shape), axis, layout, flat=flat))


def _axis_of(style: Style) -> str:
    assert style.axis is not None  # given when the plan was made
    return style.axis


def _partition_of(x: Any) -> P | None:
    return x.spec.partition if isinstance(x, Sharded) else P() if is_plain(x) else None


def _spread(x: Any) -> P:
    return _partition_of(x) or P()


def _body(f: Callable[..., Any], axis: str, result: Layout) -> Callable[..., Any]:
    if result != "unreduced":
        return f
    return lambda *args: pcast(f(*args), axis, to="unreduced")


# --- trees -----------------------------------------------------------------------------------------------------------


def parallelize(
    params: Any, styles: Mapping[str, Style], mesh: Mesh | None = None, *, axis: str | None = None
) -> tuple[Any, ParallelPlan]:
    """A tree of parameters laid out by styles, and the plan that arranges values: ``(params, plan)``.

    Args:
        params: Dicts, lists and tuples of tensors, flat (``dict(module.named_parameters())``) or nested. Global plain
            tensors that every rank holds, or `Sharded`, which are moved. To plan a module without memory: tensors on
            the meta device and a mesh of transport "abstract", or `TensorSpec` leaves.
        styles: By glob on qualified names: ``"layers.*.attn.wq"`` is a leaf or a subtree; ``*`` is one key, ``**`` any
            number. Where several match, the later decides. A leaf that none matches is replicated.
        mesh: By default the current one.
        axis: The axis of styles that name none; by default the only one of the mesh.

    The results are leaves for autograd where the parameters were. With `functional_call` the plan goes in as
    ``styles=plan``; without, ``plan[path](f)`` is ``f`` with its arguments and results arranged.

    Raises:
        TreeError: naming every pattern that matches nothing; those of `PrepareInput` and `PrepareOutput` may stand
            where no parameters are.
        AxisError, SpecError, ArgumentError: a style without an axis, or one that does not fit a leaf.

    >>> from fspmd import ColwiseParallel, make_mesh
    >>> params = {"up": {"weight": torch.ones(8, 6), "bias": torch.ones(8)}, "scale": torch.ones(6)}
    >>> params, plan = parallelize(params, {"up": ColwiseParallel()}, make_mesh((4,), ("x",)))
    >>> print(plan)
    on mesh(x=4)
    leaf       layout       pattern  style
    up.weight  f32[8@x, 6]  up       ColwiseParallel(axis='x')
    up.bias    f32[8@x]     up       ColwiseParallel(axis='x')
    scale      f32[6]       -
    """
    mesh = the_mesh(mesh, "parallelize")
    if not isinstance(params, (Mapping, list, tuple)):
        raise TreeError(f"parallelize got {described(params)} for params; give it a dict of tensors by name")
    named = {name: leaf for name, leaf, _, _ in leaves_by_name(params) if leaf is not None}
    _check_named(named, mesh)
    shapes = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in named.items()}
    plan = make_plan(shapes, styles, mesh, axis, "parallelize")
    specs = plan.specs
    placed: dict[Any, Sharded | TensorSpec] = {}  # one leaf under several names that lies alike stays one

    def place(name: str, leaf: Tensor | Sharded | TensorSpec) -> Sharded | TensorSpec:
        key = id(leaf), specs[name]
        if key not in placed:
            placed[key] = _leaf(leaf, specs[name], mesh)
        return placed[key]

    return _mapped(params, "", place), plan


def _check_named(named: Mapping[str, Any], mesh: Mesh) -> None:
    failures = []
    for name, leaf in named.items():
        if not isinstance(leaf, (Tensor, Sharded, TensorSpec)):
            failures.append(Failure(f"{name!r} is {described(leaf)}, not a tensor", TreeError))
        elif lacks_values(leaf, mesh):
            failures.append(Failure(f"{name!r} is on the meta device, which has no values", ArgumentError, PLANNED))
    if failures:
        refuse("parallelize lays out trees of tensors", failures)


def _mapped(tree: Any, prefix: str, f: Callable[[str, Any], Any]) -> Any:
    """The tree with each leaf that is not None replaced by ``f(name, leaf)``."""
    if isinstance(tree, Mapping):
        return type(tree)({key: _mapped(value, f"{prefix}.{key}", f) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, (list, tuple)):
        values = [_mapped(value, f"{prefix}.{i}", f) for i, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if tree is None else f(prefix[1:], tree)


def _leaf(x: Tensor | Sharded | TensorSpec, partition: P, mesh: Mesh) -> Sharded | TensorSpec:
    if isinstance(x, TensorSpec):
        return TensorSpec(mesh, partition, x.shape, x.dtype)
    placed: Sharded = device_put(x.detach(), partition, mesh=mesh)
    return placed.requires_grad_() if x.requires_grad else placed


def make_plan(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    styles: Mapping[str, Style],
    mesh: Mesh,
    axis: str | None,
    what: str,
) -> ParallelPlan:
    """The plan for leaves of these names, shapes and dtypes."""
    if not isinstance(styles, Mapping):
        raise ArgumentError(f"{what} got {described(styles)} for styles; write {{'layers.*.wq': ColwiseParallel()}}")
    failures: list[Failure] = []
    styles = {pattern: _with_axis(style, pattern, mesh, axis, failures) for pattern, style in styles.items()}
    paths = list(dict.fromkeys(path for name in shapes for path in prefixes(name)))
    for pattern, style in styles.items():
        if style.places and not any(matches(pattern, path) for path in paths):
            text = f"{pattern!r} ({type(style).__name__}) matches nothing{near(pattern, paths[1:])}"
            failures.append(Failure(text, TreeError, "for a module without parameters write PrepareInput(...)"))
    if failures:
        refuse(f"{what}: styles do not fit", failures)
    return ParallelPlan(styles, mesh, tuple(_rows(shapes, styles, mesh, what)))


def _with_axis(style: Any, pattern: str, mesh: Mesh, axis: str | None, failures: list[Failure]) -> Style:
    if not isinstance(style, Style):
        text = f"{pattern!r} is {described(style)}; write a style such as ColwiseParallel()"
        failures.append(Failure(text, ArgumentError))
        return PrepareInput()
    name = style.axis or axis or (mesh.axis_names[0] if len(mesh.axis_names) == 1 else None)
    if name is None:
        text = f"{pattern!r} ({type(style).__name__}) has no axis, and {mesh!r} has several"
        failures.append(Failure(text, AxisError, f"write axis={mesh.axis_names[-1]!r}"))
    elif name not in mesh.axis_names:
        text = f"{pattern!r} ({type(style).__name__}) has the axis {name!r}, but {mesh!r} has only"
        failures.append(Failure(f"{text} {quoted(mesh.axis_names)}", AxisError))
    return replace(style, axis=name)


def _rows(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], styles: Mapping[str, Style], mesh: Mesh, what: str
) -> Iterator[Row]:
    for name, (shape, dtype) in shapes.items():
        decided, partition = None, P()
        for pattern, style in styles.items():
            path = next((path for path in prefixes(name) if style.places and matches(pattern, path)), None)
            if path is not None:
                layout = style.of_parameter(name[len(path) :].lstrip("."), len(shape))
                try:
                    decided, partition = pattern, laid_out(P(), len(shape), _axis_of(style), layout)
                except ArgumentError as error:
                    raise ArgumentError(f"{what}: {name!r} under {pattern!r} ({style!r}): {error}") from None
        yield Row(name, decided, TensorSpec(mesh, partition, shape, dtype))
