"""While a program is recorded (see `fspmd.jit`): who records, and functions of ours that are one step of its record."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, ParamSpec, TypeVar

import torch

from fspmd.errors import RecordError
from fspmd.torch_internals import (
    MODULES_THAT_TRACE,
    PROXY_KEY,
    TorchDispatchMode,
    clear_transforms,
    count_dispatch_modes,
    dispatch_mode_of,
    dispatch_mode_stack,
    jit_tracing,
    pre_dispatch_modes,
    transforms_active,
)

Q = ParamSpec("Q")
R = TypeVar("R")
RecomputeContext = Callable[[], AbstractContextManager[None]]


class DispatchMode(TorchDispatchMode):
    """One that torch does not keep its compiler out of, for which it would import that, and that takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RecordingMode(DispatchMode):
    """Of which recorders are; torch carries modes into the threads that run backward."""

    paused = False
    repeats = False  # what runs now ran before, and its results were not kept


_active = 0  # recordings under way, in any thread
_thread = 0  # that began the last of them


def begin() -> None:
    """A recording begins; there is one at a time."""
    global _active, _thread
    _active, _thread = _active + 1, threading.get_ident()


def end() -> None:
    """It has ended."""
    global _active
    _active -= 1


def is_recording() -> bool:
    """Whether what this thread does is a part of a recording, steps or not; or what runs backward for it."""
    return _active > 0 and (_thread == threading.get_ident() or recorder() is not None)


def recorder() -> Any:
    """Who records what this thread does; None while nobody does."""
    if not _active:
        return None
    for mode in reversed(dispatch_mode_stack()):
        if isinstance(mode, RecordingMode):
            return None if mode.paused else mode
    return None


_is_exporting = torch.compiler.is_exporting


def is_traced() -> bool:
    """Whether torch writes down a graph of what runs: ``torch.export``, ``make_fx``, ``torch.jit.trace``, ONNX.

    Such a graph has no collectives: those of processes it does not see, and simulated ones are sums of one process.
    """
    return (
        (count_dispatch_modes() and dispatch_mode_of(PROXY_KEY) is not None)
        or jit_tracing() is not None
        or _is_exporting()
        or pre_dispatch_modes.get(0) is not None
    )


def refuse_traced(what: str) -> None:
    """Raise `RecordError` while torch writes down a graph."""
    if is_traced():
        raise RecordError(
            f"{what} was called while torch.export, make_fx or torch.jit.trace writes down a graph, in which there "
            "would be no collectives; write fspmd.jit(f).lower(*args), whose program has them"
        )


def untraceable(x: Any) -> RecordError:
    """Of a `Sharded` that torch is to write a graph for."""
    return RecordError(
        f"torch.export, make_fx or torch.jit.trace got {x!r}, whose collectives no graph of torch has; write "
        "fspmd.jit(f).lower(*args), whose program has them; instead of torch.func.linearize write "
        "fspmd.jvp(f, (x,), (tangent,)) for each tangent"
    )


def refuse_tracer(x: Any) -> None:
    """Raise `RecordError` where it is one of torch's tracers that asks how a `Sharded` lies in memory."""
    asks = sys._getframe(1)
    while asks.f_back is not None and asks.f_globals.get("__name__", "").startswith("fspmd."):
        asks = asks.f_back
    if asks.f_globals.get("__name__") in MODULES_THAT_TRACE:
        raise untraceable(x)


def note_block_use(x: torch.Tensor) -> None:
    """Tell who records of a value, before its blocks are used apart: else these would be there before, and it not."""
    if _active and (records := recorder()) is not None:
        records.node_of(x)


_recompute = threading.local()
#: contexts that hold in every thread
LASTING: Final[list[Callable[[], RecomputeContext]]] = []


@contextmanager
def recomputed_in(context: Callable[[], RecomputeContext]) -> Iterator[None]:
    """While the block runs, ``context()`` is asked for what belongs to the `recompute_context` of what begins."""
    before = getattr(_recompute, "contexts", ())
    _recompute.contexts = (*before, context)
    try:
        yield
    finally:
        _recompute.contexts = before


def has_recompute_context() -> bool:
    """Whether what runs here is to be computed again in more than the state of torch."""
    return bool(LASTING or getattr(_recompute, "contexts", ()))


def recompute_context() -> RecomputeContext:
    """What a run that begins here is to be computed again in, for backward."""
    found = [context() for context in (*LASTING, *getattr(_recompute, "contexts", ()))]

    @contextmanager
    def later() -> Iterator[None]:
        with ExitStack() as stack:
            for context in found:
                stack.enter_context(context())
            yield

    return later


@contextmanager
def recomputing() -> Iterator[None]:
    """What runs inside is computed again, for backward."""
    records = recorder()
    if records is None:
        yield
        return
    before, records.repeats = records.repeats, True
    try:
        yield
    finally:
        records.repeats = before


def _recorded(function: Callable[Q, R], instead: Callable[[Any, Any, Any], R]) -> Callable[Q, R]:
    """The function; while a program is recorded ``instead``, of who records and the arguments by place and by name."""

    @functools.wraps(function)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        if not _active or (records := recorder()) is None:
            return function(*args, **kwargs)
        return instead(records, args, kwargs)

    return run


def step(function: Callable[Q, R]) -> Callable[Q, R]:
    """A function whose calls are each one step of a record, whatever they do within."""
    return _recorded(function, lambda records, args, kwargs: records.step(function, args, kwargs))


def state(function: Callable[Q, R]) -> Callable[Q, R]:
    """A step that reads or sets what is no tensor: done, too, where a program is recorded of shapes alone."""
    return _recorded(function, lambda records, args, kwargs: records.step(function, args, kwargs, real=True))


def reading(function: Callable[Q, R]) -> Callable[Q, R]:
    """A step that shows values: it writes into none, gives nothing, and is left out where there are none."""
    setattr(function, "reads", True)  # noqa: B010 (not known to type checkers)
    return step(function)


def python(function: Callable[Q, R]) -> Callable[Q, R]:
    """A step that runs Python of the user's: it has nothing of the record but its arguments, and it needs values."""
    setattr(function, "python", True)  # noqa: B010
    return step(function)


def outside_transforms() -> Any:
    """Where no ``torch.func`` transform wraps the tensors that are made."""
    if not transforms_active():
        return nullcontext()
    return clear_transforms()


def hidden(function: Callable[Q, R]) -> Callable[Q, R]:
    """A function that works something out for all later runs: no step of a record or value of a transform.

    Its results are there before.
    """

    @functools.wraps(function)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        records = recorder()
        with outside_transforms(), nullcontext() if records is None else records.real():
            return function(*args, **kwargs)

    return run


def constant(function: Callable[Q, R]) -> Callable[Q, R]:
    """A function whose result, a tensor, is the same in every run of this rank."""

    def known(records: Any, args: Any, kwargs: Any) -> R:
        with outside_transforms(), records.real():  # else they would wrap it, and what is within be unknown
            found = function(*args, **kwargs)
        return records.constant(found)  # type: ignore[no-any-return]

    return _recorded(function, known)
