"""What processes must have alike when they run a record: its arguments, and the values that its function holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from fspmd.local_view.closures import held_values
from fspmd.meshes.mesh import Mesh
from fspmd.programs.keys import Static
from fspmd.programs.records import Record
from fspmd.sharded import Sharded
from fspmd.transport import known_values
from fspmd.trees import flatten_values, leaf_paths, parameter_names


def tell_values(record: Record, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let `known_values.hear` hear of them, for each mesh that the record and its arguments name."""
    hear = known_values.hear
    if hear is None:
        return
    name = f"jit({getattr(function, '__name__', type(function).__name__)})"
    meshes: dict[Mesh, None] = dict.fromkeys(each.mesh for each in record.moved)
    values: list[tuple[str, Any]] = []
    for root, tree in (*zip(parameter_names(function, len(args)), args, strict=True), *sorted(kwargs.items())):
        paths = leaf_paths(tree, root)
        if paths != [root]:
            places = {path: i for i, path in enumerate(paths)}
            order = [places[path] for path in leaf_paths(tree, root, in_order=True)]
            values.append((f"the order of keys in {root} of {name}", zlib.crc32(repr(order).encode())))
        for path, leaf in zip(paths, flatten_values(tree)[0], strict=True):
            if type(leaf) is Sharded:
                meshes[leaf.spec.mesh] = None
            else:
                values.append((f"{path} of {name}", leaf.value if type(leaf) is Static else leaf))
    if not any(mesh.transport == "process_group" for mesh in meshes):
        return
    values += [(f"{label}, which {name} closes over", value) for label, value in held_values(function)]
    for mesh in meshes:
        for label, value in values:
            hear(mesh, label, value)
