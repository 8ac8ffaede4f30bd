"""`Chunked`: matmuls in chunks of rows. One chunk is gathered, or summed, while another is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, fx

from fspmd.pairs import Call
from fspmd.programs.flops import flops_of
from fspmd.programs.options import check_counts
from fspmd.programs.passes.aliases import Aliases
from fspmd.programs.passes.reshaped import is_reshaped, last_of, made_by, matrix_of, reshaped, users_of
from fspmd.programs.passes.rewrites import GATHERS, SUMS
from fspmd.programs.program import Program, Value, copied, leave, leave_all, owner
from fspmd.programs.schedule import time_after
from fspmd.programs.steps import (
    add_begun,
    add_collective,
    add_step,
    add_view,
    add_wait,
    is_collective,
    reading_what_it_gives,
    replace,
)
from fspmd.redistribution.cost import price, topology, work

aten: Final = torch.ops.aten

Shape = tuple[int, ...]
Kind = tuple[str, tuple[Shape, ...], bool]  # the kind of cut, the shapes of the operands, whether in backward
#: the argument with the rows; a batch has one matrix, as `torch.einsum` makes it
_LEFT: Final[dict[Any, int]] = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}


_SLOWER: Final = "no number of chunks takes less time than the whole, beside"


@dataclass(frozen=True, slots=True)
class Chunked:
    """A pass for `jit`: a matmul and the gather before it, or the sum after it, in the best number of ``chunks``.

    Each chunk is gathered, or summed, while another is computed, so tensor parallelism overlaps. The topology decides:
    n chunks take the time of one chunk of each, n - 1 times that of the slower, and that of the copies which join the
    results. Where blocks are uneven nothing is cut, since ranks might choose differently.

    A collective that a later pass hides beside other steps is better left whole. So the pass tries on copies of the
    program which kinds of matmuls to cut, for the least time after all passes. This is for functions whose Python takes
    the same way on all ranks; where it asks `axis_index`, nothing is cut.
    """

    chunks: tuple[int, ...] = (2, 4, 8)

    def __post_init__(self) -> None:
        check_counts("Chunked(chunks=...)", self.chunks)

    def __call__(self, program: Program) -> int:
        """The number of matmuls that were cut."""
        return self.before(program, lambda tried: None)(program)

    def before(self, program: Program, others: Callable[[Program], None]) -> Callable[[Program], int]:
        """The pass to run before ``others``."""
        if leave_all(program, "chunked", "all matmuls", even=True):
            return lambda program: 0

        def time(kinds: Collection[Kind]) -> float:
            return time_after(program, lambda tried: _cut(tried, self.chunks, kinds.__contains__), others)

        chosen: set[Kind] = set()
        every = set(_cut(copied(program), self.chunks, lambda kind: True))
        if not every:
            return lambda program: 0
        best = time(chosen)
        for kind in sorted(every, key=repr):
            if (found := time(chosen | {kind})) < best:
                best, chosen = found, chosen | {kind}
        if time(every) < best:
            chosen = every
        return lambda program: len(_cut(program, self.chunks, chosen.__contains__))


def _cut(program: Program, chunks: tuple[int, ...], wanted: Callable[[Kind], bool]) -> list[Kind]:
    """Cut matmuls of the kinds wanted; gives the kind of each that was cut."""
    memory = Aliases(program)
    found = []
    for node in list(program.graph.nodes):
        if node.target in _LEFT and len(matrix_of(node)) == 2 and not _adds_rows(node):
            shapes = tuple(one.meta["value"].shape for one in node.all_input_nodes)
            for take in (_after_gather, _before_sum):
                kind = take.__name__, shapes, node.meta["backward"]
                if wanted(kind) and take(memory, node, chunks):
                    found.append(kind)
                    break
    return found


def _after_gather(memory: Aliases, product: fx.Node, chunks: tuple[int, ...]) -> bool:
    """``gather(x) @ w``: rows of ``x`` are gathered while those before are multiplied."""
    left = product.args[_LEFT[product.target]]
    assert isinstance(left, fx.Node)
    gather, names = made_by(left)
    if gather is None or not is_collective(gather, *GATHERS) or not _may_be_cut(memory, gather):
        return False
    one: Call = gather.meta["call"]
    (x,) = gather.all_input_nodes
    whole: Shape = gather.meta["value"].shape
    dim, block = one.options.dim, x.meta["value"].shape
    here = min((product, *users_of(gather)), key=memory.place.__getitem__)
    if (
        not _rows(matrix_of(left), whole, dim)
        or memory.is_written(x, gather, here)
        or memory.is_written(gather, gather)
    ):
        return False
    if not _may_come_earlier(memory, product, here) or here.meta["deferred"] != gather.meta["deferred"]:
        return False
    others = len(users_of(gather)) > 1
    copied = product.meta["value"].nbytes + (gather.meta["value"].nbytes if others else 0)
    n = _best(gather, product, block[dim], copied, chunks)
    if not n:
        leave(product, "chunked", _SLOWER, gather)
        return False
    graph, ranks = product.graph, whole[dim] // block[dim]
    length = block[dim] // n
    for operand in product.all_input_nodes:
        _bring(memory, operand, here)
    with graph.inserting_before(here):
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
            chain = reshaped(gather)
            replace(gather, full)
            for view in chain:  # views that others use, and that stood before it
                full.append(view)
                full = view
    _note(memory, parts[0], here)
    memory.stands_for(joined, product)
    replace(product, joined)
    _erase(left)
    return True


def _before_sum(memory: Aliases, product: fx.Node, chunks: tuple[int, ...]) -> bool:
    """``psum(x @ w)``, or its scatter: rows are summed up while others are multiplied; also ``psum(x @ w + y)``."""
    last, names, summand, after = last_of(product)
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
    if not _rows(matrix_of(product), whole, dim) or total.meta["deferred"] != product.meta["deferred"]:
        return False
    read = [*product.all_input_nodes, *([] if summand is None else [summand])]
    if any(memory.is_written(x, product, total) for x in read) or memory.is_written(product, product):
        return False
    ranks = whole[dim] // total.meta["value"].shape[dim] if scatters else 1
    copied = sum(x.meta["value"].nbytes for x in (total, left, *read[len(product.all_input_nodes) :]))
    n = _best(total, product, whole[dim] // ranks, copied, chunks)
    if not n:
        leave(product, "chunked", _SLOWER, total)
        return False
    graph = product.graph
    shape = (*whole[:-1], left.meta["value"].shape[-1])
    rows = Value((prod(whole[:-1]) // n, shape[-1]), left.meta["value"].dtype)
    sized = Value((*whole[:dim], whole[dim] // n, *whole[dim + 1 :]), last.meta["value"].dtype)
    first: fx.Node | None = None
    with graph.inserting_before(total):
        begun, landed = [], []
        for i in range(n):
            part = add_step(graph, rows_of, (left, shape, dim, ranks, i, n), product, rows)
            first = first or part
            made = _product(graph, product, part)
            viewed = add_view(graph, aten.view.default, (made, list(sized.shape)), product, sized.shape)
            viewed = _named(graph, viewed, names, last)
            if summand is not None:
                other = add_step(graph, block_of, (summand, dim, ranks, i, n), last, sized)
                viewed = _named(graph, add_step(graph, aten.add.Tensor, (viewed, other), last, sized), after, last)
            begun.append(add_begun(graph, one, viewed, total))
            if i:
                landed.append(add_wait(graph, begun[i - 1], total))
        landed.append(add_wait(graph, begun[-1], total))
        joined = _joined(graph, landed, (total.meta["value"].shape, dim, 1), total, total.meta["value"])
    _note(memory, first, total)
    memory.stands_for(joined, total)
    replace(total, joined)
    _erase(last)
    return True


# --- conditions -------------------------------------------------------------------------------------------------------


def _may_be_cut(memory: Aliases, node: fx.Node) -> bool:
    one: Call = node.meta["call"]
    return bool(node.meta["waits"]) and one.options.index_groups is None and one.mesh.axis_size(one.axes) > 1


def _may_come_earlier(memory: Aliases, product: fx.Node, here: fx.Node) -> bool:
    """Whether a product may be made before an earlier step: its operands, or their bases, are there."""
    if product is here:
        return True
    if product.meta["deferred"] != here.meta["deferred"]:
        return False
    for operand in product.all_input_nodes:
        made = operand
        while memory.place[made] > memory.place[here] and is_reshaped(made):
            made = made.all_input_nodes[0]
        if memory.place[made] >= memory.place[here] or memory.is_written(made, here, product):
            return False
    return True


def _bring(memory: Aliases, view: fx.Node, here: fx.Node) -> None:
    """Move a view before a step."""
    if memory.place[view] > memory.place[here]:
        _bring(memory, view.all_input_nodes[0], here)
        here.prepend(view)
        memory.place[view] = memory.place[here]


def _note(memory: Aliases, first: fx.Node | None, here: fx.Node) -> None:
    """Note new steps, from the first on, before another one."""
    while first is not None and first is not here:
        memory.place.setdefault(first, memory.place[here])
        first = first.next


def _adds_rows(product: fx.Node) -> bool:
    """Whether a product adds a matrix."""
    added: Any = product.args[0]
    return product.target is aten.addmm.default and len(added.meta["value"].shape) > 1


def _rows(matrix: Shape, whole: Shape, dim: int) -> bool:
    """Whether a matrix has the rows of a tensor whose dim is cut."""
    return len(matrix) == 2 and dim < len(whole) - 1 and matrix == (prod(whole[:-1]), whole[-1])


def _best(collective: fx.Node, product: fx.Node, length: int, copied: int, chunks: tuple[int, ...]) -> int:
    """The number of chunks with the least time; 0 where the whole takes no longer."""
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


@reading_what_it_gives
def part_of(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A contiguous slice of a block."""
    return x.narrow(dim, start, length).contiguous()


@reading_what_it_gives
def rows_of(x: Tensor, shape: Shape, dim: int, ranks: int, i: int, n: int) -> Tensor:
    """The ``i``-th of ``n`` parts of each rank's rows along a dim, as a matrix."""
    cut = x.view(shape).unflatten(dim, (ranks, n, shape[dim] // ranks // n))
    rows: Tensor = cut.select(dim + 1, i).reshape(-1, shape[-1])
    return rows


@reading_what_it_gives
def block_of(x: Tensor, dim: int, ranks: int, i: int, n: int) -> Tensor:
    """The ``i``-th of ``n`` parts of each rank's rows along a dim."""
    cut = x.unflatten(dim, (ranks, n, x.shape[dim] // ranks // n))
    rows: Tensor = cut.select(dim + 1, i).flatten(dim, dim + 1)
    return rows.contiguous()


def joined(parts: tuple[Tensor, ...], shape: Shape, dim: int, ranks: int, final: Shape) -> Tensor:
    """The whole, of chunks of each rank's rows."""
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
    args, target = list(product.args), product.target
    if target is aten.bmm.default:
        right: Any = args[1]
        args[1] = add_view(graph, aten.squeeze.dim, (right, 0), product, right.meta["value"].shape[1:])
        target = aten.mm.default
    args[_LEFT[product.target]] = rows
    value: Value = product.meta["value"]
    made = Value((rows.meta["value"].shape[0], value.shape[-1]), value.dtype)
    return add_step(graph, target, tuple(args), product, made, **product.kwargs)  # type: ignore[arg-type]


def _joined(graph: fx.Graph, parts: list[fx.Node], how: tuple[Shape, int, int], like: fx.Node, value: Value) -> fx.Node:
    return add_step(graph, joined, (tuple(parts), *how, value.shape), like, value)


def _erase(node: fx.Node) -> None:
    """Erase a step without users, and the steps before that were for it alone."""
    if node._erased or node.users or node.op != "call_function":
        return
    before = node.all_input_nodes
    node.graph.erase_node(node)
    for one in before:
        if is_reshaped(one) or one.target in (*_LEFT, aten.add.Tensor) or is_collective(one, *GATHERS):
            _erase(one)
