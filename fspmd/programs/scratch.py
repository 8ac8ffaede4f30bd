"""The memory that kernels and collectives on CPUs allocate beside their results, and free before they return.

A formula is one of shapes, strides, dtypes and threads. It comes from the source of a kernel, or from what torch's
profiler shows, and tests compare the two. Other kernels allocate nothing or a few rows. Kernels on GPUs have other
sources: none is listed, and a caching allocator hides what they take.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import Any, Final

import torch
from torch import fx

from fspmd.forms import packed
from fspmd.inspection.watch import communicates
from fspmd.pairs import Call
from fspmd.programs.program import device_of
from fspmd.torch_internals import has_bfloat16_products

aten: Final = torch.ops.aten
_HALVES: Final = (torch.bfloat16, torch.float16)
_KEYS: Final = 512  # of a block, in `_flash`
_COLUMNS: Final = 64  # of a block, in `_product`


def scratch_of(node: fx.Node, threads: int | None = None) -> int:
    """The bytes that a step allocates beside its results. ``threads``: of torch; the default is as many as now."""
    formula, call = _FORMULAS.get(node.target), node.meta.get("call")
    if (formula is None and call is None) or (device := device_of(node)) is None or device.type != "cpu":
        return 0
    if formula is not None:
        return formula(node.args, torch.get_num_threads() if threads is None else threads)
    return _staged(call, node.all_input_nodes[0]) if call is not None and communicates(call) else 0


def _staged(call: Call, x: fx.Node) -> int:
    """Of a collective between processes: what `transport.process_group` lays out anew before it sends, and after.

    Messages have one block after another. Gloo adds up a copy of what a reduce-scatter is given.
    """
    kernel, options, nbytes = call.pair.kernel, call.options, _nbytes(x)
    if kernel == "exchange":
        return nbytes * (_lies_within(x, options.dim) + _lies_within(x, options.concat_dim))
    if kernel in ("gather", "gather_once"):
        ranks = call.mesh.axis_size(call.axes or call.mesh.axis_names)
        return ranks * nbytes * _lies_within(x, options.dim)
    return nbytes * (1 + _lies_within(x, options.dim)) if kernel == "reduce_scatter" else 0


def _lies_within(x: fx.Node, dim: int) -> bool:
    """Whether the blocks along a dim do not follow one another in memory."""
    return prod(_shape(x)[:dim]) > 1


def _flash(args: Any, threads: int) -> int:
    """``cpu_flash_attention`` of torch's FlashAttentionKernel.cpp: ``size_per_thread``, and ``buf_reduced``.

    Each thread has scores, their maxima and sums, and a block of the result.
    """
    query, key = args[:2]
    rows, keys, width = *_blocks(query, key), _shape(query)[3]
    scores = rows * keys
    return threads * ((scores + 2 * rows + rows * width) * _sums(query) + scores * _narrow(query))


def _flash_backward(args: Any, threads: int) -> int:
    """``cpu_flash_attention_backward`` of the same file, and the gradient of the result laid out by positions first."""
    grad, query, key = args[:3]
    rows, keys = _blocks(query, key)
    batch, heads, positions, width = _shape(grad)
    blocks = threads * (2 * rows * keys * (_sums(query) + _narrow(query)) + rows * _sums(query))
    if _uses_onednn(query) and rows > 1:  # the gradient of values: the transposed weights times that of the result
        blocks += _onednn(keys, rows, width, threads, is_transposed=True)
    by_positions = batch, positions, heads, width
    strides = _strides(grad)
    dense = packed(by_positions)
    given = strides[0], strides[2], strides[1], strides[3]
    copied = any(size > 1 and x != y for size, x, y in zip(by_positions, given, dense, strict=True))
    return blocks + copied * _nbytes(grad)


def _blocks(query: Any, key: Any) -> tuple[int, int]:
    """The rows and the keys of a block: ``q_split_size`` and ``kv_split_size``."""
    positions, keys = _shape(query)[2], _shape(key)[2]
    rows = 256 if positions >= 768 else 64 if positions >= 192 else 32
    return min(rows, positions), min(_KEYS, keys)


def _product(args: Any, threads: int) -> int:
    """Of ``mm(a, b)``: copies of operands that BLAS cannot read as they lie, and what oneDNN allocates."""
    a, b = args[-2:]
    copied = sum(_nbytes(x) for x in (a, b) if not _is_readable(_shape(x), _strides(x)))
    rows, columns = _shape(a)[0], _shape(b)[1]
    return copied + _of_halves(a, rows, columns, threads) * (rows > 1)


def _batched(args: Any, threads: int) -> int:
    """Of ``bmm(a, b)``. MKL copies one matrix at a time, and oneDNN all of them."""
    a, b = args
    (batch, rows, _), copied = _shape(a), 0
    for x in (a, b):
        shape, strides = _shape(x), _strides(x)
        if not _is_readable(shape[1:], strides[1:]):
            copied += _nbytes(x) // (1 if _uses_onednn(x) else max(batch, 1))
        elif _uses_onednn(x) and batch > 1 and strides[0] != shape[1] * shape[2]:
            copied += _nbytes(x)
    return copied + _of_halves(a, rows, _shape(b)[2], threads)


def _grouped(args: Any, threads: int) -> int:
    """Of ``grouped_mm(a, b, groups)``, one product for each group. Their sizes are values, here taken to be equal."""
    a, b, groups, *_ = args
    count = max(_shape(groups)[0], 1)
    if len(_shape(b)) == 2:  # rows of both operands are added up by group
        return _of_halves(a, _shape(a)[0], _shape(b)[1], threads, parts=count)
    return _of_halves(a, _shape(a)[-2] // count, _shape(b)[-1], threads)


def _of_halves(a: Any, rows: int, columns: int, threads: int, parts: int = 1) -> int:
    """Of a product of ``a``, if oneDNN computes it. ``parts``: of the inner dim, one after another."""
    if not _uses_onednn(a):
        return 0
    strides = _strides(a)
    is_transposed = strides[-1] != 1 and _is_readable(_shape(a)[-2:], strides[-2:])
    return _onednn(rows, _shape(a)[-1] // parts, columns, threads, is_transposed)


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
    return _dtype(x) is torch.bfloat16 and has_bfloat16_products()


def _is_readable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether BLAS can read a matrix as it lies: rows or columns are dense."""
    (rows, columns), (down, across) = shape, strides
    return (across == 1 and down >= max(columns, 1)) or (down == 1 and across >= max(rows, 1))


def _in_float32(args: Any, threads: int) -> int:
    """A whole operand in float32, where it is of halves: of ``mean``, and of ``scatter``."""
    return 4 * prod(_shape(args[0])) if _narrow(args[0]) else 0


def _copied(args: Any, threads: int) -> int:
    """As much as the operand: of ``logsumexp`` its exponentials, of ``native_dropout`` the numbers drawn."""
    return _nbytes(args[0])


def _shape(x: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = x.meta["value"].shape
    return shape


def _dtype(x: Any) -> torch.dtype:
    dtype: torch.dtype = x.meta["value"].dtype
    return dtype


def _strides(x: Any) -> tuple[int, ...]:
    strides: tuple[int, ...] | None = x.meta.get("strides")
    return packed(_shape(x)) if strides is None else strides


def _nbytes(x: Any) -> int:
    return prod(_shape(x)) * _dtype(x).itemsize


def _sums(x: Any) -> int:
    """The bytes of a number in which a kernel adds elements up."""
    return 4 if _dtype(x) in _HALVES else _dtype(x).itemsize


def _narrow(x: Any) -> int:
    """The bytes of an element of a half, and 0 for others, of which kernels need no copy in their own dtype."""
    return 2 if _dtype(x) in _HALVES else 0


#: by function of aten, the formula of its arguments and the threads
_FORMULAS: Final[dict[Any, Callable[[Any, int], int]]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.bmm.default: _batched,
    aten._grouped_mm.default: _grouped,
    aten.mean.default: _in_float32,
    aten.mean.dim: _in_float32,
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value), _in_float32),
    aten.logsumexp.default: _copied,
    aten.native_dropout.default: _copied,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}
