"""The next tokens of sequences, from logits whose vocabulary may be cut over ranks. No rank gathers the logits.

A random number depends on the key of a sequence, the position, and the token alone, and not on the mesh, the slot or
the other sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.body import bound_body, resolve_axes
from fspmd.collectives import all_gather, axis_index, axis_size, pmax, psum
from fspmd.entries import blocks
from fspmd.errors import ArgumentError, ShapeError
from fspmd.meshes.axes import row_major
from fspmd.messages import described
from fspmd.nn.arguments import checked
from fspmd.nn.checks import check_equal, check_varies, shapes_everywhere
from fspmd.nn.parts import wide
from fspmd.nn.sequences import Axes
from fspmd.random.counter import derived

_SAMPLED, _OF_TOKEN = 3, 4  # the purposes of derived keys
_BINS = 256  # of a digit
_ONE = 2.0**40  # the highest probability, as an integer: sums of integers are equal in any order, on all meshes
Number = float | Tensor  # of all sequences, or one of each


@checked
def greedy(logits: Tensor, axis: Axes = (), *, vocabulary: int | None = None) -> Tensor:
    """The most probable token of each sequence, of equal ones the first.

    Args:
        logits: [slots, tokens], this rank's part of the vocabulary.
        axis: The mesh axis, or axes, that cut the vocabulary.
        vocabulary: The size of the whole vocabulary. It is needed where the parts of ranks differ in length.

    Returns:
        [slots], int64, equal on all ranks of ``axis``.

    Communication: an `all_gather` of two float64 for each sequence.

    Raises:
        ShapeError: The parts of the ranks do not add up to the vocabulary.

    >>> from fspmd import P, make_mesh, shard_map
    >>> call = shard_map(lambda x: greedy(x, "tp", vocabulary=5), mesh=make_mesh((4,), ("tp",)),
    ...                  in_specs=P(None, "tp"), out_specs=P())
    >>> call(torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 1.0]])).local
    tensor([1, 4])
    """
    return _best(logits, *_places(logits, axis, vocabulary, "greedy"), axis)


@checked
def sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    axis: Axes = (),
    *,
    vocabulary: int | None = None,
    temperature: Number = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Number | None = None,
) -> Tensor:
    """A token of each sequence, drawn with the probabilities ``softmax(logits / temperature)``.

    Args:
        logits: [slots, tokens], this rank's part of the vocabulary.
        keys: [slots], the `fspmd.random` key of each sequence: ``split(key(seed), slots)``.
        positions: [slots], int64: the number of the token in its sequence, such as ``cache.lengths``.
        axis: The mesh axis, or axes, that cut the vocabulary.
        vocabulary: As in `greedy`.
        temperature: A number, or one of each sequence, [slots]. With 0 the token is that of `greedy`.
        top_k: Only the k most probable tokens are drawn, and those that are as probable as the last of them. An int,
            or one of each sequence.
        top_p: Of these, only the most probable ones are drawn, as few as have this probability together, and those
            that are as probable as the last of them. A number, or one of each sequence.

    Returns:
        [slots], int64, equal on all ranks of ``axis``.

    Communication: that of `greedy`. For ``top_k``, a `psum` of 256 numbers for each sequence and byte of a logit; for
    ``top_p`` as many, and a `pmax` and a `psum` of a number for each sequence. Exact: no logits are gathered or sorted.

    Raises:
        ShapeError: The shapes do not fit.
        ArgumentError: Keys or positions are no int64, or a number is out of range.
        VarianceError: Keys, positions or numbers of sequences differ over ``axis``; or logits are equal over it.

    >>> from fspmd.random import key, split
    >>> logits = torch.tensor([0.1, 0.2, 0.7]).log().expand(10_000, 3)
    >>> tokens = sample(logits, split(key(0), 10_000), torch.zeros(10_000, dtype=torch.int64))
    >>> (tokens.bincount() / 10_000 - torch.tensor([0.1, 0.2, 0.7])).abs().max() < 0.01
    tensor(True)
    """
    first, block = _places(logits, axis, vocabulary, "sample")
    _check_rows(logits, keys=keys, positions=positions)
    if axis:
        of_sequences = {
            "keys": keys,
            "positions": positions,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
        for name, given in of_sequences.items():
            if isinstance(given, Tensor):
                check_equal("sample", axis, name, given)
    x = logits.to(wide(logits))
    tiny = torch.finfo(x.dtype).tiny
    heat = _column("temperature", temperature, x, 0, torch.inf)
    allowed = None
    if top_k is not None or top_p is not None:
        bits = _ordered(logits)
        if top_k is not None:
            limit = _column("top_k", top_k, x, 1, torch.inf)
            allowed = bits >= _least(bits, logits.itemsize, torch.ones_like(bits, dtype=torch.int32), limit, axis)
        if top_p is not None:
            share = _column("top_p", top_p, x, tiny, 1)
            top = _over(pmax, x.amax(1, keepdim=True), axis)
            mass = (((x - top) / heat.clamp(min=tiny)).exp() * _ONE).round().long()
            mass = mass if allowed is None else mass.where(allowed, 0)
            limit = share.double() * _over(psum, mass.sum(1, keepdim=True), axis)
            within = bits >= _least(bits, logits.itemsize, mass, limit, axis)
            allowed = within if allowed is None else allowed & within
    words = derived(keys, positions, _SAMPLED)[:, None]
    words = derived(words, first + torch.arange(logits.shape[1], device=logits.device), _OF_TOKEN)
    uniform = (words.to(x.dtype).abs() * 2.0**-63 + 2.0**-64).clamp(max=1 - torch.finfo(x.dtype).eps / 2)
    clocks = -torch.log1p(-uniform)
    scores = x - heat * clocks.log()  # the first event of exponential clocks with the rates exp(x / heat)
    return _best(scores if allowed is None else scores.where(allowed, -torch.inf), first, block, axis)


def _best(scores: Tensor, first: int | Tensor, block: int | None, axis: Axes) -> Tensor:
    """The place in the vocabulary of the highest score of each sequence. ``block``: as `_places` returns it."""
    if not axis:
        return scores.argmax(1)
    if axis_size(axis) == 1:
        return psum(scores.argmax(1), axis)
    if block is not None:
        scores = F.pad(scores, (0, block - scores.shape[1]), value=-torch.inf)
    value, place = scores.max(1)
    of_ranks = all_gather(torch.stack([value.double(), (first + place).double()]), axis, to="invarying")
    best = of_ranks[:, 0].argmax(0, keepdim=True)
    return of_ranks[:, 1].gather(0, best)[0].long()


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the numbers: int64, of as many bits as the dtype has."""
    bits = (x + 0.0).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).long() << 64 - 8 * x.itemsize


def _least(bits: Tensor, size: int, weights: Tensor, limit: Tensor, axis: Axes) -> Tensor:
    """The least number [slots, 1] above which the weights of all ranks, integers, add up to less than a limit.

    It is found byte by byte, from the first. Of the numbers whose bytes so far are those found, the weights are added
    up by their next byte.
    """
    least = above = torch.zeros_like(limit, dtype=torch.int64)
    for shift in range(56, 56 - 8 * size, -8):
        digit = bits >> shift & _BINS - 1
        digit = digit ^ _BINS // 2 if shift == 56 else digit  # the first bit is the sign
        bins = torch.zeros(bits.shape[0], _BINS, dtype=weights.dtype, device=bits.device)
        bins = _over(psum, bins.scatter_add(1, digit, weights), axis)
        higher = above + bins.flip(1).cumsum(1).flip(1) - bins
        chosen = (higher < limit).to(torch.int8).argmax(1, keepdim=True)
        above, weights = higher.gather(1, chosen), weights.where(digit == chosen, 0)
        least = least | (chosen ^ _BINS // 2 if shift == 56 else chosen) << shift
    return least


def _over(collective: Callable[..., Tensor], x: Tensor, axis: Axes) -> Tensor:
    return collective(x, axis) if axis else x


def _places(logits: Tensor, axis: Axes, vocabulary: int | None, what: str) -> tuple[int | Tensor, int | None]:
    """The first token of this rank, and the length of the longest part if some are shorter. Raises on all ranks."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ShapeError(f"{what} got {described(logits)} for logits; give it floats [slots, tokens]")
    if not axis:
        if logits.shape[1] != (logits.shape[1] or 1 if vocabulary is None else vocabulary):
            raise ShapeError(
                f"{what} got {logits.shape[1]} tokens and vocabulary={vocabulary!r}; give it logits of all tokens, or "
                "the axis that cuts them"
            )
        return 0, None
    body = bound_body(what)
    axes = resolve_axes(body, axis, what)
    check_varies(what, axis, "logits", logits)
    sizes, mesh = body.sizes(axes), body.mesh
    lengths = {at: logits[1] for at, (logits,) in shapes_everywhere(what, logits).items()}
    if vocabulary is None and len(set(lengths.values())) == 1:
        return axis_index(axis) * logits.shape[1], None
    if type(vocabulary) is not int:
        raise ShapeError(
            f"{what} got parts of {', '.join(map(str, lengths.values()))} tokens and vocabulary={vocabulary!r}; pass "
            "the size of the whole vocabulary"
        )
    cuts = blocks(vocabulary, sizes)
    for at, length in lengths.items():
        mine = cuts if at is None else [cuts[row_major([at[mesh.axis_names.index(name)] for name in axes], sizes)]]
        if {n for _, n in mine} != {length}:
            raise ShapeError(
                f"{what} got {length} tokens of a vocabulary of {vocabulary}, which {axis!r} cuts into parts of "
                f"{', '.join(str(n) for _, n in cuts)}; cut the logits so, or pass the size of their vocabulary"
            )
    first = torch.tensor([start for start, _ in cuts], device=logits.device)
    return first[axis_index(axis)], None if len({n for _, n in cuts}) == 1 else cuts[0][1]


def _column(name: str, value: Number, x: Tensor, least: float, most: float) -> Tensor:
    """A number for each sequence: [slots, 1], or [1, 1]. Tensors are clamped to the range; numbers must lie in it."""
    if isinstance(value, Tensor):
        _check_rows(x, **{name: value})
        return value.to(x.dtype).clamp(least, most)[:, None]
    if type(value) not in (int, float) or not least <= value <= most or (name == "top_k" and type(value) is not int):
        kind = {"temperature": "a number from 0 on", "top_k": "an int from 1 on", "top_p": "a number above 0, up to 1"}
        raise ArgumentError(f"sample got {name}={value!r}; give it {kind[name]}, or a tensor of one for each sequence")
    return torch.full((1, 1), value, dtype=x.dtype, device=x.device)


def _check_rows(logits: Tensor, **rows: Tensor) -> None:
    for name, x in rows.items():
        if name in ("keys", "positions") and x.dtype is not torch.int64:
            raise ArgumentError(f"sample got {described(x)} for {name}; give it an int64 for each sequence")
        if x.dim() != 1 or x.shape[0] != logits.shape[0]:
            raise ShapeError(
                f"sample got {name} of shape {tuple(x.shape)} for {logits.shape[0]} sequences; give it one for each"
            )
