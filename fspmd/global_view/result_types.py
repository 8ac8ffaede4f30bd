"""The outcome of a call on global tensors, found without data: shapes, dtypes, strides."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.copies import share_memory
from fspmd.errors import ArgumentError
from fspmd.fake_mode import FakeMode, UnknownValues, meta_tensors_as_on
from fspmd.forms import Laid, Strided, lies_as_new, packed
from fspmd.global_view.kernels import GlobalCall, dtype_complaint, kernel_complaint, ones_of, strides_of_kernel
from fspmd.global_view.refusals import refuse_global, shown
from fspmd.meshes import world
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import autocasts, name_of, writes
from fspmd.rules import Factors, Row, Rule, ShapedCall, row_of
from fspmd.rules.factors import elementwise
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec, is_float
from fspmd.torch_internals import DisableTorchFunction

Shape = tuple[int, ...]
Kind = Callable[[list[Any]], Any]  # tuple, list, or one of torch.return_types


class ResultMemory(NamedTuple):
    """The memory of a result: strides and storage offset."""

    laid: Laid
    base: Place | None = None  # the operand whose storage offset is added


class Outcome(NamedTuple):
    """The results of a call, without data."""

    results: Sequence[tuple[Shape, torch.dtype]]
    kind: Kind | None = None  # the container of the results; None for a single result
    bases: Sequence[Place | None] = (None,)  # the operand that each result views
    same: bool = False  # each result is the whole first operand, unchanged
    memory: Sequence[ResultMemory] | None = None  # the memory of the results; None: as of new tensors


def joined(kind: Kind | None, results: list[Any]) -> Any:
    """Return the results in their container."""
    return results[0] if kind is None else kind(results)


def outcome_of(row: Row, call: GlobalCall, values: Sequence[Any]) -> tuple[Outcome | None, Factors | None]:
    """Return the outcome of a call, None if it depends on values; and its factors, if the outcome follows from them.

    Raises:
        ArgumentError: The call fails on the global tensors.
    """
    outcome, factors = _outcome_and_factors(row, call, values)
    specs = [spec for _, spec in call.operands]
    if factors is not None and specs[0].dtype is torch.float32:  # of all operands, and every kernel takes it
        return outcome, factors
    _check_dtypes(call.func, specs)
    if outcome is not None and outcome.bases[0] is None and row.rule is not elementwise and not writes(call.func):
        complaint = dtype_complaint(call)
        if complaint is not None:
            refuse_global(call.func, specs, complaint)
    return outcome, factors


def _outcome_and_factors(row: Row, call: GlobalCall, values: Sequence[Any]) -> tuple[Outcome | None, Factors | None]:
    """Return the outcome of a call, found in the quickest way; and its factors, if the outcome follows from them."""
    func, args, kwargs, ordered = call
    specs, written = [spec for _, spec in ordered], writes(func)
    if all(map(_lies_as_new, values)) and kwargs.get("memory_format") is None and not autocasts():
        if row.kept and (outcome := _like_first(args, kwargs, specs)) is not None:
            return outcome, None
        if row.sized and not (row.kept or written):
            plain = [None if isinstance(arg, Tensor) else arg for arg in args]
            sized = _by_factors(row.rule, ShapedCall([spec.shape for spec in specs], plain, kwargs, [()]), specs)
            if sized is not None:
                return sized
        if row.rule is elementwise and not written:
            outcome = _on_one_element(call)
            if outcome is not None:
                return outcome, None
    try:
        outcome = on_meta(call)
    except Exception as error:
        refuse_global(func, specs, error)
    if row.rule is elementwise and (complaint := kernel_complaint(call)) is not None:
        refuse_global(func, specs, complaint)
    return outcome, None


#: functions whose operands need one dtype, which the meta device does not check
_OF_ONE_DTYPE: Final = frozenset(
    ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "linear", "convolution")
    + ("addmm", "addmv", "baddbmm", "addbmm")
)


def _check_dtypes(func: Any, specs: Sequence[TensorSpec]) -> None:
    """Raise for operands of several dtypes where the meta device does not."""
    if len({spec.dtype for spec in specs}) > 1 and name_of(func).strip("_") in _OF_ONE_DTYPE and not autocasts():
        widest = functools.reduce(torch.promote_types, (spec.dtype for spec in specs))
        given = ", ".join(spec.text for spec in specs)
        raise ArgumentError(
            f"{shown(func)} of {given} has operands of several dtypes; write x.to({widest}), or use torch.autocast"
        )


def _on_one_element(call: GlobalCall) -> Outcome | None:
    """Return the outcome of an elementwise function from a run on one element, or None if that fails.

    It is far quicker than a run on the meta device.
    """
    shape = _broadcast([spec.shape for _, spec in call.operands])
    if shape is None:
        return None
    storages: list[torch.UntypedStorage] = []

    def make(spec: TensorSpec) -> Tensor:
        x = ones_of(1, spec)
        storages.append(x.untyped_storage())
        return x

    try:
        with DisableTorchFunction():
            out = call.run_on(make)
            is_new = isinstance(out, Tensor) and out.dim() == len(shape) and out.untyped_storage() not in storages
    except Exception:  # the meta device will raise with a better message
        return None
    if not is_new:
        return None
    return Outcome([(shape, out.dtype)])


def _like_first(args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[TensorSpec]) -> Outcome | None:
    """Return the outcome of a function that keeps shape and dtype, or None if its arguments may change them."""
    if not _of_one_float(specs):
        return None
    for arg in (*args, *kwargs.values()):
        if arg is True or type(arg) is torch.dtype:
            return None
    return Outcome([(specs[0].shape, specs[0].dtype)])


def _by_factors(rule: Rule, call: ShapedCall, specs: Sequence[TensorSpec]) -> tuple[Outcome, Factors] | None:
    """Return the outcome and the factors of a function that keeps the dtype of its two operands.

    The sizes of the factors give the shape. The second operand may be a number. None if sizes do not agree, or if other
    arguments bear on the result.
    """
    others = [arg for arg in call.args if arg is not None]
    if len(call.args) != 2 or call.kwargs or not _of_one_float(specs) or len(specs) + len(others) != 2:
        return None
    if others and not (rule is elementwise and type(others[0]) in (float, int)):
        return None
    factors = rule(call)
    sizes: dict[int | None, int] = {None: 1}
    if [*map(len, factors.operands)] != [*map(len, call.shapes)]:
        return None
    for dims, shape in zip(factors.operands, call.shapes, strict=True):
        if [*map(sizes.setdefault, dims, shape)] != [*shape]:
            return None
    return Outcome([(tuple([sizes[factor] for factor in factors.results[0]]), specs[0].dtype)]), factors


def _of_one_float(specs: Sequence[TensorSpec]) -> bool:
    """Whether all operands have one floating dtype."""
    first = specs[0].dtype
    return first.is_floating_point and {spec.dtype for spec in specs} == {first}


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape that shapes broadcast to, or None."""
    shape = []
    for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        shape.append(wide.pop() if wide else 1)
    return tuple(reversed(shape))


def on_meta(call: GlobalCall) -> Outcome | None:
    """Return the outcome of a call on tensors without data; None if it gives no tensors, or depends on values."""
    outcome = _without_data(call)
    if outcome is None or outcome.bases != [None]:
        return outcome
    given, name, row = call.given, name_of(call.func), row_of(call.func)
    before = [_laid(at(given, place)) for place, _ in call.operands]
    by_kernel = name in _BY_KERNEL or (row is not None and row.rule is elementwise)
    if not (by_kernel and any(before)) and name not in _BY_OLD_KERNEL:
        return outcome
    ((shape, _),) = outcome.results
    strides = strides_of_kernel(call, before, shape)
    if strides is None:
        return outcome
    free = 1 if len(shape) < 3 else None  # the size of dims of which the stride says nothing; see `lies_as_new`
    as_new = all(n == free or step == new for n, step, new in zip(shape, strides, packed(shape), strict=True))
    return outcome._replace(memory=None if as_new else [ResultMemory(Laid(strides))])


#: functions beside those of elements whose kernels on the CPU lay a result out in another way than the meta device
_BY_KERNEL: Final = frozenset(
    {"batch_norm", "channel_shuffle", "fft_fftshift", "group_norm", "normal", "one_hot", "poisson", "rrelu"}
)
#: before torch 2.13 also these, even where operands lie as new tensors
_BY_OLD_KERNEL: Final = frozenset(
    {"pad", *(f"fft_{name}fft{n}" for name in ("", "i", "r", "ir", "h", "ih") for n in ("", "2", "n"))}
    if torch.__version__ < "2.13"
    else ()
)
#: functions that choose a kernel by the device, whose strides are not those of the meta device
_BY_DEVICE: Final = frozenset(
    {
        "scaled_dot_product_attention",
        *(f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)),
        *("convolution", "_convolution", "conv_tbc"),
    }
)


def _without_data(call: GlobalCall) -> Outcome | None:
    mesh, func = call.operands[0][1].mesh, call.func
    if name_of(func) in ("vector_norm", "linalg_vector_norm") and _keeps_dims_of_one():
        call = call._replace(func=_norm_without_data)
    if name_of(func) in _BY_DEVICE and world.available(mesh.device_type):
        with suppress(Exception), FakeMode():  # the meta device will raise with a better message
            return _outcome(mesh.device_type, call)
    try:
        try:
            if not autocasts():  # the meta device ignores autocast
                with meta_tensors_as_on(mesh.device_type):
                    return _outcome("meta", call)
        except NotImplementedError:  # a move to another device, or a kernel that only fake tensors know
            pass
        with FakeMode():
            return _outcome(mesh.device_type, call)
    except (NotImplementedError, UnknownValues):  # the shape of the result depends on values
        return None


def views_any(call: GlobalCall) -> bool:
    """Whether a call gives views of operands with any strides: even with gaps, and dims in another order."""
    made: list[Tensor] = []

    def make(spec: TensorSpec) -> Tensor:
        x = torch.empty([2 * n for n in reversed(spec.shape)], dtype=spec.dtype, device="meta")
        made.append(x.permute(*reversed(range(spec.ndim)))[(slice(None, None, 2),) * spec.ndim])
        return made[-1]

    try:
        out = call.run_on(make)
    except Exception:  # there is no view of these strides
        return False
    return all(any(share_memory(view, x) for x in made) for view in ((out,) if isinstance(out, Tensor) else out))


@cached(maxsize=1)
def _keeps_dims_of_one() -> bool:
    """Whether norms on the meta device keep a dim of size 1 counted from the end, as in torch 2.11 and 2.12."""
    norm: Tensor = torch.linalg.vector_norm(torch.empty(2, 1, device="meta"), dim=-1)
    return norm.dim() > 1


def _norm_without_data(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor with the shape and dtype of a norm."""
    return x.abs().sum(dim, keepdim, dtype=dtype and torch.empty((), dtype=dtype).abs().dtype)


def differentiated(call: GlobalCall) -> frozenset[Place]:
    """Return the operands that get a gradient if all ask for one: a function may only compare some. All, if unknown."""
    made: list[Tensor] = []

    def make(spec: TensorSpec) -> Tensor:
        follows = is_float(spec.dtype)
        made.append(torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=follows))
        return made[-1]

    try:
        with DisableTorchFunction(), torch.enable_grad(), without_saved_tensor_hooks():
            out = call.run_on(make)
            results = [x for x in ((out,) if isinstance(out, Tensor) else out) if x.requires_grad]
            leaves = [x for x in made if x.requires_grad]
            gradients = torch.autograd.grad(results, leaves, list(map(torch.empty_like, results)), allow_unused=True)
    except Exception:
        return frozenset(place for place, _ in call.operands)
    unused = {id(x) for x, gradient in zip(leaves, gradients, strict=True) if gradient is None}
    return frozenset(place for (place, _), x in zip(call.operands, made, strict=True) if id(x) not in unused)


def _outcome(device: str, call: GlobalCall) -> Outcome | None:
    made: list[Tensor] = []
    given, operands = call.given, call.operands
    before = [_laid(at(given, place)) for place, _ in operands]

    def make(spec: TensorSpec) -> Tensor:
        laid = before[len(made)]
        if laid is None or laid.strides is None:
            made.append(torch.empty(spec.shape, dtype=spec.dtype, device=device))
        else:
            made.append(torch.empty_strided(spec.shape, laid.strides, dtype=spec.dtype, device=device))
        return made[-1]

    out = call.run_on(make)
    outs = (out,) if isinstance(out, Tensor) else out
    if not isinstance(outs, (tuple, list)) or not outs or not all(isinstance(result, Tensor) for result in outs):
        return None
    results = [(tuple(result.shape), result.dtype) for result in outs]
    viewed = [next((k for k, x in enumerate(made) if share_memory(result, x)), None) for result in outs]
    bases = [None if k is None else operands[k][0] for k in viewed]
    same = all(k == 0 and _is_all_of(result, made[0]) for k, result in zip(viewed, outs, strict=True))
    unknown = not _is_packing(call.func, call.kwargs) and any(
        laid is not None and laid.strides is None for laid in before
    )
    memory = [_result_memory(result, k, before, operands, unknown) for k, result in zip(viewed, outs, strict=True)]
    as_new = [ResultMemory(Laid(packed(shape))) for shape, _ in results]
    return Outcome(
        results, None if isinstance(out, Tensor) else type(out), bases, same, None if memory == as_new else memory
    )


def memory_of(memory: ResultMemory, dtype: torch.dtype, given: Sequence[Any]) -> Laid:
    """Return the memory of a result. The storage offset of an operand is added, if the result views it."""
    laid, base = memory
    if base is None or laid.start is None:
        return laid
    x = at(given, base)
    return Laid(laid.strides, laid.start + x.storage_offset() * x.dtype.itemsize // dtype.itemsize)


def _lies_as_new(value: Any) -> bool:
    """Whether a tensor of a call has the strides and offset of a new one."""
    return _laid(value) is None


def strides_known(value: Any) -> bool:
    """Whether the strides that torch would give a tensor of a call are known."""
    laid = _laid(value)
    return laid is None or laid.strides is not None


def _laid(value: Any) -> Laid | None:
    """Return the memory of a tensor of a call, or None if it is that of a new tensor.

    ``start`` is 0, positive, or None if unknown: the key of a call has only the strides of a plain tensor.
    """
    if type(value) is Sharded:
        form = value.form
        return form.like if isinstance(form, Strided) else None
    if value.layout is not torch.strided or lies_as_new(value):
        return None
    return Laid(value.stride(), None if value.storage_offset() else 0)


def _result_memory(
    result: Tensor,
    base: int | None,
    before: Sequence[Laid | None],
    operands: Sequence[tuple[Place, TensorSpec]],
    unknown: bool,
) -> ResultMemory:
    """Return the memory of a result that views the operand ``base``, or of a new result if that is None.

    ``before`` has the memory of the operands; ``unknown``: the strides of some operand are unknown.
    """
    laid = None if base is None else before[base]
    start = 0 if laid is None else laid.start
    if unknown:
        return ResultMemory(Laid(None, 0 if base is None else None))
    memory = Laid(tuple(result.stride()), None if start is None else int(result.storage_offset()))
    return ResultMemory(memory, operands[base][0] if base is not None and start else None)


def _is_packing(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result has the strides of a new tensor, whatever those of the operand."""
    return name_of(func) == "contiguous" or kwargs.get("memory_format") is torch.contiguous_format


def _is_all_of(view: Tensor, x: Tensor) -> bool:
    """Whether a view of a new tensor is all of it, with each element in the same place."""
    if view is x:
        return True
    if view.shape != x.shape or view.dtype is not x.dtype:
        return False
    strides = zip(view.stride(), x.stride(), x.shape, strict=True)
    return not x.numel() or (not view.storage_offset() and all(new == old or n == 1 for new, old, n in strides))
