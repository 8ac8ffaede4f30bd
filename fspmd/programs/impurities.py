"""What no record sees unless it is looked for: values and states that leave torch, or come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from fspmd.errors import RecordError
from fspmd.foreign import ADVICE, IS, foreign_name
from fspmd.programs.replaced import replaced
from fspmd.sharded import Sharded, is_plain
from fspmd.torch_internals import pad_packed_sequence, torch_c
from fspmd.variance import unwrapped
from fspmd.watching.causes import trace


def line() -> str:
    """Where the user's code is, for the end of a message."""
    cause = trace().cause
    return f" ({cause.where})" if getattr(cause, "where", None) else ""


def constant_of(what: str, advice: str = "") -> RecordError:
    """The refusal of what would be a constant of the record."""
    return RecordError(
        f"jit cannot record {what}: it would be a constant of the record. Compute it outside of the jitted function; "
        f"or keep it a tensor: torch.where(condition, a, b) instead of a branch, masks instead of selections{advice}"
        + line()
    )


def not_compiled() -> RecordError:
    """The refusal of what torch would have its compiler take apart."""
    return RecordError(
        "jit cannot record torch.cond, while_loop and others that run functions as values tell; write "
        f"torch.where(condition, a, b), or a loop of Python with a fixed number of steps{line()}"
    )


def not_dense(x: Tensor) -> RecordError:
    """The refusal of a tensor that is sparse, nested, or lies in a way of its own."""
    if name := foreign_name(x):
        return RecordError(f"jit records tensors of this process, but got a {name}, which {IS}; {ADVICE}{line()}")
    kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return RecordError(f"jit records dense tensors, but got one of layout {kind}; make it dense before{line()}")


_VALUES: Final = "{}, which makes a Python value of a tensor's"
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
#: functions that read values of tensors among, or in lists of, their arguments
_READING: Final[dict[Any, str]] = {
    torch.tensor: "torch.tensor([x, ...]) of tensors; write torch.stack. It",
    torch.as_tensor: "torch.as_tensor([x, ...]) of tensors; write torch.stack. It",
    torch.asarray: "torch.asarray([x, ...]) of tensors; write torch.stack. It",
    _T.new_tensor: "x.new_tensor([y, ...]) of tensors; write torch.stack. It",
    _T.new: "x.new([y, ...]) of tensors; write torch.stack. It",
}
#: functions that read values of their second argument, a tensor
_PLACED: Final[dict[Any, str]] = {
    **dict.fromkeys((torch.tensor_split, _T.tensor_split), "x.tensor_split(y) with a tensor of places; it"),
    pad_packed_sequence: "pad_packed_sequence of sizes that were computed; it",
}
#: what Python asks of a tensor with one element, where constructors such as torch.FloatTensor hide that from dispatch
_NUMBERS: Final = frozenset({_T.__bool__, _T.__int__, _T.__index__, _T.__float__, _T.__complex__})
_NUMBER: Final = "a branch or x.item(), which makes a Python value of a tensor's"
_GRADIENTS: Final = {_T.grad.__get__: "reads", _T.grad.__set__: "sets", _T.grad.__delete__: "deletes"}
_GIVING: Final = frozenset({*_LEAVING, *_READING, *_PLACED})
_CHECKED: Final = frozenset({*_GIVING, *_NUMBERS, *_WRITING, *_GRADIENTS, _T.data_ptr})


class Escapes(TorchFunctionMode):
    """Refuses torch functions that nothing below them shows."""

    def __init__(self, recorder: Any, instead: dict[Any, Callable[..., Any]]) -> None:
        """``instead``: by function what is called in its place, with the recorder first; it may decline."""
        super().__init__()
        self.recorder, self.instead = recorder, instead

    @contextmanager
    def refused(self, concerns: Callable[[], bool]) -> Iterator[None]:
        """Within, they are, and where it ``concerns`` this what is no torch function to a mode.

        Libraries that look whether a CUDA graph is captured learn that no values can be read, and leave branches out.
        """

        def from_capsule(plain: Any, capsule: Any) -> Any:
            if concerns():
                raise self.recorder.refusal(constant_of("torch.from_dlpack(y), which does not tell whose memory it is"))
            return plain(capsule)

        def captures(plain: Any) -> bool:
            return concerns() or plain()

        places: Any = ((torch_c, "_from_dlpack", from_capsule), (torch.cuda, "is_current_stream_capturing", captures))
        with replaced(places), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHECKED and not self.recorder.paused:
            self.check(func, args, kwargs or {})
            if self.recorder.imagines and func in _GIVING:
                args = map_aggregate(tuple(args), self.recorder.values_of)
        out = NotImplemented
        if func in self.instead and not self.recorder.paused:
            out = self.instead[func](self.recorder, *args, **(kwargs or {}))
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        if not self.recorder.paused:
            self.recorder.lies(out)
        return out

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raises for a function that a record would not have, or not as it is."""
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
            raise self.recorder.refusal(constant_of("x.data_ptr(), by which anybody may read or write its values"))
        elif (name := _WRITING.get(func)) is not None:
            raise self.recorder.refusal(RecordError(f"jit cannot record {_WRITES.format(name)}{line()}"))
        elif (verb := _GRADIENTS.get(func)) is not None and self.recorder.was_there(args[0]):
            raise self.recorder.refusal(
                RecordError(
                    f"the jitted function {verb} .grad of a tensor that was there before it; take gradients as "
                    f"arguments, or make them by fspmd.grad, and return them{line()}"
                )
            )

    def number(self, x: Tensor) -> None:
        """The same of what torch asks for a number; it asks tensors of many elements, too, if they are one."""
        x = unwrapped(x)
        if x.numel() == 1 and not self.recorder.is_constant(x):
            raise self.recorder.refusal(constant_of(_NUMBER))

    def values(self, name: str, found: Iterable[Tensor]) -> None:
        """Raises where Python would learn of values that are no constants."""
        found = list(found)
        if not all(map(self.recorder.is_constant, found)):
            raise self.recorder.refusal(constant_of(_VALUES.format(name)))
        self.recorder.learn(found)


def _within(data: Any) -> list[Tensor]:
    if not isinstance(data, (list, tuple)):
        return []
    return [x for one in data for x in ([one] if is_plain(one) else _within(one))]
