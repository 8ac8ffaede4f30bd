"""`vmap` for functions of pytrees with plain and `Sharded` leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, AxisError, ShapeError
from fspmd.mesh import current_mesh
from fspmd.shard_map import shard_map
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, entry_axes
from fspmd.trees import key_path
from fspmd.variance import get_variance, set_variance

Dims = Any  # an int, None, or a pytree prefix of them


def vmap(
    f: Callable[..., Any],
    in_dims: Dims = 0,
    out_dims: Dims = 0,
    *,
    spmd_axis_name: str | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Map ``f`` over a dim of its arguments. ``in_dims`` and ``out_dims`` are pytree prefixes of ints and None.

    Dims of a `Sharded` are those of its global tensor; the mapped dim must be whole. With ``spmd_axis_name`` the
    mapped dim is sharded over that mesh axis: each rank maps over its own block, and results are sharded alike.

    >>> from fspmd import P, device_get, make_mesh, psum
    >>> f = shard_map(lambda x: psum(x, "x"), mesh=make_mesh((2,), ("x",)), in_specs=P("x"), out_specs=P())
    >>> device_get(vmap(f)(torch.arange(8).view(2, 4)))
    tensor([[ 2,  4],
            [10, 12]])
    """

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        leaves, treedef = optree.tree_flatten(args, is_leaf=_is_sharded, none_is_leaf=True)
        dims = _dims_of(in_dims, args, treedef, leaves)
        if spmd_axis_name is not None:
            return _over_axis(f, leaves, dims, treedef, out_dims, spmd_axis_name, randomness)
        return _batched(f, leaves, dims, treedef, out_dims, randomness)

    return mapped


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def _dims_of(in_dims: Dims, args: Any, treedef: Any, leaves: list[Any]) -> list[int | None]:
    prefix = tuple(in_dims) if isinstance(in_dims, list) else in_dims
    try:
        dims = optree.broadcast_prefix(prefix, optree.tree_unflatten(treedef, [0] * len(leaves)), none_is_leaf=True)
    except ValueError as error:
        raise ArgumentError(f"vmap got in_dims={in_dims!r}, which is no prefix of the arguments: {error}") from None
    result: list[int | None] = []
    for path, leaf, dim in zip(treedef.paths(), leaves, dims, strict=True):
        if dim is None:
            result.append(None)
            continue
        ndim = leaf.ndim if isinstance(leaf, (Tensor, Sharded)) else 0
        if type(dim) is not int or not -ndim <= dim < ndim:
            raise ShapeError(
                f"vmap got in_dims entry {dim!r} for args{key_path(path)}, "
                + (f"which has {ndim} dims" if ndim else "which has no dims; give None for it")
            )
        result.append(dim % ndim)
    if all(dim is None for dim in result):
        raise ArgumentError(f"vmap got in_dims={in_dims!r}: at least one argument must be mapped")
    return result


def _batched(f: Any, leaves: list[Any], dims: list[int | None], treedef: Any, out_dims: Dims, randomness: str) -> Any:
    specs: list[Any] = [
        _without(leaf.spec, dim) if isinstance(leaf, Sharded) and dim is not None else getattr(leaf, "spec", None)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    batch = next(leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)
    locals_ = [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    kept: dict[str, Any] = {}

    def flat(*xs: Any) -> tuple[Tensor, ...]:
        values = [
            Sharded(x, spec) if isinstance(leaf, Sharded) else x
            for x, spec, leaf in zip(xs, specs, leaves, strict=True)
        ]
        kept["outs"], kept["tree"] = optree.tree_flatten(f(*treedef.unflatten(values)), is_leaf=_is_sharded)
        outs = [o.local if isinstance(o, Sharded) else torch.as_tensor(o) for o in kept["outs"]]
        kept["variances"] = [get_variance(o) for o in outs]
        return tuple(outs)

    mapped = torch.func.vmap(flat, in_dims=tuple(dims), out_dims=0, randomness=randomness)(*locals_)
    wanted = optree.broadcast_prefix(out_dims, kept["tree"].unflatten([0] * len(mapped)), none_is_leaf=False)
    results = []
    for out, local, dim, variance in zip(kept["outs"], mapped, wanted, kept["variances"], strict=True):
        at = dim % local.ndim
        local = set_variance(local.movedim(0, at), variance)  # noqa: PLW2901
        results.append(Sharded(local, _with(out.spec, at, batch)) if isinstance(out, Sharded) else local)
    return kept["tree"].unflatten(results)


def _without(spec: TensorSpec, dim: int) -> TensorSpec:
    p = spec.partition
    if p[dim] is not None:
        raise ShapeError(
            f"vmap over dim {dim} of {spec!r}, which is sharded over {p[dim]!r}; pass spmd_axis_name={p[dim]!r} to map "
            "each rank's own part, or reshard the dim first"
        )
    entries = p.entries[:dim] + p.entries[dim + 1 :]
    shape = spec.shape[:dim] + spec.shape[dim + 1 :]
    return TensorSpec(spec.mesh, P(*entries, unreduced=p.unreduced, reduced=p.reduced), shape, spec.dtype)


def _with(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    p = spec.partition
    entries = (*p.entries[:dim], None, *p.entries[dim:])
    shape = (*spec.shape[:dim], size, *spec.shape[dim:])
    return TensorSpec(spec.mesh, P(*entries, unreduced=p.unreduced, reduced=p.reduced), shape, spec.dtype)


def _over_axis(
    f: Any, leaves: list[Any], dims: list[int | None], treedef: Any, out_dims: Dims, axis: str, randomness: str
) -> Any:
    mesh = next((leaf.spec.mesh for leaf in leaves if isinstance(leaf, Sharded)), None) or current_mesh()
    if mesh is None or axis not in mesh.shape:
        raise AxisError(
            f"vmap got spmd_axis_name={axis!r}, but "
            f"{'no mesh is set' if mesh is None else f'{mesh!r} has no such axis'}; set the mesh with set_mesh(mesh)"
        )
    in_specs = tuple(
        None if not isinstance(leaf, (Tensor, Sharded)) else P() if dim is None else P(*(None,) * dim, axis)
        for leaf, dim in zip(leaves, dims, strict=True)
    )
    for leaf, dim in zip(leaves, dims, strict=True):
        if isinstance(leaf, Sharded) and dim is not None and entry_axes(leaf.spec.partition[dim]) not in ((), (axis,)):
            raise ShapeError(f"vmap over dim {dim} of {leaf!r}: it is sharded over other axes than {axis!r}")
    flat_dims = list(dims)

    def body(*xs: Any) -> Any:
        return _batched(f, list(xs), flat_dims, treedef, out_dims, randomness)

    out_specs = optree.tree_map(lambda d: P(*(None,) * d, axis), out_dims)
    return shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis})(*leaves)
