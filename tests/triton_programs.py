"""Runs programs of `device_programs` on the CPU, with the kernels that are written in Triton in Triton's interpreter.

A process of its own, since Triton reads when it is imported whether it interprets.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

os.environ["TRITON_INTERPRET"] = "1"

import device_programs
import numpy as np
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

from fspmd import nn
from fspmd.nn import kernels


def _float32(x: Any) -> Any:
    if x.dtype == tl.bfloat16:
        return interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return x.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
    """The interpreter's own takes the bits of bfloat16 for whole numbers."""
    return interpreter.TensorHandle(_float32(a) @ _float32(b) + total.data, total.dtype.scalar)


def _rounded(given: kernels.Operands) -> kernels.Kernel:
    """In the place of torch's kernels: the same products, and results of 16 bits."""
    if given.query.dtype not in (torch.bfloat16, torch.float16) or given.query.shape[-1] > 256:
        return kernels.CPU

    def by_bools(x: kernels.Operands) -> kernels.Operands:
        return x if x.mask is None else x._replace(mask=x.mask[:, :1] == 0)

    def run(x: kernels.Operands) -> Any:
        out, lse = kernels.EXACT.run(by_bools(x))
        return out.to(x.query.dtype), lse

    def run_backward(x: kernels.Operands, *given: Tensor) -> Any:
        out_grad, out, lse = given
        grads = kernels.EXACT.run_backward(by_bools(x), out_grad.float(), out.float(), lse)
        return tuple(g.to(x.query.dtype) for g in grads)

    return kernels.Kernel(run, run_backward)


def _precision(way: Any, heads: int) -> None:
    device_programs.sequences_in_16_bits("cpu", length=256, ways=[way], heads=heads, jitted=False)


PROGRAMS: Final = {
    "kernels": lambda: device_programs.attention_kernels("cpu"),
    "ring": lambda: _precision(nn.ring_attention, 2),
    "gathered": lambda: _precision(nn.gathered_attention, 2),
    "ulysses": lambda: _precision(nn.ulysses_attention, 8),
}

if __name__ == "__main__":
    interpreter.InterpreterBuilder.create_dot = _dot
    kernels._GPU, kernels.kernel_for = "cpu", _rounded
    PROGRAMS[sys.argv[1]]()
