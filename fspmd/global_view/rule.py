"""Rules of users' own: how a function acts on dims, in one line; and what a rule means, printed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, FspmdError
from fspmd.global_view.dispatch import dispatch, forget_plans, instead_of_dispatch
from fspmd.global_view.propagate import Question, ask
from fspmd.global_view.refusals import shown
from fspmd.global_view.strategies import Strategy, strategies
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.messages import counted, described
from fspmd.rules import (
    Factors,
    Row,
    Rule,
    Site,
    Whole,
    composite_of,
    handler_of,
    is_registered,
    match,
    parse,
    reducing,
    register,
    row_of,
)
from fspmd.sharded import Sharded, above, is_sharded
from fspmd.spec import P, TensorSpec

_LINEAR: Final = ("", "sum", "product", "first")


def rule(
    func: Callable[..., Any], pattern: str, *, linear: str = "", body: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Say how a function acts on the dims of its tensors; from then on it takes `Sharded` values.

    Args:
        func: A function of tensors: a Python one, an op of ``torch.library``, a torch function. On a block it must
            do what the pattern says: the same computation, on fewer elements.
        pattern: Operands, ``->``, results, in the order of the parameters: ``"m k, k n -> m n"``. A name is one dim
            of the computation wherever it stands. A dim that no result has is summed over: sharded, the result is a
            pending sum. ``[d]`` must be whole. ``1`` is a dim of any size that is never sharded, and so is one that
            some results have and others have not: a rule does not tell whether those are sums over it. ``...``
            stands for leading dims that broadcast.
        linear: Which pending sums (unreduced operands) it may be given: ``"sum"``, where all are; ``"product"``,
            where one is; ``"first"``, where the first is; ``""``, none: they are summed first.
        body: What runs where a dim in brackets is sharded, in the words of `shard_map`: ``body(site, *args)``, with
            ``site.axes["d"]`` the axes of that dim.

    Returns:
        The function to call: ``func`` itself where torch dispatches its calls, else one that dispatches them.

    Backward communicates as the rule says of forward: an operand that has not the sharded dim gets an all-reduce.

    Raises:
        ArgumentError: no rule can be read from the pattern; at a call, that its tensors are not as the pattern says.

    >>> import torch
    >>> from fspmd import P, device_put, make_mesh
    >>> def scores(q, k):
    ...     return torch.tanh(q @ k.mT)
    >>> scores = rule(scores, "... q [d], ... k [d] -> ... q k")
    >>> q = device_put(torch.ones(4, 8, 2), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> scores(q, torch.ones(4, 6, 2))
    Sharded f32[4@x, 8, 6] on mesh(x=4)
    """
    if not callable(func):
        raise ArgumentError(f"rule got {described(func)} for func; give it a function: rule(f, 'm k, k n -> m n')")
    if not isinstance(pattern, str):
        raise ArgumentError(f"rule got {described(pattern)} for pattern; write a string: rule(f, 'm k, k n -> m n')")
    if linear not in _LINEAR:
        raise ArgumentError(f"rule got linear={linear!r}; it is one of {', '.join(map(repr, _LINEAR))}")
    bodied = replace(reducing(2)(_checked(body, shown(func))), asks=True) if body is not None else None
    register(func, Row(_fitting(shown(func), pattern, body is not None), linear, body=bodied))
    forget_plans()
    if _is_dispatched(func):
        return func

    @functools.wraps(func)
    def with_rule(*args: Any, **kwargs: Any) -> Any:
        tree: Any = (args, kwargs)
        if any(type(x) is Sharded for x in optree.tree_leaves(tree, is_leaf=is_sharded)):
            return above.dispatch(func, (), args, kwargs)
        return func(*args, **kwargs)

    register(with_rule, row_of(func))  # type: ignore[arg-type]
    return with_rule


def _fitting(name: str, pattern: str, bodied: bool) -> Rule:
    """The rule written down, for calls that are as it says; of a dim in brackets a body may make another size."""
    parsed = parse(pattern)

    def fitting(whole: Whole) -> Factors:
        factors = match(parsed, whole.shapes)
        if wrong := next(_misfits(whole, factors, factors.whole if bodied else frozenset()), None):
            sides = (", ".join(str(tuple(shape)) for shape in shapes) for shapes in (whole.shapes, whole.results))
            raise ArgumentError(
                f"{name} is not as its rule {pattern!r} says: of shapes {' it made '.join(sides)}, and {wrong}; name "
                "each dim of operands and results, alike where it is the same dim, 1 for one that is no other"
            )
        return _without_partial(factors)

    return fitting


def _without_partial(factors: Factors) -> Factors:
    """Dims that some results have and others have not are never sharded: how those others would lie is unknown."""
    having = [frozenset(f for f in dims if f is not None) for dims in factors.results]
    partial = frozenset().union(*having) - frozenset.intersection(*having) - factors.whole
    if not partial:
        return factors
    sides = (factors.operands, factors.results)
    operands, results = (tuple(tuple(None if f in partial else f for f in dims) for dims in side) for side in sides)
    return factors._replace(operands=operands, results=results)


def _checked(body: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The body, what it gives compared with the blocks that its rule promises."""

    @functools.wraps(body)
    def checked(site: Site, *args: Any, **kwargs: Any) -> Any:
        out = body(site, *args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != len(site.results) or not all(isinstance(x, Tensor) for x in outs):
            found = ", ".join(map(described, outs))
            raise ArgumentError(f"the body of {name} gave {found}; its rule has {counted(len(site.results), 'result')}")
        for x, spec in zip(outs, site.results, strict=True):
            known = [
                n if not axes else spec.block_shape[d] if spec.even else None
                for d, (n, axes) in enumerate(zip(spec.shape, spec.partition, strict=True))
            ]
            if len(known) != x.ndim or any(n is not None and x.shape[d] != n for d, n in enumerate(known)):
                shape = tuple("any" if n is None else n for n in known)
                raise ArgumentError(f"the body of {name} gave {described(x)}; a block of {spec!r} is {shape}")
        return out

    return checked


def _misfits(whole: Whole, factors: Factors, free: frozenset[int]) -> Iterator[str]:
    """What is wrong with a rule for a call: numbers of tensors, of their dims, sizes of a dim."""
    names = {number: name for name, number in factors.names.items()}
    sizes: dict[int, int] = {}
    for what, shapes, sides in (
        ("operand", whole.shapes, factors.operands),
        ("result", whole.results, factors.results),
    ):
        if len(shapes) != len(sides):
            yield f"the rule has {counted(len(sides), what)}"
        for i, (shape, dims) in enumerate(zip(shapes, sides, strict=False)):
            if len(shape) != len(dims):
                yield f"{what} {i} has {counted(len(dims), 'dim')} in the rule"
            for factor, size in zip(dims, shape, strict=False):
                if factor is not None and factor not in free and sizes.setdefault(factor, size) != size:
                    yield f"{names[factor]!r} would be both {sizes[factor]} and {size}"


def _is_dispatched(func: Any) -> bool:
    """Whether a call with a `Sharded` reaches `dispatch` by itself."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or hasattr(func, "_opoverload"):
        return True
    return func in torch.overrides.get_testing_overrides()


def explain_rule(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What the rule of a function means for a call: for one mesh axis, each way to lay out operands and results.

    Args:
        func: A torch function, or one given to `rule`.
        args: An example of a call, with tensors of any sizes (on the meta device they hold no memory).
        kwargs: The same.

    Returns:
        Text: the dims of the computation, and one line for each thing that an axis ``x`` can do. Of a function without
        a rule the same of each that it is made of.

    Raises:
        ArgumentError: neither the function nor what it is made of has a rule for such a call.

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
    operands = _operands(mesh, args, kwargs)
    question = _asked(func, args, kwargs, operands) if operands else None
    if question is not None:
        return _explained(func, question)
    given = ", ".join(repr(spec).partition(" on ")[0] for _, spec in operands)
    if parts := _parts(mesh, func, args, kwargs) if operands and _is_dispatched(func) else []:
        return "\n".join([f"{shown(func).removesuffix('()')}({given}) is made of", *parts])
    raise ArgumentError(f"{shown(func)} of {given or 'no tensors'} has no rule; write one with fspmd.rule")


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Any) -> Question | None:
    known = is_registered(func) or (handler_of(func) is None and composite_of(func, args, kwargs) is None)
    return ask(func, args, kwargs, operands) if known else None


def _parts(mesh: Mesh, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What each call with a rule means that a call is made of; it runs once, on tensors without data."""
    found: dict[str, None] = {}

    def told(inner: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operands = _operands(mesh, args, kwargs or {})
        question = _asked(inner, args, kwargs or {}, operands) if operands else None
        if question is not None:
            found[_explained(inner, question)] = None
        return dispatch(Sharded, inner, types, args, kwargs)

    def without_data(x: Any) -> Any:
        if not isinstance(x, (Tensor, Sharded)):
            return x
        block = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return Sharded(block, TensorSpec(mesh, P(), tuple(x.shape), x.dtype))

    tree: Any = (args, kwargs)
    given, named = optree.tree_map(without_data, tree, is_leaf=is_sharded, none_is_leaf=True)
    with (
        suppress(FspmdError, RuntimeError),
        torch.random.fork_rng([]),
        torch.no_grad(),
        instead_of_dispatch(lambda _: told),
    ):
        func(*given, **named)
        return list(found)
    return []


def _operands(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, TensorSpec]]:
    found: list[tuple[Any, TensorSpec]] = []
    for i, arg in enumerate((*args, *kwargs.values())):
        listed = isinstance(arg, (list, tuple))
        for k, one in enumerate(arg if listed else (arg,)):
            if isinstance(one, (Tensor, Sharded)):
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
            layouts = ", ".join(repr(_short(spec.partition)) for spec in found.operands)
            results = ", ".join(repr(_short(partition)) for partition in found.results)
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
    if linear == "sum":
        found.append(("unreduced", [pending] * count, None, 0))
    for i in range({"product": count, "first": 1}.get(linear, 0)):
        what = "unreduced" if count == 1 else f"{i} unreduced"
        found.append((what, [pending if k == i else settled for k in range(count)], None, i))
    found.append(("reduced", [P(reduced={"x"})] * count, None, None))
    return [*found, ("whole", [P()] * count, None, None)]


def _is(case: Case, one: Strategy, given: list[TensorSpec]) -> bool:
    _, _, factor, waiting = case
    if factor is not None:
        return factor in one.axes
    return bool(one.operands[waiting].partition.unreduced) if waiting is not None else list(one.operands) == given


def _short(partition: P) -> P:
    """Without the dims at the end that are whole."""
    entries = list(partition)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries, unreduced=partition.unreduced, reduced=partition.reduced)
