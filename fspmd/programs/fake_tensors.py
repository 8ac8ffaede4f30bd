"""Fake tensors: arguments without values, on which functions are recorded, and a fake mode with a cache of results."""

from __future__ import annotations

from functools import partial
from itertools import starmap
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.fake_mode import FakeMode
from fspmd.forms import overlaps
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import tensors_in
from fspmd.programs.refusals import is_dense, not_dense
from fspmd.sharded import NODES, Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    make_subclass,
)
from fspmd.tracing import DispatchMode
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import blocks_of, local_tensor, per_block

_LITERALS: Final = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_MOST: Final = 4096  # cache entries of one function
_META: Final = torch.device("meta")
_FAKE: Final = frozenset((FakeTensor,))

_default_dtype = torch.get_default_dtype

#: a fake tensor without its memory: dtype, shape, strides, offset, device, and whether it is conjugated, negated and of
#: inference mode
Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device, tuple[bool, ...]]


def fake_mode() -> FakeTensorMode:
    """A mode in which torch computes shapes alone, also for tensors with values."""
    return CachingFakeMode()


def stand_ins(tree: Any, mode: FakeTensorMode, as_they_lie: bool = False) -> Any:
    """A tree with a fake tensor for each tensor, and a `Sharded` of a fake block for each `TensorSpec`.

    ``as_they_lie``: also tensors whose elements share memory keep their strides.
    """
    return optree.tree_map(lambda leaf: _stand_in(leaf, mode, as_they_lie), tree, none_is_leaf=True, namespace=NODES)


def stand_in(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """The fake of a tensor in a mode. Fakes of views share memory as the views do."""
    with DisableTorchFunction():
        fake: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, x)
    return fake


def _stand_in(leaf: Any, mode: FakeTensorMode, as_they_lie: bool) -> Any:
    if isinstance(leaf, TensorSpec):
        return Sharded(_block(leaf, mode), leaf)
    if isinstance(leaf, Tensor):
        if not is_dense(leaf):
            raise not_dense(leaf)
        fake = per_block(partial(_fake, mode=mode), leaf)
        return like(leaf, fake if as_they_lie else unshared(fake))
    return leaf


def like(x: Tensor, made: Tensor) -> Tensor:
    """``made``, which replaces ``x``, with the ``requires_grad`` of ``x``; a parameter if ``x`` is a parameter."""
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(made, x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def unshared(x: Tensor) -> Tensor:
    """``x``, or a copy where elements share memory, so that other arguments may have the strides of the result."""
    is_strided = x.layout is torch.strided and not x.is_nested
    return x.contiguous() if is_strided and has_overlaps(x) else x


def has_overlaps(x: Tensor) -> bool:
    """Whether elements of a block share memory, as those of an expanded one do."""
    return any(starmap(overlaps, {(block.shape, block.stride()) for block in blocks_of(x)}))


def _block(spec: TensorSpec, mode: FakeTensorMode) -> Tensor:
    """A fake of this rank's block, or of the blocks of all simulated ranks."""
    device = spec.mesh.device
    with mode:
        if spec.mesh.transport != "simulation":
            place = spec.mesh.coordinate()
            return torch.empty((0,) if place is None else spec.local_shape(place), dtype=spec.dtype, device=device)
        holders = frame(spec.mesh, spec.partition.axes | spec.partition.unreduced)
        axes = spec.mesh.axis_names
        places = [dict(zip(holders.axes, place, strict=True)) for place in holders.coordinates()]
        shapes = [spec.local_shape(tuple(place.get(axis, 0) for axis in axes)) for place in places]
        return local_tensor([torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes], holders)


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """The fake of a block."""
    if isinstance(x, FakeTensor):
        return x.detach()
    if not (x.is_meta or x.is_inference()):
        return mode.from_tensor(x.detach())
    device = None if x.is_meta else x.device
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


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
    """A fake mode with a cache of the results of aten functions."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache
        self._states: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _FAKE.issuperset(types):  # a simulated value calls the function for each rank
            return NotImplemented
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

    def _fake(self, block: Tensor, device: torch.device) -> Tensor:
        """``FakeTensor(self, block, device)``, made faster: its attributes depend on the device alone."""
        if not self._allow_unsafe_data_ptr_access:
            return FakeTensor(self, block, device)
        if (state := self._states.get(device)) is None:
            state = self._states[device] = dict(FakeTensor(self, block, device).__dict__)
        fake: Tensor = make_subclass(FakeTensor, block, False, dispatch_device=True, device_for_backend_keys=device)
        fake.__dict__.update(state)
        return fake


_ENTRIES: Final[dict[Any, dict[Any, Any]]] = {}  # for each function, entries by the looks of its arguments
_NOT_CACHED: Final[dict[Any, Any]] = {}  # marks functions without entries


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
    return int(x.untyped_storage()._cdata)
