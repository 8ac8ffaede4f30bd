"""The memory that a rank holds while a program runs, and what kernels on CPUs allocate beside it.

A formula is one of shapes, strides, dtypes and threads. It comes from the source of a kernel, or from what torch's
profiler shows, and tests compare the two. Other kernels allocate nothing or a few rows. Kernels on GPUs have other
sources: none is listed, and a caching allocator hides what they take.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod
from typing import Any, Final

import torch
from torch import fx

from fspmd.forms import packed
from fspmd.inspection.watch import communicates
from fspmd.pairs import Call
from fspmd.programs.program import Program, device_of, dtype_of, nbytes_of, owner, shape_of, strides_of
from fspmd.programs.schedule import caused_by, given_as, line_of, made_by
from fspmd.programs.steps import is_wait, made_once, moved_by
from fspmd.torch_internals import (
    aten_cpu_attention,
    aten_cpu_attention_backward,
    aten_grouped_mm,
    has_bfloat16_products,
    schema_of,
)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a rank holds at the peak.

    Attributes:
        nbytes: bytes of its block.
        node: the step that made it.
        line: the user's line, or the name of an argument.
    """

    nbytes: int
    node: fx.Node
    line: str

    def __str__(self) -> str:
        return f"{self.nbytes:>16,} B  {self.node.meta['value']!s:<24}  {self.line}"


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that a rank holds. Losses of the allocator do not count.

    On CPUs the bytes of a step include what its kernels allocate while they run (`programs/memory.py`), which depends
    on the threads of torch in this process.

    Attributes:
        peak: the most bytes at once.
        given: the bytes of arguments and constants.
        at: the step that runs at the peak; None for a program without steps.
        holds: the tensors at the peak, the largest first.
        by_line: for each line of the user, the bytes at each of its steps in turn. "<- " marks its steps in backward.
    """

    peak: int
    given: int
    at: fx.Node | None
    holds: tuple[Held, ...]
    by_line: dict[str, list[int]]

    def __str__(self) -> str:
        rest = self.holds[10:]
        lines = [f"peak {self.peak:,} B, of which {self.given:,} B are arguments"]
        if self.at is not None:
            lines[0] += f"; at {line_of(self.at)}"
        lines += map(str, self.holds[:10])
        if rest:
            lines.append(f"{sum(tensor.nbytes for tensor in rest):>16,} B  {len(rest)} more")
        return "\n".join(lines)


def memory_of_program(
    program: Program, donated: Collection[fx.Node] = (), arguments: Sequence[str] = (), scratch: bool = True
) -> Memory:
    """The memory of a program. Deferred steps run last.

    Args:
        program: the program.
        donated: inputs that are freed after their last use.
        arguments: the names of its inputs.
        scratch: whether the memory within kernels counts. It depends on the machine, so where ranks must come to the
            same decision it may not.
    """
    names = given_as(program, arguments)
    specs = [node.meta["spec"] for node in (*program.inputs, *program.constants) if node.meta.get("spec") is not None]
    scratch = scratch and all(spec.mesh.device_type == "cpu" for spec in specs)  # else planned for a device not here
    steps, spans = (*program.steps, *program.deferred), lives(program, donated)
    nbytes = levels(spans, steps, scratch)
    given = sum(nbytes_of(node) for node in (*program.inputs, *program.constants))
    at = max(range(len(steps)), key=nbytes.__getitem__, default=0)
    tensors = [
        Held(nbytes_of(node), node, names.get(node) or line_of(node))
        for node, (start, end) in spans.items()
        if start <= at <= end
    ]
    tensors.sort(key=lambda tensor: -tensor.nbytes)
    by_line: dict[str, list[int]] = {}
    for node, size in zip(steps, nbytes, strict=True):
        by_line.setdefault(caused_by(node), []).append(size)
    return Memory(nbytes[at] if steps else given, given, steps[at] if steps else None, tuple(tensors), by_line)


def lives(program: Program, donated: Collection[fx.Node] = ()) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last step in which each memory is held. Deferred steps come last.

    Arguments that are not ``donated`` are held throughout, as are values that are made once. Results are held to the
    end. Every other value is freed after its last use.
    """
    steps = (*program.steps, *program.deferred)
    once = made_once(program.steps, {*program.results, *program.kept}, of_a_rank=True)
    once |= made_once(program.deferred, program.gradients, of_a_rank=True)
    given = (*program.inputs, *program.constants)
    begins = {owner(node): 0 for node in given}
    ends: dict[fx.Node, int] = {}
    places = {node: i for i, node in enumerate(steps)}
    for i, node in enumerate(steps):
        if node in once:
            continue
        begin = places[node.args[0]] if node.target is operator.getitem else i  # type: ignore[index]
        begins.update((memory, begin) for memory in _allocated(node))
        ends.update((memory, i) for memory in _used(node))
        if (last := _last_taken(node, places)) is not None:
            ends.update((memory, last) for memory in made_by(node))
    lasting = [x for x in once if any(user not in once for user in x.users)]
    begins.update((owner(node), 0) for node in lasting)
    freed = set(donated)
    kept = [*lasting, *(node for node in given if node not in freed)]
    kept += [node for node in (*program.results, *program.gradients) if node is not None]
    ends.update((owner(node), len(steps) - 1) for node in kept)
    return {memory: (i, ends.get(memory, i)) for memory, i in begins.items()}


def levels(spans: dict[fx.Node, tuple[int, int]], steps: Sequence[fx.Node], scratch: bool = True) -> list[int]:
    """The bytes that are held in each step. ``spans``: the result of `lives`. ``scratch``: as for the memory."""
    changes = [0] * (len(steps) + 2)
    for memory, (start, end) in spans.items():
        changes[start] += nbytes_of(memory)
        changes[max(end, start) + 1] -= nbytes_of(memory)
    bytes_held, places = list(accumulate(changes))[: len(steps)], {node: i for i, node in enumerate(steps)}
    for i, node in enumerate(steps):
        if "parts" in node.meta and not _gives_views(node):
            taken = {user.args[1] for user in node.users if user.target is operator.getitem}
            unused = sum(nbytes for part, nbytes in enumerate(node.meta["parts"]) if part not in taken)
            for at in range(i, (_last_taken(node, places) or i) + 1):
                bytes_held[at] += unused
        bytes_held[i] += scratch_of(node) if scratch else 0
    return bytes_held


def _last_taken(node: fx.Node, places: dict[fx.Node, int]) -> int | None:
    """The place of the step that takes the last of several results. All of them are held until then."""
    if "parts" not in node.meta:
        return None
    return max((places[user] for user in node.users if user in places), default=None)


def _gives_views(node: fx.Node) -> bool:
    """Whether the results of a function of torch lie in the memory of its operands."""
    schema: Any = schema_of(node.target)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _allocated(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a step allocates. A step that begins a collective allocates its result."""
    if moved_by(node) is not None and not node.meta["waits"]:
        return (memory for user in node.users if is_wait(user) for memory in made_by(user))
    return iter(()) if is_wait(node) else made_by(node)


def _used(node: fx.Node) -> Iterator[fx.Node]:
    """The memory that a step needs. A wait needs the operand of its collective."""
    used = [*node.all_input_nodes, node]
    if is_wait(node):
        used += node.all_input_nodes[0].all_input_nodes
    for value in used:
        if "value" in value.meta:
            yield owner(value)
        else:
            yield from made_by(value)


aten: Final = torch.ops.aten
_HALVES: Final = (torch.bfloat16, torch.float16)
_KEYS: Final = 512  # of a block, in `_flash`
_COLUMNS: Final = 64  # of a block, in `_product`


def scratch_of(node: fx.Node) -> int:
    """The bytes that a step allocates beside its results, on as many threads of torch as now."""
    formula, call = _FORMULAS.get(node.target), node.meta.get("call")
    if (formula is None and call is None) or (device := device_of(node)) is None or device.type != "cpu":
        return 0
    if formula is not None:
        return formula(node.args, torch.get_num_threads())
    return _staged(call, node.all_input_nodes[0]) if call is not None and communicates(call) else 0


def _staged(call: Call, x: fx.Node) -> int:
    """Of a collective between processes: what `transport.process_group` lays out anew before it sends, and after.

    Messages have one block after another. Gloo adds up a copy of what a reduce-scatter is given.
    """
    kernel, options, nbytes = call.pair.kernel, call.options, nbytes_of(x)
    if kernel == "exchange":
        return nbytes * (_lies_within(x, options.dim) + _lies_within(x, options.concat_dim))
    if kernel in ("gather", "gather_once"):
        ranks = call.mesh.axis_size(call.axes or call.mesh.axis_names)
        return ranks * nbytes * _lies_within(x, options.dim)
    return nbytes * (1 + _lies_within(x, options.dim)) if kernel == "reduce_scatter" else 0


def _lies_within(x: fx.Node, dim: int) -> bool:
    """Whether the blocks along a dim do not follow one another in memory."""
    return prod(shape_of(x)[:dim]) > 1


def _flash(args: Any, threads: int) -> int:
    """``cpu_flash_attention`` of torch's FlashAttentionKernel.cpp: ``size_per_thread``, and ``buf_reduced``.

    Each thread has scores, their maxima and sums, and a block of the result.
    """
    query, key = args[:2]
    rows, keys, width = *_blocks(query, key), shape_of(query)[3]
    scores = rows * keys
    return threads * ((scores + 2 * rows + rows * width) * _sums(query) + scores * _narrow(query))


def _flash_backward(args: Any, threads: int) -> int:
    """``cpu_flash_attention_backward`` of the same file, and the gradient of the result laid out by positions first."""
    grad, query, key = args[:3]
    rows, keys = _blocks(query, key)
    batch, heads, positions, width = shape_of(grad)
    blocks = threads * (2 * rows * keys * (_sums(query) + _narrow(query)) + rows * _sums(query))
    if _uses_onednn(query) and rows > 1:  # the gradient of values: the transposed weights times that of the result
        blocks += _onednn(keys, rows, width, threads, is_transposed=True)
    by_positions = batch, positions, heads, width
    strides = strides_of(grad)
    dense = packed(by_positions)
    given = strides[0], strides[2], strides[1], strides[3]
    copied = any(size > 1 and x != y for size, x, y in zip(by_positions, given, dense, strict=True))
    return blocks + copied * nbytes_of(grad)


def _blocks(query: Any, key: Any) -> tuple[int, int]:
    """The rows and the keys of a block: ``q_split_size`` and ``kv_split_size``."""
    positions, keys = shape_of(query)[2], shape_of(key)[2]
    rows = 256 if positions >= 768 else 64 if positions >= 192 else 32
    return min(rows, positions), min(_KEYS, keys)


def _product(args: Any, threads: int) -> int:
    """Of ``mm(a, b)``: copies of operands that BLAS cannot read as they lie, and what oneDNN allocates."""
    a, b = args[-2:]
    copied = sum(nbytes_of(x) for x in (a, b) if not _is_readable(shape_of(x), strides_of(x)))
    rows, columns = shape_of(a)[0], shape_of(b)[1]
    return copied + _of_halves(a, rows, columns, threads) * (rows > 1)


def _batched(args: Any, threads: int) -> int:
    """Of ``bmm(a, b)``. MKL copies one matrix at a time, and oneDNN all of them."""
    a, b = args
    (batch, rows, _), copied = shape_of(a), 0
    for x in (a, b):
        shape, strides = shape_of(x), strides_of(x)
        if not _is_readable(shape[1:], strides[1:]):
            copied += nbytes_of(x) // (1 if _uses_onednn(x) else max(batch, 1))
        elif _uses_onednn(x) and batch > 1 and strides[0] != shape[1] * shape[2]:
            copied += nbytes_of(x)
    return copied + _of_halves(a, rows, shape_of(b)[2], threads)


def _grouped(args: Any, threads: int) -> int:
    """Of ``grouped_mm(a, b, groups)``, one product for each group. Their sizes are values, here taken to be equal."""
    a, b, groups, *_ = args
    count = max(shape_of(groups)[0], 1)
    if len(shape_of(b)) == 2:  # rows of both operands are added up by group
        return _of_halves(a, shape_of(a)[0], shape_of(b)[1], threads, parts=count)
    return _of_halves(a, shape_of(a)[-2] // count, shape_of(b)[-1], threads)


def _of_halves(a: Any, rows: int, columns: int, threads: int, parts: int = 1) -> int:
    """Of a product of ``a``, if oneDNN computes it. ``parts``: of the inner dim, one after another."""
    if not _uses_onednn(a):
        return 0
    strides = strides_of(a)
    is_transposed = strides[-1] != 1 and _is_readable(shape_of(a)[-2:], strides[-2:])
    return _onednn(rows, shape_of(a)[-1] // parts, columns, threads, is_transposed)


def _onednn(rows: int, inner: int, columns: int, threads: int, is_transposed: bool) -> int:
    """About what oneDNN allocates for a product of bfloat16: for each thread, blocks of operands and of the result.

    They have at most 256 rows, 1024 of the inner dim and 64 columns. Threads share blocks of columns evenly, and then
    rows. The first operand is copied if it is transposed. Seen in torch 2.13 with AVX-512. More threads than two
    have larger blocks for few rows.
    """
    split = threads if is_transposed else threads // gcd(threads, -(-columns // _COLUMNS))
    rows, inner = -(-rows // split), min(inner, 1024)
    rows = -(-rows // -(-rows // 256))
    per_thread = 2 * inner * (_COLUMNS + rows * is_transposed) + 4 * rows * min(columns, _COLUMNS)
    return 384 + threads * (640 + per_thread)


def _uses_onednn(x: Any) -> bool:
    return dtype_of(x) is torch.bfloat16 and has_bfloat16_products()


def _is_readable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether BLAS can read a matrix as it lies: rows or columns are dense."""
    (rows, columns), (down, across) = shape, strides
    return (across == 1 and down >= max(columns, 1)) or (down == 1 and across >= max(rows, 1))


def _in_float32(args: Any, threads: int) -> int:
    """A whole operand in float32, where it is of halves: of ``mean``, and of ``scatter``."""
    return 4 * prod(shape_of(args[0])) if _narrow(args[0]) else 0


def _copied(args: Any, threads: int) -> int:
    """As much as the operand: of ``logsumexp`` its exponentials, of ``native_dropout`` the numbers drawn."""
    return nbytes_of(args[0])


def _sums(x: Any) -> int:
    """The bytes of a number in which a kernel adds elements up."""
    return 4 if dtype_of(x) in _HALVES else dtype_of(x).itemsize


def _narrow(x: Any) -> int:
    """The bytes of an element of a half, and 0 for others, of which kernels need no copy in their own dtype."""
    return 2 if dtype_of(x) in _HALVES else 0


#: by function of aten, the formula of its arguments and the threads
_FORMULAS: Final[dict[Any, Callable[[Any, int], int]]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.bmm.default: _batched,
    aten_grouped_mm: _grouped,
    aten.mean.default: _in_float32,
    aten.mean.dim: _in_float32,
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value), _in_float32),
    aten.logsumexp.default: _copied,
    aten.native_dropout.default: _copied,
    aten_cpu_attention: _flash,
    aten_cpu_attention_backward: _flash_backward,
}
