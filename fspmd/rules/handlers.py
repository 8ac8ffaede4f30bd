"""Handlers: functions that run in place of torch functions that no rule can describe.

Most of them make new values, change shapes in place (``x.t_()``, ``x.as_strided(...)``) or draw random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError, ShapeError
from fspmd.forms import is_dense, order_in_memory
from fspmd.ops.traits import name_of
from fspmd.random.blocks import fill
from fspmd.random.counter import Block
from fspmd.remembered import forget_graph
from fspmd.rules.draws import DRAWS, DROPOUTS
from fspmd.rules.foreach import of_lists, unscale
from fspmd.rules.like_functions import LIKES, Handler, settled
from fspmd.rules.value_checks import check_matrices
from fspmd.sharded import Sharded, is_sharded, lies, relay, upper
from fspmd.torch_internals import DisableTorchFunction, VariableFunctions
from fspmd.tracing import refuse_tracer

_VIEWS: Final = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")


def _in_place(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn x into a view of itself. Nothing moves, and other views of x stay as they are."""
    if not isinstance(x, Sharded):
        raise ArgumentError(f"{name}_() of a plain tensor got a Sharded; write x = x.{name}(...)")
    if x.requires_grad and x.local.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}_() got {x!r}, a leaf that requires grad; write y = x.{name}(...), or call it under torch.no_grad()"
        )
    y = getattr(x, name)(*args, **kwargs)
    x.block = y.local
    relay(x, y)
    return x


def _fill_diagonal(x: Any, fill_value: float, wrap: bool = False) -> Any:
    """``x.fill_diagonal_(value)``: each rank fills the diagonal in its block, and nothing moves."""
    if x.dim() < 2 or (x.dim() > 2 and len(set(x.shape)) > 1):
        raise ShapeError(f"fill_diagonal_() got {x!r}; give it a matrix, or a tensor whose dims all have one size")
    spec = settled(x.spec, torch.bool)
    return x.masked_fill_(fill(spec, functools.partial(_on_diagonal, wrap, x.device), x.device), fill_value)


def _on_diagonal(wrap: bool, device: torch.device, block: Block) -> Tensor:
    """Return a mask of the diagonal in a block; with ``wrap`` it starts again after each square and one more row."""
    places = [
        torch.arange(start, start + n, device=device).view(-1, *(1,) * (len(block.shape) - 1 - dim))
        for dim, (start, n) in enumerate(zip(block.offset, block.shape, strict=True))
    ]
    if wrap and len(places) == 2:
        places[0] = places[0] % (block.whole[1] + 1)
    mask = torch.ones(block.shape, dtype=torch.bool, device=device)
    for place in places[1:]:
        mask &= places[0] == place
    return mask


def _as_strided(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """``x.as_strided(...)``: a copy of elements of x, by their places in the memory that x has in torch."""
    strides = lies(x).strides
    start = 0 if storage_offset is None else storage_offset - x.storage_offset()
    places = torch.tensor([start], device=x.device)
    for n, step in zip(size, stride, strict=True):
        places = (places[:, None] + torch.arange(n, device=x.device) * step).flatten()
    if strides is None or not is_dense(tuple(x.shape), strides):
        raise ArgumentError(
            f"as_strided() got {x!r}, which is a part of a larger memory; call it on the tensor that has all of it"
        )
    reach = [(n - 1) * step for n, step in zip(size, stride, strict=True)]
    if 0 not in size and not 0 <= start + sum(min(r, 0) for r in reach) <= start + sum(reach) < x.numel():
        raise ShapeError(
            f"as_strided({size}, {stride}, {storage_offset}) of {x!r} reaches beyond its {x.numel()} elements; call it "
            "on the tensor that has all of these elements"
        )
    return x.permute(order_in_memory(strides)).reshape(-1).index_select(0, places).reshape(size)


RESHAPED: Final[dict[str, Handler]] = {
    "as_strided": _as_strided,
    **{f"{name}_": functools.partial(_in_place, name) for name in _VIEWS},
    "fill_diagonal_": _fill_diagonal,
}


def _check_errors(info: Any, name: str, *, is_matrix: bool) -> None:
    """Raise for matrices that a factorization could not factorize. Each rank checks its own block."""
    check_matrices(info.local, name, is_matrix)


def _detached(x: Any) -> Any:
    """``x.detach_()``. The block also forgets its casts and its origin, which belong to the graph that it leaves."""
    x.of_local("detach_")
    forget_graph(x.local)
    return x


def _set(x: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``x.set_(y)``, which moves y as ``x.data = y`` does. Other arguments name memory, which a rank has not."""
    if not (is_sharded(x) and is_sharded(source)) or args or kwargs:
        _refuse_memory("set_", x if is_sharded(x) else source)
    if x.requires_grad and x.local.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(f"set_() got {x!r}, a leaf that requires grad; call it under torch.no_grad()")
    x.data = source
    return x


def _own_method(name: str) -> Handler:
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def _takes_data(x: Any, y: Any) -> bool:
    """Whether ``module._apply`` may write ``x.data = y``; otherwise it makes y a new parameter."""
    return type(x) is type(y) and (x.spec.mesh, x.shape, x.device) == (y.spec.mesh, y.shape, y.device)


#: methods of `Sharded` itself
_METHODS: Final = ("is_complex", "is_floating_point", "stride", "is_contiguous", "storage_offset")
HANDLERS: Final[dict[str, Handler]] = {
    **LIKES,
    **DRAWS,
    **DROPOUTS,
    **RESHAPED,
    **{name: _own_method(name) for name in _METHODS},
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "_linalg_check_errors": _check_errors,
    "detach_": _detached,
    "set_": _set,
    "_has_compatible_shallow_copy_type": _takes_data,
}
#: functions of autograd; `upper` has their handlers, and is set after this module is imported
ENGINE: Final[dict[Any, Callable[[], Handler]]] = {
    torch.autograd.grad: lambda: upper().gradients,
    torch.autograd.backward: lambda: upper().backward,
    VariableFunctions._make_dual: lambda: upper().dual,
    VariableFunctions._unpack_dual: lambda: upper().parts,
}
_BLOCK: Final = "x.local.{0}(...), of this rank's block, or device_get(x).{0}(...), of the whole"
_SAVED: Final = (
    f"{_BLOCK}; to save it, write fspmd.save(path, tree), with asynchronous=True in the background, "
    "fspmd.save_huggingface(folder, params, model), torch.distributed.checkpoint.save, or save device_get(tree)"
)
_NEW: Final = "x.new_empty(size)"
#: methods about the memory of a tensor, of which a rank has only a block -> the code to write instead
_OF_MEMORY: Final = {
    **dict.fromkeys(("data_ptr", "storage", "untyped_storage"), _SAVED),
    **dict.fromkeys(("storage_type", "is_set_to", "as_subclass", "__dlpack__", "__dlpack_device__"), _BLOCK),
    **dict.fromkeys(("share_memory_", "pin_memory", "record_stream", "apply_", "map_", "map2_"), _BLOCK),
    **{"resize_": _NEW, "resize_as_": _NEW, "set_": "x.set_(y), with a Sharded y, or x.copy_(y)"},
}


@cached
def handler_of(func: Any) -> Handler | None:
    """Return the function that runs in place of a torch function on `Sharded` values, or None."""
    if getattr(func, "__module__", None) == "torch.nn.init":
        return functools.partial(_as_written, func)
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        return functools.partial(_refuse_collective, func)
    if func in ENGINE:
        return ENGINE[func]()
    name = name_of(func)
    if name.startswith(("_foreach_", "_fused_")):
        return functools.partial(of_lists, func, name)
    if name in HANDLERS:
        return HANDLERS[name]
    return functools.partial(_refuse_memory, name) if name in _OF_MEMORY else None


def _as_written(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function of ``torch.nn.init`` as it is: it only calls methods of its tensor."""
    with DisableTorchFunction():
        return func(*args, **kwargs)


def _refuse_collective(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ArgumentError(
        f"torch.distributed's {name_of(func)}() got a Sharded; write reshard(x, spec), a collective of fspmd in a "
        "function run by shard_map, or give it x.local, this rank's block"
    )


def _refuse_memory(name: str, x: Any, *args: Any, **kwargs: Any) -> NoReturn:
    refuse_tracer(x)
    raise ArgumentError(
        f"{name}() needs the memory of {x!r}, but this rank has only a block; write {_OF_MEMORY[name].format(name)}"
    )
