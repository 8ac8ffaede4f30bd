"""What a collective would give this process, without any communication: its shape, and no values."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

from torch import Tensor

from fspmd.pairs import Call
from fspmd.transport import Options

#: kernels that move nothing
_LOCAL: Final = frozenset({"slice", "alias", "at_root", "apart", "scale", "pick", "view"})
Shape = list[int]


def imagined(call: Call, x: Tensor) -> Tensor:
    """A tensor such as ``call`` gives on the block ``x``; its elements mean nothing."""
    if call.pair.kernel in _LOCAL:
        return call.run(x)
    return x.new_zeros(shape_after(call, tuple(x.shape)))


def shape_after(call: Call, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the block that ``call`` gives this process, or the first simulated rank, on one of ``shape``; not of views."""
    after = list(shape)
    if place := _SHAPES.get(call.pair.kernel):
        place(after, call, call.options)
    return tuple(after)


def _ranks(call: Call) -> tuple[int, int]:
    """How many ranks take part, and which of them this process is."""
    mesh = call.mesh
    at = dict(zip(mesh.axis_names, mesh.coordinate() or (), strict=False))
    index = 0
    for axis in call.axes:
        index = index * mesh.shape[axis] + at.get(axis, 0)
    for group in call.options.index_groups or ():
        if index in group:
            return len(group), group.index(index)
    return prod(mesh.shape[axis] for axis in call.axes), index


def _gather(shape: Shape, call: Call, o: Options) -> None:
    if not shape:
        shape.append(1)
    shape[o.dim] = sum(o.sizes) if o.sizes is not None else shape[o.dim] * _ranks(call)[0]


def _scatter(shape: Shape, call: Call, o: Options) -> None:
    n, index = _ranks(call)
    shape[o.dim] = o.sizes[index] if o.sizes is not None else shape[o.dim] // n


def _exchange(shape: Shape, call: Call, o: Options) -> None:
    n = _ranks(call)[0]
    _scatter(shape, call, o)
    joined = o.concat_dim != o.dim and o.concat_sizes is not None
    shape[o.concat_dim] = sum(o.concat_sizes or ()) if joined else shape[o.concat_dim] * n


def _ragged(shape: Shape, call: Call, o: Options) -> None:
    assert o.routes is not None
    shape[o.dim] = o.routes.routes[0].lands.length


def _reblock(shape: Shape, call: Call, o: Options) -> None:
    assert o.move is not None
    at = o.move.target.mesh.coordinate()
    lead = shape[: max(0, len(shape) - o.move.source.ndim)]
    shape[:] = [0] if at is None else [*lead, *o.move.target.local_shape(at)]


_SHAPES: Final[dict[str, Callable[[Shape, Call, Options], None]]] = {
    "gather": _gather,
    "gather_once": _gather,
    "slice": _scatter,
    "reduce_scatter": _scatter,
    "exchange": _exchange,
    "ragged": _ragged,
    "reblock": _reblock,
}
