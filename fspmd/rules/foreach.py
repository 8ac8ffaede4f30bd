"""Functions of lists of tensors: ``torch._foreach_*``, and the fused steps of optimizers, ``torch._fused_*``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError
from fspmd.forms import is_dense
from fspmd.messages import described
from fspmd.redistribution.redistribute import from_blocks
from fspmd.remembered import wrote_all
from fspmd.sharded import Sharded, is_plain, is_sharded, pair
from fspmd.spec import TensorSpec
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
