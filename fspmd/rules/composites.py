"""Composites: torch functions written as calls of other functions, where torch's own graph is worse, or missing."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.entries import entry_axes
from fspmd.errors import ArgumentError
from fspmd.redistribution.redistribute import to_blocks
from fspmd.rules.grouped import grouped_mm
from fspmd.rules.layers import multi_head_attention
from fspmd.rules.losses import LOSSES
from fspmd.rules.spectra import TRANSFORMS
from fspmd.rules.value_checks import check_values
from fspmd.rules.views import vanishing
from fspmd.sharded import Sharded, call_torch
from fspmd.spec import P, TensorSpec


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


def in_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
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


def without_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
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


def one_row(x: Any, dim: int = 0) -> Callable[..., Any] | None:
    """Return a composite of ``unbind`` along a sharded dim of size 1, which selects its row, or None."""
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
    """``torch.batch_norm``, whose arguments are in another order."""
    return _batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


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


def _torch_instance_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use: bool, momentum: float, eps: float, _: bool
) -> Any:
    """``torch.instance_norm``, whose arguments are in another order."""
    return _instance_norm(x, running_mean, running_var, weight, bias, use, momentum, eps)


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


def renormed_embedding(
    places: Any,
    table: Any,
    padding_idx: Any = None,
    max_norm: float = 1.0,
    norm_type: float = 2.0,
    *args: Any,
    **kw: Any,
) -> Any:
    """``F.embedding`` with ``max_norm``: first scales down the rows that are looked up, in place."""
    with torch.no_grad():
        norms = torch.linalg.vector_norm(table, norm_type, dim=1)
        used = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, places.flatten(), True)
        table.mul_(torch.where(used & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)[:, None])
    return F.embedding(places, table, padding_idx, None, norm_type, *args, **kw)


def embedding(places: Any, table: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Any:
    """``F.embedding`` as an index of the table, where some block is empty.

    torch's own has no second derivatives without indices, and on a GPU its gradient writes past a table of no columns.
    """
    ints, rows = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (places, table))
    F.embedding(ints, rows, padding_idx)  # raises what torch does
    size = table.shape[0]
    padding = None if padding_idx is None else places == padding_idx % size
    out = table[(torch.where(places < 0, size, places),)]  # a negative index is out of range
    return out if padding is None else torch.where(padding[..., None], out.detach(), out)


def torch_embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: Any, **__: Any) -> Any:
    """``torch.embedding`` for `embedding`."""
    return embedding(indices, weight, padding_idx if padding_idx >= 0 else None)


def scaled_embedding(
    places: Any,
    table: Any,
    padding_idx: int | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` with options of the gradient.

    With ``scale_grad_by_freq`` the gradient of a row is divided by the number of its look-ups on all ranks.
    """
    followed = torch.is_grad_enabled() and table.requires_grad
    if sparse:
        _refuse_sparse_gradient("embedding", table)
    out = F.embedding(places, table, padding_idx)
    if not scale_grad_by_freq or not followed:
        return out
    with torch.no_grad():
        counts = torch.zeros_like(table[:, 0], dtype=torch.int64)
        counts = counts.index_put((places,), torch.ones_like(counts[0]), accumulate=True)[(places,)]
    out = out.clone()
    out.register_hook(lambda gradient: gradient / counts[..., None])
    return out


def _refuse_sparse_gradient(name: str, table: Any) -> None:
    if torch.is_grad_enabled() and table.requires_grad:
        raise ArgumentError(
            f"{name}() got sparse=True for {table!r}, but gradients of Sharded values are dense; leave sparse=True "
            "out, or give it a weight that requires no gradient"
        )


def sparse_embedding_bag(places: Any, table: Any, *args: Any, sparse: bool = True, **kwargs: Any) -> Any:
    """``F.embedding_bag`` with ``sparse=True``, which is about gradients and is refused if there are any."""
    _refuse_sparse_gradient("embedding_bag", table)
    return F.embedding_bag(places, table, *args[:5], *(False for _ in args[5:6]), *args[6:], **kwargs)


def sparse_torch_embedding_bag(table: Any, places: Any, *args: Any, sparse: bool = True, **kwargs: Any) -> Any:
    """``torch.embedding_bag`` for `sparse_embedding_bag`."""
    _refuse_sparse_gradient("embedding_bag", table)
    return torch.embedding_bag(table, places, *args[:3], *(False for _ in args[3:4]), *args[4:], **kwargs)


def scaled_torch_embedding(weight: Any, indices: Any, padding_idx: int = -1, *options: Any, **named: Any) -> Any:
    """``torch.embedding`` for `scaled_embedding`."""
    return scaled_embedding(indices, weight, padding_idx if padding_idx >= 0 else None, None, 2.0, *options, **named)


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


def _trapezoid(name: str) -> Callable[..., Any]:
    """Return a trapezoid rule for equal distances ``dx``: ``dx`` times the rule for distances of 1."""
    of_ones = getattr(torch.ops.aten, name).dx

    def trapezoid(y: Any, *, dx: float = 1, dim: int = -1) -> Any:
        return of_ones(y, dx=1, dim=dim) * dx

    return trapezoid


def constant_pad(x: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
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


def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of a `Sharded` or a tensor."""
    return lambda x, other: getattr(x, name)(other)


def set_number(x: Any, index: Any, value: complex) -> None:
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
    F.batch_norm: _batch_norm,
    torch.batch_norm: _torch_batch_norm,
    "group_norm": _group_norm,
    F.instance_norm: _instance_norm,
    F.multi_head_attention_forward: multi_head_attention,
    torch.instance_norm: _torch_instance_norm,
    F.normalize: _normalize,
    "native_batch_norm": _norm_and_moments,
    "_native_batch_norm_legit": _legit_norm,
    "_batch_norm_with_update": _norm_with_update,
    "__rmatmul__": lambda x, y: torch.matmul(y, x),
    **{"dist": _dist, "norm": _norm, "cosine_similarity": _cosine_similarity},
    **{name: _trapezoid(name) for name in ("trapezoid", "trapz", "cumulative_trapezoid")},
    "pinverse": lambda x, rcond=1e-15: torch.linalg.pinv(x, rcond),
    **{"take": _take, "cov": _cov, "corrcoef": _corrcoef},
    **{"_is_all_true": lambda x: x.all(), "_is_any_true": lambda x: x.any()},
    **{"equal": _equal, "allclose": _allclose},
    "linear_cross_entropy": _unchunked,
    "_grouped_mm": grouped_mm,
    "one_hot": _one_hot,
    "view_as": lambda x, other: x.view(other.shape),
    "reshape_as": lambda x, other: x.reshape(other.shape),
    **{f"{name}_": _method(f"{short}_") for name, short in _COMPARED.items()},
}
