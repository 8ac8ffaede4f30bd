"""Recordings of programs (see `fspmd.jit`): the recorder of a thread, and functions that are one step of a record."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fspmd.errors import RecordError
from fspmd.torch_internals import (
    MODULES_THAT_TRACE,
    DisableTorchFunction,
    FakeTensorMode,
    TorchDispatchMode,
    count_dispatch_modes,
    dispatch_mode_stack,
    function_mode_is_on,
    pop_dispatch_mode,
    pop_transform,
    push_dispatch_mode,
    running_transforms,
    transforms_active,
)

Q = ParamSpec("Q")
R = TypeVar("R")
RecomputeContext = Callable[[], AbstractContextManager[None]]


class DispatchMode(TorchDispatchMode):
    """A mode that does not switch off torch's compiler. To switch it off torch would import it, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value, in all threads, within a ``with`` block."""
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


class RecordingMode(DispatchMode):
    """The base of recorders. Torch carries modes into the threads that run backward."""

    is_fake = False  # whether the tensors of the recording have no values
    paused = False
    repeats = False  # the steps that run now ran before, and their results were not kept

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which calls are no steps."""
        return with_attribute(self, "paused", True)

    @contextmanager
    def real(self) -> Iterator[None]:
        """Within, calls are no steps, and new tensors have values."""
        with self.pause(), without_dispatch_modes() if self.is_fake else nullcontext():
            yield


_active = 0  # the number of recordings under way, in any thread
_thread = 0  # the thread that began the last of them


def begin() -> None:
    """Begin a recording. There is one at a time."""
    global _active, _thread
    _active, _thread = _active + 1, threading.get_ident()


def end() -> None:
    """End a recording."""
    global _active
    _active -= 1


def depth() -> int:
    """Return the number of recordings under way."""
    return _active


def go_back(to: int) -> None:
    """End the recordings within the first ``to``, which an interrupt has kept from ending."""
    global _active
    _active = min(_active, to)


def is_recording() -> bool:
    """Return whether this thread takes part in a recording, or runs backward for it, even if its steps are hidden."""
    return _active > 0 and (_thread == threading.get_ident() or recorder() is not None)


def recorder() -> Any:
    """Return the recorder of this thread, or None."""
    if not _active:
        return None
    for mode in reversed(dispatch_mode_stack()):
        if isinstance(mode, RecordingMode):
            return None if mode.paused else mode
    return None


_is_exporting = torch.compiler.is_exporting
JIT_TRACED: Final[set[int]] = set()  # the threads in which torch.jit.trace runs


@contextmanager
def jit_trace() -> Iterator[None]:
    """Note that torch.jit.trace, or the old exporter for ONNX, runs in this thread within a ``with`` block."""
    thread = threading.get_ident()
    is_outermost = thread not in JIT_TRACED
    JIT_TRACED.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            JIT_TRACED.discard(thread)


def is_traced() -> bool:
    """Return whether torch traces a graph: in ``torch.export``, ``make_fx``, ``torch.jit.trace`` or for ONNX.

    Such a graph would have no collectives. It does not see those of processes, and simulated ones are plain sums.
    """
    if is_jit_traced():
        return True
    if not count_dispatch_modes() and not function_mode_is_on():  # all but torch.jit.trace activate a mode
        return False
    return _is_exporting() or get_proxy_mode() is not None


def is_jit_traced() -> bool:
    """Return whether ``torch.jit.trace`` or the old exporter for ONNX traces a graph."""
    return bool(JIT_TRACED) and threading.get_ident() in JIT_TRACED


def refuse_traced(what: str) -> None:
    """Raise `RecordError` while torch traces a graph."""
    if is_traced():
        raise RecordError(
            f"{what} was called while torch.export, make_fx or torch.jit.trace writes down a graph, in which there "
            "would be no collectives; write fspmd.jit(f).lower(*args), whose program has them"
        )


def untraceable(x: Any) -> RecordError:
    """Return the error for a `Sharded` in a trace of torch."""
    return RecordError(
        f"torch.export, make_fx or torch.jit.trace got {x!r}, whose collectives no graph of torch has; write "
        "fspmd.jit(f).lower(*args), whose program has them; instead of torch.func.linearize write "
        "fspmd.jvp(f, (x,), (tangent,)) for each tangent"
    )


def refuse_tracer(x: Any) -> None:
    """Raise `RecordError` if one of torch's tracers calls a method that gives the strides of a `Sharded`."""
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_globals.get("__name__", "").startswith("fspmd."):
        caller = caller.f_back
    if caller.f_globals.get("__name__", "").startswith(MODULES_THAT_TRACE):
        raise untraceable(x)


def note_block_use(x: torch.Tensor) -> None:
    """Show a value to the recorder before its blocks are used one by one. It must not meet the blocks first."""
    if _active and (mode := recorder()) is not None:
        mode.node_of(x)


def note_unlike(why: str) -> None:
    """Tell the recorder that ranks have other steps from here on, so that passes leave collectives unchanged."""
    if _active and (mode := recorder()) is not None:
        mode.note_unlike(lambda: why)


_recompute = threading.local()
#: functions as `recomputed_in` takes, for every thread
LASTING: Final[list[Callable[[], RecomputeContext]]] = []


@contextmanager
def recomputed_in(context: Callable[[], RecomputeContext]) -> Iterator[None]:
    """Make ``context()`` a part of each `recompute_context` that is taken within a ``with`` block."""
    before = getattr(_recompute, "contexts", ())
    _recompute.contexts = (*before, context)
    try:
        yield
    finally:
        _recompute.contexts = before


def has_recompute_context() -> bool:
    """Return whether a recomputation of this code needs more than the state of torch."""
    return bool(LASTING or getattr(_recompute, "contexts", ()))


def recompute_context() -> RecomputeContext:
    """Return the context in which backward must recompute a run that begins here."""
    contexts = [context() for context in (*LASTING, *getattr(_recompute, "contexts", ()))]

    @contextmanager
    def later() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return later


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark the steps within a ``with`` block as recomputed for backward."""
    mode = recorder()
    with nullcontext() if mode is None else with_attribute(mode, "repeats", True):
        yield


def _recorded(function: Callable[Q, R], record: Callable[[Any, Any, Any], R]) -> Callable[Q, R]:
    """Return a function that runs ``record(recorder, args, kwargs)`` in a recording, and ``function`` otherwise."""

    @functools.wraps(function)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        if not _active or (mode := recorder()) is None:
            return function(*args, **kwargs)
        return record(mode, args, kwargs)

    return run


def step(function: Callable[Q, R]) -> Callable[Q, R]:
    """Make each call of a function one step of a record."""
    return _recorded(function, lambda mode, args, kwargs: mode.step(function, args, kwargs))


def step_of_values(imagined: Callable[Q, R]) -> Callable[[Callable[Q, R]], Callable[Q, R]]:
    """Make each call of a function that needs values one step. ``imagined`` runs in its place where there are none."""

    def marked(function: Callable[Q, R]) -> Callable[Q, R]:
        setattr(function, "imagined", imagined)  # noqa: B010 (not known to type checkers)
        return step(function)

    return marked


def state(function: Callable[Q, R]) -> Callable[Q, R]:
    """Make calls of a function steps that read or set something other than tensors. They also run in a recording."""
    return _recorded(function, lambda mode, args, kwargs: mode.step(function, args, kwargs, real=True))


def reading(function: Callable[Q, R]) -> Callable[Q, R]:
    """Make calls of a function steps that show values. They write and return nothing, and do not run without values."""
    setattr(function, "reads", True)  # noqa: B010 (not known to type checkers)
    return step(function)


def python(function: Callable[Q, R]) -> Callable[Q, R]:
    """Make calls of a function steps that run a user's Python. They need values, and reach only their arguments."""
    setattr(function, "python", True)  # noqa: B010
    return step(function)


def outside_transforms() -> Any:
    """Return a context in which no ``torch.func`` transform wraps new tensors."""
    return _outside_running() if transforms_active() else nullcontext()


@contextmanager
def _outside_running() -> Iterator[None]:
    with ExitStack() as levels:
        for _ in running_transforms():
            levels.enter_context(pop_transform())
        yield


def outside_modes() -> Any:
    """Return a context in which no dispatch mode sees calls. A mode of fake tensors stays, since they need it."""
    modes = dispatch_mode_stack()
    stay = not modes or any(isinstance(mode, FakeTensorMode) for mode in modes)
    return nullcontext() if stay else without_dispatch_modes()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Leave all dispatch modes in a ``with`` block."""
    modes = dispatch_mode_stack()
    for _ in modes:
        pop_dispatch_mode()
    try:
        yield
    finally:
        for mode in modes:
            push_dispatch_mode(mode)


@contextmanager
def unseen() -> Iterator[None]:
    """Keep the calls in a ``with`` block from all transforms, modes and subclasses."""
    with outside_transforms(), without_dispatch_modes(), DisableTorchFunction():
        yield


def hidden(function: Callable[Q, R]) -> Callable[Q, R]:
    """Keep the calls of a function out of records, transforms and dispatch modes: their results serve all later runs.

    Such a mode is that of a selective checkpoint, for which a function makes the same calls whenever it runs. Nor are
    results made within `torch.inference_mode` of use to autograd later.
    """

    @functools.wraps(function)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        mode = recorder()
        with outside_transforms(), torch.inference_mode(False), outside_modes() if mode is None else mode.real():
            return function(*args, **kwargs)

    return run


def constant(function: Callable[Q, R]) -> Callable[Q, R]:
    """Make the result of a function a constant of records: a tensor that is the same in every run of this rank."""

    def record(mode: Any, args: Any, kwargs: Any) -> R:
        with outside_transforms(), mode.real():  # a transform would wrap the tensor, and hide it from the recorder
            value = function(*args, **kwargs)
        return mode.constant(value)  # type: ignore[no-any-return]

    return _recorded(function, record)
