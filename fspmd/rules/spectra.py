"""Fourier transforms of blocks, of which torch takes no empty ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor


def _of_blocks(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def local(_: tuple[int, ...], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        empty = [d for d, size in enumerate(x.shape) if not size]
        for d in empty:
            x = torch.cat([x, x.new_zeros((*x.shape[:d], 1, *x.shape[d + 1 :]))], d)
        out = func(x, *args, **kwargs)
        for d in empty:
            out = out.narrow(d, 0, 0)
        return out

    return local


#: what runs on blocks in place of a transform
SPECTRA: Final = {
    **{f.__name__: _of_blocks(f) for f in (torch.fft.fft, torch.fft.ifft, torch.fft.rfft)},
    **{f.__name__: _of_blocks(f) for f in (torch.fft.irfft, torch.fft.hfft, torch.fft.ihfft)},
    **{name: _of_blocks(getattr(torch.ops.aten, name)) for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r")},
}


def _along_each(name: str, default: tuple[int, ...] | None) -> Callable[..., Any]:
    """A transform along several dims, as one along each: between two of them a dim that is sharded may change place."""
    along = torch.fft.ifft if name.startswith("i") else torch.fft.fft

    def transform(x: Any, s: Any = None, dim: Any = default, norm: Any = None) -> Any:
        like = torch.empty(x.shape, dtype=x.dtype, device="meta")
        getattr(torch.fft, name)(like, s, dim, norm)  # raises what torch does
        s, dim = ((one,) if isinstance(one, int) else one for one in (s, dim))
        dims = range(-(x.dim() if s is None else len(s)), 0) if dim is None else dim
        places = [d % x.dim() for d in dims]
        sizes = [None] * len(places) if s is None else [None if n == -1 else n for n in s]
        steps = sorted(zip(places, sizes, strict=True), key=lambda step: bool(x.spec.partition[step[0]]))
        for d, n in steps:
            x = along(x, n, d, norm)
        return x

    return transform


#: along several dims
TRANSFORMS: Final[dict[Any, Callable[..., Any]]] = {
    **{getattr(torch.fft, name): _along_each(name, (-2, -1)) for name in ("fft2", "ifft2")},
    **{getattr(torch.fft, name): _along_each(name, None) for name in ("fftn", "ifftn")},
}
