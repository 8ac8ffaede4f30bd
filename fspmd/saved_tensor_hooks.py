"""Hooks on tensors that autograd saves, by which a checkpoint computes them again, while others differentiate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor
from torch.utils import checkpoint

from fspmd.errors import ArgumentError
from fspmd.torch_internals import pop_saved_tensors_hooks, push_saved_tensors_hooks, top_saved_tensors_hooks

_NOTHING: Final = nullcontext()


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Within, what is saved is kept: ``torch.func`` refuses to run under such hooks, and trials are none of theirs."""
    hooks = []
    while (top := top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_hooks(pack, unpack)


def is_checkpointed() -> bool:
    """Whether what is saved here a checkpoint has."""
    hooks = top_saved_tensors_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


class KeptTensors:
    """What a gradient taken within a checkpointed function needs: kept while this lives, then as the checkpoint has it.

    Torch alone would run the whole function again for it, in the midst of its forward, as far as it has come; that
    costs, and ranks with empty blocks save other tensors: they would repeat other collectives.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, int]] = []  # and their versions

    def saving(self) -> AbstractContextManager[Any]:
        """Within, tensors are saved here, too, if a checkpoint has them."""
        if not is_checkpointed():
            return _NOTHING
        pack, unpack = top_saved_tensors_hooks(True)
        here = ref(self)

        def save(x: Tensor) -> Any:
            kept = here()  # graphs hold this function, and are not to hold what it has kept
            assert kept is not None
            kept.tensors.append((x.detach(), x._version))
            return len(kept.tensors) - 1, pack(x)

        def find(saved: Any) -> Any:
            place, packed = saved
            if (kept := here()) is None:
                return unpack(packed)
            x, version = kept.tensors[place]
            if x._version != version:  # computed again in the midst of forward it would be another value
                raise ArgumentError(
                    f"a tensor of shape {tuple(x.shape)} that a gradient needs has been written into since; write "
                    "y = y + 1 instead of y += 1, or into a clone()"
                )
            return x

        return torch.autograd.graph.saved_tensors_hooks(save, find)
