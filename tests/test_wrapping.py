"""Libraries that are imported before the first mesh, and have copies of functions that fspmd wraps in torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import tensordict.nn
import torch
from fspmd import P, VarianceError, device_get, device_put, make_mesh, shard_map, typeof

mesh = make_mesh((2,), ("x",), transport="simulation")
x = torch.arange(8.0).view(4, 2)
y = torch.vmap(lambda row: row.sin() * 2)(device_put(x, P(None, "x"), mesh=mesh))
torch.testing.assert_close(device_get(y), 2 * x.sin())
f = shard_map(lambda x: torch.func.vmap(lambda row: row * 2)(x).sum(), mesh=mesh, in_specs=P("x"), out_specs=P())
try:
    f(x)
except VarianceError:
    print("types are kept")
g = shard_map(lambda x: x.sin(), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
torch.testing.assert_close(device_get(torch.func.jacrev(g)(x[:, 0])), x[:, 0].cos().diag())
print("right")
"""


def test_tensordict_before_the_first_mesh() -> None:
    """It puts functions of its own into ``torch.func``, which call the functions that it found there."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.split("\n")[:2] == ["types are kept", "right"], run.stderr
