"""From a function and its arguments to a program: it runs once, on leaves of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.programs.backward import Followed, differentiated, has_gradient
from fspmd.programs.facts import state_of
from fspmd.programs.impurities import constant_of, not_compiled
from fspmd.programs.program import Program
from fspmd.programs.reachable import reached
from fspmd.programs.recorder import Recorder
from fspmd.sharded import Sharded
from fspmd.torch_internals import DataDependentOutputException, DynamicOutputShapeException
from fspmd.transport.frame import Frame, frame
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.randomness import kept_states
from fspmd.trees import filling, flatten, flatten_in_order

#: held by who records; others run functions as they are, or wait
recording = threading.RLock()


@dataclass(frozen=True, slots=True)
class Capture:
    """One recorded run."""

    program: Program
    followed: Followed | None  # where results have a gradient
    out: Any  # the result
    given: list[Tensor]  # the tensors among the arguments
    leaves: list[Tensor]  # what the function had in their place
    results: list[Tensor]  # the tensors among those of ``out``
    same: dict[int, int]  # results that are arguments, by their places among ``results`` and ``given``
    again: Callable[[Sequence[Tensor]], list[Tensor]]  # the function, of the tensors among its arguments
    drawn: Any  # the states of generators before
    closed: tuple[Tensor, ...]  # tensors closed over
    written: tuple[int, ...]  # which of ``given`` are written into
    modules: tuple[Any, ...]  # modules that ran, and how they were


def capture(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], imagines: bool = False
) -> Capture:
    """Run a function and record it.

    ``imagines``: its arguments are fake tensors, of the mode that is active.

    In inference mode torch would not tell what is written into, so it is recorded as in `torch.no_grad`.
    """
    if not torch.is_inference_mode_enabled():
        return _captured(function, args, kwargs, imagines)
    with torch.inference_mode(False), torch.no_grad():
        return _captured(function, args, kwargs, imagines)


def _captured(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], imagines: bool) -> Capture:
    leaves, treedef = flatten_in_order((args, kwargs))
    before = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors, filled = list(map(_apart, before)), filling(leaves, treedef)

    def again(values: Sequence[Tensor]) -> list[Tensor]:
        given, named = filled(values)
        return _tensors(function(*given, **named))

    drawn = kept_states()
    recorder = Recorder(reached(function, *leaves), imagines)
    inputs = [recorder.argument(x) for x in tensors]
    given, named = filled(tensors)
    for one in optree.tree_leaves((given, named), none_is_leaf=True):
        recorder.lies(one)
    with recorder.recording():
        out = _run(recorder, function, given, named)
        for one in optree.tree_leaves(out, none_is_leaf=True):
            recorder.lies(one)
        _check_arguments(leaves, filled(tensors), (given, named))
        results = _tensors(out)
        outputs = list(map(recorder.node_of, results))
        facts = None
        if any(map(has_gradient, results)):
            program, facts = differentiated(recorder, tensors, inputs, results, outputs, _reduced(out))
        else:
            program = Program.of(recorder.graph, inputs, outputs, recorder.captured)
        program.uneven, program.unlike, program.places = recorder.uneven, recorder.unlike, recorder.places
    places = {id(x): i for i, x in enumerate(tensors)}
    written = tuple(i for i, node in enumerate(inputs) if node in recorder.written)
    if not imagines:
        _write_back([(before[i], tensors[i]) for i in written])
    return Capture(
        program,
        facts,
        out,
        before,
        tensors,
        results,
        {i: places[id(x)] for i, x in enumerate(results) if id(x) in places},
        again,
        drawn,
        tuple(x for node, x in recorder.captured.items() if node not in recorder.made),
        written,
        tuple((module, state_of(module)) for module in recorder.modules.values()),
    )


def _run(recorder: Recorder, function: Callable[..., Any], given: Any, named: Any) -> Any:
    """The result; raises what was refused, whatever was made of it on its way."""
    try:
        out = function(*given, **named)
    except Exception as error:
        if recorder.refused is None and type(error).__module__ == "torch._dynamo.exc":
            raise not_compiled() from error
        if recorder.refused is None and isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            raise constant_of(f"{error.func}, of which torch would have to know values") from error
        if recorder.refused is None or error is recorder.refused:
            raise
        raise recorder.refused from error
    recorder.finish()
    return out


def _write_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Into inference tensors, in whose place the function was given others."""
    for given, written in pairs:
        if given.is_inference():
            with torch.inference_mode():
                given.copy_(written)


def _check_arguments(leaves: list[Any], before: Any, after: Any) -> None:
    """Raises where a function has changed its arguments otherwise than by writing into tensors."""
    (was, tree), (now, other) = flatten_in_order(before), flatten_in_order(after)
    if tree != other or any(x is not y for x, y in zip(was, now, strict=True)):
        raise RecordError(
            "jit cannot record a function that changes a list, a dict or a Sharded that it was given; return what "
            "becomes of it"
        )
    for x, y in zip(
        (x for x in was if isinstance(x, Tensor)), (x for x in leaves if isinstance(x, Tensor)), strict=True
    ):
        if x.requires_grad != y.requires_grad and not y.is_inference():
            raise RecordError(
                f"jit cannot record a function that gives a gradient to an argument of shape {tuple(x.shape)}, by "
                "requires_grad_() or by writing into it what has one; write x = x.detach().requires_grad_(), or return "
                "the result"
            )


def _apart(x: Tensor) -> Tensor:
    """The same value as another object: told from the same tensor given twice, or closed over; of no graph."""
    if x.is_inference():  # no others have gradients, or are told when they are written into
        other = torch.empty_like(x, requires_grad=False).copy_(x)
        return other.requires_grad_(x.requires_grad and not torch.is_grad_enabled())  # which Python may ask for
    apart = x.detach()
    if x.layout is torch.strided and any(0 in block.stride() for block in blocks_of(x)):
        apart = apart.contiguous()  # other arguments can lie in memory as this does
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(apart, x.requires_grad)
    return apart.requires_grad_(x.requires_grad)


def _reduced(out: Any) -> list[Frame | None]:
    """For each tensor of a result, the simulated axes over which it is reduced."""
    leaves = optree.tree_leaves(out, is_leaf=lambda x: type(x) is Sharded, none_is_leaf=True)
    return [
        frame(x.spec.mesh, x.spec.partition.reduced)
        if type(x) is Sharded and x.spec.partition.reduced and x.spec.mesh.transport == "simulation"
        else None
        for x in leaves
        if isinstance(x, Tensor)
    ]


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in flatten(out)[0] if isinstance(x, Tensor)]
