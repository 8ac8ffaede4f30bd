"""The leaves that are differentiated, plain tensors and `Sharded`, and the layouts and types of their gradients.

Cotangents and tangents that a user gives are checked against the values they belong to, and cut into blocks.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import optree
import torch
from torch import Tensor

from fspmd.body import state
from fspmd.errors import ArgumentError, TreeError, VarianceError
from fspmd.messages import Failure, as_axis_name, counted, described, quoted, refuse
from fspmd.pairs import apply, call
from fspmd.redistribution.redistribute import redistribute, to_blocks
from fspmd.sharded import Sharded, alike, is_plain, pair
from fspmd.spec import TensorSpec, describe
from fspmd.trees import flatten_values, leaf_paths, tree_text
from fspmd.variance import Variance, get_variance, set_variance, show

_TENSORS: Final = frozenset((Sharded, Tensor))
Function = Callable[..., Any]
T = TypeVar("T")


class _Depth(threading.local):
    """The number of derivatives being taken on this thread, one within the other."""

    value = 0


DEPTH = _Depth()


class _Differentiating:
    """The context in which a derivative is taken. A class is faster than a generator."""

    def __enter__(self) -> None:
        DEPTH.value += 1

    def __exit__(self, *_: object) -> None:
        DEPTH.value -= 1


DIFFERENTIATING: Final = _Differentiating()


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the treedef. A `Sharded` is a leaf. None belongs to the tree, as in JAX, and has no derivative."""
    leaves, treedef = flatten_values(tree, none_is_leaf=False)
    return leaves, treedef


def flatten_quickly(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves, and the function that makes a tree of other leaves.

    A tensor and a dict of tensors take a fast path. The leaves of such a dict are in the order of the dict.
    """
    kind = type(tree)
    if kind is dict:
        leaves = [*tree.values()]
        if leaves and _TENSORS.issuperset(map(type, leaves)):
            return leaves, functools.partial(_dict_of, [*tree])
    elif kind in _TENSORS:
        return [tree], _FIRST
    leaves, treedef = flatten(tree)
    return leaves, treedef.unflatten


_FIRST: Final[Callable[[Sequence[Any]], Any]] = operator.itemgetter(0)


def _dict_of(names: list[Any], values: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(names, values, strict=True))


def local_of(leaf: Any) -> Any:
    """The block of a `Sharded`, or a plain value itself."""
    return leaf.local if type(leaf) is Sharded else leaf


def like(leaf: Any, value: Tensor) -> Any:
    """A value with the layout of the leaf, from its block."""
    return alike(value, leaf) if type(leaf) is Sharded else value


def gradient_like(leaf: Any, value: Tensor) -> Any:
    """A gradient of the leaf, from its block."""
    return pair(value, leaf.spec.dual) if type(leaf) is Sharded else value


def differentiable(leaf: Any) -> bool:
    """Whether a leaf is a tensor of real or complex floats."""
    x = local_of(leaf)
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def labelled(tree: Any, root: str) -> list[tuple[Any, str]]:
    """The leaves, each with its path."""
    return list(zip(flatten(tree)[0], leaf_paths(tree, root, none_is_leaf=False), strict=True))


def check_leaves(leaves: list[Any], labels: Callable[[], list[tuple[Any, str]]], what: str) -> None:
    """Check that every leaf has a derivative. One error names all that have none, by their labels."""
    if all(map(differentiable, leaves)):
        return
    failures = []
    for leaf, label in labels():
        if not differentiable(leaf):
            others = "close over the others" if what in ("vjp", "jvp") else "give the others as another argument"
            advice = f"differentiate floating-point tensors only: {others}, or convert them: x.float()"
            failures.append(Failure(f"{label} is {show_leaf(leaf)}", ArgumentError, advice))
    if failures:
        refuse(f"{what}: values that have no derivative", failures)


def check_results(out: Any, what: str) -> None:
    """Check that every leaf of a result is a tensor."""
    if all(isinstance(local_of(leaf), Tensor) for leaf in flatten(out)[0]):
        return
    paths = leaf_paths(out, "result", none_is_leaf=False)
    aux = ", or return them beside the result with has_aux=True" if what == "vjp" else ""
    advice = f"a differentiated function returns tensors: leave other values out{aux}"
    failures = [
        Failure(f"{path} is {described(leaf)}", ArgumentError, advice)
        for leaf, path in zip(flatten(out)[0], paths, strict=True)
        if not isinstance(local_of(leaf), Tensor)
    ]
    refuse(f"{what}: results that have no derivative", failures)


def check_function(f: Any, what: str) -> None:
    """Check that ``f`` can be called."""
    if not callable(f):
        call = {"vjp": "vjp(f, x)", "jvp": "jvp(f, (x,), (tangent,))"}.get(what, f"{what}(f)")
        raise ArgumentError(f"{what} takes a function, but got {described(f)}; write {call}, not {what}(f(x))")


def check_options(f: Any, argnums: Any, what: str) -> None:
    """Check the options before any call: ``f`` can be called, ``argnums`` are ints."""
    check_function(f, what)
    if isinstance(argnums, (Tensor, dict)):
        raise ArgumentError(f"{what} got {described(argnums)} for argnums; write {what}(f)(x), not {what}(f, x)")
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, (tuple, list)) or not numbers or not all(type(i) is int for i in numbers):
        raise ArgumentError(f"{what} got argnums={argnums!r}; expected an int or a tuple of ints, such as 0 or (0, 1)")


def check_argnums(argnums: Any, count: int, what: str) -> tuple[int, ...]:
    """The positions, not negative, of the arguments to differentiate; ``count`` is the number of arguments."""
    if type(argnums) is int and 0 <= argnums < count:
        return (argnums,)
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if wrong := [i for i in numbers if not -count <= i < count]:
        hint = "" if count else " (keyword arguments are not differentiated)"
        raise ArgumentError(
            f"{what} got argnums={argnums!r}, but the function was called with "
            f"{counted(count, 'positional argument')}{hint}: there is no argument {wrong[0]}"
        )
    chosen = tuple(i % count for i in numbers)
    if len(set(chosen)) < len(chosen):
        raise ArgumentError(f"{what} got argnums={argnums!r}, which names an argument twice; name each once")
    return chosen


def typed(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the type of ``like``."""
    return set_variance(x, get_variance(like))


def all_typed(values: list[Tensor], like: list[Tensor], dual: bool = False) -> list[Tensor]:
    """Values with the types of others, or with the types of their cotangents. Outside a body values have no types."""
    if state.body is None:
        return values
    types = map(get_variance, like)
    return list(map(set_variance, values, [variance.dual for variance in types] if dual else types))


def rewrapped(leaves: list[Any], values: tuple[Any, ...]) -> list[Any]:
    """The values that a transform gave for the leaves, with the leaves' layouts and types."""
    return [
        like(leaf, typed(value, local_of(leaf))) if isinstance(value, Tensor) else leaf
        for leaf, value in zip(leaves, values, strict=True)
    ]


def detached(tree: Any) -> Any:
    """The same tree of values that autograd does not follow."""
    if type(tree) is Sharded and state.body is None:  # the fast path
        return alike(tree.local.detach(), tree)
    return optree.tree_map(_detached_leaf, tree, none_is_leaf=True)


def _detached_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Sharded):
        return alike(all_typed([leaf.local.detach()], [leaf.local])[0], leaf)
    return typed(leaf.detach(), leaf) if isinstance(leaf, Tensor) else leaf


def show_leaf(x: Any) -> str:
    """A leaf in an error: the type of a tensor or a `Sharded`, else a description."""
    return show(x) if is_plain(x) else repr(x) if isinstance(x, Sharded) else described(x)


def stop_gradient(tree: T) -> T:
    """The same values, with their types and layouts, not followed by autograd. Nothing is sent.

    >>> import torch
    >>> from fspmd import grad
    >>> grad(lambda x: (stop_gradient(x) * x).sum())(torch.tensor([2.0, 3.0]))
    tensor([2., 3.])
    """
    result: T = detached(tree)
    return result


def cotangents_of(cotangent: Any, out: Any, outputs: Sequence[Any]) -> list[Tensor]:
    """The blocks of the cotangents of all leaves of a result. One error names all that do not fit."""
    cotangent = _filled(cotangent, out)
    given, tree = flatten(cotangent)
    _, out_tree = flatten(out)
    if tree != out_tree:
        raise TreeError(
            f"vjp got a cotangent with the tree {tree_text(tree)}, but the result has the tree "
            f"{tree_text(out_tree)}; give one tensor per leaf of the result"
        )
    if any(_cotangent_failure(c, o, "", "") is not None for c, o in zip(given, outputs, strict=True)):
        paths = [
            leaf_paths(tree, root, none_is_leaf=False) for tree, root in ((cotangent, "cotangent"), (out, "result"))
        ]
        rows = zip(given, outputs, *paths, strict=True)
        failures = (_cotangent_failure(*row) for row in rows)
        refuse("vjp: cotangents that do not fit", [failure for failure in failures if failure is not None])
    return [
        _block(c, o.spec.dual) if isinstance(o, Sharded) else _cast(c, get_variance(o).dual)
        for c, o in zip(given, outputs, strict=True)
    ]


def _filled(cotangent: Any, out: Any) -> Any:
    """The cotangent with zeros in place of None, which stands for results that have no derivative."""
    given, tree = optree.tree_flatten(cotangent, none_is_leaf=True)
    outs, out_tree = optree.tree_flatten(out, none_is_leaf=True)
    if tree != out_tree or not any(c is None and o is not None for c, o in zip(given, outs, strict=True)):
        return cotangent
    filled = [
        gradient_like(o, torch.zeros_like(local_of(o).detach()))
        if c is None and isinstance(local_of(o), Tensor) and not differentiable(o)
        else c
        for c, o in zip(given, outs, strict=True)
    ]
    return tree.unflatten(filled)


def _cast(cotangent: Tensor, to: Variance) -> Tensor:
    """Cast a cotangent to the type of its result's cotangents. An invariant one counts on each rank."""
    cast: Tensor = cotangent if state.tracker is None else state.tracker.cast(cotangent, to)
    return cast


def cotangent_of(cotangent: Any, out: Sharded, what: str) -> Tensor:
    """The block of the cotangent of one `Sharded`."""
    if type(cotangent) is Sharded and cotangent.spec is out.spec.dual:
        return cotangent.local
    if failure := _cotangent_failure(cotangent, out, "the gradient", "the tensor"):
        refuse(f"{what}: a gradient that does not fit", [failure])
    return _block(cotangent, out.spec.dual)


def tangents_of(tangents: Sequence[Any], primals: Sequence[Any], labels: Sequence[str]) -> list[Tensor]:
    """The blocks of the tangents of all leaves."""
    failures = [
        failure
        for t, primal, label in zip(tangents, primals, labels, strict=True)
        if (failure := _tangent_failure(t, primal, label.replace("primals", "tangents", 1), label)) is not None
    ]
    if failures:
        refuse("jvp: tangents that do not fit", failures)
    return [_block(t, getattr(primal, "spec", None)) for t, primal in zip(tangents, primals, strict=True)]


def scalar_of(out: Any, what: str) -> Tensor:
    """The block of a real scalar that is equal on all ranks. Such a value needs no cotangent.

    For a pending sum of the global view it is this rank's term, whose cotangent is that of the sum. For a reduced value
    it is an equal invariant value, whose cotangent is no pending sum.

    Raises:
        ArgumentError: the value is no real scalar.
        VarianceError: the value is reduced, in a body.
    """
    x = local_of(out)
    if isinstance(out, Sharded) and out.spec.partition.reduced:
        mesh = out.spec.mesh
        x = apply(x, call("reduced_to_invariant", mesh, mesh.ordered(out.spec.partition.reduced)))
    if not isinstance(x, Tensor) or x.ndim or not x.is_floating_point():
        given = show_leaf(out) if isinstance(x, Tensor) else described(out)
        more = "" if what == "backward()" else ", return (scalar, aux) with has_aux=True, or use vjp"
        raise ArgumentError(
            f"{what} needs a real scalar, a 0-d floating-point tensor, but the result is {given}; reduce it with "
            f".sum() or .mean(){more}"
        )
    if state.tracker is not None and (reduced := get_variance(x).reduced):
        axis = as_axis_name(sorted(reduced))
        raise VarianceError(
            f"{what} needs a scalar that is invariant or varying, but the result is {show_leaf(out)}: its cotangent "
            f"is a pending sum; return pmean(pcast(value, {axis}, to='varying'), {axis})"
        )
    return x


def _block(x: Any, spec: TensorSpec | None) -> Tensor:
    """The block of ``x`` in a layout; None for a plain tensor."""
    if spec is not None and isinstance(x, Sharded) and x.spec is not spec:
        return redistribute(x.local, x.spec, spec)
    if spec is None or isinstance(x, Sharded):
        block: Tensor = local_of(x)
        return block
    return to_blocks(x, spec)


def _cotangent_failure(c: Any, out: Any, where: str, of: str) -> Failure | None:
    if isinstance(out, Sharded):
        return _sharded_failure(c, out.spec.dual, where, of)
    return _plain_failure(c, out, get_variance(out).dual, where, of)


def _tangent_failure(t: Any, primal: Any, where: str, of: str) -> Failure | None:
    if isinstance(primal, Sharded):
        return _sharded_failure(t, primal.spec, where, of)
    return _plain_failure(t, primal, get_variance(primal), where, of)


def _sharded_failure(x: Any, spec: TensorSpec, where: str, of: str) -> Failure | None:
    if isinstance(x, Sharded):
        alike = x.spec.mesh == spec.mesh and (x.spec.shape, x.spec.dtype) == (spec.shape, spec.dtype)
        fits = x.spec is spec or alike  # another partition fits, too: `_block` moves the value
    else:
        fits = is_plain(x) and tuple(x.shape) == spec.shape and x.dtype == spec.dtype
    if fits:
        return None
    plain = describe(spec.dtype, spec.shape)
    return Failure(f"{where} is {show_leaf(x)}; {of} takes Sharded {spec!r}, or a global tensor {plain}", TreeError)


def _plain_failure(x: Any, like: Tensor, want: Variance, where: str, of: str) -> Failure | None:
    if not is_plain(x) or x.shape != like.shape or x.dtype != like.dtype:
        return Failure(f"{where} is {show_leaf(x)}; {of} takes {_text(like, want)}", TreeError)
    if state.body is None or not state.body.checked:
        return None
    have = get_variance(x)
    takes = f"{where} is {show_leaf(x)}; {of} takes {_text(like, want)}"
    if extra := have.varying - want.varying:
        advice = "psum it first, or pcast the value it belongs to with to='varying'"
        return Failure(f"{takes}, equal on all ranks of {quoted(sorted(extra))}", VarianceError, advice)
    return Failure(takes, VarianceError, "psum or pcast it first") if have.unreduced != want.unreduced else None


def _text(like: Tensor, variance: Variance) -> str:
    return describe(like.dtype, like.shape).replace(", ", ",") + (repr(variance) if repr(variance) != "{}" else "")
