"""What functions give of tensors without values: told by what their operands look like, once torch has worked it out.

torch remembers that, too, but takes ten times as long to answer, and loses views of ``prims.as_strided``.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.fake_mode import FakeMode
from fspmd.local_view.type_rules import tensors_of
from fspmd.torch_internals import (
    FakeTensor,
    OpOverload,
    default_device,
    dispatch_keys,
    make_subclass,
    refuse_pointers,
    warn_of_pointers,
)
from fspmd.tracing import DispatchMode
from fspmd.transport.op_facts import facts_of

_LITERALS: Final = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_MOST: Final = 4096  # results remembered of each function
_META: Final = torch.device("meta")

_default_dtype = torch.get_default_dtype

#: all that a function may ask of a tensor without values, but what shares its memory: dtype, shape, strides, offset,
#: device, and the keys by which torch dispatches, which tell apart what is conjugated, or of inference mode
Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device, int]


class Result(NamedTuple):
    """How a result looks, and whether it lies in the memory of the first argument, or in its own."""

    look: Look
    is_view: bool


class Argument(NamedTuple):
    """A result that is what a function was given, and has written into."""

    place: int


class _Untold(Exception):
    """What arguments look like does not tell all."""


class Imagining(DispatchMode, FakeMode):
    """A mode of fake tensors that remembers the results of aten functions."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # that of torch
        self._states: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _RESULTS.get(func)
        if known is None:
            known = _RESULTS[func] = {} if _is_told(func) else _UNTOLD
        if known is _UNTOLD:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        try:
            key = _key(args, kwargs)
        except _Untold:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if key in known:
            return self._made(known[key], args)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        try:
            found = self._remembered(out, args, list(tensors_of((*args, *(kwargs or {}).values()))))
            if facts_of(func).writes and _key(args, kwargs) != key:
                return out
        except _Untold:
            return out
        if len(known) >= _MOST:
            known.clear()
        known[key] = found
        return out

    def _remembered(self, out: Any, args: Any, others: list[Tensor]) -> Any:
        """What to remember of a result; ``others`` have memory of their own, but that the first argument may share."""
        if type(out) in (tuple, list):
            return type(out)(self._remembered(one, args, [*others, *tensors_of(out[:i])]) for i, one in enumerate(out))
        if out is None:
            return None
        if type(out) is not FakeTensor or out.requires_grad:
            raise _Untold
        if (place := next((i for i, x in enumerate(args) if x is out), None)) is not None:
            return Argument(place)
        look, memory = _look(out), _memory(out)
        is_view = type(args[0]) is FakeTensor and memory == _memory(args[0]) if args else False
        if not is_view and any(memory == _memory(x) for x in others):
            raise _Untold
        found = Result(look, is_view)
        again = self._made(found, args)
        if _look(again) != look or again.untyped_storage().nbytes() != out.untyped_storage().nbytes():
            raise _Untold
        return found

    def _made(self, found: Any, args: Any) -> Any:
        """Tensors that are what is remembered."""
        if type(found) is Argument:
            return args[found.place]
        if type(found) is not Result:
            return None if found is None else type(found)(self._made(one, args) for one in found)
        (dtype, shape, strides, offset, device, _), is_view = found
        block = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
        if is_view:
            block.set_(args[0].untyped_storage(), offset, shape, strides)
        return self._fake(block, device)

    def _fake(self, block: Tensor, device: torch.device) -> Tensor:
        """``FakeTensor(self, block, device)``, which has all of Python's attributes alike for a device."""
        if (state := self._states.get(device)) is None:
            state = self._states[device] = dict(FakeTensor(self, block, device).__dict__)
        fake: Tensor = make_subclass(FakeTensor, block, False, dispatch_device=True, device_for_backend_keys=device)
        if self._allow_unsafe_data_ptr_access:
            warn_of_pointers(fake)
        else:
            refuse_pointers(fake)
        fake.__dict__.update(state)
        return fake


_RESULTS: Final[dict[Any, dict[Any, Any]]] = {}  # of each function, by what its arguments look like
_UNTOLD: Final[dict[Any, Any]] = {}  # of functions of which they do not tell


def _is_told(func: Any) -> bool:
    """Whether what its arguments look like tells what a function does."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    facts = facts_of(func)
    return not (facts.strided or facts.inplace_view)  # whose bounds are those of the memory; which changes arguments


def _key(args: Any, kwargs: Any) -> Any:
    """What the arguments of a call look like, and all else that results depend on."""
    return *map(_seen, args), _seen(kwargs or None), _default_dtype(), default_device()


def _seen(value: Any) -> Any:
    """What an argument looks like."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise _Untold
        return _look(value)
    if kind is list or kind is tuple:
        return kind, *map(_seen, value)
    if kind is dict:
        return tuple((name, _seen(one)) for name, one in value.items())
    if kind not in _LITERALS:
        raise _Untold
    return kind, value


def _look(x: Any) -> Look:
    if x.layout is not torch.strided:
        raise _Untold
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.fake_device, dispatch_keys(x).raw_repr()


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
