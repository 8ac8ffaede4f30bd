"""Python values asked of tensors that differ from rank to rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fspmd import P, VarianceError, axis_index, pcast
from mistakes import Setting, mistake

SIMULATED = ("simulation",)  # without types, a real process cannot tell that its value differs from the others'


@mistake(VarianceError, checked=(True,))
def if_statement(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """

    def f(x: Tensor) -> Tensor:
        if x.sum() > 60:
            return x
        return -x

    m.map(f, P("x"), P("x"))(torch.arange(32.0).view(8, 4))


@mistake(VarianceError, checked=(False,), transports=SIMULATED)
def if_statement_unchecked(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    if_statement(m)


@mistake(VarianceError, checked=(True,))
def while_loop(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """

    def f(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x

    m.map(f, P("x"), P("x"))(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def if_on_the_rank(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """

    def f(x: Tensor) -> Tensor:
        return x if axis_index("x") == 0 else -x

    m.map(f, P("x"), P("x"))(torch.ones(8, 4))


@mistake(VarianceError, checked=(False,), transports=SIMULATED)
def if_on_the_rank_unchecked(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    if_on_the_rank(m)


@mistake(VarianceError, checked=(True,))
def value_and_value(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but f32[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    m.inside(lambda x: x.sum() and x.mean())


@mistake(VarianceError, checked=(True,))
def not_value(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but f32[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    m.inside(lambda x: not x.sum())


@mistake(VarianceError, checked=(True,))
def assert_statement(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """

    def f(x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        return x

    m.map(f, P("x"), P("x"))(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def max_of_python(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    m.inside(lambda x: max(x[0, 0], x[1, 1]))


@mistake(VarianceError, checked=(True,))
def invariant_cast_to_varying(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but f32[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    m.map(lambda w: w if bool(pcast(w, "x", to="varying").sum()) else -w, P(), P())(torch.ones(4))


@mistake(VarianceError, checked=(True,))
def to_int(m: Setting) -> None:
    """int() needs one Python value for all ranks, but f32[] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x * int(x.sum()))


@mistake(VarianceError, checked=(True,))
def to_float(m: Setting) -> None:
    """float() needs one Python value for all ranks, but f32[] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x * float(x.mean()))


@mistake(VarianceError, checked=(True,))
def to_complex(m: Setting) -> None:
    """complex() needs one Python value for all ranks, but f32[] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x * complex(x.mean()))


@mistake(VarianceError, checked=(True,))
def item(m: Setting) -> None:
    """x.item() needs one Python value for all ranks, but f32[] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x * x.mean().item())


@mistake(VarianceError, checked=(False,), transports=SIMULATED)
def item_unchecked(m: Setting) -> None:
    """x.item() needs one Python value for all ranks, but f32[] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    item(m)


@mistake(VarianceError, checked=(True,))
def to_list(m: Setting) -> None:
    """x.tolist() needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x * len(x.tolist()))


@mistake(VarianceError, checked=(False,), transports=SIMULATED)
def to_list_unchecked(m: Setting) -> None:
    """x.tolist() needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    to_list(m)


@mistake(VarianceError, checked=(True,))
def to_numpy(m: Setting) -> None:
    """x.numpy() needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: torch.from_numpy(x.numpy()))


@mistake(VarianceError, checked=(True,))
def to_numpy_detached(m: Setting) -> None:
    """x.numpy() needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: torch.from_numpy(x.detach().cpu().numpy()))


@mistake(VarianceError, checked=(True,))
def numpy_asarray(m: Setting) -> None:
    """numpy needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(np.asarray)


@mistake(VarianceError, checked=(True,))
def numpy_function(m: Setting) -> None:
    """numpy needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, pmax, \
    all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(np.sin)


@mistake(VarianceError, checked=(True,))
def range_of(m: Setting) -> None:
    """a Python index (in range(), of a list) needs one Python value for all ranks, but i64[] varies over 'x'; make \
    it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by \
    rank
    """
    m.inside(lambda x: [x for _ in range(axis_index("x"))])


@mistake(VarianceError, checked=(True,))
def list_index(m: Setting) -> None:
    """a Python index (in range(), of a list) needs one Python value for all ranks, but i64[] varies over 'x'; make \
    it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by \
    rank
    """
    m.inside(lambda x: [x, x, x, x][axis_index("x")])


@mistake(VarianceError, checked=(True,))
def shape_from_a_value(m: Setting) -> None:
    """torch.zeros() needs one Python value for all ranks, but i64[] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: torch.zeros(axis_index("x") + 1))


@mistake(VarianceError, checked=(True,))
def arange_to_a_value(m: Setting) -> None:
    """torch.arange() needs one Python value for all ranks, but i64[] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: torch.arange(axis_index("x")))


@mistake(VarianceError, checked=(True,))
def tensor_of_a_list(m: Setting) -> None:
    """torch.tensor() needs one Python value for all ranks, but f32[] varies over 'x'; join tensors with torch.stack \
    or torch.cat
    """
    m.inside(lambda x: torch.tensor([x.sum(), x.mean()]))


@mistake(VarianceError, checked=(True,))
def formatted(m: Setting) -> None:
    """a format such as f'{x:.3f}' needs one Python value for all ranks, but f32[] varies over 'x'; make it equal \
    first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: f"{x.mean():.3f}")


@mistake(VarianceError, checked=(True,))
def one_hot_of_unknown_width(m: Setting) -> None:
    """one_hot() needs one Python value for all ranks, but i64[2,4] varies over 'x'; pass num_classes"""
    m.inside(lambda x: torch.nn.functional.one_hot(x.long()))


@mistake(VarianceError, checked=(True,))
def equal(m: Setting) -> None:
    """torch.equal() needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first (psum, \
    pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x if torch.equal(x, torch.ones(2, 4)) else -x)


@mistake(VarianceError, checked=(True,))
def allclose(m: Setting) -> None:
    """torch.allclose() needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first \
    (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x if torch.allclose(x, x + 1) else -x)


@mistake(VarianceError, checked=(True,))
def value_in_tensor(m: Setting) -> None:
    """the operator in needs one Python value for all ranks, but f32[2,4] varies over 'x'; make it equal first \
    (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank by rank
    """
    m.inside(lambda x: x if 3.0 in x else -x)


@mistake(VarianceError, checked=(True,))
def tensor_in_list(m: Setting) -> None:
    """a branch (if, while, and, or, not, assert) needs one Python value for all ranks, but bool[] varies over 'x'; \
    make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, rank \
    by rank
    """
    y: list[Any] = [1.0, 2.0]
    m.inside(lambda x: x if x.sum() in y else -x)


@mistake(VarianceError, checked=(True,), transports=SIMULATED)
def uneven_size_as_a_number(m: Setting) -> None:
    """a size that differs from rank to rank, {2, 2, 1, 0} over 'x', was used as one Python number; the blocks are \
    uneven: use the global size, torch ops on axis_index, or rank_map
    """

    def f(x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = x + 1
        return x

    m.map(f, P("x"), P("x"))(torch.ones(5))


@mistake(VarianceError, checked=(True,), transports=SIMULATED)
def uneven_size_as_a_branch(m: Setting) -> None:
    """a size that differs from rank to rank, {True, True, False, False} over 'x', was used as one Python number; \
    the blocks are uneven: use the global size, torch ops on axis_index, or rank_map
    """
    m.map(lambda x: x if x.shape[0] > 1 else -x, P("x"), P("x"))(torch.ones(5))
