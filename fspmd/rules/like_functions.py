"""New values from a `Sharded`: ``zeros_like(x)`` and related functions. Results lie as x does, without pending sums.

``x.new_zeros(size)`` lies so too if it has the size of x. Otherwise it is whole on every rank.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.random.blocks import Law, drawn, fill
from fspmd.random.distributions import integers, normal, uniform
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded, alike
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import DisableTorchFunction

Handler = Callable[..., Any]
#: a `Sharded`: type checkers do not know that it has the methods of a tensor
Value = Any


def settled(spec: TensorSpec, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return a spec that is neither unreduced nor reduced, in another dtype if given."""
    partition = spec.partition
    if not partition.unreduced and not partition.reduced and dtype in (None, spec.dtype):
        return spec
    return TensorSpec(spec.mesh, P(*partition), spec.shape, dtype or spec.dtype)


def settle(x: Sharded) -> Value:
    """Return a value with its pending sums settled, and not reduced."""
    spec = settled(x.spec)
    return x if spec is x.spec else alike(redistribute(x.local, x.spec, spec), x, spec)


def drawn_like(
    x: Sharded,
    law: Law,
    then: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Value:
    """Draw random elements in the layout of ``x``."""
    return drawn(settled(x.spec, dtype), law, x.device, then, generator)


def _device(x: Sharded, options: dict[str, Any]) -> torch.device:
    """Return the device of a new value: that of x, or the meta device.

    Raises:
        ArgumentError: ``options`` name another device, on which the mesh does not communicate.
    """
    if options.get("device") is None:
        return x.device
    device = torch.device(options["device"])
    if device.type == "meta" or (device.type == x.device.type and device.index in (None, x.device.index)):
        return device
    raise ArgumentError(
        f"a new value like {x!r} would be on {str(device)!r}, but its mesh communicates on {str(x.device)!r}; leave "
        f"device= out, or make a plain tensor: torch.empty(x.shape, device={str(device)!r})"
    )


def _filled(function: Callable[..., Tensor], spec: TensorSpec, device: torch.device, *args: Any) -> Sharded:
    return fill(spec, lambda block: function(block.shape, *args, dtype=spec.dtype, device=device), device)


def _like(function: Callable[..., Tensor], x: Sharded, *args: Any, **options: Any) -> Sharded:
    """Return ``function`` of the block of ``x``, or of an empty block of its shape if ``x`` is unreduced or reduced."""
    spec = settled(x.spec, options.get("dtype"))
    like = x if spec.partition is x.spec.partition else _filled(torch.empty, spec, x.device)
    device = _device(x, options)
    options = {key: value for key, value in options.items() if key in ("fill_value", "requires_grad")}
    if device.type != x.device.type:
        options["device"] = device
    if "fill_value" in options:
        args = (options.pop("fill_value"),)
    numbers = (value.item() if isinstance(value, Sharded) else value for value in args)
    return Sharded(function(like.local.detach(), *numbers, dtype=spec.dtype, **options), spec)


def _new(function: Callable[..., Tensor], x: Sharded, *size: Any, **options: Any) -> Sharded:
    if "size" in options:
        size = (options["size"], *size)
    shape, args = (size[0], size[1:]) if isinstance(size[0], (tuple, list)) else (size, ())
    new_shape = tuple([operator.index(n) if hasattr(n, "__index__") else n for n in shape])  # NumPy's, or a tensor
    partition = P(*x.spec.partition) if new_shape == x.shape else P()
    spec = TensorSpec(x.spec.mesh, partition, new_shape, options.get("dtype") or x.dtype)
    value = [options["fill_value"]] if "fill_value" in options else args
    made = _filled(function, spec, _device(x, options), *value)
    return made.requires_grad_() if options.get("requires_grad") else made


def _new_strided(x: Sharded, size: Sequence[int], _: Sequence[int], **options: Any) -> Sharded:
    """``x.new_empty_strided``. Strides are ignored: they are about the memory of the global tensor."""
    return _new(torch.empty, x, size, **options)


def _new_by_type(x: Sharded, *args: Any, **options: Any) -> Sharded:
    """``x.new(2, 3)`` or ``x.new(size)``, as torch.distributions call it; with other data a new tensor."""
    by_size = all(type(arg) is int for arg in args) or isinstance(args[0], torch.Size)
    return _new(torch.empty, x, *(args or (0,)), **options) if by_size else _new_tensor(x, *args, **options)


def _new_tensor(x: Sharded, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Sharded:
    with DisableTorchFunction():
        made = torch.tensor(data, dtype=dtype or x.dtype, device=_device(x, options))
    if isinstance(made, Sharded):  # a copy of a Sharded keeps its layout
        return made.requires_grad_() if options.get("requires_grad") else made
    value = Sharded(made, TensorSpec(x.spec.mesh, P(), tuple(made.shape), made.dtype))
    return value.requires_grad_() if options.get("requires_grad") else value


def _random_like(law: Law, x: Sharded, *, generator: torch.Generator | None = None, **options: Any) -> Value:
    if _device(x, options).type != x.device.type:
        return _like(torch.empty_like, x, **options)  # nothing is drawn for values without data
    made = drawn_like(x, law, None, options.get("dtype"), generator)
    return made.requires_grad_() if options.get("requires_grad") else made


def _randint_like(x: Sharded, *bounds: int, **options: Any) -> Value:
    bounds = (*bounds, *(options.pop(name) for name in ("low", "high") if name in options))
    low, high = (0, *bounds)[-2:]
    return _random_like(lambda dtype: integers(low, high, _integral(dtype)), x, **options)


def _integral(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype.is_floating_point else dtype


LIKES: Final[dict[str, Handler]] = {
    "zeros_like": functools.partial(_like, torch.zeros_like),
    "ones_like": functools.partial(_like, torch.ones_like),
    "empty_like": functools.partial(_like, torch.empty_like),
    "full_like": functools.partial(_like, torch.full_like),
    **{f"new_{f.__name__}": functools.partial(_new, f) for f in (torch.zeros, torch.ones, torch.empty, torch.full)},
    "new_empty_strided": _new_strided,
    "new_tensor": _new_tensor,
    "new": _new_by_type,
    "rand_like": functools.partial(_random_like, uniform),
    "randn_like": functools.partial(_random_like, normal),
    "randint_like": _randint_like,
}
