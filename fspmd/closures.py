"""Tensors that a function closes over, found in the autograd graph of its results.

A checked body casts them as any operand. An unchecked one has no eyes: without types their gradients would not be
summed over ranks, so the graph is searched for a way out of the body that does not lead through an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fspmd.errors import ArgumentError

INNER: Final = "_fspmd_inner"  # set on the autograd leaves that grad and vjp make for themselves
_LEAF: Final[Any] = getattr(torch._C._functions, "AccumulateGrad")  # noqa: B009


def now() -> int:
    """A number that graph nodes made later exceed."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _graph(outputs: Iterable[Any], without: set[Node]) -> Iterator[Any]:
    """The nodes that the outputs were computed by, except what lies behind ``without``."""
    seen = set(without)
    stack = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend([parent for parent, _ in node.next_functions if parent is not None])


def depends_on_others(outputs: Iterable[Any], inputs: list[Tensor]) -> bool:
    """Whether the outputs were computed from autograd leaves other than ``inputs``."""
    for node in _graph(outputs, set()):
        if type(node) is _LEAF:
            leaf = node.variable
            if not hasattr(leaf, INNER) and all(leaf is not x for x in inputs):
                return True
    return False


def check_no_closures(outputs: Iterable[Any], arguments: Iterable[Any], start: int, name: str) -> bool:
    """Raise `ArgumentError` if a result depends on a differentiable tensor that is no argument.

    Returns whether there was a graph to search.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    inputs = {get_gradient_edge(x).node for x in arguments if isinstance(x, Tensor) and x.requires_grad}
    searched = False
    for node in _graph(outputs, inputs):
        searched = True
        leaf = node.variable if type(node) is _LEAF else None
        if leaf is None and node._sequence_nr() >= start:
            continue
        if leaf is None or not hasattr(leaf, INNER):
            what = f"a tensor of shape {tuple(leaf.shape)}" if leaf is not None else "a tensor computed outside"
            raise ArgumentError(
                f"{name} runs with check_vma=False and closes over {what} that requires grad; its gradient would be "
                "each rank's own, not their sum: pass it as an argument with its spec in in_specs, or use "
                "check_vma=True"
            )
    return searched
