"""The values of a program while it is recorded: the graph, and the node of every value that is alive."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from fspmd import tracing
from fspmd.body import state
from fspmd.programs.facts import aten, memory_of, shard_of
from fspmd.programs.fakes import active_mode, stand_in
from fspmd.programs.impurities import line
from fspmd.programs.program import value_of
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import TensorSpec, describe
from fspmd.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    current_autograd_node,
    disable_dispatch_modes,
    next_sequence,
)
from fspmd.tracing import RecordingMode
from fspmd.transport import Pending
from fspmd.transport.local_tensor import LocalTensor, blocks_of
from fspmd.variance import unwrapped
from fspmd.watching.causes import Cause, trace


class Number(int):
    """An integer that a step gave, such as a seed: known by its identity."""

    __slots__ = ()


class Values(RecordingMode):
    """What is put down, and where."""

    def __init__(self, imagines: bool) -> None:
        super().__init__()
        self.imagines = imagines  # tensors are fake, and have no values
        self.mode = active_mode() if imagines else None
        self.graph = fx.Graph()
        self.given: list[Tensor] = []  # arguments
        self.captured: dict[fx.Node, Tensor] = {}  # tensors that were there before
        self.written: set[fx.Node] = set()  # arguments
        self.uneven = ""  # why blocks may have another shape on other ranks; empty where they have one on all
        self.unlike = ""  # why ranks may have other steps; empty where all have the same
        self.places = False  # numbers of steps may be places that each rank has for itself
        self.are_places = False  # what is learnt now
        self.deferred = False  # steps run when gradients are asked for; collectives of processes are not done
        self.made: set[fx.Node] = set()  # those among them that are our own, and stay what they are
        self._gradients: dict[fx.Node, Any] = {}  # of what is captured
        self._of_rank: set[fx.Node] = set()  # of that, what each rank has for itself
        self._owners: dict[int, fx.Node] = {}  # of memory that was there before
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # of tensors that have values, where others have none
        self._copies: list[tuple[StorageWeakRef, set[int]]] = []  # where torch has views; both memories
        self._causes: dict[int, Cause] = {}  # of forward steps, by the numbers of autograd's nodes
        self._before: dict[int, Cause] = {}  # of the last step before a node, which may have none of its own
        self._nodes: dict[int, tuple[ReferenceType[Tensor], fx.Node]] = {}
        self._objects: dict[int, tuple[Any, fx.Node]] = {}  # of what is no tensor
        self._shards: dict[int, tuple[ReferenceType[Tensor], fx.Node, int]] = {}  # of values of all ranks

    def argument(self, x: Tensor) -> fx.Node:
        """A tensor that the recorded function, or its backward, is called with."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"x{len(self._nodes)}")
        self._know(x, node)
        self._owners.setdefault(self._memory(x), node)
        self.given.append(x)
        return node

    def was_there(self, x: Tensor) -> bool:
        """Whether a tensor is an argument or closed over, and no result of a step."""
        return _entry(self._nodes, x) is None or any(x is y for y in (*self.given, *self.captured.values()))

    def node_of(self, x: Tensor) -> fx.Node:
        """Of a value, or of what was there before."""
        if (known := _entry(self._nodes, x)) is not None:
            return known[1]  # type: ignore[no-any-return]
        if type(x) is LocalTensor and any(self.is_known(shard) for shard in x.shards):  # ours put it together
            args = [self.node_of(shard) for shard in x.shards], x.frame, x.borrowed, x.storage_offset()
            node = self._put(LocalTensor, args, {}, constant=all(map(self.is_constant, x.shards)))
        elif (shard := _entry(self._shards, x)) is not None:
            node = self._put(shard_of, shard[1:], {}, constant=self.is_constant(x))
        else:
            self.check_captured(x)
            node = self.graph.create_node("get_attr", f"captured{len(self.captured)}")
            self.captured[node] = x
            with DisableTorchFunction():
                self._gradients[node] = x.grad if x.is_leaf else None
            self._owners.setdefault(self._memory(x), node)
        self._know(x, node)
        return node

    def owner(self, x: Tensor) -> fx.Node | None:
        """Whose memory, of what was there before, a tensor lies in."""
        self.node_of(x)
        return self._owners.get(self._memory(x))

    def _memory(self, x: Tensor) -> int:
        """What tells the memory of a tensor; of one with values, where others have none, that of its stand-in."""
        block = blocks_of(x)[0]
        block = unwrapped(block)
        self.check_dense(block)
        if self.mode is not None and not isinstance(block, FakeTensor):
            if id(block) not in self._stand_ins:
                with self.pause():  # of a view torch first makes the base
                    self._stand_ins[id(block)] = block, stand_in(block, self.mode)
            block = self._stand_ins[id(block)][1]
        return memory_of(block)

    def copied(self, copy: Tensor, x: Tensor) -> None:
        """A value is a copy, and in torch it would be a view."""
        with DisableTorchFunction():
            alive = StorageWeakRef(blocks_of(unwrapped(copy))[0].untyped_storage())
        above = self._memory(x)
        other = [memories for _, memories in self._copies if above in memories]  # x may be a copy, and dead soon
        self._copies.append((alive, {self._memory(copy), above}.union(*other)))

    def is_copied(self, x: Tensor) -> bool:
        """Whether a write into a value would be seen in a copy of it, or in what it is a copy of."""
        self._copies = [one for one in self._copies if not one[0].expired()]
        return bool(self._copies) and any(self._memory(x) in memories for _, memories in self._copies)

    def constant(self, x: Tensor, value: Tensor | None = None) -> Tensor:
        """A tensor that is the same in every run of this rank, so that Python may know its value."""
        node = self.graph.create_node("get_attr", f"captured{len(self.captured)}")
        with self.real(), tracing.outside_transforms():
            kept = self.captured[node] = (x if value is None else value).clone()  # the other may be written into
            _describe(node, kept, memory_of(kept))
        self.made.add(node)
        self._gradients[node] = None
        if value is None:
            self._of_rank.add(node)
        copy = self._put(aten.clone.default, (node,), {}, constant=True, own=False)
        self._know(x, copy)
        return x

    def lies(self, out: Any) -> None:
        """Say of results in the global view how they lie."""
        if type(out) is Sharded:
            self.blocks(out.spec)
            known = _entry(self._nodes, out.local)
            if known is None and type(out.local) is LocalTensor:  # which ours put together, and nothing has used
                known = _entry(self._nodes, out.local.shards[0])
            if known is not None:
                known[1].meta.setdefault("spec", out.spec)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self.lies(one)

    def blocks(self, spec: TensorSpec) -> None:
        """What blocks there are: in backward an empty one has other steps than those of other ranks."""
        if not spec.even:
            self.is_uneven(lambda: f"{_shown(spec)} has blocks of unlike sizes")
            last = tuple(n - 1 for n in spec.mesh.shape.values())  # no block is smaller
            if 0 in spec.local_shape(last):
                self.is_unlike(lambda: f"{_shown(spec)} has empty blocks")

    def is_uneven(self, why: Callable[[], str]) -> None:
        """Blocks may have another shape on other ranks."""
        self.uneven = self.uneven or f"{why()}{line()}"

    def is_unlike(self, why: Callable[[], str]) -> None:
        """Ranks may have other steps."""
        self.unlike = self.unlike or f"{why()}{line()}"

    def is_constant(self, x: Tensor) -> bool:
        """Whether a value is the same in every run of this rank, so that Python may know it."""
        for table in (self._nodes, self._shards):
            if (found := _entry(table, x)) is not None:  # and nothing was written into it, or into what it is a view of
                return bool(found[1].meta.get("constant")) and not x._version
        return False

    def learn(self, values: Iterable[Any]) -> None:
        """Python learns of constants: which rank it runs on, where they are made of that."""
        waiting = [self.node_of(x) for x in values if is_plain(x)]
        while waiting and not self.unlike:
            node = waiting.pop()
            if node in self._of_rank and self.are_places:
                self.places = True
            elif node in self._of_rank:
                self.is_unlike(lambda: "Python has learnt a value that is made of axis_index")
            waiting += node.all_input_nodes

    @contextmanager
    def placing(self) -> Iterator[None]:
        """What is learnt within is where so many rows begin, from which no other step follows."""
        before, self.are_places = self.are_places, True
        try:
            yield
        finally:
            self.are_places = before

    def is_value(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of the recorded function, or was computed in it, and is no constant."""
        x = unwrapped(x)
        known = _entry(self._nodes, x) or _entry(self._shards, x)
        return known is not None and known[1].op != "get_attr" and not self.is_constant(x)

    def is_known(self, x: Tensor) -> bool:
        """Whether it is in the record."""
        return any(_entry(table, x) is not None for table in (self._nodes, self._shards))

    def _know(self, x: Tensor, node: fx.Node) -> None:
        self._nodes[id(x)] = ref(x), node
        if "value" not in node.meta:
            _describe(node, x, self._memory(x))
        shards = x.shards if type(x) is LocalTensor else ()
        if shards and x.uneven:  # type: ignore[attr-defined]
            self.is_uneven(lambda: f"blocks are {' or '.join(dict.fromkeys(str(value_of(one)) for one in shards))}")
        for i in reversed(range(len(shards))):  # of ranks that have one tensor it is the first one's
            self._shards[id(shards[i])] = ref(shards[i]), node, i

    def _placed(self, value: Any) -> Any:
        """An argument as the graph has it."""
        if is_plain(value):
            return self.node_of(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(map(self._placed, value)) if type(value) in (list, tuple) else value
        known = self._objects.get(id(value))
        return value if known is None else known[1]

    def check_captured(self, x: Tensor) -> None:
        """Raises for a tensor that was not there before the recording, and that no step gave."""

    def check_dense(self, x: Tensor) -> None:
        """Raises for a tensor that does not lie in memory by strides."""

    def _put(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        name: str | None = None,
        constant: bool = False,
        own: bool = True,
    ) -> fx.Node:
        """A step. ``own``: the node that autograd made last is that of the step, or of what it is a part of."""
        node = self.graph.create_node("call_function", target, name=name or getattr(target, "_opname", None))
        node.args = args  # set apart: `create_node` would look through them for sizes of other ranks, which are welcome
        if kwargs:
            node.kwargs = kwargs
        cause, backward = self._cause(own)
        node.meta.update(cause=cause, backward=backward, constant=constant, deferred=self.deferred)
        if self.repeats:
            node.meta["repeats"] = True
        if (body := state.body) is not None and body.uneven:
            self.is_uneven(lambda: f"{body.name} may have blocks of unlike sizes")
            if body.empty:
                self.is_unlike(lambda: f"{body.name} may have empty blocks")
        return node

    def _cause(self, own: bool = True) -> tuple[Cause, bool]:
        """Who asked for a step, and whether it computes gradients."""
        node: Any = current_autograd_node()
        known = None
        if node is not None and not self.repeats:
            number = node._sequence_nr()
            known = self._causes.get(number) or self._before.get(number)
        found = known or trace().cause
        last = _last_of_autograd()
        if own:
            self._causes.setdefault(last, found)
        self._before[last + 1] = found
        return found, node is not None or self.deferred

    def _results(self, out: Any, node: fx.Node) -> Any:
        """Make the results of a step known; numbers become such as can be told apart."""
        if is_plain(out):
            self._know(out, node)
        elif type(out) in (tuple, list):
            node.meta["parts"] = tuple(value_of(one).nbytes if is_plain(one) else 0 for one in out)
            return type(out)(self._results(one, _part(node, i)) for i, one in enumerate(out))
        elif type(out) is int:
            out = Number(out)
            self._objects[id(out)] = out, node
        elif isinstance(out, Pending):
            return _Landing(out, node, self)
        elif out is not None and type(out) is not bool:  # there is but one True
            self._objects[id(out)] = out, node
        return out

    @contextmanager
    def real(self) -> Iterator[None]:
        """The same, and tensors made there have values."""
        with self.pause(), disable_dispatch_modes() if self.imagines else nullcontext():
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside is no step."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class _Landing(Pending):
    """A collective under way, whose wait is a step too."""

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
        own = not torch.is_grad_enabled() and last not in recorder._causes
        node = recorder._put(Pending.wait, (self.node,), {}, own=own)
        recorder._before[last + 1] = cause  # gradients begin where this ends
        if own:
            recorder._causes[last] = cause
        node.meta["effect"] = "call" in self.node.meta and bool(self.node.meta.get("effect"))  # it writes until then
        return recorder._results(out, node)  # type: ignore[no-any-return]


def _last_of_autograd() -> int:
    """The number of the node that autograd made last."""
    return int(next_sequence()) - 1


def _shown(spec: TensorSpec) -> str:
    return describe(spec.dtype, spec.shape, spec.partition)


def _entry(table: dict[int, Any], x: Tensor) -> Any:
    """What a table has of a tensor, and not of one that died at the same address."""
    found = table.get(id(x))
    return found if found is not None and found[0]() is x else None


def _describe(node: fx.Node, x: Tensor, storage: int) -> None:
    """Say of a node what its result is, and in whose memory it lies."""
    block = blocks_of(x)[0]
    before = node.all_input_nodes  # which are alive
    if node.target is operator.getitem or node.target is Pending.wait:
        before = before[0].all_input_nodes
    memory = node
    for one in before:
        if one.meta.get("storage") == storage:
            memory = one.meta["memory"]
            break
    node.meta.update(
        value=value_of(block),
        held=(x.frame, x.uneven) if type(x) is LocalTensor else None,
        device=x.device,
        strides=_strides(block),
        storage=storage,
        memory=memory,
    )


def _strides(block: Tensor) -> tuple[int, ...] | None:
    return None if block.layout is not torch.strided or block.is_contiguous() else tuple(block.stride())


def _part(node: fx.Node, i: int) -> fx.Node:
    """One of the results of a step that gives several."""
    part = node.graph.call_function(operator.getitem, (node, i))
    part.meta.update({key: node.meta[key] for key in ("cause", "backward", "deferred")})
    return part
