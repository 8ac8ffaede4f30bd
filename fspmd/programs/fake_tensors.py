"""Fake tensors, which have no values: arguments to record a function on, and their mode with a cache of results."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.fake_mode import FakeMode
from fspmd.local_view.type_rules import tensors_of
from fspmd.ops.schemas import facts_of
from fspmd.programs.refusals import is_dense, not_dense
from fspmd.sharded import NODES, Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    FAKE_KEY,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    default_device,
    dispatch_mode_of,
    make_subclass,
    refuse_pointers,
    warn_of_pointers,
)
from fspmd.tracing import DispatchMode
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import LocalTensor, blocks_of, is_simulated, local_tensor, per_block

_LITERALS: Final = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_MOST: Final = 4096  # entries of one function
_META: Final = torch.device("meta")

_default_dtype = torch.get_default_dtype

#: a fake tensor without its memory: dtype, shape, strides, offset, device, and dispatch keys, which tell conjugated
#: tensors and those of inference mode apart
Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device, tuple[bool, ...]]


def fake_mode() -> FakeTensorMode:
    """A mode in which torch works out shapes alone, of tensors with values too."""
    return CachingFakeMode()


def stand_ins(tree: Any, mode: FakeTensorMode) -> Any:
    """A tree with a fake tensor for each tensor, and a `Sharded` of a fake block for each `TensorSpec`."""
    return optree.tree_map(lambda leaf: _stand_in(leaf, mode), tree, none_is_leaf=True, namespace=NODES)


def active_mode() -> FakeTensorMode:
    """The fake mode of the recording."""
    mode: Any = dispatch_mode_of(FAKE_KEY)
    assert mode is not None
    return mode  # type: ignore[no-any-return]


def stand_in(x: Tensor, mode: FakeTensorMode) -> Tensor:
    """The fake of a tensor in a mode; fakes of views share memory as the views do."""
    with DisableTorchFunction():
        fake: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, x)
    return fake


def _stand_in(leaf: Any, mode: FakeTensorMode) -> Any:
    if isinstance(leaf, TensorSpec):
        return Sharded(_block(leaf, mode), leaf)
    if isinstance(leaf, Tensor):
        if not is_dense(leaf):
            raise not_dense(leaf)
        return like(leaf, without_gaps(_fake(leaf, mode)))
    return leaf


def like(x: Tensor, made: Tensor) -> Tensor:
    """A tensor that was made in the place of ``x``, with a gradient and as a parameter where that is one."""
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(made, x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def without_gaps(x: Tensor) -> Tensor:
    """``x``, copied where elements lie on each other: other arguments can then lie in memory as this does."""
    is_strided = x.layout is torch.strided and not x.is_nested
    return x.contiguous() if is_strided and any(0 in block.stride() for block in blocks_of(x)) else x


def _block(spec: TensorSpec, mode: FakeTensorMode) -> Tensor:
    """A fake of this rank's block, or of the blocks of all simulated ranks."""
    device = spec.mesh.device
    with mode:
        if spec.mesh.transport != "simulation":
            at = spec.mesh.coordinate()
            return torch.empty((0,) if at is None else spec.local_shape(at), dtype=spec.dtype, device=device)
        held = frame(spec.mesh, spec.partition.axes | spec.partition.unreduced)
        axes = spec.mesh.axis_names
        places = [dict(zip(held.axes, at, strict=True)) for at in held.coordinates()]
        shapes = [spec.local_shape(tuple(at.get(axis, 0) for axis in axes)) for at in places]
        return local_tensor([torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes], held)


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    if is_simulated(x):
        return per_block(lambda block: _fake(block, mode), x)
    if isinstance(x, FakeTensor):
        return x.detach()
    if not (x.is_meta or x.is_inference()):
        return mode.from_tensor(x.detach())
    device = None if x.is_meta else x.device
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


class Result(NamedTuple):
    """The look of a result, and whether it lies in the memory of the first argument."""

    look: Look
    is_view: bool


class Argument(NamedTuple):
    """A result that is an argument of the function, which has written into it."""

    place: int


class _Untold(Exception):
    """The looks of the arguments do not decide the result."""


class CachingFakeMode(DispatchMode, FakeMode):
    """A fake mode with a cache of the results of aten functions."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache
        self._states: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if LocalTensor in types:  # which calls the function for each rank
            return NotImplemented
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
            if _key(args, kwargs) != key:  # the call has changed its arguments
                return out
        except _Untold:
            return out
        if len(known) >= _MOST:
            known.clear()
        known[key] = found
        return out

    def _remembered(self, out: Any, args: Any, others: list[Tensor]) -> Any:
        """The entry for a result. A result in the memory of ``others``, except of the first argument, has none."""
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
        """New tensors for an entry."""
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
        """``FakeTensor(self, block, device)``, whose attributes are alike for one device."""
        if (state := self._states.get(device)) is None:
            state = self._states[device] = dict(FakeTensor(self, block, device).__dict__)
        fake: Tensor = make_subclass(FakeTensor, block, False, dispatch_device=True, device_for_backend_keys=device)
        if self._allow_unsafe_data_ptr_access:
            warn_of_pointers(fake)
        else:
            refuse_pointers(fake)
        fake.__dict__.update(state)
        return fake


_RESULTS: Final[dict[Any, dict[Any, Any]]] = {}  # by function, entries by the looks of the arguments
_UNTOLD: Final[dict[Any, Any]] = {}  # stands for functions without entries


def _is_told(func: Any) -> bool:
    """Whether the looks of its arguments decide the result of a function."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    facts = facts_of(func)
    return not (facts.strided or facts.inplace_view)  # bounds depend on the memory; arguments change


def _key(args: Any, kwargs: Any) -> Any:
    """The looks of the arguments of a call, and all else that results depend on."""
    return *map(_seen, args), _seen(kwargs or None), _default_dtype(), default_device()


def _seen(value: Any) -> Any:
    """The look of an argument."""
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
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.fake_device, (x.is_conj(), x.is_neg(), x.is_inference())


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
