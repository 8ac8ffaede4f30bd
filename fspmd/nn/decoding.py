"""A cache of keys and values for decoding, and attention to it, as pure functions.

A rank has some heads, or some positions, or both. Position p of a sequence lies on rank p % n of the n ranks that share
the positions, so that a sequence of any length is spread evenly. Each slot of the batch has a sequence of its own
length. Lengths are tensors and shapes are fixed: sequences come, grow and go without a new record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.body import check_outside, state, the_mesh
from fspmd.collectives import axis_index, axis_size
from fspmd.entries import axes_within
from fspmd.errors import ArgumentError, ShapeError, SpecError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.nn.arguments import FloatDtype, Scale, Size, checked
from fspmd.nn.attention import OneBlock, attention
from fspmd.nn.checks import (
    Everywhere,
    Shape,
    check_counts,
    check_equal,
    check_slots,
    check_varies,
    shapes_everywhere,
    shapes_of,
)
from fspmd.nn.masks import AllOf, AnyOf, Causal, Mask, Prefix
from fspmd.nn.parts import merge_over
from fspmd.nn.sequences import Axes
from fspmd.placement.creation import zeros
from fspmd.placement.device_put import device_get
from fspmd.sharded import is_sharded
from fspmd.spec import P, complain
from fspmd.tracing import recorder
from fspmd.transport.local_tensor import is_uneven


class KVCache(NamedTuple):
    """The keys and values of the layers of a model. A pytree.

    The last row of each rank is no position: what finds no place is written there. So n ranks of r rows each, which
    share the positions, have room for n (r - 1) positions.
    """

    keys: tuple[Tensor, ...]  #: of each layer [slots, kv_heads, rows, width]
    values: tuple[Tensor, ...]  #: of each layer [slots, kv_heads, rows, value_width]
    lengths: Tensor  #: [slots], how many positions each sequence has, int64

    @classmethod
    @checked
    def zeros(
        cls,
        layers: Size,
        slots: Size,
        kv_heads: Size,
        capacity: Size,
        width: Size,
        *,
        value_width: Size | None = None,
        dtype: FloatDtype | None = None,
        spec: P | None = None,
        mesh: Mesh | None = None,
    ) -> KVCache:
        """An empty cache, outside of bodies.

        Args:
            capacity: How many positions each slot has room for, at least. Ranks that share them have equally many.
            spec: How slots, heads and positions are cut, such as ``P("dp", "tp", "cp")``. The default, without a mesh,
                gives plain tensors. Where heads have more ranks than there are heads, each has one; see `own_heads`.

        Raises:
            ShapeError: Neither the heads are a multiple of their ranks, nor the ranks of the heads.

        >>> from fspmd import make_mesh
        >>> mesh = make_mesh((2, 4), ("tp", "cp"))
        >>> cache = KVCache.zeros(1, 3, 2, 32, 16, spec=P(None, "tp", "cp"), mesh=mesh)
        >>> cache.keys[0], cache.capacity
        (Sharded f32[3, 2@tp, 36@cp, 16] on mesh(tp=2, cp=4), 32)
        """
        check_outside("KVCache.zeros")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        widths = [width] * layers, [width if value_width is None else value_width] * layers
        if spec is None and mesh is None:
            keys, values = (
                tuple(torch.zeros(slots, kv_heads, capacity + 1, w, dtype=dtype) for w in row) for row in widths
            )
            return cls(keys, values, torch.zeros(slots, dtype=torch.int64))
        mesh, spec = the_mesh(mesh, "KVCache.zeros"), P() if spec is None else spec
        if words := complain(spec, mesh, None):
            raise SpecError(f"KVCache.zeros: {words}")
        if len(spec) > 3 or spec.unreduced or spec.reduced:
            raise ArgumentError(f"KVCache.zeros got {spec}; give it the axes of slots, heads and positions alone")
        n, ranks = (_ranks(mesh, spec, dim) for dim in (2, 1))
        if kv_heads % ranks and ranks % kv_heads:
            raise ShapeError(
                f"KVCache.zeros got {kv_heads} KV heads for {ranks} ranks; the heads must be a multiple of the ranks, "
                "or the ranks of the heads"
            )
        shape = slots, max(kv_heads, ranks), n * (-(-capacity // n) + 1)
        keys, values = (tuple(zeros(*shape, w, spec=spec, dtype=dtype, mesh=mesh) for w in row) for row in widths)
        return cls(keys, values, zeros(slots, spec=P(*spec.entries[:1]), dtype=torch.int64, mesh=mesh))

    @classmethod
    @checked
    def of(cls, layers: Iterable[KVCache]) -> KVCache:
        """The cache of some layers, of which all have the same sequences: the inverse of `layers`."""
        layers = [] if isinstance(layers, Tensor) else list(layers)
        for layer in layers:
            if not isinstance(layer, KVCache):
                raise ArgumentError(f"KVCache.of got {described(layer)}; give it the caches of all layers")
        if not layers:
            raise ArgumentError("KVCache.of got no layers; give it the caches of all layers")
        slots = [layer.lengths.shape[0] for layer in layers if not is_uneven(layer.lengths)]
        if len({*slots}) > 1:
            given = ", ".join(map(str, sorted({*slots})))
            raise ShapeError(f"KVCache.of got layers of {given} slots; give it the caches of the same sequences")
        keys, values = (tuple(itertools.chain.from_iterable(rows)) for rows in list(zip(*layers, strict=True))[:2])
        return cls(keys, values, layers[0].lengths)

    @property
    def layers(self) -> list[KVCache]:
        """The cache of each layer. Each is appended to; `of` joins them."""
        return [KVCache((k,), (v,), self.lengths) for k, v in zip(self.keys, self.values, strict=True)]

    @property
    def specs(self) -> Any:
        """The specs of the leaves, for ``in_specs`` and ``out_specs``: a `KVCache` of `P`."""
        leaves: tuple[Any, ...] = self.keys[0], self.values[0], self.lengths
        if not all(map(is_sharded, leaves)):
            raise ArgumentError("KVCache.specs: the cache has plain tensors; make it with spec=, such as P(None, 'tp')")
        return KVCache(*(x.spec.partition for x in leaves))

    @property
    def capacity(self) -> int:
        """Outside of bodies, how many positions each slot has room for."""
        check_outside("KVCache.capacity")
        key: Any = self.keys[0]
        return int(key.shape[2]) - (_ranks(key.spec.mesh, key.spec.partition, 2) if is_sharded(key) else 1)

    def check(self) -> None:
        """Raise unless all sequences have found room. The host reads the lengths.

        A replay cannot raise for what a length is. Positions past the capacity are written nowhere, and attention at
        them is nan.

        Raises:
            ShapeError: A sequence is longer than the capacity.
        """
        lengths = device_get(self.lengths) if is_sharded(self.lengths) else self.lengths
        if full := [slot for slot, length in enumerate(lengths.tolist()) if length > self.capacity]:
            raise ShapeError(
                f"the sequences of slots {', '.join(map(str, full))} have up to {int(lengths.max())} positions, and "
                f"the cache has room for {self.capacity}; reset full slots, or make a cache of a larger capacity"
            )

    def reset(self, which: Tensor) -> KVCache:
        """The cache without the sequences of some slots, which may begin anew. Nothing moves.

        Their rows become 0: an infinity or nan among rows that nobody sees would reach results as 0 * nan.

        Args:
            which: [slots], bool.

        >>> cache = KVCache.zeros(1, 2, 1, 8, 4)._replace(lengths=torch.tensor([5, 3]))
        >>> cache.reset(torch.tensor([True, False])).lengths
        tensor([0, 3])
        """
        if not isinstance(which, Tensor) or which.dtype is not torch.bool or which.shape != self.lengths.shape:
            raise ArgumentError(
                f"KVCache.reset got {described(which)}; give it a bool for each of the {self.lengths.shape[0]} slots"
            )
        kept = ~which
        keys, values = (tuple(x.where(kept[:, None, None, None], 0) for x in row) for row in (self.keys, self.values))
        return KVCache(keys, values, self.lengths.where(kept, 0))

    @checked
    def append(
        self,
        key: Tensor,
        value: Tensor,
        *,
        axis: Axes = (),
        counts: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> KVCache:
        """The cache of one layer with more positions. Under ``jit(donate_argnums=...)`` they are written in place.

        Args:
            key: [slots, kv_heads, n, width]: the next n positions of each sequence, n = 1 in a step of decoding, and
                more in a prompt. This rank's heads, all of the positions.
            value: [slots, kv_heads, n, value_width]
            axis: The mesh axis, or axes, that cut the positions of the cache.
            counts: [slots], int64: how many of the n positions each sequence has. The rest is padding. The default
                is n.
            slots: [k], int64: the slots of the k sequences in ``key``, each at most once. The default is all.

        Communication: none.

        Raises:
            ShapeError: The shapes do not fit, or n exceeds the capacity.
            ArgumentError: A dtype does not fit, the cache has several layers, or, on CPUs, a number of ``counts`` or
                ``slots`` is out of range. A rank reads its own numbers, and a replay those of ``slots`` alone.

        >>> cache = KVCache.zeros(1, 2, 1, 8, 4)
        >>> k, v = torch.ones(2, 2, 1, 3, 4)
        >>> cache.append(k, v).append(k, v, counts=torch.tensor([3, 0])).lengths
        tensor([6, 3])
        """
        _check(self, "append", axis, counts, slots, key, value)
        n, (keys,), (values,) = key.shape[2], self.keys, self.values
        starts = self._of(slots)
        ranks, rank = _place(axis)
        # the places of a rank follow one another, and the last may be of no new position: it is written once more
        first = starts if ranks == 1 else (starts - rank + (ranks - 1)) // ranks
        places = first[:, None] if n == 1 else first[:, None] + torch.arange(-(-n // ranks), device=first.device)
        if ranks > 1 and n > 1:
            chosen = (places * ranks + (rank - starts[:, None])).clamp(max=n - 1)
            key, value = (x.gather(2, _like(chosen, x)) for x in (key, value))
        spare = keys.shape[2] - 1
        finds_place = (places < spare)[:, None, :, None]  # the rest stays finite, for it is masked by a weight of 0
        key, value = key.where(finds_place, 0), value.where(finds_place, 0)
        places = places.clamp(max=spare)
        ends = starts + (n if counts is None else counts)
        # on CPUs torch's scatter of halves makes a copy of the whole cache in float32
        if slots is None and (key.dtype.itemsize > 2 or key.device.type != "cpu"):
            grown = [old.scatter(2, _like(places, x), x) for old, x in ((keys, key), (values, value))]
            return KVCache((grown[0],), (grown[1],), ends)
        heads = torch.arange(key.shape[1], device=first.device)[:, None]
        rows = torch.arange(key.shape[0], device=first.device) if slots is None else slots
        at = rows[:, None, None], heads, places[:, None]
        lengths = ends if slots is None else self.lengths.index_put((slots,), ends)
        return KVCache((keys.index_put(at, key),), (values.index_put(at, value),), lengths)

    def _of(self, slots: Tensor | None) -> Tensor:
        return self.lengths if slots is None else self.lengths.index_select(0, slots)


@checked
def cached_attention(
    query: Tensor,
    cache: KVCache,
    *,
    axis: Axes = (),
    mask: Mask | None = None,
    scale: Scale | None = None,
    sinks: Tensor | None = None,
    counts: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """The attention of the last positions of sequences to all positions up to each of them.

    Args:
        query: [slots, heads, n, width], of the n positions that the last `KVCache.append` was given.
        cache: The cache of one layer, after that. Each KV head serves heads / kv_heads heads of queries.
        axis: The mesh axis, or axes, that cut the positions of the cache.
        mask: Which of these positions are seen, such as ``SlidingWindow(1024)``. The default is all. Of a mask such as
            ``Causal() | Prefix(n)`` each position sees the first n. Append these at once: without all of them in the
            cache, the result is nan.
        scale: Of the scores. The default is ``width ** -0.5``.
        sinks: The score of an attention sink for each head of ``query``, [heads], which takes a share of the weights.
        counts: As in `KVCache.append`. Results of padding are of no use.
        slots: As in `KVCache.append`. The keys and values of these slots are copied.

    Returns:
        [slots, heads, n, value_width], of the dtype of ``query``. At a position past the capacity it is nan.

    Communication: none without ``axis``. Otherwise a `pmax` of a number and a `psum` of value_width + 1 numbers for
    each query and head, in float32, or float64.

    Raises:
        ShapeError: The shapes do not fit.
        ArgumentError: As `KVCache.append`.

    >>> from fspmd import device_get, make_mesh, shard_map
    >>> mesh = make_mesh((2, 2), ("tp", "cp"))
    >>> cache, heads = KVCache.zeros(1, 1, 2, 32, 8, spec=P(None, "tp", "cp"), mesh=mesh), P(None, "tp")
    >>> def body(q, k, v, cache):
    ...     cache = cache.append(k, v, axis="cp")
    ...     return cached_attention(q, cache, axis="cp"), cache
    >>> step = shard_map(body, mesh=mesh, in_specs=(heads, heads, heads, cache.specs), out_specs=(heads, cache.specs))
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> out, cache = step(q, k, v, cache)
    >>> torch.allclose(device_get(out), F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    _check(cache, "cached_attention", axis, counts, slots, query)
    (keys,), (values,) = cache.keys, cache.values
    if sinks is not None:
        _check_sinks(query, sinks)
    n, starts = query.shape[2], cache._of(slots) - (query.shape[2] if counts is None else counts)
    if slots is not None:
        keys, values = keys.index_select(0, slots), values.index_select(0, slots)
    ranks, rank = _place(axis)
    places = torch.arange(keys.shape[2], device=starts.device)
    queries = starts[:, None] if n == 1 else starts[:, None] + torch.arange(n, device=starts.device)
    positions = places if ranks == 1 else places * ranks + rank
    seen, prefix = (Causal(), 0) if mask is None else _in_caches(mask)
    allowed = seen.allows(queries[..., None], positions)
    finds_place = queries < (keys.shape[2] - 1) * ranks
    if prefix:
        finds_place = finds_place & (cache._of(slots) >= prefix)[:, None]
    # the heads that share a KV head are as more queries of one head
    group = query.shape[1] // keys.shape[1]
    folded = query.reshape(*keys.shape[:2], group * n, query.shape[3])
    if n > 1:
        allowed, finds_place = allowed.repeat(1, group, 1), finds_place.repeat(1, group)
    allowed, finds_place = allowed[:, None], finds_place[:, None, :, None]
    if sinks is not None:
        sinks = sinks.view(-1, group, 1).expand(-1, -1, n).flatten(1)
    if not axis:
        bias = torch.where(allowed, 0.0, -torch.inf)
        if sinks is not None:  # the last row of the cache has a key and a value of zeros, and no position
            bias = torch.where(places == keys.shape[2] - 1, sinks[..., None], bias)
        bias = bias.where(finds_place, torch.nan).to(query.dtype)
        out = F.scaled_dot_product_attention(folded, keys, values, bias, scale=scale)
    else:
        # on GPUs torch's kernels round the parts, but share the keys of a few queries among all cores
        part = attention(OneBlock(scale, alone=True), folded, keys, values, allowed)
        out, lse = merge_over(part, axis)
        if sinks is not None:
            out = out * (lse - sinks).sigmoid()[..., None]
        out = out.where(finds_place, torch.nan).to(query.dtype)
    return out.reshape(*query.shape[:3], values.shape[3])


def _in_caches(mask: Mask) -> tuple[Mask, int]:
    """The mask of positions that see later ones in a prefix alone, and the number of positions that they need."""
    if isinstance(mask, Prefix):
        return mask, mask.size
    if not isinstance(mask, (AllOf, AnyOf)):
        return Causal() & mask, 0
    (a, of_a), (b, of_b) = _in_caches(mask.first), _in_caches(mask.second)
    if isinstance(mask, AnyOf):
        return a | b, max(of_a, of_b)
    if isinstance(mask.first, Causal) or isinstance(mask.second, Causal):
        return mask, 0
    if of_a or of_b:  # then the other mask hides no later key that both allow
        a, b = a if of_a else mask.first, b if of_b else mask.second
    return a & b, max(of_a, of_b)


@checked
def own_heads(x: Tensor, axis: Axes) -> Tensor:
    """Of all KV heads, those that the queries of this rank use, where an axis cuts the heads of queries.

    Where the ranks are more than the KV heads, some ranks have the same head.

    Args:
        x: [..., kv_heads, n, width], equal on all ranks: keys or values before `KVCache.append`.
        axis: The mesh axis, or axes, that cut the heads of queries.

    Returns:
        [..., kv_heads / ranks or 1, n, width], which varies over ``axis``.

    Communication: none forward; a sum of the gradient over ``axis`` backward.

    Raises:
        ShapeError: Neither the heads are a multiple of the ranks, nor the ranks of the heads.
        VarianceError: ``x`` differs over ``axis``, as keys whose heads are cut already.

    >>> from fspmd import device_get, make_mesh, shard_map
    >>> mesh, x = make_mesh((4,), ("tp",)), torch.tensor([5.0, 7.0]).view(2, 1, 1)
    >>> device_get(shard_map(lambda x: own_heads(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P("tp"))(x)).flatten()
    tensor([5., 5., 7., 7.])
    """
    if x.dim() < 3:
        raise ShapeError(f"own_heads got {described(x)}; give it keys or values [..., kv_heads, n, width]")
    heads, ranks = x.shape[-3], axis_size(axis)
    if not heads or (heads % ranks and ranks % heads):
        raise ShapeError(
            f"own_heads got {heads} KV heads for the {ranks} ranks of {axis!r}; the heads must be a multiple of the "
            "ranks, or the ranks of the heads"
        )
    check_equal("own_heads", axis, "heads", x)
    first = axis_index(axis) * heads // ranks
    return x.index_select(-3, first + torch.arange(max(heads // ranks, 1), device=x.device))


def _place(axis: Axes) -> tuple[int, int | Tensor]:
    """How many ranks share the positions, and which of them this is."""
    return (axis_size(axis), axis_index(axis)) if axis else (1, 0)


def _ranks(mesh: Mesh, spec: P, dim: int) -> int:
    """How many ranks cut a dim."""
    return prod(mesh.shape[name] for name in axes_within(spec[dim])) if dim < len(spec) else 1


def _like(index: Tensor, x: Tensor) -> Tensor:
    """An index of positions [slots, n] for the heads and the width of ``x``."""
    return index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])


def _check(
    cache: KVCache, what: str, axis: Axes, counts: Tensor | None, slots: Tensor | None, *operands: Tensor
) -> None:
    """Raise alike on all ranks unless keys and values, or queries, fit the cache."""
    if len(cache.keys) != 1:
        raise ArgumentError(f"{what} got a cache of {len(cache.keys)} layers; take one: cache.layers[i]")
    of_cache = cache.keys[0], cache.values[0]
    for x in operands:
        if x.dim() != 4:
            raise ShapeError(f"{what} got {described(x)}; give it tensors [slots, heads, n, width]")
        if x.dtype is not of_cache[0].dtype:
            raise ArgumentError(f"{what} got {x.dtype} for a cache of {of_cache[0].dtype}; make the cache of one dtype")
    for name, numbers in (("counts", counts), ("slots", slots)):
        if numbers is not None and (not isinstance(numbers, Tensor) or numbers.dtype is not torch.int64):
            raise ArgumentError(f"{what} got {described(numbers)} for {name}; give it an int64 for each sequence")
    if axis:
        check_varies(what, axis, "a cache", *of_cache)
    tensors = *of_cache, *operands, *(x for x in (counts, slots) if x is not None)
    ranks = axis_size(axis) if axis else 1
    for key, value, *shapes in _everywhere(what, *tensors).values():
        given, of_numbers = shapes[: len(operands)], shapes[len(operands) :]
        batch = of_numbers[-1] if slots is not None else key[:1]
        if any(shape != batch for shape in of_numbers) or any(shape[:1] != batch for shape in given):
            raise ShapeError(
                f"{what} got {' and '.join(map(str, given))}{_numbers(of_numbers)} for a cache of {key[0]} slots; give "
                "it one sequence for each slot, or the slots of the sequences: slots="
            )
        if not _fit(key, value, *given):
            raise ShapeError(
                f"{what} got {' and '.join(map(str, given))} for a cache of {key[1]} KV heads of widths {key[3]} and "
                f"{value[3]}; {_WANTED[what]}"
            )
        if given[0][2] > (room := (key[2] - 1) * ranks):
            raise ShapeError(
                f"{what} got {given[0][2]} positions for a cache with room for {room}; make a cache of a larger "
                "capacity"
            )
    if slots is not None:
        check_slots(what, slots, of_cache[0].shape[0])
    if counts is not None and recorder() is None:  # a step of decoding may have some, and its replays ask nothing
        check_counts(what, counts, operands[0].shape[2])


def _check_sinks(query: Tensor, sinks: Tensor) -> None:
    """Raise alike on all ranks unless there is a sink for each head."""
    for shapes in _everywhere("cached_attention", query, sinks).values():
        if shapes[1] != shapes[0][1:2]:
            raise ShapeError(
                f"cached_attention got sinks of shape {shapes[1]} for {shapes[0][1]} heads; give it one of each head"
            )


def _everywhere(what: str, *tensors: Tensor) -> Everywhere:
    return {None: shapes_of(*tensors)} if state.body is None else shapes_everywhere(what, *tensors)


_WANTED = {
    "append": "give it keys and values [slots, kv_heads, n, width] of these; where heads are cut, see own_heads",
    "cached_attention": "give it queries [slots, heads, n, width], with heads a multiple of these",
}


def _fit(key: Shape, value: Shape, first: Shape, second: Shape | None = None) -> bool:
    if second is None:
        return first[1] % key[1] == 0 and first[3] == key[3]
    widths = first[3], second[3]
    return first[:3] == second[:3] and first[1] == key[1] and widths == (key[3], value[3])


def _numbers(shapes: list[Shape]) -> str:
    return "".join(f" with {shape[0] if shape else 'one'} of counts or slots" for shape in shapes)
