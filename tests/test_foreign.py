"""Tensors that are not dense are refused wherever a block or a global tensor is taken, also where a dense one was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fspmd import (
    ArgumentError,
    P,
    RecordError,
    Sharded,
    all_gather,
    device_get,
    device_put,
    from_callback,
    from_local,
    jit,
    make_mesh,
    psum,
    scatter,
    shard_map,
)

MESH = make_mesh((2,), ("x",), transport="simulation")
WHOLE = torch.eye(4)
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": Tensor.to_sparse,
    "sparse_csr": Tensor.to_sparse_csr,
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]]),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


def _in_body(f: Callable[[Any], Any], at: P) -> Callable[[Any], Any]:
    return shard_map(f, mesh=MESH, in_specs=at, out_specs=P())


def _given() -> Sharded:
    return device_put(WHOLE.clone(), P("x"), mesh=MESH)


def _recorded(x: Tensor) -> Tensor:
    """Recorded anew: torch's own guards, which compare with what was recorded, abort of a nested tensor."""
    return jit(Tensor.abs)(x)


TAKERS: dict[str, Callable[[Any], Any]] = {
    "global +": lambda x: _given() + x,
    "global mm": lambda x: torch.mm(_given(), x),
    "global cat": lambda x: torch.cat([_given(), x]),
    "copy_": lambda x: _given().copy_(x),
    "device_put cut": lambda x: device_put(x, P("x"), mesh=MESH),
    "device_put whole": lambda x: device_put(x, P(), mesh=MESH),
    "scatter": lambda x: scatter(x, P("x"), src=0, mesh=MESH),
    "from_local": lambda x: from_local(x, P(), mesh=MESH),
    "from_callback": lambda x: from_callback((4, 4), P(), lambda _: x, mesh=MESH),
    "Sharded": lambda x: Sharded(x, _given().spec),
    "psum": lambda x: _in_body(lambda _: psum(x, "x"), P())(WHOLE),
    "all_gather": lambda x: _in_body(lambda _: all_gather(x, "x"), P())(WHOLE),
    "result": lambda x: _in_body(lambda _: x, P())(WHOLE),
    "jit": _recorded,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taker", TAKERS)
def test_refused(taker: str, kind: str) -> None:
    """The first time, and after a call with a dense tensor of that shape, whose plan would be taken again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch calls a prototype
        loose = KINDS[kind](WHOLE)
    for _ in range(2):
        with pytest.raises((ArgumentError, RecordError), match=f"(?s){kind} tensor.*make it dense"):
            TAKERS[taker](loose)
        if taker not in ("psum", "all_gather"):
            TAKERS[taker](WHOLE if taker != "Sharded" else _given().local)


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "mkldnn"])
@pytest.mark.parametrize("spec", [P(), P("x")], ids=repr)
def test_arguments_and_results_of_a_body_that_took_dense_ones(spec: P, kind: str) -> None:
    f = _in_body(lambda x: psum(x, "x") if spec.axes else x, spec)
    torch.testing.assert_close(device_get(f(WHOLE)), WHOLE[:2] + WHOLE[2:] if spec.axes else WHOLE)
    with pytest.raises(ArgumentError, match=f"(?s)x is a {kind} tensor.*make it dense"):
        f(KINDS[kind](WHOLE))


def test_a_body_takes_one_as_a_static_argument() -> None:
    f = shard_map(lambda a, x: a @ x, mesh=MESH, in_specs=(None, P(None, "x")), out_specs=P(None, "x"))
    torch.testing.assert_close(device_get(f(WHOLE.to_sparse(), WHOLE + 1)), WHOLE + 1)
    device_get(device_put(torch.ones(5), P("x"), mesh=MESH) * 2)  # from here on blocks may be uneven
    torch.testing.assert_close(device_get(f(WHOLE.to_sparse(), WHOLE + 1)), WHOLE + 1)
