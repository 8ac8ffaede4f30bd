"""What check_vma costs per torch call: the same call inside a checked body, outside any, and under an idle mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bodies import RANKS, fake_world, inside, sharded
from timing import Goal, Row, Table, calls, loop, side_by_side
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fspmd
from fspmd import make_mesh

#: by what is timed: the call, of a varying x and an invariant w, both [16, 16], w a parameter
OPS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x + x": lambda x, w: x + x,
    "x @ x": lambda x, w: x @ x,
    "x * w, w invariant (cast once)": lambda x, w: x * w,
    "w * w, both invariant": lambda x, w: w * w,
    "x.sum(dim=1), a keyword": lambda x, w: x.sum(dim=1),
    "F.softmax(x, dim=-1)": lambda x, w: F.softmax(x, dim=-1),
    "torch.cat([x, x]), a list": lambda x, w: torch.cat([x, x]),
    "x[0]": lambda x, w: x[0],
    "x.shape": lambda x, w: x.shape,
}


def measure() -> Table:
    """Each call of `OPS`."""
    fake_world()
    mesh = make_mesh((RANKS,), ("x",), device="cpu")
    return Table(
        "Type tracking, per torch call in a checked body",
        [row for what, op in OPS.items() for row in _rows(mesh, what, op)],
        "The idle mode is a TorchFunctionMode that only calls on: what torch itself asks for seeing every call. With "
        "check_vma=False there is no mode and nothing to measure.",
    )


class IdleMode(TorchFunctionMode):
    """Sees every torch call and does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _rows(mesh: fspmd.Mesh, what: str, op: Callable[[Tensor, Tensor], object]) -> list[Row]:
    x, w = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)

    def idle(number: int) -> float:
        with IdleMode():
            return loop(lambda: op(x, w), number)

    times = side_by_side(
        {
            "outside": calls(lambda: op(x, w)),
            "checked": inside(mesh, sharded(mesh, 16, 16), lambda block: lambda: op(block, w), check_vma=True),
            "idle": idle,
        }
    )
    return [
        Row(what, times["checked"], "outside", times["outside"], Goal(3e-6, "difference")),
        Row(what, times["checked"], "under an idle mode", times["idle"]),
    ]
