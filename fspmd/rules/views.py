"""Functions that arrange elements anew: permutations of dims, reshapes, slices, joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from fspmd.rules.factors import Dims, Factors, Shape
from fspmd.rules.global_call import NO_RULE, Rule, Whole


def permuted(order: Callable[[Whole], Sequence[int | None]]) -> Rule:
    """The dims of the operand in another order."""
    return lambda whole: Factors((tuple(range(whole.ndim)),), (tuple(order(whole)),))


def transposed(whole: Whole) -> Dims:
    """Two dims change places."""
    if not whole.ndim:
        return ()
    first = whole.argument(1, "dim0", whole.kwargs.get("axis0"))
    second = whole.argument(2, "dim1", whole.kwargs.get("axis1"))
    order = list(range(whole.ndim))
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def in_order(whole: Whole) -> Dims:
    """As ``dims`` says."""
    return whole.dims(1, "dims")


def moved(whole: Whole) -> Dims:
    """``source`` dims to ``destination``."""
    if not whole.ndim:
        return ()
    sources, targets = whole.argument(1, "source"), whole.argument(2, "destination")
    sources, targets = ([d % whole.ndim for d in ((v,) if isinstance(v, int) else v)] for v in (sources, targets))
    order: list[int | None] = [None] * whole.ndim
    for s, t in zip(sources, targets, strict=True):
        order[t] = s
    rest = iter(d for d in range(whole.ndim) if d not in sources)
    return tuple(next(rest) if d is None else d for d in order)


def reversed_dims(whole: Whole) -> Dims:
    """The dims from the last to the first."""
    return tuple(reversed(range(whole.ndim)))


def last_swapped(whole: Whole) -> Dims:
    """The last two dims change places."""
    n = whole.ndim
    return (*range(n - 2), n - 1, n - 2) if n > 1 else tuple(range(n))


# --- reshapes: the same elements in the same order --------------------------------------------------------------------


def reshaped(whole: Whole) -> Factors:
    """Groups of dims of equal products: the leading dim of a group may stay sharded, where its blocks stay blocks.

    So may a dim of size 1, as one that stands between the same others. Otherwise one dim of one group, as one dim of
    that group in the result, by a body.
    """
    before, after = whole.shapes[0], whole.results[0]
    operand: list[int | None] = [None] * len(before)
    result: list[int | None] = [None] * len(after)
    ways: list[tuple[list[int], list[int]]] = []
    for source, target in groups(before, after):
        pair = [d for d in source if before[d] != 1], [d for d in target if after[d] != 1]
        if all(pair):
            operand[pair[0][0]] = result[pair[1][0]] = pair[0][0]
            if source != [pair[0][0]] or target != [pair[1][0]]:
                ways.append(pair)
    found = Factors((tuple(operand),), (tuple(result),))
    others = tuple(_one_way(found, pair, s, t) for pair in ways for s in pair[0] for t in _roomy_first(pair[1], after))
    new = _ones(after)
    for gap, ones in _ones(before).items():
        for s, t in zip(ones, new.get(gap, ()), strict=False):
            operand[s] = result[t] = s
    return Factors((tuple(operand),), (tuple(result),), others=others)


def _ones(shape: Shape) -> dict[int, list[int]]:
    """The dims of size 1, by the number of others before them."""
    found: dict[int, list[int]] = {}
    others = 0
    for d, size in enumerate(shape):
        if size == 1:
            found.setdefault(others, []).append(d)
        else:
            others += 1
    return found


def vanishing(before: Shape, after: Shape) -> list[int]:
    """The dims of size 1 that a reshape leaves out."""
    kept = _ones(after)
    return [d for gap, ones in _ones(before).items() for d in ones[len(kept.get(gap, ())) :]]


def squeezed(whole: Whole) -> Factors:
    """Without dims of size 1, the ones that are named."""
    ones = [d for d, size in enumerate(whole.shapes[0]) if size == 1]
    gone = set(ones) & set(whole.dims(1, "dim")) if whole.argument(1, "dim") != () else set[int]()
    kept = tuple(None if d in gone else d for d in range(whole.ndim))
    return Factors((kept,), (tuple(d for d in kept if d is not None),))


def unsqueezed(whole: Whole) -> Factors:
    """With a new dim of size 1."""
    dim, every = whole.argument(1, "dim") % (whole.ndim + 1), range(whole.ndim)
    return Factors((tuple(every),), ((*every[:dim], None, *every[dim:]),))


def bits(whole: Whole) -> Factors:
    """As another dtype: of another size its elements are made of those of a row, or are their parts."""
    dims: list[int | None] = list(range(whole.ndim))
    if whole.shapes[0] != whole.results[0]:
        dims[-1] = None
    return Factors((tuple(dims),), (tuple(dims),))


def _one_way(found: Factors, pair: tuple[list[int], list[int]], s: int, t: int) -> Factors:
    """Of a group, ``pair``, dim ``s`` of the operand as dim ``t`` of the result."""
    operand = (None if d in pair[0] and d != s else s if d == s else f for d, f in enumerate(found.operands[0]))
    result = (s if d == t else None if d in pair[1] else f for d, f in enumerate(found.results[0]))
    return Factors((tuple(operand),), (tuple(result),), whole=frozenset({s}))


def _roomy_first(dims: list[int], sizes: Shape) -> list[int]:
    """The first of dims that most meshes can cut, before those that they cannot."""
    return sorted(dims, key=lambda d: -min(sizes[d], _ROOMY))


_ROOMY = 8


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims, side by side, whose sizes multiply to the same."""
    if 0 in before:
        return [(list(range(len(before))), [])]
    found: list[tuple[list[int], list[int]]] = []
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
        found.append((source, target))
    return found


def reshape_blocks(factors: Factors, before: Shape, after: Shape, x: Tensor) -> Tensor:
    """A block of the operand as a block of the result."""
    sizes: list[Any] = list(after)
    for d, factor in enumerate(factors.results[0]):
        if factor is not None:
            sizes[d] = x.shape[factor] * after[d] // before[factor] if before[factor] else after[d]
    return of_sizes(x, sizes)


def of_sizes(x: Tensor, sizes: Sequence[Any]) -> Tensor:
    """A view of a block where it has one: of sizes that differ from rank to rank torch's reshape copies."""
    try:
        return x.view(sizes)
    except (RuntimeError, ValueError):  # the latter of a tensor without values
        return x.reshape(sizes)


def expanded(whole: Whole) -> Factors:
    """New leading dims, and dims of size 1 that grow, are whole."""
    before, after = whole.shapes[0], whole.results[0]
    new = len(after) - len(before)
    kept = [d if before[d] == after[d + new] else None for d in range(len(before))]
    return Factors((tuple(kept),), ((*(None,) * new, *kept),))


def expand_blocks(factors: Factors, before: Shape, after: Shape, x: Tensor) -> Tensor:
    """A block, along the dims that grow."""
    return x.expand([size if factor is None else -1 for factor, size in zip(factors.results[0], after, strict=True)])


# --- parts, and the whole of parts ------------------------------------------------------------------------------------


def indexed(whole: Whole) -> Factors:
    """``x[...]`` by ints, slices, None and an ellipsis: dims that are not taken in full are whole."""
    index = whole.args[1] if isinstance(whole.args[1], tuple) else (whole.args[1],)
    if not all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in index):
        return NO_RULE
    dims = sum(type(entry) in (int, slice) for entry in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    result: list[int | None] = []
    cut: set[int] = set()
    taken: set[int] = set()
    at = 0
    for entry in index:
        if entry is None:
            result.append(None)
        elif entry is Ellipsis:
            result += range(at, at + whole.ndim - dims)
            at += whole.ndim - dims
        else:
            if type(entry) is int:
                taken.add(at)
            else:
                result.append(at)
                if entry != slice(None):
                    cut.add(at)
            at += 1
    one = frozenset(taken)
    return Factors((tuple(range(whole.ndim)),), (tuple(result),), summed=one, whole=frozenset(cut) | one, near=one)


def sliced(whole: Whole) -> Factors:
    """A range of one dim, which must be whole if not all of it is taken."""
    dim = whole.argument(1, "dim", 0) % whole.ndim
    every = tuple(range(whole.ndim))
    cut = () if whole.results[0] == whole.shapes[0] else (dim,)
    return Factors((every,), (every,), whole=frozenset(cut))


def repeated(whole: Whole) -> Factors:
    """Dims that are taken more than once must be whole."""
    before, after = whole.shapes[0], whole.results[0]
    new, every = len(after) - len(before), tuple(range(len(before)))
    grown = frozenset(d for d in every if before[d] != after[d + new])
    return Factors((every,), ((*(None,) * new, *every),), whole=grown)


def padded(whole: Whole) -> Factors:
    """Dims that are padded must be whole."""
    pad, every = whole.argument(1, "pad"), tuple(range(whole.ndim))
    return Factors((every,), (every,), whole=frozenset(whole.ndim - 1 - i // 2 for i, size in enumerate(pad) if size))


def wrapped(whole: Whole) -> Factors:
    """The same, of what comes from the other end."""
    return padded(whole) if whole.argument(2, "mode") == "circular" else NO_RULE


def rolled(whole: Whole) -> Factors:
    """Dims along which elements move on must be whole; without such all, as of one, of which a body can take one."""
    dims = whole.argument(2, "dims")
    every: Dims = tuple(range(whole.ndim))
    if isinstance(dims, int) or dims:
        moved = _shifts(whole.shapes[0], whole.argument(1, "shifts"), dims)
        return Factors((every,), (every,), whole=frozenset(d for d, shift in moved.items() if shift))
    if not any(_shifts((prod(whole.shapes[0]),), whole.argument(1, "shifts"), 0).values()):
        return Factors((every,), (every,))
    nothing: Dims = (None,) * whole.ndim
    others = []
    for one in range(whole.ndim):
        way: Dims = (*nothing[:one], one, *nothing[one + 1 :])
        others.append(Factors((way,), (way,), whole=frozenset({one})))
    return Factors((nothing,), (nothing,), others=tuple(others))


def _shifts(shape: Shape, shifts: int | Sequence[int], dims: int | Sequence[int]) -> dict[int, int]:
    """By how many places the elements of each dim of a roll move on: less than there are."""
    found: dict[int, int] = {}
    pairs = zip(*([given] if isinstance(given, int) else given for given in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        d = dim % len(shape)
        found[d] = (found.get(d, 0) + shift) % max(1, shape[d])
    return found


def roll_blocks(shape: Shape, x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Blocks that are whole along all dims that elements move along."""
    if not isinstance(dims, int) and not dims:
        return x.roll(*_shifts((prod(shape),), shifts, 0).values())
    moved = {d: shift for d, shift in _shifts(shape, shifts, dims).items() if shift}
    return x.roll([*moved.values()], [*moved]) if moved else x.clone()


def shuffled(whole: Whole) -> Factors:
    """The channels, in another order."""
    every: Dims = tuple(range(whole.ndim))
    return Factors((every,), (every,), whole=frozenset({1}))


def triangle(whole: Whole) -> Factors:
    """The last two dims must be whole."""
    every: Dims = tuple(range(whole.ndim))
    return Factors((every,), (every,), whole=frozenset(range(max(0, whole.ndim - 2), whole.ndim)))


def unfolded(whole: Whole) -> Factors:
    """The dim along which windows are taken must be whole; the windows are a dim of their own."""
    every: Dims = tuple(range(whole.ndim))
    if not every:
        return Factors(((),), ((None,),))
    if len(whole.results[0]) != whole.ndim + 1:
        return NO_RULE  # of another function of that name
    dim = whole.argument(1, "dimension") % whole.ndim
    size, step = whole.results[0][-1], whole.argument(3, "step")
    one = frozenset({dim})
    near = one if size <= step and whole.results[0][dim] * step == whole.shapes[0][dim] else frozenset[int]()
    return Factors((every,), ((*every, None),), whole=frozenset() if size == step == 1 else one, near=near)


def unfold(_: Shape, x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """On blocks: windows of one element are a new dim, though torch takes none of a block without elements."""
    return x.unsqueeze(-1) if size == step == 1 and x.dim() else x.unfold(dimension, size, step)


def flipped(whole: Whole) -> Factors:
    """The dims that are turned round must be whole."""
    every: Dims = tuple(range(whole.ndim))
    dims = whole.argument(1, "dims")
    touched = whole.dims(1, "dims") if isinstance(dims, int) or dims else ()
    return Factors((every,), (every,), whole=frozenset(d for d in touched if every and whole.shapes[0][d] > 1))


def parts(place: int, name: str, *, gone: bool = False, copied: bool = False) -> Rule:
    """Pieces along a dim, which must be whole; with ``gone`` they do not have it; ``copied``: they are no views."""

    def rule(whole: Whole) -> Factors:
        dim = whole.argument(place, name, 0) % whole.ndim
        every = range(whole.ndim)
        piece = tuple(d for d in every if d != dim) if gone else tuple(every)
        one = frozenset({dim})
        taken = one if gone else frozenset[int]()  # by one rank, the others' terms are nothing
        if copied and whole.results[0] == whole.shapes[0]:
            one = frozenset()  # one piece
        return Factors((tuple(every),), (piece,) * len(whole.results), summed=taken, whole=one, near=taken)

    return rule


def joined(*, new: bool = False) -> Rule:
    """Operands one after another along a dim, which must be whole; with ``new`` along a dim of its own."""

    def rule(whole: Whole) -> Factors:
        ndim = max(map(len, whole.shapes))
        dim = whole.argument(1, "dim", 0) % (ndim + new)
        every = range(ndim)
        if new:
            return Factors((tuple(every),) * len(whole.shapes), ((*range(dim), None, *range(dim, ndim)),))
        long = [shape for shape in whole.shapes if len(shape) == ndim and shape[dim]]
        if len(long) == 1:  # of others there is nothing
            own = tuple(None if d == dim else d for d in every)
            of = (
                tuple(every) if shape is long[0] else own if len(shape) == ndim else (None,) for shape in whole.shapes
            )
            return Factors(tuple(of), (tuple(every),))
        operands = tuple(tuple(every) if len(shape) == ndim else (None,) for shape in whole.shapes)  # torch skips [0]
        return Factors(operands, (tuple(every),), whole=frozenset({dim}))

    return rule
