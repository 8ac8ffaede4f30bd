"""Functions whose derivative is in terms of what they gave, such as ``exp``, on uneven simulated blocks.

In derivatives of derivatives their result has one more gradient, which hooks on it are to see. The results of ranks
that have been computed one by one have theirs where no hook of the value they are bound to would see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.ops.traits import tensors_in
from fspmd.remembered import ASKING
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.tracing import hidden
from fspmd.transport.local_tensor import blocks_of

Function = Callable[..., Any]
Convert = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
Way = Literal["apart", "at once", "unseen"]
_known: Final[dict[Any, Way]] = {}
_MAXSIZE: Final = 4096


def way_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], alone: Convert, together: Convert) -> Way:
    """How a call runs: rank by rank, ``apart``; at once; or apart, and nobody may hook its results.

    What it saves for its derivative is seen on the arguments of one rank, which ``alone`` makes of those of all.
    ``together`` makes those of a call at once, which torch may not differentiate where it asks for plain sizes.
    """
    key = func, *map(_facts, args), *kwargs, *map(_facts, kwargs.values())
    try:
        found = _known.get(key)
    except TypeError:  # an argument has no hash
        return _tried(func, args, kwargs, alone, together)
    if found is None:
        if len(_known) >= _MAXSIZE:
            _known.clear()
        found = _known[key] = _tried(func, args, kwargs, alone, together)
    return found


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
            return "apart"
        try:
            row, named = together(args, kwargs)
            found: Any = func(*row, **named)
            for order in range(3):
                outs = [x for x in tensors_in((found,)) if x.requires_grad]
                found = torch.autograd.grad(
                    outs, inputs, list(map(torch.ones_like, outs)), create_graph=True, allow_unused=True
                )
                if order == 0 and None in found:  # zeros that the engine would make, of sizes that are no numbers
                    return "apart" if not any(x is not None for x in found) else "unseen"
                found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
        except (RuntimeError, ShapeError, VarianceError):
            return "unseen"
    return "at once"


def _are_saved(results: Any) -> bool:
    nodes = {one.grad_fn for one in tensors_in((results,)) if one.grad_fn is not None}
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


def unasked(out: Any, name: str) -> Any:
    """Results of which nobody may ask for a gradient of their own."""
    for one in tensors_in((out,)):
        for method in ASKING if one.grad_fn is not None else ():
            setattr(one, method, functools.partial(_refuse, method, name))
    return out


def _refuse(method: str, name: str, *_: Any) -> NoReturn:
    raise ArgumentError(
        f"{method}() of what {name} gave of blocks that are uneven, in a simulation, where not all of its gradient is "
        "seen if that is differentiated again; write y = y * 1 and ask for that of the product"
    )
