"""Records: how one is made of a capture, replayed, and found to be out of date."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.inspection.watch import Communication
from fspmd.ops.traits import autocasts
from fspmd.programs.backward import Halves, halves_of, replay
from fspmd.programs.cache_misses import Facts
from fspmd.programs.capture import Capture
from fspmd.programs.communication import known_communication, report_when_run
from fspmd.programs.donation import Donation, reuse
from fspmd.programs.keys import guard, strides_of
from fspmd.programs.program import memory_of, owner
from fspmd.programs.replay import Maker, ProgramPart, below_autograd, compiled, taken
from fspmd.remembered import wrote
from fspmd.sharded import Sharded, is_plain, laid, lies, pair
from fspmd.transport.local_tensor import blocks_of, held_frame, local_tensor
from fspmd.trees import filling, flatten


class Closed:
    """Tensors that a function closes over, and their kinds when it was recorded.

    Each replay reads their values. Their shapes, dtypes, devices and strides are constants of the record, and so is
    that one had no gradient; ``module.to(dtype)`` and ``x.data = y`` change them.
    """

    __slots__ = ("_check", "_forms", "_still", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._forms = list(map(_form, self.tensors))
        self._still = [x for x in self.tensors if _may_thaw(x)] if torch.is_grad_enabled() else []
        self._check = _check_of(self.tensors)

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def holds(self) -> bool:
        """Whether their kinds are as they were."""
        if not self.tensors or self._check(*self.tensors):
            return True
        if next(self.changes(), None) is not None:
            return False
        self._check = _check_of(self.tensors)  # some have no gradient any more, and need none
        return True

    def changes(self) -> Iterator[str]:
        """The changes of their kinds."""
        for x, was in zip(self.tensors, self._forms, strict=True):
            now, shape = _form(x), was["shape"][0]
            for name, value in was.items():
                if now[name] != value:
                    told = " -> ".join(str(one[name][0]) for one in (was, now))
                    yield f"a tensor of shape {shape} that it closes over: {name} {told}"
        for x in self._still:
            if x.requires_grad:
                yield f"a tensor of shape {tuple(x.shape)} that it closes over: requires_grad False -> True"


def _form(x: Tensor) -> dict[str, list[Any]]:
    blocks = blocks_of(x)
    return {
        "shape": [tuple(one.shape) for one in blocks],
        "dtype": [one.dtype for one in blocks],
        "device": [one.device for one in blocks],
        "strides": [one.stride() for one in blocks],
    }


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A quick test that their kinds are as they are now; it may say no where they are."""
    return (tensors and guard(tensors)) or _unknown


def _unknown(*tensors: Tensor) -> bool:
    return False


def _may_thaw(x: Tensor) -> bool:
    return x.is_leaf and not x.requires_grad and (x.is_floating_point() or x.is_complex())


@dataclass(frozen=True, slots=True)
class Record:
    """A function that replays a recorded run, and the facts that it depends on."""

    run: Callable[..., tuple[Any, ...]]  # from the tensors among the leaves of the arguments to those of the result
    strides: list[Any]  # of these tensors, as recorded
    written: tuple[int, ...]  # which of them it writes into
    same: dict[int, int]  # results that are arguments, by place
    rebuild: Callable[[tuple[Any, ...]], Any]  # makes the result of its tensors
    closed: Closed  # tensors closed over
    modules: tuple[Any, ...]  # modules that ran, and their states
    facts: Facts  # the parts of its key
    donation: Donation  # tensors that ``run`` takes out of lists
    halves: Halves | None  # where autograd follows results
    moved: tuple[Communication, ...]  # the communication of a run
    plain: bool  # ``run`` needs nothing but arguments with the recorded strides


def replayed(record: Record, values: list[Any], strides: list[Any]) -> Any:
    """The result for the tensors among the leaves of the arguments; ``strides``: theirs."""
    for i in record.written:
        wrote(values[i], soon=True)
    if strides != record.strides:
        return record.rebuild(relaid(record, values))
    if record.donation.places:
        values = record.donation.given(values)
    return record.rebuild(record.run(*values))


def relaid(record: Record, values: list[Tensor]) -> tuple[Any, ...]:
    """Replay on copies of tensors that have other strides than when they were recorded."""
    laid: list[Any] = [x if strides_of(x) == s else _lying(x, s) for x, s in zip(values, record.strides, strict=True)]
    if record.written and len(set(map(memory_of, values))) < len(values):
        raise RecordError(
            "jit cannot replay a function that writes into an argument which shares memory with another, where they "
            "lie in memory otherwise than when it was recorded; pass x.clone()"
        )
    donated = record.donation.places
    if donated:
        given = record.donation.given(values)
        for i in donated:
            laid[i] = given[i] if laid[i] is values[i] else [laid[i]]
        del given
    out = record.run(*laid)
    with torch.no_grad():
        for i in record.written:
            if i not in donated and laid[i] is not values[i]:
                values[i].copy_(laid[i])
    return in_place_of(out, {i: place for i, place in record.same.items() if place not in donated}, values)


def in_place_of(results: Sequence[Any], same: dict[int, int], values: Sequence[Tensor]) -> tuple[Any, ...]:
    """Results with the values themselves in the place of those that are arguments."""
    return tuple(values[same[i]] if i in same else x for i, x in enumerate(results))


def _lying(x: Tensor, strides: Any) -> Tensor:
    held = held_frame(x)
    empty = _empty(x, strides) if held is None else local_tensor(list(map(_empty, blocks_of(x), strides)), held)
    return empty.copy_(x)


def _empty(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def changed(record: Record) -> bool:
    """Whether a module is in another mode or has other parts, or a tensor closed over has another kind."""
    return not record.closed.holds() or any(not is_as(module, was) for module, was in record.modules)


def stale(record: Record) -> tuple[str, ...]:
    """Why a record with the right key does not hold any more."""
    parts = "has other parameters, buffers or submodules"
    modules = [
        f"a module {type(module).__name__}: "
        + (parts if module.training == was[0] else f"training {was[0]} -> {not was[0]}")
        for module, was in record.modules
        if not is_as(module, was)
    ]
    return *record.closed.changes(), *modules


def record_of(found: Capture, facts: Facts, donation: Donation, make: Maker) -> Record:
    """The record of a capture."""
    program, halves = found.program, None
    donation = settled(found, donation, make)
    report_when_run(program)
    if found.followed is None:
        inputs = program.inputs
        donated = [inputs[i] for i in donation.places]
        run = make(ProgramPart(program.steps, inputs, program.results, program.constants, donated))
        if shared := _results_to_detach(found):
            run = _detaching(run, shared)
        if any(x.requires_grad for x in (*found.leaves, *found.closed)):
            run = below_autograd(run)
    else:
        halves = halves_of(program, found.followed, found.again, make)
        run = replay(halves)
        if found.same:
            run = _handing_on(run, found.same)
        if donation.places:
            run = taken(run)  # autograd keeps the tensors
    if autocasts():
        run = _as_recorded(run)
    moved = known_communication(program.steps)
    strides = list(map(strides_of, found.leaves))
    modules = tuple((module, state_of(module)) for module in found.modules)
    made_of = found.written, found.same, _rebuilder(found.out), Closed(found.closed), modules
    return Record(run, strides, *made_of, facts, donation, halves, moved, not donation.places)


def _handing_on(run: Callable[..., Any], same: dict[int, int]) -> Callable[..., Any]:
    """``run`` with arguments themselves for results that are arguments; autograd's functions give new values."""
    return lambda *values: in_place_of(run(*values), same, values)


def _results_to_detach(found: Capture) -> tuple[int, ...]:
    """Results that share memory with an argument, a tensor closed over or another result, and are other tensors."""
    program = found.program
    given = dict(zip(program.inputs, found.leaves, strict=True)) | program.constants
    shared, seen = [], dict[Any, list[Tensor]]()
    for i, (node, x) in enumerate(zip(program.results, found.results, strict=True)):
        before = seen.setdefault(node, [given[node]] if node in given else [])
        is_other = bool(before) or owner(node) in given
        if is_other and i not in found.same and not any(x is one for one in before):
            shared.append(i)
        before.append(x)
    return tuple(shared)


def _detaching(run: Callable[..., Any], shared: Sequence[int]) -> Callable[..., Any]:
    """``run`` with some results as tensors of their own, without a gradient."""
    return lambda *values: tuple([x.detach() if i in shared else x for i, x in enumerate(run(*values))])


def settled(found: Capture, donation: Donation, make: Maker) -> Donation:
    """The donation, with results written into donated arguments where steps run one by one."""
    if donation.places and found.followed is None and make is compiled:
        return replace(donation, written=reuse(found, donation.places))
    return donation


def _as_recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with autocast off: casts are steps of the record already."""
    kinds = [kind for kind, _ in autocasts()]

    def without(*values: Any) -> Any:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return run(*values)

    return without


def _rebuilder(out: Any) -> Callable[[tuple[Any, ...]], Any]:
    """A function that makes a result like ``out`` of its tensors."""
    if is_plain(out):
        return lambda values: values[0]
    if type(out) is Sharded:
        return _pairing([out], "x0")
    if type(out) is tuple and out and all(type(x) is Sharded for x in out):
        return _pairing(out, "".join(f"x{i}, " for i in range(len(out))))
    return filling(*flatten(out))


def _pairing(found: Sequence[Sharded], result: str) -> Callable[[tuple[Any, ...]], Any]:
    """A function that makes `Sharded` values like those ``found`` of tensors, without the checks of a constructor.

    It is straight Python, as replays are. ``result``: an expression of the names ``x0``, ``x1``, ...
    """
    scope: dict[str, Any] = {
        "pair": pair,
        "laid": laid,
        **{f"s{i}": x.spec for i, x in enumerate(found)},
        **{f"l{i}": lies(x) for i, x in enumerate(found)},
    }
    lines = ["def rebuild(values):", f"    {''.join(f'v{i}, ' for i in range(len(found)))} = values"]
    for i, x in enumerate(found):
        lines += [f"    x{i} = pair(v{i}, s{i})" if x.form is x.spec else f"    x{i} = laid(v{i}, s{i}, l{i})"]
    exec("\n".join([*lines, f"    return {result}"]), scope)
    rebuild: Callable[[tuple[Any, ...]], Any] = scope["rebuild"]
    return rebuild


def state_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """The state of a module that a record depends on: its mode, parameters, buffers and submodules."""
    return module.training, *module._parameters.values(), *module._buffers.values(), *module._modules.values()


def is_as(module: torch.nn.Module, was: tuple[Any, ...]) -> bool:
    """Whether a module is in this state."""
    now = state_of(module)
    return len(now) == len(was) and all(map(operator.is_, now, was))
