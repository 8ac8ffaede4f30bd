"""What each mesh axis may do in a call, and what a combination of these takes, as far as that is plain to see."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Final

from fspmd.entries import entry_axes
from fspmd.global_view.layouts import Choice, Layouts, computing, state_of
from fspmd.redistribution.cost import Topology, links_differ, price
from fspmd.rules.factors import Dims, Factors
from fspmd.spec import P, TensorSpec

#: by operand what an axis moves: µs at least, at most; nothing for a slice
Changes = dict[int, tuple[float, float]]
_NOTHING: Final[Changes] = {}
_STAY: Final[Sequence[tuple[Dims, TensorSpec]]] = ()


@dataclass(slots=True)
class Way:
    """One combination, in the order of preference; what it takes; and its layouts once they are asked for."""

    least: float  # µs
    most: float  # µs without gradients; inf where it is not plain
    place: int
    factors: Factors
    choices: dict[str, Choice]
    layouts: Layouts | None = None
    made: bool = False
    computed: bool = False

    def compute(self, operands: Sequence[TensorSpec], results: Sequence[TensorSpec], topology: Topology) -> None:
        """Add the computation, and that pending sums must end, to what is plain."""
        mesh, parts, pending = operands[0].mesh, dict[int | None, int](), list[str]()
        for axis, choice in self.choices.items():
            if isinstance(choice, int):
                parts[choice] = parts.get(choice, 1) * mesh.shape[axis]
                if choice in self.factors.summed:
                    pending.append(axis)
        held = []
        for dims, spec in zip((*self.factors.operands, *self.factors.results), (*operands, *results), strict=True):
            block = [-(-n // parts.get(factor, 1)) for factor, n in zip(dims, spec.shape, strict=True)]
            held.append((block, spec.dtype))
        self.computed = True
        time = computing(self.factors, held, topology)
        self.least += time if self.least else 0.0
        self.most += time
        for block, dtype in held[len(operands) :] if pending else ():
            size = prod(block) * dtype.itemsize
            self.most += price("reduce", mesh, tuple(pending), size, size, topology).time / 2


def ways(
    factors: Factors,
    linear: str,
    operands: Sequence[TensorSpec],
    bodied: bool,
    topology: Topology,
    results: Sequence[TensorSpec] = (),
) -> Iterator[Way]:
    """For each way to read the call what each axis does.

    ``bodied``: dims that must be whole may be sharded, too. Given ``results``, without the ways that gather the largest
    operand of a function of elements.
    """
    mesh, place = operands[0].mesh, itertools.count()
    plain = _are_plain(operands, topology)
    idle = not plain and True in [0 in spec.shape for spec in operands]  # nobody has anything to move
    for reading in (factors, *factors.others):
        stay = _leading(reading, operands, results) if results else _STAY
        options = []
        for axis, n in mesh.shape.items():
            chosen = _choices(axis, reading, linear, operands, bodied, stay)
            if n == 1 or idle:
                options.append([(choice, _NOTHING, False) for choice in chosen])
            else:
                args = reading, operands, topology, plain
                options.append([(one, _changes(axis, one, *args), _pends(one, reading)) for one in chosen])
        for combination in itertools.product(*options):
            least, most = _together([changes for _, changes, _ in combination], topology)
            if least and True in [pends for *_, pends in combination]:
                least += topology.launch / 2  # at least sums are scattered
            chosen = [choice for choice, *_ in combination]
            if not plain or (bodied and not reading.whole.isdisjoint(chosen)) or _share_a_dim(chosen):
                most = inf
            yield Way(least, most, next(place), reading, dict(zip(mesh.axis_names, chosen, strict=True)))


def _together(several: Sequence[Changes], topology: Topology) -> tuple[float, float]:
    """µs at least and at most of what several axes move; of an operand that several of them change not what of each."""
    changes: Changes = {}
    for i, took in itertools.chain(*[one.items() for one in several]):
        begun = topology.launch if i in changes and (took[0] or changes[i][0]) else 0.0
        changes[i] = (begun, inf) if i in changes else took
    return sum([least for least, _ in changes.values()]), sum([most for _, most in changes.values()])


def _are_plain(operands: Sequence[TensorSpec], topology: Topology) -> bool:
    """Whether one native collective along one axis is the best there is, and has its formula's price."""
    for spec in operands:
        if not spec.even or spec.flat or spec.partition.unreduced or spec.partition.reduced or 0 in spec.shape:
            return False
    mesh = operands[0].mesh
    return topology.capacity == inf and 1 not in mesh.shape.values() and not links_differ(mesh, topology)


def _changes(
    axis: str, choice: Choice, factors: Factors, operands: Sequence[TensorSpec], topology: Topology, plain: bool
) -> Changes:
    """What an axis must move so that it does its part."""
    found: Changes = {}
    for i, (dims, spec) in enumerate(zip(factors.operands, operands, strict=True)):
        lies = spec.partition
        if axis in lies.axes:
            alone = axis in lies.entries
            cut = lies.entries.index(axis) if alone else _dim_of(axis, lies)
            if isinstance(choice, str) or choice not in dims:
                to = None
            elif dims[cut] != choice:
                to = dims.index(choice)
            else:
                continue
            if plain and alone:
                found[i] = _native(spec, axis, to, topology)
            elif plain or to is None or spec.even:  # to another dim: of uneven blocks there may be but one
                found[i] = topology.launch, inf
        elif axis in lies.unreduced:
            if state_of(choice, i, dims, factors) != "U":
                found[i] = topology.launch, inf
        elif plain and choice in dims:
            found[i] = 0.0, 0.0
    return found


def _dim_of(axis: str, lies: P) -> int:
    return next(d for d, entry in enumerate(lies) if axis in entry_axes(entry))


def _native(spec: TensorSpec, axis: str, to: int | None, topology: Topology) -> tuple[float, float]:
    """Of a dim that one axis cuts: gathered, or exchanged for another one."""
    held = prod(spec.block_shape) * spec.dtype.itemsize
    n = spec.mesh.shape[axis]
    if to is None:
        time = price("gather", spec.mesh, (axis,), held, held * n, topology).time
    elif spec.partition[to] is None and spec.shape[to] % n == 0:
        time = price("exchange", spec.mesh, (axis,), held, held, topology).time
    else:
        return topology.launch, inf
    return time, time


def _share_a_dim(chosen: list[Choice]) -> bool:
    """Whether several axes shard one factor: they may have to stand in another order."""
    cut = [choice for choice in chosen if isinstance(choice, int)] if len(chosen) > 1 else []
    return len({*cut}) < len(cut)


def _pends(choice: Choice, factors: Factors) -> bool:
    return "U" in choice if isinstance(choice, str) else choice in factors.summed


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
    if pending and linear == "sum":
        found.append("U" * len(operands))
    elif pending and (linear == "product" or (linear == "first" and pending[0] == 0)):
        for one in pending if linear == "product" else (0,):
            if one not in factors.added:
                found.append("".join("U" if i in factors.added or i == one else "R" for i in range(len(operands))))
    for dims, spec in zip(factors.operands, operands, strict=True):
        if axis not in spec.partition.axes:
            continue
        for factor, entry in zip(dims, spec.partition, strict=True):
            if axis not in entry_axes(entry):
                continue
            if factor is None or (factor in factors.whole and not bodied):
                found += [free for free in _free(axis, factors, operands) if free not in found]
            elif factor not in found:
                found.append(factor)
    for dims, spec in stay:
        if any(axis in entry_axes(entry) for f, entry in zip(dims, spec.partition, strict=True) if f is not None):
            return found
    whole = "I" * len(operands)
    return [whole, *found] if True in [0 in spec.shape for spec in operands] else [*found, whole]


def _free(axis: str, factors: Factors, operands: Sequence[TensorSpec]) -> Iterator[int]:
    """The factors that an axis may shard instead of one that must be whole: an exchange moves less than a gather."""
    for dims, spec in zip(factors.operands, operands, strict=True):
        for factor, size in zip(dims, spec.shape, strict=True):
            if factor is not None and factor not in factors.whole and size >= spec.mesh.shape[axis]:
                yield factor
