"""Errors of a recording: values that leave torch, shapes that depend on values, writes that are no steps.

Some functions have a replacement that reads no values: ``x[i]`` with a tensor ``i``, and ``one_hot``. If ``i`` is a
tensor of one number, ``x[i]`` is a view in torch and a copy in a record. A write into either raises `RecordError` while
both are in use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fspmd.errors import RecordError
from fspmd.foreign import ADVICE, IS, foreign_name, loose_kind
from fspmd.inspection.causes import trace
from fspmd.local_view.indexing import INTEGERS, as_index
from fspmd.messages import style_by_rows
from fspmd.ops.schemas import OpFacts, facts_of
from fspmd.sharded import Sharded, is_plain
from fspmd.torch_internals import FROM_CAPSULE, FakeTensor, pad_packed_sequence
from fspmd.tracing import with_attribute
from fspmd.transport.local_tensor import BLOCKS
from fspmd.variance import unwrapped


def line() -> str:
    """The user's line, for the end of a message."""
    cause = trace().cause
    return f" ({cause.where})" if getattr(cause, "where", None) else ""


def constant_of(what: str, advice: str = "") -> RecordError:
    """The error for a value that would be a constant of the record."""
    return RecordError(
        f"jit cannot record {what}: it would be a constant of the record. Compute it outside of the jitted function; "
        f"or keep it a tensor: torch.where(condition, a, b) instead of a branch, masks instead of selections{advice}"
        + line()
    )


def not_compiled() -> RecordError:
    """The error for functions that torch traces with its compiler."""
    return RecordError(
        "jit cannot record torch.cond, while_loop and similar functions, whose control flow depends on values; write "
        f"torch.where(condition, a, b), or a Python loop with a fixed number of steps{line()}"
    )


def not_dense(x: Tensor) -> RecordError:
    """The error for a tensor that is sparse, nested, or of another library."""
    if name := foreign_name(x):
        return RecordError(f"jit records tensors of this process, but got a {name}, which {IS}; {ADVICE}{line()}")
    return RecordError(f"jit records dense tensors, but got a {loose_kind(x)}; make it dense first{line()}")


_VALUES: Final = "{}, which makes a Python value of a tensor"
_WRITES: Final = "{}, which writes into a tensor without being an operation of torch"
_T: Any = Tensor
#: functions that give the values of their first argument to Python
_LEAVING: Final[dict[Any, str]] = {
    _T.numpy: "x.numpy()",
    _T.tolist: "x.tolist()",
    _T.__array__: "numpy.asarray(x)",
    _T.__dlpack__: "x.__dlpack__()",
    _T.__reduce_ex__: "pickling a tensor",
    _T.untyped_storage: "pickling a tensor or x.untyped_storage()",
    _T.__deepcopy__: "copy.deepcopy(x); write x.clone(). It",
    _T.__repr__: "print(x) or repr(x); write fspmd.debug_print('{}', x). It",
    _T.__format__: "a format such as f'{x}'; write fspmd.debug_print('{}', x). It",
}
#: functions that write where dispatch does not see it
_WRITING: Final[dict[Any, str]] = {
    _T.data.__set__: "x.data = y",
    _T.apply_: "x.apply_(f)",
    _T.map_: "x.map_(y, f)",
    _T.map2_: "x.map2_(y, z, f)",
}
#: functions that read values of tensors in their last argument, also in lists
_READING: Final[dict[Any, str]] = {
    torch.tensor: "torch.tensor([x, ...]) of tensors; write torch.stack. It",
    torch.as_tensor: "torch.as_tensor([x, ...]) of tensors; write torch.stack. It",
    torch.asarray: "torch.asarray([x, ...]) of tensors; write torch.stack. It",
    _T.new_tensor: "x.new_tensor([y, ...]) of tensors; write torch.stack. It",
    _T.new: "x.new([y, ...]) of tensors; write torch.stack. It",
}
#: functions that read values of their arguments after the first
_PLACED: Final[dict[Any, str]] = {
    **dict.fromkeys((torch.tensor_split, _T.tensor_split), "x.tensor_split(y) with a tensor of places; it"),
    pad_packed_sequence: "pad_packed_sequence of computed sizes; it",
}
#: conversions of one element to Python, which constructors such as torch.FloatTensor hide from dispatch
_NUMBERS: Final = frozenset({_T.__bool__, _T.__int__, _T.__index__, _T.__float__, _T.__complex__})
_NUMBER: Final = "a branch or x.item(), which makes a Python value of a tensor"
_INSTEAD_OF_PLACES: Final = ", x.index_select(d, i + torch.arange(n)) instead of x.narrow(d, i, n) or x[i:i + n]"
_GRADIENTS: Final = {_T.grad.__get__: "reads", _T.grad.__set__: "sets", _T.grad.__delete__: "deletes"}
_GIVING: Final = frozenset({*_LEAVING, *_READING, *_PLACED})
_CHECKED: Final = frozenset({*_GIVING, *_NUMBERS, *_WRITING, *_GRADIENTS, _T.data_ptr})


class RefusingMode(TorchFunctionMode):
    """A mode that raises `RecordError` for torch functions which dispatch does not see."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    @contextmanager
    def refused(self, concerns: Callable[[], bool]) -> Iterator[None]:
        """Within, such functions raise `RecordError`; so does ``from_dlpack`` of a capsule if ``concerns()``.

        ``torch.cuda.is_current_stream_capturing()`` is True, so that libraries leave out branches on values.
        """

        def from_capsule(plain: Any, capsule: Any) -> Any:
            if concerns():
                raise self.recorder.refusal(constant_of("torch.from_dlpack(y), whose memory has an unknown owner"))
            return plain(capsule)

        def captures(plain: Any) -> bool:
            return concerns() or plain()

        dlpack, capturing = getattr(*FROM_CAPSULE), torch.cuda.is_current_stream_capturing
        with (
            with_attribute(*FROM_CAPSULE, partial(from_capsule, dlpack)),
            with_attribute(torch.cuda, "is_current_stream_capturing", partial(captures, capturing)),
            self,
        ):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHECKED and not self.recorder.paused:
            self.check(func, args, kwargs or {})
            if self.recorder.is_fake and func in _GIVING:
                args = map_aggregate(tuple(args), self.recorder.values_of)
        out = NotImplemented
        if func in REPLACEMENTS and not self.recorder.paused:
            out = REPLACEMENTS[func](self.recorder, *args, **(kwargs or {}))
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        if not self.recorder.paused and type(out) in (Sharded, tuple, list):
            self.recorder.note_specs(out)
        return out

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise `RecordError` for a function that a record cannot repeat."""
        if (name := _LEAVING.get(func)) is not None:
            self.values(name, args[:1])
        elif func in _READING:
            data = args[-1] if args else kwargs.get("data", kwargs.get("obj"))
            self.values(_READING[func], _within(data))
        elif (name := _PLACED.get(func)) is not None:
            given = (x.local if type(x) is Sharded else x for x in (*args[1:], *kwargs.values()))
            self.values(name, [x for x in given if isinstance(x, Tensor)])
        elif func in _NUMBERS:
            self.number(args[0])
        elif func is _T.data_ptr and self.recorder.is_value(args[0]):
            raise self.recorder.refusal(constant_of("x.data_ptr(), which lets code read and write the values"))
        elif (name := _WRITING.get(func)) is not None:
            raise self.recorder.refusal(RecordError(f"jit cannot record {_WRITES.format(name)}{line()}"))
        elif (verb := _GRADIENTS.get(func)) is not None and self.recorder.is_from_outside(args[0]):
            raise self.recorder.refusal(
                RecordError(
                    f"the jitted function {verb} .grad of an argument, or of a tensor that it closes over; pass "
                    f"gradients as arguments, or compute them with fspmd.grad, and return them{line()}"
                )
            )

    def number(self, x: Tensor) -> None:
        """Raise `RecordError` where the single element of a tensor becomes a Python number."""
        x = unwrapped(x)
        if x.numel() == 1 and not self.recorder.is_constant(x):
            raise self.recorder.refusal(constant_of(_NUMBER, _advice()))

    def values(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Raise `RecordError` where Python would read values that are not constant."""
        tensors = list(tensors)
        if not all(map(self.recorder.is_constant, tensors)):
            raise self.recorder.refusal(constant_of(_VALUES.format(name)))
        self.recorder.note_read(tensors)


def _advice() -> str:
    """What to write in place of a Python value. Distributions ask whether all values are valid."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributions.distribution":
            return ", Normal(mean, scale, validate_args=False) for a distribution"
        frame = frame.f_back
    return _INSTEAD_OF_PLACES


def _within(data: Any) -> list[Tensor]:
    """The tensors in a list or a tuple, also in nested ones."""
    if not isinstance(data, (list, tuple)):
        return []
    return [x for entry in data for x in ([entry] if is_plain(entry) else _within(entry))]


def check(func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Any) -> None:
    """Raise `RecordError` where a call depends on values, or writes, in a way that a record cannot hold."""
    if facts.gives_values:
        name = _name_of(func)
        raise recorder.refusal(constant_of(_VALUES.format(_NAMES.get(name, name)), _advice()))
    if facts.shape_of_values(args, kwargs):
        raise recorder.refusal(shape_of_values(func))
    if facts.inplace_view and any(args[0] is x for x in recorder.given):
        raise recorder.refusal(
            RecordError(
                f"jit cannot record {func.overloadpacket.__name__}(), which changes the shape or the strides of "
                f"an argument of shape {tuple(args[0].shape)}; return the changed value{line()}"
            )
        )
    if facts.writes:
        check_writes(func.overloadpacket.__name__, written_by(func, args, kwargs), recorder)


def shape_of_values(func: Any) -> RecordError:
    """The error for a call whose result has a shape that depends on values."""
    name = _name_of(func)
    sized = f"; {_WITH_SIZE[name]}" if name in _WITH_SIZE else ""
    advice = f"{sized}; {_BY_RANK}: {style_by_rows(trace().cause.module or '...')}"
    return constant_of(f"{name}, which gives a result whose shape depends on values", advice)


def _name_of(func: Any) -> str:
    return func.overloadpacket.__name__.lstrip("_")  # type: ignore[no-any-return]


_BY_RANK: Final = "code of each rank on its own rows, as of experts, may run as Python"
#: the advice for functions that have a variant of known size
_WITH_SIZE: Final = {
    "repeat_interleave": "or give the size of the result: x.repeat_interleave(repeats, dim, output_size=n)",
    "nonzero": "or give the number of rows: torch.nonzero_static(x, size=n)",
    "bincount": "or count by sums: torch.zeros(n).index_add(0, x, torch.ones(len(x)))",
}
_NAMES: Final = {"local_scalar_dense": "a branch or x.item()"}


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes into."""
    written = facts_of(func).written(args, kwargs)
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in written)
    return [x for values in lists for x in values if isinstance(x, Tensor)]


def check_writes(name: str, written: list[Tensor], recorder: Any) -> None:
    """Raise `RecordError` where a write goes into a tensor that the recorded function closes over.

    Also where a tensor has a copy that is a view in torch. ``name``: of the function that writes.
    """
    for x in written:
        if recorder.is_copied(x):
            raise recorder.refusal(written_while_copied(name))
        node = recorder.owner(x)
        if node is not None:
            recorder.written.add(node)
        if node in recorder.captured:
            raise recorder.refusal(
                RecordError(
                    f"{name}() writes into a tensor of shape {tuple(x.shape)} that the jitted function closes over; "
                    f"pass it as an argument, and return the changed value{line()}"
                )
            )
        _vary(recorder.node_of(x))


def _vary(node: fx.Node) -> None:
    """Note that a constant, and the values whose view it is, are written into and no longer constant."""
    if node.meta.pop("constant", False):
        for operand in node.all_input_nodes:
            _vary(operand)


#: types of tensors that are blocks, and never another library's global tensor
OWN_TYPES: Final = BLOCKS | {FakeTensor}


def is_dense(x: Tensor) -> bool:
    """Whether a tensor has strides, and its memory in this process."""
    return not loose_kind(x) and (type(x) in OWN_TYPES or not foreign_name(x))


def check_dense(leaves: Iterable[Any]) -> None:
    """Raise `RecordError` where a leaf is a tensor that is not dense."""
    for x in leaves:
        if isinstance(x, Tensor) and not is_dense(x):
            raise not_dense(x)


def written_while_copied(name: str) -> RecordError:
    """The error for a write that changes a view in torch, but not the copy that a record has in its place."""
    return RecordError(
        f"jit cannot record {name}(), which writes into x or y while y = x[i] is in use, where the tensor i has one "
        f"number: y is a view in torch, and a copy in a record; write x[i] = x[i] + 1 for x[i] += 1, and "
        f"y = x[i].clone() to keep the old value{line()}"
    )


def _one_hot(records: Any, tensor: Any, num_classes: int = -1) -> Any:
    if not is_plain(tensor) or tensor.dtype is not torch.int64 or not _is_value(records, tensor):
        return NotImplemented
    if type(num_classes) is not int or num_classes <= 0:
        return NotImplemented
    classes = tensor.unsqueeze(-1)
    zeros = torch.zeros_like(classes.expand(*[-1] * tensor.dim(), num_classes), memory_format=torch.contiguous_format)
    return zeros.scatter(-1, classes, 1)


def _getitem(records: Any, x: Any, index: Any) -> Any:
    if (parts := _with_dims(records, x, index)) is None:
        return NotImplemented
    entries, dim, _ = parts
    if dim is None:
        return x[entries]
    out = x[entries].squeeze(dim)
    records.copied(_local(out), _local(x))
    return out


def _select(records: Any, input: Any, dim: int, index: Any) -> Any:
    if not isinstance(input, Tensor) or type(dim) is not int or not -input.dim() <= dim < input.dim():
        return NotImplemented
    return _getitem(records, *as_index(input, dim, index))


def _narrow(records: Any, input: Any, dim: Any, start: Any, length: Any) -> Any:
    if type(length) is not int or not (is_plain(input) and is_plain(start) and records.is_constant(start)):
        return NotImplemented
    with records.placing():
        return torch.narrow(input, dim, start, length)


def _setitem(records: Any, x: Any, index: Any, value: Any) -> Any:
    if (parts := _with_dims(records, x, index)) is None:
        return NotImplemented
    entries, dim, after = parts
    if isinstance(value, Tensor) and dim is not None:
        value = value.to(x.dtype)
        value = value.unsqueeze(value.dim() - after) if value.dim() >= after else value
    x[entries] = value
    return None


def _with_dims(records: Any, x: Any, index: Any) -> tuple[tuple[Any, ...], int | None, int] | None:
    """The index with its numbers as tensors of one dim, the place of that dim in the result, and the dims after it.

    Beside lists and tensors of integers the new dims broadcast with theirs, and the place is None. Torch takes numbers
    first: ``x[:, k][i]``. Without other entries between them ``x[i, k[None]]`` is the same.

    Returns None if no number in the index is a value of the record, or if the index has entries of other kinds, or
    lists or tensors that do not stand together with the numbers.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Tensor) or not any(_is_number(records, entry) for entry in entries):
        return None
    rest = x.dim() - sum(entry is not None and entry is not Ellipsis for entry in entries)  # dims without an entry
    extended: list[Any] = []
    places: list[int] = []
    dims = 0  # dims of the result, plus one for each of the tensors
    for entry in entries:
        if _is_number(records, entry):
            places.append(dims)
        elif not (entry is None or entry is Ellipsis or type(entry) is slice or _is_int(entry) or _is_array(entry)):
            return None
        extended.append(entry.long().unsqueeze(0) if _is_number(records, entry) else entry)
        dims += rest if entry is Ellipsis else not _is_int(entry)
    arrays = [i for i, entry in enumerate(extended) if _is_array(entry)]  # lists and tensors, and the numbers
    if len(arrays) > len(places):
        stand_together = all(_is_array(entry) or _is_int(entry) for entry in extended[arrays[0] : arrays[-1]])
        return (tuple(extended), None, 0) if stand_together else None
    together = places[-1] - places[0] < len(places)
    dim = places[0] if together else 0
    after = dims + (0 if any(entry is Ellipsis for entry in entries) else rest) - len(places) - dim
    return tuple(extended), dim, after


def _is_number(records: Any, x: Any) -> bool:
    return isinstance(x, Tensor) and not x.dim() and x.dtype in INTEGERS and _is_value(records, x)


def _is_array(x: Any) -> bool:
    """Whether an entry of an index is a list or a tensor of integers that has dims."""
    if isinstance(x, Tensor):
        return x.dim() > 0 and x.dtype in INTEGERS
    return type(x) is list and bool(x) and all(map(_is_int, x))


def _is_int(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_value(records: Any, x: Any) -> bool:
    return isinstance(x, Tensor) and not records.is_constant(_local(x))


def _local(x: Any) -> Tensor:
    return x.local if type(x) is Sharded else x


#: replacements by torch function: functions of the recorder and the arguments, which return NotImplemented if they
#: leave the call to torch
REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    F.one_hot: _one_hot,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.select: _select,
    torch.select: _select,
    Tensor.narrow: _narrow,
    torch.narrow: _narrow,
}
