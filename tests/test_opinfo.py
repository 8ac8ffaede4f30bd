"""A sample of torch's op database in each mode; ``make opinfo`` runs the whole of it."""

from __future__ import annotations

import warnings
import zlib

import pytest
from opinfo.sweep import REFUSED, ops, run_op
from processes import Processes

#: sizes, mesh
MODES = (("uneven", "line"), ("even", "line"), ("uneven", "grid"))


@pytest.mark.parametrize("name", ops())
def test_values_and_gradients(name: str) -> None:
    sizes, mesh = MODES[zlib.crc32(name.encode()) % len(MODES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = run_op(ops()[name], sizes=sizes, mesh=mesh, most_samples=2, most_placements=2)
    if name in REFUSED:
        assert report.status in ("clean", "refused"), report.notes
    else:
        assert report.status in ("clean", "no samples"), report.notes


def _on_processes(names: list[str], mesh: str) -> list[str]:
    warnings.simplefilter("ignore")
    options = {"sizes": "uneven", "mesh": mesh, "most_samples": 1, "most_placements": 2, "transport": "process_group"}
    reports = (run_op(ops()[name], **options) for name in names)
    return [f"{report.name}: {report.notes}" for report in reports if report.status != "clean"]


@pytest.mark.parametrize(("count", "meshes"), [(4, ("line", "grid")), (6, ("six", "wide"))])
def test_on_processes(count: int, meshes: tuple[str, str]) -> None:
    chosen = [name for name in ops() if name not in REFUSED][count * 3 :: 47]
    with Processes(count) as pool:
        for i, mesh in enumerate(meshes):
            for failures in pool.run(_on_processes, chosen[i::2], mesh, seconds=120):
                assert not failures
