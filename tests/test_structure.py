"""Imports of the package point down, and one module has the private names of torch."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fspmd"


def _imports(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package a file names in imports, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= below & modules or {node.module}
    return names & modules


def test_imports_have_an_order() -> None:
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {name: _imports(path, set(files)) for name, path in files.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, with the circle
    assert set(order) == set(files)
    assert order[-1] == "fspmd"
    assert sum(map(len, graph.values())) > 200
    rooms: dict[str, set[str]] = {}
    for name, imported in graph.items():
        if name != "fspmd":
            rooms.setdefault(_room(name), set()).update(map(_room, imported))
    list(TopologicalSorter({room: below - {room} for room, below in rooms.items()}).static_order())


def _room(name: str) -> str:
    """The folder that a module is in, or the module itself."""
    return ".".join(name.split(".")[:2])


def _torch_names(path: Path) -> set[str]:
    """The dotted names of a file that begin with torch, and those it imports from torch."""
    found: set[str] = set()
    heads: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            heads |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            heads |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", name := ast.unparse(node)):
            head, _, rest = name.partition(".")
            found.add(f"{heads.get(head, head)}.{rest}")
    return {name for name in found if name.startswith("torch.")}


def test_private_names_of_torch_stand_in_one_module() -> None:
    private = {
        str(path.relative_to(PACKAGE)): {name for name in _torch_names(path) if re.search(r"\._[a-zA-Z]", name)}
        for path in PACKAGE.rglob("*.py")
    }
    assert len(private.pop("torch_internals.py")) > 50
    assert {path: names for path, names in private.items() if names} == {}


def test_private_names_of_torch_are_told_what_they_give() -> None:
    lines = (PACKAGE / "torch_internals.py").read_text().splitlines()
    untold = [
        line for before, line in pairwise(lines) if re.match(r"\w+(: Any)? = ", line) and not before.startswith("#: ")
    ]
    assert untold == []
