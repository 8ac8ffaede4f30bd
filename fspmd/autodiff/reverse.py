"""Gradients: `vjp`, `grad` and `value_and_grad`, on plain autograd; under a ``torch.func`` transform, through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from fspmd.autodiff.cotangents import cotangents_of, scalar_of
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
    detached,
    flatten,
    flatten_quickly,
    gradient_like,
    labelled,
    like,
    local_of,
    rewrapped,
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
from fspmd.wrapping import wraps

leave_to_python(uses_closed_over, "it looks at the graph that autograd has made")

_run_backward: Final[Any] = execution_engine.run_backward

Q = ParamSpec("Q")
R = TypeVar("R")
Tree = Callable[[Sequence[Any]], Any]  # makes a tree of leaves
Aux = TypeVar("Aux")


def vjp(f: Function, *primals: Any, has_aux: bool = False) -> Any:
    """``f(*primals)`` and the function that maps a cotangent of the result to cotangents of the primals.

    Cotangents are trees like the result; a `Sharded` result takes a `Sharded`, which is moved to where the result lies,
    or a plain global tensor, and a result of integers takes None. Returns
    ``(out, vjp_fn)``, or ``(out, vjp_fn, aux)``. ``vjp_fn`` may be called again.

    Raises:
        ArgumentError: primals that have no derivative.
        TreeError, VarianceError: of ``vjp_fn``, a cotangent of another tree, shape, dtype or layout, or one that varies
            where the result does not.

    >>> from fspmd import P, make_mesh, psum, shard_map
    >>> f = shard_map(lambda x: x * x, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> out, pull = vjp(f, torch.arange(4.0))
    >>> pull(torch.ones(4))
    (tensor([0., 2., 4., 6.]),)
    """
    leaves, together = flatten_quickly(primals)
    check_function(f, "vjp")

    def labels() -> list[tuple[Any, str]]:
        return labelled(primals, "primals")

    def run(primals: tuple[Any, ...]) -> Any:
        return f(*primals)

    if transforms_active():
        check_leaves(leaves, labels, "vjp")
        return _vjp_by_transform(run, leaves, together, has_aux, "vjp")
    inputs, out, aux, create, kept = _trace(run, leaves, together, has_aux, labels, "vjp")
    check_results(out, "vjp")

    def pull(cotangent: Any) -> Any:
        outputs, _ = flatten(out)
        cotangents = cotangents_of(cotangent, out, outputs, "vjp")
        used = [(o, c) for o, c in zip(map(local_of, outputs), cotangents, strict=True) if o.requires_grad]
        again = create or any(c.requires_grad for _, c in used)
        values, given = tuple(o for o, _ in used), tuple(c for _, c in used)
        return together(_autograd(values, given, leaves, inputs, again, retain=True, kept=kept))

    value = out if create else detached(out)
    return (value, pull, aux) if has_aux else (value, pull)


def _trace(
    run: Function,
    leaves: list[Any],
    together: Tree,
    has_aux: bool,
    labels: Callable[[], list[tuple[Any, str]]],
    what: str,
) -> tuple[list[Tensor], Any, Any, bool, KeptTensors | None]:
    """Run a function of a tree on fresh autograd leaves (connected to what the primals came from) and give its result.

    The fourth says whether gradients must be differentiable: inside another derivative, or where the function depends
    on other tensors that require grad. The last has what they need, as long as it lives.

    Here and in what follows little is called, and loops stand where they are used: each small function costs 1 µs, on
    the way between kernels that have driven it out of the processor's caches.
    """
    if torch.is_inference_mode_enabled():
        raise ArgumentError("gradients were asked for in torch.inference_mode(), where there are none; use no_grad")
    followed = torch.is_grad_enabled()
    try:
        inputs, values, call_with_empty_blocks = _fresh(leaves, followed)
    except (AttributeError, RuntimeError):
        check_leaves(leaves, labels, what)
        raise
    create = call_with_empty_blocks or (followed and DEPTH.value > 0)
    tree = together(values)
    kept = None
    DEPTH.value += 1
    try:
        if followed and not is_checkpointed():
            out = run(tree)
        else:
            kept = KeptTensors()
            with torch.enable_grad(), kept.saving():
                out = run(tree)
    finally:
        DEPTH.value -= 1
        let_go(inputs)
    aux = None
    if has_aux:
        out, aux = _with_aux(out)
    if not create and followed:
        outs = [out] if isinstance(out, Tensor) and not has_aux else flatten((out, aux))[0]
        create = uses_closed_over([x.local if type(x) is Sharded else x for x in outs])
    return inputs, out, aux if create or not has_aux else detached(aux), create, kept


def _with_aux(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        given = f"a tuple of {len(out)}" if isinstance(out, tuple) else show_leaf(out)
        raise TreeError(f"with has_aux=True the function returns a pair, (out, aux), but it returned {given}")
    return out


def _fresh(leaves: list[Any], followed: bool) -> tuple[list[Tensor], list[Any], bool]:
    """New leaves of autograd, or views of what it follows; the values that have them; whether any is a view."""
    inner = state.body
    fresh, values, call_with_empty_blocks = [], [], False
    with DisableTorchFunction():
        for leaf in leaves:
            whole = type(leaf) is Sharded
            x = leaf.block if whole else leaf
            if followed and x.requires_grad:
                call_with_empty_blocks = True
                y = x.view_as(x)
                ask_gradient(y)
            else:
                y = x.detach().requires_grad_()
                setattr(y, INNER, inner)
                hold_casts(y)
            if inner is not None:
                typed(y, x)
            fresh.append(y)
            values.append(y if not whole else pair(y, leaf.spec) if leaf.form is leaf.spec else alike(y, leaf))
    return fresh, values, call_with_empty_blocks


def _autograd(
    outputs: tuple[Tensor, ...],
    cotangents: tuple[Tensor, ...],
    leaves: list[Any],
    inputs: list[Tensor],
    create: bool,
    retain: bool,
    kept: KeptTensors | None,
) -> list[Any]:
    """Gradients that lie as the leaves, of what ``kept`` has, which lives until they are there."""
    inner = state.body
    grads: list[Any] = []
    DEPTH.value += 1
    try:
        with DisableTorchFunction():
            found: Sequence[Tensor | None] = [None] * len(inputs)
            if outputs:
                # torch.autograd.grad without its checks and logs, which take as long as the derivatives of several ops
                found = _run_backward(
                    outputs, cotangents, retain or create, create, tuple(inputs), True, accumulate_grad=False
                )
            for gradient, x, leaf in zip(found, inputs, leaves, strict=True):
                g = torch.zeros_like(x) if gradient is None else gradient
                if inner is not None:
                    set_variance(g, get_variance(x).dual)
                grads.append(pair(g, leaf.spec.dual) if type(leaf) is Sharded else g)
    finally:
        DEPTH.value -= 1
    return grads


def value_and_grad(
    f: Callable[Q, R], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Q, tuple[R, Any]]:
    """A function that gives ``(f(*args), gradient)``, the gradient a tree like ``args[argnums]``.

    ``f`` returns a scalar, a plain tensor or a `Sharded`; with ``has_aux`` it returns ``(scalar, aux)`` and the result
    is ``((scalar, aux), gradient)``. Forward and backward communicate as the collectives in ``f`` and their transposes.

    Inside a checked body the gradient of an invariant value is summed over ranks already; a psum of it would count it
    once more per rank. ``pcast(w, "x", to="varying")`` before gives each rank's own.

    Raises:
        ArgumentError: leaves that have no derivative, wrong ``argnums``, a result that is no real scalar.
        VarianceError: a `Sharded` result that is not equal on all ranks.

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
    """A function that gives the gradient of a scalar function; see `value_and_grad`. With ``has_aux``: (gradient, aux).

    The gradient is a tree like ``args[argnums]`` (a tuple of such for several), each leaf of its primal's shape, dtype
    and layout. Raises what `value_and_grad` raises.

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
    """The result of ``f``, what it gave beside, whether autograd follows both on, and the gradients."""
    numbers = check_argnums(argnums, len(args), what)
    one = isinstance(argnums, int)
    leaves, together = flatten_quickly(args[numbers[0]] if one else tuple([args[i] for i in numbers]))

    def labels() -> list[tuple[Any, str]]:
        names = parameter_names(f, len(args))
        return [one for i in numbers for one in labelled(args[i], names[i])]

    def run(chosen: Any) -> Any:
        full = [*args]
        if one:
            full[argnums] = chosen
        else:
            for i, value in zip(numbers, chosen, strict=True):
                full[i] = value
        return f(*full, **kwargs)

    if transforms_active():
        check_leaves(leaves, labels, what)
        result = _vjp_by_transform(run, leaves, together, has_aux, what)
        out, pull, aux = result if has_aux else (*result, None)
        scalar_of(out, what)
        return out, aux, True, pull(_like_ones(out))
    inputs, out, aux, create, kept = _trace(run, leaves, together, has_aux, labels, what)
    loss = scalar_of(out, what)
    outputs = (loss,) if loss.requires_grad else ()
    grads = _autograd(outputs, (_seed(loss),), leaves, inputs, create, retain=False, kept=kept)
    return out, aux, create, together(grads)


def _like_ones(out: Any) -> Any:
    if isinstance(out, Sharded):
        return torch.ones((), dtype=out.dtype, device=out.device)
    return gradient_like(out, _seed(out))


def _seed(loss: Tensor) -> Tensor:
    seed = torch.ones_like(loss)
    return seed if state.body is None else all_typed([seed], [loss], dual=True)[0]


def _vjp_by_transform(run: Function, leaves: list[Any], together: Tree, has_aux: bool, what: str) -> Any:
    """The same through ``torch.func``, where one of its transforms is active already."""
    kept: dict[str, Any] = {}
    blocks = [own(local_of(leaf)) for leaf in leaves]

    def flat(*xs: Tensor) -> Any:
        xs = tuple(typed(x, block) for x, block in zip(xs, blocks, strict=True))
        out = run(together([like(leaf, x) for leaf, x in zip(leaves, xs, strict=True)]))
        aux = None
        if has_aux:
            out, aux = _with_aux(out)
        check_results(out, what)
        kept["out"], kept["aux"] = flatten(out), flatten(aux)
        return _unwrappable(kept["out"][0]), _unwrappable(kept["aux"][0])

    with DIFFERENTIATING, without_saved_tensor_hooks():
        traced: Any = torch.func.vjp(flat, *blocks, has_aux=True)
    values, pull_flat, aux_values = traced
    outs = rewrapped(kept["out"][0], values)
    out = kept["out"][1].unflatten(outs)

    def pull(cotangent: Any) -> Any:
        cotangents = cotangents_of(cotangent, out, outs, "vjp")
        with without_saved_tensor_hooks():
            grads = pull_flat(tuple(cotangents))
        grads = all_typed(list(grads), blocks, dual=True)
        return together(list(map(gradient_like, leaves, grads)))

    aux = kept["aux"][1].unflatten(rewrapped(kept["aux"][0], aux_values))
    return (out, pull, aux) if has_aux else (out, pull)


def _unwrappable(leaves: list[Any]) -> tuple[Any, ...]:
    """Leaves as a transform takes them: tensors, nothing for what is none."""
    return tuple(x if is_plain(x := local_of(leaf)) else () for leaf in leaves)
