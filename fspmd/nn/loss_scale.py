"""A scale of the loss as a value, for gradients in float16 (Micikevicius et al., "Mixed Precision Training", 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.body import state
from fspmd.collectives import psum
from fspmd.placement.device_put import device_get
from fspmd.sharded import is_sharded
from fspmd.variance import get_variance


class LossScale(NamedTuple):
    """A power of two by which a loss is multiplied, so that its small gradients do not underflow. It is a pytree.

    Attributes:
        scale: The factor, a 0-d tensor.
        steps: The number of steps without overflow since it last changed, a 0-d tensor.

    >>> scale = LossScale.of(1024.0)
    >>> grads, finite = scale.unscaled({"w": torch.tensor([512.0, float("inf")])})
    >>> finite, scale.after(finite).scale
    (tensor(False), tensor(512.))
    """

    scale: Tensor
    steps: Tensor

    @classmethod
    def of(cls, scale: float = 65536.0, device: Any = None) -> LossScale:
        """A scale to begin with."""
        return cls(torch.tensor(scale, device=device), torch.zeros((), dtype=torch.int64, device=device))

    def scaled(self, loss: Any) -> Any:
        """The loss, times the scale. A pending sum stays pending."""
        return loss * self.scale.to(loss.dtype)

    def unscaled(self, grads: Any) -> tuple[Any, Tensor]:
        """The gradients of the loss itself, and whether all of them are finite, as `all_finite` says."""
        finite = all_finite(grads)
        return optree.tree_map(lambda g: g / self.scale.to(g.dtype), grads, is_leaf=is_sharded), finite

    def after(self, finite: Tensor, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
        """The scale of the next step: larger after ``interval`` finite steps, smaller after one that is not finite."""
        grows = finite & (self.steps + 1 >= interval)
        scale = torch.where(finite, torch.where(grows, self.scale * growth, self.scale), self.scale * backoff)
        return LossScale(scale, torch.where(finite & ~grows, self.steps + 1, 0))


def all_finite(tree: Any) -> Tensor:
    """Whether all elements of all leaves are finite: a 0-d bool tensor, equal on all ranks.

    Communication: an all-reduce of a number for each layout (in a body, for each type) among the leaves.

    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> all_finite(device_put({"w": torch.tensor([1.0, 2.0, 3.0, float("nan")])}, P("x"), mesh=mesh))
    tensor(False)
    """
    counts: dict[Any, list[Any]] = {}
    for x in optree.tree_leaves(tree, is_leaf=is_sharded):
        count = (~x.isfinite()).sum()
        counts.setdefault(count.spec if is_sharded(count) else get_variance(count), []).append(count)
    totals = list(map(_total, counts.values())) or [torch.zeros((), dtype=torch.int64)]
    return torch.stack(totals).sum() == 0


def selected(condition: Tensor, new: Any, old: Any) -> Any:
    """The leaves of one tree or of another, without asking on the host: ``new`` where the condition holds.

    >>> selected(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    return optree.tree_map(lambda x, y: torch.where(condition, x, y), new, old, is_leaf=is_sharded)


def _total(counts: Iterable[Any]) -> Tensor:
    """The sum of counts that lie alike, on all ranks."""
    total: Any = torch.stack(list(counts)).sum()
    if state.body is None:
        total = device_get(total) if is_sharded(total) else total
    elif varying := get_variance(total).varying:
        total = psum(total, tuple(sorted(varying)))
    return total  # type: ignore[no-any-return]
