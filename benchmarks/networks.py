"""What the layers of a model cost, forward and backward: on plain blocks by hand, on `Sharded`, and on DTensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bodies import Pair, World, fake_world, meshes, pair, placements
from timing import Overhead, Table, calls, side_by_side
from torch import Tensor
from torch.distributed.tensor import DTensor

import fspmd
from fspmd import P

N, HEADS, ROWS = 32, 2, 4  # width and heads of a rank, rows of a rank's batch

Values = dict[str, Any]

# --- an MLP of two layers, its batch sharded, its weights' gradients left as pending sums -----------------------------

MLP = {
    "x": (P("x", None), (ROWS, N)),
    "w1": (P(None, None, reduced={"x"}), (N, N)),
    "b1": (P(None, reduced={"x"}), (N,)),
    "w2": (P(None, None, reduced={"x"}), (N, N)),
    "b2": (P(None, reduced={"x"}), (N,)),
}


def mlp(v: Values) -> Any:
    return torch.relu(v["x"] @ v["w1"] + v["b1"]) @ v["w2"] + v["b2"]


#: the same as models have it, each weight's gradient summed: replicated weights beside a cut batch; columns, then rows
TRAINED = {
    "replicated weights": {name: (P("x", None) if name == "x" else P(), shape) for name, (_, shape) in MLP.items()},
    "columns, then rows": {
        "x": (P(), (ROWS, N)),
        "w1": (P(None, "x"), (N, N)),
        "b1": (P("x"), (N,)),
        "w2": (P("x", None), (N, N)),
        "b2": (P(), (N,)),
    },
}

# --- a transformer layer: batch over "x", heads and hidden columns over "y" -------------------------------------------

LAYER = {
    "x": (P("x", None, None), (ROWS, 8, N)),
    **{f"norm{i}": (P(), (N,)) for i in (1, 2)},
    **{f"w{name}": (P(None, "y"), (N, N)) for name in ("q", "k", "v", "1")},
    **{f"w{name}": (P("y", None), (N, N)) for name in ("o", "2")},
}


def _heads(x: Any) -> Any:
    return x.unflatten(-1, (-1, N // HEADS)).transpose(1, 2)


def _attention(x: Any, v: Values) -> Any:
    q, k, value = (_heads(x @ v[name]) for name in ("wq", "wk", "wv"))
    scores = F.softmax(q @ k.transpose(-1, -2) * (N // HEADS) ** -0.5, dim=-1)
    return (scores @ value).transpose(1, 2).flatten(2) @ v["wo"]


def layer(v: Values, enter: Callable[[Any], Any], leave: Callable[[Any], Any]) -> Any:
    """``enter`` and ``leave`` stand around what is computed in columns over "y"."""
    x = v["x"]
    x = x + leave(_attention(enter(F.layer_norm(x, (N,), v["norm1"])), v))
    hidden = F.gelu(enter(F.layer_norm(x, (N,), v["norm2"])) @ v["w1"])
    return x + leave(hidden @ v["w2"])


class _Enter(torch.autograd.Function):
    """By hand: the gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class _Leave(torch.autograd.Function):
    """By hand: the value is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def measure() -> Table:
    """The MLP, and a training step of the layer: forward, backward, gradients summed over the batch, update."""
    fake_world()
    one, two = meshes(1), meshes(2)
    return Table(
        "Layers of a model, 8 ranks of the fake backend",
        [
            _mlp_row(one),
            *(row for what, layout in TRAINED.items() for row in _trained_rows(one, what, layout)),
            _layer_row(two),
        ],
        "Plain is the same on plain blocks; the transformer layer there has its collectives written by hand with c10d "
        f"(an all-reduce per pending sum, one per weight). Blocks of {N} columns. Gradients of replicated weights, "
        "and of columns and rows, are summed as the weights lie: DTensor's by redistribute; the plain ones are not.",
    )


def values_of(world: World, layout: dict[str, tuple[P, tuple[int, ...]]]) -> tuple[Values, Values, Values]:
    """Plain blocks, `Sharded` values and DTensors; all but x are trained."""
    pairs: dict[str, Pair] = {k: pair(world, spec, shape, grad=k != "x") for k, (spec, shape) in layout.items()}
    plain, ours, theirs = ({k: getattr(v, name) for k, v in pairs.items()} for name in ("plain", "ours", "theirs"))
    return plain, ours, theirs


def forget(values: Values) -> None:
    for value in values.values():
        getattr(value, "local", value).grad = None


def _mlp_row(world: World) -> Overhead:
    def statement(values: Values) -> Callable[[], object]:
        out = mlp(values)
        one = torch.ones_like(out.detach())
        if isinstance(out, fspmd.Sharded):
            one = fspmd.Sharded(one.local, out.spec.dual)

        def run() -> None:
            mlp(values).backward(one)
            forget(values)

        return run

    plain, ours, theirs = (calls(statement(values)) for values in values_of(world, MLP))
    times = side_by_side({"plain": plain, "ours": ours, "theirs": theirs})
    return Overhead("MLP, forward and backward", times["plain"], times["ours"], times["theirs"], 1 / 10)


def _trained_rows(world: World, what: str, layout: dict[str, tuple[P, tuple[int, ...]]]) -> list[Overhead]:
    """Loss and gradients that lie as the weights, by ``.backward()``, by `value_and_grad`, and `grad`.

    ``.backward()`` leaves gradients on blocks; the others give `Sharded` ones, for which there ``.grad`` is read.
    """
    plain, ours, theirs = values_of(world, layout)
    trained = [name for name in layout if name != "x"]
    weights = {name: ours[name].detach() for name in trained}
    loss = lambda weights, x: _mean_square({**weights, "x": x})  # noqa: E731
    functional = {"value_and_grad": fspmd.value_and_grad(loss), "grad": fspmd.grad(loss)}

    def by_torch() -> None:
        torch.autograd.grad(_mean_square(plain), [plain[name] for name in trained])

    def backward() -> None:
        _mean_square(ours).backward()
        forget(ours)

    def backward_and_read() -> None:
        _mean_square(ours).backward()
        _ = [ours[name].grad for name in trained]
        forget(ours)

    def by_dtensor() -> None:
        _mean_square(theirs).backward()
        for name in trained:
            theirs[name].grad.redistribute(placements=theirs[name].placements)
        forget(theirs)

    found = side_by_side(
        {
            "plain": calls(by_torch),
            "ours": calls(backward),
            "read": calls(backward_and_read),
            **{name: calls(functools.partial(f, weights, ours["x"])) for name, f in functional.items()},
            "theirs": calls(by_dtensor),
        }
    )
    return [
        Overhead(f"MLP, {what}, {how}", found["plain"], found[name], found["theirs"], 1 / 5)
        for how, name in (
            (".backward()", "ours"),
            (".backward(), .grad read", "read"),
            *zip(functional, functional, strict=True),
        )
    ]


def _mean_square(values: Values) -> Any:
    return mlp(values).square().mean()


def _layer_row(world: World) -> Overhead:
    plain, ours, theirs = values_of(world, LAYER)
    times = side_by_side(
        {
            "plain": calls(by_hand(plain, world)),
            "ours": calls(global_view(ours)),
            "theirs": calls(dtensor(theirs, world)),
        },
        seconds=0.02,
    )
    return Overhead("transformer layer, training step", times["plain"], times["ours"], times["theirs"])


def by_hand(values: Values, world: World) -> Callable[[], None]:
    """A training step on plain blocks, its collectives written out."""
    rows, columns = (world.theirs.get_group(axis) for axis in ("x", "y"))

    def step() -> None:
        out = layer(values, lambda x: _Enter.apply(x, columns), lambda x: _Leave.apply(x, columns))
        out.square().sum().backward()
        with torch.no_grad():
            for name, w in values.items():
                if name != "x":
                    dist.all_reduce(w.grad, group=rows)
                    w.sub_(w.grad, alpha=1e-6)
        forget(values)

    return step


def global_view(values: Values) -> Callable[[], None]:
    """The same on `Sharded` values."""

    def step() -> None:
        fspmd.reshard(loss(values), P()).backward()
        with torch.no_grad():
            for name, w in values.items():
                if name != "x":
                    w.sub_(w.grad, alpha=1e-6)
        forget(values)

    return step


def loss(values: Values) -> Any:
    """A number to train by, of `Sharded` values."""
    return layer(values, _same, lambda x: fspmd.reshard(x, P("x", None, None))).square().sum()


def dtensor(values: Values, world: World) -> Callable[[], None]:
    """The same on DTensors."""
    whole: Any = placements(world, P("x", None, None))

    def step() -> None:
        out = layer(values, _same, lambda x: x.redistribute(placements=whole))
        out.square().sum().full_tensor().backward()
        with torch.no_grad():
            for name, w in values.items():
                if name != "x":
                    g: DTensor = w.grad
                    w.sub_(g.redistribute(placements=w.placements), alpha=1e-6)
        forget(values)

    return step


def _same(x: Any) -> Any:
    return x
