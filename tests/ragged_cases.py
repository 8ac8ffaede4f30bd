"""Ragged exchanges: random ones, the rules as a loop over ranks and slices, and one program that runs anywhere."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from collective_cases import DIFFERENTIABLE, MOVED, NAMES, draw
from torch import Tensor

from fspmd import Mesh, P, make_mesh, ragged_all_to_all, shard_map
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

Lists = list[list[int]]  # per rank, a number per slice

MESHES: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((4,), None),
    ((4,), (2, 0, 3, 1)),
    ((3,), (3, 0, 2)),
    ((2, 2), None),
    ((2, 2), (3, 1, 0, 2)),
    ((1, 2), (1, 3)),
    ((1,), (2,)),
)


@dataclass(frozen=True)
class Ragged:
    """One exchange: the four numbers of every slice follow from the seed."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None
    dtype: str
    each: int  # slices for each rank
    rows: tuple[int, int]  # of operand and output
    trailing: tuple[int, ...]
    wait: bool
    seed: int

    def mesh(self, transport: str) -> Mesh:
        names = NAMES[: len(self.mesh_shape)]
        return make_mesh(self.mesh_shape, names, ranks=self.ranks, transport=transport, device="cpu")

    @property
    def size(self) -> int:
        return math.prod(self.mesh_shape)

    def members(self) -> Lists:
        """Positions of the ranks of each group, in rank order."""
        names = NAMES[: len(self.mesh_shape)]
        sizes = dict(zip(names, self.mesh_shape, strict=True))
        found: dict[Any, dict[int, int]] = {}
        for position, at in enumerate(itertools.product(*map(range, self.mesh_shape))):
            where = dict(zip(names, at, strict=True))
            place = 0
            for axis in self.axes:
                place = place * sizes[axis] + where[axis]
            found.setdefault(tuple(where[a] for a in names if a not in self.axes), {})[place] = position
        whole = [[group[i] for i in range(len(group))] for group in found.values()]
        return [[g[i] for i in some] for g in whole for some in self.groups] if self.groups else whole

    def numbers(self) -> tuple[Lists, Lists, Lists, Lists]:
        """input_offsets, send_sizes, output_offsets and recv_sizes of every rank; slices may overlap at either end."""
        rng = random.Random(self.seed)
        n = len(self.members()[0])
        starts: Lists = [[0] * (n * self.each) for _ in range(self.size)]
        sizes, targets, received = ([row[:] for row in starts] for _ in range(3))
        for group in self.members():
            for (i, sender), (j, receiver) in itertools.product(enumerate(group), repeat=2):
                for k in range(self.each):
                    there, here = j * self.each + k, i * self.each + k
                    size = rng.choice([0, 1, 1, 2, 3])
                    size = min(size, *self.rows)
                    sizes[sender][there] = received[receiver][here] = size
                    starts[sender][there] = rng.randint(0, self.rows[0] - size)
                    targets[sender][there] = rng.randint(0, self.rows[1] - size)
        return starts, sizes, targets, received

    def draw(self, salt: str, rows: int, added: bool) -> list[Tensor]:
        """A block per rank."""
        seed = zlib.crc32(f"{self!r}{salt}".encode())
        dtype = getattr(torch, self.dtype)
        return [draw((rows, *self.trailing), dtype, seed + i, added) for i in range(self.size)]


def some_ragged(count: int, seed: int = 0) -> list[Ragged]:
    """A sample with every dtype."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        mesh_shape, ranks = rng.choice(MESHES)
        names = NAMES[: len(mesh_shape)]
        axes = rng.choice([order for k in range(1, len(names) + 1) for order in itertools.permutations(names, k)])
        n = math.prod(dict(zip(names, mesh_shape, strict=True))[axis] for axis in axes)
        groups = rng.choice([None, None, ((3, 1), (0, 2))]) if n == 4 else rng.choice([None, None, ((1, 0),)])
        dtype = rng.choice(DIFFERENTIABLE) if i % 2 else MOVED[i // 2 % len(MOVED)]
        rows = rng.choice([(5, 7), (7, 4), (3, 12), (1, 1), (0, 3), (4, 0)])
        trailing = rng.choice([(), (), (2,), (2, 3), (0,), (1,)])
        groups = groups if n in (2, 4) else None
        found.append(
            Ragged(
                mesh_shape, ranks, axes, groups, dtype, rng.choice([1, 1, 2, 3]), rows, trailing, rng.random() < 0.6, i
            )
        )
    return found


def exchanged(case: Ragged, operand: list[Tensor], output: list[Tensor]) -> list[Tensor]:
    """The judge: for every sender, receiver and slice, row by row."""
    starts, sizes, targets, _ = case.numbers()
    results = [list(block) for block in output]
    for group in case.members():
        for receiver, sender in itertools.product(range(len(group)), repeat=2):
            for k in range(case.each):
                here, slice_ = group[sender], receiver * case.each + k
                for row in range(sizes[here][slice_]):
                    source = operand[here][starts[here][slice_] + row]
                    results[group[receiver]][targets[here][slice_] + row] = source
    return [torch.stack(rows) if rows else block for rows, block in zip(results, output, strict=True)]


def expected_ragged(case: Ragged) -> list[list[Tensor]]:
    """Result, gradients of operand and output, and the gradients of those with respect to the cotangent."""
    operand, output = case.draw("in", case.rows[0], False), case.draw("out", case.rows[1], False)
    if case.dtype not in DIFFERENTIABLE:
        words = {"float4_e2m1fn_x2": torch.uint8, "bits8": torch.uint8, "bits16": torch.int16}.get(case.dtype)
        if words is None:
            return [exchanged(case, operand, output)]
        moved = exchanged(case, [x.view(words) for x in operand], [x.view(words) for x in output])
        return [[x.view(getattr(torch, case.dtype)) for x in moved]]
    leaves = [x.requires_grad_() for x in (*operand, *output)]
    ct = [x.requires_grad_() for x in case.draw("ct", case.rows[1], True)]
    v, w = case.draw("v", case.rows[0], True), case.draw("w", case.rows[1], True)
    y = exchanged(case, leaves[: case.size], leaves[case.size :])
    grads = torch.autograd.grad(y, leaves, ct, create_graph=True, allow_unused=True, materialize_grads=True)
    followed = [(g, u) for g, u in zip(grads, (*v, *w), strict=True) if g.requires_grad]
    second: Any = [None] * case.size
    if followed:
        second = torch.autograd.grad([g for g, _ in followed], ct, [u for _, u in followed], allow_unused=True)
    whole = [torch.zeros_like(c) if s is None else s for s, c in zip(second, ct, strict=True)]
    return [list(y), list(grads[: case.size]), list(grads[case.size :]), whole]


def run_ragged(case: Ragged, transport: str) -> list[list[Tensor]] | None:
    """The same by the call itself, on the ranks this process plays."""
    mesh = case.mesh(transport)
    if mesh.coordinate() is None:
        return None
    blocks = [case.draw("in", case.rows[0], False), case.draw("out", case.rows[1], False)]
    blocks += [
        case.draw("ct", case.rows[1], True),
        case.draw("v", case.rows[0], True),
        case.draw("w", case.rows[1], True),
    ]
    arguments = [torch.stack(list_of_blocks) for list_of_blocks in blocks]
    arguments += [torch.tensor(rows, dtype=torch.int32) for rows in case.numbers()]
    results: list[Tensor] = []
    follow = case.dtype in DIFFERENTIABLE

    def body(*values: Tensor) -> Tensor:
        operand, output, ct, v, w, *numbers = (x.squeeze(0).clone() for x in values)
        for x in (operand, output, ct) if follow else ():
            x.requires_grad_()
        y = ragged_all_to_all(
            operand, output, *numbers, axis_name=case.axes, axis_index_groups=case.groups, wait=case.wait
        )
        y = y if case.wait else y.wait()
        results.append(y)
        if follow:
            grads = torch.autograd.grad(y, (operand, output), ct, create_graph=True)
            results.extend(grads)
            results.extend(torch.autograd.grad(grads, ct, (v, w)))
        return torch.zeros(())

    spec = P(NAMES[: len(case.mesh_shape)])
    shard_map(body, mesh=mesh, in_specs=spec, out_specs=P())(*arguments)
    if transport == "simulation":
        whole = frame_over(mesh, mesh.axis_names)
        return [[b.detach() for b in shards_of(r.detach(), whole)] for r in results]
    return [[r.detach()] for r in results]
