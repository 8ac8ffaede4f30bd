"""Rules of users' own: how a function acts on dims, in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.global_view.dispatch import forget_plans
from fspmd.global_view.refusals import shown
from fspmd.messages import counted, described
from fspmd.rules import (
    FLOATS,
    NONE,
    Bodied,
    BodyLayout,
    Factors,
    Row,
    Rule,
    Site,
    Whole,
    match,
    parse,
    reducing,
    register,
    row_of,
)
from fspmd.sharded import Sharded, call_torch
from fspmd.torch_internals import OpOverload, OpOverloadPacket

_LINEAR: Final = ("", "sum", "product", "first")


def rule(
    func: Callable[..., Any],
    pattern: str,
    *,
    linear: str = "",
    body: Callable[..., Any] | None = None,
    price: float | Callable[[BodyLayout], float] = 2,
) -> Callable[..., Any]:
    """Say how a function acts on the dims of its tensors; from then on it takes `Sharded` values.

    Args:
        func: A function of tensors: a Python one, an op of ``torch.library``, a torch function. On a block it must
            do what the pattern says: the same computation, on fewer elements.
        pattern: Operands, ``->``, results, in the order of the parameters: ``"m k, k n -> m n"``. A name is one dim
            of the computation wherever it stands. A dim that no result has is summed over: sharded, the result is a
            pending sum. ``[d]`` must be whole. ``1`` is a dim of any size that is never sharded, and so is one that
            some results have and others have not: a rule does not tell whether those are sums over it. ``...``
            stands for leading dims that broadcast. Floats among the arguments change nothing of that.
        linear: Which pending sums (unreduced operands) it may be given: ``"sum"``, where all are; ``"product"``,
            where one is; ``"first"``, where the first is; ``""``, none: they are summed first.
        body: Runs where a dim in brackets is sharded, as the body of a `shard_map` does: ``body(site, *args)``. The
            `Site` tells the axes of that dim, ``site.axes["d"]``, and the layouts of operands and results.
        price: The collectives of the body, forward; backward takes the same. A number: so many all-reduces of one
            number for each row of the first operand along the dims in brackets. Or a function of the `BodyLayout` that
            gives µs. The body runs where that takes less time than to gather the dim.

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
    bodied = _priced(_checked(body, shown(func)), price) if body is not None else None
    free = FLOATS if body is None and _tells_sizes(pattern) else NONE
    register(func, Row(_fitting(shown(func), pattern, body is not None), linear, free=free, body=bodied))
    forget_plans()
    if is_dispatched(func):
        return func

    @functools.wraps(func)
    def with_rule(*args: Any, **kwargs: Any) -> Any:
        tree: Any = (args, kwargs)
        if any(type(x) is Sharded for x in optree.tree_leaves(tree)):
            return call_torch(func, args, kwargs)
        return func(*args, **kwargs)

    register(with_rule, row_of(func))  # type: ignore[arg-type]
    return with_rule


def _priced(body: Callable[..., Any], price: Any) -> Bodied:
    if callable(price):
        return Bodied(body, _in_numbers(price), asks=True)
    if not isinstance(price, (int, float)) or isinstance(price, bool) or not price >= 0:
        raise ArgumentError(
            f"rule got {described(price)} for price; give it a number of all-reduces, or a function of a BodyLayout "
            "that gives µs: price=lambda layout: layout.price('reduce', layout.row_bytes(), layout.row_bytes())"
        )
    return replace(reducing(price)(body), asks=True)


def _in_numbers(price: Callable[[BodyLayout], Any]) -> Callable[[BodyLayout], float]:
    def time(layout: BodyLayout) -> float:
        found = price(layout)
        if not isinstance(found, (int, float)) or not found >= 0:
            raise ArgumentError(
                f"the price of a body gave {described(found)}; it gives µs, 0 or more: price=lambda layout: "
                "layout.price('reduce', layout.row_bytes(), layout.row_bytes())"
            )
        return found

    return time


def _tells_sizes(pattern: str) -> bool:
    """Whether the sizes of the results are those of dims of operands, on which no number bears."""
    return all("1" not in dims for dims in parse(pattern).results)


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


def is_dispatched(func: Any) -> bool:
    """Whether a call with a `Sharded` reaches `dispatch` by itself."""
    if isinstance(func, (OpOverload, OpOverloadPacket)) or hasattr(func, "_opoverload"):
        return True
    return func in torch.overrides.get_testing_overrides()
