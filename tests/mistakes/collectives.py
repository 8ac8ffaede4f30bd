"""Arguments of collectives: operands, dims, sizes, permutations, groups, casts, handles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fspmd import (
    ArgumentError,
    P,
    ShapeError,
    VarianceError,
    all_gather,
    all_to_all,
    axis_index,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
)
from mistakes import Setting, mistake

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]

# --- operands -------------------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def psum_of_a_string(m: Setting) -> None:
    """psum takes tensors and numbers
    * x is the string 'loss'
    """
    m.inside(lambda x: psum("loss", "x"))


@mistake(ArgumentError)
def psum_of_an_array(m: Setting) -> None:
    """psum takes tensors and numbers
    * x is a numpy array of shape (3,)
    """
    m.inside(lambda x: psum(np.ones(3), "x"))


@mistake(ArgumentError)
def psum_of_several_wrong_leaves(m: Setting) -> None:
    """psum takes tensors and numbers
    * x['b'] is the string 'text'
    * x['c'][0] is a numpy array of shape (3,)
    * x['c'][2] is the set {1, 2}
    """
    m.inside(lambda x: psum({"a": x, "b": "text", "c": [np.ones(3), x, {1, 2}]}, "x"))


@mistake(ArgumentError)
def gather_of_a_handle(m: Setting) -> None:
    """all_gather takes tensors and numbers
    * x is the handle of a collective; take its value: handle.wait()
    """
    m.inside(lambda x: all_gather(psum(x, "x", wait=False), "x"))


@mistake(ArgumentError)
def pmax_of_complex(m: Setting) -> None:
    """pmax of c64: complex numbers have no order; take the real part or abs first"""
    m.inside(lambda x: pmax(x + 1j, "x"))


# --- dims and sizes -------------------------------------------------------------------------------------------------


@mistake(ShapeError)
def gather_dim_out_of_range(m: Setting) -> None:
    """all_gather got axis=2, but it must be from -2 to 1"""
    m.inside(lambda x: all_gather(x, "x", axis=2, tiled=True))


@mistake(ArgumentError)
def gather_dim_is_a_string(m: Setting) -> None:
    """all_gather got the string 'x' for axis; expected an int"""
    m.inside(lambda x: all_gather(x, "x", axis="x"))


@mistake(ArgumentError)
def gather_dim_is_a_bool(m: Setting) -> None:
    """all_gather got the bool True for axis; expected an int"""
    m.inside(lambda x: all_gather(x, "x", axis=True))


@mistake(ShapeError)
def gather_of_a_scalar_tiled(m: Setting) -> None:
    """all_gather got axis=0, but the value is a scalar and has no dims"""
    m.inside(lambda x: all_gather(x.sum(), "x", tiled=True))


@mistake(ShapeError)
def gather_of_several_wrong_leaves(m: Setting) -> None:
    """all_gather: leaves that do not fit
    * x['b']: all_gather got axis=1, but it must be from -1 to 0
    * x['s']: all_gather got axis=1, but the value is a scalar and has no dims
    """
    m.inside(lambda x: all_gather({"w": x, "b": x[0], "s": x.sum()}, "x", axis=1, tiled=True))


@mistake(ArgumentError)
def gather_to_nowhere(m: Setting) -> None:
    """all_gather got to='invariant'; expected one of 'varying', 'invarying', 'reduced'"""
    m.inside(lambda x: all_gather(x, "x", to="invariant"))


@mistake(ArgumentError)
def gather_size_without_tiled(m: Setting) -> None:
    """all_gather got size=8 without tiled=True; uneven blocks are joined, not stacked"""
    m.inside(lambda x: all_gather(x, "x", size=8))


@mistake(ArgumentError)
def gather_size_is_a_float(m: Setting) -> None:
    """all_gather got the float 8.0 for size; expected an int"""
    m.inside(lambda x: all_gather(x, "x", tiled=True, size=8.0))


@mistake(ShapeError)
def gather_size_negative(m: Setting) -> None:
    """all_gather got size=-8; a global size is not negative"""
    m.inside(lambda x: all_gather(x, "x", tiled=True, size=-8))


@mistake(ShapeError)
def gather_size_wrong(m: Setting) -> None:
    """all_gather over 'x' got size=12, which makes blocks of 3, 3, 3, 3: rank 0 at x=0 should have one of shape (3, \
    4), but has (2, 4); pass size=8
    """
    m.inside(lambda x: all_gather(x, "x", tiled=True, size=12))


@mistake(ShapeError)
def gather_size_wrong_for_uneven_blocks(m: Setting) -> None:
    """all_gather over 'x' got size=6, which makes blocks of 2, 2, 2, 0: rank 2 at x=2 should have one of shape \
    (2,), but has (1,); pass size=5
    """
    m.map(lambda x: all_gather(x, "x", tiled=True, size=6), P("x"), P("x"))(torch.arange(5))


@mistake(ShapeError)
def gather_of_uneven_blocks_without_size(m: Setting) -> None:
    """all_gather over 'x': rank 2 at x=2 has i64 of shape (1,), but rank 0 at x=0 has i64 of shape (2,); for uneven \
    blocks pass tiled=True and size=5, the global size
    """
    m.map(lambda x: all_gather(x, "x", tiled=True), P("x"), P("x"))(torch.arange(5))


@mistake(ShapeError)
def sum_of_uneven_blocks(m: Setting) -> None:
    """psum over 'x': rank 2 at x=2 has i64 of shape (1,), but rank 0 at x=0 has i64 of shape (2,); all ranks must \
    pass the same shape: pad the blocks to one size first
    """
    m.map(lambda x: psum(x, "x"), P("x"), P())(torch.arange(5))


@mistake(ShapeError, checked=(True,))
def sum_of_selected_rows(m: Setting) -> None:
    """psum over 'x': rank 2 at x=2 has f32 of shape (0, 4), but rank 0 at x=0 has f32 of shape (1, 4); all ranks \
    must pass the same shape: pad the blocks to one size first
    """
    m.inside(lambda x: psum(x[x[:, 0] % 3 == 0], "x"))


@mistake(ShapeError)
def uneven_blocks_in_a_tree(m: Setting) -> None:
    """ppermute over 'x': rank 2 at x=2 has i64 of shape (1,), but rank 0 at x=0 has i64 of shape (2,); all ranks \
    must pass the same shape: pad the blocks to one size first
    """

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return ppermute({"even": y, "uneven": x}, "x", RING)

    m.map(f, P("x"), P("x"))(torch.arange(5), torch.arange(4))


@mistake(ShapeError)
def scatter_does_not_divide(m: Setting) -> None:
    """psum_scatter of f32[6,4]: dim 0 does not divide into 4 equal blocks; for uneven blocks pass size=6"""
    m.map(lambda x: psum_scatter(x, "x", tiled=True), P(), P("x"))(torch.ones(6, 4))


@mistake(ShapeError)
def scatter_not_tiled(m: Setting) -> None:
    """psum_scatter of f32[8,4] without tiled=True: dim 0 is 8, but must be 4, the number of ranks; pass tiled=True \
    to split it into 4 blocks
    """
    m.map(lambda x: psum_scatter(x, "x"), P(), P("x"))(torch.ones(8, 4))


@mistake(ShapeError)
def scatter_size_wrong(m: Setting) -> None:
    """psum_scatter of f32[6,4] got size=5, but dim 0 is 6; pass that"""
    m.map(lambda x: psum_scatter(x, "x", tiled=True, size=5), P(), P("x"))(torch.ones(6, 4))


@mistake(ShapeError)
def scatter_of_a_scalar(m: Setting) -> None:
    """psum_scatter got scatter_dimension=0, but the value is a scalar and has no dims"""
    m.inside(lambda x: psum_scatter(x.sum(), "x"))


@mistake(ShapeError)
def scatter_of_several_wrong_leaves(m: Setting) -> None:
    """psum_scatter: leaves that do not fit
    * x['b']: psum_scatter of f32[6]: dim 0 does not divide into 4 equal blocks; for uneven blocks pass size=6
    * x['c']: psum_scatter of f32[7,2]: dim 0 does not divide into 4 equal blocks; for uneven blocks pass size=7
    """

    def f(x: torch.Tensor) -> Any:
        return psum_scatter({"a": x, "b": torch.ones(6), "c": torch.ones(7, 2)}, "x", tiled=True)

    m.map(f, P(), P("x"))(torch.ones(8, 4))


@mistake(ShapeError)
def exchange_does_not_divide(m: Setting) -> None:
    """all_to_all of f32[2,6]{V:x}: dim 1 does not divide into 4 equal blocks; for uneven blocks pass size=, the \
    global size of concat_axis
    """
    m.map(lambda x: all_to_all(x, "x", 1, 0, tiled=True), P("x"), P(None, "x"))(torch.ones(8, 6))


@mistake(ShapeError)
def exchange_not_tiled(m: Setting) -> None:
    """all_to_all of f32[2,4]{V:x} without tiled=True: dim 0 is 2, but must be 4, the number of ranks; pass \
    tiled=True to split it into 4 blocks
    """
    m.inside(lambda x: all_to_all(x, "x", 0, 0))


@mistake(ShapeError)
def exchange_dim_out_of_range(m: Setting) -> None:
    """all_to_all got concat_axis=3, but it must be from -2 to 1"""
    m.inside(lambda x: all_to_all(x, "x", 1, 3, tiled=True))


@mistake(ShapeError)
def exchange_uneven_in_place(m: Setting) -> None:
    """all_to_all of uneven blocks got 0 for both split_axis and concat_axis; name two dims"""
    m.map(lambda x: all_to_all(x, "x", 0, 0, tiled=True, size=5), P("x"), P("x"))(torch.ones(5, 4))


@mistake(ShapeError)
def swap_of_a_wrong_size(m: Setting) -> None:
    """pswapaxes of f32[2,4]{V:x} without tiled=True: dim 0 is 2, but must be 4, the number of ranks; pass \
    tiled=True to split it into 4 blocks
    """
    m.inside(lambda x: pswapaxes(x, "x", 0))


# --- permutations and positions -------------------------------------------------------------------------------------


@mistake(ArgumentError)
def perm_is_a_dict(m: Setting) -> None:
    """ppermute got the dict {0: 1, 1: 0} for perm; write its pairs: perm=[(0, 1), (1, 0)]"""
    m.inside(lambda x: ppermute(x, "x", {0: 1, 1: 0}))


@mistake(ArgumentError)
def perm_is_flat(m: Setting) -> None:
    """ppermute got the list [1, 2, 3, 0] for perm; expected (source, destination) pairs, such as [(0, 1), (1, 2), \
    (2, 3), (3, 0)]
    """
    m.inside(lambda x: ppermute(x, "x", [1, 2, 3, 0]))


@mistake(ArgumentError)
def perm_holds_a_varying_index(m: Setting) -> None:
    """ppermute got a tensor of shape () for a position in perm; expected an int: Python numbers are the same on all \
    ranks
    """
    m.inside(lambda x: ppermute(x, "x", [(axis_index("x"), axis_index("x") + 1)]))


@mistake(ShapeError)
def perm_outside(m: Setting) -> None:
    """ppermute got perm=[(0, 1), (1, 2), (2, 3), (3, 4)], but positions are from 0 to 3, not 4"""
    m.inside(lambda x: ppermute(x, "x", [(i, i + 1) for i in range(4)]))


@mistake(ShapeError)
def perm_with_a_destination_twice(m: Setting) -> None:
    """ppermute got perm=[(0, 1), (2, 1)], in which 1 is a destination more than once; each rank sends at most once \
    and receives at most once
    """
    m.inside(lambda x: ppermute(x, "x", [(0, 1), (2, 1)]))


@mistake(ShapeError)
def perm_with_a_source_twice(m: Setting) -> None:
    """ppermute got perm=[(0, 1), (0, 2)], in which 0 is a source more than once; each rank sends at most once and \
    receives at most once
    """
    m.inside(lambda x: ppermute(x, "x", [(0, 1), (0, 2)]))


@mistake(ArgumentError)
def shuffle_of_pairs(m: Setting) -> None:
    """pshuffle got the list [(0, 1), (1, 2), (2, 3), (3, 0)] for perm; expected the source of each position, such \
    as [0, 1, 2, 3]; for pairs use ppermute
    """
    m.inside(lambda x: pshuffle(x, "x", RING))


@mistake(ShapeError)
def shuffle_too_short(m: Setting) -> None:
    """pshuffle got perm=[1, 0], but it must name each position from 0 to 3 once; to send to some ranks only, use \
    ppermute
    """
    m.inside(lambda x: pshuffle(x, "x", [1, 0]))


@mistake(ArgumentError)
def shuffle_by_a_number(m: Setting) -> None:
    """pshuffle got the int 1 for perm; expected the source of each position, such as [0, 1, 2, 3]"""
    m.inside(lambda x: pshuffle(x, "x", 1))


@mistake(ShapeError)
def broadcast_from_outside(m: Setting) -> None:
    """pbroadcast got source=4, but positions along 'x' are from 0 to 3"""
    m.inside(lambda x: pbroadcast(x, "x", 4))


@mistake(ArgumentError)
def broadcast_from_a_float(m: Setting) -> None:
    """pbroadcast got the float 0.0 for source; expected a position along 'x', an int"""
    m.inside(lambda x: pbroadcast(x, "x", 0.0))


@mistake(ArgumentError)
def broadcast_from_a_varying_position(m: Setting) -> None:
    """pbroadcast got a tensor of shape () for source; expected a position along 'x', an int: Python numbers are the \
    same on all ranks
    """
    m.inside(lambda x: pbroadcast(x, "x", axis_index("x")))


# --- groups ---------------------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def groups_are_flat(m: Setting) -> None:
    """psum got the list [0, 1, 2, 3] for axis_index_groups; expected lists of positions, such as [[0, 1], [2, 3]]"""
    m.inside(lambda x: psum(x, "x", axis_index_groups=[0, 1, 2, 3]))


@mistake(ShapeError)
def groups_leave_one_out(m: Setting) -> None:
    """psum got axis_index_groups=[[0, 1], [2]], but together they must name each position from 0 to 3 once, such as \
    [[0, 1], [2, 3]]
    """
    m.inside(lambda x: psum(x, "x", axis_index_groups=[[0, 1], [2]]))


@mistake(ShapeError)
def groups_of_different_sizes(m: Setting) -> None:
    """all_gather got axis_index_groups=[[0, 1, 2], [3]], but here the groups must be of one size"""
    m.inside(lambda x: all_gather(x, "x", axis_index_groups=[[0, 1, 2], [3]]))


@mistake(ArgumentError)
def groups_gathered_invarying(m: Setting) -> None:
    """all_gather got axis_index_groups with to='invarying', but groups gather different values; write to='varying'"""
    m.inside(lambda x: all_gather(x, "x", axis_index_groups=[[0, 1], [2, 3]], to="invarying"))


@mistake(ArgumentError)
def groups_and_size(m: Setting) -> None:
    """all_gather got both size=8 and axis_index_groups; leave out one of them"""
    m.inside(lambda x: all_gather(x, "x", axis_index_groups=[[0, 1], [2, 3]], tiled=True, size=8))


# --- types ----------------------------------------------------------------------------------------------------------


@mistake(VarianceError, checked=(True,))
def psum_of_a_mixed_tuple(m: Setting) -> None:
    """psum of f32[4]{V:x} over ('x', 'y'): it is varying over 'x', invariant over 'y', and one call takes one type; \
    name only 'x', or cast it first: pcast(x, 'y', to='varying')
    """
    m.map(lambda x: psum(x, ("x", "y")), P("x"), P(), mesh=m.grid)(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def pmean_of_a_mixed_tree(m: Setting) -> None:
    """pmean: leaves that do not fit
      * x['one']: pmean of f32[4]{V:x} over ('x', 'y'): it is varying over 'x', invariant over 'y', and one call takes \
    one type; name only 'x', or cast it first: pcast(x, 'y', to='varying')
      * x['other']: pmean of f32[4]{V:x} over ('x', 'y'): it is varying over 'x', invariant over 'y', and one call \
    takes one type; name only 'x', or cast it first: pcast(x, 'y', to='varying')
    """

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return pmean({"both": x, "one": y, "other": y}, ("x", "y"))

    m.map(f, (P("x", "y"), P("x")), P(), mesh=m.grid)(torch.ones(8, 8), torch.ones(8))


@mistake(VarianceError, checked=(True,))
def psum_of_reduced(m: Setting) -> None:
    """psum of f32[8]{R:x} over 'x': it is reduced, equal on all ranks; use it as it is, or to add up equal copies \
    psum(pcast(x, 'x', to='varying'), ...)
    """
    m.map(lambda x: psum(x, "x"), P(reduced={"x"}), P())(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def gather_of_unreduced(m: Setting) -> None:
    """all_gather of f32[8]{U:x} over 'x': it is unreduced over 'x'; add it up first: psum or psum_scatter"""
    m.map(lambda x: all_gather(x, "x"), P(unreduced={"x"}), P())(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def gather_reduced_of_invariant(m: Setting) -> None:
    """all_gather of f32[8] over 'x' to='reduced': the value is equal on all ranks, so there is nothing to gather; \
    write pcast(x, 'x', to='reduced')
    """
    m.map(lambda x: all_gather(x, "x", to="reduced"), P(), P(reduced={"x"}))(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def scatter_of_reduced(m: Setting) -> None:
    """psum_scatter of f32[8]{R:x} over 'x': it is reduced, equal on all ranks; to add up equal copies, \
    psum_scatter(pcast(x, 'x', to='varying'), ...)
    """
    m.map(lambda x: psum_scatter(x, "x", tiled=True), P(reduced={"x"}), P("x"))(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def pmax_of_unreduced(m: Setting) -> None:
    """pmax of f32[8]{U:x} over 'x': it is unreduced over 'x'; add it up first: psum or psum_scatter"""
    m.map(lambda x: pmax(x, "x"), P(unreduced={"x"}), P())(torch.ones(8))


@mistake(ArgumentError)
def cast_to_nowhere(m: Setting) -> None:
    """pcast got to='invariant'; expected one of 'reduced', 'unreduced', 'varying'; to make a value equal on all \
    ranks use psum or all_gather
    """
    m.inside(lambda x: pcast(x, "x", to="invariant"))


@mistake(VarianceError, checked=(True,))
def cast_of_varying_to_varying(m: Setting) -> None:
    """pcast of f32[2,4]{V:x} over 'x' to 'varying': the value has that type already; use it as it is"""
    m.inside(lambda x: pcast(x, "x", to="varying"))


@mistake(VarianceError, checked=(True,))
def cast_of_varying_to_reduced(m: Setting) -> None:
    """pcast of f32[2,4]{V:x} over 'x' to 'reduced': a varying value casts only to 'unreduced'"""
    m.inside(lambda x: pcast(x, "x", to="reduced"))


@mistake(VarianceError, checked=(True,))
def cast_of_unreduced(m: Setting) -> None:
    """pcast of f32[8]{U:x} over 'x' to 'varying': the value is a pending sum; settle it: psum(x, 'x') or \
    psum_scatter(x, 'x', tiled=True)
    """
    m.map(lambda x: pcast(x, "x", to="varying"), P(unreduced={"x"}), P())(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def product_of_pending_sums(m: Setting) -> None:
    """mul(f32[8]{U:x}, f32[8]{U:x}): a value unreduced over 'x' is a sum still pending, which only linear ops keep \
    so; add it up first: psum(x, 'x'), or psum_scatter
    """
    m.map(lambda x: x * x, P(unreduced={"x"}), P(unreduced={"x"}))(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def relu_of_a_pending_sum(m: Setting) -> None:
    """relu(f32[8]{U:x}): a value unreduced over 'x' is a sum still pending, which only linear ops keep so; add it \
    up first: psum(x, 'x'), or psum_scatter
    """
    m.map(torch.relu, P(unreduced={"x"}), P(unreduced={"x"}))(torch.ones(8))


@mistake(VarianceError, checked=(True,))
def pending_sum_plus_an_invariant(m: Setting) -> None:
    """add(f32[8]{U:x}, f32[8]): a value unreduced over 'x' is a sum still pending, which only linear ops keep so; \
    add it up first: psum(x, 'x'), or psum_scatter
    """
    m.map(lambda x: x + torch.ones(8), P(unreduced={"x"}), P(unreduced={"x"}))(torch.ones(8))


# --- handles --------------------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def handle_in_arithmetic(m: Setting) -> None:
    """+ was used on the handle of a collective with wait=False; use its value: handle.wait()"""
    m.inside(lambda x: psum(x, "x", wait=False) + 1)


@mistake(ArgumentError)
def handle_in_a_function(m: Setting) -> None:
    """relu() was used on the handle of a collective with wait=False; use its value: handle.wait()"""
    m.inside(lambda x: torch.relu(psum(x, "x", wait=False)))


@mistake(ArgumentError)
def handle_as_a_tensor(m: Setting) -> None:
    """.sum was used on the handle of a collective with wait=False; use its value: handle.wait()"""
    m.inside(lambda x: psum(x, "x", wait=False).sum())


@mistake(ArgumentError)
def handle_returned(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
    * result is a collective under way; return handle.wait()
    """
    m.inside(lambda x: psum(x, "x", wait=False))


@mistake(ArgumentError)
def wait_is_no_bool(m: Setting) -> None:
    """all_gather got the string 'later' for wait; expected True, or False for a handle"""
    m.inside(lambda x: all_gather(x, "x", wait="later"))
