"""`check_replicas`: values that must be equal on several ranks are compared by digests."""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, MappingView, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.body import check_member, check_outside, refuse_recorded
from fspmd.digests import Difference, difference, digests, mixed, of_bytes, raw_bytes
from fspmd.errors import ArgumentError, ReplicaError, TreeError, join_failures
from fspmd.foreign import refuse_misfit
from fspmd.inspection.replays import compare_replays, replay_hashes
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh, current_mesh, groups_along, make_mesh
from fspmd.messages import Failure, counted, described, refuse
from fspmd.placement.broadcast import hear_all
from fspmd.sharded import Sharded
from fspmd.spec import describe
from fspmd.transport import Options, arrived, transport_named
from fspmd.transport.groups import gather_integers
from fspmd.transport.local_tensor import blocks_of, held_frame, placed_blocks
from fspmd.trees import flatten_values, leaf_paths, tree_text
from fspmd.user_code import UserLine, user_line

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_CHUNK: Final = 1 << 22  # bytes of each rank that are compared at once, once a leaf differs


def check_replicas(tree: Any, *, every: int = 1, mesh: Mesh | None = None) -> None:
    """Raise an error unless all copies of each value have the same bits on all ranks that hold one.

    A layout says which blocks are copies: ranks that differ only along axes that its spec does not name hold equal
    blocks. That is true of parameters under data parallelism, and of all values that are invariant or reduced over an
    axis. Blocks of pending sums are compared along the other axes. A plain tensor, a number or a string is one value
    for all ranks of ``mesh``, and so is the state of a generator. Other leaves are not looked at, and neither are
    tensors without values (meta tensors). Modules, optimizers and iterators, in which nothing would be, are refused.

    NaNs and -0.0 are compared by their bits. Values are reduced to 64 bits per leaf, which see the place of each bit,
    so a difference goes unseen once in 2⁶⁴ times. It costs some two and a half sums of each tensor.

    In a simulation one tensor stands for all copies, which are equal by construction. Where it holds several, they are
    compared.

    Args:
        tree: A pytree of `Sharded`, tensors, arrays, numbers and strings, such as parameters and optimizer states.
        every: In a loop, compare at the first call from a line, and at every ``every``-th after it. The calls between
            do nothing. All ranks count alike, since they make the same calls.
        mesh: The ranks that compare leaves without a layout. By default that of `set_mesh`, or else that of the first
            `Sharded`, or else all processes.

    Communication: one all-gather of a few integers per mesh, whatever the tree. If there is a difference, the digests
    of all leaves and the blocks of those that differ follow.

    Raises:
        ReplicaError: on all ranks of the mesh alike, copies differ. The error names each leaf, the ranks, the number of
            elements that differ, the largest difference, and the first place in the block.
        LockstepError: on all ranks alike, ranks have replayed different records of `jit`.
        TreeError: on all ranks alike, the ranks pass trees with other structures, shapes, dtypes or specs.
        ArgumentError, RecordError: it is called in a body, or within jit; or ``every`` is no integer above 0; or a leaf
            is a module, an optimizer or an iterator.

    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("dp",))
    >>> params = device_put({"w": torch.ones(8, 2), "b": torch.zeros(2)}, P(), mesh=mesh)
    >>> check_replicas({"params": params, "step": 3})
    >>> for step in range(10):
    ...     check_replicas(params, every=5)
    """
    what = "check_replicas"
    refuse_recorded(what)
    check_outside(what)
    if type(every) is not int or every < 1:
        raise ArgumentError(f"check_replicas got every={described(every)}; give it an integer above 0")
    if every > 1:
        line = user_line(sys._getframe(1))
        _calls[line] += 1
        if (_calls[line] - 1) % every:
            return
    values, treedef = flatten_values(tree)
    labels = leaf_paths(tree, "tree")
    if failures := [failure for pair in zip(values, labels, strict=True) if (failure := _opaque(*pair))]:
        refuse("check_replicas cannot look into all leaves:", failures)
    default = mesh_of(values, mesh, what)
    leaves: dict[Mesh, list[_Copied]] = {default: []}
    for value, label in zip(values, labels, strict=True):
        leaf = _copied(value, label, default)
        if leaf is not None and leaf.mesh.coordinate() is not None:
            leaves.setdefault(leaf.mesh, []).append(leaf)
    for each, group in leaves.items():
        _compare(group, each, tree_text(treedef) if each is default else "")


_calls: Final[Counter[UserLine]] = Counter()  # with every=, by the line of the call


def mesh_of(values: Iterable[Any], mesh: Mesh | None, what: str) -> Mesh:
    """The mesh of a call: ``mesh``, or that of `set_mesh`, or that of the first `Sharded`, or all processes."""
    chosen = mesh or current_mesh() or next((x.spec.mesh for x in values if isinstance(x, Sharded)), None)
    if chosen is None:
        chosen = make_mesh((world.world_size(),), ("process",))
    check_member(chosen, what)
    return chosen


@dataclass(frozen=True, slots=True)
class _Copied:
    """A leaf, and the axes over which ranks hold copies of it."""

    label: str
    what: str  # a description, alike on all ranks
    mesh: Mesh
    axes: tuple[str, ...]
    block: Tensor | None
    text: str = ""  # in the place of a block

    @property
    def name(self) -> str:
        """The label and the description."""
        return f"{self.label}, {self.what}" if self.what else self.label

    @property
    def has(self) -> str:
        """What a rank has, in words."""
        return self.text if self.block is None else f"a block of shape {tuple(self.block.shape)}"

    def digests(self) -> list[int]:
        """The digest of the block; in a simulation, of each block."""
        if self.block is None:
            return [of_bytes(self.text.encode())]
        shapes = [mixed(*x.shape) for x in blocks_of(self.block)]
        return [mixed(*pair) for pair in zip(shapes, digests(blocks_of(self.block)), strict=True)]


def _opaque(x: Any, label: str) -> Failure | None:
    """The failure of a leaf that holds values which this function would not see."""
    if isinstance(x, (torch.nn.Module, torch.optim.Optimizer)):
        return Failure(f"{label} is {described(x)}", ArgumentError, "pass its state_dict()")
    if isinstance(x, (Iterator, MappingView)):
        return Failure(f"{label} is {described(x)}", ArgumentError, "pass a list of its values")
    return None


def _copied(x: Any, label: str, mesh: Mesh) -> _Copied | None:
    """The leaf, if ranks may hold copies of it."""
    if isinstance(x, torch.Generator):
        x = x.get_state()
    if type(x).__name__ == "ndarray":
        x = torch.as_tensor(x)
    if isinstance(x, Sharded):
        mesh, differs = x.spec.mesh, {*x.spec.partition.axes, *x.spec.partition.unreduced}
        axes = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in differs)
        return _Copied(label, repr(x.spec), mesh, axes, x.local) if axes and not x.local.is_meta else None
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    if isinstance(x, Tensor):
        refuse_misfit(x, f"check_replicas got for {label}")
        return None if x.is_meta else _Copied(label, describe(x.dtype, x.shape), mesh, axes, x)
    return _Copied(label, "", mesh, axes, None, repr(x)) if isinstance(x, _PLAIN) else None


def _compare(leaves: Sequence[_Copied], mesh: Mesh, structure: str) -> None:
    """Compare the copies of all leaves on a mesh."""
    numbers_of = [leaf.digests() for leaf in leaves]
    if mesh.transport != "process_group":
        failures = [_simulated(leaf, numbers) for leaf, numbers in zip(leaves, numbers_of, strict=True)]
    else:
        text = f"{structure}: {'; '.join(f'{leaf.label} {leaf.what}' for leaf in leaves)}"
        if _agree(leaves, [numbers[0] for numbers in numbers_of], of_bytes(text.encode()), mesh):
            return
        failures = _differences(leaves, [numbers[0] for numbers in numbers_of], text, mesh)
    if failures := [failure for failure in failures if failure]:
        verb = "differs" if len(failures) == 1 else "differ"
        head = (
            f"check_replicas: {len(failures)} of {counted(len(leaves), 'value')} {verb} between ranks that hold copies:"
        )
        raise ReplicaError(join_failures(head, failures, _ADVICE))


_ADVICE: Final = (
    "either ranks do not run the same program (lockstep and debug find the line), or a device or a message has failed "
    "(replay_check finds a device); broadcast(tree, src=0) gives the values of one rank to all"
)


def _agree(leaves: Sequence[_Copied], numbers: Sequence[int], text: int, mesh: Mesh) -> bool:
    """Whether all ranks have one structure and equal digests, by one all-gather whose size depends on the mesh alone.

    There is one digest for each set of axes: of all leaves with copies over these axes.
    """
    live = [axis for axis, size in mesh.shape.items() if size > 1]
    row = [text] + [0] * (1 << len(live))
    sets = [sum(1 << i for i, axis in enumerate(live) if axis in leaf.axes) for leaf in leaves]
    for place, number in zip(sets, numbers, strict=True):
        row[1 + place] = mixed(row[1 + place], number)
    replays = replay_hashes(mesh) or [0] * ((1 << len(live)) - 1)
    rows = gather_integers(row + replays, mesh)
    compare_replays([other[len(row) :] for other in rows], mesh)
    if any(other[0] != text for other in rows):
        return False
    for place in set(sets):
        over = [axis for i, axis in enumerate(live) if place >> i & 1]
        if any(len({rows[i][1 + place] for i in copies}) > 1 for copies in groups_along(mesh, over)):
            return False
    return True


def _differences(leaves: Sequence[_Copied], numbers: Sequence[int], text: str, mesh: Mesh) -> list[str]:
    """The differences of all leaves on all ranks, alike on all ranks."""
    reports = hear_all(lambda: (text, list(numbers), [leaf.has for leaf in leaves]), mesh)
    for rank, (other, _, _) in zip(mesh.ranks, reports, strict=True):
        if other != reports[0][0]:
            raise TreeError(
                f"check_replicas: rank {rank} passes {other}, but rank {mesh.ranks[0]} {reports[0][0]}; pass the same "
                "tree on all ranks"
            )
    lines = []
    for i, leaf in enumerate(leaves):
        hashes = [report[1][i] for report in reports]
        groups = [group for group in groups_along(mesh, leaf.axes) if len({hashes[at] for at in group}) > 1]
        if not groups:
            continue
        has = {at: reports[at][2][i] for group in groups for at in group}
        if leaf.block is None or any(len({has[at] for at in group}) > 1 for group in groups):
            texts = {at: f"rank {mesh.ranks[at]} has {text}" for at, text in has.items()}
        else:
            ranks = mesh.group_ranks(leaf.axes)
            mine = _counted(_gathered(leaf.block, leaf), ranks, [hashes[mesh.ranks.index(rank)] for rank in ranks])
            texts = {at: text for at, text in enumerate(hear_all(functools.partial(str, mine), mesh)) if text}
        lines.append(f"{leaf.name}: {'; '.join(dict.fromkeys(texts.values()))}")
    return lines


def _simulated(leaf: _Copied, hashes: Sequence[int]) -> str:
    """The differences between copies that a simulation holds; "" if there are none."""
    mesh = leaf.mesh
    if leaf.block is None or held_frame(leaf.block) is None:
        return ""
    groups: dict[tuple[int, ...], list[tuple[int, Tensor, int]]] = {}
    for (place, block), number in zip(placed_blocks(leaf.block, mesh), hashes, strict=True):
        key = tuple(i for axis, i in place.items() if axis not in leaf.axes)
        groups.setdefault(key, []).append((mesh.rank_at(tuple(place.values())), block, number))
    texts = []
    for group in groups.values():
        ranks, blocks, numbers = zip(*group, strict=True)
        texts.append(_counted(iter([torch.stack(blocks)]), ranks, numbers))
    return f"{leaf.name}: {'; '.join(filter(None, texts))}" if any(texts) else ""


def _gathered(block: Tensor, leaf: _Copied) -> Iterator[Tensor]:
    """The copies of a block from all ranks along its axes, [copies, elements], in chunks."""
    transport, mesh = transport_named(leaf.mesh.transport), leaf.mesh
    copies = mesh.axis_size(leaf.axes)
    for chunk in raw_bytes(block).split(_CHUNK):
        whole = arrived(transport.gather(chunk.unsqueeze(0).to(mesh.device), mesh, leaf.axes, Options()))
        yield whole.to("cpu").flatten().view(block.dtype).view(copies, len(chunk) // block.element_size())


def _counted(chunks: Iterable[Tensor], ranks: Sequence[int], hashes: Sequence[int]) -> str:
    """What differs between copies on some ranks; "" if nothing does."""
    most = Counter(hashes).most_common(1)[0][0]
    first = hashes.index(most)
    differences: dict[int, Difference] = {}
    total = 0
    for chunk in chunks:
        for i, row in enumerate(chunk):
            if (new := difference(row, chunk[first])) is not None:
                old = differences.get(i, Difference(0, 0.0, total + new.first))
                differences[i] = Difference(
                    old.elements + new.elements, max(old.largest, new.largest, key=_with_nan), old.first
                )
        total += chunk[0].numel()
    alike = [rank for rank, number in zip(ranks, hashes, strict=True) if number == most]
    others = f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
    return "; ".join(
        f"rank {ranks[i]} differs from {others} in {n} of {counted(total, 'element')}, by at most {largest:.6g}, first "
        f"at element {place} of its block"
        for i, (n, largest, place) in differences.items()
    )


def _with_nan(distance: float) -> float:
    return math.inf if math.isnan(distance) else distance
