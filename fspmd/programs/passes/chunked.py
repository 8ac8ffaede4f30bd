"""`Chunked`: cut matmuls into chunks of rows. A chunk is gathered, or summed, while another chunk is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, fx

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.pairs import Call
from fspmd.programs.flops import flops_of
from fspmd.programs.passes.rewrites import (
    GATHERS,
    SUMS,
    collective_before,
    is_reshaped,
    last_of,
    matrix_of,
    reshaped,
    users_of,
)
from fspmd.programs.program import Program, Value, copied, leave, leave_all, owner
from fspmd.programs.schedule import time_after
from fspmd.programs.steps import (
    Aliases,
    add_begun,
    add_collective,
    add_step,
    add_view,
    add_wait,
    is_collective,
    reads_result_alone,
    replace,
)
from fspmd.redistribution.cost import price, topology, work

aten: Final = torch.ops.aten

Shape = tuple[int, ...]
Kind = tuple[str, tuple[Shape, ...], bool]  # the kind of cut, the shapes of the operands, whether in backward
#: the place of the argument with the rows; a batch has one matrix, as `torch.einsum` makes it
_LEFT: Final[dict[Any, int]] = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}
_SLOWER: Final = "no number of chunks takes less time than one piece, beside"


@dataclass(frozen=True, slots=True)
class Chunked:
    """A pass for `jit`: cut a matmul, and the gather before it or the sum after it, into chunks of rows.

    Each chunk is gathered, or summed, while another chunk is computed, so tensor parallelism overlaps. The topology
    decides the number of chunks, of those in ``chunks``. The time of n chunks is the sum of: a chunk of the collective,
    a chunk of the matmul, n - 1 times the slower of them, and the copies that join the results. If blocks are uneven,
    nothing is cut, since ranks might choose differently.

    A collective that a later pass hides beside other steps should stay in one piece. So the pass tries on copies of the
    program which kinds of matmuls to cut, for the least time after all passes. This is for functions whose Python makes
    the same choices on all ranks. If it asks `axis_index`, nothing is cut.
    """

    chunks: tuple[int, ...] = (2, 4, 8)

    def __post_init__(self) -> None:
        given: Any = self.chunks
        if not isinstance(given, (tuple, list)) or not all(type(n) is int and n >= 1 for n in given):
            raise ArgumentError(f"Chunked(chunks=...) got {described(given)}; expected ints >= 1, such as (2, 4, 8)")

    def __call__(self, program: Program) -> int:
        """Run the pass. Returns the number of matmuls that were cut."""
        return self.before(program, lambda copy: None)(program)

    def before(self, program: Program, others: Callable[[Program], None]) -> Callable[[Program], int]:
        """The pass with the best kinds to cut before ``others``, the passes that follow."""
        if leave_all(program, "chunked", "all matmuls", even=True):
            return lambda program: 0

        def time(kinds: Collection[Kind]) -> float:
            return time_after(program, lambda copy: _cut(copy, self.chunks, kinds.__contains__), others)

        chosen: set[Kind] = set()
        kinds = set(_cut(copied(program), self.chunks, lambda kind: True))
        if not kinds:
            return lambda program: 0
        best = time(chosen)
        for kind in sorted(kinds, key=repr):
            if (shorter := time(chosen | {kind})) < best:
                best, chosen = shorter, chosen | {kind}
        if time(kinds) < best:
            chosen = kinds
        return lambda program: len(_cut(program, self.chunks, chosen.__contains__))


def _cut(program: Program, chunks: tuple[int, ...], wanted: Callable[[Kind], bool]) -> list[Kind]:
    """Cut matmuls of wanted kinds. Returns the kind of each matmul that was cut."""
    memory = Aliases(program)
    kinds = []
    for node in list(program.graph.nodes):
        if node.target in _LEFT and len(matrix_of(node)) == 2 and not _adds_rows(node):
            shapes = tuple(operand.meta["value"].shape for operand in node.all_input_nodes)
            for cut in (_after_gather, _before_sum):
                kind = cut.__name__, shapes, node.meta["backward"]
                if wanted(kind) and cut(memory, node, chunks):
                    kinds.append(kind)
                    break
    return kinds


def _after_gather(memory: Aliases, product: fx.Node, chunks: tuple[int, ...]) -> bool:
    """Cut ``gather(x) @ w``: rows of ``x`` are gathered while earlier rows are multiplied. Returns whether it did."""
    left = product.args[_LEFT[product.target]]
    assert isinstance(left, fx.Node)
    gather, casts = collective_before(left)
    if gather is None or not is_collective(gather, *GATHERS) or not _may_be_cut(gather):
        return False
    call: Call = gather.meta["call"]
    (x,) = gather.all_input_nodes
    full: Shape = gather.meta["value"].shape
    dim, block = call.options.dim, x.meta["value"].shape
    anchor = min((product, *users_of(gather)), key=memory.place.__getitem__)  # the place of the new steps
    if (
        not _has_rows(matrix_of(left), full, dim)
        or memory.is_written(x, gather, anchor)
        or memory.is_written(gather, gather)
    ):
        return False
    if not _may_move_before(memory, product, anchor) or anchor.meta["deferred"] != gather.meta["deferred"]:
        return False
    others = len(users_of(gather)) > 1
    copied = product.meta["value"].nbytes + (gather.meta["value"].nbytes if others else 0)
    n = _best(gather, product, block[dim], copied, chunks)
    if not n:
        leave(product, "chunked", _SLOWER, gather)
        return False
    graph, ranks = product.graph, full[dim] // block[dim]
    length = block[dim] // n
    for operand in product.all_input_nodes:
        _move_before(memory, operand, anchor)
    with graph.inserting_before(anchor):
        parts = [_part(graph, x, dim, i * length, length, gather) for i in range(n)]
        begun = [add_begun(graph, call, parts[0], gather)]
        gathered, results = [], []
        for i in range(n):
            if i + 1 < n:
                begun.append(add_begun(graph, call, parts[i + 1], gather))
            gathered.append(add_wait(graph, begun[i], gather))
            rows = _with_casts(graph, gathered[i], casts, gather)
            results.append(_product(graph, product, _as_matrix(graph, rows, product)))
        shape = (*full[:-1], product.meta["value"].shape[-1])
        joined = _joined(graph, results, (shape, dim, ranks), product, product.meta["value"])
        if others:
            last = _joined(graph, gathered, (full, dim, ranks), gather, gather.meta["value"])
            gather.meta["frame"] = None
            memory.stands_for(last, gather)
            views = reshaped(gather)
            replace(gather, last)
            for view in views:  # views that stood before the new gather
                last.append(view)
                last = view
    _note(memory, parts[0], anchor)
    memory.stands_for(joined, product)
    replace(product, joined)
    _erase(left)
    return True


def _before_sum(memory: Aliases, product: fx.Node, chunks: tuple[int, ...]) -> bool:
    """Cut ``psum(x @ w)`` or ``psum(x @ w + y)``, or the reduce-scatter of these. Returns whether it did.

    Rows are summed over ranks while later rows are multiplied.
    """
    last, casts, summand, after = last_of(product)
    if len(last.users) != 1:
        return False
    total = next(iter(last.users))
    scatters = is_collective(total, "reduce_scatter")
    if not (scatters or is_collective(total, *SUMS)) or not _may_be_cut(total):
        return False
    call: Call = total.meta["call"]
    left: Any = product.args[_LEFT[product.target]]
    full: Shape = last.meta["value"].shape
    dim = call.options.dim if scatters else 0
    if not _has_rows(matrix_of(product), full, dim) or total.meta["deferred"] != product.meta["deferred"]:
        return False
    read = [*product.all_input_nodes, *([] if summand is None else [summand])]
    if any(memory.is_written(x, product, total) for x in read) or memory.is_written(product, product):
        return False
    ranks = full[dim] // total.meta["value"].shape[dim] if scatters else 1
    copied = sum(x.meta["value"].nbytes for x in (total, left, *read[len(product.all_input_nodes) :]))
    n = _best(total, product, full[dim] // ranks, copied, chunks)
    if not n:
        leave(product, "chunked", _SLOWER, total)
        return False
    graph = product.graph
    shape = (*full[:-1], left.meta["value"].shape[-1])
    rows = Value((prod(full[:-1]) // n, shape[-1]), left.meta["value"].dtype)
    chunk = Value((*full[:dim], full[dim] // n, *full[dim + 1 :]), last.meta["value"].dtype)
    first: fx.Node | None = None
    with graph.inserting_before(total):
        begun, landed = [], []
        for i in range(n):
            part = add_step(graph, rows_of, (left, shape, dim, ranks, i, n), product, rows)
            first = first or part
            matrix = _product(graph, product, part)
            term = add_view(graph, aten.view.default, (matrix, list(chunk.shape)), product, chunk.shape)
            term = _with_casts(graph, term, casts, last)
            if summand is not None:
                other = add_step(graph, block_of, (summand, dim, ranks, i, n), last, chunk)
                term = _with_casts(graph, add_step(graph, aten.add.Tensor, (term, other), last, chunk), after, last)
            begun.append(add_begun(graph, call, term, total))
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


def _may_be_cut(node: fx.Node) -> bool:
    """Whether a collective may run in chunks."""
    call: Call = node.meta["call"]
    return bool(node.meta["waits"]) and call.options.index_groups is None and call.mesh.axis_size(call.axes) > 1


def _may_move_before(memory: Aliases, product: fx.Node, step: fx.Node) -> bool:
    """Whether a product may be computed before an earlier step: its operands, or their bases, exist there."""
    if product is step:
        return True
    if product.meta["deferred"] != step.meta["deferred"]:
        return False
    for operand in product.all_input_nodes:
        base = operand
        while memory.place[base] > memory.place[step] and is_reshaped(base):
            base = base.all_input_nodes[0]
        if memory.place[base] >= memory.place[step] or memory.is_written(base, step, product):
            return False
    return True


def _move_before(memory: Aliases, view: fx.Node, step: fx.Node) -> None:
    """Move a view, and the views that it is made of, before a step."""
    if memory.place[view] > memory.place[step]:
        _move_before(memory, view.all_input_nodes[0], step)
        step.prepend(view)
        memory.place[view] = memory.place[step]


def _note(memory: Aliases, first: fx.Node | None, step: fx.Node) -> None:
    """Note the places of new steps: ``first`` and its successors before ``step``."""
    while first is not None and first is not step:
        memory.place.setdefault(first, memory.place[step])
        first = first.next


def _adds_rows(product: fx.Node) -> bool:
    """Whether a product adds a matrix, and not only a row."""
    added: Any = product.args[0]
    return product.target is aten.addmm.default and len(added.meta["value"].shape) > 1


def _has_rows(matrix: Shape, full: Shape, dim: int) -> bool:
    """Whether a matrix is a tensor with all dims but the last flattened, and ``dim`` is one of the flattened dims."""
    return len(matrix) == 2 and dim < len(full) - 1 and matrix == (prod(full[:-1]), full[-1])


def _best(collective: fx.Node, product: fx.Node, length: int, copied: int, chunks: tuple[int, ...]) -> int:
    """The number of chunks with the least time; 0 if one piece takes no longer.

    ``length``: the rows to cut. ``copied``: the bytes that are copied to join results.
    """
    call: Call = collective.meta["call"]
    before, after = collective.all_input_nodes[0].meta["value"].nbytes, collective.meta["value"].nbytes
    links = topology()
    compute_time = work(flops_of(product) / 2, 0, links)
    best, best_n = price(call.pair.kernel, call.mesh, call.axes, before, after).time + compute_time, 0
    for n in chunks:
        if length % n or length < n:
            continue
        move_time = price(call.pair.kernel, call.mesh, call.axes, before // n, after // n).time
        slower = max(move_time, compute_time / n)
        time = move_time + compute_time / n + (n - 1) * slower + 2 * copied / links.memory
        if time < best:
            best, best_n = time, n
    return best_n


# --- steps ------------------------------------------------------------------------------------------------------------


@reads_result_alone
def part_of(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A contiguous slice of a block."""
    return x.narrow(dim, start, length).contiguous()


@reads_result_alone
def rows_of(x: Tensor, shape: Shape, dim: int, ranks: int, i: int, n: int) -> Tensor:
    """The ``i``-th of ``n`` parts of each rank's rows along a dim, as a matrix."""
    cut = x.view(shape).unflatten(dim, (ranks, n, shape[dim] // ranks // n))
    rows: Tensor = cut.select(dim + 1, i).reshape(-1, shape[-1])
    return rows


@reads_result_alone
def block_of(x: Tensor, dim: int, ranks: int, i: int, n: int) -> Tensor:
    """The ``i``-th of ``n`` parts of each rank's rows along a dim."""
    cut = x.unflatten(dim, (ranks, n, x.shape[dim] // ranks // n))
    rows: Tensor = cut.select(dim + 1, i).flatten(dim, dim + 1)
    return rows.contiguous()


def joined(parts: tuple[Tensor, ...], shape: Shape, dim: int, ranks: int, final: Shape) -> Tensor:
    """The tensor that chunks of each rank's rows make."""
    length = shape[dim] // ranks // len(parts)
    cut = [part.reshape(*shape[:dim], ranks, length, *shape[dim + 1 :]) for part in parts]
    return torch.cat(cut, dim + 1).reshape(final)


def _part(graph: fx.Graph, x: fx.Node, dim: int, start: int, length: int, like: fx.Node) -> fx.Node:
    """Add a slice of a block."""
    value: Value = x.meta["value"]
    shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
    return add_step(graph, part_of, (x, dim, start, length), like, Value(shape, value.dtype))


def _with_casts(graph: fx.Graph, node: fx.Node, casts: list[Call], like: fx.Node) -> fx.Node:
    """Add casts of a value."""
    for cast in casts:
        before, node = node, add_collective(graph, cast, node, like)
        node.meta["memory"] = owner(before)
    return node


def _as_matrix(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """Add a view of a value with all dims but the last flattened, unless it is a matrix."""
    shape = node.meta["value"].shape
    matrix = (prod(shape[:-1]), shape[-1])
    return node if shape == matrix else add_view(graph, aten.view.default, (node, list(matrix)), like, matrix)


def _product(graph: fx.Graph, product: fx.Node, rows: fx.Node) -> fx.Node:
    """Add the product of some rows."""
    args, target = list(product.args), product.target
    if target is aten.bmm.default:
        right: Any = args[1]
        args[1] = add_view(graph, aten.squeeze.dim, (right, 0), product, right.meta["value"].shape[1:])
        target = aten.mm.default
    args[_LEFT[product.target]] = rows
    value: Value = product.meta["value"]
    result = Value((rows.meta["value"].shape[0], value.shape[-1]), value.dtype)
    return add_step(graph, target, tuple(args), product, result, **product.kwargs)  # type: ignore[arg-type]


def _joined(graph: fx.Graph, parts: list[fx.Node], how: tuple[Shape, int, int], like: fx.Node, value: Value) -> fx.Node:
    return add_step(graph, joined, (tuple(parts), *how, value.shape), like, value)


def _erase(node: fx.Node) -> None:
    """Erase a step without users, and its operands that have no other users."""
    if node.prev.next is not node or node.users or node.op != "call_function":  # the first: it is erased already
        return
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if is_reshaped(operand) or operand.target in (*_LEFT, aten.add.Tensor) or is_collective(operand, *GATHERS):
            _erase(operand)
