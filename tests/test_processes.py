"""What processes do together with values of their own: meet, compare, gather, lay out a DataLoader's batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from processes import Processes
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fspmd
from fspmd import (
    ArgumentError,
    FspmdError,
    P,
    RecordError,
    ShapeError,
    Sharded,
    SpecError,
    TreeError,
    VarianceError,
    assert_equal,
    barrier,
    device_get,
    from_process_local,
    jit,
    make_mesh,
    process_allgather,
)

WHOLE = {
    "x": torch.arange(60, dtype=torch.float64).view(10, 6),
    "y": torch.arange(10).bool(),
    "w": torch.arange(7).to(torch.bfloat16),
}
SPECS = {"x": P("dp"), "y": P("dp"), "w": P()}
SIZES = (3, 3, 3, 1)


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def _part(rank: int) -> dict[str, Any]:
    """What one of 4 processes has loaded of the whole."""
    return {k: v.split(SIZES)[rank] if SPECS[k] == P("dp") else v.clone() for k, v in WHOLE.items()}


def _laid_out() -> tuple[list[Tensor], list[Tensor], str]:
    rank = make_mesh((4,), ("r",), device="cpu").coordinate()[0]  # type: ignore[index]
    line, grid = make_mesh((4,), ("dp",), device="cpu"), make_mesh((2, 2), ("dp", "tp"), device="cpu")
    found = from_process_local(_part(rank), SPECS, mesh=line)
    array = np.full((2, 3), rank // 2)
    on_grid, name = from_process_local((array, "batch"), (P("dp"), None), mesh=grid, check=rank < 9)
    unchecked = from_process_local(array, P("dp"), mesh=grid, check=False)
    assert unchecked.spec is on_grid.spec
    assert name == "batch"
    sampler = DistributedSampler(range(8), 4, rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
    batches = list(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, sampler=sampler))
    (loaded,) = from_process_local(batches[0], P("dp"), mesh=line)
    return [device_get(found[k]) for k in WHOLE], [device_get(on_grid), device_get(loaded)], repr(found["x"].spec)


def test_each_process_lays_out_what_it_has_loaded(four: Processes) -> None:
    for found, (on_grid, loaded), spec in four.run(_laid_out):
        assert all(map(torch.equal, found, WHOLE.values()))
        assert spec == "f64[10@dp, 6] on mesh(dp=4)"
        assert on_grid.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
        assert loaded.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_simulation_is_one_process_that_has_all() -> None:
    found = from_process_local(WHOLE, SPECS, mesh=make_mesh((4,), ("dp",), transport="simulation"))
    assert all(torch.equal(device_get(found[k]), WHOLE[k]) for k in WHOLE)
    assert process_allgather(torch.ones(2)).shape == (1, 2)
    assert process_allgather(found["y"]).equal(WHOLE["y"])
    assert_equal(found)
    with pytest.raises(RecordError, match="barrier was called within jit"):
        jit(lambda x: (barrier(), x)[1])(torch.ones(2))


def _gathered() -> list[Any]:
    mesh = make_mesh((2, 2), ("a", "b"), ranks=(3, 1, 2, 0), device="cpu")
    rank = torch.distributed.get_rank()
    barrier("here", mesh=mesh)
    with fspmd.set_mesh(mesh):
        by_place = process_allgather(rank)
    sharded = fspmd.device_put(torch.arange(3), P("a"), mesh=mesh)
    tree = {"n": rank * 0.5, "x": torch.tensor([rank, -rank], dtype=torch.int8), "s": sharded}
    joined = process_allgather({"x": torch.full((rank, 2), rank)}, tiled=True)
    found = process_allgather(tree)
    assert_equal({"tree": found, "name": "all"})
    assert_equal(fspmd.device_put(torch.arange(3.0), P("a"), mesh=mesh))
    return [by_place.tolist(), found["n"].tolist(), found["x"].tolist(), found["s"].tolist(), joined["x"].tolist()]


def test_values_of_all_processes(four: Processes) -> None:
    tens = [[0, 0], [1, -1], [2, -2], [3, -3]]
    joined = [[1] * 2] + [[2] * 2] * 2 + [[3] * 2] * 3
    assert four.run(_gathered) == [[[3, 1, 2, 0], [0.0, 0.5, 1.0, 1.5], tens, [0, 1, 2], joined]] * 4


def _nan(rank: int) -> Tensor:
    return torch.tensor([float("nan"), 1.0, 2.0])[torch.tensor([0, 2, 1] if rank == 2 else [0, 1, 2])]


def _drifted(rank: int) -> Sharded:
    mesh = make_mesh((2, 2), ("a", "b"), device="cpu")
    x = fspmd.device_put(torch.zeros(4), P("a"), mesh=mesh)
    x.local[0] += rank == 3
    return x


def _ones(spec: P) -> Sharded:
    return fspmd.device_put(torch.ones(4), spec, mesh=make_mesh((2, 2), ("a", "b"), device="cpu"))


#: by name: what one rank's mistake does to a call, the error on all ranks, and words in it
MISTAKES: dict[str, tuple[Any, type[FspmdError], str]] = {
    "another barrier": (lambda r: barrier("b" if r == 1 else "a"), ArgumentError, "rank 1 at .* waits at 'b'"),
    "values": (lambda r: assert_equal({"w": _nan(r)}, "resumed"), VarianceError, r"^resumed: rank 2 .* tree\['w'\]"),
    "a number": (lambda r: assert_equal([r // 3]), VarianceError, r"rank 3 .* has tree\[0\]: 1, unlike"),
    "a tree": (lambda r: assert_equal([1] * (1 + (r == 2))), VarianceError, r"rank 2 .* has the tree \[\*, \*\]"),
    "a copy of a block": (lambda r: assert_equal(_drifted(r)), VarianceError, "rank 3 at process=3 has tree: Sharded"),
    "shapes": (lambda r: process_allgather(torch.ones(1 + (r == 1))), ShapeError, "rank 1 .* has tree of shape"),
    "more leaves": (lambda r: process_allgather([1] * (1 + r)), TreeError, r"rank 1 .* has the tree \[\*, \*\]"),
    "another call": (lambda r: barrier() if r == 2 else process_allgather(1), ArgumentError, "rank 2 .* calls barrier"),
    "two layouts": (lambda r: assert_equal(_ones(P("a") if r == 1 else P())), VarianceError, r"rank 1 .* f32\[4@a\]"),
    "a layout": (lambda r: process_allgather(_ones(P()) if r == 1 else torch.ones(())), ShapeError, "the Sharded f32"),
    "a number too large": (lambda r: process_allgather(1 << 70 if r == 1 else 1), ArgumentError, "no tensor holds"),
    "a string": (lambda r: process_allgather("a" if r == 1 else 1), ArgumentError, "tree is the string 'a'"),
    "a block": (lambda r: _lay(torch.ones(3 if r == 1 else 2), P("dp")), ShapeError, "rank 1 .* block of shape"),
    "a dtype": (lambda r: _lay(torch.ones(2).to([torch.float32, torch.int32][r == 3]), P("dp")), ShapeError, "rank 3"),
    "a spec": (lambda r: _lay(torch.ones(2), P("tp") if r == 2 else P("dp")), TreeError, "rank 2 .* with the specs"),
    "an axis": (lambda r: _lay(torch.ones(2), P("no" if r == 2 else "dp")), SpecError, "names the axis 'no'"),
    "copies": (lambda r: _lay(torch.full((2,), r), P("dp")), VarianceError, "rank 1 at dp=0, tp=1 has other values"),
    "no tensor": (lambda r: _lay("a" if r else torch.ones(2), P("dp")), ArgumentError, "tree is the string 'a'"),
    "an array": (lambda r: _lay(np.array([r, None] if r == 1 else [r, 1]), P()), ArgumentError, "numpy.object_"),
}


def _lay(x: Any, spec: P) -> None:
    from_process_local(x, spec, mesh=make_mesh((2, 2), ("dp", "tp"), device="cpu"))


def _complaint(name: str) -> tuple[str, str]:
    make_mesh((4,), ("r",), device="cpu")
    try:
        MISTAKES[name][0](torch.distributed.get_rank())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_one_rank_are_errors_on_all(name: str, four: Processes) -> None:
    _, kind, words = MISTAKES[name]
    for found, text in four.run(_complaint, name):
        assert found == kind.__name__, text
        assert re.search(words, text), text
