"""The communication that a torch function on `Sharded` values implies, with its price and the line to write instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.global_view.kernels import GlobalCall
from fspmd.global_view.question import ask
from fspmd.global_view.refusals import shown
from fspmd.global_view.result_types import differentiated
from fspmd.global_view.strategies import Strategy, strategies
from fspmd.inspection.causes import Cause, Trace, expression_at, operands_of
from fspmd.inspection.watch import communicates, price_of
from fspmd.meshes.mesh import Mesh, current_mesh
from fspmd.messages import micros
from fspmd.ops.operators import REFLECTED
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import name_of
from fspmd.pairs import Call, call
from fspmd.redistribution.cost import FREE, Price, topology
from fspmd.redistribution.moves import moves
from fspmd.rules import composite_of, handler_of
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import P, TensorSpec, is_float
from fspmd.torch_internals import NO_LEVEL, level_of, wrapped_by
from fspmd.transport.local_tensor import blocks_of

_grad_enabled = torch.is_grad_enabled
_ALTERNATIVES = 4  # strategies that a report shows besides the cheapest
_REFLECTED = {f"__{name}__" for name in REFLECTED}
_LONGEST = 60  # characters of an expression that a report shows


@dataclass(frozen=True, slots=True)
class Implicit:
    """Communication that the user did not write. Printed, it is the message of the error or warning.

    Attributes:
        cause: The function that implies the communication, and the user's line.
        text: The message.
        of_gradients: Nothing moves forward, and gradients are summed in backward, not gathered. Example: weights beside
            a cut batch.
    """

    cause: Cause
    text: str
    of_gradients: bool = False

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class _NamedOperand:
    """One tensor of a call: its name in the user's code, its layout, and whether it will have a gradient."""

    name: str
    written: bool  # the name is an expression in the user's code
    assignable: bool  # the name is a variable, or a leaf of one
    mesh_argument: str  # the argument `mesh=` of `reshard` for a plain tensor
    spec: TensorSpec
    has_gradient: bool


def _is_followed(x: Any) -> bool:
    """Whether autograd follows a tensor, at any level of ``torch.func``."""
    while _grad_enabled() and isinstance(x, Tensor):
        if x.requires_grad:
            return True
        x = wrapped_by(x) if level_of(x) != NO_LEVEL else None
    return False


def implied(x: Tensor, call: Call, trace: Trace) -> tuple[Call, ...]:
    """The communication of a call on ``x``: the call, and its transpose if ``x`` will have a gradient."""
    dispatched = trace.dispatches[0]
    backward = (call.transposed,) if _is_followed(x) and _is_differentiable(dispatched) else ()
    calls = tuple(step for step in (call, *backward) if communicates(step))
    return () if backward and calls == backward and _is_only_read(x, dispatched) else calls


def _is_only_read(x: Tensor, dispatched: FrameType) -> bool:
    """Whether the block ``x`` belongs to operands of a torch function that get no gradient from it."""
    names = dispatched.f_locals
    func, args, kwargs = names["func"], names["args"], names["kwargs"] or {}
    operands = _operands(func, args, kwargs, [], _Names({}, {}, {}), True)
    given = (*args, *kwargs.values())
    places = [place for place in operands if _holds(at(given, place), x)]
    return bool(places) and not any(operands[place].has_gradient for place in places)


def _holds(arg: Any, x: Tensor) -> bool:
    return arg is x or (is_sharded(arg) and arg.local is x)


def _is_differentiable(dispatched: FrameType) -> bool:
    """Whether a torch function has a result of floats, or a result that is not known yet."""
    results = dispatched.f_locals["plan"].results if "plan" in dispatched.f_locals else ()
    specs = results if isinstance(results, tuple) else (results,)
    return not specs or any(is_float(spec.dtype) for spec in specs)


def report(x: Tensor, first: Call, trace: Trace) -> Implicit:
    """The report on a function whose first communication is the call ``first`` on ``x``."""
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
    names = _names(trace.user, expression or cause.text)
    operands = _operands(func, args, kwargs, sources, names, _is_differentiable(inner))
    findings = _findings(func, args, kwargs, operands)
    rows = findings.rows or [f"first {_priced(step, _largest(x), x.dtype)}" for step in implied(x, first, trace)]
    lines += [f"  {row}" for row in rows]
    if findings.alternatives:
        lines.append("other ways:")
        lines += [f"  {i}. {text}" for i, text in enumerate(findings.alternatives[:_ALTERNATIVES], 1)]
    fix, bodiless = (  # an inner function has operands that the user cannot name
        _pasted([need for need in needs if inner is outer or need[0].assignable])
        for needs in (findings.needs, findings.bodiless)
    )
    around = f'with explicit("off"): {_statement(trace, shown_as)}'
    lines.append(f"write {fix or around + (f', or {bodiless}' if bodiless else '')}")
    if any(_holds(at((*args, *kwargs.values()), place), x) for place in operands):
        of_gradients = findings.only_sums
    else:  # an operand of an operand, which is made anew
        of_gradients = findings.idle and _are_sums(implied(x, first, trace))
    return Implicit(cause, "\n".join(lines), of_gradients)


Needs = Sequence[tuple[_NamedOperand, TensorSpec]]


class _Findings(NamedTuple):
    """The communication of a call, and ways around it."""

    rows: Sequence[str] = ()  # a line for each move
    needs: Needs = ()  # layouts of the operands for which the call moves nothing
    alternatives: Sequence[str] = ()  # lines of the other strategies
    bodiless: Needs = ()  # layouts of the operands for which no body communicates
    idle: bool = False  # nothing moves forward
    only_sums: bool = False  # and gradients are summed, not gathered


def _findings(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: dict[Place, _NamedOperand]
) -> _Findings:
    if handler_of(func) is not None or composite_of(func, args, kwargs) is not None:
        return _Findings()
    question = None
    with suppress(ArgumentError):  # the result depends on values
        question = ask(func, args, kwargs, [(place, operand.spec) for place, operand in operands.items()])
    if question is None:
        mentioned = [operand for operand in operands.values() if operand.spec.partition.mentioned]
        gathers = [_ImpliedMove(replace(x, has_gradient=False), x.spec.with_partition(P()), ()) for x in mentioned]
        rows = ["it runs on global tensors, since its result depends on values"]
        rows += [f"{move.operand.name}: {move}" for move in gathers]
        return _Findings(rows, [(move.operand, move.need) for move in gathers])
    ordered = [operands[place] for place in question.places]
    question = question._replace(gradients=frozenset(i for i, operand in enumerate(ordered) if operand.has_gradient))
    cheapest, *others = sorted(strategies(question), key=lambda strategy: strategy.time)
    implied = _moves(ordered, cheapest)
    rows = [row for move in implied for row in move.rows()]
    bodiless: Needs = ()
    if not rows and cheapest.by_body:
        rows = [f"a sharded body, {micros(cheapest.body)} of collectives"]
        bodiless = next((_needs(_moves(ordered, other)) for other in others if not other.by_body), ())
    idle = not cheapest.by_body and not any(move.forward for move in implied)
    backward = [step for move in implied for step in (*(step for step, _ in move.backward), *move.casts)]
    only_sums = idle and _are_sums(backward)
    return _Findings(rows, _needs(implied), _alternatives(ordered, others), bodiless, idle, only_sums)


def _needs(implied: Sequence[_ImpliedMove]) -> Needs:
    """The layouts of the operands for which a strategy implies no communication."""
    return [(move.operand, move.target) for move in implied]


# --- the operands ---------------------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """What the user's frame calls its values."""

    tensors: dict[int, list[str]]  # by identity: variables, the local ones first, then leaves of dicts and lists
    constant: dict[int, str]  # by identity: leaves of tuples, to which nothing can be assigned
    meshes: dict[object, str]

    def of(self, x: Any, source: str | None) -> tuple[str | None, bool]:
        """The name of an operand, and whether it can be assigned to. ``source`` is its text in the call, if known.

        Another variable may hold the same tensor. To assign to it would change nothing.
        """
        known = self.tensors.get(id(x), [])
        if source is not None:
            return source, source in known
        return (known[0], True) if known else (self.constant.get(id(x)), False)


def _names(user: FrameType | None, expression: str) -> _Names:
    """The names in the user's frame that an expression mentions."""
    names = _Names({}, {}, {})
    if user is None:
        return names
    mentioned = set(re.findall(r"\w+", expression))
    known = {**user.f_locals, **{name: value for name, value in user.f_globals.items() if name not in user.f_locals}}
    for name, value in known.items():
        if isinstance(value, Mesh):
            names.meshes.setdefault(value, name)
        elif isinstance(value, Tensor) and name in mentioned:
            names.tensors.setdefault(id(value), []).append(name)
    for name, value in known.items():
        if type(value) in (dict, list, tuple) and name in mentioned:  # perhaps a tree of parameters
            with suppress(RecursionError, TypeError, ValueError):  # or any other container, even one that holds itself
                for path, leaf in zip(*optree.tree_flatten_with_accessor(value, none_is_leaf=True)[:2], strict=True):
                    if path and path[-1].type in (dict, list):
                        names.tensors.setdefault(id(leaf), []).append(path.codify(name))
                    else:
                        names.constant.setdefault(id(leaf), path.codify(name))
    return names


def _operands(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sources: list[str],
    names: _Names,
    is_differentiable: bool,
) -> dict[Place, _NamedOperand]:
    """The tensors of a call by their places.

    ``sources`` are the positional arguments as the user wrote them, or [] where they are unknown.
    """
    tree: Any = (args, kwargs)
    first = next(x for x in optree.tree_leaves(tree) if isinstance(x, Sharded))
    mesh = first.spec.mesh
    name, _ = names.of(first, None)
    attribute = "mesh" if name is None else f"{name}.spec.mesh"
    mesh_argument = "" if current_mesh() == mesh else f", mesh={names.meshes.get(mesh, attribute)}"
    operands: dict[Place, _NamedOperand] = {}
    for i, arg in enumerate((*args, *kwargs.values())):
        listed = isinstance(arg, (list, tuple))
        for k, x in enumerate(arg if listed else (arg,)):
            if isinstance(x, Tensor):
                source = sources[i] if i < len(sources) and not listed else None
                name, assignable = names.of(x, source)
                sharded = isinstance(x, Sharded)
                operands[(i, k) if listed else i] = _NamedOperand(
                    name=name or f"operand {len(operands) + 1}",
                    written=name is not None,
                    assignable=assignable,
                    mesh_argument="" if sharded else mesh_argument,
                    spec=x.spec if isinstance(x, Sharded) else TensorSpec(mesh, P(), tuple(x.shape), x.dtype),
                    has_gradient=is_differentiable and _is_followed(x.local if isinstance(x, Sharded) else x),
                )
    if not any(operand.has_gradient for operand in operands.values()):
        return operands
    places = differentiated(
        GlobalCall(func, args, kwargs, [(place, operand.spec) for place, operand in operands.items()])
    )
    return {
        place: replace(operand, has_gradient=operand.has_gradient and place in places)
        for place, operand in operands.items()
    }


# --- moves ----------------------------------------------------------------------------------------------------------


class _ImpliedMove:
    """The move of an operand to the layout ``need`` of a strategy, and its cast over ``axes``."""

    def __init__(self, operand: _NamedOperand, need: TensorSpec, axes: tuple[str, ...]) -> None:
        self.operand, self.need, self.axes = operand, need, axes
        self.route = moves(operand.spec, need, axes, topology(), operand.has_gradient).route
        #: the collectives of forward
        self.forward = [step.call for step in self.route.steps if communicates(step.call)]
        #: the collectives of backward with the layouts that they take, if nothing moves forward; and those of the cast
        self.backward: list[tuple[Call, TensorSpec]] = []
        self.casts: list[Call] = []
        if operand.has_gradient:
            steps = () if self.forward else self.route.steps
            self.backward = [(s.call.transposed, s.spec) for s in steps if communicates(s.call.transposed)]
            others = tuple(axis for axis in axes if axis not in need.partition.reduced)
            self.casts = [call("psum", need.mesh, others)] if others else []

    @property
    def target(self) -> TensorSpec:
        """The layout of the operand for which the strategy implies no communication.

        It is reduced over the axes of a cast whose gradient would be summed in backward.
        """
        if not (self.operand.has_gradient and self.axes):
            return self.need
        partition = self.need.partition
        reduced = partition.reduced | frozenset(self.axes)
        return self.need.with_partition(P(*partition, unreduced=partition.unreduced, reduced=reduced))

    @property
    def price(self) -> Price:
        """The price of all collectives."""
        prices = [price_of(step, spec.block_shape, spec.dtype) for step, spec in self.backward]
        prices += [price_of(cast, self.need.block_shape, self.need.dtype) for cast in self.casts]
        return sum(prices, self.route.price)

    def rows(self) -> Iterator[str]:
        """A line for the move, and one for the cast, where they are implied."""
        if self.operand.spec is not self.need:
            yield f"{self.operand.name}: {self}"
        for cast in self.casts:
            cost = _priced(cast, self.need.block_shape, self.need.dtype)
            yield f"{self.operand.name}: {self.need.text} → {self.target.text} [in backward {cost}]"

    def __str__(self) -> str:
        """``actual → needed [collectives, bytes, µs]``."""
        if self.forward:
            cost = f"{', '.join(map(_over, self.forward))}, {_cost(self.route.price)}"
        else:
            parts = [_priced(step, spec.block_shape, spec.dtype) for step, spec in self.backward]
            cost = f"in backward {', '.join(parts)}" if parts else "moves nothing"
        return f"{self.operand.spec.text} → {self.route.target.text} [{cost}]"


def _moves(operands: Sequence[_NamedOperand], strategy: Strategy) -> list[_ImpliedMove]:
    """The moves that a strategy implies."""
    return list(map(_ImpliedMove, operands, strategy.operands, strategy.casts))


def _are_sums(calls: Sequence[Call]) -> bool:
    """Whether there are collectives, and all of them are sums."""
    return bool(calls) and all(step.pair.kernel.startswith("reduce") for step in calls)


def _over(call: Call) -> str:
    return f"{call.pair.name} over {', '.join(map(repr, call.axes or call.mesh.axis_names))}"


def _largest(x: Tensor) -> tuple[int, ...]:
    """The shape of a block; in a simulation each dim has its largest size of all ranks."""
    return tuple(map(max, zip(*[block.shape for block in blocks_of(x)], strict=True)))


def _priced(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{_over(call)}, {_cost(price_of(call, shape, dtype))}"


def _cost(price: Price) -> str:
    return f"{price.moved:,.0f} B, {micros(price.time)}"


# --- alternatives ---------------------------------------------------------------------------------------------------


def _alternatives(operands: Sequence[_NamedOperand], others: list[Strategy]) -> list[str]:
    """A line for each strategy, the cheapest first. Its time includes the collectives of a body."""
    alternatives = []
    for strategy in others:
        price = sum((move.price for move in _moves(operands, strategy)), FREE)
        time = price.time + strategy.body
        before = ", ".join(spec.text for spec in strategy.operands)
        after = ", ".join(spec.text for spec in strategy.results)
        where = " in a sharded body" if strategy.by_body else ""
        alternatives.append((time, f"{before} → {after} [{price.moved:,.0f} B, {micros(time)}{where}]"))
    return [text for _, text in sorted(alternatives, key=lambda alternative: alternative[0])]


def _pasted(needs: Needs) -> str:
    """The lines to paste; "" where an operand that must move has no name in the user's code."""
    lines = []
    for operand, need in needs:
        if operand.spec is not need:
            if not operand.written:
                return ""
            moved = f"reshard({operand.name}, {need.partition.shortened!r}{operand.mesh_argument})"
            lines.append(f"{operand.name} = {moved}" if operand.assignable else f"{moved} for {operand.name}")
    return "; ".join(dict.fromkeys(lines))


def _statement(trace: Trace, expression: str) -> str:
    """The user's line if it is one simple statement that evaluates the expression at once; else the expression."""
    text = trace.cause.text
    try:
        (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return expression
    deferred = trace.user is not None and trace.user.f_code.co_name in ("<lambda>", "<genexpr>")
    return expression if deferred or hasattr(statement, "body") or len(text) > 2 * _LONGEST else text
