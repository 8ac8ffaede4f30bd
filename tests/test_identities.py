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


@pytest.mark.one_of(4)
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


KERNEL = torch.linspace(-1, 1, 72, dtype=F64).sin()
#: of blocks of an image of [2, 3, 16, 24], a place of the result being made of one block
WINDOWS: dict[str, Callable[[Any], Any]] = {
    "a kernel of one": lambda x: F.conv2d(x, KERNEL[:18].reshape(6, 3, 1, 1)),
    "a kernel of one, every other": lambda x: F.conv2d(x, KERNEL[:18].reshape(6, 3, 1, 1), stride=2),
    "patches": lambda x: F.conv2d(x, KERNEL.reshape(6, 3, 2, 2), stride=2),
    "patches of three dims": lambda x: F.conv3d(x[:, None], KERNEL[:12].reshape(1, 1, 3, 2, 2), stride=(3, 2, 2)),
    "patches, transposed": lambda x: F.conv_transpose2d(x, KERNEL.reshape(3, 6, 2, 2), stride=2),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, (2, 3)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "windows side by side": lambda x: x.unfold(2, 2, 2).unfold(3, 3, 3),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_within_blocks_move_nothing(name: str) -> None:
    f = WINDOWS[name]
    for sizes in ((2,), (4, 2)):
        mesh = make_mesh(sizes, ("x", "y")[: len(sizes)])
        plain = torch.linspace(-3, 3, 2304, dtype=F64).mul(7).sin().reshape(2, 3, 16, 24).requires_grad_()
        expected = f(plain)
        weight = torch.linspace(-1, 1, expected.numel(), dtype=F64).reshape(expected.shape)
        (grad,) = torch.autograd.grad(expected, plain, weight)
        for spec in (P(None, None, *mesh.axis_names), P(None, None, *reversed(mesh.axis_names))):
            x = device_put(plain.detach(), spec, mesh=mesh).requires_grad_()
            with communication_log() as log:
                out = f(x)
                out.backward(weight)
            torch.testing.assert_close(device_get(out), expected)
            torch.testing.assert_close(device_get(x.grad), grad)
            assert list(log) == [], (spec, str(log))


ONES: dict[str, Callable[[Any], Any]] = {
    "squeeze": lambda x: x.squeeze(1),
    "squeeze of all": lambda x: x.squeeze(),
    "view": lambda x: x.view(4, 6),
    "reshape": lambda x: x.reshape(2, 2, 6),
    "flatten": lambda x: x.flatten(0, 1),
    "select": lambda x: x[:, 0],
    "one is left": lambda x: x[:, None].view(4, 1, 6),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ONES)
def test_viewing_away_a_cut_dim_of_one_moves_nothing(name: str) -> None:
    plain = torch.randn(4, 1, 6, dtype=F64)
    for mesh in MESHES:
        for spec in (P(None, "x"), P("y", "x"), P(None, ("x", "y"), "z"), P("x", "y")):
            if not set(spec.axes) <= set(mesh.axis_names):
                continue
            x = device_put(plain, spec, mesh=mesh).requires_grad_()
            with communication_log() as log:
                out = ONES[name](x)
            assert list(log) == [], (spec, str(log))
            assert torch.equal(device_get(out), ONES[name](plain)), spec
            weight = torch.linspace(-1, 1, 24, dtype=F64).reshape(out.shape)
            (out * weight).sum().backward()
            assert torch.equal(device_get(x.grad), weight.reshape(4, 1, 6)), spec
