"""Contractions, which sum products: products of matrices, einsum, solutions, and products of groups.

`torch.nn.functional.grouped_mm` multiplies groups of rows with one matrix per group, for mixtures of experts. Offsets
say where groups end. torch leaves the memory past the last group uninitialised, in results and in gradients. Here it is
zero, so that ranks with other groups, or other rows, can add up their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fspmd.errors import ArgumentError
from fspmd.rules.bodies import Site
from fspmd.rules.factors import NO_RULE, Factors, Rule, ShapedCall, elementwise, match, parse
from fspmd.rules.windows import block_places, per_rank, still
from fspmd.sharded import call_torch

_MATMUL: Final = {
    (1, 1): parse("k, k ->"),
    (2, 1): parse("... m k, k -> ... m"),
    (1, 2): parse("k, ... k n -> ... n"),
    (2, 2): parse("... m k, ... k n -> ... m n"),
}


def matmul(call: ShapedCall) -> Factors:
    """The rule of ``matmul``, by the number of dims of both operands."""
    a, b = (min(len(shape), 2) for shape in call.shapes)
    return match(_MATMUL[a, b], call.shapes) if a and b else NO_RULE


def cross(call: ShapedCall) -> Factors:
    """The rule of ``linalg.cross``: elementwise except along one dim of the result, which must be whole."""
    factors = elementwise(call)
    factor = factors.results[0][call.argument(2, "dim", -1)]
    return factors._replace(whole=frozenset(() if factor is None else (factor,)))


def einsum(call: ShapedCall) -> Factors:
    """The rule of ``einsum``, given by its equation. An ellipsis, or another form of the call, has no rule."""
    if not isinstance(call.args[0], str) or "." in call.args[0]:
        return NO_RULE
    operands, arrow, result = call.args[0].replace(" ", "").partition("->")
    if not arrow:  # the result has the letters that stand once, in alphabetical order
        result = "".join(sorted(c for c in operands if c != "," and operands.count(c) == 1))
    return match(parse(f"{', '.join(map(' '.join, operands.split(',')))} -> {' '.join(result)}"), call.shapes)


def with_added(text: str, place: int) -> Rule:
    """Return the rule of a contraction plus the operand at ``place``, which broadcasts."""
    pattern = parse(text)

    def rule(call: ShapedCall) -> Factors:
        shapes = list(call.shapes)
        if place >= len(shapes):
            return match(pattern, shapes)
        bias = shapes.pop(place)
        factors = match(pattern, shapes)
        result = factors.results[0]
        sizes = call.results[0][len(result) - len(bias) :]
        trailing = result[len(result) - len(bias) :]
        added = tuple(f if size == n else None for f, size, n in zip(trailing, bias, sizes, strict=True))
        operands = (*factors.operands[:place], added, *factors.operands[place:])
        return factors._replace(operands=operands, added=frozenset({place}))

    return rule


def solved(call: ShapedCall) -> Factors:
    """The rule of ``linalg.solve``: the columns of the right-hand side may be sharded (rows if ``left=False``)."""
    left, (a, b) = call.argument(2, "left", True), call.shapes
    vectors = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    out, given = ("... 1", "... [p]") if vectors else ("... 1 k", "... [p] k") if left else ("... k 1", "... k [p]")
    return match(parse(f"... [n] [m], {given} -> {out}, ... 1 1, ... 1, ..."), call.shapes)


# --- products of groups -----------------------------------------------------------------------------------------------

#: of torch's kernels
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """``F.grouped_mm``. The operands with 3 dims hold one matrix per group, and decide which product this is."""
    dims = mat_a.dim(), mat_b.dim()
    _check(mat_a, mat_b, offs, bias, out_dtype)
    if dims == (3, 3):
        return torch.bmm(mat_a, mat_b)
    if dims == (2, 3):
        return call_torch(rows_by_groups, (mat_a, mat_b, offs))
    if dims == (3, 2):
        return call_torch(rows_by_groups, (mat_b.mT, mat_a.mT, offs)).mT
    return call_torch(groups_of_columns, (mat_a, mat_b, offs))


def pointing(text: str, cut: str) -> Rule:
    """Return a rule whose third operand has the ends of groups. Over a sharded dim ``cut`` the result is pending."""
    pattern = parse(text)

    def rule(call: ShapedCall) -> Factors:
        factors = match(pattern, call.shapes)
        return factors._replace(summed=factors.summed | {factors.names[cut]}, places=frozenset({2}))

    return rule


def _check(a: Any, b: Any, offs: Any, bias: Any, out_dtype: Any) -> None:
    """Raise where torch raises on some device. The meta device only checks bfloat16, with other messages."""
    dims = a.dim(), b.dim()
    if not {*dims} <= {2, 3}:
        raise ArgumentError(
            f"grouped_mm: Multiplicands must be 2D or 3D but got mat_a.dim()={dims[0]} and mat_b.dim()={dims[1]}"
        )
    if (offs is None) != (dims == (3, 3)):
        raise ArgumentError(
            f"grouped_mm: offs are given if, and only if, an operand is 2D; got dims {dims} and offs={offs!r}"
        )
    groups = {x.size(0) for x in (a, b) if x.dim() == 3}
    if a.size(-1) != b.size(-2) or len(groups | ({offs.size(0)} if offs is not None and groups else set())) > 1:
        given = f"{tuple(a.shape)} and {tuple(b.shape)}" + ("" if offs is None else f" of {offs.size(0)} groups")
        raise ArgumentError(
            f"grouped_mm: contraction dimension of mat_a and mat_b, and their groups, must match; got {given}"
        )
    if offs is not None and (offs.dtype is not torch.int32 or offs.dim() != 1):
        raise ArgumentError(f"grouped_mm: Offsets have to be int32, of one dim; got {offs.dtype}, of {offs.dim()}")
    if a.dtype is not b.dtype or a.dtype not in DTYPES:
        raise ArgumentError(
            f"grouped_mm: Expected matrices of Float32, BFloat16 or Float16, alike; got {a.dtype} and {b.dtype}"
        )
    if bias is not None or out_dtype not in (None, a.dtype):
        raise ArgumentError(
            "grouped_mm: Bias and another out_dtype are not supported yet; add the bias to the result, or cast it"
        )


def rows_by_groups(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return ``[s, n]``: the rows ``a[s, k]`` of each group times its matrix of ``b[g, k, n]``; zeros past the last."""
    if has_torch_function((a, b, offs)):
        return handle_torch_function(rows_by_groups, (a, b, offs), a, b, offs)
    if a.is_meta:  # the shape, and a gradient of what it has one of
        return a @ b.sum(0)
    past = _past(a.shape[0], offs)[:, None]
    a = torch.where(past, 0, a)  # and its gradient; a mask of rows makes `masked_fill` slow on the CPU
    if 0 in (*a.shape, *b.shape):
        return a @ b.sum(0)
    columns = b.shape[2]
    if a.dtype not in DTYPES:
        return _one_by_one(a, b, offs)
    out = _with_fitting_gradient(F.grouped_mm(_fitting(a, True), _fitting(b), offs=offs))
    return torch.where(past, 0, out[:, :columns])


def _one_by_one(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """`rows_by_groups`, where torch has no kernel: all rows times each matrix, rows of other groups being 0.

    Rows of other groups are 0 in the result, too, so that what is not finite in a group stays there, as in a kernel.
    """
    group = torch.searchsorted(offs, torch.arange(a.shape[0], device=a.device, dtype=offs.dtype), right=True)[:, None]
    out = a.new_zeros(a.shape[0], b.shape[2])
    for g, matrix in enumerate(b.unbind()):
        own = group == g
        out = torch.where(own, a.where(own, 0) @ matrix, out)
    return out


def groups_of_columns(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return ``[g, m, n]``: for each group its columns of ``a[m, s]`` times its rows of ``b[s, n]``."""
    if has_torch_function((a, b, offs)):
        return handle_torch_function(groups_of_columns, (a, b, offs), a, b, offs)
    if a.is_meta:
        return (a @ b).repeat(offs.shape[0], 1, 1)
    past = _past(a.shape[1], offs)
    a, b = torch.where(past, 0, a), torch.where(past[:, None], 0, b)
    if 0 in (*a.shape, *b.shape, *offs.shape):
        return (a @ b).expand(offs.shape[0], -1, -1).clone()
    rows, columns = a.shape[0], b.shape[1]
    out = _with_fitting_gradient(F.grouped_mm(_fitting(a), _fitting(b), offs=offs))
    return out[:, :rows, :columns].contiguous()


def _past(rows: int, offs: Tensor) -> Tensor:
    """Return a mask of the rows past the last group."""
    places = torch.arange(rows, device=offs.device)
    return places >= (offs[-1:] if len(offs) else 0)


def _fitting(x: Tensor, rows: bool = False) -> Tensor:
    """Return a matrix padded and strided for torch's kernels, forward and backward.

    They need the last two dims (of ``rows`` the last one) to be multiples of 16 bytes long.
    """
    unit = max(1, 16 // x.dtype.itemsize)
    lacks = [-x.shape[-1] % unit, 0 if rows else -x.shape[-2] % unit]
    if any(lacks):
        return torch.constant_pad_nd(x, [0, lacks[0], 0, lacks[1]]).contiguous()
    rows_apart, columns_apart = x.stride()[-2:]
    is_fit = (columns_apart == 1 and rows_apart >= x.shape[-1] and rows_apart % unit == 0) or (
        rows_apart == 1 and columns_apart >= x.shape[-2] and columns_apart % unit == 0
    )
    return x if is_fit else x.contiguous()


def _with_fitting_gradient(x: Tensor) -> Tensor:
    """Return a product whose gradient reaches torch's kernel as dense as the product is."""
    return x.flatten().view(x.shape)


@still
def own_groups(site: Site, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The body of `rows_by_groups`: each rank multiplies the rows of its block that belong to its groups.

    The rows are rolled so that the rows of its first group come first.
    """
    ends = _ends(site, offs)
    if not site.axes.get("g"):
        return rows_by_groups(a, b, ends)
    groups = site.blocks(offs.shape[0], "g")
    ends = torch.cat([ends.new_zeros(1), ends])
    start = _part(site, "start", "g", ends, lambda at: torch.tensor([groups[at][0]]))
    own = _part(site, "own", "g", ends, lambda at: block_places(groups, at) + 1)
    rows = site.blocks(site.operands[0].shape[0], "s")
    axes = site.axes.get("s", ())
    places = per_rank(site, "places", axes, lambda at: torch.arange(rows[at][1]))
    length = per_rank(site, "length", axes, lambda at: torch.tensor([max(1, rows[at][1])]))
    out = rows_by_groups(a.index_select(0, (places + start) % length), b, own - start)
    return out.index_select(0, (places - start) % length)


@still
def own_columns(site: Site, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The body of `groups_of_columns`: the products of each rank's rows are the terms of a pending sum."""
    return groups_of_columns(a, b, _ends(site, offs))


def _ends(site: Site, offs: Tensor) -> Tensor:
    """Return the ends of the groups, counted in this rank's rows."""
    if not site.axes.get("s"):
        return offs
    rows = site.blocks(site.operands[0].shape[site.operands[0].ndim - 1 if site.results[0].ndim == 3 else 0], "s")
    first = per_rank(site, "first", site.axes["s"], lambda at: torch.tensor([rows[at][0]], dtype=offs.dtype))
    length = per_rank(site, "rows", site.axes["s"], lambda at: torch.tensor([rows[at][1]], dtype=offs.dtype))
    return (offs - first).clamp(min=0).minimum(length)


def _part(site: Site, key: str, dim: str, x: Tensor, places: Callable[[int], Tensor]) -> Tensor:
    return x.index_select(0, per_rank(site, key, site.axes[dim], places))
