"""The values of a program while it is recorded: the graph, and the node of each live value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage, fx
from torch.multiprocessing.reductions import StorageWeakRef

from fspmd import tracing
from fspmd.body import state
from fspmd.errors import RecordError
from fspmd.fake_mode import CachingFakeMode
from fspmd.forms import packed
from fspmd.inspection.causes import Cause, trace
from fspmd.programs.program import Value, memory_of, value_of
from fspmd.programs.refusals import OWN_TYPES, is_dense, line, not_dense
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    NO_LEVEL,
    DisableTorchFunction,
    FakeTensor,
    address_of,
    current_autograd_node,
    level_of,
    next_sequence,
)
from fspmd.tracing import RecordingMode, with_attribute
from fspmd.transport.frame import Frame
from fspmd.transport.local_tensor import JOINED, blocks_of, is_simulated, layout_of_blocks, parts_of, shard_of
from fspmd.transport.pending import Pending
from fspmd.variance import unwrapped

aten: Final = torch.ops.aten


class Number(int):
    """An integer that is the result of a step, such as a seed. The recorder knows it by its identity."""

    __slots__ = ()


class Values(RecordingMode):
    """The graph of a recording, and the node of each value."""

    def __init__(self, mode: CachingFakeMode | None) -> None:
        super().__init__()
        self.mode = mode  # of fake tensors, if tensors have no values
        self.is_fake = mode is not None
        self.graph = fx.Graph()
        self.refused: RecordError | None = None  # the first refusal
        self.given: list[Tensor] = []  # tensors among the arguments
        self.captured: dict[fx.Node, Tensor] = {}  # tensors from before the recording
        self.written: set[fx.Node] = set()  # inputs that are written into
        self.uneven = ""  # why blocks may have another shape on other ranks; empty if all blocks have one shape
        self.unlike = ""  # why ranks may have other steps; empty if all ranks have equal steps
        self.places = False  # whether numbers of steps may be places that differ from rank to rank
        self.are_places = False  # whether constants that Python now reads are places
        self.deferred = False  # whether steps belong to backward; collectives of processes then do not run
        self.made: set[fx.Node] = set()  # captured constants, which never change
        self._gradients: dict[fx.Node, Any] = {}  # ``.grad`` of captured tensors
        self._of_rank: set[fx.Node] = set()  # constants that differ from rank to rank
        self._owners: dict[int, fx.Node] = {}  # nodes of inputs and captured tensors, by memory
        #: copies that are views in torch, and all memories; a weak reference keeps other memory from the same address
        self._copies: list[tuple[StorageWeakRef, set[StorageWeakRef]]] = []
        self._causes: dict[int, Cause] = {}  # causes of forward steps, by autograd's sequence numbers
        self._before: dict[int, Cause] = {}  # causes of the last steps before autograd's sequence numbers
        self._nodes: dict[int, tuple[ReferenceType[Tensor], fx.Node]] = {}  # nodes of live tensors, by id
        self._objects: dict[int, tuple[Any, fx.Node]] = {}  # nodes of results that are no tensors, by id
        self._shards: dict[int, tuple[ReferenceType[Tensor], fx.Node, int]] = {}  # node and place of shards, by id

    def arguments(self, tensors: Iterable[Tensor]) -> list[fx.Node]:
        """The nodes for arguments of the function, or of its backward."""
        nodes = []
        for x in tensors:
            first = next(iter(self.graph.nodes), None)
            with self.graph.inserting_before(first):
                node = self.graph.placeholder(f"x{len(self._nodes)}")
            self._know(x, node)
            self._owners.setdefault(node.meta["storage"], node)
            self.given.append(x)
            nodes.append(node)
        return nodes

    def is_from_outside(self, x: Tensor) -> bool:
        """Whether a tensor is an argument or closed over, and not the result of a step."""
        return _entry(self._nodes, x) is None or any(x is y for y in (*self.given, *self.captured.values()))

    def node_of(self, x: Tensor) -> fx.Node:
        """The node of a tensor: of a result, or of a tensor from before the recording."""
        if (known := _entry(self._nodes, x)) is not None:
            return known[1]  # type: ignore[no-any-return]
        if is_simulated(x) and any(map(self.is_known, blocks_of(x))):  # fspmd has joined the blocks
            shards, *rest = parts_of(x)
            args = (list(map(self.node_of, shards)), *rest)
            node = self._put(JOINED, args, {}, constant=all(map(self.is_constant, shards)))
        elif (shard := _entry(self._shards, x)) is not None:
            node = self._put(shard_of, shard[1:], {}, constant=self.is_constant(x))
        else:
            self._check_captured(x)
            node = self.graph.create_node("get_attr", f"captured{len(self.captured)}")
            self.captured[node] = x
            with DisableTorchFunction():
                self._gradients[node] = x.grad if x.is_leaf else None
        self._know(x, node)
        if node.op == "get_attr":
            self._owners.setdefault(node.meta["storage"], node)
        return node

    def owner(self, x: Tensor) -> fx.Node | None:
        """The node of the argument or captured tensor in whose memory a tensor lies; None for memory of a step."""
        self.node_of(x)
        return self._owners.get(self.memory(x))

    def memory(self, x: Tensor) -> int:
        """The number of a tensor's memory, while the memory lives."""
        return int(address_of(self._storage(blocks_of(x)[0])))

    def _storage(self, block: Tensor) -> UntypedStorage:
        """A block's memory. In a fake recording a tensor with values counts as its fake."""
        if level_of(block) != NO_LEVEL:
            block = unwrapped(block)
        is_usual = type(block) in OWN_TYPES and block.layout is torch.strided and not block.is_nested
        if not is_usual and not is_dense(block):
            raise self.refusal(not_dense(block))
        if self.mode is not None and not isinstance(block, FakeTensor):
            with tracing.unseen():
                block = self.mode.fake_of(block)
        with DisableTorchFunction():
            return block.untyped_storage()

    def copied(self, copy: Tensor, x: Tensor) -> None:
        """Note that ``copy``, a part of ``x``, is a copy in the record and a view in torch."""
        with DisableTorchFunction():
            alive = StorageWeakRef(blocks_of(unwrapped(copy))[0].untyped_storage())
        base = StorageWeakRef(self._storage(blocks_of(x)[0]))
        # x may be a copy itself, and freed soon
        shared = [memories for _, memories in self._copies if base in memories]
        self._copies.append((alive, {StorageWeakRef(self._storage(blocks_of(copy)[0])), base}.union(*shared)))

    def is_copied(self, x: Tensor) -> bool:
        """Whether a write into a tensor would, in torch, change another tensor, which is a copy in the record."""
        self._copies = [entry for entry in self._copies if not entry[0].expired()]
        if not self._copies:
            return False
        memory = StorageWeakRef(self._storage(blocks_of(x)[0]))
        return any(memory in memories for _, memories in self._copies)

    def constant(self, x: Tensor, value: Tensor | None = None) -> Tensor:
        """A tensor that is the same in every run of this rank, so that Python may know its value."""
        node = self.graph.create_node("get_attr", f"captured{len(self.captured)}")
        with self.real(), tracing.outside_transforms():
            kept = self.captured[node] = (x if value is None else value).clone()  # later writes must not change it
            _describe(node, blocks_of(kept)[0], layout_of_blocks(kept), memory_of(kept))
        self.made.add(node)
        self._gradients[node] = None
        if value is None:
            self._of_rank.add(node)
        copy = self._put(aten.clone.default, (node,), {}, constant=True, has_node=False)
        self._know(x, copy)
        return x

    def note_specs(self, out: Any) -> None:
        """Note the specs of `Sharded` results."""
        if type(out) is Sharded:
            self.note_blocks(out.spec)
            block = out.block
            known = _entry(self._nodes, block)
            if known is None:  # fspmd has joined the shards, and no step has used the result yet
                known = _entry(self._nodes, blocks_of(block)[0])
            if known is not None:
                known[1].meta.setdefault("spec", out.spec)
        elif isinstance(out, (tuple, list)):
            for value in out:
                self.note_specs(value)

    def note_blocks(self, spec: TensorSpec) -> None:
        """Note whether blocks of a spec are uneven or empty. Backward has other steps for an empty block."""
        if not spec.even:
            self.note_uneven(lambda: f"{spec.text} has blocks of different sizes")
            last = tuple(n - 1 for n in spec.mesh.shape.values())  # the smallest block
            if 0 in spec.local_shape(last):
                self.note_unlike(lambda: f"{spec.text} has empty blocks")

    def note_uneven(self, why: Callable[[], str]) -> None:
        """Note that blocks may have another shape on other ranks."""
        self.uneven = self.uneven or f"{why()}{line()}"

    def note_unlike(self, why: Callable[[], str]) -> None:
        """Note that ranks may have other steps."""
        self.unlike = self.unlike or f"{why()}{line()}"

    def is_constant(self, x: Tensor) -> bool:
        """Whether a value is the same in every run of this rank, so that Python may know it."""
        for table in (self._nodes, self._shards):
            if (entry := _entry(table, x)) is not None:  # a write, also into its base, makes it no constant
                return bool(entry[1].meta.get("constant")) and not x._version
        return False

    def are_constant(self, values: Iterable[Tensor]) -> bool:
        """Whether Python may know all values."""
        return all(map(self.is_constant, values))

    def note_read(self, values: Iterable[Any]) -> None:
        """Note that Python reads these constants. Those made of `axis_index` tell Python its rank."""
        waiting = [self.node_of(x) for x in values if is_plain(x)]
        while waiting and not self.unlike:
            node = waiting.pop()
            if node in self._of_rank and self.are_places:
                self.places = True
            elif node in self._of_rank:
                self.note_unlike(lambda: "Python has read a value that is made of axis_index")
            waiting += node.all_input_nodes

    def placing(self) -> AbstractContextManager[None]:
        """Within, constants that Python reads are starts of `narrow`, on which no other step depends."""
        return with_attribute(self, "are_places", True)

    def is_value(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of the recorded function or was computed in it, and is not constant."""
        x = unwrapped(x)
        known = _entry(self._nodes, x) or _entry(self._shards, x)
        return known is not None and known[1].op != "get_attr" and not self.is_constant(x)

    def is_known(self, x: Tensor) -> bool:
        """Whether a tensor has a node."""
        return any(_entry(table, x) is not None for table in (self._nodes, self._shards))

    def _know(self, x: Tensor, node: fx.Node) -> None:
        """Note that a tensor is the result of a node."""
        self._nodes[id(x)] = ref(x), node
        blocks, layout = blocks_of(x), layout_of_blocks(x)
        if "value" not in node.meta:
            _describe(node, blocks[0], layout, int(address_of(self._storage(blocks[0]))))
        if layout is None:
            return
        if layout[1]:
            self.note_uneven(lambda: f"blocks are {' or '.join(dict.fromkeys(str(value_of(x)) for x in blocks))}")
        for i in reversed(range(len(blocks))):  # one tensor may be the block of several ranks: the first counts
            self._shards[id(blocks[i])] = ref(blocks[i]), node, i

    def _operands(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with nodes in place of their tensors."""
        return tuple(map(self._placed, args)), {name: self._placed(value) for name, value in kwargs.items()}

    def _placed(self, value: Any) -> Any:
        """An argument with nodes in place of its tensors."""
        if isinstance(value, Tensor) and type(value) is not Sharded:
            return self.node_of(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(map(self._placed, value)) if type(value) in (list, tuple) else value
        known = self._objects.get(id(value))
        return value if known is None else known[1]

    def refusal(self, error: RecordError) -> RecordError:
        """Note an error that the caller raises. If the function catches it, it is raised again at the end."""
        self.refused = self.refused or error
        return error

    def _check_captured(self, x: Tensor) -> None:
        """Raise `RecordError` for a tensor without values that is not the result of a step."""
        if self.is_fake and isinstance(blocks_of(unwrapped(x))[0], FakeTensor):
            raise self.refusal(
                RecordError(
                    f"jit cannot record the use of a tensor of shape {tuple(x.shape)} that another thread or recording "
                    f"has computed; compute it in the thread of the jitted function{line()}"
                )
            )

    def _put(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        name: str | None = None,
        constant: bool = False,
        has_node: bool = True,
    ) -> fx.Node:
        """Add a step. ``has_node``: whether autograd has just made a node for the step, or for a call with it."""
        packet = getattr(target, "overloadpacket", None)
        named = name or getattr(packet, "__name__", None)
        node = self.graph.create_node("call_function", target, name=named)
        node.args = args  # set here, since `create_node` warns about sizes that differ from rank to rank
        if kwargs:
            node.kwargs = kwargs
        cause, backward = self._cause(has_node)
        node.meta.update(cause=cause, backward=backward, constant=constant, deferred=self.deferred)
        if self.repeats:
            node.meta["repeats"] = True
        if (body := state.body) is not None and body.uneven:
            self.note_uneven(lambda: f"{body.name} may have blocks of different sizes")
            if body.empty:
                self.note_unlike(lambda: f"{body.name} may have empty blocks")
        return node

    def _cause(self, has_node: bool = True) -> tuple[Cause, bool]:
        """The cause of a step, which is noted for its gradient; and whether the step computes gradients."""
        node: Any = current_autograd_node()
        known = None
        if node is not None and not self.repeats:
            number = node._sequence_nr()
            known = self._causes.get(number) or self._before.get(number)
        cause = known or trace().cause
        last = _last_of_autograd()
        if has_node:
            self._causes.setdefault(last, cause)
        self._before[last + 1] = cause
        return cause, node is not None or self.deferred

    def _results(self, out: Any, node: fx.Node) -> Any:
        """The results of a step, for which nodes are noted. An int becomes a `Number`, which has an identity."""
        if isinstance(out, Tensor) and type(out) is not Sharded:
            self._know(out, node)
        elif type(out) in (tuple, list):
            node.meta["parts"] = tuple(value_of(x).nbytes if is_plain(x) else 0 for x in out)
            return type(out)(self._results(x, _part(node, i)) for i, x in enumerate(out))
        elif type(out) is int:
            out = Number(out)
            self._objects[id(out)] = out, node
        elif isinstance(out, Pending):
            return _RecordedPending(out, node, self)
        elif out is not None and type(out) is not bool:  # True is a single object, which has no identity
            self._objects[id(out)] = out, node
        return out


class _RecordedPending(Pending):
    """A pending collective whose wait becomes a step."""

    __slots__ = ("node", "recorder")

    def __init__(self, plain: Pending, node: fx.Node, recorder: Values) -> None:
        super().__init__(plain)
        self.node = node
        self.recorder = recorder

    def wait(self) -> Tensor:
        plain: Pending = self._value
        recorder = self.recorder
        if tracing.recorder() is not recorder:
            return plain.wait()
        with recorder.pause():
            out = plain.wait()
        last, cause = _last_of_autograd(), self.node.meta["cause"]
        has_node = not torch.is_grad_enabled() and last not in recorder._causes
        node = recorder._put(Pending.wait, (self.node,), {}, has_node=has_node)
        recorder._before[last + 1] = cause  # gradients begin at the wait
        if has_node:
            recorder._causes[last] = cause
        # a collective that writes into a tensor writes until its wait
        node.meta["effect"] = "call" in self.node.meta and bool(self.node.meta.get("effect"))
        return recorder._results(out, node)  # type: ignore[no-any-return]


def _last_of_autograd() -> int:
    """The sequence number of autograd's latest node."""
    return int(next_sequence()) - 1


def _entry(table: dict[int, Any], x: Tensor) -> Any:
    """The entry of a tensor in a table. The entry of a freed tensor with the same id does not count."""
    entry = table.get(id(x))
    return entry if entry is not None and entry[0]() is x else None


def _describe(node: fx.Node, block: Tensor, layout: tuple[Frame, bool] | None, storage: int) -> None:
    """Describe the result of a node in its ``meta``, by its first block: value, device, strides and memory."""
    operands = node.all_input_nodes  # they are alive, so numbers of memory are distinct
    if node.target is operator.getitem or node.target is Pending.wait:
        operands = operands[0].all_input_nodes
    memory = node
    for operand in operands:
        if operand.meta.get("storage") == storage:
            memory = operand.meta["memory"]
            break
    node.meta.update(
        value=Value(tuple(block.shape), block.dtype),
        frame=layout,
        device=block.device,
        strides=_strides(block),
        storage=storage,
        memory=memory,
    )


def _strides(block: Tensor) -> tuple[int, ...] | None:
    if block.layout is not torch.strided or (block.is_contiguous() and 1 not in block.shape):
        return None
    return None if (strides := tuple(block.stride())) == packed(tuple(block.shape)) else strides


def _part(node: fx.Node, i: int) -> fx.Node:
    """A node for one of the results of a step."""
    part = node.graph.call_function(operator.getitem, (node, i))
    part.meta.update({key: node.meta[key] for key in ("cause", "backward", "deferred")})
    return part
