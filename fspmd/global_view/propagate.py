"""From the layouts of a call's operands to a plan: what moves, what runs on the blocks, how the result lies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.forms import Strided, Strides, form_of, packed
from fspmd.global_view.call_keys import keyed
from fspmd.global_view.flat_dims import ViewedCall, viewed_call
from fspmd.global_view.local_calls import (
    as_block,
    as_even_block,
    in_own_memory,
    of_first,
    packed_if_need_be,
    rank_by_rank,
    set_in,
    untouched,
    view_or_copy,
)
from fspmd.global_view.refusals import check_dtypes, refuse_global, shown
from fspmd.global_view.result_types import (
    Kind,
    Lying,
    Outcome,
    Shape,
    by_factors,
    dtype_complaint,
    kernel_complaint,
    lies_as_new,
    lies_known,
    like_first,
    on_meta,
    on_one_element,
    views_any,
)
from fspmd.global_view.sharded_bodies import as_local_call
from fspmd.global_view.strategies import Strategy, as_they_lie, best_strategy
from fspmd.local_view.empty_blocks import call_with_empty_blocks
from fspmd.local_view.hooks import completing
from fspmd.ops.linearity import stay_sums
from fspmd.ops.signatures import Place, argument_of, at, by_signature, in_order, may_view, stand_in_order
from fspmd.pairs import Call
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import Leg
from fspmd.redistribution.moves import casts as casts_of
from fspmd.redistribution.moves import moves as moves_of
from fspmd.rules import Factors, Row, Site, Whole, is_registered, row_of, without_write, writes
from fspmd.rules.elementwise import elementwise
from fspmd.rules.views import groups, reshaped
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, is_float

T = TypeVar("T")
Calls = tuple[tuple[Place, tuple[Call, ...]], ...]


@dataclass(slots=True)
class OpPlan:
    """One call, decided, and never changed. ``needs_redistribute`` is False where the operands lie right."""

    results: TensorSpec | tuple[TensorSpec, ...]
    needs_redistribute: bool
    moves: tuple[tuple[Place, tuple[Leg, ...]], ...]
    casts: Calls  # of operands that will have a gradient; forward they move nothing
    local: Callable[..., Any]
    in_order: bool = False  # keywords, if any, stand in the order of the parameters of ``local``
    by_name: bool = False  # operands are given by keyword
    writes: bool = False  # into the first operand, which is the result
    copies: Place | None = None  # an operand of which torch gives views, and this copies
    name: str = ""  # as messages name what writes or copies
    whole: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None  # does all of it, given Sharded operands
    in_parts: bool = False  # by calls of other functions alone
    choose: Callable[[list[Any]], OpPlan] | None = None  # which plan, of blocks some of which will have a gradient
    lying: Sequence[Lying] | None = None  # how torch would keep the results; None: as new tensors
    at_once: bool = field(init=False)  # nothing is moved, cast, written or copied
    single: bool = field(init=False)  # the result is a tensor, not a tuple of them, and begins where the plan says
    form: Any = field(init=False)  # of a single result, and where in memory it lies
    strides: Strides | None = field(init=False)
    start: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.at_once = not (self.needs_redistribute or self.casts or self.writes or self.copies is not None)
        self.single = type(self.results) is not tuple
        self.form, self.strides, self.start = self.results, None, None
        if self.lying is not None and isinstance(self.results, TensorSpec):
            (strides, start), base = self.lying[0]
            self.single = base is None
            self.form = form_of(self.results, strides, None if start is None else start > 0)
            self.strides = strides or packed(self.results.shape)
            self.start = start or None  # which torch takes quicker than 0


class Question(NamedTuple):
    """What is known of a call before a strategy is chosen: operands in order, results, and what its rule says."""

    row: Row
    operands: Sequence[tuple[Place, TensorSpec]]
    results: list[TensorSpec]  # not laid out yet: any layout of them
    kind: Kind | None  # in what they are; None for a single one
    factors: Factors
    linear: str
    fixed: bool  # the call writes into its first operand
    viewed: Place | None  # the operand of which it gives views
    names: tuple[str, ...]  # of the keyword arguments
    products: ViewedCall | None  # the call on views, of which strategies are found, where dims are `Flat`
    plain: frozenset[int] = frozenset()  # operands that are no `Sharded`
    lying: Sequence[Lying] | None = None  # how torch would keep the results; None: as new tensors
    may_alias: bool = False  # blocks may be viewed where torch copies
    loose: bool = False  # it gives views of some blocks, and copies of those that lie otherwise in memory
    gradients: frozenset[int] = frozenset()  # operands that will have one

    @property
    def weighs(self) -> bool:
        """Whether sums of gradients of whole operands count: no batch is sharded, but at most what is added to it."""
        added = self.factors.added
        return self.row.weighs or (
            bool(added) and all(i in added or not any(spec.partition) for i, (_, spec) in enumerate(self.operands))
        )

    @property
    def passes_on(self) -> str:
        """What the call is linear in, as far as it passes on pending sums.

        Parts that are handed out all at once would each end one of their own, so what they are parts of ends first.
        Where autograd follows them: it lets nobody write into one of several views, which are copies then.
        """
        return "" if self.gradients and self.viewed is not None and len(self.results) > 1 else self.linear

    def at(self, specs: Sequence[TensorSpec]) -> Question:
        """The same of other layouts of the operands."""
        operands = [(place, spec) for (place, _), spec in zip(self.operands, specs, strict=True)]
        return self._replace(operands=operands, products=viewed_call(self.row, self.factors, specs, self.results))

    def solve(self, choose: Callable[..., T], **options: Any) -> T:
        """The strategy, or strategies, that ``choose`` takes; where dims are `Flat` of views."""
        factors, specs, results = self._viewed()
        options |= {"fixed": self.fixed, "empty": self.row.empty, "body": self.row.body, "gradients": self.gradients}
        options["weighs"] = self.weighs
        return choose(factors, self.passes_on, specs, results, topology(), **options)

    def _viewed(self) -> tuple[Factors, list[TensorSpec], list[TensorSpec]]:
        """Factors, operands and results; where dims are `Flat` of views."""
        if self.products is None:
            return self.factors, [spec for _, spec in self.operands], self.results
        return self.products.factors, *self.products.views

    def together(self, strategy: Strategy) -> Strategy:
        """A strategy that was found for views, of the operands and results themselves."""
        if self.products is None:
            return strategy
        operands, results = self.products.together(strategy.operands, strategy.results)
        return strategy._replace(operands=operands, results=results)

    def best(self, known: list[Any] | None = None) -> Strategy | None:
        """The cheapest strategy; ``known``: as `best_strategy` has it."""
        if self.products is not None and self.products.regrouped is not None:
            stays = tuple(spec for _, spec in self.operands)
            return Strategy(stays, ((),), (self.products.regrouped,), (0.0, 0.0), False, {}, 0.0)
        best = None
        if not self.gradients:
            best = as_they_lie(*self._viewed(), fixed=self.fixed, empty=self.row.empty)
        if best is None:
            best = self.solve(best_strategy, known=known)
        found = None if best is None else self.together(best)
        moved = found is not None and self.fixed and found.operands[0] is not self.operands[0][1]
        return None if moved else found  # a write into what was moved would be lost


def ask(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Question | None:
    """The question that a call poses; None: there is no rule for it.

    Raises:
        ArgumentError: the call fails on the global tensors.
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
    outcome, told = _outcome(row, func, args, kwargs, ordered, values)
    check_dtypes(func, specs)
    if outcome is None:
        return None
    after = [shape for shape, _ in outcome.results]
    results = [_undecided_spec(shape, dtype, specs[0]) for shape, dtype in outcome.results]
    try:
        factors = row.rule(Whole(shapes, plain, kwargs, after)) if told is None else told
    except (IndexError, TypeError) as error:  # no such dim, or no dim
        refuse_global(func, specs, error)
    fixed = writes(func)
    if not fixed and row.rule is not elementwise and outcome.bases[0] is None and specs[0].mesh.device_type == "cpu":
        complaint = dtype_complaint(func, args, kwargs, ordered, factors.whole)
        if complaint is not None:
            refuse_global(func, specs, complaint)
    if fixed:
        _refuse_expanded(func, values[0])
    cuts = factors.whole or factors.summed  # but not x[:, 0:], nor x.split(8) of 8 rows
    as_is = outcome.same and not fixed and row.as_is and all(map(lies_known, values))
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
    if told is None and not _fits(factors, shapes, after, free, resized=row.blocks is not None):
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
        lying=outcome.lying,
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
    """What a call gives, told in the quickest way there is; and the factors of the rule, where they have told it.

    Raises:
        ArgumentError: the call fails on the global tensors.
    """
    specs, written = [spec for _, spec in ordered], writes(func)
    if all(map(lies_as_new, values)) and kwargs.get("memory_format") is None:
        if row.kept and (found := like_first(args, kwargs, specs)) is not None:
            return found, None
        if row.sized and not (row.kept or written):
            plain = [None if isinstance(arg, Tensor) else arg for arg in args]
            told = by_factors(row.rule, Whole([spec.shape for spec in specs], plain, kwargs, [()]), specs)
            if told is not None:
                return told
        if row.rule is elementwise and not written:
            found = on_one_element(func, args, kwargs, ordered)
            if found is not None:
                return found, None
    try:
        found = on_meta(func, args, kwargs, ordered)
    except Exception as error:
        refuse_global(func, specs, error)
    if row.rule is elementwise and specs[0].mesh.device_type == "cpu":
        complaint = kernel_complaint(func, args, kwargs, ordered)
        if complaint is not None:
            refuse_global(func, specs, complaint)
    return found, None


def _refuse_expanded(func: Any, x: Any) -> None:
    """Torch's kernels refuse to write into such memory, on ranks alone that have a block with elements."""
    strides = x.form.strides if isinstance(x, Sharded) and isinstance(x.form, Strided) else None
    if strides is None or not x.numel():
        return
    if any(n > 1 and not stride for n, stride in zip(x.shape, strides, strict=True)):
        raise ArgumentError(
            f"{shown(func)} writes into {x!r}, of which several elements are one in memory, as expand() makes them; "
            "write into what was expanded, or into a clone()"
        )


def _undecided_spec(shape: Shape, dtype: torch.dtype, like: TensorSpec) -> TensorSpec:
    """A result that is not laid out yet: of some layout, which does not count."""
    if (shape, dtype) == (like.shape, like.dtype):
        return like
    return TensorSpec(like.mesh, P(*(None,) * len(shape)), shape, dtype)


def plan_of(
    func: Any, positional: int, question: Question, best: Strategy, lie: Sequence[TensorSpec] | None = None
) -> OpPlan:
    """What a strategy comes to; so many arguments of the call are positional.

    ``lie``: where blocks were moved before, from which they go on.
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
        lying=question.lying,
    )


def _moves(
    question: Question, best: Strategy, lie: Sequence[TensorSpec] | None
) -> tuple[tuple[tuple[Place, tuple[Leg, ...]], ...], Calls]:
    """How operands get to where a strategy has them, and the casts of those that will have a gradient."""
    operands = question.operands
    moves: list[tuple[Place, tuple[Leg, ...]]] = []
    casts: list[tuple[Place, tuple[Call, ...]]] = []
    moving = [*map(id, best.operands)] != [id(spec) for _, spec in operands]  # then gradients tell which plan it is
    for i, ((place, spec), need, wanted) in enumerate(zip(operands, best.operands, best.casts, strict=True)):
        axes = wanted if i in question.gradients or not moving else ()
        if spec is need and not axes:
            continue
        start, followed, legs = spec, i in question.gradients, list[Leg]()
        if lie is not None and lie[i] is not spec is not need:
            start = lie[i]
            legs.append(moves_of(spec, start, (), topology(), followed).leg)  # of a pending sum: it is no plain tensor
        way = moves_of(start, need, axes, topology(), followed) if start is not need else None
        if way is not None:
            legs.append(way.leg._replace(own=i not in question.plain))
        if legs:
            moves.append((place, tuple(legs)))
        if cast := casts_of(need, axes) if way is None else way.casts:
            casts.append((place, cast))
    return tuple(moves), tuple(casts)


def _body(func: Any, question: Question, best: Strategy, final: tuple[TensorSpec, ...]) -> Callable[..., Any]:
    """The sharded body of a row, as what runs on blocks."""
    assert question.row.body is not None  # as the strategy has it
    names = question.factors.names
    named = {name: best.axes[factor] for name, factor in names.items() if factor in best.axes}
    site = Site(named or best.axes, best.operands, final)
    places = [(place, need) for (place, _), need in zip(question.operands, best.operands, strict=True)]
    return as_local_call(question.row.body, shown(func), site, places, final, linear=bool(question.linear))


def _local_run(
    func: Any, question: Question, best: Strategy, final: tuple[TensorSpec, ...], copies: Place | None
) -> Callable[..., Any]:
    """What runs on blocks that lie as a strategy has them; ``copies``: of an operand that was moved for that."""
    row, first = question.row, question.operands[0][1]
    writes_blocks = bool(writes(func)) and not row.sets
    local: Callable[..., Any] = functools.partial(completing, func) if is_registered(func) else func
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
    """Pairs of dims of an operand that a call makes one, where torch may find them adjacent on some ranks alone.

    For torch a dim of one element, or none, has any stride.
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
    """The plan of a call that is more than one local call; ``in_parts``: calls of other functions alone."""
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
    """What a call is linear in, whatever the numbers are that are in no key; what is made wider is added up before."""
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
    """Whether a float dtype becomes another one that lacks some of its numbers."""
    if not (is_float(before) and is_float(after)):
        return False
    old, new = torch.finfo(before), torch.finfo(after)
    return new.eps > old.eps or new.max < old.max


def _fits(factors: Factors, before: list[Shape], after: list[Shape], free: frozenset[int], *, resized: bool) -> bool:
    """Whether each factor has one size wherever it stands: a rule that is wrong for a call is not used.

    ``free``: factors of which that is not so. ``resized``: a dim of the result may be another size, of which the
    strategy sees that the blocks are the same.
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
