"""What a rule means, printed: for one mesh axis, each way to lay out operands and results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, FspmdError
from fspmd.global_view.axis_choices import passed_on
from fspmd.global_view.dispatch import dispatch
from fspmd.global_view.interceptors import intercept_dispatch
from fspmd.global_view.propagate import Question, ask
from fspmd.global_view.refusals import shown
from fspmd.global_view.rule import is_dispatched
from fspmd.global_view.strategies import Strategy, strategies
from fspmd.inspection.trials import takes_tensors_alone, trials
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.ops.signatures import required
from fspmd.rules import composite_of, handler_of, is_registered
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec


def explain_rule(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What the rule of a function means for a call: for one mesh axis, each way to lay out operands and results.

    Args:
        func: A torch function, or one given to `rule`.
        args: An example of a call, with tensors of any sizes (on the meta device they hold no memory); none, for one
            of the fewest arguments, where all tensors have as many dims if they may, each of size 4.
        kwargs: The same.

    Returns:
        Text: the dims of the computation, and one line for each thing that an axis ``x`` can do. Of a function without
        a rule the same of each that it is made of, or how the results of calls lie and what they communicate.

    Raises:
        ArgumentError: it is no function that takes `Sharded` values, or it takes no such call.

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
    operands = _operands(mesh, args, kwargs)
    question = _asked(func, args, kwargs, operands)
    if question is not None:
        return _explained(func, question)
    given = ", ".join(repr(spec).partition(" on ")[0] for _, spec in operands)
    if parts := _parts(mesh, func, args, kwargs) if operands and is_dispatched(func) else []:
        return "\n".join([f"{shown(func).removesuffix('()')}({given}) is made of", *parts])
    if tried := trials(func, args, kwargs, mesh) if operands and is_dispatched(func) else []:
        return "\n".join([f"{shown(func).removesuffix('()')}({given}) has no rule; calls of it give", *tried])
    raise ArgumentError(f"{shown(func)} of {given or 'no tensors'} has no rule; write one with fspmd.rule")


def _examples(func: Any) -> Iterator[tuple[Any, ...]]:
    """Calls that torch takes, with what has no default.

    Tensors of as many dims first, of floats, or one of places or truths; of ints the last dim, or its size.
    """
    for kinds in dict.fromkeys(map(tuple, required(func))):
        count = sum(kind not in _OTHERS for kind in kinds)
        if not 0 < count <= 5 or not {*kinds} <= {"Tensor", "List[Tensor]", *_OTHERS}:
            continue
        every = sorted(itertools.product((2, 1, 3, 4), repeat=count), key=lambda dims: len({*dims}))
        odd = [(None, torch.float32), *itertools.product(range(count), (torch.int64, torch.bool))]
        for (place, dtype), dims in itertools.product(odd, every):
            made = (torch.zeros((4,) * n, dtype=dtype if i == place else torch.float32) for i, n in enumerate(dims))
            example = tuple(_OTHERS[kind] if kind in _OTHERS else _listed(kind, next(made)) for kind in kinds)
            if _is_taken(func, example):
                yield example


_TRIED: Final = 16  # examples; the first that torch takes mostly has a rule
_OTHERS: Final[dict[str, Any]] = {"int": -1, "List[int]": [4]}


def _is_taken(func: Any, example: tuple[Any, ...]) -> bool:
    try:
        with torch.random.fork_rng([]):
            func(*example)
    except Exception:  # whatever a function says of arguments that nobody gave it
        return False
    return True


def _listed(kind: str, x: Tensor) -> Any:
    return x if kind == "Tensor" else [x, x]


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Any) -> Question | None:
    """What its rule is asked, if it has one of its own."""
    known = is_registered(func) or (handler_of(func) is None and composite_of(func, args, kwargs) is None)
    return ask(func, args, kwargs, operands) if operands and known else None


def _parts(mesh: Mesh, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What each call with a rule means that a call is made of; it runs once, on tensors without data."""
    found: dict[str, None] = {}

    def told(inner: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if (question := _asked(inner, args, named, _operands(mesh, args, named))) is not None:
            found[_explained(inner, question)] = None
        return dispatch(Sharded, inner, types, args, kwargs)

    def without_data(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        block = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return Sharded(block, TensorSpec(mesh, P(), tuple(x.shape), x.dtype))

    tree: Any = (args, kwargs)
    given, named = optree.tree_map(without_data, tree, none_is_leaf=True)
    with (
        suppress(FspmdError, RuntimeError, TypeError, ValueError),  # of what gives no tensors
        torch.random.fork_rng([]),
        torch.no_grad(),
        intercept_dispatch(lambda _: told),
    ):
        if takes_tensors_alone(func):
            told(func, (), given, named)
        else:
            func(*given, **named)
        return list(found)
    return []


def _operands(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, TensorSpec]]:
    found: list[tuple[Any, TensorSpec]] = []
    for i, arg in enumerate((*args, *kwargs.values())):
        listed = isinstance(arg, (list, tuple))
        for k, one in enumerate(arg if listed else (arg,)):
            if isinstance(one, Tensor):
                found.append(((i, k) if listed else i, TensorSpec(mesh, P(), tuple(one.shape), one.dtype)))
    return found


def _explained(func: Any, question: Question) -> str:
    name = shown(func).removesuffix("()")
    factors, specs = question.factors, [spec for _, spec in question.operands]
    letters = _letters(question)

    def dims(own: Sequence[int | None]) -> str:
        return " ".join("1" if f is None else f"[{letters[f]}]" if f in factors.whole else letters[f] for f in own)

    sides = [", ".join(map(dims, side)) for side in (factors.operands, factors.results)]
    lines = [f"{name}({', '.join(repr(spec).partition(' on ')[0] for spec in specs)}): {sides[0]} -> {sides[1]}"]
    for case in _cases(question, letters):
        given = [spec.with_partition(partition) for spec, partition in zip(specs, case[1], strict=True)]
        asked = question.at(given)
        ways = map(asked.together, asked.solve(strategies))
        found = next((one for one in ways if _is(case, one, given)), None)
        if found is not None:
            layouts = ", ".join(repr(spec.partition.shortened) for spec in found.operands)
            results = ", ".join(repr(partition.shortened) for partition in found.results)
            lines.append(f"  {case[0]:14} {layouts} -> {results}{' by a body' if found.by_body else ''}")
    return "\n".join(lines)


def _letters(question: Question) -> dict[int, str]:
    """A name for each factor: that of its rule, or a letter."""
    found = {number: name for name, number in question.factors.names.items() if isinstance(name, str)}
    found = {number: name.strip("[]") for number, name in found.items()}
    free = (letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in found.values())
    for dims in (*question.factors.operands, *question.factors.results):
        for factor in dims:
            if factor is not None and factor not in found:
                found[factor] = next(free)
    return found


#: what an axis does, the layouts of the operands that suggest it, and the factor it shards; or the operand that waits
Case = tuple[str, list[P], int | None, int | None]


def _cases(question: Question, letters: dict[int, str]) -> list[Case]:
    factors, count, linear = question.factors, len(question.operands), question.linear
    found: list[Case] = []
    for factor, letter in letters.items():
        rows = ([own == factor and dims.count(factor) == 1 for own in dims] for dims in factors.operands)
        found.append((f"{letter} sharded", [P(*("x" if one else None for one in row)) for row in rows], factor, None))
    pending, settled = P(unreduced={"x"}), P()
    for waiting, _ in passed_on(factors, linear, count):
        first = min(waiting)
        what = "unreduced" if linear == "sum" or count == 1 else f"{first} unreduced"
        found.append((what, [pending if k in waiting else settled for k in range(count)], None, first))
    found.append(("reduced", [P(reduced={"x"})] * count, None, None))
    return [*found, ("whole", [P()] * count, None, None)]


def _is(case: Case, one: Strategy, given: list[TensorSpec]) -> bool:
    _, _, factor, waiting = case
    if factor is not None:
        return factor in one.axes
    return bool(one.operands[waiting].partition.unreduced) if waiting is not None else list(one.operands) == given
