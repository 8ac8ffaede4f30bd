"""Calls on operands with `Flat` dims, as calls on views without them.

A rule that holds for a dim holds for each dim that was flattened into it: if a dim may be sharded, the function works
block by block, whichever indices a block has. So a flat dim is split into its dims, and so are all dims of the same
factor. Strategies are found for these views, in ordinary layouts, and then joined again. A reshape whose operand and
result have views with the same dims moves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fspmd.entries import Axes, Entry, Flat, axes_within, entry_of, joined, refined, runs
from fspmd.rules.factors import Dims, Factors
from fspmd.rules.views import groups
from fspmd.spec import P, TensorSpec

Sizes = tuple[int, ...]


class ViewedCall(NamedTuple):
    """A call on views, in which each dim of an operand or result is split into dims whose sizes multiply to its own."""

    factors: Factors  # of the views
    operands: Sequence[TensorSpec]
    results: Sequence[TensorSpec]
    before: Sequence[Sequence[Sizes]]  # per operand and dim: the sizes it is split into
    after: Sequence[Sequence[Sizes]]  # the same per result
    regrouped: P | None = None  # the layout of the result, if the call is a reshape that moves nothing

    @property
    def views(self) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """The views of the operands, and of the results, which are not laid out yet."""
        operands = []
        for spec, sizes in zip(self.operands, self.before, strict=True):
            axes = [spec.unflattened_axes(d, dim_sizes) for d, dim_sizes in enumerate(sizes)]
            operands.append(spec.viewed(sizes, [dim_sizes for dim_sizes in axes if dim_sizes is not None]))
        rows = zip(self.results, self.after, strict=True)
        return operands, [spec.viewed(sizes, [((),) * len(dim_sizes) for dim_sizes in sizes]) for spec, sizes in rows]

    def together(
        self, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
    ) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the layouts of operands and results, given those of their views."""
        needs = zip(self.operands, operands, self.before, strict=True)
        ends = zip(self.results, results, self.after, strict=True)
        return tuple([_as_whole(*row) for row in needs]), tuple([_as_whole(*row) for row in ends])


def _as_whole(spec: TensorSpec, view: TensorSpec, sizes: Sequence[Sizes]) -> TensorSpec:
    return spec.with_partition(_together(view.partition, sizes))


def _together(view: P, sizes: Sequence[Sizes]) -> P:
    of_view, entries = iter(view), list[Entry]()
    for dim_sizes in sizes:
        of_dim = [next(of_view) for _ in dim_sizes]
        entries.append(of_dim[0] if len(dim_sizes) == 1 else Flat(*zip(dim_sizes, of_dim, strict=True)))
    return view.with_entries(entries)


# --- reshapes ---------------------------------------------------------------------------------------------------------


def regrouped(spec: TensorSpec, result: TensorSpec) -> ViewedCall | None:
    """Return a reshape that maps blocks to blocks, or None if it must move something or if no dim is sharded."""
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
        for group, shape, sizes, factors in ((source, spec.shape, before, dims), (target, result.shape, after, new)):
            for d, part in zip(group, runs([shape[d] for d in group], named), strict=True):
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
    names: dict[int | None, int] = {group[0]: d for d, group in enumerate(dims) if group[0] is not None}
    dims, new = ([tuple(names.get(f, f) for f in group) for group in side] for side in (dims, new))
    of_atoms = Factors((_flattened(dims),), (_flattened(new),))
    lies = spec.partition.with_entries(entries)
    return ViewedCall(of_atoms, [spec], [result], [before], [after], lies)


def _flattened(dims: Iterable[Dims]) -> Dims:
    return tuple(factor for group in dims for factor in group)


# --- other functions --------------------------------------------------------------------------------------------------


def with_flat_dims_split(
    factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec], has_body: bool
) -> ViewedCall:
    """Return the call on views: all dims of a factor are split as its `Flat` dim is.

    An operand that has no such view, or whose body or rule needs consecutive blocks, gets another layout first. The
    operands of the returned call have these layouts, from which strategies start.
    """
    readings = (factors, *factors.alternatives)
    specs = [_in_blocks_where(spec, i, readings, operands, results, has_body) for i, spec in enumerate(operands)]
    sizes: dict[int, Sizes] = {}
    for factor in {f for dims, spec in zip(factors.operands, specs, strict=True) for f in _flat(dims, spec)}:
        if factor is not None:
            sizes[factor] = _agreed(factor, factors, specs)
    before = [
        [
            sizes.get(f, (n,)) if f is not None else tuple(m for m, _ in parts)
            for f, n, parts in zip(dims, spec.shape, spec.factors, strict=True)
        ]
        for dims, spec in zip(factors.operands, specs, strict=True)
    ]
    after = [
        [sizes.get(f, (n,)) if f is not None else (n,) for f, n in zip(dims, spec.shape, strict=True)]
        for dims, spec in zip(factors.results, results, strict=True)
    ]
    named = (f for each in readings for dims in (*each.operands, *each.results) for f in dims if f is not None)
    first = 1 + max(named, default=0)
    split = [views for reading in readings if (views := _split(reading, before, after, first)) is not None]
    return ViewedCall(split[0]._replace(alternatives=tuple(split[1:])), specs, results, before, after)


def _flat(dims: Dims, spec: TensorSpec) -> list[int | None]:
    return [f for f, entry in zip(dims, spec.partition, strict=True) if isinstance(entry, Flat)]


def _in_blocks_where(
    spec: TensorSpec,
    operand: int,
    readings: Sequence[Factors],
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    has_body: bool,
) -> TensorSpec:
    """Return the spec with consecutive blocks along dims that need them."""
    for d, entry in enumerate(spec.partition):
        if isinstance(entry, Flat) and any(
            (factor := reading.operands[operand][d]) in reading.scaled
            or (has_body and (factor in reading.whole if factor is not None else len(readings) > 1))
            or (factor is not None and not _is_of_one_size(factor, reading, operands, results))
            for reading in readings
        ):
            spec = _with_entry(spec, d, entry_of(entry.axes))
    return spec


def _is_of_one_size(
    factor: int, factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> bool:
    rows = zip((*factors.operands, *factors.results), (*operands, *results), strict=True)
    return len({n for dims, spec in rows for f, n in zip(dims, spec.shape, strict=True) if f == factor}) == 1


def _with_entry(spec: TensorSpec, dim: int, entry: Entry) -> TensorSpec:
    entries = spec.partition.entries
    return spec.with_partition(spec.partition.with_entries((*entries[:dim], entry, *entries[dim + 1 :])))


def _agreed(factor: int, factors: Factors, specs: list[TensorSpec]) -> Sizes:
    """Return the sizes that split a factor in all operands.

    An operand that has no view of these sizes takes the layout of the first one, in ``specs``, or is not cut.
    """
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
    """Return a reading with one factor for each size, or None if it splits a factor in two ways."""
    known: dict[int, tuple[Sizes, Dims]] = {}
    numbers = itertools.count(first)

    def split(dims: Dims, sizes: Sequence[Sizes]) -> Iterator[Dims]:
        for factor, dim_sizes in zip(dims, sizes, strict=True):
            n = len(dim_sizes)
            if factor is None:
                yield (None,) * n
                continue
            if factor not in known:
                known[factor] = dim_sizes, (factor,) if n == 1 else tuple(itertools.islice(numbers, n))
            yield known[factor][1] if len(known[factor][0]) == n else ()

    operands = [list(split(dims, sizes)) for dims, sizes in zip(factors.operands, before, strict=True)]
    results = [list(split(dims, sizes)) for dims, sizes in zip(factors.results, after, strict=True)]
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
        alternatives=(),
    )
