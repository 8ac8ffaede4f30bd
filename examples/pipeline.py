"""A pipeline: each rank holds one stage, and `ppermute` hands microbatches on.

At tick t, stage s works on microbatch t - s. The backward pass needs no code: the gradient of a ppermute is the inverse
ppermute, so gradients run through the pipeline from the last stage to the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fspmd
from fspmd import P

STAGES, MICROBATCHES, B, D = 4, 6, 5, 8
HAND_ON = [(stage, stage + 1) for stage in range(STAGES - 1)]
mesh = fspmd.make_mesh((STAGES,), ("stage",), device="cpu")


def stage_fn(w: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ w)  # w [D, D], x [B, D]


@fspmd.shard_map(mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())
def pipeline(weights: Tensor, microbatches: Tensor) -> Tensor:
    """This rank's weights [1, D, D] and all microbatches [M, B, D] -> the results of the last stage, [M, B, D]."""
    stage = fspmd.axis_index("stage")
    received = torch.zeros_like(microbatches[0])
    results = []
    for tick in range(MICROBATCHES + STAGES - 1):
        x = torch.where(stage == 0, microbatches[min(tick, MICROBATCHES - 1)], received)
        y = stage_fn(weights[0], x)
        received = fspmd.ppermute(y, "stage", HAND_ON)
        if tick >= STAGES - 1:  # before that the last stage has not got its first microbatch
            results.append(torch.where(stage == STAGES - 1, y, 0.0))
    return fspmd.psum(torch.stack(results), "stage")  # only the last stage adds something


def sequential(weights: Tensor, microbatches: Tensor) -> Tensor:
    for w in weights:
        microbatches = stage_fn(w, microbatches)
    return microbatches


def main() -> None:
    torch.manual_seed(0)
    weights = torch.randn(STAGES, D, D, dtype=torch.float64) / D**0.5
    x = torch.randn(MICROBATCHES, B, D, dtype=torch.float64)
    y_alone, pull_alone, *_ = torch.func.vjp(sequential, weights, x)
    y, pull = fspmd.vjp(pipeline, weights, x)
    torch.testing.assert_close(fspmd.device_get((y, *pull(y))), (y_alone, *pull_alone(y_alone)))
    if not any(mesh.coordinate() or ()):  # one process prints
        for stage in range(STAGES):
            print(f"stage {stage}:", " . " * stage, *(f"m{m}" for m in range(MICROBATCHES)))
        print("outputs and both gradients agree with the stages run one after the other")


if __name__ == "__main__":
    main()
