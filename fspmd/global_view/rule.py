"""`rule`: rules for functions of the user, in one line."""

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
    ShapedCall,
    Site,
    match,
    parse,
    reducing,
    register,
    row_of,
)
from fspmd.sharded import Sharded, call_torch
from fspmd.torch_internals import OpOverload, OpOverloadPacket, op_of

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
        pattern: Operands, ``->``, results, in the order of the parameters: ``"m k, k n -> m n"``. A name is one factor
            of the computation, in all places. The function sums over a factor that no result has: if it is sharded, the
            result is a pending sum. A dim ``[d]`` must be whole. ``1`` is a dim of any size that is never sharded. A
            factor that some results have and others lack is never sharded either. ``...`` stands for leading dims that
            broadcast. Floats among the arguments must not change any of this.
        linear: The operands that may be pending sums: all together (``"sum"``), any one of them (``"product"``), the
            first (``"first"``), or none (``""``). Other pending sums are settled before the call.
        body: Runs where a dim in brackets is sharded, typed like the body of a `shard_map`: ``body(site, *args)``. The
            `Site` has the axes of that dim, ``site.axes["d"]``, and the layouts of operands and results.
        price: The time of the body's collectives, forward; backward takes the same. A number counts all-reduces of one
            number per row of the first operand, where rows run along the dims in brackets. A function takes the
            `BodyLayout` and returns µs. The body runs if that is less than the time to gather the dim.

    Returns:
        The function to call: ``func`` itself if torch dispatches its calls, otherwise a function that dispatches them.

    Backward communicates as follows from the rule: the gradient of an operand without the sharded factor is an
    all-reduce.

    Raises:
        ArgumentError: The pattern is not a rule; or, at a call, the tensors do not fit the pattern.

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
        raise ArgumentError(f"rule got linear={linear!r}; write one of {', '.join(map(repr, _LINEAR))}")
    row_body = _priced(_checked(body, shown(func)), price) if body is not None else None
    free = FLOATS if body is None and _tells_sizes(pattern) else NONE
    register(func, Row(_fitting(shown(func), pattern, body is not None), linear, free=free, body=row_body))
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
        microseconds = price(layout)
        if not isinstance(microseconds, (int, float)) or not microseconds >= 0:
            raise ArgumentError(
                f"the price of a body gave {described(microseconds)}; return µs, 0 or more: price=lambda layout: "
                "layout.price('reduce', layout.row_bytes(), layout.row_bytes())"
            )
        return microseconds

    return time


def _tells_sizes(pattern: str) -> bool:
    """Whether all sizes of the results are sizes of operands, so that no number among the arguments decides them."""
    return all("1" not in dims for dims in parse(pattern).results)


def _fitting(name: str, pattern: str, has_body: bool) -> Rule:
    """Return the rule of a pattern. It checks each call; a dim in brackets may change its size if there is a body."""
    parsed = parse(pattern)

    def fitting(call: ShapedCall) -> Factors:
        factors = match(parsed, call.shapes)
        if wrong := next(_misfits(call, factors, factors.whole if has_body else frozenset()), None):
            sides = (", ".join(str(tuple(shape)) for shape in shapes) for shapes in (call.shapes, call.results))
            raise ArgumentError(
                f"{name} does not fit its rule {pattern!r}: of shapes {' it made '.join(sides)}, and {wrong}; name "
                "each dim of operands and results, the same dim by the same name, and a dim that stands alone 1"
            )
        return _without_partial(factors)

    return fitting


def _without_partial(factors: Factors) -> Factors:
    """Return the factors without those that only some results have: the layout of the other results is unknown."""
    having = [frozenset(f for f in dims if f is not None) for dims in factors.results]
    partial = frozenset().union(*having) - frozenset.intersection(*having) - factors.whole
    if not partial:
        return factors
    sides = (factors.operands, factors.results)
    operands, results = (tuple(tuple(None if f in partial else f for f in dims) for dims in side) for side in sides)
    return factors._replace(operands=operands, results=results)


def _checked(body: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the body with a check of its results against the blocks of its rule."""

    @functools.wraps(body)
    def checked(site: Site, *args: Any, **kwargs: Any) -> Any:
        out = body(site, *args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != len(site.results) or not all(isinstance(x, Tensor) for x in outs):
            given = ", ".join(map(described, outs))
            raise ArgumentError(
                f"the body of {name} gave {given}, but its rule has {counted(len(site.results), 'result')}; return a "
                "tensor for each"
            )
        for x, spec in zip(outs, site.results, strict=True):
            known = [
                n if not axes else spec.block_shape[d] if spec.even else None
                for d, (n, axes) in enumerate(zip(spec.shape, spec.partition, strict=True))
            ]
            if len(known) != x.ndim or any(n is not None and x.shape[d] != n for d, n in enumerate(known)):
                shape = tuple("any" if n is None else n for n in known)
                raise ArgumentError(
                    f"the body of {name} gave {described(x)}, but a block of {spec!r} has shape {shape}; return a block"
                )
        return out

    return checked


def _misfits(call: ShapedCall, factors: Factors, free: frozenset[int]) -> Iterator[str]:
    """Yield the differences of a rule and a call: in the number of tensors, of dims, or in the sizes of a factor."""
    names = {number: name for name, number in factors.names.items()}
    sizes: dict[int, int] = {}
    for role, shapes, sides in (
        ("operand", call.shapes, factors.operands),
        ("result", call.results, factors.results),
    ):
        if len(shapes) != len(sides):
            yield f"the rule has {counted(len(sides), role)}"
        for i, (shape, dims) in enumerate(zip(shapes, sides, strict=False)):
            if len(shape) != len(dims):
                yield f"{role} {i} has {counted(len(dims), 'dim')} in the rule"
            for factor, size in zip(dims, shape, strict=False):
                if factor is not None and factor not in free and sizes.setdefault(factor, size) != size:
                    yield f"{names[factor]!r} would be both {sizes[factor]} and {size}"


def is_dispatched(func: Any) -> bool:
    """Whether torch dispatches a call with a `Sharded` to `dispatch`."""
    if isinstance(op_of(func), (OpOverload, OpOverloadPacket)):
        return True
    return func in torch.overrides.get_testing_overrides()
