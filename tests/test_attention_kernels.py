"""How attention calls the kernels that torch has for GPUs. They stand here as their definitions, on the CPU.

Each definition refuses operands that its kernel refuses, and gives what its kernel gives beyond the definition.
`device_programs` runs the same programs with the kernels, on a GPU.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import device_programs
import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fspmd.nn import kernels, triton_attention


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """For a query that sees no key, NaN and an lse of 0."""
    scores = _scores(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.where(lse != -math.inf, 0).float()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Any, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, bias, causal, scale) - lse[..., None].double()).exp()
    grad, out = grad.double(), out.double()
    scores_grad = weights * (grad @ v.double().mT - (grad * out).sum(-1, keepdim=True)) * scale
    return (
        (scores_grad @ k.double()).to(q.dtype),
        (scores_grad.mT @ q.double()).to(k.dtype),
        (weights.mT @ grad).to(v.dtype),
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, scale: float) -> Any:
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert not q.shape[-1] % 8
    assert dropout == 0
    repeats = q.shape[1] // k.shape[1]
    out, lse = _forward(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), None, causal, scale)
    none = torch.empty(0, dtype=torch.int32)
    seeds = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out, lse, none, none, q.shape[2], k.shape[2], *seeds, none


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> Any:
    *_, rows, columns, dropout, causal, seed, offset = rest
    assert (rows, columns, dropout) == (q.shape[2], k.shape[2], 0)
    assert seed.dtype == offset.dtype == torch.uint64
    assert lse.dtype is torch.float32
    assert lse.is_contiguous()
    assert {x.dtype for x in (grad, q, k, v, out)} == {q.dtype}
    repeats = q.shape[1] // k.shape[1]
    wide = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    grads = _backward(grad, q, *wide, out, lse, None, causal, scale)
    return grads[0], *(x.unflatten(1, (-1, repeats)).sum(2) for x in grads[1:])


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float,
) -> Any:
    _check(q, k, v, bias)
    out, totals = _forward(q, k, v, bias, causal, scale)
    seeds = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, torch.nn.functional.pad(totals, (0, -q.shape[2] % 32), value=math.inf), *seeds


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> Any:
    *_, dropout, wanted, causal = rest if isinstance(rest[-1], bool) else (*rest, False)
    _check(q, k, v, bias)
    assert not lse.shape[-1] % 32
    assert lse.is_contiguous()
    assert out.transpose(1, 2).is_contiguous()
    assert (dropout, list(wanted)) == (0, [True, True, True, False])
    assert {x.dtype for x in (grad, q, k, v, out)} == {q.dtype}
    grads = _backward(grad, q, k, v, out, lse[..., : q.shape[2]], bias, causal, scale)
    return *grads, torch.empty(0)


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    assert q.dtype is not torch.float64
    assert q.shape[1] == k.shape[1] == v.shape[1]
    for x in (q, k, v):
        assert not x.shape[-1] * x.dtype.itemsize % 16
        assert x.stride(-1) == 1
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype is q.dtype
        assert not bias.stride(2) % 16


def _cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> Any:
    _check(q, k, v, bias)
    assert (lse, dropout) == (True, 0)
    out, totals = _forward(q, k, v, bias, causal, scale)
    seeds = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
    return out, totals[..., None], None, None, q.shape[2], k.shape[2], *seeds, None


def _cudnn_backward(*given: Any, scale: float) -> Any:
    grad, q, k, v, out, lse, _, _, bias, _, _, rows, columns, dropout, causal = given
    _check(q, k, v, bias)
    assert lse.shape == (*q.shape[:3], 1)
    assert (rows, columns, dropout) == (q.shape[2], k.shape[2], 0)
    return _backward(grad, q, k, v, out, lse[..., 0], bias, causal, scale)


KERNELS = {
    "FLASH": ("_scaled_dot_product_flash_attention", _flash, _flash_backward),
    "EFFICIENT": ("_scaled_dot_product_efficient_attention", _efficient, _efficient_backward),
    "CUDNN": ("_scaled_dot_product_cudnn_attention", _cudnn, _cudnn_backward),
}


@pytest.fixture(params=KERNELS)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of GPUs as if the CPU had them, which takes `EFFICIENT` for what another one lacks."""
    library = torch.library.Library("aten", "IMPL")
    for name, run, run_backward in KERNELS.values():
        library.impl(name, run, "CPU")
        library.impl(f"{name}_backward", run_backward, "CPU")

    def kernel_for(given: kernels.Operands) -> kernels.Kernel:
        if given.query.dtype is torch.float64:
            return kernels.CPU
        is_wide = given.query.dtype is torch.float32 or given.query.shape[-1] > 256
        is_wide |= given.mask is not None and request.param == "FLASH"
        return kernels.EFFICIENT if is_wide else getattr(kernels, request.param)

    monkeypatch.setattr(kernels, "kernel_for", kernel_for)
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    monkeypatch.setattr(kernels, "_GPU", "cpu")
    yield
    library._destroy()


@pytest.mark.usefixtures("on_the_cpu")
def test_kernels_of_gpus_are_called_as_they_are_defined() -> None:
    device_programs.attention_kernels("cpu")


@pytest.mark.usefixtures("on_the_cpu")
def test_sequences_with_kernels_of_gpus() -> None:
    """They round parts to 16 bits."""
    device_programs.sequences_in_16_bits("cpu", 1.42)


# ------------------------------------------------------------------------------------------- kernels written in Triton


@pytest.mark.parametrize("program", ["kernels", "ring", "gathered", "ulysses"])
def test_kernels_in_triton_are_exact(program: str) -> None:
    """In Triton's interpreter: beside the definition; and 8 ranks beside one, in 16 bits."""
    command = [sys.executable, str(Path(__file__).parent / "triton_programs.py"), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class _NoGPU:
    """What Triton asks of a GPU before it launches a kernel."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.one_of(15)
@pytest.mark.parametrize("masked", ["no", "causal", "some"])
@pytest.mark.parametrize("width", [16, 40, 64, 128, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
def test_kernels_in_triton_fit_into_gpus(
    arch: int, dtype: torch.dtype, width: int, masked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles them without a GPU. A program has at most the 99 KiB on the chip that GPUs of each kind have."""
    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiled.append(launch(self, *args, warmup=True, **options))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", _NoGPU(arch))
    q, k = (torch.zeros(2, heads, 100, width, dtype=dtype) for heads in (4, 2))
    options = torch.ones(2, 1, 100, 100).bool() if masked == "some" else None, masked == "causal", 0.1
    _, lse = triton_attention.attention(q, k, k, *options)
    triton_attention.attention_backward(q, q, k, k, lse, lse, *options)
    assert len(compiled) == 3
    for kernel in compiled:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 99 * 1024, kernel.metadata
