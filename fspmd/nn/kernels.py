"""Kernels for the attention of queries to one block of keys: which there are, and how they want their operands.

Those of torch take four dims, as many heads of keys as of queries, and values as wide as keys: so heads of keys are
repeated and widths are filled up with zeros. A mask becomes numbers that are added to the scores. On GPUs they round
their results to 16 bits. Parts that are merged are not rounded where there is Triton: `fspmd.nn.triton_attention`.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F

from fspmd.cache import cached
from fspmd.nn.parts import PartialAttention, Triple, wide
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
from fspmd.tracing import hidden

TRIANGLE: Final = "triangle"
#: which query sees which key: a bool for each pair; "triangle": of as many keys as queries, query i sees keys 0 to i;
#: None: all see all
Allowed = Tensor | Literal["triangle"] | None

_GPU = "cuda"
_ROWS: Final = 32  # the lse of the efficient kernel has a multiple of so many rows
_HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
_WIDEST: Final = 256  # heads of the kernels of Triton


class BlockOptions(NamedTuple):
    """Of attention to one block of keys. ``alone``: no other part is merged with it, so 16 bits may round it."""

    allowed: Allowed
    scale: float | None  # None: the default
    alone: bool = False


class Operands(NamedTuple):
    """Of a kernel: [batch, heads, n, width], and a mask or whether it is causal.

    For torch's kernels heads and widths are equal, and the mask is a bias. For Triton's it is bools.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


@dataclass(frozen=True, eq=False)
class Kernel:
    """``run`` gives out and lse; ``run_backward`` takes the gradient of out, out and lse, and gives gradients.

    A kernel that rounds takes and gives them in the dtype of the operands, the others in float32.
    """

    run: Callable[[Operands], tuple[Tensor, Tensor]]
    run_backward: Callable[[Operands, Tensor, Tensor, Tensor], Triple]
    rounds: bool = True


def forward(operands: Triple, options: BlockOptions) -> PartialAttention | None:
    """The part of the keys, in float32 or float64. None: there is no kernel for these operands."""
    if (chosen := _kernel(operands, options)) is None:
        return None
    (kernel, given), (query, _, value), allowed = chosen, operands, options.allowed
    rows, dtype = query.shape[:-1], wide(query)
    out, lse = kernel.run(given)
    out, lse = _narrowed(out, (*rows, value.shape[-1])).to(dtype), lse.reshape(rows).to(dtype)
    if kernel.rounds and isinstance(allowed, Tensor):  # a query that sees no key: torch's kernels differ
        sees = allowed.any(-1)
        out, lse = out.where(sees[..., None], 0), lse.where(sees, -torch.inf)
    return PartialAttention(out, lse)


def backward(out_grad: Tensor, operands: Triple, merged: PartialAttention, options: BlockOptions) -> Triple | None:
    """The gradients that come from these keys, of any dtype. ``merged.lse`` of a query that sees nothing is inf."""
    if (chosen := _kernel(operands, options)) is None:
        return None
    (kernel, given), (query, key, value) = chosen, operands
    shape = given.query.shape
    dtype, width = (given.query.dtype, shape[-1]) if kernel.rounds else (wide(query), value.shape[-1])
    out_grad, out = (_fitting(x, dtype, width) for x in (out_grad, merged.out))
    grads = kernel.run_backward(given, out_grad, out, merged.lse.reshape(shape[:-1]))
    query_grad, key_grad, value_grad = (
        _narrowed(g, (*x.shape[:-3], *g.shape[1:-1], x.shape[-1])) for g, x in zip(grads, operands, strict=True)
    )
    if key_grad.shape[-3] != key.shape[-3]:
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


def _kernel(operands: Triple, options: BlockOptions) -> tuple[Kernel, Operands] | None:
    """A kernel and its operands; None if there is none on the device, for the dtype, or for no queries or no keys."""
    query, key, value = operands
    device, dtype = query.device.type, query.dtype
    if not (query.shape[-2] and key.shape[-2]):
        return None
    if device == _GPU and dtype is not torch.float64:
        unit = 16 // dtype.itemsize
    elif device == "cpu":
        dtype, unit = wide(query), 1
    else:
        return None
    is_exact = unit == 8 and not options.alone and max(query.shape[-1], value.shape[-1]) <= _WIDEST
    if is_exact and cuda.flash_sdp_enabled() and _runs_triton(query.device):
        return EXACT, _operands(operands, options)
    given = _fitted(operands, options, dtype, unit)
    kernel = kernel_for(given)
    return None if kernel is None else (kernel, given)


@cached
def _runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: an NVIDIA GPU since Ampere, for whose memory they are cut.

    To compile them, Triton needs a C compiler and the headers of Python.
    """
    is_old = device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0))
    if is_old or not _HAS_TRITON:
        return False
    try:
        if hidden(_is_right)(device):
            return True
        error = "a result is wrong"
    except Exception as raised:  # from Triton, from its compilers, from the driver
        error = f"{type(raised).__name__}: {raised}"
    warnings.warn(
        f"Triton cannot run its kernels of attention on {device}, so parts are rounded to 16 bits; it needs a C "
        f"compiler and the headers of Python. The reason: {error}",
        stacklevel=2,
    )
    return False


def _is_right(device: torch.device) -> bool:
    """Whether attention of 16 equal queries to the keys up to their own, and its gradients, come out right."""
    ones, shares = torch.ones(1, 1, 16, 16, device=device), 1 / torch.arange(1, 17, device=device)
    halves = ones.half()
    given = Operands(halves, halves, halves, None, True, 1.0)
    out, lse = EXACT.run(given)
    query_grad, key_grad, value_grad = EXACT.run_backward(given, ones, out, lse)
    wanted = shares.flip(0).cumsum(0).flip(0)[:, None].expand(16, 16)
    pairs = (out, ones), (lse, 16 - shares.log()), (query_grad, 0 * ones), (key_grad, 0 * ones), (value_grad, wanted)
    return all(bool(torch.isclose(x, y, rtol=1e-2, atol=1e-2).all()) for x, y in pairs)


def _operands(operands: Triple, options: BlockOptions) -> Operands:
    """As they are, in four dims."""
    (query, key, _), allowed, mask = operands, options.allowed, None
    if isinstance(allowed, Tensor):
        shape = query.shape[-2], key.shape[-2]
        mask = allowed.expand(*query.shape[:-3], 1, *shape).reshape(-1, 1, *shape)
    query, key, value = (_fitting(x, x.dtype, x.shape[-1]) for x in operands)
    return Operands(query, key, value, mask, isinstance(allowed, str), scale_of(query, options.scale))


def _fitted(operands: Triple, options: BlockOptions, dtype: torch.dtype, unit: int) -> Operands:
    """For torch's kernels: of a dtype, of equal heads and widths, which are a multiple of ``unit``, and with a bias."""
    query, key, value = operands
    if scale_of(query, options.scale) <= 0:  # of causal calls the CPU's kernel makes NaN
        options = options._replace(allowed=mask_of(options.allowed, query, key))
    width, heads = max(query.shape[-1], value.shape[-1]), query.shape[-3]
    width += -width % unit
    query, key, value, bias, causal, scale = _operands(operands, options)
    if bias is not None:
        columns = key.shape[-2]
        bias = torch.where(bias, 0.0, -torch.inf).to(dtype)
        if unit > 1:  # of all heads, with rows that begin at multiples of 16 numbers
            bias = F.pad(bias, (0, -columns % 16))[..., :columns].expand(-1, heads, -1, -1)
    if heads != key.shape[1]:
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    query, key, value = (_fitting(x, dtype, width) for x in (query, key, value))
    return Operands(query, key, value, bias, causal, scale)


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
    out, lse = aten_cpu_attention(*x[:3], 0.0, x.causal, attn_mask=x.mask, scale=x.scale)
    return out, lse


def _cpu_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    return aten_cpu_attention_backward(out_grad, *x[:3], out, lse, 0.0, x.causal, attn_mask=x.mask, scale=x.scale)


def _cudnn(x: Operands) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten_cudnn_attention(*x[:4], True, 0.0, x.causal, scale=x.scale)
    return out, lse


def _cudnn_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    seeds = _unused(x, torch.int64), _unused(x, torch.int64)
    lengths = None, None, x.query.shape[-2], x.key.shape[-2]  # equal in the batch
    return aten_cudnn_attention_backward(
        out_grad, *x[:3], out, lse[..., None].contiguous(), *seeds, x.mask, *lengths, 0.0, x.causal, scale=x.scale
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
    grads = aten_efficient_attention_backward(out_grad, *x[:4], out, lse, *seeds, 0.0, wanted, x.causal, scale=x.scale)
    return grads[:3]


def _exact(x: Operands) -> tuple[Tensor, Tensor]:
    from fspmd.nn import triton_attention

    out, lse = triton_attention.attention(*x)
    return out, lse


def _exact_backward(x: Operands, out_grad: Tensor, out: Tensor, lse: Tensor) -> Any:
    from fspmd.nn import triton_attention

    drop, lse = (out_grad * out).sum(-1).contiguous(), lse.contiguous()
    out_grad = _fitting(out_grad, x.query.dtype, out.shape[-1])
    return triton_attention.attention_backward(out_grad, *x[:3], drop, lse, *x[3:])


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
#: 16 bits, with float32 results, if there is Triton
EXACT: Final = Kernel(_exact, _exact_backward, rounds=False)


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
