"""Tensors that an unchecked body closes over: without types their gradients would not be summed over ranks.

A checked body casts them as any operand. An unchecked one has no eyes, so the graph of the first run is searched, once
per plan, for a way out of the body that does not lead through an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fspmd.errors import ArgumentError


def now() -> int:
    """A number that graph nodes made later exceed."""
    number: int = torch.autograd._get_sequence_nr()
    return number


def check_no_closures(outputs: Iterable[Any], arguments: Iterable[Any], start: int, name: str) -> bool:
    """Raise `ArgumentError` if a result depends on a differentiable tensor that is no argument.

    Returns whether there was a graph to search.
    """
    roots = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    if not roots or torch._C._are_functorch_transforms_active():
        return False
    allowed = {get_gradient_edge(x).node for x in arguments if isinstance(x, Tensor) and x.requires_grad}
    seen: set[Node] = set()
    stack = [root for root in roots if root not in allowed]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None or node._sequence_nr() < start:
            what = f"a tensor of shape {tuple(leaf.shape)}" if leaf is not None else "a tensor computed outside"
            raise ArgumentError(
                f"{name} runs with check_vma=False and closes over {what} that requires grad; its gradient would be each "
                "rank's own, not their sum: pass it as an argument with its spec in in_specs, or use check_vma=True"
            )
        stack.extend(parent for parent, _ in node.next_functions if parent is not None and parent not in allowed)
    return True
