"""From a call to its `Question`, and from a strategy to an `OpPlan`: moves, local call, layouts of results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from fspmd.forms import Form, Laid, form_of, packed
from fspmd.global_view.call_keys import keyed
from fspmd.global_view.flat_dims import ViewedCall, viewed_call
from fspmd.global_view.kernels import dtype_complaint, kernel_complaint
from fspmd.global_view.local_calls import (
    as_block,
    as_even_block,
    as_local_call,
    in_own_memory,
    of_first,
    packed_if_need_be,
    rank_by_rank,
    set_in,
    untouched,
    view_or_copy,
)
from fspmd.global_view.refusals import check_dtypes, refuse_global, refuse_shared_memory, shown
from fspmd.global_view.result_types import (
    Kind,
    Outcome,
    ResultMemory,
    Shape,
    by_factors,
    lies_as_new,
    like_first,
    on_meta,
    on_one_element,
    strides_known,
    views_any,
)
from fspmd.global_view.strategies import Strategy, as_they_lie, best_strategy
from fspmd.local_view.empty_blocks import call_with_empty_blocks
from fspmd.local_view.hooks import completing
from fspmd.ops.linearity import stay_sums
from fspmd.ops.operators import SOONER
from fspmd.ops.signatures import Place, argument_of, at, by_signature, in_order, may_view, stand_in_order
from fspmd.pairs import Call
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg
from fspmd.redistribution.moves import casts as casts_of
from fspmd.redistribution.moves import moves as moves_of
from fspmd.rules import Factors, Row, Site, Whole, is_registered, row_of, without_write, writes
from fspmd.rules.factors import elementwise
from fspmd.rules.views import groups, reshaped
from fspmd.sharded import Sharded, shell_of
from fspmd.spec import P, TensorSpec, is_float

T = TypeVar("T")
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
        if isinstance(self.results, tuple) and all(base is None for _, base in self.memory or ()):
            memory = self.memory or [ResultMemory(Laid(packed(spec.shape))) for spec in self.results]
            pairs = zip(self.results, memory, strict=True)
            self.parts = tuple((form_of(spec, laid), laid) for spec, (laid, _) in pairs)


class Question(NamedTuple):
    """A call before a strategy is chosen: its operands in the order of the rule, its results, its factors."""

    row: Row
    operands: Sequence[tuple[Place, TensorSpec]]
    results: list[TensorSpec]  # their layouts are arbitrary as yet
    kind: Kind | None  # the container of the results; None for a single result
    factors: Factors
    linear: str
    fixed: bool  # the call writes into its first operand
    viewed: Place | None  # the operand that the results view
    names: tuple[str, ...]  # of the keyword arguments
    products: ViewedCall | None  # where dims are `Flat`: the call on views, for which strategies are found
    plain: frozenset[int] = frozenset()  # operands that are plain tensors
    memory: Sequence[ResultMemory] | None = None  # the memory of the results in torch; None: as of new tensors
    may_alias: bool = False  # a block may be viewed where torch copies the global tensor
    loose: bool = False  # gives a view of a block, or a copy if its strides allow no view
    gradients: frozenset[int] = frozenset()  # operands that will have a gradient

    @property
    def weighs(self) -> bool:
        """Whether sums of gradients of whole operands count: they do if only added operands (a bias) are sharded."""
        added = self.factors.added
        return self.row.weighs or (
            bool(added) and all(i in added or not any(spec.partition) for i, (_, spec) in enumerate(self.operands))
        )

    @property
    def passes_on(self) -> str:
        """The operands whose pending sums the call passes on (see ``Row.linear``).

        If a call gives several views and autograd follows them, it passes on none. Each view would settle a sum of its
        own, so the operand is settled first. The views are then copies, but autograd forbids writes into them anyway.
        """
        return "" if self.gradients and self.viewed is not None and len(self.results) > 1 else self.linear

    def at(self, specs: Sequence[TensorSpec]) -> Question:
        """Return the question for other layouts of the operands."""
        operands = [(place, spec) for (place, _), spec in zip(self.operands, specs, strict=True)]
        return self._replace(operands=operands, products=viewed_call(self.row, self.factors, specs, self.results))

    def solve(self, choose: Callable[..., T], **options: Any) -> T:
        """Call ``choose`` with factors, specs and options of this call; where dims are `Flat`, with those of views."""
        factors, specs, results = self._viewed()
        options |= {"fixed": self.fixed, "empty": self.row.empty, "body": self.row.body, "gradients": self.gradients}
        options["weighs"] = self.weighs
        return choose(factors, self.passes_on, specs, results, topology(), **options)

    def _viewed(self) -> tuple[Factors, list[TensorSpec], list[TensorSpec]]:
        """Return factors, operands and results; where dims are `Flat`, those of views."""
        if self.products is None:
            return self.factors, [spec for _, spec in self.operands], self.results
        return self.products.factors, *self.products.views

    def together(self, strategy: Strategy) -> Strategy:
        """Turn a strategy for views into one for the operands and results themselves."""
        if self.products is None:
            return strategy
        operands, results = self.products.together(strategy.operands, strategy.results)
        return strategy._replace(operands=operands, results=results)

    def best(self, known: list[Any] | None = None) -> Strategy | None:
        """Return the cheapest strategy, or None if there is none; ``known`` is that of `best_strategy`."""
        if self.products is not None and self.products.regrouped is not None:
            stays = tuple(spec for _, spec in self.operands)
            return Strategy(stays, ((),), (self.products.regrouped,), (0.0, 0.0), False, {}, 0.0)
        best = None
        if not self.gradients:
            best = as_they_lie(*self._viewed(), fixed=self.fixed, empty=self.row.empty)
        if best is None:
            best = self.solve(best_strategy, known=known)
        best = None if best is None else self.together(best)
        moved = best is not None and self.fixed and best.operands[0] is not self.operands[0][1]
        return None if moved else best  # a write into a moved operand would be lost


def ask(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Question | None:
    """Return the question of a call, or None if no rule decides it.

    Raises:
        ArgumentError: The call fails on the global tensors.
    """
    row = row_of(func)
    if row is None:
        return None
    if (ordered := by_signature(func, len(args), list(kwargs), operands)) is None:
        return None
    specs = [spec for _, spec in ordered]
    shapes = [spec.shape for spec in specs]
    plain = [None if isinstance(arg, Tensor) else arg for arg in args]
    given = [*args, *kwargs.values()]
    values = [at(given, place) for place, _ in ordered]
    outcome, known_factors = _outcome(row, func, args, kwargs, ordered, values)
    check_dtypes(func, specs)
    if outcome is None:
        return None
    after = [shape for shape, _ in outcome.results]
    results = [_undecided_spec(shape, dtype, specs[0]) for shape, dtype in outcome.results]
    try:
        factors = row.rule(Whole(shapes, plain, kwargs, after)) if known_factors is None else known_factors
    except (IndexError, TypeError) as error:  # a dim that is out of range, or is not an int
        refuse_global(func, specs, error)
    if fixed := writes(func):
        refuse_shared_memory(func, values[0], at_once=not row.sets)
    elif row.rule is not elementwise and outcome.bases[0] is None:
        complaint = dtype_complaint(func, args, kwargs, ordered)
        if complaint is not None:
            refuse_global(func, specs, complaint)
    # x[:, 0:], or x.split(8) of 8 rows, gives all of x: then no dim need be whole
    cuts = factors.whole or factors.summed
    as_is = outcome.same and not fixed and row.as_is and all(map(strides_known, values))
    if as_is or (outcome.same and not fixed and cuts):
        row = replace(
            row,
            rule=elementwise,
            linear="first",
            local=functools.partial(untouched, outcome.kind, len(results)),
            body=None,
            blocks=None,
        )
        factors = elementwise(Whole(shapes, plain, kwargs, after))
    free = factors.scaled if row.body is None else factors.scaled | factors.whole
    if known_factors is None and not _fits(factors, shapes, after, free, resized=row.blocks is not None):
        return None
    linear = _linearity(row, func, args, kwargs, specs, results[0])
    products = viewed_call(row, factors, specs, results)
    bare = frozenset([i for i, x in enumerate(values) if type(x) is not Sharded])
    viewed = None if fixed else outcome.bases[0]
    copies = outcome.bases[0] is None and not fixed and outcome.kind is None
    return Question(
        row=row,
        operands=ordered,
        results=results,
        kind=outcome.kind,
        factors=factors,
        linear=linear,
        fixed=fixed,
        viewed=viewed,
        names=tuple(kwargs),
        products=products,
        plain=bare,
        memory=outcome.memory,
        may_alias=copies and results[0].dtype is specs[0].dtype and may_view(func),
        loose=viewed is not None and not as_is and not views_any(func, args, kwargs, ordered),
    )


def _outcome(
    row: Row,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ordered: Sequence[tuple[Place, TensorSpec]],
    values: Sequence[Any],
) -> tuple[Outcome | None, Factors | None]:
    """Return the outcome of a call, found in the quickest way; and its factors, if the outcome follows from them.

    Raises:
        ArgumentError: The call fails on the global tensors.
    """
    specs, written = [spec for _, spec in ordered], writes(func)
    if all(map(lies_as_new, values)) and kwargs.get("memory_format") is None:
        if row.kept and (outcome := like_first(args, kwargs, specs)) is not None:
            return outcome, None
        if row.sized and not (row.kept or written):
            plain = [None if isinstance(arg, Tensor) else arg for arg in args]
            sized = by_factors(row.rule, Whole([spec.shape for spec in specs], plain, kwargs, [()]), specs)
            if sized is not None:
                return sized
        if row.rule is elementwise and not written:
            outcome = on_one_element(func, args, kwargs, ordered)
            if outcome is not None:
                return outcome, None
    try:
        outcome = on_meta(func, args, kwargs, ordered)
    except Exception as error:
        refuse_global(func, specs, error)
    if row.rule is elementwise and (complaint := kernel_complaint(func, args, kwargs, ordered)) is not None:
        refuse_global(func, specs, complaint)
    return outcome, None


def _undecided_spec(shape: Shape, dtype: torch.dtype, like: TensorSpec) -> TensorSpec:
    """Return a result with an arbitrary layout: it is not laid out yet."""
    if (shape, dtype) == (like.shape, like.dtype):
        return like
    return TensorSpec(like.mesh, P(*(None,) * len(shape)), shape, dtype)


def plan_of(
    func: Any, positional: int, question: Question, best: Strategy, lie: Sequence[TensorSpec] | None = None
) -> OpPlan:
    """Return the plan of a strategy.

    Args:
        positional: The number of positional arguments of the call.
        lie: The layouts to which blocks were moved before. Moves start there.
    """
    row, operands, results = question.row, question.operands, question.results
    written = bool(writes(func))
    final = tuple([spec.with_partition(lies) for spec, lies in zip(results, best.results, strict=True)])
    moves, casts = _moves(question, best, lie)
    copies = next((place for place, _ in moves if place == question.viewed), None)
    by_body = best.by_body and row.body is not None
    if by_body:
        casts, copies = (), question.viewed
        local = _body(func, question, best, final)
    else:
        local = _local_run(func, question, best, final, copies)
    if written and row.sets:
        local = functools.partial(set_in, local)
    return OpPlan(
        final[0] if question.kind is None else final,
        bool(moves),
        moves,
        casts,
        local,
        in_order=not question.names if by_body else stand_in_order(local, positional, question.names),
        by_name=bool(question.names) and any(argument_of(place) >= positional for place, _ in operands),
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
    moving = [*map(id, best.operands)] != [id(spec) for _, spec in operands]  # then gradients decide between plans
    for i, ((place, spec), need, cast_axes) in enumerate(zip(operands, best.operands, best.casts, strict=True)):
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


def _body(func: Any, question: Question, best: Strategy, final: tuple[TensorSpec, ...]) -> Callable[..., Any]:
    """Return the sharded body of a row as the local call of a plan."""
    assert question.row.body is not None  # the strategy uses it
    names = question.factors.names
    named = {name: best.axes[factor] for name, factor in names.items() if factor in best.axes}
    site = Site(named or best.axes, best.operands, final)
    places = [(place, need) for (place, _), need in zip(question.operands, best.operands, strict=True)]
    return as_local_call(question.row.body, shown(func), site, places, final, linear=bool(question.linear))


def _local_run(
    func: Any, question: Question, best: Strategy, final: tuple[TensorSpec, ...], copies: Place | None
) -> Callable[..., Any]:
    """Return the local call of a strategy without a body; ``copies`` is the operand that is copied, not viewed."""
    row, first = question.row, question.operands[0][1]
    writes_blocks = bool(writes(func)) and not row.sets
    local: Callable[..., Any] = functools.partial(completing, func) if is_registered(func) else SOONER.get(func, func)
    if writes(func) and row.sets:
        local = without_write(func)
    if row.local is not None:
        local = functools.partial(row.local, first.shape)
    elif row.blocks is not None:
        whole = functools.partial(row.blocks, question.factors, first.shape, question.results[0].shape)
        local = functools.partial(of_first, whole)
    if question.products is not None and question.products.regrouped is not None:
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
    (_, spec), result = question.operands[0], question.results[0]
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


def _linearity(
    row: Row,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: Sequence[TensorSpec],
    result: TensorSpec,
) -> str:
    """Return the linearity of a call, for all numbers that its key leaves out.

    A call that widens the dtype is not linear here: the sum is settled before, in the narrower dtype.
    """
    if isinstance(row.linear, str):
        linear = row.linear
    else:
        args = tuple([_some_number(func, arg, i) for i, arg in enumerate(args)])
        kwargs = {name: _some_number(func, arg, name) for name, arg in kwargs.items()}
        args, kwargs = in_order(func, args, kwargs)
        linear = row.linear(*args, **kwargs)
    first = specs[0]
    if not linear or all(spec.dtype is result.dtype for spec in specs):
        return linear
    widened = linear == "first" and result.shape == first.shape and result.dtype.itemsize > first.dtype.itemsize
    exact = not _narrows(first.dtype, result.dtype) and all(stay_sums(spec.dtype, result.dtype) for spec in specs)
    return linear if exact and not widened else ""


def _some_number(func: Any, arg: Any, place: int | str) -> Any:
    return nan if isinstance(arg, (int, float, complex)) and keyed(func, arg, place) is type(arg) else arg


def _narrows(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a float dtype becomes one that cannot represent some of its numbers."""
    if not (is_float(before) and is_float(after)):
        return False
    old, new = torch.finfo(before), torch.finfo(after)
    return new.eps > old.eps or new.max < old.max


def _fits(factors: Factors, before: list[Shape], after: list[Shape], free: frozenset[int], *, resized: bool) -> bool:
    """Whether each factor has one size in all dims. A rule that does not fit a call is not used.

    Args:
        free: Factors that may have several sizes.
        resized: Dims of the result may have other sizes; the strategy checks that their blocks are the same shares.
    """
    rows, shapes = (*factors.operands, *factors.results), (*before, *after)
    if [*map(len, rows)] != [*map(len, shapes)]:
        return False
    sizes: dict[int | None, int] = {}
    known = zip(factors.operands, before, strict=True) if resized else zip(rows, shapes, strict=True)
    for dims, shape in {*known}:
        if tuple(map(sizes.setdefault, dims, shape)) != shape and any(
            sizes[f] != size and f is not None and f not in free for f, size in zip(dims, shape, strict=True)
        ):
            return False
    return True
