"""`Coalesce`: pack small collectives of one kind into one. This saves the time to begin each, and costs copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch import Tensor, fx

from fspmd.pairs import Call, call
from fspmd.programs.keys import check_bytes
from fspmd.programs.program import Program, Value, copied, forget, leave, leave_all
from fspmd.programs.schedule import time_after
from fspmd.programs.steps import (
    add_collective,
    add_step,
    dependencies,
    has_effect,
    is_collective,
    is_wait,
    reads_result_alone,
    replace,
)
from fspmd.redistribution.cost import moves, price, topology
from fspmd.transport import Options

Shape = tuple[int, ...]
_LESS: Final = 64  # the divisor of ``bucket`` for the smaller size to try
_NAME: Final = "coalesce"


@dataclass(frozen=True, slots=True)
class Coalesce:
    """A pass for `jit`: pack collectives that do not depend on each other into one of at most ``bucket`` bytes.

    Collectives are packed if, by the topology, the copies take less time than beginning each collective. Steps that use
    a result wait for the packed collective. None of them is a collective, so the order of other collectives stays.
    Results have the same values, except that a backend may add in another order.

    A packed collective is hidden beside fewer steps. So before `Overlap` the pass tries on copies of the program
    whether to pack up to ``bucket``, less, or nothing. It does not try if ranks might choose differently: if blocks are
    uneven, or Python asks `axis_index`.

    >>> from fspmd import P, jit, make_mesh, psum, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = shard_map(lambda x: psum(x, "x") * psum(x * x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    >>> len(jit(f, passes=[Coalesce()]).lower(torch.ones(4)).collectives())
    1
    """

    bucket: float = 25 << 20

    def __post_init__(self) -> None:
        check_bytes("Coalesce(bucket=...)", self.bucket)

    def __call__(self, program: Program) -> int:
        """Pack until nothing more can be packed. Returns the number of removed collectives."""
        removed = 0
        if leave_all(program, _NAME, "all collectives"):
            return removed
        while packed := self._pack_all(program):
            removed += packed
        return removed

    def before(self, program: Program, others: Callable[[Program], None]) -> Coalesce:
        """The pass with the best ``bucket`` before ``others``, the passes that follow."""
        if not (program.even and program.alike and self(copied(program))):  # smaller buckets pack no more
            return self
        choices = self, Coalesce(self.bucket / _LESS), Coalesce(0)
        return min(choices, key=lambda choice: time_after(program, choice, others))

    def _pack_all(self, program: Program) -> int:
        """Pack each bucket of the program. Returns the number of removed collectives."""
        removed = 0
        for bucket in sorted(self._buckets(program), key=lambda bucket: bucket.places[-1]):
            if len(bucket.members) > 1:
                _pack(bucket)
                removed += len(bucket.members) - 1
        return removed

    def _buckets(self, program: Program) -> list[_CollectiveBucket]:
        """The collectives of a program in buckets. Notes why collectives are not packed."""
        forget(program, _NAME)
        before = dependencies(program)
        open_: dict[Hashable, _CollectiveBucket] = {}
        full: dict[Hashable, fx.Node] = {}  # by the step that closed it
        done: list[_CollectiveBucket] = []
        for place, node in enumerate(list(program.graph.nodes)):
            key = _key(node)
            for kind, bucket in list(open_.items()):
                if not any(earlier in bucket.after for earlier in before[node]):
                    continue
                bucket.after[node] = None
                if _stays(node):  # this step would wait for later members, or they for this step
                    done.append(open_.pop(kind))
                    full[kind] = node
            if key is None:
                continue
            bucket = open_.setdefault(key, _CollectiveBucket())
            if not bucket.members and key in full:
                leave(node, _NAME, "earlier collectives of its kind are needed before it, by", full[key])
            if bucket.members and (why := self._beside(bucket, node)):
                leave(node, _NAME, why, bucket.members[0])
                if bucket.bytes < _bytes(node):  # the bucket stays open, since it is smaller than the collective
                    continue
                done.append(bucket)
                bucket = open_[key] = _CollectiveBucket()
            bucket.add(node, place)
        return done + list(open_.values())

    def _beside(self, bucket: _CollectiveBucket, node: fx.Node) -> str:
        """Why a collective is not packed with the members of a bucket; empty if it is."""
        if bucket.bytes + _bytes(node) > self.bucket:
            return f"at most {self.bucket:,.0f} bytes are packed into one; it is separate from"
        return "" if bucket.pays(node) else "copies would take longer than to begin it after"


@dataclass(slots=True)
class _CollectiveBucket:
    """Collectives to pack, and the steps that depend on them."""

    members: list[fx.Node] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    bytes: int = 0
    after: dict[fx.Node, None] = field(default_factory=dict)  # members, and steps that depend on them, in order
    delayed: int = 0  # the number of steps of ``after`` before the last member

    def add(self, node: fx.Node, place: int) -> None:
        """Add a collective at a place of the program."""
        self.members.append(node)
        self.places.append(place)
        self.delayed = len(self.after)
        self.after[node] = None
        self.bytes += _bytes(node)

    def pays(self, node: fx.Node) -> bool:
        """Whether one more collective takes less time packed than alone."""
        call: Call = node.meta["call"]
        alone, after = _bytes(node), node.meta["value"].nbytes
        together = self.bytes + alone
        ratio = after / alone
        separate = _time(call, self.bytes, self.bytes * ratio) + _time(call, alone, after)
        copied = alone if len(self.members) > 1 else together
        copies = 2 * copied * (1 + ratio) / topology().memory
        return bool(_time(call, together, together * ratio) + copies < separate)


def _time(call: Call, before: float, after: float) -> float:
    """µs of a call on an operand of ``before`` bytes, with a result of ``after`` bytes."""
    return price(call.pair.kernel, call.mesh, call.axes, int(before), int(after)).time


def _bytes(node: fx.Node) -> int:
    """The bytes of the operand. They are equal on all ranks that take part."""
    value: Value = node.all_input_nodes[0].meta["value"]
    return value.nbytes


def _stays(node: fx.Node) -> bool:
    """Whether a step cannot be moved after a later collective."""
    if node.op != "call_function":
        return True
    return (is_collective(node) and moves(node.meta["call"].pair.kernel)) or is_wait(node) or has_effect(node)


def _key(node: fx.Node) -> Hashable | None:
    """The key that collectives of one bucket share; None for steps that are never packed."""
    if not is_collective(node, *_PACKINGS) or not node.meta["waits"]:
        return None
    call: Call = node.meta["call"]
    (x,) = node.all_input_nodes
    value: Value = x.meta["value"]
    o = call.options
    if o.index_groups or o.sizes or o.concat_sizes or not value.shape or not value.nbytes:
        return None
    frame = x.meta.get("frame")
    if call.mesh.transport == "simulation" and (frame is None or frame[1]):
        return None
    return call.pair.name, call.mesh, call.axes, o.op, value.dtype, frame, node.meta["deferred"], node.meta["backward"]


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packing:
    """For a kernel: an operand as rows, and a result from rows."""

    into: Callable[[Tensor, Call], Tensor]
    back: Callable[[Tensor, Shape, Call], Tensor]


def _ranks(call: Call) -> int:
    return prod(call.mesh.shape[axis] for axis in call.axes)


def _one_row(x: Tensor, call: Call) -> Tensor:
    return x.reshape(1, -1)


def _row_per_rank(x: Tensor, call: Call) -> Tensor:
    n, dim = _ranks(call), call.options.dim
    rows: Tensor = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).reshape(n, -1)
    return rows


def _from_one_row(row: Tensor, shape: Shape, call: Call) -> Tensor:
    return row.reshape(shape)


def _from_row_per_rank(dim: int, rows: Tensor, shape: Shape, call: Call) -> Tensor:
    """The result, from a row per rank: blocks along a dim."""
    n = _ranks(call)
    block = (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])
    joined: Tensor = rows.reshape(n, *block).movedim(0, dim).flatten(dim, dim + 1)
    return joined


_SUM: Final = Packing(_one_row, _from_one_row)
_GATHER: Final = Packing(_one_row, lambda rows, shape, call: _from_row_per_rank(call.options.dim, rows, shape, call))
_PACKINGS: Final = {
    "reduce": _SUM,
    "reduce_once": _SUM,
    "gather": _GATHER,
    "gather_once": _GATHER,
    "reduce_scatter": Packing(_row_per_rank, _from_one_row),
    "exchange": Packing(
        _row_per_rank, lambda rows, shape, call: _from_row_per_rank(call.options.concat_dim, rows, shape, call)
    ),
}


def packed(calls: Sequence[Call], *operands: Tensor) -> Tensor:
    """The rows of all operands, joined along their length."""
    rows = [_PACKINGS[call.pair.kernel].into(x, call) for call, x in zip(calls, operands, strict=True)]
    return torch.cat(rows, 1)


@reads_result_alone
def unpacked(rows: Tensor, start: int, width: int, shape: Shape, strides: Shape | None, call: Call) -> Tensor:
    """The result of one call in new memory: contiguous, or with the ``strides`` of the result of a separate call."""
    result = _PACKINGS[call.pair.kernel].back(rows.narrow(1, start, width), shape, call)
    if strides is None:
        return result.clone(memory_format=torch.contiguous_format)
    return result.new_empty_strided(shape, strides).copy_(result)


def _pack(bucket: _CollectiveBucket) -> None:
    """Replace the members of a bucket by a step that packs, one collective, and a step for each result.

    These stand at the last member. Steps that use results, and stand before it, move after them.
    """
    last = bucket.members[-1]
    graph = last.graph
    calls = tuple(node.meta["call"] for node in bucket.members)
    operands = [node.all_input_nodes[0] for node in bucket.members]
    first: Call = calls[0]
    n = _ranks(first) if first.pair.kernel in ("reduce_scatter", "exchange") else 1
    sizes = [prod(x.meta["value"].shape) // n for x in operands]
    dtype = operands[0].meta["value"].dtype
    delayed = [node for node in list(bucket.after)[: bucket.delayed] if node not in bucket.members]
    with graph.inserting_before(last):
        rows = add_step(graph, packed, (calls, *operands), last, Value((n, sum(sizes)), dtype))
        options = Options(op=first.options.op)
        joint = add_collective(graph, call(first.pair.name, first.mesh, first.axes, options), rows, last)
    place, start = last, 0
    for node, size in zip(bucket.members, sizes, strict=True):
        value: Value = node.meta["value"]
        with graph.inserting_after(place):
            args = joint, start, size, value.shape, node.meta.get("strides"), node.meta["call"]
            place = add_step(graph, unpacked, args, node, value)
        start += size
        replace(node, place)
        if node is last:
            break
    for node in delayed:
        place.append(node)
        place = node
