"""Watching what is communicated: while somebody does, each call of the pair table carries its cause into backward."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import record_function

from fspmd.inspection.causes import Cause, Trace, trace
from fspmd.meshes.axes import row_major
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, StandIn, profile_with, watch_with, watches_with
from fspmd.redistribution.cost import Price, Topology, moves, price
from fspmd.torch_internals import current_autograd_node, profiler
from fspmd.transport import Pending
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.rows import RankRoute
from fspmd.transport.windows import is_idle, traffic

_lock: Final = threading.Lock()
_watchers: tuple[Watcher, ...] = ()


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective, of this process's rank; in a simulation, of the first rank.

    ``kind`` is the name of its row of the pair table, ``shape`` and ``dtype`` are those of the block it takes,
    ``price.moved`` is the bytes that a rank sends. ``backward``: it ran in a backward pass, for what ``cause`` did in
    the forward pass.
    """

    kind: str
    mesh: Mesh
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    price: Price
    backward: bool
    cause: Cause


class Watcher:
    """Who wants to know of communication; does nothing."""

    #: whether it is enough to be told of what a recorded program communicates, when that runs
    of_records = False

    def before(self, x: Any, call: Call, trace: Trace) -> None:
        """A call is about to be applied to ``x``; its transpose follows in backward without being told here."""

    def told(self, moved: Communication) -> None:
        """A collective begins, in forward or backward, on any thread."""


def add(watcher: Watcher) -> None:
    """Tell it of what happens from here on, in this process."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
        watch_with(_watched)


def remove(watcher: Watcher) -> None:
    """Tell it no more."""
    global _watchers
    with _lock:
        gone = max(i for i, one in enumerate(_watchers) if one is watcher)
        _watchers = _watchers[:gone] + _watchers[gone + 1 :]
        watch_with(_watched if _watchers else None)


def hears_of_records() -> bool:
    """Whether somebody watches, and all who do only want to be told."""
    return bool(_watchers) and watches_with(_watched) and all(one.of_records for one in _watchers)


def tell(communications: Iterable[Communication]) -> None:
    """Tell of collectives that a recorded program runs."""
    for watcher in _watchers:
        for one in communications:
            watcher.told(one)


class _Watched(StandIn):
    """A call that knows its cause, and tells when it begins."""

    __slots__ = ()
    by: Cause

    def start(self, x: Tensor) -> Pending:
        self._announce(x)
        with self._range():
            return self.plain.start(x)

    def run(self, x: Tensor) -> Tensor:
        self._announce(x)
        with self._range():
            return self.plain.run(x)

    def into(self, x: Tensor, out: Tensor) -> Pending:
        self._announce(x)
        with self._range():
            return self.plain.into(x, out)

    def _range(self) -> Any:
        """What a trace shows of it."""
        if not (profiler._is_profiler_enabled and communicates(self)):
            return nullcontext()
        return record_function(label(self.plain, self.by))

    def _announce(self, x: Tensor) -> None:
        if _watchers and communicates(self):
            shape = tuple(blocks_of(x)[0].shape)
            cost = price_of(self, shape, x.dtype)
            _tell(self.pair.name, self.mesh, self.axes, shape, x.dtype, cost, self.by)


def label(call: Call, cause: Cause) -> str:
    """A collective in a trace of torch's profiler: its name and axes, who asked for it, and the user's line."""
    axes = ", ".join(call.axes or call.mesh.axis_names)
    return f"fspmd::{call.pair.name}[{axes}] {cause.by} ({cause.where})"


def announce(kind: str, mesh: Mesh, x: Tensor, messages: int, moved: int) -> None:
    """Tell of what is no row of the pair table: messages between this rank and others, and their bytes."""
    if _watchers and messages:
        cost = price(kind, mesh, mesh.axis_names, x.nbytes, x.nbytes, traffic=(messages, moved))
        _tell(kind, mesh, mesh.axis_names, tuple(x.shape), x.dtype, cost, trace().cause)


def _tell(
    kind: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    cost: Price,
    cause: Cause,
) -> None:
    backward = current_autograd_node() is not None
    moved = Communication(kind, mesh, axes, shape, dtype, cost, backward, cause)
    for watcher in _watchers:
        watcher.told(moved)


def _watched(x: Any, call: Call) -> Call:
    if type(call) is _Watched:
        return call
    found = trace()
    if current_autograd_node() is None:
        for watcher in _watchers:
            watcher.before(x, call, found)
    return _Watched(call, found.cause)


profile_with(_watched)


def communicates(call: Call) -> bool:
    """Whether anything moves between ranks."""
    if call.options.move is not None:
        return not is_idle(call.options.move)
    return moves(call.pair.kernel) and _ranks(call) > 1


def _ranks(call: Call) -> int:
    groups = call.options.index_groups
    return max(map(len, groups)) if groups else call.mesh.axis_size(call.axes or call.mesh.axis_names)


def price_of(call: Call, shape: tuple[int, ...], dtype: torch.dtype, links: Topology | None = None) -> Price:
    """What a call costs on a block of a shape, on the machine of `set_topology` or on another."""
    o, n = call.options, _ranks(call)
    left = _shape_after(call, shape, n)
    before, after = prod(shape) * dtype.itemsize, prod(left) * dtype.itemsize
    received = message = None
    if o.move is not None:
        after = prod(o.move.target.block_shape) * dtype.itemsize
        received = (traffic(o.move).messages, traffic(o.move).elements * dtype.itemsize)
    elif o.routes is not None:
        route: RankRoute = o.routes.routes[0]
        row = prod(size for dim, size in enumerate(shape) if dim != o.dim) * dtype.itemsize
        after = route.lands.length * row
        rows = o.routes.busiest
        received = (n - 1, (sum(route.sends) - route.sends[_place(call)] if rows is None else rows) * row)
    elif o.sizes is not None or o.concat_sizes is not None:
        message = prod(map(min, shape, left)) * dtype.itemsize
    given = call.pair.kernel, call.mesh, call.axes, before, after, links
    return price(*given, traffic=received, ranks=n, message=message)


def _shape_after(call: Call, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Of the block of the first rank, which is the longest, after a collective that cuts or joins."""
    o, kernel, after = call.options, call.pair.kernel, list(shape or (1,))
    if kernel in ("reduce_scatter", "exchange"):
        after[o.dim] = after[o.dim] // n if o.sizes is None else max(o.sizes)
    if kernel in ("gather", "gather_once"):
        after[o.dim] = after[o.dim] * n if o.sizes is None else sum(o.sizes)
    if kernel == "exchange":
        after[o.concat_dim] = after[o.concat_dim] * n if o.concat_sizes is None else sum(o.concat_sizes)
    return tuple(after)


def _place(call: Call) -> int:
    """This process's place in its group along the axes."""
    mesh = call.mesh
    at, axes = dict(zip(mesh.axis_names, mesh.coordinate() or (), strict=False)), call.axes or mesh.axis_names
    place = row_major([at.get(axis, 0) for axis in axes], [mesh.shape[axis] for axis in axes])
    for group in call.options.index_groups or ():
        if place in group:
            return group.index(place)
    return place
