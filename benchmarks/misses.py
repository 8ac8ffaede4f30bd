"""What the first call of a function with given layouts costs, when its plan is made: caches are emptied each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bodies import World, fake_world, meshes, pair
from timing import Goal, Row, Sampler, Table, loop, side_by_side
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import fspmd
from fspmd import P, entries, pairs, spec
from fspmd.redistribution import bounds, edges, moves, routes, straight
from fspmd.transport import windows

N = 64  # each dim of a global tensor
BOUND = 1 / 10

#: by name: the function, and how its operands lie: over "x", and over all axes but "x"
CASES: dict[str, tuple[Callable[..., Any], Callable[[tuple[str, ...]], tuple[P, ...]]]] = {
    "x + y": (torch.add, lambda rest: (P("x", rest), P("x", rest))),
    "mm": (torch.mm, lambda rest: (P("x", None), P(None, rest))),
    "mm that gathers": (torch.mm, lambda rest: (P(None, "x"), P(None, "x"))),
    "mm that gathers over all": (torch.mm, lambda rest: (P("x", rest), P(None, rest)) if rest else (P("x"), P("x"))),
    "softmax": (lambda x: F.softmax(x, dim=-1), lambda rest: (P(("x", *rest), None),)),
    "layer_norm": (lambda x: F.layer_norm(x, (N,)), lambda rest: (P(("x", *rest), None),)),
}

#: caches of what depends on layouts or shapes
KNOWN: list[Any] = [
    cache
    for module in (entries, spec, pairs, bounds, edges, moves, routes, straight, windows)
    for cache in vars(module).values()
    if hasattr(cache, "cache_clear") and cache.__module__ == module.__name__
]


def measure() -> Table:
    """Each of `CASES` on meshes of one, two and three axes."""
    fake_world()
    rows = [
        _row(f"{what}, {axes} {'axis' if axes == 1 else 'axes'}", call, meshes(axes), lies(("y", "z")[: axes - 1]))
        for what, (call, lies) in CASES.items()
        for axes in (1, 2, 3)
    ]
    return Table(
        "A call that no cache has a plan for, 8 ranks of the fake backend",
        rows,
        "Before each call the library's caches of plans and of all that depends on layouts or shapes are emptied; the "
        "emptying is not timed. What is known of torch's functions and of the mesh stays.",
    )


def _row(what: str, call: Callable[..., Any], world: World, specs: tuple[P, ...]) -> Row:
    laid_out = [fspmd.TensorSpec(world.ours, one, (N, N), torch.float32) for one in specs]
    operands = [pair(world, one.partition, one.block_shape) for one in laid_out]
    times = side_by_side(
        {
            "ours": _first(call, [one.ours for one in operands], forget),
            "theirs": _first(call, [one.theirs for one in operands], _forget_theirs),
        }
    )
    return Row(what, times["ours"], "DTensor", times["theirs"], Goal(BOUND, "ratio"))


def _first(call: Callable[..., Any], values: list[Any], forget: Callable[[], None]) -> Sampler:
    def sample(number: int) -> float:
        taken = 0.0
        for _ in range(number):
            forget()
            taken += loop(lambda: call(*values), 1)
        return taken

    return sample


def forget() -> None:
    """Empty all caches of plans, and of what depends on layouts or shapes."""
    fspmd.propagation_cache_clear()
    for cache in KNOWN:
        cache.cache_clear()


def _forget_theirs() -> None:
    _clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    _gen_transform_infos.cache_clear()
