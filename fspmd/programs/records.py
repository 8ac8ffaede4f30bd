"""One recorded run: how it is made, and what runs it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.op_kinds import autocasts
from fspmd.programs.backward import Halves, followed, halves_of, replay
from fspmd.programs.capture import Capture, capture
from fspmd.programs.closed_over import Closed
from fspmd.programs.donation import Donation
from fspmd.programs.facts import is_as, memory_of
from fspmd.programs.keys import strides_of
from fspmd.programs.logged_collectives import tell_when_they_run, told_before
from fspmd.programs.misses import Facts
from fspmd.programs.passes.table import Pass, transform
from fspmd.programs.program import owner
from fspmd.programs.replay import Maker, Part, below_autograd, compiled, taken
from fspmd.programs.reuse import reuse
from fspmd.remembered import wrote
from fspmd.sharded import Sharded, is_plain, laid, lies, pair
from fspmd.transport.local_tensor import LocalTensor
from fspmd.trees import filling, flatten
from fspmd.watching.watch import Communication


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded run."""

    run: Callable[..., tuple[Any, ...]]  # of the tensors among the leaves of the arguments: those of the result
    strides: list[Any]  # of those when they were recorded
    written: tuple[int, ...]  # those that it writes into
    same: dict[int, int]  # results that are arguments
    rebuild: Callable[[tuple[Any, ...]], Any]  # the result, of its tensors
    closed: Closed  # tensors closed over
    modules: tuple[Any, ...]  # modules that ran, and how they were
    facts: Facts  # what its key is made of
    donation: Donation  # the tensors among the leaves that ``run`` takes out of lists
    halves: Halves | None  # where results have a gradient
    moved: tuple[Communication, ...]  # what is communicated when it runs
    plain: bool  # arguments that lie in memory as they did are all that ``run`` needs


def replayed(record: Record, values: list[Any], strides: list[Any]) -> Any:
    """The result, of the tensors among the leaves of the arguments, which lie in memory with some strides."""
    for i in record.written:
        wrote(values[i], soon=True)
    if strides != record.strides:
        return record.rebuild(relaid(record, values))
    if record.donation:
        values = record.donation.given(values)
    return record.rebuild(record.run(*values))


def relaid(record: Record, values: list[Tensor]) -> tuple[Any, ...]:
    """Replay on tensors that lie in memory as they did when they were recorded."""
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
    """Results, of which some are among the values."""
    return tuple(values[same[i]] if i in same else x for i, x in enumerate(results))


def _lying(x: Tensor, strides: Any) -> Tensor:
    if type(x) is LocalTensor:
        empty: Tensor = LocalTensor(list(map(_empty, x.shards, strides)), x.frame)
    else:
        empty = _empty(x, strides)
    return empty.copy_(x)


def _empty(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def changed(record: Record) -> bool:
    """Whether a module is in another mode or has other parts, or a tensor closed over is of another kind."""
    return not record.closed.holds() or any(not is_as(module, was) for module, was in record.modules)


def stale(record: Record) -> tuple[str, ...]:
    """Why a record with the right key is of no use."""
    parts = "has other parameters, buffers or submodules"
    modules = [
        f"a module {type(module).__name__}: "
        + (parts if module.training == was[0] else f"training {was[0]} -> {not was[0]}")
        for module, was in record.modules
        if not is_as(module, was)
    ]
    return *record.closed.changes(), *modules


def recorded(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    passes: Sequence[Pass],
    facts: Facts,
    donation: Donation,
    make: Maker,
) -> tuple[Record, Any]:
    """Run a function and record it; the record, changed by ``passes``, and the result."""
    found = capture(function, args, kwargs)
    transform(found.program, passes)
    record = record_of(found, facts, donation, make)
    given = [x[0] if type(x) is list else x for x in donation.given(found.given)]
    if record.halves is None and not found.same:
        return record, found.out
    results = found.results
    if record.halves is not None:
        results = followed(record.halves, found.drawn, given, found.leaves, results)
    return record, record.rebuild(in_place_of(results, found.same, given))


def record_of(found: Capture, facts: Facts, donation: Donation, make: Maker) -> Record:
    """What replays a program."""
    program, halves = found.program, None
    donation = settled(found, donation, make)
    tell_when_they_run(program)
    if found.followed is None:
        inputs = program.inputs
        donated = [inputs[i] for i in donation.places]
        run = make(Part(program.steps, inputs, program.results, program.constants, donated))
        if apart := _apart(found):
            run = _detaching(run, apart)
        if any(x.requires_grad for x in (*found.leaves, *found.closed)):
            run = below_autograd(run)
    else:
        halves = halves_of(program, found.followed, found.again, make)
        run = replay(halves)
        if found.same:
            run = _handing_on(run, found.same)
        if donation:
            run = taken(run)  # autograd keeps them
    if autocasts():
        run = _as_recorded(run)
    moved = told_before(program.steps)
    strides = list(map(strides_of, found.leaves))
    made_of = found.written, found.same, _rebuilder(found.out), Closed(found.closed), found.modules
    return Record(run, strides, *made_of, facts, donation, halves, moved, not donation)


def _handing_on(run: Callable[..., Any], same: dict[int, int]) -> Callable[..., Any]:
    """The same where some results are arguments, which autograd's functions would give as values of their own."""
    return lambda *values: in_place_of(run(*values), same, values)


def _apart(found: Capture) -> tuple[int, ...]:
    """Results in the memory of an argument, a tensor closed over or another result that are none of these."""
    program = found.program
    given = dict(zip(program.inputs, found.leaves, strict=True)) | program.constants
    apart, seen = [], dict[Any, list[Tensor]]()
    for i, (node, x) in enumerate(zip(program.results, found.results, strict=True)):
        before = seen.setdefault(node, [given[node]] if node in given else [])
        is_other = bool(before) or owner(node) in given
        if is_other and i not in found.same and not any(x is one for one in before):
            apart.append(i)
        before.append(x)
    return tuple(apart)


def _detaching(run: Callable[..., Any], apart: Sequence[int]) -> Callable[..., Any]:
    """The same where some results are tensors of their own, without a gradient."""
    return lambda *values: tuple([x.detach() if i in apart else x for i, x in enumerate(run(*values))])


def settled(found: Capture, donation: Donation, make: Maker) -> Donation:
    """Have results written into donated arguments, where steps run one by one: what compiles them finds its own way."""
    if donation and found.followed is None and make is compiled:
        return replace(donation, written=reuse(found, donation.places))
    return donation


def _as_recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same where autocast is on: casts are steps of the record, and no others are wanted."""
    kinds = [kind for kind, _ in autocasts()]

    def without(*values: Any) -> Any:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return run(*values)

    return without


def _rebuilder(out: Any) -> Callable[[tuple[Any, ...]], Any]:
    """What makes a result like ``out`` of its tensors."""
    if is_plain(out):
        return lambda values: values[0]
    if type(out) is Sharded:
        return _pairing([out], "x0")
    if type(out) is tuple and out and all(type(x) is Sharded for x in out):
        return _pairing(out, "".join(f"x{i}, " for i in range(len(out))))
    return filling(*flatten(out))


def _pairing(found: Sequence[Sharded], result: str) -> Callable[[tuple[Any, ...]], Any]:
    """What makes `Sharded` values of tensors, like those ``found``, without the checks of their constructor.

    It is straight Python, as replays are.

    ``result`` is made of their names, ``x0`` and so on.
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
