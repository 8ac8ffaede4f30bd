"""What passes gain on the training step of a transformer, by the cost model: ``python benchmarks/passes.py``.

Layers of a Megatron block without attention, sequence parallel over "tp", weights sharded over "dp" as well (FSDP),
forward, backward and update, lowered for a mesh of 64 ranks that do not exist. Passes are added one after another.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from fspmd import P, TensorSpec, jit, make_mesh, reshard, value_and_grad
from fspmd.programs.capture import capture_fake
from fspmd.programs.passes.overlap import Overlap
from fspmd.programs.passes.recompute import Recompute
from fspmd.programs.passes.table import PASSES

LAYERS, BATCH, LENGTH, WIDTH = 8, 16, 2048, 4096
MESH = make_mesh((8, 8), ("dp", "tp"), transport="abstract")
ACTIVATIONS = P("dp", "tp", None)
Params = dict[str, Any]


def layer(x: Any, params: Params) -> Any:
    """Norm, the first product of gathered rows, the second one to scattered rows; weights gathered when used."""
    y = F.layer_norm(x, (WIDTH,), params["scale"], params["shift"])
    up = reshard(params["up"], P(None, "tp", reduced={"dp"}))
    down = reshard(params["down"], P("tp", None, reduced={"dp"}))
    y = reshard(y, P("dp", None, None, reduced={"tp"}))
    return x + reshard(F.gelu(y @ up, approximate="tanh") @ down, ACTIVATIONS)


def loss(params: list[Params], x: Any) -> Any:
    """A number."""
    for one in params:
        x = layer(x, one)
    return (x * x).mean()


def step(params: list[Params], x: Any) -> Any:
    """Updated parameters, and the loss."""
    value, gradients = value_and_grad(loss)(params, x)
    return value, [
        {name: p - 0.01 * g[name] for name, p in one.items()} for one, g in zip(params, gradients, strict=True)
    ]


def arguments() -> tuple[Any, ...]:
    """Layouts in the place of tensors."""

    def spec(shape: tuple[int, ...], partition: P) -> TensorSpec:
        return TensorSpec(MESH, partition, shape, torch.bfloat16)

    one = {
        "scale": spec((WIDTH,), P()),
        "shift": spec((WIDTH,), P()),
        "up": spec((WIDTH, 4 * WIDTH), P("dp", "tp")),
        "down": spec((4 * WIDTH, WIDTH), P("tp", "dp")),
    }
    return [dict(one) for _ in range(LAYERS)], spec((BATCH, LENGTH, WIDTH), ACTIVATIONS)


FIRST = ("equal_steps", "rewrites", "dead_code")
AHEAD = Overlap(overtake=True)
SETS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "default": FIRST,
    "and coalesce": (*FIRST, "coalesce"),
    "and overlap": (*FIRST, "coalesce", "overlap"),
    "which overtakes": (*FIRST, "coalesce", AHEAD),
    "and chunked": (*FIRST, "chunked", "coalesce", AHEAD),
    "and recompute": (*FIRST, Recompute(256 << 20, collectives=True), "chunked", "coalesce", AHEAD),
}


def main() -> None:
    """Tables, as Markdown."""
    args = arguments()
    print("| passes | steps | collectives | GB sent | ms | of them exposed | GB at the peak |")
    print("|---|---|---|---|---|---|---|")
    for name, passes in SETS.items():
        lowered = jit(step, passes=passes).lower(*args)
        cost, calls = lowered.cost(), len(lowered.collectives())
        steps = len(lowered.program.steps)
        print(
            f"| {name} | {steps:,} | {calls} | {cost.moved / 1e9:.2f} | {cost.time / 1e3:.1f} "
            f"| {cost.exposed / 1e3:.1f} | {lowered.memory().peak / 1e9:.2f} |"
        )
    print("\n| pass | µs a step |\n|---|---|")
    program = capture_fake(step, args, {}).program
    for name, one in PASSES.items():
        steps, start = len(program.steps), time.perf_counter()
        one(program)
        print(f"| {name} | {(time.perf_counter() - start) / steps * 1e6:.0f} |")


if __name__ == "__main__":
    main()
