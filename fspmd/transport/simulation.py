"""Collectives of simulated ranks: arithmetic on lists of shards; and random functions, with a stream for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.meshes.mesh import Mesh
from fspmd.ops.schemas import facts_of
from fspmd.torch_internals import schema_of
from fspmd.tracing import DispatchMode, constant, outside_transforms, step
from fspmd.transport.call import Layout, Options, Transport
from fspmd.transport.carriers import Reshape, carried, moves_bits, neutral_like
from fspmd.transport.frame import Frame, frame_over, groups, spread, union
from fspmd.transport.local_tensor import LocalTensor, call_per_rank, expand, frame_of, local_tensor, shards_of
from fspmd.transport.randomness import streams
from fspmd.transport.windows import coordinates, parts

Table = tuple[tuple[int, ...], ...]


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x + y``. Torch's sum of complex numbers makes nan of infinity, and on a GPU loses the signs of zeros."""
    if not x.is_complex():
        return x + y
    return torch.view_as_complex(torch.view_as_real(x.resolve_conj()) + torch.view_as_real(y.resolve_conj()))


_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": _sum,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class SimulationTransport(Transport):
    """The transport of a mesh whose ranks are all in this process."""

    def reduce(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        total = self.reduce_once(x, mesh, axes, o)
        if o.index_groups is not None:
            return total
        frame, _, shards, table = _groups(total, mesh, axes, o)
        return _one_per_rank([shards[group[0]] for group in table], frame, table)

    def reduce_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, rest, shards, table = _groups(x, mesh, axes, o)
        fn = _REDUCE[o.op]
        totals = []
        try:
            for group in table:
                total = shards[group[0]]
                if len(group) == 1:
                    total = total.clone()
                for i in group[1:]:
                    total = fn(total, shards[i])
                totals.append(total)
        except NotImplementedError:
            wide, back = _carried(x, o.op)
            return back(self.reduce_once(wide, mesh, axes, o))
        return _one_per_group(totals, frame, rest, table, o)

    @moves_bits
    def gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        return _one_per_rank([torch.cat([shards[i] for i in group], o.dim) for group in table], frame, table)

    @moves_bits
    def gather_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, rest, shards, table = _groups(x, mesh, axes, o)
        wholes = [torch.cat([shards[i] for i in group], o.dim) for group in table]
        return _one_per_group(wholes, frame, rest, table, o)

    def reduce_scatter(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        pieces: list[Tensor] = [x] * frame.volume
        try:
            for group in table:
                total = shards[group[0]]
                for i in group[1:]:
                    total = _sum(total, shards[i])
                parts = total.split(o.sizes, o.dim) if o.sizes else total.chunk(len(group), o.dim)
                for i, piece in zip(group, parts, strict=True):
                    pieces[i] = piece.clone() if len(group) == 1 else piece
        except NotImplementedError:
            wide, back = _carried(x, "sum")
            return back(self.reduce_scatter(wide, mesh, axes, o))
        return LocalTensor(pieces, frame)

    def gather_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        whole = self.gather_once(x.unsqueeze(0), mesh, axes, Options())  # ``out`` may have one copy, or one per rank
        return out.copy_(whole.view(out.shape))

    def reduce_scatter_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        block = self.reduce_scatter(x, mesh, axes, Options())
        return out.copy_(block.view(out.shape))

    def slice(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        pieces: list[Tensor] = [x] * frame.volume
        for group in table:
            parts = dict[int, tuple[Tensor, ...]]()  # by tensor: all ranks of the group may have the same
            for place, i in enumerate(group):
                shard = shards[i]
                if id(shard) not in parts:
                    parts[id(shard)] = shard.split(o.sizes, o.dim) if o.sizes else shard.chunk(len(group), o.dim)
                pieces[i] = parts[id(shard)][place]
        return LocalTensor(pieces, frame)

    @moves_bits
    def exchange(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        received: list[Tensor] = [x] * frame.volume
        for group in table:
            wholes = [shards[i] for i in group]
            sent = [x.split(o.sizes, o.dim) if o.sizes else x.chunk(len(group), o.dim) for x in wholes]
            for place, i in enumerate(group):
                received[i] = torch.cat([pieces[place] for pieces in sent], o.concat_dim)
        return LocalTensor(received, frame)

    def ragged(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        assert o.routes is not None
        assert o.routes.frame is not None
        frame = union(frame_of(x, mesh), o.routes.frame)
        routes = [o.routes.routes[i] for i in spread(o.routes.frame, frame)]
        _, table = groups(frame, axes)
        if o.index_groups is not None:
            table = tuple(tuple(group[i] for i in chosen) for group in table for chosen in o.index_groups)
        shards = [shard.movedim(o.dim, 0) for shard in shards_of(x, frame)]
        landed: list[Tensor] = [x] * frame.volume
        for group in table:
            sent = [routes[i].pack(shards[i]).split(routes[i].sends) for i in group]
            for place, i in enumerate(group):
                landed[i] = routes[i].land(torch.cat([pieces[place] for pieces in sent]), x.dtype).movedim(0, o.dim)
        return LocalTensor(landed, frame)

    @moves_bits
    def permute(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        received: list[Tensor | None] = [None] * frame.volume
        for group in table:
            for source, destination in o.perm:
                received[group[destination]] = shards[group[source]].clone()
        filled = [torch.zeros_like(s) if r is None else r for r, s in zip(received, shards, strict=True)]
        return LocalTensor(filled, frame)

    @moves_bits
    def reblock(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        assert o.move is not None
        source, target = o.move.source, o.move.target
        frame = union(frame_of(x, source.mesh), frame_over(source.mesh, (*axes, *source.partition.axes)))
        varies = target.partition.axes | target.partition.unreduced
        if not o.move.across:
            varies |= frozenset(frame.axes).difference(axes)
        shards, after = shards_of(x, frame), frame_over(target.mesh, varies)
        number = {at: i for i, at in enumerate(frame.coordinates())}
        named = [source.mesh.axis_names.index(axis) for axis in frame.axes]
        made = []
        for at in coordinates(target.mesh, varies):
            block = shards[0].new_empty((*shards[0].shape[: shards[0].ndim - source.ndim], *target.local_shape(at)))
            for part in parts(o.move, at):
                before = source.mesh.coordinate(part.holder)
                assert before is not None
                shard = shards[number[tuple(before[i] for i in named)]]
                block[part.there] = shard[part.here]
            made.append(block)
        return local_tensor(made, after)

    def broadcast(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        return _one_per_rank([shards[group[o.root]].clone() for group in table], frame, table)

    def broadcast_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        _, rest, shards, table = _groups(x, mesh, axes, o)
        return local_tensor([shards[group[o.root]].clone() for group in table], rest)

    def reduce_to_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        frame, _, shards, table = _groups(x, mesh, axes, o)
        results = [torch.zeros_like(shard) for shard in shards]
        for group in table:
            for i in group:
                results[group[o.root]] += shards[i]
        return LocalTensor(results, frame)

    def agree(self, complaint: str, mesh: Mesh) -> str:
        return complaint

    def layouts(self, blocks: Sequence[Tensor | None], mesh: Mesh) -> list[tuple[Layout | None, ...]]:
        whole = frame_over(mesh, mesh.axis_names)
        columns = [
            [None] * whole.volume if x is None else [(x.dtype, shape) for shape in shapes_of(x, whole)] for x in blocks
        ]
        return list(zip(*columns, strict=True))

    def alias(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        return LocalTensor(x.shards, x.frame, x.borrowed) if type(x) is LocalTensor else x.view_as(x)

    def per_rank(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        if not axes:
            return self.alias(x, mesh, axes, o)
        wide = expand(x, frame_over(mesh, axes))
        return LocalTensor(wide.shards, wide.frame, wide.borrowed) if wide is x else wide

    def view(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        assert o.dims is not None
        if type(x) is not LocalTensor:
            return o.dims.view(x, (0,) * len(mesh.shape))
        views = []
        for at, shard in zip(x.frame.coordinates(), x.shards, strict=True):
            place = dict(zip(x.frame.axes, at, strict=True))
            views.append(o.dims.view(shard, tuple(place.get(axis, 0) for axis in mesh.axis_names)))
        return LocalTensor(views, x.frame, x.borrowed)

    def at_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        wide = expand(x, frame_over(mesh, axes))
        roots = {group[o.root] for group in groups(wide.frame, axes)[1]}
        shards = [shard.clone() if i in roots else neutral_like(shard) for i, shard in enumerate(wide.shards)]
        return local_tensor(shards, wide.frame)

    def scale(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        return expand(x * o.factor, frame_over(mesh, axes))

    def pick(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        if type(x) is not LocalTensor:
            return x.view_as(x)
        rest, table = groups(x.frame, tuple(axis for axis in x.frame.axes if axis in axes))
        firsts = [x.shards[group[0]] for group in table]
        return local_tensor([shard.view_as(shard) for shard in firsts], rest)

    @constant
    def index(self, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        return _index(mesh, axes).clone()


@cached(maxsize=1024)
def _index(mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    frame = frame_over(mesh, axes)
    _, (order,) = groups(frame, axes)
    place = {i: position for position, i in enumerate(order)}
    with outside_transforms():  # a transform would wrap each rank's number
        return local_tensor([torch.tensor(place[i], device=mesh.device) for i in range(frame.volume)], frame)


def _groups(x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> tuple[Frame, Frame, list[Tensor], Table]:
    """Return the frame with ``axes``, the frame without them, the shards, and the groups of shard indices."""
    frame = frame_over(mesh, axes)
    if type(x) is LocalTensor:
        frame = union(x.frame, frame)
        shards = x.shards if frame is x.frame else x.at(frame)
    else:
        shards = shards_of(x, frame)
    rest, table = groups(frame, axes)
    if o.index_groups is not None:
        table = tuple(tuple(group[i] for i in chosen) for group in table for chosen in o.index_groups)
    return frame, rest, shards, table


def shapes_of(x: Tensor, frame: Frame) -> list[tuple[int, ...]]:
    """Return the shape of the block at each coordinate. Dims that ``vmap`` hides do not count."""
    if type(x) is LocalTensor:
        return [tuple(shard.shape) for shard in x.at(frame)]
    columns = [
        [length] * frame.volume if type(length) is int else length.node.at(frame)  # type: ignore[attr-defined]
        for length in x.shape
    ]
    return [tuple(column[i] for column in columns) for i in range(frame.volume)]


def _carried(x: Tensor, op: str) -> tuple[Tensor, Reshape]:
    """Return `carried` for a value that torch cannot reduce.

    Raises:
        ArgumentError: There is no carrier for its dtype.
    """
    wide, back = carried(x, op)
    if back is None:
        raise NotImplementedError(f"torch has no {op} of {x.dtype} on {x.device.type}")
    return wide, back


def _one_per_group(results: list[Tensor], frame: Frame, rest: Frame, table: Table, o: Options) -> Tensor:
    """Return a value that is equal within each group, with one shard per group, unless groups are parts of an axis."""
    return _one_per_rank(results, frame, table) if o.index_groups else local_tensor(results, rest)


def _one_per_rank(results: list[Tensor], frame: Frame, table: Table) -> Tensor:
    """Return a value that is equal within each group, with a copy for each rank, into which the rank may write."""
    copies: list[Tensor] = [results[0]] * frame.volume
    for group, result in zip(table, results, strict=True):
        for place, i in enumerate(group):
            copies[i] = result if place == 0 else result.clone()
    return LocalTensor(copies, frame)


@contextmanager
def draw_per_rank(frame: Frame, seed: int) -> Iterator[None]:
    """Let random ops in a ``with`` block draw from the streams of ``seed`` over the coordinates of ``frame``.

    This includes ops that make tensors from sizes alone, as dropout under ``torch.func`` does.
    """
    with streams(frame, seed), _MakePerRank(frame):
        yield


class _MakePerRank(DispatchMode):
    """Gives tensors that are made from no other tensors one copy per rank."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _makes_tensor(func):
            return func(*args, **kwargs)
        return _call_per_rank(func, args, kwargs, self.frame, draws=True)


_call_per_rank: Final = step(call_per_rank)


@cached
def _makes_tensor(func: Any) -> bool:
    """Return whether an op returns a tensor and takes none. Zero tangents have no memory, and no rank draws them."""
    schema = schema_of(func)
    takes = facts_of(func).absent or any("Tensor" in str(argument.type) for argument in schema.arguments)
    return not takes and [str(r.type) for r in schema.returns] == ["Tensor"]
