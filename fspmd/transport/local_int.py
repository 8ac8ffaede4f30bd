"""A Python number that differs from rank to rank: the size of an uneven simulated block, and what is computed from it.

It is the node of a ``torch.SymInt`` (``SymFloat``, ``SymBool``), so ``x.shape[0]`` of an uneven block can be used in
further shapes and in arithmetic. Python cannot branch on it: that raises unless all ranks agree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fspmd.errors import VarianceError
from fspmd.forms import is_dense
from fspmd.spec import TensorSpec
from fspmd.torch_internals import method_of_symbols
from fspmd.transport.frame import UNEVEN, Frame, frame_over, spread, union

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def local_int(frame: Frame, values: Sequence[int]) -> Any:
    """A plain int where all ranks agree, else a ``torch.SymInt`` with one value per rank of ``frame``."""
    first = values[0]
    if values.count(first) == len(values):
        return first
    UNEVEN.add(frame.mesh.transport)
    return torch.SymInt(LocalInt(frame, list(values)))


def block_sizes(spec: TensorSpec) -> tuple[Any, ...]:
    """The shape of this process's block, or of the blocks of all simulated ranks, as numbers that may differ."""
    mesh = spec.mesh
    if spec.even:
        return spec.block_shape
    if mesh.transport != "simulation":
        return spec.local_shape(mesh.coordinate() or ())
    frame = frame_over(mesh, spec.partition.axes)
    shapes = map(spec.local_shape, frame.mesh_coordinates())
    return tuple(local_int(frame, sizes) for sizes in zip(*shapes, strict=True))


class LocalInt:
    """One int (or float, or bool) per coordinate of ``frame``; speaks the protocol of a SymInt node.

    Torch's own code asks whether two sizes are equal and goes a general way where they are not. It is answered for all
    ranks at once: ``verdict`` is that answer where ranks differ. Python code that asks gets an error instead.
    """

    __slots__ = ("frame", "values", "verdict")

    def __init__(self, frame: Frame, values: list[Any], verdict: bool | None = None) -> None:
        self.frame = frame
        self.values = values
        self.verdict = verdict

    def at(self, frame: Frame) -> list[Any]:
        """The values in the order of a frame that includes this one's."""
        return self.values if frame is self.frame else [self.values[i] for i in spread(self.frame, frame)]

    def __repr__(self) -> str:
        return "{" + ", ".join(map(str, self.values)) + "}"

    _str = _graph_repr = __str__ = __repr__

    # --- what kind of number, and is it the same on all ranks -----------------------------------------------------

    def _agreed(self) -> bool:
        return self.values.count(self.values[0]) == len(self.values)

    is_constant = _agreed

    def is_nested_int(self) -> bool:
        return False

    is_symbolic = has_hint = is_nested_int

    def nested_int(self) -> None:
        return None

    def clone(self) -> LocalInt:
        return self

    def wrap_int(self, value: int) -> LocalInt:
        return LocalInt(self.frame, [value] * self.frame.volume)

    wrap_bool = wrap_float = wrap_int

    # --- one Python number ----------------------------------------------------------------------------------------

    def guard_bool(self, file: str = "", line: int = 0) -> bool:
        return self._agreed_value() if self.verdict is None or self._agreed() else self.verdict

    guard_size_oblivious = expect_true = expect_size = guard_bool

    def guard_or_false(self, file: str = "", line: int = 0) -> bool:
        return bool(self._agreed() and self.values[0])

    statically_known_true = guard_or_false

    def guard_or_true(self, file: str = "", line: int = 0) -> bool:
        return bool(not self._agreed() or self.values[0])

    def _agreed_value(self) -> Any:
        if self._agreed():
            return self.values[0]
        raise VarianceError(
            f"a size that differs from rank to rank, {self!r} over {', '.join(map(repr, self.frame.axes))}, was used "
            "as one Python number; the blocks are uneven: use the global size, torch ops on axis_index, or rank_map"
        )

    # --- arithmetic -----------------------------------------------------------------------------------------------

    def sym_ite(self, then: Any, otherwise: Any) -> LocalInt:
        rows = zip(self.values, _values(then, self.frame), _values(otherwise, self.frame), strict=True)
        return LocalInt(self.frame, [a if c else b for c, a, b in rows])

    def sym_not(self) -> LocalInt:
        return LocalInt(self.frame, [not v for v in self.values], None if self.verdict is None else not self.verdict)

    def eq(self, other: Any) -> LocalInt:
        return LocalInt(*_zipped(operator.eq, self, other), verdict=False)

    def ne(self, other: Any) -> LocalInt:
        return LocalInt(*_zipped(operator.ne, self, other), verdict=True)

    def sym_and(self, other: Any) -> LocalInt:
        return _connect(lambda a, b: a and b, self, other)

    def sym_or(self, other: Any) -> LocalInt:
        return _connect(lambda a, b: a or b, self, other)

    and_, or_ = sym_and, sym_or


def _of_blocks(
    first: LocalInt, sizes: list[Any], strides: list[Any], memory_format: torch.memory_format | None
) -> LocalInt:
    """Whether each rank's block lies so; without a format, whether it is dense in some order of its dims."""
    rows = zip(*(_values(x, first.frame) for x in (*sizes, *strides)), strict=True)
    verdicts = []
    for row in rows:
        shape, steps = row[: len(sizes)], row[len(sizes) :]
        if memory_format is None:
            verdicts.append(0 in shape or is_dense(shape, steps))
        else:
            block = torch.empty_strided(shape, steps, device="meta")
            verdicts.append(block.is_contiguous(memory_format=memory_format))
    return LocalInt(first.frame, verdicts, verdict=False)


def _values(x: Any, frame: Frame) -> list[Any]:
    if isinstance(x, LocalInt):
        return x.at(frame)
    if not isinstance(x, (int, float)):  # a C++ constant node
        x = x.guard_bool("", 0) if x.is_bool() else x.guard_float("", 0) if x.is_float() else x.guard_int("", 0)
    return [x] * frame.volume


def _zipped(fn: Callable[[Any, Any], Any], a: LocalInt, b: Any) -> tuple[Frame, list[Any]]:
    frame = union(a.frame, b.frame) if isinstance(b, LocalInt) else a.frame
    return frame, [fn(x, y) for x, y in zip(a.at(frame), _values(b, frame), strict=True)]


def _connect(fn: Callable[[Any, Any], Any], a: LocalInt, b: Any) -> LocalInt:
    """and, or: where all ranks agree on an operand it has no say in the verdict."""
    verdicts = {x.verdict for x in (a, b) if isinstance(x, LocalInt) and not x._agreed()}
    return LocalInt(*_zipped(fn, a, b), verdict=verdicts.pop() if len(verdicts) == 1 else None)


def _binary(fn: Callable[[Any, Any], Any]) -> Callable[[LocalInt, Any], LocalInt]:
    return lambda self, other: LocalInt(*_zipped(fn, self, other))


def _unary(fn: Callable[[Any], Any]) -> Callable[[LocalInt], LocalInt]:
    return lambda self: LocalInt(self.frame, [fn(value) for value in self.values])


def _lying(memory_format: torch.memory_format | None) -> Callable[[LocalInt, list[Any], list[Any]], LocalInt]:
    return lambda self, sizes, strides: _of_blocks(self, sizes, strides, memory_format)


def _asking(kind: type) -> dict[str, Callable[..., Any]]:
    """The methods that ask whether a number has a type, and for the one Python number of this type."""
    name = kind.__name__
    return {
        f"is_{name}": lambda self: type(self.values[0]) is kind,
        f"maybe_as_{name}": lambda self: self.values[0] if type(self.values[0]) is kind and self._agreed() else None,
        f"{name}_": lambda self: kind(self._agreed_value()),
        **({} if kind is bool else {f"guard_{name}": lambda self, file="", line=0: kind(self._agreed_value())}),
    }


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "lt", "le", "gt", "ge", "pow")},
    **dict.fromkeys(("floordiv", "int_floordiv"), operator.floordiv),
    **dict.fromkeys(("truediv", "int_truediv", "float_truediv"), operator.truediv),
    **dict.fromkeys(("pow_by_natural", "float_pow"), operator.pow),
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "sym_max": max,
    "sym_min": min,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "sym_float": float,
    "sym_int": int,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
    "round": round,
    "is_integer": lambda value: float(value).is_integer(),
    **{method_of_symbols(fn): fn for fn in (math.sqrt, math.cos, math.cosh, math.sin, math.sinh, math.tan, math.tanh)},
    **{method_of_symbols(fn): fn for fn in (math.asin, math.acos, math.atan, math.log2)},
}
setattr(LocalInt, "str", LocalInt.__repr__)  # noqa: B010 (the protocol's name would hide the type in annotations)
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _binary(fn) for name, fn in _BINARY.items()},
    **{name: _unary(fn) for name, fn in _UNARY.items()},
    **_asking(int),
    **_asking(float),
    **_asking(bool),
    "is_contiguous": _lying(torch.contiguous_format),
    "is_channels_last_contiguous_2d": _lying(torch.channels_last),
    "is_channels_last_contiguous_3d": _lying(torch.channels_last_3d),
    "is_non_overlapping_and_dense": _lying(None),
}
for _name, _method in _METHODS.items():
    setattr(LocalInt, _name, _method)
