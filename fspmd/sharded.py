"""`Sharded`: this rank's block of a global tensor, and the layout of the global tensor on the mesh."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, ClassVar, Final, Protocol

import optree
import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from fspmd.errors import ArgumentError, ShapeError
from fspmd.foreign import refuse_misfit
from fspmd.forms import UNKNOWN, Form, Laid, Strided, as_made, form_of, is_dense, packed
from fspmd.messages import described
from fspmd.ops.operators import WithOperators
from fspmd.ops.schemas import facts_of
from fspmd.pairs import apply, call
from fspmd.pickled_blocks import Place, check_block, check_blocks, checked_rest, place_of, refuse_checkpoint
from fspmd.redistribution.redistribute import redistribute
from fspmd.remembered import forget_graph, is_bound, remember_no_moves
from fspmd.spec import SAVED, P, TensorSpec
from fspmd.torch_internals import NO_LEVEL, DisableTorchFunction, level_of, make_wrapper_subclass
from fspmd.tracing import refuse_tracer
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import blocks_of, expand, held_frame, local_tensor, owned


class Sharded(WithOperators):
    """A global tensor: a pair of (local, spec), where ``local`` is this rank's block.

    ``shape`` and ``dtype`` are those of the global tensor. In a simulation ``local`` holds the blocks of all ranks.

    Write into the Sharded, not into ``local``. A gather or sum of a block serves all later uses, so a rank that uses a
    block after writing into it gets an error. Torch does not count writes through ``x.local.data``, NumPy or pointers.
    They go unseen, and later uses may have the old value.

    All ranks must make the same calls of fspmd, and of torch on Sharded values, in the same order, writes included. A
    rank that alone runs ``x.mul_(2)``, makes a value or sets ``requires_grad`` may later wait forever, or take the
    message of another call for its own. `lockstep` finds the call at which ranks differ.

    A Sharded is a ``torch.Tensor``, so that libraries which expect a tensor accept it. Torch functions reach it through
    ``__torch_function__``, above autograd, and run on the block. Below Python torch keeps a shell without data. A
    function that would read the shell raises an error.

    >>> from fspmd import P, device_put, make_mesh
    >>> x = device_put(torch.zeros(8, 4), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> x
    Sharded f32[8@x, 4] on mesh(x=4)
    >>> x.shape, x.spec.partition
    (torch.Size([8, 4]), P('x', None))
    """

    __slots__ = ("block", "form", "spec")
    block: Tensor  # `local` without its checks
    spec: TensorSpec
    form: Form  # the spec itself, if torch would lay out the global tensor as a new tensor
    __torch_function__: ClassVar[Callable[..., Any]]  # set by the global view

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
        """Run an aten function that reached the shell as a call of the global view.

        Raises:
            ArgumentError: The function is not aten's, or a transform wraps the block.
        """
        is_aten = func.namespace == "aten"
        if is_aten and len(args) == 1 and facts_of(func).gives_values:
            return args[0].item()
        given = [x for x in (*args, *(kwargs or {}).values()) if type(x) is Sharded]
        if wrapped := [x for x in given if level_of(x.local) != NO_LEVEL]:
            raise ArgumentError(
                f"{func} got {wrapped[0]!r} below the level of torch functions, within a transform such as grad or "
                "vmap; write x itself in place of torch.as_tensor(x), x.to(dtype) in place of torch.as_tensor(x, "
                "dtype=dtype), x.clone() in place of torch.tensor(x); or return device_get(x) from the function"
            )
        if kwargs and kwargs.get("device") == OF_SHELLS:  # torch.tensor(x) has read it off the shell
            kwargs = {**kwargs, "device": given[0].device}
        if facts_of(func).converts and _is_conversion_to_itself(args[0], kwargs or {}):
            return args[0]
        if func is torch.ops.aten.detach.default:  # torch.tensor(x) detaches x, and then copies it
            out = call_torch(func, args, kwargs)
            setattr(out, _IS_COPIED, True)
            return out
        if is_aten:
            if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
                return call_torch(func, args, kwargs)
            with enable_reentrant_dispatch():  # the blocks carry the gradient
                return call_torch(func, args, kwargs)
        raise ArgumentError(
            f"{func} got {given[0] if given else 'a Sharded'!r} below the level of torch functions, where fspmd has no "
            "rule for it; write x.local for this rank's block, device_get(x) for the whole tensor"
        )

    @property
    def local(self) -> Tensor:
        """This rank's block. In a simulation it holds the blocks of all ranks.

        Other ranks do not see a write into it, or an assignment to it. A gather or sum of a block serves all its later
        uses. So after the first use, a use of a block that was written into raises an error, on each rank that wrote.
        An assignment raises at once. Write into the Sharded instead, or make a new one, on all ranks: ``x.mul_(2)``,
        ``x = from_local(block, P("x"), mesh=mesh)``.

        Raises:
            ArgumentError: On assignment, if one of the two blocks was used before or is in a graph, or if their
                ``requires_grad`` differs.
        """
        return self.block

    @local.setter
    def local(self, block: Tensor) -> None:
        if is_bound(self.block) or is_bound(block) or self.block.requires_grad != block.requires_grad:
            raise ArgumentError(
                f"x.local = block was written for {self!r}, where one of the two blocks was used before, or is in a "
                "graph of autograd, or their requires_grad differs: the other ranks may not know of it, and would wait "
                "for this one; on all ranks write into x, with torch.no_grad(): x.copy_(y), or make a new value, "
                "x = from_local(block, P(...), mesh=mesh)"
            )
        self.block = block

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return torch.Size(self.spec.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims."""
        return len(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return self.spec.dtype

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or the size of ``dim``.

        Raises:
            ShapeError: There is no such dim.
        """
        if dim is None:
            return torch.Size(self.spec.shape)
        try:
            return self.spec.shape[dim]
        except IndexError:
            raise _no_dim(self, "size", dim) from None

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self.spec.shape)

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return prod(self.spec.shape)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the global tensor."""
        return self.numel() * self.spec.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides that torch would give the global tensor after the same calls. Blocks may have others.

        Raises:
            ArgumentError: The strides are unknown.
            ShapeError: There is no such dim.
        """
        refuse_tracer(self)
        _check_known(self, "strides", "stride()")
        with DisableTorchFunction():
            strides = _STRIDE(self)
        if dim is None:
            return strides
        try:
            return strides[dim]
        except IndexError:
            raise _no_dim(self, "stride", dim) from None

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Return whether torch would keep the global tensor contiguous after the same calls, as for `stride`."""
        _check_known(self, "strides", "is_contiguous()")
        with DisableTorchFunction():
            return bool(_IS_CONTIGUOUS(self, memory_format=memory_format))

    def storage_offset(self) -> int:
        """Return the offset that torch would give the global tensor after the same calls, as for `stride`."""
        _check_known(self, "later", "storage_offset()")
        with DisableTorchFunction():
            return int(_OFFSET(self))

    def is_floating_point(self) -> bool:
        """Return whether the dtype is a floating-point one."""
        return self.spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Return whether the dtype is a complex one."""
        return self.spec.dtype.is_complex

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's block."""
        return self.block.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the block."""
        return self.block.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.of_local("requires_grad_", value)

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """Make the block a leaf that autograd follows, or with False one that it does not."""
        self.of_local("requires_grad_", requires_grad)
        return self

    @property  # type: ignore[override]
    def grad(self) -> Sharded | None:
        """The gradient that `backward` left on the block: laid out as self, but unreduced where self is reduced.

        It is the same object as long as the block has this gradient. ``x.grad = y`` takes y, or a copy of y that is
        moved to this layout.
        """
        gradient: Tensor | None = self.block.grad
        if gradient is None:
            return None
        grad: Sharded | None = self.__dict__.get(_GRAD)
        if grad is None or grad.block is not gradient:
            spec = self.spec.dual
            block = held_as(gradient, spec)
            if self.form is self.spec and self.local.is_leaf:  # the fast path
                grad = pair(block, spec)
            else:
                grad = laid(block, spec, _lies_of_gradient(self))
            self.__dict__[_GRAD] = grad
            remember_no_moves(block)  # backward adds to it, perhaps on some ranks only
        return grad

    @grad.setter
    def grad(self, value: Sharded | None) -> None:
        spec = self.spec.dual
        if value is not None and (not is_sharded(value) or _kind(value.spec) != _kind(spec)):
            raise ArgumentError(
                f"x.grad = y got {described(value)} for the gradient of {self!r}; it takes None, or a Sharded of the "
                f"same shape and dtype on the same mesh, which moves to {spec.partition!r}"
            )
        self.__dict__.pop(_GRAD, None)
        if value is None:
            self.block.grad = None
            return
        value, frame = _moved(value, spec.partition), held_frame(self.block)
        gradient = value.local if frame is None else owned(expand(value.local, frame))  # backward adds to one per rank
        self.block.grad = gradient
        if gradient is value.local and value.form is not self.form:
            self.__dict__[_GRAD] = grad = alike(self.block.grad, value)
            remember_no_moves(grad.local)

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
        """Compute the gradients of the leaves from which this value was computed.

        ``gradient`` is a Sharded that lies as self, or a plain global tensor. ``retain_graph``, ``create_graph`` and
        ``inputs`` are torch's.

        Raises:
            ArgumentError, VarianceError: There is no ``gradient``, and self is not a scalar equal on all ranks.
            TreeError: ``gradient`` has another shape, dtype or layout.
        """
        upper().backward(self, gradient, retain_graph, create_graph, inputs, what="backward()")

    def register_hook(self, hook: Callable[[Sharded], Sharded | Tensor | None]) -> Any:
        """Call ``hook`` with the gradient, laid out as `grad`. If it returns a tensor, this replaces the gradient.

        Raises:
            ArgumentError: self does not require grad, or ``hook`` is not a function.
            TreeError: In backward, if the returned gradient does not fit.
        """
        return upper().on_gradient(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Sharded], None]) -> Any:
        """Call ``hook`` with self whenever backward has added to `grad`. Self must be a leaf."""
        return self.of_local("register_post_accumulate_grad_hook", lambda _: hook(self))

    def retain_grad(self) -> None:
        """Keep the gradient in `grad` even if self is not a leaf."""
        self.of_local("retain_grad")

    def of_local(self, name: str, *args: Any) -> Any:
        """Return ``block.name(*args)``. The error of torch, if it raises one, then names self."""
        try:
            return getattr(self.block, name)(*args)
        except RuntimeError as error:
            raise ArgumentError(f"{name}() of {self!r} fails: {error}") from error

    @property  # type: ignore[override]
    def data(self) -> Sharded:
        """`detach`: the same memory, not followed by autograd.

        ``x.data = y`` gives x the memory of y. Where y lies otherwise it moves to the layout of x. Where that sends or
        cuts anything x is a copy, and neither sees later writes into the other.
        """
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        on_mesh = is_sharded(value) and value.spec.mesh is self.spec.mesh
        lies_alike = on_mesh and value.spec.partition == self.spec.partition
        if not lies_alike and not (on_mesh and value.shape == self.shape):
            raise ArgumentError(
                f"x.data = y got {described(value)} for {self!r}; it takes a Sharded on the same mesh, of the same "
                "shape or the same spec: write into x, with torch.no_grad(): x.copy_(y), or reshard y first"
            )
        if not lies_alike:
            value = _moved(value.detach(), self.spec.partition)
        if value.form is not self.form or not _same_memory(value.local, self.block):
            _take_memory(self, value)  # otherwise x.data -= y has already written into the memory of x

    def detach(self) -> Sharded:
        """Return the same value, not followed by autograd."""
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
        """A process saves its block, a simulation all blocks. ``torch.load(..., weights_only=True)`` can load them.

        It calls functions that check what a file says, and attributes are arguments of these: torch would set them on
        objects of those classes alone that a file may call.
        """
        x, attributes = self.block, _attributes(self)
        rest = (*lies(self), attributes) if attributes else lies(self)
        if (frame := held_frame(x)) is None:
            refuse_checkpoint(self.spec, place := place_of(self.spec))
            block = x.detach().requires_grad_(x.requires_grad)
            return _of_block, (block, self.spec, place, *rest)
        blocks = [block.detach() for block in blocks_of(owned(x))]
        return _of_blocks, (self.spec, frame.axes, blocks, x.requires_grad, *rest)

    def __len__(self) -> int:
        if not self.spec.shape:
            raise ShardedTypeError(
                f"len() got {self!r}, which has no dims; torch.tensor and torch.as_tensor call len() and take no "
                "Sharded: write device_get(x), or torch.stack for several values"
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
                f"iteration over {self!r}, which has no dims; a function that checks type(x) is torch.Tensor may have "
                "taken it for a list: write device_get(x)"
            )
        return iter(call_torch(Tensor.unbind, (self,)))

    __array_priority__ = 1000  # as for a tensor: NumPy leaves ``number * x`` to Sharded

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = _read_only(call_torch(Tensor.__array__, (self,)))
        return array if dtype in (None, array.dtype) and not copy else array.astype(dtype or array.dtype)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the global tensor as a NumPy array that cannot be written into, as in JAX: other ranks have theirs."""
        return _read_only(call_torch(Tensor.numpy, (self,), {"force": force}))

    def __array_wrap__(self, array: Any, *_: Any) -> Tensor:
        """Return the result of a NumPy function, such as ``np.add``, as a tensor, as torch does."""
        return torch.as_tensor(array)

    def __index__(self) -> int:
        return int(operator.index(self.item()))

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise ArgumentError(
                f"{self!r} was used as a condition (if, while, and, or, not), but has {self.numel():,} elements "
                "instead of one: write x.any() or x.all()"
            )
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        if spec and self.ndim:
            raise ArgumentError(
                f"the format {spec!r} was given for {self!r}; it takes a scalar: reduce the value, or format its repr"
            )
        if spec and self.spec.mesh.transport == "process_group" and self.spec.partition.mentioned:
            raise ArgumentError(
                f"the format {spec!r} was given for {self!r}, whose number takes a collective of all ranks, while "
                "often one rank alone prints: write number = x.item() on all ranks, and format the number"
            )
        return format(self.item(), spec) if spec or upper().is_number(self) else str(self)

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def item(self) -> Any:
        """Return the number of a tensor of one element, on every rank. It is gathered or summed where needed."""
        return call_torch(Tensor.item, (self,)) if self.spec.partition.mentioned else self.of_local("item")


def call_torch(func: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """Call a torch function, or a function of ours with a rule, on arguments of which some are `Sharded`."""
    return Sharded.__torch_function__(func, (), args, kwargs)


class Upper(Protocol):
    """Functions of a Sharded that live on floors above this one."""

    @property
    def backward(self) -> Callable[..., None]:
        """``torch.autograd.backward``."""

    @property
    def gradients(self) -> Callable[..., Any]:
        """``torch.autograd.grad``."""

    def apply_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``apply`` of a custom ``autograd.Function``."""

    def on_gradient(self, x: Sharded, hook: Callable[[Sharded], Any]) -> Any:
        """``x.register_hook``."""

    def dual(self, x: Any, tangent: Any, *, level: int) -> Any:
        """``torch.autograd.forward_ad.make_dual``."""

    def parts(self, x: Sharded, *, level: int) -> tuple[Sharded, Sharded | None]:
        """``torch.autograd.forward_ad.unpack_dual``."""

    def text(self, x: Sharded) -> str:
        """``str(x)``."""

    def html(self, x: Sharded) -> str:
        """The HTML that a notebook shows."""

    def is_number(self, x: Sharded) -> bool:
        """Whether every rank knows the value without a collective."""


def upper() -> Upper:
    """Return the object that `provide` was given."""
    return _upper[0]


def provide(functions: Upper) -> None:
    """Give Sharded the functions of upper floors."""
    _upper[:] = [functions]


_upper: Final[list[Upper]] = []


class ShardedTypeError(ArgumentError, TypeError):
    """Raised by ``len()`` and iteration over a Sharded without dims."""


_GRAD: Final = "_fspmd_grad"
_IS_COPIED: Final = "_fspmd_is_copied"
_DATA: Final[Any] = Tensor.data
_STRIDE: Final[Any] = Tensor.stride
_IS_CONTIGUOUS: Final[Any] = Tensor.is_contiguous
_OFFSET: Final[Any] = Tensor.storage_offset
_GETITEM: Final[Any] = Tensor.__getitem__
#: Makes the shell of a Sharded: shape, strides and dtype, no data. It is on the meta device, so that torch itself
#: refuses to make it the memory of another tensor (``plain.data = x``), which would read where no data is.
shell: Final[Callable[..., Sharded]] = make_wrapper_subclass
_STRIDED: Final = torch.strided
#: "meta" with an index, so that ``torch.tensor(x)``, which reads it, differs from ``torch.tensor(x, device="meta")``
OF_SHELLS: Final = torch.device("meta", 1)


def _is_conversion_to_itself(x: Any, options: dict[str, Any]) -> bool:
    """Whether ``torch.as_tensor(x, **options)`` is x: torch reads the device of the shell, and asks for a copy."""
    return (
        type(x) is Sharded
        and not hasattr(x, _IS_COPIED)
        and options.get("dtype") in (None, x.dtype)
        and options.get("device") in (None, x.device)
    )


def pair(local: Any, spec: TensorSpec) -> Sharded:
    """Return ``Sharded(local, spec)`` without the checks. The shell takes positional arguments: names cost 200 ns."""
    x = shell(Sharded, spec.shape, None, None, None, spec.dtype, _STRIDED, OF_SHELLS)
    x.block = local
    x.spec = spec
    x.form = spec
    return x


def shell_of(spec: TensorSpec, lies: Laid | None) -> tuple[Any, ...]:
    """Return the arguments of `shell` for a value that torch would keep as ``lies`` says; None: as a new tensor."""
    strides = None if lies is None else lies.strides or packed(spec.shape)
    start = None if lies is None else lies.start or None  # None is quicker for torch than 0
    return Sharded, spec.shape, strides, start, None, spec.dtype, _STRIDED, OF_SHELLS


def laid(local: Any, spec: TensorSpec, lies: Laid) -> Sharded:
    """Return a Sharded whose global tensor torch would keep as ``lies`` says."""
    return formed(local, spec, form_of(spec, lies), lies)


def formed(local: Any, spec: TensorSpec, form: Form, lies: Laid) -> Sharded:
    """Return a Sharded of a known form, which is that of ``lies``."""
    if form is spec:
        return pair(local, spec)
    x = shell(*shell_of(spec, lies))
    x.block = local
    x.spec = spec
    x.form = form
    return x


def lies(x: Sharded) -> Laid:
    """Return the strides and the offset that torch would give the global tensor."""
    form = x.form
    if not isinstance(form, Strided):
        return Laid(packed(form.shape))
    return form.laid._replace(start=x.storage_offset()) if form.later else form.laid


def alike(local: Any, x: Sharded, spec: TensorSpec | None = None) -> Sharded:
    """Return a Sharded with the global form of ``x`` and other blocks, perhaps in another layout."""
    return pair(local, spec or x.spec) if x.form is x.spec else laid(local, spec or x.spec, lies(x))


def of_form(form: Form, local: Any) -> Sharded:
    """Return a Sharded of a form. The form says whether it has an offset in its memory, and not which."""
    return laid(local, form.spec, form.laid) if isinstance(form, Strided) else pair(local, form)


def relay(x: Sharded, like: Sharded) -> None:
    """Give ``x`` the shape, dtype, spec and form of ``like``. It keeps its blocks."""
    with DisableTorchFunction():
        _DATA.__set__(x, like)
    x.spec, x.form = like.spec, like.form


def is_sharded(x: Any) -> bool:
    """Return whether a value is a `Sharded`, as the ``is_leaf`` of tree functions too."""
    return type(x) is Sharded


def is_plain(x: Any) -> bool:
    """Return whether a value is a tensor but not a `Sharded`: a block, or a global value that every rank has."""
    return isinstance(x, Tensor) and type(x) is not Sharded


def held_as(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return a simulated value with the frame of its spec. Autograd may have given it a frame of more axes.

    A value with a gradient keeps its frame, because the cotangents of its copies differ.
    """
    frame = held_frame(x)
    if frame is None or (x.requires_grad and torch.is_grad_enabled()):
        return x
    partition, mesh = spec.partition, spec.mesh
    absent = tuple(a for a in frame.axes if a not in partition.axes and a not in partition.unreduced)
    return apply(x, call("held_once", mesh, absent)) if absent else x


def _check_known(x: Sharded, name: str, method: str) -> None:
    if isinstance(x.form, Strided) and getattr(x.form, name) is None:
        raise ArgumentError(
            f"{method} of {x!r} is unknown: fspmd does not know how torch would keep a gradient other than x.grad, an "
            "argument of jit that is a part of a larger memory, or a value made of these; write x = x.contiguous() "
            "before"
        )


def _marked(x: Sharded, like: Sharded) -> Sharded:
    x.__dict__.update(_attributes(like))
    return x


def _attributes(x: Sharded) -> dict[str, Any]:
    """Return the attributes that users have set, and the mark by which ``torch.nn.Parameter`` knows its instances."""
    return {name: value for name, value in x.__dict__.items() if name != _GRAD}


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _lies_of_gradient(x: Sharded) -> Laid:
    """Return the strides of a gradient: those of the leaf if its memory is dense, else those of a new tensor."""
    if not x.local.is_leaf:
        return UNKNOWN
    strides = lies(x).strides
    return Laid(strides if strides is None or is_dense(x.spec.shape, strides) else packed(x.spec.shape))


def _kind(spec: TensorSpec) -> tuple[Any, ...]:
    return spec.mesh, spec.shape, spec.dtype


def _no_dim(x: Sharded, name: str, dim: int) -> ShapeError:
    return ShapeError(f"{name}({dim}) of {x!r}, whose dims are {-x.ndim} to {x.ndim - 1}")


def _moved(x: Sharded, partition: P) -> Sharded:
    spec = x.spec.with_partition(partition)
    return x if x.spec is spec else alike(redistribute(x.local, x.spec, spec), x, spec)


def _same_memory(x: Tensor, y: Tensor) -> bool:
    pairs = zip(*map(blocks_of, (x, y)), strict=False)
    return type(x) is type(y) and all((a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()) for a, b in pairs)


def _take_memory(x: Sharded, y: Sharded) -> None:
    """Give the block of ``x`` the memory and dtype of ``y``, and its gradient the dtype. Graphs keep their values."""
    block = x.local
    gradient = block.grad if block.is_leaf or block.retains_grad else None
    block.data = y.local
    forget_graph(block)
    for tensor in (block, y.local):  # the version of one does not count writes into the other
        remember_no_moves(tensor)
    if gradient is not None and gradient.dtype is not block.dtype:
        block.grad = None
        block.grad = gradient.to(block.dtype)
    relay(x, y)


def _of_block(local: Tensor, spec: TensorSpec, place: Place, *rest: Any) -> Sharded:
    """Load the block that a process has saved. Only a process at the same place of the mesh may load it."""
    check_block(local, spec, place)
    return _loaded(local, spec, rest)


def _of_blocks(
    spec: TensorSpec, axes: tuple[str, ...], blocks: list[Tensor], requires_grad: bool, *rest: Any
) -> Sharded:
    """Load the blocks that a simulation has saved."""
    check_blocks(spec, axes, blocks, requires_grad)
    return _loaded(local_tensor(blocks, frame_over(spec.mesh, axes)).requires_grad_(requires_grad), spec, rest)


def _loaded(local: Tensor, spec: TensorSpec, rest: tuple[Any, ...]) -> Sharded:
    """Return a value of a pickle, whose rest are its strides, its offset and its attributes."""
    places, attributes = checked_rest(spec, rest)
    x = laid(local, spec, Laid(*places or (packed(spec.shape),)))
    x.__dict__.update((name, value) for name, value in attributes.items() if name != _GRAD)
    return x


torch.serialization.add_safe_globals([_of_block, _of_blocks, *SAVED])


def _flatten(x: Sharded) -> tuple[tuple[Tensor], Form, tuple[str]]:
    form: Any = x.form
    return (x.block,), form if form is x.spec or not form.made else as_made(form, False), ("local",)


def _unflatten(form: Form, children: Iterable[Any]) -> Sharded:
    """Return the Sharded of a leaf that a tree function returned. The leaf may have another dtype.

    If the value had an offset in its memory, the offset is unknown afterwards.

    Raises:
        ShapeError: The leaf has another shape than the block.
    """
    (local,) = children
    spec = form.spec if isinstance(form, Strided) else form
    if isinstance(local, Tensor):
        fits = local.dim() == len(spec.shape) and (not spec.even or tuple(local.shape) == spec.block_shape)
        if not fits and spec.mesh.coordinate() is not None:  # of another process the block is empty
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


#: A namespace of optree in which a Sharded is a node, whose child is its block. In other namespaces it is a leaf, so
#: that a function of all elements, such as a norm, sees the global tensor and not one block.
NODES: Final = "fspmd"
#: The same namespace, but dicts keep the order of their keys, which functions can see. Elsewhere keys are sorted.
IN_ORDER: Final = "fspmd.in_order"
for _namespace in (NODES, IN_ORDER):
    optree.register_pytree_node(
        Sharded, _flatten, _unflatten, path_entry_type=optree.GetAttrEntry, namespace=_namespace
    )
