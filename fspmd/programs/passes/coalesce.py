"""`Coalesce`: small collectives of one kind become one. Each saves the time to begin, and costs a copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch import Tensor, fx

from fspmd.pairs import Call, call
from fspmd.programs.options import check_bytes
from fspmd.programs.passes.aliases import dependencies, has_effect
from fspmd.programs.program import Program, Value, forget, leave, leave_all
from fspmd.programs.schedule import time_after
from fspmd.programs.steps import add_collective, add_step, is_collective, is_wait, reading_what_it_gives, replace
from fspmd.redistribution.cost import moves, price, topology
from fspmd.transport import Options

Shape = tuple[int, ...]
_LESS: Final = 64
_NAME: Final = "coalesce"


@dataclass(frozen=True, slots=True)
class Coalesce:
    """A pass for `jit`: collectives that do not depend on each other become one, of ``bucket`` bytes at most.

    It packs where the copies take less time than beginning each, by the topology. Steps that use a result wait for the
    packed collective. None of them is a collective, so the order of the others stays. Values are equal; a backend may
    add up sums in another order.

    A packed collective is hidden beside fewer steps. So before `Overlap` the pass tries on copies of the program
    whether to pack up to ``bucket``, less, or nothing. It does not try where ranks might choose differently: where
    blocks are uneven, or Python asks `axis_index`.

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
        """The number of collectives that went. It packs again as long as packing brings others together."""
        gone = 0
        if leave_all(program, _NAME, "all collectives"):
            return gone
        while packed := self._pack_all(program):
            gone += packed
        return gone

    def before(self, program: Program, others: Callable[[Program], None]) -> Coalesce:
        """The pass to run before ``others``."""
        if not (program.even and program.alike):
            return self
        choices = self, Coalesce(self.bucket / _LESS), Coalesce(0)
        return min(choices, key=lambda one: time_after(program, one, others))

    def _pack_all(self, program: Program) -> int:
        gone = 0
        for bucket in sorted(self._buckets(program), key=lambda bucket: bucket.places[-1]):
            if len(bucket.members) > 1:
                _pack(bucket)
                gone += len(bucket.members) - 1
        return gone

    def _buckets(self, program: Program) -> list[_CollectiveBucket]:
        forget(program, _NAME)
        before = dependencies(program)
        open_: dict[Hashable, _CollectiveBucket] = {}
        closed: dict[Hashable, fx.Node] = {}  # by the step that closed it
        done: list[_CollectiveBucket] = []
        for place, node in enumerate(list(program.graph.nodes)):
            key = _key(node)
            for kind, bucket in list(open_.items()):
                if not any(one in bucket.after for one in before[node]):
                    continue
                bucket.after[node] = None
                if _stays(node):  # later members would wait for this step, or it for them
                    done.append(open_.pop(kind))
                    closed[kind] = node
            if key is None:
                continue
            bucket = open_.setdefault(key, _CollectiveBucket())
            if not bucket.members and key in closed:
                leave(node, _NAME, "a step that needs earlier ones of its kind stands between, or is it:", closed[key])
            if bucket.members and (why := self._beside(bucket, node)):
                leave(node, _NAME, why, bucket.members[0])
                if bucket.bytes < _bytes(node):  # the smaller one stays open
                    continue
                done.append(bucket)
                bucket = open_[key] = _CollectiveBucket()
            bucket.add(node, place)
        return done + list(open_.values())

    def _beside(self, bucket: _CollectiveBucket, node: fx.Node) -> str:
        """Why a collective is not packed with those of a bucket."""
        if bucket.bytes + _bytes(node) > self.bucket:
            return f"at most {self.bucket:,.0f} bytes become one; it is packed apart from"
        return "" if bucket.pays(node) else "copies would take longer than to begin it after"


@dataclass(slots=True)
class _CollectiveBucket:
    """Collectives to pack, and the steps that depend on them."""

    members: list[fx.Node] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    bytes: int = 0
    after: dict[fx.Node, None] = field(default_factory=dict)
    delayed: int = 0  # the number of these before the last member

    def add(self, node: fx.Node, place: int) -> None:
        self.members.append(node)
        self.places.append(place)
        self.delayed = len(self.after)
        self.after[node] = None
        self.bytes += _bytes(node)

    def pays(self, node: fx.Node) -> bool:
        """Whether one more collective takes less time packed than alone."""
        one: Call = node.meta["call"]
        alone, after = _bytes(node), node.meta["value"].nbytes
        together = self.bytes + alone
        ratio = after / alone
        apart = _time(one, self.bytes, self.bytes * ratio) + _time(one, alone, after)
        copied = alone if len(self.members) > 1 else together
        copies = 2 * copied * (1 + ratio) / topology().memory
        return bool(_time(one, together, together * ratio) + copies < apart)


def _time(one: Call, before: float, after: float) -> float:
    return price(one.pair.kernel, one.mesh, one.axes, int(before), int(after)).time


def _bytes(node: fx.Node) -> int:
    """Bytes of the operand, equal on all ranks that take part."""
    value: Value = node.all_input_nodes[0].meta["value"]
    return value.nbytes


def _stays(node: fx.Node) -> bool:
    """Whether a step keeps its place among others of its kind."""
    if node.op != "call_function":
        return True
    return (is_collective(node) and moves(node.meta["call"].pair.kernel)) or is_wait(node) or has_effect(node)


def _key(node: fx.Node) -> Hashable | None:
    """The key that packed collectives share; None for steps that are not packed."""
    if not is_collective(node, *_FORMS) or not node.meta["waits"]:
        return None
    one: Call = node.meta["call"]
    (x,) = node.all_input_nodes
    value: Value = x.meta["value"]
    o = one.options
    if o.index_groups or o.sizes or o.concat_sizes or not value.shape or not value.nbytes:
        return None
    held = x.meta.get("held")
    if one.mesh.transport == "simulation" and (held is None or held[1]):
        return None
    return one.pair.name, one.mesh, one.axes, o.op, value.dtype, held, node.meta["deferred"], node.meta["backward"]


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """The rows of an operand for a kernel, and the result from rows."""

    into: Callable[[Tensor, Call], Tensor]
    back: Callable[[Tensor, Shape, Call], Tensor]


def _ranks(one: Call) -> int:
    return prod(one.mesh.shape[axis] for axis in one.axes)


def _one_row(x: Tensor, one: Call) -> Tensor:
    return x.reshape(1, -1)


def _row_per_rank(x: Tensor, one: Call) -> Tensor:
    n, dim = _ranks(one), one.options.dim
    rows: Tensor = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).reshape(n, -1)
    return rows


def _from_one_row(row: Tensor, shape: Shape, one: Call) -> Tensor:
    return row.reshape(shape)


def _from_row_per_rank(dim: int, rows: Tensor, shape: Shape, one: Call) -> Tensor:
    """Blocks along a dim."""
    n = _ranks(one)
    block = (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])
    joined: Tensor = rows.reshape(n, *block).movedim(0, dim).flatten(dim, dim + 1)
    return joined


_SUM: Final = Form(_one_row, _from_one_row)
_GATHER: Final = Form(_one_row, lambda rows, shape, one: _from_row_per_rank(one.options.dim, rows, shape, one))
_FORMS: Final = {
    "reduce": _SUM,
    "reduce_once": _SUM,
    "gather": _GATHER,
    "gather_once": _GATHER,
    "reduce_scatter": Form(_row_per_rank, _from_one_row),
    "exchange": Form(
        _row_per_rank, lambda rows, shape, one: _from_row_per_rank(one.options.concat_dim, rows, shape, one)
    ),
}


def packed(calls: Sequence[Call], *operands: Tensor) -> Tensor:
    """The rows of all operands side by side."""
    rows = [_FORMS[one.pair.kernel].into(x, one) for one, x in zip(calls, operands, strict=True)]
    return torch.cat(rows, 1)


@reading_what_it_gives
def unpacked(rows: Tensor, start: int, width: int, shape: Shape, strides: Shape | None, one: Call) -> Tensor:
    """One result with memory of its own: contiguous, or with the ``strides`` that it had alone."""
    found = _FORMS[one.pair.kernel].back(rows.narrow(1, start, width), shape, one)
    if strides is None:
        return found.clone(memory_format=torch.contiguous_format)
    return found.new_empty_strided(shape, strides).copy_(found)


def _pack(bucket: _CollectiveBucket) -> None:
    """Put a step that packs, the collective, and a step for each result before the steps that use the results."""
    last = bucket.members[-1]
    graph = last.graph
    calls = tuple(node.meta["call"] for node in bucket.members)
    operands = [node.all_input_nodes[0] for node in bucket.members]
    one: Call = calls[0]
    n = _ranks(one) if one.pair.kernel in ("reduce_scatter", "exchange") else 1
    sizes = [prod(x.meta["value"].shape) // n for x in operands]
    dtype = operands[0].meta["value"].dtype
    late = [node for node in list(bucket.after)[: bucket.delayed] if node not in bucket.members]
    with graph.inserting_before(last):
        rows = add_step(graph, packed, (calls, *operands), last, Value((n, sum(sizes)), dtype))
        options = Options(op=one.options.op)
        whole = add_collective(graph, call(one.pair.name, one.mesh, one.axes, options), rows, last)
    place, start = last, 0
    for node, size in zip(bucket.members, sizes, strict=True):
        value: Value = node.meta["value"]
        with graph.inserting_after(place):
            args = whole, start, size, value.shape, node.meta.get("strides"), node.meta["call"]
            place = add_step(graph, unpacked, args, node, value)
        start += size
        replace(node, place)
        if node is last:
            break
    for node in late:
        place.append(node)
        place = node
