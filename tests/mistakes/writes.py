"""In-place writes that would make an invariant value differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd import P, VarianceError, axis_index, pcast
from mistakes import Setting, mistake


def on(m: Setting, write: Callable[[Tensor, Tensor], Any]) -> None:
    """Run ``write(w, x)`` with ``w`` invariant, 2 by 4, and ``x`` varying, 2 by 4."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        write(w, x)
        return w

    m.map(f, (P(), P("x")), P())(torch.ones(2, 4), torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def add_method(m: Setting) -> None:
    """add_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w.add_(x))


@mistake(VarianceError, checked=(False,), transports=("simulation",))
def add_method_unchecked(m: Setting) -> None:
    """add_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w.add_(x))


@mistake(VarianceError, checked=(True,))
def augmented_assignment(m: Setting) -> None:
    """mul_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """

    def f(w: Tensor, x: Tensor) -> Tensor:
        w *= x
        return w

    m.map(f, (P(), P("x")), P("x"))(torch.ones(2, 4), torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def accumulator(m: Setting) -> None:
    """add_() would write a value that varies over 'x' into f32[4], which is equal on all ranks there; compute a new \
    tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """

    def f(x: Tensor) -> Tensor:
        total = torch.zeros(4)
        for row in x:
            total += row
        return total

    m.map(f, P("x"), P("x"))(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def set_item(m: Setting) -> None:
    """x[...] = y would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute \
    a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """

    def write(w: Tensor, x: Tensor) -> None:
        w[0] = x[0]

    on(m, write)


@mistake(VarianceError, checked=(True,))
def set_item_at_a_varying_index(m: Setting) -> None:
    """x[...] = y would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute \
    a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """

    def write(w: Tensor, x: Tensor) -> None:
        w[axis_index("x") % 2] = 0.0

    on(m, write)


@mistake(VarianceError, checked=(True,))
def set_item_by_a_varying_mask(m: Setting) -> None:
    """x[...] = y would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute \
    a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """

    def write(w: Tensor, x: Tensor) -> None:
        w[x > 0] = 0.0

    on(m, write)


@mistake(VarianceError, checked=(True,))
def copy_method(m: Setting) -> None:
    """copy_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w.copy_(x))


@mistake(VarianceError, checked=(True,))
def through_a_view(m: Setting) -> None:
    """copy_() would write a value that varies over 'x' into f32[4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w[0].copy_(x[0]))


@mistake(VarianceError, checked=(True,))
def scatter_method(m: Setting) -> None:
    """scatter_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute \
    a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w.scatter_(0, x.long(), 1.0))


@mistake(VarianceError, checked=(True,))
def index_put_method(m: Setting) -> None:
    """index_put_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; \
    compute a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w.index_put_((torch.tensor([0]),), x[0]))


@mistake(VarianceError, checked=(True,))
def clamp_method(m: Setting) -> None:
    """clamp_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: w.clamp_(max=x))


@mistake(VarianceError, checked=(True,))
def out_argument(m: Setting) -> None:
    """add() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: torch.add(x, 1, out=w))


@mistake(VarianceError, checked=(True,))
def op_overload(m: Setting) -> None:
    """mul_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute a \
    new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, torch.ops.aten.mul_.Tensor)


@mistake(VarianceError, checked=(True,))
def foreach(m: Setting) -> None:
    """_foreach_add_() would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; \
    compute a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """
    on(m, lambda w, x: torch._foreach_add_([w, w.clone()], [x, x]))


@mistake(VarianceError, checked=(True,))
def running_statistics(m: Setting) -> None:
    """batch_norm() would write a value that varies over 'x' into f32[4], which is equal on all ranks there; its \
    running statistics would be each rank's own: keep none (track_running_stats=False), or compute mean and variance \
    with pmean
    """
    mean, variance = torch.zeros(4), torch.ones(4)

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, variance, training=True)

    m.map(f, P("x"), P("x"))(torch.ones(8, 4))


@mistake(VarianceError, checked=(True,))
def batch_norm_module(m: Setting) -> None:
    """batch_norm() would write a value that varies over 'x' into f32[4], which is equal on all ranks there; its \
    running statistics would be each rank's own: keep none (track_running_stats=False), or compute mean and variance \
    with pmean
    """
    m.inside(torch.nn.BatchNorm1d(4))


@mistake(VarianceError, checked=(True,))
def instance_norm(m: Setting) -> None:
    """instance_norm() would write a value that varies over 'x' into f32[2], which is equal on all ranks there; its \
    running statistics would be each rank's own: keep none (track_running_stats=False), or compute mean and variance \
    with pmean
    """
    mean, variance = torch.zeros(2), torch.ones(2)

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.instance_norm(x[None], mean, variance)

    m.map(f, P("x"), P(None, "x"))(torch.ones(8, 4, 4))


@mistake(VarianceError, checked=(True,))
def gradient_attribute(m: Setting) -> None:
    """x.grad = y would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; the \
    gradient of a value that is equal on all ranks is a sum over them: psum it first
    """

    def write(w: Tensor, x: Tensor) -> None:
        w.grad = x

    on(m, write)


@mistake(VarianceError, checked=(True,))
def data_attribute(m: Setting) -> None:
    """x.data = y would write a value that varies over 'x' into f32[2,4], which is equal on all ranks there; compute \
    a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)
    """

    def write(w: Tensor, x: Tensor) -> None:
        w.data = x

    on(m, write)


@mistake(VarianceError, checked=(True,))
def into_a_cast(m: Setting) -> None:
    """add_() would write into the result of pcast, which shares its memory with its argument; write into a copy: \
    pcast(...).clone()
    """
    on(m, lambda w, x: pcast(w, "x", to="varying").add_(x))


@mistake(VarianceError, checked=(True,))
def view_of_a_cast(m: Setting) -> None:
    """zero_() would write into the result of pcast, which shares its memory with its argument; write into a copy: \
    pcast(...).clone()
    """
    on(m, lambda w, x: pcast(w, "x", to="varying")[0].t().zero_())
