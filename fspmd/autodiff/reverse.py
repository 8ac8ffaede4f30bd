"""Gradients: `vjp`, `grad` and `value_and_grad`. They use autograd, and ``torch.func`` within one of its transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from fspmd.autodiff.leaves import (
    DEPTH,
    DIFFERENTIATING,
    Function,
    all_typed,
    check_argnums,
    check_function,
    check_leaves,
    check_options,
    check_results,
    cotangents_of,
    detached,
    flatten,
    flatten_quickly,
    gradient_like,
    labelled,
    like,
    local_of,
    rewrapped,
    scalar_of,
    show_leaf,
    typed,
)
from fspmd.body import state
from fspmd.errors import ArgumentError, TreeError
from fspmd.local_view.closures import INNER, uses_closed_over
from fspmd.local_view.modes import leave_to_python
from fspmd.local_view.tracking import own
from fspmd.remembered import ask_gradient, hold_casts, let_go
from fspmd.saved_tensor_hooks import KeptTensors, is_checkpointed, without_saved_tensor_hooks
from fspmd.sharded import Sharded, alike, is_plain, pair
from fspmd.torch_internals import DisableTorchFunction, execution_engine, transforms_active
from fspmd.trees import parameter_names
from fspmd.variance import get_variance, set_variance
from fspmd.wrappers import wraps

_run_backward: Final[Any] = execution_engine.run_backward

Q = ParamSpec("Q")
R = TypeVar("R")
Unflatten = Callable[[Sequence[Any]], Any]  # makes a tree of leaves
Aux = TypeVar("Aux")


def vjp(f: Function, *primals: Any, has_aux: bool = False) -> Any:
    """``f(*primals)`` and the function that maps a cotangent of the result to cotangents of the primals.

    A cotangent is a tree like the result. For a `Sharded` result its leaf is a `Sharded`, which is moved to the layout
    of the result, or a plain global tensor. For a result of integers it is None.

    Returns:
        ``(out, vjp_fn)``, or ``(out, vjp_fn, aux)`` with ``has_aux``. ``vjp_fn`` may be called again.

    Raises:
        ArgumentError: a primal has no derivative.
        TreeError, VarianceError: by ``vjp_fn``, a cotangent has another tree, shape, dtype or layout, or varies where
            the result does not.

    >>> from fspmd import P, make_mesh, psum, shard_map
    >>> f = shard_map(lambda x: x * x, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> out, pull = vjp(f, torch.arange(4.0))
    >>> pull(torch.ones(4))
    (tensor([0., 2., 4., 6.]),)
    """
    leaves, unflatten = flatten_quickly(primals)
    check_function(f, "vjp")

    def labels() -> list[tuple[Any, str]]:
        return labelled(primals, "primals")

    def run(primals: tuple[Any, ...]) -> Any:
        return f(*primals)

    if transforms_active():
        check_leaves(leaves, labels, "vjp")
        return _vjp_by_transform(run, leaves, unflatten, has_aux, "vjp")
    inputs, out, aux, create, saved = _trace(run, leaves, unflatten, has_aux, labels, "vjp")
    check_results(out, "vjp")

    def pull(cotangent: Any) -> Any:
        outputs, _ = flatten(out)
        cotangents = cotangents_of(cotangent, out, outputs)
        pairs = [(o, c) for o, c in zip(map(local_of, outputs), cotangents, strict=True) if o.requires_grad]
        create_again = create or any(c.requires_grad for _, c in pairs)
        values, given = tuple(o for o, _ in pairs), tuple(c for _, c in pairs)
        return unflatten(_autograd(values, given, leaves, inputs, create_again, retain=True, saved=saved))

    value = out if create else detached(out)
    return (value, pull, aux) if has_aux else (value, pull)


def _trace(
    run: Function,
    leaves: list[Any],
    unflatten: Unflatten,
    has_aux: bool,
    labels: Callable[[], list[tuple[Any, str]]],
    what: str,
) -> tuple[list[Tensor], Any, Any, bool, KeptTensors | None]:
    """Run a function of a tree on fresh autograd leaves, which stay connected to the graph of the primals.

    Returns:
        The fresh leaves, the result, the ``aux`` beside it, whether gradients must be differentiable, and the owner of
        the saved tensors that backward needs. Gradients must be differentiable inside another derivative, and where the
        function depends on other tensors that require grad.

    Here and below loops stand inline, and few functions are called. Each small function costs 1 µs here, because the
    kernels in between have driven it out of the processor's caches.
    """
    if torch.is_inference_mode_enabled():
        raise ArgumentError(f"{what} was called in torch.inference_mode(), which has no gradients; use torch.no_grad()")
    grad_enabled = torch.is_grad_enabled()
    try:
        inputs, values, any_followed = _fresh(leaves, grad_enabled)
    except (AttributeError, RuntimeError):
        check_leaves(leaves, labels, what)
        raise
    create = any_followed or (grad_enabled and DEPTH.value > 0)
    tree = unflatten(values)
    saved = None
    DEPTH.value += 1
    try:
        if grad_enabled and not is_checkpointed():
            out = run(tree)
        else:
            saved = KeptTensors()
            with torch.enable_grad(), saved.saving():
                out = run(tree)
    finally:
        DEPTH.value -= 1
        let_go(inputs)
    aux = None
    if has_aux:
        out, aux = _with_aux(out)
    if not create and grad_enabled:
        outs = [out] if isinstance(out, Tensor) and not has_aux else flatten((out, aux))[0]
        create = uses_closed_over([x.local if type(x) is Sharded else x for x in outs])
    return inputs, out, aux if create or not has_aux else detached(aux), create, saved


_LOOKS = "it looks at the graph that autograd has made"
leave_to_python(uses_closed_over, _LOOKS)
leave_to_python(_trace, _LOOKS, all_within=False)


def _with_aux(out: Any) -> tuple[Any, Any]:
    """The pair that a function with ``has_aux=True`` returned."""
    if not isinstance(out, tuple) or len(out) != 2:
        given = f"a tuple of {len(out)}" if isinstance(out, tuple) else show_leaf(out)
        raise TreeError(f"with has_aux=True the function returns a pair, (out, aux), but it returned {given}")
    return out


def _fresh(leaves: list[Any], grad_enabled: bool) -> tuple[list[Tensor], list[Any], bool]:
    """New autograd leaves, or views of tensors that autograd follows; the values that they are the blocks of; and
    whether autograd follows any."""
    body = state.body
    fresh, values, any_followed = [], [], False
    with DisableTorchFunction():
        for leaf in leaves:
            sharded = type(leaf) is Sharded
            x = leaf.block if sharded else leaf
            if grad_enabled and x.requires_grad:
                any_followed = True
                y = x.view_as(x)
                ask_gradient(y)
            else:
                y = x.detach().requires_grad_()
                setattr(y, INNER, body)
                hold_casts(y)
            if body is not None:
                typed(y, x)
            fresh.append(y)
            values.append(y if not sharded else pair(y, leaf.spec) if leaf.form is leaf.spec else alike(y, leaf))
    return fresh, values, any_followed


def _autograd(
    outputs: tuple[Tensor, ...],
    cotangents: tuple[Tensor, ...],
    leaves: list[Any],
    inputs: list[Tensor],
    create: bool,
    retain: bool,
    saved: KeptTensors | None,
) -> list[Any]:
    """Gradients with the layouts of the leaves. The caller's reference ``saved`` keeps the saved tensors alive."""
    body = state.body
    grads: list[Any] = []
    DEPTH.value += 1
    try:
        with DisableTorchFunction():
            gradients: Sequence[Tensor | None] = [None] * len(inputs)
            if outputs:
                # torch.autograd.grad without its checks and logs, which take as long as the derivatives of several ops
                gradients = _run_backward(
                    outputs, cotangents, retain or create, create, tuple(inputs), True, accumulate_grad=False
                )
            for gradient, x, leaf in zip(gradients, inputs, leaves, strict=True):
                g = torch.zeros_like(x) if gradient is None else gradient
                if body is not None:
                    set_variance(g, get_variance(x).dual)
                grads.append(pair(g, leaf.spec.dual) if type(leaf) is Sharded else g)
    finally:
        DEPTH.value -= 1
    return grads


def value_and_grad(
    f: Callable[Q, R], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Q, tuple[R, Any]]:
    """A function that returns ``(f(*args), gradient)``. The gradient is a tree like ``args[argnums]``.

    Forward communicates as the collectives in ``f``, backward as their transposes.

    Inside a checked body the gradient of an invariant value is already summed over ranks. A psum of it would count it
    once more per rank. ``pcast(w, "x", to="varying")`` before the use of ``w`` gives the gradient of each rank.

    Args:
        f: A function that returns a scalar, as a plain tensor or a `Sharded`. With ``has_aux`` it returns
            ``(scalar, aux)``.
        argnums: The position of the argument to differentiate, or a tuple of positions.
        has_aux: The result is ``((scalar, aux), gradient)``.

    Raises:
        ArgumentError: a leaf has no derivative, ``argnums`` are wrong, or the result is no real scalar.
        VarianceError: a `Sharded` result is not equal on all ranks.

    >>> from fspmd import P, make_mesh, psum, shard_map
    >>> loss = shard_map(
    ...     lambda w, x: psum((w * x).sum(), "x"), mesh=make_mesh((4,), ("x",)), in_specs=(P(), P("x")), out_specs=P()
    ... )
    >>> value_and_grad(loss)(torch.tensor(2.0), torch.arange(4.0))
    (Sharded f32[] on mesh(x=4), tensor(6.))
    """

    check_options(f, argnums, "value_and_grad")

    @wraps(f)
    def with_gradient(*args: Q.args, **kwargs: Q.kwargs) -> tuple[R, Any]:
        out, aux, create, grads = _value_and_grad(f, argnums, has_aux, args, kwargs, "value_and_grad")
        value: Any = out if create else detached(out)
        if has_aux:
            value = value, aux
        return value, grads

    return with_gradient


@overload
def grad(
    f: Callable[Q, tuple[Any, Aux]], argnums: int | Sequence[int] = 0, *, has_aux: Literal[True]
) -> Callable[Q, tuple[Any, Aux]]: ...
@overload
def grad(
    f: Callable[Q, Any], argnums: int | Sequence[int] = 0, has_aux: Literal[False] = False
) -> Callable[Q, Any]: ...
def grad(f: Callable[Q, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[Q, Any]:
    """A function that returns the gradient of a scalar function; with ``has_aux`` it returns ``(gradient, aux)``.

    The gradient is a tree like ``args[argnums]``, or a tuple of trees for several ``argnums``. Each leaf has the shape,
    dtype and layout of its primal. Arguments, communication and errors are those of `value_and_grad`.

    >>> grad(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
    tensor([ 3., 12.])
    >>> grad(grad(lambda x: x**3))(torch.tensor(2.0))
    tensor(12.)
    """

    check_options(f, argnums, "grad")

    @wraps(f)
    def gradient(*args: Q.args, **kwargs: Q.kwargs) -> Any:
        _, aux, _, grads = _value_and_grad(f, argnums, has_aux, args, kwargs, "grad")
        return (grads, aux) if has_aux else grads

    return gradient


def _value_and_grad(
    f: Function, argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any], what: str
) -> tuple[Any, Any, bool, Any]:
    """The result of ``f``, its ``aux``, whether autograd must follow both further, and the gradients."""
    numbers = check_argnums(argnums, len(args), what)
    single = isinstance(argnums, int)
    leaves, unflatten = flatten_quickly(args[numbers[0]] if single else tuple([args[i] for i in numbers]))

    def labels() -> list[tuple[Any, str]]:
        names = parameter_names(f, len(args))
        return [leaf_label for i in numbers for leaf_label in labelled(args[i], names[i])]

    def run(primals: Any) -> Any:
        all_args = [*args]
        if single:
            all_args[argnums] = primals
        else:
            for i, value in zip(numbers, primals, strict=True):
                all_args[i] = value
        return f(*all_args, **kwargs)

    if transforms_active():
        check_leaves(leaves, labels, what)
        result = _vjp_by_transform(run, leaves, unflatten, has_aux, what)
        out, pull, aux = result if has_aux else (*result, None)
        scalar_of(out, what)
        return out, aux, True, pull(_like_ones(out))
    inputs, out, aux, create, saved = _trace(run, leaves, unflatten, has_aux, labels, what)
    loss = scalar_of(out, what)
    outputs = (loss,) if loss.requires_grad else ()
    grads = _autograd(outputs, (_seed(loss),), leaves, inputs, create, retain=False, saved=saved)
    return out, aux, create, unflatten(grads)


def _like_ones(out: Any) -> Any:
    """The cotangent 1 of a scalar, plain or `Sharded`, as a user would give it."""
    if isinstance(out, Sharded):
        return torch.ones((), dtype=out.dtype, device=out.device)
    return _seed(out)


def _seed(loss: Tensor) -> Tensor:
    """The cotangent 1 of a block. That of a pending sum is equal on all ranks."""
    if state.body is None:
        return torch.ones_like(loss)
    with DisableTorchFunction():
        pending = get_variance(loss).unreduced and not get_variance(loss).varying
        seed = torch.ones((), dtype=loss.dtype, device=loss.device) if pending else torch.ones_like(loss)
    return all_typed([seed], [loss], dual=True)[0]


def _vjp_by_transform(run: Function, leaves: list[Any], unflatten: Unflatten, has_aux: bool, what: str) -> Any:
    """`vjp` of a function of a tree through ``torch.func``, for use within one of its transforms."""
    trees: dict[str, Any] = {}
    blocks = [own(local_of(leaf)) for leaf in leaves]

    def flat(*xs: Tensor) -> Any:
        xs = tuple(typed(x, block) for x, block in zip(xs, blocks, strict=True))
        out = run(unflatten([like(leaf, x) for leaf, x in zip(leaves, xs, strict=True)]))
        aux = None
        if has_aux:
            out, aux = _with_aux(out)
        check_results(out, what)
        trees["out"], trees["aux"] = flatten(out), flatten(aux)
        return _unwrappable(trees["out"][0]), _unwrappable(trees["aux"][0])

    with DIFFERENTIATING, without_saved_tensor_hooks():
        traced: Any = torch.func.vjp(flat, *blocks, has_aux=True)
    values, pull_flat, aux_values = traced
    outs = rewrapped(trees["out"][0], values)
    out = trees["out"][1].unflatten(outs)

    def pull(cotangent: Any) -> Any:
        cotangents = cotangents_of(cotangent, out, outs)
        with without_saved_tensor_hooks():
            grads = pull_flat(tuple(cotangents))
        grads = all_typed(list(grads), blocks, dual=True)
        return unflatten(list(map(gradient_like, leaves, grads)))

    aux = trees["aux"][1].unflatten(rewrapped(trees["aux"][0], aux_values))
    return (out, pull, aux) if has_aux else (out, pull)


def _unwrappable(leaves: list[Any]) -> tuple[Any, ...]:
    """Leaves that a transform can unwrap: blocks, and () in place of values that are no tensors."""
    return tuple(x if is_plain(x := local_of(leaf)) else () for leaf in leaves)
