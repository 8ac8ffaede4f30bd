"""Storages of values: bytes, which have no type, and in a simulation no memory. No mode sees what is done with them.

``x.untyped_storage()`` in a body marks the storage with the type of ``x``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fspmd.body import state
from fspmd.errors import ArgumentError, VarianceError
from fspmd.local_view.modes import is_active
from fspmd.torch_internals import untyped_storage
from fspmd.variance import ATTRIBUTE

#: methods that make a tensor of a storage -> how messages show them, and their advice
OF_TENSORS = {
    "__new__": "torch.Tensor(storage)",
    "set_": "x.set_(storage)",
}
_VIEW = "write y.view_as(y) for a tensor with the memory of y, or x.set_(y) with the tensor y itself"
#: methods of storages that read or write elements -> how messages show them
_OF_STORAGES = {
    "copy_": "storage.copy_()",
    "fill_": "storage.fill_()",
    "__getitem__": "storage[i]",
    "__setitem__": "storage[i] = byte",
    "byteswap": "storage.byteswap()",
    "resize_": "storage.resize_()",
}
_TENSOR = "read and write the tensor: x.view(torch.uint8) for its bytes, x.copy_(y), x.clone()"


def wrap_storages() -> None:
    """Let methods of storages refuse values of bodies that differ from rank to rank, and those of simulated ranks."""

    def wrap(name: str, original: Any) -> None:
        @functools.wraps(original)
        def run(*operands: Any, **kwargs: Any) -> Any:
            tracker = state.tracker
            check_storages(name, (*operands, *kwargs.values()), tracker is not None and is_active(tracker))
            return original(*operands, **kwargs)

        setattr(torch.UntypedStorage, name, run)

    for name in _OF_STORAGES:
        wrap(name, getattr(torch.UntypedStorage, name))


def check_storages(name: str, operands: tuple[Any, ...], types_values: bool) -> None:
    """Raise for a storage among the operands that a value with a type gave, or that has no memory.

    Raises:
        VarianceError: The body types values, and has typed the owner of the storage.
        ArgumentError: The storage is that of a value of simulated ranks.
    """
    for x in operands:
        if isinstance(x, (torch.UntypedStorage, torch.TypedStorage)):
            _check(name, untyped_storage(x), types_values)


def _check(name: str, storage: Any, types_values: bool) -> None:
    shown, write = (OF_TENSORS[name], _VIEW) if name in OF_TENSORS else (_OF_STORAGES[name], _TENSOR)
    if types_values and (variance := getattr(storage, ATTRIBUTE, None)) is not None:
        raise VarianceError(f"{shown} got the storage of a value {variance!r}, and would lose this type; {write}")
    if hasattr(storage, "simulated"):
        raise ArgumentError(
            f"{shown} got the storage of a value of simulated ranks, which has no memory of its own; {write}"
        )
