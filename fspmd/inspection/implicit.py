"""What a torch function on `Sharded` values communicates by itself, told with its price and what to write instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.global_view.propagate import Question, ask
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import differentiated
from fspmd.global_view.strategies import Strategy, strategies
from fspmd.inspection.causes import Cause, Trace
from fspmd.inspection.expressions import expression_at, operands_of
from fspmd.inspection.watch import communicates, price_of
from fspmd.meshes.mesh import Mesh, current_mesh
from fspmd.messages import micros
from fspmd.ops.operators import REFLECTED
from fspmd.ops.signatures import Place
from fspmd.ops.traits import name_of
from fspmd.pairs import Call, call
from fspmd.redistribution.cost import FREE, Price, topology
from fspmd.redistribution.moves import moves
from fspmd.redistribution.routes import Route
from fspmd.redistribution.steps import Step
from fspmd.rules import composite_of, handler_of
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import is_wrapped, wrapped_by
from fspmd.transport.local_tensor import blocks_of
from fspmd.trees import leaf_paths

_grad_enabled = torch.is_grad_enabled
_WAYS = 4  # that a report shows besides the one taken
_REFLECTED = {f"__{name}__" for name in REFLECTED}
_SUMS = "[in backward "  # how the cost of a row begins that moves nothing forward
_LONGEST = 60  # characters of an expression that a report shows


@dataclass(frozen=True, slots=True)
class Implicit:
    """Communication that the user did not write: ``cause`` implies it. Printing it tells all.

    ``of_gradients``: nothing moves forward, and in backward gradients are summed, as of weights beside a cut batch.
    """

    cause: Cause
    text: str
    of_gradients: bool = False

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class _NamedOperand:
    """One tensor of a call: what the user calls it, how it lies, and whether it will have a gradient."""

    name: str
    written: bool  # the name is an expression of the user's
    assignable: bool  # the name is a variable's, or that of a leaf of one
    on: str  # what tells `reshard` the mesh of a plain tensor
    spec: TensorSpec
    followed: bool


def followed(x: Any) -> bool:
    """Whether autograd follows a tensor, at any level of ``torch.func``."""
    while _grad_enabled() and isinstance(x, Tensor):
        if x.requires_grad:
            return True
        x = wrapped_by(x) if is_wrapped(x) else None
    return False


def implied(x: Tensor, call: Call, trace: Trace) -> tuple[Call, ...]:
    """What applying a call to ``x`` communicates: the call, and its transpose if ``x`` will have a gradient."""
    dispatched = trace.dispatches[0]
    later = (call.transposed,) if followed(x) and _has_gradient(dispatched) else ()
    found = tuple(one for one in (call, *later) if communicates(one))
    return () if later and found == later and _is_only_read(x, dispatched) else found


def _is_only_read(x: Tensor, dispatched: FrameType) -> bool:
    """Whether a block is that of operands of a torch function through which no gradient comes."""
    names = dispatched.f_locals
    func, args, kwargs = names["func"], names["args"], names["kwargs"] or {}
    operands = _operands(func, args, kwargs, [], {}, True)
    given = (*args, *kwargs.values())
    own = [place for place in operands if (one := _at(given, place)) is x or (is_sharded(one) and one.local is x)]
    return bool(own) and not any(operands[place].followed for place in own)


def _has_gradient(dispatched: FrameType) -> bool:
    """Whether a torch function gives something that may be differentiated, as far as it is known: no booleans."""
    results = dispatched.f_locals["plan"].results if "plan" in dispatched.f_locals else ()
    specs = results if isinstance(results, tuple) else (results,)
    return not specs or any(is_float(spec.dtype) for spec in specs)


def report(x: Tensor, first: Call, trace: Trace) -> Implicit:
    """What the function communicates whose first call of the pair table is ``first``, on ``x``."""
    inner, outer = trace.dispatches[0], trace.dispatches[-1]
    func, args, kwargs = inner.f_locals["func"], inner.f_locals["args"], inner.f_locals["kwargs"] or {}
    cause, expression = trace.cause, expression_at(trace.user) if trace.user is not None else ""
    shown_as = expression if 0 < len(expression) <= _LONGEST else cause.what
    within = "" if cause.what.strip("()") in shown_as or "[" in cause.what else f", in {cause.what}"
    lines = [f"{shown_as} communicates, which is not written ({cause.where}{within})"]
    if inner is not outer:
        lines.append(f"  in {shown(func)}, which it is made of")
    sources = operands_of(expression, cause.what, len(args)) if inner is outer else []
    if name_of(func) in _REFLECTED:
        sources.reverse()
    operands = _operands(func, args, kwargs, sources, _names(trace.user), _has_gradient(inner))
    rows, needs, others, without = _solved(func, args, kwargs, operands)
    lines += [
        f"  {row}"
        for row in rows or (f"first {_priced(one, _largest(x), x.dtype)}" for one in implied(x, first, trace))
    ]
    lines += ["other ways:", *(f"  {i}. {way}" for i, way in enumerate(others[:_WAYS], 1))] if others else []
    fix, other = (  # what it is made of has values of its own
        _pasted([need for need in found if inner is outer or need[0].assignable]) for found in (needs, without)
    )
    around = f'with explicit("off"): {_statement(trace, shown_as)}'
    lines.append(f"write {fix or around + (f', or {other}' if other else '')}")
    return Implicit(cause, "\n".join(lines), bool(rows) and all(_SUMS in row for row in rows))


Needs = list[tuple[_NamedOperand, TensorSpec]]


def _solved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: dict[Place, _NamedOperand]
) -> tuple[list[str], Needs, list[str], Needs]:
    """What moves, how the operands must lie so that nothing is implied, the other ways to compute it, and how they must
    lie so that no body communicates."""
    if handler_of(func) is not None or composite_of(func, args, kwargs) is not None:
        return [], [], [], []
    question = None
    with suppress(ArgumentError):  # of what depends on values
        question = ask(func, args, kwargs, [(place, one.spec) for place, one in operands.items()])
    if question is None:
        needs = [(one, one.spec.with_partition(P())) for one in operands.values() if one.spec.partition.mentioned]
        gathered = [f"{one.name}: {_shown(_way(one, need))}" for one, need in needs]
        return ["it runs on global tensors, as what depends on values does", *gathered], needs, [], []
    ordered = [operands[place] for place, _ in question.operands]
    question = question._replace(gradients=frozenset(i for i, one in enumerate(ordered) if one.followed))
    ways = sorted(map(question.together, question.solve(strategies)), key=lambda way: way.time)
    needs = [_needed(one, ways[0], i) for i, one in enumerate(ordered)]
    rows = list(_rows(ordered, ways[0]))
    without: Needs = []
    if not rows and ways[0].by_body:
        rows = [f"a sharded body, {micros(ways[0].body)} of collectives"]
        whole = next((way for way in ways if not way.by_body), None)
        without = [_needed(one, whole, i) for i, one in enumerate(ordered)] if whole else []
    return rows, needs, _other_strategies(question, ordered, ways[1:]), without


# --- the operands ---------------------------------------------------------------------------------------------------


def _names(user: FrameType | None) -> dict[object, str]:
    """What the user calls values, by identity, and meshes; arguments and local variables before globals."""
    if user is None:
        return {}
    known = {**user.f_globals, **user.f_locals}
    found: dict[object, str] = {value: name for name, value in known.items() if isinstance(value, Mesh)}
    for name, value in known.items():
        if type(value) in (dict, list, tuple) and not name.startswith("_"):  # a tree of parameters
            with suppress(RecursionError, TypeError, ValueError):  # or something else, which holds itself perhaps
                leaves = optree.tree_leaves(value, none_is_leaf=True)
                paths = leaf_paths(value, name)
                found.update((id(leaf), path) for leaf, path in zip(leaves, paths, strict=True))
    return found | {id(value): name for name, value in known.items() if isinstance(value, Tensor)}


def _at(given: Sequence[Any], place: Place) -> Any:
    return given[place[0]][place[1]] if isinstance(place, tuple) else given[place]


def _operands(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sources: list[str],
    names: dict[object, str],
    has_gradient: bool,
) -> dict[Place, _NamedOperand]:
    """The tensors of a call; ``sources`` are its positional arguments as they are written, or []."""
    tree: Any = (args, kwargs)
    first = next(x for x in optree.tree_leaves(tree) if isinstance(x, Sharded))
    mesh = first.spec.mesh
    held = f"{names[id(first)]}.spec.mesh" if id(first) in names else "mesh"
    on = "" if current_mesh() == mesh else f", mesh={names.get(mesh, held)}"
    found: dict[Place, _NamedOperand] = {}
    for i, arg in enumerate((*args, *kwargs.values())):
        listed = isinstance(arg, (list, tuple))
        for k, x in enumerate(arg if listed else (arg,)):
            if isinstance(x, Tensor):
                source = sources[i] if i < len(sources) and not listed else None
                spec = x.spec if isinstance(x, Sharded) else TensorSpec(mesh, P(), tuple(x.shape), x.dtype)
                known = names.get(id(x))
                name = known or source
                later = has_gradient and followed(x.local if isinstance(x, Sharded) else x)
                written = name is not None
                found[(i, k) if listed else i] = _NamedOperand(
                    name or f"operand {len(found) + 1}",
                    written,
                    known is not None,
                    "" if isinstance(x, Sharded) else on,
                    spec,
                    later,
                )
    if not any(one.followed for one in found.values()):
        return found
    taken = differentiated(func, args, kwargs, [(place, one.spec) for place, one in found.items()])
    return {place: replace(one, followed=one.followed and place in taken) for place, one in found.items()}


# --- what moves -----------------------------------------------------------------------------------------------------


def _cast_calls(need: TensorSpec, axes: tuple[str, ...]) -> list[Call]:
    """What the casts of an operand that will have a gradient do in backward."""
    others = tuple(axis for axis in axes if axis not in need.partition.reduced)
    return [call("psum", need.mesh, others)] if others else []


def _needed(one: _NamedOperand, way: Strategy, i: int) -> tuple[_NamedOperand, TensorSpec]:
    """How an operand must lie so that nothing is implied: reduced where its cast would be summed in backward."""
    need = way.operands[i]
    if not (one.followed and way.casts[i]):
        return one, need
    partition = need.partition
    reduced = partition.reduced | frozenset(way.casts[i])
    return one, need.with_partition(P(*partition, unreduced=partition.unreduced, reduced=reduced))


def _rows(operands: Sequence[_NamedOperand], way: Strategy) -> Iterator[str]:
    for i, (one, need, axes) in enumerate(zip(operands, way.operands, way.casts, strict=True)):
        if one.spec is not need:
            yield f"{one.name}: {_shown(_way(one, need, axes), backward=one.followed)}"
        for cast in _cast_calls(need, axes) if one.followed else ():
            target = _needed(one, way, i)[1]
            shape, dtype = need.block_shape, need.dtype
            yield f"{one.name}: {_short(need)} → {_short(target)} {_SUMS}{_priced(cast, shape, dtype)}]"


def _way(one: _NamedOperand, need: TensorSpec, axes: tuple[str, ...] = ()) -> Route:
    """The route that is taken; ``axes``: of the cast after it."""
    return moves(one.spec, need, axes, topology(), one.followed).route


def _short(spec: TensorSpec) -> str:
    return repr(spec).partition(" on ")[0]


def _over(call: Call) -> str:
    return f"{call.pair.name} over {', '.join(map(repr, call.axes or call.mesh.axis_names))}"


def _largest(x: Tensor) -> tuple[int, ...]:
    """The shape of a block; of simulated ranks the longest that each dim is."""
    return tuple(map(max, zip(*[one.shape for one in blocks_of(x)], strict=True)))


def _priced(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{_over(call)}, {_cost(price_of(call, shape, dtype))}"


def _cost(price: Price) -> str:
    return f"{price.moved:,.0f} B, {micros(price.time)}"


def _later(way: Route) -> list[Step]:
    """Of a route that moves nothing the steps whose transposes move something, in backward."""
    steps = [] if any(communicates(step.call) for step in way.steps) else way.steps
    return [step for step in steps if communicates(step.call.transposed)]


def _shown(way: Route, *, backward: bool = False) -> str:
    """``actual → needed [collectives, bytes, µs]``."""
    moving = [step for step in way.steps if communicates(step.call)]
    if moving:
        what = f"{', '.join(_over(step.call) for step in moving)}, {_cost(way.price)}"
    else:
        later = _later(way) if backward else []
        parts = [_priced(step.call.transposed, step.spec.block_shape, step.spec.dtype) for step in later]
        what = f"{_SUMS[1:]}{', '.join(parts)}" if parts else "moves nothing"
    return f"{_short(way.source)} → {_short(way.target)} [{what}]"


# --- what else there is ---------------------------------------------------------------------------------------------


def _price(operands: Sequence[_NamedOperand], way: Strategy) -> Price:
    total = FREE
    for one, need, axes in zip(operands, way.operands, way.casts, strict=True):
        found = _way(one, need, axes)
        total += found.price
        for step in _later(found) if one.followed else ():
            total += price_of(step.call.transposed, step.spec.block_shape, step.spec.dtype)
        for cast in _cast_calls(need, axes) if one.followed else ():
            total += price_of(cast, need.block_shape, need.dtype)
    return total


def _other_strategies(question: Question, operands: Sequence[_NamedOperand], ways: list[Strategy]) -> list[str]:
    """Strategies, the cheapest first; what a body would communicate is in their time."""
    found = []
    for way in ways:
        price = _price(operands, way)
        time = price.time + way.body
        laid = ", ".join(map(_short, way.operands))
        out = ", ".join(_short(r.with_partition(p)) for r, p in zip(question.results, way.results, strict=True))
        where = " in a sharded body" if way.by_body else ""
        found.append((time, f"{laid} → {out} [{price.moved:,.0f} B, {micros(time)}{where}]"))
    return [text for _, text in sorted(found, key=lambda one: one[0])]


def _pasted(needs: Needs) -> str:
    """The lines to paste; "" where they would need names for what the user has not written."""
    lines = []
    for one, need in needs:
        if one.spec is not need:
            if not one.written:
                return ""
            moved = f"reshard({one.name}, {need.partition.shortened!r}{one.on})"
            lines.append(f"{one.name} = {moved}" if one.assignable else f"{moved} for {one.name}")
    return "; ".join(dict.fromkeys(lines))


def _statement(trace: Trace, expression: str) -> str:
    """The user's line, if it is one simple statement, which runs what stands in it."""
    text = trace.cause.text
    try:
        (found,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return expression
    later = trace.user is not None and trace.user.f_code.co_name in ("<lambda>", "<genexpr>")
    return expression if later or hasattr(found, "body") or len(text) > 2 * _LONGEST else text
