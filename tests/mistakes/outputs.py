"""Results whose type is not that of their spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd import ArgumentError, P, ShapeError, VarianceError, device_put, pcast, psum, rank_map
from mistakes import Setting, mistake

# --- kinds of tensors ------------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def sparse_result(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result is a sparse_coo tensor, which has no dense blocks, but a body returns blocks
    make it dense: x.to_dense(), x.dequantize(), x.to_tensor(0.0) or torch.nested.to_padded_tensor(x, 0.0)
    """

    def f(x: Tensor) -> Tensor:
        return torch.eye(4).to_sparse()

    m.map(f, P("x"), P())(torch.ones(8, 4))


# --- types ----------------------------------------------------------------------------------------------------------


@mistake(VarianceError, checked=(True,))
def varies_but_not_in_the_spec(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[2,4]{V:x}, varies over 'x', but its spec P() does not say so (P('x', None) would)
    make it equal on all ranks first: psum(value, 'x'), pmean(value, 'x') or all_gather(value, 'x', tiled=True, \
    to='invarying'); or name 'x' in its spec
    """

    def f(x: Tensor) -> Tensor:
        return x * 2

    m.map(f, P("x"), P())(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def local_loss(m: Setting) -> None:
    """shard_map(loss): the results do not fit out_specs
      * result, f32[]{V:x}, varies over 'x', but its spec P() does not say so
    make it equal on all ranks first: psum(value, 'x') or pmean(value, 'x'); or return value[None] with the spec P('x')
    """

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).sum()

    m.map(loss, (P(), P("x")), P())(torch.ones(4), torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def varies_over_two_axes(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[4,2]{V:x,y}, varies over 'x', 'y', but its spec P() does not say so (P(('x', 'y'), None) would)
    make it equal on all ranks first: psum(value, ('x', 'y')), pmean(value, ('x', 'y')) or all_gather(value, ('x', \
    'y'), tiled=True, to='invarying'); or name ('x', 'y') in its spec
    """

    def f(x: Tensor) -> Tensor:
        return x

    m.map(f, P("x", "y"), P(), mesh=m.grid)(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def one_axis_summed_one_left(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[4,2]{V:y}, varies over 'y', but its spec P() does not say so (P('y', None) would)
    make it equal on all ranks first: psum(value, 'y'), pmean(value, 'y') or all_gather(value, 'y', tiled=True, \
    to='invarying'); or name 'y' in its spec
    """

    def f(x: Tensor) -> Tensor:
        total: Tensor = psum(x, "x")
        return total

    m.map(f, P("x", "y"), P(), mesh=m.grid)(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def several_results(m: Setting) -> None:
    """shard_map(step): the results do not fit out_specs
      * result['aux'][0], f32[2,4]{V:x}, varies over 'x', but its spec P() does not say so (P('x', None) would)
      * result['aux'][2], f32[4]{V:x}, varies over 'x', but its spec P() does not say so (P('x') would)
      * result['loss'], f32[]{V:x}, varies over 'x', but its spec P() does not say so
    make it equal on all ranks first: psum(value, 'x'), pmean(value, 'x') or all_gather(value, 'x', tiled=True, \
    to='invarying'); or name 'x' in its spec
    make it equal on all ranks first: psum(value, 'x') or pmean(value, 'x'); or return value[None] with the spec P('x')
    """

    def step(w: Tensor, x: Tensor) -> dict[str, Any]:
        return {"loss": (w * x).sum(), "aux": [x, w, x.mean(0)]}

    m.map(step, (P(), P("x")), P())(torch.ones(4), torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def pending_sum(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[2,4]{U:x}, is unreduced over 'x', but its spec P() does not say so
    add it up: psum(value, 'x'), or psum_scatter with tiled=True; or write unreduced={'x'} in its spec
    """

    def f(x: Tensor) -> Tensor:
        pending: Tensor = pcast(x, "x", to="unreduced")
        return pending

    m.map(f, P("x"), P())(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def reduced_result(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[8,4]{R:x}, is reduced over 'x', but its spec P() does not say so
    cast it: pcast(value, 'x', to='varying'), a copy per rank; or write reduced={'x'} in its spec
    """

    def f(x: Tensor) -> Tensor:
        return x * 2

    m.map(f, P(reduced={"x"}), P())(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def unreduced_asked_of_an_invariant(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[8,4], is not unreduced over 'x', but its spec P(unreduced={'x'}) says so
    leave unreduced= out of its spec; only a varying value can be cast to unreduced
    """

    def f(x: Tensor) -> Tensor:
        return x * 2

    m.map(f, P(), P(unreduced={"x"}))(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def reduced_asked_of_a_varying(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[2,4]{V:x}, is not reduced over 'x', but its spec P(reduced={'x'}) says so
    gather it: all_gather(value, 'x', tiled=True, to='reduced'); or leave reduced= out of its spec
    """

    def f(x: Tensor) -> Tensor:
        return x * 2

    m.map(f, P("x"), P(reduced={"x"}))(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def varies_in_a_nested_body(m: Setting) -> None:
    """shard_map(inner): the results do not fit out_specs
      * result, f32[2,4]{V:x,y}, varies over 'y', but its spec P() does not say so (P('y', None) would)
    make it equal on all ranks first: psum(value, 'y'), pmean(value, 'y') or all_gather(value, 'y', tiled=True, \
    to='invarying'); or name 'y' in its spec
    """

    def inner(x: Tensor) -> Tensor:
        return x

    def outer(x: Tensor) -> Tensor:
        return m.map(inner, P("y"), P(), mesh=m.grid)(x)

    m.map(outer, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(torch.ones(8, 4))


# --- shapes ---------------------------------------------------------------------------------------------------------


@mistake(ShapeError)
def blocks_not_as_chunk_cuts_them(m: Setting) -> None:
    """shard_map(double): the results do not fit out_specs
      * result: rank 0 at x=0 has a block of shape (4,), but torch.chunk of the whole, i64[10@x] on mesh(x=4), gives \
    it (3,); pad the blocks to one shape, or put them together first: all_gather
    """

    def double(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    m.map(double, P("x"), P("x"))(torch.arange(5))


@mistake(ShapeError)
def blocks_of_a_rank_map(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
      * result: rank 0 at x=0 has a block of shape (1,), but torch.chunk of the whole, f32[10@x] on mesh(x=4), gives \
    it (3,); pad the blocks to one shape, or put them together first: all_gather
    """

    def count(i: Tensor) -> Tensor:
        return torch.ones(int(i) + 1)

    m.map(lambda i: rank_map(count, i), P("x"), P("x"))(torch.arange(4))


@mistake(ShapeError, transports=("simulation",))
def blocks_of_different_ndim(m: Setting) -> None:
    """the blocks of one value have different numbers of dims on different ranks: [(2,), (2, 2), (2,), (2, 2)]; give \
    them one number of dims, for example squeeze no dim whose size differs from rank to rank
    """

    def grow(i: Tensor) -> Tensor:
        return torch.ones((2,) * (1 + int(i) % 2))

    m.map(lambda i: rank_map(grow, i), P("x"), P("x"))(torch.arange(4))


@mistake(ShapeError, transports=("gloo",))
def blocks_of_different_ndim_on_processes(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
      * result: rank 1 at x=1 has f32 of shape (2, 2), but the first rank has f32 of shape (2,); all ranks must hold \
    one dtype and one number of dims
    """
    blocks_of_different_ndim(m)


@mistake(ArgumentError, transports=("simulation",))
def blocks_of_different_dtype(m: Setting) -> None:
    """rank_map: the function returned torch.float32 on the first rank, but torch.float64 on rank 2; return one \
    dtype on all ranks
    """

    def cast(i: Tensor) -> Tensor:
        return torch.ones(2, dtype=torch.float64 if int(i) == 2 else torch.float32)

    m.map(lambda i: rank_map(cast, i), P("x"), P("x"))(torch.arange(4))


@mistake(ShapeError, transports=("gloo",))
def blocks_of_different_dtype_on_processes(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
      * result: rank 2 at x=2 has f64 of shape (2,), but the first rank has f32 of shape (2,); all ranks must hold one \
    dtype and one number of dims
    """
    blocks_of_different_dtype(m)


@mistake(VarianceError, checked=(True,), transports=("simulation",))
def block_that_was_no_argument(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result, f32[4], has another value on each rank over 'x', which its type does not say
    it comes from a block that the body was not given: x.local of a Sharded, or a value kept from another body; pass \
    it as an argument, the Sharded with its spec in in_specs
    """
    x = device_put(torch.ones(8, 4), P("x"), mesh=m.line)

    def f(w: Tensor) -> Tensor:
        return x.local.sum(0) * w

    m.map(f, P(), P())(torch.ones(4))
