"""`Sharded`: this rank's block of a global tensor, with the spec that says how it lies on the mesh."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, ClassVar, Final, Protocol

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError
from fspmd.foreign import refuse_misfit
from fspmd.forms import UNKNOWN, Form, Laid, Strided, form_of, is_dense, packed
from fspmd.messages import described
from fspmd.pairs import apply, call
from fspmd.pickled_blocks import Place, check_place, place_of, refuse_checkpoint
from fspmd.remembered import forget_graph, is_bound, remember_no_moves
from fspmd.spec import SAVED, TensorSpec
from fspmd.torch_internals import DisableTorchFunction, aten_number, is_wrapped, make_wrapper_subclass
from fspmd.tracing import refuse_tracer
from fspmd.transport.frame import frame
from fspmd.transport.local_tensor import blocks_of, held_frame, local_tensor


class Sharded(Tensor):
    """A pair of (local tensor, spec): a global tensor, of which ``local`` is this rank's block.

    ``shape`` and ``dtype`` are those of the global tensor. In a simulation ``local`` holds the blocks of all ranks.

    Write into the Sharded, not into ``local``: what was gathered or summed of a block for one use serves the next. A
    later use of a block that was written into is refused on the rank that wrote. Torch counts no writes by
    ``x.local.data``, NumPy or pointers: those are not seen, and later uses may have the value of before.

    All ranks make the same calls of fspmd, and of torch on Sharded values, in the same order, writes included. A rank
    that runs ``x.mul_(2)`` alone, or makes a value, or sets ``requires_grad``, may later wait for others that do not
    come, or take what they send for something else: `lockstep` finds where ranks part.

    It is a ``torch.Tensor`` so that libraries which ask for one take it. Torch functions reach it through
    ``__torch_function__``, above autograd, and run on the block. What torch keeps below Python is a shell without data:
    a function that gets there is refused.

    >>> from fspmd import P, device_put, make_mesh
    >>> x = device_put(torch.zeros(8, 4), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> x
    Sharded f32[8@x, 4] on mesh(x=4)
    >>> x.shape, x.spec.partition
    (torch.Size([8, 4]), P('x', None))
    """

    __slots__ = ("block", "form", "spec")
    block: Tensor  # `local`, read and set at once
    spec: TensorSpec
    form: Form  # the spec, where torch would keep the global tensor as a new one
    __torch_function__: ClassVar[Callable[..., Any]]  # set where it is written

    def __new__(cls, local: Tensor, spec: TensorSpec) -> Sharded:
        if type(spec) is not TensorSpec:
            raise ArgumentError(
                f"Sharded(local, spec) got {described(spec)} for spec; it takes a TensorSpec: for a P write "
                "from_local(local, P(...), mesh=mesh)"
            )
        refuse_misfit(local, "Sharded(local, spec) got for local")
        return pair(local, spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What reached the shell: aten functions run as they do above; a gradient that would be lost is refused."""
        if func is aten_number:
            return args[0].item()
        given = [x for x in (*args, *(kwargs or {}).values()) if type(x) is Sharded]
        if wrapped := [x for x in given if is_wrapped(x.local)]:
            raise ArgumentError(
                f"{func} got {wrapped[0]!r} below the level of torch functions, within a transform such as grad or "
                "vmap; instead of torch.tensor(x) write x.clone(), or return device_get(x) from the function"
            )
        if kwargs and kwargs.get("device") == META:  # which torch.tensor(x) has read off the shell
            kwargs = {**kwargs, "device": given[0].device}
        followed = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        if func.namespace == "aten" and (not followed or func is torch.ops.aten.detach.default):
            return call_torch(func, args, kwargs)
        raise ArgumentError(
            f"{func} got {given[0] if given else 'a Sharded'!r} below the level of torch functions, where autograd "
            "does not follow it; write x.local for this rank's block, device_get(x) for the whole tensor"
        )

    @property
    def local(self) -> Tensor:
        """This rank's block; in a simulation, those of all ranks.

        To write into it, or to set it, is this rank's affair, of which the others know nothing. What was sent of a
        block serves its later uses, so after the first of them the next raises where it was written into, and setting
        raises at once, as it does within a graph: on all ranks if all of them did so, or on one alone. Write into the
        Sharded instead, or make a new one, on all ranks: ``x.mul_(2)``, ``x = from_local(block, P("x"), mesh=mesh)``.

        Raises:
            ArgumentError: it is set where either block was used before, is in a graph, or has another requires_grad.
        """
        return self.block

    @local.setter
    def local(self, block: Tensor) -> None:
        if is_bound(self.block) or is_bound(block) or self.block.requires_grad != block.requires_grad:
            raise ArgumentError(
                f"x.local = block was written for {self!r}, where one of the two blocks was used before, or is in a "
                "graph of autograd, or their requires_grad differs: the other ranks may not know of it, and would send "
                "what this one does not; on all ranks write into x, with torch.no_grad(): x.copy_(y), or make a new "
                "value, x = from_local(block, P(...), mesh=mesh)"
            )
        self.block = block

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return torch.Size(self.spec.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return self.spec.dtype

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or one of its sizes.

        Raises:
            ShapeError: there is no such dim.
        """
        if dim is None:
            return torch.Size(self.spec.shape)
        try:
            return self.spec.shape[dim]
        except IndexError:
            raise ShapeError(f"size({dim}) of {self!r}, whose dims are {-self.ndim} to {self.ndim - 1}") from None

    def dim(self) -> int:
        """Number of dims."""
        return len(self.spec.shape)

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.spec.shape)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the global tensor."""
        return self.numel() * self.spec.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """What torch tells of the global tensor after the same calls; no rank need keep its block so.

        Raises:
            ArgumentError: nobody knows.
            IndexError: there is no such dim.
        """
        refuse_tracer(self)
        _check_known(self, "strides", "stride()")
        with DisableTorchFunction():
            return _STRIDE(self) if dim is None else _STRIDE(self, dim)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """What torch tells of the global tensor after the same calls, as `stride`."""
        _check_known(self, "strides", "is_contiguous()")
        with DisableTorchFunction():
            return bool(_IS_CONTIGUOUS(self, memory_format=memory_format))

    def storage_offset(self) -> int:
        """What torch tells of the global tensor after the same calls, as `stride`."""
        _check_known(self, "later", "storage_offset()")
        with DisableTorchFunction():
            return int(_OFFSET(self))

    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating-point one."""
        return self.spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the dtype is a complex one."""
        return self.spec.dtype.is_complex

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where this rank's block is."""
        return self.block.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the local tensor."""
        return self.block.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.of_local("requires_grad_", value)

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """Make the local tensor a leaf that autograd follows."""
        self.of_local("requires_grad_", requires_grad)
        return self

    @property  # type: ignore[override]
    def grad(self) -> Sharded | None:
        """The gradient that `backward` left on the local tensor: laid out as self, unreduced where self is reduced.

        It is one object for as long as the local tensor has that gradient.
        """
        gradient: Tensor | None = self.block.grad
        if gradient is None:
            return None
        found: Sharded | None = self.__dict__.get(_GRAD)
        if found is None or found.block is not gradient:
            spec = self.spec.dual
            block = held_as(gradient, spec)
            if self.form is self.spec and self.local.is_leaf:  # quickly
                found = pair(block, spec)
            else:
                found = laid(block, spec, _lies_of_gradient(self))
            self.__dict__[_GRAD] = found
            remember_no_moves(block)  # backward adds to it, on some ranks perhaps
        return found

    @grad.setter
    def grad(self, value: Sharded | None) -> None:
        if value is not None and (not is_sharded(value) or value.spec is not self.spec.dual):
            raise ArgumentError(
                f"x.grad = y got {described(value)} for the gradient of {self!r}; it takes None, or a Sharded that "
                f"lies as {self.spec.dual!r}"
            )
        self.block.grad = None if value is None else value.local
        self.__dict__.pop(_GRAD, None)
        if value is not None and value.form is not self.form:
            self.__dict__[_GRAD] = found = alike(self.block.grad, value)
            remember_no_moves(found.local)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def backward(
        self,
        gradient: Tensor | Sharded | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Gradients for the leaves this value was computed from; ``gradient`` lies as self, or is global and plain.

        ``retain_graph``, ``create_graph`` and ``inputs`` are torch's.

        Raises:
            ArgumentError, VarianceError: no ``gradient``, and self is no scalar equal on all ranks.
            TreeError: a ``gradient`` of another shape, dtype or layout.
        """
        upper().backward(self, gradient, retain_graph, create_graph, inputs, what="backward()")

    def register_hook(self, hook: Callable[[Sharded], Sharded | Tensor | None]) -> Any:
        """Call ``hook`` with the gradient, laid out as `grad` is; what it returns is the gradient from there on.

        Raises:
            ArgumentError: self does not require grad, or the hook is no function.
            TreeError: in backward, of a gradient that does not fit.
        """
        return upper().on_gradient(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Sharded], None]) -> Any:
        """Call ``hook`` with self whenever backward has added to `grad`; self is a leaf."""
        return self.of_local("register_post_accumulate_grad_hook", lambda _: hook(self))

    def retain_grad(self) -> None:
        """Keep in `grad` the gradient of a value that is no leaf, too."""
        self.of_local("retain_grad")

    def of_local(self, name: str, *args: Any) -> Any:
        """What a method of the local tensor gives; of what torch refuses there the error names self."""
        try:
            return getattr(self.block, name)(*args)
        except RuntimeError as error:
            raise ArgumentError(f"{name}() of {self!r} fails: {error}") from error

    @property  # type: ignore[override]
    def data(self) -> Sharded:
        """`detach`: the same memory, not followed by autograd. ``x.data = y`` moves y as x lies."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        known = is_sharded(value) and value.spec.mesh is self.spec.mesh
        lies_so = known and value.spec.partition == self.spec.partition
        if not lies_so and not (known and value.shape == self.shape):
            raise ArgumentError(
                f"x.data = y got {described(value)} for {self!r}; it takes a Sharded of that shape on that mesh, or of "
                "another shape that lies so: write into x, with torch.no_grad(): x.copy_(y), or reshard y first"
            )
        if not lies_so:  # moved, into memory of its own
            new = call_torch(torch.empty_like, (self.detach(),), {"dtype": value.dtype})
            value = alike(call_torch(Tensor.copy_, (new, value.detach())).block, value, new.spec)
        if value.form is not self.form or not _same_memory(value.local, self.block):
            _take_memory(self, value)  # else x.data -= y has written where it was to

    def detach(self) -> Sharded:
        """The same value, not followed by autograd."""
        return alike(self.block.detach(), self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Sharded {self.spec!r}" if isinstance(self.spec, TensorSpec) else f"Sharded({self.block!r})"

    def __str__(self) -> str:
        return upper().text(self)

    def _repr_html_(self) -> str:
        return upper().html(self)

    def __copy__(self) -> Sharded:
        return _marked(alike(self.block, self), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        made = memo[id(self)] = alike(copy.deepcopy(self.block, memo), self)
        made.__dict__.update(copy.deepcopy(_attributes(self), memo))
        return made

    def __dir__(self) -> list[str]:
        return list(object.__dir__(self))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        """A process saves its block, a simulation those of all ranks; ``torch.load(..., weights_only=True)`` too."""
        x = self.block
        if (held := held_frame(x)) is None:
            refuse_checkpoint(self.spec, place := place_of(self.spec))
            block = x.detach().requires_grad_(x.requires_grad)
            return _of_block, (block, self.spec, place, *lies(self)), _attributes(self) or None
        blocks = [one.detach().clone() for one in blocks_of(x)]
        return _of_blocks, (self.spec, held.axes, blocks, x.requires_grad, *lies(self)), _attributes(self) or None

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        if not self.spec.shape:
            raise ShardedTypeError(
                f"len() of {self!r}, which has no dims; torch.tensor and torch.as_tensor, which ask for it, take no "
                "Sharded: write device_get(x), or torch.stack of several"
            )
        return self.spec.shape[0]

    def __contains__(self, element: Any) -> bool:
        return bool((self == element).any())

    def __reversed__(self) -> Any:
        return call_torch(Tensor.flip, (self, 0)) if self.spec.shape else self

    def __getitem__(self, index: Any) -> Any:
        return call_torch(_GETITEM, (self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        call_torch(Tensor.__setitem__, (self, index, value))

    def __iter__(self) -> Any:
        if not self.spec.shape:
            raise ShardedTypeError(
                f"iteration over {self!r}, which has no dims; what checks for a torch.Tensor and finds none may have "
                "taken it for a list"
            )
        return iter(call_torch(Tensor.unbind, (self,)))

    __array_priority__ = 1000  # so that NumPy leaves ``number * x`` to Sharded, as it does to a tensor

    def __array__(self, *args: Any, **options: Any) -> Any:
        return call_torch(Tensor.__array__, (self,))

    def __array_wrap__(self, array: Any, *_: Any) -> Tensor:
        """What a function of NumPy, such as ``np.add``, makes of the global tensor: a tensor, as of a tensor."""
        return torch.as_tensor(array)

    def __index__(self) -> int:
        return int(operator.index(self.item()))

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise ArgumentError(
                f"{self!r} was used as a condition (if, while, and, or, not); one that has more or fewer elements than "
                "one is ambiguous: write x.any() or x.all()"
            )
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        if spec and self.ndim:
            raise ArgumentError(
                f"the format {spec!r} was asked of {self!r}; it takes a scalar: reduce it, or format its repr"
            )
        if spec and self.spec.mesh.transport == "process_group" and self.spec.partition.mentioned:
            raise ArgumentError(
                f"the format {spec!r} was asked of {self!r}, whose number is known after a collective; all ranks must "
                "take part, and often one alone prints: write number = x.item() on all of them, and format that"
            )
        return format(self.item(), spec) if spec or upper().is_number(self) else str(self)

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def item(self) -> Any:
        """The number of a tensor of one element, on every rank: gathered, or its pending sum settled, where need be."""
        return call_torch(Tensor.item, (self,)) if self.spec.partition.mentioned else self.of_local("item")


def call_torch(func: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """A torch function, or one of ours that has a rule, on values of which some are `Sharded`."""
    return Sharded.__torch_function__(func, (), args, kwargs)


class Upper(Protocol):
    """What a Sharded does that stands on floors above this one."""

    @property
    def backward(self) -> Callable[..., None]:
        """``torch.autograd.backward``."""

    @property
    def gradients(self) -> Callable[..., Any]:
        """``torch.autograd.grad``."""

    def on_gradient(self, x: Sharded, hook: Callable[[Sharded], Any]) -> Any:
        """``x.register_hook``."""

    def dual(self, x: Any, tangent: Any, *, level: int) -> Any:
        """``torch.autograd.forward_ad.make_dual``."""

    def parts(self, x: Sharded, *, level: int) -> tuple[Sharded, Sharded | None]:
        """``torch.autograd.forward_ad.unpack_dual``."""

    def text(self, x: Sharded) -> str:
        """``str(x)``."""

    def html(self, x: Sharded) -> str:
        """What a notebook shows."""

    def is_number(self, x: Sharded) -> bool:
        """Whether every rank can tell the value without a collective."""


def upper() -> Upper:
    """What `provide` was given."""
    return _upper[0]


def provide(given: Upper) -> None:
    """Have a Sharded do what stands above it."""
    _upper[:] = [given]


_upper: Final[list[Upper]] = []


class ShardedTypeError(ArgumentError, TypeError):
    """A number of elements asked of a Sharded without dims."""


_GRAD: Final = "_fspmd_grad"
_DATA: Final[Any] = Tensor.data
_STRIDE: Final[Any] = Tensor.stride
_IS_CONTIGUOUS: Final[Any] = Tensor.is_contiguous
_OFFSET: Final[Any] = Tensor.storage_offset
_GETITEM: Final[Any] = Tensor.__getitem__
#: The shell that torch knows of a Sharded: shape, strides and dtype, no data. It is on the meta device, so that torch
#: itself refuses to make it the memory of another tensor (``plain.data = x``) and then to read where nothing is.
shell: Final[Callable[..., Sharded]] = make_wrapper_subclass
STRIDED: Final = torch.strided
META: Final = torch.device("meta")


def pair(local: Any, spec: TensorSpec) -> Sharded:
    """``Sharded(local, spec)`` without the check of its constructor. By place: names cost torch 200 ns."""
    x = shell(Sharded, spec.shape, None, None, None, spec.dtype, STRIDED, META)
    x.block = local
    x.spec = spec
    x.form = spec
    return x


def laid(local: Any, spec: TensorSpec, lies: Laid) -> Sharded:
    """A pair of which it is known how torch would keep the global tensor."""
    form = form_of(spec, lies.strides, None if lies.start is None else lies.start > 0)
    if form is spec:
        return pair(local, spec)
    x = shell(
        Sharded, spec.shape, lies.strides or packed(spec.shape), lies.start or None, None, spec.dtype, STRIDED, META
    )
    x.block = local
    x.spec = spec
    x.form = form
    return x


def lies(x: Sharded) -> Laid:
    """How torch would keep the global tensor."""
    form = x.form
    if not isinstance(form, Strided):
        return Laid(packed(form.shape))
    return form.laid._replace(start=x.storage_offset()) if form.later else form.laid


def alike(local: Any, x: Sharded, spec: TensorSpec | None = None) -> Sharded:
    """Other blocks for the same global tensor, maybe in another layout."""
    return pair(local, spec or x.spec) if x.form is x.spec else laid(local, spec or x.spec, lies(x))


def of_form(form: Form, local: Any) -> Sharded:
    """A value of which only the form is known: if it begins later in its memory, not where."""
    return laid(local, form.spec, form.laid) if isinstance(form, Strided) else pair(local, form)


def relay(x: Sharded, like: Sharded) -> None:
    """x has the shape, dtype, spec and form of another, and keeps its blocks."""
    with DisableTorchFunction():
        _DATA.__set__(x, like)
    x.spec, x.form = like.spec, like.form


def is_sharded(x: Any) -> bool:
    """For the ``is_leaf`` of tree functions."""
    return type(x) is Sharded


def is_plain(x: Any) -> bool:
    """Whether a value is a tensor but no `Sharded`: a block, or a global value that every rank has."""
    return isinstance(x, Tensor) and type(x) is not Sharded


def held_as(x: Tensor, spec: TensorSpec) -> Tensor:
    """A simulated value that autograd held apart over more axes than its spec varies over, held as the spec says.

    One that has a gradient of its own stays apart: its copies' cotangents are apart, too.
    """
    held = held_frame(x)
    if held is None or (x.requires_grad and torch.is_grad_enabled()):
        return x
    partition, mesh = spec.partition, spec.mesh
    absent = tuple(a for a in held.axes if a not in partition.axes and a not in partition.unreduced)
    return apply(x, call("held_once", mesh, absent)) if absent else x


def _check_known(x: Sharded, name: str, what: str) -> None:
    if isinstance(x.form, Strided) and getattr(x.form, name) is None:
        raise ArgumentError(
            f"{what} of {x!r}: how torch would keep it in memory is known of no gradient but x.grad, nor of a part of "
            "memory that jit was given, or of what is made of these; write x = x.contiguous() before"
        )


def _marked(x: Sharded, like: Sharded) -> Sharded:
    x.__dict__.update(_attributes(like))
    return x


def _attributes(x: Sharded) -> dict[str, Any]:
    """Those that users have set, and ``torch.nn.Parameter``, by which it knows what is one."""
    return {name: value for name, value in x.__dict__.items() if name != _GRAD}


def _lies_of_gradient(x: Sharded) -> Laid:
    """What backward leaves on a leaf lies as the leaf does, if that has each element once, and else as a new tensor."""
    if not x.local.is_leaf:
        return UNKNOWN
    strides = lies(x).strides
    return Laid(strides if strides is None or is_dense(x.spec.shape, strides) else packed(x.spec.shape))


def _same_memory(x: Tensor, y: Tensor) -> bool:
    pairs = zip(*map(blocks_of, (x, y)), strict=False)
    return type(x) is type(y) and all((a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()) for a, b in pairs)


def _take_memory(x: Sharded, y: Sharded) -> None:
    """The block of x has the memory of y, of another dtype, too, as does its gradient; what graphs know of it stays."""
    block = x.local
    gradient = block.grad if block.is_leaf or block.retains_grad else None
    block.data = y.local
    forget_graph(block)
    for one in (block, y.local):  # the two do not tell each other of writes
        remember_no_moves(one)
    if gradient is not None and gradient.dtype is not block.dtype:
        block.grad = None
        block.grad = gradient.to(block.dtype)
    relay(x, y)


def _of_block(local: Tensor, spec: TensorSpec, place: Place, *lies: Any) -> Sharded:
    """What a process has saved, which only one that stands where it stood may load."""
    check_place(spec, place)
    return laid(local, spec, Laid(*lies or (packed(spec.shape),)))


def _of_blocks(
    spec: TensorSpec, axes: tuple[str, ...], blocks: list[Tensor], requires_grad: bool, *lies: Any
) -> Sharded:
    """What was saved of a simulation."""
    local = local_tensor(blocks, frame(spec.mesh, axes)).requires_grad_(requires_grad)
    return laid(local, spec, Laid(*lies or (packed(spec.shape),)))


torch.serialization.add_safe_globals([Sharded, _of_block, _of_blocks, *SAVED])


def _flatten(x: Sharded) -> tuple[tuple[Tensor], Form, tuple[str]]:
    return (x.block,), x.form, ("local",)


def _unflatten(form: Form, children: Iterable[Any]) -> Sharded:
    """What a tree function makes of a block: of another dtype, with the spec of that; of another shape, an error.

    Where it begins in memory is not known any more, if not at the start.
    """
    (local,) = children
    spec = form.spec if isinstance(form, Strided) else form
    if isinstance(local, Tensor):
        if local.dim() != len(spec.shape) or (spec.even and tuple(local.shape) != spec.block_shape):
            raise ShapeError(
                f"a tree function put a tensor of shape {tuple(local.shape)} in the place of a block of shape "
                f"{spec.block_shape} into Sharded {spec!r}; instead of torch.vmap and torch.func use fspmd.vmap, "
                "fspmd.grad ..., or return device_get(x) from the function; instead of a tree_map that changes shapes "
                "use shard_map"
            )
        if local.dtype is not spec.dtype:
            spec = TensorSpec(spec.mesh, spec.partition, spec.shape, local.dtype)
            return laid(local, spec, form.laid) if isinstance(form, Strided) else pair(local, spec)
    return of_form(form, local)


#: The namespaces of optree in which a Sharded is a node, whose child is its block. For everybody else it is a leaf: a
#: function of all elements, such as a norm, then sees the global tensor and not one block of it.
NODES: Final = "fspmd"
#: and dicts have their keys as they were put in, of which functions learn; elsewhere they are sorted
IN_ORDER: Final = "fspmd.in_order"
for _namespace in (NODES, IN_ORDER):
    optree.register_pytree_node(
        Sharded, _flatten, _unflatten, path_entry_type=optree.GetAttrEntry, namespace=_namespace
    )
