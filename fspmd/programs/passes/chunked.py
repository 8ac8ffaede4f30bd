"""Matmuls in chunks of rows, of which each is gathered, or summed up, while another one is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, fx

from fspmd.pairs import Call
from fspmd.programs.calls import (
    add_begun,
    add_collective,
    add_step,
    add_view,
    add_wait,
    is_alike,
    is_collective,
    replace,
)
from fspmd.programs.facts import aten
from fspmd.programs.flops import flops_of
from fspmd.programs.passes.aliases import Memory
from fspmd.programs.passes.rewrites import GATHERS, NAMES, SUMS
from fspmd.programs.program import Program, Value, owner
from fspmd.redistribution.cost import price, topology, work

Shape = tuple[int, ...]
_LEFT: Final[dict[Any, int]] = {aten.mm.default: 0, aten.addmm.default: 1}  # which argument has the rows
_RESHAPES: Final = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, slots=True)
class Chunked:
    """A pass for `jit`: a matmul, and the gather before it or the sum after it, in as many ``chunks`` as pays most.

    So each chunk is gathered, or summed up, while another one is computed: tensor parallelism that overlaps. The
    topology decides what pays: n chunks take the time of one chunk of each, n - 1 times that of the slower, and that of
    the copies which put results together. Not on meshes with uneven blocks, where ranks might differ.
    """

    chunks: tuple[int, ...] = (2, 4, 8)

    def __call__(self, program: Program) -> int:
        """How many matmuls there are in chunks."""
        memory = Memory(program)
        count = 0
        for node in list(program.graph.nodes):
            if node.target in _LEFT and node.meta["value"].shape:
                count += any(take(memory, node, self.chunks) for take in (_after_gather, _before_sum))
        return count


def _after_gather(memory: Memory, product: fx.Node, chunks: tuple[int, ...]) -> bool:
    """``gather(x) @ w``: rows of ``x`` are gathered while those before are multiplied."""
    left = product.args[_LEFT[product.target]]
    assert isinstance(left, fx.Node)
    gather, names = _made_by(left)
    if gather is None or not is_collective(gather, *GATHERS) or not _may_be_cut(memory, gather):
        return False
    one: Call = gather.meta["call"]
    (x,) = gather.all_input_nodes
    whole: Shape = gather.meta["value"].shape
    dim, block = one.options.dim, x.meta["value"].shape
    if not _rows(left.meta["value"].shape, whole, dim) or memory.is_written(x, gather, product):
        return False
    if memory.is_written(gather, gather) or any(memory.place[user] < memory.place[product] for user in _users(gather)):
        return False
    others = len(_users(gather)) > 1
    copied = product.meta["value"].nbytes + (gather.meta["value"].nbytes if others else 0)
    n = _best(gather, product, block[dim], copied, chunks)
    if not n:
        return False
    graph, ranks = product.graph, whole[dim] // block[dim]
    length = block[dim] // n
    with graph.inserting_before(product):
        parts = [_part(graph, x, dim, i * length, length, gather) for i in range(n)]
        begun = [add_begun(graph, one, parts[0], gather)]
        gathered, products = [], []
        for i in range(n):
            if i + 1 < n:
                begun.append(add_begun(graph, one, parts[i + 1], gather))
            gathered.append(add_wait(graph, begun[i], gather))
            rows = _named(graph, gathered[i], names, gather)
            products.append(_product(graph, product, _flat(graph, rows, product)))
        shape = (*whole[:-1], product.meta["value"].shape[-1])
        joined = _joined(graph, products, (shape, dim, ranks), product, product.meta["value"])
        if others:
            full = _joined(graph, gathered, (whole, dim, ranks), gather, gather.meta["value"])
            gather.meta["held"] = None
            memory.stands_for(full, gather)
            chain = _views(gather)
            replace(gather, full)
            for view in chain:  # that others use, and that stood before it
                full.append(view)
                full = view
    memory.stands_for(joined, product)
    replace(product, joined)
    _erase(left)
    return True


def _before_sum(memory: Memory, product: fx.Node, chunks: tuple[int, ...]) -> bool:
    """``psum(x @ w)``, or its scatter: rows are summed up while those after are multiplied."""
    last = product
    while len(last.users) == 1 and (user := next(iter(last.users))).target in _RESHAPES:
        last = user
    if len(last.users) != 1:
        return False
    total = next(iter(last.users))
    scatters = is_collective(total, "reduce_scatter")
    if not (scatters or is_collective(total, *SUMS)) or not _may_be_cut(memory, total):
        return False
    one: Call = total.meta["call"]
    left: Any = product.args[_LEFT[product.target]]
    whole: Shape = last.meta["value"].shape
    dim = one.options.dim if scatters else 0
    if not _rows(product.meta["value"].shape, whole, dim) or total.meta["deferred"] != product.meta["deferred"]:
        return False
    if any(memory.is_written(x, product, total) for x in product.all_input_nodes) or memory.is_written(
        product, product
    ):
        return False
    ranks = whole[dim] // total.meta["value"].shape[dim] if scatters else 1
    n = _best(total, product, whole[dim] // ranks, total.meta["value"].nbytes + left.meta["value"].nbytes, chunks)
    if not n:
        return False
    graph = product.graph
    shape = (*whole[:-1], left.meta["value"].shape[-1])
    rows = Value((prod(whole[:-1]) // n, shape[-1]), left.meta["value"].dtype)
    with graph.inserting_before(total):
        begun, landed = [], []
        for i in range(n):
            part = add_step(graph, rows_of, (left, shape, dim, ranks, i, n), product, rows)
            made = _product(graph, product, part)
            sized = (*whole[:dim], whole[dim] // n, *whole[dim + 1 :])
            viewed = add_view(graph, aten.view.default, (made, list(sized)), product, sized)
            begun.append(add_begun(graph, one, viewed, total))
            if i:
                landed.append(add_wait(graph, begun[i - 1], total))
        landed.append(add_wait(graph, begun[-1], total))
        joined = _joined(graph, landed, (total.meta["value"].shape, dim, 1), total, total.meta["value"])
    memory.stands_for(joined, total)
    replace(total, joined)
    _erase(last)
    return True


# --- conditions -------------------------------------------------------------------------------------------------------


def _made_by(node: fx.Node) -> tuple[fx.Node | None, list[Call]]:
    """The step whose rows a matrix has, and the calls that have changed their type since."""
    names = []
    while node.target in _RESHAPES or is_collective(node, *NAMES):
        if is_collective(node):
            names.append(node.meta["call"])
        node = node.all_input_nodes[0]
    return (node if is_collective(node) else None), names[::-1]


def _views(node: fx.Node) -> list[fx.Node]:
    """The same matrix with other shapes or types, each after what it is made of."""
    found = [user for user in node.users if user.target in _RESHAPES or is_collective(user, *NAMES)]
    return found + [one for view in found for one in _views(view)]


def _users(node: fx.Node) -> list[fx.Node]:
    """Who uses a result, or views of it."""
    views = _views(node)
    return [user for one in (node, *views) for user in one.users if user not in views]


def _may_be_cut(memory: Memory, node: fx.Node) -> bool:
    one: Call = node.meta["call"]
    (x,) = node.all_input_nodes
    held = x.meta.get("held")
    o = one.options
    even = o.sizes is None and o.index_groups is None and not (held and held[1])
    return bool(node.meta["waits"]) and even and is_alike(one) and one.mesh.axis_size(one.axes) > 1


def _rows(matrix: Shape, whole: Shape, dim: int) -> bool:
    """Whether a matrix has the rows of a tensor, and these are cut."""
    return len(matrix) == 2 and dim < len(whole) - 1 and matrix == (prod(whole[:-1]), whole[-1])


def _best(collective: fx.Node, product: fx.Node, length: int, copied: int, chunks: tuple[int, ...]) -> int:
    """The number of chunks that takes least time; 0 where none takes less than the whole."""
    one: Call = collective.meta["call"]
    before, after = collective.all_input_nodes[0].meta["value"].nbytes, collective.meta["value"].nbytes
    links = topology()
    computes = work(flops_of(product) / 2, 0, links)
    best, found = price(one.pair.kernel, one.mesh, one.axes, before, after).time + computes, 0
    for n in chunks:
        if length % n or length < n:
            continue
        moves = price(one.pair.kernel, one.mesh, one.axes, before // n, after // n).time
        time = moves + computes / n + (n - 1) * max(moves, computes / n) + 2 * copied / links.memory
        if time < best:
            best, found = time, n
    return found


# --- steps ------------------------------------------------------------------------------------------------------------


def part_of(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Some of a block, without gaps in memory."""
    return x.narrow(dim, start, length).contiguous()


def rows_of(x: Tensor, shape: Shape, dim: int, ranks: int, i: int, n: int) -> Tensor:
    """Of the rows of each rank along a dim the ``i``-th of ``n`` parts, as a matrix."""
    cut = x.view(shape).unflatten(dim, (ranks, n, shape[dim] // ranks // n))
    rows: Tensor = cut.select(dim + 1, i).reshape(-1, shape[-1])
    return rows


def joined(parts: tuple[Tensor, ...], shape: Shape, dim: int, ranks: int, final: Shape) -> Tensor:
    """Chunks of rows of each rank as they lie in the whole."""
    length = shape[dim] // ranks // len(parts)
    cut = [part.reshape(*shape[:dim], ranks, length, *shape[dim + 1 :]) for part in parts]
    return torch.cat(cut, dim + 1).reshape(final)


def _part(graph: fx.Graph, x: fx.Node, dim: int, start: int, length: int, like: fx.Node) -> fx.Node:
    value: Value = x.meta["value"]
    shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
    return add_step(graph, part_of, (x, dim, start, length), like, Value(shape, value.dtype))


def _named(graph: fx.Graph, node: fx.Node, names: list[Call], like: fx.Node) -> fx.Node:
    for one in names:
        before, node = node, add_collective(graph, one, node, like)
        node.meta["memory"] = owner(before)
    return node


def _flat(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    shape = node.meta["value"].shape
    matrix = (prod(shape[:-1]), shape[-1])
    return node if shape == matrix else add_view(graph, aten.view.default, (node, list(matrix)), like, matrix)


def _product(graph: fx.Graph, product: fx.Node, rows: fx.Node) -> fx.Node:
    args = list(product.args)
    args[_LEFT[product.target]] = rows
    value: Value = product.meta["value"]
    target: Callable[..., Any] = product.target  # type: ignore[assignment]
    made = Value((rows.meta["value"].shape[0], value.shape[1]), value.dtype)
    return add_step(graph, target, tuple(args), product, made, **product.kwargs)


def _joined(graph: fx.Graph, parts: list[fx.Node], how: tuple[Shape, int, int], like: fx.Node, value: Value) -> fx.Node:
    return add_step(graph, joined, (tuple(parts), *how, value.shape), like, value)


def _erase(node: fx.Node) -> None:
    """A step that nothing uses, and those that were for it alone, as far as they compute nothing else."""
    if node.users or node.op != "call_function":
        return
    before = node.all_input_nodes
    node.graph.erase_node(node)
    for one in before:
        if one.target in _RESHAPES or one.target in _LEFT or is_collective(one, *NAMES, *GATHERS):
            _erase(one)
