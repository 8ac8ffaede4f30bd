"""An `OpPlan`: moves, local call, layouts of results. A question and its strategy make it.

A call moves and casts its operands as the plan says.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from fspmd.forms import Form, Laid, as_made, form_of, packed
from fspmd.global_view.local_calls import (
    as_block,
    as_even_block,
    as_local_call,
    in_own_memory,
    of_first,
    packed_if_need_be,
    rank_by_rank,
    set_in,
    view_or_copy,
)
from fspmd.global_view.question import Question
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import ResultMemory
from fspmd.global_view.strategies import Strategy
from fspmd.local_view.empty_blocks import call_with_empty_blocks
from fspmd.local_view.hooks import completing
from fspmd.ops.operators import SOONER
from fspmd.ops.signatures import Place, argument_of, at, stand_in_order
from fspmd.ops.traits import writes
from fspmd.pairs import Call
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg
from fspmd.redistribution.moves import casts as casts_of
from fspmd.redistribution.moves import moves as moves_of
from fspmd.redistribution.redistribute import along, cast_once
from fspmd.remembered import holds_casts
from fspmd.rules import Site, without_write
from fspmd.rules.views import groups, reshaped
from fspmd.sharded import shell_of
from fspmd.spec import TensorSpec
from fspmd.torch_internals import transforms_active

Calls = tuple[tuple[Place, tuple[Call, ...]], ...]


@dataclass(slots=True)
class OpPlan:
    """A decided call. A plan never changes."""

    results: TensorSpec | tuple[TensorSpec, ...]
    needs_redistribute: bool  # False if the operands lie right
    moves: tuple[tuple[Place, tuple[Leg, ...]], ...]
    casts: Calls  # of operands that will have a gradient; they move nothing forward
    local: Callable[..., Any]  # runs on the blocks
    in_order: bool = False  # keyword arguments stand in the order of the parameters of ``local``
    by_name: bool = False  # some operands are keyword arguments
    writes: bool = False  # into the first operand, which is the result
    copies: Place | None = None  # the operand that torch would view, and that this plan copies
    name: str = ""  # of the function in messages, if the plan writes or copies
    whole: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None  # takes the Sharded operands and does it all
    in_parts: bool = False  # ``whole`` only calls other functions
    choose: Callable[[list[Any]], OpPlan] | None = None  # takes the blocks and picks the plan: gradients decide
    memory: Sequence[ResultMemory] | None = None  # the memory of the results in torch; None: as of new tensors
    made: bool = False  # the result is made of less (`forms.py`)
    at_once: bool = field(init=False)  # nothing is moved, cast, written or copied
    single: bool = field(init=False)  # the result is one tensor, whose storage offset the plan knows
    form: Any = field(init=False)  # of a single result
    dtype: torch.dtype | None = field(init=False)  # of a single result
    shell: tuple[Any, ...] = field(init=False)  # the arguments of `sharded.shell` for a single result
    parts: tuple[tuple[Form, Laid], ...] | None = field(init=False)  # of several results, if the plan knows them

    def __post_init__(self) -> None:
        self.at_once = not (self.needs_redistribute or self.casts or self.writes or self.copies is not None)
        self.single = type(self.results) is not tuple
        self.form, self.dtype, self.shell, self.parts = self.results, None, (), None
        if isinstance(self.results, TensorSpec):
            laid, base = (None, None) if self.memory is None else self.memory[0]
            self.single = base is None
            self.form = self.results if laid is None else form_of(self.results, laid)
            self.dtype = self.results.dtype
            self.shell = shell_of(self.results, None if self.form is self.results else laid)
            if self.made:
                self.form = as_made(self.form)
        if isinstance(self.results, tuple) and all(base is None for _, base in self.memory or ()):
            memory = self.memory or [ResultMemory(Laid(packed(spec.shape))) for spec in self.results]
            pairs = zip(self.results, memory, strict=True)
            self.parts = tuple((form_of(spec, laid), laid) for spec, (laid, _) in pairs)


def plan_of(question: Question, best: Strategy, lie: Sequence[TensorSpec] | None = None) -> OpPlan:
    """Return the plan of a strategy. ``lie``: the layouts to which blocks were moved before, where moves start."""
    func, row, positional, final = question.func, question.row, question.positional, best.results
    written = bool(writes(func))
    moves, casts = _moves(question, best, lie)
    copies = next((place for place, _ in moves if place == question.viewed), None)
    by_body = best.by_body and row.body is not None
    if by_body:
        casts, copies = (), question.viewed
        local = _body(question, best)
    else:
        local = _local_run(question, best, copies)
    if written and row.sets:
        local = functools.partial(set_in, local)
    return OpPlan(
        final[0] if question.kind is None else final,
        bool(moves),
        moves,
        casts,
        local,
        in_order=not question.names or (not by_body and stand_in_order(local, positional, question.names)),
        by_name=bool(question.names) and any(argument_of(place) >= positional for place in question.places),
        writes=written,
        name=shown(func) if written or copies is not None else "",
        copies=copies,
        memory=question.memory,
    )


def _moves(
    question: Question, best: Strategy, lie: Sequence[TensorSpec] | None
) -> tuple[tuple[tuple[Place, tuple[Leg, ...]], ...], Calls]:
    """Return the moves of operands to the layouts of a strategy, and the casts of operands with a gradient."""
    operands = question.operands
    moves: list[tuple[Place, tuple[Leg, ...]]] = []
    casts: list[tuple[Place, tuple[Call, ...]]] = []
    moving = [*map(id, best.operands)] != [*map(id, operands)]  # then gradients decide between plans
    rows = zip(question.places, operands, best.operands, best.casts, strict=True)
    for i, (place, spec, need, cast_axes) in enumerate(rows):
        axes = cast_axes if i in question.gradients or not moving else ()
        if spec is need and not axes:
            continue
        start, followed, legs = spec, i in question.gradients, list[Leg]()
        if lie is not None and lie[i] is not spec is not need:
            start = lie[i]
            legs.append(moves_of(spec, start, (), topology(), followed).leg)  # a pending sum is never a plain tensor
        move = moves_of(start, need, axes, topology(), followed) if start is not need else None
        if move is not None:
            legs.append(move.leg._replace(own=i not in question.plain))
        if legs:
            moves.append((place, tuple(legs)))
        if cast := casts_of(need, axes) if move is None else move.casts:
            casts.append((place, cast))
    return tuple(moves), tuple(casts)


def _body(question: Question, best: Strategy) -> Callable[..., Any]:
    """Return the sharded body of a row as the local call of a plan."""
    assert question.row.body is not None  # the strategy uses it
    names = question.factors.names
    named = {name: best.axes[factor] for name, factor in names.items() if factor in best.axes}
    site = Site(named or best.axes, best.operands, best.results)
    places = list(zip(question.places, best.operands, strict=True))
    return as_local_call(
        question.row.body, shown(question.func), site, places, best.results, linear=bool(question.linear)
    )


def _local_run(question: Question, best: Strategy, copies: Place | None) -> Callable[..., Any]:
    """Return the local call of a strategy without a body; ``copies`` is the operand that is copied, not viewed."""
    func, row, first, final = question.func, question.row, question.operands[0], best.results
    writes_blocks = bool(writes(func)) and not row.sets
    local: Callable[..., Any] = functools.partial(completing, func) if row.registered else SOONER.get(func, func)
    if writes(func) and row.sets:
        local = without_write(func)
    if row.local is not None:
        local = functools.partial(row.local, first.shape)
    elif row.blocks is not None:
        of_blocks = functools.partial(row.blocks, question.factors, first.shape, question.results[0].shape)
        local = functools.partial(of_first, of_blocks)
    if question.viewed_call is not None and question.viewed_call.regrouped is not None:
        local = functools.partial(as_even_block, final[0].block_shape)
        if not final[0].even:
            local = functools.partial(as_block, final[0], question.viewed is None)
    elif False in [spec.even for spec in (*final, *best.operands)]:
        if first.mesh.transport == "simulation":
            local = functools.partial(rank_by_rank, local, not writes_blocks)
        elif not writes_blocks and question.viewed is None:
            local = functools.partial(call_with_empty_blocks, local)
    if question.loose and row.blocks is None:
        local = functools.partial(packed_if_need_be, local)
    if question.may_alias:
        return functools.partial(in_own_memory, local)
    if question.loose and copies is None:
        return functools.partial(view_or_copy, local, shown(func), _merged(question))
    return local


def _merged(question: Question) -> tuple[tuple[int, int], ...]:
    """Return the pairs of dims that a call merges and whose strides torch may find mergeable on some ranks only.

    For torch the stride of a dim of size 0 or 1 is arbitrary.
    """
    spec, result = question.operands[0], question.results[0]
    if spec.even or 0 in spec.shape:
        return ()
    runs = [[*range(spec.ndim)]]
    if question.row.rule is reshaped:
        runs = [source for source, _ in groups(spec.shape, result.shape)]
    large = [[d for d in run if spec.shape[d] > 1] for run in runs]
    return tuple([pair for run in large for pair in itertools.pairwise(run)])


def opaque_plan(run: Callable[[tuple[Any, ...], dict[str, Any]], Any], *, in_parts: bool = False) -> OpPlan:
    """Return the plan of a call that ``run`` does; ``in_parts``: it only calls other functions."""
    return OpPlan((), True, (), (), _never, whole=run, in_parts=in_parts)


def _never(*_: Any) -> NoReturn:
    raise NotImplementedError


_grad_enabled = torch.is_grad_enabled


def move_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Move operands; return the slices of operands with a gradient, whose uses share one gather in backward."""
    slices: list[Tensor] = []
    for place, legs in plan.moves:
        x = at(blocks, place)
        for leg in legs:
            x = along(x, leg, slices, plan.copies != place)
        _set(blocks, place, x)
    return slices


def cast_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Cast operands that will have a gradient; return the casts that the autograd graph must keep alive."""
    kept: list[Tensor] = []
    follows = transforms_active()
    if not (follows or _grad_enabled()):
        return kept
    for place, casts in plan.casts:
        x = blocks[place] if type(place) is int else at(blocks, place)
        if follows or x.requires_grad:
            is_held = holds_casts(x)
            for cast in casts:
                x = cast_once(x, cast)
            if type(place) is int:
                blocks[place] = x
            else:
                _set(blocks, place, x)
            if not (is_held and len(casts) == 1):
                kept.append(x)
    return kept


def _set(blocks: list[Any], place: Place, x: Tensor) -> None:
    if isinstance(place, tuple):
        blocks[place[0]] = [*blocks[place[0]]]  # it may be the caller's own list
        blocks[place[0]][place[1]] = x
    else:
        blocks[place] = x
