"""Functions on uneven simulated blocks that need derivatives of their own: `split` and ``exp`` are examples.

`split`, `chunk` and `unbind` give parts that are views. Torch's own backward makes zeros for a part that has no
gradient, and needs plain sizes for them. Its forward mode does so for tangents. Here the zeros have sizes that differ
from rank to rank.

The derivative of ``exp`` uses its result. In derivatives of derivatives the result then gets one more gradient, which
hooks on it must see. Where ranks are computed one after another, that gradient reaches each rank's own result, and a
hook on the joined value misses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.ops.traits import tensors_in
from fspmd.remembered import ASKING
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.tracing import hidden, outside_transforms
from fspmd.transport.local_tensor import blocks_of, call_per_rank, common_frame

Function = Callable[..., Any]
Convert = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
Way = Literal["rank by rank", "at once", "without hooks"]
_known: Final[dict[Any, Way]] = {}
_MAXSIZE: Final = 4096


def way_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], alone: Convert, together: Convert) -> Way:
    """Returns how a call runs: rank by rank; at once; or rank by rank, and hooks on its results are refused.

    A trial on the arguments of one rank, ``alone``, shows whether the derivative uses the result. A second trial on the
    blocks of all ranks, ``together``, shows whether torch can differentiate the call at once, without plain sizes.
    """
    key = func, *map(_facts, args), *kwargs, *map(_facts, kwargs.values())
    try:
        way = _known.get(key)
    except TypeError:  # an argument has no hash
        return _tried(func, args, kwargs, alone, together)
    if way is None:
        if len(_known) >= _MAXSIZE:
            _known.clear()
        way = _known[key] = _tried(func, args, kwargs, alone, together)
    return way


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.requires_grad, *[tuple(block.shape) for block in blocks_of(value)]
    return tuple(map(_facts, value)) if type(value) in (list, tuple) else (type(value), value)


@hidden
def _tried(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], alone: Convert, together: Convert) -> Way:
    args, kwargs = _leaves(args), dict(zip(kwargs, _leaves(kwargs.values()), strict=True))
    inputs = [x for x in tensors_in((*args, *kwargs.values())) if x.requires_grad]
    with torch.enable_grad(), without_saved_tensor_hooks():
        row, named = alone(args, kwargs)
        if not _are_saved(func(*row, **named)):
            return "rank by rank"
        try:
            row, named = together(args, kwargs)
            values: Any = func(*row, **named)
            for order in range(3):
                outs = [x for x in tensors_in((values,)) if x.requires_grad]
                grads = torch.autograd.grad(
                    outs, inputs, list(map(torch.ones_like, outs)), create_graph=True, allow_unused=True
                )
                if order == 0 and None in grads:  # the engine would make zeros, for which it needs plain sizes
                    return "rank by rank" if not any(g is not None for g in grads) else "without hooks"
                values = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
        except (RuntimeError, ShapeError, VarianceError):
            return "without hooks"
    return "at once"


def _are_saved(results: Any) -> bool:
    nodes = {x.grad_fn for x in tensors_in((results,)) if x.grad_fn is not None}
    return any(_saves_own(node, name) for node in nodes for name in _saved_names(type(node)))


@functools.lru_cache(maxsize=4096)
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def _saves_own(node: Any, name: str) -> bool:
    saved = getattr(node, name)
    return isinstance(saved, Tensor) and saved.grad_fn is node


def _leaves(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(
        x.detach().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else type(x)(_leaves(x))
        if type(x) in (list, tuple)
        else x
        for x in values
    )


def without_hooks(out: Any, name: str) -> Any:
    """Makes hooks on results, and questions for their own gradients, raise `ArgumentError`."""
    for x in tensors_in((out,)):
        for method in ASKING if x.grad_fn is not None else ():
            setattr(x, method, functools.partial(_refuse, method, name))
    return out


def _refuse(method: str, name: str, *_: Any) -> NoReturn:
    raise ArgumentError(
        f"{method}() of a result of {name} on uneven simulated blocks would miss a part of its gradient in derivatives "
        "of derivatives; write y = y * 1, and call it on the product"
    )


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
