"""What each process writes of a step, and how the processes complete it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from fspmd.checkpoints import folders
from fspmd.checkpoints.boxes import Cuboid, NamedLeaf, boxes_of, encoded, is_tensor, kind_of, whole, wrong_cover
from fspmd.checkpoints.crew import Crew, Report, Settlement
from fspmd.checkpoints.files import Output, write_file
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
from fspmd.errors import CheckpointError, FspmdError
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport.local_tensor import placed_blocks, resolved


class Task(NamedTuple):
    """A block that this process writes."""

    name: str
    box: Cuboid
    data: Tensor | bytes


@dataclass(slots=True)
class Work:
    """A step that is being saved, in a folder without its name."""

    path: str
    unfinished: str
    step: int
    keep: float
    leaves: Leaves  # of all processes, without blocks
    tasks: list[Task]
    file: str
    failure: str = ""  # why this process has nothing to write


def work_of(
    leaves: list[NamedLeaf], crew: Crew, copies: bool, path: str, unfinished: str, step: int, keep: float
) -> Work:
    """Return what this process has to do. An error becomes its failure, since the others wait for its report."""
    work = Work(path, unfinished, step, keep, {}, [], f"__{crew.place}_0.distcp")
    try:
        work.leaves, work.tasks = _tasks(leaves, crew, copies)
    except Exception as error:
        work.failure = _text(error)
    return work


def _tasks(leaves: list[NamedLeaf], crew: Crew, copies: bool) -> tuple[Leaves, list[Task]]:
    """Return the leaves, and the blocks that this process writes.

    A block goes to that of its holders which has the fewest bytes so far. All processes find the same, without asking.
    """
    me, loads = crew.ranks[crew.place], dict.fromkeys(crew.ranks, 0)
    leaves_saved: Leaves = {}
    tasks: list[Task] = []
    boxes_by_spec: dict[TensorSpec, dict[Cuboid, list[int]]] = {}
    for leaf in leaves:
        value = leaf.value
        tensor = is_tensor(value)
        leaves_saved[leaf.name] = SavedLeaf(
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
            owner = min(holders if is_spread(value) else crew.ranks, key=loads.__getitem__)
            loads[owner] += box.numel * size
            if owner == me:
                mine.add(box)
        tasks += [Task(leaf.name, box, _copied(data) if copies else data) for box, data in _data(value, mine)]
    if copies:
        _finish_copies(leaves)
    return leaves_saved, tasks


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
        rows.append((whole(value.shape), torch.empty(value.shape, dtype=value.dtype, device="cpu")))
    return rows


def _copied(data: Tensor | bytes) -> Tensor | bytes:
    """Return a copy in the host's memory. One from a GPU is under way until `_finish_copies`."""
    if not isinstance(data, Tensor):
        return data
    with torch.no_grad(), DisableTorchFunction():
        x = resolved(data)
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return copy.copy_(x, non_blocking=x.is_cuda)


def _finish_copies(leaves: list[NamedLeaf]) -> None:
    for device in {leaf.value.device for leaf in leaves if isinstance(leaf.value, Tensor) and leaf.value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def plain_block(block: Tensor) -> Tensor:
    """Return a block as a tensor of the host that has no more memory than its elements."""
    with torch.no_grad(), DisableTorchFunction():
        x = resolved(block.detach()).cpu().contiguous()
        return x if type(x) is Tensor and x.untyped_storage().nbytes() == x.nbytes else x.as_subclass(Tensor).clone()


def is_spread(value: Any) -> bool:
    """Whether a leaf has its blocks on different processes."""
    return isinstance(value, Sharded) and value.spec.mesh.transport == "process_group"


# --- writing ----------------------------------------------------------------------------------------------------------


def finish(work: Work, settlement: Settlement) -> tuple[str, str]:
    """Write, and settle with the other processes whether the step is complete. Return its folder's name, and a failure.

    One of the two is "". An interrupt is raised after the others have heard of it.
    """
    with settlement.signs_of_life():
        return _finish(work, settlement)


def _finish(work: Work, settlement: Settlement) -> tuple[str, str]:
    interrupt: BaseException | None = None
    try:
        report: Report = {"failure": work.failure} if work.failure else {"blocks": _write(work)}
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
    work.tasks.clear()
    if interrupt is not None:
        raise interrupt
    if "failure" in outcome:
        return "", f"save of step {work.step} in {work.path} failed: {outcome['failure']}"
    return str(outcome["name"]), ""


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, FspmdError) else f"{type(error).__name__}: {error}"


def _write(work: Work) -> list[Any]:
    """Write the blocks of this process into its file, and return them as rows."""
    rows = []
    if work.tasks:
        with Output(os.path.join(work.unfinished, work.file)) as out:
            for name, box, data in work.tasks:
                out.begin()
                elements = None
                if isinstance(data, Tensor):
                    torch.save(plain_block(data), cast(IO[bytes], out))
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


def _complete(work: Work, reports: list[Report], crew: Crew) -> str:
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
    return folders.complete(work.path, work.unfinished, work.step, work.keep)
