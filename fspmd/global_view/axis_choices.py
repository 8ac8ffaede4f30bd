"""What each mesh axis may do in a call, and what a combination of these takes, as far as that is plain to see."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Final

from fspmd.global_view.layouts import CallLayouts, Choice, state_of
from fspmd.redistribution.cost import Topology, links_differ, native_time, price, work
from fspmd.redistribution.straight import are_many
from fspmd.rules.factors import Dims, Factors
from fspmd.spec import P, TensorSpec

#: by operand what an axis moves: µs at least, at most; nothing for a slice
Changes = dict[int, tuple[float, float]]
_Option = tuple[str, Choice, Changes, bool]  # what an axis may do, what that moves, and whether it leaves pending sums
_NOTHING: Final[Changes] = {}
_MOST, _FEW = 512, 64  # combinations of many axes, and so many of more
_STAY: Final[Sequence[tuple[Dims, TensorSpec]]] = ()


@dataclass(slots=True)
class Combination:
    """One combination, in the order of preference; what it takes; and its layouts once they are asked for."""

    least: float  # µs
    most: float  # µs without gradients; inf where it is not plain
    place: int
    factors: Factors
    choices: dict[str, Choice]
    layouts: CallLayouts | None = None
    made: bool = False
    computed: bool = False

    def compute(self, operands: Sequence[TensorSpec], results: Sequence[TensorSpec], topology: Topology) -> None:
        """Add the computation, and that pending sums must end, to what is plain."""
        mesh, parts, pending = operands[0].mesh, dict[int | None, int](), list[str]()
        factors, self.computed = self.factors, True
        for axis, choice in self.choices.items():
            if isinstance(choice, int):
                parts[choice] = parts.get(choice, 1) * mesh.shape[axis]
                if choice in factors.summed:
                    pending.append(axis)
        lengths: dict[int | None, int] = {}
        held = 0
        for dims, spec in zip((*factors.operands, *factors.results), (*operands, *results), strict=True):
            own = spec.dtype.itemsize
            for factor, n in zip(dims, spec.shape, strict=True):
                lengths[factor] = length = -(-n // parts[factor]) if factor in parts else n
                own *= length
            held += own
        lengths[None] = factors.products
        time = work(prod(lengths.values()), held, topology)
        self.least += time if self.least else 0.0
        self.most += time
        if pending:
            self.most += len(results) * price("reduce", mesh, tuple(pending), held, held, topology).time / 2


def combinations(
    factors: Factors,
    linear: str,
    operands: Sequence[TensorSpec],
    bodied: bool,
    topology: Topology,
    results: Sequence[TensorSpec] = (),
) -> Iterator[Combination]:
    """For each way to read the call what each axis does.

    ``bodied``: dims that must be whole may be sharded, too. Given ``results``, without the ways that gather the largest
    operand of a function of elements.
    """
    mesh, place = operands[0].mesh, itertools.count()
    plain = _are_plain(operands, topology)
    idle = not plain and True in [0 in spec.shape for spec in operands]  # nobody has anything to move
    for reading in (factors, *factors.others):
        stay = _leading(reading, operands, results) if results else _STAY
        options: list[list[_Option]] = []
        for axis, n in mesh.shape.items():
            found = _choices(axis, reading, linear, operands, bodied, stay)
            if n == 1 or idle:
                options.append([(axis, choice, _NOTHING, False) for choice in found])
            else:
                native = _Native(axis, operands, topology) if plain else None
                begun = topology.launch, inf
                options.append([_option(axis, choice, reading, operands, native, begun) for choice in found])
        for combination in _combinations(options, operands, topology):
            least, most, choices = _together(combination, topology)
            if not plain or (bodied and not reading.whole.isdisjoint(choices.values())) or _share_a_dim(choices):
                most = inf
            yield Combination(least, most, next(place), reading, choices)


def _combinations(
    options: list[list[_Option]], operands: Sequence[TensorSpec], topology: Topology
) -> Iterator[Sequence[_Option]]:
    """What each axis does; of many axes those that have the same part in all operands do the same.

    Where that leaves too many, those go on, axis by axis, that move the least so far.
    """
    mesh = operands[0].mesh
    if not are_many(mesh):
        return itertools.product(*options)
    kinds: dict[Any, list[int]] = {}
    for i, (axis, n) in enumerate(mesh.shape.items()):
        places = [(_place(axis, spec), axis in spec.partition.reduced) for spec in operands]
        kinds.setdefault((n > 1, str(places), *(option[1] for option in options[i])), []).append(i)
    alike = list(kinds.values())

    def chosen(row: Sequence[int]) -> list[_Option]:
        return [options[i][k] for own, k in zip(alike, row, strict=False) for i in own]

    rows: list[tuple[int, ...]] = [()]
    for own in alike:
        rows = [(*row, k) for row in rows for k in range(len(options[own[0]]))]
        if len(rows) > _MOST:
            rows = sorted(heapq.nsmallest(_FEW, rows, lambda row: _together(chosen(row), topology)[0]))
    order = sorted(range(len(options)), key=[i for own in alike for i in own].__getitem__)
    return ([found[i] for i in order] for found in map(chosen, rows))


def _place(axis: str, spec: TensorSpec) -> int | str:
    """The dim that an axis cuts, or what else it does."""
    lies = spec.partition
    return _dim_of(axis, lies) if axis in lies.axes else "U" if axis in lies.unreduced else ""


def _together(combination: Sequence[_Option], topology: Topology) -> tuple[float, float, dict[str, Choice]]:
    """µs at least and at most of what several axes move; of an operand that several of them change not what of each."""
    changes: dict[int, list[tuple[float, float]]] = {}
    choices: dict[str, Choice] = {}
    least, most, pends = 0.0, 0.0, False
    for axis, choice, moved, pending in combination:
        choices[axis] = choice
        pends = pends or pending
        for i, took in moved.items():
            if i in changes:
                changes[i].append(took)
            else:
                changes[i] = [took]
    for several in changes.values():
        low, high = several[0] if len(several) == 1 else (_jointly([low for low, _ in several], topology), inf)
        least, most = least + low, most + high
    return least + (topology.launch / 2 if least and pends else 0.0), most, choices  # at least sums are scattered


def _jointly(lows: Sequence[float], topology: Topology) -> float:
    """µs at least of what several axes change of one operand: as for each, unless slices leave less to move."""
    return max(lows) if 0.0 not in lows else topology.launch if any(lows) else 0.0


def _are_plain(operands: Sequence[TensorSpec], topology: Topology) -> bool:
    """Whether one native collective along one axis is the best there is, and has its formula's price."""
    for spec in operands:
        if not spec.even or spec.flat or spec.partition.unreduced or spec.partition.reduced or 0 in spec.shape:
            return False
    mesh = operands[0].mesh
    return topology.capacity == inf and 1 not in mesh.shape.values() and not links_differ(mesh, topology)


def _option(
    axis: str,
    choice: Choice,
    factors: Factors,
    operands: Sequence[TensorSpec],
    native: _Native | None,
    begun: tuple[float, float],
) -> _Option:
    """What an axis must move so that it does its part; ``begun``: of what has no plain price."""
    found: Changes = {}
    for i, spec in enumerate(operands):
        lies, dims = spec.partition, factors.operands[i]
        if axis in lies.axes:
            cut = lies.entries.index(axis) if axis in lies.entries else _dim_of(axis, lies)
            to = None if isinstance(choice, str) or choice not in dims else dims.index(choice)
            if to is not None and dims[cut] == choice:
                continue
            if native is not None:
                time = native.time(i, to)
                found[i] = begun if time is None else (time, time)
            elif to is None or spec.even:  # to another dim: of uneven blocks there may be but one
                found[i] = begun
        elif axis in lies.unreduced:
            if state_of(choice, i, dims, factors) != "U":
                found[i] = begun
        elif native is not None and choice in dims:
            found[i] = 0.0, 0.0
    return axis, choice, found, "U" in choice if isinstance(choice, str) else choice in factors.summed


def _dim_of(axis: str, lies: P) -> int:
    return next(d for d, axes in enumerate(lies.dim_axes) if axis in axes)


class _Native:
    """µs of the native collectives of operands along one axis that alone cuts a dim; None where there is none."""

    __slots__ = ("axis", "link", "n", "operands", "topology")

    def __init__(self, axis: str, operands: Sequence[TensorSpec], topology: Topology) -> None:
        mesh = operands[0].mesh
        self.axis, self.operands, self.topology = axis, operands, topology
        self.n, self.link = mesh.shape[axis], topology.link(mesh, (axis,))

    def time(self, i: int, to: int | None) -> float | None:
        """Of an operand that is gathered, or whose axis goes to another dim."""
        spec = self.operands[i]
        entries, held = spec.partition.entries, prod(spec.block_shape) * spec.dtype.itemsize
        if self.axis not in entries:
            return None
        if to is None:
            return native_time("gather", self.n, held, held * self.n, self.link, self.topology)
        if entries[to] is None and spec.shape[to] % self.n == 0:
            return native_time("exchange", self.n, held, held, self.link, self.topology)
        return None


def _share_a_dim(choices: dict[str, Choice]) -> bool:
    """Whether several axes shard one factor: they may have to stand in another order."""
    if len(choices) == 1:
        return False
    cut = [choice for choice in choices.values() if isinstance(choice, int)]
    return len({*cut}) < len(cut)


def _leading(
    factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> Sequence[tuple[Dims, TensorSpec]]:
    """Of a function of elements the operands as large as the result and as any other, with their dims."""
    if len(operands) < 2 or factors.summed or factors.whole:
        return ()
    size = max(prod(spec.shape) for spec in results)
    wide = max(prod(spec.shape) * spec.dtype.itemsize for spec in operands)
    return [
        (dims, spec)
        for dims, spec in zip(factors.operands, operands, strict=True)
        if prod(spec.shape) >= size and prod(spec.shape) * spec.dtype.itemsize >= wide
    ]


def _choices(
    axis: str,
    factors: Factors,
    linear: str,
    operands: Sequence[TensorSpec],
    bodied: bool,
    stay: Sequence[tuple[Dims, TensorSpec]],
) -> list[Choice]:
    """What an axis can do, the preferred first: what some operand already does, or nothing.

    Where it shards a dim that must be whole, another dim is a way, too. An operand in ``stay`` is not gathered.
    """
    found: list[Choice] = []
    if True in [axis in spec.partition.reduced for spec in operands]:
        found.append("R" * len(operands))
    pending = [i for i, spec in enumerate(operands) if axis in spec.partition.unreduced]
    if pending:
        found += [way for waiting, way in passed_on(factors, linear, len(operands)) if not waiting.isdisjoint(pending)]
    for dims, spec in zip(factors.operands, operands, strict=True):
        if axis not in spec.partition.axes:
            continue
        for factor, axes in zip(dims, spec.partition.dim_axes, strict=True):
            if axis not in axes:
                continue
            if factor is None or (factor in factors.whole and not bodied):
                found += [free for free in _free(axis, factors, operands) if free not in found]
            elif factor not in found:
                found.append(factor)
    for dims, spec in stay:
        if any(axis in axes for f, axes in zip(dims, spec.partition.dim_axes, strict=True) if f is not None):
            return found
    whole = "I" * len(operands)
    return [whole, *found] if True in [0 in spec.shape for spec in operands] else [*found, whole]


def passed_on(factors: Factors, linear: str, operands: int) -> Iterator[tuple[frozenset[int], str]]:
    """The operands that may be pending sums, and what all are then, where the result is one."""
    every = range(operands)
    if linear == "sum":
        summands = frozenset(every) - factors.places
        yield summands, "".join("U" if i in summands else "I" for i in every)
    for one in range({"product": operands, "first": 1}.get(linear, 0)):
        if one not in factors.added | factors.places:
            states = ("U" if i in factors.added or i == one else "I" if i in factors.places else "R" for i in every)
            yield frozenset((one,)), "".join(states)


def _free(axis: str, factors: Factors, operands: Sequence[TensorSpec]) -> Iterator[int]:
    """The factors that an axis may shard instead of one that must be whole: an exchange moves less than a gather."""
    for dims, spec in zip(factors.operands, operands, strict=True):
        for factor, size in zip(dims, spec.shape, strict=True):
            if factor is not None and factor not in factors.whole and size >= spec.mesh.shape[axis]:
                yield factor
