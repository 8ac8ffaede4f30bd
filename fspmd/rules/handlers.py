"""Handlers: functions that run in place of torch functions that no rule can describe.

Most of them make new values, change shapes in place (``x.t_()``, ``x.as_strided(...)``), draw random numbers, or take
lists of tensors: ``torch._foreach_*``, and the fused steps of optimizers, ``torch._fused_*``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError, ShapeError
from fspmd.forms import is_dense, order_in_memory
from fspmd.messages import described
from fspmd.ops.traits import name_of
from fspmd.random.blocks import fill
from fspmd.random.counter import Block
from fspmd.redistribution.redistribute import from_blocks
from fspmd.remembered import forget_graph, wrote_all
from fspmd.rules.draws import DRAWS, DROPOUTS
from fspmd.rules.like_functions import LIKES, Handler, settled
from fspmd.rules.value_checks import check_matrices
from fspmd.sharded import Sharded, is_plain, is_sharded, lies, pair, relay, upper
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction, make_dual, unpack_dual
from fspmd.tracing import refuse_tracer
from fspmd.transport.local_tensor import blocks_of, is_simulated, per_block

_VALUE: Final = frozenset(("addcdiv", "addcmul"))  # the fourth argument is the ``value`` of the function of one tensor
_OF_NUMBERS: Final = {"maximum": "clamp_min", "minimum": "clamp_max"}  # the function for a tensor and a number
_OTHERS: Final = {
    "norm": torch.linalg.vector_norm,
    "powsum": lambda x, ord=2, dtype=None: (x.abs() ** ord).sum(dtype=dtype),
}
_OF_ALL_ELEMENTS: Final = frozenset((*_OTHERS, "max"))  # reductions; all other functions are elementwise
_UNLIKE: Any = object()


def of_lists(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a function of lists at once on the blocks if the entries of all lists lie alike, else entry by entry.

    If autograd is on, it runs entry by entry, since each operand may need a cast of its own.
    """
    fused = name.startswith("_fused_")
    if fused or not torch.is_grad_enabled():
        out = _at_once(func, name, args, kwargs)
        if out is not _UNLIKE:
            return out
    if fused:
        raise ArgumentError(_FUSED.format(name, _first_unlike(args)))
    return each_of(name, *args, **kwargs)


def _at_once(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function on the lists of blocks, or return `_UNLIKE` if that differs from the global tensors."""
    specs = _specs_of(args[0])
    if not specs or name.removeprefix("_foreach_").rstrip("_") in _OF_ALL_ELEMENTS:
        return _UNLIKE
    given = [_blocks_of(value, specs) for value in args]
    named = {key: _blocks_of(value, specs) for key, value in kwargs.items()}
    if any(value is _UNLIKE for value in (*given, *named.values())):
        return _UNLIKE
    if name == "_fused_adagrad_":  # its schema says that it writes into step counts, which it only reads
        given[3] = list(map(_held_as, given[3], given[0]))
    if name.endswith("_"):
        for x in given[0]:
            refuse_copy(x, f"{name}()")
    out = _fused(func, given, named) if name.startswith("_fused_") else func(*given, **named)
    if name.endswith("_"):
        wrote_all(given[0])
    return out if out is None else type(out)([_paired(x, spec) for x, spec in zip(out, specs, strict=True)])


def _fused(func: Any, given: list[Any], named: dict[str, Any]) -> Any:
    """Run a fused step of an optimizer, on copies where the tensors of a parameter lie differently in memory.

    Torch's kernel for the CPU pairs elements by their places in memory, and does not look at strides. In torch
    ``backward`` gives a gradient the strides of its parameter. One that is assigned may have others.
    """
    lists = [values for values in given if isinstance(values, list) and values]
    if all(block.is_contiguous() for values in lists for x in values for block in blocks_of(x)):
        return func(*given, **named)
    unlike = dict.fromkeys(i for i, row in enumerate(zip(*lists, strict=True)) if not _lie_alike(row))
    begin = 0
    for i in (*unlike, len(given[0])):  # in order, since parameters may share memory
        if begin < i:
            func(*[values[begin:i] if isinstance(values, list) else values for values in given], **named)
        if i in unlike:
            row = [values[i] for values in lists]
            dense = [x.clone(memory_format=_DENSE) for x in row]
            numbers = iter(dense)
            func(*[[next(numbers)] if isinstance(values, list) and values else values for values in given], **named)
            if named.get("grad_scale") is None:  # the gradient was only read
                del row[1], dense[1]
            for x, y in zip(row, dense, strict=True):
                _write(x, y)
        begin = i + 1
    return None


def _write(x: Tensor, values: Tensor) -> None:
    """Write values into a tensor that may be expanded."""
    for block, new in zip(blocks_of(x), blocks_of(values), strict=True):
        once = tuple(slice(0, None if stride else 1) for stride in block.stride())
        block[once].copy_(new[once])


def _lie_alike(row: Sequence[Tensor]) -> bool:
    """Whether the tensors of a parameter that have its shape have equal strides and no gaps, on each rank."""
    row = [x for x in row if x.shape == row[0].shape]  # a count of steps has another
    if all(block.is_contiguous() for x in row for block in blocks_of(x)):
        return True
    for x, *others in zip(*map(blocks_of, row), strict=True):
        strides = x.stride()
        if not is_dense(tuple(x.shape), strides) or any(other.stride() != strides for other in others):
            return False
    return True


_DENSE: Final = torch.contiguous_format
_FUSED: Final = (
    "{}(), which an optimizer with fused=True calls, takes parameters, gradients and states that lie alike, none of "
    "them a pending sum or reduced, but {}; write foreach=True"
)
Specs = list[TensorSpec | None]


def _specs_of(first: Any) -> Specs | None:
    """Return the specs of the first list's entries, with None for a plain one; None if any is unreduced or reduced."""
    if not isinstance(first, (list, tuple)) or not all(isinstance(x, Tensor) for x in first):
        return None
    specs = [x.spec if type(x) is Sharded else None for x in first]
    return None if any(spec and (spec.partition.unreduced or spec.partition.reduced) for spec in specs) else specs


def _blocks_of(value: Any, specs: Specs) -> Any:
    """Return the blocks of a list whose entries have these specs or are single numbers; otherwise `_UNLIKE`."""
    if not isinstance(value, (list, tuple)):
        return _number_of(value)
    blocks = [
        x.block if type(x) is Sharded and x.spec is spec else x if spec is None and is_plain(x) else _entry_of(x)
        for x, spec in zip(value, specs, strict=False)
    ]
    return _UNLIKE if any(x is _UNLIKE for x in blocks) else blocks


def _held_as(number: Tensor, x: Tensor) -> Tensor:
    """Return a number with one copy per shard of x, if x is simulated."""
    return per_block(lambda _: number.clone(), x) if is_simulated(x) else number


def _number_of(x: Any) -> Any:
    """Return a value that is equal on all ranks as a plain one; otherwise `_UNLIKE`."""
    return x if type(x) is not Sharded else _UNLIKE if x.ndim or x.spec.partition.mentioned else x.local


def _entry_of(x: Any) -> Any:
    """Return the number that an entry is; otherwise `_UNLIKE`."""
    return _UNLIKE if isinstance(x, Tensor) and x.ndim else _number_of(x)


def _paired(x: Tensor, spec: TensorSpec | None) -> Tensor:
    if spec is None:
        return x
    return pair(x, spec if x.dtype is spec.dtype else TensorSpec(spec.mesh, spec.partition, spec.shape, x.dtype))


def _first_unlike(args: tuple[Any, ...]) -> str:
    for row in zip(*(value for value in args if isinstance(value, (list, tuple)) and value), strict=False):
        layouts = {x.spec if type(x) is Sharded else None: x for x in row if isinstance(x, Tensor) and x.ndim}
        if len(layouts) > 1:
            return " stands beside ".join(described(x) if spec is None else repr(x) for spec, x in layouts.items())
    return f"it got {args[0][0]!r}"


def each_of(name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """Run the function on the first entries of the lists, on the second ones, and so on. A write returns None."""
    writes, name = name.endswith("_"), name.removeprefix("_foreach_").rstrip("_")
    if name in _VALUE and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    kwargs = {"value" if name in _VALUE and key == "scalars" else key: value for key, value in kwargs.items()}
    if isinstance(kwargs.get("value"), Tensor):
        kwargs["value"] = kwargs["value"].tolist()
    count = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)))
    results = []
    for i in range(count):
        given = [_entry(value, i) for value in args]
        named = {key: _entry(value, i) for key, value in kwargs.items()}
        if name in _OF_NUMBERS and isinstance(given[-1], (int, float)):
            name = _OF_NUMBERS[name]
        if writes and hasattr(Tensor, f"{name}_"):
            getattr(given[0], f"{name}_")(*given[1:], **named)
            continue
        out = (_OTHERS.get(name) or getattr(torch, name))(*given, **named)
        results.append(given[0].copy_(out) if writes else out)
    return None if writes else tuple(results)


def unscale(gradients: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Divide gradients by the scale of ``torch.amp.GradScaler``, and set ``found_inf`` if any element is not finite.

    All ranks learn it. Counts that lie alike are one pending sum, so there is one all-reduce of one number for each set
    of axes that cut gradients.
    """
    counts: dict[Any, Any] = {}
    for x in gradients:
        bad = x.isfinite().logical_not().sum(dtype=torch.float32)
        spec = bad.spec if is_sharded(bad) else None
        counts[spec] = bad if spec not in counts else counts[spec] + bad
        x.mul_(inv_scale)
    for spec, bad in counts.items():
        whole = bad if spec is None else from_blocks(bad.local, spec)
        found_inf.copy_(torch.maximum(found_inf, (whole > 0).to(found_inf)))


def _entry(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, (list, tuple)) else value


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
    spans = [(n - 1) * step for n, step in zip(size, stride, strict=True)]
    if 0 not in size and not 0 <= start + sum(min(r, 0) for r in spans) <= start + sum(spans) < x.numel():
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


def _check_errors(func: Any, info: Any, name: str, *, is_matrix: bool) -> None:
    """Raise for matrices that a factorization could not factorize. Each rank checks its own block."""
    check_matrices(func, info.local, name, is_matrix)


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
    "detach_": _detached,
    "set_": _set,
    "_has_compatible_shallow_copy_type": _takes_data,
}
#: functions of autograd; `upper` has their handlers, and is set after this module is imported
ENGINE: Final[dict[Any, Callable[[], Handler]]] = {
    torch.autograd.grad: lambda: upper().gradients,
    torch.autograd.backward: lambda: upper().backward,
    make_dual: lambda: upper().dual,
    unpack_dual: lambda: upper().parts,
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


#: names of functions that have a handler, as have all functions whose names begin as `OF_LISTS`
HANDLED: Final = frozenset((*HANDLERS, *_OF_MEMORY, "_linalg_check_errors"))
OF_LISTS: Final = ("_foreach_", "_fused_")


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
    if name.startswith(OF_LISTS):
        return functools.partial(of_lists, func, name)
    if name == "_linalg_check_errors":
        return functools.partial(_check_errors, func)
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
