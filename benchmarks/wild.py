"""What a plan takes at most: first calls of all kinds of functions on many axes, in layouts drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bodies import fake_world
from misses import forget
from timing import Goal, Row, Table, Timing, loop, summary

from fspmd import Mesh, P, Sharded, TensorSpec, make_mesh

MESHES = ((4, 4, 2), (2, 2, 2, 2, 2))  # on four hosts
LAYOUTS = 6  # of each function, on each mesh
BOUND = 0.1  # s


def _multihead(x: Any, w: Any, o: Any) -> Any:
    return F.multi_head_attention_forward(x, x, x, 32, 4, w, None, None, None, False, 0.0, o, None, need_weights=False)[
        0
    ]


def _grouped(x: Any, w: Any) -> Any:
    return F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=torch.tensor([8, 16, 32, 64], dtype=torch.int32))


#: by name: a function, and the shapes of its operands
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "x + y": (torch.add, [(64, 32), (64, 32)]),
    "x + y, broadcast": (torch.add, [(8, 8, 32), (8, 1, 32)]),
    "where": (lambda x, y, z: torch.where(x > 0, y, z), [(64, 32), (64, 32), (32,)]),
    "mm": (torch.mm, [(64, 32), (32, 128)]),
    "addmm": (torch.addmm, [(128,), (64, 32), (32, 128)]),
    "bmm": (torch.bmm, [(8, 64, 32), (8, 32, 64)]),
    "matmul": (torch.matmul, [(8, 4, 16, 32), (32, 64)]),
    "einsum": (lambda x, y: torch.einsum("bshd,bthd->bhst", x, y), [(8, 16, 8, 16), (8, 32, 8, 16)]),
    "einsum of three": (lambda x, y, z: torch.einsum("bi,ij,bj->b", x, y, z), [(16, 32), (32, 64), (16, 64)]),
    "linear": (F.linear, [(16, 64, 32), (128, 32), (128,)]),
    "bilinear": (F.bilinear, [(16, 8), (16, 16), (32, 8, 16)]),
    "attention": (F.scaled_dot_product_attention, [(8, 8, 32, 16)] * 3),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [(8, 8, 32, 16)] * 3 + [(8, 1, 32, 32)],
    ),
    "conv1d": (F.conv1d, [(8, 16, 64), (32, 16, 3), (32,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [(8, 16, 32, 32), (32, 16, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(8, 16, 16, 16), (16, 8, 2, 2)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(8, 16, 32, 32)]),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 1, 1), [(8, 16, 64)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 4), [(8, 16, 32, 32)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), [(8, 16, 16, 16)]),
    "softmax": (lambda x: F.softmax(x, -1), [(16, 32, 64)]),
    "log_softmax": (lambda x: F.log_softmax(x, 1), [(16, 32, 64)]),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, (y.abs() > 1).long()), [(64, 128), (64,)]),
    "mse_loss": (F.mse_loss, [(64, 32), (64, 32)]),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [(64, 32), (64, 32)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), [(16, 16, 32), (32,), (32,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (32,), w), [(16, 16, 32), (32,)]),
    "group_norm": (lambda x, w: F.group_norm(x, 4, w), [(16, 16, 32), (16,)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(16, 16, 32)]),
    "embedding": (lambda i, w: F.embedding((i > 0).long(), w), [(16, 64), (128, 32)]),
    "dropout": (F.dropout, [(64, 32)]),
    "gelu": (F.gelu, [(16, 64, 32)]),
    "sum": (lambda x: x.sum(1), [(16, 64, 32)]),
    "var": (lambda x: x.var((0, 2)), [(16, 64, 32)]),
    "argmax": (lambda x: x.argmax(1), [(16, 64, 32)]),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), [(16, 64, 32)]),
    "logsumexp": (lambda x: x.logsumexp(0), [(16, 64, 32)]),
    "sort": (lambda x: x.sort(1).values, [(16, 64, 32)]),
    "topk": (lambda x: x.topk(4, 1).values, [(16, 64, 32)]),
    "median": (lambda x: x.median(), [(64, 32)]),
    "cumsum": (lambda x: x.cumsum(1), [(16, 64, 32)]),
    "cummax": (lambda x: x.cummax(0).values, [(16, 64, 32)]),
    "x[:, 3:]": (lambda x: x[:, 3:], [(16, 64, 32)]),
    "x[i]": (lambda x, i: x[(i > 0).long()], [(64, 16, 32), (32,)]),
    "x[i, j]": (lambda x, i: x[(i > 0).long(), :, (i > 0).long()], [(64, 16, 32), (32,)]),
    "index_select": (lambda x, i: x.index_select(1, (i > 0).long()), [(16, 64, 32), (32,)]),
    "gather": (lambda x, i: x.gather(1, (i > 0).long()), [(16, 64, 32), (16, 32, 32)]),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, (i > 0).long(), y), [(16, 64), (16, 32), (16, 32)]),
    "index_add": (lambda x, i, y: x.index_add(0, (i > 0).long(), y), [(64, 32), (16,), (16, 32)]),
    "index_put": (lambda x, i, y: x.index_put(((i > 0).long(),), y, accumulate=True), [(64, 32), (16,), (16, 32)]),
    "masked_fill": (lambda x, m: x.masked_fill(m > 0, 0.0), [(16, 64, 32), (64, 1)]),
    "narrow": (lambda x, y: (x * 2).narrow(0, 8, 8) + y, [(64, 32), (8, 32)]),
    "cat": (lambda *x: torch.cat(x, 1), [(16, 64, 32), (16, 32, 32), (16, 32, 32)]),
    "stack": (lambda *x: torch.stack(x, 1), [(16, 64)] * 3),
    "split": (lambda x: x.split(24, 1), [(16, 64, 32)]),
    "chunk": (lambda x: x.chunk(4, 1), [(16, 64, 32)]),
    "reshape": (lambda x: x.reshape(16 * 64, 32), [(16, 64, 32)]),
    "view that splits": (lambda x: x.reshape(16, 64, 4, 8), [(16, 64, 32)]),
    "flatten and mm": (lambda x, w: x.flatten(0, 1) @ w, [(16, 64, 32), (32, 64)]),
    "transpose": (lambda x: x.transpose(0, 2), [(16, 64, 32)]),
    "permute and reshape": (lambda x: x.permute(0, 2, 1, 3).reshape(8, 32, 64), [(8, 8, 32, 8)]),
    "expand": (lambda x: x.expand(8, 16, 32), [(16, 32)]),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 0)), [(16, 64, 32)]),
    "roll": (lambda x: x.roll(3, 1), [(16, 64, 32)]),
    "flip": (lambda x: x.flip(1), [(16, 64, 32)]),
    "repeat": (lambda x: x.repeat(2, 1), [(64, 32)]),
    "tril": (torch.tril, [(16, 64, 32)]),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), [(16, 32, 32)]),
    "unfold": (lambda x: x.unfold(1, 4, 2), [(16, 64, 32)]),
    "fft": (lambda x: torch.fft.rfft(x, dim=1), [(16, 64, 32)]),
    "cdist": (torch.cdist, [(8, 32, 16), (8, 64, 16)]),
    "cosine_similarity": (F.cosine_similarity, [(16, 64, 32), (16, 64, 32)]),
    "kron": (torch.kron, [(8, 4), (8, 16)]),
    "outer": (torch.outer, [(64,), (32,)]),
    "lerp": (torch.lerp, [(64, 32), (64, 32), (32,)]),
    "addcmul": (torch.addcmul, [(64, 32), (64, 32), (64, 1)]),
    "multi-head attention": (_multihead, [(32, 8, 32), (96, 32), (32, 32)]),
    "grouped_mm": (_grouped, [(64, 32), (4, 32, 64)]),
    "norm of a list": (lambda *x: torch.nn.utils.get_total_norm(x), [(64, 32), (32,), (16, 16)]),
}


def layout(draw: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> TensorSpec:
    """A layout in which each axis cuts some dim, is pending or reduced, or does nothing."""
    cuts: list[list[str]] = [[] for _ in shape]
    states: dict[str, set[str]] = {"U": set(), "R": set(), "I": set()}
    share = draw.choice([0.0, 0.2, 0.5, 1.0])
    for axis in draw.sample(mesh.axis_names, len(mesh.axis_names)):
        state = "U" if draw.random() < share else draw.choice(["R", "I", "V", "V", "V", "V"])
        if state == "V":
            draw.choice(cuts).append(axis)
        else:
            states[state].add(axis)
    partition = P(*map(tuple, cuts), unreduced=states["U"], reduced=states["R"])
    return TensorSpec(mesh, partition, shape, torch.float32)


def planning(call: Callable[..., Any], specs: list[TensorSpec], followed: bool) -> float:
    """Seconds of a plan: by which a first call is longer than the next; with gradients it makes two."""
    values = [Sharded(torch.zeros(s.block_shape, requires_grad=followed), s) for s in specs]
    forget()
    first, second = (loop(lambda: call(*values), 1) for _ in range(2))
    return (first - second) / (2 if followed else 1)


def measure() -> Table:
    """The longest of so many layouts; beside it the median."""
    fake_world(32)
    rows = []
    for sizes in MESHES:
        mesh = make_mesh(sizes, tuple("abcde")[: len(sizes)])
        for what, (call, shapes) in CASES.items():
            draw, times = random.Random(what), list[float]()
            for i in range(-1, LAYOUTS):
                taken = planning(call, [layout(draw, mesh, shape) for shape in shapes], bool(i % 2))
                times += [taken] * (i >= 0)  # the first call learns of torch's functions
            half, longest = summary(times), Timing(max(times), max(times), max(times), LAYOUTS, 1)
            rows.append(Row(f"{what}, {len(sizes)} axes", longest, "median", half, Goal(BOUND)))
    return Table(
        "Plans on three axes and on five, 32 ranks of the fake backend: the longest of 6 layouts drawn at random",
        rows,
        "Each axis cuts some dim of an operand, is pending, reduced, or does nothing. A plan takes what a first call "
        "takes beyond the next; calls with gradients, which are half of them, make two, and count half.",
    )
