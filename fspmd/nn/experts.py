"""Experts that lie on the ranks of an axis: the choice of experts, and the move of tokens to them and back. In a body.

Of E experts each of n ranks has E / n, in rank order: ``P("ep")`` cuts their weights. If that is no whole number, it is
rounded up, and the last ranks have fewer or none. Of several axes, as in ``P(("ep", "tp"))``, each cuts the blocks of
the axes before it. A rank has T tokens, and each token k experts: T k choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fspmd.body import bound_body, resolve_axes
from fspmd.collectives import all_gather, all_to_all, axis_index, axis_size, pmax, psum
from fspmd.collectives.ragged import exchanged_rows
from fspmd.entries import blocks
from fspmd.errors import ArgumentError, RecordError, ShapeError
from fspmd.messages import as_axis_name, described
from fspmd.nn.arguments import Block, Count, Finite, checked
from fspmd.nn.checks import check_groups, check_varies
from fspmd.nn.parameters import moved
from fspmd.nn.parts import wide
from fspmd.nn.sequences import Axes, names_of
from fspmd.rules.contractions import rows_by_groups
from fspmd.spec import P, TensorSpec
from fspmd.tracing import recorder
from fspmd.variance import get_variance


class Routing(NamedTuple):
    """Which experts compute which tokens, and figures of the whole batch. A pytree."""

    weights: Tensor  #: [tokens, k], of results of experts
    experts: Tensor  #: [tokens, k], each token's experts, int64
    counts: Tensor  #: [experts], how many tokens of the whole batch each expert has, int64
    balance_loss: Tensor  #: 1 for an even choice, up to experts / k for an uneven one
    z_loss: Tensor  #: the mean square of the logsumexp of a token's logits


@checked
def route(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    axes: Axes = (),
) -> Routing:
    """Choose the k experts with the highest scores for each token.

    Args:
        logits: [tokens, experts]. Scores are computed in float32, or float64.
        k: How many experts each token has.
        bias: [experts]. Added to scores for the choice, not for weights. See `balance`.
        score: What scores are of logits.
        normalize: Whether the weights of a token add up to 1. With ``k=1`` they then have no gradient.
        axes: The mesh axes that cut the batch. The type checker names a result that lacks one, and its function.

    Returns:
        A `Routing`. Its counts and losses are those of the whole batch: sums over all tokens, divided by their number,
        whatever ranks have how many. ``balance_loss`` is that of Fedus et al., "Switch Transformers", 2021, eq. 4.

    Communication: one `psum` over ``axes``, forward, of 2 E + 1 numbers in float64: counts, shares of scores, a square.

    Raises:
        ArgumentError: ``k`` or ``score`` is unknown.
        ShapeError: ``logits`` is no matrix, or ``bias`` has another length.
        VarianceError: Ranks of one of ``axes`` have the same tokens, which would count several times.

    >>> import torch
    >>> from fspmd.nn import route
    >>> routing = route(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), 2)
    >>> routing.experts.tolist(), routing.counts.tolist()
    ([[0, 2], [1, 2]], [1, 1, 2])
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ShapeError(f"route got {described(logits)} for logits; give it floats [tokens, experts]")
    n = logits.shape[1]
    if type(k) is not int or not 1 <= k <= n:
        raise ArgumentError(f"route got k={k!r} for {n} experts; give it an int from 1 to {n}")
    if score not in ("softmax", "sigmoid"):
        raise ArgumentError(f"route got score={score!r}; expected 'softmax' or 'sigmoid'")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.is_complex()):
        raise ShapeError(
            f"route got a bias of shape {tuple(bias.shape)} of {bias.dtype} for {n} experts; give it real numbers of "
            f"shape ({n},)"
        )
    if axes:
        check_varies("route", axes, "logits", logits)
    logits = logits.to(wide(logits))
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    shares = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    choice = scores.detach() if bias is None else scores.detach() + bias.detach()
    experts = choice.topk(k, 1).indices
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True)
    counts, share, z = counted(experts.flatten(), n), shares.sum(0), logits.logsumexp(1).square().sum()
    if axes:  # float64 holds counts exactly
        sums = psum(torch.cat([x.double().view(-1) for x in (counts, share, z)]), axes).split([n, n, 1])
        counts, share, z = sums[0].long(), sums[1].to(share.dtype), sums[2].to(z.dtype).view(())
    chosen = counts.sum().clamp(min=1)
    balance_loss = (counts.to(share.dtype) * share).sum() * (n * k) / chosen / chosen
    return Routing(weights, experts, counts, balance_loss, z * k / chosen)


@checked
def balance(bias: Tensor, counts: Tensor, rate: Finite) -> Tensor:
    """The bias for the next step: higher for experts with less than the mean, lower for those with more.

    Call it once a step with the counts of the step, outside of what is recomputed. It is a pure function. From Wang et
    al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1.

    Args:
        bias: [..., experts], that of `route`, or of several layers.
        counts: [..., experts], `Routing.counts`. Add up those of microbatches.
        rate: By how much a bias changes, from 0 on, such as 0.001.

    >>> import torch
    >>> from fspmd.nn import balance
    >>> balance(torch.zeros(3), torch.tensor([4, 0, 2]), 0.5)
    tensor([-0.5000,  0.5000,  0.0000])
    """
    if bias.shape != counts.shape:
        raise ShapeError(f"balance got a bias of shape {tuple(bias.shape)} and counts of {tuple(counts.shape)}")
    with torch.no_grad():
        gap = counts.sum(-1, keepdim=True) - counts * counts.shape[-1]
        return bias + rate * gap.sign().to(bias.dtype)


def counted(experts: Tensor, n: int) -> Tensor:
    """How often each of n experts is in a list, int64 [n]. No operation of the host."""
    ends = torch.searchsorted(experts.sort().values, torch.arange(n, device=experts.device), right=True)
    return torch.diff(ends, prepend=ends.new_zeros(1))


class Dispatched(NamedTuple):
    """Tokens at their experts, and the way back. A pytree."""

    rows: Tensor  #: [rows, width], the tokens of this rank's experts, ordered by expert; zeros past the last
    counts: Tensor  #: [experts of this rank], how many rows each of them has
    dropped: Tensor  #: how many choices of this rank's tokens found no place; 0 without a capacity
    places: Tensor  #: [T k], where the result of a choice lies among those that return
    back: Tensor | None  #: [4, E], the slices that return, as in `exchanged_rows`; None with a capacity
    axes: tuple[dict[str, tuple[()]], ...]  #: the names of the axes of the experts, as keys, which are no leaves


@checked
def dispatch(
    x: Block, routing: Routing, axis: Axes, *, capacity: Count | None = None, rows: Count | None = None
) -> Dispatched:
    """Send tokens to the ranks of their experts. `combine` sends results back.

    Args:
        x: [T, width], this rank's tokens. Ranks may have different numbers of tokens.
        routing: The choice for these tokens, from `route`.
        axis: The mesh axis, or axes in rank order, that cuts the experts.
        capacity: How many tokens each rank may send to each expert. Later tokens are dropped. All shapes are then known
            beforehand, and the host reads nothing. The default drops none.
        rows: Without a capacity, how many rows each rank has room for; `jit` needs it. The default is as many as the
            fullest rank needs, which the host reads. On an abstract mesh, where no choice is known, it is T k: as many
            as an even choice needs.

    Returns:
        `Dispatched`, with ``rows`` [E capacity, width] if there is a capacity. Here and below E is rounded up to a
        multiple of n.

    Communication, with a capacity: one `all_to_all` of E * capacity rows, forward and backward. Without: an
    `all_gather` of E counts, a `pmax` over other axes over which the tokens vary, and an all-to-all of the T k chosen
    rows; backward sends the gradients of these rows back. The host reads the counts.
    Where nothing has values, in ``jit(f).lower(...)``, the prices are those of a choice that is even over ranks.

    Raises:
        ShapeError: The choice is not for these tokens; or ``rows`` is too small, on all ranks.

    >>> import torch
    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> from fspmd.nn import dispatch, route
    >>> def body(x):
    ...     return dispatch(x, route(x, 1, axes="ep"), "ep").rows
    >>> f = shard_map(body, mesh=make_mesh((2,), ("ep",)), in_specs=P("ep"), out_specs=P("ep"))
    >>> device_get(f(torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [4.0, 0.0]])))
    tensor([[2., 0.],
            [4., 0.],
            [0., 1.],
            [0., 3.]])
    """
    n = _check(x, routing, axis, capacity, rows)
    total, k = n * -(-routing.counts.shape[0] // n), routing.experts.shape[1]
    shelves = _shelves(routing.counts, axis)
    chosen = routing.experts.flatten() if shelves is None else shelves.index_select(0, routing.experts.flatten())
    order = chosen.argsort(stable=True)
    counts = counted(chosen, total)
    starts, tokens, position = _before(counts), order // k, order.argsort()
    if capacity is not None:
        own = _own(torch.full_like(routing.counts, n * capacity), axis)
        return _with_capacity(x, axis, capacity, own, chosen, counts, starts, tokens, position)
    table = all_gather(counts, axis, to="invarying").view(n, n, total // n)  # of the source, of the rank and expert
    ordered = table.permute(1, 2, 0).flatten(1)  # rows lie by expert, then by source
    fullest = ordered.sum(1).max()
    needed = None if rows is None else fullest
    if rows is None:
        is_abstract = bound_body("dispatch").mesh.transport == "abstract"
        rows = len(tokens) if is_abstract else _fullest(fullest, axis)
    here = axis_index(axis).view(1)
    got = table.index_select(1, here).flatten()
    lies = _before(ordered).view(n, -1, n).index_select(0, here)[0].T.flatten()
    goes, comes = torch.stack([starts, counts]), torch.stack([lies, got])
    sent = x.index_select(0, tokens)
    arrived = exchanged_rows(sent, rows, torch.cat([goes, comes]), axis, "dispatch", needed)
    of_shelves = table.sum(0).flatten()
    of_experts = of_shelves[: routing.counts.shape[0]] if shelves is None else of_shelves.index_select(0, shelves)
    own = _own(of_experts, axis)
    return Dispatched(arrived, own, counts.sum() * 0, position, torch.cat([comes, goes]), _keys(axis))


@checked
def combine(y: Tensor, sent: Dispatched, routing: Routing, axis: Axes) -> Tensor:
    """Send the results of experts back, and add up those of each token, times its weights.

    Args:
        y: [rows, out_width], for ``sent.rows``.
        sent: What `dispatch` gave.
        routing: The choice that `dispatch` was given. Dropped choices count as 0.
        axis: That of `dispatch`.

    Returns:
        [T, out_width], of the dtype of ``y``. The sum is in float32, or float64.

    Communication: an exchange of results, as large as that of `dispatch`, forward; the same of gradients, backward.

    Raises:
        ShapeError: ``y`` has other rows than ``sent.rows``, or the routing is another one than that of `dispatch`.
        ArgumentError: ``axis`` is another one than that of `dispatch`.
    """
    if y.dim() != 2 or y.shape[0] != sent.rows.shape[0]:
        raise ShapeError(
            f"combine got results {described(y)} for rows {described(sent.rows)}; give it one row for each of these"
        )
    if sent.places.shape[0] != routing.experts.numel():
        raise ShapeError(
            f"combine got the dispatch of {sent.places.shape[0]} choices and a routing of "
            f"{routing.experts.numel()}; give it the routing that dispatch was given"
        )
    if _keys(axis) != sent.axes:
        of_dispatch = as_axis_name([name for key in sent.axes for name in key])
        raise ArgumentError(
            f"combine got axis={axis!r} for a dispatch over {of_dispatch}; give it the axis of dispatch"
        )
    if sent.back is None:
        n = axis_size(axis)
        by_source = y.view(-(-routing.counts.shape[0] // n), n, -1, y.shape[1])
        returned = all_to_all(by_source, axis, 1, 0, tiled=True).flatten(0, 2)
        returned = torch.cat([returned.new_zeros(1, y.shape[1]), returned])
    else:
        returned = exchanged_rows(y, sent.places, sent.back, axis, "combine")
    parts = returned.index_select(0, sent.places).view(*routing.experts.shape, y.shape[1])
    return (parts.to(wide(y)) * routing.weights[..., None]).sum(1).to(y.dtype)


@checked
def experts(
    x: Tensor,
    routing: Routing,
    f: Callable[[Tensor, Tensor], Tensor],
    *,
    axis: Axes,
    capacity: int | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of the experts of each token, and how many choices were dropped: `dispatch`, f and `combine`.

    Args:
        f: Gets rows [rows, width], ordered by expert, and counts, of each expert; gives one row for each. See
            `grouped_matmul`. With a capacity the counts include rows of zeros.

    Other arguments, communication and errors are those of `dispatch` and `combine`.

    A body sees which tokens a rank has; a global value does not say it. On global values the experts are therefore a
    function under `shard_map`, which takes `Sharded` values and gives some. Before and after it stand other functions.

    >>> import torch
    >>> from fspmd import P, device_get, device_put, grad, make_mesh, shard_map
    >>> from fspmd.nn import experts, grouped_matmul, route
    >>> mesh = make_mesh((2,), ("ep",))
    >>> @shard_map(mesh=mesh, in_specs=(P("ep"), P("ep")), out_specs=P("ep"))
    ... def mixture(x, w):
    ...     f = lambda rows, counts: grouped_matmul(rows, w, counts)
    ...     return experts(x, route(x, 2, axes="ep"), f, axis="ep")[0]
    >>> x, w = device_put((torch.randn(6, 4), torch.eye(4).expand(4, 4, 4)), P("ep"), mesh=mesh)
    >>> y = torch.relu(mixture(x, w))
    >>> y
    Sharded f32[6@ep, 4] on mesh(ep=2)
    >>> torch.allclose(device_get(y), device_get(x).relu(), atol=1e-6)
    True
    >>> grad(lambda w: mixture(x, w).sum())(w)
    Sharded f32[4@ep, 4, 4] on mesh(ep=2)
    """
    sent = dispatch(x, routing, axis, capacity=capacity, rows=rows)
    return combine(f(sent.rows, sent.counts), sent, routing, axis), sent.dropped


@checked
def grouped_matmul(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """The product of each group of rows with its matrix. Rows past the last group give 0, and get gradients of 0.

    Args:
        x: [rows, a], ordered by group.
        w: [groups, a, b], of the same dtype.
        counts: [groups], how many rows each group has.

    On CPUs counts that are below 0, or more than the rows together, are an error. GPUs would have to wait for that, and
    a record cannot raise for it: there, groups past the last row have no rows.

    Returns:
        [rows, b]. `torch.nn.functional.grouped_mm` computes it where it has the dtype. Otherwise each group has a
        product with all rows, those of other groups being 0; so the host reads nothing.

    Raises:
        ShapeError: The shapes do not fit together.
        ArgumentError: The dtypes do not; or, on CPUs, the counts do not fit the rows.

    >>> import torch
    >>> from fspmd.nn import grouped_matmul
    >>> grouped_matmul(torch.ones(4, 1), torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([1, 2])).flatten()
    tensor([2., 3., 3., 0.])
    """
    if x.dim() != 2 or w.dim() != 3 or w.shape[1] != x.shape[1] or tuple(counts.shape) != (w.shape[0],):
        raise ShapeError(
            f"grouped_matmul got {described(x)}, {described(w)} and counts {described(counts)}; they must be "
            "[rows, a], [groups, a, b] and [groups]"
        )
    if counts.is_floating_point() or counts.dtype is torch.bool:
        raise ArgumentError(f"grouped_matmul got counts of {counts.dtype}; give it ints: how many rows each group has")
    if x.dtype is not w.dtype:
        raise ArgumentError(f"grouped_matmul got {x.dtype} and {w.dtype}; give it one dtype")
    if recorder() is None:
        check_groups("grouped_matmul", x, counts)
    return rows_by_groups(x, w, counts.cumsum(0).to(torch.int32))


def _keys(axis: Axes) -> tuple[dict[str, tuple[()]], ...]:
    """The names of axes in a pytree without leaves, which `Dispatched` keeps wherever it goes."""
    return tuple({name: ()} for name in resolve_axes(bound_body("combine"), axis, "combine"))


def _with_capacity(
    x: Tensor,
    axis: Axes,
    capacity: int,
    own: Tensor,
    chosen: Tensor,
    counts: Tensor,
    starts: Tensor,
    tokens: Tensor,
    position: Tensor,
) -> Dispatched:
    """`dispatch` into so many places for each rank and expert. Index 0 is a row of zeros.

    ``own`` has the counts of this rank's experts.
    """
    total, place = counts.shape[0], torch.arange(capacity, device=x.device)
    choice = torch.where(place < counts[:, None], starts[:, None] + place + 1, 0)
    source = torch.cat([tokens.new_zeros(1), tokens + 1]).index_select(0, choice.flatten())
    sent = torch.cat([x.new_zeros(1, x.shape[1]), x]).index_select(0, source)
    rows = all_to_all(sent.view(total, 1, capacity, x.shape[1]), axis, 0, 1, tiled=True).flatten(0, 2)
    among = position - starts.index_select(0, chosen)
    places = torch.where(among < capacity, chosen * capacity + among + 1, 0)
    return Dispatched(rows, own, (counts - capacity).clamp(min=0).sum(), places, None, _keys(axis))


def _before(counts: Tensor) -> Tensor:
    """The sum of the numbers before each one, along the last dim."""
    return counts.cumsum(-1) - counts


def _shelves(counts: Tensor, axis: Axes) -> Tensor | None:
    """The place of each expert, int64 [E], where each rank has E / n places, rounded up. None if they are 0 to E - 1.

    Of several axes each cuts the blocks of the axes before it. So a rank before the last may have places to spare.
    """
    body, total = bound_body("dispatch"), counts.shape[0]
    cuts = blocks(total, body.sizes(resolve_axes(body, axis, "dispatch")))
    most = -(-total // len(cuts))
    shelves = [rank * most + i for rank, (_, size) in enumerate(cuts) for i in range(size)]
    return None if shelves == [*range(total)] else torch.tensor(shelves, device=counts.device)


def _own(counts: Tensor, axis: Axes) -> Tensor:
    """The numbers of this rank's experts among those of all, [E]. Moves nothing."""
    body, axes = bound_body("dispatch"), names_of(axis)
    whole = TensorSpec(body.mesh, P(), tuple(counts.shape), counts.dtype)
    return moved(counts, whole, whole.with_partition(P(axes)), get_variance(counts).moved(axes, "V"))


def _fullest(rows: Tensor, axis: Axes) -> int:
    """The most rows of any rank, as a number of the host. So blocks have one shape on all ranks."""
    body = bound_body("dispatch")
    if recorder() is not None:
        raise RecordError(
            "dispatch reads how many rows the fullest rank gets, which jit cannot record; give rows=, at most the "
            "choices of all ranks, or capacity="
        )
    others = get_variance(rows).varying if body.checked else {*body.mesh.axis_names}.difference(names_of(axis))
    return int(pmax(rows, tuple(sorted(others))) if others else rows)


def _check(x: Tensor, routing: Routing, axis: Axes, capacity: int | None, rows: int | None) -> int:
    """Raise before anything moves unless arguments fit. The number of ranks."""
    if x.dim() != 2:
        raise ShapeError(f"dispatch got {described(x)}; give it this rank's tokens [tokens, width], in a body")
    if capacity is not None and rows is not None:
        raise ArgumentError("dispatch got capacity and rows; a capacity decides how many rows there are")
    if routing.experts.shape[0] != x.shape[0]:
        raise ShapeError(f"dispatch got {x.shape[0]} tokens and a routing of {routing.experts.shape[0]}")
    return axis_size(axis)
