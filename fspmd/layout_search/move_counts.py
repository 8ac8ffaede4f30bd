"""Gradients of gradients: the numbers of moves of an operand to an op, and of its gradient back.

Each derivative of a move is a move, in the same or the other direction. So stand-ins run with the graph that autograd
makes of them. In this graph a function stands for each move, and counts how often it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.global_view.composed import operands_of, replaced
from fspmd.global_view.question import Question
from fspmd.global_view.refusals import shown
from fspmd.meshes.mesh import Mesh
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, TensorSpec


class MoveCounts(NamedTuple):
    """The numbers of moves of an operand (``forward``) and of its gradient (``backward``).

    ``copy``: the number of the copy of the value. Each derivative has another copy of its argument.
    """

    forward: int = 1
    backward: int = 1
    copy: int = 0

    @property
    def passes(self) -> int:
        """The number of runs of an op with two such operands. The derivative of a product is two products."""
        return 1 + 2 * self.backward + 4 * (self.forward - 1)


ONCE: Final = MoveCounts()


@dataclass(slots=True)
class _Count:
    """The numbers of moves at one place. ``arrived`` is called with each gradient that comes back."""

    arrived: Callable[[Tensor], None] | None = None
    forward: int = 0
    backward: int = 0


class _Move(torch.autograd.Function):
    """A function that stands for a move, and counts it. ``returns``: whether it moves a gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: _Count, returns: bool) -> Tensor:
        ctx.count, ctx.returns = count, returns
        moved = x.clone()
        if not returns:
            count.forward += 1
            return moved
        count.backward += 1
        if count.arrived is not None:
            count.arrived(moved)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _moved(gradient, ctx.count, not ctx.returns), None, None


def _moved(x: Tensor, count: _Count, returns: bool = False) -> Tensor:
    moved: Tensor = _Move.apply(x, count, returns)
    return moved


class Counting:
    """The numbers of moves of one function.

    ``arrived`` is called with each gradient that comes back, and the value's number.
    """

    def __init__(self, mesh: Mesh, arrived: Callable[[Tensor, int], None]) -> None:
        self.repeats = False  # whether `checkpoint` repeats calls that were counted
        self._mesh, self._arrived = mesh, arrived
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id: a tensor, its number, the copy for readers
        self._of_values: dict[int, list[_Count]] = {}  # for each value, the counts of its copies
        self._of_operands: dict[tuple[int, int], tuple[_Count, int]] = {}  # count and copy, by op and operand

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Within, nothing is counted."""
        before, self.repeats = self.repeats, True
        try:
            yield
        finally:
            self.repeats = before

    def repeated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that was counted before."""
        given = optree.tree_map(_local, (args, kwargs), none_is_leaf=True)
        out = func(*given[0], **given[1])
        return optree.tree_map(lambda y: Sharded(y, TensorSpec(self._mesh, P(), tuple(y.shape), y.dtype)), out)

    def read(self, x: Any, number: int, op: int, operand: int) -> Tensor:
        """The tensor that an op reads for a value. ``number``: of the value."""
        local: Tensor = _local(x)
        if not local.is_meta:
            return torch.empty_like(local, device="meta")
        if not (local.requires_grad and torch.is_grad_enabled()):
            return local
        if id(local) not in self._copies:
            of_value = _Count(lambda gradient: self._arrived(gradient, number))
            counts = self._of_values.setdefault(number, [])
            self._copies[id(local)] = local, len(counts), _moved(local, of_value)
            counts.append(of_value)
        _, start, copy = self._copies[id(local)]
        of_operand = _Count()
        self._of_operands[op, operand] = of_operand, start
        return _moved(copy, of_operand)

    def results(
        self,
        func: Any,
        question: Question,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: tuple[int, ...],
        op: int,
    ) -> list[Tensor]:
        """The results of a call, in new memory."""
        if question.fixed:
            raise RecordError(
                f"auto_spec cannot record gradients of gradients through {shown(func)}, which writes into its operand; "
                "write the function that returns a new tensor"
            )
        rows = enumerate(zip(question.places, operands_of(question, args, kwargs), numbers, strict=True))
        moved = {place: self.read(x, number, op, k) for k, (place, x, number) in rows}
        args, kwargs = replaced(args, kwargs, moved)
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as error:
            raise RecordError(
                f"auto_spec cannot record gradients of gradients through {shown(func)}, which torch cannot run without "
                "data; leave it out of the function"
            ) from error
        return [x.clone() for x in ((out,) if is_plain(out) else out)]

    def of_operand(self, op: int, operand: int) -> MoveCounts:
        """The numbers of moves of an operand of an op."""
        if (op, operand) not in self._of_operands:
            return ONCE
        count, start = self._of_operands[op, operand]
        return MoveCounts(count.forward, count.backward, start)

    def of_values(self) -> dict[tuple[int, int], int]:
        """For each copy of a value, how often the gradients of its readers come back. Keys are value and copy."""
        return {
            (n, start): count.backward for n, counts in self._of_values.items() for start, count in enumerate(counts)
        }


def _local(x: Any) -> Any:
    return x.local if isinstance(x, Sharded) else x
