"""`explain_rule`: a rule as text, with each strategy for one mesh axis.

For a function without a rule it tries sample calls, and tells the layouts of their operands and results, and the
collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, FspmdError
from fspmd.global_view.axis_choices import passed_on
from fspmd.global_view.dispatch import dispatch
from fspmd.global_view.interceptors import intercept_dispatch
from fspmd.global_view.question import Question, ask, places_of
from fspmd.global_view.refusals import shown
from fspmd.global_view.rule import is_dispatched
from fspmd.global_view.strategies import Strategy, strategies
from fspmd.inspection.communication_log import communication_log
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.ops.signatures import required
from fspmd.redistribution.redistribute import redistribute
from fspmd.rules import composite_of, handler_of, is_registered
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec


def is_tensor_method(func: Any) -> bool:
    """Whether it is a method of ``torch.Tensor`` in C, which cannot be called on a `Sharded` directly."""
    return isinstance(func, (MethodDescriptorType, WrapperDescriptorType))


def trials(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[str]:
    """One line for each layout of the operands that the function accepts. Tensors without values count as zeros.

    Raises:
        ArgumentError: it accepts no layout. The message has its error for whole operands.
    """
    tree: Any = (args, kwargs)
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    operands = [_with_values(leaves[i]) for i in places]
    lines: list[str] = []
    failed: Exception | None = None
    for title, partitions in _partitions(operands):
        for i, x, partition in zip(places, operands, partitions, strict=True):
            source = TensorSpec(mesh, P(), x.shape, x.dtype)
            target = source.with_partition(partition)
            leaves[i] = Sharded(redistribute(x, source, target), target)
        given, named = treedef.unflatten(leaves)
        try:
            with torch.random.fork_rng([]), torch.no_grad(), communication_log() as log:
                out = dispatch(Sharded, func, (), given, named) if is_tensor_method(func) else func(*given, **named)
        except Exception as error:  # the function may raise anything for this layout, or for zeros
            failed = error
            continue
        specs = [leaf.spec.partition for leaf in optree.tree_leaves(out) if isinstance(leaf, Sharded)]
        results = ", ".join(repr(partition.shortened) for partition in specs) or "the same on all ranks"
        moved = f" [{', '.join(dict.fromkeys(entry.kind for entry in log))}]" if log else ""
        lines.append(f"  {title:18} {', '.join(map(repr, partitions))} -> {results}{moved}")
    if failed is not None and not lines:
        raise ArgumentError(f"explain_rule calls {shown(func)}, which fails: {failed}") from failed
    return lines


def _with_values(x: Tensor | Sharded) -> Tensor:
    if isinstance(x, Sharded) or x.is_meta:
        return torch.zeros(x.shape, dtype=x.dtype)
    return x.detach()


def _partitions(operands: list[Tensor]) -> Iterator[tuple[str, list[P]]]:
    """One dim of one operand sharded, the others whole; and all whole."""
    whole = [P() for _ in operands]
    for i, x in enumerate(operands):
        for dim in range(x.ndim):
            title = f"dim {dim} sharded" if len(operands) == 1 else f"{i}, dim {dim} sharded"
            yield title, [*whole[:i], P(*[None] * dim, "x"), *whole[i + 1 :]]
    yield "whole", whole


def explain_rule(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Explain the rule of a function for a call: each layout of operands and results that one mesh axis allows.

    Args:
        func: A torch function, or a function given to `rule`.
        args: The positional arguments of an example of a call. Tensors may have any sizes; on the meta device they
            take no memory. Without arguments the example is a call with the fewest arguments. Its tensors have dims of
            size 4, and the same number of dims if ``func`` allows it.
        kwargs: The keyword arguments of the example.

    Returns:
        Text: the factors of the call, and one line for each strategy of an axis ``x``. For a function that torch
        composes of others, the text explains those that have a rule. For any other function it has the layouts of
        results and the collectives of sample calls.

    Raises:
        ArgumentError: ``func`` does not take `Sharded` values, or does not take the call.

    >>> import torch
    >>> print(explain_rule(torch.mm, torch.empty(4, 6), torch.empty(6, 8)))
    mm(f32[4, 6], f32[6, 8]): m k, k n -> m n
      m sharded      P('x'), P() -> P('x')
      k sharded      P(None, 'x'), P('x') -> P(unreduced={'x'})
      n sharded      P(), P(None, 'x') -> P(None, 'x')
      0 unreduced    P(unreduced={'x'}), P(reduced={'x'}) -> P(unreduced={'x'})
      1 unreduced    P(reduced={'x'}), P(unreduced={'x'}) -> P(unreduced={'x'})
      reduced        P(reduced={'x'}), P(reduced={'x'}) -> P(reduced={'x'})
      whole          P(), P() -> P()
    """
    mesh = make_mesh((2,), ("x",), transport="simulation", device="cpu")
    if args or kwargs:
        return _of_call(mesh, func, args, kwargs)
    for example in itertools.islice(_examples(func) if callable(func) else (), _TRIED):
        with suppress(FspmdError):
            return _of_call(mesh, func, example, {})
    raise ArgumentError(
        f"explain_rule knows no call of {shown(func)} with a rule; give it an example, explain_rule(func, "
        "torch.empty(4, 6)), and if that has no rule write one with fspmd.rule"
    )


def _of_call(mesh: Mesh, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The explanation of one call."""
    operands = _operands(mesh, args, kwargs)
    question = _question(func, args, kwargs, operands)
    if question is not None:
        return _explained(question)
    given = ", ".join(spec.text for _, spec in operands)
    if parts := _parts(mesh, func, args, kwargs) if operands and is_dispatched(func) else []:
        return "\n".join([f"{shown(func).removesuffix('()')}({given}) is made of", *parts])
    if tried := trials(func, args, kwargs, mesh) if operands and is_dispatched(func) else []:
        return "\n".join([f"{shown(func).removesuffix('()')}({given}) has no rule; calls of it give", *tried])
    raise ArgumentError(f"{shown(func)} of {given or 'no tensors'} has no rule; write one with fspmd.rule")


def _examples(func: Any) -> Iterator[tuple[Any, ...]]:
    """Calls that torch accepts, with the parameters that have no default.

    Calls whose tensors have the same number of dims come first. All tensors are floats, or one of them is of ints or
    bools. An int is the last dim; a list of ints is the size of a dim.
    """
    for kinds in dict.fromkeys(map(tuple, required(func))):
        count = sum(kind not in _OTHERS for kind in kinds)
        if not 0 < count <= 5 or not {*kinds} <= {"Tensor", "List[Tensor]", *_OTHERS}:
            continue
        ranks = sorted(itertools.product((2, 1, 3, 4), repeat=count), key=lambda dims: len({*dims}))
        dtypes = [(None, torch.float32), *itertools.product(range(count), (torch.int64, torch.bool))]
        for (place, dtype), dims in itertools.product(dtypes, ranks):
            tensors = (torch.zeros((4,) * n, dtype=dtype if i == place else torch.float32) for i, n in enumerate(dims))
            example = tuple(_OTHERS[kind] if kind in _OTHERS else _listed(kind, next(tensors)) for kind in kinds)
            if _is_accepted(func, example):
                yield example


_TRIED: Final = 16  # the number of examples; the first that torch accepts mostly has a rule
_OTHERS: Final[dict[str, Any]] = {"int": -1, "List[int]": [4]}


def _is_accepted(func: Any, example: tuple[Any, ...]) -> bool:
    try:
        with torch.random.fork_rng([]):
            func(*example)
    except Exception:  # a function may raise anything for arguments that nobody meant for it
        return False
    return True


def _listed(kind: str, x: Tensor) -> Any:
    return x if kind == "Tensor" else [x, x]


def _question(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Any) -> Question | None:
    """The question to the function's own rule; None where it has none."""
    has_rule = is_registered(func) or (handler_of(func) is None and composite_of(func, args, kwargs) is None)
    return ask(func, args, kwargs, operands) if operands and has_rule else None


def _parts(mesh: Mesh, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The explanations of the calls with a rule that a call consists of. It runs once, on tensors without data."""
    texts: dict[str, None] = {}

    def explain(inner: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if (question := _question(inner, args, named, _operands(mesh, args, named))) is not None:
            texts[_explained(question)] = None
        return dispatch(Sharded, inner, types, args, kwargs)

    def without_data(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        block = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return Sharded(block, TensorSpec(mesh, P(), tuple(x.shape), x.dtype))

    tree: Any = (args, kwargs)
    given, named = optree.tree_map(without_data, tree, none_is_leaf=True)
    with (
        suppress(FspmdError, RuntimeError, TypeError, ValueError),  # from functions that give no tensors
        torch.random.fork_rng([]),
        torch.no_grad(),
        intercept_dispatch(lambda _: explain),
    ):
        if is_tensor_method(func):
            explain(func, (), given, named)
        else:
            func(*given, **named)
        return list(texts)
    return []


def _operands(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, TensorSpec]]:
    """The places of the tensors of a call, and their layouts on all ranks alike."""
    return [(place, TensorSpec(mesh, P(), x.shape, x.dtype)) for place, x in places_of(args, kwargs, mesh)]


def _explained(question: Question) -> str:
    """The factors of a call, and a line for each strategy."""
    name = shown(question.func).removesuffix("()")
    factors, specs = question.factors, question.operands
    letters = _letters(question)

    def notation(dims: Sequence[int | None]) -> str:
        return " ".join("1" if f is None else f"[{letters[f]}]" if f in factors.whole else letters[f] for f in dims)

    sides = [", ".join(map(notation, side)) for side in (factors.operands, factors.results)]
    lines = [f"{name}({', '.join(repr(spec).partition(' on ')[0] for spec in specs)}): {sides[0]} -> {sides[1]}"]
    for case in _cases(question, letters):
        given = [spec.with_partition(partition) for spec, partition in zip(specs, case.operands, strict=True)]
        candidates = strategies(question.at(given))
        strategy = next((strategy for strategy in candidates if _matches(case, strategy, given)), None)
        if strategy is not None:
            layouts = ", ".join(repr(spec.partition.shortened) for spec in strategy.operands)
            results = ", ".join(repr(spec.partition.shortened) for spec in strategy.results)
            lines.append(f"  {case.title:14} {layouts} -> {results}{' by a body' if strategy.by_body else ''}")
    return "\n".join(lines)


def _letters(question: Question) -> dict[int, str]:
    """A name for each factor: its name in the rule, or else a letter."""
    named = question.factors.names.items()
    letters = {number: name.strip("[]") for name, number in named if isinstance(name, str)}
    free = (letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in letters.values())
    for dims in (*question.factors.operands, *question.factors.results):
        for factor in dims:
            if factor is not None and factor not in letters:
                letters[factor] = next(free)
    return letters


class _Case(NamedTuple):
    """One role of the axis in a call, and the specs of the operands that suggest it."""

    title: str
    operands: list[P]
    factor: int | None = None  # the factor that the axis cuts
    pending: int | None = None  # the first operand that is unreduced


def _cases(question: Question, letters: dict[int, str]) -> list[_Case]:
    factors, count, linear = question.factors, len(question.operands), question.linear
    cases: list[_Case] = []
    for factor, letter in letters.items():
        specs = [
            P(*("x" if other == factor and dims.count(factor) == 1 else None for other in dims))
            for dims in factors.operands
        ]
        cases.append(_Case(f"{letter} sharded", specs, factor))
    for pending, _ in passed_on(factors, linear, count):
        first = min(pending)
        title = "unreduced" if linear == "sum" or count == 1 else f"{first} unreduced"
        specs = [P(unreduced={"x"}) if k in pending else P() for k in range(count)]
        cases.append(_Case(title, specs, pending=first))
    cases.append(_Case("reduced", [P(reduced={"x"})] * count))
    return [*cases, _Case("whole", [P()] * count)]


def _matches(case: _Case, strategy: Strategy, given: list[TensorSpec]) -> bool:
    if case.factor is not None:
        return case.factor in strategy.axes
    if case.pending is not None:
        return bool(strategy.operands[case.pending].partition.unreduced)
    return list(strategy.operands) == given
