"""The record of a constructor: its calls that make and write tensors, on the meta device, where they have no memory."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from fspmd.errors import ArgumentError
from fspmd.ops.traits import learn, name_of
from fspmd.torch_internals import address_of


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor on the meta device: its memory, and its part of this memory. Aliases with the same part are one Ref."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def ref_of(x: Tensor) -> Ref:
    """The Ref of a meta tensor."""
    storage = address_of(x.untyped_storage())
    return Ref(storage, int(x.storage_offset()), tuple(x.shape), tuple(x.stride()), x.dtype)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call. Its arguments have Refs in place of recorded tensors, and copies of other tensors and arrays."""

    func: Any
    args: Any
    kwargs: Any
    makes: tuple[Ref, ...]
    writes: Ref | None
    default: torch.dtype  # the default dtype of new tensors at the call

    @property
    def reads(self) -> list[Ref]:
        """The Refs among the arguments."""
        return [x for x in optree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Ref)]

    @property
    def overwrites(self) -> bool:
        """Whether it writes all elements of its target and reads none of them."""
        return self.func in INITS or name_of(self.func) in _OVERWRITING

    @property
    def draws(self) -> bool:
        """Whether its result is random."""
        creates = name_of(self.func) in ("rand", "randn", "randint", "randperm")
        return creates or self.func in INITS or learn(self.func).draws is not None


@dataclass(frozen=True, slots=True)
class View:
    """A view: the tensor that it is a view of, the call that gave it, and its place among the views that this gave."""

    base: Ref
    step: RecordedCall
    place: int | None  # None if the call gave one view


#: code -> function of torch.nn.init; a library may rename these functions, or wrap them under their names
_BY_CODE: Final = {f.__code__: f for f in vars(nn.init).values() if inspect.isfunction(f)}
#: functions of torch.nn.init that leave meta tensors alone; a call of one is recorded as one step
INITS: Final = {f for f in _BY_CODE.values() if "is_meta" in f.__code__.co_names}


_OVERWRITING: Final = {"fill_", "zero_", "copy_", "uniform_", "normal_", "log_normal_", "exponential_", "cauchy_"}


def _kaiming(tensor: Tensor, a: float, mode: Any, nonlinearity: Any, **_: Any) -> tuple[Any, tuple[float, ...]]:
    shape = tensor.shape
    if tensor.numel():  # torch checks the shape and the mode
        nn.init.kaiming_uniform_(torch.empty(shape, device="meta"), a, mode, nonlinearity)
    fan = math.prod(shape[1:] if mode.lower() == "fan_in" else (shape[0], *shape[2:]))
    bound = nn.init.calculate_gain(nonlinearity, a) * (3.0 / fan) ** 0.5 if fan else 0.0
    return Tensor.uniform_, (-bound, bound)


#: functions of torch.nn.init that use torch's override protocol -> the method that each calls, with its numbers
_METHODS: Final[dict[Any, Callable[..., tuple[Any, tuple[Any, ...]]]]] = {
    nn.init.uniform_: lambda tensor, a, b, **_: (Tensor.uniform_, (a, b)),
    nn.init.normal_: lambda tensor, mean, std, **_: (Tensor.normal_, (mean, std)),
    nn.init.constant_: lambda tensor, val, **_: (Tensor.fill_, (val,)),
    nn.init.kaiming_uniform_: _kaiming,
}


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_IS_META: Final = _getter("is_meta")
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_META: Final = torch.device("meta")
_TO_DEVICE: Final = {Tensor.cpu, Tensor.cuda}


class InitRecorder(TorchFunctionMode):
    """Within ``with InitRecorder(device) as tape:`` records the calls that make and write tensors.

    New tensors are on the meta device. Libraries initialise nothing there, so the tensors pretend to be on ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.steps: list[RecordedCall] = []
        self.views: dict[Ref, View] = {}
        self.meta_on_purpose: set[int] = set()  # memory that module_fn itself has put on the meta device
        self.value_of: Callable[[Ref], Tensor | None] = lambda ref: None  # the value of a tensor that Python reads
        self._known: dict[int, Tensor] = {}  # memory -> a tensor that keeps it alive, so that its number stays unique
        self._replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._answers = {  # getter -> its answer for a recorded tensor
            _getter("is_meta"): False,
            _getter("device"): device,
            _getter("is_cpu"): device.type == "cpu",
            _getter("is_cuda"): device.type == "cuda",
            Tensor.get_device: -1 if device.type == "cpu" else device.index or 0,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_in((args, kwargs))
        for x in tensors:
            if isinstance(x, nn.Parameter) and not x.is_meta:
                self._replace(x)
        if (frame := _init_frame(sys._getframe(1), func)) is not None:
            return self._init(func, frame)
        if tensors and self._knows(tensors[0]):
            if func in self._answers:
                return self._answers[func]
            if func is Tensor.__setitem__:
                self._record(func, args, kwargs, writes=ref_of(args[0]))
                return None
        if kwargs.get("out") is not None:
            return self._into(func, args, kwargs)
        return self._called(func, args, kwargs, tensors)

    def has(self, ref: Ref) -> bool:
        """Whether the call that made a tensor is recorded."""
        return ref in self.views or any(ref in step.makes for step in self.steps)

    def _knows(self, x: Tensor) -> bool:
        return x.is_meta and address_of(x.untyped_storage()) in self._known

    def _called(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run a call and record the tensors that it makes, writes, or gives as views."""
        before = [(x, x._version, ref_of(x)) for x in tensors if self._knows(x)]
        try:
            out, stand_ins = self._run(func, args, kwargs, bool(before))
        except (RuntimeError, TypeError) as error:  # torch needed values
            if "meta" not in str(error).lower():
                raise
            return self._call_with_values(func, args, kwargs, error)
        if any(x._version for x in stand_ins):  # it writes into a tensor that has values
            return self._call_with_values(func, args, kwargs)
        written = [] if func == _SET_DATA else [(x, ref) for x, version, ref in before if x._version != version]
        if written:
            self._wrote(func, args, kwargs, written)
            return out
        made = [x for x in _tensors_in(out) if x.is_meta]
        if all(map(self._knows, made)):
            if made:
                self._views(made, self._step(func, args, kwargs), before)
            return out
        self._record(func, args, kwargs, makes=tuple(map(ref_of, made)))
        self._known |= {address_of(x.untyped_storage()): x for x in made}
        if not tensors and kwargs.get("device") is not None and torch.device(kwargs["device"]) == _META:
            self.meta_on_purpose |= {address_of(x.untyped_storage()) for x in made}
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, beside_meta: bool) -> tuple[Any, list[Tensor]]:
        """The result of the call on the meta device, and the meta tensors that stood for tensors with values.

        ``beside_meta``: a recorded tensor is among the arguments.
        """
        stand_ins: list[Tensor] = []
        if beside_meta and func in _TO_DEVICE:
            return args[0], stand_ins

        def on_meta(x: Any) -> Any:
            if isinstance(x, torch.device):
                return _META
            if not beside_meta or not isinstance(x, Tensor) or x.is_meta:
                return x
            if func == _SET_DATA:
                return self._constant(x)
            stand_ins.append(x.to(_META))
            return stand_ins[-1]

        args, named = optree.tree_map(on_meta, (args, kwargs))
        if kwargs.get("device") is not None:
            named = {**named, "device": _META}
        if func is Tensor.to and beside_meta and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], _META, *args[2:])
        with _META:  # for functions that make tensors
            return func(*args, **named), stand_ins

    def _step(
        self, func: Any, args: Any, kwargs: Any, makes: tuple[Ref, ...] = (), writes: Ref | None = None
    ) -> RecordedCall:
        def with_ref(x: Any) -> Any:
            return ref_of(x) if isinstance(x, Tensor) and x.is_meta else _as_now(x)

        args, kwargs = optree.tree_map(with_ref, (tuple(args), kwargs))
        return RecordedCall(func, args, kwargs, makes, writes, torch.get_default_dtype())

    def _record(self, func: Any, args: Any, kwargs: Any, **effects: Any) -> None:
        self.steps.append(self._step(func, args, kwargs, **effects))

    def _init(self, func: Any, frame: FrameType) -> Any:
        """Record a call of a function of torch.nn.init, whose frame has the arguments."""
        init = _BY_CODE[frame.f_code]
        given = {name: frame.f_locals[name] for name in inspect.signature(init).parameters}
        target = given["tensor"]
        if init in _METHODS:
            method, numbers = _METHODS[init](**given)
            args, kwargs = (target, *numbers), {"generator": given["generator"]} if given.get("generator") else {}
            with self, torch.no_grad():
                return method(*args, **kwargs)
        if not self._knows(target):
            return target.is_meta
        given = {name: x for name, x in given.items() if x is not None}
        self._record(init, (given.pop("tensor"),), given, writes=ref_of(target))
        return True  # the answer to `is_meta`: the function then leaves the tensor alone

    def _into(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call with ``out=`` as a call whose results are copied into the tensors of ``out``."""
        out = kwargs["out"]
        kwargs = {key: x for key, x in kwargs.items() if key not in ("out", "requires_grad")}
        if isinstance(out, Tensor) and not _tensors_in((args, kwargs)):
            kwargs = {"dtype": out.dtype, **kwargs}
        with self:
            results = func(*args, **kwargs)
            for x, value in [(out, results)] if isinstance(out, Tensor) else zip(out, results, strict=True):
                x.copy_(value)
        return out

    def _wrote(self, func: Any, args: Any, kwargs: Any, written: list[tuple[Tensor, Ref]]) -> None:
        (target, ref), *others = written
        if others:
            raise ArgumentError(
                f"init_sharded: the constructor calls {name_of(func)}(), which writes into several tensors at once; "
                "write into one tensor per call"
            )
        if (now := ref_of(target)) == ref:
            self._record(func, args, kwargs, writes=ref)
        else:  # t_() and the like make another view of the same memory
            step = self._step(getattr(Tensor, name_of(func).removesuffix("_")), (ref, *args[1:]), kwargs)
            self.views[now] = View(ref, step, None)

    def _views(self, made: list[Tensor], step: RecordedCall, before: list[tuple[Tensor, int, Ref]]) -> None:
        """Keep the bases of the views that a step gave. A view of the same part of memory has the same Ref."""
        for place, ref in enumerate(map(ref_of, made)):
            base = next((base for _, _, base in before if base.storage == ref.storage), None)
            if base is not None and ref != base:
                self.views[ref] = View(base, step, place if len(made) > 1 else None)

    def _constant(self, x: Tensor) -> Tensor:
        """A meta tensor for a tensor with values. A step of the record gives the values."""
        stand_in = x.to(_META)
        self._known[address_of(stand_in.untyped_storage())] = stand_in
        made = (ref_of(stand_in),)
        self.steps.append(RecordedCall(_constant_value, (_Constant(x),), {}, made, None, torch.get_default_dtype()))
        return stand_in

    def _replace(self, parameter: nn.Parameter) -> None:
        """Put a meta tensor in the place of a parameter that no mode saw being made, such as ``torch.Tensor(8, 6)``."""
        stand_in = nn.Parameter(self._constant(parameter.data), parameter.requires_grad)
        try:
            torch.utils.swap_tensors(parameter, stand_in)
        except RuntimeError:  # the parameter has a weak reference
            return
        self._replaced.append((parameter, stand_in))

    def give_back(self) -> None:
        """Put the parameters with values into their places again."""
        while self._replaced:
            torch.utils.swap_tensors(*self._replaced.pop())

    def _call_with_values(self, func: Any, args: Any, kwargs: Any, error: Exception | None = None) -> Any:
        """Run a call with values in place of recorded tensors."""
        args, kwargs = optree.tree_map(functools.partial(self._with_values, func, error), (args, kwargs))
        return func(*args, **kwargs)

    def _with_values(self, func: Any, error: Exception | None, x: Any) -> Any:
        """The argument ``x`` of a function, with values if it is a recorded tensor."""
        if not isinstance(x, Tensor) or not x.is_meta:
            return x
        value = self.value_of(ref_of(x)) if self._knows(x) else None
        if value is None:
            raise ArgumentError(
                f"init_sharded: the constructor asks for values of a tensor by {name_of(func)}(), but runs on the meta "
                "device, where tensors have none; compute them in Python or numpy"
            ) from error
        return value


def _as_now(x: Any) -> Any:
    """An argument as it is now. The constructor may write other values into a tensor or an array before the replay."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    return copy.copy(x) if hasattr(x, "__array_interface__") else x


class _Constant:
    """A tensor that no tree function sees."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _constant_value(x: _Constant) -> Tensor:
    return x.value


def _tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def _init_frame(caller: FrameType, func: Any) -> FrameType | None:
    """The frame of the function of torch.nn.init that calls ``func``, if it is one that is recorded as one step.

    The function asks whether its tensor is meta, or calls torch's override protocol.
    """
    if func == _IS_META:
        return caller if _BY_CODE.get(caller.f_code) in INITS else None
    if caller.f_code is handle_torch_function.__code__ and caller.f_back is not None:
        return caller.f_back if _BY_CODE.get(caller.f_back.f_code) in _METHODS else None
    return None
