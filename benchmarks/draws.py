"""What random numbers cost on the CPU, beside torch's own, which no layout and no other device draws again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bodies import RANKS, fake_world
from timing import Goal, Row, Table, calls, side_by_side

import fspmd
from fspmd import P, make_mesh

SIZES = (1_000_000, 50_000, 10_000)


def measure() -> Table:
    """The block of rank 0 of 8, of so many numbers."""
    fake_world()
    mesh = make_mesh((RANKS,), ("x",))
    spec, rows = P("x"), []
    for n in SIZES:
        plain = torch.full((n,), 0.3)
        ours = fspmd.full((RANKS * n,), 0.3, mesh=mesh, spec=spec)
        pairs = {
            "rand": (lambda n=RANKS * n: fspmd.rand(n, mesh=mesh, spec=spec), lambda n=n: torch.rand(n)),
            "randn": (lambda n=RANKS * n: fspmd.randn(n, mesh=mesh, spec=spec), lambda n=n: torch.randn(n)),
            "randint": (
                lambda n=RANKS * n: fspmd.randint(0, 1000, (n,), mesh=mesh, spec=spec),
                lambda n=n: torch.randint(0, 1000, (n,)),
            ),
            "bernoulli": (lambda x=ours: torch.bernoulli(x), lambda x=plain: torch.bernoulli(x)),
            "dropout": (lambda x=ours: F.dropout(x, 0.1), lambda x=plain: F.dropout(x, 0.1)),
        }
        for what, (mine, theirs) in pairs.items():
            found = side_by_side({"ours": calls(mine), "torch": calls(theirs)})
            rows.append(Row(f"{what} of {n:,}", found["ours"], "torch", found["torch"], Goal(1.5, "ratio")))
    return Table("Random numbers on the CPU", rows)
