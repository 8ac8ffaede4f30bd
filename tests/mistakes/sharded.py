"""Values out of their place: a Sharded in the hands of what knows only tensors, a block outside its body."""

from __future__ import annotations

import torch

from fspmd import ArgumentError, MeshError, P, Sharded, device_put
from mistakes import Setting, mistake


def rows(m: Setting) -> Sharded:
    """Blocks of two along x."""
    x: Sharded = device_put(torch.arange(8.0), P("x"), mesh=m.line)
    return x


@mistake(ArgumentError)
def torch_vmap_over_a_mapped_function(m: Setting) -> None:
    """aten.expand.default got Sharded f32[8@x] on mesh(x=4), whose block a transform of torch has wrapped; instead of \
    torch.vmap and torch.func use fspmd.vmap, fspmd.grad ..., or return device_get(x) from the function
    """
    torch.vmap(m.map(lambda x: x * 2, P("x"), P("x")))(torch.ones(3, 8))


@mistake(ArgumentError)
def torch_jacobian_of_a_mapped_function(m: Setting) -> None:
    """aten.expand.default got Sharded f32[8@x] on mesh(x=4), whose block a transform of torch has wrapped; instead of \
    torch.vmap and torch.func use fspmd.vmap, fspmd.grad ..., or return device_get(x) from the function
    """
    torch.func.jacfwd(m.map(lambda x: x * 2, P("x"), P("x")))(torch.ones(8))


@mistake(MeshError, transports=("simulation",))
def block_of_another_body(m: Setting) -> None:
    """blocks of a body on mesh(x=2, y=2) were used together with blocks on mesh(x=4); return them from their own \
    body, and pass the result to the other as an argument
    """
    kept: list[torch.Tensor] = []
    m.inside(lambda x: (kept.append(x), x)[1])
    m.map(lambda x: x + kept[0], P("x"), P("x"), mesh=m.grid)(torch.ones(8, 4))


@mistake(ArgumentError, checked=(True,))
def format_of_a_vector(m: Setting) -> None:
    """the format '.2f' was asked of Sharded f32[8@x] on mesh(x=4); it takes a scalar: reduce it, or format its repr"""
    f"{rows(m):.2f}"


@mistake(ArgumentError, checked=(True,), transports=("gloo",))
def format_of_a_pending_sum(m: Setting) -> None:
    """the format '.2f' was asked of Sharded f32[]{U:x} on mesh(x=4), whose number is known after a collective; all \
    ranks must take part, and often one alone prints: write number = x.item() on all of them, and format that
    """
    f"{rows(m).sum():.2f}"
