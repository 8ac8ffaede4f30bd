"""Keys of records: the kind of the arguments and of the surroundings of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import current_mesh
from fspmd.messages import described
from fspmd.ops.traits import autocasts
from fspmd.programs.fake_tensors import has_overlaps
from fspmd.programs.refusals import is_dense, not_dense
from fspmd.torch_internals import (
    DeviceContext,
    TensorGuards,
    count_function_modes,
    function_mode_at,
    is_any_autocast_enabled,
)
from fspmd.transport.local_tensor import blocks_of, kinds_of
from fspmd.trees import flatten, flatten_args, flatten_trees

_grad_enabled = torch.is_grad_enabled
_strided = torch.strided
_default_dtype = torch.get_default_dtype
_PLAIN: Final = {Tensor, torch.nn.Parameter}


def default_device() -> torch.device | None:
    """The device of ``with torch.device(...)``, on which new tensors are made."""
    modes = map(function_mode_at, range(count_function_modes()))
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor], list[Any]]:
    """The key of a call; the tensors among the leaves of its arguments; their strides.

    Strides are no part of the key, since they may differ from process to process.
    """
    leaves, structure = flatten_call(args, kwargs)
    kinds, values, strides = kinds_of(leaves, identity)
    return ((*structure, *surroundings()), kinds), values, strides


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The leaves of the arguments of a call, and their structure as a part of its key."""
    if not kwargs:
        leaves, structure = flatten_args(args)  # which takes 4 µs less
        return leaves, (structure,)
    leaves, structure = flatten_trees((args, kwargs))
    return leaves, (structure, dict)  # the structure includes the dict


def surroundings() -> tuple[Any, ...]:
    """The part of the key of a call that excludes its arguments."""
    casts = autocasts() if is_any_autocast_enabled() else ()
    around = _grad_enabled(), _default_dtype(), casts, current_mesh()
    return (*around, default_device()) if count_function_modes() else around


def guard(leaves: Sequence[Any]) -> Callable[..., bool] | None:
    """A function that returns, by one call of torch, whether other leaves have the same kinds and strides.

    It may return False for leaves that have them. Returns None where a leaf is no plain tensor, or occurs twice, since
    torch's guards then always fail.
    """
    if not {*map(type, leaves)} <= _PLAIN or any(leaf.layout is not _strided for leaf in leaves):
        return None
    if len({*map(id, leaves)}) < len(leaves):
        return None
    check: Callable[..., bool] = TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def identity(value: Any) -> Any:
    """A value as part of a key. It distinguishes 1, 1.0 and True, and the two zeros, also within containers."""
    kind = type(value)
    if kind is Static:
        return value
    if kind in _DISTINCT:
        return kind, value
    if kind is float or (isinstance(value, Number) and not isinstance(value, int)):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, value, tuple(map(identity, value))
    if kind is frozenset:
        return kind, frozenset(map(identity, value))
    if (parameters := getattr(kind, "__dataclass_params__", None)) is not None and parameters.eq:
        names = [field.name for field in fields(value) if field.compare and field.hash is not False]
        return kind, value, tuple(identity(getattr(value, name)) for name in names)
    return kind, value


#: types whose equal values cannot be distinguished
_DISTINCT: Final = frozenset({int, bool, str, type(None)})


def shared_strides(values: Sequence[Tensor]) -> tuple[Any, ...]:
    """The places and strides of tensors whose elements share memory. Other values do not fit into such memory."""
    return tuple((i, *(block.stride() for block in blocks_of(x))) for i, x in enumerate(values) if has_overlaps(x))


class Static:
    """A static argument as one leaf. Two are equal if their values have one type and are equal."""

    __slots__ = ("hash", "key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = identity(value)
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and bool(self.key == other.key)


def without_key(leaves: list[Any], error: Exception) -> Exception:
    """The error for leaves that have no kind: about a tensor that is not dense, else ``error``."""
    return next((not_dense(x) for x in leaves if isinstance(x, Tensor) and not is_dense(x)), error)


def not_hashable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError:
    """The error for a call that has no key."""
    for leaf in flatten((args, kwargs))[0]:
        try:
            hash(leaf)
        except TypeError:
            return ArgumentError(
                f"jit got {described(leaf)} for an argument, which has no hash; arguments other than tensors are part "
                "of the key of a record: pass tensors, numbers, strings, or trees of those"
            )
    return ArgumentError("jit got an argument that has no hash; pass tensors, numbers, strings, or trees of those")
