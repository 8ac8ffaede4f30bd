"""What kernels allocate while they run, by the formulas, beside what torch's profiler sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from full import FULL, sample
from measured_peaks import beside_results, bytes_of, peak
from torch import Tensor, fx
from torch.nn import functional as F

from fspmd import grad, jit, value_and_grad
from fspmd.nn import KVCache, adamw, cached_attention
from fspmd.programs.memory import memory_of_program, scratch_of
from fspmd.programs.program import Value
from fspmd.torch_internals import has_bfloat16_products

aten = torch.ops.aten
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
Make = Callable[..., Tensor]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _predicted(target: Any, args: Any, device: str = "cpu") -> int:
    """What the formula says of a call."""
    graph = fx.Graph()

    def node(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = graph.placeholder("x")
        strides = None if x.is_contiguous() else x.stride()
        made.meta.update(value=Value(tuple(x.shape), x.dtype), strides=strides, device=torch.device(device))
        return made

    step = graph.call_function(target, tuple(map(node, args)))
    step.meta["device"] = torch.device(device)
    return scratch_of(step)


# ------------------------------------------------------------------------------------------------------- attention

#: batch, heads, queries, keys, width
ATTENTION = [
    (1, 2, 64, 64, 16),
    (2, 4, 512, 512, 64),
    (1, 4, 800, 900, 64),
    (3, 2, 1, 100, 32),
    (2, 2, 200, 50, 15),
    (1, 2, 150, 700, 40),
    (4, 1, 33, 33, 24),
    (1, 3, 192, 191, 8),
    (2, 2, 767, 768, 16),
]


def _heads(size: tuple[int, ...], dtype: torch.dtype, by_positions: bool) -> list[Tensor]:
    batch, heads, queries, keys, width = size
    if by_positions:
        return [torch.randn(batch, n, heads, width, dtype=dtype).transpose(1, 2) for n in (queries, keys, keys)]
    return [torch.randn(batch, heads, n, width, dtype=dtype) for n in (queries, keys, keys)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_positions", [False, True], ids=["by heads", "by positions"])
def test_attention(dtype: str, by_positions: bool, threads: int) -> None:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    with _threads(threads):
        for size in ATTENTION if FULL else ATTENTION[: 4 if threads == 1 else 1]:
            q, k, v = _heads(size, DTYPES[dtype], by_positions)
            assert _predicted(forward, (q, k, v, 0.0, False)) == beside_results(forward, q, k, v, 0.0, False)
            out, lse = forward(q, k, v, 0.0, False)
            args = torch.randn_like(out), q, k, v, out, lse, 0.0, False
            whole = bytes_of(args)  # what a percent is of
            predicted, found = _predicted(backward, args), beside_results(backward, *args)
            slack = max(0.1 * found, 4096 * threads) if dtype == "bf16" else 4096
            assert abs(predicted - found) <= max(slack, 0.01 * whole), (size, predicted, found)


# -------------------------------------------------------------------------------------------------- other kernels


def _matrix(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, dtype=dtype)


CALLS: dict[str, tuple[Any, Callable[[Make], tuple[Any, ...]]]] = {
    "mm": (aten.mm.default, lambda m: (m(256, 512), m(512, 384))),
    "mm of few rows": (aten.mm.default, lambda m: (m(4, 512), m(512, 384))),
    "mm of one row": (aten.mm.default, lambda m: (m(1, 64), m(64, 64))),
    "mm of a transposed weight": (aten.mm.default, lambda m: (m(256, 512), m(384, 512).t())),
    "mm of a transposed value": (aten.mm.default, lambda m: (m(64, 64).t(), m(64, 64))),
    "mm of every second column": (aten.mm.default, lambda m: (m(256, 256)[:, ::2], m(128, 64))),
    "addmm": (aten.addmm.default, lambda m: (m(64), m(256, 256), m(256, 64))),
    "bmm": (aten.bmm.default, lambda m: (m(8, 64, 128), m(8, 128, 32))),
    "bmm of every second column": (aten.bmm.default, lambda m: (m(8, 64, 256)[..., ::2], m(8, 128, 32))),
    "bmm by positions": (aten.bmm.default, lambda m: (m(64, 8, 128).transpose(0, 1), m(8, 128, 32))),
    "bmm of an expanded matrix": (aten.bmm.default, lambda m: (m(8, 64, 128), m(1, 128, 32).expand(8, -1, -1))),
    "mean": (aten.mean.dim, lambda m: (m(128, 256), [1], True)),
    "mean of all": (aten.mean.default, lambda m: (m(128, 256),)),
    "sum": (aten.sum.dim_IntList, lambda m: (m(128, 256), [1])),
    "softmax": (aten._softmax.default, lambda m: (m(128, 256), -1, False)),
    "scatter": (aten.scatter.src, lambda m: (m(128, 256), 0, torch.zeros(1, 256, dtype=torch.int64), m(1, 256))),
    "scatter_": (aten.scatter_.value, lambda m: (m(128, 256), 0, torch.zeros(1, 256, dtype=torch.int64), 2.0)),
    "index_put": (aten.index_put.default, lambda m: (m(128, 256), [torch.arange(9)], m(9, 256))),
    "logsumexp": (aten.logsumexp.default, lambda m: (m(128, 256), [1])),
    "native_dropout": (aten.native_dropout.default, lambda m: (m(128, 256), 0.5, True)),
    "gelu": (aten.gelu.default, lambda m: (m(128, 256),)),
    "cumsum": (aten.cumsum.default, lambda m: (m(128, 256), 0)),
    "index_add": (aten.index_add.default, lambda m: (m(128, 256), 0, torch.arange(50), m(50, 256))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_other_kernels(name: str, dtype: str) -> None:
    """Within 5 % of what a call holds."""
    target, make = CALLS[name]
    with _threads(1):
        args = make(partial(_matrix, DTYPES[dtype]))
        predicted, found = _predicted(target, args), beside_results(target, *args)
        assert abs(predicted - found) <= 0.05 * bytes_of((args, target(*args))), (predicted, found)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_said_of_other_devices(name: str) -> None:
    target, make = CALLS[name]
    args = make(partial(_matrix, torch.bfloat16))
    assert _predicted(target, args, "cuda") == 0


# ---------------------------------------------------------------------------------------------------------- programs


def _weights(width: int, kv_heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    kv = width // 4 * kv_heads
    shapes = {"q": (width, width), "k": (width, kv), "v": (width, kv), "o": (width, width)}
    shapes |= {"gate": (width, 3 * width), "up": (width, 3 * width), "down": (3 * width, width)}
    made = {name: (torch.randn(shape) / width**0.5).to(dtype) for name, shape in shapes.items()}
    return made | {name: torch.ones(width, dtype=dtype) for name in ("n1", "n2")}


def _llama(w: dict[str, Tensor], x: Tensor) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], w["n1"])
    q, k, v = ((y @ w[name]).unflatten(-1, (-1, x.shape[-1] // 4)).transpose(1, 2) for name in "qkv")
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + heads.transpose(1, 2).flatten(2) @ w["o"]
    y = F.rms_norm(x, x.shape[-1:], w["n2"])
    return x + (F.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def _loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return _llama(w, x).square().mean()


def _attention_loss(w: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (heads.transpose(1, 2).flatten(2) @ w).square().sum()


def _attention_args(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    width = size[1] * size[4]
    return torch.randn(width, width, dtype=dtype) / width, *_heads(size, dtype, False)


def _decoding(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    def step(cache: KVCache, q: Tensor, k: Tensor) -> Any:
        cache = cache.append(k, k)
        return cached_attention(q, cache), cache

    cache = KVCache.zeros(1, 4, 2, 511, 64, dtype=dtype)
    return step, (cache, torch.randn(4, 4, 1, 64, dtype=dtype), torch.randn(4, 2, 1, 64, dtype=dtype))


def _training(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    init, update = adamw(0.1)

    def step(w: Any, state: Any, x: Any) -> Any:
        loss, gradients = value_and_grad(_loss)(w, x)
        return loss, update(gradients, state, w)

    w = _weights(128, 2, dtype)
    return step, (w, init(w), torch.randn(2, 128, 128, dtype=dtype))


def _update(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    (init, update), w = adamw(0.1), _weights(128, 2, dtype)
    return update, ({name: torch.randn_like(x) for name, x in w.items()}, init(w), w)


#: by name, a function of a dtype that gives a function and its arguments
PROGRAMS: dict[str, Callable[[torch.dtype], tuple[Any, tuple[Any, ...]]]] = {
    f"attention {size}, {what}": lambda dtype, size=size, make=make: (make, _attention_args(size, dtype))  # type: ignore[misc]
    for size in ((2, 4, 256, 256, 64), (1, 8, 1024, 1024, 64), (8, 4, 40, 40, 32), (1, 2, 800, 800, 128))
    for what, make in (("forward", _attention_loss), ("gradients", grad(_attention_loss, (0, 1, 2, 3))))
}
PROGRAMS |= {
    f"a Llama block {rows, width}, {what}": lambda dtype, rows=rows, width=width, make=make: (  # type: ignore[misc]
        make,
        (_weights(width, 2, dtype), torch.randn(*rows, width, dtype=dtype)),
    )
    for rows, width in (((8, 64), 128), ((1, 1024), 128), ((2, 256), 256), ((1, 256), 64))
    for what, make in (("forward", _llama), ("gradients", grad(_loss)))
}
PROGRAMS["attention times values by positions, gradients"] = lambda dtype: (
    grad(lambda q, k, v, c: (F.scaled_dot_product_attention(q, k, v) * c.transpose(1, 2)).sum(), (0, 1, 2)),
    (*_heads((2, 4, 256, 256, 64), dtype, False), torch.randn(2, 256, 4, 64, dtype=dtype)),
)
PROGRAMS |= {"decoding": _decoding, "a step of training": _training, "an update": _update}
CASES = [(name, dtype, threads) for name in PROGRAMS for dtype in ("f32", "f64", "bf16") for threads in (1, 2)]


@pytest.mark.parametrize(("name", "dtype", "threads"), sample(CASES, 16), ids=str)
def test_predicted_peaks_are_those_measured(name: str, dtype: str, threads: int) -> None:
    torch.manual_seed(0)
    f, args = PROGRAMS[name](DTYPES[dtype])
    with _threads(threads):
        lowered = jit(f).lower(*args)
        predicted, measured = lowered.memory().peak, bytes_of(args) + peak(lowered.compile(), *args)
        assert abs(predicted / measured - 1) < 0.05, (predicted, measured)
        without = memory_of_program(lowered.program, scratch=False).peak
    assert without <= predicted
    with _threads(2 // threads):
        assert memory_of_program(lowered.program, scratch=False).peak == without  # what ranks decide by


def test_bfloat16_products_are_asked_of_this_machine() -> None:
    assert isinstance(has_bfloat16_products(), bool)
