"""torch's kernels for the attention of queries to one block of keys: which there are, and how they want their operands.

They take four dims, as many heads of keys as of queries, and values as wide as keys: so heads of keys are repeated and
widths are filled up with zeros. A mask becomes numbers that are added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F

from fspmd.nn.parts import PartialAttention, wide
from fspmd.torch_internals import (
    aten_cpu_attention,
    aten_cpu_attention_backward,
    aten_cudnn_attention,
    aten_cudnn_attention_backward,
    aten_efficient_attention,
    aten_efficient_attention_backward,
    aten_flash_attention,
    aten_flash_attention_backward,
)

TRIANGLE: Final = "triangle"
#: which query sees which key: a bool for each pair; "triangle": of as many keys as queries, query i sees keys 0 to i;
#: None: all see all
Allowed = Tensor | Literal["triangle"] | None
Grads = tuple[Tensor, Tensor, Tensor]

_GPU = "cuda"
_ROWS: Final = 32  # the lse of the efficient kernel has a multiple of so many rows


class Operands(NamedTuple):
    """Of a kernel: [batch, heads, n, width], with equal heads and equal widths, and a bias or whether it is causal."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


@dataclass(frozen=True, eq=False)
class Kernel:
    """``run`` gives out and lse; ``run_backward`` takes the gradient of out, out and lse, and gives gradients."""

    run: Callable[[Operands], tuple[Tensor, Tensor]]
    run_backward: Callable[[Operands, Tensor, Tensor, Tensor], Grads]


def forward(
    query: Tensor, key: Tensor, value: Tensor, allowed: Allowed, scale: float | None
) -> PartialAttention | None:
    """The part of the keys, in float32 or float64. None: torch has no kernel for these operands."""
    given = _operands(query, key, value, allowed, scale)
    if given is None or (kernel := kernel_for(given)) is None:
        return None
    rows, dtype = query.shape[:-1], wide(query)
    out, lse = kernel.run(given)
    out, lse = _narrowed(out, (*rows, value.shape[-1])).to(dtype), lse.reshape(rows).to(dtype)
    if isinstance(allowed, Tensor):  # what a kernel gives to a query that sees no key differs from kernel to kernel
        sees = allowed.any(-1)
        out, lse = out.where(sees[..., None], 0), lse.where(sees, -torch.inf)
    return PartialAttention(out, lse)


def backward(
    out_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    allowed: Allowed,
    scale: float | None,
) -> Grads | None:
    """The gradients that come from these keys, of any dtype. ``whole.lse`` of a query that sees nothing is inf."""
    given = _operands(query, key, value, allowed, scale)
    if given is None or (kernel := kernel_for(given)) is None:
        return None
    shape = given.query.shape
    out_grad, out = (_fitting(x, given.query.dtype, shape[-1]) for x in (out_grad, whole.out))
    found = kernel.run_backward(given, out_grad, out, whole.lse.reshape(shape[:-1]))
    query_grad, key_grad, value_grad = (
        _narrowed(g, (*x.shape[:-3], shape[-3], *x.shape[-2:])) for g, x in zip(found, (query, key, value), strict=True)
    )
    if shape[-3] != key.shape[-3]:
        groups, dtype = (key.shape[-3], -1), wide(key)
        key_grad, value_grad = (g.unflatten(-3, groups).sum(-3, dtype=dtype) for g in (key_grad, value_grad))
    return query_grad, key_grad, value_grad


def scale_of(query: Tensor, scale: float | None) -> float:
    """The scale of the scores."""
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def mask_of(allowed: Allowed, query: Tensor, key: Tensor) -> Tensor | None:
    """Who sees whom as bools; None if all see all."""
    if isinstance(allowed, str):
        return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return allowed


def _operands(query: Tensor, key: Tensor, value: Tensor, allowed: Allowed, scale: float | None) -> Operands | None:
    """The operands of a kernel; None if there is none on the device, for the dtype, or for no queries or no keys."""
    device, dtype, heads = query.device.type, query.dtype, query.shape[-3]
    if not (query.shape[-2] and key.shape[-2]):
        return None
    if device == _GPU and dtype is not torch.float64:
        unit = 16 // dtype.itemsize
    elif device == "cpu":
        dtype, unit = wide(query), 1
    else:
        return None
    scale, width = scale_of(query, scale), max(query.shape[-1], value.shape[-1])
    width += -width % unit
    rows, columns = query.shape[-2], key.shape[-2]
    if scale <= 0:  # of causal calls the CPU's kernel makes NaN
        allowed = mask_of(allowed, query, key)
    bias = None
    if isinstance(allowed, Tensor):
        bias = torch.where(allowed, 0.0, -torch.inf).to(dtype)
        bias = bias.expand(*query.shape[:-3], 1, rows, columns).reshape(-1, 1, rows, columns)
        if unit > 1:  # of all heads, with rows that begin at multiples of 16 numbers
            bias = F.pad(bias, (0, -columns % 16))[..., :columns].expand(-1, heads, -1, -1)
    if heads != key.shape[-3]:
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    query, key, value = (_fitting(x, dtype, width) for x in (query, key, value))
    return Operands(query, key, value, bias, isinstance(allowed, str), scale)


def _fitting(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """[..., heads, n, m] as [batch, heads, n, width], with zeros up to the width, and dense rows."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def _narrowed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What `_fitting` was given the shape of."""
    return x if x.shape == shape else x[..., : shape[-1]].reshape(shape)


# --- the kernels ----------------------------------------------------------------------------------------------------


def _cpu(x: Operands) -> tuple[Tensor, Tensor]:
    out, lse = aten_cpu_attention(*x[:3], 0.0, x.causal, attn_mask=x.bias, scale=x.scale)
    return out, lse


def _cpu_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    return aten_cpu_attention_backward(out_grad, *x[:3], out, lse, 0.0, x.causal, attn_mask=x.bias, scale=x.scale)


def _cudnn(x: Operands) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten_cudnn_attention(*x[:4], True, 0.0, x.causal, scale=x.scale)
    return out, lse


def _cudnn_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    seeds = _unused(x, torch.int64), _unused(x, torch.int64)
    lengths = None, None, x.query.shape[-2], x.key.shape[-2]  # equal in the batch
    return aten_cudnn_attention_backward(
        out_grad, *x[:3], out, lse[..., None].contiguous(), *seeds, x.bias, *lengths, 0.0, x.causal, scale=x.scale
    )


def _flash(x: Operands) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten_flash_attention(*x[:3], 0.0, x.causal, scale=x.scale)
    return out, lse


def _flash_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    seeds = _unused(x, torch.uint64, 2), _unused(x, torch.uint64)
    lengths = None, None, x.query.shape[-2], x.key.shape[-2]  # equal in the batch
    return aten_flash_attention_backward(
        out_grad, *x[:3], out, lse.contiguous(), *lengths, 0.0, x.causal, *seeds, scale=x.scale
    )


def _efficient(x: Operands) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten_efficient_attention(*x[:4], True, 0.0, x.causal, scale=x.scale)
    return out, lse[..., : x.query.shape[-2]]


def _efficient_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    lse = F.pad(lse, (0, -lse.shape[-1] % _ROWS), value=torch.inf).contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes out for laid as its own
    seeds, wanted = (_unused(x, torch.int64), _unused(x, torch.int64)), [True, True, True, False]
    found = aten_efficient_attention_backward(out_grad, *x[:4], out, lse, *seeds, 0.0, wanted, x.causal, scale=x.scale)
    return found[:3]


def _unused(x: Operands, dtype: torch.dtype, *shape: int) -> Tensor:
    """The state of random numbers, which attention without dropout does not read."""
    return torch.empty(shape, dtype=dtype, device=x.query.device)


#: The CPU's kernel takes rows for dense whatever their stride, ends the process for no keys, gives a query that sees no
#: key the lse 0, and gives NaN in causal calls whose scale is not positive.
CPU: Final = Kernel(_cpu, _cpu_backward)
#: 16 bits; twice as fast as `FLASH` on an H200
CUDNN: Final = Kernel(_cudnn, _cudnn_backward)
#: 16 bits without a bias (Dao, "FlashAttention-2", 2023)
FLASH: Final = Kernel(_flash, _flash_backward)
#: 16 and 32 bits (Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021)
EFFICIENT: Final = Kernel(_efficient, _efficient_backward)


def kernel_for(given: Operands) -> Kernel | None:
    """The fastest kernel that torch has for operands, and that the user has not turned off."""
    device = given.query.device
    if device.type == "cpu":
        return CPU
    asked = cuda.SDPAParams(*given[:4], 0.0, given.causal, False)
    is_hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    if is_hopper and cuda.can_use_cudnn_attention(asked):
        return CUDNN
    if cuda.can_use_flash_attention(asked):
        return FLASH
    return EFFICIENT if cuda.can_use_efficient_attention(asked) else None
