"""The rules of functions that rearrange elements: permutations of dims, reshapes, slices, joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from fspmd.rules.factors import NO_RULE, Dims, Factors, Rule, Shape, ShapedCall


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


def bits(call: ShapedCall) -> Factors:
    """The rule of ``view(dtype)``: if the dtypes differ in size, the last dim must be whole."""
    dims: list[int | None] = list(range(call.ndim))
    if call.shapes[0] != call.results[0]:
        dims[-1] = None
    return Factors((tuple(dims),), (tuple(dims),))


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


def expanded(call: ShapedCall) -> Factors:
    """The rule of ``expand``: new leading dims, and dims of size 1 that grow, are whole."""
    before, after = call.shapes[0], call.results[0]
    new = len(after) - len(before)
    kept = [d if before[d] == after[d + new] else None for d in range(len(before))]
    return Factors((tuple(kept),), ((*(None,) * new, *kept),))


def expand_blocks(factors: Factors, before: Shape, after: Shape, x: Tensor) -> Tensor:
    """Expand a block along the dims that grow."""
    return x.expand([size if factor is None else -1 for factor, size in zip(factors.results[0], after, strict=True)])


# --- slices and joins -------------------------------------------------------------------------------------------------


def indexed(call: ShapedCall) -> Factors:
    """The rule of ``x[...]`` with ints, slices, None and an ellipsis: dims that are not taken in full must be whole."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in index):
        return NO_RULE
    dims = sum(type(entry) in (int, slice) for entry in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    result: list[int | None] = []
    cut: set[int] = set()
    picked: set[int] = set()
    at = 0
    for entry in index:
        if entry is None:
            result.append(None)
        elif entry is Ellipsis:
            result += range(at, at + call.ndim - dims)
            at += call.ndim - dims
        else:
            if type(entry) is int:
                picked.add(at)
            else:
                result.append(at)
                if entry != slice(None):
                    cut.add(at)
            at += 1
    ints = frozenset(picked)
    return Factors((tuple(range(call.ndim)),), (tuple(result),), summed=ints, whole=frozenset(cut) | ints, near=ints)


def keeping(dims: Callable[[ShapedCall], Iterable[int]]) -> Rule:
    """Return the rule of a function of one operand whose result has the same dims. Those of ``dims`` must be whole."""

    def rule(call: ShapedCall) -> Factors:
        every = tuple(range(call.ndim))
        return Factors((every,), (every,), whole=frozenset(dims(call)))

    return rule


def _sliced_dims(call: ShapedCall) -> tuple[int, ...]:
    return () if call.results[0] == call.shapes[0] else (call.argument(1, "dim", 0) % call.ndim,)


def _padded_dims(call: ShapedCall) -> list[int]:
    return [call.ndim - 1 - i // 2 for i, size in enumerate(call.argument(1, "pad")) if size]


def _flipped_dims(call: ShapedCall) -> list[int]:
    dims = call.argument(1, "dims")
    touched = call.dims(1, "dims") if isinstance(dims, int) or dims else ()
    return [d for d in touched if call.ndim and call.shapes[0][d] > 1]


sliced, padded, flipped = keeping(_sliced_dims), keeping(_padded_dims), keeping(_flipped_dims)
#: channels must be whole
shuffled = keeping(lambda _: (1,))
#: the rule of ``tril`` and ``triu``: the last two dims must be whole
triangle = keeping(lambda call: range(max(0, call.ndim - 2), call.ndim))


def repeated(call: ShapedCall) -> Factors:
    """The rule of ``repeat``: dims that are repeated must be whole."""
    before, after = call.shapes[0], call.results[0]
    new, every = len(after) - len(before), tuple(range(len(before)))
    grown = frozenset(d for d in every if before[d] != after[d + new])
    return Factors((every,), ((*(None,) * new, *every),), whole=grown)


def wrapped(call: ShapedCall) -> Factors:
    """The rule of aten's ``pad`` in mode ``"circular"``; other modes have none."""
    return padded(call) if call.argument(2, "mode") == "circular" else NO_RULE


def rolled(call: ShapedCall) -> Factors:
    """The rule of ``roll``: dims that roll must be whole.

    Without ``dims`` the flattened tensor rolls. Then no dim is sharded, except one at a time by a body.
    """
    dims = call.argument(2, "dims")
    every: Dims = tuple(range(call.ndim))
    if isinstance(dims, int) or dims:
        moved = _shifts(call.shapes[0], call.argument(1, "shifts"), dims)
        return Factors((every,), (every,), whole=frozenset(d for d, shift in moved.items() if shift))
    if not any(_shifts((prod(call.shapes[0]),), call.argument(1, "shifts"), 0).values()):
        return Factors((every,), (every,))
    no_dim: Dims = (None,) * call.ndim
    alternatives = []
    for d in range(call.ndim):
        one_dim: Dims = (*no_dim[:d], d, *no_dim[d + 1 :])
        alternatives.append(Factors((one_dim,), (one_dim,), whole=frozenset({d})))
    return Factors((no_dim,), (no_dim,), alternatives=tuple(alternatives))


def _shifts(shape: Shape, shifts: int | Sequence[int], dims: int | Sequence[int]) -> dict[int, int]:
    """Return the shift of each dim of a roll, reduced modulo its size."""
    by_dim: dict[int, int] = {}
    pairs = zip(*([given] if isinstance(given, int) else given for given in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        d = dim % len(shape)
        by_dim[d] = (by_dim.get(d, 0) + shift) % max(1, shape[d])
    return by_dim


def roll_blocks(shape: Shape, x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Roll blocks that are whole along all dims that roll; ``shape`` is the global shape."""
    if not isinstance(dims, int) and not dims:
        return x.roll(*_shifts((prod(shape),), shifts, 0).values())
    moved = {d: shift for d, shift in _shifts(shape, shifts, dims).items() if shift}
    return x.roll([*moved.values()], [*moved]) if moved else x.clone()


def unfolded(call: ShapedCall) -> Factors:
    """The rule of ``unfold``: the dim of the windows must be whole. The elements of a window are a new dim."""
    every: Dims = tuple(range(call.ndim))
    if not every:
        return Factors(((),), ((None,),))
    if len(call.results[0]) != call.ndim + 1:
        return NO_RULE  # another function with the same name
    dim = call.argument(1, "dimension") % call.ndim
    size, step = call.results[0][-1], call.argument(3, "step")
    windowed = frozenset({dim})
    near = windowed if size <= step and call.results[0][dim] * step == call.shapes[0][dim] else frozenset[int]()
    return Factors((every,), ((*every, None),), whole=frozenset() if size == step == 1 else windowed, near=near)


def unfold(_: Shape, x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Run ``unfold`` on blocks. Windows of one element work for empty blocks too, which torch refuses."""
    return x.unsqueeze(-1) if size == step == 1 and x.dim() else x.unfold(dimension, size, step)


def parts(place: int, name: str, *, gone: bool = False, copied: bool = False) -> Rule:
    """Return the rule of pieces along a dim, which must be whole.

    Args:
        place: The place of the argument that names the dim.
        name: Its name.
        gone: The pieces do not have the dim.
        copied: The pieces are not views.
    """

    def rule(call: ShapedCall) -> Factors:
        dim = call.argument(place, name, 0) % call.ndim
        every = range(call.ndim)
        piece = tuple(d for d in every if d != dim) if gone else tuple(every)
        cut = frozenset({dim})
        summed = cut if gone else frozenset[int]()  # one rank has the piece; the terms of the others are zero
        if copied and call.results[0] == call.shapes[0]:
            cut = frozenset()  # there is one piece
        return Factors((tuple(every),), (piece,) * len(call.results), summed=summed, whole=cut, near=summed)

    return rule


def joined(*, new: bool = False) -> Rule:
    """Return the rule of ``cat``: the dim must be whole; with ``new`` that of ``stack``, where the dim is new."""

    def rule(call: ShapedCall) -> Factors:
        ndim = max(map(len, call.shapes))
        dim = call.argument(1, "dim", 0) % (ndim + new)
        every = range(ndim)
        if new:
            return Factors((tuple(every),) * len(call.shapes), ((*range(dim), None, *range(dim, ndim)),))
        long = [shape for shape in call.shapes if len(shape) == ndim and shape[dim]]
        if len(long) == 1:  # all other operands are empty
            empty = tuple(None if d == dim else d for d in every)
            rows = (
                tuple(every) if shape is long[0] else empty if len(shape) == ndim else (None,) for shape in call.shapes
            )
            return Factors(tuple(rows), (tuple(every),))
        operands = tuple(tuple(every) if len(shape) == ndim else (None,) for shape in call.shapes)  # torch skips [0]
        return Factors(operands, (tuple(every),), whole=frozenset({dim}))

    return rule
