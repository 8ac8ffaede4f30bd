"""Which of two layouts is quicker, as it is predicted and as it is measured, on four processes with Gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from ranks import RANKS, aligned, on_processes
from timing import Goal, Row, Table, side_by_side

import fspmd
from fspmd import Mesh, P, TensorSpec, Topology, jit, make_mesh

Specs = Mapping[str, tuple[tuple[int, ...], P]]
F32 = torch.float32


def measure() -> Table:
    """The times of the first of four processes."""
    return on_processes(_rows)


def mlp(v: Any) -> Any:
    """Two products and what lies between."""
    return (F.gelu(v["x"] @ v["up"]) @ v["down"]).square().sum()


def scores(v: Any) -> Any:
    """A table looked up, and scores against all of it."""
    return F.cross_entropy(F.embedding(v["x"], v["table"]) @ v["table"].transpose(0, 1), v["x"])


def _mlp(rows: int, width: int, x: P, up: P, down: P) -> Specs:
    hidden = 4 * width
    return {"x": ((rows, width), x), "up": ((width, hidden), up), "down": ((hidden, width), down)}


def _scores(rows: int, words: int, x: P, table: P) -> Specs:
    return {"x": ((rows,), x), "table": ((words, 256), table)}


#: what is run, and by name how its arguments lie
CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Specs]]] = {
    "MLP of 768, 32 rows": (
        mlp,
        {
            "columns, then rows": _mlp(32, 768, P(), P(None, "x"), P("x")),
            "data parallel": _mlp(32, 768, P("x"), P(), P()),
        },
    ),
    "MLP of 16, 65,536 rows": (
        mlp,
        {
            "data parallel": _mlp(65536, 16, P("x"), P(), P()),
            "columns, then rows": _mlp(65536, 16, P(), P(None, "x"), P("x")),
        },
    ),
    "MLP of 512, 64 rows": (
        mlp,
        {
            "columns, then rows": _mlp(64, 512, P(), P(None, "x"), P("x")),
            "rows, then columns": _mlp(64, 512, P(), P("x"), P(None, "x")),
        },
    ),
    "16,384 words, 64 rows": (
        scores,
        {
            "words cut": _scores(64, 16384, P(), P("x")),
            "data parallel": _scores(64, 16384, P("x"), P()),
        },
    ),
}


def _rows(mesh: Mesh) -> Table:
    links = fspmd.measure_topology(mesh)
    links = Topology(links.inside, links.between, links.per_host, links.launch, links.memory, _flops(), axes=links.axes)
    rows = []
    for what, (function, layouts) in CASES.items():
        predicted, samplers = {}, {}
        for name, specs in layouts.items():
            step: Any = jit(fspmd.value_and_grad(lambda w, x, f=function: f({**w, "x": x})))
            predicted[name] = step.lower(*_parted(_abstract(specs))).cost(links).time
            samplers[name] = aligned(functools.partial(step, *_parted(_values(specs, mesh))))
        (one, other), times = layouts, side_by_side(samplers, repeats=9, number=2)
        shown = {name: f"{name} (predicted {time / 1e3:.1f} ms)" for name, time in predicted.items()}
        quicker, slower = (one, other) if predicted[one] < predicted[other] else (other, one)
        rows.append(Row(f"{what}: {shown[quicker]}", times[quicker], shown[slower], times[slower], Goal(1.0, "ratio")))
    return Table(
        f"Predicted and measured, {RANKS} processes with Gloo",
        rows,
        "A step, forward and backward, replayed by jit; time on the wall. The first layout of each row is the one that "
        "is predicted to be quicker, by links measured on the spot.",
    )


def _parted(values: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return {name: value for name, value in values.items() if name != "x"}, values["x"]


def _flops() -> float:
    """Operations of a product in a µs, while all processes compute."""
    a = torch.randn(256, 256)
    times = side_by_side({"mm": aligned(lambda: a @ a)}, repeats=9, number=20)
    return 2 * 256**3 / (times["mm"].median * 1e6)


def _abstract(specs: Specs) -> dict[str, TensorSpec]:
    mesh = make_mesh((RANKS,), ("x",), device="cpu", transport="abstract")
    return {name: TensorSpec(mesh, spec, shape, _dtype(shape)) for name, (shape, spec) in specs.items()}


def _values(specs: Specs, mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(0)
    made = {}
    for name, (shape, spec) in specs.items():
        whole = torch.randint(1000, shape) if len(shape) == 1 else torch.randn(shape) / shape[0] ** 0.5
        made[name] = fspmd.device_put(whole, spec, mesh=mesh)
    return made


def _dtype(shape: tuple[int, ...]) -> torch.dtype:
    return torch.int64 if len(shape) == 1 else F32
