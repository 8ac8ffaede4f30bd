"""The names of calls in messages, and the errors for calls on `Sharded` values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from fspmd.errors import ArgumentError, FspmdError, VarianceError
from fspmd.forms import Strided, overlaps
from fspmd.messages import quoted
from fspmd.ops.operators import OPERATORS
from fspmd.ops.traits import INSTEAD_OF_COMPILED, name_of
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import CHECKPOINT_EXCEPTIONS

#: exceptions that pass unchanged: our errors, and those of torch's checkpoints
PASSING: Final = (FspmdError, *CHECKPOINT_EXCEPTIONS)


class NoRuleError(ArgumentError):
    """No rule says how a function acts on global tensors."""


def shown(func: Any) -> str:
    """Return the name of a function in messages: ``sum()``, ``.T``, ``+``."""
    name = name_of(func)
    if name.startswith("__"):
        return OPERATORS.get(name.strip("_"), (f"{name}()",))[0]
    return f".{name.removeprefix('get ')}" if name.startswith("get ") else f"{name}()"


def refuse_global(func: Any, specs: Sequence[TensorSpec], error: Exception) -> NoReturn:
    """Raise for a call that fails on the global tensors, with torch's message and without the frames of our tracing."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    error.__traceback__ = error.__context__ = None
    raise ArgumentError(f"{shown(func)} of {given} fails on the global tensors: {error}") from error


def refuse_higher_order(func: Any, specs: Sequence[TensorSpec]) -> NoReturn:
    """Raise for a function that torch compiles together with the functions that it calls."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    raise NoRuleError(f"{shown(func)} runs functions that torch compiles, which take no {given}. {INSTEAD_OF_COMPILED}")


def refuse_write(func: Any, specs: Sequence[TensorSpec]) -> NoReturn:
    """Raise for a write that would change the layout of its operand."""
    name, first = shown(func), specs[0]
    new = f"x = x.{name.removesuffix('()').removesuffix('_')}(...)"
    if first.partition.unreduced:
        raise VarianceError(
            f"{name} would change the layout of its operand: it writes into Sharded {first!r}, whose sum over "
            f"{quoted(sorted(first.partition.unreduced))} is pending and would be settled; write {new}, or settle the "
            f"sum first: x = reshard(x, {P(*first.partition)!r})"
        )
    raise VarianceError(
        f"{name} would change the layout of its operand: it writes into Sharded {first!r} a value that it computes "
        f"with {', '.join(map(repr, specs[1:])) or 'a number'}; write {new}, or move the operands first"
    )


def refuse_shared_memory(func: Any, x: Any, *, at_once: bool) -> None:
    """Raise on all ranks for a write into expanded memory; torch refuses it only on ranks whose block has elements.

    A write that is not made ``at_once`` computes all elements anew and copies them. Where some share memory, old ones
    could come after new ones, so it is refused for windows, too.
    """
    strides = x.form.strides if isinstance(x, Sharded) and isinstance(x.form, Strided) else None
    if strides is None or not x.numel():
        return
    is_expanded = any(n > 1 and not stride for n, stride in zip(x.shape, strides, strict=True))
    if is_expanded or (not at_once and overlaps(x.spec.shape, strides)):
        raise ArgumentError(
            f"{shown(func)} writes into {x!r}, whose elements share memory, as those of "
            f"{'expand()' if is_expanded else 'unfold()'} do; write into the tensor that it is a view of, or into a "
            "clone()"
        )


def refuse_rule(func: Any, specs: Sequence[TensorSpec], part: NoRuleError | None = None) -> NoReturn:
    """Raise `NoRuleError`; ``part`` is the error of a function that this function calls."""
    given = ", ".join(f"Sharded {spec!r}" for spec in specs)
    why = f": it calls {str(part).split(' ')[0]}, which has no rule" if part is not None else ""
    raise NoRuleError(
        f"{shown(func)} has no rule for {given}{why}; write one, such as fspmd.rule(f, 'm n -> m n'), or use it in a "
        "function run by shard_map, whose values are this rank's blocks, or on the global tensor, device_get(x)"
    ) from part
