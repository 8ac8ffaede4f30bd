"""Plans: styles by pattern, the layout of each leaf, and the layouts of values at the patterns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fspmd.body import state
from fspmd.cache import cached
from fspmd.collectives import pcast
from fspmd.errors import ArgumentError, AxisError, TreeError
from fspmd.local_view.shard_map import shard_map
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, counted, described, quoted, refuse
from fspmd.modules.paths import matches, near, prefixes
from fspmd.modules.styles import ColwiseParallel, Layout, OnBlocks, PrepareInput, Style, laid_out, several
from fspmd.redistribution.redistribute import redistribute_once, to_blocks
from fspmd.sharded import Sharded, alike, is_plain
from fspmd.spec import P, TensorSpec
from fspmd.wrappers import wraps

# --- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedLeaf:
    """One leaf: its name, the pattern that decided its layout (None if no pattern matched), and the layout."""

    name: str
    pattern: str | None
    spec: TensorSpec


@dataclass(frozen=True)
class ParallelPlan:
    """Styles by pattern, the layout of each leaf, and the layouts of values at the patterns.

    ``plan["layers.0.mlp.up"]`` has the styles at a path (`Placed`). ``plan.specs`` has the partition of each leaf by
    name. ``str(plan)`` is a table of the leaves.
    """

    styles: Mapping[str, Style]
    mesh: Mesh
    rows: tuple[PlacedLeaf, ...]
    _placed: dict[str, Placed | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _used: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # patterns of called modules
    _decisive: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # and those that decided

    @property
    def specs(self) -> dict[str, P]:
        """The partition of each leaf by name."""
        return {row.name: row.spec.partition for row in self.rows}

    def __getitem__(self, path: str) -> Placed:
        placed = self.at(path)
        if placed is None:
            raise TreeError(f"no style matches {path!r}{near(path, self.styles)}")
        return placed

    def at(self, path: str) -> Placed | None:
        """The styles at a path; None where no pattern matches."""
        if path not in self._placed:
            styles = {pattern: style for pattern, style in self.styles.items() if matches(pattern, path)}
            self._placed[path] = Placed(path, styles, self.mesh, self._columns(path)) if styles else None
        return self._placed[path]

    def _columns(self, path: str) -> frozenset[str]:
        """The axes that cut layers at a path, or below it, by columns."""
        below = [row.pattern for row in self.rows if f"{row.name}.".startswith(f"{path}." if path else "")]
        styles = [self.styles[pattern] for pattern in below if pattern is not None]
        return frozenset([_axis_of(style) for style in styles if isinstance(style, ColwiseParallel)])

    def mark_used(self, placed: Placed) -> None:
        """Note that styles were applied to values."""
        self._used.update(placed.styles)
        self._decisive.update(placed.decisive)

    def warn_of_unused(self) -> None:
        """Warn once of each style for values that a whole call has not applied, or that decided nothing."""
        arranging = [pattern for pattern, style in self.styles.items() if style.arranges]
        unused = [pattern for pattern in arranging if pattern not in self._used]
        decisive = self._decisive.union(unused, [row.pattern for row in self.rows if row.pattern is not None])
        shadowed = [pattern for pattern in arranging if pattern not in decisive]
        self._used.update(unused)
        self._decisive.update(unused, shadowed)
        for pattern in shadowed:
            warnings.warn(
                f"styles: the style at {pattern!r} ({type(self.styles[pattern]).__name__}) changes nothing, because "
                "later patterns decide all leaves and values that it matches; leave it out, or write it after them",
                stacklevel=5,
            )
        for pattern in unused:
            warnings.warn(
                f"styles: no module at {pattern!r} ({type(self.styles[pattern]).__name__}) was called, so its input, "
                "kwargs and output have changed nothing; write the pattern of a module that is called, or leave them "
                "out: Style(weight=..., vector=...)",
                stacklevel=5,
            )

    def __str__(self) -> str:
        cells = [("leaf", "layout", "pattern", "style")]
        for row in self.rows:
            style = "" if row.pattern is None else repr(self.styles[row.pattern])
            layout = row.spec.text
            cells.append((row.name, layout, "-" if row.pattern is None else row.pattern or '""', style))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = ["  ".join((*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3])) for line in cells]
        return "\n".join((f"on {self.mesh!r}", *(line.rstrip() for line in lines)))


@dataclass(frozen=True)
class Placed:
    """The styles at one path. For each field the last style that sets it decides.

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
    columns: frozenset[str] = frozenset()  # axes that cut layers by columns, here or below

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` on global shapes, with its arguments and results laid out by the styles."""

        @wraps(f)
        def arranged(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.inputs(args, kwargs)
            return self.outputs(f(*args, **kwargs))

        return arranged

    def local(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` on this rank's blocks, as a body of `shard_map`, with arguments and result laid out by the styles.

        It communicates only at the boundary. The result of a row-parallel ``f`` is summed, so add a bias to the result
        outside.

        Raises:
            ArgumentError: no style has a layout of the result; or an argument that is equal on all ranks would be
                summed once per rank.
        """
        style = self._style_with("result")
        if style is None:
            raise ArgumentError(f"the style at {self.path!r} has no layout of the result; give it result=")
        axis, result = _axis_of(style), style.result
        maps: dict[Any, Callable[..., Any]] = {}

        @wraps(f)
        def mapped(*args: Any) -> Any:
            args, _ = self.inputs(args, {})
            specs = tuple(_partition_of(x) for x in args)
            run = maps.get(specs)
            if run is None:
                if result == "unreduced":
                    self._check_summands(args[len(several(style.input)) :], axis)
                out = laid_out(_partition_of(args[0]) or P(), args[0].ndim, axis, result)
                run = maps[specs] = shard_map(_body(f, axis, result), mesh=self.mesh, in_specs=specs, out_specs=out)
            return self.outputs(run(*args))

        return mapped

    def _check_summands(self, others: tuple[Any, ...], axis: str) -> None:
        for x in others:
            if isinstance(x, Tensor) and x.is_floating_point() and axis not in (_partition_of(x) or P()).axes:
                raise ArgumentError(
                    f"{self.path!r}: the results of the ranks are summed over {axis!r}, but {described(x)} is equal on "
                    "all ranks and would count once per rank; add it to the result"
                )

    def elsewhere(self, path: str, alike: bool) -> Placed | None:
        """The styles for another module with the same parameter: the same ones if it has the same forward (``alike``).

        For another forward, such as a head that shares the weight of an embedding, it is known only whether the input
        must be replicated.
        """
        styles, columns = {pattern: style for pattern, style in self.styles.items() if style.places}, self.columns
        if not alike:
            styles = {
                pattern: PrepareInput(axis=style.axis, input="replicated")
                for pattern, style in styles.items()
                if style.input == "replicated"
            }
            columns = frozenset(map(_axis_of, styles.values()))  # the rows of an embedding are the columns of a head
        return Placed(path, styles, self.mesh, columns) if styles else None

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, laid out by the styles. ``names`` are the parameters of the function, in order."""
        positional = list(args)
        if style := self._style_with("input"):
            for i, layout in enumerate(several(style.input)):
                if i < len(positional):
                    positional[i] = self._input(positional[i], layout, style)
                elif i < len(names) and names[i] in kwargs:
                    kwargs = kwargs | {names[i]: self._input(kwargs[names[i]], layout, style)}
        for style in self.styles.values():
            for key, layout in style.kwargs.items():
                if key in kwargs:
                    kwargs = kwargs | {key: self._input(kwargs[key], layout, style)}
                elif key in names[: len(positional)]:
                    i = names.index(key)
                    positional[i] = self._input(positional[i], layout, style)
        return tuple(positional), kwargs

    def _input(self, x: Any, layout: Layout, style: Style) -> Any:
        """One argument, laid out by a style.

        If it is gathered for layers cut by columns, it is reduced: its gradient is then a pending sum of all layers,
        which one reduce-scatter settles.
        """
        axis = _axis_of(style)
        if layout == "replicated" and axis in self.columns and isinstance(x, Sharded):
            partition = x.spec.partition
            if axis in partition.axes | partition.reduced and x.spec.dtype.is_floating_point:
                layout = "reduced"
        return self.arranged_by(x, layout, style)

    def outputs(self, out: Any) -> Any:
        """The result, laid out by the styles."""
        style = self._style_with("output")
        if style is None:
            return out
        layouts = several(style.output)
        count = len(out) if isinstance(out, (tuple, list)) else 1
        if any(layout is not None for layout in layouts[count:]):
            raise ArgumentError(
                f"the styles at {self.path!r} lay out {counted(len(layouts), 'result')} by output={style.output!r}, "
                f"but the module returned {counted(count, 'result')}; give a layout for each, and None for those that "
                "stay"
            )
        if not isinstance(out, (tuple, list)):
            return self.arranged_by(out, layouts[0], style, flat=True)
        arranged = [self.arranged_by(x, layout, style, flat=True) for x, layout in zip(out, layouts, strict=False)]
        return type(out)([*arranged, *out[len(layouts) :]])

    @functools.cached_property
    def decisive(self) -> frozenset[str]:
        """The patterns of the styles that decide something of values here."""
        last: dict[Any, str] = {}
        for pattern, style in self.styles.items():
            names = [name for name in ("input", "output", "result") if getattr(style, name) is not None]
            last |= dict.fromkeys([*names, *(("kwargs", key) for key in style.kwargs)], pattern)
            if isinstance(style, OnBlocks):
                last["blocks"] = pattern
        return frozenset(last.values())

    @property
    def block_style(self) -> OnBlocks | None:
        """The style by which a module's forward runs on blocks."""
        return next((style for style in reversed(self.styles.values()) if isinstance(style, OnBlocks)), None)

    def _style_with(self, name: str) -> Style | None:
        """The last style that sets a field."""
        return next((style for style in reversed(self.styles.values()) if getattr(style, name) is not None), None)

    def arranged_by(self, x: Any, layout: Layout, style: Style, *, flat: bool = False) -> Any:
        """A value in a layout over the axis of a style. Its frame gives `inspection/causes.py` the style."""
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


@cached
def _target(source: TensorSpec, axis: str, layout: Layout, flat: bool) -> TensorSpec:
    return source.with_partition(laid_out(source.partition, len(source.shape), axis, layout, flat=flat))


def _axis_of(style: Style) -> str:
    assert style.axis is not None  # set when the plan was made
    return style.axis


def _partition_of(x: Any) -> P | None:
    """The partition of an argument; None for a value that is no tensor."""
    return x.spec.partition if isinstance(x, Sharded) else P() if is_plain(x) else None


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
        failures += _style_failures(pattern, style, shapes)
    if failures:
        refuse(f"{what}: styles do not fit", failures)
    rows = tuple(_rows(shapes, styles, mesh, what))
    for pattern in styles.keys() - {row.pattern for row in rows}:
        if styles[pattern].places and not styles[pattern].arranges:
            warnings.warn(
                f"{what}: the style at {pattern!r} ({type(styles[pattern]).__name__}) changes nothing, because later "
                "patterns decide all leaves that it matches; leave it out, or write it after them",
                stacklevel=3,
            )
    return ParallelPlan(styles, mesh, rows)


def _style_failures(pattern: str, style: Style, shapes: Mapping[str, Any]) -> Iterator[Failure]:
    """Failures of a style that sets no field, and of patterns that match no leaf."""
    which = f"{pattern!r} ({type(style).__name__})"
    if not (style.places or style.arranges or style.result is not None or isinstance(style, OnBlocks)):
        yield Failure(f"{which} has no layout; give it input=, output= or specs=", TreeError)
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
    """The style with its axis set: its own, that of `parallelize`, or the only axis of the mesh."""
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
    """The layout of each leaf. The last pattern that matches decides."""
    for name, (shape, dtype) in shapes.items():
        last, partition = None, P()
        for pattern, style in styles.items():
            path = next((path for path in prefixes(name) if style.places and matches(pattern, path)), None)
            if path is not None:
                layout = style.of_parameter(name[len(path) :].lstrip("."), len(shape))
                try:
                    last, partition = pattern, laid_out(P(), len(shape), _axis_of(style), layout)
                except ArgumentError as error:
                    raise ArgumentError(f"{what}: {name!r} under {pattern!r} ({style!r}): {error}") from None
        yield PlacedLeaf(name, last, TensorSpec(mesh, partition, shape, dtype))
