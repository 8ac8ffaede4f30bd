"""Meshes of a million ranks: making, slicing, flattening and pickling one, beside torch's DeviceMesh."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from typing import Any

from bodies import fake_world
from timing import Goal, Row, Table, summary
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fspmd

SHAPE, NAMES = (64, 125, 125), ("a", "b", "c")
REPEATS = 7
Operations = dict[str, Callable[[Any], Any]]

OURS: Operations = {
    "make": lambda _: fspmd.make_mesh(SHAPE, NAMES, device="cpu"),
    'slice: mesh["a", "b"]': lambda mesh: mesh["a", "b"],
    'flatten ("a", "b")': lambda mesh: mesh.flatten(("a", "b"), "ab"),
    "pickle": pickle.dumps,
}


def _flatten(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["a", "b"]._flatten("ab")


THEIRS: Operations = {
    "make": lambda _: init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES),
    'slice: mesh["a", "b"]': lambda mesh: mesh["a", "b"],
    'flatten ("a", "b")': _flatten,
    "pickle": pickle.dumps,
}


def measure() -> Table:
    """Every operation once on each of `REPEATS` fresh meshes, ours and torch's in turns: both remember slices."""
    fake_world(math.prod(SHAPE))
    samples: dict[tuple[str, str], list[float]] = {}
    sizes: dict[str, int] = {}
    for _ in range(REPEATS):
        for who, operations in (("ours", OURS), ("theirs", THEIRS)):
            mesh = None
            for what, operation in operations.items():
                start = time.thread_time()
                out = operation(mesh)
                samples.setdefault((who, what), []).append(time.thread_time() - start)
                mesh = out if mesh is None else mesh
            start = time.thread_time()
            pickle.loads(out)
            samples.setdefault((who, "unpickle"), []).append(time.thread_time() - start)
            sizes[who] = len(out)
    rows = [
        Row(
            what,
            summary(samples["ours", what]),
            "torch DeviceMesh",
            summary(samples["theirs", what]),
            Goal(10e-3),
        )
        for who, what in samples
        if who == "ours"
    ]
    return Table(
        f"A mesh of {' x '.join(map(str, SHAPE))} = {math.prod(SHAPE):,} ranks, fake backend",
        rows,
        "torch makes the process groups of every axis, of a flattened one too, along with the mesh; ours are made when "
        f"first used. The pickles have {sizes['ours']:,} bytes and {sizes['theirs']:,} bytes.",
    )
