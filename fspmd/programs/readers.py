"""Readers: the leaves of arguments of one structure, by straight-line Python where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final

import optree
from torch import Tensor, nn

from fspmd.sharded import Sharded
from fspmd.trees import flatten_trees

#: returns the leaves of arguments, or None if they have another structure
Reader = Callable[[tuple[Any, ...], dict[str, Any]], list[Any] | None]
#: returns some arguments themselves, each a tensor or a `Sharded`
Picker = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Any]]
_LEAVES: Final = (Sharded, Tensor, nn.Parameter)


def reader(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Reader:
    """A reader of the arguments of calls like this one, which has these leaves. It keeps none of them.

    Like arguments have equal containers with equal keys, and leaves of these types and forms. For containers other than
    tuples, lists, dicts and named tuples the reader walks through trees.
    """
    if (known := _read(args, kwargs, leaves)) is not None:
        return known[1]
    structure = flatten_trees((args, kwargs))[1]

    def by_walk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        leaves, given = flatten_trees((args, kwargs))
        return leaves if given == structure else None

    return by_walk


def picker(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], places: Sequence[int]) -> Picker | None:
    """A picker of the leaves at some places, for arguments that a `reader` of these has read.

    None for containers through which a reader walks.
    """
    if (known := _read(args, kwargs, leaves)) is None:
        return None
    return known[0].written_picker([[*known[0].leaves][place] for place in places])


def _read(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> tuple[_Writing, Reader] | None:
    """The lines that take arguments apart into these leaves, and their function; None if a walk alone does."""
    writing = _Writing()
    if writing.read_children("args", args) and writing.read_children("kwargs", kwargs):
        read = writing.written()
        values = read(args, kwargs)  # a library may have registered a named tuple as a node of its own
        if values is not None and len(values) == len(leaves) and all(map(is_, values, leaves)):
            return writing, read
    return None


class _Writing:
    """The lines of a reader, and the values of their names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.unpacked: dict[str, tuple[str, list[str]]] = {}  # by container: the line that unpacks it, and its parts
        self.scope: dict[str, Any] = {}
        self.leaves: dict[str, Any] = {}  # by name
        self.count = 0

    def named(self, value: Any) -> str:
        """A new name for a value."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def read(self, name: str, tree: Any) -> bool:
        """Take a tree apart. Returns whether that is possible."""
        kind = type(tree)
        if kind in _LEAVES:
            self.leaves[name] = tree
            return True
        if kind is not dict and kind is not list and kind is not tuple and not optree.is_namedtuple_class(kind):
            return False
        self.lines.append(f"if type({name}) is not {self.named(kind)}: return None")
        return self.read_children(name, tree)

    def read_children(self, name: str, tree: Any) -> bool:
        """Take the children of a tree apart, whose type is known."""
        children = [*(tree.values() if type(tree) is dict else tree)]
        if not children:
            self.lines.append(f"if {name}: return None")
        elif type(tree) is dict:
            self.lines.append(f"if [*{name}] != {self.named([*tree])}: return None")
        names = [f"x{self.count + i}" for i in range(len(children))]
        self.count += len(children)
        if names:
            line = f"{', '.join(names)}, = {name}{'.values()' * (type(tree) is dict)}"
            self.lines.append(line)
            self.unpacked[name] = line, names
        return all(map(self.read, names, children))

    def written(self) -> Reader:
        """The reader."""
        tests, blocks = [], []
        for name, x in self.leaves.items():
            tests.append(f"type({name}) is not {type(x).__name__}")
            if type(x) is Sharded:
                tests.append(f"{name}.form is not {self.named(x.form)}")
            blocks.append(f"{name}.block" if type(x) is Sharded else name)
        if tests:
            self.lines.append(f"if {' or '.join(tests)}: return None")
        self.lines.append(f"return [{', '.join(blocks)}]")
        lines = "\n        ".join(self.lines)  # to take apart a container of another length is a ValueError
        source = f"def read(args, kwargs):\n    try:\n        {lines}\n    except ValueError: return None"
        scope = {kind.__name__: kind for kind in _LEAVES} | self.scope
        exec(source, scope)
        read: Reader = scope["read"]
        return read

    def written_picker(self, picked: Sequence[str]) -> Picker:
        """The picker of some names."""
        lines, needed = [], {*picked}
        for name, (line, parts) in reversed(self.unpacked.items()):  # a container comes before its parts
            if not needed.isdisjoint(parts):
                needed.add(name)
                lines.append(line)
        source = "\n    ".join(["def pick(args, kwargs):", *reversed(lines), f"return [{', '.join(picked)}]"])
        scope: dict[str, Any] = {}
        exec(source, scope)
        pick: Picker = scope["pick"]
        return pick
