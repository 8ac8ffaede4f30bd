"""The methods, operators and properties of a tensor, given to `Sharded`: torch functions, or questions to its block."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.ops.operators import BINARY, REFLECTED, UNARY
from fspmd.sharded import Sharded
from fspmd.torch_internals import TensorBase


class ShardedAttributeError(ArgumentError, AttributeError):
    """An attribute of tensors that a Sharded does not have; for ``hasattr`` and ``getattr`` it is absent."""


def _method(func: Any) -> Any:
    def method(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        return Sharded.__torch_function__(func, (), (self, *args), kwargs)

    method.__name__ = method.__qualname__ = getattr(func, "__name__", "")
    method.__doc__ = f"``torch.Tensor.{method.__name__}`` on a global tensor."
    return method


def _getter(func: Any) -> Any:
    return property(lambda self: Sharded.__torch_function__(func, (), (self,)))


def _binary(func: Any) -> Any:
    def method(self: Sharded, other: Any) -> Any:
        return NotImplemented if other is None else Sharded.__torch_function__(func, (), (self, other))

    return method


def _reflected(name: str) -> Any:
    """``other <op> self``. Two tensors keep this order, since it decides the strides of the result."""
    forward, reflected = getattr(Tensor, f"__{name[1:]}__"), getattr(Tensor, f"__{name}__")

    def method(self: Sharded, other: Any) -> Any:
        if isinstance(other, Tensor):
            return Sharded.__torch_function__(forward, (), (other, self))
        return NotImplemented if other is None else Sharded.__torch_function__(reflected, (), (self, other))

    return method


def _radd(self: Sharded, other: Any) -> Any:
    """``other + self``. Python's ``sum`` starts from 0, which settles no pending sum."""
    if type(other) is int and other == 0 and self.spec.partition.unreduced and self.spec.dtype is not torch.bool:
        return Sharded.__torch_function__(Tensor.clone, (), (self,))
    return _add_to(self, other)


_add_to: Final = _reflected("radd")


def _absent(name: str, advice: str = "use it in a function run by shard_map, or on device_get(x)") -> Any:
    def getter(_: Sharded) -> NoReturn:
        raise ShardedAttributeError(f"a Sharded has no .{name}; {advice}")

    return property(getter)  # a __getattr__ would slow down every attribute


def _of_local(name: str) -> Any:
    return property(lambda self: getattr(self.local, name), doc=f"As of this rank's block: ``torch.Tensor.{name}``.")


def _asked_of_local(name: str) -> Any:
    def method(self: Sharded, *args: Any) -> Any:
        return self.of_local(name, *args)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As of this rank's block: ``torch.Tensor.{name}``."
    return method


_OF_LOCAL: Final = (
    *(name for name in dir(TensorBase) if name.startswith("is_") and not callable(getattr(Tensor, name))),
    *("layout", "itemsize", "grad_fn", "retains_grad", "output_nr", "_version", "_backward_hooks"),
)
_ASKED_OF_LOCAL: Final = ("is_shared", "is_pinned", "is_inference", "get_device", "_is_view")
#: names of other libraries -> ours
_OTHER_NAMES: Final = {
    "to_local": "x.local",
    "full_tensor": "device_get(x)",
    "redistribute": "reshard(x, P(...))",
    "placements": "x.spec.partition",
    "device_mesh": "x.spec.mesh",
    "sharding": "x.spec",
    "__cuda_array_interface__": "x.local",  # by which libraries ask whether they may take the memory
}
_VIEWS: Final = ("T", "mT", "H", "mH", "real", "imag")  # properties that give tensors


def install() -> None:
    """Give `Sharded` its methods, operators and properties."""
    for name in _OF_LOCAL:
        setattr(Sharded, name, _of_local(name))
    for name in _ASKED_OF_LOCAL:
        setattr(Sharded, name, _asked_of_local(name))
    for name in dir(Tensor):
        if name not in vars(Sharded) and not name.startswith("_") and callable(getattr(Tensor, name)):
            setattr(Sharded, name, _method(getattr(Tensor, name)))
    for name in _VIEWS:
        setattr(Sharded, name, _getter(getattr(Tensor, name).__get__))
    for name in BINARY:
        setattr(Sharded, f"__{name}__", _binary(getattr(Tensor, f"__{name}__")))
    for name in REFLECTED:
        setattr(Sharded, f"__{name}__", _reflected(name))
    for name, (_, function) in BINARY.items():
        if hasattr(Tensor, f"__i{name}__"):  # x += y writes into x, which other names may hold
            setattr(Sharded, f"__i{name}__", _binary(getattr(Tensor, f"{function}_")))
    for name in UNARY:
        setattr(Sharded, f"__{name}__", _method(getattr(Tensor, f"__{name}__")))
    Sharded.__radd__ = _radd  # type: ignore[method-assign, assignment]
    for name in dir(Tensor):
        if name not in vars(Sharded) and not name.startswith("_"):
            setattr(Sharded, name, _absent(name))
    for name, ours in _OTHER_NAMES.items():
        setattr(Sharded, name, _absent(name, f"write {ours}"))
    Sharded.__hash__ = object.__hash__  # type: ignore[method-assign]
