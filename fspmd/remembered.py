"""The results of moves and casts of a tensor, remembered on the tensor itself for its later uses.

A memory lasts as long as the tensor that has it. Thus the moves that a rank finds never depend on garbage collection,
and all ranks find the same. A write into the tensor or into the result ends the memory. Ranks must agree on this too,
so only writes of fspmd count, which happen on all ranks (`wrote`). A block that was written into by hand raises an
error at its next use: a rank that alone moved it again would wait for the others forever. Torch does not report writes
through ``x.local.data``. Memories belong to *scopes*: each thread, each recording and each run of a checkpointed
function has a scope of its own, and its memories end with it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.spec import describe
from fspmd.torch_internals import DisableTorchFunction, function_mode_is_on
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import unwrapped

_MOVES: Final = "_fspmd_moves"
_CASTS: Final = "_fspmd_casts"
_ORIGIN: Final = "_fspmd_origin"
_SHARED: Final = (
    "_fspmd_shared"  # how often a tensor got memory that it shares with a tensor of another version counter
)
_WRITES: Final = "_fspmd_writes"  # on a storage: the number of fspmd's last write into it, and the version after that
_ASKED: Final = "_fspmd_asked"
ASKING: Final = frozenset({"register_hook", "retain_grad"})  # methods that make the gradient of a tensor visible
_grad_enabled = torch.is_grad_enabled
Stamp = tuple[int, int, int]


class _Remembered(dict[Any, tuple[Any, Any, Any]]):
    """The memory of a tensor: (scope, move) -> (result, stamp of the tensor, stamp of the result).

    A copy of the tensor begins with an empty memory.
    """

    owner: weakref.ref[Tensor] | None = None

    def __reduce__(self) -> Any:
        return _Remembered, ()

    def __deepcopy__(self, memo: Any) -> _Remembered:
        return _Remembered()


torch.serialization.add_safe_globals([_Remembered])  # blocks are saved with their memories, emptied


class _HeldCasts(_Remembered):
    """The casts of a tensor that keeps them alive itself, until `let_go`."""


class _NoMoves(_Remembered):
    """The memory of a tensor whose storage may be written into unnoticed, through another tensor. It stays empty."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Scope:
    """A scope that ends: its number, and the living tensors that remember something in it."""

    __slots__ = ("number", "tensors")

    def __init__(self) -> None:
        self.tensors: dict[int, weakref.ref[Tensor]] = {}
        self.number = next(_numbers)

    def add(self, x: Tensor) -> None:
        """Note that ``x`` remembers something in this scope."""
        key, tensors = id(x), self.tensors
        tensors[key] = weakref.ref(x, lambda _: tensors.pop(key, None))

    def end(self) -> None:
        """Forget everything that is remembered in this scope."""
        for ref in list(self.tensors.values()):
            x = ref()
            for name in () if x is None else (_MOVES, _CASTS):
                memory = getattr(x, name, None) or {}
                for key in list(memory):  # a copy, since other threads may add keys
                    if type(key) is tuple and key[0] == self.number:
                        memory.pop(key, None)
        self.tensors.clear()

    def __del__(self) -> None:  # the scope of a thread ends with the thread
        if hasattr(self, "tensors"):  # else an interrupt has come before
            self.end()


_numbers: Final = itertools.count(1)


class _Here(threading.local):
    """The scopes of a thread for moves and for casts. The main thread begins without."""

    def __init__(self) -> None:
        self.moves: _Scope | None = None if threading.current_thread() is threading.main_thread() else _Scope()
        self.casts: _Scope | None = self.moves


_here: Final = _Here()


@contextmanager
def forgetting(casts: bool = True) -> Iterator[None]:
    """Hide the moves of before in a ``with`` block, and forget the moves of the block when it ends.

    With ``casts`` this holds for casts too. Casts move nothing forward, so a recomputation may find earlier ones.
    """
    before, scope = (_here.moves, _here.casts), _Scope()
    _here.moves, _here.casts = scope, scope if casts else _here.casts
    try:
        yield
    finally:
        if _here.moves is scope:  # it is another one if a generator is closed late
            _here.moves, _here.casts = before
        scope.end()


def has_moves(x: Tensor) -> bool:
    """Return whether a tensor has a memory of moves."""
    return _MOVES in x.__dict__


def is_bound(x: Tensor) -> bool:
    """Return whether a block has memories or a graph, which would not fit another block in its place."""
    return bool(x.__dict__.get(_MOVES)) or (x.requires_grad and not x.is_leaf)


def moves_of(x: Tensor) -> list[Any]:
    """Return the moves that a tensor remembers in this scope, in order. Some results may be outdated."""
    memory: _Remembered | None = x.__dict__.get(_MOVES)
    here = _number(_here.moves)
    return [] if memory is None else [move for number, move in list(memory) if number == here]


def recall(x: Tensor, move: Hashable) -> Tensor | None:
    """Return the remembered result of a move, or None. It counts if neither it nor ``x`` was written into since."""
    memory: _Remembered | None = x.__dict__.get(_MOVES)
    if memory is None or (entry := memory.get((_number(_here.moves), move))) is None:
        return None
    value: Tensor = entry[0]
    if not (is_unwritten(x, entry[1]) and is_unwritten(value, entry[2])):
        return None
    if not x.requires_grad:
        return value.detach() if value.requires_grad else value  # x was detached since, perhaps on this rank alone
    lacks_graph = _grad_enabled() and not value.requires_grad  # the value was made under no_grad
    return None if lacks_graph else value


def remember(x: Tensor, move: Hashable, value: Tensor) -> None:
    """Remember the result of a move as long as ``x`` lives."""
    if not (x.is_inference() or value.is_inference()):  # torch does not count writes into inference tensors
        scope = _here.moves
        memory = _memory(x, _MOVES, scope)
        memory.owner = memory.owner or weakref.ref(
            x
        )  # `torch.utils.swap_tensors` refuses a tensor with a weak reference
        memory[_number(scope), move] = value, stamp(x), stamp(value)


def recall_cast(x: Tensor, cast: Hashable) -> Tensor | None:
    """Return the remembered cast of a tensor with a gradient, or None.

    It counts if it is still alive and ``x`` was not written into since. The cast is a view, and after a write into
    ``x`` autograd gives the view another graph, without the transpose of the cast. After a step of an optimizer the
    gradient would then be that of this rank alone.
    """
    memory: _Remembered | None = x.__dict__.get(_CASTS)
    if memory is None:
        return None
    entry = memory.get(cast if _here.casts is None else (_here.casts.number, cast))
    if entry is None:
        return None
    if entry[1] != x._version:
        if not x.is_leaf and _writes(x)[1] <= entry[1]:
            _refuse_written(x)
        return None
    value: Tensor | None = entry[0] if type(memory) is _HeldCasts else entry[0]()
    return value


def remember_cast(x: Tensor, cast: Hashable, value: Tensor) -> None:
    """Remember a cast as long as it lives, by a weak reference. Forward must not depend on whether it lives."""
    scope = _here.casts
    memory = _memory(x, _CASTS, scope)
    reference: Any = value if type(memory) is _HeldCasts else weakref.ref(value)
    memory[cast if scope is None else (scope.number, cast)] = reference, x._version, 0


def hold_casts(x: Tensor) -> None:
    """Let a new tensor keep its casts alive, in place of the graph. They refer to it: `let_go` must end the cycle."""
    setattr(x, _CASTS, _HeldCasts())


def holds_casts(x: Tensor) -> bool:
    """Return whether a tensor keeps its casts alive."""
    return type(x.__dict__.get(_CASTS)) is _HeldCasts


def let_go(tensors: Iterable[Tensor]) -> None:
    """Release the casts that tensors keep alive. The graph still has them."""
    for x in tensors:
        setattr(x, _CASTS, None)  # Dynamo can follow this


def forget_graph(x: Tensor) -> None:
    """Forget all that belongs to the graph that a tensor has left. Its moves stay, and leave the graph too."""
    for name in (_CASTS, _ORIGIN, *ASKING):
        x.__dict__.pop(name, None)
    memory: _Remembered = x.__dict__.get(_MOVES) or _Remembered()
    for move, (value, before, after) in list(memory.items()):
        if value.requires_grad and _SHARED not in value.__dict__:  # a detached tensor would lack that attribute
            memory[move] = value.detach(), before, after


def remember_no_moves(x: Tensor) -> None:
    """Forget the moves of a tensor, and remember none from now on."""
    setattr(x, _MOVES, _NoMoves())
    setattr(x, _SHARED, x.__dict__.get(_SHARED, 0) + 1)


def wrote(x: Tensor, soon: bool = False, memory: torch.UntypedStorage | None = None) -> None:
    """Note that fspmd has written into a tensor on all ranks, or will ``soon``. This ends the memories of its storage.

    ``memory`` is the storage, if the caller knows it.
    """
    if (x := unwrapped(x)).is_inference():
        return  # an inference tensor has no version and no memories
    global _last
    _last = next(_numbers)
    if _hear is not None:
        _hear()
    setattr(memory_of(x) if memory is None else memory, _WRITES, (_last, x._version + soon))


def hear_writes(hear: Callable[[], None] | None) -> Callable[[], None] | None:
    """Call ``hear`` at each write of fspmd from now on, and return the previous function."""
    global _hear
    before, _hear = _hear, hear
    return before


def wrote_all(tensors: Iterable[Tensor]) -> None:
    """Note writes into a list of tensors, most of which are parameters and have no memories."""
    is_heard = _hear is not None
    for x in tensors:
        try:
            is_new = x.is_leaf and _MOVES not in x.__dict__
        except RuntimeError:  # a view that was made without autograd, of a parameter that was written into since
            is_new = False
        if is_heard or not is_new:
            wrote(x)


_last = 0  # the number of the last write into any memory
_hear: Callable[[], None] | None = None
_UNWRITTEN: Final = (0, 0)


def _writes(x: Tensor) -> tuple[int, int]:
    writes: tuple[int, int] = getattr(memory_of(x), _WRITES, _UNWRITTEN)
    return writes


def last_write(x: Tensor) -> int:
    """Return the number of the last write of fspmd into the storage of a tensor; 0 for none."""
    return _writes(x)[0]


def memory_of(x: Tensor) -> torch.UntypedStorage:
    """Return the storage of a block, or of the first shard. Torch gives the same object as long as a tensor uses it."""
    block = blocks_of(unwrapped(x))[0]
    if not function_mode_is_on():
        return block.untyped_storage()
    with DisableTorchFunction():
        return block.untyped_storage()


def stamp(x: Tensor) -> Stamp:
    """Return the state by which `is_unwritten` later knows whether a tensor was written into."""
    return x._version, x.__dict__.get(_SHARED, 0), _last


def is_unwritten(x: Tensor, before: Stamp) -> bool:
    """Return whether fspmd has neither written into a tensor nor replaced its memory, which all ranks know.

    Raises:
        ArgumentError: The tensor was written into by hand.
    """
    version, shared, last = before
    if x.__dict__.get(_SHARED, 0) != shared or (last != _last and _writes(x)[0] > last):
        return False
    if x._version != version:
        _refuse_written(x)
    return True


def _refuse_written(x: Tensor) -> NoReturn:
    with DisableTorchFunction():
        shown = describe(x.dtype, x.shape)
    raise ArgumentError(
        f"a block {shown} was written into by hand (x.local, or a block in a function) after its value was used: the "
        "other ranks may not know of it, and would go on with the old value; write into the Sharded itself, x.mul_(2), "
        "or make a new one: x = from_local(x.local.clone().mul_(2), spec, mesh=mesh)"
    )


def remember_origin(x: Tensor, origin: Callable[[Tensor, Any], Tensor | None]) -> None:
    """Remember how a tensor was made. ``origin(x, leg)`` makes its blocks at the end of a leg, or returns None."""
    setattr(x, _ORIGIN, origin)


def origin_of(x: Tensor) -> Callable[[Tensor, Any], Tensor | None] | None:
    """Return the function that `remember_origin` was given for a tensor, or None."""
    return x.__dict__.get(_ORIGIN)


def ask_gradient(x: Tensor) -> None:
    """Note that a derivative with respect to a tensor follows, so that no use may bypass its gradient."""
    setattr(x, _ASKED, True)


def needs_gradient(x: Tensor) -> bool:
    """Return whether the gradient of a tensor itself is needed, on all ranks: by a derivative, or as a leaf."""
    return x.is_leaf or _ASKED in x.__dict__


def is_hooked(x: Tensor) -> bool:
    """Return whether a hook or `retain_grad` sees the gradient of a tensor, perhaps on this rank alone."""
    return x.retains_grad or bool(x._backward_hooks)


def bypass(x: Tensor) -> None:
    """Note that the gradient of a use bypasses a tensor. Its methods that make the gradient visible then raise."""
    for name in ASKING:
        setattr(x, name, functools.partial(refuse_partial, f"{name}()", describe(x.dtype, x.shape)))


def is_bypassed(x: Tensor) -> bool:
    """Return whether the gradient of some use bypasses a tensor."""
    return not ASKING.isdisjoint(x.__dict__)


def refuse_partial(what: str, shown: str, *_: Any) -> NoReturn:
    """Raise the error of a value whose gradient is incomplete, because a use was made anew from its operands."""
    raise ArgumentError(
        f"{what} got {shown}, whose gradient is incomplete: the value was used in another layout, where each rank made "
        "its part anew from the operands; write x = x.clone() before that use, and use the copy, whose gradient is "
        "gathered"
    )


def _number(scope: _Scope | None) -> int:
    return 0 if scope is None else scope.number


def _memory(x: Tensor, name: str, scope: _Scope | None) -> _Remembered:
    memory: _Remembered | None = x.__dict__.get(name)
    if memory is None:
        memory = _Remembered()
        setattr(x, name, memory)
    if scope is not None:
        scope.add(x)
    return memory
