"""Slices of any lengths exchanged between ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes
from fspmd.collectives.checks import check_alike, check_index_groups, where
from fspmd.collectives.collective import AxisName, Groups, as_varying, varying_operand
from fspmd.collectives.steps import Handle
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.flights import depart, land
from fspmd.foreign import refuse_misfit
from fspmd.messages import described
from fspmd.pairs import Call, apply
from fspmd.torch_internals import NOT_MAPPED, DisableTorchFunction, batch_dim_of
from fspmd.tracing import outside_transforms, step_of_values
from fspmd.transport import Options, arrived, carriers
from fspmd.transport.frame import Frame, frame_over, union
from fspmd.transport.local_tensor import blocks_of, frame_of, local_tensor, shards_of
from fspmd.transport.rows import Routes, even_routes, landing_mask, plan_route
from fspmd.transport.simulation import shapes_of
from fspmd.variance import INVARIANT, Variance, join, set_variance, show, unwrapped

_NAMES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@overload
def ragged_all_to_all(
    operand: Tensor,
    output: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    wait: Literal[True] = True,
) -> Tensor: ...
@overload
def ragged_all_to_all(
    operand: Tensor,
    output: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    wait: Literal[False],
) -> Handle[Tensor]: ...
def ragged_all_to_all(
    operand: Tensor,
    output: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    output_offsets: Tensor,
    recv_sizes: Tensor,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    wait: bool = True,
) -> Any:
    """Send slices of ``operand``'s leading dim to other ranks. Each rank gets ``output`` with the slices written in.

    With K slices and n ranks, slice ``i`` goes to rank ``i // (K // n)``. It begins at row ``input_offsets[i]`` here,
    has ``send_sizes[i]`` rows, and is written at row ``output_offsets[i]`` there. ``recv_sizes[i]`` is the size of the
    i-th slice that arrives here; arriving slices are ordered by source rank. Where they overlap, the last one stays.

    Args:
        operand: ``[N, ...]``.
        output: ``[M, ...]``, of the same dtype. It is not written in place.
        input_offsets, send_sizes, output_offsets, recv_sizes: integers ``[K]``, K a multiple of n. The host reads
            their values. Where there are none, in ``jit(f).lower(...)``, the price is that of an even exchange: all
            rows of ``operand``, of which one in n stays.
        axis_name: One mesh axis, or several in rank order.
        axis_index_groups: Groups of equal size. Ranks exchange within their group.
        wait: False returns a handle.

    Returns:
        ``[M, ...]``, varying over the axes. Differentiable with respect to ``operand`` and ``output``. Backward sends
        each slice's cotangent back; the cotangents of a row that was sent more than once are added.

    Raises:
        ShapeError: on all ranks, if a slice is outside its tensor or sizes do not match.

    >>> from fspmd import P, all_to_all, axis_index, device_get, make_mesh, shard_map
    >>> def body(x, sizes):  # rank 0 keeps 1 and sends 2; rank 1 sends 1 and keeps 1
    ...     offsets, there = torch.tensor([0, 1]), axis_index("x") * torch.tensor([1, 2])
    ...     received = all_to_all(sizes, "x", 0, 0, tiled=True)
    ...     return ragged_all_to_all(x, x.new_zeros(4), offsets, sizes, there, received, axis_name="x")
    >>> f = shard_map(body, mesh=make_mesh((2,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.tensor([1, 2, 2, 3, 4, 0]), torch.tensor([1, 2, 1, 1])))
    tensor([1, 3, 0, 0, 2, 2, 4, 0])
    """
    what = "ragged_all_to_all"
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    numbers = (input_offsets, send_sizes, output_offsets, recv_sizes)
    _check_kinds(operand, output, numbers)
    n = math.prod(body.sizes(axes))
    index_groups = check_index_groups(axis_index_groups, n, what, equal=True)
    count = len(index_groups[0]) if index_groups else n
    lent = operand, output
    with DisableTorchFunction():
        check_alike(body, (*numbers, operand[:0], output[:0]), axes, what)
        _check_shapes(operand, output, numbers, count)
        after = _result_type(body, (operand, output, *numbers), axes, what)
        o = Options(index_groups=index_groups)
        routes, mask = _plan(body, axes, o, operand, output, numbers, count)
        exchange = Call("ragged_all_to_all", body.mesh, axes, Options(index_groups=index_groups, routes=routes))
        operand, output = as_varying(body, operand, after), as_varying(body, output, after)
        mask = mask.view(-1, *(1,) * (output.ndim - 1))
        if wait:
            landed = functools.partial(apply, operand, exchange)
        else:
            landed = functools.partial(land, depart(operand, exchange))

    def finish() -> Tensor:
        with DisableTorchFunction():
            result = carriers.where(mask, landed(), output)
            return set_variance(result, after) if body.checked else result

    return finish() if wait else Handle(finish, lent)


def exchanged_rows(
    x: Tensor, rows: int | Tensor, slices: Tensor, axis_name: AxisName, what: str, needed: Tensor | None = None
) -> Tensor:
    """`ragged_all_to_all` into so many rows of zeros, of slices that all ranks know to match. It sends rows alone.

    ``rows`` is a number, or a tensor that has as many rows on each rank.
    ``slices`` is ``[4, K]``: where slices begin here and their sizes, and where those that arrive go and their sizes.
    ``needed`` is the number of rows that the fullest rank of the group gets, if that may be more than ``rows``.

    Raises:
        ShapeError: on all ranks, if some rank gets more rows.
    """
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    with DisableTorchFunction():
        after = _result_type(body, (x, slices), axes, what)
        with outside_transforms():
            numbers, wanted = unwrapped(slices), None if needed is None else unwrapped(needed)
            frame, lengths = _frame_and_rows(body, axes, [numbers], x, rows)
            routes = _known_routes(body, axes, numbers, wanted, frame, lengths, what)
        exchange = Call("ragged_all_to_all", body.mesh, axes, Options(routes=routes))
        result = apply(as_varying(body, x, after), exchange)
        return set_variance(result, after) if body.checked else result


def _frame_and_rows(
    body: Body, axes: tuple[str, ...], numbers: list[Tensor], x: Tensor, out: int | Tensor
) -> tuple[Frame | None, list[tuple[int, int]]]:
    """The frame of all values, in a simulation, and how many rows each of its ranks has before and after."""
    frame: Frame | None = None
    if body.mesh.transport == "simulation":
        values = (*numbers, *(unwrapped(value) for value in (x, out) if isinstance(value, Tensor)))
        frame = functools.reduce(union, (frame_of(value, body.mesh) for value in values), frame_over(body.mesh, axes))
    return frame, list(zip(_lengths(x, frame), _lengths(out, frame), strict=True))


def _lengths(x: int | Tensor, frame: Frame | None) -> list[int]:
    """The number of rows on each rank of a frame, or of this process."""
    if not isinstance(x, Tensor):
        return [x] * (1 if frame is None else frame.volume)
    return [x.shape[0]] if frame is None else [shape[0] for shape in shapes_of(x, frame)]


def _even_known_routes(
    body: Body,
    axes: tuple[str, ...],
    slices: Tensor,
    needed: Tensor | None,
    frame: Frame | None,
    lengths: list[tuple[int, int]],
    what: str,
) -> Routes:
    """`_known_routes` where numbers have no values."""
    return even_routes(lengths, frame, math.prod(body.sizes(axes)), slices.device)


@step_of_values(_even_known_routes)
def _known_routes(
    body: Body,
    axes: tuple[str, ...],
    slices: Tensor,
    needed: Tensor | None,
    frame: Frame | None,
    lengths: list[tuple[int, int]],
    what: str,
) -> Routes:
    """The routes of slices that match."""
    mesh, n = body.mesh, math.prod(body.sizes(axes))
    if needed is not None:
        most, room = max(map(int, blocks_of(needed))), lengths[0][1]
        text = f"{what} got rows={room}, but a rank gets {most} rows; give it so many, or a capacity"
        complaint = text if most > room else ""
        if complaint := complaint if n == mesh.size else body.transport.agree(complaint, mesh):
            raise ShapeError(complaint)
    routes = []
    for numbers, rows in zip([slices] if frame is None else shards_of(slices, frame), lengths, strict=True):
        starts, sizes, places, arriving = numbers.tolist()
        routes.append(plan_route(starts, sizes, places, arriving, rows, n, slices.device))
    return Routes(tuple(routes), frame)


def _check_kinds(operand: Any, output: Any, numbers: tuple[Any, ...]) -> None:
    for name, value in zip(("operand", "output", *_NAMES), (operand, output, *numbers), strict=True):
        if not isinstance(value, Tensor):
            raise ArgumentError(f"ragged_all_to_all got {described(value)} for {name}; pass a torch.Tensor")
        refuse_misfit(value, f"ragged_all_to_all got for {name}")
    for name, value in zip(_NAMES, numbers, strict=True):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool:
            raise ArgumentError(f"ragged_all_to_all got {name}, {show(value)}; pass integers")
        if batch_dim_of(value) != NOT_MAPPED:
            raise ArgumentError(f"ragged_all_to_all under vmap got a batch of {name}; map over operand and output only")
    if operand.dtype is not output.dtype:
        raise ArgumentError(
            f"ragged_all_to_all got operand, {show(operand)}, and output, {show(output)}; pass two of one dtype"
        )


def _check_shapes(operand: Tensor, output: Tensor, numbers: tuple[Tensor, ...], n: int) -> None:
    if not operand.ndim or not output.ndim or operand.shape[1:] != output.shape[1:]:
        raise ShapeError(
            f"ragged_all_to_all got operand, {show(operand)}, and output, {show(output)}; only their leading dims, of "
            "which slices are sent, may differ"
        )
    shapes = {tuple(value.shape) for value in numbers}
    slices = len(numbers[0]) if numbers[0].ndim == 1 else 0
    if len(shapes) > 1 or not slices or slices % n:
        given = ", ".join(f"{name} of shape {tuple(v.shape)}" for name, v in zip(_NAMES, numbers, strict=True))
        raise ShapeError(
            f"ragged_all_to_all over {n} ranks got {given}; pass four 1-d tensors of one length, a multiple of {n}: as "
            "many slices for each rank"
        )


def _result_type(body: Body, values: tuple[Tensor, ...], axes: tuple[str, ...], what: str) -> Variance:
    if not body.checked:
        return INVARIANT
    result = Variance(varying=axes)
    for x in values:
        variance = varying_operand(body, x, axes, what)
        if variance.unreduced:
            raise VarianceError(f"{what} of {show(x)}: a pending sum is not sent row by row; psum it first")
        result = join(result, variance)
    return result


def _plan(
    body: Body,
    axes: tuple[str, ...],
    o: Options,
    operand: Tensor,
    output: Tensor,
    numbers: tuple[Tensor, ...],
    n: int,
) -> tuple[Routes, Tensor]:
    """The routes of rows, and a mask of the rows of the result that arrive. A simulation has a route per rank."""
    with outside_transforms():
        plain = [unwrapped(value) for value in numbers]
        frame, lengths = _frame_and_rows(body, axes, plain, operand, output)
        return _routes(body, axes, o, plain, frame, lengths, n, operand.device)


def _even_routes(
    body: Body,
    axes: tuple[str, ...],
    o: Options,
    numbers: list[Tensor],
    frame: Frame | None,
    lengths: list[tuple[int, int]],
    n: int,
    device: torch.device,
) -> tuple[Routes, Tensor]:
    """`_routes` where numbers have no values. Shapes are right. The price is that of an even exchange."""
    masks = [torch.zeros(rows, dtype=torch.bool, device=device) for _, rows in lengths]
    return even_routes(lengths, frame, n, device), local_tensor(masks, frame) if frame is not None else masks[0]


@step_of_values(_even_routes)
def _routes(
    body: Body,
    axes: tuple[str, ...],
    o: Options,
    numbers: list[Tensor],
    frame: Frame | None,
    lengths: list[tuple[int, int]],
    n: int,
    device: torch.device,
) -> tuple[Routes, Tensor]:
    """The routes and the mask, from the values of the numbers and the ``lengths`` of operand and output."""
    mesh, transport = body.mesh, body.transport
    with torch.no_grad(), outside_transforms():
        starts, sizes, targets, receiving = (value.detach().to(torch.int64) for value in numbers)
        told, told_to = torch.stack([targets, sizes]), Options(dim=1, concat_dim=1, index_groups=o.index_groups)
        columns: list[Any] = [starts, sizes, targets, receiving, arrived(transport.exchange(told, mesh, axes, told_to))]
        columns = [[x] if frame is None else shards_of(x, frame) for x in columns]
        routes, complaint = [], ""
        for place, (row, rows) in enumerate(zip(zip(*columns, strict=True), lengths, strict=True)):
            *lists, there = (x.tolist() for x in row)
            complaint = complaint or _complaint(body, frame, place, lists, there, rows)
            if not complaint:
                routes.append(plan_route(lists[0], lists[1], there[0], lists[3], rows, n, device))
        if complaint := transport.agree(complaint, mesh):
            raise ShapeError(complaint)
        masks = [landing_mask(route) for route in routes]
        return Routes(tuple(routes), frame), local_tensor(masks, frame) if frame is not None else masks[0]


def _complaint(
    body: Body,
    frame: Frame | None,
    place: int,
    lists: Sequence[list[int]],
    there: list[list[int]],
    rows: tuple[int, int],
) -> str:
    """The first fault in one rank's slices, or ""."""
    starts, sizes, _, receiving = lists
    targets, arriving = there
    wrong = ""
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if not 0 <= start <= start + size <= rows[0]:
            wrong = f"slice {i}, {size} rows from input_offsets[{i}]={start}, is outside of operand's {rows[0]} rows"
            break
    for i, (target, size, expected) in enumerate(zip(targets, arriving, receiving, strict=True)):
        if wrong:
            break
        if size != expected:
            wrong = f"recv_sizes[{i}] is {expected}, but the slice that arrives there has {size} rows"
        elif not 0 <= target <= target + size <= rows[1]:
            wrong = f"slice {i} to arrive, {size} rows to be put at {target}, is outside of output's {rows[1]} rows"
    if not wrong:
        return ""
    mesh = body.mesh
    at = mesh.coordinate() or ()
    if frame is not None:
        at = list(frame.mesh_coordinates())[place]
    return (
        f"ragged_all_to_all: on {where(mesh, at)} {wrong}; recv_sizes is all_to_all(send_sizes, axis_name, 0, 0, "
        "tiled=True), and offsets and sizes must stay within the tensors"
    )
