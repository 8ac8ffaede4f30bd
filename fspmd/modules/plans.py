"""Plans: styles by pattern, what became of each leaf, and how values are arranged where styles stand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fspmd.modules.paths import matches, near, prefixes
from fspmd.modules.styles import ColwiseParallel, Layout, OnBlocks, PrepareInput, Style, laid_out, several
from fspmd.redistribution.redistribute import to_blocks
from fspmd.redistribution.shared_moves import redistribute_once
from fspmd.sharded import Sharded, alike, is_plain
from fspmd.spec import P, TensorSpec
from fspmd.wrapping import wraps

# --- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedLeaf:
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
    rows: tuple[PlacedLeaf, ...]
    _placed: dict[str, Placed | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _heard: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # patterns that have acted

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

    def hear(self, patterns: Iterable[str]) -> None:
        """The styles of these patterns have met values."""
        self._heard.update(patterns)

    def warn_of_unheard(self) -> None:
        """Of styles that arrange values and met none in a whole call: once."""
        lost = [p for p, style in self.styles.items() if style.arranges and p not in self._heard]
        self._heard.update(lost)
        for pattern in lost:
            warnings.warn(
                f"styles: no module at {pattern!r} ({type(self.styles[pattern]).__name__}) was called, so what it says "
                "of input, kwargs and output has changed nothing; give it to the module that is called, or say nothing "
                "of them: Style(weight=..., vector=...)",
                stacklevel=5,
            )

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
    >>> from fspmd import ColwiseParallel, RowwiseParallel, make_mesh, parallelize
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

    def elsewhere(self, path: str, alike: bool) -> Placed | None:
        """What stands at another module that has the same parameter: the same of one that does the same with it.

        Of another (a head that is an embedding) it is known only whether its input must be replicated.
        """
        styles, columns = {pattern: style for pattern, style in self.styles.items() if style.places}, self.columns
        if not alike:
            whole = {pattern: style for pattern, style in styles.items() if style.input == "replicated"}
            styles = {pattern: PrepareInput(axis=style.axis, input="replicated") for pattern, style in whole.items()}
            columns = frozenset(map(_axis_of, styles.values()))  # an embedding's rows are the columns of a head
        return Placed(path, styles, self.mesh, columns) if styles else None

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, laid out as the styles say; ``names``: those of all parameters, by which some may come."""
        given = list(args)
        if style := self._speaking_of("input"):
            for i, layout in enumerate(several(style.input)):
                if i < len(given):
                    given[i] = self._taken(given[i], layout, style)
                elif i < len(names) and names[i] in kwargs:
                    kwargs = kwargs | {names[i]: self._taken(kwargs[names[i]], layout, style)}
        for style in self.styles.values():
            for key, layout in style.kwargs.items():
                if key in kwargs:
                    kwargs = kwargs | {key: self._taken(kwargs[key], layout, style)}
                elif key in names[: len(given)]:
                    given[names.index(key)] = self._taken(given[names.index(key)], layout, style)
        return tuple(given), kwargs

    def _taken(self, x: Any, layout: Layout, style: Style) -> Any:
        """An argument. One that is gathered for layers cut by columns, whose gradients are a sum, goes back as one."""
        axis = _axis_of(style)
        if layout == "replicated" and axis in self.columns and isinstance(x, Sharded):
            lies = x.spec.partition
            if axis in lies.axes | lies.reduced and x.spec.dtype.is_floating_point:
                layout = "reduced"
        return self._arranged(x, layout, style)

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
            return x if target is source else alike(redistribute_once(x.local, source, target), x, target)
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


# --- leaves ----------------------------------------------------------------------------------------------------------


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
    for pattern, style in styles.items():
        failures += _useless(pattern, style, shapes)
    if failures:
        refuse(f"{what}: styles do not fit", failures)
    rows = tuple(_rows(shapes, styles, mesh, what))
    for pattern in styles.keys() - {row.pattern for row in rows}:
        if styles[pattern].places and not styles[pattern].arranges:
            warnings.warn(
                f"{what}: the style at {pattern!r} ({type(styles[pattern]).__name__}) changes nothing: later ones "
                "decide all that it matches; leave it out, or write it after them",
                stacklevel=3,
            )
    return ParallelPlan(styles, mesh, rows)


def _useless(pattern: str, style: Style, shapes: Mapping[str, Any]) -> Iterator[Failure]:
    """What the style says of nothing."""
    which = f"{pattern!r} ({type(style).__name__})"
    if not (style.places or style.arranges or style.result is not None or isinstance(style, OnBlocks)):
        yield Failure(f"{which} says nothing; give it input=, output= or specs=", TreeError)
    below = [name[len(path) :].lstrip(".") for name in shapes for path in prefixes(name) if matches(pattern, path)]
    if style.places and not below:
        paths = dict.fromkeys(path for name in shapes for path in prefixes(name) if path)
        text = f"{which} matches nothing{near(pattern, paths)}"
        yield Failure(text, TreeError, "for a module without parameters write PrepareInput(...)")
        return
    for key in style.specs:
        if not any(matches(key, name) for name in below):
            yield Failure(f"{which}: {key!r} in specs matches nothing{near(key, below)}", TreeError)


def _with_axis(style: Any, pattern: str, mesh: Mesh, axis: str | None, failures: list[Failure]) -> Style:
    if not isinstance(style, Style):
        text = f"{pattern!r} is {described(style)}; write a style such as ColwiseParallel()"
        failures.append(Failure(text, ArgumentError))
        return PrepareInput(input="replicated")
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
) -> Iterator[PlacedLeaf]:
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
        yield PlacedLeaf(name, decided, TensorSpec(mesh, partition, shape, dtype))
