"""`ragged_all_to_all`: every rank sends every other a slice of its own length."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fspmd.body import bound_body, resolve_axes
from fspmd.collectives.all_to_all import all_to_all
from fspmd.collectives.checks import check_index_groups
from fspmd.collectives.operands import AxisName, Groups, done
from fspmd.collectives.reductions import pmax
from fspmd.errors import ArgumentError, ShapeError
from fspmd.mesh import Mesh
from fspmd.rank_map import rank_map
from fspmd.transport import Options, transport_of
from fspmd.variance import get_variance, set_variance, show


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
    """``output`` with the rows that all ranks sent written into it; the result varies over the axes.

    This rank sends rank ``j`` the rows ``operand[input_offsets[j] : input_offsets[j] + send_sizes[j]]``, which stand in
    rank ``j``'s output from row ``output_offsets[j]`` on; from rank ``j`` it receives ``recv_sizes[j]`` rows. The four
    are integer tensors with one entry per rank of the group. Backward sends the gradients of the rows back; rows of
    ``output`` that were written over have none. Reads the sizes on the host.

    Raises:
        ArgumentError, ShapeError: on all ranks alike, for wrong dtypes and shapes, slices that leave their tensor, or
            sizes on which sender and receiver do not agree.

    >>> from fspmd import P, axis_index, device_get, make_mesh, shard_map
    >>> def body(x):  # rank r sends one row to rank 0 and two to rank 1, which line them up by sender
    ...     one, two = torch.tensor([1, 2]), axis_index("x")
    ...     there = torch.stack([two * 1, two * 2])
    ...     received = (two + 1) * torch.tensor([1, 1])
    ...     return ragged_all_to_all(
    ...         x, x.new_zeros(4), torch.tensor([0, 1]), one, there, received, axis_name="x"
    ...     )
    >>> f = shard_map(body, mesh=make_mesh((2,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(1.0, 7.0)))
    tensor([1., 4., 0., 0., 2., 3., 5., 6.])
    """
    what = "ragged_all_to_all"
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    n = math.prod(body.sizes(axes))
    groups = check_index_groups(axis_index_groups, n, what, equal=True)
    count = len(groups[0]) if groups else n
    numbers = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    _check_arguments(operand, output, numbers, count)
    arriving = all_to_all(output_offsets, axes, 0, 0, tiled=True, axis_index_groups=groups)
    announced = all_to_all(send_sizes, axes, 0, 0, tiled=True, axis_index_groups=groups)
    wrong = rank_map(_complaint, operand, output, input_offsets, send_sizes, arriving, announced, recv_sizes)
    worst = int(pmax(wrong, tuple(axis for axis in body.mesh.axis_names if axis in body.axes)))
    if worst:
        raise ShapeError(f"{what} of {show(operand)} into {show(output)}: on some rank {_COMPLAINTS[worst - 1]}")
    rows = torch.index_select(operand, 0, rank_map(_rows, input_offsets, send_sizes))
    with torch._C.DisableTorchFunction():
        options = Options(index_groups=groups)
        received: Tensor = _Exchange.apply(rows, send_sizes, recv_sizes, body.mesh, axes, options)
    if body.checked:
        set_variance(received, get_variance(rows))
    result = torch.index_copy(output, 0, rank_map(_rows, arriving, recv_sizes), received)
    return result if wait else done(result)


def _check_arguments(operand: Any, output: Any, numbers: dict[str, Any], count: int) -> None:
    what = "ragged_all_to_all"
    for name, x in {"operand": operand, "output": output, **numbers}.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{what} got {name} of type {type(x).__name__}; expected a torch.Tensor")
    for name, x in numbers.items():
        if x.dtype not in (torch.int64, torch.int32) or tuple(x.shape) != (count,):
            raise ShapeError(
                f"{what} got {name} {show(x)}; expected int32 or int64, one entry for each of {count} ranks"
            )
    if not operand.ndim or operand.ndim != output.ndim or operand.dtype != output.dtype:
        raise ShapeError(
            f"{what} got operand {show(operand)} and output {show(output)}; both need the same number of dims, "
            "at least one, and the same dtype"
        )
    if tuple(operand.shape[1:]) != tuple(output.shape[1:]):
        raise ShapeError(f"{what} got operand {show(operand)} and output {show(output)}; rows must have the same shape")


_COMPLAINTS = (
    "input_offsets and send_sizes leave the operand",
    "output_offsets and recv_sizes leave the output",
    "recv_sizes differ from what the other ranks send (their send_sizes)",
)


def _complaint(
    operand: Tensor, output: Tensor, start: Tensor, length: Tensor, there: Tensor, announced: Tensor, expected: Tensor
) -> int:
    """The number of what is wrong on one rank, 0 for nothing."""
    if bool((start < 0).any() or (length < 0).any() or (start + length > operand.shape[0]).any()):
        return 1
    if bool((there < 0).any() or (expected < 0).any() or (there + expected > output.shape[0]).any()):
        return 2
    return 0 if torch.equal(announced, expected.to(announced.dtype)) else 3


def _rows(offsets: Tensor, lengths: Tensor) -> Tensor:
    """The row numbers of all slices, one slice after the other."""
    slices = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return torch.cat([torch.arange(start, start + length, device=offsets.device) for start, length in slices])


class _Exchange(torch.autograd.Function):
    """Rows in the order of their receivers become rows in the order of their senders; the transpose swaps the sizes."""

    @staticmethod
    def forward(x: Tensor, send: Tensor, recv: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Tensor:
        return transport_of(mesh).exchange_rows(x, send, recv, mesh, axes, o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.send, ctx.recv, *ctx.where = inputs[1:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunction():
            return _Exchange.apply(g, ctx.recv, ctx.send, *ctx.where), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        result: Tensor = _Exchange.apply(tangent, ctx.send, ctx.recv, *ctx.where)
        return result
