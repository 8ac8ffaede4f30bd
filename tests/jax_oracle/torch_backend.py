"""The argument ``m`` of a program, made of fspmd, and the programs as functions of global tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fspmd
from jax_oracle.programs import Program, Spec, canonical_type, leaves, map_specs, weights

DTYPES = {
    "float64": torch.float64,
    "int64": torch.int64,
    "index": torch.int64,
    "bool": torch.bool,
    "complex128": torch.complex128,
}


def to_fspmd(spec: Spec) -> fspmd.P:
    """The same spec in fspmd's words."""
    return fspmd.P(*spec.parts, unreduced=set(spec.unreduced), reduced=set(spec.reduced))


class FspmdBackend:
    """Collectives and transforms are fspmd's own; the array functions are torch's under the names programs use."""

    sin, cos, exp, log, tanh, sqrt = map(
        staticmethod, (torch.sin, torch.cos, torch.exp, torch.log, torch.tanh, torch.sqrt)
    )
    matmul, where, reshape, transpose = map(staticmethod, (torch.matmul, torch.where, torch.reshape, torch.permute))
    zeros_like, arange, concat, stack = map(staticmethod, (torch.zeros_like, torch.arange, torch.concat, torch.stack))

    abs, argmax = map(staticmethod, (torch.abs, torch.argmax))

    def __init__(self, program: Program) -> None:
        self.mesh = fspmd.make_mesh(program.mesh_shape, program.axis_names)
        self.types: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(fspmd, name.removesuffix("_with_gradient"))

    def tap(self, label: str, x: Any) -> Any:
        """Record the type of a value on the way."""
        self.types[label] = canonical_type(str(fspmd.typeof(x)))
        return x

    def custom_cotangent(self, g: Tensor, axis_name: Any) -> Tensor:
        """A custom function is an op like others: its invariant operands are cast, whose backward is the psum."""
        return g

    def grouped(self, what: str, x: Tensor, axis_name: Any, groups: Any) -> Tensor:
        return getattr(fspmd, what)(x, axis_name, axis_index_groups=groups)

    def loosely_reduced(self, x: Tensor, axis_name: Any) -> Tensor:
        return fspmd.pcast(x, axis_name, to="reduced")

    def loosely_unreduced(self, x: Tensor, axis_name: Any) -> Tensor:
        return fspmd.pcast(x, axis_name, to="unreduced")

    def const(self, values: Any, dtype: str = "float64") -> Tensor:
        return torch.tensor(values, dtype=DTYPES[dtype])

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def astype(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(DTYPES[dtype])

    def sum(self, x: Tensor, axis: int | None = None) -> Tensor:
        return torch.sum(x) if axis is None else torch.sum(x, axis)

    def max(self, x: Tensor, axis: int) -> Tensor:
        return torch.amax(x, axis)

    def set(self, x: Tensor, index: int, value: Any) -> Tensor:
        part = x[index]
        new = value.expand(part.shape) if isinstance(value, Tensor) else torch.full_like(part, value)
        return torch.select_scatter(x, new, 0, index)

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.index_select(x, 0, index.reshape(1))[0]

    def dynamic_slice(self, x: Tensor, start: Any, size: int, axis: int = 0) -> Tensor:
        return torch.index_select(x, axis, torch.arange(size) + start)

    def scan(self, step: Callable[..., Any], init: Any, rows: Tensor) -> Any:
        for row in rows.unbind(0):
            init = step(init, row)
        return init

    def while_loop(self, condition: Callable[..., Any], step: Callable[..., Any], init: Any) -> Any:
        while condition(init):
            init = step(init)
        return init

    def cond(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> Any:
        return yes(*args) if predicate else no(*args)

    def vmap(
        self, f: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, spmd_axis_name: str | None = None
    ) -> Callable[..., Any]:
        return fspmd.vmap(f, in_axes, out_axes, spmd_axis_name=spmd_axis_name)

    def custom_vjp(self, f: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
        class Custom(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Any:
                return f(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                residuals = forward(*inputs)[1]
                ctx.single = isinstance(residuals, Tensor)
                ctx.save_for_backward(*([residuals] if ctx.single else residuals))

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                saved = ctx.saved_tensors
                return backward(saved[0] if ctx.single else saved, gradient)

        return Custom.apply

    def shard_map(
        self,
        f: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axis_names: set[str] | None = None,
        *,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        return fspmd.shard_map(
            f,
            mesh=self.mesh,
            in_specs=map_specs(to_fspmd, in_specs),
            out_specs=map_specs(to_fspmd, out_specs),
            axis_names=axis_names,
            check_vma=check_vma,
        )


def build(program: Program) -> tuple[FspmdBackend, Callable[..., list[Tensor]], list[Tensor]]:
    """The program as a function from global tensors to a flat list of global tensors, and its inputs."""
    m = FspmdBackend(program)

    def body(*blocks: Any) -> Any:
        out = program.body(m, *blocks)
        if program.expect == "values":
            for i, leaf in enumerate(leaves(out)):
                m.tap(f"out{i}", leaf)
        return out

    def run(*args: Tensor) -> list[Tensor]:
        if program.scope == "global":
            with fspmd.set_mesh(m.mesh):
                out = program.body(m, *args)
        else:
            out = m.shard_map(body, program.in_specs, program.out_specs, check_vma=program.check_vma)(*args)
        return list(leaves(fspmd.device_get(out)))

    inputs = [
        torch.tensor(given.flat(k), dtype=DTYPES[given.dtype]).reshape(given.shape)
        for k, given in enumerate(program.inputs)
    ]
    return m, run, inputs


def weighted(tensors: Sequence[Tensor], salt: int) -> list[Tensor]:
    """The fixed weights of each tensor."""
    return [
        torch.tensor(weights(t.numel(), salt + k), dtype=torch.float64).reshape(t.shape) for k, t in enumerate(tensors)
    ]


def scalar(outputs: Sequence[Tensor]) -> Tensor:
    """The number whose gradients are compared."""
    total = torch.zeros((), dtype=torch.float64)
    for out, w in zip(outputs, weighted(outputs, 0), strict=True):
        if out.is_floating_point():
            total = total + torch.sum(w * (out + out * out / 4))
    return total
