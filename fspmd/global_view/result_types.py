"""What a call gives for global tensors: shapes and dtypes, without data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.fake_mode import FakeMode, meta_tensors_as_on
from fspmd.forms import Laid, Strided, Strides, order_in_memory, packed
from fspmd.ops.signatures import Place, at
from fspmd.ops.traits import is_tagged, name_of
from fspmd.rules import Factors, Rule, Whole, row_of
from fspmd.rules.elementwise import elementwise
from fspmd.saved_tensor_hooks import without_saved_tensor_hooks
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec, is_float
from fspmd.torch_internals import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    is_alias_of,
    is_any_autocast_enabled,
)

Shape = tuple[int, ...]
Kind = Callable[[list[Any]], Any]  # tuple, list, or one of torch.return_types


class Lying(NamedTuple):
    """How a result would lie in memory, and the operand in whose memory it begins so far from where that begins."""

    laid: Laid
    base: Place | None = None


class Outcome(NamedTuple):
    """Shape and dtype of each result; in what they are, None for a single one; the operand in whose memory each lies,
    or None; whether each has all of the first operand, as it was; how they lie, None where all do as new tensors.
    """

    results: Sequence[tuple[Shape, torch.dtype]]
    kind: Kind | None = None
    bases: Sequence[Place | None] = (None,)
    same: bool = False
    lying: Sequence[Lying] | None = None


def joined(kind: Kind | None, results: list[Any]) -> Any:
    """Results as a function gives them."""
    return results[0] if kind is None else kind(results)


def on_one_element(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Outcome | None:
    """What a function of elements gives for global tensors without data, or None: the meta device takes far longer."""
    shape = _broadcast([spec.shape for _, spec in operands])
    if shape is None or is_any_autocast_enabled():
        return None
    made: list[Tensor] = []

    def make(spec: TensorSpec) -> Tensor:
        made.append(_ones(1, spec))
        return made[-1]

    try:
        out = _on(make, func, args, kwargs, operands)
    except Exception:  # which the meta device tells better
        return None
    if not isinstance(out, Tensor) or out.dim() != len(shape) or any(is_alias_of(out, x) for x in made):
        return None
    return Outcome([(shape, out.dtype)])


def _ones(size: int, spec: TensorSpec) -> Tensor:
    return torch.ones((size,) * spec.ndim, dtype=spec.dtype, device="cpu")


def kernel_complaint(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Exception | None:
    """What the kernel of a function of elements says of these dtypes and numbers, for which the meta device has none.

    It says so of one element, and if not for its value of none, too.
    """
    found: list[Exception] = []
    for size in (1, 0):
        try:
            _on(functools.partial(_ones, size), func, args, kwargs, operands)
            return None
        except NotImplementedError as error:
            return error
        except Exception as error:
            found.append(error)
    return found[0]


def dtype_complaint(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
    whole: frozenset[int] = frozenset(),
) -> Exception | None:
    """What a kernel says of these dtypes, and not of float32 in their place, for which the meta device has no words.

    It is asked of at most two elements along each dim; if those are too few for float32, too, of all along the dims of
    the first operand that must be ``whole``. Functions of lists are not asked, nor
    those that draw.
    """
    told = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)]
    if {*told, *(spec.dtype for _, spec in operands)} <= {torch.float32}:
        return None
    if any(isinstance(place, tuple) for place, _ in operands):
        return None
    if is_tagged(name_of(func), torch.Tag.nondeterministic_seeded):
        return None

    def asked(all_of: frozenset[int], single: bool) -> Exception | None:
        def kind(x: Any) -> Any:
            return torch.float32 if single and isinstance(x, torch.dtype) else x

        def ones(spec: TensorSpec) -> Tensor:
            shape = [n if d in all_of else min(n, 2) for d, n in enumerate(spec.shape)]
            return torch.ones(shape, dtype=kind(spec.dtype), device="cpu")

        named = {name: kind(arg) for name, arg in kwargs.items()}
        try:
            _on(ones, func, tuple(map(kind, args)), named, operands)
        except Exception as error:
            return error
        return None

    sizes = dict(enumerate(operands[0][1].shape))
    for all_of in (frozenset[int](), whole):
        if prod(sizes.get(d, 1) for d in all_of) > _MOST_ASKED:
            return None
        found = asked(all_of, single=False)
        if found is None or asked(all_of, single=True) is None:
            return found
    return None


_MOST_ASKED: Final = 1 << 20  # elements of which a kernel is asked


def like_first(args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[TensorSpec]) -> Outcome | None:
    """The result of a function that keeps shape and dtype, or None where its arguments may say otherwise."""
    if not _of_one_float(specs):
        return None
    for arg in (*args, *kwargs.values()):
        if arg is True or type(arg) is torch.dtype:
            return None
    return Outcome([(specs[0].shape, specs[0].dtype)])


def by_factors(rule: Rule, whole: Whole, specs: Sequence[TensorSpec]) -> tuple[Outcome, Factors] | None:
    """The result of a function of two operands, or of one and a number, which keeps their dtype; and its factors.

    Its shape is told by their sizes; None where these do not agree, or the arguments say otherwise.
    """
    others = [arg for arg in whole.args if arg is not None]
    if len(whole.args) != 2 or whole.kwargs or not _of_one_float(specs) or len(specs) + len(others) != 2:
        return None
    if others and not (rule is elementwise and type(others[0]) in (float, int)):
        return None
    factors = rule(whole)
    sizes: dict[int | None, int] = {None: 1}
    if [*map(len, factors.operands)] != [*map(len, whole.shapes)]:
        return None
    for dims, shape in zip(factors.operands, whole.shapes, strict=True):
        if [*map(sizes.setdefault, dims, shape)] != [*shape]:
            return None
    return Outcome([(tuple([sizes[factor] for factor in factors.results[0]]), specs[0].dtype)]), factors


def _of_one_float(specs: Sequence[TensorSpec]) -> bool:
    """Whether all operands have one floating dtype, which autocast leaves alone."""
    first = specs[0].dtype
    alike = first.is_floating_point and {spec.dtype for spec in specs} == {first}
    return alike and not is_any_autocast_enabled()


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    found = []
    for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        found.append(wide.pop() if wide else 1)
    return tuple(reversed(found))


def on_meta(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
) -> Outcome | None:
    """What the call gives for global tensors without data; None where it is no tensors, or depends on values."""
    found = _without_data(func, args, kwargs, operands)
    if found is None or found.bases != [None] or operands[0][1].mesh.device_type != "cpu":
        return found
    given = (*args, *kwargs.values())
    before = [_laid(at(given, place)) for place, _ in operands]
    row = row_of(func)
    if row is None or row.rule is not elementwise or not any(before) or any(one and not one.strides for one in before):
        return found
    ((shape, _),) = found.results
    strides = _strides_of_kernel(func, args, kwargs, operands, before, shape)
    if strides is None:
        return found
    as_new = all(n == 1 or step == new for n, step, new in zip(shape, strides, packed(shape), strict=True))
    return found._replace(lying=None if as_new else [Lying(Laid(strides))])


def _strides_of_kernel(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
    before: Sequence[Laid | None],
    shape: Shape,
) -> Strides | None:
    """How a kernel lays out the result of a function of elements, of which some do otherwise without data.

    It is asked of at most two elements along each dim, which lie in the order of the operands' dims.
    """
    count = itertools.count()

    def make(spec: TensorSpec) -> Tensor:
        laid = before[next(count)]
        strides = packed(spec.shape) if laid is None or laid.strides is None else laid.strides
        ranks = {step: 1 << i for i, step in enumerate(sorted({*strides} - {0}))} | {0: 0}
        small = [min(n, 2) for n in spec.shape]
        memory = torch.ones(1 << len(ranks), dtype=spec.dtype, device="cpu")
        return memory.as_strided(small, [ranks[step] for step in strides])

    try:
        out = _on(make, func, args, kwargs, operands)
    except Exception:  # which is told elsewhere
        return None
    if not isinstance(out, Tensor) or tuple(out.shape) != tuple(min(n, 2) for n in shape):
        return None
    found, step = [1] * len(shape), 1
    for dim in reversed(order_in_memory(tuple(out.stride()))):
        found[dim], step = step, step * max(shape[dim], 1)
    return tuple(found)


def _without_data(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
) -> Outcome | None:
    mesh = operands[0][1].mesh
    if name_of(func) in ("vector_norm", "linalg_vector_norm") and _keeps_dims_of_one():
        func = _norm_without_data
    try:
        try:
            if not is_any_autocast_enabled():  # of which the meta device knows nothing
                with meta_tensors_as_on(mesh.device_type):
                    return _outcome("meta", func, args, kwargs, operands)
        except NotImplementedError:  # a move to another device, or a kernel that only fake tensors know
            pass
        with FakeMode():
            return _outcome(mesh.device_type, func, args, kwargs, operands)
    except (
        NotImplementedError,
        DataDependentOutputException,
        DynamicOutputShapeException,
    ):  # the shape of the result depends on values
        return None


def views_any(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> bool:
    """Whether a call gives views of whatever operands, though they have gaps and their dims stand in another order."""
    made: list[Tensor] = []

    def make(spec: TensorSpec) -> Tensor:
        x = torch.empty([2 * n for n in reversed(spec.shape)], dtype=spec.dtype, device="meta")
        made.append(x.permute(*reversed(range(spec.ndim)))[(slice(None, None, 2),) * spec.ndim])
        return made[-1]

    try:
        out = _on(make, func, args, kwargs, operands)
    except Exception:  # of others alone
        return False
    return all(any(is_alias_of(one, x) for x in made) for one in ((out,) if isinstance(out, Tensor) else out))


@functools.lru_cache(maxsize=1)
def _keeps_dims_of_one() -> bool:
    """Whether norms without data keep a dim of size 1 that is counted from the end, as in torch 2.11 and 2.12."""
    norm: Tensor = torch.linalg.vector_norm(torch.empty(2, 1, device="meta"), dim=-1)
    return norm.dim() > 1


def _norm_without_data(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Of the shape and dtype of a norm."""
    return x.abs().sum(dim, keepdim, dtype=dtype and torch.empty((), dtype=dtype).abs().dtype)


def differentiated(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> frozenset[Place]:
    """The operands that get a gradient where all ask for one: a function may only compare some. All, if unknown."""
    made: list[Tensor] = []

    def make(spec: TensorSpec) -> Tensor:
        follows = is_float(spec.dtype)
        made.append(torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=follows))
        return made[-1]

    try:
        with DisableTorchFunction(), torch.enable_grad(), without_saved_tensor_hooks():
            out = _on(make, func, args, kwargs, operands)
            results = [x for x in ((out,) if isinstance(out, Tensor) else out) if x.requires_grad]
            leaves = [x for x in made if x.requires_grad]
            found = torch.autograd.grad(results, leaves, list(map(torch.empty_like, results)), allow_unused=True)
    except Exception:
        return frozenset(place for place, _ in operands)
    unused = {id(x) for x, gradient in zip(leaves, found, strict=True) if gradient is None}
    return frozenset(place for (place, _), x in zip(operands, made, strict=True) if id(x) not in unused)


def _outcome(
    device: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
) -> Outcome | None:
    made: list[Tensor] = []
    given = (*args, *kwargs.values())
    before = [_laid(at(given, place)) for place, _ in operands]

    def make(spec: TensorSpec) -> Tensor:
        laid = before[len(made)]
        if laid is None or laid.strides is None:
            made.append(torch.empty(spec.shape, dtype=spec.dtype, device=device))
        else:
            made.append(torch.empty_strided(spec.shape, laid.strides, dtype=spec.dtype, device=device))
        return made[-1]

    out = _on(make, func, args, kwargs, operands)
    found = (out,) if isinstance(out, Tensor) else out
    if not isinstance(found, (tuple, list)) or not found or not all(isinstance(one, Tensor) for one in found):
        return None
    results = [(tuple(one.shape), one.dtype) for one in found]
    viewed = [next((k for k, x in enumerate(made) if is_alias_of(one, x)), None) for one in found]
    bases = [None if k is None else operands[k][0] for k in viewed]
    same = all(k == 0 and _is_all_of(one, made[0]) for k, one in zip(viewed, found, strict=True))
    unknown = not _is_packing(func, kwargs) and any(laid is not None and laid.strides is None for laid in before)
    lying = [_lying(one, k, before, operands, unknown) for k, one in zip(viewed, found, strict=True)]
    as_new = [Lying(Laid(packed(shape))) for shape, _ in results]
    return Outcome(
        results, None if isinstance(out, Tensor) else type(out), bases, same, None if lying == as_new else lying
    )


def begun(lying: Lying, dtype: torch.dtype, given: Sequence[Any]) -> Laid:
    """How a result of a call lies, of arguments of which one may begin later in its memory."""
    laid, base = lying
    if base is None or laid.start is None:
        return laid
    x = at(given, base)
    return Laid(laid.strides, laid.start + x.storage_offset() * x.dtype.itemsize // dtype.itemsize)


def lies_as_new(value: Any) -> bool:
    """Whether a tensor of a call lies in memory as a new one does."""
    return _laid(value) is None


def lies_known(value: Any) -> bool:
    """Whether it is known how torch would keep a tensor of a call."""
    laid = _laid(value)
    return laid is None or laid.strides is not None


def _laid(value: Any) -> Laid | None:
    """How a tensor of a call lies in memory, ``start`` being 0, more, or None where nobody knows; None: as a new one.

    Of a plain tensor the key of a call tells only the strides.
    """
    if type(value) is Sharded:
        form = value.form
        if not isinstance(form, Strided):
            return None
        return Laid(form.strides, None if form.later is None else int(form.later))
    if value.layout is not torch.strided or (value.is_contiguous() and not value.storage_offset()):
        return None
    return Laid(value.stride(), None if value.storage_offset() else 0)


def _lying(
    one: Tensor,
    base: int | None,
    before: Sequence[Laid | None],
    operands: Sequence[tuple[Place, TensorSpec]],
    unknown: bool,
) -> Lying:
    """How a result lies that is in the memory of an operand, of which it is known how it lay ``before``."""
    laid = None if base is None else before[base]
    start = 0 if laid is None else laid.start
    if unknown:
        return Lying(Laid(None, 0 if base is None else None))
    told = Laid(tuple(one.stride()), None if start is None else int(one.storage_offset()))
    return Lying(told, operands[base][0] if base is not None and start else None)


def _is_packing(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a result is as a new tensor, however its operand lies."""
    return name_of(func) == "contiguous" or kwargs.get("memory_format") is torch.contiguous_format


def _is_all_of(view: Tensor, x: Tensor) -> bool:
    """Whether a tensor in the memory of a new one has each element in the place where it was."""
    if view is x:
        return True
    if view.shape != x.shape or view.dtype is not x.dtype:
        return False
    strides = zip(view.stride(), x.stride(), x.shape, strict=True)
    return not x.numel() or (not view.storage_offset() and all(new == old or n == 1 for new, old, n in strides))


def _on(
    make: Callable[[TensorSpec], Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[Place, TensorSpec]],
) -> Any:
    given = (*args, *kwargs.values())
    values = [list(value) if isinstance(value, (list, tuple)) else value for value in given]
    for place, spec in operands:
        if isinstance(place, tuple):
            values[place[0]][place[1]] = make(spec)
        else:
            values[place] = make(spec)
    values = [type(old)(new) if type(old) is tuple else new for old, new in zip(given, values, strict=True)]
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    if named.get("device") is not None:  # where there are no values to make, nor numbers to draw
        named["device"] = at(values, operands[0][0]).device
    return func(*values[: len(args)], **named)
