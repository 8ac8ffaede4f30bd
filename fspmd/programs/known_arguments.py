"""What processes must have alike when they run a record: its arguments, and the values that its function holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from fspmd.local_view.closures import held_values
from fspmd.local_view.key_orders import check_order
from fspmd.meshes.mesh import Mesh
from fspmd.programs.keys import Static
from fspmd.programs.records import Record
from fspmd.sharded import Sharded, is_sharded
from fspmd.transport import known_values
from fspmd.transport.known_values import layout_row
from fspmd.trees import flatten_in_order, flatten_values, labels, leaf_paths, order_of, parameter_names, paths_of


def tell_values(record: Record, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let `known_values.hear` hear of them, for each mesh that the record and its arguments name."""
    hear = known_values.hear
    if hear is None:
        return
    name, meshes = _name_of(function), _meshes(record, args, kwargs)
    values: list[tuple[str, Any]] = []
    layouts: list[known_values.ArgumentRow] = []
    for root, tree in _trees(function, args, kwargs):
        paths = leaf_paths(tree, root)
        if paths != [root]:
            places = {path: i for i, path in enumerate(paths)}
            order = [places[path] for path in paths_of(flatten_in_order(tree, is_sharded)[1], root)]
            values.append((f"the order of keys in {root} of {name}", zlib.crc32(repr(order).encode())))
        for path, leaf in zip(paths, flatten_values(tree)[0], strict=True):
            if type(leaf) is Sharded:
                layouts.append(layout_row(path, name, leaf.spec))
            else:
                values.append((f"{path} of {name}", leaf.value if type(leaf) is Static else leaf))
    if not any(mesh.transport == "process_group" for mesh in meshes):
        return
    values += [(f"{label}, which {name} closes over", value) for label, value in held_values(function)]
    if record.draws_seeds:
        values.append((f"the state of torch's generator before {name}", torch.get_rng_state()))
    for mesh in meshes:
        known_values.hear_layouts(mesh, name, tuple(layouts))
        for label, value in values:
            hear(mesh, label, value)


def check_orders(record: Record, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `LockstepError` if another rank has made a record of this call with keys of dicts in another order."""
    roots, trees = zip(*named, strict=True) if (named := _trees(function, args, kwargs)) else ((), ())
    treedef = flatten_values(trees)[1]
    names = labels(treedef, roots)
    check_order(_meshes(record, args, kwargs), _name_of(function), function, treedef, order_of(treedef), names)


def _name_of(function: Callable[..., Any]) -> str:
    return f"jit({getattr(function, '__name__', type(function).__name__)})"


def _meshes(record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Mesh, None]:
    """The meshes of a record and of its arguments, in one order on all ranks."""
    leaves = flatten_values((args, kwargs))[0]
    return dict.fromkeys((*(each.mesh for each in record.moved), *(x.spec.mesh for x in leaves if type(x) is Sharded)))


def _trees(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments with their names."""
    return [*zip(parameter_names(function, len(args)), args, strict=True), *sorted(kwargs.items())]
