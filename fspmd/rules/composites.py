"""Composites: torch functions written as calls of other functions, where torch's own graph is worse, or missing."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.errors import ArgumentError
from fspmd.ops.linearity import argument
from fspmd.ops.traits import is_torch, name_of
from fspmd.rules.attention import with_dropout
from fspmd.rules.contractions import grouped_mm
from fspmd.rules.layers import EMBEDDINGS, multi_head_attention
from fspmd.rules.losses import ELEMENTWISE, LOSSES, WEIGHED, smoothed_of_linear
from fspmd.rules.normalizations import NORMALIZATIONS
from fspmd.rules.softmaxes import cross_entropy, has_labels, has_probabilities, of_smoothed_probabilities
from fspmd.rules.spectra import TRANSFORMS
from fspmd.rules.value_checks import check_values
from fspmd.rules.views import vanishing
from fspmd.sharded import Sharded
from fspmd.torch_internals import OpOverload

#: chooses the composite of a function, or none, by the arguments of a call
Choice = Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[..., Any] | None]


def _take(x: Any, index: Any) -> Any:
    """``x.take(index)`` as ``x[i, j, ...]``, whose body looks up the indices along sharded dims."""
    like = torch.empty((1,), dtype=x.dtype, device="meta")
    like.take(torch.empty((1,), dtype=index.dtype, device="meta"))  # raises what torch does
    x, count = x.reshape(x.shape or (1,)), x.numel()
    index = torch.where(index < 0, index + count, index)
    index = torch.where(index < 0, count, index)  # out of range
    places: list[Any] = []
    for size in reversed(x.shape[1:]):
        places.insert(0, index % size)
        index = index // size
    return x[(index, *places)]


def _centred(x: Any) -> Any:
    """Return the observations of each variable (a row) less their mean."""
    dtype = torch.ones((2,) * x.dim(), dtype=x.dtype).cov().dtype  # raises what torch does
    rows = (x if x.dim() == 2 else x.reshape(1, -1)).to(dtype)
    return rows - rows.mean(1, keepdim=True)


def _cov(x: Any, *, correction: int = 1, **_: None) -> Any:
    """``torch.cov``; if observations are sharded, the sums of products are pending."""
    centred = _centred(x)
    return (centred @ centred.mH / max(centred.size(1) - correction, 0)).squeeze()


def _corrcoef(x: Any) -> Any:
    centred = _centred(x)
    unit = centred / torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    out = (unit @ unit.mH).squeeze()
    if not out.is_complex():
        return out.clip(-1, 1)
    return torch.complex(out.real.clip(-1, 1), out.imag.clip(-1, 1))


def _unchunked(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """``F.linear_cross_entropy`` without ``options``, which only say how to compute the loss in parts."""
    return F.linear_cross_entropy(*args, **kwargs)


def _normalize(x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """``F.normalize``. Spectral norms use ``out`` to write into their buffers."""
    unit = x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)
    return unit if out is None else out.copy_(unit)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _in_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return a composite of a split along a flat dim that needs no communication, or None.

    The uncut leading dims of the flat dim must split into equal pieces.
    """
    x = args[0] if args else None
    if not isinstance(x, Sharded) or not x.spec.flat or any(map(_is_tensor, (*args[1:], *kwargs.values()))):
        return None
    try:
        shapes = [piece.shape for piece in func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs)]
    except Exception:
        return None  # the row of the function raises
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.dim()
    uncut = itertools.takewhile(lambda factor: not factor[1], x.spec.factors[dim])
    if len({*shapes}) > 1 or math.prod(n for n, _ in uncut) % len(shapes):
        return None
    sizes = (len(shapes), shapes[0][dim])
    return lambda x, *_, **__: x.unflatten(dim, sizes).unbind(dim)


def _without_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return a composite of a reshape that drops sharded dims of size 1, or None.

    One rank has such a dim. The composite selects its row there, and then reshapes.
    """
    x = args[0] if args else None
    if not isinstance(x, Sharded) or x.spec.flat or not any(x.shape[d] == 1 < math.prod(n) for d, _, n in x.spec.cuts):
        return None
    whole = [torch.empty(arg.shape, device="meta") if _is_tensor(arg) else arg for arg in args]
    try:
        shape = func(*whole, **kwargs).shape
    except Exception:
        return None  # the row of the function raises
    cut = {d for d, _, parts in x.spec.cuts if math.prod(parts) > 1}
    gone = cut.intersection(vanishing(x.spec.shape, tuple(shape)))
    return functools.partial(_reshaped_without, sorted(gone, reverse=True), shape) if gone else None


def _one_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return a composite of ``unbind`` along a sharded dim of size 1, which selects its row, or None."""
    x, dim = args[0] if args else None, argument(args, kwargs, 1, "dim", 0)
    if not isinstance(x, Sharded) or x.spec.flat or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        return None
    cut = [d for d, _, parts in x.spec.cuts if x.shape[d] == 1 < math.prod(parts)]
    return (lambda x, *_, **__: (x.select(dim, 0),)) if dim % x.dim() in cut else None


def _reshaped_without(gone: list[int], shape: Any, x: Any, *_: Any, **__: Any) -> Any:
    for d in gone:
        x = x.select(d, 0)
    return x.reshape(shape)


def _dist(x: Any, other: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(x - other, p)


def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """``F.cosine_similarity``. The gradient passes the lower bound ``eps`` of a norm, as in torch."""
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    if not dtype.is_floating_point:
        raise RuntimeError("expected common dtype to be floating point, yet common dtype is " + str(dtype))

    def unit(x: Any) -> Any:
        length = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        return x / torch.where(length < eps, length - length.detach() + eps, length)

    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    return (unit(x1.to(dtype).expand(shape)) * unit(x2.to(dtype).expand(shape))).sum(dim)


def _norm(x: Any, p: Any = 2.0, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> Any:
    """``torch.norm`` if its order is a number."""
    return torch.linalg.vector_norm(x, 2.0 if p is None else p, dim, keepdim, dtype=dtype)


def _constant_pad(x: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """``F.pad`` in mode ``"constant"``."""
    return torch.constant_pad_nd(x, pad, 0 if value is None else value)


def _one_hot(x: Any, num_classes: int = -1) -> Any:
    """``F.one_hot`` that checks its classes. torch's graph gives a row of zeros for a number that is not a class."""
    if x.dtype is not torch.int64:
        raise RuntimeError  # torch's own call then raises with its message
    if num_classes == -1 or not x.numel() + num_classes:
        if not x.numel():
            raise ArgumentError(
                "one_hot got an empty tensor, which does not say how many classes there are; pass num_classes"
            )
        num_classes = int(x.max()) + 1
    hot = x.unsqueeze(-1) == torch.arange(max(num_classes, 0), device=x.device)
    message = (
        f"one_hot got a number that is negative, or not below num_classes={num_classes}; pass a greater num_classes"
    )
    check_values(hot.any(-1), Tensor.bool, message)
    return hot.to(torch.int64, memory_format=torch.contiguous_format)


def _trapezoid(y: Any, *, dx: float, dim: int = -1) -> Any:
    """``torch.trapezoid``. torch's graph has ``dx`` as a constant, so each number would be traced anew."""
    return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * float(dx)


def _cumulative_trapezoid(y: Any, *, dx: float, dim: int = -1) -> Any:
    count = y.size(dim) - 1
    return ((y.narrow(dim, 1, count) + y.narrow(dim, 0, count)) * (float(dx) / 2)).cumsum(dim)


def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of a `Sharded` or a tensor."""
    return lambda x, other: getattr(x, name)(other)


def _set_number(x: Any, index: Any, value: complex) -> None:
    """``x[i] = 0.5`` with the number as a tensor, so that all numbers share a plan."""
    x[index] = torch.full((), value, dtype=x.dtype, device=x.device)


def _equal(x: Any, other: Any) -> bool:
    """``torch.equal``: one all-reduce of one byte."""
    return x.shape == other.shape and bool((x == other).all())


def _allclose(x: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(x, other, rtol, atol, equal_nan).all())


#: comparisons -> their other names, under which their writes run
_COMPARED: Final = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}
#: torch function, or name of functions -> composite
COMPOSITES: Final[dict[Any, Callable[..., Any]]] = {
    **LOSSES,
    **TRANSFORMS,
    **NORMALIZATIONS,
    F.multi_head_attention_forward: multi_head_attention,
    F.normalize: _normalize,
    "__rmatmul__": lambda x, y: torch.matmul(y, x),
    **{"cosine_similarity": _cosine_similarity, "dist": _dist, "norm": _norm},
    **{"take": _take, "cov": _cov, "corrcoef": _corrcoef},
    "pinverse": lambda x, rcond=1e-15: torch.linalg.pinv(x, rcond),
    **{"_is_all_true": lambda x: x.all(), "_is_any_true": lambda x: x.any()},
    **{"equal": _equal, "allclose": _allclose},
    "linear_cross_entropy": _unchunked,
    "_grouped_mm": grouped_mm,
    "one_hot": _one_hot,
    **{"trapz": _trapezoid, "trapezoid": _trapezoid, "cumulative_trapezoid": _cumulative_trapezoid},
    "view_as": lambda x, other: x.view(other.shape),
    "reshape_as": lambda x, other: x.reshape(other.shape),
    **{f"{name}_": _method(f"{short}_") for name, short in _COMPARED.items()},
}


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    if any(isinstance(arg, torch.dtype) for arg in (*args[1:2], *kwargs.values())):
        return torch.ops.aten.view.dtype
    return _without_ones(func, args, kwargs)


def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    return _constant_pad if argument(args, kwargs, 2, "mode", "constant") == "constant" else None


def _setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    return _set_number if isinstance(args[2], Number) else None


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    return with_dropout if argument(args, kwargs, 4, "dropout_p", 0.0) else None


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    smoothing = kwargs.get("label_smoothing")  # whether it is 0 is part of the key of a plan, its value is not
    if smoothing and not (type(smoothing) in (int, float) and args and args[0].numel()):
        return None
    if has_labels(*args, **kwargs):
        return cross_entropy
    return of_smoothed_probabilities if smoothing and has_probabilities(*args, **kwargs) else None


def _linear_cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    if kwargs.get("options") is not None:
        return _unchunked
    return smoothed_of_linear if kwargs.get("label_smoothing") else None


def _elementwise_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    if func in WEIGHED and kwargs.get("weight") is not None:
        return None
    if kwargs.get("reduction") == "none" and kwargs.get("size_average") is kwargs.get("reduce") is None:
        return None
    return LOSSES.get(func)


def _has_no_steps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a trapezoidal rule has no number ``dx``, or no steps, or values that torch refuses."""
    y, dx = args[0] if args else None, kwargs.get("dx")
    return type(dx) not in (int, float) or len(args) > 1 or y is None or not y.numel() or y.dtype is torch.bool


def _unless(excludes: Callable[[tuple[Any, ...], dict[str, Any]], bool]) -> Choice:
    """Return the choice of the composite in `COMPOSITES`, unless ``excludes(args, kwargs)``."""
    return lambda func, args, kwargs: None if excludes(args, kwargs) else COMPOSITES[name_of(func)]


#: torch function, or name of functions -> what chooses its composite, or none, by the arguments of a call
CHOICES: Final[dict[Any, Choice]] = {
    **EMBEDDINGS,
    "view": _view,
    **dict.fromkeys(("reshape", "flatten", "ravel", "squeeze"), _without_ones),
    "unbind": _one_row,
    **dict.fromkeys(("split", "chunk"), _in_pieces),
    F.pad: _pad,
    Tensor.__setitem__: _setitem,
    "scaled_dot_product_attention": _attention,
    F.cross_entropy: _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    **dict.fromkeys(ELEMENTWISE, _elementwise_loss),
    "norm": _unless(lambda args, kwargs: isinstance(argument(args, kwargs, 1, "p", None), str)),
    **dict.fromkeys(("trapz", "trapezoid", "cumulative_trapezoid"), _unless(_has_no_steps)),
    "cov": _unless(lambda _, kwargs: any(kwargs.get(weights) is not None for weights in ("fweights", "aweights"))),
}


def composite_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the composite that runs in place of a torch function for these arguments, or None.

    Ops of a graph have none.
    """
    if not _is_function(func):
        return None
    name = name_of(func)
    choice = CHOICES.get(func) or CHOICES.get(name)
    return choice(func, args, kwargs) if choice is not None else COMPOSITES.get(func) or COMPOSITES.get(name)


def has_composite(func: Any) -> bool:
    """Whether a torch function has a composite, which its arguments may still rule out."""
    return _is_function(func) and (func in COMPOSITES or name_of(func) in COMPOSITES)


def _is_function(func: Any) -> bool:
    return not isinstance(func, OpOverload) and is_torch(func)
