"""From the layouts of a call's operands to a plan: what moves, what runs on the blocks, how the result lies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fspmd.copies import as_copies, handed_on, is_packed
from fspmd.entries import blocks
from fspmd.errors import ArgumentError, VarianceError
from fspmd.global_view.bodied import as_local_call
from fspmd.global_view.outcomes import Place, Shape, by_factors, like_first, on_meta, on_one_element
from fspmd.global_view.products import Products, products_of
from fspmd.global_view.strategies import Strategy, best_strategy
from fspmd.local_view.connected import connected
from fspmd.local_view.type_rules import tensors_of
from fspmd.local_view.uneven import call_uneven, numbers_frame
from fspmd.messages import quoted
from fspmd.op_kinds import name_of
from fspmd.operators import OPERATORS
from fspmd.pairs import Call
from fspmd.redistribution.cost import moves as kernel_moves
from fspmd.redistribution.cost import topology
from fspmd.redistribution.moves import casts as casts_of
from fspmd.redistribution.moves import moves as moves_of
from fspmd.rules import Factors, Row, Site, Whole, row_of, writes
from fspmd.rules.elementwise import elementwise
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_int import block_sizes

#: of whose operands the meta device does not ask that they have one dtype, as other devices do
_OF_ONE_DTYPE = frozenset(
    ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "linear", "convolution")
    + ("addmm", "addmv", "baddbmm", "addbmm")
)
T = TypeVar("T")
Calls = tuple[tuple[Place, tuple[Call, ...]], ...]


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One call, decided; immutable. ``needs_redistribute`` is False where the operands lie right."""

    results: TensorSpec | tuple[TensorSpec, ...]
    needs_redistribute: bool
    moves: Calls
    casts: Calls  # of operands that will have a gradient; forward they move nothing
    local: Callable[..., Any]
    in_order: bool = False  # keywords, if any, stand in the order of the parameters of ``local``
    by_name: bool = False  # operands are given by keyword
    writes: str = ""  # as messages name what writes into the first operand, which is the result
    copies: bool = False  # gives copies of the first operand, moved, where torch gives views
    whole: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None  # does all of it, given Sharded operands
    choose: Callable[[list[Any]], OpPlan] | None = None  # which plan, of blocks some of which will have a gradient
    at_once: bool = field(init=False)  # nothing is moved, cast or written

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_once", not (self.needs_redistribute or self.casts or self.writes))


@dataclass(frozen=True, slots=True)
class Question:
    """What is known of a call before a strategy is chosen: operands in order, results, and what its rule says."""

    row: Row
    operands: Sequence[tuple[Place, TensorSpec]]
    results: list[TensorSpec]  # not laid out yet: any layout of them
    single: bool  # the result is a tensor, not a tuple of them
    factors: Factors
    linear: str
    fixed: bool  # the call writes into its first operand
    views: bool  # of the first operand are what it gives
    names: tuple[str, ...]  # of the keyword arguments
    products: Products | None  # the call on views, of which strategies are found, where dims are `Flat`
    gradients: frozenset[int] = frozenset()  # operands that will have one

    @property
    def weighs(self) -> bool:
        """Whether sums of gradients of whole operands count: no batch is sharded, but at most what is added to it."""
        added = self.factors.added
        return self.row.weighs or (
            bool(added) and all(i in added or not any(spec.partition) for i, (_, spec) in enumerate(self.operands))
        )

    def at(self, specs: Sequence[TensorSpec]) -> Question:
        """The same of other layouts of the operands."""
        operands = [(place, spec) for (place, _), spec in zip(self.operands, specs, strict=True)]
        return replace(self, operands=operands, products=products_of(self.row, self.factors, specs, self.results))

    def solve(self, choose: Callable[..., T], **options: Any) -> T:
        """The strategy, or strategies, that ``choose`` takes; where dims are `Flat` of views."""
        factors, specs, results = self.factors, [spec for _, spec in self.operands], self.results
        if self.products is not None:
            factors, (specs, results) = self.products.factors, self.products.views
        options |= {"fixed": self.fixed, "empty": self.row.empty, "body": self.row.body, "gradients": self.gradients}
        options["weighs"] = self.weighs
        return choose(factors, self.linear, specs, results, topology(), **options)

    def together(self, strategy: Strategy) -> Strategy:
        """A strategy that was found for views, of the operands and results themselves."""
        if self.products is None:
            return strategy
        operands, results = self.products.together(strategy.operands, strategy.results)
        return replace(strategy, operands=operands, results=results)

    def best(self, known: list[Any] | None = None) -> Strategy | None:
        """The cheapest strategy; ``known``: as `best_strategy` has it."""
        if self.products is not None and self.products.regrouped is not None:
            stays = tuple(spec for _, spec in self.operands)
            return Strategy(stays, ((),), (self.products.regrouped,), (0.0, 0.0), False, {}, 0.0)
        best = self.solve(best_strategy, known=known)
        return None if best is None else self.together(best)


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
    if (ordered := _by_signature(func, len(args), list(kwargs), operands)) is None:
        return None
    specs = [spec for _, spec in ordered]
    shapes = [spec.shape for spec in specs]
    plain = [None if isinstance(a, (Sharded, Tensor)) else a for a in args]
    outcome = None
    if row.kept:
        outcome = like_first(args, kwargs, specs)
    elif row.sized and not writes(func):
        outcome = by_factors(row.rule, Whole(shapes, plain, kwargs, [()]), specs)
    if outcome is None and row.rule is elementwise and not writes(func):
        outcome = on_one_element(func, args, kwargs, ordered)
    if outcome is None:
        try:
            outcome = on_meta(func, args, kwargs, ordered)
        except Exception as error:
            _refuse_global(func, specs, error)
    if name_of(func).strip("_") in _OF_ONE_DTYPE and not torch._C._is_any_autocast_enabled():
        _check_dtypes(func, specs)
    if outcome is None:
        return None
    after = [shape for shape, _ in outcome.results]
    results = [_whole(shape, dtype, specs[0]) for shape, dtype in outcome.results]
    try:
        factors = row.rule(Whole(shapes, plain, kwargs, after))
    except IndexError as error:  # no such dim
        _refuse_global(func, specs, error)
    free = factors.scaled if row.body is None else factors.scaled | factors.whole
    if not _fits(factors, shapes, after, free, resized=row.blocks is not None):
        return None
    linear = _linearity(row, args, kwargs, specs[0], results[0])
    products = products_of(row, factors, specs, results)
    return Question(
        row, ordered, results, outcome.single, factors, linear, writes(func), outcome.views, tuple(kwargs), products
    )


def _whole(shape: Shape, dtype: torch.dtype, like: TensorSpec) -> TensorSpec:
    """A result that is not laid out yet: of some layout, which does not count."""
    if (shape, dtype) == (like.shape, like.dtype):
        return like
    return TensorSpec(like.mesh, P(*(None,) * len(shape)), shape, dtype)


def propagate(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> OpPlan | None:
    """Plan a call; ``operands`` are the places of its tensors, and their layouts. None: there is no rule for it.

    Raises:
        ArgumentError: the call fails on the global tensors.
    """
    question = ask(func, args, kwargs, operands)
    if question is None:
        return None
    known: list[Any] = []
    best = question.best(known)
    if best is None:
        _refuse_write(func, [spec for _, spec in question.operands])
    plan = _plan(func, len(args), question, best)
    empty = any(0 in spec.shape for _, spec in question.operands)
    if not (plan.needs_redistribute or best.by_body or empty or (question.weighs and plan.casts)):
        return plan
    floating = frozenset(i for i, (_, spec) in enumerate(question.operands) if _is_float(spec.dtype))
    if not floating:
        return plan
    if _same(best, replace(question, gradients=floating).best(known)):
        return plan
    return replace(plan, needs_redistribute=True, choose=_ByGradients(func, len(args), question, plan).plan)


def _same(one: Strategy, other: Strategy | None) -> bool:
    return other is not None and (one.operands, one.results, one.by_body) == (
        other.operands,
        other.results,
        other.by_body,
    )


class _ByGradients:
    """The plans of a call of which the cheapest way depends on which operands will have a gradient."""

    def __init__(self, func: Any, positional: int, question: Question, plan: OpPlan) -> None:
        self.func, self.positional, self.question = func, positional, question
        self.plans = {frozenset[int](): plan}

    def plan(self, blocks: list[Any]) -> OpPlan:
        """Of a call on these blocks."""
        transformed = torch._C._are_functorch_transforms_active()
        followed = frozenset(
            i
            for i, (place, spec) in enumerate(self.question.operands)
            if _is_float(spec.dtype) and (transformed or (torch.is_grad_enabled() and _at(blocks, place).requires_grad))
        )
        plan = self.plans.get(followed)
        if plan is None:
            question = replace(self.question, gradients=followed)
            best = question.best()
            if best is None:
                _refuse_write(self.func, [spec for _, spec in question.operands])
            plan = self.plans[followed] = _plan(self.func, self.positional, question, best)
        return plan


def _at(blocks: list[Any], place: Place) -> Any:
    return blocks[place[0]][place[1]] if isinstance(place, tuple) else blocks[place]


def _plan(func: Any, positional: int, question: Question, best: Strategy) -> OpPlan:
    """What a strategy comes to; so many arguments of the call are positional."""
    row, operands, results, factors = question.row, question.operands, question.results, question.factors
    by_name = any((place[0] if isinstance(place, tuple) else place) >= positional for place, _ in operands)
    specs, mesh, written = [spec for _, spec in operands], results[0].mesh, writes(func)
    final = tuple(spec.with_partition(partition) for spec, partition in zip(results, best.results, strict=True))
    moves: list[tuple[Place, tuple[Call, ...]]] = []
    casts: list[tuple[Place, tuple[Call, ...]]] = []
    for (place, spec), need, axes in zip(operands, best.operands, best.casts, strict=True):
        way = moves_of(spec, need, axes, topology()) if spec is not need else None
        if way is not None:
            moves.append((place, way.calls))
        if cast := casts_of(need, axes) if way is None else way.casts:
            casts.append((place, cast))
    result = final[0] if question.single else final
    if best.by_body and row.body is not None:
        named = {name: best.axes[factor] for name, factor in factors.names.items() if factor in best.axes}
        site = Site(named or best.axes, best.operands, final)
        places = [(place, need) for (place, _), need in zip(operands, best.operands, strict=True)]
        body = as_local_call(row.body.body, shown(func), site, places, final)
        if question.views:
            body = functools.partial(_copying, body, shown(func), False)
        return OpPlan(result, bool(moves), tuple(moves), (), body, not question.names, by_name, copies=question.views)
    local: Callable[..., Any] = func
    if row.local is not None:
        local = functools.partial(row.local, specs[0].shape)
    elif row.blocks is not None:
        whole = functools.partial(row.blocks, factors, specs[0].shape, results[0].shape)
        local = functools.partial(_of_first, whole)
    if question.products is not None and question.products.regrouped is not None:
        thin = question.views and _has_thin_blocks(specs[0].unflattened)
        flat = question.views and (specs[0].flat or final[0].flat)
        local = functools.partial(_as_even_block, final[0].block_shape)
        if not final[0].even:
            local = functools.partial(_as_block, final[0], question.views)
        if flat or thin:
            local = functools.partial(_view_or_copy, local, shown(func), thin)
    elif not all(spec.even for spec in (*final, *best.operands)):
        if mesh.transport == "simulation":
            local = functools.partial(_rank_by_rank, local, not written, question.views)
        elif not written and not question.views:
            local = functools.partial(connected, local)
    if copies := not written and question.views and bool(moves):
        taken = [step for _, found in moves for step in found]
        own = any(kernel_moves(step.pair.kernel) and prod(mesh.shape[a] for a in step.axes) > 1 for step in taken)
        local = functools.partial(_copying, local, shown(func), own)
    in_order = _in_order(local, positional, question.names)
    name = shown(func) if written else ""
    return OpPlan(result, bool(moves), tuple(moves), tuple(casts), local, in_order, by_name, name, copies)


def _in_order(local: Any, positional: int, names: tuple[str, ...]) -> bool:
    """Whether keyword arguments can be given as positional ones, which is quicker: no overload has them elsewhere."""
    if not names:
        return True
    end, agree = positional + len(names), False
    for before, after in _parameters_of(local):
        if len(before) >= end or not {*names}.isdisjoint((*before, *after)):
            if before[positional:end] != names:
                return False
            agree = True
    return agree


@functools.cache
def _parameters_of(func: Any) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names of the parameters that may be positional, and of the others, of each overload that is known."""
    if isinstance(func, FunctionType):
        code = func.__code__
        every = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return [(every[: code.co_argcount], every[code.co_argcount :])]
    if not isinstance(func, (BuiltinFunctionType, MethodDescriptorType)):
        return []
    found = [[(one.name, one.kwarg_only) for one in schema.arguments] for schema in schemas(func)]
    return [(tuple(x for x, only in one if not only), tuple(x for x, only in one if only)) for one in found]


def schemas(func: Any) -> list[Any]:
    """Of the overloads of torch's own functions in C."""
    packet = getattr(torch.ops.aten, name_of(func), None)
    return [getattr(packet, name)._schema for name in packet.overloads()] if packet is not None else []


def _copying(local: Callable[..., Any], name: str, own: bool, *args: Any, **kwargs: Any) -> Any:
    return as_copies(local(*args, **kwargs), tensors_of((*args, *kwargs.values())), name, own)


def as_whole(run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> OpPlan:
    """The plan of a call that is more than one local call."""
    return OpPlan((), True, (), (), _never, whole=run)


def _never(*_: Any) -> NoReturn:
    raise NotImplementedError


def _as_even_block(sizes: Shape, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The same elements as a block of a layout whose blocks are all of one shape."""
    return x.reshape(sizes)


def _view_or_copy(local: Callable[..., Tensor], name: str, thin: bool, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A block that is part of each row may not be one that can be viewed, where the whole tensor could be.

    Nor may the whole tensor, where its ``thin`` blocks can, and those of some ranks may be thinner: such are copies on
    all ranks, unless they lie in memory as new ones do.
    """
    out = local(x)
    if out is x or (is_packed(x) if thin else out._is_view()):
        return out
    copy: Tensor = as_copies(out, (x,), name, False)
    return copy


def _has_thin_blocks(spec: TensorSpec) -> bool:
    """Whether some rank has one element of a dim that is sharded, or none; strides do not matter there."""
    return any(min(length for _, length in blocks(spec.shape[dim], parts)) < 2 for dim, _, parts in spec.cuts)


def _as_block(spec: TensorSpec, views: bool, x: Tensor, *_: Any, **__: Any) -> Any:
    """The same elements as a block of a layout."""
    sizes = block_sizes(spec)
    held = numbers_frame(sizes)
    out = call_uneven(torch.reshape, (x, sizes), {}, held, pure=not views)
    return handed_on(out, x) if views else out


def _of_first(local: Callable[[Tensor], Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return local(x)


def _by_signature(
    func: Any, positional: int, names: list[str], operands: Sequence[tuple[Place, TensorSpec]]
) -> Sequence[tuple[Place, TensorSpec]] | None:
    """The operands in the order of the parameters, however they were named; None where that is not known."""

    def place_of(operand: tuple[Place, TensorSpec]) -> int:
        place = operand[0]
        return place[0] if isinstance(place, tuple) else place

    named = [operand for operand in operands if place_of(operand) >= positional]
    if len(named) < 2:
        return operands
    order = parameters(func)
    if not all(names[place_of(operand) - positional] in order for operand in named):
        return None
    named.sort(key=lambda operand: order.index(names[place_of(operand) - positional]))
    return [*(operand for operand in operands if place_of(operand) < positional), *named]


@functools.cache
def parameters(func: Any) -> list[str]:
    """The names of a function's parameters; torch's own in C are known by their schemas."""
    if isinstance(func, torch._ops.OpOverload):
        return [argument.name for argument in func._schema.arguments]
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return list(dict.fromkeys(argument.name for schema in schemas(func) for argument in schema.arguments))


def _linearity(row: Row, args: tuple[Any, ...], kwargs: dict[str, Any], first: TensorSpec, result: TensorSpec) -> str:
    """A number would be added once per rank, and rounding is not linear."""
    if kwargs.get("rounding_mode") is not None:
        return ""
    if row.linear == "sum" and row.free and any(isinstance(a, (int, float, complex)) for a in args[:2]):
        return ""
    return "" if _is_float(first.dtype) and not _is_float(result.dtype) else row.linear


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _fits(factors: Factors, before: list[Shape], after: list[Shape], free: frozenset[int], *, resized: bool) -> bool:
    """Whether each factor has one size wherever it stands: a rule that is wrong for a call is not used.

    ``free``: factors of which that is not so. ``resized``: a dim of the result may be another size, of which the
    strategy sees that the blocks are the same.
    """
    rows = (*factors.operands, *factors.results)
    if [*map(len, rows)] != [*map(len, (*before, *after))]:
        return False
    sizes: dict[int, int] = {}
    known = zip(factors.operands, before, strict=True) if resized else zip(rows, (*before, *after), strict=True)
    pairs = [pair for dims, shape in known for pair in zip(dims, shape, strict=True)]
    return all(factor is None or factor in free or sizes.setdefault(factor, size) == size for factor, size in pairs)


def _refuse_write(func: Any, specs: Sequence[TensorSpec]) -> NoReturn:
    name, first = shown(func), specs[0]
    new = f"x = x.{name.removesuffix('()').removesuffix('_')}(...)"
    if first.partition.unreduced:
        raise VarianceError(
            f"{name} would change how its operand lies: it writes into Sharded {first!r}, a sum pending over "
            f"{quoted(sorted(first.partition.unreduced))} that would end; write {new}, or end it first: x = reshard(x, "
            f"{P(*first.partition)!r})"
        )
    raise VarianceError(
        f"{name} would change how its operand lies: it writes into Sharded {first!r} what it computes with "
        f"{', '.join(map(repr, specs[1:])) or 'a number'}; write {new}, or move the operands first"
    )


def _rank_by_rank(func: Any, pure: bool, views: bool, *args: Any, **kwargs: Any) -> Any:
    """What torch does in backward often needs the sizes of an uneven block as plain numbers."""
    out = call_uneven(func, args, kwargs, None, pure=pure)
    return handed_on(out, args[0]) if views else out


def shown(func: Any) -> str:
    """The call as a message names it."""
    name = name_of(func)
    if name.startswith("__"):
        return OPERATORS.get(name.strip("_"), (f"{name}()",))[0]
    return f".{name.removeprefix('get ')}" if name.startswith("get ") else f"{name}()"


def _refuse_global(func: Any, specs: Sequence[TensorSpec], error: Exception) -> NoReturn:
    given = ", ".join(repr(spec).partition(" on ")[0] for spec in specs)
    raise ArgumentError(f"{shown(func)} of {given} fails on the global tensors: {error}") from error


def _check_dtypes(func: Any, specs: Sequence[TensorSpec]) -> None:
    if any(spec.dtype is not specs[0].dtype for spec in specs):
        widest = functools.reduce(torch.promote_types, (spec.dtype for spec in specs))
        given = ", ".join(repr(spec).partition(" on ")[0] for spec in specs)
        raise ArgumentError(
            f"{shown(func)} of {given} takes operands of one dtype; write x.to({widest}), or use torch.autocast"
        )


class NoRuleError(ArgumentError):
    """A function that is not known to act on global tensors."""


def refuse_rule(func: Any, specs: Sequence[TensorSpec], part: NoRuleError | None = None) -> NoReturn:
    """Raise `NoRuleError`; ``part``: of what the function is made of."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    why = f": it is made of {str(part).split(' ')[0]}, which has none" if part is not None else ""
    raise NoRuleError(
        f"{shown(func)} has no rule for {given}{why}; write it in a function run by shard_map, whose values are this "
        "rank's blocks, or use it on the global tensor, device_get(x)"
    ) from part
