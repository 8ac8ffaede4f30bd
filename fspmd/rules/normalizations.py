"""Normalization layers as calls of other functions: over the batch, over groups of channels, over each channel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F

from fspmd.entries import entry_axes
from fspmd.redistribution.redistribute import to_blocks
from fspmd.sharded import Sharded, call_torch
from fspmd.spec import P, TensorSpec


def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``F.batch_norm`` by the moments over all dims but the channels. The running moments keep their layout."""
    return _normed(x, running_mean, running_var, weight, bias, training, momentum, eps)[0]


def _normed(
    x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Return the result, and the mean and variance that normalise it.

    The mean is subtracted as a constant of its value; the difference, which is zero, is a part of the bias. For a
    sharded batch backward then sums two gradients per channel (of scale and shift) in place of three.
    """
    if not x.numel():
        out = x.clone() if weight is None else x * weight[0]
        return (out if bias is None else out + bias[0]), running_mean, running_var
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean, var = running_mean, running_var
    if training:
        _check_batch(x.shape)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(wide, dims, correction=0)
        count = x.numel() // x.size(1)
        for running, new in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
            if running is not None:
                with torch.no_grad():
                    running.mul_(1 - momentum).add_((new.detach() * momentum).to(running.dtype))
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
    constant = mean.detach()
    shift = bias
    if training:
        difference = (mean - constant) * scale
        shift = -difference if bias is None else bias - difference
    out = (wide - constant.view(shape)) * scale.view(shape)
    return (out if shift is None else out + shift.view(shape)).to(x.dtype), mean, var


def _check_batch(shape: tuple[int, ...]) -> None:
    """Raise torch's error for one value per channel, which has no variance."""
    if math.prod(shape) == shape[1]:
        F.batch_norm(torch.empty(shape, device="meta"), None, None, training=True)


def _group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """``F.group_norm`` as a layer norm of each group. If blocks cut groups, it needs two all-reduces per group."""
    if x.dim() < 2 or x.size(1) % num_groups:
        raise RuntimeError(f"Expected channels that divide into {num_groups} groups, but got {tuple(x.shape)}")
    _check_batch((x.size(0) * x.size(1) // num_groups, num_groups, *x.shape[2:]))
    if _cuts_groups(x, num_groups):
        out = _normed_groups(x, num_groups, eps)
    else:
        grouped = x.unflatten(1, (num_groups, x.size(1) // num_groups))
        out = F.layer_norm(grouped, tuple(grouped.shape[2:]), eps=eps).flatten(1, 2)
    return _per_channel(out, weight, bias)


def _cuts_groups(x: Any, groups: int) -> bool:
    if not isinstance(x, Sharded) or x.spec.flat:
        return False
    return groups % math.prod(x.spec.mesh.shape[axis] for axis in entry_axes(x.spec.partition[1])) > 0


def _normed_groups(x: Any, groups: int, eps: float) -> Any:
    """Normalise groups without moving channels: the sums of groups are pending, and each channel looks up its group."""
    size, space = x.size(1) // groups, tuple(range(2, x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    lies = TensorSpec(x.spec.mesh, P(x.spec.partition[1]), (x.size(1),), torch.int64)
    group_of = Sharded(to_blocks(torch.arange(x.size(1), device=x.device) // size, lies), lies)
    count = size * math.prod(x.shape[2:])

    def mean(values: Any) -> Any:
        sums = values.sum(space) if space else values
        means = call_torch(sums_of_groups, (sums, group_of, groups)) / count
        return means.index_select(1, group_of).view(*sums.shape, *(1,) * len(space))

    wide = wide - mean(wide)
    return (wide * torch.rsqrt(mean(wide * wide) + eps)).to(x.dtype)


def sums_of_groups(x: Any, group_of: Any, groups: int) -> Any:
    """Sum the channels of each group: x ``[n, c]``, the group of each channel ``[c]`` -> ``[n, groups]``."""
    return x.new_zeros(x.size(0), groups).index_add(1, group_of, x)


def _per_channel(x: Any, weight: Any, bias: Any) -> Any:
    shape = (1, -1, *(1,) * (x.dim() - 2))
    out = x if weight is None else x * weight.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.dtype)


def _instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``F.instance_norm`` as a layer norm of each channel of each sample. Running moments are means over the batch."""
    if not use_input_stats:
        return _batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    if math.prod(x.shape[2:]) == 1:
        F.instance_norm(torch.empty(x.shape, device="meta"))  # raises what torch does
    if running_mean is not None or running_var is not None:
        with torch.no_grad():
            var, mean = torch.var_mean(x.detach(), tuple(range(2, x.dim())))
            for running, new in ((running_mean, mean), (running_var, var)):
                if running is not None:
                    running.mul_(1 - momentum).add_((new.mean(0) * momentum).to(running.dtype))
    return _per_channel(F.layer_norm(x, tuple(x.shape[2:]), eps=eps), weight, bias)


def _by_place(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return a norm for ``torch.batch_norm`` or ``torch.instance_norm``, whose arguments are in another order."""
    return lambda x, weight, bias, mean, var, flag, momentum, eps, _: norm(
        x, mean, var, weight, bias, flag, momentum, eps
    )


def _norm_and_moments(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    """``native_batch_norm``: the result, and in training the mean and reciprocal deviation, which get no gradient."""
    out, mean, var = _normed(x, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, var = mean.detach(), var.detach()
    return (out, mean, torch.rsqrt(var + eps)) if training else (out, x.new_empty((0,)), x.new_empty((0,)))


def _legit_norm(x: Any, weight: Any, bias: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """``_native_batch_norm_legit``, which torch calls without arguments for running moments if there are none."""
    missing = () if len(args) + len(kwargs) > 3 else (None, None)
    return _norm_and_moments(x, weight, bias, *missing, *args, **kwargs)


def _norm_with_update(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, Any, Any, Any]:
    """``_batch_norm_with_update``, whose last result is an empty buffer."""
    results = _norm_and_moments(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*results, x.new_empty((0,), dtype=torch.uint8))


#: torch function, or name of functions -> composite
NORMALIZATIONS: Final[dict[Any, Callable[..., Any]]] = {
    F.batch_norm: _batch_norm,
    torch.batch_norm: _by_place(_batch_norm),
    "group_norm": _group_norm,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _by_place(_instance_norm),
    "native_batch_norm": _norm_and_moments,
    "_native_batch_norm_legit": _legit_norm,
    "_batch_norm_with_update": _norm_with_update,
}
