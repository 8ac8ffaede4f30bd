"""Sharded bodies that move rows, look up and attend: values and gradients beside unsharded torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dispatch_cases import Case, check_case, outputs_of, placements, values
from full import FULL
from processes import Processes
from torch.nn import functional as F

import fspmd
from fspmd import Mesh, P, communication_log, device_get, device_put, make_mesh
from fspmd.redistribution.cost import Link, Topology, set_topology, topology

#: bytes cost something and messages nothing, so that bodies are taken for blocks as small as these
BYTES = Topology(Link(0.0, 1e3), Link(0.0, 1e3), launch=0.0)
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")

_attend = F.scaled_dot_product_attention
_SEEN = torch.arange(30).reshape(5, 6).remainder(4) != 1

CASES: dict[str, Case] = {
    "attention": (_attend, ((2, 4, 4, 3), (2, 4, 4, 3), (2, 4, 4, 3))),
    "attention, uneven": (lambda q, k, v: _attend(q, k, v, scale=0.3), ((3, 5, 3), (3, 5, 3), (3, 5, 3))),
    "attention, causal": (lambda q, k, v: _attend(q, k, v, is_causal=True), ((2, 5, 3), (2, 5, 3), (2, 5, 3))),
    "attention, lengths": (_attend, ((2, 5, 3), (2, 6, 3), (2, 6, 3))),
    "attention, causal lengths": (lambda q, k, v: _attend(q, k, v, is_causal=True), ((1, 5, 3), (1, 6, 3), (1, 6, 3))),
    "attention, seen": (lambda q, k, v: _attend(q, k, v, _SEEN), ((2, 5, 3), (2, 6, 3), (2, 6, 3))),
    "attention, added": (_attend, ((2, 5, 3), (2, 5, 3), (2, 5, 3), (5, 5))),
    "attention, added row": (_attend, ((2, 5, 3), (2, 5, 3), (2, 5, 3), (2, 5, 1))),
    "attention, groups": (
        lambda q, k, v: _attend(q, k, v, enable_gqa=True, is_causal=True),
        ((1, 8, 4, 3), (1, 4, 4, 3), (1, 4, 4, 3)),
    ),
}

_ROWS = torch.tensor([3, 0, -1, 4, 3, 1])
_GRID = torch.tensor([[0, 4, 2], [1, 1, 3]])


def _set(index: Any) -> Callable[..., Any]:
    def f(x: Any, v: Any) -> Any:
        y = x * 1
        y[index] = v
        return y

    return f


CASES |= {
    "embedding": (lambda w: F.embedding(_GRID, w), ((5, 4),)),
    "embedding, padding": (lambda w: F.embedding(_GRID, w, padding_idx=-4), ((5, 4),)),
    "embedding of torch": (lambda w: torch.embedding(w, _GRID, 1), ((5, 4),)),
    "embedding, sharded places": (lambda w, x: (F.embedding((x.abs() * 4).long(), w), x * 1), ((5, 4), (3, 4))),
    "gather": (lambda x: x.gather(1, _GRID), ((2, 5),)),
    "gather, sharded places": (lambda x, y: (x.gather(0, (y.abs() * 4).long()), y * 1), ((5, 3), (5, 3))),
    "take_along_dim": (lambda x: torch.take_along_dim(x, _GRID, 1), ((2, 5),)),
    "index_select": (lambda x: x.index_select(0, _ROWS.abs()), ((5, 3),)),
    "index": (lambda x: x[_ROWS], ((5, 4),)),
    "index of two": (lambda x: x[_GRID, :, _GRID], ((5, 2, 5),)),
    "index of adjacent": (lambda x: x[:, _GRID, _GRID[0]], ((2, 5, 5),)),
    "scatter": (lambda x, y: x.scatter(1, _GRID, y), ((2, 5), (2, 3))),
    "scatter_add": (lambda x, y: x.scatter_add(0, _GRID, y), ((5, 3), (2, 3))),
    "scatter_reduce": (
        lambda x, y: x.scatter_reduce(0, _GRID, y, "mean", include_self=False),
        ((5, 3), (2, 3)),
    ),
    "index_add": (lambda x, y: x.index_add(0, _ROWS.abs(), y, alpha=2), ((5, 3), (6, 3))),
    "index_copy": (lambda x, y: x.index_copy(1, torch.tensor([4, 0]), y), ((3, 5), (3, 2))),
    "index_fill": (lambda x: x.index_fill(0, _ROWS[:2], 7.0), ((5, 3),)),
    "index_put": (lambda x, y: x.index_put((_GRID,), y, accumulate=True), ((5, 4), (2, 3, 4))),
    "index_put of two": (_set((torch.tensor([0, 4, 2]), torch.tensor([1, 3, 0]))), ((5, 4), (3,))),
    "writes of rows": (_set(torch.tensor([0, -1])), ((5, 4), (4,))),
}

CASES |= {
    "slices": (lambda x: x[1:4, ::2], ((5, 6),)),
    "an int": (lambda x: x[-2], ((5, 6),)),
    "an int, a slice and None": (lambda x: x[2, None, ..., 1:], ((5, 3, 4),)),
    "select": (lambda x: x.select(1, 3), ((3, 5),)),
    "narrow": (lambda x: x.narrow(0, 1, 3), ((5, 4),)),
    "split": (lambda x: x.split(2), ((5, 4),)),
    "split with sizes": (lambda x: x.split([1, 3, 4], 1), ((2, 8),)),
    "chunk": (lambda x: x.chunk(3, 0), ((6, 4),)),
    "diff": (lambda x: x.diff(dim=0), ((6, 4),)),
    "flip": (lambda x: x.flip(0, 1), ((5, 4),)),
    "roll": (lambda x: x.roll((2, -1), (0, 1)), ((5, 4),)),
    "roll of all": (lambda x: x.roll(3), ((5, 4),)),
    "repeat": (lambda x: x.repeat(2, 3, 1), ((5, 4),)),
    "tile": (lambda x: x.tile(2), ((3, 5),)),
    "pad": (lambda x: F.pad(x, (1, 2, 3, -1)), ((5, 4),)),
    "pad with a value": (lambda x: F.pad(x, (0, 0, 1, 1), value=2.5), ((5, 4),)),
    "pad, reflected": (lambda x: F.pad(x, (2, 3, 4, 1), "reflect"), ((2, 5, 6),)),
    "pad, replicated": (lambda x: F.pad(x, (2, -1, 6, 3), "replicate"), ((2, 5, 4),)),
    "pad, replicated in one dim": (lambda x: F.pad(x, (0, 0, 1, 3), "replicate"), ((5, 1, 4),)),
    "pad, circular": (lambda x: F.pad(x, (2, -1, 4, 5), "circular"), ((2, 5, 6),)),
    "cat": (lambda x, y: torch.cat([x, y]), ((5, 3), (4, 3))),
    "cat of more": (lambda x, y: torch.cat([x, y, x], -1), ((2, 5), (2, 1))),
    "tril": (lambda x: x.tril(-1), ((2, 5, 6),)),
    "triu": (lambda x: x.triu(1), ((5, 5),)),
    "unfold": (lambda x: x.unfold(0, 3, 2), ((9, 3),)),
    "unfold of one": (lambda x: x.unfold(1, 2, 1), ((3, 3),)),
}

CASES |= {
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 0, 1, 6, 2), ((7, 3), (3, 3))),
    "slice_scatter of none": (lambda x, y: x.slice_scatter(y[:, :0], 1, 2, 2), ((2, 5), (2, 1))),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, -2), ((6, 3), (3,))),
    "writes of slices": (_set((slice(1, 4), slice(None, None, 2))), ((5, 6), (3, 3))),
    "writes of an int": (_set((..., 3)), ((5, 6), (5,))),
}

CASES |= {
    "flatten": (torch.flatten, ((5, 6),)),
    "flatten of more": (lambda x: x.flatten(1, 2), ((2, 5, 6),)),
    "unflatten": (lambda x: x.unflatten(0, (2, 3)), ((6, 5),)),
    "unflatten of pieces": (lambda x: x.view(3, 5, 2, 3), ((15, 6),)),
    "reshape": (lambda x: x.reshape(4, 9), ((6, 3, 2),)),
    "reshape with ones": (lambda x: x.reshape(1, 6, 1, 7, 1), ((3, 1, 2, 7),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 0), ((5, 2),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), ((1, 8, 2, 3),)),
    "diagonal": (torch.diagonal, ((5, 5),)),
    "diagonal of more rows": (lambda x: x.diagonal(-2, 2, 1), ((2, 5, 7),)),
    "diagonal of more columns": (lambda x: x.diagonal(1), ((4, 9, 2),)),
    "diagonal of none": (lambda x: (x.diagonal(6), x * 1), ((6, 5),)),
    "trace": (torch.trace, ((6, 5),)),
    "diag": (lambda x: torch.diag(x, 1), ((6,),)),
    "diag_embed": (lambda x: torch.diag_embed(x, -2, 2, 0), ((3, 5),)),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y, -1, 1, 0), ((5, 6, 2), (2, 5))),
}


def _low(x: Any) -> Any:
    """Of which many elements are less than any number."""
    return x.masked_fill(x < 0.2, -math.inf)


CASES |= {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), ((2, 3, 9), (4, 3, 3), (4,))),
    "conv1d, stride": (lambda x, w: F.conv1d(x, w, stride=2, padding=2, dilation=2), ((1, 2, 11), (2, 2, 3))),
    "conv1d, groups": (lambda x, w, b: F.conv1d(x, w, b, groups=2), ((2, 4, 6), (4, 2, 4), (4,))),
    "conv1d, a group per channel": (
        lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=5),
        ((2, 5, 6), (10, 1, 3), (10,)),
    ),
    "conv_transpose1d, a group per channel": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, groups=4),
        ((2, 4, 5), (4, 1, 3), (4,)),
    ),
    "conv2d, channels and space": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2)),
        ((2, 4, 5, 6), (4, 4, 3, 3), (4,)),
    ),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), ((1, 2, 5), (2, 3, 3))),
    "conv_transpose1d, gaps": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=4, padding=1, output_padding=2),
        ((1, 2, 5), (2, 3, 2), (3,)),
    ),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2),
        ((1, 4, 6, 5), (4, 1, 3, 3)),
    ),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), ((1, 2, 4, 3, 3), (2, 2, 3, 2, 1))),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), ((2, 2, 9),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, (3, 2), (2, 1)), ((1, 2, 9, 6),)),
    "avg_pool2d, padded": (lambda x: F.avg_pool2d(x, (3, 2), 2, (1, 0)), ((1, 2, 9, 6),)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 3, 2), ((2, 2, 9),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True), ((1, 2, 8, 9),)),
    "max_pool2d, padded": (
        lambda x: F.max_pool2d(x, 3, (1, 2), (0, 1), (2, 1), return_indices=True),
        ((2, 8, 9),),
    ),
    "avg_pool1d, padded": (lambda x: F.avg_pool1d(x, 4, 3, 2, True), ((2, 2, 9),)),
    "avg_pool2d, not counted": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
        ((2, 8, 7),),
    ),
    "avg_pool3d, divided": (
        lambda x: F.avg_pool3d(x, 2, 1, 1, divisor_override=3),
        ((1, 1, 4, 3, 5),),
    ),
    "max_pool1d, padded": (lambda x: F.max_pool1d(_low(x), 3, 2, 1, 2, True), ((2, 2, 9),)),
    "max_pool1d, places": (lambda x: F.max_pool1d(_low(x), 3, 4, 1, 1, True, True), ((2, 2, 9),)),
    "max_pool2d, the least": (
        lambda x: F.max_pool2d(_low(x), (3, 2), 2, 1, return_indices=True),
        ((1, 6, 5),),
    ),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 4), ((2, 2, 9),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, None)), ((2, 8, 5),)),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), ((1, 2, 6, 5),)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (5, 1, 2)), ((1, 1, 4, 3, 5),)),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 7, True), ((2, 2, 9),)),
    "adaptive_max_pool2d": (
        lambda x: F.adaptive_max_pool2d(x, (3, 2), True),
        ((2, 8, 7),),
    ),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, 1), ((1, 1, 4, 3, 5),)),
}


_COMPLEX = torch.view_as_real
CASES |= {
    "conv1d, groups of channels": (
        lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=4),
        ((2, 8, 5), (12, 2, 3), (12,)),
    ),
    "conv_transpose1d, groups of channels": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, groups=4),
        ((1, 8, 5), (8, 3, 3)),
    ),
    "channel_shuffle": (lambda x: torch.channel_shuffle(x, 3), ((2, 6, 5),)),
    "take": (lambda x: x.take(torch.tensor([[3, 0, -1], [29, -30, 3]])), ((5, 6),)),
    "take of a vector": (lambda x: torch.take(x, torch.tensor([3, 0, -1, 4, 3])), ((5,),)),
    "cov": (lambda x: torch.cov(x, correction=0), ((5, 6),)),
    "cov of one": (torch.cov, ((6,),)),
    "corrcoef": (lambda x: torch.corrcoef(x * x + x), ((5, 6),)),
    "rfft2": (lambda x: _COMPLEX(torch.fft.rfft2(x, (3, 8))), ((5, 6, 7),)),
    "ihfftn": (lambda x: _COMPLEX(torch.fft.ihfftn(x)), ((5, 6),)),
    "irfftn": (lambda x: torch.fft.irfftn(torch.complex(x, x * x), dim=(2, 0)), ((5, 3, 6),)),
    "hfft2": (lambda x: torch.fft.hfft2(torch.complex(x, x * x), norm="ortho"), ((4, 6),)),
    "fft2": (lambda x: _COMPLEX(torch.fft.fft2(x, dim=(0, 2))), ((5, 6, 3),)),
}


CASES |= {
    "interpolate": (lambda x: F.interpolate(x, scale_factor=1.7), ((1, 2, 7, 5),)),
    "interpolate, exact": (lambda x: F.interpolate(x, 5, mode="nearest-exact"), ((2, 1, 9),)),
    "interpolate, linear": (lambda x: F.interpolate(x, 11, mode="linear", align_corners=True), ((2, 2, 5),)),
    "interpolate, bilinear": (lambda x: F.interpolate(x, (4, 9), mode="bilinear"), ((1, 1, 7, 6),)),
    "interpolate, bicubic": (lambda x: F.interpolate(x, (5, 9), mode="bicubic"), ((1, 1, 7, 6),)),
    "interpolate, bicubic scale": (lambda x: F.interpolate(x, scale_factor=1.6, mode="bicubic"), ((1, 1, 7, 6),)),
    "interpolate, antialias": (
        lambda x: F.interpolate(x, (3, 8), mode="bilinear", antialias=True),
        ((1, 1, 9, 6),),
    ),
    "interpolate, cubic antialias": (
        lambda x: F.interpolate(x, (4, 4), mode="bicubic", antialias=True, align_corners=True),
        ((1, 1, 7, 6),),
    ),
    "fold": (lambda x: F.fold(x, (3, 5), (2, 2)), ((2, 16, 8),)),
    "fold of one": (lambda x: F.fold(x, (4, 5), (2, 3), 1, 1, 2), ((12, 9),)),
    "interpolate, trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), ((1, 1, 5, 2, 3),)),
}


@pytest.fixture(autouse=True)
def _bytes() -> Iterator[None]:
    before = topology()
    set_topology(BYTES)
    fspmd.propagation_cache_clear()
    yield
    set_topology(before)
    fspmd.propagation_cache_clear()


@pytest.mark.one_of(20)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("mesh", "most"), [(LINE, 6), (GRID, 4), (WIDE, 3)])
def test_values_and_gradients(mesh: Mesh, most: int, name: str) -> None:
    check_case(name, CASES[name], mesh, most)


def test_reshapes_beside_a_dim_of_one_in_every_layout() -> None:
    x = torch.arange(9.0).reshape(1, 9)
    for (spec,) in placements(GRID, ((1, 9),), 100):
        moved = device_put(x, spec, mesh=GRID).reshape(1, 3, 3)
        assert torch.equal(device_get(moved), x.reshape(1, 3, 3)), spec


_ROW, _COLUMN, _SPACE = P("x"), P(None, "x"), P(None, None, "x")
#: a function, its operands' shapes and layouts, how many elements a rank sends at most
MOVES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[P, ...], int]] = {
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 0, 2, 7), ((13, 64), (5, 64)), (_ROW, P()), 0),
    "slice_scatter, sharded": (lambda x, y: x.slice_scatter(y, 0, 2, 7), ((13, 64), (5, 64)), (_ROW, _ROW), 2 * 64),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, 3), ((13, 64), (64,)), (_ROW, P()), 0),
    "diagonal": (torch.diagonal, ((13, 13),), (_ROW,), 0),
    "diagonal of columns": (torch.diagonal, ((13, 13),), (_COLUMN,), 0),
    "diagonal, moved": (torch.diagonal, ((13, 64),), (_COLUMN,), 16),
    "trace": (torch.trace, ((13, 13),), (_COLUMN,), 0),
    "diagonal_scatter": (torch.diagonal_scatter, ((13, 64), (13,)), (_ROW, P()), 0),
    "pad, reflected": (lambda x: F.pad(x, (0, 0, 2, 1), "reflect"), ((1, 13, 64),), (_COLUMN,), 3 * 64),
    "pad, circular": (lambda x: F.pad(x, (0, 0, 2, 1), "circular"), ((1, 13, 64),), (_COLUMN,), 3 * 64),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        ((1, 4, 13, 8), (4, 4, 3, 3)),
        (_SPACE, P()),
        2 * 4 * 8,
    ),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), ((1, 2, 13, 8),), (_SPACE,), 2 * 8 * 2),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), ((1, 2, 13, 8),), (_SPACE,), 2 * 8 * 2),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), ((1, 2, 14, 8),), (_SPACE,), 2 * 2 * 8),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), ((1, 2, 14, 8),), (_SPACE,), 0),
    "flatten": (torch.flatten, ((13, 64),), (_ROW,), 2 * 64),
    "flatten of columns": (torch.flatten, ((13, 64),), (_COLUMN,), 13 * 16),
    "unflatten": (lambda x: x.view(2, 7, 64), ((14, 64),), (_ROW,), 4 * 64),
    "roll of all": (lambda x: x.roll(5), ((13, 64),), (_ROW,), 64),
    "roll of all, columns": (lambda x: x.roll(5), ((13, 64),), (_COLUMN,), 13 * 8),
    "conv1d, a group per channel": (
        lambda x, w: F.conv1d(x, w, groups=14),
        ((2, 14, 64), (14, 1, 3)),
        (_COLUMN, _ROW),
        0,
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 2, 14, 8),), (_SPACE,), 4 * 8),
    "interpolate, bicubic": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        ((1, 2, 14, 8),),
        (_SPACE,),
        10 * 8,
    ),
    "fold": (lambda x: F.fold(x, (3, 5), (2, 2)), ((2, 16, 8),), (_SPACE,), 0),
    "fold of channels": (lambda x: F.fold(x, (3, 5), (2, 2)), ((2, 16, 8),), (_COLUMN,), 0),
    "conv1d, groups of channels": (
        lambda x, w: F.conv1d(x, w, groups=4),
        ((2, 16, 64), (16, 4, 3)),
        (_COLUMN, _ROW),
        0,
    ),
    "channel_shuffle": (lambda x: torch.channel_shuffle(x, 2), ((2, 16, 64),), (_COLUMN,), 2 * 4 * 64),
    "take": (lambda x: x.take(torch.tensor([5, 3])), ((13, 64),), (_COLUMN,), 0),
    "cov": (torch.cov, ((13, 64),), (_COLUMN,), 2 * 13),
    "cdist of columns": (torch.cdist, ((5, 64), (7, 64)), (_COLUMN, _COLUMN), 2 * 35),
    "rfft2": (torch.fft.rfft2, ((8, 8, 16),), (_SPACE,), 8 * 8 * 4),
    "pad around, circular": (lambda x: F.pad(x, (3, 3, 2, 1), "circular"), ((1, 13, 64),), (_COLUMN,), 3 * 64),
    "addcmul": (torch.addcmul, ((8, 64), (8, 64), (8, 64)), (_ROW, P(), P()), 0),
    "addmm of what is added": (torch.addmm, ((8, 8), (8, 2), (2, 8)), (_ROW, P(), P()), 64),
    "a write": (_set((slice(2, 7),)), ((13, 64), (5, 64)), (_ROW, P()), 0),
}


#: of rows -> a function whose pieces are one exchange
EXCHANGED: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "flip": lambda x: (x.flip(0),),
    "roll": lambda x: (x.roll(3, 0),),
    "slice": lambda x: (x[1::2],),
    "pad": lambda x: (F.pad(x[None], (0, 0, 4, 3), "replicate")[0],),
    "split": lambda x: x.split(5),
    "split of sizes": lambda x: x.split([1, 0, 8, len(x) - 9]),
    "chunk": lambda x: x.chunk(3),
}


@pytest.mark.parametrize("size", [13, 22])
@pytest.mark.parametrize("name", EXCHANGED)
def test_an_exchange_is_one_and_counted_by_the_busiest_rank(name: str, size: int) -> None:
    f, (x,) = EXCHANGED[name], values(((size, 64),))
    with communication_log() as log:
        found = f(device_put(x, _ROW, mesh=LINE))
    moved = torch.zeros(4, 4)
    home = _homes(size)
    for piece, out in zip(f(torch.arange(float(size))[:, None]), found, strict=True):
        assert out.spec.partition == P("x", None)
        for source, target in zip(home[piece[:, 0].long()].tolist(), _homes(len(piece)).tolist(), strict=True):
            moved[source, target] += source != target
    assert [one.kind for one in log] == ["ragged_all_to_all"] * bool(moved.any())
    assert log.moved == 64 * 8 * max(moved.sum(0).max(), moved.sum(1).max())


def _homes(size: int) -> torch.Tensor:
    """The rank that each row is on."""
    return torch.arange(size) // max(1, -(-size // 4))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", MOVES)
def test_what_moves(name: str) -> None:
    """No rank sends, or receives, more than so many elements, in any of the collectives of the forward pass."""
    f, shapes, specs, most = MOVES[name]
    given = [device_put(x, s, mesh=LINE).requires_grad_() for x, s in zip(values(shapes), specs, strict=True)]
    with communication_log() as log:
        f(*given)
    assert log.moved <= most * 8, log


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_of_integers_are_as_torch_rounds_them(mode: str) -> None:
    plain = torch.arange(3 * 32 * 20).reshape(1, 3, 32, 20).mul(7).remainder(256).to(torch.uint8)
    x = device_put(plain, _SPACE, mesh=LINE)
    found = F.interpolate(x, scale_factor=1.7, mode=mode)
    torch.testing.assert_close(device_get(found), F.interpolate(plain, scale_factor=1.7, mode=mode), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_what_is_set_becomes_of_the_dtype_of_what_it_is_set_in(dtype: torch.dtype) -> None:
    plain = torch.linspace(-2.0, 3.0, 54).reshape(9, 6).to(dtype)
    x = device_put(plain, _ROW, mesh=LINE)
    for f in (
        lambda x: x.slice_scatter(x[:3] + 1, 0, 2, 8, 2),
        lambda x: x.select_scatter(x[4] + 1.5, 0, 7),
        lambda x: x.diagonal_scatter(x[0] + 1.5),
    ):
        found, want = f(x), f(plain)
        assert found.dtype == want.dtype
        assert torch.equal(device_get(found), want)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_drops_the_same_shares_under_every_layout(causal: bool) -> None:
    """Each share is dropped, or divided by the chance to stay; gradients are those of the shares that stay."""
    shapes = ((4, 4, 5, 3), (4, 2, 5, 3), (4, 2, 5, 5))
    q, k, v = (x.requires_grad_() for x in values(shapes))
    scores = (q @ k.repeat_interleave(2, 1).mT) / 3**0.5
    shares = (scores.masked_fill(torch.ones(5, 5).triu(1) == 1, -math.inf) if causal else scores).softmax(-1)

    def attended(mesh: Mesh, specs: tuple[P, ...], value: torch.Tensor) -> tuple[Any, list[Any]]:
        given = [
            device_put(x.detach(), s, mesh=mesh).requires_grad_() for x, s in zip((q, k, value), specs, strict=True)
        ]
        torch.manual_seed(3)
        return _attend(*given, dropout_p=0.4, is_causal=causal, enable_gqa=True), given

    kept = device_get(attended(LINE, (P(), P(), P()), torch.eye(5, dtype=torch.float64).expand(4, 2, 5, 5))[0]) != 0
    assert 0.3 < 1 - kept.sum() / shares.count_nonzero() < 0.5
    expected = (shares * kept / 0.6) @ v.repeat_interleave(2, 1)
    grads = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for mesh in (LINE, GRID):
        for specs in placements(mesh, shapes, 12 if FULL else 4):
            out, given = attended(mesh, specs, v)
            torch.testing.assert_close(device_get(out), expected, rtol=1e-12, atol=1e-12)
            for found, want in zip(torch.autograd.grad(out.sin().sum(), given), grads, strict=True):
                torch.testing.assert_close(device_get(found), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("added", [False, True])
def test_attention_with_dropout_gives_zeros_to_a_query_that_sees_nothing(added: bool) -> None:
    seen = _SEEN.index_fill(0, torch.tensor([2]), False)
    shapes = ((2, 5, 3), (2, 6, 3), (2, 6, 3), *(((5, 6),) if added else ()))
    given = [x.requires_grad_() for x in values(shapes)]

    def attended(q: Any, k: Any, v: Any, bias: Any = None, **options: Any) -> Any:
        mask = seen if bias is None else bias.masked_fill(~seen, -math.inf)
        return _attend(q, k, v, mask, **options)

    expected = attended(*given)
    assert not expected[:, 2].any()
    grads = torch.autograd.grad(expected.sin().sum(), given)
    for mesh in (LINE, GRID):
        for specs in placements(mesh, shapes, 12 if FULL else 4):
            laid = [device_put(x.detach(), s, mesh=mesh).requires_grad_() for x, s in zip(given, specs, strict=True)]
            out = attended(*laid, dropout_p=1e-20)
            torch.testing.assert_close(device_get(out), expected, rtol=1e-12, atol=1e-12)
            for found, want in zip(torch.autograd.grad(out.sin().sum(), laid), grads, strict=True):
                torch.testing.assert_close(device_get(found), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", [_ROW, _COLUMN], ids=repr)
def test_attention_with_dropout_moves_nothing(spec: P) -> None:
    given = [device_put(x, spec, mesh=LINE).requires_grad_() for x in values(((4, 4, 5, 3),) * 3)]
    with communication_log() as log:
        _attend(*given, dropout_p=0.4).sum().backward()
    assert not log


def _on_processes(sizes: tuple[int, ...]) -> None:
    set_topology(BYTES)
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)])
    for name, case in list(CASES.items())[:: 3 if FULL else 18]:
        check_case(name, case, mesh, 1)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_on_processes(sizes: tuple[int, ...]) -> None:
    with Processes(4) as pool:
        pool.run(_on_processes, sizes)


def _second(f: Callable[..., Any], given: list[Any]) -> tuple[Any, ...]:
    """A gradient of a gradient of a function of squares."""
    outs = [out for out in outputs_of(f(*(x * x for x in given))) if out.is_floating_point()]
    first = torch.autograd.grad(sum((out**3).sum() for out in outs), given, create_graph=True)
    found: tuple[Any, ...] = torch.autograd.grad(sum((g**2).sum() for g in first), given)
    return found


#: torch has no second gradient of fused attention, nor of an embedding of no places
_ONCE = "attention", "embedding, sharded places"


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(_ONCE)])
def test_gradients_of_gradients(name: str) -> None:
    f, shapes = CASES[name]
    plain = [x.requires_grad_() for x in values(shapes)]
    expected = _second(f, plain)
    for mesh in (LINE, GRID):
        for specs in placements(mesh, shapes, 2):
            given = [device_put(x.detach(), s, mesh=mesh).requires_grad_() for x, s in zip(plain, specs, strict=True)]
            for found, want in zip(_second(f, given), expected, strict=True):
                torch.testing.assert_close(device_get(found), want, rtol=1e-10, atol=1e-10, msg=f"{name} {specs}")


#: torch has no tangents of fused attention, and tangents of a padding that has no gradient
_NO_TANGENTS = "attention", "embedding, padding", "embedding of torch"


_WITH_TANGENTS = [name for name in CASES if not name.startswith(_NO_TANGENTS)]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", _WITH_TANGENTS if FULL else sorted({"embedding", *_WITH_TANGENTS[::8]}))
def test_what_a_transform_calls_first_is_called_outside_of_it_too(name: str) -> None:
    """Plans, and what bodies make once, hold no values of the transform that they were made in."""
    f, shapes = CASES[name]
    plain = values(shapes)

    def total(*given: Any) -> Any:
        return sum((out**2).sum() for out in outputs_of(f(*given)) if out.is_floating_point())

    ways = [x.cos() for x in plain]
    expected = torch.func.jvp(total, tuple(plain), tuple(ways))[1]
    for specs in placements(LINE, shapes, 3):
        fspmd.propagation_cache_clear()
        given = [device_put(x, s, mesh=LINE) for x, s in zip(plain, specs, strict=True)]
        found = fspmd.jvp(total, given, ways)[1]
        torch.testing.assert_close(device_get(found), expected, equal_nan=True, msg=f"{name} {specs}")
        torch.testing.assert_close(device_get(total(*given)), total(*plain), msg=f"{name} {specs}")
