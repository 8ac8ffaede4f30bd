"""Reshapes of a sharded dim that is not the leading one of its group, or whose blocks are not the result's.

The elements of a group of dims are rows, as long as the boundaries of all blocks allow; each rank fetches those of its
new block that it lacks, in one all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.rules.bodies import Site
from fspmd.rules.views import groups
from fspmd.rules.windows import exchanged, passing
from fspmd.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class _Repeats:
    """How blocks lie in the elements of a group: ``width`` of them again and again, of which each has a part."""

    times: int
    width: int
    parts: tuple[tuple[int, int], ...]  # of each block (offset, length) in a width
    sizes: tuple[int, ...]  # of the dims of a block, -1 for that which is cut

    @classmethod
    def of(cls, site: Site, spec: TensorSpec, dims: Sequence[int], axes: tuple[str, ...], key: int) -> _Repeats:
        sizes = [spec.shape[d] for d in dims]
        place = next(i for i, d in enumerate(dims) if entry_axes(spec.partition[d]) == axes)
        inner = prod(sizes[place + 1 :])
        parts = tuple((start * inner, length * inner) for start, length in site.blocks(sizes[place], key))
        width = sizes[place] * inner
        sizes[place] = -1
        return cls(prod(sizes[:place]), width, parts, tuple(sizes))

    @property
    def unit(self) -> int:
        """Of which all blocks are multiples, and all their places."""
        return gcd(self.width, *(start for start, _ in self.parts))

    def rows(self, unit: int, at: int) -> Tensor:
        """The rows, of so many elements, that a block has, in order."""
        start, length = self.parts[at]
        within = torch.arange(start // unit, (start + length) // unit)
        return (torch.arange(self.times)[:, None] * (self.width // unit) + within).flatten()


def regrouped(site: Site, x: Tensor, source: Sequence[int], target: Sequence[int], shift: int = 0) -> Tensor:
    """Dims of the operand as dims of the result, in whose place they are; ``shift``: the elements moved on."""
    before, after, at = site.operands[0], site.results[0], target[0]
    flat = x.flatten(at, at + len(source) - 1)
    sizes: Sequence[int] = [after.shape[d] for d in target]
    if (cut := next((d for d in source if before.partition[d] is not None), None)) is not None:
        axes = site.axes[cut]
        held, new = (_Repeats.of(site, spec, dims, axes, cut) for spec, dims in ((before, source), (after, target)))
        unit, count = gcd(held.unit, new.unit, shift), held.times * held.width
        sizes = new.sizes
        if not site.once(("aligned", at), lambda: not shift and _alike(held, new, unit)):
            flat = exchanged(
                site,
                ("rows", at),
                flat.unflatten(at, (-1, unit)),
                at,
                axes,
                lambda at: held.rows(unit, at),
                lambda at: (new.rows(unit, at) - shift // unit) % (count // unit),
            ).flatten(at, at + 1)
    out: Tensor = flat.unflatten(at, sizes)
    return out


def _alike(held: _Repeats, new: _Repeats, unit: int) -> bool:
    return all(torch.equal(held.rows(unit, at), new.rows(unit, at)) for at in range(len(held.parts)))


@passing
def reshape(site: Site, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Group by group; dims of size 1 come and go."""
    for source, target in groups(site.operands[0].shape, site.results[0].shape):
        if not target:
            x = x.squeeze(len(x.shape) - (len(site.operands[0].shape) - source[0]))
        elif not source:
            x = x.unsqueeze(target[0])
        elif len(source) > 1 or len(target) > 1:
            x = regrouped(site, x, source, target)
    return x
