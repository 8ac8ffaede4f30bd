"""`fspmd.shard_map` means what its definition says (`reference.py`): values, gradients and gradients of gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

import fspmd
from fspmd import P, device_get, make_mesh

MESHES = ({"x": 2, "y": 3}, {"x": 3, "y": 1}, {"x": 4, "y": 2})
#: a body in terms of the collectives of a module ``c``; the specs of its operands [12, 24] and [24, 12]; of its result
CASES: dict[str, tuple[Callable[..., Tensor], list[Any], tuple[Any, ...]]] = {
    "contraction": (lambda c, a, b: c.psum(a.sin() @ b, "x"), [(None, "x"), ("x", None)], (None, None)),
    "scattered sum": (
        lambda c, a, b: c.psum_scatter((a @ b).tanh(), "x", scatter_dimension=1, tiled=True),
        [(None, "x"), ("x", None)],
        (None, "x"),
    ),
    "gather for use": (
        lambda c, a, b: c.psum(a @ c.all_gather(b, "y", axis=1, tiled=True).cos(), "y"),
        [("x", None), (None, "y")],
        ("x", None),
    ),
    "stacked": (
        lambda c, a, b: c.psum(c.all_gather(a, "x", axis=1).prod(1) * (b**2).sum(), "x"),
        [(None, ("y", "x")), (None, None)],
        (None, "y"),
    ),
    "exchange": (
        lambda c, a, b: c.all_to_all(a, "x", 1, 0, tiled=True).exp() * b.sum(0)[:1],
        [("x", None), (None, None)],
        (None, "x"),
    ),
    "ring": (
        lambda c, a, b: a * c.ppermute(a, "x", [(0, 1), (1, 0)]) + b.sum(),
        [("x", "y"), (None, None)],
        ("x", "y"),
    ),
    "by place": (
        lambda c, a, b: c.psum(a * (c.axis_index("x") + 2 * c.axis_index("y")) + b.mean(), ("x", "y")).square(),
        [("x", "y"), ("y", None)],
        (None, None),
    ),
    "replicated operand": (lambda c, a, b: (a @ b).sin(), [(("x", "y"), None), (None, None)], (("x", "y"), None)),
    "blocks of blocks": (
        lambda c, a, b: a.cumsum(0) * b.sum(),
        [(("x", "y"), None), (None, None)],
        (("x", "y"), None),
    ),
}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_body_means_what_the_definition_says(name: str, sizes: dict[str, int]) -> None:
    body, specs, spec = CASES[name]
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes))
    ours = fspmd.shard_map(
        lambda *blocks: body(fspmd, *blocks), mesh=mesh, in_specs=tuple(P(*one) for one in specs), out_specs=P(*spec)
    )
    theirs = reference.shard_map(lambda *blocks: body(reference, *blocks), sizes, specs, spec)
    found, want = (_derivatives(f) for f in (ours, theirs))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def _derivatives(f: Callable[..., Any]) -> list[Tensor]:
    """The value, the gradients of a function of it, and those of the sum of their squares."""
    numbers = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, generator=numbers) / 5 for shape in ((12, 24), (24, 12))]
    for leaf in leaves:
        leaf.requires_grad_()
    out = device_get(f(*leaves))
    weights = torch.arange(out.numel(), dtype=torch.float64).cos().reshape(out.shape)
    first = torch.autograd.grad((out.square() * weights).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return [out.detach(), *(g.detach() for g in first), *second]


def test_the_documentation_quotes_the_definition() -> None:
    root = Path(__file__).parent
    quoted = re.findall(r"```python\n(.*?)```", (root.parent / "docs" / "shard_map.md").read_text(), re.DOTALL)
    assert len(quoted) == 3
    assert all(one in (root / "reference.py").read_text() for one in quoted)
