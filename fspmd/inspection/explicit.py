"""`explicit`: communication that the user did not write raises, or is listed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from fspmd.errors import ArgumentError, CommunicationError
from fspmd.inspection.causes import Trace
from fspmd.inspection.implicit import Implicit, implied, report
from fspmd.inspection.watch import Watcher, add, remove
from fspmd.messages import described, quoted
from fspmd.pairs import Call

Mode = Literal["raise", "warn", "off"]
_MODES: Final = ("raise", "warn", "off")


class ImplicitCommunicationWarning(UserWarning):
    """A torch function communicates, which is not written, within ``explicit("warn")``."""


class GradientSumWarning(ImplicitCommunicationWarning):
    """The same of sums of gradients in backward alone, which are expected where a batch is cut and weights are not."""


class _ExplicitBlock:
    """What holds within one context: the mode, and what was found, once for each function and line."""

    __slots__ = ("found", "mode", "seen")

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.found: list[Implicit] = []
        self.seen: set[Any] = set()


class _Active(threading.local):
    scope: _ExplicitBlock | None = None


_state: Final = _Active()
_default = _ExplicitBlock("off")


class _Checker(Watcher):
    def before(self, x: Any, call: Call, trace: Trace) -> None:
        scope = _state.scope or _default
        if scope.mode == "off" or not trace.dispatches or not implied(x, call, trace):
            return
        if scope.mode == "raise":
            raise CommunicationError(str(report(x, call, trace)))
        key = (trace.cause, trace.dispatches[0].f_locals["func"])
        if key not in scope.seen:
            scope.seen.add(key)
            found = report(x, call, trace)
            scope.found.append(found)
            file, line = found.cause.file or "?", found.cause.line
            kind = GradientSumWarning if found.of_gradients else ImplicitCommunicationWarning
            warnings.warn_explicit(str(found), kind, file, line)


_checker: Final = _Checker()


@contextmanager
def explicit(mode: Mode = "raise") -> Iterator[list[Implicit]]:
    """Within it a torch function on `Sharded` values that communicates by itself raises, before anything moves.

    What it would communicate in backward counts, too: an operand equal on all ranks beside a sharded one has a gradient
    that is summed over them, if it has one, and that is told when the function is called. A cast that several uses
    share is one. So do functions whose result depends on values and ``.item()``, which gather. The message names the
    function, the line, how each operand lies and would have to, collectives with bytes and µs, other strategies with
    their price, and the line to write.

    Written, and allowed: `reshard`, `with_spec`, `device_put`, `device_get`, the specs of `shard_map` and the styles of
    `parallelize`, and all that happens inside a body. A value that is reduced (`P(reduced={"x"})`) has a pending sum
    for its gradient, which is settled where it was made so.

    ``mode``: "warn" warns instead, once for each function and line, and gives the context's value, a list of what was
    found. A call that moves nothing forward, and sums gradients in backward, gives a `GradientSumWarning`, which can be
    filtered by itself; its entry in the list has ``of_gradients`` True. "off" lifts an enclosing context, or the
    default. It holds for the thread that enters it.

    Communication: none.

    Raises:
        CommunicationError: within it.
        ArgumentError: another ``mode``.

    >>> import torch
    >>> from fspmd import P, device_put, make_mesh, reshard
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> x = device_put(torch.ones(8, 4), P(None, "x"), mesh=mesh)
    >>> w = device_put(torch.ones(4, 2), P("x"), mesh=mesh)
    >>> with explicit():
    ...     y = x @ w  # a pending sum, nothing moves
    ...     z = torch.relu(reshard(y, P("x")))
    >>> with explicit():
    ...     z = torch.relu(y)
    Traceback (most recent call last):
    fspmd.errors.CommunicationError: torch.relu(y) communicates, which is not written (...)
      y: f32[8, 2]{U:x} → f32[8, 2] [psum_unreduced over 'x', 96 B, 16 µs]
    write y = reshard(y, P())
    """
    before, scope = _state.scope, _ExplicitBlock(_checked(mode, "explicit"))
    _state.scope = scope
    add(_checker)
    try:
        yield scope.found
    finally:
        remove(_checker)
        _state.scope = before


def set_default(*, explicit: Mode, **others: Any) -> None:
    """What holds outside any `explicit` context, on all threads of this process: "raise", "warn", or "off" as at first.

    Raises:
        ArgumentError: another mode, or another keyword.

    >>> set_default(explicit="warn")
    >>> set_default(explicit="off")
    """
    global _default
    if others:
        raise ArgumentError(f'set_default got {quoted(others)}; it sets explicit= alone: set_default(explicit="raise")')
    was, _default = _default.mode, _ExplicitBlock(_checked(explicit, "set_default"))
    if was == "off" and explicit != "off":
        add(_checker)
    elif was != "off" and explicit == "off":
        remove(_checker)


def _checked(mode: Any, what: str) -> Mode:
    if mode not in _MODES:
        raise ArgumentError(f"{what} got {described(mode)}; expected one of {', '.join(map(repr, _MODES))}")
    known: Mode = mode
    return known
