"""A custom `autograd.Function` on `Sharded` values: its forward and its backward run on global values.

Torch would follow the shells of its arguments. So a Function on their blocks stands in its place. Its forward runs the
user's on the values, and its backward runs the user's on cotangents that are laid out as values are. A gradient is
moved to the layout of the argument's gradients. Communication: that of the functions in forward and backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fspmd.autodiff.leaves import local_of
from fspmd.errors import ArgumentError
from fspmd.local_view.hooks import zeros_later
from fspmd.local_view.modes import run_in
from fspmd.messages import counted, described
from fspmd.redistribution.redistribute import redistribute, to_blocks
from fspmd.sharded import Sharded, held_as, of_form, pair
from fspmd.spec import P, TensorSpec, describe

_Function: Any = torch.autograd.Function


def apply_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function.apply(*args, **kwargs)``, where an argument is `Sharded` and an argument requires grad.

    >>> from fspmd import P, device_get, device_put, make_mesh
    >>> class Cube(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x**3
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         return 3 * g * ctx.saved_tensors[0] ** 2
    >>> x = device_put(torch.arange(4.0), P("x"), mesh=make_mesh((4,), ("x",))).requires_grad_()
    >>> y = Cube.apply(x)
    >>> y.sum().backward()
    >>> y, device_get(x.grad)
    (Sharded f32[4@x] on mesh(x=4), tensor([ 0.,  3., 12., 27.]))
    """
    if kwargs or _sets_context(function):
        args = _in_order(function, args, kwargs)
    context = _FunctionContext(function, args)
    blocks = [local_of(x) for x in args if isinstance(x, Tensor)]
    outs = _OfBlocks.apply(context, *blocks)
    row = tuple(map(_like, context.results, outs))
    return row if context.several else row[0]


def _in_order(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of forward in its order, with its defaults, and without ``ctx``."""
    context = () if _sets_context(function) else (None,)
    try:
        bound = inspect.signature(function.forward).bind(*context, *args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{function.__name__}.apply got arguments that forward does not take: {error}") from error
    bound.apply_defaults()
    if bound.kwargs:
        raise ArgumentError(
            f"{function.__name__}.forward takes {', '.join(map(repr, bound.kwargs))} by keyword alone, but backward "
            "returns a gradient for each argument, in order; leave the * out of its signature"
        )
    return bound.args[len(context) :]


def _sets_context(function: Any) -> bool:
    return function.setup_context is not _Function.setup_context


class _Known:
    """What is known of a tensor that is not kept: its layout, unless it is plain, and its shapes."""

    __slots__ = ("dtype", "form", "shape", "zeros")

    def __init__(self, x: Tensor) -> None:
        self.form = x.form if type(x) is Sharded else None
        self.shape, self.dtype, self.zeros = x.shape, x.dtype, zeros_later(local_of(x))

    def __repr__(self) -> str:
        return describe(self.dtype, self.shape) if self.form is None else f"Sharded {self._spec!r}"

    @property
    def _spec(self) -> TensorSpec:
        return self.form if isinstance(self.form, TensorSpec) else self.form.spec  # type: ignore[union-attr]

    def value(self, block: Tensor) -> Tensor:
        """The tensor, of its block."""
        return block if self.form is None else of_form(self.form, block)

    def gradient(self, block: Tensor | None) -> Tensor | None:
        """The gradient of the tensor, of the gradient's block."""
        if block is None or self.form is None:
            return block
        return pair(held_as(block.contiguous(), self._spec.dual), self._spec.dual)

    def block_of(self, gradient: Tensor) -> Tensor:
        """The block of a gradient of the tensor. That of a plain tensor is whole."""
        if type(gradient) is not Sharded:
            return gradient if self.form is None else to_blocks(gradient, self._spec.dual)
        partition = P() if self.form is None else self._spec.dual.partition
        to = TensorSpec(gradient.spec.mesh, partition, gradient.shape, gradient.dtype)
        return redistribute(gradient.local, gradient.spec, to)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of a shape broadcasts to another shape."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _known(x: Any) -> Any:
    return _Known(x) if isinstance(x, Tensor) else x


def _like(known: Any, x: Any) -> Any:
    return known.value(x) if isinstance(known, _Known) else x


class _FunctionContext:
    """What forward and backward of the user's Function get as ``ctx``."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._saved: Sequence[Any] = ()
        self._fills = True
        self._of_blocks: Any = None
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        self.results: tuple[Any, ...] = ()
        self.several = False

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for backward. Torch keeps their blocks, as it keeps the tensors of other Functions."""
        self._saved = [_known(x) for x in tensors]
        self._of_blocks.save_for_backward(*map(local_of, tensors))

    save_for_forward = save_for_backward

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The values that `save_for_backward` got."""
        return tuple(map(_like, self._saved, self._of_blocks.saved_tensors))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Say which results have no gradient."""
        self._of_blocks.mark_non_differentiable(*map(local_of, tensors))

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether backward gets zeros, or None, for results that have no gradient."""
        self._fills = value

    def mark_dirty(self, *tensors: Any) -> None:
        """Refuse what forward has written into."""
        raise ArgumentError(
            f"{self._function.__name__}.apply writes into {tensors[0]!r}, which has a gradient that autograd follows; "
            "write into a copy, x.clone(), or call it in a function run by shard_map"
        )

    def forward(self, of_blocks: Any) -> tuple[Any, ...]:
        """Run the user's forward; return the blocks of the results."""
        self._of_blocks, function = of_blocks, self._function
        if _sets_context(function):
            out = function.forward(*self._args)
            function.setup_context(self, self._args, out)
        else:
            out = function.forward(self, *self._args)
        self.several = isinstance(out, tuple)
        outs = tuple(out) if self.several else (out,)
        self.results = tuple(map(_known, outs))
        self._args = tuple(map(_known, self._args))
        return tuple(map(local_of, outs))

    def backward(self, of_blocks: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Run the user's backward; return the blocks of the gradients of the tensors among the arguments."""
        self._of_blocks, function = of_blocks, self._function
        given = [self._cotangent(g, y) for g, y in zip(cotangents, self.results, strict=True)]
        run = function.backward if function.vjp is _Function.vjp else function.vjp
        gradients = run(self, *given)
        row = list(gradients) if isinstance(gradients, tuple) else [gradients]
        name = f"{function.__name__}.backward"
        if len(row) < len(self._args) or any(g is not None for g in row[len(self._args) :]):
            raise ArgumentError(
                f"{name} returned {counted(len(row), 'gradient')} for {counted(len(self._args), 'argument')} of forward"
            )
        return tuple(self._gradient(g, x, name) for g, x in zip(row, self._args, strict=False) if isinstance(x, _Known))

    def _cotangent(self, gradient: Tensor | None, result: Any) -> Any:
        if not isinstance(result, _Known):
            return gradient
        return result.gradient(result.zeros() if gradient is None and self._fills else gradient)

    @staticmethod
    def _gradient(gradient: Any, x: _Known, name: str) -> Tensor | None:
        if gradient is None:
            return None
        if isinstance(gradient, Tensor) and gradient.shape != x.shape and _broadcasts(x.shape, gradient.shape):
            gradient = gradient.sum_to_size(x.shape)  # as torch does
        if not isinstance(gradient, Tensor) or gradient.shape != x.shape:
            raise ArgumentError(f"{name} returned {described(gradient)} as the gradient of {x!r}; return one like it")
        return x.block_of(gradient)


class _OfBlocks(torch.autograd.Function):
    """A user's Function on blocks. The first argument is the user's context."""

    @staticmethod
    def forward(ctx: Any, context: _FunctionContext, *blocks: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.context = context
        return context.forward(ctx)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return None, *run_in(None, None, ctx.context.backward, ctx, cotangents)
