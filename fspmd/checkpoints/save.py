"""`save`: a pytree as a step of a checkpoint."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import IO, Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor

from fspmd.checkpoints import folders
from fspmd.checkpoints.boxes import Cuboid, boxed, boxes_of, whole, wrong_cover
from fspmd.checkpoints.crew import Crew, Report, Settlement, crew_of
from fspmd.checkpoints.files import Output, bytes_of, write_file
from fspmd.checkpoints.index import (
    INDEX,
    METADATA,
    Leaves,
    SavedBlock,
    SavedLeaf,
    blocks_of_rows,
    index_text,
    metadata_of_torch,
    rows_of,
)
from fspmd.checkpoints.leaves import NamedLeaf, encoded, is_tensor, kind_of, named_leaves
from fspmd.errors import ArgumentError, CheckpointError, FspmdError, MeshError, TreeError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport.local_tensor import placed_blocks, resolved

PathLike = str | os.PathLike[str]


class SaveHandle:
    """A save, which may still be under way: its ``step`` and, once it is done, its ``folder``.

    ``folder`` is a checkpoint of torch.distributed.checkpoint.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self._path = path
        self._name: str | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._told = False

    @property
    def folder(self) -> str:
        """The folder of the step. It waits for the save."""
        self.wait()
        return os.path.join(self._path, self._name or "")

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


_last: SaveHandle | None = None  # the save whose failure nobody has been told yet


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

    >>> import tempfile
    >>> from fspmd import P, device_put, latest_step, make_mesh
    >>> path = tempfile.mkdtemp()
    >>> w = device_put(torch.ones(5, 3), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> save(path, {"w": w, "rate": 0.1}, step=20)
    SaveHandle(step=20, done=True)
    >>> latest_step(path)
    20
    """
    global _last
    path = os.path.abspath(os.fspath(path))
    crew = crew_of(mesh, "save")
    finish_last()

    def prepared() -> tuple[list[NamedLeaf], str, list[Any]]:
        _check_numbers(step, keep)
        leaves, _ = named_leaves(tree, "save", "tree", ())
        leaves = [_with_state(leaf) for leaf in leaves]
        rows = [(leaf.name, _told(leaf, crew)) for leaf in leaves]
        return leaves, f"step={step}, keep={keep}, asynchronous={asynchronous}", rows

    leaves = _agreed(crew, prepared)
    with torch.no_grad():
        leaves = [_settled(leaf) for leaf in leaves]
    number, unfinished = crew.decide(lambda: (folders.next_step(path) if step is None else step, folders.begin(path)))
    work = _Work(path, unfinished, number, inf if keep is None else keep, *_tasks(leaves, crew, asynchronous))
    settlement = crew.settlement(os.path.basename(unfinished))
    handle = _last = SaveHandle(number, path)
    if asynchronous:
        handle._thread = threading.Thread(target=_run, args=(handle, work, settlement), name="fspmd save")
        handle._thread.start()  # no daemon, so a process that ends waits for it
    else:
        _run(handle, work, settlement)
        _last = None
        handle.wait()
    return handle


def finish_last() -> None:
    """Wait for the save before, and raise its failure unless it was raised already."""
    global _last
    handle, _last = _last, None
    if handle is not None and not handle._told:
        handle.wait()


@atexit.register
def _tell_last() -> None:
    """Print the failure of the last save if nobody asked for it. The interpreter has joined its thread."""
    if _last is not None and _last._failure and not _last._told:
        print(f"fspmd.CheckpointError: {_last._failure}", file=sys.stderr)


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
    if len(crew.ranks) > 1 and not _is_spread(value):
        text += f", checksum {_checksum(value):08x}"
    return text


def _is_spread(value: Any) -> bool:
    """Whether a leaf has its blocks on different processes."""
    return isinstance(value, Sharded) and value.spec.mesh.transport == "process_group"


def _checksum(value: Any) -> int:
    blocks = [b for _, b in placed_blocks(value.local, value.spec.mesh)] if isinstance(value, Sharded) else [value]
    total = 0
    for block in blocks:
        total = crc32(bytes_of(_plain(block)) if isinstance(block, Tensor) else encoded(block), total)
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


# --- what each process writes -----------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A block that this process writes."""

    name: str
    box: Cuboid
    data: Tensor | bytes


@dataclass(slots=True)
class _Work:
    """A step that is being saved, in a folder without its name."""

    path: str
    unfinished: str
    step: int
    keep: float
    leaves: Leaves  # of all processes, without blocks
    tasks: list[Task]
    file: str


def _tasks(leaves: list[NamedLeaf], crew: Crew, copies: bool) -> tuple[Leaves, list[Task], str]:
    """Return the leaves, the blocks that this process writes, and its file.

    A block goes to that of its holders which has the fewest bytes so far. All processes find the same, without asking.
    """
    me, loads = crew.ranks[crew.place], dict.fromkeys(crew.ranks, 0)
    found: Leaves = {}
    tasks: list[Task] = []
    boxes_by_spec: dict[TensorSpec, dict[Cuboid, list[int]]] = {}
    for leaf in leaves:
        value = leaf.value
        tensor = is_tensor(value)
        found[leaf.name] = SavedLeaf(
            leaf.path,
            value.dtype if tensor else None,
            tuple(value.shape) if tensor else (),
            None if tensor else kind_of(value),
        )
        if isinstance(value, Sharded):
            if value.spec not in boxes_by_spec:
                boxes_by_spec[value.spec] = boxes_of(value.spec)
            boxes, size = boxes_by_spec[value.spec], value.dtype.itemsize
        else:
            boxes, size = {whole(value.shape if tensor else ()): []}, value.dtype.itemsize if tensor else 1024
        mine: set[Cuboid] = set()
        for box, holders in boxes.items():
            owner = min(holders if _is_spread(value) else crew.ranks, key=loads.__getitem__)
            loads[owner] += box.numel * size
            if owner == me:
                mine.add(box)
        tasks += [Task(leaf.name, box, _copied(data) if copies else data) for box, data in _data(value, mine)]
    if copies:
        _finish_copies(leaves)
    return found, tasks, f"__{crew.place}_0.distcp"


def _data(value: Any, mine: set[Cuboid]) -> list[tuple[Cuboid, Tensor | bytes]]:
    """Return the boxes of a leaf that this process writes, each with its block."""
    if not isinstance(value, Sharded):
        return [(box, value.detach() if isinstance(value, Tensor) else encoded(value)) for box in mine]
    left = set(mine)
    rows: list[tuple[Cuboid, Tensor | bytes]] = []
    for index, block in placed_blocks(value.local.detach(), value.spec.mesh) if mine else ():
        at = tuple(index.values())
        box = Cuboid(value.spec.offset(at), value.spec.local_shape(at))
        if box in left:
            left.remove(box)
            rows.append((box, block))
    if left == {whole(value.shape)}:  # a tensor without elements
        rows.append((whole(value.shape), torch.empty(value.shape, dtype=value.dtype)))
    return rows


def _copied(data: Tensor | bytes) -> Tensor | bytes:
    """Return a copy in the host's memory. One from a GPU is under way until `_finish_copies`."""
    if not isinstance(data, Tensor):
        return data
    with torch.no_grad(), DisableTorchFunction():
        x = resolved(data)
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return copy.copy_(x, non_blocking=x.is_cuda)


def _finish_copies(leaves: list[NamedLeaf]) -> None:
    for device in {leaf.value.device for leaf in leaves if isinstance(leaf.value, Tensor) and leaf.value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _plain(block: Tensor) -> Tensor:
    """Return a block as a tensor of the host that has no more memory than its elements."""
    with torch.no_grad(), DisableTorchFunction():
        x = resolved(block.detach()).cpu().contiguous()
        return x if type(x) is Tensor and x.untyped_storage().nbytes() == x.nbytes else x.as_subclass(Tensor).clone()


# --- writing ----------------------------------------------------------------------------------------------------------


def _run(handle: SaveHandle, work: _Work, settlement: Settlement) -> None:
    """Write, and settle with the other processes whether the step is complete."""
    interrupt: BaseException | None = None
    try:
        report: Report = {"blocks": _write(work)}
    except BaseException as error:
        report = {"failure": _text(error)}
        interrupt = None if isinstance(error, Exception) else error

    def decide(reports: list[Report]) -> Report:
        try:
            return {"name": _complete(work, reports, settlement.crew)}
        except Exception as error:
            shutil.rmtree(work.unfinished, ignore_errors=True)
            return {"failure": _text(error)}

    try:
        outcome = settlement.settle(report, decide)
    except Exception as error:
        outcome = {"failure": f"the ranks could not settle whether the step is complete: {error}"}
    handle._name = outcome.get("name")
    if "failure" in outcome:
        handle._failure = f"save of step {work.step} in {work.path} failed: {outcome['failure']}"
    work.tasks.clear()
    if interrupt is not None:
        raise interrupt


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, FspmdError) else f"{type(error).__name__}: {error}"


def _write(work: _Work) -> list[Any]:
    """Write the blocks of this process into its file, and return them as rows."""
    rows = []
    if work.tasks:
        with Output(os.path.join(work.unfinished, work.file)) as out:
            for name, box, data in work.tasks:
                out.begin()
                elements = None
                if isinstance(data, Tensor):
                    torch.save(_plain(data), cast(IO[bytes], out))
                    elements = _elements(bytes(out.head))
                else:
                    out.write(data)
                start, length, checksums = out.end()
                rows.append([name, rows_of([SavedBlock(box, work.file, start, length, elements, checksums)])[0]])
    return rows


def _elements(head: bytes) -> int | None:
    """Return where the elements of a tensor begin in an item of torch.save, a zip file: after its entry "data/0"."""
    at = head.find(b"archive/data/0")
    header = head[at - 30 : at]
    if at < 30 or not header.startswith(b"PK\x03\x04"):
        return None
    return at + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _complete(work: _Work, reports: list[Report], crew: Crew) -> str:
    """Check that all is written, and give the step its name. The first process does so for all."""
    for rank, report in zip(crew.ranks, reports, strict=True):
        if "failure" in report:
            raise CheckpointError(f"rank {rank}: {report['failure']}" if len(crew.ranks) > 1 else report["failure"])
    for name, row in (pair for report in reports for pair in report["blocks"]):
        work.leaves[name].blocks += blocks_of_rows([row])
    for name, leaf in work.leaves.items():
        if wrong := wrong_cover(leaf.shape, (block.box for block in leaf.blocks)):
            raise CheckpointError(f"{name!r} was not written whole: {wrong}")
    write_file(os.path.join(work.unfinished, METADATA), metadata_of_torch(work.leaves, work.path))
    write_file(os.path.join(work.unfinished, INDEX), index_text(work.leaves, work.step))
    name = folders.commit(work.path, work.unfinished, work.step)
    folders.prune(work.path, work.keep, name)
    return name
