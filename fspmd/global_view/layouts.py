"""How all of a call lies where each mesh axis does one thing: operands, results, what is cast, what is computed."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf, lcm, prod
from typing import Final, NamedTuple

from fspmd.entries import Entry, blocks, entry_of
from fspmd.redistribution.cost import Topology, work
from fspmd.rules.bodies import Bodied, BodyLayout
from fspmd.rules.factors import Dims, Factors
from fspmd.spec import P, TensorSpec

#: what one axis does: shard a factor (int); or per operand "U", "R" or "I" (nothing), and the result like the first
Choice = int | str
_NONE: Final = frozenset[int]()


class CallLayouts(NamedTuple):
    """How all of a call lies in one combination; µs of the collectives in a body."""

    operands: tuple[TensorSpec, ...]
    casts: tuple[tuple[str, ...], ...]
    results: tuple[TensorSpec, ...]
    by_body: bool
    axes: dict[int, tuple[str, ...]]
    body: float
    back: float  # of its gradients


def layouts_of(
    factors: Factors,
    choices: dict[str, Choice],
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    topology: Topology,
    empty: bool,
    body: Bodied | None,
) -> CallLayouts | None:
    """The layouts of a combination; None where blocks do not fit."""
    axes_of, unreduced, reduced = _used(choices, factors, operands)
    entries = {factor: entry_of(axes) for factor, axes in axes_of.items()}
    needs: list[TensorSpec] = []
    casts: list[tuple[str, ...]] = []
    for i, (dims, spec) in enumerate(zip(factors.operands, operands, strict=True)):
        cast, pending, gradients = _states(i, dims, choices, factors)
        if spec.partition.reduced:
            gradients |= spec.partition.reduced.intersection(cast)
        needs.append(spec.with_partition(P(*entries_of(dims, entries), unreduced=pending, reduced=gradients)))
        casts.append(cast)
    outs = [P(*entries_of(dims, entries), unreduced=unreduced, reduced=reduced) for dims in factors.results]
    by_body = factors.whole.intersection(axes_of) if body is not None else _NONE
    if by_body and any(isinstance(choice, str) and {"U", "R"} <= set(choice) for choice in choices.values()):
        return None  # of pending sums a body knows those of all its operands, not a product's
    if not aligned(factors, axes_of, [*operands, *results], empty, by_body):
        return None
    laid = [spec.with_partition(out) for spec, out in zip(results, outs, strict=True)]
    within = back = 0.0
    if by_body and body is not None:
        specs, needed = [*needs, *results], dict.fromkeys(factors.whole)
        for factor in factors.near.intersection(by_body):
            if aligned(factors, {factor: axes_of[factor]}, specs, True, _NONE):
                del needed[factor]
        whole = frozenset(d for d, factor in enumerate(factors.operands[0]) if factor in needed)
        over = tuple(axis for factor in by_body if factor in needed for axis in axes_of[factor])
        layout = BodyLayout(needs, results, over, topology, whole)
        within = body.time(layout)
        if within == inf:
            return None
        back = body.back(layout) if callable(body.back) else within * body.back
    return CallLayouts(tuple(needs), tuple(casts), tuple(laid), bool(by_body), axes_of, within, back)


def working(factors: Factors, needs: Sequence[TensorSpec], results: Sequence[TensorSpec], topology: Topology) -> float:
    """µs of the computation: the products of each place of its factors' blocks, or reading and writing the blocks."""
    lengths: dict[int | None, int] = {}
    held = 0
    for dims, spec in zip((*factors.operands, *factors.results), (*needs, *results), strict=True):
        lengths.update(zip(dims, spec.block_shape, strict=True))
        held += prod(spec.block_shape) * spec.dtype.itemsize
    lengths[None] = factors.products
    return work(prod(lengths.values()), held, topology)


def aligned(
    factors: Factors,
    axes_of: dict[int, tuple[str, ...]],
    specs: Sequence[TensorSpec],
    empty: bool,
    by_body: Set[int],
) -> bool:
    """Whether the blocks of a factor are the same parts of every dim it stands for, where those differ in size.

    Not ``empty``: none of them may be. A body sees to both itself.
    """
    rows = (*factors.operands, *factors.results)
    for factor, axes in axes_of.items():
        sizes = {spec.shape[d] for i, spec in enumerate(specs) for d, own in enumerate(rows[i]) if own == factor}
        if factor in factors.pieces:
            sizes.add(factors.pieces[factor])
        if factor in by_body or (empty and len(sizes) == 1):
            continue
        parts = tuple([specs[0].mesh.shape[axis] for axis in axes])
        if not empty and any(length == 0 for size in sizes if size for _, length in blocks(size, parts)):
            return False
        unit = lcm(*(size or 1 for size in sizes))  # blocks as shares of the dim, in this unit
        if len({tuple(length * unit // (size or 1) for _, length in blocks(size, parts)) for size in sizes}) > 1:
            return False
    return True


def state_of(choice: Choice, operand: int, dims: Dims, factors: Factors) -> str:
    """What an operand must be over an axis: I, V (it has the factor), U, R, or cast where it meets others that vary."""
    if isinstance(choice, str):
        return choice[operand]
    if choice in dims:
        return "V"
    return "U" if choice in factors.summed and operand in factors.added else "cast"


def entries_of(dims: Dims, entries: dict[int, Entry]) -> list[Entry]:
    """The entries of a partition, of those of its factors."""
    return [None if factor is None else entries.get(factor) for factor in dims]


def _states(
    operand: int, dims: Dims, choices: dict[str, Choice], factors: Factors
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """The axes over which an operand is cast, is a pending sum, and is reduced."""
    found: dict[str, list[str]] = {"cast": [], "U": [], "R": []}
    for axis, choice in choices.items():
        found.setdefault(state_of(choice, operand, dims, factors), []).append(axis)
    return tuple(found["cast"]), frozenset(found["U"]), frozenset(found["R"])


def _used(
    choices: dict[str, Choice], factors: Factors, operands: Sequence[TensorSpec]
) -> tuple[dict[int, tuple[str, ...]], frozenset[str], frozenset[str]]:
    """The axes of each sharded factor; those over which the results are unreduced, and reduced."""
    axes_of: dict[int, tuple[str, ...]] = {}
    unreduced: list[str] = []
    reduced: list[str] = []
    for axis, choice in choices.items():
        if isinstance(choice, int):
            axes_of[choice] = (*axes_of.get(choice, ()), axis)
        if choice in factors.summed if isinstance(choice, int) else "U" in choice:
            unreduced.append(axis)
        elif isinstance(choice, str) and "R" in choice:
            reduced.append(axis)
    for factor, axes in axes_of.items():
        if len(axes) > 1:
            axes_of[factor] = _ordered(factor, axes, factors, operands)
    return axes_of, frozenset(unreduced), frozenset(reduced)


def _ordered(factor: int, axes: tuple[str, ...], factors: Factors, operands: Sequence[TensorSpec]) -> tuple[str, ...]:
    """The axes of a factor, in the order that the operand with most of them has."""
    best: tuple[str, ...] = ()
    for dims, spec in zip(factors.operands, operands, strict=True):
        for own, cut in zip(dims, spec.partition.dim_axes, strict=True):
            kept = tuple([axis for axis in cut if axis in axes])
            if own == factor and len(kept) > len(best):
                best = kept
    return (*best, *(axis for axis in axes if axis not in best))
