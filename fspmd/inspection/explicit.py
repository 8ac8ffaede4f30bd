"""`explicit`: communication that the user did not write raises, or warns."""

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
    """Within ``explicit("warn")`` a torch function communicates, which is not written."""


class GradientSumWarning(ImplicitCommunicationWarning):
    """Within ``explicit("warn")`` a torch function moves nothing forward, and in backward it only sums gradients.

    This is expected where a batch is cut and weights are not. A function that gathers a gradient gives an
    `ImplicitCommunicationWarning`.
    """


class _ExplicitBlock:
    """The state of one context: its mode, and its findings, once for each function and line."""

    __slots__ = ("findings", "mode", "seen")

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.findings: list[Implicit] = []
        self.seen: set[Any] = set()


class _Active(threading.local):
    scope: _ExplicitBlock | None = None


_state: Final = _Active()
_default = _ExplicitBlock("off")


class _Checker(Watcher):
    def on_call(self, x: Any, call: Call, trace: Trace) -> None:
        scope = _state.scope or _default
        if scope.mode == "off" or not trace.dispatches or not implied(x, call, trace):
            return
        if scope.mode == "raise":
            raise CommunicationError(str(report(x, call, trace)))
        key = (trace.cause, trace.dispatches[0].f_locals["func"])
        if key not in scope.seen:
            scope.seen.add(key)
            implicit = report(x, call, trace)
            scope.findings.append(implicit)
            file, line = implicit.cause.file or "?", implicit.cause.line
            kind = GradientSumWarning if implicit.of_gradients else ImplicitCommunicationWarning
            warnings.warn_explicit(str(implicit), kind, file, line)


_checker: Final = _Checker()


@contextmanager
def explicit(mode: Mode = "raise") -> Iterator[list[Implicit]]:
    """Within the context a torch function on `Sharded` values that communicates by itself raises, before anything
    moves.

    Communication in backward counts, too. An operand that is equal on all ranks, beside a sharded one, has a gradient
    that is summed over the ranks. If it needs a gradient, the call raises. A cast that several uses share counts once.
    Functions whose result depends on values, and ``.item()``, gather and raise.

    The message names the function, the line, the layout of each operand, the layout that the function needs, the
    collectives with bytes and µs, other strategies with their price, and the line to write.

    Written communication is allowed: `reshard`, `with_spec`, `device_put`, `device_get`, the specs of `shard_map`, the
    styles of `parallelize`, and everything inside a body. The gradient of a reduced value (`P(reduced={"x"})`) is a
    pending sum. It is settled at the call that made the value reduced.

    A jitted function runs without its record. From then on the ranks of this world no longer compare which records they
    replay; `debug` goes on to compare their collectives.

    Args:
        mode: "raise" raises. "warn" warns, once for each function and line, and the context's value is a list of the
            findings. A call that moves nothing forward, and in backward only sums gradients, gives a
            `GradientSumWarning`, which can be filtered by itself; its entry in the list has ``of_gradients`` True.
            "off" lifts an enclosing context, or the default. The mode holds for the thread that enters the context.

    Communication: none.

    Raises:
        CommunicationError: a torch function communicates within the context.
        ArgumentError: ``mode`` is another value.

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
        yield scope.findings
    finally:
        remove(_checker)
        _state.scope = before


def set_default(*, explicit: Mode, **others: Any) -> None:
    """Set the mode outside any `explicit` context, on all threads of this process. Initially it is "off".

    Args:
        explicit: "raise", "warn" or "off".

    Raises:
        ArgumentError: ``explicit`` is another value, or another keyword is given.

    >>> set_default(explicit="warn")
    >>> set_default(explicit="off")
    """
    global _default
    if others:
        raise ArgumentError(f'set_default got {quoted(others)}; it sets explicit= alone: set_default(explicit="raise")')
    before, _default = _default.mode, _ExplicitBlock(_checked(explicit, "set_default"))
    if before == "off" and explicit != "off":
        add(_checker)
    elif before != "off" and explicit == "off":
        remove(_checker)


def _checked(mode: Any, caller: str) -> Mode:
    if mode not in _MODES:
        raise ArgumentError(f"{caller} got {described(mode)}; expected one of {', '.join(map(repr, _MODES))}")
    checked: Mode = mode
    return checked
