"""Graphs that torch writes down would have no collectives, so what communicates is refused while it writes one.

A Sharded argument is refused before: of a function that communicates nothing, the graph would return constants.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fspmd import P, RecordError, device_get, device_put, grad, jit, make_mesh, psum, shard_map

MESH = make_mesh((2,), ("x",))
W = device_put(torch.arange(4.0), P("x"), mesh=MESH)
_sum = shard_map(lambda x: psum(x * 2, "x"), mesh=MESH, in_specs=P("x"), out_specs=P())

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "a body": _sum,
    "a body made within": lambda x: shard_map(_sum.__wrapped__, mesh=MESH, in_specs=P("x"), out_specs=P())(x) + 0,
    "values put and taken": lambda x: device_get(device_put(x, P("x"), mesh=MESH).sum()),
    "replicated values": lambda x: device_get(device_put(x, P(), mesh=MESH) * 2),
    "a value closed over": lambda x: x + device_get(W).sum(),
    "a Sharded beside": lambda x: (W + x).local,
    "a recorded function": jit(_sum),
    "a gradient": grad(lambda x: device_get(_sum(x)).sum()),
}


class _Module(nn.Module):
    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


TRACERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "torch.export": lambda f, x: torch.export.export(_Module(f), (x,)),
    "strict": lambda f, x: torch.export.export(_Module(f), (x,), strict=True),
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx of fakes": lambda f, x: make_fx(f, tracing_mode="fake")(x),
    "make_fx of symbols": lambda f, x: make_fx(f, tracing_mode="symbolic")(x),
    "make_fx above autograd": lambda f, x: make_fx(f, pre_dispatch=True)(x),
    "torch.jit.trace": torch.jit.trace,
    "torch.onnx": lambda f, x: torch.onnx.export(_Module(f), (x,), io.BytesIO(), dynamo=False),
}


@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_no_graph_leaves_collectives_out(tracer: str) -> None:
    """Strict export gives our text in Dynamo's error. A Sharded beside what has no values fails before it is moved."""
    for name, program in PROGRAMS.items():
        beside = name == "a Sharded beside" and tracer.startswith(("torch.export", "make_fx"))
        with pytest.raises(Exception if tracer == "strict" or beside else RecordError) as caught:
            TRACERS[tracer](program, torch.arange(4.0))
        assert beside or "fspmd.jit(f).lower(*args)" in str(caught.value), (name, caught.value)
    assert torch.equal(device_get(_sum(torch.arange(4.0))), torch.tensor([4.0, 8.0]))


OF_ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    **TRACERS,
    "trees": lambda f, x: make_fx(lambda tree: f(tree["x"][0]))({"x": [x]}),
    "named arguments": lambda f, x: torch.export.export(_Module(f), (), {"x": x}),
    "torch.jit.trace of names": lambda f, x: torch.jit.trace(f, example_kwarg_inputs={"x": x}),
    "torch.jit.trace of modules": lambda f, x: torch.jit.trace(_Module(f), (x,)),
    "torch.jit.trace_module": lambda f, x: torch.jit.trace_module(_Module(f), {"forward": {"x": x}}),
    "aot_function": lambda f, x: aot_function(f, nop)(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", OF_ARGUMENTS)
def test_no_graph_takes_the_blocks_of_an_argument_for_constants(tracer: str) -> None:
    """Strict export gives Dynamo's error, in which the same is to be written."""

    def f(x: Any) -> Any:
        return x * 2

    f(W)  # so that the call is a hit
    leaf = W.detach().requires_grad_()
    (of_unknown_strides,) = torch.autograd.grad((leaf**2).sum(), [leaf])
    for x in (W, W.sum(), leaf, of_unknown_strides):
        with pytest.raises(Exception if tracer == "strict" else RecordError) as caught:
            OF_ARGUMENTS[tracer](f, x)
        assert "fspmd.jit(f).lower(*args)" in str(caught.value)
    assert f(W).stride() == (1,)


def test_functions_of_plain_tensors_are_exported() -> None:
    """`jit` is as if it were not there."""
    doubled = jit(lambda x: x * 2)
    doubled(torch.ones(4))
    made = torch.export.export(_Module(doubled), (torch.ones(4),))
    assert torch.equal(made.module()(torch.arange(4.0)), torch.arange(4.0) * 2)
