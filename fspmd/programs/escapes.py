"""What no record sees unless it is looked for: values and states that leave torch, or come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from fspmd.errors import RecordError
from fspmd.watching.causes import trace

Knows = Callable[[Tensor], bool]


def line() -> str:
    """Where the user's code is, for the end of a message."""
    cause = trace().cause
    return f" ({cause.where})" if getattr(cause, "where", None) else ""


def constant_of(what: str) -> RecordError:
    """The refusal of what would be a constant of the record."""
    return RecordError(
        f"jit cannot record {what}: it would be a constant of the record. Compute it outside of the jitted function; "
        "or keep it a tensor: torch.where(condition, a, b) instead of a branch, masks instead of selections" + line()
    )


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
}
_SPLITTING: Final = (torch.tensor_split, _T.tensor_split)
_GRADIENTS: Final = {_T.grad.__get__: "reads", _T.grad.__set__: "sets", _T.grad.__delete__: "deletes"}
_CHECKED: Final = frozenset({*_LEAVING, *_WRITING, *_READING, *_SPLITTING, *_GRADIENTS})


class Escapes(TorchFunctionMode):
    """Refuses torch functions that nothing below them shows."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHECKED and not self.recorder.paused:
            self.check(func, args, kwargs or {})
            if self.recorder.imagines and (func in _LEAVING or func in _READING or func in _SPLITTING):
                args = map_aggregate(tuple(args), self.recorder.values_of)
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
        elif func in _SPLITTING:
            self.values("x.tensor_split(y) with a tensor of places; it", [x for x in args[1:] if isinstance(x, Tensor)])
        elif (name := _WRITING.get(func)) is not None:
            raise self.recorder.refusal(RecordError(f"jit cannot record {_WRITES.format(name)}{line()}"))
        elif (verb := _GRADIENTS.get(func)) is not None and self.recorder.was_there(args[0]):
            raise self.recorder.refusal(
                RecordError(
                    f"the jitted function {verb} .grad of a tensor that was there before it; take gradients as "
                    f"arguments, or make them by fspmd.grad, and return them{line()}"
                )
            )

    def values(self, name: str, found: Iterable[Tensor]) -> None:
        """Raises where Python would learn of values that are no constants."""
        if not all(map(self.recorder.is_constant, found)):
            raise self.recorder.refusal(constant_of(_VALUES.format(name)))


def _within(data: Any) -> list[Tensor]:
    if not isinstance(data, (list, tuple)):
        return []
    return [x for one in data for x in ([one] if isinstance(one, Tensor) else _within(one))]
