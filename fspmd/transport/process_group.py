"""Collectives on c10d process groups (NCCL, Gloo), which write into one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fspmd.errors import ShapeError
from fspmd.foreign import refuse_misfit
from fspmd.meshes import process_groups, world
from fspmd.meshes.mesh import Mesh
from fspmd.torch_internals import is_zero_tangent
from fspmd.tracing import constant, hidden
from fspmd.transport.call import DTYPES, Layout, Options, Transport
from fspmd.transport.carriers import FLOATS, Reshape, carried, check_adds, moves_bits, neutral_like, neutral_number
from fspmd.transport.groups import Group, gather_integers, group_of, in_c10d_order
from fspmd.transport.pending import Message, Pending, Result, arrived, fail, wait_for
from fspmd.transport.stacks import padded, stack, unstack
from fspmd.transport.windows import flow, is_idle

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
#: dtypes that every backend can move; others travel as bytes
_MOVABLE = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8})


_ROW = 66  # dtype, rank, and up to 64 dims


def _reduce_options(op: str) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return options


_ALLREDUCE = {op: _reduce_options(op) for op in _OPS}
_SCATTER_SUM = c10d.ReduceScatterOptions()
_SCATTER_SUM.reduceOp = _OPS["sum"]


def _layout(row: Sequence[int]) -> Layout | None:
    kind, ndim, *shape = row
    return None if kind < 0 else ([*DTYPES][kind], tuple(shape[:ndim]))


class ProcessGroupTransport(Transport):
    """The transport of one rank per process."""

    coalesces = True
    views = frozenset({"alias", "per_rank", "pick"})
    in_place = frozenset({"reduce", "reduce_once", "at_root"})

    def reduce(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        if group.size == 1:
            check_adds(x.dtype, "psum" if o.op == "sum" else f"p{o.op}", o.op)
            return x.clone(memory_format=torch.contiguous_format)
        out, back = (x, None) if x.dtype in FLOATS and o.op == "sum" else carried(x, o.op)
        if out is x:
            try:
                out = x.clone(memory_format=torch.contiguous_format)
            except RuntimeError:
                refuse_misfit(x, "a sum over ranks, perhaps of gradients, got")
                raise
        works = (group.pg.allreduce([out], _ALLREDUCE[o.op]),) if out.numel() else ()
        return Pending(out, works, back)

    def reduce_in_place(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        return Pending(x, (group.pg.allreduce([x], _ALLREDUCE[o.op]),) if group.size > 1 and x.numel() else ())

    reduce_once, reduce_once_in_place = reduce, reduce_in_place

    @moves_bits
    def gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        sizes, dim = o.sizes, o.dim
        block = x if sizes is None else padded(x, dim, max(sizes))
        if group.size == 1:
            return block.clone()
        leading = dim == 0 and group.order is None and sizes is None
        send, restore = _movable(block.contiguous())
        out = send.new_empty((group.size * send.shape[0], *send.shape[1:]) if send.ndim else (group.size,))
        work = group.pg._allgather_base(out, send)
        shape = tuple(block.shape)
        if leading:
            whole = (group.size * shape[0], *shape[1:])
            return Pending(out, (work,), None if restore is None else lambda flat: restore(flat).view(whole))

        def arrange(flat: Tensor) -> Tensor:
            stacked = flat.view(group.size, *shape)
            if group.order is not None:
                stacked = stacked[group.order]
            return unstack(stacked, dim, sizes)

        return Pending(out, (work,), _after(restore, arrange))

    gather_once = gather

    def reduce_scatter(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        check_adds(x.dtype, "psum_scatter")
        if group.size == 1:
            return x.clone()
        length = None if o.sizes is None else o.sizes[group.index]
        stacked = stack(x, o.dim, o.sizes, group.size)
        if group.back is not None:
            stacked = stacked[group.back]
        send, back = carried(_settled(stacked.contiguous()), "sum")
        out = send.new_empty(send.shape[1:])

        def finish(total: Tensor) -> Tensor:
            block = total if back is None else back(total)
            return block if length is None else block.narrow(o.dim, 0, length)

        return Pending(out, (_scatter_sum(group, out.view(-1), send.view(-1)),), finish)

    def gather_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Result:
        group = in_c10d_order(mesh, axes, "all_gather_into")
        if group.size == 1:
            return out.view(-1).copy_(x.view(-1))
        received, sent = _movable(out.view(-1))[0], _movable(x.view(-1))[0]
        return Pending(out, (group.pg._allgather_base(received, sent),) if out.numel() else ())

    def reduce_scatter_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Result:
        group = in_c10d_order(mesh, axes, "psum_scatter_into")
        if group.size == 1:
            return out.view(-1).copy_(x.view(-1))
        check_adds(x.dtype, "psum_scatter_into")
        flat = out.view(-1), _settled(x).view(-1)
        received, sent = (torch.view_as_real(t) if t.dtype.is_complex else t for t in flat)
        if not x.dtype.is_complex and carried(sent, "sum")[0] is not sent:
            raise ShapeError(f"psum_scatter_into cannot add {out.dtype} in place; use psum_scatter")
        return Pending(out, (_scatter_sum(group, received.view(-1), sent.view(-1)),))

    def slice(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        if o.sizes is None:
            length = x.shape[o.dim] // group.size
            return x.narrow(o.dim, group.index * length, length)
        return x.narrow(o.dim, sum(o.sizes[: group.index]), o.sizes[group.index])

    @moves_bits
    def exchange(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        n = group.size
        if n == 1:
            return x.clone()
        even, in_order = not (o.sizes or o.concat_sizes), group.back is None and group.order is None
        if even and in_order and x.numel():
            return _exchange_evenly(x, group, o)
        split = o.sizes or (x.shape[o.dim] // n,) * n
        joined = o.concat_sizes or (x.shape[o.concat_dim],) * n
        inwards = range(n) if group.back is None else group.back
        pieces = x.split(split, o.dim)
        if o.dim == 0 and group.back is None:
            flat = x.contiguous().view(-1)
        else:
            flat = torch.cat([pieces[i].reshape(-1) for i in inwards])
        shapes = [list(pieces[group.index].shape) for _ in inwards]
        for i, shape in zip(inwards, shapes, strict=True):
            if o.concat_dim != o.dim:
                shape[o.concat_dim] = joined[i]
        counts = [prod(shape) for shape in shapes]

        def arrange(whole: Tensor) -> Tensor:
            if o.concat_dim == 0 and group.order is None:
                return whole.view(sum(shape[0] for shape in shapes), *shapes[0][1:])
            blocks = [part.view(shape) for part, shape in zip(whole.split(counts), shapes, strict=True)]
            return torch.cat(blocks if group.order is None else [blocks[i] for i in group.order], o.concat_dim)

        return _all_to_all(group.pg, flat, [pieces[i].numel() for i in inwards], counts, arrange)

    def ragged(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        assert o.routes is not None
        (route,) = o.routes.routes
        rows = route.pack(x.movedim(o.dim, 0))
        if group.size == 1:
            return route.land(rows.clone(), x.dtype).movedim(0, o.dim)
        inwards = range(group.size) if group.back is None else group.back
        if group.back is not None:
            pieces = rows.split(route.sends)
            rows = torch.cat([pieces[i] for i in inwards])
        flat = rows.contiguous().view(-1) if rows.numel() else rows.new_empty(0)
        arriving, width = [route.receives[i] for i in inwards], prod(rows.shape[1:])

        def arrange(received: Tensor) -> Tensor:
            whole = received.view(sum(arriving), *rows.shape[1:])
            if group.order is not None:
                parts = whole.split(arriving)
                whole = torch.cat([parts[i] for i in group.order])
            return route.land(whole, x.dtype).movedim(0, o.dim)

        sends = [route.sends[i] * width for i in inwards]
        return _all_to_all(group.pg, flat, sends, [count * width for count in arriving], arrange)

    @moves_bits
    def permute(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        send, restore = _movable(x.contiguous())
        out = torch.zeros_like(send)
        sends, receives = [], []
        for source, destination in o.perm:
            if source == destination == group.index:
                out.copy_(send)
            elif source == group.index:
                sends.append((destination, send))
            elif destination == group.index:
                receives.append((source, out))
        moved = _moved(group, x.device, sends, receives)
        return Pending(out, (moved,), None if restore is None else lambda flat: restore(flat).view(x.shape))

    @moves_bits
    def reblock(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        assert o.move is not None
        rank = world.rank()
        mine = flow(o.move, rank)
        member = o.move.source.mesh.coordinate(rank) is not None
        lead = tuple(x.shape[: x.ndim - o.move.source.ndim]) if member else ()
        new = x.new_empty((0,) if mine.shape is None else (*lead, *mine.shape))
        place = mine.peers.index(rank)
        for here, part in zip(mine.sends[place], mine.receives[place], strict=True):
            new[part.there] = x[here]
        if is_idle(o.move) or 0 in lead:
            return new
        others = [i for i in range(len(mine.peers)) if i != place]
        pieces = {i: [x[here].reshape(-1) for here in mine.sends[i]] for i in others}
        targets = {i: [new[part.there] for part in mine.receives[i]] for i in others}
        packed = [piece for i in others for piece in pieces[i]]
        sends, counts = (
            [sum(x.numel() for x in each.get(i, ())) for i in range(len(mine.peers))] for each in (pieces, targets)
        )

        def arrange(whole: Tensor) -> Tensor:
            landing = [target for i in others for target in targets[i]]
            for target, piece in zip(landing, whole.split([t.numel() for t in landing]), strict=True):
                target.copy_(piece.view(target.shape))
            return new

        flat = torch.cat(packed) if packed else x.new_empty(0)
        return _all_to_all(process_groups.process_group(mine.peers), flat, sends, counts, arrange)

    def broadcast(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        group = group_of(mesh, axes, o)
        out = x.clone(memory_format=torch.contiguous_format)
        wire = out.view(-1).view(torch.uint8)
        return Pending(out, (_broadcast(group, wire, o.root),) if wire.numel() else ())

    def reduce_to_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        at_root = group_of(mesh, axes, o).index == o.root
        total = self.reduce(x, mesh, axes, o)
        return total if at_root else Pending(total, (), lambda result: torch.zeros_like(arrived(result)))

    @hidden
    def agree(self, complaint: str, mesh: Mesh) -> str:
        group = group_of(mesh, mesh.axis_names, Options())
        if group.size == 1:
            return complaint
        first = torch.tensor([group.index if complaint else group.size], device=mesh.device)
        wait_for((group.pg.allreduce([first], _ALLREDUCE["min"]),))
        place = int(first)
        return "" if place == group.size else self.tell(complaint.encode(), mesh, place).decode()

    @hidden
    def layouts(self, blocks: Sequence[Tensor | None], mesh: Mesh) -> list[tuple[Layout | None, ...]]:
        mine = []
        for x in blocks:
            row = [-1] if x is None else [DTYPES[x.dtype], x.ndim, *x.shape]
            mine += row + [0] * (_ROW - len(row))
        return [
            tuple(_layout(row[start : start + _ROW]) for start in range(0, len(row), _ROW))
            for row in gather_integers(mine, mesh)
        ]

    def tell(self, message: bytes, mesh: Mesh, source: int) -> bytes:
        group = group_of(mesh, mesh.axis_names, Options())
        if group.size == 1:
            return message
        length = torch.tensor([len(message)], device=mesh.device)
        wait_for((_broadcast(group, length, source),))
        if group.index == source:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(mesh.device)
        else:
            data = torch.empty(int(length), dtype=torch.uint8, device=mesh.device)
        wait_for((_broadcast(group, data, source),))
        return bytes(data.cpu().tolist())

    def transfer(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], mesh: Mesh
    ) -> Pending:
        group = group_of(mesh, mesh.axis_names, Options())
        flat = [[(position, _movable(x)[0]) for position, x in peers] for peers in (sends, receives)]
        return Pending(None, (_moved(group, mesh.device, *flat),))

    def alias(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        return x.view_as(x)

    def at_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        return x.clone() if group_of(mesh, axes, Options()).index == o.root else neutral_like(x)

    def at_root_in_place(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        return x if group_of(mesh, axes, Options()).index == o.root else x.fill_(neutral_number(x))

    pick = alias

    @constant
    def index(self, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        return torch.tensor(group_of(mesh, axes, Options()).index, device=mesh.device)


def _settled(x: Tensor) -> Tensor:
    """Return ``x`` with its values in memory. Conjugate and negative views, and zero tangents, lack them."""
    if is_zero_tangent(x):
        return x.clone()
    return x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x


def _broadcast(group: Group, x: Tensor, root: int) -> Any:
    """Begin to write the value of the rank at a position into a tensor."""
    options = c10d.BroadcastOptions()
    options.rootRank = group.peer(root)
    return group.pg.broadcast([x], options)


def _scatter_sum(group: Group, out: Tensor, x: Tensor) -> Pending:
    """Sum the flat tensors of all ranks, and write this rank's part into ``out``.

    Gloo has no reduce-scatter. Torch takes part of an all-reduce, as this does, but its wait has no time limit.
    """
    if not out.numel():
        return Pending(out)
    pg = group.pg
    if not group.is_on_gloo(out.device):
        return Pending(out, (pg._reduce_scatter_base(out, x, _SCATTER_SUM),))
    total = x.clone()
    work = pg.allreduce([total], _ALLREDUCE["sum"])
    return Pending(out, (work,), lambda out: out.copy_(total.view(group.size, -1)[pg.rank()]))


def _moved(
    group: Group, device: torch.device, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> Pending:
    """Send tensors to mesh positions, and receive others from there, as they come.

    Gloo sends the memory of the host alone, and a GPU's address ends the process, so such tensors pass through it.
    """
    pg = group.pg  # made by all members, also where this rank has nothing to send
    group.meet(device)
    hosted = device.type != "cpu" and group.is_on_gloo(device)
    kept, operations = [], []
    for operation, peers in ((dist.isend, sends), (dist.irecv, receives)):
        for position, x in peers:
            if x.numel() and not x.is_meta:  # without memory there is nothing to send
                there = x.cpu() if hosted else x
                kept.append((operation, x, there))
                operations.append(dist.P2POp(operation, there, group=pg, group_peer=group.peer(position)))

    def land(_: None) -> None:
        for operation, x, there in kept:
            if operation is dist.irecv:
                x.copy_(there)

    try:
        works = tuple(map(Message, dist.batch_isend_irecv(operations))) if operations else ()
    except RuntimeError as error:  # the peer has ended
        fail(error)
    return Pending(None, works, land if hosted else None)


def _exchange_evenly(x: Tensor, group: Group, o: Options) -> Pending:
    """Run an all-to-all of blocks of one shape between ranks that c10d and the mesh have in one order."""
    parts = x.unflatten(o.dim, (group.size, x.shape[o.dim] // group.size)).movedim(o.dim, 0).contiguous()

    def arrange(whole: Tensor) -> Tensor:
        return whole.view(parts.shape).movedim(0, o.concat_dim).flatten(o.concat_dim, o.concat_dim + 1)

    return _all_to_all(group.pg, parts.view(-1), [], [], arrange)


def _all_to_all(pg: Any, flat: Tensor, sends: list[int], receives: list[int], arrange: Reshape) -> Pending:
    """Exchange parts of flat tensors, of so many elements to and from each rank; [] for equal parts."""
    send, restore = _movable(flat)
    width = flat.element_size() // send.element_size()
    out = send.new_empty(sum(receives) * width) if receives else torch.empty_like(send)
    counts = [n * width for n in receives], [n * width for n in sends]
    return Pending(out, (pg.alltoall_base(out, send, *counts, c10d.AllToAllOptions()),), _after(restore, arrange))


def _after(restore: Reshape | None, arrange: Reshape) -> Reshape:
    """Return ``arrange`` of a tensor that is read back by ``restore``."""
    return arrange if restore is None else lambda moved: arrange(restore(moved))


def _movable(x: Tensor) -> tuple[Tensor, Reshape | None]:
    """Return a contiguous tensor that a backend can move, as flat bytes if needed, and the function to read it back."""
    x = _settled(x)
    if x.dtype in _MOVABLE and x.ndim:
        return x, None
    dtype = x.dtype
    if dtype in _MOVABLE:
        return x.reshape(1), lambda flat: flat
    flat = x.as_strided((x.numel(),), (1,))  # a dim of size 1, or of an empty tensor, may have any stride
    return flat.view(torch.uint8), lambda flat: flat.view(dtype)
