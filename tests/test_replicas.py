"""`check_replicas` finds one flipped bit in one copy, wherever it is; digests see bits and places."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from processes import Processes
from simulated import MESH, simulated
from torch import Tensor

from fspmd import (
    ArgumentError,
    P,
    RecordError,
    ReplicaError,
    TreeError,
    check_replicas,
    device_put,
    from_local,
    jit,
    make_mesh,
    replay_check,
)
from fspmd.digests import digests

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.bool, torch.int8, torch.int64]
DTYPES += [torch.float8_e4m3fn]


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def _values(count: int, dtype: torch.dtype) -> Tensor:
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator())
    return (data > 127).view(torch.bool) if dtype == torch.bool else data.view(dtype)


def _flip(x: Tensor, element: int, bit: int) -> None:
    data = x.view(-1)[element : element + 1].view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_see_each_bit_and_place(dtype: torch.dtype) -> None:
    for count in (1, 3, 1000, 70_001):
        x = _values(count, dtype)
        flipped = []
        for element in {0, 1, count // 2, count - 1} & set(range(count)):
            for bit in range(1 if dtype == torch.bool else 8 * dtype.itemsize):
                flipped.append(x.clone())
                _flip(flipped[-1], element, bit)
        for i in range(1, min(count, 4)):  # two flips of the highest bit
            flipped.append(flipped[0].clone())
            _flip(flipped[-1], i, 0 if dtype == torch.bool else 8 * dtype.itemsize - 1)
        data, width = x.view(torch.uint8), dtype.itemsize
        others = [torch.cat([data, data[:1]]), *([data.roll(width), data.flip(0)] if count > 3 else [])]
        found = digests([x, *flipped, *others])
        assert len(set(found)) == len(found)
        assert digests([x.clone(), torch.cat([data[:width], data])[width:]]) == [found[0]] * 2  # an odd offset


def test_many_flips_do_not_cancel() -> None:
    x = torch.randn(300_000, dtype=torch.float64)
    chosen = [x, -x, torch.cat([-x[:150_000], x[150_000:]]), x * torch.tensor([1, -1]).repeat(150_000)]
    chosen += [-x.float(), x.float(), x.view(-1, 2).flip(0).flatten(), x.view(300, 1000).mT]
    assert len(set(digests(chosen))) == len(chosen)
    assert digests([x.view(300, 1000).mT]) == digests([x.view(300, 1000).mT.contiguous()])


def _caught(tree: Any, **options: Any) -> str:
    try:
        check_replicas(tree, **options)
    except (ReplicaError, TreeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _trees() -> dict[str, str]:
    """For each fault its error."""
    line = make_mesh((4,), ("dp",), device="cpu")
    grid = make_mesh((2, 2), ("dp", "tp"), device="cpu")
    rank = line.coordinate()[0]  # type: ignore[index]
    found = {}
    for dtype in DTYPES:
        x = _values(5000, dtype).view(50, 100)
        for what, mesh, spec in (("all", line, P()), ("dp", grid, P("tp")), ("uneven", grid, P(None, "tp"))):
            block = x[:, 50 * (rank % 2) :][:, :50] if what == "uneven" else x[25 * (rank % 2) :][:25]
            block = (x if what == "all" else block).clone(memory_format=torch.contiguous_format)
            tree = {"b": torch.ones(3), "w": [from_local(block, spec, mesh=mesh)]}
            assert _caught(tree) == "", _caught(tree)
            if rank == 2:
                _flip(block, 607, 0)
            found[f"{dtype} {what}"] = _caught(tree)
    x = torch.ones(8, 4)
    whole = {
        "pending": from_local(x * rank, P(unreduced={"dp"}), mesh=line),
        "pending over dp": from_local(x * (rank // 2), P(unreduced={"dp"}), mesh=grid),
        "sharded": from_local(x * rank, P("dp"), mesh=line),
        "empty": from_local(torch.ones(0, 4), P(), mesh=line),
        "meta": torch.empty(3, device="meta"),
        "step": 3,
        "name": "adam",
        "other": object(),
        "none": None,
        "on both": [device_put(x, P(), mesh=grid), torch.tensor(2)],
    }
    found["right"] = _caught(whole)
    found["a number"] = _caught({"step": rank // 3})
    found["a generator"] = _caught([torch.Generator().manual_seed(rank // 3)])
    found["a tensor"] = _caught([torch.full((6,), 7 + (rank == 1))])
    found["nan"] = _caught([torch.full((6,), float("nan") if rank else 0.0)], mesh=line)
    found["zero"] = _caught(from_local(torch.zeros(2) * (-1 if rank == 3 else 1), P(), mesh=line))
    row = device_put(torch.zeros(1, 3), P("tp"), mesh=grid)  # ranks 1 and 3 have none
    if rank == 2:
        row.local[0, 1] += 1
    found["no rows"] = _caught(row)
    found["pending"] = _caught({"p": from_local(x * rank, P(unreduced={"dp"}), mesh=grid)})
    found["another tree"] = _caught({"a": x, **({"b": x} if rank == 3 else {})})
    found["another shape"] = _caught(torch.ones(3 + rank // 2))
    return found


def test_one_flipped_bit_of_one_rank_is_found(four: Processes) -> None:
    first, *others = four.run(_trees)
    assert others == [first] * 3
    head = "ReplicaError: check_replicas: 1 of "
    assert first.pop("right") == ""
    for name, error in first.items():
        if name.startswith("torch"):
            alike = "ranks 0, 1, 3" if name.endswith("all") else "rank 0"
            assert error.startswith(f"{head}2 values differs between ranks that"), error
            assert f"rank 2 differs from {alike} in 1 of " in error, error
            assert ", first at element 607 of its block" in error
            assert "* tree['w'][0], " in error
    distances = {n: re.search(r"at most (\S+),", e)[1] for n, e in first.items() if n.endswith("all")}  # type: ignore[index]
    assert {distances["torch.bool all"], distances["torch.int8 all"]} == {"1"}
    assert "tree['step']: rank 0 has 0; rank 1 has 0; rank 2 has 0; rank 3 has 1" in first["a number"]
    assert "tree[0], u8[5056]: rank 3 differs from ranks 0, 1, 2 in " in first["a generator"]
    assert "rank 1 differs from ranks 0, 2, 3 in 6 of 6 elements, by at most 1, first at element 0" in first["a tensor"]
    assert "rank 0 differs from ranks 1, 2, 3 in 6 of 6 elements, by at most nan" in first["nan"]
    assert "rank 3 differs from ranks 0, 1, 2 in 2 of 2 elements, by at most 0," in first["zero"]
    assert "rank 2 differs from rank 0 in 1 of 3 elements, by at most 1, first at element 1" in first["no rows"]
    assert "rank 1 differs from rank 0 in 32 of 32 elements, by at most 1, " in first["pending"]
    assert "rank 3 differs from rank 2 in 32 of 32 elements, by at most 1, " in first["pending"]
    assert first["another tree"].startswith("TreeError: check_replicas: rank 3 passes ")
    assert "rank 2 passes *: tree f32[4], but rank 0 *: tree f32[3]" in first["another shape"]


def test_copies_of_a_simulation() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), transport="simulation")
    x = device_put(torch.ones(4, 4), P("tp"), mesh=mesh)
    check_replicas({"x": x, "pending": x @ x.mT, "n": 1})
    with pytest.raises(ArgumentError, match="check_replicas got for tree a sparse_coo tensor"):
        check_replicas(torch.eye(2).to_sparse())
    model = torch.nn.Linear(2, 2)
    for tree, text in (
        (model, "tree is a Linear\npass its state_dict"),
        ([torch.optim.SGD(model.parameters())], r"tree\[0\] is a"),
        (model.parameters(), "tree is a.*\npass a list of its values"),
        ({"w": {"x": x}.values()}, r"tree\['w'\] is a.*\npass a list of its values"),
    ):
        with pytest.raises(ArgumentError, match=f"check_replicas cannot look into all leaves:\n  \\* {text}"):
            check_replicas(tree)
    with pytest.raises(RecordError, match="check_replicas was called within jit"):
        jit(check_replicas)(x)


def test_a_loop_compares_every_few_calls_of_a_line() -> None:
    right, wrong = device_put(torch.zeros(3), P(), mesh=MESH), from_local(simulated(3), P(), mesh=MESH)
    silent = []
    for step in range(9):
        check_replicas(wrong if step % 4 else right, every=4)
        with suppress(ReplicaError):
            check_replicas(right if step == 0 else wrong, every=3)
            silent.append(step)
    assert silent == [0, 1, 2, 4, 5, 7, 8]
    for bad in (0, -1, 2.0, True, None):
        with pytest.raises(ArgumentError, match="check_replicas got every="):
            check_replicas(right, every=bad)  # type: ignore[arg-type]


_runs = 0


def _restless(x: Any, state: Any) -> Any:
    """A step that is another in its second run, on one rank."""
    global _runs
    _runs += 1
    state["n"].add_(1)
    w = x.clone()
    if _runs % 2 == 0 and make_mesh((4,), ("dp",), device="cpu").coordinate() == (1,):
        w.local[0, 1] += 0.5
        state["n"][2] = 7
    return {"w": w, "loss": torch.rand(2)}


def _replays() -> list[Any]:
    mesh = make_mesh((4,), ("dp",), device="cpu")
    torch.manual_seed(3)
    x, n = device_put(torch.ones(4, 3, dtype=torch.float64), P("dp"), mesh=mesh), torch.zeros(4)
    step = jit(lambda x, n: (x.sum() + torch.rand(()), n.add_(1)), donate_argnums=1)
    found: list[Any] = [float(replay_check(step, x, n)[0]) - 12.0, n.tolist()]
    torch.manual_seed(3)
    found.append(float(torch.rand(())))
    try:
        replay_check(_restless, x, {"n": n})
    except ReplicaError as error:
        found.append(str(error))
    return found


def test_two_runs_of_a_step_are_compared(four: Processes) -> None:
    first, *others = four.run(_replays)
    assert others == [first] * 3
    drawn, n, expected, error = first
    assert drawn == pytest.approx(expected)
    assert n == [0.0] * 4
    assert "replay_check: two runs of _restless from the same state differ on rank 1:" in error
    assert "* result['w']: 1 of 3 elements of the block differ, by at most 0.5, first at element 1" in error
    assert "* args[1]['n']: 1 of 4 elements of the block differ, by at most 6, first at element 2" in error
    with pytest.raises(ArgumentError, match=r"write replay_check\(step, \*args\)"):
        replay_check(3)  # type: ignore[arg-type]
