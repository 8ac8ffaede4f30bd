"""Values as numbers that are the same on all processes, though the memory and the hashes of Python are not."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.digests import digests, of_bytes
from fspmd.meshes.mesh import Mesh
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, describe

#: types whose texts tell their values
_TOLD: Final = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, bytearray, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, P, TensorSpec, Mesh, Sharded),
)
_DEPTH: Final = 24  # of containers in containers


def number_of(value: Any) -> int:
    """A 64-bit number for a value. Other values have other numbers, unless only their types are known.

    Tensors count by their bits, and containers and objects by their parts. A function counts by its line. Of an object
    that is equal to itself alone, or that cannot be pickled, only the type counts.

    >>> number_of({"b": 1.0, "a": {"x", "y"}}) == number_of({"b": 1.0, "a": {"y", "x"}})
    True
    >>> number_of(1) == number_of(True), number_of((1, 2)) == number_of([1, 2]), number_of(0.0) == number_of(-0.0)
    (False, False, False)
    """
    return of_bytes(_text(value, _DEPTH).encode())


def is_told(x: Tensor) -> bool:
    """Whether the bits of a tensor count: it is a plain one, and has any."""
    return type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta and x.layout is torch.strided


def _text(value: Any, depth: int) -> str:
    kind: Any = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _TOLD:
        return f"{name} {value!r}"
    if isinstance(value, Tensor):
        return f"{name} {describe(value.dtype, value.shape)} {digests([value])[0] if is_told(value) else ''}"
    if isinstance(value, Enum):
        return f"{name} {value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if not depth:
        return name
    if isinstance(value, torch.nn.Module):
        return _joined(name, [part for named in value.named_parameters() for part in named], depth)
    if isinstance(value, (set, frozenset)):
        return f"{name}({', '.join(sorted(_text(part, depth - 1) for part in value))})"
    if isinstance(value, dict):
        return _joined(name, [part for item in value.items() for part in item], depth)
    if isinstance(value, (tuple, list)):
        return _joined(name, value, depth)
    if kind.__eq__ is object.__eq__:
        return name
    try:
        made_of = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled
        return name
    if isinstance(made_of, str):
        return f"{name} {made_of}"
    return _joined(name, [list(part) if hasattr(part, "__next__") else part for part in made_of], depth)


def _joined(name: str, parts: Iterable[Any], depth: int) -> str:
    return f"{name}({', '.join(_text(part, depth - 1) for part in parts)})"
