"""Donated arguments: a replay frees their memory, or writes results into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from sys import getrefcount
from typing import Any, Final
from weakref import getweakrefcount

import torch
from torch import Tensor, fx

from fspmd.errors import ArgumentError, DonationError
from fspmd.programs.capture import Capture
from fspmd.programs.keys import Chosen
from fspmd.programs.program import by_memory, owner
from fspmd.programs.readers import Picker
from fspmd.programs.steps import OF_RANKS, in_flight, is_unknown
from fspmd.sharded import Sharded, is_sharded
from fspmd.torch_internals import (
    DisableTorchFunctionSubclass,
    address_of,
    make_wrapper_subclass,
    storage_uses,
    swap_memory,
    tensor_uses,
)
from fspmd.transport.local_tensor import blocks_of, is_borrowed, is_simulated, take_blocks
from fspmd.trees import flatten, flatten_in_order, parameter_names, paths_of

_T: Any = Tensor
_STRIDED: Final = torch.strided
#: puts what `Donation.given` returns in the place of the leaves of arguments
Taker = Callable[[tuple[Any, ...], dict[str, Any], list[Any]], None]
#: functions that a tensor without memory still supports
_FACTS: Final = frozenset(
    [
        *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_leaf", "grad")),
        *(getattr(_T, name).__get__ for name in ("requires_grad", "grad_fn")),
        *(_T.dim, _T.size, _T.numel),
    ]
)


class Donated(Tensor):
    """A tensor without its memory. It has a shape and a dtype; any other use raises `DonationError`."""

    donated_as: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal((args, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refusal((args, kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<a tensor of shape {tuple(self.shape)}, donated as {self.donated_as}>"


def _refusal(arguments: Any) -> DonationError:
    donated = next((x for x in flatten(arguments)[0] if isinstance(x, Donated)), "a donated tensor")
    return DonationError(
        f"{donated!r} was used: its memory is gone. Use the results of the jitted function in its place; or leave it "
        "out of donate_argnums, or donate x.clone()"
    )


@dataclass(frozen=True, slots=True)
class Donation:
    """The donated tensors among the leaves of a call's arguments: their places and their names."""

    places: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    written: frozenset[int] = frozenset()  # places that a replay writes results into

    def given(self, values: Sequence[Tensor]) -> list[Any]:
        """The values; for each donated tensor, a list of a new tensor that takes over the memory.

        Raises:
            ArgumentError: a donated tensor is given twice.
        """
        moved: list[Any] = list(values)
        if len({*map(id, values)}) < len(values):
            ids = list(map(id, values))
            for place, name in zip(self.places, self.names, strict=True):
                if ids.count(ids[place]) > 1:
                    raise ArgumentError(
                        f"jit got the tensor donated as {name} in two arguments; pass x.clone() for one"
                    )
        for place, name in zip(self.places, self.names, strict=True):
            moved[place] = self._moved(values[place], place, name)
        return moved

    def _moved(self, x: Tensor, place: int, name: str) -> list[Tensor]:
        """A tensor that takes over the memory, in a list, so that the replay can take the only reference."""
        taker = give_away(x, name)
        return [unshared(taker) if place in self.written else taker]

    def taker(self, pick: Picker | None, leaves: Sequence[Tensor]) -> Taker:
        """A taker for arguments with leaves like these, which are all different. ``pick`` gives the donated ones.

        A block that nothing but its `Sharded` refers to is moved itself. The `Sharded` gets a `Donated` in its place,
        one for all calls. This takes a quarter of the time of a new tensor that takes over the memory.
        """
        if pick is None:
            return self._take_all
        gone = [_gone(leaves[place], name) for place, name in zip(self.places, self.names, strict=True)]
        rows = zip(self.places, self.names, gone, [place in self.written for place in self.places], strict=True)
        return partial(self._take, pick, [*rows])

    def _take_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> None:
        values[:] = self.given(values)

    def _take(
        self, pick: Picker, rows: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]
    ) -> None:
        for holder, (place, name, gone, is_written) in zip(pick(args, kwargs), rows, strict=True):
            x = values[place]
            if (
                type(holder) is Sharded
                and holder.block is x
                and type(x) is Tensor
                and getrefcount(x) <= _HELD
                and not (x.__dict__ or getweakrefcount(x))  # of moves and casts, which would not fit the result
                and (not is_written or _is_alone(x))
            ):
                holder.block = gone
                values[place] = [x]
            else:
                values[place] = self._moved(x, place, name)


NOTHING: Final = Donation()


def _without_memory(like: Any) -> Any:
    """A `Donated`, still without a name. The arguments have no names either, which would cost 200 ns."""
    return make_wrapper_subclass(Donated, like.shape, None, None, None, like.dtype, _STRIDED, like.device)


def _gone(like: Any, name: str) -> Any:
    gone = _without_memory(like)
    gone.donated_as = name
    return gone


def give_away(x: Any, name: str) -> Tensor:
    """A new tensor that takes over the memory of ``x``, which becomes a `Donated`."""
    if type(x) is not Tensor and is_simulated(x):
        return take_blocks(x, lambda block: _gone(block, name))
    taker, giver = _without_memory(x), x
    swap_memory(giver, taker)
    giver.__class__, taker.__class__, giver.donated_as = Donated, Tensor, name
    return taker  # type: ignore[no-any-return]


def donation(f: Any, which: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Donation:
    """The donation of a call.

    Raises:
        ArgumentError: a donated tensor has a gradient, so that autograd would keep the tensor.
    """
    parameters = parameter_names(f, len(args))
    called = getattr(f, "__name__", None) or type(f).__name__
    trees = [(name, arg, i in which) for i, (name, arg) in enumerate(zip(parameters, args, strict=True))]
    trees += [(name, kwargs[name], name in which) for name in kwargs]
    places, names, place = [], [], 0
    for name, tree, given in trees:
        leaves, treedef = flatten_in_order(tree, is_sharded)
        for path, leaf in zip(paths_of(treedef, name), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                continue
            if given and leaf.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    f"{path} of {called} is donated, but has a gradient, so that autograd would keep it; call {called} "
                    "in torch.no_grad(), pass tensors without a gradient, or leave it out of donate_argnums"
                )
            if given:
                places.append(place)
                names.append(f"{path} of {called}")
            place += 1
    return Donation(tuple(places), tuple(names))


aten: Final = torch.ops.aten
#: for elementwise functions and writes at indices, the variant that writes its result into the first argument
IN_PLACE: Final[dict[Any, Any]] = {
    getattr(getattr(aten, name), kind): getattr(getattr(aten, f"{name}_"), kind)
    for names, kinds in (
        (("add", "sub", "mul", "div"), ("Tensor", "Scalar")),
        (("addcmul", "addcdiv", "clamp", "exp", "neg", "relu", "sigmoid", "sqrt", "tanh"), ("default",)),
        (("lerp",), ("Tensor", "Scalar")),
        (("index_put", "index_copy", "index_add", "scatter_add"), ("default",)),
        (("scatter",), ("src", "value")),
    )
    for name in names
    for kind in kinds
}


def reuse(captured: Capture, places: Sequence[int]) -> frozenset[int]:
    """Let steps write into donated arguments instead of new tensors. Returns the places that are written into.

    A step may write into its first operand if that is the whole argument, if no later step reads the memory, and if
    the result has the shape and dtype of the operand. Memory with other references is copied first (`unshared`), so
    that their holders see no write.
    """
    program = captured.program
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    within = by_memory(place)
    for i in places:
        argument, leaf = program.inputs[i], captured.leaves[i]
        if leaf.requires_grad or not all(shard.is_contiguous() for shard in blocks_of(leaf)):
            continue
        operand, readers = argument, _Readers(place)
        readers.add(within[argument])
        while (step := readers.last_of(operand)) is not None and _fits(step, operand):
            step.target = IN_PLACE[step.target]
            step.meta["memory"] = argument
            step.meta["reuses"] = True
            readers.add(within.pop(step))
            operand = step
    # also steps that `lower` has changed before
    written = {owner(node) for node in place if node.meta.get("reuses")}
    return frozenset(i for i in places if program.inputs[i] in written)


class _Readers:
    """The steps that read the memory of an argument: the last of them, and whether one may keep the memory."""

    def __init__(self, place: dict[fx.Node, int]) -> None:
        self.place = place
        self.last: fx.Node | None = None
        self.may_keep = False

    def add(self, views: list[fx.Node]) -> None:
        """Add the readers of values in the memory. A pending collective reads until its wait."""
        users = {user for node in views for user in node.users}
        users |= {wait for user in users if in_flight(user) for wait in user.users}
        self.may_keep = self.may_keep or any(map(_may_keep, users))
        known = users if self.last is None else {self.last, *users}
        self.last = max(known, key=self.place.__getitem__, default=None)

    def last_of(self, value: fx.Node) -> fx.Node | None:
        """The last step, if it reads ``value`` itself and no step may keep the memory."""
        return None if self.may_keep or self.last is None or value not in self.last.all_input_nodes else self.last


def _may_keep(user: fx.Node) -> bool:
    """Whether a step may keep a reference to the memory of an operand."""
    return is_unknown(user) or user.target in OF_RANKS or user.op == "output"


def _fits(step: fx.Node, operand: fx.Node) -> bool:
    """Whether the result of a step may lie in the memory of its first operand."""
    memory = owner(operand)
    return (
        step.target in IN_PLACE
        and step.args[0] is operand
        and all(x is operand or owner(x) is not memory for x in step.all_input_nodes)
        and step.meta.get("value") == operand.meta.get("value")
        and step.meta.get("frame", False) == operand.meta["frame"]
    )


def unshared(x: Tensor) -> Tensor:
    """A donated tensor, or a copy if there are other references to its memory."""
    if type(x) is Tensor or not is_simulated(x):
        return x if _is_alone(x) else x.detach().clone()
    alone = all(getrefcount(block) <= _OF_LOOP and _is_alone(block) for block in blocks_of(x))
    return x if alone and not is_borrowed(x) else x.detach().clone()


_OF_LOOP: Final = 3  # references of the list, the loop, and the call


def _is_alone(x: Tensor) -> bool:
    """Whether the tensor holds the only reference to its memory."""
    if (counts := _reference_counts(x)) is None:
        return False
    ours, torchs, tensors = counts
    return ours <= _ALONE[0] and torchs <= _ALONE[1] and tensors <= _ALONE[2]


def _references_to_block() -> int:
    """The references to a block that its `Sharded`, a list of values and a local variable have, as in a taker."""
    holder, values = Exception(), [torch.empty(0, device="cpu")]
    holder.args = (values[0],)
    x = values[0]
    return getrefcount(x)


_HELD: Final = _references_to_block()


def _reference_counts(x: Tensor) -> tuple[int, int, int] | None:
    """The numbers of references to Python's storage, to torch's storage, and to the tensor.

    None for memory of NumPy, or of other processes.
    """
    storage = x.untyped_storage()
    # `is_shared` is always True on other devices
    if not storage.resizable() or (storage.is_shared() and storage.device.type == "cpu"):
        return None
    uses: int = storage_uses(address_of(storage))
    return getrefcount(storage), uses, tensor_uses(x)


#: the counts of a tensor that holds the only reference; versions of torch differ
_ALONE: Final = _reference_counts(torch.empty(1, device="cpu")) or (0, 0, 0)
