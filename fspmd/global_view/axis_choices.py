"""The choices of each mesh axis in a call, their combinations, and bounds on the time of a combination."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Final, NamedTuple

from fspmd.global_view.question import Question
from fspmd.redistribution.cost import Topology, links_differ, native_time, price, topology, work
from fspmd.redistribution.straight import are_many
from fspmd.rules.factors import Dims, Factors
from fspmd.spec import P, TensorSpec

#: the choice of one axis: the factor that it shards (int), or a letter per operand, "U", "R" or "I" (neither)
Choice = int | str
#: operand -> bounds (µs, lower and upper) of the move that a choice requires; a slice has no entry
Changes = dict[int, tuple[float, float]]
_Option = tuple[str, Choice, Changes, bool]  # axis, its choice, the moves of operands, whether sums are left pending
_NOTHING: Final[Changes] = {}
_MOST, _FEW = 512, 64  # more than _MOST combinations of many axes are reduced to _FEW
_STAY: Final[Sequence[tuple[Dims, TensorSpec]]] = ()


@dataclass(slots=True)
class Combination:
    """One choice for each axis, with bounds of its time; its layouts are made on demand."""

    least: float  # lower bound, µs
    most: float  # upper bound without gradients, µs; inf where no formula gives it
    place: int  # in the order of preference
    factors: Factors
    choices: dict[str, Choice]
    layouts: Any = None  # its `Strategy`, once ``made``; None if blocks do not fit together
    made: bool = False
    computed: bool = False

    def compute(self, question: Question) -> None:
        """Add the time of the computation, and of settling pending sums, to the bounds."""
        operands, results, machine = question.operands, question.results, topology()
        mesh, parts, pending = operands[0].mesh, dict[int | None, int](), list[str]()
        factors, self.computed = self.factors, True
        for axis, choice in self.choices.items():
            if isinstance(choice, int):
                parts[choice] = parts.get(choice, 1) * mesh.shape[axis]
                if choice in factors.summed:
                    pending.append(axis)
        lengths: dict[int | None, int] = {}
        size = 0
        for dims, spec in zip((*factors.operands, *factors.results), (*operands, *results), strict=True):
            block_bytes = spec.dtype.itemsize
            for factor, n in zip(dims, spec.shape, strict=True):
                lengths[factor] = length = -(-n // parts[factor]) if factor in parts else n
                block_bytes *= length
            size += block_bytes
        lengths[None] = factors.multiplications
        time = work(prod(lengths.values()), size, machine)
        self.least += time if self.least else 0.0
        self.most += time
        if pending:
            self.most += len(results) * price("reduce", mesh, tuple(pending), size, size, machine).time / 2


def combinations(question: Question) -> Iterator[Combination]:
    """Yield the combinations of the axes' choices, for each reading of the call.

    The largest operand of an elementwise function is not gathered, unless the result is fixed.
    """
    factors, operands, linear, has_body = (
        question.factors,
        question.operands,
        question.passes_on,
        bool(question.row.body),
    )
    mesh, machine, place = operands[0].mesh, topology(), itertools.count()
    plain = _are_plain(operands, machine)
    idle = not plain and True in [0 in spec.shape for spec in operands]  # there is nothing to move
    for reading in (factors, *factors.alternatives):
        stay = _STAY if question.fixed else _leading(reading, operands, question.results)
        options: list[list[_Option]] = []
        for axis, n in mesh.shape.items():
            choices = _choices(axis, reading, linear, operands, has_body, stay)
            if n == 1 or idle:
                options.append([(axis, choice, _NOTHING, False) for choice in choices])
            else:
                native = _Native(axis, operands, machine) if plain else None
                unknown = machine.launch, inf
                options.append([_option(axis, choice, reading, operands, native, unknown) for choice in choices])
        for combination in _combinations(options, operands, machine):
            least, most, chosen = _bounds(combination, machine)
            if not plain or (has_body and not reading.whole.isdisjoint(chosen.values())) or _share_a_dim(chosen):
                most = inf
            yield Combination(least, most, next(place), reading, chosen)


def _combinations(
    options: list[list[_Option]], operands: Sequence[TensorSpec], topology: Topology
) -> Iterator[Sequence[_Option]]:
    """Return all combinations of the options.

    On a mesh of many axes, axes that lie alike in all operands choose alike. If too many combinations remain, the
    search goes axis by axis, and keeps those that move the least.
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
        return [options[i][k] for group, k in zip(alike, row, strict=False) for i in group]

    rows: list[tuple[tuple[int, ...], _Lows]] = [((), _Lows((-1.0,) * len(operands), False))]
    for group in alike:
        added = [_lows([options[i][k] for i in group], len(operands)) for k in range(len(options[group[0]]))]
        rows = [((*row, k), _join(lows, more)) for row, lows in rows for k, more in enumerate(added)]
        if len(rows) > _MOST:
            rows = sorted(heapq.nsmallest(_FEW, rows, lambda row: _least(row[1], topology)))
    order = sorted(range(len(options)), key=[i for group in alike for i in group].__getitem__)
    return ([combination[i] for i in order] for combination in (chosen(row) for row, _ in rows))


class _Lows(NamedTuple):
    """The lower bounds of the moves of a part of a combination, so that the bound of a longer part needs no more."""

    moves: tuple[float, ...]  # per operand µs: the largest, -1 without a move, inf if a slice leaves less to move
    pends: bool


def _lows(part: Sequence[_Option], operands: int) -> _Lows:
    lows = _Lows((-1.0,) * operands, False)
    for _, _, changes, pends in part:
        lows = _join(lows, _Lows(tuple([changes[i][0] if i in changes else -1.0 for i in range(operands)]), pends))
    return lows


def _join(a: _Lows, b: _Lows) -> _Lows:
    pairs = zip(a.moves, b.moves, strict=True)
    return _Lows(tuple([x if y < 0 else y if x < 0 else _together(x, y) for x, y in pairs]), a.pends or b.pends)


def _together(a: float, b: float) -> float:
    """Return the lower bound (µs) of the move of an operand that two axes change.

    It is the larger one, unless a slice over one axis leaves less to move over the other: inf, for one launch.
    """
    return max(a, b) if bool(a) is bool(b) else inf


def _least(lows: _Lows, topology: Topology) -> float:
    """Return the least time (µs) of the moves of a combination."""
    least = 0.0
    for low in lows.moves:
        if low > 0:
            least += topology.launch if low == inf else low
    return least + (topology.launch / 2 if least and lows.pends else 0.0)  # at least sums are scattered


def _place(axis: str, spec: TensorSpec) -> int | str:
    """Return the dim that an axis cuts, "U" if the value is unreduced over it, "" otherwise."""
    lies = spec.partition
    return _dim_of(axis, lies) if axis in lies.axes else "U" if axis in lies.unreduced else ""


def _bounds(combination: Sequence[_Option], topology: Topology) -> tuple[float, float, dict[str, Choice]]:
    """Return the least and the greatest time of a combination's moves (µs), and its choices by axis."""
    changes: dict[int, tuple[float, float]] = {}
    choices: dict[str, Choice] = {}
    least, most, pends = 0.0, 0.0, False
    for axis, choice, moved, pending in combination:
        choices[axis] = choice
        pends = pends or pending
        for i, bounds in moved.items():
            changes[i] = (_together(changes[i][0], bounds[0]), inf) if i in changes else bounds
    for low, high in changes.values():
        least, most = least + (topology.launch if low == inf else low), most + high
    return least + (topology.launch / 2 if least and pends else 0.0), most, choices  # at least sums are scattered


def _are_plain(operands: Sequence[TensorSpec], topology: Topology) -> bool:
    """Whether no route beats one native collective along one axis, so that a formula gives the price."""
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
    unknown: tuple[float, float],
) -> _Option:
    """Return a choice of an axis with the moves that it requires; ``unknown`` bounds a move that has no formula."""
    changes: Changes = {}
    for i, spec in enumerate(operands):
        lies, dims = spec.partition, factors.operands[i]
        if axis in lies.axes:
            cut = lies.entries.index(axis) if axis in lies.entries else _dim_of(axis, lies)
            to = None if isinstance(choice, str) or choice not in dims else dims.index(choice)
            if to is not None and dims[cut] == choice:
                continue
            if native is not None:
                time = native.time(i, to)
                changes[i] = unknown if time is None else (time, time)
            elif to is None or spec.even:  # an uneven value may have a single block, which an exchange leaves in place
                changes[i] = unknown
        elif axis in lies.unreduced:
            if state_of(choice, i, dims, factors) != "U":
                changes[i] = unknown
        elif native is not None and choice in dims:
            changes[i] = 0.0, 0.0
    return axis, choice, changes, "U" in choice if isinstance(choice, str) else choice in factors.summed


def _dim_of(axis: str, lies: P) -> int:
    return next(d for d, axes in enumerate(lies.dim_axes) if axis in axes)


class _Native:
    """Prices of the native collectives of operands over one axis."""

    __slots__ = ("axis", "link", "n", "operands", "topology")

    def __init__(self, axis: str, operands: Sequence[TensorSpec], topology: Topology) -> None:
        mesh = operands[0].mesh
        self.axis, self.operands, self.topology = axis, operands, topology
        self.n, self.link = mesh.shape[axis], topology.link(mesh, (axis,))

    def time(self, i: int, to: int | None) -> float | None:
        """Return the µs to gather an operand, or to move its axis to the dim ``to``.

        None if no native collective does so, or if the axis does not cut its dim alone.
        """
        spec = self.operands[i]
        entries, size = spec.partition.entries, spec.block_bytes
        if self.axis not in entries:
            return None
        if to is None:
            return native_time("gather", self.n, size, size * self.n, self.link, self.topology)
        if entries[to] is None and spec.shape[to] % self.n == 0:
            return native_time("exchange", self.n, size, size, self.link, self.topology)
        return None


def _share_a_dim(choices: dict[str, Choice]) -> bool:
    """Whether several axes shard one factor. They may then have to change their order."""
    if len(choices) == 1:
        return False
    cut = [choice for choice in choices.values() if isinstance(choice, int)]
    return len({*cut}) < len(cut)


def _leading(
    factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> Sequence[tuple[Dims, TensorSpec]]:
    """Return the dims and specs of the largest operands of an elementwise function that are as large as its result."""
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
    has_body: bool,
    stay: Sequence[tuple[Dims, TensorSpec]],
) -> list[Choice]:
    """Return the choices of an axis, the preferred first: its part in some operand, or none.

    Where it shards a dim that must be whole, it may shard another dim instead. An operand in ``stay`` is not gathered.
    """
    choices: list[Choice] = []
    if True in [axis in spec.partition.reduced for spec in operands]:
        choices.append("R" * len(operands))
    pending = [i for i, spec in enumerate(operands) if axis in spec.partition.unreduced]
    if pending:
        choices += [
            states for sums, states in passed_on(factors, linear, len(operands)) if not sums.isdisjoint(pending)
        ]
    for dims, spec in zip(factors.operands, operands, strict=True):
        if axis not in spec.partition.axes:
            continue
        for factor, axes in zip(dims, spec.partition.dim_axes, strict=True):
            if axis not in axes:
                continue
            if factor is None or (factor in factors.whole and not has_body):
                choices += [free for free in _free(axis, factors, operands) if free not in choices]
            elif factor not in choices:
                choices.append(factor)
    for dims, spec in stay:
        if any(axis in axes for f, axes in zip(dims, spec.partition.dim_axes, strict=True) if f is not None):
            return choices
    invariant = "I" * len(operands)
    return [invariant, *choices] if True in [0 in spec.shape for spec in operands] else [*choices, invariant]


def passed_on(factors: Factors, linear: str, operands: int) -> Iterator[tuple[frozenset[int], str]]:
    """Yield the sets of operands that may be pending together, and the states of all operands then.

    The result is a pending sum too. A state is "U" (unreduced), "R" (reduced) or "I" (invariant).
    """
    every = range(operands)
    if linear == "sum":
        summands = frozenset(every) - factors.places
        yield summands, "".join("U" if i in summands else "I" for i in every)
    for pending in range({"product": operands, "first": 1}.get(linear, 0)):
        if pending not in factors.added | factors.places:
            states = ("U" if i in factors.added or i == pending else "I" if i in factors.places else "R" for i in every)
            yield frozenset((pending,)), "".join(states)


def _free(axis: str, factors: Factors, operands: Sequence[TensorSpec]) -> Iterator[int]:
    """Yield the factors that an axis may shard in place of a whole one: an exchange moves less than a gather."""
    for dims, spec in zip(factors.operands, operands, strict=True):
        for factor, size in zip(dims, spec.shape, strict=True):
            if factor is not None and factor not in factors.whole and size >= spec.mesh.shape[axis]:
                yield factor


def state_of(choice: Choice, operand: int, dims: Dims, factors: Factors) -> str:
    """Return the state of an operand over an axis: "I", "U", "R", "V" (it has the factor), or "cast".

    An operand without the factor is cast to varying, since the operands that have it vary.
    """
    if isinstance(choice, str):
        return choice[operand]
    if choice in dims:
        return "V"
    return "U" if choice in factors.summed and operand in factors.added else "cast"
