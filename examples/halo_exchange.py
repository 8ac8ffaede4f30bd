"""Halo exchange: heat spreads over a grid that is cut in both dims; neighbours exchange their edges at every step.

The grid is a torus, so an edge travels by `ppermute` around a ring: once to the next rank and once to the previous.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fspmd
from fspmd import P

mesh = fspmd.make_mesh((2, 2), ("rows", "columns"), device="cpu")
first = not any(mesh.coordinate() or ())


def with_halo(u: Tensor, axis_name: str, dim: int) -> Tensor:
    """The block with one more line at each end of ``dim``: the last of the rank before, the first of the rank after."""
    n = fspmd.axis_size(axis_name)
    to_next, to_previous = [(i, (i + 1) % n) for i in range(n)], [(i, (i - 1) % n) for i in range(n)]
    before = fspmd.ppermute(u.narrow(dim, u.shape[dim] - 1, 1), axis_name, to_next)
    after = fspmd.ppermute(u.narrow(dim, 0, 1), axis_name, to_previous)
    return torch.cat([before, u, after], dim)


@fspmd.shard_map(mesh=mesh, in_specs=(P("rows", "columns"), None), out_specs=P("rows", "columns"))
def spread(u: Tensor, steps: int) -> Tensor:
    """A block [R / rows, C / columns] of temperatures after so many steps."""
    for _ in range(steps):
        tall, wide = with_halo(u, "rows", 0), with_halo(u, "columns", 1)
        u = u + 0.2 * (tall[:-2] + tall[2:] + wide[:, :-2] + wide[:, 2:] - 4 * u)
    return u


def spread_alone(u: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        u = u + 0.2 * (u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1) - 4 * u)
    return u


def main() -> None:
    u = torch.zeros(8, 24, dtype=torch.float64)
    u[0, 0] = u[4, 12] = 100.0  # in a corner, where four ranks meet, and on a cut
    heat = fspmd.device_put(u, P("rows", "columns"), mesh=mesh)
    for steps in (0, 1, 9):
        heat = spread(heat, steps)
        u = spread_alone(u, steps)
        whole = fspmd.device_get(heat)
        torch.testing.assert_close(whole, u)
        if first:
            print(f"after {steps} more steps, {heat!r}:")
            for row in whole:
                print("   ", "".join(" .:-=+*#%@"[min(9, int(x.item() ** 0.5 * 1.5))] for x in row))


if __name__ == "__main__":
    main()
