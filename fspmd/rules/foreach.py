"""``torch._foreach_*``: one function of tensors, applied to each of a list."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_VALUE: Final = frozenset(("addcdiv", "addcmul"))  # what these take fourth here is elsewhere their ``value``
_OF_NUMBERS: Final = {"maximum": "clamp_min", "minimum": "clamp_max"}  # of a tensor and a number
_OTHERS: Final = {
    "norm": torch.linalg.vector_norm,
    "powsum": lambda x, ord=2, dtype=None: (x.abs() ** ord).sum(dtype=dtype),
}


def each_of(name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """The function on the first entries of the lists, on the second, and so on; one that writes gives nothing."""
    writes, name = name.endswith("_"), name.removeprefix("_foreach_").rstrip("_")
    if name in _VALUE and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    kwargs = {"value" if name in _VALUE and key == "scalars" else key: value for key, value in kwargs.items()}
    if isinstance(kwargs.get("value"), Tensor):
        kwargs["value"] = kwargs["value"].tolist()
    count = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)))
    found = []
    for i in range(count):
        given = [_entry(value, i) for value in args]
        named = {key: _entry(value, i) for key, value in kwargs.items()}
        if name in _OF_NUMBERS and isinstance(given[-1], (int, float)):
            name = _OF_NUMBERS[name]
        if writes and hasattr(Tensor, f"{name}_"):
            getattr(given[0], f"{name}_")(*given[1:], **named)
            continue
        out = (_OTHERS.get(name) or getattr(torch, name))(*given, **named)
        found.append(given[0].copy_(out) if writes else out)
    return None if writes else tuple(found)


def _entry(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, (list, tuple)) else value
