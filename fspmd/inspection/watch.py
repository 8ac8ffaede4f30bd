"""Watchers of communication. While there are any, each call of the pair table carries its cause into backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from fspmd.errors import ArgumentError
from fspmd.inspection.causes import Cause, Trace, trace
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.pairs import Call, StandIn, profile_with, watch_with, watches_with
from fspmd.redistribution.cost import Price, Topology, moves, price
from fspmd.torch_internals import current_autograd_node, profiler
from fspmd.transport import Pending, Result
from fspmd.transport.abstract import place_in_group
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.rows import RankRoute
from fspmd.transport.windows import is_idle, traffic
from fspmd.user_code import UserLine, line_of, user_frame, user_line

_lock: Final = threading.Lock()
_watchers: tuple[Watcher, ...] = ()
_note: Note | None = None


def check_seconds(caller: str, seconds: Any, otherwise: str = "") -> None:
    """Raise an error for a time that is no number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ArgumentError(f"{caller} got seconds={described(seconds)}; give it a number above 0{otherwise}")


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective of this process's rank; in a simulation, of the first rank.

    Attributes:
        kind: The name of its row of the pair table.
        mesh: The mesh.
        axes: The mesh axes; () for all of them.
        shape: The shape of the block that it takes.
        dtype: The dtype of that block.
        price: ``price.moved`` is the number of bytes that a rank sends, ``price.time`` is in µs.
        backward: It ran in a backward pass. ``cause`` is then the cause of its forward call.
        cause: The function that the user called, and the user's line.
        call: The call of the pair table; None for messages that are no call.
    """

    kind: str
    mesh: Mesh
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    price: Price
    backward: bool
    cause: Cause
    call: Call | None = field(default=None, repr=False, compare=False)


class Watcher:
    """The base of objects that hear of communication. Its methods do nothing."""

    #: whether `on_communication` alone is enough when a recorded program runs
    of_records = False

    def on_call(self, x: Any, call: Call, trace: Trace) -> None:
        """A call is about to be applied to ``x`` in forward. Its transpose in backward is not announced here."""

    def on_communication(self, communication: Communication) -> None:
        """A collective begins, in forward or backward, on any thread."""


def add(watcher: Watcher) -> None:
    """Tell a watcher of all communication of this process from now on."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
        watch_with(_watcher())


def remove(watcher: Watcher) -> None:
    """Stop telling a watcher. One that was added several times is removed once."""
    global _watchers
    with _lock:
        last = max(i for i, other in enumerate(_watchers) if other is watcher)
        _watchers = _watchers[:last] + _watchers[last + 1 :]
        watch_with(_watcher())


class Note(Protocol):
    """A light watcher. It knows the user's line of each call, and not its cause, so a call costs a microsecond."""

    def call(self, call: Noted, x: Tensor) -> None:
        """A call of the pair table begins, in forward or backward, on any thread."""

    def record(self, communications: Sequence[Communication]) -> None:
        """The collectives of a recorded program begin. It gets the same tuple in each replay."""

    def compares(self) -> bool:
        """Whether ranks compare what they tell their notes."""


def note_with(note: Note | None) -> None:
    """Let a light watcher hear of each call; with None, none."""
    global _note
    with _lock:
        _note = note
        watch_with(_watcher())


def _watcher() -> Callable[[Any, Call], Call] | None:
    return _watched if _watchers else None if _note is None else _noted


def hears_of_records() -> bool:
    """Whether there are watchers, and `on_communication` is enough for all of them when a recorded program runs."""
    if not _watchers:
        return _note is not None and watches_with(_noted)
    return watches_with(_watched) and all(watcher.of_records for watcher in _watchers)


def compares() -> bool:
    """Whether ranks compare the collectives that they come to."""
    return _note is not None and _note.compares()


def tell(communications: Sequence[Communication]) -> None:
    """Tell the watchers of the collectives that a recorded program runs."""
    if _note is not None:
        _note.record(communications)
    _tell_all(communications)


def _tell_all(communications: Iterable[Communication]) -> None:
    for watcher in _watchers:
        for communication in communications:
            watcher.on_communication(communication)


class _Watched(StandIn):
    """A call that knows its cause, and tells the watchers when it begins."""

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
        """The context that shows the call in a trace of torch's profiler."""
        if not (profiler._is_profiler_enabled and communicates(self)):
            return nullcontext()
        return record_function(label(self.plain, self.by))

    def _announce(self, x: Tensor) -> None:
        if _note is not None:
            _note.call(Noted(self.plain, line_of(self.by.where)), x)
        if _watchers and communicates(self):
            shape = tuple(blocks_of(x)[0].shape)
            what = self.pair.name, self.mesh, self.axes, shape, x.dtype, price_of(self, shape, x.dtype)
            _tell_all([Communication(*what, current_autograd_node() is not None, self.by, self.plain)])


class Noted(StandIn):
    """A call that knows the user's line, and tells the note when it begins."""

    __slots__ = ("number",)
    by: UserLine

    def __init__(self, plain: Call, by: UserLine) -> None:
        super().__init__(plain, by)
        self.in_place = plain.in_place
        self._transposed = None
        self.number: int | None = None  # for a note: a number of the call and the line

    def start(self, x: Tensor) -> Pending:
        if _note is not None:
            _note.call(self, x)
        return self.plain.start(x)

    def run(self, x: Tensor) -> Tensor:
        if _note is not None:
            _note.call(self, x)
        plain = self.plain
        result: Result = plain.kernel(x, plain.mesh, plain.axes, plain.options)
        return result.wait() if isinstance(result, Pending) else result

    def start_in_place(self, x: Tensor) -> Pending:
        if _note is not None:
            _note.call(self, x)
        return self.plain.start_in_place(x)

    def into(self, x: Tensor, out: Tensor) -> Pending:
        if _note is not None:
            _note.call(self, x)
        return self.plain.into(x, out)

    @property
    def transposed(self) -> Call:
        if self._transposed is None:
            self._transposed = super().transposed
        return self._transposed


_KEPT: Final = 8192
#: by the id of the call, which they hold, and the place in the user's code, which `user_line` holds
_stand_ins: Final[dict[tuple[int, int, int], Noted]] = {}


def _noted(x: Any, call: Call) -> Call:
    """The call with the user's line."""
    if type(call) is Noted:
        return call
    if type(call) is _Watched:  # a transpose, whose watchers have left meanwhile
        return Noted(call.plain, line_of(call.by.where))
    frame = user_frame(sys._getframe(2))
    if frame is None:
        return Noted(call, user_line(None))
    code = frame.f_code
    known = _stand_ins.get((id(call), id(code), frame.f_lasti))
    if known is None:
        known = Noted(call, user_line(frame))
        if call.options.routes is None:  # else each call is another one
            if len(_stand_ins) >= _KEPT:
                _stand_ins.clear()
            _stand_ins[id(call), id(code), frame.f_lasti] = known
    return known


def label(call: Call, cause: Cause) -> str:
    """The label of a collective in a trace of torch's profiler: its name and axes, its cause, and the user's line."""
    axes = ", ".join(call.axes or call.mesh.axis_names)
    return f"fspmd::{call.pair.name}[{axes}] {cause.by} ({cause.where})"


def announce(kind: str, mesh: Mesh, x: Tensor, messages: int, moved: int) -> None:
    """Tell the watchers of messages between this rank and others that no row of the pair table stands for.

    ``moved`` is the number of their bytes.
    """
    if _watchers and messages:
        cost = price(kind, mesh, mesh.axis_names, x.nbytes, x.nbytes, traffic=(messages, moved))
        what = kind, mesh, mesh.axis_names, tuple(x.shape), x.dtype, cost
        _tell_all([Communication(*what, current_autograd_node() is not None, trace().cause)])


def _watched(x: Any, call: Call) -> Call:
    """The call with its cause."""
    if type(call) is _Watched:
        return call
    if type(call) is Noted:  # its transpose, where the other watchers have come meanwhile
        call = call.plain
    origin = trace()
    if current_autograd_node() is None:
        for watcher in _watchers:
            watcher.on_call(x, call, origin)
    return _Watched(call, origin.cause)


profile_with(_watched)


def communicates(call: Call) -> bool:
    """Whether a call moves anything between ranks."""
    if call.options.move is not None:
        return not is_idle(call.options.move)
    return moves(call.pair.kernel) and _ranks(call) > 1


def _ranks(call: Call) -> int:
    groups = call.options.index_groups
    return max(map(len, groups)) if groups else call.mesh.axis_size(call.axes or call.mesh.axis_names)


def price_of(call: Call, shape: tuple[int, ...], dtype: torch.dtype, links: Topology | None = None) -> Price:
    """The price of a call on a block of a shape, on the machine of `set_topology` or on ``links``."""
    o, n = call.options, _ranks(call)
    shape_after = _shape_after(call, shape, n)
    before, after = prod(shape) * dtype.itemsize, prod(shape_after) * dtype.itemsize
    received = message = None  # messages and bytes that this rank receives; bytes of one message
    if o.move is not None:
        after = prod(o.move.target.block_shape) * dtype.itemsize
        received = (traffic(o.move).messages, traffic(o.move).elements * dtype.itemsize)
    elif o.routes is not None:
        route: RankRoute = o.routes.routes[0]
        row = prod(size for dim, size in enumerate(shape) if dim != o.dim) * dtype.itemsize
        after = route.lands.length * row
        rows = o.routes.busiest
        if rows is None:
            _, place = place_in_group(call.mesh, call.axes or call.mesh.axis_names, o)
            rows = sum(route.sends) - route.sends[place]
        received = n - 1, rows * row
    elif o.sizes is not None or o.concat_sizes is not None:
        message = prod(map(min, shape, shape_after)) * dtype.itemsize
    given = call.pair.kernel, call.mesh, call.axes, before, after, links
    return price(*given, traffic=received, ranks=n, message=message)


def _shape_after(call: Call, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The shape of the first rank's block after a collective that cuts or joins. No rank has a larger block."""
    o, kernel, after = call.options, call.pair.kernel, list(shape or (1,))
    if kernel in ("reduce_scatter", "exchange"):
        after[o.dim] = after[o.dim] // n if o.sizes is None else max(o.sizes)
    if kernel in ("gather", "gather_once"):
        after[o.dim] = after[o.dim] * n if o.sizes is None else sum(o.sizes)
    if kernel == "exchange":
        after[o.concat_dim] = after[o.concat_dim] * n if o.concat_sizes is None else sum(o.concat_sizes)
    return tuple(after)
