"""Steps that replays run in other words give what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated import MESH

from fspmd import P, device_get, device_put, jit, shard_map

I = torch.tensor([2, 0, 3])  # noqa: E741
B = torch.tensor([True, False, True, True])
X = torch.arange(48.0).view(4, 6, 2)

_CALLS: dict[str, Callable[..., Any]] = {
    "rows": lambda x, i, b: x[i],
    "columns": lambda x, i, b: x[:, i],
    "the last dim": lambda x, i, b: x[..., i % 2],
    "two indices": lambda x, i, b: x[i, i],
    "indices of two shapes": lambda x, i, b: x[i[:, None], :, i % 2],
    "an index without dims": lambda x, i, b: x[i[0]],
    "indices with and without dims": lambda x, i, b: torch.ops.aten.index.Tensor(x, [i, i[1]]),
    "int32": lambda x, i, b: x[i.int()],
    "one row": lambda x, i, b: x[i[:1]],
    "no row": lambda x, i, b: x[i[:0]],
    "even pieces": lambda x, i, b: x.split(3, 1),
    "an uneven last piece": lambda x, i, b: [y + 1 for y in x.split(4, 1)],
    "one piece": lambda x, i, b: torch.split(x, 9, dim=1),
    "pieces of an empty tensor": lambda x, i, b: x[:0].split(3),
    "chunks": lambda x, i, b: x.chunk(4, -2)[1] * 2,
    "casts": lambda x, i, b: [x.double(), i.float(), b.long(), x.half(), x.bfloat16(), x.int(), x.bool(), b.bool()],
    "a cast of a transposed tensor": lambda x, i, b: x.mT.double(),
    "a cast that lays anew": lambda x, i, b: x.mT.to(torch.float64, memory_format=torch.contiguous_format),
    "a cast to complex numbers": lambda x, i, b: x.to(torch.complex64),
    "a copy in the same dtype": lambda x, i, b: x.to(torch.float32, copy=True),
}


@pytest.mark.parametrize("name", _CALLS)
def test_replays_give_what_torch_gives(name: str) -> None:
    f = _CALLS[name]
    recorded, expected = jit(f), _list(f(X, I, B))
    for _ in range(3):
        _check(_list(recorded(X, I, B)), expected)


@pytest.mark.parametrize("name", _CALLS)
def test_in_bodies_of_simulated_ranks(name: str) -> None:
    f = _CALLS[name]
    body = shard_map(lambda *given: _list(f(*given)), mesh=MESH, in_specs=P(), out_specs=P())
    recorded, values = jit(body), [device_put(x, P(), mesh=MESH) for x in (X, I, B)]
    for _ in range(2):
        found = [device_get(x) for x in recorded(*values)]
        for x, y in zip(found, _list(f(X, I, B)), strict=True):
            assert x.dtype is y.dtype
            assert torch.equal(x, y)


def _list(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [*result]


def _check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(x, y)
