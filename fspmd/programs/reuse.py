"""Results written into the memory of donated arguments, where nobody reads those anymore."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import le
from typing import Any, Final

import torch
from torch import Tensor, fx

from fspmd.programs.capture import Capture
from fspmd.programs.facts import shard_of
from fspmd.programs.passes.aliases import in_flight, is_unknown
from fspmd.programs.program import owner
from fspmd.torch_internals import storage_uses
from fspmd.transport.local_tensor import LocalTensor, blocks_of

aten: Final = torch.ops.aten
#: functions of elements that have a form which writes its result into the first argument
IN_PLACE: Final[dict[Any, Any]] = {
    getattr(getattr(aten, name), kind): getattr(getattr(aten, f"{name}_"), kind)
    for names, kinds in (
        (("add", "sub", "mul", "div"), ("Tensor", "Scalar")),
        (("addcmul", "addcdiv", "clamp", "exp", "neg", "relu", "sigmoid", "sqrt", "tanh"), ("default",)),
        (("lerp",), ("Tensor", "Scalar")),
    )
    for name in names
    for kind in kinds
}


def reuse(captured: Capture, places: Sequence[int]) -> frozenset[int]:
    """Have steps write into donated arguments instead of making new tensors; which arguments are written into.

    A step may, if it is the last that reads the memory of its first operand, which is the whole argument, and its
    result is like it. Memory that others hold, too, is copied first (`own`), so that they see none of it.
    """
    program = captured.program
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    within: dict[fx.Node, list[fx.Node]] = {}  # by the step in whose memory they lie
    for node in place:
        within.setdefault(owner(node), []).append(node)
    for i in places:
        argument, leaf = program.inputs[i], captured.leaves[i]
        if not _is_dense(leaf) or leaf.requires_grad:
            continue
        here, readers = argument, _Readers(place)
        readers.add(within[argument])
        while (step := readers.last_of(here)) is not None and _fits(step, here):
            step.target = IN_PLACE[step.target]
            step.meta["memory"] = argument
            step.meta["reuses"] = True
            readers.add(within.pop(step))
            here = step
    written = {owner(node) for node in place if node.meta.get("reuses")}  # now, or when it was lowered
    return frozenset(i for i in places if program.inputs[i] in written)


def _is_dense(x: Tensor) -> bool:
    return all(shard.is_contiguous() for shard in blocks_of(x))


class _Readers:
    """The steps that read the memory of an argument: the last of them, and whether any may hold on to it."""

    def __init__(self, place: dict[fx.Node, int]) -> None:
        self.place = place
        self.last: fx.Node | None = None
        self.odd = False

    def add(self, views: list[fx.Node]) -> None:
        """Those of values that lie in the memory, too; what a collective under way reads, it reads until its wait."""
        users = {user for node in views for user in node.users}
        users |= {wait for user in users if in_flight(user) for wait in user.users}
        self.odd = self.odd or any(map(_is_odd, users))
        known = users if self.last is None else {self.last, *users}
        self.last = max(known, key=self.place.__getitem__, default=None)

    def last_of(self, here: fx.Node) -> fx.Node | None:
        """The last, if it reads the value ``here`` itself."""
        return None if self.odd or self.last is None or here not in self.last.all_input_nodes else self.last


def _is_odd(user: fx.Node) -> bool:
    return is_unknown(user) or user.target in (LocalTensor, shard_of) or user.op == "output"


def _fits(step: fx.Node, here: fx.Node) -> bool:
    """Whether the result of a step may lie where its first operand does."""
    mine = owner(here)
    return (
        step.target in IN_PLACE
        and step.args[0] is here
        and all(x is here or owner(x) is not mine for x in step.all_input_nodes)
        and step.meta.get("value") == here.meta.get("value")
        and step.meta.get("held", False) == here.meta["held"]
    )


def own(x: Tensor) -> Tensor:
    """A tensor that was given away, if nobody else holds its memory; else a copy."""
    if type(x) is not LocalTensor:
        return x if _is_alone(x) else x.detach().clone()
    held = all(sys.getrefcount(shard) <= _HELD and _is_alone(shard) for shard in x.shards)
    return x if held and not x.borrowed else x.detach().clone()


_HELD: Final = 3  # by the list, the loop, and the call


def _is_alone(x: Tensor) -> bool:
    if not x.untyped_storage().resizable() or _is_shared(x):  # that of numpy, or of other processes
        return False
    return all(map(le, _holders(x), _NOBODY))


def _is_shared(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_shared()  # torch says so of all others


def _holders(x: Tensor) -> tuple[int, int, int]:
    """How many hold the memory of a tensor, as Python's object, as torch's, and as the tensor."""
    storage = x.untyped_storage()
    uses: int = storage_uses(storage._cdata)
    return sys.getrefcount(storage), uses, x._use_count()  # type: ignore[attr-defined]


_NOBODY: Final = _holders(torch.empty(1, device="cpu"))  # besides the tensor: versions of torch differ
