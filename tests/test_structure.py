"""Imports of the package point down."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
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
