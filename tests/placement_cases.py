"""Values put on meshes and taken off them: cases, a judge that cuts with torch.chunk, and the same program anywhere."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from collective_cases import ADDED, DIFFERENTIABLE, MOVED, NAMES, chunks, draw
from torch import Tensor

from fspmd import Mesh, P, TensorSpec, device_get, device_put, from_callback, from_local, make_mesh
from fspmd.placement.scatter import ScatterRoute, _Scatter
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

MESHES: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((4,), None),
    ((4,), (2, 0, 3, 1)),
    ((3,), (3, 0, 2)),
    ((2, 2), None),
    ((2, 2), (3, 1, 0, 2)),
    ((2, 1, 2), (1, 3, 2, 0)),
    ((1,), (2,)),
)
SHAPES = ((), (4,), (7,), (0,), (4, 4), (5, 4), (3, 2), (1, 3), (2, 0), (5, 3, 2))


@dataclass(frozen=True)
class Placement:
    """A tensor of a shape and dtype under a partition of a mesh; ``source`` is the position of the rank that has it."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    dtype: str
    shape: tuple[int, ...]
    entries: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]
    source: int

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(NAMES, self.mesh_shape, strict=False))

    @property
    def partition(self) -> P:
        return P(*self.entries, unreduced=self.unreduced, reduced=self.reduced)

    def mesh(self, transport: str) -> Mesh:
        names = NAMES[: len(self.mesh_shape)]
        return make_mesh(self.mesh_shape, names, ranks=self.ranks, transport=transport, device="cpu")

    def draw(self, salt: str, added: bool) -> Tensor:
        seed = zlib.crc32(f"{self!r}{salt}".encode())
        return draw(self.shape, getattr(torch, self.dtype), seed, added)

    @property
    def whole(self) -> Tensor:
        """The global tensor; small integers where it will be added up."""
        return self.draw("x", bool(self.unreduced))

    def coordinates(self) -> list[dict[str, int]]:
        names = NAMES[: len(self.mesh_shape)]
        return [dict(zip(names, at, strict=True)) for at in itertools.product(*map(range, self.mesh_shape))]

    def block(self, whole: Tensor, at: dict[str, int]) -> Tensor:
        """The judge: what the rank at a coordinate holds."""
        if any(at[axis] for axis in self.unreduced):
            whole = torch.zeros_like(whole)
        for dim, axes in enumerate(self.entries):
            if axes:
                place = 0
                for axis in axes:
                    place = place * self.sizes[axis] + at[axis]
                whole = chunks(whole, tuple(self.sizes[axis] for axis in axes), dim)[place]
        return whole


def some_placements(count: int, seed: int = 0) -> list[Placement]:
    """A sample in which every dtype stands more than once."""
    rng = random.Random(seed)
    found: dict[Placement, None] = {}
    for i in range(count):
        mesh_shape, ranks = rng.choice(MESHES)
        shape = rng.choice(SHAPES)
        dtype = rng.choice(DIFFERENTIABLE) if i % 2 else MOVED[i // 2 % len(MOVED)]
        entries, unreduced, reduced = cut(rng, len(mesh_shape), len(shape), dtype)
        source = rng.randrange(math.prod(mesh_shape))
        found[Placement(mesh_shape, ranks, dtype, shape, entries, unreduced, reduced, source)] = None
    return list(found)


Axes = tuple[str, ...]


def cut(rng: random.Random, mesh_dims: int, dims: int, dtype: str) -> tuple[tuple[Axes, ...], Axes, Axes]:
    """Entries, unreduced and reduced axes."""
    axes = list(NAMES[:mesh_dims])
    rng.shuffle(axes)
    entries: list[list[str]] = [[] for _ in range(dims)]
    unreduced: list[str] = []
    reduced: list[str] = []
    for axis in axes:
        rng.choice([*entries, *entries, unreduced, reduced, []]).append(axis)
    if dtype not in ADDED:
        unreduced = []
    return tuple(map(tuple, entries)), tuple(unreduced), tuple(reduced)


def some_moves(count: int, seed: int = 0) -> list[tuple[Placement, Placement]]:
    """Pairs of placements of one tensor on the same ranks."""
    rng = random.Random(seed)
    moves = []
    for start in some_placements(count, seed):
        ranks = set(start.mesh("simulation").ranks)
        alike = [m for m in MESHES if set(m[1] or range(math.prod(m[0]))) == ranks]
        mesh = (start.mesh_shape, start.ranks) if rng.random() < 0.7 else rng.choice(alike)
        entries, unreduced, reduced = cut(rng, len(mesh[0]), len(start.shape), start.dtype)
        end = replace(start, mesh_shape=mesh[0], ranks=mesh[1], entries=entries, unreduced=unreduced, reduced=reduced)
        moves.append((start, end))
    return moves


#: what `run_placement` gives, in order: blocks put, put from a source, from a callback and from local ones, the global
#: tensor back, gradients through put and get, through a scatter (on the source only), and of that gradient
RESULTS = ("put", "scattered", "called", "local", "got", "gradient", "scattered gradient", "second")


def run_placement(case: Placement, transport: str) -> list[list[Tensor]] | None:
    """The results on every rank this process plays, None outside the mesh."""
    mesh = case.mesh(transport)
    here = mesh.coordinate()
    if here is None:
        return None
    simulated = transport == "simulation"
    whole, partition = case.whole, case.partition
    spec = TensorSpec(mesh, partition, whole.shape, whole.dtype)
    source = mesh.ranks[case.source]
    at_source = simulated or mesh.coordinate(source) == here

    def blocks(x: Tensor) -> list[Tensor]:
        return list(shards_of(x.detach(), frame_over(mesh, mesh.axis_names))) if simulated else [x.detach()]

    put = device_put({"w": whole}, partition, mesh=mesh)["w"]
    assert put.spec is spec
    tree = {"w": whole if at_source else None, "none": None} if at_source or case.source % 2 else None
    scattered = device_put(tree, partition, mesh=mesh, src=source)
    assert scattered["w"].spec is spec
    assert scattered["none"] is None
    results = [blocks(put.local), blocks(scattered["w"].local)]
    if case.unreduced:  # a callback makes terms, not the sum
        results.append(results[0])
    else:
        results.append(blocks(from_callback(whole.shape, partition, lambda index: whole[index], mesh=mesh).local))
    local = from_local(put.local, partition, mesh=mesh)
    assert local.spec is spec
    assert from_local(put.local, spec).spec is spec
    results += [blocks(local.local), blocks(device_get(put))]
    if case.dtype in DIFFERENTIABLE:
        results += _gradients(case, mesh, spec, source, at_source, blocks)
    return results


def _gradients(case: Placement, mesh: Mesh, spec: TensorSpec, source: int, at_source: bool, blocks: Any) -> Any:
    ct, v = case.draw("ct", True), case.draw("v", True)
    leaf = case.whole.requires_grad_()
    device_get(device_put(leaf, case.partition, mesh=mesh)).backward(ct)
    assert leaf.grad is not None
    held = case.whole.requires_grad_()
    device_get(device_put(held if at_source else None, case.partition, mesh=mesh, src=source)).backward(ct)
    got = held.grad if at_source else None
    second = [torch.zeros(0)] if mesh.transport != "simulation" else [torch.zeros(0)] * mesh.size
    if mesh.transport != "simulation":  # in a simulation device_put does not scatter
        route = ScatterRoute(spec, case.source, _place(mesh), mesh.device)
        anchor = (case.whole if at_source else torch.zeros(0, dtype=spec.dtype)).requires_grad_()
        block = _Scatter.apply(anchor, route, False)
        cotangent = torch.ones_like(block).requires_grad_()
        (gradient,) = torch.autograd.grad(block, anchor, cotangent, create_graph=True)
        second = [torch.autograd.grad(gradient, cotangent, v if at_source else torch.zeros(0, dtype=spec.dtype))[0]]
    return [blocks(leaf.grad), blocks(got if got is not None else torch.zeros(0)), second]


def _place(mesh: Mesh) -> int:
    place = 0
    for index, size in zip(mesh.coordinate() or (), mesh.shape.values(), strict=True):
        place = place * size + index
    return place


def expected_placement(case: Placement) -> dict[str, list[Tensor]]:
    """The judge's results for every rank."""
    whole, ct, v = case.whole, case.draw("ct", True), case.draw("v", True)
    at = case.coordinates()
    placed = [case.block(whole, one) for one in at]
    everywhere = [whole] * len(at)
    return {
        "put": placed,
        "scattered": placed,
        "called": placed,
        "local": placed,
        "got": everywhere,
        "gradient": [ct] * len(at),
        "scattered gradient": [ct if i == case.source else torch.zeros(0) for i in range(len(at))],
        "second": [case.block(v, one) for one in at],
    }
