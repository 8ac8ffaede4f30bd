"""Attention on GPUs in Triton, whose parts and gradients are float32. Kernels of torch round them to 16 bits.

Operands have 16 bits, products are summed in float32. A head of keys serves its heads of queries without a copy, values
may be wider than keys, and a mask is read as bools. The method is that of Dao, "FlashAttention-2" (2023): weights never
leave the chip, and scores are exponents of two. Only `fspmd.nn.kernels` imports this module, where Triton is installed.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.language import constexpr, tensor

from fspmd.programs.flops import of_attention, of_attention_gradients

_LOG2_E: Final = constexpr(math.log2(math.e))
_OPERANDS: Final = "Tensor query, Tensor key, Tensor value"
_OPTIONS: Final = "Tensor? allowed, bool is_causal, float scale"
_library: Final = torch.library.Library("fspmd", "FRAGMENT")
_library.define(f"attention({_OPERANDS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_backward(Tensor out_grad, {_OPERANDS}, Tensor drop, Tensor lse, {_OPTIONS}) -> "
    "(Tensor query_grad, Tensor key_grad, Tensor value_grad)"
)
#: operands [batch, heads, n, width] of 16 bits with dense rows, and ``allowed`` bool[batch, 1, queries, keys]; ``drop``
#: is the sum of ``out * out_grad`` over the width, and a query that sees no key has the ``lse`` inf in backward
attention: Final[Any] = torch.ops.fspmd.attention.default
attention_backward: Final[Any] = torch.ops.fspmd.attention_backward.default


class Blocks(NamedTuple):
    """How a kernel is cut: the queries and keys of a block, warps, and how many blocks are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Cuts(NamedTuple):
    """How the kernels are cut for operands of a width."""

    forward: Blocks
    masked_forward: Blocks
    key_gradients: Blocks
    query_gradients: Blocks


#: By the largest width. Each needs less than 99 KiB of memory on the chip, which all GPUs since Ampere have.
CUTS: Final = {
    64: Cuts(Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: Cuts(Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1)),
    256: Cuts(Blocks(64, 32, 4, 1), Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
}


# --- what the kernels are given ---------------------------------------------------------------------------------------


def _forward(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    results, launch = _results(query, key, value), _Launch(query, key, value, allowed, causal, scale)
    blocks = launch.cuts.forward if allowed is None else launch.cuts.masked_forward
    launch.run(_forward_kernel, query, blocks.queries, blocks, (), results)
    return results


def _backward(
    out_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, drop: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    grads, launch = _gradients(out_grad, query, key, value), _Launch(query, key, value, *options)
    given = (out_grad, lse, drop), out_grad.stride()[:3]
    of_keys, of_queries = launch.cuts.key_gradients, launch.cuts.query_gradients
    launch.run(_key_gradients_kernel, key, of_keys.keys, of_keys, given, grads[1:])
    launch.run(_query_gradients_kernel, query, of_queries.queries, of_queries, given, grads[:1])
    return grads


class _Launch:
    """The kernels of one call: what all of them are given."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, causal: bool, scale: float
    ) -> None:
        (_, heads, n, width), (_, kv_heads, m, value_width) = query.shape, value.shape
        mask = query if allowed is None else allowed.view(torch.uint8)
        strides = tuple(x.stride()[:3] for x in (query, key, value))
        of_mask = (0, 0, 0) if allowed is None else (mask.stride(0), *mask.stride()[2:])
        self.operands = (query, key, value, mask), (*strides, of_mask)
        # powers of two, and at least what one instruction multiplies
        widths = [max(16, triton.next_power_of_2(x)) for x in (width, value_width)]
        self.sizes = heads, heads // kv_heads, n, m, scale, width, value_width
        self.options = *widths, causal, allowed is not None
        self.cuts = CUTS[max(64, *widths)]

    def run(self, kernel: Any, rows: Tensor, length: int, blocks: Blocks, given: tuple[Any, ...], results: Any) -> None:
        """One program for each block of ``length`` rows of each head."""
        programs = triton.cdiv(rows.shape[2], length) * rows.shape[0] * rows.shape[1]
        with torch.cuda.device_of(rows):
            kernel[(programs,)](
                *self.operands,
                *given,
                results,
                self.sizes,
                *self.options,
                *blocks[:2],
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )


def _results(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    return query.new_empty((*rows, value.shape[-1]), dtype=torch.float32), query.new_empty(rows, dtype=torch.float32)


def _gradients(out_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (query, key, value))


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fspmd::attention", _results, lib=_library)
torch.library.register_fake("fspmd::attention_backward", _gradients, lib=_library)
register_flop_formula(torch.ops.fspmd.attention)(of_attention)
register_flop_formula(torch.ops.fspmd.attention_backward)(of_attention_gradients)


# --- the kernels ------------------------------------------------------------------------------------------------------
# Strides are those of batch, heads and rows; of a mask those of batch, queries and keys. Results are dense.


@triton.jit
def _rows(
    x: tensor, stride: tensor, start: tensor, count: tensor, width: tensor, LENGTH: constexpr, WIDTH: constexpr
) -> tensor:
    """Load rows [LENGTH, WIDTH], with zeros past the last row and past the width."""
    row, column = (start + tl.arange(0, LENGTH))[:, None], tl.arange(0, WIDTH)[None, :]
    return tl.load(x + row.to(tl.int64) * stride + column, mask=(row < count) & (column < width), other=0.0)


@triton.jit
def _put(
    x: tensor, rows: tensor, start: tensor, count: tensor, width: tensor, LENGTH: constexpr, WIDTH: constexpr
) -> None:
    """Write rows [LENGTH, WIDTH] of a dense result, but those past the last, and numbers past the width."""
    row, column = (start + tl.arange(0, LENGTH))[:, None], tl.arange(0, WIDTH)[None, :]
    tl.store(x + row.to(tl.int64) * width + column, rows, mask=(row < count) & (column < width))


@triton.jit
def _numbers(x: tensor, start: tensor, count: tensor, other: constexpr, LENGTH: constexpr) -> tensor:
    """Load one number for each row."""
    row = start + tl.arange(0, LENGTH)
    return tl.load(x + row, mask=row < count, other=other)


@triton.jit
def _seen(
    allowed: tensor,
    strides: tl.tuple,
    start_n: tensor,
    start_m: tensor,
    n: tensor,
    m: tensor,
    CAUSAL: constexpr,
    MASKED: constexpr,
    QUERIES: constexpr,
    KEYS: constexpr,
) -> tensor:
    """Which query of a block sees which key: [QUERIES, KEYS]."""
    row, column = (start_n + tl.arange(0, QUERIES))[:, None], (start_m + tl.arange(0, KEYS))[None, :]
    seen = (row < n) & (column < m)
    if CAUSAL:
        seen = seen & (row >= column)
    if MASKED:
        at = row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
        seen = tl.load(allowed + at, mask=seen, other=0) != 0
    return seen


@triton.jit
def _forward_kernel(
    operands: tl.tuple,
    strides: tl.tuple,
    results: tl.tuple,
    sizes: tl.tuple,
    WIDTH: constexpr,
    VALUE_WIDTH: constexpr,
    CAUSAL: constexpr,
    MASKED: constexpr,
    QUERIES: constexpr,
    KEYS: constexpr,
) -> None:
    """A block of queries of one head meets all keys that it may see."""
    query, key, value, allowed = operands
    q_strides, k_strides, v_strides, allowed_strides = strides
    heads, group, n, m, scale, width, value_width = sizes
    out, lse = results
    count = tl.cdiv(n, QUERIES)
    start = (count - 1 - tl.program_id(0) % count) * QUERIES  # the queries that see the most keys first
    at = (tl.program_id(0) // count).to(tl.int64)
    batch, head = at // heads, at % heads
    query += batch * q_strides[0] + head * q_strides[1]
    key += batch * k_strides[0] + head // group * k_strides[1]
    value += batch * v_strides[0] + head // group * v_strides[1]
    allowed += batch * allowed_strides[0]
    q = _rows(query, q_strides[2], start, n, width, QUERIES, WIDTH)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    end = tl.minimum(m, start + QUERIES) if CAUSAL else m
    plain = (tl.minimum(m, start) if CAUSAL else m) // KEYS * KEYS  # all queries of the block see the keys before it
    for first in range(0, end, KEYS):
        k = _rows(key, k_strides[2], first, m, width, KEYS, WIDTH)
        scores = tl.dot(q, tl.trans(k)) * (scale * _LOG2_E)
        if MASKED or first >= plain:
            seen = _seen(allowed, allowed_strides, start, first, n, m, CAUSAL, MASKED, QUERIES, KEYS)
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(top - finite)
        total = total * fade + tl.sum(weights, 1)
        v = _rows(value, v_strides[2], first, m, value_width, KEYS, VALUE_WIDTH)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None])
        top = new
    seen_any = total != 0  # NaN is seen
    sums = sums / tl.where(seen_any, total, 1.0)[:, None]
    _put(out + at * n * value_width, sums, start, n, value_width, QUERIES, VALUE_WIDTH)
    row = start + tl.arange(0, QUERIES)
    totals = tl.where(seen_any, (top + tl.log2(tl.where(seen_any, total, 1.0))) / _LOG2_E, float("-inf"))
    tl.store(lse + at * n + row, totals, mask=row < n)


@triton.jit
def _key_gradients_kernel(
    operands: tl.tuple,
    strides: tl.tuple,
    given: tl.tuple,
    out_strides: tl.tuple,
    results: tl.tuple,
    sizes: tl.tuple,
    WIDTH: constexpr,
    VALUE_WIDTH: constexpr,
    CAUSAL: constexpr,
    MASKED: constexpr,
    QUERIES: constexpr,
    KEYS: constexpr,
) -> None:
    """A block of keys of one head meets the queries that may see it, of all heads that it serves."""
    query, key, value, allowed = operands
    q_strides, k_strides, v_strides, allowed_strides = strides
    heads, group, n, m, scale, width, value_width = sizes
    out_grad, lse, drop = given
    key_grad, value_grad = results
    count, kv_heads = tl.cdiv(m, KEYS), heads // group
    start = tl.program_id(0) % count * KEYS
    at = (tl.program_id(0) // count).to(tl.int64)
    batch, kv_head = at // kv_heads, at % kv_heads
    k = _rows(key + batch * k_strides[0] + kv_head * k_strides[1], k_strides[2], start, m, width, KEYS, WIDTH)
    value += batch * v_strides[0] + kv_head * v_strides[1]
    v = _rows(value, v_strides[2], start, m, value_width, KEYS, VALUE_WIDTH)
    allowed += batch * allowed_strides[0]
    k_sums = tl.zeros([KEYS, WIDTH], tl.float32)
    v_sums = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    begin = start // QUERIES * QUERIES if CAUSAL else 0
    steps = tl.maximum(tl.cdiv(n - begin, QUERIES), 0)
    for step in range(0, group * steps):
        head = kv_head * group + step // steps
        first = begin + step % steps * QUERIES
        row = (batch * heads + head) * n
        totals = _numbers(lse + row, first, n, float("inf"), QUERIES) * _LOG2_E
        drops = _numbers(drop + row, first, n, 0.0, QUERIES)
        q = _rows(query + batch * q_strides[0] + head * q_strides[1], q_strides[2], first, n, width, QUERIES, WIDTH)
        scores = tl.dot(k, tl.trans(q)) * (scale * _LOG2_E)
        if CAUSAL or MASKED or first + QUERIES > n or start + KEYS > m:
            seen = _seen(allowed, allowed_strides, first, start, n, m, CAUSAL, MASKED, QUERIES, KEYS)
            scores = tl.where(tl.trans(seen), scores, float("-inf"))
        weights = tl.exp2(scores - totals[None, :])
        grads = out_grad + batch * out_strides[0] + head * out_strides[1]
        o = _rows(grads, out_strides[2], first, n, value_width, QUERIES, VALUE_WIDTH)
        v_sums = tl.dot(weights.to(o.dtype), o, v_sums)
        scores_grad = weights * (tl.dot(v, tl.trans(o)) - drops[None, :])
        k_sums = tl.dot(scores_grad.to(q.dtype), q, k_sums)
    _put(key_grad + at * m * width, k_sums * scale, start, m, width, KEYS, WIDTH)
    _put(value_grad + at * m * value_width, v_sums, start, m, value_width, KEYS, VALUE_WIDTH)


@triton.jit
def _query_gradients_kernel(
    operands: tl.tuple,
    strides: tl.tuple,
    given: tl.tuple,
    out_strides: tl.tuple,
    results: tl.tuple,
    sizes: tl.tuple,
    WIDTH: constexpr,
    VALUE_WIDTH: constexpr,
    CAUSAL: constexpr,
    MASKED: constexpr,
    QUERIES: constexpr,
    KEYS: constexpr,
) -> None:
    """A block of queries of one head meets all keys that it may see."""
    query, key, value, allowed = operands
    q_strides, k_strides, v_strides, allowed_strides = strides
    heads, group, n, m, scale, width, value_width = sizes
    out_grad, lse, drop = given
    count = tl.cdiv(n, QUERIES)
    start = (count - 1 - tl.program_id(0) % count) * QUERIES  # the queries that see the most keys first
    at = (tl.program_id(0) // count).to(tl.int64)
    batch, head = at // heads, at % heads
    key += batch * k_strides[0] + head // group * k_strides[1]
    value += batch * v_strides[0] + head // group * v_strides[1]
    allowed += batch * allowed_strides[0]
    q = _rows(query + batch * q_strides[0] + head * q_strides[1], q_strides[2], start, n, width, QUERIES, WIDTH)
    out_grad += batch * out_strides[0] + head * out_strides[1]
    o = _rows(out_grad, out_strides[2], start, n, value_width, QUERIES, VALUE_WIDTH)
    totals = _numbers(lse + at * n, start, n, float("inf"), QUERIES) * _LOG2_E
    drops = _numbers(drop + at * n, start, n, 0.0, QUERIES)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    end = tl.minimum(m, start + QUERIES) if CAUSAL else m
    plain = (tl.minimum(m, start) if CAUSAL else m) // KEYS * KEYS  # all queries of the block see the keys before it
    for first in range(0, end, KEYS):
        k = _rows(key, k_strides[2], first, m, width, KEYS, WIDTH)
        v = _rows(value, v_strides[2], first, m, value_width, KEYS, VALUE_WIDTH)
        scores = tl.dot(q, tl.trans(k)) * (scale * _LOG2_E)
        if MASKED or first >= plain:
            seen = _seen(allowed, allowed_strides, start, first, n, m, CAUSAL, MASKED, QUERIES, KEYS)
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - totals[:, None])
        scores_grad = weights * (tl.dot(o, tl.trans(v)) - drops[:, None])
        sums = tl.dot(scores_grad.to(k.dtype), k, sums)
    _put(results[0] + at * n * width, sums * scale, start, n, width, QUERIES, WIDTH)
