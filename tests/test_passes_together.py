"""Passes after each other, on training steps with uneven blocks: handles, dropout that `checkpoint` repeats, donation.

The judge of values and gradients is the function run without `jit`, with the numbers that it draws.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from full import FULL
from simulated import GRID, MESH
from test_passes import SLOW
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fspmd import (
    Mesh,
    P,
    Sharded,
    checkpoint,
    device_get,
    device_put,
    jit,
    make_mesh,
    psum,
    reshard,
    set_topology,
    shard_map,
    topology,
    value_and_grad,
)
from fspmd.programs.passes.chunked import Chunked
from fspmd.programs.passes.coalesce import Coalesce
from fspmd.programs.passes.overlap import Overlap
from fspmd.programs.passes.recompute import Recompute
from fspmd.programs.passes.table import PASSES
from fspmd.transport.local_tensor import LocalTensor

F64 = torch.float64
SIX = make_mesh((6,), ("x",), transport="simulation")
#: with options, beside those of the table
OTHERS: list[Any] = [
    Overlap(512, overtake=True),
    Recompute(256),
    Recompute(collectives=True),
    Coalesce(),
    Chunked((2,)),
]


def _with_handles(x: Any, w: Any) -> Any:
    def body(x: Tensor, w: Tensor) -> Tensor:
        a, b = psum((x @ w).sum(0), "x", wait=False), psum((x.sin() @ w).sum(0), "x", wait=False)
        y = x @ w
        return y * a.wait() + b.wait() * y.cos()

    specs = P("x"), P()
    moved = (reshard(one, spec) for one, spec in zip((x, w), specs, strict=True))
    return shard_map(body, mesh=x.spec.mesh, in_specs=specs, out_specs=P("x"))(*moved) / len(w)


LAYERS: list[Callable[[Any, Any], Any]] = [
    _with_handles,
    lambda x, w: torch.tanh(x @ w) @ w.t(),
    lambda x, w: F.dropout(x @ w, 0.5),
    checkpoint(lambda x, w: F.dropout(torch.relu(x @ w), 0.3) @ w),
    lambda x, w: torch.softmax(x @ x.t() / len(w), -1) @ x @ w,
    lambda x, w: F.layer_norm(x, w.shape[:1]) * w[0] + 0.1 * torch.randn_like(x),
]


def generated(seed: int, mesh: Mesh) -> tuple[Callable[[Any, Any], Any], list[Sharded], Sharded]:
    """A loss of parameters and data, which rarely divide evenly."""
    draw = random.Random(seed)
    layers = [draw.choice(LAYERS) for _ in range(draw.randint(1, 3))]
    rows, width = draw.choice([3, mesh.size + 1, 2 * mesh.size - 1, 2 * mesh.size]), draw.choice([4, 6, 12])
    specs = [P(), P("x"), P(None, "x"), *([P("x", "y")] if "y" in mesh.axis_names else [])]
    generator = torch.Generator().manual_seed(seed)

    def value(*shape: int) -> Sharded:
        whole = torch.randn(shape, dtype=F64, generator=generator) / width**0.5
        return device_put(whole, draw.choice(specs), mesh=mesh)

    def loss(ws: Any, x: Any) -> Any:
        for one, w in zip(layers, ws, strict=True):
            x = one(x, w)
        return (x.sin() * torch.arange(width, dtype=F64)).sum()

    return loss, [value(width, width) for _ in layers], value(rows, width)


def _agree(found: Any, expected: Any) -> None:
    leaves = (optree.tree_leaves(tree, lambda x: isinstance(x, Sharded)) for tree in (found, expected))
    for x, y in zip(*leaves, strict=True):
        torch.testing.assert_close(device_get(x), device_get(y), rtol=1e-9, atol=1e-9)


def _drawing(seed: int, f: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(seed)
    return f(*args)


def check(seed: int, mesh: Mesh, passes: list[Any], donates: bool) -> None:
    """Gradients within the record, of parameters that are given away or not, and by autograd."""
    loss, ws, x = generated(seed, mesh)
    gradients = value_and_grad(loss)

    def step(ws: Any, x: Any) -> Any:
        value, found = gradients(ws, x)
        return value, found, [w - 0.1 * g for w, g in zip(ws, found, strict=True)]

    recorded = jit(step, passes=passes, donate_argnums=0 if donates else None)
    expected = _drawing(seed, step, ws, x)
    for _ in range(3):
        _agree(_drawing(seed, recorded, [Sharded(w.local.clone(), w.spec) for w in ws], x), expected)
    leaves = [w.detach().requires_grad_() for w in ws]
    recorded = jit(loss, passes=passes)
    recorded(leaves, x)
    outs = [torch.autograd.grad(_drawing(seed, f, leaves, x), leaves) for f in (recorded, loss)]
    _agree(*outs)


@pytest.fixture(params=["fast", "slow"])
def links(request: pytest.FixtureRequest) -> Any:
    """Links that hardly matter, and such as make chunks pay."""
    before = topology()
    if request.param == "slow":
        set_topology(SLOW)
    yield
    set_topology(before)


@pytest.mark.one_of(6)
@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("seed", range(80 if FULL else 6))
def test_passes_together(seed: int) -> None:
    draw = random.Random(seed)
    names: list[Any] = list(PASSES)
    orders = [draw.sample(names, 2), names, draw.sample(names, len(names)), draw.sample(names + OTHERS, 4)]
    for i, passes in enumerate(orders):
        try:
            check(seed, (MESH, SIX, GRID)[seed % 3], passes, donates=i % 2 == 0)
        except Exception as error:
            error.add_note(f"seed {seed}, passes {passes}")
            raise


class _Alive(TorchDispatchMode):
    """The most bytes that given tensors, and those made since, hold at once, after each function of torch."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.most = 0
        self.known: list[Any] = []  # weak references
        self.note(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(optree.tree_leaves((args, out)))  # donated arguments are others from here on
        return out

    def note(self, made: list[Any]) -> None:
        tensors = [x for x in made if isinstance(x, Tensor)]
        blocks = [block for x in tensors for block in (x.shards if isinstance(x, LocalTensor) else [x])]
        self.known = list(dict.fromkeys([*self.known, *map(weakref.ref, blocks)]))
        found = [x.untyped_storage() for one in self.known if type(x := one()) is Tensor]
        self.most = max(self.most, sum({storage._cdata: storage.nbytes() for storage in found}.values()))


@pytest.mark.parametrize("passes", [None, ["recompute"], ["overlap", "coalesce"]], ids=str)
def test_memory_is_what_is_held_in_a_replay(passes: Any) -> None:
    """Of a single rank, but for a few numbers; without draws, which need memory for themselves."""
    mesh = make_mesh((1,), ("x",), transport="simulation")
    ws, x = (
        [device_put(torch.randn(24, 24, dtype=F64), P(), mesh=mesh) for _ in range(4)],
        torch.ones(50, 24, dtype=F64),
    )

    def loss(ws: Any, x: Any) -> Any:
        for layer, w in zip((LAYERS[0], LAYERS[1], LAYERS[4], LAYERS[1]), ws, strict=True):
            x = layer(x, w)
        return (x * x).mean()

    def step(ws: Any, x: Any) -> Any:
        value, gradients = value_and_grad(loss)(ws, x)
        return value, [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]

    for donated in (None, 0):
        recorded: Any = jit(step, passes=passes, donate_argnums=donated)
        memory = recorded.lower(ws, device_put(x, P("x"), mesh=mesh)).memory()
        for _ in range(2):
            given = [Sharded(w.local.clone(), w.spec) for w in ws]
            data = device_put(x.clone(), P("x"), mesh=mesh)
            with _Alive([*(w.local for w in given), data.local]) as alive:
                recorded(given, data)
        assert abs(alive.most - memory.peak) <= 128
