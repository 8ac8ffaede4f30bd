"""Derivatives of functions of pytrees with plain and `Sharded` leaves, outside and inside a body.

Reverse mode runs on plain autograd, at its speed; under a ``torch.func`` transform it runs through ``torch.func``.
Gradients have the layout of their primals.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import state
from fspmd.errors import ArgumentError, TreeError, VarianceError
from fspmd.redistribute import to_blocks
from fspmd.sharded import Sharded, dual
from fspmd.trees import key_path
from fspmd.variance import get_variance, set_variance, show

_transforms_active = torch._C._are_functorch_transforms_active
Function = Callable[..., Any]


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextmanager
def _differentiating() -> Any:
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


# --- leaves ---------------------------------------------------------------------------------------------------------


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def _flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(tree, is_leaf=_is_sharded, none_is_leaf=True)  # type: ignore[return-value]


def _local(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def _like(leaf: Any, value: Tensor) -> Any:
    return Sharded(value, leaf.spec) if isinstance(leaf, Sharded) else value


def _gradient_like(leaf: Any, value: Tensor) -> Any:
    return Sharded(value, dual(leaf.spec)) if isinstance(leaf, Sharded) else value


def _differentiable(leaf: Any) -> bool:
    x = _local(leaf)
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _check_leaf(leaf: Any, path: tuple[Any, ...], what: str, argument: str) -> None:
    if not _differentiable(leaf):
        x = _local(leaf)
        given = f"a {x.dtype} tensor" if isinstance(x, Tensor) else f"a {type(leaf).__name__}"
        raise ArgumentError(
            f"{what}: {argument}{key_path(path)} is {given}, which has no derivative; differentiate with respect to "
            "floating-point tensors only (see argnums), or convert it: x.to(torch.float32)"
        )


def _argnums(argnums: Any, count: int, what: str) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, (tuple, list)) or not numbers or not all(type(i) is int for i in numbers):
        raise ArgumentError(f"{what} got argnums={argnums!r}; expected an int or a tuple of ints, such as 0 or (0, 1)")
    if wrong := [i for i in numbers if not -count <= i < count]:
        raise ArgumentError(
            f"{what} got argnums={argnums!r}, but the function was called with {count} positional arguments; "
            f"{wrong} is out of range"
        )
    chosen = tuple(i % count for i in numbers)
    if len(set(chosen)) < len(chosen):
        raise ArgumentError(f"{what} got argnums={argnums!r}, which names an argument twice")
    return chosen


# --- reverse mode ---------------------------------------------------------------------------------------------------


def vjp(f: Function, *primals: Any, has_aux: bool = False) -> Any:
    """``f(*primals)`` and the function that maps a cotangent of the result to cotangents of the primals.

    Cotangents are trees like the result; a `Sharded` result takes a `Sharded` or a plain global tensor. Returns
    ``(out, vjp_fn)``, or ``(out, vjp_fn, aux)``.

    >>> from fspmd import P, make_mesh, psum, shard_map
    >>> f = shard_map(lambda x: x * x, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> out, pull = vjp(f, torch.arange(4.0))
    >>> pull(torch.ones(4))
    (tensor([0., 2., 4., 6.]),)
    """
    leaves, treedef = _flatten(primals)
    for path, leaf in zip(treedef.paths(), leaves, strict=True):
        _check_leaf(leaf, path[1:], "vjp", f"primals[{path[0]}]")
    if _transforms_active():
        return _vjp_by_transform(f, leaves, treedef, has_aux)
    inputs, out, aux, create = _trace(f, leaves, treedef, has_aux)

    def pull(cotangent: Any) -> Any:
        outputs, out_tree = _flatten(out)
        cotangents = _cotangents(cotangent, outputs, out_tree)
        used = [(o, c) for o, c in zip(map(_local, outputs), cotangents, strict=True) if o.requires_grad]
        grads = _autograd(used, inputs, create or any(c.requires_grad for _, c in used), retain=True)
        return treedef.unflatten([_gradient_like(leaf, g) for leaf, g in zip(leaves, grads, strict=True)])

    return (out, pull, aux) if has_aux else (out, pull)


def _trace(f: Function, leaves: list[Any], treedef: Any, has_aux: bool) -> tuple[list[Tensor], Any, Any, bool]:
    """Run ``f`` on fresh autograd leaves (connected to what the primals came from) and give its result."""
    create = torch.is_grad_enabled() and (_depth.value > 0 or any(_local(leaf).requires_grad for leaf in leaves))
    with torch.enable_grad(), _differentiating():
        inputs = [_fresh(_local(leaf), create) for leaf in leaves]
        args = treedef.unflatten([_like(leaf, x) for leaf, x in zip(leaves, inputs, strict=True)])
        out = f(*args)
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TreeError(
                f"with has_aux=True the function must return (out, aux), but it returned {type(out).__name__}"
            )
        out, aux = out
        aux = _detached(aux) if not create else aux
    return inputs, out, aux, create


def _detached(tree: Any) -> Any:
    return optree.tree_map(
        lambda x: _like(x, _typed(_local(x).detach(), _local(x))) if isinstance(_local(x), Tensor) else x,
        tree,
        is_leaf=_is_sharded,
        none_is_leaf=True,
    )


def _typed(x: Tensor, like: Tensor) -> Tensor:
    return set_variance(x, get_variance(like))


def _fresh(x: Tensor, connected: bool) -> Tensor:
    with torch._C.DisableTorchFunction():
        y = x.view_as(x) if connected and x.requires_grad else x.detach().requires_grad_()
    return _typed(y, x)


def _cotangents(cotangent: Any, outputs: list[Any], out_tree: Any) -> list[Tensor]:
    given, tree = _flatten(cotangent)
    if tree != out_tree:
        raise TreeError(
            f"vjp got a cotangent of the tree {tree}, but the function returned {out_tree}; give one of that tree"
        )
    return [_cotangent(c, out, path) for c, out, path in zip(given, outputs, out_tree.paths(), strict=True)]


def _cotangent(c: Any, out: Any, path: tuple[Any, ...]) -> Tensor:
    where = f"the cotangent{key_path(path)}"
    if isinstance(out, Sharded):
        spec = dual(out.spec)
        if isinstance(c, Sharded):
            if c.spec is not spec:
                raise TreeError(f"vjp: {where} is {c!r}, but the result is {out!r}, whose cotangent lies as {spec!r}")
            return c.local
        if not isinstance(c, Tensor) or tuple(c.shape) != out.shape or c.dtype != out.dtype:
            raise TreeError(f"vjp: {where} is {_show(c)}, but the result is {out!r}; give a tensor of its global shape")
        return to_blocks(c, spec)
    if not isinstance(c, Tensor) or c.shape != out.shape or c.dtype != out.dtype:
        raise TreeError(
            f"vjp: {where} is {_show(c)}, but the result is {_show(out)}; give a tensor of that shape and dtype"
        )
    if state.body is not None and state.body.checked:
        have, want = get_variance(c), get_variance(out).dual
        if have.varying - want.varying or have.unreduced != want.unreduced:
            raise VarianceError(
                f"vjp: {where} is {show(c)}, but the result is {show(out)}; psum or pcast the cotangent"
            )
    return c


def _show(x: Any) -> str:
    return show(x) if isinstance(x, Tensor) else repr(x) if isinstance(x, Sharded) else f"a {type(x).__name__}"


def _autograd(used: list[tuple[Tensor, Tensor]], inputs: list[Tensor], create: bool, retain: bool) -> list[Tensor]:
    if not used:
        return [_typed(torch.zeros_like(x), x) for x in inputs]
    with torch._C.DisableTorchFunction(), _differentiating():
        found = torch.autograd.grad(
            [o for o, _ in used],
            inputs,
            [c for _, c in used],
            create_graph=create,
            retain_graph=create or retain,
            allow_unused=True,
        )
        grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
    return [set_variance(g, get_variance(x).dual) for g, x in zip(grads, inputs, strict=True)]


def value_and_grad(f: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
    """A function that gives ``(f(*args), gradient)``, the gradient a tree like ``args[argnums]``.

    ``f`` returns a scalar, a plain tensor or a `Sharded`; with ``has_aux`` it returns ``(scalar, aux)`` and the result
    is ``((scalar, aux), gradient)``. Inside a checked body the gradient of an invariant value is summed over ranks.

    >>> from fspmd import P, make_mesh, psum, shard_map
    >>> loss = shard_map(
    ...     lambda w, x: psum((w * x).sum(), "x"), mesh=make_mesh((4,), ("x",)), in_specs=(P(), P("x")), out_specs=P()
    ... )
    >>> value_and_grad(loss)(torch.tensor(2.0), torch.arange(4.0))
    (Sharded f32[] on mesh(x=4), tensor(6.))
    """

    @functools.wraps(f)
    def with_gradient(*args: Any, **kwargs: Any) -> Any:
        return _value_and_grad(f, argnums, has_aux, args, kwargs)

    return with_gradient


def grad(f: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
    """A function that gives the gradient of a scalar function; see `value_and_grad`. With ``has_aux``: (gradient, aux).

    >>> grad(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
    tensor([ 3., 12.])
    >>> grad(grad(lambda x: x**3))(torch.tensor(2.0))
    tensor(12.)
    """

    @functools.wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = _value_and_grad(f, argnums, has_aux, args, kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def _value_and_grad(f: Function, argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    numbers = _argnums(argnums, len(args), "grad")
    chosen = tuple(args[i] for i in numbers)
    leaves, treedef = _flatten(chosen)
    for path, leaf in zip(treedef.paths(), leaves, strict=True):
        _check_leaf(leaf, path[1:], "grad", f"argument {numbers[path[0]]}")

    def of_chosen(*values: Any) -> Any:
        full = list(args)
        for i, value in zip(numbers, values, strict=True):
            full[i] = value
        return f(*full, **kwargs)

    if _transforms_active():
        result = _vjp_by_transform(of_chosen, leaves, treedef, has_aux)
        out, pull, aux = result if has_aux else (*result, None)
        _scalar(out)
        grads = pull(_like_ones(out))
    else:
        inputs, out, aux, create = _trace(of_chosen, leaves, treedef, has_aux)
        loss = _scalar(out)
        used = [(loss, _typed(torch.ones_like(loss), loss))] if loss.requires_grad else []
        found = _autograd(used, inputs, create, retain=False)
        grads = treedef.unflatten([_gradient_like(leaf, g) for leaf, g in zip(leaves, found, strict=True)])
        out = out if create else _detached(out)
    value = (out, aux) if has_aux else out
    return value, (grads[0] if isinstance(argnums, int) else grads)


def _like_ones(out: Any) -> Any:
    return _like(out, _typed(torch.ones_like(_local(out)), _local(out)))


def _scalar(out: Any) -> Tensor:
    x = _local(out)
    if not isinstance(x, Tensor) or x.ndim or not _differentiable(x):
        raise ArgumentError(
            f"grad needs a function with a real scalar result, but it returned {_show(out)}; reduce it to a 0-d "
            "floating-point tensor (.sum(), .mean()), return (scalar, aux) with has_aux=True, or use vjp"
        )
    if isinstance(out, Sharded) and out.spec.partition.mentioned:
        raise VarianceError(f"grad needs a scalar equal on all ranks, but the function returned {out!r}; psum it first")
    return x


def _vjp_by_transform(f: Function, leaves: list[Any], treedef: Any, has_aux: bool) -> Any:
    """The same through ``torch.func``, where one of its transforms is active already."""
    kept: dict[str, Any] = {}

    def flat(*xs: Tensor) -> tuple[Tensor, ...]:
        xs = tuple(_typed(x, _local(leaf)) for x, leaf in zip(xs, leaves, strict=True))
        out = f(*treedef.unflatten([_like(leaf, x) for leaf, x in zip(leaves, xs, strict=True)]))
        if has_aux:
            out, kept["aux"] = out
        kept["outs"], kept["tree"] = _flatten(out)
        kept["variances"] = [get_variance(_local(o)) for o in kept["outs"]]
        return tuple(_local(o) for o in kept["outs"])

    with _differentiating():
        values, pull_flat = torch.func.vjp(flat, *(_local(leaf) for leaf in leaves))
    for value, variance in zip(values, kept["variances"], strict=True):
        set_variance(value, variance)
    outs = [_like(o, value) for o, value in zip(kept["outs"], values, strict=True)]
    out = kept["tree"].unflatten(outs)

    def pull(cotangent: Any) -> Any:
        cotangents = _cotangents(cotangent, outs, kept["tree"])
        grads = pull_flat(tuple(cotangents))
        typed = [set_variance(g, get_variance(_local(leaf)).dual) for g, leaf in zip(grads, leaves, strict=True)]
        return treedef.unflatten([_gradient_like(leaf, g) for leaf, g in zip(leaves, typed, strict=True)])

    return (out, pull, kept["aux"]) if has_aux else (out, pull)


# --- forward mode ---------------------------------------------------------------------------------------------------


def jvp(f: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``f(*primals)`` and its derivative along ``tangents``, a tree like ``primals``; both have the result's layout.

    >>> from fspmd import P, device_get, make_mesh, psum, shard_map
    >>> f = shard_map(lambda x: psum(x * x, "x"), mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P())
    >>> out, tangent = jvp(f, (torch.arange(4.0),), (torch.ones(4),))
    >>> device_get(tangent)
    tensor([12.])
    """
    primals, tangents = tuple(primals), tuple(tangents)
    leaves, treedef = _flatten(primals)
    given, tree = _flatten(tangents)
    if tree != treedef:
        raise TreeError(
            f"jvp got tangents of the tree {tree}, but the primals have {treedef}; give tangents of that tree"
        )
    locals_: list[Tensor] = []
    for path, leaf, t in zip(treedef.paths(), leaves, given, strict=True):
        _check_leaf(leaf, path[1:], "jvp", f"primals[{path[0]}]")
        locals_.append(_tangent(leaf, t, path))
    kept: dict[str, Any] = {}

    def flat(*xs: Tensor) -> tuple[Tensor, ...]:
        xs = tuple(_typed(x, _local(leaf)) for x, leaf in zip(xs, leaves, strict=True))
        kept["outs"], kept["tree"] = _flatten(
            f(*treedef.unflatten([_like(o, x) for o, x in zip(leaves, xs, strict=True)]))
        )
        kept["variances"] = [get_variance(_local(o)) for o in kept["outs"]]
        return tuple(_local(o) for o in kept["outs"])

    with _differentiating():
        values, derivatives = torch.func.jvp(flat, tuple(_local(leaf) for leaf in leaves), tuple(locals_))
    sides = []
    for side in (values, derivatives):
        for value, variance in zip(side, kept["variances"], strict=True):
            set_variance(value, variance)
        sides.append(kept["tree"].unflatten([_like(o, v) for o, v in zip(kept["outs"], side, strict=True)]))
    return sides[0], sides[1]


def _tangent(leaf: Any, t: Any, path: tuple[Any, ...]) -> Tensor:
    where = f"jvp: the tangent{key_path(path)}"
    if isinstance(leaf, Sharded):
        if isinstance(t, Sharded) and t.spec is leaf.spec:
            return t.local
        if isinstance(t, Tensor) and tuple(t.shape) == leaf.shape and t.dtype == leaf.dtype:
            return to_blocks(t, leaf.spec)
        raise TreeError(
            f"{where} is {_show(t)}, but the primal is {leaf!r}; give a Sharded of that spec or a global tensor"
        )
    if not isinstance(t, Tensor) or t.shape != leaf.shape or t.dtype != leaf.dtype:
        raise TreeError(
            f"{where} is {_show(t)}, but the primal is {_show(leaf)}; give a tensor of that shape and dtype"
        )
    if (
        state.body is not None
        and state.body.checked
        and (extra := get_variance(t).varying - get_variance(leaf).varying)
    ):
        raise VarianceError(
            f"{where} is {show(t)}, but the primal is {show(leaf)}: a tangent cannot vary over more axes than its primal "
            f"({', '.join(sorted(extra))}); pcast the primal to varying first"
        )
    return t


# --- other transforms -----------------------------------------------------------------------------------------------


def stop_gradient(tree: Any) -> Any:
    """The same values, not followed by autograd.

    >>> grad(lambda x: (stop_gradient(x) * x).sum())(torch.tensor([2.0, 3.0]))
    tensor([2., 3.])
    """
    return _detached(tree)


def checkpoint(f: Function) -> Function:
    """``f``, recomputed in backward instead of keeping its intermediates, collectives included.

    >>> def layer(w, x):
    ...     return torch.tanh(x @ w).sum()
    >>> grad(checkpoint(layer))(torch.zeros(2, 1), torch.ones(3, 2))
    tensor([[3.],
            [3.]])
    """

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if _transforms_active() or not torch.is_grad_enabled():
            return f(*args, **kwargs)
        from fspmd.recompute import run_checkpointed

        return run_checkpointed(f, args, kwargs)

    return recomputed
