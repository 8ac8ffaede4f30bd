"""The folders of steps, and ``latest``, which names one of them.

``path/step-00000020`` is complete from the moment that it has its name. ``path/latest`` is a symbolic link to it. Names
that begin with a dot are unfinished work of a save, or leftovers of one that was killed. A save that lives holds a lock
on its folder, so that another save into the same path leaves it alone.
"""

from __future__ import annotations

import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from fspmd.checkpoints.files import PathLike, checked_path, locked, remove, sync_folder, told
from fspmd.checkpoints.index import INDEX, METADATA, missing_bytes, read_index
from fspmd.errors import CheckpointError

_LATEST: Final = "latest"
_STEP: Final = re.compile(r"step-(\d+)(?:\.(\d+))?")
_PATIENCE: Final = 60.0  # seconds that a save waits for another one to change names
_UNFINISHED: Final = re.compile(r"\.(saving|removing|latest)-.*")


def begin(path: str, lives: ExitStack) -> str:
    """Make the folder of a step that is being saved, and return it. It counts as left by a killed save once ``lives``
    is closed or the process has ended. Remove what others have left.
    """
    latest = os.path.join(path, _LATEST)
    if os.path.exists(latest) and not os.path.islink(latest):
        raise CheckpointError(
            f"{latest} is no link, so save cannot move it: a copy that follows links has made it of a step; remove it, "
            "or rename it to step-N if the folder has no such step"
        )
    with told("make the folder", path):
        _make(path)
        with _alone(path):
            for name in filter(_UNFINISHED.fullmatch, os.listdir(path)):
                with _left_in_place(), locked(os.path.join(path, name)) as is_left:
                    if is_left:
                        remove(os.path.join(path, name))
            unfinished = os.path.join(path, f".saving-{uuid.uuid4().hex[:12]}")
            os.mkdir(unfinished)
            lives.enter_context(locked(unfinished))
    return unfinished


def complete(path: str, unfinished: str, step: int, keep: float) -> str:
    """Give the folder of a step its name, let ``latest`` name it, and then remove older steps. Return its name."""
    with _alone(path):
        name = _commit(path, unfinished, step)
        _prune(path, keep, name)
    return name


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Within the block no other save changes names in a folder."""
    end = time.monotonic() + _PATIENCE
    while True:
        with locked(path) as is_mine:
            if is_mine:
                yield
                return
        if time.monotonic() > end:
            raise CheckpointError(f"another save has changed {path} for {_PATIENCE:.0f} s; end its process if it hangs")
        time.sleep(0.005)


def _commit(path: str, unfinished: str, step: int) -> str:
    """Give the folder of a step its name, then let ``latest`` name it. Return its name.

    A step that is there already keeps its folder, and the new one gets a number after a dot.
    """
    name = _free_name(path, step)
    sync_folder(unfinished)
    with told("rename", unfinished):
        os.rename(unfinished, os.path.join(path, name))
    sync_folder(path)
    link, latest = os.path.join(path, f".latest-{uuid.uuid4().hex[:12]}"), os.path.join(path, _LATEST)
    with told("move", latest):
        os.symlink(name, link)
        os.rename(link, latest)
    sync_folder(path)
    return name


def _prune(path: str, keep: float, newest: str) -> None:
    """Remove all steps but the last complete ones, and older folders of the step ``newest``, which stays itself.

    A folder that cannot be removed is a warning: the step is saved.
    """
    kept = 1
    for name in reversed(_names(path)):
        if name == newest:
            continue
        if _step(name) != _step(newest) and kept < keep:
            kept += not _fault(os.path.join(path, name))
            continue
        with _left_in_place():
            hidden = os.path.join(path, f".removing-{name}")
            os.rename(os.path.join(path, name), hidden)
            remove(hidden)


@contextmanager
def _left_in_place() -> Iterator[None]:
    """Warn of what cannot be removed. The step to be saved matters more, and the next save tries again."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        warnings.warn(f"save could not remove an old step: {error}", stacklevel=2)


def latest_step(path: PathLike) -> int | None:
    """Return the step that `load` would read, or None if there is none.

    It is the step that ``latest`` names. Where that was lost, it is the last complete step.

    >>> import tempfile
    >>> latest_step(tempfile.mkdtemp())
    """
    name = _latest(checked_path(path, "latest_step"))
    return None if name is None else _step(name)


def next_step(path: str) -> int:
    """Return the number after the greatest."""
    return max((_step(name) for name in _names(path)), default=-1) + 1


def find(path: str, step: int | None) -> str:
    """Return the folder of a step, by default that of the latest.

    Raises:
        CheckpointError: there is none. The error names the steps that are there.
    """
    there = _names(path)
    if not there and step is None and os.path.exists(os.path.join(path, METADATA)):
        return path  # a folder of torch.distributed.checkpoint, or of one step
    name = _latest(path) if step is None else next((n for n in reversed(there) if _step(n) == step), None)
    if name is None:
        steps = ", ".join(str(_step(n)) for n in there) or "none"
        what = "checkpoint" if step is None else f"step {step}"
        raise CheckpointError(f"load found no {what} in {path}; the steps there: {steps}")
    return os.path.join(path, name)


def instead_of(folder: str) -> str:
    """Return the advice for a damaged step: the newest other step that is complete."""
    path, name = os.path.split(folder)
    for other in reversed(_names(path) if _STEP.fullmatch(name) else []):
        if other != name and _step(other) <= _step(name) and not _fault(os.path.join(path, other)):
            return f"; the last complete step before it is {_step(other)}: load(path, like, step={_step(other)})"
    return ""


def _make(path: str) -> None:
    """Make a folder and those above it that are missing, durably."""
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        _make(above)
        os.mkdir(path)
        sync_folder(above)


def _latest(path: str) -> str | None:
    try:
        name = os.path.basename(os.readlink(os.path.join(path, _LATEST)))
    except OSError:
        name = ""
    if _STEP.fullmatch(name) and os.path.exists(os.path.join(path, name, INDEX)):
        return name
    complete = (name for name in reversed(_names(path)) if not _fault(os.path.join(path, name)))
    return next(complete, None)


def _names(path: str) -> list[str]:
    """Return the folders of steps, the oldest first."""
    names = filter(_STEP.fullmatch, os.listdir(path) if os.path.isdir(path) else [])
    folders = (name for name in names if os.path.isdir(os.path.join(path, name)))
    return sorted(folders, key=lambda name: (_step(name), _attempt(name)))


def _step(name: str) -> int:
    return int(_STEP.fullmatch(name)[1])  # type: ignore[index]


def _attempt(name: str) -> int:
    return int(_STEP.fullmatch(name)[2] or 0)  # type: ignore[index]


def _free_name(path: str, step: int) -> str:
    taken = [_attempt(name) for name in _names(path) if _step(name) == step]
    return f"step-{step:08d}.{max(taken) + 1}" if taken else f"step-{step:08d}"


def _fault(folder: str) -> str:
    """Return why a step is not complete, or ""."""
    try:
        return missing_bytes(folder, read_index(folder))
    except CheckpointError as error:
        return str(error)
