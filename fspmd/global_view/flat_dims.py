"""Calls on operands of which dims are `Flat`, as calls on views of them of which no dim is.

What a rule says of a dim, it says of each dim that it is made of: blocks of a function whose dim may be sharded are its
results on those blocks, whichever indices they have. So such a dim and all that are the same dim of the computation are
taken apart, strategies are found for views in ordinary layouts, and put together again. A reshape of which views of the
operand and of the result have the same dims is a function that has just these; nothing moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fspmd.entries import Axes, Entry, Flat, axes_within, entry_of, joined, refined, runs
from fspmd.rules import Row
from fspmd.rules.factors import Dims, Factors
from fspmd.rules.views import groups, reshaped
from fspmd.spec import P, TensorSpec

Sizes = tuple[int, ...]


class ViewedCall(NamedTuple):
    """A call whose dims are taken apart: of which sizes each dim of the operands and of the results is a product."""

    factors: Factors  # of the views
    operands: Sequence[TensorSpec]
    results: Sequence[TensorSpec]
    before: Sequence[Sequence[Sizes]]
    after: Sequence[Sequence[Sizes]]
    regrouped: P | None = None  # how the result lies of a reshape that moves nothing

    @property
    def views(self) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Operands and results, not laid out yet, with a dim for each size."""
        operands = []
        for spec, sizes in zip(self.operands, self.before, strict=True):
            axes = [spec.unflattened_axes(d, own) for d, own in enumerate(sizes)]
            operands.append(spec.viewed(sizes, [own for own in axes if own is not None]))
        rows = zip(self.results, self.after, strict=True)
        return operands, [spec.viewed(sizes, [((),) * len(own) for own in sizes]) for spec, sizes in rows]

    def together(
        self, operands: Sequence[TensorSpec], results: Sequence[P]
    ) -> tuple[tuple[TensorSpec, ...], tuple[P, ...]]:
        """The layouts of operands and results, of those of their views."""
        needs = zip(self.operands, operands, self.before, strict=True)
        ends = zip(self.results, results, self.after, strict=True)
        return (
            tuple(spec.with_partition(_together(view.partition, sizes)) for spec, view, sizes in needs),
            tuple(spec.with_partition(_together(view, sizes)).partition for spec, view, sizes in ends),
        )


def _together(view: P, sizes: Sequence[Sizes]) -> P:
    entries, found = iter(view), list[Entry]()
    for own in sizes:
        of_dim = [next(entries) for _ in own]
        found.append(of_dim[0] if len(own) == 1 else Flat(*zip(own, of_dim, strict=True)))
    return P(*found, unreduced=view.unreduced, reduced=view.reduced)


def viewed_call(
    row: Row, factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> ViewedCall | None:
    """The call on views; None where no dim is `Flat`, nor is of a reshape."""
    if row.rule is reshaped and results[0].dtype is operands[0].dtype:
        found = regrouped(operands[0], results[0])
        if found is not None:
            return found
    if True not in [spec.flat for spec in operands]:
        return None
    return with_flat_dims_split(factors, operands, results, row.body is not None)


# --- reshapes ---------------------------------------------------------------------------------------------------------


def regrouped(spec: TensorSpec, result: TensorSpec) -> ViewedCall | None:
    """A reshape of which each block is that of a block; None: it has to move something, or no dim is sharded."""
    if not spec.partition.axes or 0 in spec.shape:
        return None
    numbers = itertools.count(spec.ndim)
    before: list[Sizes] = [(n,) for n in spec.shape]
    after: list[Sizes] = [(n,) for n in result.shape]
    dims: list[Dims] = [(None,)] * spec.ndim
    new: list[Dims] = [(None,)] * result.ndim
    entries: list[Entry] = [None] * result.ndim
    for source, target in groups(spec.shape, result.shape):
        cut = [d for d in source if axes_within(spec.partition[d])]
        if not cut:
            continue
        finer = refined([n for d in source for n, _ in spec.factors[d]], [result.shape[d] for d in target])
        if finer is None:
            return None
        named = tuple(zip(finer, numbers, strict=False))
        for own, shape, sizes, factors in ((source, spec.shape, before, dims), (target, result.shape, after, new)):
            for d, part in zip(own, runs([shape[d] for d in own], named), strict=True):
                if part:
                    sizes[d], factors[d] = zip(*part, strict=True)
        axes: list[Axes] = []
        for d in source:
            own_axes = spec.unflattened_axes(d, before[d])
            if own_axes is None or (spec.shape[d] == 1 and d in cut):
                return None
            axes += own_axes if dims[d][0] is not None else ()
        of_atom = iter(axes)
        for d in target:
            if new[d][0] is not None:
                entries[d] = joined([(n, next(of_atom)) for n in after[d]], dict(spec.mesh.shape))
    names: dict[int | None, int] = {own[0]: d for d, own in enumerate(dims) if own[0] is not None}
    dims, new = ([tuple(names.get(f, f) for f in own) for own in side] for side in (dims, new))
    of_atoms = Factors((_flattened(dims),), (_flattened(new),))
    lies = P(*entries, unreduced=spec.partition.unreduced, reduced=spec.partition.reduced)
    return ViewedCall(of_atoms, [spec], [result], [before], [after], lies)


def _flattened(dims: Iterable[Dims]) -> Dims:
    return tuple(factor for own in dims for factor in own)


# --- other functions --------------------------------------------------------------------------------------------------


def with_flat_dims_split(
    factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec], bodied: bool
) -> ViewedCall:
    """The call on views of operands of which some have a `Flat` dim, and of such as have the same dims.

    Where an operand cannot be viewed as another, or a body or a rule needs consecutive blocks, its layout is first
    another: operands of the result have that from which strategies lead.
    """
    readings = (factors, *factors.others)
    specs = [_in_blocks_where(spec, i, readings, operands, results, bodied) for i, spec in enumerate(operands)]
    sizes: dict[int, Sizes] = {}
    for factor in {f for dims, spec in zip(factors.operands, specs, strict=True) for f in _flat(dims, spec)}:
        if factor is not None:
            sizes[factor] = _agreed(factor, factors, specs)
    before = [
        [
            sizes.get(f, (n,)) if f is not None else tuple(m for m, _ in own)
            for f, n, own in zip(dims, spec.shape, spec.factors, strict=True)
        ]
        for dims, spec in zip(factors.operands, specs, strict=True)
    ]
    after = [
        [sizes.get(f, (n,)) if f is not None else (n,) for f, n in zip(dims, spec.shape, strict=True)]
        for dims, spec in zip(factors.results, results, strict=True)
    ]
    named = (f for one in readings for dims in (*one.operands, *one.results) for f in dims if f is not None)
    first = 1 + max(named, default=0)
    ways = [one for reading in readings if (one := _split(reading, before, after, first)) is not None]
    return ViewedCall(ways[0]._replace(others=tuple(ways[1:])), specs, results, before, after)


def _flat(dims: Dims, spec: TensorSpec) -> list[int | None]:
    return [f for f, entry in zip(dims, spec.partition, strict=True) if isinstance(entry, Flat)]


def _in_blocks_where(
    spec: TensorSpec,
    operand: int,
    readings: Sequence[Factors],
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    bodied: bool,
) -> TensorSpec:
    """The operand with consecutive blocks of the dims that have to have such."""
    for d, entry in enumerate(spec.partition):
        if isinstance(entry, Flat) and any(
            (own := one.operands[operand][d]) in one.scaled
            or (bodied and (own in one.whole if own is not None else len(readings) > 1))
            or (own is not None and not _is_of_one_size(own, one, operands, results))
            for one in readings
        ):
            spec = _with_entry(spec, d, entry_of(entry.axes))
    return spec


def _is_of_one_size(
    factor: int, factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> bool:
    rows = zip((*factors.operands, *factors.results), (*operands, *results), strict=True)
    return len({n for dims, spec in rows for f, n in zip(dims, spec.shape, strict=True) if f == factor}) == 1


def _with_entry(spec: TensorSpec, dim: int, entry: Entry) -> TensorSpec:
    like = spec.partition
    entries = (*like.entries[:dim], entry, *like.entries[dim + 1 :])
    return spec.with_partition(P(*entries, unreduced=like.unreduced, reduced=like.reduced))


def _agreed(factor: int, factors: Factors, specs: list[TensorSpec]) -> Sizes:
    """The sizes as which all operands that have a factor can be viewed: such as cannot take the layout of the first."""
    cells = [(i, d) for i, dims in enumerate(factors.operands) for d, f in enumerate(dims) if f == factor]
    cut = [(i, d) for i, d in cells if axes_within(specs[i].partition[d])]
    (i, d), *others = cut
    sizes, lead, fit = tuple(n for n, _ in specs[i].factors[d]), specs[i].partition[d], [(i, d)]
    for i, d in others:
        finer = refined(sizes, [n for n, _ in specs[i].factors[d]])
        if finer is None or any(specs[k].unflattened_axes(e, finer) is None for k, e in (*fit, (i, d))):
            like = specs[i].partition
            free = set(axes_within(lead)).isdisjoint(like.mentioned - set(axes_within(like[d])))
            specs[i] = _with_entry(specs[i], d, lead if free else None)
        else:
            sizes = finer
        fit.append((i, d))
    return sizes


def _split(
    factors: Factors, before: Sequence[Sequence[Sizes]], after: Sequence[Sequence[Sizes]], first: int
) -> Factors | None:
    """One reading with a factor for each size of its dims; None: to it those that are taken apart are not alike."""
    known: dict[int, tuple[Sizes, Dims]] = {}
    numbers = itertools.count(first)

    def taken(dims: Dims, sizes: Sequence[Sizes]) -> Iterator[Dims]:
        for factor, own in zip(dims, sizes, strict=True):
            if factor is None:
                yield (None,) * len(own)
                continue
            if factor not in known:
                known[factor] = own, (factor,) if len(own) == 1 else tuple(itertools.islice(numbers, len(own)))
            yield known[factor][1] if len(known[factor][0]) == len(own) else ()

    operands = [list(taken(dims, sizes)) for dims, sizes in zip(factors.operands, before, strict=True)]
    results = [list(taken(dims, sizes)) for dims, sizes in zip(factors.results, after, strict=True)]
    if any(() in dims for dims in (*operands, *results)):
        return None

    def each(some: frozenset[int]) -> frozenset[int]:
        return frozenset(new for old in some for new in known.get(old, ((), (old,)))[1] if new is not None)

    return factors._replace(
        operands=tuple(map(_flattened, operands)),
        results=tuple(map(_flattened, results)),
        summed=each(factors.summed),
        whole=each(factors.whole),
        scaled=each(factors.scaled),
        names={name: f for name, f in factors.names.items() if f not in known or known[f][1] == (f,)},
        others=(),
    )
