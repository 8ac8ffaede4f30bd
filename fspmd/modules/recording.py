"""What a constructor does to its tensors, recorded on the meta device and done again on `Sharded` values."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.placing import creation
from fspmd.placing.placement import device_put
from fspmd.sharded import Sharded, above
from fspmd.spec import P


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor on the meta device, by its memory and the part of it that it is; aliases are one Ref."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def ref_of(x: Tensor) -> Ref:
    """The Ref of a meta tensor."""
    storage = x.untyped_storage()._cdata
    return Ref(storage, int(x.storage_offset()), tuple(x.shape), tuple(x.stride()), x.dtype)


@dataclass(frozen=True, slots=True)
class Step:
    """A recorded call: its arguments with Refs in them, and what it makes or writes."""

    func: Any
    args: Any
    kwargs: Any
    makes: tuple[Ref, ...]
    writes: Ref | None

    @property
    def reads(self) -> list[Ref]:
        """The Refs among the arguments."""
        return [x for x in optree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Ref)]


_IN_PLACE: Final = {
    f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")
}
_HARMLESS: Final = {"requires_grad_", "detach_", "share_memory_", "retain_grad"}
_INITS: Final = {f.__code__: f for f in vars(nn.init).values() if inspect.isfunction(f)}
_IS_META: Final = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _HARMLESS:
        return False
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class Recorder(TorchFunctionMode):
    """Records, within ``with torch.device("meta"), Recorder() as tape:``, what makes and writes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.views: dict[Ref, tuple[Ref, Step]] = {}
        self._known: dict[int, Tensor] = {}  # one tensor per memory, which keeps its number from being used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if func == _IS_META and (init := _INITS.get(caller.f_code)) is not None:  # one that leaves meta tensors alone
            given = {name: caller.f_locals[name] for name in inspect.signature(init).parameters}
            self._record(init, (), given, given["tensor"])
            return True
        fresh = not any(isinstance(x, Tensor) for x in optree.tree_leaves((args, kwargs)))
        if fresh and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:  # what torch raises without memory
            if "meta" not in str(error):
                raise
            raise ArgumentError(
                f"init_sharded: the constructor asks for values of a tensor by {func.__name__}(), but runs where "
                "tensors have none; compute them in Python or numpy"
            ) from error
        if func in _METHODS:
            method, numbers = _METHODS[func](**kwargs)
            self._record(method, (kwargs["tensor"], *numbers), {"generator": kwargs.get("generator")}, kwargs["tensor"])
            return out
        if _writes(func):
            self._record(func, args, kwargs, args[0])
            return out
        made = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor) and x.is_meta]
        new = [x for x in made if x.untyped_storage()._cdata not in self._known]
        given, named = self._with_refs((args, kwargs))
        step = Step(func, given, named, tuple(ref_of(x) for x in made), None)
        if new:
            self.steps.append(step)
            self._known |= {x.untyped_storage()._cdata: x for x in new}
        elif made:
            self._view(step)
        return out

    def _with_refs(self, tree: Any) -> Any:
        return optree.tree_map(lambda x: ref_of(x) if isinstance(x, Tensor) and x.is_meta else x, tree)

    def _record(self, func: Any, args: Any, kwargs: Any, target: Tensor) -> None:
        if target.is_meta and target.untyped_storage()._cdata in self._known:
            kwargs = {key: x for key, x in kwargs.items() if x is not None}
            given, named = self._with_refs((args, kwargs))
            self.steps.append(Step(func, given, named, (), ref_of(target)))

    def _view(self, step: Step) -> None:
        """Other parts of known memory; of the same part nothing is to be told."""
        base = next((x for x in step.reads if x.storage == step.makes[0].storage), None)
        if base is not None and len(step.makes) == 1 and step.makes[0] != base:
            self.views[step.makes[0]] = base, step


class Replay:
    """Does the steps again that some tensors depend on; of the others nothing is made.

    ``wanted`` gives the layout of each tensor of the end; what these are made of by calls that keep the shape is laid
    out alike from the start, so that no rank holds the whole of a cut tensor on the way.
    """

    def __init__(self, tape: Recorder, wanted: Mapping[Ref, P], mesh: Mesh) -> None:
        self.tape, self.mesh = tape, mesh
        self.layouts = dict(wanted)
        self.values: dict[Ref, Any] = {}
        needed = {ref.storage for ref in wanted}
        steps = []
        for step in reversed(tape.steps):
            touched = [*step.makes, *([step.writes] if step.writes else [])]
            if any(ref.storage in needed for ref in touched):
                steps.append(step)
                needed |= {ref.storage for ref in step.reads}
                self._lay_out_alike(step, touched)
        with torch.no_grad():
            for step in reversed(steps):
                self._run(step)

    def _lay_out_alike(self, step: Step, touched: list[Ref]) -> None:
        for ref in touched:
            if (layout := self.layouts.get(ref)) is not None:
                for read in step.reads:
                    if read.shape == ref.shape:
                        self.layouts.setdefault(read, layout)

    def value(self, ref: Ref) -> Any:
        """What stands for a tensor now; a part is taken out of the whole each time."""
        if ref in self.values:
            return self.values[ref]
        _, step = self.tape.views[ref]
        return called(step.func, self._given(step.args), self._given(step.kwargs))

    def has(self, ref: Ref) -> bool:
        """Whether the tape tells how a tensor was made."""
        return ref in self.values or ref in self.tape.views

    def _given(self, tree: Any) -> Any:
        return optree.tree_map(lambda x: self.value(x) if isinstance(x, Ref) else x, tree)

    def _run(self, step: Step) -> None:
        if step.writes is not None:
            self._write(step)
            return
        made = self._made(step, self._given(step.args), self._given(step.kwargs))
        leaves = [x for x in optree.tree_leaves(made, is_leaf=_is_value) if _is_value(x)]
        self.values |= dict(zip(step.makes, leaves, strict=True))

    def _made(self, step: Step, args: Any, kwargs: Any) -> Any:
        if step.reads:
            return called(step.func, args, {key: x for key, x in kwargs.items() if key != "device"})
        options = {key: x for key, x in kwargs.items() if key not in _OF_MEMORY}
        make = _CREATION.get(step.func)
        if make is None:
            return step.func(*args, **options)
        return make(*args, **options, spec=self.layouts.get(step.makes[0], P()), mesh=self.mesh)

    def _write(self, step: Step) -> None:
        assert step.writes is not None
        ref, views = step.writes, list[Step]()
        while ref not in self.values:
            if ref not in self.tape.views:
                raise ArgumentError(
                    f"init_sharded: the constructor calls {step.func.__name__}() on a part of a tensor that it took "
                    "in a way that was not seen; write into weight[...]"
                )
            ref, taken = self.tape.views[ref]
            views.insert(0, taken)
        whole = self.values[ref]
        part = part_of(step, [*views, step] if step.func is Tensor.__setitem__ else views)
        if not isinstance(whole, Sharded) or not (views or part or step.func in _WHOLE):
            called(step.func, self._given(step.args), self._given(step.kwargs))
        elif part is not None:  # without a look at the part, which the ranks that have it would send to all
            by_index = step.func is Tensor.__setitem__
            func, numbers = (Tensor.fill_, step.args[2:]) if by_index else (step.func, step.args[1:])
            write_part(whole, part, func, numbers, step.kwargs)
        else:
            self._write_gathered(ref, step)

    def _write_gathered(self, ref: Ref, step: Step) -> None:
        """What needs the whole: done on a copy that every rank has."""
        sharded = self.values[ref]
        self.values[ref] = device_put(sharded, P(), mesh=self.mesh).clone()
        called(step.func, self._given(step.args), self._given(step.kwargs))
        sharded.copy_(device_put(self.values[ref], sharded.spec.partition, mesh=self.mesh))
        self.values[ref] = sharded


# --- writes into parts -----------------------------------------------------------------------------------------------

_BY_NUMBERS: Final = {"fill_", "zero_", "uniform_", "normal_", "mul_", "div_", "add_", "sub_", "__setitem__"}


def part_of(step: Step, views: list[Step]) -> tuple[Any, ...] | None:
    """The index of a part that was taken by one index of ints and slices and is written by numbers alone."""
    if len(views) != 1 or step.func.__name__ not in _BY_NUMBERS:
        return None
    if views[0].func not in (Tensor.__getitem__, Tensor.__setitem__):
        return None
    index = views[0].args[1]
    index = index if isinstance(index, tuple) else (index,)
    numbers = all(not isinstance(x, (Tensor, Ref)) for x in (*step.args[1:], *step.kwargs.values()))
    plain = all(type(i) is int or (type(i) is slice and i.step in (None, 1)) for i in index)
    return index if plain and numbers else None


def write_part(whole: Any, index: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write ``whole[index]`` where it lies: the function on a copy of the whole, taken where the index says."""
    written = whole.clone()
    called(func, (written, *args), kwargs)
    mask: Any = None
    for dim, i in enumerate(index):
        size = whole.shape[dim]
        start, stop, _ = i.indices(size) if isinstance(i, slice) else (i % size, i % size + 1, 1)
        place: Any = creation.arange(size, spec=P(whole.spec.partition[dim]), mesh=whole.spec.mesh)
        within: Any = ((place >= start) & (place < stop)).view(-1, *(1,) * (whole.ndim - dim - 1))
        mask = within if mask is None else mask & within
    whole.copy_(torch.where(mask, written, whole))


def _is_value(x: Any) -> bool:
    return isinstance(x, (Tensor, Sharded))


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recorded call on other values."""
    if not any(isinstance(x, Sharded) for x in optree.tree_leaves((args, kwargs), is_leaf=_is_value)):
        return func(*args, **kwargs)
    if func in _TRUNCATED:
        return _trunc_normal_(*args, **kwargs)
    return func(*args, **kwargs) if func in _WHOLE else above.dispatch(func, (), args, kwargs)


def _trunc_normal_(
    tensor: Any, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Any:
    """By the inverse of the distribution function: torch's own rejects, and looks at values to know when to stop."""
    low, high = (math.erf((x - mean) / std / math.sqrt(2.0)) for x in (a, b))
    tensor.uniform_(low, high, generator=generator)
    tensor.copy_((tensor.erfinv() * (std * math.sqrt(2.0)) + mean).clamp(min=a, max=b))
    return tensor


def _kaiming(tensor: Tensor, a: float, mode: Any, nonlinearity: Any, **_: Any) -> tuple[Any, tuple[float, ...]]:
    fan = nn.init._calculate_correct_fan(tensor, mode)
    bound = nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3.0 / fan) if fan else 0.0
    return Tensor.uniform_, (-bound, bound)


#: inits that speak torch's override protocol, as the methods they call
_METHODS: Final[dict[Any, Any]] = {
    nn.init.uniform_: lambda tensor, a, b, **_: (Tensor.uniform_, (a, b)),
    nn.init.normal_: lambda tensor, mean, std, **_: (Tensor.normal_, (mean, std)),
    nn.init.constant_: lambda tensor, val, **_: (Tensor.fill_, (val,)),
    nn.init.kaiming_uniform_: _kaiming,
}
_TRUNCATED: Final = {nn.init.trunc_normal_, nn.init._no_grad_trunc_normal_}
#: inits that look at the whole tensor
_WHOLE: Final = {nn.init.orthogonal_, nn.init.dirac_}
_OF_MEMORY: Final = {"device", "layout", "pin_memory", "memory_format"}
_CREATION: Final = {
    getattr(torch, name): getattr(creation, name)
    for name in ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "normal", "randint")
}
