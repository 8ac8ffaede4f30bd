"""Rebuilders: a result made of its tensors, by straight-line Python where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, Final

import optree
from torch import Tensor

from fspmd.sharded import Sharded, lies, shell, shell_of
from fspmd.trees import filling, flatten_values

#: makes a result of its tensors, without checks
Rebuilder = Callable[[tuple[Any, ...]], Any]
_FIXED: Final = (type(None), bool, int, float, str)


def rebuilder(out: Any) -> Rebuilder:
    """A rebuilder of results with the structure of ``out``."""
    leaves, treedef = flatten_values(out)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    names = "".join(f"x{i}, " for i in range(len(tensors)))
    scope: dict[str, Any] = {"shell": shell}
    lines = ["def rebuild(values):", f"    ({names.replace('x', 'v')}) = values"]
    for i, x in enumerate(tensors):
        if type(x) is not Sharded:
            lines.append(f"    x{i} = v{i}")
            continue
        scope |= {f"a{i}": shell_of(x.spec, None if x.form is x.spec else lies(x)), f"s{i}": x.spec, f"f{i}": x.form}
        lines += [f"    x{i} = shell(*a{i})", f"    x{i}.block, x{i}.spec, x{i}.form = v{i}, s{i}, f{i}"]  # as `pair`
    result = _result(out, leaves, treedef, scope)
    if result is None:
        scope["filled"], result = filling(leaves, treedef), f"filled([{names}])"
    exec("\n".join([*lines, f"    return {result}"]), scope)
    rebuild: Rebuilder = scope["rebuild"]
    return rebuild


def _result(out: Any, leaves: list[Any], treedef: optree.PyTreeSpec, scope: dict[str, Any]) -> str | None:
    """The expression of a result with the structure of ``out``, if it has one; ``scope`` gets the values of its names.

    Its tensors have the names x0, x1, ... in the order of ``leaves``.
    """
    writing = _Expressions(scope)
    result = writing.expression(out)
    if result is None or not _are(writing.leaves, leaves):
        return None
    names = [f"x{i}" for i in range(sum(isinstance(x, Tensor) for x in leaves))]
    make = eval(f"lambda {', '.join(names)}: {result}", {**scope})
    made, structure = flatten_values(make(*(x for x in leaves if isinstance(x, Tensor))))
    return result if structure == treedef and _are(made, leaves) else None


def _are(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


class _Expressions:
    """The leaves of a tree in optree's order, and its expression."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.leaves: list[Any] = []
        self.count = 0  # of tensors

    def expression(self, tree: Any) -> str | None:
        """The expression of a tree of tuples, lists, dicts and named tuples."""
        kind = type(tree)
        if kind in _FIXED or isinstance(tree, Tensor):
            self.leaves.append(tree)
            self.count += isinstance(tree, Tensor)
            return f"x{self.count - 1}" if isinstance(tree, Tensor) else self.named(tree)
        if kind is dict:
            return self.of_dict(tree)
        if kind is not list and kind is not tuple and not optree.is_namedtuple_class(kind):
            return None
        parts = [self.expression(child) for child in tree]
        if None in parts:
            return None
        inner = "".join(f"{part}, " for part in parts)
        return f"[{inner}]" if kind is list else f"({inner})" if kind is tuple else f"{self.named(kind)}({inner})"

    def of_dict(self, tree: dict[Any, Any]) -> str | None:
        """The expression of a dict, with its keys in their order. optree takes its values by sorted keys."""
        try:
            keys = sorted(tree)
        except TypeError:
            return None
        parts = {key: self.expression(tree[key]) for key in keys}
        if None in parts.values():
            return None
        return f"{{{', '.join(f'{self.named(key)}: {parts[key]}' for key in tree)}}}"

    def named(self, value: Any) -> str:
        """A name for a value."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name
