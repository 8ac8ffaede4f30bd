"""The leaves that are differentiated: plain tensors and `Sharded`, and how gradients take their layout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.sharded import Sharded, dual
from fspmd.trees import key_path
from fspmd.variance import get_variance, set_variance, show

transforms_active = torch._C._are_functorch_transforms_active
Function = Callable[..., Any]


class _Depth(threading.local):
    value = 0


DEPTH = _Depth()


@contextmanager
def differentiating() -> Any:
    DEPTH.value += 1
    try:
        yield
    finally:
        DEPTH.value -= 1


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)
    return leaves, treedef


def local_of(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def like(leaf: Any, value: Tensor) -> Any:
    return Sharded(value, leaf.spec) if isinstance(leaf, Sharded) else value


def gradient_like(leaf: Any, value: Tensor) -> Any:
    return Sharded(value, dual(leaf.spec)) if isinstance(leaf, Sharded) else value


def differentiable(leaf: Any) -> bool:
    x = local_of(leaf)
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def check_leaf(leaf: Any, path: tuple[Any, ...], what: str, argument: str) -> None:
    if not differentiable(leaf):
        x = local_of(leaf)
        given = f"a {x.dtype} tensor" if isinstance(x, Tensor) else f"a {type(leaf).__name__}"
        raise ArgumentError(
            f"{what}: {argument}{key_path(path)} is {given}, which has no derivative; differentiate with respect to "
            "floating-point tensors only (see argnums), or convert it: x.to(torch.float32)"
        )


def check_argnums(argnums: Any, count: int, what: str) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, (tuple, list)) or not numbers or not all(type(i) is int for i in numbers):
        raise ArgumentError(f"{what} got argnums={argnums!r}; expected an int or a tuple of ints, such as 0 or (0, 1)")
    if wrong := [i for i in numbers if not -count <= i < count]:
        raise ArgumentError(
            f"{what} got argnums={argnums!r}, but the function was called with {count} positional arguments; "
            f"{wrong} is out of range"
        )
    chosen = tuple(i % count for i in numbers)
    if len(set(chosen)) < len(chosen):
        raise ArgumentError(f"{what} got argnums={argnums!r}, which names an argument twice")
    return chosen


def typed(x: Tensor, like: Tensor) -> Tensor:
    return set_variance(x, get_variance(like))


def detached(tree: Any) -> Any:
    return optree.tree_map(
        lambda x: like(x, typed(local_of(x).detach(), local_of(x))) if isinstance(local_of(x), Tensor) else x,
        tree,
        is_leaf=is_sharded,
        none_is_leaf=True,
    )


def show_leaf(x: Any) -> str:
    return show(x) if isinstance(x, Tensor) else repr(x) if isinstance(x, Sharded) else f"a {type(x).__name__}"


def stop_gradient(tree: Any) -> Any:
    """The same values, not followed by autograd.

    >>> from fspmd import grad
    >>> grad(lambda x: (stop_gradient(x) * x).sum())(torch.tensor([2.0, 3.0]))
    tensor([2., 3.])
    """
    return detached(tree)
