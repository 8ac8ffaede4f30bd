"""What entering and leaving a body costs: a shard_map call beside the function itself and torch's local_map."""

from __future__ import annotations

from typing import Any

import torch
from bodies import RANKS, fake_world, sharded
from timing import Goal, Row, Sampler, Table, calls, side_by_side
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import local_map

from fspmd import P, make_mesh, shard_map


def measure() -> Table:
    """Calls with 2 and with 20 leaves, `Sharded` in and out, of a function that does nothing."""
    fake_world()
    mesh, device_mesh = make_mesh((RANKS,), ("x",), device="cpu"), init_device_mesh("cpu", (RANKS,))

    def pair(x: Any, y: Any) -> Any:
        return x, y

    def tree(x: Any) -> Any:
        return x

    def mapped(f: Any, args: tuple[Any, ...], check_vma: bool) -> Sampler:
        call = shard_map(f, mesh=mesh, in_specs=(P("x"),) * len(args), out_specs=P("x"), check_vma=check_vma)
        return calls(lambda: call(*args))

    def local_mapped(f: Any, args: tuple[Any, ...], leaves: int) -> Sampler:
        placements = ([Shard(0)],) * leaves
        call = local_map(f, out_placements=placements, in_placements=placements, device_mesh=device_mesh)
        return calls(lambda: call(*args))

    two = (sharded(mesh, 2), sharded(mesh, 2))
    twenty = ({f"w{i}": sharded(mesh, 2) for i in range(20)},)
    d_two = tuple(DTensor.from_local(torch.randn(2), device_mesh, [Shard(0)]) for _ in range(2))
    d_twenty = ({f"w{i}": d_two[0] for i in range(20)},)
    times = side_by_side(
        {
            "body 2": calls(lambda: pair(*two)),
            "checked 2": mapped(pair, two, True),
            "unchecked 2": mapped(pair, two, False),
            "local_map 2": local_mapped(pair, d_two, 2),
            "body 20": calls(lambda: tree(*twenty)),
            "checked 20": mapped(tree, twenty, True),
            "unchecked 20": mapped(tree, twenty, False),
            "local_map 20": local_mapped(tree, d_twenty, 20),
        }
    )
    rows = []
    for leaves, goal in ((2, Goal(5e-6, "difference")), (20, None)):
        for what, key in (("", "checked"), (", check_vma=False", "unchecked")):
            ours = times[f"{key} {leaves}"]
            label = f"shard_map call, {leaves} leaves{what}"
            rows.append(Row(label, ours, "the function itself", times[f"body {leaves}"], goal))
            rows.append(Row(label, ours, "torch local_map", times[f"local_map {leaves}"]))
    return Table("One shard_map call, sharded leaves in and out", rows)
