"""Functions that take all of a value as it lies move nothing, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_cases import placements
from torch import Tensor
from torch.nn import functional as F

from fspmd import P, Sharded, communication_log, device_get, device_put, make_mesh

F64 = torch.float64
MESHES = [make_mesh(shape, tuple("xyz"[: len(shape)])) for shape in ((2,), (3,), (4,), (2, 3), (2, 2, 2))]
ROWS, COLUMNS = 8, 6

VIEWS: dict[str, Callable[[Any], Any]] = {
    "x[:, 0:]": lambda x: x[:, slice(0, None)],
    "x[0:]": lambda x: x[0:],
    "x[0:8, :6]": lambda x: x[0:ROWS, :COLUMNS],
    "x[-8:99]": lambda x: x[-ROWS:99],
    "x[::1]": lambda x: x[::1, ::1],
    "x[...]": lambda x: x[...],
    "narrow": lambda x: x.narrow(0, 0, ROWS).narrow(-1, 0, COLUMNS),
    "narrow by name": lambda x: torch.narrow(x, dim=0, start=-ROWS, length=ROWS),
    "split into one": lambda x: x.split(ROWS)[0].split([COLUMNS], dim=1)[0],
    "chunk": lambda x: x.chunk(1)[0].chunk(1, dim=-1)[0],
    "tensor_split": lambda x: x.tensor_split(1)[0],
    "expand": lambda x: x.expand(ROWS, -1).expand_as(x),
    "unfold": lambda x: x.unfold(0, 1, 1).squeeze(-1),
    "aten slice": lambda x: torch.ops.aten.slice.Tensor(x, 0, 0, 2**63 - 1),
    "flatten": lambda x: x.flatten(0, 0).unflatten(1, (COLUMNS,)),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "roll": lambda x: x.roll(0, 0).roll(2 * COLUMNS, 1).roll((ROWS, -COLUMNS), (0, 1)),
    "roll of all": lambda x: x.roll(ROWS * COLUMNS),
    "roll there and back": lambda x: x.roll((3, -3), (0, 0)),
    "flip of one row": lambda x: x[:, None].flip(1).squeeze(1),
    "pad": lambda x: F.pad(x, (0, 0, 0, 0)),
    "repeat": lambda x: x.repeat(1, 1).tile(1),
    "cat": lambda x: torch.cat([x]),
    "unsafe_chunk": lambda x: x.unsafe_chunk(1)[0],
}


def _sharded(mesh: Any) -> list[P]:
    return [spec for (spec,) in placements(mesh, ((ROWS, COLUMNS),), 12)]


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_what_takes_all_moves_nothing_forward_or_backward(name: str) -> None:
    f = (VIEWS | COPIES)[name]
    plain = torch.randn(ROWS, COLUMNS, dtype=F64)
    for mesh in MESHES:
        for spec in _sharded(mesh):
            x = device_put(plain, spec, mesh=mesh).requires_grad_()
            with communication_log() as log:
                out = f(x)
                out.backward(Sharded(torch.ones_like(out.local.detach()), out.spec.dual))
            assert (out.spec, list(log)) == (x.spec, []), (spec, out, str(log))
            assert torch.equal(device_get(out), plain), spec


@pytest.mark.parametrize("name", VIEWS)
def test_they_are_views_that_can_be_written_into(name: str) -> None:
    for mesh in MESHES[1:4]:
        for spec in (P("x"), P(None, "x")):
            x = device_put(torch.zeros(ROWS, COLUMNS), spec, mesh=mesh)
            VIEWS[name](x).add_(1)
            assert torch.equal(device_get(x), torch.ones(ROWS, COLUMNS)), spec


def test_what_takes_a_part_or_turns_round_still_moves() -> None:
    mesh = make_mesh((4,), ("x",))
    plain = torch.arange(24.0).reshape(8, 3)
    x = device_put(plain, P("x"), mesh=mesh)
    for f in (lambda x: x[1:], lambda x: x.flip(0), lambda x: x.roll(1, 0), lambda x: x[::2], lambda x: x[-9:7]):
        one: Tensor = f(plain)
        assert torch.equal(device_get(f(x)), one)
