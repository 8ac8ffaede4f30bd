"""Derivatives of derivatives as chains of steps, of one function that lies on a mesh in many ways.

A step turns a scalar function of a tree into another by one transform. A chain runs the same lines three times: on
`fspmd` outside a body, on `fspmd` inside one, and on ``torch.func`` over the whole tensors, which is the judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import optree
import torch
from torch import Tensor, func

import fspmd
from fspmd import Mesh, P, Sharded, device_get, device_put, pcast, psum, shard_map

F64 = torch.float64
Scalar = Callable[[Any], Any]


@dataclass(frozen=True)
class Layout:
    """A mesh, and how the tree of parameters lies on it: rows ``[n, 3]`` cut along n, columns ``[3, m]`` along m."""

    mesh: tuple[tuple[str, int], ...]
    n: int
    m: int
    rows: P
    columns: P
    other: P  # another layout of the rows, from which a call must move them

    @property
    def specs(self) -> Any:
        return {"rows": self.rows, "rest": (self.columns, P())}

    def tree(self) -> Any:
        values = (
            torch.linspace(-1.1, 0.9, 3 * (self.n + self.m + 1), dtype=F64).sin().split([3 * self.n, 3 * self.m, 3])
        )
        return {"rows": values[0].view(-1, 3), "rest": (values[1].view(3, -1), values[2])}


LINE, GRID, THIN = (("x", 4),), (("x", 2), ("y", 3)), (("x", 1), ("y", 4))
LAYOUTS = {
    "even": Layout(LINE, 8, 4, P("x"), P(None, "x"), P()),
    "uneven": Layout(LINE, 7, 5, P("x"), P(), P(None, "x")),
    "empty": Layout(LINE, 2, 1, P("x"), P(None, "x"), P()),
    "grid": Layout(GRID, 4, 3, P("x"), P(None, "y"), P("y")),
    "uneven grid": Layout(GRID, 7, 4, P(("y", "x")), P(None, "x"), P("y", "x")),
    "axis of one": Layout(THIN, 5, 4, P("x"), P(None, "y"), P("y")),
}
#: how the leaves of the tree are given outside a body
KINDS: dict[str, Callable[[Any, Layout, Mesh], Any]] = {
    "plain": lambda tree, at, mesh: tree,
    "sharded": lambda tree, at, mesh: device_put(tree, at.specs, mesh=mesh),
    "moved": lambda tree, at, mesh: device_put(tree, {"rows": at.other, "rest": (P(), P())}, mesh=mesh),
    "mixed": lambda tree, at, mesh: {**tree, "rest": device_put(tree["rest"], at.specs["rest"], mesh=mesh)},
}


# --- the three worlds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Where a chain runs: its transforms, how a value is read as a plain tensor, and a sum over all blocks."""

    api: Any
    get: Callable[[Any], Any]
    total: Callable[[Tensor, P], Tensor]
    specs: Any

    def norm(self, tree: Any) -> Tensor:
        """One number of all leaves."""
        leaves = [self.get(x) for x in optree.tree_leaves(tree, is_leaf=_is_leaf)]
        specs = optree.tree_leaves(self.specs)
        return torch.stack(
            [self.total((x / 2).sin().sum(), spec) for x, spec in zip(leaves, specs, strict=True)]
        ).mean()

    def loss(self, tree: Any) -> Tensor:
        rows, (columns, bias) = tree["rows"], tree["rest"]
        first = self.total((rows @ bias).tanh().square().sum(), self.specs["rows"])
        second = self.total((bias @ columns).sin().sum(), self.specs["rest"][0])
        return first * second.cos() + second / 3


TORCH = SimpleNamespace(
    grad=func.grad,
    value_and_grad=lambda f: lambda p: func.grad_and_value(f)(p)[::-1],
    vjp=func.vjp,
    jvp=func.jvp,
    vmap=func.vmap,
    checkpoint=lambda f: f,
    stop_gradient=lambda tree: optree.tree_map(torch.detach, tree),
)


def _same(x: Any, spec: P | None = None) -> Any:
    return x


def _psum(x: Tensor, spec: P) -> Tensor:
    total: Tensor = psum(x, tuple(spec.mentioned)) if spec.mentioned else x
    return total


def judge(at: Layout) -> World:
    return World(TORCH, _same, _same, at.specs)


def outside(at: Layout) -> World:
    return World(fspmd, device_get, _same, at.specs)


def inside(at: Layout, alone: bool = False) -> World:
    return World(fspmd, _same, _same if alone else _psum, at.specs)


# --- steps ----------------------------------------------------------------------------------------------------------

SCALES = torch.tensor([0.5, -0.9], dtype=F64)
FACTOR = torch.tensor(0.6, dtype=F64)


def over_leaves(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Of a Sharded: on its blocks, in a map of its own."""

    def mapped(x: Any) -> Any:
        if not isinstance(x, Sharded):
            return fn(x)
        return shard_map(fn, mesh=x.spec.mesh, in_specs=x.spec.partition, out_specs=x.spec.partition)(x)

    return optree.tree_map(mapped, tree, is_leaf=_is_leaf)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Sharded)


def _scaled(tree: Any, s: Tensor) -> Any:
    return over_leaves(lambda x: x * s, tree)


def _value_and_grad(w: World, f: Scalar) -> Scalar:
    def both(p: Any) -> Tensor:
        value, gradient = w.api.value_and_grad(f)(p)
        return w.get(value).sin() + w.norm(gradient)

    return both


def _vjp_of_tree(w: World, f: Scalar) -> Scalar:
    """Cotangents that depend on the primals, one of them in the layout of a leaf."""

    def pulled(p: Any) -> Tensor:
        out, pull = w.api.vjp(lambda p: {"value": w.get(f(p)), "tree": over_leaves(torch.sin, p)}, p)
        (gradient,) = pull({"value": out["value"].cos(), "tree": over_leaves(torch.cos, out["tree"])})
        return w.norm(gradient)

    return pulled


def _vjp_twice(w: World, f: Scalar) -> Scalar:
    def pulled(p: Any) -> Tensor:
        _, pull = w.api.vjp(lambda p: w.get(f(p)), p)
        return w.norm(over_leaves(lambda x: x / 2, pull(FACTOR)[0])) + w.norm(pull(FACTOR * 3)[0])

    return pulled


def _vmap_of_trees(w: World, f: Scalar) -> Scalar:
    """The mapped dim in a place of its own in each leaf; None for a leaf that all share."""

    def mapped(p: Any) -> Tensor:
        dims = {"rows": -1, "rest": (1, None)}
        rows, columns = w.api.vmap(lambda s: _scaled((p["rows"], p["rest"][0]), s), out_dims=(-1, 1))(SCALES)
        return w.get(w.api.vmap(f, in_dims=(dims,))({"rows": rows, "rest": (columns, p["rest"][1])})).sum()

    return mapped


def _vmap_of_grad(w: World, f: Scalar) -> Scalar:
    def mapped(p: Any) -> Tensor:
        batch = w.api.vmap(lambda s: _scaled(p, s))(SCALES)
        return w.norm(w.api.vmap(w.api.grad(f))(batch))

    return mapped


STEPS: dict[str, Callable[[World, Scalar], Scalar]] = {
    "grad": lambda w, f: lambda p: w.norm(w.api.grad(f)(p)),
    "value_and_grad": _value_and_grad,
    "vjp": _vjp_of_tree,
    "vjp twice": _vjp_twice,
    "jvp": lambda w, f: lambda p: w.get(w.api.jvp(f, (p,), (over_leaves(torch.cos, p),))[1]),
    "vmap": lambda w, f: lambda p: w.get(w.api.vmap(lambda s: f(_scaled(p, s)))(SCALES)).sum(),
    "vmap of trees": _vmap_of_trees,
    "vmap of grad": _vmap_of_grad,
    "checkpoint": lambda w, f: w.api.checkpoint(f),
    "stop_gradient": lambda w, f: lambda p: w.get(f(p)) * w.norm(w.api.stop_gradient(p)),
}
Chain = tuple[str, ...]


def chains(depth: int) -> Iterator[Chain]:
    return itertools.product(STEPS, repeat=depth)


def chained(w: World, chain: Chain, f: Scalar) -> Scalar:
    """The first step is the innermost."""
    for name in chain:
        f = STEPS[name](w, f)
    return f


# --- what a chain gives ---------------------------------------------------------------------------------------------


def expected(at: Layout, chain: Chain, tree: Any) -> tuple[Tensor, Any]:
    """The value and the gradient on whole tensors."""
    w = judge(at)
    f = chained(w, chain, w.loss)
    return f(tree), func.grad(f)(tree)


def found_outside(at: Layout, mesh: Mesh, kind: str, chain: Chain, checked: bool) -> tuple[Any, Any, Any]:
    """The value, the gradient, and the tree that it must lie as."""
    mapped = shard_map(inside(at).loss, mesh=mesh, in_specs=(at.specs,), out_specs=P(), check_vma=checked)
    f = chained(outside(at), chain, mapped)
    given = KINDS[kind](at.tree(), at, mesh)
    return device_get(f(given)), fspmd.grad(f)(given), given


def found_inside(at: Layout, mesh: Mesh, chain: Chain) -> tuple[Any, Any]:
    w = inside(at)
    f = chained(w, chain, w.loss)
    mapped = shard_map(lambda p: (f(p), fspmd.grad(f)(p)), mesh=mesh, in_specs=(at.specs,), out_specs=(P(), at.specs))
    return device_get(mapped(at.tree()))


def found_alone(at: Layout, mesh: Mesh, chain: Chain, checked: bool) -> Any:
    """Each rank's own numbers, of its own blocks: a value and the norm of a gradient per rank."""
    w = inside(at, alone=True)
    f = chained(w, chain, w.loss)

    def body(p: Any) -> tuple[Tensor, Tensor]:
        if checked:
            p = optree.tree_map(lambda x, spec: _apart(x, spec, mesh), p, at.specs)
        return f(p)[None], w.norm(fspmd.grad(f)(p))[None]

    every = P(mesh.axis_names)
    mapped = shard_map(body, mesh=mesh, in_specs=(at.specs,), out_specs=every, check_vma=checked)
    return device_get(mapped(at.tree()))


def _apart(x: Tensor, spec: P, mesh: Mesh) -> Tensor:
    axes = tuple(axis for axis in mesh.axis_names if axis not in spec.mentioned)
    varying: Tensor = pcast(x, axes, to="varying") if axes else x
    return varying


def expected_alone(at: Layout, chain: Chain) -> tuple[Tensor, Tensor]:
    """A loop over mesh coordinates, on the blocks that torch.chunk cuts."""
    w, values, norms = judge(at), [], []
    f = chained(w, chain, w.loss)
    for coordinate in itertools.product(*(range(size) for _, size in at.mesh)):
        where = {name: (c, size) for (name, size), c in zip(at.mesh, coordinate, strict=True)}
        tree = optree.tree_map(lambda x, spec, where=where: block(x, spec, where), at.tree(), at.specs)
        values.append(f(tree))
        norms.append(w.norm(func.grad(f)(tree)))
    return torch.stack(values), torch.stack(norms)


def block(x: Tensor, spec: P, where: dict[str, tuple[int, int]]) -> Tensor:
    """A rank's block: chunks of chunks, empty where they run out."""
    for dim, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            index, size = where[axis]
            pieces = x.chunk(size, dim)
            x = pieces[index] if index < len(pieces) else x.narrow(dim, 0, 0)
    return x


# --- comparing ------------------------------------------------------------------------------------------------------


def leaves_of(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=_is_leaf)


def same_layout(gradient: Any, primal: Any) -> None:
    """A gradient is a tree like its primal: plain where that is plain, else a Sharded of the very same spec."""
    for g, x in zip(leaves_of(gradient), leaves_of(primal), strict=True):
        assert type(g) is type(x)
        assert not isinstance(x, Sharded) or g.spec is x.spec


def close(found: Any, wanted: Any, what: Any = None) -> None:
    """To rounding, which derivatives of derivatives magnify as they grow."""
    for a, b in zip(leaves_of(device_get(found)), leaves_of(wanted), strict=True):
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10 * scale, msg=lambda m: f"{what}: {m}")
