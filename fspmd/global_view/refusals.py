"""What a call on `Sharded` values is called in messages, and how it is refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch

from fspmd.errors import ArgumentError, FspmdError, VarianceError
from fspmd.messages import quoted
from fspmd.ops.operators import OPERATORS
from fspmd.ops.traits import INSTEAD_OF_COMPILED, name_of
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import StopRecomputation, is_any_autocast_enabled

#: of whose operands the meta device does not ask that they have one dtype, as other devices do
_OF_ONE_DTYPE = frozenset(
    ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "linear", "convolution")
    + ("addmm", "addmv", "baddbmm", "addbmm")
)

#: errors that have their words, and what is no error: both pass as they are
TOLD: Final = (FspmdError, StopRecomputation)


class NoRuleError(ArgumentError):
    """A function that is not known to act on global tensors."""


def shown(func: Any) -> str:
    """The call as a message names it."""
    name = name_of(func)
    if name.startswith("__"):
        return OPERATORS.get(name.strip("_"), (f"{name}()",))[0]
    return f".{name.removeprefix('get ')}" if name.startswith("get ") else f"{name}()"


def check_dtypes(func: Any, specs: Sequence[TensorSpec]) -> None:
    """Raises where the meta device would let pass what other devices do not."""
    if name_of(func).strip("_") not in _OF_ONE_DTYPE or is_any_autocast_enabled():
        return
    if len({spec.dtype for spec in specs}) > 1:
        widest = functools.reduce(torch.promote_types, (spec.dtype for spec in specs))
        given = ", ".join(repr(spec).partition(" on ")[0] for spec in specs)
        raise ArgumentError(
            f"{shown(func)} of {given} takes operands of one dtype; write x.to({widest}), or use torch.autocast"
        )


def refuse_global(func: Any, specs: Sequence[TensorSpec], error: Exception) -> NoReturn:
    """Raise for a call that fails on the global tensors, in torch's words and without the frames of our tracing."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    error.__traceback__ = error.__context__ = None
    raise ArgumentError(f"{shown(func)} of {given} fails on the global tensors: {error}") from error


def refuse_higher_order(func: Any, specs: Sequence[TensorSpec]) -> NoReturn:
    """Raise for what torch compiles as a whole, with the functions that it runs."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    raise NoRuleError(f"{shown(func)} runs functions that torch compiles, which take no {given}. {INSTEAD_OF_COMPILED}")


def refuse_write(func: Any, specs: Sequence[TensorSpec]) -> NoReturn:
    """Raise for a write that would leave its operand in another layout."""
    name, first = shown(func), specs[0]
    new = f"x = x.{name.removesuffix('()').removesuffix('_')}(...)"
    if first.partition.unreduced:
        raise VarianceError(
            f"{name} would change how its operand lies: it writes into Sharded {first!r}, a sum pending over "
            f"{quoted(sorted(first.partition.unreduced))} that would end; write {new}, or end it first: x = reshard(x, "
            f"{P(*first.partition)!r})"
        )
    raise VarianceError(
        f"{name} would change how its operand lies: it writes into Sharded {first!r} what it computes with "
        f"{', '.join(map(repr, specs[1:])) or 'a number'}; write {new}, or move the operands first"
    )


def refuse_rule(func: Any, specs: Sequence[TensorSpec], part: NoRuleError | None = None) -> NoReturn:
    """Raise `NoRuleError`; ``part``: of what the function is made of."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    why = f": it is made of {str(part).split(' ')[0]}, which has none" if part is not None else ""
    raise NoRuleError(
        f"{shown(func)} has no rule for {given}{why}; write one, such as fspmd.rule(f, 'm n -> m n'), or use it in a "
        "function run by shard_map, whose values are this rank's blocks, or on the global tensor, device_get(x)"
    ) from part
