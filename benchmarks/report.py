"""Groups of measurements as a program: each runs in a process of its own, and is printed as a Markdown table.

Tables show medians; "spread" is the larger distance between the quartiles of the candidates of a row, as a part of the
median: beyond some 30 % the machine was busy, and the row is worth another run. How the clock runs: timing.py.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from timing import Overhead, Row, Table


def measure(group: str) -> Table:
    """One group, in this process."""
    torch.set_num_threads(1)
    table: Table = importlib.import_module(group).measure()
    return table


def in_a_process(group: str) -> Table:
    """One group, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, group).result()


def surroundings() -> dict[str, Any]:
    """The machine and the versions, as far as they matter."""
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "optree": optree.__version__,
    }


def as_json(row: Row | Overhead) -> dict[str, Any]:
    """The figures of a row, in seconds."""
    return dataclasses.asdict(row) | {"met": row.met}


def report(what: str | None, groups: Sequence[str]) -> None:
    """The program: all groups, or those named on the command line; ``--json`` writes the figures to a file, too."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"one of {', '.join(groups)}; by default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if unknown := sorted(set(options.groups) - set(groups)):
        parser.error(f"unknown groups {', '.join(unknown)}; there are {', '.join(groups)}")
    found: dict[str, Any] = surroundings()
    print(", ".join(f"{key} {value}" for key, value in found.items()), end="\n\n", flush=True)
    start, found["groups"] = time.perf_counter(), {}
    for group in options.groups or groups:
        table = in_a_process(group)
        print(table.markdown(), flush=True)
        found["groups"][group] = {"title": table.title, "rows": [as_json(row) for row in table.rows]}
    found["seconds"] = round(time.perf_counter() - start, 1)
    print(f"{found['seconds']} s in all, load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
