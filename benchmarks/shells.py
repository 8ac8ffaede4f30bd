"""What it costs that a `Sharded` is a ``torch.Tensor``: ways to make such a pair, beside a class that is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import Row, Table, calls, side_by_side

from fspmd import P, device_put, make_mesh
from fspmd.sharded import pair


class Plain:
    """A pair that no library takes for a tensor. ``__class__`` could say otherwise; torch's C code would believe it."""

    __slots__ = ("local", "spec")


class Subclass(torch.Tensor):
    """A tensor of torch, whose shell refuses use."""

    __slots__ = ("local", "spec")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def measure() -> Table:
    """A pair of a block of 8 x 8 numbers and its spec, made and thrown away."""
    x: Any = device_put(torch.ones(8, 8), P(), mesh=make_mesh((1,), ("x",), transport="simulation"))
    local, spec, new = x.local, x.spec, object.__new__
    nothing, cast = torch.empty(0), torch.Tensor.as_subclass
    subclass, wrapper = torch.Tensor._make_subclass, torch.Tensor._make_wrapper_subclass

    def filled(made: Any) -> Any:
        made.local, made.spec = local, spec
        return made

    ways: dict[str, Callable[[], Any]] = {
        "wrapper, by place: pair()": lambda: pair(local, spec),
        "wrapper, by name": lambda: filled(wrapper(Subclass, spec.shape, dtype=spec.dtype)),
        "_make_subclass": lambda: filled(subclass(Subclass, nothing)),
        "as_subclass": lambda: filled(cast(nothing, Subclass)),
    }
    found = side_by_side({"plain": calls(lambda: filled(new(Plain))), **{k: calls(f) for k, f in ways.items()}})
    return Table(
        "A pair that is a torch.Tensor, beside one that is not",
        [Row(name, found[name], "a class of its own", found["plain"]) for name in ways],
    )
