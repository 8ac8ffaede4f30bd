"""The replay of a constructor's record on `Sharded` values, each in the layout of the tensor that it becomes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import optree
import torch
from torch import Tensor, nn

from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.modules.constructor_record import INITS, InitRecorder, RecordedCall, Ref
from fspmd.ops.traits import name_of
from fspmd.placement import creation
from fspmd.placement.device_put import device_put
from fspmd.sharded import Sharded, call_torch
from fspmd.spec import P
from fspmd.torch_internals import TRUNCATED_NORMAL


class Replay:
    """Repeats the recorded steps that some tensors depend on. It makes no other tensors.

    ``targets`` has the layout of each of these tensors. An intermediate tensor with the same dims gets the same layout,
    so that no rank holds the whole of a cut tensor.
    """

    def __init__(self, tape: InitRecorder, targets: Mapping[Ref, P], mesh: Mesh) -> None:
        self.tape, self.mesh = tape, mesh
        self.layouts = dict(targets)
        self.values: dict[Ref, Any] = {}
        self.steps = list(self._needed({ref.storage for ref in targets}))[::-1]
        for ref in targets:
            self._lay_out(ref)
        for step in reversed(self.steps):
            for ref in (*step.makes, *([step.writes] if step.writes else [])):
                if ref in self.layouts:
                    for read in step.reads:
                        self._lay_out(read, like=ref)

    def _needed(self, needed: set[int]) -> Iterator[RecordedCall]:
        """The steps that the memory ``needed`` depends on, from the last to the first.

        A step is left out if its result is overwritten before it is read.
        """
        made = {ref for step in self.tape.steps for ref in step.makes}
        overwritten: set[int] = set()
        for step in reversed(self.tape.steps):
            if step.writes is None:
                if not any(ref.storage in needed for ref in step.makes):
                    continue
            elif step.writes.storage not in needed or step.writes.storage in overwritten:
                continue
            elif step.overwrites and step.writes in made:
                overwritten.add(step.writes.storage)
            reads = {ref.storage for ref in step.reads if ref != step.writes}
            needed |= reads
            overwritten -= reads
            yield step

    def _lay_out(self, ref: Ref, like: Ref | None = None) -> None:
        """Choose the layout of a tensor, and of the tensors that it is a view of.

        A tensor that is read to compute ``like`` gets the layout of its last dims of equal size.
        """
        if like is not None and like != ref:
            more = max(0, len(like.shape) - len(ref.shape))
            entries, sizes = list(self.layouts[like])[more:], like.shape[more:]
            if len(entries) < len(ref.shape):
                return
            dims = zip(entries, sizes, ref.shape, strict=True)
            self.layouts.setdefault(ref, P(*(entry if like_size == size else None for entry, like_size, size in dims)))
        while ref in self.tape.views:
            base = self.tape.views[ref].base
            axes = {
                (size, stride): entry
                for size, stride, entry in zip(ref.shape, ref.stride, self.layouts[ref], strict=False)
                if entry is not None
            }
            base_dims = zip(base.shape, base.stride, strict=True)
            self.layouts.setdefault(base, P(*(axes.pop(dim, None) for dim in base_dims)))
            ref = base

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers."""
        return any(step.draws for step in self.steps)

    def run(self) -> Replay:
        """Run the steps."""
        with torch.no_grad():
            for step in self.steps:
                with _default_dtype(step.default):
                    self._run(step)
        return self

    def value(self, ref: Ref) -> Any:
        """The current value of a tensor. A view is taken from its base at each call."""
        if ref in self.values:
            return self.values[ref]
        view = self.tape.views[ref]
        if view.place is not None and (box := _box(view.base, ref)) is not None:
            value = box.part(self.value(view.base))
        else:
            step = view.step
            value = call_again(step.func, self._with_values(step.args), self._with_values(step.kwargs))
            if view.place is not None:
                value = optree.tree_leaves(value, is_leaf=_is_tensor)[view.place]
        return self._placed(value, ref)

    def _with_values(self, tree: Any) -> Any:
        """Arguments of a step with values in place of Refs."""
        return optree.tree_map(lambda x: self.value(x) if isinstance(x, Ref) else x, tree)

    def _placed(self, x: Any, ref: Ref) -> Any:
        """A value in the layout that was chosen for its tensor."""
        layout = self.layouts.get(ref)
        if layout is None or (isinstance(x, Sharded) and x.spec.partition == layout):
            return x
        return device_put(x, layout, mesh=self.mesh)

    def _run(self, step: RecordedCall) -> None:
        if step.writes is not None:
            self._write(step)
            return
        results = self._results(step, self._with_values(step.args), self._with_values(step.kwargs))
        values = [x for x in optree.tree_leaves(results, is_leaf=_is_tensor) if _is_tensor(x)]
        for ref, x in zip(step.makes, values, strict=True):
            self.values[ref] = self._placed(x, ref)

    def _results(self, step: RecordedCall, args: Any, kwargs: Any) -> Any:
        """The results of a step that makes tensors, from others or new ones."""
        if step.reads:
            devices = (torch.device, str) if step.func is Tensor.to else torch.device
            args = tuple(self.mesh.device if isinstance(x, devices) else x for x in args)
            return call_again(step.func, args, {key: x for key, x in kwargs.items() if key != "device"})
        options = {key: x for key, x in kwargs.items() if key not in _MEMORY_OPTIONS}
        create = _CREATION.get(step.func)
        if create is None:
            return step.func(*args, **options)
        return create(*args, **options, spec=self.layouts.get(step.makes[0], P()), mesh=self.mesh)

    # --- writes ------------------------------------------------------------------------------------------------------

    def _write(self, step: RecordedCall) -> None:
        """Repeat a write, without moving the tensor if possible.

        A write of numbers into a part of the tensor runs on a copy, and a mask selects the part. Another write into a
        part runs on the part, which is put back. Writes that need the whole tensor run on a gathered copy.
        """
        assert step.writes is not None
        root = step.writes
        while root not in self.values:
            if root not in self.tape.views:
                raise ArgumentError(
                    f"init_sharded: the constructor calls {name_of(step.func)}() on a view of a tensor that was made "
                    "by a call that was not recorded; write into weight[...]"
                )
            root = self.tape.views[root].base
        target, box = self.values[root], _box(root, step.writes)
        if step.func is not Tensor.__setitem__ and isinstance(target, Sharded) and step.func not in _WHOLE:
            if box is not None and not box.is_whole and _writes_numbers(step):
                return _write_masked(step, target, box.mask(target))
            if box is not None and not box.is_whole:
                part = box.part(target).clone()
                call_again(step.func, (part, *self._with_values(step.args[1:])), self._with_values(step.kwargs))
                box.put(target, part)
                return None
        if isinstance(target, Sharded) and (step.func in _WHOLE or root != step.writes):
            return self._write_gathered(root, step)
        call_again(step.func, self._with_values(step.args), self._with_values(step.kwargs))
        return None

    def _write_gathered(self, ref: Ref, step: RecordedCall) -> None:
        """Repeat a write on a copy that every rank has whole."""
        sharded = self.values[ref]
        self.values[ref] = device_put(sharded, P(), mesh=self.mesh).clone()
        layouts, self.layouts = self.layouts, {}
        call_again(step.func, self._with_values(step.args), self._with_values(step.kwargs))
        self.layouts = layouts
        sharded.copy_(device_put(self.values[ref], sharded.spec.partition, mesh=self.mesh))
        self.values[ref] = sharded


# --- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A part of a tensor: a slice of each dim. The part may drop dims of one element, and permute the others."""

    slices: tuple[slice, ...]
    dims: tuple[int, ...]  # for each dim of the part, the dim of the whole
    is_whole: bool

    @property
    def index(self) -> tuple[Any, ...]:
        """The index that gives the part, with its dims in the order of the whole."""
        return tuple(x if dim in self.dims else x.start for dim, x in enumerate(self.slices))

    def part(self, whole: Any) -> Any:
        """The part of a value, as a view."""
        order = sorted(self.dims)
        return whole[self.index].permute([order.index(dim) for dim in self.dims])

    def put(self, whole: Any, part: Any) -> None:
        """Write the part into a value."""
        whole[self.index] = part.permute([self.dims.index(dim) for dim in sorted(self.dims)])

    def mask(self, whole: Any) -> Any:
        """True in the part. It broadcasts to the whole, and has the layout of the whole."""
        mask: Any = True
        for dim, (size, x) in enumerate(zip(whole.shape, self.slices, strict=True)):
            if (x.start, x.stop, x.step) != (0, size, 1):
                index: Any = creation.arange(size, spec=P(whole.spec.partition[dim]), mesh=whole.spec.mesh)
                within = (index >= x.start) & (index < x.stop) & ((index - x.start) % x.step == 0)
                mask = within.view(-1, *(1,) * (whole.ndim - dim - 1)) & mask
        return mask


def _box(whole: Ref, part: Ref) -> Box | None:
    """The part of a whole without gaps in memory, found from offsets and strides; None where it is no box."""
    if part.dtype != whole.dtype or 0 in whole.shape:
        return None
    offset = part.offset - whole.offset
    part_dims = {i for i, size in enumerate(part.shape) if size > 1}
    slices: list[slice] = []
    dims: dict[int, int] = {}  # dim of the part -> dim of the whole
    for dim, (size, stride) in enumerate(zip(whole.shape, whole.stride, strict=True)):
        start, offset = divmod(offset, stride) if size > 1 else (0, offset)
        fitting = (
            i
            for i in part_dims
            if part.stride[i] % stride == 0 and part.stride[i] * (part.shape[i] - 1) < size * stride
        )
        part_dim = next(fitting, None)
        if part_dim is None or size == 1:
            slices.append(slice(start, start + 1, 1))
            continue
        step, length = part.stride[part_dim] // stride, part.shape[part_dim]
        if start + step * (length - 1) >= size:
            return None
        slices.append(slice(start, start + step * (length - 1) + 1, step))
        dims[part_dim] = dim
        part_dims.remove(part_dim)
    if offset or part_dims:
        return None
    return _with_ones(whole, part, slices, dims)


def _with_ones(whole: Ref, part: Ref, slices: list[slice], dims: dict[int, int]) -> Box | None:
    """The box, after each dim of size 1 of the part has got a dim of the whole that is left."""
    left = [dim for dim in range(len(whole.shape)) if dim not in dims.values()]
    for i in range(len(part.shape)):
        if i not in dims:
            if not left:
                return None
            dims[i] = left.pop(0)
    order = tuple(dims[i] for i in range(len(part.shape)))
    return Box(tuple(slices), order, part.shape == whole.shape and order == tuple(range(len(whole.shape))))


def _write_masked(step: RecordedCall, target: Any, mask: Any) -> None:
    """Repeat a write on a copy of the whole tensor, and take the elements under the mask."""
    written = target.clone()
    call_again(step.func, (written, *step.args[1:]), step.kwargs)
    target.copy_(torch.where(mask, written, target))


def _writes_numbers(step: RecordedCall) -> bool:
    """Whether a write is elementwise and has numbers alone as arguments."""
    return name_of(step.func) in _ELEMENTWISE and not any(
        isinstance(x, (Tensor, Ref)) for x in optree.tree_leaves((step.args[1:], step.kwargs))
    )


# --- calls -----------------------------------------------------------------------------------------------------------


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def call_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat a recorded call on other values."""
    if not any(isinstance(x, Sharded) for x in optree.tree_leaves((args, kwargs), is_leaf=_is_tensor)):
        return func(*args, **kwargs)
    if func in _TRUNCATED:
        return _trunc_normal_(*args, **kwargs)
    return func(*args, **kwargs) if func in INITS else call_torch(func, args, kwargs)


def _trunc_normal_(
    tensor: Any, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Any:
    """``nn.init.trunc_normal_`` by the inverse of the distribution function. torch rejects draws, and reads values."""
    low, high = (math.erf((x - mean) / std / math.sqrt(2.0)) for x in (a, b))
    tensor.uniform_(low, high, generator=generator)
    tensor.copy_((tensor.erfinv() * (std * math.sqrt(2.0)) + mean).clamp(min=a, max=b))
    return tensor


_TRUNCATED: Final = {nn.init.trunc_normal_, *(f for f in INITS if f.__name__.endswith("trunc_normal_"))}
#: functions of torch.nn.init that need the whole tensor
_WHOLE: Final = INITS - _TRUNCATED
_ELEMENTWISE: Final = {
    "fill_", "zero_", "uniform_", "normal_", "mul_", "div_", "add_", "sub_", "trunc_normal_", TRUNCATED_NORMAL,
    "exponential_", "clamp_", "log_normal_", "cauchy_", "bernoulli_",
}  # fmt: skip
_MEMORY_OPTIONS: Final = {"device", "layout", "pin_memory", "memory_format"}
_CREATION: Final = {
    getattr(torch, name): getattr(creation, name)
    for name in ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "normal", "randint")
}
