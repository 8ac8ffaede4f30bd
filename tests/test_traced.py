"""Graphs that torch writes down would have no collectives, so what communicates is refused while it writes one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fspmd import P, RecordError, device_get, device_put, grad, jit, make_mesh, psum, shard_map

MESH = make_mesh((2,), ("x",))
W = device_put(torch.arange(4.0), P("x"), mesh=MESH)
_sum = shard_map(lambda x: psum(x * 2, "x"), mesh=MESH, in_specs=P("x"), out_specs=P())

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "a body": _sum,
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
    "torch.jit.trace": torch.jit.trace,
    "torch.onnx": lambda f, x: torch.onnx.export(_Module(f), (x,), io.BytesIO(), dynamo=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_no_graph_leaves_collectives_out(tracer: str) -> None:
    """Strict export has Dynamo's own words; a Sharded beside what has no values fails before it is moved."""
    for name, program in PROGRAMS.items():
        others: Any = Exception if tracer == "strict" or name == "a Sharded beside" else RecordError
        with pytest.raises(others) as caught:
            TRACERS[tracer](program, torch.arange(4.0))
        if others is RecordError:
            assert "write fspmd.jit(f).lower(*args)" in str(caught.value), (name, caught.value)
    assert torch.equal(device_get(_sum(torch.arange(4.0))), torch.tensor([4.0, 8.0]))


def test_functions_of_plain_tensors_are_exported() -> None:
    """`jit` is as if it were not there."""
    doubled = jit(lambda x: x * 2)
    doubled(torch.ones(4))
    made = torch.export.export(_Module(doubled), (torch.ones(4),))
    assert torch.equal(made.module()(torch.arange(4.0)), torch.arange(4.0) * 2)
