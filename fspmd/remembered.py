"""What became of a tensor when it was moved or cast, remembered on the tensor itself, for its later uses.

A memory lasts as long as the tensor that has it, so which moves are found never depends on garbage collection, and all
ranks find the same. Writing into either of the two ends it. Ranks must agree on that, too, so what counts is what fspmd
has written, which it does on all ranks (`wrote`). A block that was written into by hand is refused where it is found:
if one rank alone moved it again, it would wait for the others forever. Of writes through ``x.local.data`` torch tells
nobody. Memories are kept apart in *scopes*: each thread, each recording and each run of a checkpointed function has one
of its own, which is forgotten when that ends.
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
from fspmd.torch_internals import DisableTorchFunction, count_function_modes
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import unwrapped

_MOVES: Final = "_fspmd_moves"
_CASTS: Final = "_fspmd_casts"
_ORIGIN: Final = "_fspmd_origin"
_SHARED: Final = "_fspmd_shared"  # how often a tensor was given memory that it shares with another unseen
_WRITES: Final = "_fspmd_writes"  # on memory: the number of fspmd's last write into it, and the version after that
_ASKED: Final = "_fspmd_asked"
ASKING: Final = frozenset({"register_hook", "retain_grad"})  # methods by which a tensor is asked for its gradient
_grad_enabled = torch.is_grad_enabled
Stamp = tuple[int, int, int]


class _Remembered(dict[Any, tuple[Any, Any, Any]]):
    """Values with two stamps, of the tensor and of them, by what was done in which scope; a copy has none."""

    owner: weakref.ref[Tensor] | None = None

    def __reduce__(self) -> Any:
        return _Remembered, ()

    def __deepcopy__(self, memo: Any) -> _Remembered:
        return _Remembered()


class _HeldCasts(_Remembered):
    """Casts of a tensor that itself holds them, until it `let_go`."""


class _Nothing(_Remembered):
    """Of a tensor that shares memory with another unseen: a write into that would not be noticed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Scope:
    """One that ends: the living tensors on which something is remembered in it, under its number."""

    __slots__ = ("number", "tensors")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.tensors: dict[int, weakref.ref[Tensor]] = {}

    def add(self, x: Tensor) -> None:
        """Something is remembered on it."""
        key, tensors = id(x), self.tensors
        tensors[key] = weakref.ref(x, lambda _: tensors.pop(key, None))

    def end(self) -> None:
        """Nothing is remembered in it any more."""
        for ref in list(self.tensors.values()):
            x = ref()
            for name in () if x is None else (_MOVES, _CASTS):
                memory = getattr(x, name, None) or {}
                for key in list(memory):  # other threads may add some
                    if type(key) is tuple and key[0] == self.number:
                        memory.pop(key, None)
        self.tensors.clear()

    __del__ = end  # that of a thread


_numbers: Final = itertools.count(1)


class _Here(threading.local):
    """The scopes of a thread, of moves and of casts; the main thread begins without."""

    def __init__(self) -> None:
        self.moves: _Scope | None = None if threading.current_thread() is threading.main_thread() else _Scope()
        self.casts: _Scope | None = self.moves


_here: Final = _Here()


@contextmanager
def forgetting(casts: bool = True) -> Iterator[None]:
    """What the block runs finds no move that was made before, and those it makes are forgotten when it ends.

    ``casts`` too: they send nothing forward, so what is computed twice may find those of the first time.
    """
    before, scope = (_here.moves, _here.casts), _Scope()
    _here.moves, _here.casts = scope, scope if casts else _here.casts
    try:
        yield
    finally:
        if _here.moves is scope:  # else a generator ends late
            _here.moves, _here.casts = before
        scope.end()


def has_moves(x: Tensor) -> bool:
    """Whether any move was remembered of a tensor."""
    return _MOVES in x.__dict__


def is_bound(x: Tensor) -> bool:
    """Whether something is known of a block that would not hold of another: what it was moved to, or a graph."""
    return bool(x.__dict__.get(_MOVES)) or (x.requires_grad and not x.is_leaf)


def moves_of(x: Tensor) -> list[Any]:
    """What was done with a tensor of which something may be remembered, in order."""
    memory: _Remembered | None = x.__dict__.get(_MOVES)
    here = _number(_here.moves)
    return [] if memory is None else [what for number, what in list(memory) if number == here]


def recall(x: Tensor, what: Hashable) -> Tensor | None:
    """What became of a tensor, if it is still that: neither of the two was written into since."""
    memory: _Remembered | None = x.__dict__.get(_MOVES)
    if memory is None or (found := memory.get((_number(_here.moves), what))) is None:
        return None
    value: Tensor = found[0]
    if not (is_unwritten(x, found[1]) and is_unwritten(value, found[2])):
        return None
    if not x.requires_grad:
        return value.detach() if value.requires_grad else value  # x was detached since, perhaps on this rank alone
    is_cut_off = _grad_enabled() and not value.requires_grad  # it was made under no_grad
    return None if is_cut_off else value


def remember(x: Tensor, what: Hashable, value: Tensor) -> None:
    """What became of a tensor, as long as that lives."""
    if not (x.is_inference() or value.is_inference()):  # of which torch does not tell what is written into
        scope = _here.moves
        memory = _memory(x, _MOVES, scope)
        memory.owner = memory.owner or weakref.ref(x)  # `torch.utils.swap_tensors` refuses a tensor that has one
        memory[_number(scope), what] = value, stamp(x), stamp(value)


def recall_cast(x: Tensor, cast: Hashable) -> Tensor | None:
    """What a tensor with a gradient was cast to, if somebody has that and the tensor was not written into since.

    The cast is a view. Autograd gives a view of what was written into another graph, in which the cast's transpose is
    left out: after a step of an optimizer the gradient would be of this rank alone.
    """
    memory: _Remembered | None = x.__dict__.get(_CASTS)
    if memory is None:
        return None
    found = memory.get(cast if _here.casts is None else (_here.casts.number, cast))
    if found is None:
        return None
    if found[1] != x._version:
        if not x.is_leaf and _writes(x)[1] <= found[1]:
            _refuse_written(x)
        return None
    value: Tensor | None = found[0] if type(memory) is _HeldCasts else found[0]()
    return value


def remember_cast(x: Tensor, cast: Hashable, value: Tensor) -> None:
    """What a tensor was cast to, as long as somebody else has it: whether it lives must bear on nothing forward."""
    scope = _here.casts
    memory = _memory(x, _CASTS, scope)
    held: Any = value if type(memory) is _HeldCasts else weakref.ref(value)
    memory[cast if scope is None else (scope.number, cast)] = held, x._version, 0


def hold_casts(x: Tensor) -> None:
    """From here on a new tensor itself holds its casts; the graph then need not. They refer to it: `let_go` of them."""
    setattr(x, _CASTS, _HeldCasts())


def holds_casts(x: Tensor) -> bool:
    """Whether a tensor itself holds its casts."""
    return type(x.__dict__.get(_CASTS)) is _HeldCasts


def let_go(tensors: Iterable[Tensor]) -> None:
    """Tensors hold no casts any more, but the graph does."""
    for x in tensors:
        setattr(x, _CASTS, None)  # as Dynamo can follow


def forget_graph(x: Tensor) -> None:
    """A tensor has left its graph; what it was moved to stays what it is, and has left the graph, too."""
    for name in (_CASTS, _ORIGIN, *ASKING):
        x.__dict__.pop(name, None)
    memory: _Remembered = x.__dict__.get(_MOVES) or _Remembered()
    for what, (value, before, after) in list(memory.items()):
        if value.requires_grad and _SHARED not in value.__dict__:  # which the detached one would not tell
            memory[what] = value.detach(), before, after


def remember_no_moves(x: Tensor) -> None:
    """From here on, and what was remembered is forgotten."""
    setattr(x, _MOVES, _Nothing())
    setattr(x, _SHARED, x.__dict__.get(_SHARED, 0) + 1)


def wrote(x: Tensor, soon: bool = False, memory: torch.UntypedStorage | None = None) -> None:
    """Fspmd has written into a tensor, on all ranks, or will ``soon``; what is remembered of its ``memory`` ends."""
    if (x := unwrapped(x)).is_inference():
        return  # it has no version, and nothing is remembered of it
    global _last
    _last = next(_numbers)
    if _hear is not None:
        _hear()
    setattr(memory_of(x) if memory is None else memory, _WRITES, (_last, x._version + soon))


def hear_writes(hear: Callable[[], None] | None) -> Callable[[], None] | None:
    """Call ``hear`` at each write that fspmd tells of, from here on; gives what was called before."""
    global _hear
    before, _hear = _hear, hear
    return before


def wrote_all(tensors: Iterable[Tensor]) -> None:
    """The same of lists of parameters and their like, of most of which nothing can be remembered."""
    all_of_them = _hear is not None
    for x in tensors:
        if all_of_them or not x.is_leaf or _MOVES in x.__dict__:
            wrote(x)


_last = 0  # the number of the last write into any memory
_hear: Callable[[], None] | None = None
_UNWRITTEN: Final = (0, 0)


def _writes(x: Tensor) -> tuple[int, int]:
    found: tuple[int, int] = getattr(memory_of(x), _WRITES, _UNWRITTEN)
    return found


def memory_of(x: Tensor) -> torch.UntypedStorage:
    """That of a block, or of the first of all ranks: one object for as long as anything lies there."""
    block = blocks_of(unwrapped(x))[0]
    if not count_function_modes():
        return block.untyped_storage()
    with DisableTorchFunction():
        return block.untyped_storage()


def stamp(x: Tensor) -> Stamp:
    """By which `is_unwritten` tells whether a tensor is what it was."""
    return x._version, x.__dict__.get(_SHARED, 0), _last


def is_unwritten(x: Tensor, before: Stamp) -> bool:
    """Whether a tensor is what it was, as all ranks know: not written into by fspmd, nor given memory by it.

    Raises:
        ArgumentError: somebody else has written into it.
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
        f"a block {shown} was written into by hand (x.local, or a block in a function) after the value it belongs to "
        "was used: the other ranks may not know of it, and what they had of it then would be used on; write into the "
        "Sharded itself, x.mul_(2), or make a new one: x = from_local(x.local.clone().mul_(2), spec, mesh=mesh)"
    )


def remember_origin(x: Tensor, origin: Callable[[Tensor, Any], Tensor | None]) -> None:
    """How a tensor was made: what makes another layout of it, or None."""
    setattr(x, _ORIGIN, origin)


def origin_of(x: Tensor) -> Callable[[Tensor, Any], Tensor | None] | None:
    """What was noted of how a tensor was made."""
    return x.__dict__.get(_ORIGIN)


def ask_gradient(x: Tensor) -> None:
    """The gradient of a tensor will be asked for, so all that it is used for must lead to it."""
    setattr(x, _ASKED, True)


def is_asked(x: Tensor) -> bool:
    """Whether the gradient of a tensor itself is asked for, on all ranks: by a derivative, or of a leaf."""
    return x.is_leaf or _ASKED in x.__dict__


def is_hooked(x: Tensor) -> bool:
    """Whether somebody sees the gradient of a tensor itself, perhaps on this rank alone."""
    return x.retains_grad or bool(x._backward_hooks)


def bypass(x: Tensor) -> None:
    """Something made of a tensor has a gradient that does not come by it; whoever asks for that later gets an error."""
    for name in ASKING:
        setattr(x, name, functools.partial(refuse_partial, f"{name}()", describe(x.dtype, x.shape)))


def is_bypassed(x: Tensor) -> bool:
    """Whether the gradient of a tensor is not all that it would be."""
    return not ASKING.isdisjoint(x.__dict__)


def refuse_partial(what: str, shown: str, *_: Any) -> NoReturn:
    """Of a value that was made anew of what it was made of."""
    raise ArgumentError(
        f"{what} asks for the gradient of {shown}, which was used in another layout and made anew there, of what it "
        "was made of; write x = x.clone() before that, and ask for that of the copy, which is gathered"
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
