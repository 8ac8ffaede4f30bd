"""What a recorded program costs when it is replayed: a training step, a call of a mapped function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bodies import RANKS, fake_world, meshes, sharded
from networks import LAYER, MLP, by_hand, dtensor, forget, global_view, loss, mlp, values_of
from timing import Goal, Row, Table, calls, side_by_side
from torch import Tensor

import fspmd
from fspmd import P, jit, make_mesh, shard_map


def measure() -> Table:
    """Both."""
    fake_world()
    return Table(
        "Recorded programs, replayed, 8 ranks of the fake backend",
        [*_layer_rows(), *_mlp_rows(), *_call_rows()],
        "The training step of a transformer layer as above: forward, backward, sums of gradients, update. By hand it "
        "is plain torch, its collectives written with c10d, and autograd. DTensor under torch.compile, with inductor, "
        "is shown for an MLP alone: the layer's attention does not compile there in torch 2.13.",
    )


def train(values: dict[str, Any]) -> Any:
    """One step, as a function that changes its weights where they lie."""
    weights = {name: w for name, w in values.items() if name != "x"}
    value, gradients = fspmd.value_and_grad(lambda w: fspmd.reshard(loss({**values, **w}), P()))(weights)
    for name, w in weights.items():
        w.sub_(gradients[name], alpha=1e-6)
    return value


def _layer_rows() -> list[Row]:
    world = meshes(2)
    plain, ours, theirs = values_of(world, LAYER)
    recorded, constant = jit(train), {name: w.detach() for name, w in ours.items()}
    times = side_by_side(
        {
            "by hand": calls(by_hand(plain, world)),
            "jit": calls(lambda: recorded(constant)),
            "without jit": calls(global_view(ours)),
            "DTensor": calls(dtensor(theirs, world)),
        },
        seconds=0.02,
    )
    what, goals = "transformer layer, training step", {"by hand": Goal(1.0, "ratio")}
    return [
        Row(what, times["jit"], peer, times[peer], goals.get(peer)) for peer in ("by hand", "without jit", "DTensor")
    ]


def _mlp_rows() -> list[Row]:
    world = meshes(2)
    _, ours, theirs = values_of(world, MLP)

    def backward(values: dict[str, Any]) -> Callable[[], None]:
        def step() -> None:
            mlp(values).sum().full_tensor().backward()

        return step

    def cleared(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            step()
            forget(theirs)

        return run

    weights = {name: w.detach() for name, w in ours.items()}
    recorded = jit(fspmd.value_and_grad(lambda w: fspmd.reshard(mlp(w).sum(), P())))
    times = side_by_side(
        {
            "jit": calls(lambda: recorded(weights)),
            "DTensor under torch.compile": calls(cleared(torch.compile(backward(theirs)))),
            "DTensor": calls(cleared(backward(theirs))),
        },
        seconds=0.02,
    )
    what = "MLP, forward and backward"
    return [Row(what, times["jit"], peer, times[peer]) for peer in ("DTensor under torch.compile", "DTensor")]


def _call_rows() -> list[Row]:
    mesh = make_mesh((RANKS,), ("x",), device="cpu")
    x, y = sharded(mesh, 16, 16), sharded(mesh, 16, 16)

    def body(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a * b

    mapped = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    recorded, a, b = jit(mapped), x.local, y.local
    times = side_by_side(
        {
            "jit": calls(lambda: recorded(x, y)),
            "the function itself": calls(lambda: (torch.add(a, b), torch.mul(a, b))),
            "without jit": calls(lambda: mapped(x, y)),
        }
    )
    what, goals = "shard_map call, 2 leaves", {"the function itself": Goal(3e-6, "difference")}
    return [
        Row(what, times["jit"], peer, times[peer], goals.get(peer)) for peer in ("the function itself", "without jit")
    ]
