"""What the kernels of the CPU tell of a call that the meta device does not: the dtypes they take, and strides.

A kernel runs on few elements, once per miss. Only meshes of CPU devices ask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from operator import mul
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.forms import Laid, Strides, is_dense, packed
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import is_tagged, name_of
from fspmd.spec import TensorSpec
from fspmd.transport.randomness import kept


class GlobalCall(NamedTuple):
    """A call on global tensors, with the places of its operands among the arguments, and their layouts."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: Sequence[tuple[Place, TensorSpec]]

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments, those with names last."""
        return (*self.args, *self.kwargs.values())

    def run_on(self, make: Callable[[TensorSpec], Tensor]) -> Any:
        """Call the function on tensors that ``make`` gives in place of its operands."""
        given, count = self.given, len(self.args)
        values = [list(value) if isinstance(value, (list, tuple)) else value for value in given]
        for place, spec in self.operands:
            if isinstance(place, tuple):
                values[place[0]][place[1]] = make(spec)
            else:
                values[place] = make(spec)
        values = [type(old)(new) if type(old) is tuple else new for old, new in zip(given, values, strict=True)]
        named = dict(zip(self.kwargs, values[count:], strict=True))
        if named.get("device") is not None:  # so that no data is made there, and nothing is drawn
            named["device"] = at(values, self.operands[0][0]).device
        return self.func(*values[:count], **named)

    @property
    def has_kernels(self) -> bool:
        """Whether the mesh is of CPU devices."""
        return self.operands[0][1].mesh.device_type == "cpu"


def ones_of(size: int, spec: TensorSpec) -> Tensor:
    """Return ones on the CPU, ``size`` of them along each dim."""
    return torch.ones((size,) * len(spec.shape), dtype=spec.dtype, device="cpu")


def kernel_complaint(call: GlobalCall) -> Exception | None:
    """Return the error of an elementwise kernel for these dtypes and numbers, or None.

    An error for one element may be due to its value. It counts only if no elements give an error too.
    """
    if not call.has_kernels:
        return None
    errors: list[Exception] = []
    for size in (1, 0):
        try:
            call.run_on(functools.partial(ones_of, size))
            return None
        except NotImplementedError as error:
            return error
        except Exception as error:
            errors.append(error)
    return errors[0]


def dtype_complaint(call: GlobalCall) -> Exception | None:
    """Return the error of a kernel that is due to these dtypes: float32 in their place has none. None without one.

    The kernel runs on at most two elements along each dim. If it fails there, sizes may be the reason: unless it says
    that it is not implemented, it runs on all elements, if these are few. Functions of lists, and functions that draw,
    are not asked.
    """
    if not call.has_kernels:
        return None
    func, args, kwargs, operands = call
    dtypes = [arg for arg in call.given if isinstance(arg, torch.dtype)]
    if {*dtypes, *(spec.dtype for _, spec in operands)} <= {torch.float32}:
        return None
    if any(isinstance(place, tuple) for place, _ in operands):
        return None
    if is_tagged(name_of(func), torch.Tag.nondeterministic_seeded):
        return None

    def attempt(most: int | None, in_float32: bool) -> Exception | None:
        def dtype_of(x: Any) -> Any:
            return torch.float32 if in_float32 and isinstance(x, torch.dtype) else x

        def ones(spec: TensorSpec) -> Tensor:
            shape = spec.shape if most is None else [min(n, most) for n in spec.shape]
            return torch.ones(shape, dtype=dtype_of(spec.dtype), device="cpu")

        named = {name: dtype_of(arg) for name, arg in kwargs.items()}
        try:
            with kept():  # some functions draw in Python, and have no tag
                GlobalCall(func, tuple(map(dtype_of, args)), named, operands).run_on(ones)
        except Exception as error:
            return error
        return None

    most: int | None = 2
    complaint = attempt(most, in_float32=False)
    if complaint is not None and not isinstance(complaint, NotImplementedError):
        if sum(prod(spec.shape) for _, spec in operands) > _FEW:
            return None
        most = None
        complaint = attempt(most, in_float32=False)
    return complaint if complaint is not None and attempt(most, in_float32=True) is None else None


_FEW: Final = 1 << 16  # elements on which a kernel runs once more to be asked


def strides_of_kernel(call: GlobalCall, before: Sequence[Laid | None], shape: tuple[int, ...]) -> Strides | None:
    """Return the strides that a kernel gives its one result, or None. Meta kernels may give others.

    ``before`` has the memory of the operands. The kernel runs on few elements. Their strides and sizes have the order
    of the operands' own, by which torch lays results out: by sizes where strides are equal.
    """
    if not call.has_kernels or not all(laid is None or laid.strides for laid in before):
        return None
    args, named = tuple(map(_unless_generator, call.args)), {k: _unless_generator(x) for k, x in call.kwargs.items()}
    sizes = sorted({n for _, spec in call.operands for n in spec.shape if n > 1})
    for whole in (None, *sizes):  # groups divide the number of channels
        few = {0: 0, 1: 1}
        for n in sizes:
            few[n] = n if n == whole else max(few.values()) + 1
        try:
            with kept():
                out = call._replace(args=args, kwargs=named).run_on(functools.partial(_few, iter(before), few))
        except Exception:  # because of the sizes, or the call itself raises it
            continue
        return tuple(_in_order_of(out.stride(), shape)) if isinstance(out, Tensor) and out.dim() == len(shape) else None
    return None


def _few(before: Iterator[Laid | None], few: dict[int, int], spec: TensorSpec) -> Tensor:
    """Return the next operand with fewer elements, in memory of the same order."""
    laid = next(before)
    strides = packed(spec.shape) if laid is None or laid.strides is None else laid.strides
    small = [few[n] for n in spec.shape]
    steps = _steps(strides, spec.shape, small, not is_dense(spec.shape, strides))
    memory = torch.ones(1 + sum(map(mul, small, steps)), dtype=spec.dtype, device="cpu")
    return memory.as_strided(small, steps)


def _unless_generator(value: Any) -> Any:
    """Return an argument, and None for a generator, which must not advance."""
    return None if isinstance(value, torch.Generator) else value


def _steps(strides: Strides, shape: Sequence[int], small: Sequence[int], gaps: bool) -> list[int]:
    """Return strides for a small shape, with the order and the ties of the strides of a shape, with or without gaps.

    A stride that is less than what lies within it stays so, as with every second of five numbers: there are three, and
    a row ends before the gap after the last one.
    """
    steps, step, known = {0: 0}, 1, sorted({*strides} - {0})
    for stride, following in zip(known, [*known[1:], inf], strict=True):
        steps[stride] = step
        whole, few = (prod(n for n, s in zip(sizes, strides, strict=True) if s == stride) for sizes in (shape, small))
        step = step * few + gaps if following >= stride * whole else step * (few - 1) + 1
        gaps = False
    return [steps[stride] for stride in strides]


def _in_order_of(strides: Strides, shape: Sequence[int]) -> list[int]:
    """Return strides without gaps for a shape, with the dims in the same order as by the given strides."""
    steps, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim] != 1, -dim)):
        steps[dim], step = step, step * max(shape[dim], 1)
    return steps
