"""Checkpoints: every layout to the bit, and what is left after faults."""

from __future__ import annotations

import collections
import itertools
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import full
import optree
import pytest
import torch
from checkpoint_programs import (
    SPECS,
    bits,
    complaint,
    cut,
    end_at_once,
    failures_alike,
    kill_in_save,
    kill_one_of_two,
    lose_one_of_two,
    losses_go_on,
    save_meanwhile,
    small_tree,
    steps_between_transports,
    steps_of_torch,
    training_goes_on,
    tree_bits,
    wholes,
)
from fault_shim import FULL, READ_ONLY, Disk, fail_at, watched
from processes import Processes, forks, free_port

from fspmd import Flat, FspmdError, Mesh, P, TensorSpec, device_put, latest_step, load, make_mesh, save
from fspmd.checkpoints import files
from fspmd.checkpoints import load as loading
from fspmd.checkpoints.boxes import Cuboid, parts, pieces_of, whole, wrong_cover
from fspmd.errors import CheckpointError

MESH = make_mesh((2, 2), ("x", "y"), transport="simulation", device="cpu")


def _calls_of_a_save(path: Path, keep: int | None) -> list[str]:
    names: list[str] = []
    with watched(lambda _, name, args: names.append(name)):
        save(path, small_tree(MESH, 2), step=2, keep=keep)
    return names


@pytest.mark.parametrize("keep", [None, 1])
def test_a_kill_at_any_call_leaves_a_step_that_loads(tmp_path: Path, keep: int | None) -> None:
    first = tmp_path / "first"
    save(first, small_tree(MESH, 1), step=1)
    shutil.copytree(first, tmp_path / "dry", symlinks=True)
    names = _calls_of_a_save(tmp_path / "dry", keep)
    assert {"open", "write", "fsync", "rename", "symlink", "mkdir"} <= set(names)
    seen = []
    numbers = range(len(names) + 1)
    for number in numbers if full.FULL else sorted({*numbers[2 * bool(keep) :: 7], numbers[-1]}):
        path = tmp_path / f"{number}"
        shutil.copytree(first, path, symlinks=True)
        child = forks().Process(target=kill_in_save, args=(str(path), number, keep))
        child.start()
        child.join(300)
        assert child.exitcode == (-9 if number < len(names) else 0)
        step = latest_step(path)
        assert (path / "latest").exists()
        assert tree_bits(load(path, small_tree(MESH, 0))) == tree_bits(small_tree(MESH, step or 0))
        seen.append(step)
        save(path, small_tree(MESH, 3), step=3, keep=1)
        assert sorted(os.listdir(path)) == ["latest", "step-00000003"]
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("names_lost", [False, True])
@pytest.mark.parametrize("first", [None, 1])
def test_a_loss_of_power_at_any_call_leaves_a_step_that_loads(
    tmp_path: Path, first: int | None, names_lost: bool
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if first:
        save(home / "steps", small_tree(MESH, first), step=first)
    disk, left, seen = Disk(home), [], []

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        left.append(tmp_path / f"{number}")
        disk.lay_out(left[-1], names_lost)

    with watched(before, disk.after):
        save(home / "steps", small_tree(MESH, 2), step=2, keep=1)
    before(len(left), "the end", ())
    for path in left:
        step = latest_step(path / "steps")
        seen.append(step)
        if step is not None:
            assert tree_bits(load(path / "steps", small_tree(MESH, 0))) == tree_bits(small_tree(MESH, step)), path
    changed = seen.index(2)
    assert seen == [first] * changed + [2] * (len(seen) - changed)
    assert changed > 10


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


@pytest.mark.parametrize("program", [steps_between_transports, steps_of_torch, losses_go_on, training_goes_on])
def test_on_processes(four: Processes, program: Any) -> None:
    assert four.run(program) == [[]] * 4


def test_all_ranks_hear_of_failures_alike(four: Processes) -> None:
    told = four.run(failures_alike)
    assert told == [told[0]] * 4
    words = (
        "rank 3 has for 'seed' number, checksum",
        "rank 1 has for 'state' torch.int64 of shape (2,), checksum",
        "rank 2 passes step=1, keep=None, asynchronous=False, but rank 0 step=0",
        "rank 1 has for 'extra' number",
        "tree['f'] is the function print, which no safe load brings back",
        "rank 1 calls load, but rank 0 save",
        *("save of step 2 in PATH failed: rank 2: cannot write PATH/.saving-",) * 3,
        "save of step 2 in PATH failed: rank 1: MemoryError: no memory",
        "True",
        "PATH/step-00000001/__2_0.distcp is damaged: 'w' has another checksum",
        "like['v'] is missing: no leaf 'v' was saved\n  * like['w'] is f64[5, 7], but f32[5, 7] was saved",
        "found no step 7 in PATH; the steps there: 0, 1",
    )
    assert [text for text, word in zip(told[0], words, strict=True) if word not in text] == []


def test_processes_that_end_at_once_lose_nothing(tmp_path: Path) -> None:
    port = free_port()
    both = [forks().Process(target=end_at_once, args=(str(tmp_path), r, port)) for r in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
    assert tree_bits(load(tmp_path, small_tree(MESH, 0), step=2)) == tree_bits(small_tree(MESH, 2))


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (0, 9), (1, 1), (1, 2)])
def test_a_kill_of_one_process_is_an_error_on_the_other(tmp_path: Path, rank: int, number: int) -> None:
    save(tmp_path, small_tree(MESH, 1), step=1)
    port = free_port()
    both = [forks().Process(target=kill_one_of_two, args=(str(tmp_path), r, port, rank, number)) for r in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [-9 if r == rank else 7 for r in range(2)]
    step = latest_step(tmp_path)
    assert tree_bits(load(tmp_path, small_tree(MESH, 0))) == tree_bits(small_tree(MESH, step or 0))


@pytest.mark.parametrize(("name", "codes"), [("lost", [7, -9]), ("lost elsewhere", [7, -9]), ("slow", [0, 0])])
def test_a_process_that_is_lost_is_named_by_a_save_in_the_background(
    tmp_path: Path, name: str, codes: list[int]
) -> None:
    """One that only takes its time is waited for."""
    save(tmp_path / name, small_tree(MESH, 1), step=1)
    port = free_port()
    both = [forks().Process(target=lose_one_of_two, args=(str(tmp_path / name), r, port)) for r in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == codes
    step = 2 if name == "slow" else 1
    assert latest_step(tmp_path / name) == step
    assert tree_bits(load(tmp_path / name, small_tree(MESH, 0))) == tree_bits(small_tree(MESH, step))


# --- layouts ----------------------------------------------------------------------------------------------------------

_MESHES = [
    make_mesh(shape, ("x", "y"), transport="simulation", device="cpu") for shape in ((2, 2), (3, 2), (1, 4), (1, 1))
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("mesh", "piece"), list(zip(_MESHES, (1 << 20, 48, 7, 64), strict=True)), ids=str)
def test_every_layout_to_the_bit(tmp_path: Path, mesh: Mesh, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", piece)
    monkeypatch.setattr(loading, "PIECE", piece)
    monkeypatch.setattr(loading, "_AT_ONCE", piece)
    values = {
        name: x for name, x in wholes().items() if x.dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    }
    tree = {
        n: {str(i): device_put(x, cut(s, x.ndim), mesh=mesh) for i, s in enumerate(SPECS)} for n, x in values.items()
    }
    save(tmp_path, tree)
    for other, spec in [*itertools.product(_MESHES, SPECS)][:: 1 if full.FULL else 9]:
        like = {
            n: {str(i): TensorSpec(other, cut(spec, x.ndim), x.shape, x.dtype) for i in range(5)}
            for n, x in values.items()
        }
        found = load(tmp_path, like)
        assert [n for n, x in values.items() for i in range(5) if bits(found[n][str(i)]) != bits(x)] == []


def test_pieces_and_covers_beside_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 3))]
        starts = [draw.randrange(n) for n in shape]
        sizes = [draw.randint(1, n - start) for n, start in zip(shape, starts, strict=True)]
        part, itemsize, begins, piece = (
            Cuboid((*starts,), (*sizes,)),
            draw.choice((1, 2, 8)),
            draw.randrange(200),
            draw.randint(1, 30),
        )
        numbers = torch.arange(math.prod(shape)).view(shape)[part.within(whole(shape))].reshape(-1).tolist()
        bytes_of_part = {begins + n * itemsize + i for n in numbers for i in range(itemsize)}
        found = {
            p for first, n in pieces_of(part, whole(shape), itemsize, begins, piece) for p in range(first, first + n)
        }
        assert found == {at // piece for at in bytes_of_part}
        split = list(parts(part, draw.randint(1, 20)))
        counts = torch.zeros(shape, dtype=torch.int64)
        for box in split:
            counts[box.within(whole(shape))] += 1
        assert counts.sum() == counts[part.within(whole(shape))].sum() == part.numel
        boxes = [box for box in parts(whole(shape), draw.randint(1, 9)) if draw.random() < 0.9]
        boxes += [part] if draw.random() < 0.3 else []
        held = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            held[box.within(whole(shape))] += 1
        assert (wrong_cover(shape, boxes) == "") == bool((held == 1).all())


def test_a_rank_reads_the_pieces_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_mesh((4,), ("x",), transport="simulation", device="cpu")
    whole = torch.arange(1 << 22).view(2048, 2048)  # 32 MiB
    save(tmp_path, {"a": device_put(whole, P(), mesh=line), "b": device_put(whole, P(None, "x"), mesh=line)})
    read: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda d, buffers, at: (read.append(len(buffers[0])), real(d, buffers, at))[1])
    one = make_mesh((1,), ("x",), transport="simulation", device="cpu")
    for name, rows in (("a", 512), ("a", 1), ("b", 512)):
        read.clear()
        with monkeypatch.context() as patch:  # one rank of many, in this process
            patch.setattr(TensorSpec, "offset", lambda self, _: (700, 0))
            patch.setattr(TensorSpec, "local_shape", lambda self, _, rows=rows: (rows, 2048))
            patch.setattr("fspmd.sharded.Sharded.__new__", lambda cls, local, spec: local)
            block = load(tmp_path, {name: TensorSpec(one, P(), whole.shape, whole.dtype)}, strict=False)[name]
        assert torch.equal(block, whole[700 : 700 + rows])
        assert sum(read) <= rows * 2048 * 8 + (2 << 20) * (1 if name == "a" else 4)


def test_trees_of_every_kind(tmp_path: Path) -> None:
    w = device_put(torch.ones(5, 7), P("x"), mesh=MESH)
    pair = collections.namedtuple("pair", ("left", "right"))
    tree = {
        "tuple": (w, [w, 1], ()),
        "pair": pair(w, 2.5),
        "ordered": collections.OrderedDict(b=1, a=True),
        "rest": [None, "text", b"bytes", 1 + 2j, [], [[1, (2,)]]],
        "numbers": {1: torch.tensor(2.5), 0: torch.zeros(0, 3)},
        "generator": torch.Generator().manual_seed(3),
        "view": torch.arange(12).view(3, 4).T[1:],
        "conj": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "grad": device_put(torch.ones(4), P(), mesh=MESH).requires_grad_(),
        "sum": device_put(torch.ones(4), P(unreduced={"x", "y"}), mesh=MESH),
        "flat": device_put(torch.arange(24), P(Flat((4, None), (6, "x"))), mesh=MESH),
    }
    save(tmp_path, tree)
    found = load(tmp_path, tree)
    assert tree_bits(found) == tree_bits(tree)
    assert optree.tree_structure(found) == optree.tree_structure(tree)
    assert type(found["parameter"]) is torch.nn.Parameter
    assert found["grad"].requires_grad
    assert (found["sum"].spec, found["flat"].spec) == (tree["sum"].spec, tree["flat"].spec)
    with torch.device("meta"):  # new tensors are not made there
        save(tmp_path, tree)
        assert tree_bits(load(tmp_path, tree)) == tree_bits(tree)
    for alone in (w, 3, [torch.ones(2)]):
        save(tmp_path / "alone", alone)
        assert tree_bits(load(tmp_path / "alone", alone)) == tree_bits(alone)


# --- files that are damaged, full and forbidden -----------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_at_any_write_leaves_the_step_before(tmp_path: Path, asynchronous: bool) -> None:
    save(tmp_path, small_tree(MESH, 1), step=1)
    for number in itertools.count():
        with watched(fail_at(number, FULL)):
            text = complaint(lambda: save(tmp_path, small_tree(MESH, 2), step=2, asynchronous=asynchronous).wait())
        if text == "gave None":
            break
        assert re.search(f"^CheckpointError.*{tmp_path}/.saving-\\w+/\\S+: No space left on device", text)
        assert tree_bits(load(tmp_path, small_tree(MESH, 0))) == tree_bits(small_tree(MESH, 1))
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]
    assert number > 2
    assert latest_step(tmp_path) == 2


@pytest.mark.filterwarnings("ignore:save could not remove an old step")
@pytest.mark.parametrize("name", ["open", "mkdir", "fsync", "rename", "symlink"])
def test_a_forbidden_call_names_the_file(tmp_path: Path, name: str) -> None:
    save(tmp_path, small_tree(MESH, 1), step=1)
    for number in itertools.count():
        with watched(fail_at(number, READ_ONLY, (name,))):
            text = complaint(lambda: save(tmp_path, small_tree(MESH, 2), step=2).wait())
        if text == "gave None":
            break
        assert re.search(f"^CheckpointError.*{tmp_path}\\S*: Read-only file system", text)
        assert tree_bits(load(tmp_path, small_tree(MESH, 0))) in [tree_bits(small_tree(MESH, k)) for k in (1, 2)]
    assert number > 0


def test_a_flipped_bit_or_a_lost_end_names_file_and_leaf(tmp_path: Path) -> None:
    tree, count = small_tree(MESH, 1), 80 if full.FULL else 24
    save(tmp_path, tree, step=1)
    folder = save(tmp_path, tree, step=2).folder
    for file in ("__0_0.distcp", "fspmd.json", ".metadata"):
        path = Path(folder, file)
        data = path.read_bytes()
        damaged = [bytearray(data) for _ in range(count)]
        for i, copy in enumerate(damaged):
            copy[i * len(data) // count] ^= 1 << i % 8
        for copy in (*damaged, data[: len(data) // 2], data[:-1], b""):
            path.write_bytes(copy)
            if file == ".metadata":  # only torch reads it
                assert tree_bits(load(tmp_path, tree)) == tree_bits(tree)
                continue
            with pytest.raises(CheckpointError) as error:
                load(tmp_path, tree)
            assert str(path) in str(error.value)
            assert "the last complete step before it is 1: load(path, like, step=1)" in str(error.value)
            assert file == "fspmd.json" or any(f"'{n}'" in str(error.value) for n in ("w", "count", "list", "table.0"))
            assert tree_bits(load(tmp_path, tree, step=1)) == tree_bits(tree)
        path.write_bytes(data)
    os.unlink(Path(folder, "__0_0.distcp"))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: No such file"):
        load(tmp_path, tree)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("posix", "mkdir"),
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),  # a module that the file may name imports os
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch", "os.mkdir"),
        ("pathlib", "PosixPath.mkdir"),
    ],
)
def test_a_crafted_index_runs_no_code(tmp_path: Path, module: str, name: str) -> None:
    def text(value: str) -> bytes:
        return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()

    call = text(module) + text(name) + pickle.STACK_GLOBAL + text(str(tmp_path / "made")) + pickle.TUPLE1
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\x04" + call + pickle.REDUCE + pickle.STOP)
    with pytest.raises(CheckpointError, match=rf"it names {re.escape(module)}\.{re.escape(name)}, which"):
        load(tmp_path, {"w": 1})
    assert not (tmp_path / "made").exists()


# --- steps ------------------------------------------------------------------------------------------------------------


def test_steps_are_kept_replaced_and_found(tmp_path: Path) -> None:
    like = small_tree(MESH, 0)
    assert latest_step(tmp_path) is None
    with pytest.raises(CheckpointError, match="the steps there: none"):
        load(tmp_path, like)
    for k in (0, 5, 9, 9, 3):
        assert save(tmp_path, small_tree(MESH, k), step=k, keep=3).step == k
    assert latest_step(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000003", "step-00000005", "step-00000009.1"]
    assert [load(tmp_path, like, step=k)["count"] for k in (3, 5, 9)] == [3, 5, 9]
    os.unlink(tmp_path / "latest")
    assert latest_step(tmp_path) == 9
    assert save(tmp_path, like).step == 10
    os.unlink(tmp_path / "step-00000010" / "__0_0.distcp")
    save(tmp_path, like, step=11, keep=2)
    assert "step-00000009.1" in os.listdir(tmp_path)  # the last that is whole, beside the newest
    one = save(tmp_path, small_tree(MESH, 12), step=12).folder
    assert load(one, like)["count"] == 12
    shutil.copytree(one, tmp_path / "other")  # a folder of one step, into which steps are saved
    assert load(tmp_path / "other", like)["count"] == 12
    save(tmp_path / "other", small_tree(MESH, 13))
    assert load(tmp_path / "other", like)["count"] == 13


def test_only_what_a_step_has_itself_is_removed_with_it(tmp_path: Path) -> None:
    like, base, run = small_tree(MESH, 0), tmp_path / "base", tmp_path / "run"
    first = save(base, small_tree(MESH, 1), step=1).folder
    run.mkdir()
    os.symlink(first, run / "step-00000001")  # a run that goes on from the step of another
    (run / "step-7").touch()
    assert load(run, like, step=1)["count"] == 1
    folder = save(run, small_tree(MESH, 2), step=2, keep=1).folder
    assert load(base, like)["count"] == 1
    os.makedirs(f"{folder}/tokenizer/old")
    Path(folder, "tokenizer", "old", "words").touch()
    save(run, small_tree(MESH, 3), step=3, keep=1)
    assert sorted(os.listdir(run)) == ["latest", "step-00000003", "step-7"]


def test_a_latest_that_is_no_link_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path / "first", small_tree(MESH, 1), step=1)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")  # follows links
    assert load(tmp_path / "copy", small_tree(MESH, 0))["count"] == 1
    with pytest.raises(CheckpointError, match="copy/latest is no link"):
        save(tmp_path / "copy", small_tree(MESH, 2), step=2)
    assert sorted(os.listdir(tmp_path / "copy")) == ["latest", "step-00000001"]
    shutil.rmtree(tmp_path / "copy" / "latest")
    save(tmp_path / "copy", small_tree(MESH, 2), step=2)
    assert latest_step(tmp_path / "copy") == 2


def test_a_leftover_that_stays_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, small_tree(MESH, 1), step=1)
    (tmp_path / ".removing-step-00000000").mkdir()
    with watched(fail_at(0, READ_ONLY, ("rmdir",))), pytest.warns(UserWarning, match="could not remove an old step"):
        save(tmp_path, small_tree(MESH, 2), step=2)
    assert latest_step(tmp_path) == 2
    save(tmp_path, small_tree(MESH, 3), step=3, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000003"]


def test_a_copy_is_saved_and_written_behind_the_back(tmp_path: Path) -> None:
    gate = threading.Event()
    tree = {"w": device_put(torch.ones(5), P("x"), mesh=MESH), "t": torch.ones(3), "list": [1]}
    with watched(lambda *_: threading.current_thread() is threading.main_thread() or gate.wait(20) or None):
        handle = save(tmp_path, tree, asynchronous=True)
        assert not handle.done()
        tree["w"].mul_(3)
        tree["t"].mul_(3)
        tree["list"].append(2)
        gate.set()
        assert handle.folder.endswith("step-00000000")
    found = load(tmp_path, {"w": tree["w"], "t": tree["t"], "list": [0]})
    assert tree_bits(found) == tree_bits([[1], torch.ones(3), torch.ones(5)])


def test_two_jobs_save_into_one_folder(tmp_path: Path) -> None:
    """One saves while the other writes. What was left by a process that ended goes, and no more."""
    gate = threading.Event()
    (tmp_path / ".saving-killed").mkdir()
    with watched(lambda *_: threading.current_thread() is threading.main_thread() or gate.wait(60) or None):
        handle = save(tmp_path, small_tree(MESH, 2), step=2, asynchronous=True)
        other = forks().Process(target=save_meanwhile, args=(str(tmp_path),))
        other.start()
        other.join(60)
        gate.set()
        handle.wait()
    assert other.exitcode == 0
    assert [tree_bits(load(tmp_path, small_tree(MESH, 0), step=k)) for k in (2, 3)] == [
        tree_bits(small_tree(MESH, k)) for k in (2, 3)
    ]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002", "step-00000003"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_cut_off_has_not_saved(tmp_path: Path) -> None:
    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    with watched(lambda number, name, args: name != "write" or leave()):
        handle = save(tmp_path, small_tree(MESH, 1), asynchronous=True)
        handle._thread.join()  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"save of step 0 in .* was cut off"):
        handle.wait()
    assert latest_step(tmp_path) is None


def test_a_process_that_ends_loses_nothing(tmp_path: Path) -> None:
    code = f"""
import time, os, torch, fspmd
from fspmd import save
real = os.write
os.write = lambda *args: (time.sleep(0.2), real(*args))[1]
save({str(tmp_path)!r}, {{"t": torch.arange(5)}}, step=1).wait()
save({str(tmp_path)!r}, {{"t": torch.arange(5) + 1}}, step=2, asynchronous=True)
os.write = lambda *args: 1 / 0 if len(args[1]) == 3 else real(*args)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert bits(load(tmp_path, {"t": torch.zeros(5).long()})["t"]) == bits(torch.arange(5) + 1)


def test_mistakes_are_told_in_one_message(tmp_path: Path) -> None:
    w = device_put(torch.ones(5, 7), P("x"), mesh=MESH)
    mistakes = {"f": print, "m": torch.nn.Linear(1, 1), "s": torch.eye(2).to_sparse(), "l": w.local, "i": 1 << 2047}
    with pytest.raises(FspmdError) as error:
        save(tmp_path, {**mistakes, "ok": 1})
    for name, text in {"f": "is", "m": "is", "s": "is", "l": "holds", "i": "is an int"}.items():
        assert f"tree[{name!r}] {text}" in str(error.value)
    for tree, text in (
        ({"a.b": 1, "a": {"b": 2}}, "have one name, 'a.b'"),
        ({"w": w.spec}, "tree['w'] is a TensorSpec"),
        ({"o": torch.optim.SGD([torch.ones(1)])}, "optimizer.state_dict()"),
    ):
        with pytest.raises(FspmdError, match=re.escape(text)):
            save(tmp_path, tree)
    for options in ({"step": -1}, {"step": 1.5}, {"keep": 0}):
        with pytest.raises(FspmdError, match="give it an int of at least"):
            save(tmp_path, {}, **options)
    assert os.listdir(tmp_path) == []
    save(tmp_path, {"w": w, "n": 1, "gone": [1]})
    like = {"w": torch.ones(7, 5), "n": "one", "new": w.spec}
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, like)
    for text in (
        "like['n'] is the string",
        "like['w'] is f32[7, 5], but f32[5, 7]",
        "like['new'] is missing",
        "'gone' was",
    ):
        assert text in str(error.value)
    save(tmp_path, {"short": torch.zeros(3).byte(), "wrong": torch.zeros(5056).byte()})
    with pytest.raises(CheckpointError, match=r"like\['short'\] is u8\[5056\], but u8\[3\] was saved"):
        load(tmp_path, {"short": torch.Generator()}, strict=False)
    with pytest.raises(CheckpointError, match="Invalid mt19937 state"):
        load(tmp_path, {"wrong": torch.Generator()}, strict=False)
    found = load(tmp_path, {"w": w, "new": 7}, step=0, strict=False)
    assert tree_bits(found) == tree_bits({"w": w, "new": 7})
