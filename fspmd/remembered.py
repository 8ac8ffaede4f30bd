"""What became of a tensor when it was moved or cast, remembered on the tensor itself, for its later uses.

A memory lasts as long as the tensor that has it, so which moves are found never depends on garbage collection, and all
ranks find the same. Writing into either of the two ends it. Memories are kept apart in *scopes*: each thread, each
recording and each run of a checkpointed function has one of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_MOVES: Final = "_fspmd_moves"
_CASTS: Final = "_fspmd_casts"
_ORIGIN: Final = "_fspmd_origin"
_MEMORY: Final = "_fspmd_memory"  # how often a tensor was given other memory, or another graph
_ASKED: Final = "_fspmd_asked"
_BYPASSED: Final = "_fspmd_bypassed"
_grad_enabled = torch.is_grad_enabled


class _Memory(dict[Any, tuple[Any, Any, Any]]):
    """Values with two versions, of the tensor and of them, by what was done in which scope; a copy has none."""

    def __reduce__(self) -> Any:
        return _Memory, ()

    def __deepcopy__(self, memo: Any) -> _Memory:
        return _Memory()


class _Nothing(_Memory):
    """Of a tensor that shares memory with another unseen: a write into that would not be noticed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Scope:
    """One that ends: the tensors on which something is remembered in it."""

    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []


class _Here(threading.local):
    """The scopes of a thread, of moves and of casts; the main thread begins without."""

    def __init__(self) -> None:
        self.moves: Any = None if threading.current_thread() is threading.main_thread() else object()
        self.casts: Any = self.moves


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
        for ref in scope.tensors:
            x = ref()
            for name in () if x is None else (_MOVES, _CASTS):
                memory = getattr(x, name, {})
                for key in [key for key in memory if type(key) is tuple and key[0] is scope]:
                    memory.pop(key, None)


def has_moves(x: Tensor) -> bool:
    """Whether any move was remembered of a tensor."""
    return _MOVES in x.__dict__


def moves_of(x: Tensor) -> list[Any]:
    """What was done with a tensor of which something may be remembered, in order."""
    memory: _Memory | None = x.__dict__.get(_MOVES)
    return [] if memory is None else [what for scope, what in memory if scope is _here.moves]


def recall(x: Tensor, what: Hashable) -> Tensor | None:
    """What became of a tensor, if it is still that: neither of the two was written into since."""
    memory: _Memory | None = x.__dict__.get(_MOVES)
    if memory is None or (found := memory.get((_here.moves, what))) is None:
        return None
    value: Tensor = found[0]
    if found[1] != version_of(x) or found[2] != version_of(value):
        return None
    is_cut_off = x.requires_grad and _grad_enabled() and not value.requires_grad  # it was made under no_grad
    return None if is_cut_off else value


def remember(x: Tensor, what: Hashable, value: Tensor) -> None:
    """What became of a tensor, as long as that lives."""
    if not (x.is_inference() or value.is_inference()):  # of which torch does not tell what is written into
        _memory(x, _MOVES, _here.moves)[_here.moves, what] = value, version_of(x), version_of(value)


def recall_cast(x: Tensor, cast: Hashable) -> Tensor | None:
    """What a tensor with a gradient was cast to, if somebody has that and the tensor was not written into since."""
    memory: _Memory | None = x.__dict__.get(_CASTS)
    if memory is None:
        return None
    found = memory.get(cast if _here.casts is None else (_here.casts, cast))
    return found[0]() if found is not None and found[1] == x._version else None


def remember_cast(x: Tensor, cast: Hashable, value: Tensor) -> None:
    """What a tensor was cast to, as long as somebody else has it: whether it lives must bear on nothing forward."""
    scope = _here.casts
    _memory(x, _CASTS, scope)[cast if scope is None else (scope, cast)] = weakref.ref(value), x._version, 0


def forget(x: Tensor) -> None:
    """A tensor is in other memory now, or has left its graph."""
    for name in (_MOVES, _CASTS, _ORIGIN, _BYPASSED):
        x.__dict__.pop(name, None)
    setattr(x, _MEMORY, x.__dict__.get(_MEMORY, 0) + 1)


def remember_no_moves(x: Tensor) -> None:
    """From here on, and what was remembered is forgotten."""
    setattr(x, _MOVES, _Nothing())


def version_of(x: Tensor) -> tuple[int, int]:
    """Another one whenever a tensor was written into, or `forget` was told of it."""
    return x._version, x.__dict__.get(_MEMORY, 0)


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
    """Whether somebody sees the gradient of a tensor itself: a derivative, a leaf, a hook."""
    return x.is_leaf or x.retains_grad or bool(x._backward_hooks) or _ASKED in x.__dict__


def bypass(x: Tensor) -> None:
    """Something made of a tensor has a gradient that does not come by it."""
    setattr(x, _BYPASSED, True)


def is_bypassed(x: Tensor) -> bool:
    """Whether the gradient of a tensor is not all that it would be."""
    return _BYPASSED in x.__dict__


def _memory(x: Tensor, name: str, scope: Any) -> _Memory:
    memory: _Memory | None = x.__dict__.get(name)
    if memory is None:
        memory = _Memory()
        setattr(x, name, memory)
    if type(scope) is _Scope:
        scope.tensors.append(weakref.ref(x))
    return memory
