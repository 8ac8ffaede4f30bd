"""What one torch function on `Sharded` values costs above the same on plain tensors, beside DTensor."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bodies import Pair, fake_world, meshes, pair
from timing import Overhead, Table, calls, side_by_side
from torch import Tensor

import fspmd
from fspmd import P

N = 16  # each dim of a block
MEDIAN, HIGHEST = 1 / 5, 1 / 3  # of the ratios of overheads


@dataclass(frozen=True, slots=True)
class Case:
    """A function, and for one mesh axis and for two how its operands lie."""

    what: str
    call: Callable[..., Any]
    one: tuple[P, ...]
    two: tuple[P, ...]
    dims: tuple[int, ...] = ()  # of each operand; by default two


ROWS, OVER, BOTH = P("x", None), P("x", "y"), P(("x", "y"), None)
WHOLE, BIAS = P(None, None, reduced={"x"}), P(None, reduced={"x"})
WHOLE2, BIAS2 = P(None, None, reduced={"x", "y"}), P(None, reduced={"x", "y"})

CASES = (
    Case("x + y", lambda x, y: x + y, (ROWS, ROWS), (OVER, OVER)),
    Case("x * 0.5", lambda x: x * 0.5, (ROWS,), (OVER,)),
    Case("relu(x)", torch.relu, (ROWS,), (OVER,)),
    Case("mm, replicated", torch.mm, (P(), P()), (P(), P())),
    Case("mm, columns", torch.mm, (WHOLE, P(None, "x")), (P("x", reduced={"y"}), P(None, "y", reduced={"x"}))),
    Case("mm, rows", torch.mm, (P(None, "x"), ROWS), (OVER, P("y", reduced={"x"}))),
    Case(
        "addmm",
        torch.addmm,
        (BIAS, ROWS, WHOLE),
        (P("y", reduced={"x"}), P("x", reduced={"y"}), P(None, "y", reduced={"x"})),
        (1, 2, 2),
    ),
    Case(
        "linear",
        F.linear,
        (ROWS, WHOLE, BIAS),
        (P("x", reduced={"y"}), P("y", reduced={"x"}), P("y", reduced={"x"})),
        (2, 2, 1),
    ),
    Case("sum(dim=1)", lambda x: x.sum(dim=1), (ROWS,), (BOTH,)),
    Case("transpose", lambda x: x.transpose(0, 1), (ROWS,), (OVER,)),
    Case("view", lambda x: x.view(x.shape[0], 4, 4), (ROWS,), (BOTH,)),
    Case("slice", lambda x: x[:, 2:6], (ROWS,), (BOTH,)),
    Case("cat", lambda x, y: torch.cat([x, y], dim=1), (ROWS, ROWS), (BOTH, BOTH)),
    Case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (N,), w, b),
        (ROWS, BIAS, BIAS),
        (BOTH, BIAS2, BIAS2),
        (2, 1, 1),
    ),
    Case("softmax", lambda x: F.softmax(x, dim=-1), (ROWS,), (BOTH,)),
)


def measure() -> Table:
    """Each of `CASES` on one mesh axis and on two, without gradient, and forward and backward."""
    fake_world()
    rows = []
    for axes in (1, 2):
        mesh = meshes(axes)
        for case in CASES:
            specs = case.one if axes == 1 else case.two
            dims = case.dims or (2,) * len(specs)
            for grad in (False, True):
                operands = [pair(mesh, spec, (N,) * n, grad=grad) for spec, n in zip(specs, dims, strict=True)]
                rows.append(_row(f"{case.what}, {axes} {'axis' if axes == 1 else 'axes'}", case.call, operands, grad))
    return Table(
        "A function on blocks of 16 numbers per dim, 8 ranks of the fake backend",
        rows,
        "Overheads are times above the function on plain blocks. Operands that DTensor's gradient would leave as "
        "a pending sum are `reduced` here, so that neither communicates.",
        _summary(rows),
    )


def _summary(rows: list[Overhead]) -> str:
    ratios = [row.ratio for row in rows]
    above = [row.what for row in rows if row.ratio > HIGHEST]
    return (
        f"The median of {len(rows)} ratios is {statistics.median(ratios):.3f} (goal: at most {MEDIAN:.2f}), "
        f"the highest {max(ratios):.2f} (goal: at most {HIGHEST:.2f}); above that: {', '.join(above) or 'none'}."
    )


def _row(what: str, call: Callable[..., Any], operands: list[Pair], grad: bool) -> Overhead:
    columns = {
        "plain": [one.plain for one in operands],
        "ours": [one.ours for one in operands],
        "theirs": [one.theirs for one in operands],
    }
    statement = _with_gradient if grad else _without_gradient
    times = side_by_side({name: calls(statement(call, values)) for name, values in columns.items()})
    return Overhead(
        f"{what}{', and gradient' if grad else ''}", times["plain"], times["ours"], times["theirs"], HIGHEST
    )


def _without_gradient(call: Callable[..., Any], values: list[Any]) -> Callable[[], object]:
    return lambda: call(*values)


def _with_gradient(call: Callable[..., Any], values: list[Any]) -> Callable[[], object]:
    """Forward and backward; the blocks' own gradients are dropped in between, for each kind of value alike."""
    out = call(*values)
    one = torch.ones_like(out.detach())
    if isinstance(out, fspmd.Sharded):
        one = fspmd.Sharded(torch.ones_like(out.local.detach()), out.spec.dual)
    leaves: list[Tensor] = [getattr(value, "local", value) for value in values]

    def statement() -> None:
        call(*values).backward(one)
        for leaf in leaves:
            leaf.grad = None

    return statement
