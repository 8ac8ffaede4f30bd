"""What ``import fspmd`` costs beyond ``import torch, optree``, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from timing import Goal, Row, Table, summary

REPEATS = 7
#: not to be imported on the way
AVOIDED = ("jax", "numpy", "torch.distributed.tensor")

_PROGRAM = """
import json, sys, time
def clocks():
    return time.perf_counter(), time.process_time()
start = clocks()
import torch, optree
middle = clocks()
before = set(sys.modules)
import fspmd
end = clocks()
taken = [[b - a for a, b in zip(*pair)] for pair in ((middle, end), (start, middle))]
print(json.dumps([taken, sorted(set(sys.modules) - before)]))
"""


def measure() -> Table:
    """Both imports in each of `REPEATS` processes, of bytecode, as from an installed package."""
    writes = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(REPEATS + 1):
        done = subprocess.run([sys.executable, "-c", _PROGRAM], env=writes, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    runs = runs[1:]  # the first compiles
    added = runs[0][1]
    found = [name for name in AVOIDED if name in added]
    rows = []
    for clock, what in enumerate(("import fspmd", "import fspmd, processor time")):
        ours, theirs = (summary([taken[who][clock] for taken, _ in runs]) for who in (0, 1))
        rows.append(Row(what, ours, "import torch, optree", theirs, Goal(0.2)))
    verdict = f"It imports {', '.join(found)}" if found else f"It imports none of {', '.join(AVOIDED)}"
    return Table(
        "Importing",
        rows,
        f"{verdict} (beyond what torch and optree import themselves), and {len(added)} modules in all, "
        f"{sum(not name.startswith('fspmd') for name in added)} of them not its own.",
    )
