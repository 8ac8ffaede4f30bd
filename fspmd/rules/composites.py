"""Functions written in terms of others, where the graph that torch would trace is not the best one, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F


def _unchunked(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """``options`` only bear on how a whole loss is computed in parts."""
    return F.linear_cross_entropy(*args, **kwargs)


def _dist(x: Any, y: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(x - y, p)


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
    """By moments over all dims but the channels'; the running ones are written where they lie."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean, var = running_mean, running_var
    if training:
        F._verify_batch_size(x.size())  # type: ignore[attr-defined]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean, var = wide.mean(dims), wide.var(dims, correction=0)
        count = x.numel() // x.size(1)
        for running, new in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
            if running is not None:
                with torch.no_grad():
                    running.mul_(1 - momentum).add_((new.detach() * momentum).to(running.dtype))
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
    out = (wide - mean.view(shape)) * scale.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.dtype)


def _torch_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    _: bool,
) -> Any:
    """The same, its arguments in another order."""
    return _batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


#: by torch function, or by the name of all that have it
COMPOSITES: Final[dict[Any, Callable[..., Any]]] = {
    F.batch_norm: _batch_norm,
    torch.batch_norm: _torch_batch_norm,
    "dist": _dist,
    "linear_cross_entropy": _unchunked,
}
