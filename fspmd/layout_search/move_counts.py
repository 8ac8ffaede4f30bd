"""Gradients of gradients: how often an operand is moved to where an op reads it, and its gradient back.

Each derivative of a move is a move, there or back. So stand-ins run with the graph that autograd makes of them, and
what stands in it for a move is counted each time that it runs.
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
from fspmd.global_view.calls import operands_of, replaced
from fspmd.global_view.propagate import Question
from fspmd.global_view.refusals import shown
from fspmd.meshes.mesh import Mesh
from fspmd.sharded import Sharded, is_plain
from fspmd.spec import P, TensorSpec


class Trips(NamedTuple):
    """How often an operand is moved, and its gradient back."""

    there: int = 1
    back: int = 1
    start: int = 0  # of a value: each derivative has a copy of what it is of

    @property
    def passes(self) -> int:
        """How often an op of two such operands computes: the derivative of a product is two of them."""
        return 1 + 2 * self.back + 4 * (self.there - 1)


ONCE: Final = Trips()


@dataclass(slots=True)
class _Count:
    """Of one place where moves are made; ``arrived`` is given each gradient that comes back."""

    arrived: Callable[[Tensor], None] | None = None
    there: int = 0
    back: int = 0


class _Move(torch.autograd.Function):
    """What stands for a move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: _Count, returns: bool) -> Tensor:
        ctx.count, ctx.returns = count, returns
        moved = x.clone()
        if not returns:
            count.there += 1
            return moved
        count.back += 1
        if count.arrived is not None:
            count.arrived(moved)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _moved(gradient, ctx.count, not ctx.returns), None, None


def _moved(x: Tensor, count: _Count, returns: bool = False) -> Tensor:
    found: Tensor = _Move.apply(x, count, returns)
    return found


class Counting:
    """The trips of one function; ``arrived`` is given each gradient of a value that comes back, and of which."""

    def __init__(self, mesh: Mesh, arrived: Callable[[Tensor, int], None]) -> None:
        self.again = False  # `checkpoint` computes what was counted
        self._mesh, self._arrived = mesh, arrived
        self._read: dict[int, tuple[Tensor, int, Tensor]] = {}  # by tensor: itself, which copy, what its readers read
        self._of_values: dict[int, list[_Count]] = {}
        self._of_operands: dict[tuple[int, int], tuple[_Count, int]] = {}

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Nothing is counted."""
        before, self.again = self.again, True
        try:
            yield
        finally:
            self.again = before

    def repeated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that was counted."""
        given = optree.tree_map(_local, (args, kwargs), none_is_leaf=True)
        out = func(*given[0], **given[1])
        return optree.tree_map(lambda y: Sharded(y, TensorSpec(self._mesh, P(), tuple(y.shape), y.dtype)), out)

    def read(self, x: Any, number: int, op: int, operand: int) -> Tensor:
        """A value where an op reads it."""
        local: Tensor = _local(x)
        if not local.is_meta:
            return torch.empty_like(local, device="meta")
        if not (local.requires_grad and torch.is_grad_enabled()):
            return local
        if id(local) not in self._read:
            of_value = _Count(lambda gradient: self._arrived(gradient, number))
            counts = self._of_values.setdefault(number, [])
            self._read[id(local)] = local, len(counts), _moved(local, of_value)
            counts.append(of_value)
        _, start, read = self._read[id(local)]
        of_operand = _Count()
        self._of_operands[op, operand] = of_operand, start
        return _moved(read, of_operand)

    def results(
        self,
        func: Any,
        question: Question,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: tuple[int, ...],
        op: int,
    ) -> list[Tensor]:
        """What a call gives, in memory of its own."""
        if question.fixed:
            raise RecordError(
                f"auto_spec cannot record gradients of gradients through {shown(func)}, which writes into its operand; "
                "write the function that gives a new tensor"
            )
        rows = enumerate(zip(question.operands, operands_of(question, args, kwargs), numbers, strict=True))
        moved = {place: self.read(x, number, op, k) for k, ((place, _), x, number) in rows}
        args, kwargs = replaced(args, kwargs, moved)
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as error:
            raise RecordError(
                f"auto_spec cannot record gradients of gradients through {shown(func)}, of which torch knows nothing "
                "without data; leave it out of the function"
            ) from error
        return [one.clone() for one in ((out,) if is_plain(out) else out)]

    def of_operand(self, op: int, operand: int) -> Trips:
        """Those of one operand of an op."""
        if (op, operand) not in self._of_operands:
            return ONCE
        found, start = self._of_operands[op, operand]
        return Trips(found.there, found.back, start)

    def of_values(self) -> dict[tuple[int, int], int]:
        """How often the gradients of a value come back, of all that read one copy of it."""
        return {(n, start): one.back for n, counts in self._of_values.items() for start, one in enumerate(counts)}


def _local(x: Any) -> Any:
    return x.local if isinstance(x, Sharded) else x
