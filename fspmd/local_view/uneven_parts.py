"""`split`, `chunk` and `unbind` of an uneven simulated block: parts that are views, differentiated as torch does.

Torch's own backward makes zeros for a part that has no gradient, and needs plain sizes for them. Its forward mode does
so for tangents. Here the zeros have sizes that differ from rank to rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.tracing import outside_transforms
from fspmd.transport.local_tensor import call_per_rank, common_frame

_OF_SIZES: Final = ("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
#: functions that split a value along a dim: the position of that argument, and the function that joins the parts
PARTS: Final[dict[str, tuple[int, Callable[..., Tensor]]]] = {
    **dict.fromkeys(_OF_SIZES, (2, torch.cat)),
    "unbind": (1, torch.stack),
}
Outline = tuple[Any, torch.dtype, torch.device]


def parted(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Calls a function of `PARTS`."""
    place, join = PARTS[name]
    dim = kwargs.get("dim", args[place] if place < len(args) else 0)
    (x,) = (arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))

    def cut(other: Tensor) -> tuple[Tensor, ...]:
        row = [other if arg is x else arg for arg in args]
        return tuple(func(*row, **{name: other if arg is x else arg for name, arg in kwargs.items()}))

    parts: tuple[Tensor, ...] = _Parts.apply(_Split(cut, join, dim), x)
    return parts


@dataclass(frozen=True, slots=True)
class _Split:
    """A way to split a value, and to join the parts."""

    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[..., Tensor]
    dim: int

    def joined(self, parts: Iterable[Tensor | None], outlines: Iterable[Outline]) -> Tensor:
        """Joins parts; zeros stand for those that are None."""
        filled = [self._zeros(*outline) if x is None else x for x, outline in zip(parts, outlines, strict=True)]
        x: Tensor = _Joined.apply(self, *filled)
        return x

    def batched(self) -> _Split:
        """Returns the same for values with one more dim in front."""
        return _Split(torch.vmap(self.split), self.join, self.dim + (self.dim >= 0))

    def _zeros(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        with outside_transforms():
            if self.join is torch.stack:
                fill: Any = torch.zeros((), dtype=dtype, device=device).expand
            else:
                fill = functools.partial(torch.zeros, dtype=dtype, device=device)
            held = common_frame(shape, None)
            zeros: Tensor = fill(shape) if held is None else call_per_rank(fill, (shape,), {}, held)
        return zeros


def _outlines(parts: Iterable[Tensor]) -> list[Outline]:
    return [(part.shape, part.dtype, part.device) for part in parts]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(cut: _Split, x: Tensor) -> tuple[Tensor, ...]:
        return cut.split(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.outlines = inputs[0], _outlines(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, ctx.cut.joined(grads, ctx.outlines)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Any:
        return ctx.cut.split(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[None, int], cut: _Split, x: Tensor) -> Any:
        parts = _Parts.apply(cut.batched(), x.movedim(in_dims[1], 0))
        return parts, (0,) * len(parts)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(cut: _Split, *parts: Tensor) -> Tensor:
        return cut.join(parts, cut.dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.outlines = inputs[0], _outlines(inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, *_Parts.apply(ctx.cut, g)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        return ctx.cut.joined(tangents, ctx.outlines)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], cut: _Split, *parts: Tensor) -> tuple[Tensor, int]:
        rows = [
            part.expand(info.batch_size, *[-1] * part.ndim) if dim is None else part.movedim(dim, 0)
            for part, dim in zip(parts, in_dims[1:], strict=True)
        ]
        return _Joined.apply(cut.batched(), *rows), 0
