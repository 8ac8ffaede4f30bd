"""A sample of torch's op database in each mode; ``make opinfo`` runs the whole of it."""

from __future__ import annotations

import warnings
import zlib

import pytest
from sweep import REFUSED, ops, run_op

#: sizes, mesh
MODES = (("uneven", "line"), ("even", "line"), ("uneven", "grid"))


@pytest.mark.parametrize("name", ops())
def test_values_and_gradients(name: str) -> None:
    sizes, mesh = MODES[zlib.crc32(name.encode()) % len(MODES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = run_op(ops()[name], sizes=sizes, mesh=mesh, most_samples=2, most_placements=3)
    if name in REFUSED:
        assert report.status in ("clean", "refused"), report.notes
    else:
        assert report.status in ("clean", "no samples"), report.notes
