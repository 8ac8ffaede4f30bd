"""Pytrees of arguments: flattening, prefixes of specs, and key paths for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree

from fspmd.errors import TreeError, join_failures
from fspmd.spec import P

Paths = Sequence[tuple[Any, ...]]


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and treedef; None is a leaf."""
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, treedef


def key_path(path: tuple[Any, ...]) -> str:
    """``[0]['w']`` for the path ``(0, 'w')``."""
    return "".join(f"[{entry!r}]" for entry in path)


def broadcast_prefix(prefix: Any, tree: Any, what: str, where: str, header: str) -> list[Any]:
    """The leaf of ``prefix`` that stands over each leaf of ``tree``.

    Raises `TreeError` naming every place where the trees part; ``what`` names the prefix, ``where`` the tree.
    """
    if isinstance(prefix, P) or prefix is None:
        return [prefix] * optree.tree_structure(tree, none_is_leaf=True).num_leaves
    result: list[Any] = []
    failures: list[str] = []
    _walk(prefix, tree, (), result, failures, what, where)
    if failures:
        raise TreeError(
            join_failures(header, failures, f"write one spec per leaf, or one spec for a whole subtree of {where}")
        )
    return result


def _walk(
    prefix: Any, tree: Any, path: tuple[Any, ...], result: list[Any], failures: list[str], what: str, where: str
) -> None:
    if isinstance(prefix, P) or prefix is None:
        result.extend([prefix] * optree.tree_structure(tree, none_is_leaf=True).num_leaves)
        return
    at = key_path(path)
    one, two = optree.tree_structure(prefix, none_is_leaf=True), optree.tree_structure(tree, none_is_leaf=True)
    if one.is_leaf():
        failures.append(
            f"{what}{at} is {prefix!r} of type {type(prefix).__name__}; expected a P, or None for a static value"
        )
        return
    if two.is_leaf():
        failures.append(f"{what}{at} is a {type(prefix).__name__}, but {where}{at} is a leaf: {_brief(tree)}")
        return
    mine, theirs = _children(prefix), _children(tree)
    if one.type is not two.type and not {one.type, two.type} <= {tuple, list}:
        failures.append(f"{what}{at} is a {type(prefix).__name__}, but {where}{at} is a {type(tree).__name__}")
        return
    if list(mine) != list(theirs):
        if isinstance(prefix, dict):
            missing, extra = [k for k in theirs if k not in mine], [k for k in mine if k not in theirs]
            difference = [f"no spec for the keys {missing}"] if missing else []
            difference += [f"specs for the keys {extra}, which are not there"] if extra else []
            failures.append(f"{what}{at} has {' and '.join(difference)}")
        else:
            failures.append(f"{what}{at} has {len(mine)} entries, but {where}{at} has {len(theirs)}")
        return
    for key, child in mine.items():
        _walk(child, theirs[key], (*path, key), result, failures, what, where)


def _children(node: Any) -> dict[Any, Any]:
    children, _, entries, _ = optree.tree_flatten_one_level(node, none_is_leaf=True)
    return dict(zip(entries, children, strict=True))


def _brief(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__} of shape {tuple(shape)}" if shape is not None else repr(x)[:60]
