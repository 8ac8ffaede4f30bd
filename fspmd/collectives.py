"""The collectives of the local view, with JAX's names, argument order and semantics.

Each takes a pytree and one mesh axis or a tuple of axes, whose order is the rank order. Each is differentiable any
number of times; `fspmd.pairs.PAIRS` is the table of what forward and backward communicate. ``wait=False`` returns a
handle whose ``.wait()`` gives the result; in backward, too, communication starts early and is waited for late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.checks import (
    block_lengths,
    check_blocks,
    check_dim,
    check_divides,
    check_index_groups,
    check_permutation,
    check_size,
)
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.pairs import Call, apply, call
from fspmd.steps import Handle, Rows, Step, run
from fspmd.transport import Options
from fspmd.variance import ATTRIBUTE, BORROWED, INVARIANT, Variance, get_variance, set_variance, show

AxisName = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None

# --- reductions -----------------------------------------------------------------------------------------------------


def psum(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Sum over mesh axes: ``[A] [B] => A+B``, invariant over them.

    Forward an all-reduce, backward nothing. The sum of an unreduced value is the pending one; of an invariant value,
    the value times the number of ranks; of a Python number, that without any communication. Booleans are counted.

    Raises:
        AxisError: outside a body, or an axis that is not bound.
        VarianceError: axes of different types in one call, or a reduced value.

    >>> from fspmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> shard_map(lambda x: psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0))
    Sharded f32[1] on mesh(x=4)
    """
    body = state.body
    if body is not None and wait and axis_index_groups is None and isinstance(x, Tensor):
        known = body.calls.get((axis_name, getattr(x, ATTRIBUTE, None))) if type(axis_name) is str else None
        if known is not None:
            with torch._C.DisableTorchFunction():
                if x.dtype is not torch.bool and not torch._C._are_functorch_transforms_active():
                    y = apply(x, known[0])
                    if known[1] is not None:
                        setattr(y, ATTRIBUTE, known[1])
                    return y
    return _reduction(x, axis_name, axis_index_groups, wait, "psum")


def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Mean over mesh axes: `psum` divided by the number of ranks. Integers give floats.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> device_get(shard_map(lambda x: pmean(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0)))
    tensor([1.5000])
    """
    return _reduction(x, axis_name, axis_index_groups, wait, "pmean")


def _reduction(x: Any, axis_name: AxisName, groups: Groups, wait: bool, what: str) -> Any:
    body = bound_body(what, f"{what}(x, 'x')")
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = _flatten(x, what)
    n = math.prod(body.sizes(axes))
    index_groups = check_index_groups(groups, n, what, equal=what == "pmean")
    if not axes:
        return x if wait else _done(x)
    count = n if index_groups is None else len(index_groups[0])
    mean = what == "pmean"
    steps: list[Step | None] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):  # a Python number: no communication
            leaves[i] = (float(leaf) if isinstance(leaf, bool) else leaf) if mean else leaf * count
            steps.append(None)
            continue
        if leaf.dtype is torch.bool:
            with torch._C.DisableTorchFunction():
                leaves[i] = leaf = set_variance(leaf.to(torch.int64), get_variance(leaf))
        step = _psum_step(body, leaf, axes, index_groups, what)
        if mean:
            step = _then(step, lambda y: y / count)
        elif type(axis_name) is str and index_groups is None:
            _remember_psum(body, axis_name, leaf, step)
        leaves[i] = _operand(body, leaf, axes, step)
        steps.append(step)
    return run(body, leaves, steps, treedef, wait)


def _psum_step(body: Body, x: Tensor, axes: tuple[str, ...], index_groups: Any, what: str) -> Step:
    variance = get_variance(x)
    letter = _one_state(x, variance, axes, what) if body.checked else "V"
    if letter == "R":
        raise VarianceError(
            f"{what} of {show(x)} over {axes}: the value is reduced there, so it is equal on all ranks already; use it "
            "as it is, or pcast(x, axis, to='varying') if a sum of equal copies is meant"
        )
    if index_groups is not None:
        name, after = "psum_varying", variance.moved(axes, "V") if body.checked else INVARIANT
    elif not body.checked:
        name, after = "psum_varying", INVARIANT
    else:
        name, after = ("psum_unreduced" if letter == "U" else "psum"), variance.moved(axes, "I")
    return _flat(call(name, body.mesh, axes, Options(index_groups=index_groups)), after, x)


def _remember_psum(body: Body, axis_name: str, x: Tensor, step: Step) -> None:
    """The fast path of `psum`: known types need no more checks."""
    variance = getattr(x, ATTRIBUTE, None)
    if not body.checked or (variance is not None and axis_name in variance.varying):
        body.calls[axis_name, variance] = step.call, step.variance if body.checked else None


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Maximum over mesh axes, element by element; invariant over them.

    Forward an all-reduce. The gradient goes to the elements that attain the maximum, in equal parts, as torch.amax's
    does; finding out how many they are costs an all-reduce in backward.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> device_get(shard_map(lambda x: pmax(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0)))
    tensor([3.])
    """
    return _extremum(x, axis_name, axis_index_groups, wait, "max")


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Minimum over mesh axes; see `pmax`."""
    return _extremum(x, axis_name, axis_index_groups, wait, "min")


def _extremum(x: Any, axis_name: AxisName, groups: Groups, wait: bool, op: str) -> Any:
    what = f"p{op}"
    body = bound_body(what, f"{what}(x, 'x')")
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = _flatten(x, what)
    index_groups = check_index_groups(groups, math.prod(body.sizes(axes)), what, equal=False)
    if not axes:
        return x if wait else _done(x)
    steps: list[Step | None] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            steps.append(None)
            continue
        if leaf.dtype.is_complex:
            raise ArgumentError(
                f"{what} of {show(leaf)}: complex numbers have no order; take the real part or abs first"
            )
        variance = _varying_operand(body, leaf, axes, what)
        after = variance.moved(axes, "V" if index_groups else "I") if body.checked else INVARIANT
        o = Options(op=op, index_groups=index_groups)
        sums = "psum_varying" if index_groups is not None or not body.checked else "psum"
        find = call("psum_varying", body.mesh, axes, o)
        leaves[i] = _cast(body, leaf, variance.moved(axes, "V"))
        if leaf.requires_grad or torch._C._are_functorch_transforms_active():
            count = call(sums, body.mesh, axes, Options(index_groups=index_groups))
            steps.append(Step(None, after, after=lambda x, find=find, count=count: _Extremum.apply(x, find, count)))
        else:
            steps.append(_flat(find, after, leaf))
    return run(body, leaves, steps, treedef, wait)


class _Extremum(torch.autograd.Function):
    """``find`` the extremum; the gradient is shared by the elements that attain it, ``count`` of them."""

    @staticmethod
    def forward(x: Tensor, find: Call, count: Call) -> Tensor:  # type: ignore[override]
        return find.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Call, Call], output: Tensor) -> None:
        x, ctx.find, ctx.count = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            return apply(g, ctx.count.transposed) * _shares(*ctx.saved_tensors, ctx.count), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            return apply(tangent * _shares(*ctx.saved_tensors, ctx.count), ctx.count)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, find: Call, count: Call) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Extremum.apply(x, find, count), in_dims[0]


def _shares(x: Tensor, best: Tensor, count: Call) -> Tensor:
    hit = (x == best).to(x.dtype)
    return hit / apply(hit, count)


# --- gathers and scatters -------------------------------------------------------------------------------------------


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    size: int | None = None,
    wait: bool = True,
) -> Any:
    """Every rank's block on every rank: ``[A] [B] => [A,B] [A,B]``.

    ``tiled`` joins the blocks along the existing dim ``axis``, otherwise they are stacked along a new one. ``to`` is
    the type of the result over the axes: "varying" (backward a reduce-scatter), "invarying" (backward a slice) or
    "reduced" (backward a reduce-scatter of pending sums). ``size`` is the global size of ``axis`` where blocks are
    uneven, as torch.chunk cuts them; it needs ``tiled``. Nothing is copied when the gathered dim is leading.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = lambda x: all_gather(x, "x", tiled=True, to="invarying", size=5)
    >>> device_get(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(5)))
    tensor([0, 1, 2, 3, 4])
    """
    what = "all_gather"
    body = bound_body(what, "all_gather(x, 'x', tiled=True, to='invarying')")
    axes = resolve_axes(body, axis_name, what)
    if to not in _GATHER_ROWS:
        raise ArgumentError(f"all_gather got to={to!r}; expected one of {', '.join(map(repr, _GATHER_ROWS))}")
    leaves, treedef = _tensors(x, what)
    n = math.prod(body.sizes(axes))
    index_groups = check_index_groups(axis_index_groups, n, what, equal=True)
    if index_groups and to != "varying":
        raise ArgumentError(f"all_gather with axis_index_groups differs from group to group; to={to!r} is not possible")
    if not axes:
        return x if wait else _done(x)
    _check_size_use(size, tiled, index_groups, what)
    name, letter = _GATHER_ROWS[to] if body.checked else _GATHER_ROWS["varying"]
    steps: list[Step | None] = []
    for i, leaf in enumerate(leaves):
        variance = _varying_operand(body, leaf, axes, what)
        if letter == "R" and body.checked and not variance.varying.intersection(axes):
            raise VarianceError(
                f"all_gather(to='reduced') of {show(leaf)} over {axes}: the value does not vary there, so its gradient "
                "would not be a pending sum of different blocks; use pcast(x, axis, to='reduced')"
            )
        dim = check_dim(axis, leaf.ndim + (not tiled), what, "axis")
        lengths = None
        if size is not None:
            lengths = block_lengths(body, axes, check_size(size, what))
            check_blocks(body, leaf, axes, dim, size, lengths, what)
        after = variance.moved(axes, letter) if body.checked else INVARIANT
        leaves[i] = _cast(body, leaf, variance.moved(axes, "V"))
        steps.append(_gather_step(body, leaf, axes, name, dim, tiled, lengths, index_groups, after))
    return run(body, leaves, steps, treedef, wait)


_GATHER_ROWS = {
    "varying": ("all_gather", "V"),
    "invarying": ("all_gather_invariant", "I"),
    "reduced": ("all_gather_reduced", "R"),
}


def _gather_step(
    body: Body,
    x: Tensor,
    axes: tuple[str, ...],
    name: str,
    dim: int,
    tiled: bool,
    lengths: tuple[int, ...] | None,
    index_groups: Any,
    after: Variance,
) -> Step:
    o = Options(dim=dim, sizes=lengths, index_groups=index_groups)
    rows = None
    if lengths is None:
        shape = tuple(x.shape)

        def back(gathered: Tensor) -> Tensor:
            stacked = gathered.unflatten(1, shape) if shape else gathered.squeeze(1)
            stacked = stacked.movedim(0, dim)
            return stacked.flatten(dim, dim + 1) if tiled else stacked

        on_rows = call(name, body.mesh, axes, Options(index_groups=index_groups))
        rows = Rows(on_rows, lambda leaf: leaf.reshape(1, -1), back)
    before = None if tiled else (lambda leaf: leaf.unsqueeze(dim))
    return Step(call(name, body.mesh, axes, o), after, before, rows=rows)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: bool = True,
) -> Any:
    """Sum over ranks, each keeping its block: ``[A0,A1] [B0,B1] => [A0+B0] [A1+B1]``.

    A reduce-scatter; backward an all-gather. ``tiled`` keeps the scattered dim (its size divided), otherwise the dim
    must equal the number of ranks and is dropped. ``size`` allows a dim that does not divide: blocks as torch.chunk
    cuts them.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = lambda x: psum_scatter(x, "x", tiled=True, size=5)
    >>> device_get(shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("x"))(torch.arange(5)))
    tensor([ 0,  4,  8, 12, 16])
    """
    what = "psum_scatter"
    body = bound_body(what, "psum_scatter(x, 'x', tiled=True)")
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = _tensors(x, what)
    n = math.prod(body.sizes(axes))
    index_groups = check_index_groups(axis_index_groups, n, what, equal=True)
    if not axes:
        return x if wait else _done(x)
    _check_size_use(size, tiled, index_groups, what)
    count = len(index_groups[0]) if index_groups else n
    steps: list[Step | None] = []
    for i, leaf in enumerate(leaves):
        variance = get_variance(leaf)
        letter = _one_state(leaf, variance, axes, what) if body.checked else "V"
        if letter == "R":
            raise VarianceError(f"psum_scatter of {show(leaf)}: the value is reduced over {axes}, not a sum to be made")
        dim = check_dim(scatter_dimension, leaf.ndim, what, "scatter_dimension")
        lengths = None
        if size is not None:
            lengths = block_lengths(body, axes, check_size(size, what))
            if leaf.shape[dim] != size:
                raise ShapeError(f"psum_scatter of {show(leaf)} got size={size}, but dim {dim} is {leaf.shape[dim]}")
        elif not tiled and leaf.shape[dim] != count:
            raise ShapeError(
                f"psum_scatter of {show(leaf)} without tiled=True: dim {dim} is {leaf.shape[dim]}, but it must equal "
                f"the number of ranks, {count}; pass tiled=True to split the dim into {count} blocks"
            )
        elif tiled:
            check_divides(
                leaf, dim, count, what, f"pass size={leaf.shape[dim]} for uneven blocks as torch.chunk cuts them"
            )
        name = "psum_scatter_unreduced" if letter == "U" else "psum_scatter"
        after = variance.moved(axes, "V") if body.checked else INVARIANT
        if letter == "I" and body.checked:
            leaves[i] = _cast(body, leaf, after)
        o = Options(dim=dim, sizes=lengths, index_groups=index_groups)
        squeeze = None if tiled else (lambda y, dim=dim: y.squeeze(dim))
        rows = None if lengths else _scatter_rows(body, leaf, axes, name, dim, tiled, count, index_groups)
        steps.append(Step(call(name, body.mesh, axes, o), after, after=squeeze, rows=rows))
    return run(body, leaves, steps, treedef, wait)


def _scatter_rows(
    body: Body, x: Tensor, axes: tuple[str, ...], name: str, dim: int, tiled: bool, n: int, index_groups: Any
) -> Rows:
    shape = list(x.shape)
    shape[dim] //= n

    def back(row: Tensor) -> Tensor:
        block = row.reshape(shape)
        return block if tiled else block.squeeze(dim)

    on_rows = call(name, body.mesh, axes, Options(index_groups=index_groups))
    return Rows(on_rows, lambda leaf: leaf.unflatten(dim, (n, -1)).movedim(dim, 0).reshape(n, -1), back)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    size: int | None = None,
    wait: bool = True,
) -> Any:
    """Transpose blocks between ranks: ``[A0,A1] [B0,B1] => [A0,B0] [A1,B1]``.

    ``tiled`` splits the dim ``split_axis`` into one block per rank and joins what arrives along ``concat_axis``;
    otherwise ``split_axis`` must equal the number of ranks, is dropped, and a new dim stands at ``concat_axis``.
    ``size``, with ``tiled``, is the global size of ``concat_axis`` where its blocks are uneven; then ``split_axis``
    may be uneven too. Backward is the inverse all-to-all.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ("x",))
    >>> f = lambda x: all_to_all(x, "x", 1, 0, tiled=True)  # from sharded rows to sharded columns
    >>> device_get(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))(torch.arange(4).view(2, 2)))
    tensor([[0, 1],
            [2, 3]])
    """
    what = "all_to_all"
    body = bound_body(what, "all_to_all(x, 'x', 1, 0, tiled=True)")
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = _tensors(x, what)
    n = math.prod(body.sizes(axes))
    index_groups = check_index_groups(axis_index_groups, n, what, equal=True)
    if not axes:
        return x if wait else _done(x)
    _check_size_use(size, tiled, index_groups, what)
    count = len(index_groups[0]) if index_groups else n
    steps: list[Step | None] = []
    for i, leaf in enumerate(leaves):
        variance = _varying_operand(body, leaf, axes, what)
        split = check_dim(split_axis, leaf.ndim, what, "split_axis")
        concat = check_dim(concat_axis, leaf.ndim, what, "concat_axis")
        o = Options(index_groups=index_groups)
        if size is None and not tiled and leaf.shape[split] != count:
            raise ShapeError(
                f"all_to_all of {show(leaf)} without tiled=True: dim {split} is {leaf.shape[split]}, but it must equal "
                f"the number of ranks, {count}; pass tiled=True to split the dim into {count} blocks"
            )
        if size is None and tiled:
            check_divides(leaf, split, count, what, "pass size= (the global size of concat_axis) for uneven blocks")
        leaves[i] = _cast(body, leaf, variance.moved(axes, "V"))
        after = variance.moved(axes, "V") if body.checked else INVARIANT
        before = back = None
        if size is not None:
            joined = tuple(block_lengths(body, axes, check_size(size, what)) or (size // n,) * n)
            check_blocks(body, leaf, axes, concat, size, joined, what)
            pieces = block_lengths(body, axes, leaf.shape[split]) or (leaf.shape[split] // n,) * n
            if len(set(pieces)) > 1 or len(set(joined)) > 1:
                if split == concat:
                    raise ShapeError("all_to_all with uneven blocks needs different split_axis and concat_axis")
                o = Options(dim=split, sizes=pieces, concat_dim=concat, concat_sizes=joined)
            else:
                o = Options(dim=split, concat_dim=concat)
        elif tiled:
            o = Options(dim=split, concat_dim=concat, index_groups=index_groups)
        else:  # a new dim of one stands where the ranks will be joined; the split dim becomes one
            new = concat if concat <= split else concat + 1
            gone = split + 1 if concat <= split else split
            before = lambda leaf, new=new: leaf.unsqueeze(new)  # noqa: E731
            back = lambda y, gone=gone: y.squeeze(gone)  # noqa: E731
            o = Options(dim=gone, concat_dim=new, index_groups=index_groups)
        steps.append(
            Step(call(what, body.mesh, axes, o), after, before, back, _exchange_rows(body, leaf, axes, o, back))
        )
    return run(body, leaves, steps, treedef, wait)


def _exchange_rows(body: Body, x: Tensor, axes: tuple[str, ...], o: Options, squeeze: Any) -> Rows | None:
    if o.sizes is not None:
        return None
    n = len(o.index_groups[0]) if o.index_groups else math.prod(body.sizes(axes))
    shape = list(x.shape)
    if squeeze is not None:
        shape.insert(o.concat_dim, 1)
    piece = list(shape)
    piece[o.dim] //= n

    def into(leaf: Tensor) -> Tensor:
        return leaf.reshape(shape).unflatten(o.dim, (n, -1)).movedim(o.dim, 0).reshape(n, -1)

    def back(rows: Tensor) -> Tensor:
        y = rows.reshape(n, *piece).movedim(0, o.concat_dim).flatten(o.concat_dim, o.concat_dim + 1)
        return squeeze(y) if squeeze is not None else y

    return Rows(call("all_to_all", body.mesh, axes, Options(index_groups=o.index_groups)), into, back)


def pswapaxes(x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None, wait: bool = True) -> Any:
    """Swap a mesh axis with a dim of its size: ``all_to_all(x, axis_name, axis, axis)``."""
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups, wait=wait)


# --- permutations ---------------------------------------------------------------------------------------------------


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, wait: bool = True) -> Any:
    """Send blocks along (source, destination) pairs; a rank nobody sends to gets zeros. Backward: the inverse pairs.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> ring = [(i, (i + 1) % 4) for i in range(4)]
    >>> f = shard_map(lambda x: ppermute(x, "x", ring), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(4)))
    tensor([3, 0, 1, 2])
    """
    return _permute(x, axis_name, lambda size: check_permutation(perm, size, "ppermute"), wait, "ppermute")


def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int], *, wait: bool = True) -> Any:
    """`ppermute` by a full permutation: position ``i`` receives from ``perm[i]``."""

    def pairs(size: int) -> tuple[tuple[int, int], ...]:
        if sorted(perm) != list(range(size)):
            raise ShapeError(
                f"pshuffle got perm={list(perm)}; expected a permutation of all positions, such as {list(range(size))}"
            )
        return tuple((source, i) for i, source in enumerate(perm))

    return _permute(x, axis_name, pairs, wait, "pshuffle")


def _permute(x: Any, axis_name: AxisName, pairs: Callable[[int], Any], wait: bool, what: str) -> Any:
    body = bound_body(what, f"{what}(x, 'x', perm)")
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = _tensors(x, what)
    if not axes:
        return x if wait else _done(x)
    the_call = call("ppermute", body.mesh, axes, Options(perm=pairs(math.prod(body.sizes(axes)))))
    return _moved(body, leaves, treedef, axes, the_call, wait, what)


def pbroadcast(x: Any, axis_name: AxisName, source: int, *, wait: bool = True) -> Any:
    """The block of position ``source`` on every rank. Backward: the sum of all cotangents goes to the source."""
    what = "pbroadcast"
    body = bound_body(what, "pbroadcast(x, 'x', 0)")
    axes = resolve_axes(body, axis_name, what)
    leaves, treedef = _tensors(x, what)
    n = math.prod(body.sizes(axes))
    if not isinstance(source, int) or not 0 <= source < n:
        raise ShapeError(f"pbroadcast got source={source!r}; expected a position from 0 to {n - 1} along {axes}")
    if not axes:
        return x if wait else _done(x)
    return _moved(body, leaves, treedef, axes, call(what, body.mesh, axes, Options(root=source)), wait, what)


def _moved(
    body: Body, leaves: list[Tensor], treedef: Any, axes: tuple[str, ...], the_call: Call, wait: bool, what: str
) -> Any:
    steps: list[Step | None] = []
    for i, leaf in enumerate(leaves):
        after = _varying_operand(body, leaf, axes, what).moved(axes, "V") if body.checked else INVARIANT
        leaves[i] = _cast(body, leaf, after)
        steps.append(_flat(the_call, after, leaf))
    return run(body, leaves, steps, treedef, wait)


# --- types and positions --------------------------------------------------------------------------------------------

_PCASTS = {
    ("I", "varying"): ("invariant_to_varying", "V"),
    ("I", "reduced"): ("invariant_to_reduced", "R"),
    ("R", "varying"): ("reduced_to_varying", "V"),
    ("V", "unreduced"): ("varying_to_unreduced", "U"),
}


def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    """The same value under another type; moves nothing forward.

    Invariant to varying or reduced: backward an all-reduce is no longer done for you (the gradient is each rank's own,
    or a pending sum). Reduced to varying and varying to unreduced are free both ways. The result aliases ``x``.

    >>> from fspmd import P, make_mesh, shard_map, typeof
    >>> mesh = make_mesh((4,), ("x",))
    >>> def f(w):
    ...     print(typeof(w), typeof(pcast(w, "x", to="varying")))
    ...     return w
    >>> _ = shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(torch.ones(2))
    f32[2] f32[2]{V:x}
    """
    body = bound_body("pcast", "psum(pcast(x, 'y', to='varying'), ('x', 'y'))")
    axes = resolve_axes(body, axis_name, "pcast")
    targets = sorted({target for _, target in _PCASTS})
    if to not in targets:
        raise ArgumentError(f"pcast got to={to!r}; expected one of {', '.join(map(repr, targets))}")
    leaves, treedef = _tensors(x, "pcast")
    if not axes or not body.checked:
        return x
    return optree.tree_unflatten(treedef, [_pcast_one(body, leaf, axes, to) for leaf in leaves])


def _pcast_one(body: Body, x: Tensor, axes: tuple[str, ...], to: str) -> Tensor:
    variance = get_variance(x)
    letter = _one_state(x, variance, axes, "pcast")
    row = _PCASTS.get((letter, to))
    if row is None:
        possible = [target for source, target in _PCASTS if source == letter] or ["none; psum it first"]
        raise VarianceError(
            f"pcast of {show(x)} over {axes} to {to!r}: the value is {_WORDS[letter]} there; possible: "
            f"{', '.join(possible)}"
        )
    with torch._C.DisableTorchFunction():
        y = apply(x, call(row[0], body.mesh, axes))
        if letter == "I":
            y = apply(y, call("apart", body.mesh, axes))
    setattr(y, BORROWED, True)
    return set_variance(y, variance.moved(axes, row[1]))


def axis_index(axis_name: AxisName) -> Tensor:
    """This rank's position along the axis (a tuple: major first), a 0-d int64 tensor that varies over it.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = shard_map(lambda x: x + axis_index("x"), mesh=mesh, in_specs=P(), out_specs=P("x"))
    >>> device_get(f(torch.zeros(1)))
    tensor([0., 1., 2., 3.])
    """
    body = bound_body("axis_index", "x * axis_index('x')")
    axes = resolve_axes(body, axis_name, "axis_index")
    with torch._C.DisableTorchFunction():
        index = body.transport.index(body.mesh, axes)
    return set_variance(index, Variance(varying=axes)) if body.checked else index


def axis_size(axis_name: AxisName) -> int:
    """The number of ranks along the axis, or along all of a tuple of axes: a Python int."""
    body = bound_body("axis_size", "x / axis_size('x')")
    return math.prod(body.sizes(resolve_axes(body, axis_name, "axis_size")))


# --- shared pieces --------------------------------------------------------------------------------------------------

_WORDS = {"I": "invariant", "V": "varying", "U": "unreduced", "R": "reduced"}


def _flatten(tree: Any, what: str) -> tuple[list[Any], Any]:
    if type(tree) is Tensor:
        return [tree], _LEAF
    leaves, treedef = optree.tree_flatten(tree)
    for path, leaf in zip(treedef.paths(), leaves, strict=True):
        if not isinstance(leaf, (Tensor, int, float, complex, bool)):
            at = "".join(f"[{entry!r}]" for entry in path)
            raise ArgumentError(
                f"{what} got x{at} of type {type(leaf).__name__}; every leaf must be a torch.Tensor (this rank's block)"
            )
    return leaves, treedef


_LEAF = optree.tree_structure(0)


def _tensors(tree: Any, what: str) -> tuple[list[Any], Any]:
    leaves, treedef = _flatten(tree, what)
    return [leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf) for leaf in leaves], treedef


def _flat(the_call: Call, after: Variance, x: Tensor) -> Step:
    """A step whose call acts element by element, so that any shape can be packed as one row."""
    shape = tuple(x.shape)
    return Step(the_call, after, rows=Rows(the_call, lambda leaf: leaf.reshape(1, -1), lambda row: row.reshape(shape)))


def _then(step: Step, after: Callable[[Tensor], Tensor]) -> Step:
    rows = step.rows
    if rows is not None:
        back = rows.back
        rows = Rows(rows.call, rows.into, lambda row: after(back(row)))
    return Step(step.call, step.variance, step.before, after, rows)


def _one_state(x: Tensor, variance: Variance, axes: tuple[str, ...], what: str) -> str:
    letters = {variance.state(axis) for axis in axes}
    if len(letters) == 1:
        return letters.pop()
    states = ", ".join(f"{_WORDS[variance.state(axis)]} over {axis!r}" for axis in axes)
    varying = tuple(axis for axis in axes if variance.state(axis) == "V")
    raise VarianceError(
        f"{what} of {show(x)} over {axes}: the value is {states}; one call needs one type over all its axes: name only "
        f"the axes it varies over, {varying}, or pcast it to varying over the others first"
    )


def _varying_operand(body: Body, x: Tensor, axes: tuple[str, ...], what: str) -> Variance:
    variance = get_variance(x)
    if body.checked and (pending := [a for a in axes if variance.state(a) in "UR"]):
        raise VarianceError(
            f"{what} of {show(x)}: the value is {_WORDS[variance.state(pending[0])]} over {', '.join(map(repr, pending))}; "
            + ("psum or psum_scatter it first" if variance.state(pending[0]) == "U" else "pcast it to varying first")
        )
    return variance


def _cast(body: Body, x: Tensor, to: Variance) -> Tensor:
    """The operand as varying; an invariant one is cast, as any op's would be."""
    return state.tracker.cast(x, to) if body.checked and state.tracker is not None else x


def _operand(body: Body, x: Tensor, axes: tuple[str, ...], step: Step) -> Tensor:
    variance = get_variance(x)
    if step.call is not None and step.call.pair.source == "V":
        return _cast(body, x, variance.moved(axes, "V"))
    return x


def _check_size_use(size: int | None, tiled: bool, index_groups: Any, what: str) -> None:
    if size is not None and not tiled:
        raise ArgumentError(f"{what} got size={size} without tiled=True; uneven blocks have no common shape to stack")
    if size is not None and index_groups is not None:
        raise ArgumentError(f"{what} got both size={size} and axis_index_groups; uneven blocks follow the mesh axes")


def _done(x: Any) -> Any:
    return Handle(lambda: x)
