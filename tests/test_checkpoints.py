"""Checkpoints: every layout to the bit, and what is left after faults."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_programs import (
    SHAPES,
    SPECS,
    bits,
    cut,
    kill_in_save,
    small_tree,
    steps_between_transports,
    tree_bits,
    wholes,
)
from fault_shim import FULL, READ_ONLY, Disk, fail_at, kill_at, watched
from processes import Processes, forks

import fspmd
from fspmd import Flat, FspmdError, P, TensorSpec, device_put, make_mesh
from fspmd.checkpoints import latest_step, load, save
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
    for number in range(len(names) + 1):
        path = tmp_path / f"{number}"
        shutil.copytree(first, path, symlinks=True)
        child = forks().Process(target=kill_in_save, args=(str(path), number, keep))
        child.start()
        child.join(60)
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
def test_a_loss_of_power_at_any_call_leaves_a_step_that_loads(tmp_path: Path, names_lost: bool) -> None:
    path = tmp_path / "steps"
    save(path, small_tree(MESH, 1), step=1)
    disk, seen = Disk(path), []

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        disk.lay_out(tmp_path / f"{number}", names_lost)

    with watched(before, disk.after):
        save(path, small_tree(MESH, 2), step=2, keep=1)
    disk.lay_out(tmp_path / "end", names_lost)
    for left in [
        *sorted((p for p in tmp_path.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)),
        tmp_path / "end",
    ]:
        step = latest_step(left)
        assert tree_bits(load(left, small_tree(MESH, 0))) == tree_bits(small_tree(MESH, step or 0)), left
        seen.append(step)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
