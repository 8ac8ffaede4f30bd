"""Fake tensors, which have shapes and no values. Torch's log stays silent about their errors, since fspmd raises them.

Tensors on the meta device are far faster. Torch lays out the results of its kernels there as on a GPU, unless it is
given another kind of device.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fspmd.cache import cached
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import tensors_in
from fspmd.torch_internals import (
    DEVICE_HINT,
    FAKE_TENSOR_ERRORS,
    NO_LEVEL,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    address_of,
    aten_grouped_mm,
    level_of,
    make_subclass,
    neg_view,
    tells_addresses,
)
from fspmd.tracing import DispatchMode, unseen, without_dispatch_modes


class UnknownValues(RuntimeError):
    """A function on fake tensors needs values, for its result or for the shape of its result.

    Attributes:
        func: The aten function.
        for_shape: Whether the shape depends on the values.
    """

    def __init__(self, func: Any, for_shape: bool) -> None:
        super().__init__(f"{func} needs values")
        self.func = func
        self.for_shape = for_shape


class FakeMode(FakeTensorMode):
    """A mode in which torch computes shapes and dtypes. Its logger does not report errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        converter: Any = self.fake_tensor_converter
        converter.from_real_tensor = functools.partial(_without_gradient, converter.from_real_tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_grouped_mm and args[0].dtype is not torch.bfloat16:  # only torch's real kernels take others
            operands: list[Tensor] = [*args[:3], *(kwargs or {}).values()]
            a, b = operands[:2]
            groups = () if a.dim() != b.dim() else a.shape[:1] if a.dim() == 3 else operands[2].shape
            with self:
                return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
        if func is _VIEW and all(type(n) is int for n in (*args[0].shape, *args[1])):
            with without_dispatch_modes():  # the fake view accepts some views that do not exist; this raises for them
                torch.empty_strided(args[0].shape, args[0].stride(), device="meta").view(args[1])
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        except FAKE_TENSOR_ERRORS as error:
            if (unknown := _unknown_values(error)) is None:
                raise
            raise unknown from error
        if isinstance(out, Tensor) and torch.Tag.pointwise in func.tags and (func, out.dtype) not in _RIGHT:
            return self._laid_out(args, out)
        return out

    def _laid_out(self, args: Any, out: Tensor) -> Tensor:
        """The result of a function of elements, laid out as its kernel does.

        Torch computes some such results by several functions, or in float32 for operands of 16 bits. An expanded
        operand is then laid out anew. No kernel does that.
        """
        operands = [x for x in args if isinstance(x, Tensor)]
        like = _LIKE.get(len(operands))
        is_expanded = any(0 in x.stride() for x in operands) and any(x.shape == out.shape for x in operands)
        is_alike = all(
            x is not out and x.dtype is out.dtype and x.dim() == out.dim() and {*x.shape} <= {1, *out.shape}
            for x in operands
        )
        if like is None or not is_expanded or not is_alike:
            return out
        with self:
            wide = [torch.empty_strided(x.shape, x.stride(), dtype=_WIDE, device=x.device) for x in operands]
            strides = like(*wide).stride()
            # where operands lie otherwise, their order decides, and a kernel may have another one than its function
            if strides == out.stride() or strides != like(*reversed(wide)).stride():
                return out
            return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


_VIEW: Final = torch.ops.aten.view.default
_WIDE: Final = torch.float32
#: by the number of operands, a function of elements whose shape function lays the result out as kernels do, in `_WIDE`
_LIKE: Final[dict[int, Any]] = {2: torch.ops.aten.mul.Tensor, 3: torch.ops.aten.addcmul.default}
_RIGHT: Final = {(func, _WIDE) for func in _LIKE.values()}


def _without_gradient(convert: Callable[..., Any], mode: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Converts a real tensor without its gradient, which may have another shape or dtype by now."""
    with DisableTorchFunction():
        if x.is_leaf and x.grad is not None:
            with without_dispatch_modes():
                x = x.detach()
    return convert(mode, x, *args, **kwargs)


def _unknown_values(error: Any) -> UnknownValues | None:
    """The error of fspmd for an error of torch, if that says that a function needs values."""
    func = getattr(error, "func", None)
    if isinstance(error, _shape_error()):  # no tag says so of a user's function, and of some of torch's
        return UnknownValues(func, True)
    is_value = func is not None and torch.Tag.data_dependent_output in func.tags
    return UnknownValues(func, False) if is_value else None


@cached
def _shape_error() -> type[Exception]:
    """The class of torch's error for a result whose shape depends on values: as that of `nonzero`."""
    try:
        with unseen(), FakeTensorMode():
            torch.empty(1).nonzero()
    except FAKE_TENSOR_ERRORS as error:
        return type(error)
    raise NotImplementedError("fspmd does not know this version of torch: nonzero() of a fake tensor has a shape")


class _NotOurs(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        failed = record.exc_info[2] if record.exc_info else None
        return failed is None or not isinstance(failed.tb_frame.f_locals.get("self"), FakeMode)


logging.getLogger(FakeTensorMode.__module__).addFilter(_NotOurs())


_LITERALS: Final = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_MOST: Final = 4096  # cache entries of one function
_META: Final = torch.device("meta")
_FAKE: Final = frozenset((FakeTensor,))
_USUAL: Final = frozenset((Tensor, torch.nn.Parameter))

_default_dtype = torch.get_default_dtype

#: a fake tensor without its memory: dtype, shape, strides, offset, device, and whether it is conjugated, negated and of
#: inference mode
Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device, tuple[bool, ...]]


class Result(NamedTuple):
    """A cache entry: the look of a result, and whether it lies in the memory of the first argument."""

    look: Look
    is_view: bool


class Argument(NamedTuple):
    """A cache entry: the result is the argument at ``place``, which the function has written into."""

    place: int


class _NotCacheable(Exception):
    """The looks of the arguments do not determine the result."""


class CachingFakeMode(DispatchMode, FakeMode):
    """A mode in which torch computes shapes alone, also for tensors with values. It has a cache of results."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache
        self._states: dict[torch.device, dict[str, Any]] = {}
        self._memories: dict[StorageWeakRef, Tensor] = {}  # the bytes of fakes, by the memory of tensors
        converter: Any = self.fake_tensor_converter
        self._converted = functools.partial(converter.from_real_tensor, self)
        converter.from_real_tensor = lambda _, x, **how: (
            self.fake_of(x) if _is_usual(x) and not how else self._converted(x, **how)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _FAKE.issuperset(types):  # a simulated value calls the function for each rank
            return NotImplemented
        if not _USUAL.isdisjoint(map(type, args)):
            args = tuple([self.fake_of(x) if type(x) in _USUAL and _is_usual(x) else x for x in args])
        entries = _ENTRIES.get(func)
        if entries is None:
            entries = _ENTRIES[func] = {} if _is_cacheable(func) else _NOT_CACHED
        if entries is _NOT_CACHED:
            return self._computed(func, types, args, kwargs or {})
        try:
            key = _key(args, kwargs)
        except _NotCacheable:
            return self._computed(func, types, args, kwargs or {})
        if key in entries:
            return self._made(entries[key], args)
        out = self._computed(func, types, args, kwargs or {})
        try:
            entry = self._entry(out, args, list(tensors_in((*args, *(kwargs or {}).values()))))
            if _key(args, kwargs) != key:  # the call has changed its arguments
                return out
        except _NotCacheable:
            return out
        if len(entries) >= _MOST:
            entries.clear()
        entries[key] = entry
        return out

    def _computed(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result without the cache. Some kernels take empty operands of dtypes that shape functions refuse."""
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            given = list(tensors_in((*args, *kwargs.values())))
            is_empty = any(0 in x.shape for x in given) and all(x.device.type == "cpu" for x in given)
            if type(error) is not RuntimeError or not is_empty:
                raise
            try:
                out = func(*map(_zeros_like, args), **{name: _zeros_like(x) for name, x in kwargs.items()})
            except RuntimeError:
                raise error from None
            if type(out) is not Tensor:
                raise
            block = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=_META)
            return self._fake(block, out.device)

    def _entry(self, out: Any, args: Any, others: list[Tensor]) -> Any:
        """The cache entry for a result.

        Raises `_NotCacheable` for a result in the memory of one of ``others``, except of the first argument.
        """
        if type(out) in (tuple, list):
            return type(out)(self._entry(x, args, [*others, *tensors_in(out[:i])]) for i, x in enumerate(out))
        if out is None:
            return None
        if type(out) is not FakeTensor or out.requires_grad:
            raise _NotCacheable
        if (place := next((i for i, x in enumerate(args) if x is out), None)) is not None:
            return Argument(place)
        look, memory = _look(out), _memory(out)
        is_view = type(args[0]) is FakeTensor and memory == _memory(args[0]) if args else False
        if not is_view and any(memory == _memory(x) for x in others):
            raise _NotCacheable
        entry = Result(look, is_view)
        again = self._made(entry, args)
        if _look(again) != look or again.untyped_storage().nbytes() != out.untyped_storage().nbytes():
            raise _NotCacheable
        return entry

    def _made(self, entry: Any, args: Any) -> Any:
        """New tensors for a cache entry."""
        if type(entry) is Argument:
            return args[entry.place]
        if type(entry) is not Result:
            return None if entry is None else type(entry)(self._made(part, args) for part in entry)
        (dtype, shape, strides, offset, device, _), is_view = entry
        block = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
        if is_view:
            block.set_(args[0].untyped_storage(), offset, shape, strides)
        return self._fake(block, device)

    def fake_of(self, x: Tensor) -> Tensor:
        """The fake of a tensor. Fakes share memory as the tensors do. Transforms and modes must not see the call.

        A meta tensor stands for one on the default device: so are the parameters of a module that is to be planned.
        """
        if isinstance(x, FakeTensor):
            return x.detach()
        if type(x) in _USUAL and x.is_conj():
            return self.fake_of(x.conj()).conj()
        if type(x) in _USUAL and x.is_neg():
            negated: Tensor = neg_view(self.fake_of(neg_view(x)))
            return negated
        storage, size = x.untyped_storage(), x.dtype.itemsize
        memory = self._memories.get(key := StorageWeakRef(storage))
        if not _is_usual(x):
            fake: Tensor = self._converted(x.detach())
            if memory is None:
                self._memories[key] = torch.empty(0, dtype=torch.uint8, device=_META).set_(fake.untyped_storage())
            return fake
        if memory is None:
            memory = self._memories[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META)
        elements = memory[: storage.nbytes() // size * size].view(x.dtype)
        device = torch.get_default_device() if x.is_meta else x.device
        return self._fake(elements.as_strided(x.shape, x.stride(), x.storage_offset()), device)

    def _fake(self, block: Tensor, device: torch.device) -> Tensor:
        """``FakeTensor(self, block, device)``, made faster: its attributes depend on the device alone."""
        if not tells_addresses(self):
            return FakeTensor(self, block, device)
        if (state := self._states.get(device)) is None:
            state = self._states[device] = dict(FakeTensor(self, block, device).__dict__)
        fake: Tensor = make_subclass(FakeTensor, block, False, dispatch_device=True, device_for_backend_keys=device)
        fake.__dict__.update(state)
        return fake


_ENTRIES: Final[dict[Any, dict[Any, Any]]] = {}  # for each function, entries by the looks of its arguments
_NOT_CACHED: Final[dict[Any, Any]] = {}  # marks functions without entries


def _is_usual(x: Tensor) -> bool:
    """Whether dtype, shape, strides and offset are all that a fake tensor has of a tensor."""
    is_plain = type(x) in _USUAL and level_of(x) == NO_LEVEL and x.layout is torch.strided
    return is_plain and not (x.is_conj() or x.is_neg() or x.is_nested or x.is_quantized)


def _zeros_like(x: Any) -> Any:
    """Zeros with values, which need no memory, for a fake tensor; other arguments as they are."""
    return torch.zeros((), dtype=x.dtype, device=x.fake_device).expand(x.shape) if type(x) is FakeTensor else x


def _is_cacheable(func: Any) -> bool:
    """Whether the looks of its arguments determine the result of a function."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    facts = facts_of(func)
    return not (facts.strided or facts.inplace_view)  # bounds depend on the memory; arguments change


def _key(args: Any, kwargs: Any) -> Any:
    """The looks of the arguments of a call, and everything else that results depend on."""
    return *map(_key_part, args), _key_part(kwargs or None), _default_dtype()


def _key_part(value: Any) -> Any:
    """An argument as part of a key: for a tensor its look."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise _NotCacheable
        return _look(value)
    if kind is list or kind is tuple:
        return kind, *map(_key_part, value)
    if kind is dict:
        return tuple((name, _key_part(entry)) for name, entry in value.items())
    if kind not in _LITERALS:
        raise _NotCacheable
    return kind, value


def _look(x: Any) -> Look:
    if x.layout is not torch.strided:
        raise _NotCacheable
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.fake_device, (x.is_conj(), x.is_neg(), x.is_inference())


def _memory(x: Tensor) -> int:
    return int(address_of(x.untyped_storage()))


class _Device(threading.local):
    kind = ""


_device: Final = _Device()


@contextmanager
def meta_tensors_as_on(kind: str) -> Iterator[None]:
    """Lay out tensors on the meta device as on a device of this kind, within a ``with`` block."""
    before, _device.kind = _device.kind, kind
    try:
        yield
    finally:
        _device.kind = before


def install() -> None:
    """Make torch's functions on the meta device ask for the kind."""
    original = getattr(*DEVICE_HINT)
    setattr(*DEVICE_HINT, lambda x: _device.kind if _device.kind and x.is_meta else original(x))
