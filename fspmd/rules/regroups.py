"""Reshapes that move elements: of a sharded dim that is not the first of its group, or whose blocks change.

The elements of a group of dims are split into rows, as long as the boundaries of all blocks allow. Each rank fetches
the rows of its new block that it lacks, in one all-to-all.
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
    """The blocks of a group of dims, in its elements: ``times`` periods of ``width`` elements, each cut into parts."""

    times: int
    width: int
    parts: tuple[tuple[int, int], ...]  # (offset, length) of each block in a period
    sizes: tuple[int, ...]  # of the dims of a block; -1 for the cut dim

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
        """The greatest length that divides all offsets and lengths of blocks."""
        return gcd(self.width, *(start for start, _ in self.parts))

    def rows(self, unit: int, at: int) -> Tensor:
        """Return the rows of ``unit`` elements that a block has, in order."""
        start, length = self.parts[at]
        within = torch.arange(start // unit, (start + length) // unit)
        return (torch.arange(self.times)[:, None] * (self.width // unit) + within).flatten()


def regrouped(site: Site, x: Tensor, source: Sequence[int], target: Sequence[int], shift: int = 0) -> Tensor:
    """Reshape the dims ``source`` into the dims ``target``; ``shift``: all elements first move on by so many places."""
    before, after, at = site.operands[0], site.results[0], target[0]
    flat = x.flatten(at, at + len(source) - 1)
    sizes: Sequence[int] = [after.shape[d] for d in target]
    if (cut := next((d for d in source if before.partition[d] is not None), None)) is not None:
        axes = site.axes[cut]
        old, new = (_Repeats.of(site, spec, dims, axes, cut) for spec, dims in ((before, source), (after, target)))
        unit, count = gcd(old.unit, new.unit, shift), old.times * old.width
        sizes = new.sizes
        if not site.once(("aligned", at), lambda: not shift and _alike(old, new, unit)):
            flat = exchanged(
                site,
                ("rows", at),
                flat.unflatten(at, (-1, unit)),
                at,
                axes,
                lambda at: old.rows(unit, at),
                lambda at: (new.rows(unit, at) - shift // unit) % (count // unit),
            ).flatten(at, at + 1)
    out: Tensor = flat.unflatten(at, sizes)
    return out


def _alike(old: _Repeats, new: _Repeats, unit: int) -> bool:
    return all(torch.equal(old.rows(unit, at), new.rows(unit, at)) for at in range(len(old.parts)))


@passing
def reshape(site: Site, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The body of reshapes: group by group; dims of size 1 appear or vanish."""
    for source, target in groups(site.operands[0].shape, site.results[0].shape):
        if not target:
            x = x.squeeze(len(x.shape) - (len(site.operands[0].shape) - source[0]))
        elif not source:
            x = x.unsqueeze(target[0])
        elif len(source) > 1 or len(target) > 1:
            x = regrouped(site, x, source, target)
    return x
