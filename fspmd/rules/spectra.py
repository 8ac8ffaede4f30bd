"""Fourier transforms: on blocks, which may be empty, and along several dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.entries import axes_within
from fspmd.sharded import call_torch


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


#: transforms -> functions on blocks that also take empty ones
SPECTRA: Final = {
    **{f.__name__: _of_blocks(f) for f in (torch.fft.fft, torch.fft.ifft, torch.fft.rfft)},
    **{f.__name__: _of_blocks(f) for f in (torch.fft.irfft, torch.fft.hfft, torch.fft.ihfft)},
    **{name: _of_blocks(getattr(torch.ops.aten, name)) for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r")},
}


def gathered_along(x: Any, dims: Sequence[int]) -> Any:
    """Return the operand whole along ``dims``; it may be sharded along others."""
    return x


def _gathered_once(x: Any, dims: Sequence[int]) -> Any:
    """Make the operand of several transforms whole along ``dims`` in one move, if another dim can be sharded."""
    ranks = [x.spec.mesh.axis_size(axes) for axes in map(axes_within, (x.spec.partition[d] for d in dims)) if axes]
    others = [x.shape[d] for d in range(x.dim()) if d not in dims]
    if len(ranks) != 1 or max(others, default=0) < ranks[0]:
        return x
    return call_torch(gathered_along, (x, list(dims)))


def _places_and_sizes(name: str, x: Any, s: Any, dim: Any, norm: Any) -> tuple[list[int], list[int]]:
    """Return the dims of a transform and their sizes, -1 for the size of x. Arguments that torch refuses raise."""
    try:
        getattr(torch.fft, name)(torch.empty(x.shape, dtype=x.dtype, device="meta"), s, dim, norm)
    except RuntimeError as error:
        if not str(error).startswith("setStorage"):  # torch 2.11 fails so on the meta device if dims are out of order
            raise
    s, dim = ((v,) if isinstance(v, int) else v for v in (s, dim))
    dims = range(-(x.dim() if s is None else len(s)), 0) if dim is None else dim
    places = [d % x.dim() for d in dims]
    return places, [-1] * len(places) if s is None else list(s)


def _along_each(name: str, default: tuple[int, ...] | None) -> Callable[..., Any]:
    """Return a transform along several dims as one along each, so that the sharded dim can change between two steps."""
    along = torch.fft.ifft if name.startswith("i") else torch.fft.fft

    def transform(x: Any, s: Any = None, dim: Any = default, norm: Any = None) -> Any:
        places, sizes = _places_and_sizes(name, x, s, dim, norm)
        x = _gathered_once(x, places)
        steps = sorted(zip(places, sizes, strict=True), key=lambda step: bool(x.spec.partition[step[0]]))
        for d, n in steps:
            x = along(x, None if n == -1 else n, d, norm)
        return x

    return transform


def _of_reals(name: str) -> Callable[..., Any]:
    """Return a transform from or to reals along several dims: real along the last dim, complex along the others.

    Dims are first cut to their sizes. A sharded dim is transformed after the others.
    """
    last, two = getattr(torch.fft, name[: name.index("fft") + 3]), name.endswith("2")
    real_first = name.startswith(("r", "ih"))
    others = getattr(torch.fft, "ifftn" if name.startswith("i") else "fftn")

    def transform(x: Any, s: Any = None, dim: Any = (-2, -1) if two else None, norm: Any = None) -> Any:
        (*places, end), (*sizes, length) = _places_and_sizes(name, x, s, dim, norm)
        for d, n in zip(places, sizes, strict=True):
            x = x.narrow(d, 0, n) if -1 < n < x.shape[d] else x
        x = _gathered_once(x, [*places, end])
        x = last(x, None if length == -1 else length, end, norm) if real_first else x
        x = others(x, sizes, places, norm) if places else x
        return x if real_first else last(x, None if length == -1 else length, end, norm)

    return transform


#: transforms along several dims -> composites
TRANSFORMS: Final[dict[Any, Callable[..., Any]]] = {
    **{getattr(torch.fft, name): _along_each(name, (-2, -1)) for name in ("fft2", "ifft2")},
    **{getattr(torch.fft, name): _along_each(name, None) for name in ("fftn", "ifftn")},
    **{
        getattr(torch.fft, f"{name}fft{n}"): _of_reals(f"{name}fft{n}") for name in ("r", "ir", "h", "ih") for n in "2n"
    },
}
