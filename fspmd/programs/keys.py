"""What tells records apart: the kind of arguments that a function is called with, and of its surroundings."""

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
from fspmd.op_kinds import autocasts
from fspmd.programs.facts import is_dense
from fspmd.programs.impurities import not_dense
from fspmd.torch_internals import (
    DeviceContext,
    TensorGuards,
    count_function_modes,
    function_mode_at,
    is_any_autocast_enabled,
)
from fspmd.transport.local_tensor import LocalTensor
from fspmd.trees import flatten, flatten_args, flatten_in_order

_grad_enabled = torch.is_grad_enabled
_strided = torch.strided
_default_dtype = torch.get_default_dtype
_PLAIN: Final = {Tensor, torch.nn.Parameter}


def default_device() -> torch.device | None:
    """Where ``with torch.device(...)`` has new tensors made."""
    modes = map(function_mode_at, range(count_function_modes()))
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor], list[Any]]:
    """The key of a call; the tensors among the leaves of its arguments; how those lie in memory.

    How they lie is no part of the key, since it may differ from process to process.
    """
    leaves, around = taken_apart(args, kwargs)
    kinds, values, strides = kinds_of(leaves)
    return (around, kinds), values, strides


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The leaves of the arguments of a call, and all of its key but what they are."""
    leaves, structure = flatten_in_order((args, kwargs)) if kwargs else flatten_args(args)
    casts = autocasts() if is_any_autocast_enabled() else ()
    around: tuple[Any, ...] = structure, _grad_enabled(), _default_dtype(), casts, current_mesh()
    if count_function_modes():
        around += (default_device(),)
    return leaves, around if not kwargs else (*around, dict)  # the structure is of a dict, too


def kinds_of(leaves: list[Any]) -> tuple[tuple[Any, ...], list[Tensor], list[Any]]:
    """What leaves are in a key; the tensors among them; how those lie in memory."""
    kinds: list[Any] = []
    values, strides = [], []
    for leaf in leaves:
        if type(leaf) is Tensor:
            kinds += leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device
            if leaf.is_conj() or leaf.is_neg() or leaf.layout is not _strided:
                kinds += leaf.is_conj(), leaf.is_neg(), leaf.layout
            values.append(leaf)
            strides.append(leaf.stride())
        else:
            kinds.append(_kind(leaf))
            if isinstance(leaf, Tensor):
                values.append(leaf)
                strides.append(strides_of(leaf))
    return tuple(kinds), values, strides


def guard(leaves: Sequence[Any]) -> Callable[..., bool] | None:
    """What tells of other leaves, in one call, whether they are of the same kinds and lie alike in memory.

    It may miss some that are. None where leaves are other than plain tensors, or one stands in several places, to which
    torch's guards always say no.
    """
    if not {*map(type, leaves)} <= _PLAIN or any(leaf.layout is not _strided for leaf in leaves):
        return None
    if len({*map(id, leaves)}) < len(leaves):
        return None
    check: Callable[..., bool] = TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _kind(leaf: Any) -> Any:
    """What a leaf that is no plain tensor is in a key."""
    if type(leaf) is LocalTensor:
        shapes = tuple(shard.shape for shard in (leaf.shards if leaf.uneven else leaf.shards[:1]))
        return leaf.dtype, leaf.frame, shapes, leaf.requires_grad, leaf.device
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device
    return leaf if type(leaf) is Static else identity(leaf)


def identity(value: Any) -> Any:
    """What tells one Python value from another: 1, 1.0 and True, two zeros; in tuples, sets and dataclasses, too."""
    kind = type(value)
    if kind in _TOLD:
        return kind, value
    if kind is float or (isinstance(value, Number) and not isinstance(value, int)):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, value, tuple(map(identity, value))
    if kind is frozenset:
        return kind, frozenset(map(identity, value))
    if (parameters := getattr(kind, "__dataclass_params__", None)) is not None and parameters.eq:
        told = [one.name for one in fields(value) if one.compare and one.hash is not False]
        return kind, value, tuple(identity(getattr(value, name)) for name in told)
    return kind, value


#: of equal values of one of these types nobody tells one from another
_TOLD: Final = frozenset({int, bool, str, type(None)})


class Static:
    """A static argument: one leaf, whatever it is, told from others by type and equality."""

    __slots__ = ("hash", "key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = identity(value)
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and bool(self.key == other.key)


def strides_of(x: Tensor) -> Any:
    """How a tensor lies in memory."""
    return x.stride() if type(x) is not LocalTensor else [shard.stride() for shard in x.shards]


def without_key(leaves: list[Any], error: Exception) -> Exception:
    """Why leaves have no kind."""
    return next((not_dense(x) for x in leaves if isinstance(x, Tensor) and not is_dense(x)), error)


def not_hashable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError:
    """The refusal of a call that has no key."""
    for leaf in flatten((args, kwargs))[0]:
        try:
            hash(leaf)
        except TypeError:
            return ArgumentError(
                f"jit got {described(leaf)} for an argument; arguments that are no tensors tell records apart, so they "
                "must be hashable: pass tensors, numbers, strings, or trees of those"
            )
    return ArgumentError("jit got an argument that has no hash; pass tensors, numbers, strings, or trees of those")
