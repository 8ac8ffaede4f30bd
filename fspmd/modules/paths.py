"""Qualified names of leaves (``layers.0.attn.wq.weight``), globs on them, and near misses for errors."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fspmd.cache import cached
from fspmd.messages import quoted


def leaves_by_name(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """``(name, leaf, container, key)`` of each leaf of a tree of dicts, lists and tuples. Dots join the keys of a name.

    >>> [(name, leaf) for name, leaf, _, _ in leaves_by_name({"layers": [{"w": 1}], "head.w": 2})]
    [('layers.0.w', 1), ('head.w', 2)]
    """
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        name = f"{prefix}{key}"
        if isinstance(value, (Mapping, list, tuple)):
            yield from leaves_by_name(value, f"{name}.")
        else:
            yield name, value, tree, key


def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole path. ``*``, ``?`` and ``[...]`` match within one key, ``**`` any number of keys.

    >>> matches("layers.*.wq", "layers.0.wq"), matches("layers.*", "layers.0.wq"), matches("**.wq", "layers.0.wq")
    (True, False, True)
    """
    return _compiled(pattern).fullmatch(f"{path}." if path else "") is not None


@cached(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    keys = [
        r"(?:[^.]+\.)*" if key == "**" else fnmatch.translate(key).removeprefix("(?s:").removesuffix(r")\Z") + r"\."
        for key in pattern.split(".")
        if pattern
    ]
    return re.compile("".join(key.replace(".*", "[^.]*") if key[0] != "(" else key for key in keys))


def prefixes(path: str) -> Iterator[str]:
    """The paths of the subtrees that have a leaf, from the whole tree (``""``) to the leaf itself.

    >>> list(prefixes("layers.0.w"))
    ['', 'layers', 'layers.0', 'layers.0.w']
    """
    yield ""
    keys = path.split(".")
    for i in range(len(keys)):
        yield ".".join(keys[: i + 1])


def near(name: str, names: Iterable[str]) -> str:
    """The known names closest to an unknown one, as the end of a message.

    >>> near("layers.0.w", ["layers.0.w1", "head"])
    "; near it: 'layers.0.w1'"
    """
    known = list(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"; near it: {quoted(close)}"
    return f"; it has {quoted(known[:6])}{', ...' if len(known) > 6 else ''}" if known else ""
