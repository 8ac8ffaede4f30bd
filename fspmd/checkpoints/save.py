"""`save`: a pytree as a step of a checkpoint. A save may go on while the program does."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fspmd.checkpoints import folders
from fspmd.checkpoints.boxes import NamedLeaf, boxed, canonical, kind_of, named_leaves
from fspmd.checkpoints.crew import Crew, crew_of
from fspmd.checkpoints.files import PathLike, checked_path
from fspmd.checkpoints.writing import finish, is_spread, plain_block, work_of
from fspmd.digests import bytes_of
from fspmd.errors import ArgumentError, CheckpointError, MeshError, TreeError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded
from fspmd.transport.local_tensor import placed_blocks


class SaveHandle:
    """A save, which may still be under way: its ``step`` and, once it is done, its ``folder``.

    ``folder`` is a checkpoint of torch.distributed.checkpoint.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self._path = path
        self._name = ""
        self._failure = f"save of step {step} in {path} was cut off"  # until it has ended
        self._told = False
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], tuple[str, str]], asynchronous: bool) -> None:
        """Do the work, which returns the name of the folder and the failure, here or in a thread."""

        def target() -> None:
            self._name, self._failure = work()

        if not asynchronous:
            target()
            self.wait()
            return
        global _last
        _last = self
        self._thread = threading.Thread(target=target, name="fspmd save")
        self._thread.start()  # no daemon, so a process that ends waits for it

    @property
    def folder(self) -> str:
        """The folder of the step. It waits for the save."""
        self.wait()
        return os.path.join(self._path, self._name)

    def done(self) -> bool:
        """Whether nothing is left to be written. The answer may differ from rank to rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the step is complete.

        Raises:
            CheckpointError: on all ranks alike, a rank could not write.
        """
        if self._thread is not None:
            self._thread.join()
        if self._failure:
            self._told = True
            raise CheckpointError(self._failure)

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, done={self.done()})"


_last: SaveHandle | None = None  # the last asynchronous save, until `finish_last`


def finish_last() -> None:
    """Wait for the asynchronous save before, and raise its failure unless it was raised already."""
    global _last
    handle, _last = _last, None
    if handle is not None and not handle._told:
        handle.wait()


@atexit.register
def _tell_last() -> None:
    """Print the failure of the last save if nobody asked for it. The interpreter has joined its thread."""
    if _last is not None and _last._failure and not _last._told:
        print(f"fspmd.CheckpointError: {_last._failure}", file=sys.stderr)


def save(
    path: PathLike,
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    mesh: Mesh | None = None,
) -> SaveHandle:
    """Save a pytree as a step of the checkpoint in a folder.

    The step is complete or not there: a process or a machine that stops at any moment leaves the steps before it as
    they were, and ``path/latest`` names one that is complete. The files are those of torch.distributed.checkpoint,
    which reads the step's folder: ``dcp.load(tree, checkpoint_id=handle.folder)``. Each leaf has its global key path as
    its name, such as ``"layers.0.weight"``. Each block is written once, by one of the ranks that hold it, with
    checksums.

    Args:
        path: The folder of all steps. All processes must see the same.
        tree: A pytree of `Sharded` values, tensors, generators, numbers, strings, bytes and None. All processes pass
            the same structure, and equal values for what is no `Sharded`. Pending sums are settled first.
        step: The number of the step; by default the next. A step that is there already is replaced, once the new one is
            complete.
        keep: How many complete steps stay, this one included. Older ones are removed last.
        asynchronous: Copy the values, return at once, and write in a thread. A process that ends waits for the thread.
            A failure is raised by `SaveHandle.wait`, or else by the next `save` or `load`.
        mesh: Its processes save together. By default those of `set_mesh`, or else all. A simulation is one process.

    Communication: two all-gathers of small messages, and those that settle pending sums. The outcome passes through the
    store of torch.distributed.

    Raises:
        CheckpointError: on all ranks alike, a rank could not write; or the save before failed.
        TreeError, ArgumentError, MeshError: on all ranks alike, an argument is wrong; the error names all leaves that
            cannot be saved. Or ranks pass different trees.
        LockstepError: on all ranks alike, ranks have replayed different records of `jit`.

    >>> import tempfile
    >>> from fspmd import P, device_put, latest_step, make_mesh
    >>> path = tempfile.mkdtemp()
    >>> w = device_put(torch.ones(5, 3), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> save(path, {"w": w, "rate": 0.1}, step=20)
    SaveHandle(step=20, done=True)
    >>> latest_step(path)
    20
    """
    crew = crew_of(mesh, "save")

    def prepared() -> tuple[list[NamedLeaf], str, list[Any]]:
        finish_last()  # here, where all ranks hear of an error: one of them may have been told by its handle
        _check_numbers(step, keep)
        checked_path(path, "save")
        leaves, _ = named_leaves(tree, "save", "tree", ())
        leaves = [_with_state(leaf) for leaf in leaves]
        rows = [(leaf.name, _told(leaf, crew)) for leaf in leaves]
        return leaves, f"step={step}, keep={keep}, asynchronous={asynchronous}", rows

    leaves = _agreed(crew, prepared)
    with torch.no_grad():
        leaves = [_settled(leaf) for leaf in leaves]

    lives = ExitStack()  # closed when the step is complete, or was given up

    def begun() -> tuple[str, int, str]:
        steps = checked_path(path, "save")
        return steps, folders.next_step(steps) if step is None else step, folders.begin(steps, lives)

    steps, number, unfinished = crew.decide(begun)
    work = work_of(leaves, crew, asynchronous, steps, unfinished, number, inf if keep is None else keep)
    settlement = crew.settlement(os.path.basename(unfinished))
    handle = SaveHandle(number, steps)

    def finished() -> tuple[str, str]:
        with lives:
            return finish(work, settlement)

    handle.run(finished, asynchronous)
    return handle


# --- before anything is written ---------------------------------------------------------------------------------------


def _check_numbers(step: Any, keep: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ArgumentError(f"save got {name}={described(value)}; give it an int of at least {least}, or None")


def _with_state(leaf: NamedLeaf) -> NamedLeaf:
    return leaf._replace(value=leaf.value.get_state()) if isinstance(leaf.value, torch.Generator) else leaf


def _told(leaf: NamedLeaf, crew: Crew) -> str:
    """Return the text by which ranks compare a leaf, with a checksum of values that must be equal on all."""
    value = leaf.value
    if isinstance(value, Sharded):
        mesh = value.spec.mesh
        if mesh.transport == "abstract":
            raise MeshError(f"save got {leaf.label}, {value!r}, whose ranks do not exist; save on another mesh")
        if mesh.transport == "process_group" and (others := sorted(set(mesh.ranks) - set(crew.ranks))):
            raise MeshError(
                f"save got {leaf.label}, {value!r}, whose ranks {others} are not among those that save, {crew.ranks}; "
                "pass mesh= with all of them"
            )
    text = f"{value.spec!r}" if isinstance(value, Sharded) else f"{kind_of(value)}"
    if isinstance(value, Tensor) and not isinstance(value, Sharded):
        text = f"{value.dtype} of shape {tuple(value.shape)}"
    if len(crew.ranks) > 1 and not is_spread(value):
        text += f", checksum {_checksum(value):08x}"
    return text


def _checksum(value: Any) -> int:
    blocks = [b for _, b in placed_blocks(value.local, value.spec.mesh)] if isinstance(value, Sharded) else [value]
    total = 0
    for block in blocks:
        total = crc32(bytes_of(plain_block(block)) if isinstance(block, Tensor) else canonical(block), total)
    return total


def _agreed(crew: Crew, make: Callable[[], tuple[list[NamedLeaf], str, list[Any]]]) -> list[NamedLeaf]:
    """Return the leaves. Processes whose leaves differ raise one error, which names the first difference."""
    made: list[Any] = []

    def digest() -> tuple[str, int]:
        made.extend(make())
        return made[1], crc32(repr(made[2]).encode())

    digests = crew.hear(digest)
    if digests.count(digests[0]) != len(digests):
        if (options := [text for text, _ in digests]) and options.count(options[0]) != len(options):
            other = next(i for i, text in enumerate(options) if text != options[0])
            raise ArgumentError(
                f"save: rank {crew.ranks[other]} passes {options[other]}, but rank {crew.ranks[0]} {options[0]}; pass "
                "the same on all ranks"
            )
        raise TreeError(_difference(crew.hear(lambda: made[2]), crew))
    return made[0]  # type: ignore[no-any-return]


def _difference(all_rows: Sequence[list[tuple[str, str]]], crew: Crew) -> str:
    first = dict(all_rows[0])
    for rank, rows in zip(crew.ranks, all_rows, strict=True):
        mine = dict(rows)
        for name in sorted(first.keys() | mine.keys()):
            here, there = mine.get(name, "no such leaf"), first.get(name, "no such leaf")
            if here != there:
                return (
                    f"save: rank {rank} has for {name!r} {here}, but rank {crew.ranks[0]} {there}; pass one tree on "
                    "all ranks. Give values that differ from rank to rank as one Sharded: "
                    "from_process_local(x[None], P(axis))"
                )
    return "save: ranks pass different trees"


def _settled(leaf: NamedLeaf) -> NamedLeaf:
    x = leaf.value
    if not isinstance(x, Sharded):
        return leaf
    target = boxed(x.spec)
    local = x.local.detach()
    return leaf._replace(value=x if target is x.spec else Sharded(redistribute(local, x.spec, target), target))
