"""Arguments of all_gather_into and psum_scatter_into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd import (
    ArgumentError,
    P,
    ShapeError,
    VarianceError,
    all_gather_into,
    axis_index,
    grad,
    jvp,
    pcast,
    psum,
    psum_scatter_into,
    vmap,
)
from mistakes import Setting, mistake


def gathered_sum(m: Setting) -> Any:
    def f(x: Tensor) -> Tensor:
        total: Tensor = psum(all_gather_into(torch.empty(8, 4), x, "x").sum(), "x")
        return total

    return m.map(f, P("x"), P())


@mistake(ArgumentError)
def out_is_a_list(m: Setting) -> None:
    """all_gather_into got out of type list; expected a torch.Tensor"""
    wrong: Any = [torch.empty(2, 4)] * 4
    m.inside(lambda x: all_gather_into(wrong, x, "x"))


@mistake(ShapeError)
def out_and_x_swapped(m: Setting) -> None:
    """all_gather_into over 4 ranks: x is f32[8,4], so out must be torch.float32 of shape (32, 4) or (4, 8, 4), but \
    it is f32[2,4]{V:x}
    """
    m.inside(lambda x: all_gather_into(x, torch.empty(8, 4), "x"))


@mistake(ShapeError)
def out_of_another_dtype(m: Setting) -> None:
    """all_gather_into over 4 ranks: x is f32[2,4]{V:x}, so out must be torch.float32 of shape (8, 4) or (4, 2, 4), \
    but it is f64[8,4]
    """
    m.inside(lambda x: all_gather_into(torch.empty(8, 4, dtype=torch.float64), x, "x"))


@mistake(ShapeError)
def out_transposed(m: Setting) -> None:
    """all_gather_into: out, f32[8,4] with strides (1, 8), is not contiguous: moving it in one piece would take a \
    copy; pass a contiguous out
    """
    m.inside(lambda x: all_gather_into(torch.empty(4, 8).T, x, "x"))


@mistake(ShapeError)
def block_of_a_wrong_size(m: Setting) -> None:
    """psum_scatter_into over 4 ranks: out is f32[3,4]{V:x}, so x must be torch.float32 of shape (12, 4) or (4, 3, 4), \
    but it is f32[2,4]{V:x}
    """
    m.inside(lambda x: psum_scatter_into(x.new_empty(3, 4), x, "x"))


@mistake(ArgumentError)
def out_that_requires_grad(m: Setting) -> None:
    """all_gather_into writes in place and has no gradient; pass out.detach(), or use all_gather"""
    out = torch.empty(8, 4, requires_grad=True)
    m.inside(lambda x: all_gather_into(out, x, "x"))


@mistake(ArgumentError)
def gradient_through_a_gather(m: Setting) -> None:
    """all_gather_into writes in place and has no gradient; pass x.detach(), or use all_gather"""
    grad(gathered_sum(m))(torch.ones(8, 4))


@mistake(ArgumentError)
def gradient_of_a_leaf_through_a_scatter(m: Setting) -> None:
    """psum_scatter_into writes in place and has no gradient; pass x.detach(), or use psum_scatter"""
    w = torch.ones(8, 4, requires_grad=True)
    m.inside(lambda x: psum_scatter_into(x.new_empty(2, 4), (w * x[0]), "x"))


@mistake(ArgumentError)
def mapped_gather(m: Setting) -> None:
    """all_gather_into writes in place and takes no part in vmap or jvp; use all_gather"""
    vmap(gathered_sum(m))(torch.ones(3, 8, 4))


@mistake(ArgumentError)
def tangent_through_a_gather(m: Setting) -> None:
    """all_gather_into writes in place and takes no part in vmap or jvp; use all_gather"""
    jvp(gathered_sum(m), (torch.ones(8, 4),), (torch.ones(8, 4),))


@mistake(VarianceError, transports=("simulation",))
def scatter_into_what_all_ranks_share(m: Setting) -> None:
    """psum_scatter_into: out, f32[1], is equal on all ranks of 'x', and the result is not; make it with \
    x.new_empty(shape)
    """
    m.inside(lambda x: psum_scatter_into(torch.empty(1), torch.ones(4) * axis_index("x"), "x"))


@mistake(VarianceError, checked=(True,), transports=("simulation",))
def scatter_of_what_all_ranks_share(m: Setting) -> None:
    """psum_scatter_into: out, f32[1], is equal on all ranks of 'x', and the result is not; make it with pcast(x, \
    'x', to='varying').new_empty(shape)
    """
    m.map(lambda x: psum_scatter_into(x.new_empty(1), x, "x"), P(), P("x"))(torch.ones(4))


@mistake(VarianceError, checked=(True,))
def into_a_cast_of_out(m: Setting) -> None:
    """all_gather_into: out is the result of a pcast, which aliases its argument; pass a tensor of its own"""
    m.inside(lambda x: all_gather_into(pcast(torch.empty(8, 4), "x", to="varying"), x, "x"))
