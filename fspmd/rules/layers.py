"""Layers of torch: embeddings, multi-head attention, with separate dims for batch and heads, and recurrent layers.

Embeddings are calls of other functions where torch's own cannot run on blocks, or an option is about gradients.

torch flattens batch and heads into one dim, along which heads cannot be sharded. Here queries, keys and values are
[B, H, S, K] throughout, so batch and heads stay sharded. In a recurrent layer (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``)
each rank runs the sequences of its part of the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import optree
import torch
from torch.nn import functional as F

from fspmd.errors import ArgumentError
from fspmd.ops.linearity import argument
from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import NO_RULE, Dims, Factors, ShapedCall
from fspmd.rules.windows import still
from fspmd.sharded import Sharded


def _renormed(
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


def _indexed(places: Any, table: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Any:
    """``F.embedding`` as an index of the table, where some block is empty.

    torch's own has no second derivatives without indices, and on a GPU its gradient writes past a table of no columns.
    """
    ints, rows = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (places, table))
    F.embedding(ints, rows, padding_idx)  # raises what torch does
    size = table.shape[0]
    padding = None if padding_idx is None else places == padding_idx % size
    out = table[(torch.where(places < 0, size, places),)]  # a negative index is out of range
    return out if padding is None else torch.where(padding[..., None], out.detach(), out)


def _scaled(
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


def _sparse_bag(func: Any, place: int, *args: Any, sparse: bool = True, **kwargs: Any) -> Any:
    """An embedding bag with ``sparse=True``, which is about gradients and is refused if there are any."""
    _refuse_sparse_gradient("embedding_bag", args[1 if func is F.embedding_bag else 0])
    return func(*args[:place], *(False for _ in args[place : place + 1]), *args[place + 1 :], **kwargs)


def _table_first(composite: Callable[..., Any]) -> Callable[..., Any]:
    """Return a composite of ``F.embedding`` for ``torch.embedding``, which takes the table first."""

    def embedding(weight: Any, indices: Any, padding_idx: int = -1, *options: Any, **named: Any) -> Any:
        padding = padding_idx if padding_idx >= 0 else None
        return composite(indices, weight, padding, None, 2.0, *options, **named)

    return embedding


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    if func is F.embedding and argument(args, kwargs, 3, "max_norm", None) is not None:
        return _renormed
    indexed, scaled, options = _indexed, _scaled, 5
    if func is not F.embedding:
        indexed, scaled, options = _table_first(_indexed), _table_first(_scaled), 3
    if any(args[options:]) or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        return scaled
    operands = (*args[:2], *kwargs.values())
    # if some rank has no indices, or nothing of the table
    return indexed if any(isinstance(x, Sharded) and x.spec.thinnest == 0 for x in operands) else None


def _bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    place = 7 if func is F.embedding_bag else 5
    return functools.partial(_sparse_bag, func, place) if argument(args, kwargs, place, "sparse", False) else None


#: torch function -> its composite for the arguments of a call, or None
EMBEDDINGS: Final[dict[Any, Callable[..., Callable[..., Any] | None]]] = {
    **dict.fromkeys((F.embedding, torch.embedding), _embedding),
    **dict.fromkeys((F.embedding_bag, torch.embedding_bag), _bag),
}


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """``F.multi_head_attention_forward``: query [L, B, E], key and value [S, B, ...] -> [L, B, E], weights or None."""
    if unbatched := query.dim() == 2:
        lifted = {id(x): x.unsqueeze(1) for x in (query, key, value)}
        query, key, value = lifted[id(query)], lifted[id(key)], lifted[id(value)]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    _check(query, key, value, embed_dim_to_check, num_heads, bias_k, bias_v, is_causal and attn_mask is None)
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # ``is_causal`` stands for the mask
    else:
        is_causal = False  # the mask is causal
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    else:
        q, k, v = _projected(query, key, value, in_proj_weight, in_proj_bias)
    if bias_k is not None:
        k, v = (torch.cat([x, bias.expand(1, x.shape[1], -1)]) for x, bias in ((k, bias_k), (v, bias_v)))
    q = _heads(q, num_heads)
    k = _heads(k, num_heads) if static_k is None else static_k.unflatten(0, (-1, num_heads))
    v = _heads(v, num_heads) if static_v is None else static_v.unflatten(0, (-1, num_heads))
    if add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    mask = _mask(attn_mask, key_padding_mask, q, k.shape[2])
    attended, shares = _attended(q, k, v, mask, dropout_p if training else 0.0, is_causal, need_weights)
    out = F.linear(attended.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if shares is not None and average_attn_weights:
        shares = shares.mean(1)
    return (out.squeeze(1), None if shares is None else shares.squeeze(0)) if unbatched else (out, shares)


def _check(query: Any, key: Any, value: Any, width: int, heads: int, bias_k: Any, bias_v: Any, no_mask: bool) -> None:
    """Raise for arguments that torch refuses, and that would compute something here."""
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
        raise RuntimeError(f"expected query, key and value [S, B, E], got {query!r}, {key!r}, {value!r}")
    if query.shape[2] != width or width % heads:
        raise RuntimeError(f"expected queries of width {width}, a multiple of {heads} heads, got {query!r}")
    if (bias_k is None) != (bias_v is None):
        raise RuntimeError("got only one of bias_k and bias_v; give both or neither")
    if no_mask:
        raise RuntimeError("is_causal=True is a hint about attn_mask, which is None; give attn_mask too")


def _projected(query: Any, key: Any, value: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Project by one weight [3 E, E]: one input in one product, different inputs by the three parts of the weight.

    If the weight is cut along 3 E, one exchange cuts the three parts of the result along E.
    """
    if query is key and key is value:
        q, k, v = F.linear(query, weight, bias).unflatten(-1, (3, -1)).unbind(-2)
        return q, k, v
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True))
    return q, k, v


def _heads(x: Any, heads: int) -> Any:
    """[S, B, H K] -> [B, H, S, K]."""
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _mask(mask: Any, padding: Any, q: Any, keys: int) -> Any:
    """Return the summand of scores [B, H, L, S], made of ``mask`` [L, S] or [B H, L, S], and of ``padding`` [B, S]."""
    total = None
    for given, shaped in ((mask, _over_heads), (padding, _over_queries)):
        if given is None:
            continue
        added = given.to(q.dtype)
        added = shaped(added.masked_fill(given, -math.inf) if given.dtype == torch.bool else added, q)
        added = F.pad(added, (0, keys - added.shape[-1]))
        total = added if total is None else total + added
    return total


def _over_heads(mask: Any, q: Any) -> Any:
    return mask if mask.dim() == 2 else mask.unflatten(0, tuple(q.shape[:2]))


def _over_queries(padding: Any, q: Any) -> Any:
    return padding[:, None, None]


def _attended(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, need_weights: bool
) -> tuple[Any, Any]:
    """Return the attended values [B, H, L, K], and the weights [B, H, L, S] if they are needed."""
    if not need_weights and not dropout_p:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal), None
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    shares = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout_p)
    return shares @ v, shares if need_weights else None


def sequences(call: ShapedCall) -> Factors:
    """The rule of a recurrent layer: only the batch may be sharded.

    Arguments are ``(input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first)``. Dropout between
    layers, which draws random numbers, has no rule.
    """
    if len(call.args) != 9 or not isinstance(call.args[1], (tuple, list, type(None))) or call.ndim != 3:
        return NO_RULE
    if call.args[4] > 1 and call.args[5] and call.args[6]:
        return NO_RULE
    batch = 0 if call.args[8] else 1
    values: Dims = tuple(0 if d == batch else None for d in range(3))
    states: Dims = (None, 0, None)
    count = len(call.results) - 1  # states: all results but the sequence of outputs
    weights = tuple((None,) * len(shape) for shape in call.shapes[1 + count :])
    operands = (values, *(states,) * count, *weights)
    return Factors(operands, (values, *(states,) * count), whole=frozenset({0}), names={"batch": 0})


def _layer(name: str) -> Bodied:
    def body(site: Site, *args: Any) -> Any:
        states = optree.tree_map(torch.Tensor.contiguous, args[1])  # cuDNN takes no parts of a batch, which are views
        return getattr(torch, name)(args[0], states, *args[2:])

    return still(body)


def is_packed(args: tuple[Any, ...]) -> bool:
    """Whether a layer takes packed sequences. Values then say how many sequences run at each step."""
    return len(args) > 3 and isinstance(args[3], (tuple, list))  # the weights follow ``batch_sizes``


LAYERS: Final = {name: _layer(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
