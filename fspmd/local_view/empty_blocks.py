"""Calls on empty blocks whose gradients are connected to the graph, as those of blocks with elements are.

For an empty block torch often makes new zeros as the gradient, which depend on nothing. In gradients of gradients this
rank would then skip the collectives on that path, and the other ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.local_view.modes import BodyMode
from fspmd.ops.traits import OPS, learn
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.torch_internals import DisableTorchFunction, execution_engine, plain_apply, transforms_active


def call_with_empty_blocks(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function without side effects. The gradient of an empty operand depends on what others' would."""
    if not torch.is_grad_enabled() or transforms_active() or not any(map(_is_empty, (*args, *kwargs.values()))):
        return func(*args, **kwargs)
    leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
    followed = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    call = func, [_outline(x) for x in leaves], treedef
    link = _AnchoredCall(call, followed, [zero_depending_on(leaves[i]) for i in followed])
    for place, i in enumerate(followed):
        leaves[i] = _operand(leaves[i], link, place)
    args, kwargs = optree.tree_unflatten(treedef, leaves)
    return optree.tree_map(link.result, func(*args, **kwargs))


class ConnectingMode(BodyMode):
    """The mode of an unchecked body of uneven blocks on processes, in which no tracker sees the torch calls."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = OPS.get(func) or learn(func)
        return call_with_empty_blocks(func, *args, **kwargs) if op.pure else func(*args, **kwargs)


def _is_empty(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.requires_grad and x.numel() == 0
    return isinstance(x, (list, tuple)) and any(map(_is_empty, x))


def zero_depending_on(x: Tensor) -> Tensor:
    """Returns a zero that depends on ``x`` and saves nothing: `checkpoint` counts what is saved."""
    zero = x.flatten()[:0].sum()
    return zero.real if zero.is_complex() else zero


def _outline(x: Any) -> Any:
    """Returns a meta tensor like ``x`` with size 1 in place of 0, for a trial; another value as it is."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty([max(1, size) for size in x.shape], dtype=x.dtype, device="meta")


class _AnchoredCall:
    """One call: anchors of its operands, the gradients that have arrived at its results, and a way to try it."""

    def __init__(self, call: tuple[Any, list[Any], Any], followed: Sequence[int], anchors: list[Tensor]) -> None:
        self.call = call
        self.followed = followed
        self.anchors = anchors
        self.arrived: list[Tensor] = []  # zeros until they arrive

    def result(self, x: Any) -> Any:
        """Returns a result of the call, whose gradient will be noted."""
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        self.arrived.append(x.new_zeros(()))
        return _result(x, self, len(self.arrived) - 1)

    def arrive(self, place: int, g: Tensor) -> None:
        """Note the gradient of a result until backward ends: its graph may hold this."""
        self.arrived[place] = g
        if g.requires_grad:
            zero = g.new_zeros(())
            execution_engine.queue_callback(lambda: self.arrived.__setitem__(place, zero))

    def sources(self, place: int) -> list[Tensor]:
        """Returns what the gradient of a non-empty operand would depend on: operands, and gradients of results."""
        dependencies = _dependencies(*self.call, self.followed)
        if dependencies is None:  # the trial failed; any gradient depends on those of results
            return self.arrived
        return [x for x, needed in zip((*self.anchors, *self.arrived), dependencies[place], strict=True) if needed]


def _dependencies(func: Any, leaves: list[Any], treedef: Any, followed: Sequence[int]) -> list[list[bool]] | None:
    """Returns for each operand whether its gradient depends on each operand, and on the gradient of each result."""
    leaves = list(leaves)
    operands = [leaves[i].requires_grad_() for i in followed]
    try:
        with DisableTorchFunction(), torch.enable_grad(), without_saved_tensor_hooks():
            args, kwargs = optree.tree_unflatten(treedef, leaves)
            out = optree.tree_leaves(func(*args, **kwargs))
            results = [x for x in out if isinstance(x, Tensor) and x.requires_grad]
            given = [torch.empty_like(x).requires_grad_() for x in results]
            gradients = torch.autograd.grad(results, operands, given, create_graph=True, allow_unused=True)
            return [
                [h is not None for h in torch.autograd.grad(g.abs().sum(), [*operands, *given], allow_unused=True)]
                if g is not None and g.requires_grad
                else [False] * (len(operands) + len(given))
                for g in gradients
            ]
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None


class _TiedToAnchors(torch.autograd.Function):
    """The identity. Its gradient depends on the sources of the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _AnchoredCall, place: int) -> Tensor:
        ctx.link, ctx.place = link, place
        return x.detach()  # no view: it may be written into

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            for source in ctx.link.sources(ctx.place):
                if source.requires_grad:
                    g = g + zero_depending_on(source).to(g.dtype)
        return g, None, None


class _NotedGradient(torch.autograd.Function):
    """The identity. It notes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _AnchoredCall, place: int) -> Tensor:
        ctx.link, ctx.place = link, place
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.link.arrive(ctx.place, g)
        return g, None, None


_operand = plain_apply(_TiedToAnchors)
_result = plain_apply(_NotedGradient)
