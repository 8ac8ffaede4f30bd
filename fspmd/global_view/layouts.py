"""The layouts of a call as they lie, or by one choice per mesh axis, and the time of the computation."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf, lcm, prod
from typing import Final, NamedTuple

from fspmd.entries import Entry, blocks, entry_of
from fspmd.redistribution.cost import topology, work
from fspmd.rules.bodies import Bodied, BodyLayout
from fspmd.rules.factors import Dims, Factors
from fspmd.spec import P, TensorSpec

#: the choice of one axis: the factor that it shards (int), or a letter per operand, "U", "R" or "I" (neither)
Choice = int | str
_NONE: Final = frozenset[int]()


class LayoutProblem(NamedTuple):
    """The facts that decide the layouts of a call."""

    factors: Factors
    linear: str  # see `Row.linear`
    operands: Sequence[TensorSpec]
    results: Sequence[TensorSpec]  # their layouts are arbitrary
    fixed: bool = False  # the first operand is not moved, and the result lies as it does
    empty: bool = True  # the function takes empty blocks
    body: Bodied | None = None  # runs where a whole factor is sharded; None: whole factors are not sharded
    gradients: frozenset[int] = _NONE  # operands that will have a gradient
    weighs: bool = False  # sums of gradients of whole operands are a part of the price


class Strategy(NamedTuple):
    """The layouts of the operands and results of one call, with their price."""

    operands: tuple[TensorSpec, ...]
    casts: tuple[tuple[str, ...], ...]  # per operand the axes over which it is cast to varying
    results: tuple[TensorSpec, ...]
    by_body: bool  # a factor that must be whole is sharded
    axes: dict[int, tuple[str, ...]]  # of each sharded factor
    body: float = 0.0  # µs of the body's collectives, forward
    back: float = 0.0  # and backward
    #: the price in µs (an upper bound if a formula gives it); then, to decide between equal prices, the µs that casts
    #: take in backward and that settling pending sums takes
    time: tuple[float, float] = (0.0, 0.0)


def layouts_of(problem: LayoutProblem, factors: Factors, choices: dict[str, Choice]) -> Strategy | None:
    """Return the strategy of a combination, or None if blocks of operands and results do not fit together.

    It has no price yet, except that of its body. ``factors`` is the reading of the call to which the choices belong.
    """
    operands, results, body = problem.operands, problem.results, problem.body
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
        return None  # a body takes pending sums in all its operands, not in one operand of a product
    if not aligned(factors, axes_of, [*operands, *results], problem.empty, by_body):
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
        layout = BodyLayout(needs, results, over, topology(), whole)
        within = body.time(layout)
        if within == inf:
            return None
        back = body.back(layout) if callable(body.back) else within * body.back
    return Strategy(tuple(needs), tuple(casts), tuple(laid), bool(by_body), axes_of, within, back)


def as_they_lie(problem: LayoutProblem) -> Strategy | None:
    """Return the strategy that moves nothing, or None if operands do not lie alike or sums are pending.

    It is the cheapest if no operand has a gradient.
    """
    factors, operands, results = problem.factors, problem.operands, problem.results
    entries: dict[int | None, Entry] = {}
    for dims, spec in zip(factors.operands, operands, strict=True):
        lies = spec.partition
        if lies.unreduced or lies.reduced or 0 in spec.shape:
            return None
        if tuple(map(entries.setdefault, dims, lies.entries)) != lies.entries:
            return None
    if entries.get(None) is not None:
        return None
    axes_of = {
        f: axes
        for dims, spec in zip(factors.operands, operands, strict=True)
        for f, axes in zip(dims, spec.partition.dim_axes, strict=True)
        if f is not None and axes
    }
    if not (factors.whole.isdisjoint(axes_of) and factors.summed.isdisjoint(axes_of)):
        return None
    used = {axis: factor for factor, axes in axes_of.items() for axis in axes}
    if len(used) < sum(map(len, axes_of.values())):  # an axis cuts two factors
        return None
    if not aligned(factors, axes_of, [*operands, *results], problem.empty, _NONE):
        return None
    order = [axis for axis in operands[0].mesh.axis_names if axis in used]
    casts = [tuple([axis for axis in order if used[axis] not in dims]) for dims in factors.operands]
    first, lead = factors.operands[0], operands[0].partition
    laid = [
        spec.with_partition(lead if dims == first else P(*map(entries.get, dims)))
        for spec, dims in zip(results, factors.results, strict=True)
    ]
    if problem.fixed and (casts[0] or laid[0].partition is not lead):
        return None
    return Strategy(tuple(operands), tuple(casts), tuple(laid), False, axes_of)


def working(factors: Factors, needs: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> float:
    """Return the µs of the computation: of its products, or of reading and writing the blocks."""
    lengths: dict[int | None, int] = {}
    size = 0
    for dims, spec in zip((*factors.operands, *factors.results), (*needs, *results), strict=True):
        lengths.update(zip(dims, spec.block_shape, strict=True))
        size += spec.block_bytes
    lengths[None] = factors.products
    return work(prod(lengths.values()), size, topology())


def aligned(
    factors: Factors,
    axes_of: dict[int, tuple[str, ...]],
    specs: Sequence[TensorSpec],
    empty: bool,
    by_body: Set[int],
) -> bool:
    """Whether the blocks of each factor are the same shares of all its dims, which may differ in size.

    If not ``empty``, no block may be empty. A body takes care of both, so factors in ``by_body`` are not checked.
    """
    rows = (*factors.operands, *factors.results)
    for factor, axes in axes_of.items():
        sizes = {spec.shape[d] for i, spec in enumerate(specs) for d, f in enumerate(rows[i]) if f == factor}
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
    """Return the state of an operand over an axis: "I", "U", "R", "V" (it has the factor), or "cast".

    An operand without the factor is cast to varying, since the operands that have it vary.
    """
    if isinstance(choice, str):
        return choice[operand]
    if choice in dims:
        return "V"
    return "U" if choice in factors.summed and operand in factors.added else "cast"


def entries_of(dims: Dims, entries: dict[int, Entry]) -> list[Entry]:
    """Return the entry of each dim, given the entries of the factors."""
    return [None if factor is None else entries.get(factor) for factor in dims]


def _states(
    operand: int, dims: Dims, choices: dict[str, Choice], factors: Factors
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Return the axes over which an operand is cast, is unreduced, and is reduced."""
    axes: dict[str, list[str]] = {"cast": [], "U": [], "R": []}
    for axis, choice in choices.items():
        axes.setdefault(state_of(choice, operand, dims, factors), []).append(axis)
    return tuple(axes["cast"]), frozenset(axes["U"]), frozenset(axes["R"])


def _used(
    choices: dict[str, Choice], factors: Factors, operands: Sequence[TensorSpec]
) -> tuple[dict[int, tuple[str, ...]], frozenset[str], frozenset[str]]:
    """Return the axes of each sharded factor, and those over which the results are unreduced and reduced."""
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
    """Return the axes of a factor, in the order of the operand that is cut by most of them."""
    best: tuple[str, ...] = ()
    for dims, spec in zip(factors.operands, operands, strict=True):
        for dim_factor, cut in zip(dims, spec.partition.dim_axes, strict=True):
            kept = tuple([axis for axis in cut if axis in axes])
            if dim_factor == factor and len(kept) > len(best):
                best = kept
    return (*best, *(axis for axis in axes if axis not in best))
