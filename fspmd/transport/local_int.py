"""An integer that differs from rank to rank: the size of an uneven simulated block.

It is the node of a ``torch.SymInt``, so ``x.shape[0]`` of an uneven block can be used in further shapes. Python cannot
branch on it: that raises unless all ranks agree.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fspmd.errors import VarianceError
from fspmd.transport.frame import Frame, spread, union


def local_int(held: Frame, values: Sequence[int]) -> Any:
    """A plain int where all ranks agree, else a ``torch.SymInt`` with one value per rank of ``held``."""
    first = values[0]
    if all(value == first for value in values):
        return first
    return torch.SymInt(LocalInt(held, list(values)))


class LocalInt:
    """One integer (or bool) per coordinate of ``frame``; speaks the protocol of a SymInt node."""

    def __init__(self, held: Frame, values: list[Any]) -> None:
        self.frame = held
        self.values = values

    def at(self, held: Frame) -> list[Any]:
        """The values in the order of a frame that includes this one's."""
        return self.values if held is self.frame else [self.values[i] for i in spread(self.frame, held)]

    def __repr__(self) -> str:
        return "{" + ", ".join(map(str, self.values)) + "}"

    str = _str = _graph_repr = __str__ = __repr__

    def maybe_as_int(self) -> int | None:
        return self.values[0] if self._agreed() and not self.is_bool() else None

    def maybe_as_bool(self) -> bool | None:
        return self.values[0] if self._agreed() and self.is_bool() else None

    def maybe_as_float(self) -> None:
        return None

    def _agreed(self) -> bool:
        return all(value == self.values[0] for value in self.values)

    def is_int(self) -> bool:
        return not self.is_bool()

    def is_float(self) -> bool:
        return isinstance(self.values[0], float)

    def is_bool(self) -> bool:
        return isinstance(self.values[0], bool)

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return False

    def clone(self) -> LocalInt:
        return self

    def wrap_int(self, value: int) -> LocalInt:
        return LocalInt(self.frame, [value] * self.frame.volume)

    wrap_bool = wrap_float = wrap_int

    def is_contiguous(self, *args: Any) -> bool:
        return True

    def is_non_overlapping_and_dense(self, *args: Any) -> LocalInt:
        return self.wrap_int(True)

    def guard_int(self, file: str = "", line: int = 0) -> int:
        return int(self._one())

    def guard_bool(self, file: str = "", line: int = 0) -> bool:
        return bool(self._one())

    def guard_float(self, file: str = "", line: int = 0) -> float:
        return float(self._one())

    guard_size_oblivious = guard_or_false = guard_or_true = expect_true = expect_size = guard_bool

    def _one(self) -> Any:
        if self._agreed():
            return self.values[0]
        raise VarianceError(
            f"a size that differs from rank to rank, {self!r} over {', '.join(map(repr, self.frame.axes))}, was used "
            "as one Python number; the blocks are uneven: use the global size, torch ops on axis_index, or rank_map"
        )

    def sym_max(self, other: Any) -> LocalInt:
        return _binary(max, self, other)

    def sym_min(self, other: Any) -> LocalInt:
        return _binary(min, self, other)

    def neg(self) -> LocalInt:
        return LocalInt(self.frame, [-value for value in self.values])

    def sym_not(self) -> LocalInt:
        return LocalInt(self.frame, [not value for value in self.values])

    def sym_float(self) -> LocalInt:
        return LocalInt(self.frame, [float(value) for value in self.values])

    def sym_ite(self, then: Any, otherwise: Any) -> LocalInt:
        rows = zip(self.values, _values(then, self.frame), _values(otherwise, self.frame), strict=True)
        return LocalInt(self.frame, [a if c else b for c, a, b in rows])


def _values(x: Any, held: Frame) -> list[Any]:
    if isinstance(x, LocalInt):
        return x.at(held)
    if not isinstance(x, (int, float)):  # a C++ constant node
        x = x.guard_int("", 0) if x.is_int() else x.guard_bool("", 0)
    return [x] * held.volume


def _binary(fn: Callable[[Any, Any], Any], a: LocalInt, b: Any) -> LocalInt:
    held = union(a.frame, b.frame) if isinstance(b, LocalInt) else a.frame
    return LocalInt(held, [fn(x, y) for x, y in zip(a.at(held), _values(b, held), strict=True)])


def _operator(fn: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[LocalInt, Any], LocalInt]:
    if swapped:
        return lambda self, other: _binary(lambda a, b: fn(b, a), self, other)
    return lambda self, other: _binary(fn, self, other)


def _equality(same: bool) -> Callable[[LocalInt, Any], Any]:
    """Sizes are equal when they are on every rank; that is one answer, and torch asks for it often."""

    def compare(self: LocalInt, other: Any) -> Any:
        equal = all(_binary(operator.eq, self, other).values)
        return torch._C._get_constant_bool_symnode(equal is same)

    return compare


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "lt", "le", "gt", "ge")},
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "pow": operator.pow,
    "pow_by_natural": operator.pow,
    "and_": lambda a, b: a and b,
    "or_": lambda a, b: a or b,
    "sym_and": lambda a, b: a and b,
    "sym_or": lambda a, b: a or b,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
}
for _name, _fn in _ARITHMETIC.items():
    setattr(LocalInt, _name, _operator(_fn))
    setattr(LocalInt, f"r{_name}", _operator(_fn, swapped=True))
setattr(LocalInt, "eq", _equality(True))  # noqa: B010
setattr(LocalInt, "ne", _equality(False))  # noqa: B010
