"""`reshard` with dtypes for the way forward and back, waited for or not, in all kinds of programs, beside casts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd import Mesh, P, Sharded, checkpoint, device_get, device_put, grad, jit, jvp, make_mesh, reshard, vmap

SHAPES = [(8, 4), (5, 3), (4,), (6, 2, 3)]
DTYPES = [None, torch.float32, torch.bfloat16, torch.float64]  # small integers are exact in each


def drawn(draw: random.Random, mesh: Mesh, ndim: int) -> P:
    """A layout in which each axis cuts a dim, is pending, reduced, or does nothing."""
    cuts: list[list[str]] = [[] for _ in range(ndim)]
    states: dict[str, set[str]] = {"U": set(), "R": set(), "I": set()}
    for axis in mesh.axis_names:
        place = draw.choice([*range(ndim), *range(ndim), *"URI"])
        (cuts[place].append if isinstance(place, int) else states[place].add)(axis)
    return P(*map(tuple, cuts), unreduced=states["U"], reduced=states["R"])


#: what is compared with the value, or (after "d") with the gradient of its weighted sum; both of one function ``move``
PROGRAMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "eager": lambda move, loss, x: move(x),
    "jit": lambda move, loss, x: [f := jit(move), f(x), f(x)][-1],
    "vmap": lambda move, loss, x: vmap(move)(x),
    "jvp": lambda move, loss, x: jvp(move, (x,), (x,))[1],
    "d grad": lambda move, loss, x: grad(loss)(x),
    "d jit": lambda move, loss, x: [f := jit(grad(loss)), f(x), f(x)][-1],
    "d checkpoint": lambda move, loss, x: grad(checkpoint(loss))(x),
    "d vmap of grad": lambda move, loss, x: vmap(grad(loss))(x),
    "d grad of vmap": lambda move, loss, x: grad(lambda x: vmap(loss)(x).sum())(x),
    "d twice": lambda move, loss, x: grad(lambda x: grad(lambda x: (loss(x) ** 2) / 2)(x).sum())(x),
}


def check(way: str, seed: int, mesh: Mesh) -> None:
    """One program, of layouts and dtypes drawn at random."""
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    source, target = (drawn(draw, mesh, len(shape)) for _ in range(2))
    own, forward, backward = draw.choice(DTYPES[1::2]), draw.choice(DTYPES), draw.choice(DTYPES)
    wait, numbers = draw.choice([True, False]), torch.Generator().manual_seed(seed)
    weight = torch.randint(-2, 3, shape, generator=numbers).float()
    mapped = "vmap" in way
    whole = torch.randint(-4, 5, (2, *shape) if mapped else shape, generator=numbers).to(own)
    if mapped:
        source = P(None, *source, unreduced=source.unreduced, reduced=source.reduced)
    x = reshard(device_put(whole, P(), mesh=mesh), source)

    def move(x: Any) -> Any:
        y = reshard(x, target, forward_dtype=forward, backward_dtype=backward, wait=wait)
        return y if wait else y.wait()

    found: Sharded = PROGRAMS[way](move, lambda x: (move(x) * weight).sum(), x)
    told = f"{way} of {source} to {target}, {own}, {forward}, {backward}, wait={wait}"
    want: Tensor = weight * weight.sum() if way == "d twice" else weight.expand_as(whole) if way[0] == "d" else whole
    assert found.dtype == (own if way.startswith("d ") else forward or own), told
    torch.testing.assert_close(device_get(found).double(), want.double(), msg=lambda text: f"{told}: {text}")


def run(seeds: list[int], sizes: tuple[int, ...]) -> None:
    """All programs, on processes where there are such."""
    mesh = make_mesh(sizes, ("a", "b")[: len(sizes)])
    for seed in seeds:
        for way in PROGRAMS:
            check(way, seed * 100 + len(way), mesh)
