"""The rules of functions that rearrange dims: permutations, reshapes, expansions.

A reshape moves elements if a sharded dim is not the first of its group, or if blocks change. The elements of a group of
dims are split into rows, as long as the boundaries of all blocks allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.rules.bodies import Site
from fspmd.rules.factors import Dims, Factors, Rule, Shape, ShapedCall
from fspmd.rules.windows import exchanged, passing
from fspmd.spec import TensorSpec


def permuted(order: Callable[[ShapedCall], Sequence[int | None]]) -> Rule:
    """Return the rule of a function that permutes dims."""
    return lambda call: Factors((tuple(range(call.ndim)),), (tuple(order(call)),))


def transposed(call: ShapedCall) -> Dims:
    """The order of dims after ``transpose``."""
    if not call.ndim:
        return ()
    first = call.argument(1, "dim0", call.kwargs.get("axis0"))
    second = call.argument(2, "dim1", call.kwargs.get("axis1"))
    order = list(range(call.ndim))
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def in_order(call: ShapedCall) -> Dims:
    """The order of dims after ``permute``."""
    return call.dims(1, "dims")


def moved(call: ShapedCall) -> Dims:
    """The order of dims after ``movedim``."""
    if not call.ndim:
        return ()
    sources, targets = call.argument(1, "source"), call.argument(2, "destination")
    sources, targets = ([d % call.ndim for d in ((v,) if isinstance(v, int) else v)] for v in (sources, targets))
    order: list[int | None] = [None] * call.ndim
    for s, t in zip(sources, targets, strict=True):
        order[t] = s
    rest = iter(d for d in range(call.ndim) if d not in sources)
    return tuple(next(rest) if d is None else d for d in order)


def reversed_dims(call: ShapedCall) -> Dims:
    """The dims in reversed order."""
    return tuple(reversed(range(call.ndim)))


def last_swapped(call: ShapedCall) -> Dims:
    """The order of dims with the last two exchanged."""
    n = call.ndim
    return (*range(n - 2), n - 1, n - 2) if n > 1 else tuple(range(n))


def squeezed(call: ShapedCall) -> Factors:
    """The rule of ``squeeze``: the named dims of size 1 vanish."""
    ones = [d for d, size in enumerate(call.shapes[0]) if size == 1]
    gone = set(ones) & set(call.dims(1, "dim")) if call.argument(1, "dim") != () else set[int]()
    kept = tuple(None if d in gone else d for d in range(call.ndim))
    return Factors((kept,), (tuple(d for d in kept if d is not None),))


def unsqueezed(call: ShapedCall) -> Factors:
    """The rule of ``unsqueeze``: the new dim of size 1 is not sharded."""
    dim, every = call.argument(1, "dim") % (call.ndim + 1), range(call.ndim)
    return Factors((tuple(every),), ((*every[:dim], None, *every[dim:]),))


def expanded(call: ShapedCall) -> Factors:
    """The rule of ``expand``: new leading dims, and dims of size 1 that grow, are whole."""
    before, after = call.shapes[0], call.results[0]
    new = len(after) - len(before)
    kept = [d if before[d] == after[d + new] else None for d in range(len(before))]
    return Factors((tuple(kept),), ((*(None,) * new, *kept),))


def expand_blocks(factors: Factors, before: Shape, after: Shape, x: Tensor) -> Tensor:
    """Expand a block along the dims that grow."""
    return x.expand([size if factor is None else -1 for factor, size in zip(factors.results[0], after, strict=True)])


def bits(call: ShapedCall) -> Factors:
    """The rule of ``view(dtype)``: if the dtypes differ in size, the last dim must be whole."""
    dims: list[int | None] = list(range(call.ndim))
    if call.shapes[0] != call.results[0]:
        dims[-1] = None
    return Factors((tuple(dims),), (tuple(dims),))


# --- reshapes: the same elements in the same order --------------------------------------------------------------------


def reshaped(call: ShapedCall) -> Factors:
    """The rule of reshapes, by groups of dims whose sizes have equal products.

    The leading dim of a group may stay sharded, if its blocks are blocks of the result. So may a dim of size 1 that
    stands between the same dims before and after. With a body, any dim of one group may be sharded, as any dim of that
    group in the result.
    """
    before, after = call.shapes[0], call.results[0]
    operand: list[int | None] = [None] * len(before)
    result: list[int | None] = [None] * len(after)
    pairs: list[tuple[list[int], list[int]]] = []
    for source, target in groups(before, after):
        pair = [d for d in source if before[d] != 1], [d for d in target if after[d] != 1]
        if all(pair):
            operand[pair[0][0]] = result[pair[1][0]] = pair[0][0]
            if source != [pair[0][0]] or target != [pair[1][0]]:
                pairs.append(pair)
    leading = Factors((tuple(operand),), (tuple(result),))
    alternatives = tuple(
        _reading(leading, pair, s, t) for pair in pairs for s in pair[0] for t in _large_first(pair[1], after)
    )
    new = _ones(after)
    for gap, ones in _ones(before).items():
        for s, t in zip(ones, new.get(gap, ()), strict=False):
            operand[s] = result[t] = s
    return Factors((tuple(operand),), (tuple(result),), alternatives=alternatives)


def _ones(shape: Shape) -> dict[int, list[int]]:
    """Return the dims of size 1, by the number of other dims before them."""
    by_gap: dict[int, list[int]] = {}
    others = 0
    for d, size in enumerate(shape):
        if size == 1:
            by_gap.setdefault(others, []).append(d)
        else:
            others += 1
    return by_gap


def vanishing(before: Shape, after: Shape) -> list[int]:
    """Return the dims of size 1 that a reshape drops."""
    kept = _ones(after)
    return [d for gap, ones in _ones(before).items() for d in ones[len(kept.get(gap, ())) :]]


def _reading(leading: Factors, pair: tuple[list[int], list[int]], s: int, t: int) -> Factors:
    """Return the reading in which, in the group ``pair``, dim ``s`` of the operand is dim ``t`` of the result."""
    operand = (None if d in pair[0] and d != s else s if d == s else f for d, f in enumerate(leading.operands[0]))
    result = (s if d == t else None if d in pair[1] else f for d, f in enumerate(leading.results[0]))
    return Factors((tuple(operand),), (tuple(result),), whole=frozenset({s}))


def _large_first(dims: list[int], sizes: Shape) -> list[int]:
    """Sort dims by their size up to `_LARGE`, which most meshes can cut; dims as large stay in their order."""
    return sorted(dims, key=lambda d: -min(sizes[d], _LARGE))


_LARGE = 8


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of adjacent dims, before and after, whose sizes have equal products."""
    if 0 in before:
        return [(list(range(len(before))), [])]
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        source: list[int] = []
        target: list[int] = []
        a = b = 1
        while (not source and not target) or a != b:
            if (a <= b and i < len(before)) or j == len(after):
                source.append(i)
                a *= before[i]
                i += 1
            else:
                target.append(j)
                b *= after[j]
                j += 1
        runs.append((source, target))
    return runs


def reshape_blocks(factors: Factors, before: Shape, after: Shape, x: Tensor) -> Tensor:
    """Reshape a block of the operand to a block of the result."""
    sizes: list[Any] = list(after)
    for d, factor in enumerate(factors.results[0]):
        if factor is not None:
            sizes[d] = x.shape[factor] * after[d] // before[factor] if before[factor] else after[d]
    return of_sizes(x, sizes)


def of_sizes(x: Tensor, sizes: Sequence[Any]) -> Tensor:
    """Reshape a block, as a view if there is one. torch's own reshape copies if sizes differ from rank to rank."""
    try:
        return x.view(sizes)
    except (RuntimeError, ValueError):  # ValueError for a tensor without values
        return x.reshape(sizes)


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
