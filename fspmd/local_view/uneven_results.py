"""Functions on uneven simulated blocks that need derivatives of their own: `split` and ``exp`` are examples.

`split`, `chunk` and `unbind` give parts that are views. Torch's own backward makes zeros for a part that has no
gradient, and needs plain sizes for them. Its forward mode does so for tangents. Here backward has torch's steps, with
zeros whose sizes differ from rank to rank, so that a program of a simulation has the steps of a process. In transforms
and in forward mode, where zeros would need sizes again, each part is a value of its own.

The derivative of ``exp`` uses its result. In derivatives of derivatives the result then gets one more gradient, which
hooks on it must see. Where ranks are computed one after another, that gradient reaches each rank's own result, and a
hook on the joined value misses it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.ops.traits import tensors_in
from fspmd.pairs import is_transformed
from fspmd.remembered import ASKING
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.torch_internals import SAVED
from fspmd.tracing import hidden
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


@cached
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith(SAVED)]


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


#: functions that give parts along a dim: the position of that argument
PARTS: Final = {
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), 2),
    **dict.fromkeys(("split_blocks", "chunk_blocks"), 2),  # of `rules/slices.py`, in place of torch's unsafe functions
    "unbind": 1,
}


def parted(func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Calls a function of `PARTS`."""
    place = PARTS[name]
    dim = kwargs.get("dim", args[place] if place < len(args) else 0)
    (x,) = tensors_in((*args, *kwargs.values()))
    if not is_transformed():
        parts: tuple[Tensor, ...] = _Parts.apply(x, functools.partial(func, *args, **kwargs), name == "unbind", dim)
        return parts
    with torch.no_grad():
        parts = func(*args, **kwargs)
    if name == "unbind":
        return tuple(x.select(dim, i) for i in range(len(parts)))
    sizes = [part.shape[dim] for part in parts]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return tuple(_Narrow.apply(x, dim % x.ndim, *cut) for cut in zip(starts, sizes, strict=True))


class _Parts(torch.autograd.Function):
    """The parts of a tensor along a dim, with the steps of torch's own backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cut: Callable[[], Sequence[Tensor]], unbinds: bool, dim: int
    ) -> tuple[Tensor, ...]:
        parts = tuple(cut())
        ctx.unbinds, ctx.dim, ctx.shapes = unbinds, dim, [part.shape for part in parts]
        ctx.set_materialize_grads(False)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        given = [g for g in grads if g is not None]
        if not given:
            return None, None, None, None
        zeros = functools.partial(_unbound_zeros if ctx.unbinds else _zeros, given[0])
        parts = [zeros(shape) if g is None else g for g, shape in zip(grads, ctx.shapes, strict=True)]
        return torch.stack(parts, ctx.dim) if ctx.unbinds else torch.cat(parts, ctx.dim), None, None, None


def _zeros(like: Tensor, shape: Sequence[Any]) -> Tensor:
    return _sized(torch.zeros, shape, dtype=like.dtype, device=like.device)


def _unbound_zeros(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """The zeros of `unbind`: one number, expanded."""
    return _sized(Tensor.expand, _zeros(like, ()), shape)


def _sized(func: Function, *args: Any, **options: Any) -> Tensor:
    """Calls a function of sizes, which may differ from rank to rank."""
    frame = common_frame(args, None)
    out: Tensor = func(*args, **options) if frame is None else call_per_rank(func, args, options, frame)
    return out


class _Narrow(torch.autograd.Function):
    """``x.narrow(dim, start, size)``. Torch's own, under ``vmap``, needs plain sizes in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, start: Any, size: Any) -> Tensor:
        return x.narrow(dim, start, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, Any, Any], output: Tensor) -> None:
        x, dim, start, size = inputs
        ctx.cut = dim, start, size
        ctx.padding = *(0, 0) * (x.ndim - 1 - dim), start, x.shape[dim] - start - size

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.nn.functional.pad(g, ctx.padding), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.narrow(*ctx.cut)
