"""Parts of uneven simulated blocks: values and derivatives beside those of plain blocks; what lower tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from full import sample
from simulated import MESH

import fspmd
from fspmd import P, TensorSpec, device_get, device_put, jit, make_mesh, psum, shard_map, value_and_grad
from fspmd.local_view.uneven_results import PARTS
from fspmd.rules import slices

Function = Callable[..., Any]
CUTS: dict[str, Function] = {
    "split": lambda y: y.split(2, 1)[0].sin(),
    "several": lambda y: y.split(2, 1)[0].sin().sum(1) * y.split([1, y.shape[1] - 1], 1)[1].sum(1),
    "all": lambda y: torch.cat([part.cos() for part in y.split(2, 1)], 1),
    "chunk": lambda y: torch.chunk(y, 3, dim=-1)[1].cos(),
    "by name": lambda y: torch.split(tensor=y, split_size_or_sections=3, dim=1)[0].sin(),
    "unbind": lambda y: torch.unbind(y, dim=-1)[2].sin() * y.unbind(-1)[0],
    "iterated": lambda y: next(iter(y.T)).sin(),
    "slices": lambda y: y.tensor_split(2, 1)[0].sin() * torch.hsplit(y, [3])[0],
    "unsafe": lambda y: torch.unsafe_split(y, 2, 1)[1].sin(),
    "mapped": lambda y: fspmd.vmap(lambda s: (y * s).split(2, 1)[0].sin() * (y * s).unbind(1)[0][:, None])(SCALES),
    "of what is mapped": lambda y: fspmd.vmap(lambda s: y.split(2, 1)[1].sin() * s)(SCALES),
}
SCALES = torch.arange(1.0, 4.0, dtype=torch.float64)
MODES: dict[str, Callable[[Any, Function, Any], Any]] = {
    "grad": lambda t, f, x: t.grad(f)(x),
    "twice": lambda t, f, x: t.grad(lambda y: t.grad(f)(y).sin().sum())(x),
    "jvp": lambda t, f, x: t.jvp(f, (x,), (x * 2,))[1],
    "forward of reverse": lambda t, f, x: t.jvp(t.grad(f), (x,), (x * 2,))[1],
    "recorded": lambda t, f, x: (jit(t.grad(f)) if t is fspmd else t.grad(f))(x),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", CUTS)
def test_derivatives(cut: str, mode: str) -> None:
    f, x = CUTS[cut], torch.randn(7, 5, dtype=torch.float64)
    views: list[tuple[Function, Function]] = [
        (lambda x: f(x).square().sum(), lambda x: f(x).square().sum()),
        (
            shard_map(lambda b: psum(f(b).square().sum(), "x"), mesh=MESH, in_specs=P("x"), out_specs=P()),
            lambda x: torch.stack([f(b).square().sum() for b in x.split(2)]).sum(),
        ),
    ]
    for ours, reference in views:
        expected = MODES[mode](torch.func, reference, x)
        found = MODES[mode](fspmd, ours, device_put(x, P("x"), mesh=MESH))
        torch.testing.assert_close(device_get(found) if isinstance(found, fspmd.Sharded) else found, expected)


def test_functions_that_run_on_blocks_in_place_of_torchs_are_known_as_parts() -> None:
    """By their names: a new name would lose second derivatives of uneven blocks."""
    assert {f.__name__ for f in (slices.split_blocks, slices.chunk_blocks)} <= PARTS.keys()
    test_derivatives("unsafe", "twice")


VIEWS: dict[str, Function] = {
    **{name: f for name, f in CUTS.items() if "mapped" not in name},
    "rows": lambda x: x.chunk(3, 0)[1].sin(),
    "narrow": lambda x: x.narrow(0, 1, 2).exp(),
    "row": lambda x: x[2].sin(),
    "column": lambda x: x.select(1, 1).exp(),
    "cat": lambda x: torch.cat([x, x * 2]).sin(),
    "stack": lambda x: torch.stack([x, x * 2], 1).sin(),
    "places": lambda x: x[:, [0, 1, 1]] * x[[0, 1, 1]].sum(),
    "diagonal": lambda x: x.diagonal().sin(),
    "largest": lambda x: x.max(0)[0] * x.topk(2, 1)[0].sum(),
    "again": fspmd.checkpoint(lambda y: y.sin().chunk(2, 1)[0].exp()),
    "flat": lambda x: x.flatten().sin().unfold(0, 2, 1),
}
WEIGHT = torch.ones(1, dtype=torch.float64, requires_grad=True)
AROUND: dict[str, Callable[[Function], Function]] = {
    "values": lambda f: f,
    "with gradients": lambda f: value_and_grad(lambda x: f(x).sum()),
    "followed": lambda f: lambda x: f(x * WEIGHT),  # backward is a part of the program
}
SHAPES = [(7, 5), (3, 5), (12, 6)]
LAYOUTS: dict[tuple[int, ...], list[P]] = {
    (4,): [P("x"), P(None, "x")],
    (2, 3): [P("x"), P("y", "x"), P(("x", "y"))],
}
_LOWERED = [
    (view, around, sizes, shape, spec)
    for view in VIEWS
    for around in AROUND
    for sizes, specs in LAYOUTS.items()
    for spec in specs
    for shape in SHAPES
]


@pytest.mark.parametrize("case", sample(_LOWERED, 30), ids=str)
def test_a_simulation_is_lowered_as_a_mesh_without_ranks(case: Any) -> None:
    """Time, bytes, FLOPs, memory and collectives are those of a process, whatever blocks there are."""
    view, around, sizes, shape, spec = case
    told = []
    for transport in ("simulation", "abstract"):
        mesh = make_mesh(sizes, ("x", "y")[: len(sizes)], transport=transport)
        lowered = jit(AROUND[around](VIEWS[view])).lower(TensorSpec(mesh, spec, shape, torch.float64))
        moved = [(one.kind, one.axes, one.shape, one.price, one.backward) for one in lowered.collectives()]
        told.append((lowered.memory().peak, lowered.memory().given, lowered.cost(), moved))
    assert told[0] == told[1]


def test_views_take_no_memory() -> None:
    x = TensorSpec(make_mesh((2,), ("x",), transport="abstract"), P(), (4, 8), torch.float64)
    assert jit(lambda x: x.chunk(4, 1)[1].sin()).lower(x).memory().peak == 8 * (4 * 8 + 4 * 2)


#: of blocks of [rows, 4], in backward of which torch asks for the sizes of a block
OF_ROWS: dict[str, Function] = {
    "row": lambda y: y[0],
    "rows": lambda y: y[-2:],
    "steps": lambda y: y[-3:-1:2],
    "narrow": lambda y: y.narrow(0, 0, 2),
    "flipped": lambda y: y.flip(0)[0],
    "last sum": lambda y: y.cumsum(0)[-1],
    "chosen": lambda y: torch.where(y > 0, y, 0.0)[1],
    "padded": lambda y: torch.nn.functional.pad(y, (0, 0, 1, 0))[:2],
    "moments": lambda y: torch.std_mean(y, 0)[1],
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_cotangent_that_is_equal_on_all_ranks(name: str) -> None:
    view = OF_ROWS[name]
    mesh = make_mesh((3,), ("x",))
    x = torch.randn(8, 4, dtype=torch.float64)
    c = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def squares(block: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        y = block.detach().requires_grad_()
        out = view(y**3)
        (g,) = torch.autograd.grad(out, y, cotangent.expand(out.shape), create_graph=True)
        return (g * g).sum()

    def body(block: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return psum(squares(block, cotangent), "x")

    found = shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())(x, c)
    expected = torch.stack([squares(block, c) for block in x.split(3)]).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, c), torch.autograd.grad(expected, c))
