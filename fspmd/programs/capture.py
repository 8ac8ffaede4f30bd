"""Capture: run a function once, on copies of its arguments or on fake tensors, and record a `Program`.

Fake tensors have shapes and strides, and no values.

An interrupt or a `RecursionError` may end a recording between any two calls. Torch's own contexts then leave modes
behind, or take away modes that are not theirs, so `unwound` restores them.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from traceback import clear_frames
from typing import Any, Final, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor

from fspmd import tracing
from fspmd.errors import RecordError
from fspmd.fake_mode import CachingFakeMode, UnknownValues
from fspmd.programs.backward import AutogradFacts, differentiated, has_gradient
from fspmd.programs.program import Program, memory_of
from fspmd.programs.reachable import reachable_from
from fspmd.programs.recorder import ProgramRecorder
from fspmd.programs.refusals import check_dense, constant_of, not_compiled
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    DYNAMO_ERRORS,
    DisableTorchFunction,
    dispatch_mode_stack,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from fspmd.transport.frame import Frame, frame_over
from fspmd.transport.local_tensor import has_overlaps, local_tensor, per_block, with_blocks
from fspmd.trees import filling, flatten, flatten_in_order, is_mutable

Q = ParamSpec("Q")
R = TypeVar("R")
Flat = tuple[list[Any], optree.PyTreeSpec]  # the leaves and the treedef of arguments
#: held while a thread records; other threads run functions unrecorded, or wait
recording = threading.RLock()


@dataclass(frozen=True, slots=True)
class Capture:
    """A recorded run of a function."""

    given: tuple[tuple[Any, ...], dict[str, Any]]  # its arguments, without values
    program: Program
    followed: AutogradFacts | None  # the facts for autograd if results have a gradient
    out: Any  # the result
    leaves: list[Tensor]  # the tensors, copied or fake, among the arguments
    results: list[Tensor]  # the tensors of ``out``
    same: dict[int, int]  # results that are arguments: places in ``leaves`` by places in ``results``
    again: Callable[[Sequence[Tensor]], list[Tensor]]  # the function; takes and returns tensors as ``run`` does
    closed_over: tuple[Tensor, ...]  # tensors closed over
    written: tuple[int, ...]  # places of ``leaves`` that are written into
    modules: tuple[torch.nn.Module, ...]  # modules that ran
    is_fake: bool  # whether it ran without values


def unwound(record: Callable[Q, R]) -> Callable[Q, R]:
    """Return a function that records, and after an exception leaves torch's modes as they were before.

    An interrupt is raised itself, and not the error of a context that it has kept from ending.
    """

    @functools.wraps(record)
    def run(*args: Q.args, **kwargs: Q.kwargs) -> R:
        modes, depth, handled = [entered() for entered, _, _ in _STACKS], tracing.depth(), sys.exc_info()[1]
        try:
            return record(*args, **kwargs)
        except BaseException as error:
            errors = list(takewhile(lambda each: each is not handled, _behind(error)))
            try:
                for each in filter(_is_stray, errors):
                    clear_frames(each.__traceback__)  # contexts that wait there would end later, and push modes then
            finally:
                try:
                    _restore(modes, depth)
                finally:
                    _restore(modes, depth)
            interrupt = next((each for each in errors if not isinstance(each, (Exception, GeneratorExit))), error)
            if interrupt is error:
                raise
            raise interrupt from None

    return run


def _is_stray(error: BaseException) -> bool:
    """Return whether an error may be raised between any two calls."""
    return isinstance(error, (RecursionError, MemoryError)) or not isinstance(error, Exception)


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those in whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__


#: for dispatch modes and for function modes: functions that list the entered modes, leave the last, and enter one
_STACKS: Final[tuple[tuple[Callable[[], list[object]], Callable[[], object], Callable[[object], object]], ...]] = (
    (dispatch_mode_stack, pop_dispatch_mode, push_dispatch_mode),
    (function_modes, pop_function_mode, push_function_mode),
)


def _restore(modes: list[list[object]], depth: int) -> None:
    tracing.go_back(depth)
    for (entered, leave, enter), before in zip(_STACKS, modes, strict=True):
        now = entered()
        if list(map(id, now)) != list(map(id, before)):
            for _ in now:
                leave()
            for mode in before:
                enter(mode)


@unwound
def capture(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """Run a function on copies of its arguments, and record it."""
    leaves, treedef = flatten_in_order((args, kwargs))
    copies = copies_of(x for x in leaves if isinstance(x, Tensor))
    given, named = filling(leaves, treedef)(copies)
    captured = _without_inference(function, given, named, None)
    with torch.inference_mode(False), tracing.unseen():
        return replace(captured, given=stand_ins(captured.given, CachingFakeMode()))


@unwound
def capture_fake(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], as_they_lie: bool = False
) -> Capture:
    """Run a function on fake tensors, and record it. ``as_they_lie`` is that of `stand_ins`."""
    mode = CachingFakeMode()
    with torch.inference_mode(False), tracing.unseen():
        given, named = stand_ins((args, kwargs), mode, as_they_lie)
    with recording, mode:
        return _without_inference(function, given, named, mode)


def _without_inference(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: CachingFakeMode | None
) -> Capture:
    """In inference mode torch does not count writes. A function is then recorded in `torch.no_grad`."""
    if not torch.is_inference_mode_enabled():
        return _captured(function, args, kwargs, mode)
    with torch.inference_mode(False), torch.no_grad():
        return _captured(function, args, kwargs, mode)


def _captured(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: CachingFakeMode | None
) -> Capture:
    leaves, treedef = flatten_in_order((args, kwargs))
    tensors, filled = [leaf for leaf in leaves if isinstance(leaf, Tensor)], filling(leaves, treedef)

    def again(values: Sequence[Tensor]) -> list[Tensor]:
        given, named = filled(values)
        return _tensors(function(*given, **named))

    recorder = ProgramRecorder(reachable_from(function, *leaves), mode)
    inputs = recorder.arguments(tensors)
    had_gradient = [x.requires_grad for x in tensors]
    recorder.note_specs(optree.tree_leaves((args, kwargs), none_is_leaf=True))
    with recorder.recording():
        out = _run(recorder, function, args, kwargs)
        recorder.note_specs(optree.tree_leaves(out, none_is_leaf=True))
        with DisableTorchFunction():
            _check_arguments((leaves, treedef), flatten_in_order((args, kwargs)), had_gradient)
            results = _tensors(out)
            is_followed = any(map(has_gradient, results))
        outputs = list(map(recorder.node_of, results))
        facts = None
        if is_followed:
            program, facts = differentiated(recorder, tensors, inputs, results, outputs, _reduced(out))
        else:
            program = Program.of(recorder.graph, inputs, outputs, recorder.captured)
        program.uneven, program.unlike, program.places = recorder.uneven, recorder.unlike, recorder.places
    places = {id(x): i for i, x in enumerate(tensors)}
    # a write is known by its memory, in which other arguments may lie, here and not in later calls
    memory = {memory_of(x) for x, node in zip(tensors, inputs, strict=True) if node in recorder.written}
    written = tuple(i for i, x in enumerate(tensors) if memory and memory_of(x) in memory)
    return Capture(
        (args, kwargs),
        program,
        facts,
        out,
        tensors,
        results,
        {i: places[id(x)] for i, x in enumerate(results) if id(x) in places},
        again,
        tuple(x for node, x in recorder.captured.items() if node not in recorder.made),
        written,
        tuple(recorder.modules.values()),
        mode is not None,
    )


def _run(recorder: ProgramRecorder, function: Callable[..., Any], given: Any, named: Any) -> Any:
    """The result of the function. An error of the recorder is raised even if the function has caught it."""
    try:
        out = function(*given, **named)
    except Exception as error:
        if recorder.refused is None and type(error).__module__ == DYNAMO_ERRORS:
            raise not_compiled() from error
        if recorder.refused is None and isinstance(error, UnknownValues):
            raise constant_of(f"{error.func}, which needs values of tensors") from error
        if recorder.refused is None or error is recorder.refused:
            raise
        raise recorder.refused from error
    recorder.finish()
    return out


def _check_arguments(before: Flat, after: Flat, had_gradient: Sequence[bool]) -> None:
    """Raise `RecordError` where a function has changed its arguments, except by writing into tensors."""
    (was, tree), (now, other) = before, after
    if tree != other or any(x is not y for x, y in zip(was, now, strict=True)):
        raise RecordError(
            "jit cannot record a function that changes a list, a dict or a Sharded that it was given; return the "
            "changed value"
        )
    for x, had in zip((x for x in was if isinstance(x, Tensor)), had_gradient, strict=True):
        if x.requires_grad != had:
            raise RecordError(
                "jit cannot record a function that calls requires_grad_() on an argument, or writes a value with a "
                f"gradient into it: the argument has shape {tuple(x.shape)}; write x = x.detach().requires_grad_(), or "
                "return the result"
            )


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors, without a graph. Copies share memory with each other where the tensors do."""
    memo: dict[int, Any] = {}

    def copied(x: Tensor) -> Tensor:
        other: Tensor = copy.deepcopy(x.detach(), memo)
        return other

    with torch.inference_mode(False):
        return [like(x, unshared(with_blocks(x, copied))) for x in tensors]


def _reduced(out: Any) -> list[Frame | None]:
    """For each tensor of a result, the simulated axes over which it is reduced."""
    leaves = optree.tree_leaves(out, is_leaf=lambda x: type(x) is Sharded, none_is_leaf=True)
    return [
        frame_over(x.spec.mesh, x.spec.partition.reduced)
        if type(x) is Sharded and x.spec.partition.reduced and x.spec.mesh.transport == "simulation"
        else None
        for x in leaves
        if isinstance(x, Tensor)
    ]


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in flatten(out)[0] if isinstance(x, Tensor)]


def stand_ins(tree: Any, mode: CachingFakeMode, as_they_lie: bool = False) -> Any:
    """A tree with a fake tensor for each tensor, and a `Sharded` of a fake block for each `TensorSpec`.

    It has its own copies of sets and arrays.

    ``as_they_lie``: also tensors whose elements share memory keep their strides.
    """
    leaves, treedef = flatten(tree)
    check_dense(leaves)
    return treedef.unflatten([_stand_in(leaf, mode, as_they_lie) for leaf in leaves])


def _stand_in(leaf: Any, mode: CachingFakeMode, as_they_lie: bool) -> Any:
    if isinstance(leaf, TensorSpec):
        return Sharded(_block(leaf, mode), leaf)
    if isinstance(leaf, Tensor):
        fake = per_block(mode.fake_of, leaf)
        return like(leaf, fake if as_they_lie else unshared(fake))
    return copy.copy(leaf) if is_mutable(leaf) else leaf


def like(x: Tensor, made: Tensor) -> Tensor:
    """``made``, which replaces ``x``, with the ``requires_grad`` of ``x``; a parameter if ``x`` is a parameter."""
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(made, x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def unshared(x: Tensor) -> Tensor:
    """``x``, or a copy where elements share memory, so that other arguments may have the strides of the result."""
    is_strided = x.layout is torch.strided and not x.is_nested
    return x.contiguous() if is_strided and has_overlaps(x) else x


def _block(spec: TensorSpec, mode: CachingFakeMode) -> Tensor:
    """A fake of this rank's block, or of the blocks of all simulated ranks."""
    device = spec.mesh.device
    with mode:
        if spec.mesh.transport != "simulation":
            place = spec.mesh.coordinate()
            return torch.empty((0,) if place is None else spec.local_shape(place), dtype=spec.dtype, device=device)
        holders = frame_over(spec.mesh, spec.partition.axes | spec.partition.unreduced)
        shapes = map(spec.local_shape, holders.mesh_coordinates())
        return local_tensor([torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes], holders)
