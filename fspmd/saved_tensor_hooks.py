"""Hooks on the tensors that autograd saves. A checkpoint uses such hooks to compute the tensors again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from fspmd.errors import ArgumentError
from fspmd.torch_internals import top_saved_tensors_hooks

_NO_HOOKS: Final = nullcontext()


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Suspend all hooks in a ``with`` block, for ``torch.func``, which refuses to run under them, and for trials."""
    suspended = []
    while (top := top_saved_tensors_hooks(True)) is not None:
        suspended.append(saved_tensors_hooks(*top))
        suspended[-1].__exit__()  # ends the innermost hooks
    try:
        yield
    finally:
        for hooks in reversed(suspended):
            hooks.__enter__()


def is_checkpointed() -> bool:
    """Return whether a checkpoint takes the tensors that are saved here."""
    hooks = top_saved_tensors_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


class KeptTensors:
    """Keeps the tensors that a gradient within a checkpointed function needs. Later the checkpoint provides them.

    Without it, torch would run the function again, up to the point that its forward has reached. That takes time. And
    ranks with empty blocks save other tensors, so they would repeat other collectives.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, int]] = []  # and their versions

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that a checkpoint takes are kept here, too."""
        if not is_checkpointed():
            return _NO_HOOKS
        pack, unpack = top_saved_tensors_hooks(True)
        here = ref(self)

        def save(x: Tensor) -> Any:
            kept = here()  # a weak reference: graphs hold this function and must not hold the tensors
            assert kept is not None
            kept.tensors.append((x.detach(), x._version))
            return len(kept.tensors) - 1, pack(x)

        def find(saved: Any) -> Any:
            place, packed = saved
            if (kept := here()) is None:
                return unpack(packed)
            x, version = kept.tensors[place]
            if x._version != version:  # a recomputation in the middle of forward would give another value, too
                raise ArgumentError(
                    f"a tensor of shape {tuple(x.shape)} that a gradient needs has been written into since; write "
                    "y = y + 1 instead of y += 1, or into a clone()"
                )
            return x

        return saved_tensors_hooks(save, find)
