"""Pytree nodes of other libraries: a class that its library registered with torch's pytrees is one here, too.

TensorDict is. optree, which walks our trees, does not know of torch's registry.
"""

from __future__ import annotations

from typing import Any, Final

import optree

from fspmd.torch_internals import torch_trees

_NODES: Final[dict[type, Any]] = torch_trees.SUPPORTED_NODES
_CONTAINERS: Final = (dict, list, tuple)  # of Python; whether a class made of one is a leaf optree has its own say
_seen = 0


def adopt() -> None:
    """Register with optree what has been registered with torch since the last time. Asked of every tree, so quick."""
    if len(_NODES) != _seen:
        _adopt()


def _adopt() -> None:
    global _seen
    for kind, node in list(_NODES.items()):
        own = kind.__module__.split(".")[0]
        if own in ("torch", "builtins", "collections", "types") or issubclass(kind, _CONTAINERS):
            continue
        if optree.register_pytree_node.get(kind) is None:
            _register(kind, node)
    _seen = len(_NODES)


def _register(kind: Any, node: Any) -> None:
    keyed = torch_trees.SUPPORTED_NODES[kind].flatten_with_keys_fn

    def flatten(x: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(x)
        entries = None if keyed is None else tuple(map(_key, keyed(x)[0]))
        return tuple(children), _Context(kind, context), entries

    def unflatten(context: _Context, children: Any) -> Any:
        value = context.value
        given = dict(value) if type(value) is dict else value  # the function may write into it
        return node.unflatten_fn(list(children), given)

    optree.register_pytree_node(
        kind, flatten, unflatten, path_entry_type=optree.GetItemEntry, namespace=optree.registry.__GLOBAL_NAMESPACE
    )


def _key(entry: Any) -> Any:
    """What stands in the brackets, or how torch would number it."""
    key, _ = entry
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key)


class _Context:
    """What torch keeps of a node besides its children, which need have no hash."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: type, value: Any) -> None:
        self.kind, self.value = kind, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.kind is other.kind and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return repr(self.value)
