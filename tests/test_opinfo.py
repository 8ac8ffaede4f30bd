"""A sample of torch's op database in each mode; ``make opinfo`` runs the whole of it."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import optree
import pytest
import torch
from full import FULL
from opinfo.sweep import DRAWS, REFUSED, WRITTEN, function_of, is_tensor, ops, run_op, samples
from processes import Processes

from fspmd import P, Sharded, device_get, device_put, make_mesh

#: sizes, mesh
MODES = (("uneven", "line"), ("even", "line"), ("uneven", "grid"))


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


@pytest.mark.one_of(20)
@pytest.mark.parametrize("name", ops())
def test_values_and_gradients(name: str) -> None:
    sizes, mesh = MODES[_number(name) % len(MODES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = run_op(ops()[name], sizes=sizes, mesh=mesh, most_samples=2, most_placements=2)
    if name in REFUSED:
        assert report.status in ("clean", "refused"), report.notes
    else:
        assert report.status in ("clean", "no samples"), report.notes


@pytest.mark.one_of(20)
@pytest.mark.parametrize("name", [name for name in ops() if name not in REFUSED and (FULL or _number(name) % 2)])
def test_calls_that_are_written_otherwise(name: str) -> None:
    number = _number(name)
    sizes, mesh = MODES[number % len(MODES)]
    written = WRITTEN[1 + number // len(MODES) % 3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = run_op(ops()[name], sizes=sizes, mesh=mesh, most_samples=3, most_placements=2, written=written)
    assert report.status in ("clean", "no samples"), report.notes


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", sorted(DRAWS & ops().keys()))
def test_a_first_call_draws_no_more_than_the_next(name: str) -> None:
    op, mesh = ops()[name], make_mesh((4,), ("x",))

    def put(x: Any) -> Any:
        return device_put(x.detach().clone(), P("x"), mesh=mesh) if is_tensor(x) and x.ndim else x

    for sample in samples(op, torch.float64, "uneven", 8):
        drawn: list[list[torch.Tensor]] = []
        for _ in range(2):
            given: Any = (sample.input, tuple(sample.args), dict(sample.kwargs))
            first, args, kwargs = optree.tree_map(put, given, none_is_leaf=True)
            torch.manual_seed(1)
            out = function_of(op)(first, *args, **kwargs)
            found = optree.tree_leaves(out, is_leaf=is_tensor)
            drawn.append([torch.get_rng_state(), *(device_get(x) if isinstance(x, Sharded) else x for x in found)])
        torch.testing.assert_close(*drawn, equal_nan=True, msg=str(sample))


def _on_processes(names: list[str], mesh: str) -> list[str]:
    warnings.simplefilter("ignore")
    options = {"sizes": "uneven", "mesh": mesh, "most_samples": 1, "most_placements": 2, "transport": "process_group"}
    reports = (run_op(ops()[name], **options) for name in names)
    return [f"{report.name}: {report.notes}" for report in reports if report.status != "clean"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("count", "meshes"), [(4, ("line", "grid")), (6, ("six", "wide"))])
def test_on_processes(count: int, meshes: tuple[str, str]) -> None:
    chosen = [name for name in ops() if name not in REFUSED][count * 3 :: 47 if FULL else 564]
    with Processes(count) as pool:
        for i, mesh in enumerate(meshes):
            for failures in pool.run(_on_processes, chosen[i::2], mesh):
                assert not failures
