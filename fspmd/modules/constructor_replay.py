"""What a constructor did to its tensors, done again on `Sharded` values, each laid out as it will be."""

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
from fspmd.torch_internals import trunc_normal_without_grad


class Replay:
    """Does the steps again that some tensors depend on; of the others nothing is made.

    ``wanted`` gives the layout of each tensor of the end. Whatever has the same dims on the way there is laid out
    alike, so that no rank holds the whole of a cut tensor.
    """

    def __init__(self, tape: InitRecorder, wanted: Mapping[Ref, P], mesh: Mesh) -> None:
        self.tape, self.mesh = tape, mesh
        self.layouts = dict(wanted)
        self.values: dict[Ref, Any] = {}
        self.steps = list(self._needed({ref.storage for ref in wanted}))[::-1]
        for ref in wanted:
            self._lay_out(ref)
        for step in reversed(self.steps):
            for ref in (*step.makes, *([step.writes] if step.writes else [])):
                if ref in self.layouts:
                    for read in step.reads:
                        self._lay_out(read, like=ref)

    def _needed(self, needed: set[int]) -> Iterator[RecordedCall]:
        """From the last to the first: not those whose results are overwritten unseen."""
        whole = {ref for step in self.tape.steps for ref in step.makes}
        lost: set[int] = set()
        for step in reversed(self.tape.steps):
            if step.writes is None:
                if not any(ref.storage in needed for ref in step.makes):
                    continue
            elif step.writes.storage not in needed or step.writes.storage in lost:
                continue
            elif step.overwrites and step.writes in whole:
                lost.add(step.writes.storage)
            reads = {ref.storage for ref in step.reads if ref != step.writes}
            needed |= reads
            lost -= reads
            yield step

    def _lay_out(self, ref: Ref, like: Ref | None = None) -> None:
        """A tensor that is read for one with a layout; what it is a part of, too."""
        if like is not None and like != ref:
            entries = list(self.layouts[like])[max(0, len(like.shape) - len(ref.shape)) :]
            sizes = like.shape[max(0, len(like.shape) - len(ref.shape)) :]
            if len(entries) < len(ref.shape):
                return
            rows = zip(entries, sizes, ref.shape, strict=True)
            self.layouts.setdefault(ref, P(*(entry if size == own else None for entry, size, own in rows)))
        while ref in self.tape.views:
            base, _ = self.tape.views[ref]
            axes = {
                (size, stride): entry
                for size, stride, entry in zip(ref.shape, ref.stride, self.layouts[ref], strict=False)
                if entry is not None
            }
            own = zip(base.shape, base.stride, strict=True)
            self.layouts.setdefault(base, P(*(axes.pop((size, stride), None) for size, stride in own)))
            ref = base

    @property
    def draws(self) -> bool:
        """Whether what comes out is random."""
        return any(step.draws for step in self.steps)

    def run(self) -> Replay:
        """Do the steps."""
        with torch.no_grad():
            for step in self.steps:
                with _default_dtype(step.default):
                    self._run(step)
        return self

    def value(self, ref: Ref) -> Any:
        """What stands for a tensor now; a part is taken out of the whole each time."""
        if ref in self.values:
            return self.values[ref]
        base, step = self.tape.views[ref]
        if step is not None:
            found = called(step.func, self._given(step.args), self._given(step.kwargs))
        elif (box := _box(base, ref)) is not None:
            found = box.part(self.value(base))
        else:
            raise ArgumentError(
                "init_sharded: the constructor takes a part of a tensor in a way that was not seen; write into "
                "weight[...]"
            )
        return self._placed(found, ref)

    def _given(self, tree: Any) -> Any:
        return optree.tree_map(lambda x: self.value(x) if isinstance(x, Ref) else x, tree)

    def _placed(self, x: Any, ref: Ref) -> Any:
        """A value where it is to lie, before it meets others."""
        layout = self.layouts.get(ref)
        if layout is None or (isinstance(x, Sharded) and x.spec.partition == layout):
            return x
        return device_put(x, layout, mesh=self.mesh)

    def _run(self, step: RecordedCall) -> None:
        if step.writes is not None:
            self._write(step)
            return
        made = self._made(step, self._given(step.args), self._given(step.kwargs))
        leaves = [x for x in optree.tree_leaves(made, is_leaf=_is_value) if _is_value(x)]
        for ref, x in zip(step.makes, leaves, strict=True):
            self.values[ref] = self._placed(x, ref)

    def _made(self, step: RecordedCall, args: Any, kwargs: Any) -> Any:
        if step.reads:
            devices = (torch.device, str) if step.func is Tensor.to else torch.device
            args = tuple(self.mesh.device if isinstance(x, devices) else x for x in args)
            return called(step.func, args, {key: x for key, x in kwargs.items() if key != "device"})
        options = {key: x for key, x in kwargs.items() if key not in _OF_MEMORY}
        make = _CREATION.get(step.func)
        if make is None:
            return step.func(*args, **options)
        return make(*args, **options, spec=self.layouts.get(step.makes[0], P()), mesh=self.mesh)

    # --- writes ------------------------------------------------------------------------------------------------------

    def _write(self, step: RecordedCall) -> None:
        """Where it lies, if it can be; parts by numbers under a mask, others moved there and back."""
        assert step.writes is not None
        root = step.writes
        while root not in self.values:
            if root not in self.tape.views:
                return self._missing(step)
            root, _ = self.tape.views[root]
        whole, box = self.values[root], _box(root, step.writes)
        if step.func is not Tensor.__setitem__ and isinstance(whole, Sharded) and step.func not in _WHOLE:
            if box is not None and not box.is_whole and _of_numbers(step):
                return _write_masked(step, whole, box.mask(whole))
            if box is not None and not box.is_whole:
                part = box.part(whole).clone()
                called(step.func, (part, *self._given(step.args[1:])), self._given(step.kwargs))
                box.put(whole, part)
                return None
        if isinstance(whole, Sharded) and (step.func in _WHOLE or root != step.writes):
            return self._write_gathered(root, step)
        called(step.func, self._given(step.args), self._given(step.kwargs))
        return None

    def _missing(self, step: RecordedCall) -> None:
        raise ArgumentError(
            f"init_sharded: the constructor calls {name_of(step.func)}() on a part of a tensor that it took in a way "
            "that was not seen; write into weight[...]"
        )

    def _write_gathered(self, ref: Ref, step: RecordedCall) -> None:
        """What needs the whole: done on a copy that every rank has."""
        sharded = self.values[ref]
        self.values[ref] = device_put(sharded, P(), mesh=self.mesh).clone()
        layouts, self.layouts = self.layouts, {}
        called(step.func, self._given(step.args), self._given(step.kwargs))
        self.layouts = layouts
        sharded.copy_(device_put(self.values[ref], sharded.spec.partition, mesh=self.mesh))
        self.values[ref] = sharded


# --- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A part of a whole: a slice of each of its dims, of which some are dropped, in another order."""

    slices: tuple[slice, ...]
    dims: tuple[int, ...]  # of the whole, that the part has
    is_whole: bool

    @property
    def index(self) -> tuple[Any, ...]:
        """Of the dims that the part has, in the whole's order."""
        return tuple(x if dim in self.dims else x.start for dim, x in enumerate(self.slices))

    def part(self, whole: Any) -> Any:
        """The part of a value."""
        order = sorted(self.dims)
        return whole[self.index].permute([order.index(dim) for dim in self.dims])

    def put(self, whole: Any, part: Any) -> None:
        """Write the part into a value."""
        whole[self.index] = part.permute([self.dims.index(dim) for dim in sorted(self.dims)])

    def mask(self, whole: Any) -> Any:
        """True in the part, of the whole's dims or ones; it lies as the whole does."""
        found: Any = True
        for dim, (size, x) in enumerate(zip(whole.shape, self.slices, strict=True)):
            if (x.start, x.stop, x.step) != (0, size, 1):
                place: Any = creation.arange(size, spec=P(whole.spec.partition[dim]), mesh=whole.spec.mesh)
                within = (place >= x.start) & (place < x.stop) & ((place - x.start) % x.step == 0)
                found = within.view(-1, *(1,) * (whole.ndim - dim - 1)) & found
        return found


def _box(whole: Ref, part: Ref) -> Box | None:
    """The part of a packed whole, read off how both lie in memory; None where it is no box of elements."""
    if part.dtype != whole.dtype or 0 in whole.shape:
        return None
    rest = part.offset - whole.offset
    free = {i for i, size in enumerate(part.shape) if size > 1}
    slices: list[slice] = []
    dims: dict[int, int] = {}  # of the part: of the whole
    for dim, (size, stride) in enumerate(zip(whole.shape, whole.stride, strict=True)):
        start, rest = divmod(rest, stride) if size > 1 else (0, rest)
        found = next(
            (i for i in free if part.stride[i] % stride == 0 and part.stride[i] * (part.shape[i] - 1) < size * stride),
            None,
        )
        if found is None or size == 1:
            slices.append(slice(start, start + 1, 1))
            continue
        step, length = part.stride[found] // stride, part.shape[found]
        if start + step * (length - 1) >= size:
            return None
        slices.append(slice(start, start + step * (length - 1) + 1, step))
        dims[found] = dim
        free.remove(found)
    if rest or free:
        return None
    return _with_ones(whole, part, slices, dims)


def _with_ones(whole: Ref, part: Ref, slices: list[slice], dims: dict[int, int]) -> Box | None:
    """Dims of one element of the part are some dims of the whole of which the part has one."""
    left = [dim for dim in range(len(whole.shape)) if dim not in dims.values()]
    for i in range(len(part.shape)):
        if i not in dims:
            if not left:
                return None
            dims[i] = left.pop(0)
    order = tuple(dims[i] for i in range(len(part.shape)))
    return Box(tuple(slices), order, part.shape == whole.shape and order == tuple(range(len(whole.shape))))


def _write_masked(step: RecordedCall, whole: Any, mask: Any) -> None:
    written = whole.clone()
    called(step.func, (written, *step.args[1:]), step.kwargs)
    whole.copy_(torch.where(mask, written, whole))


def _of_numbers(step: RecordedCall) -> bool:
    """Whether a write is by numbers alone, each element by itself."""
    return name_of(step.func) in _BY_NUMBERS and not any(
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


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor)


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recorded call on other values."""
    if not any(isinstance(x, Sharded) for x in optree.tree_leaves((args, kwargs), is_leaf=_is_value)):
        return func(*args, **kwargs)
    if func in _TRUNCATED:
        return _trunc_normal_(*args, **kwargs)
    return func(*args, **kwargs) if func in INITS else call_torch(func, args, kwargs)


def _trunc_normal_(
    tensor: Any, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Any:
    """By the inverse of the distribution function: torch's own rejects, and looks at values to know when to stop."""
    low, high = (math.erf((x - mean) / std / math.sqrt(2.0)) for x in (a, b))
    tensor.uniform_(low, high, generator=generator)
    tensor.copy_((tensor.erfinv() * (std * math.sqrt(2.0)) + mean).clamp(min=a, max=b))
    return tensor


_TRUNCATED: Final = {nn.init.trunc_normal_, trunc_normal_without_grad}
#: inits that look at the whole tensor
_WHOLE: Final = INITS - _TRUNCATED
_BY_NUMBERS: Final = {
    "fill_", "zero_", "uniform_", "normal_", "mul_", "div_", "add_", "sub_", "trunc_normal_", "_no_grad_trunc_normal_",
    "exponential_", "clamp_", "log_normal_", "cauchy_", "bernoulli_",
}  # fmt: skip
_OF_MEMORY: Final = {"device", "layout", "pin_memory", "memory_format"}
_CREATION: Final = {
    getattr(torch, name): getattr(creation, name)
    for name in ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "normal", "randint")
}
