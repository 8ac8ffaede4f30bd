"""Imports of the package point down, as the design draws them; what belongs together stands in one module."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

from fspmd.rules import Row, Rule
from fspmd.rules.table import _BY_FUNCTION, _ROWS, ROWS

PACKAGE = Path(__file__).parents[1] / "fspmd"
DESIGN = PACKAGE.parent / "docs" / "design.md"


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package a file names in imports, those inside functions too."""
    names = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= below & modules or {node.module}
    return names & modules


@functools.cache
def _graph() -> dict[str, set[str]]:
    """The modules of the package, each with those it imports."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {name: _imports(path, set(files)) for name, path in files.items()}


def _rooms() -> dict[str, set[str]]:
    """The folders and top-level files of the package, each with the others that it imports."""
    rooms: dict[str, set[str]] = {}
    for name, imported in _graph().items():
        rooms.setdefault(_room(name), set()).update(map(_room, imported))
    return {room: below - {room} for room, below in rooms.items()}


def test_imports_have_an_order() -> None:
    graph = _graph()
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, with the circle
    assert set(order) == set(graph)
    assert order[-1] == "fspmd"
    assert sum(map(len, graph.values())) > 200
    list(TopologicalSorter(_rooms()).static_order())


def _floors(picture: str) -> dict[str, int]:
    """The floor of each room, by the picture in the design: a number begins a floor, each line has a room."""
    floors: dict[str, int] = {}
    floor = 0
    for line in picture.splitlines():
        number, room = re.fullmatch(r" *(\d*) +(\S+)  +\S.*", line).groups()  # type: ignore[union-attr]
        floor = int(number or floor)
        name = room.removesuffix("/").removesuffix(".py")
        floors["fspmd" if name == "__init__" else f"fspmd.{name}"] = floor
    return floors


def _is_wrong(floors: dict[str, int], rooms: dict[str, set[str]]) -> list[str]:
    """What a picture and the imports disagree about."""
    missing = [f"{room} is not in the picture" for room in rooms.keys() - floors.keys()]
    gone = [f"{room} is in the picture alone" for room in floors.keys() - rooms.keys()]
    upward = [
        f"{room} imports {below}, which is on a higher floor"
        for room in rooms.keys() & floors.keys()
        for below in rooms[room] & floors.keys()
        if floors[below] > floors[room]
    ]
    return sorted(missing + gone + upward)


def test_the_picture_of_the_floors_is_true() -> None:
    picture = re.search(r"```text\n(.*?)```", DESIGN.read_text(), re.DOTALL)
    assert picture is not None
    floors, rooms = _floors(picture[1]), _rooms()
    assert list(floors.values()) == sorted(floors.values(), reverse=True)
    assert _is_wrong(floors, rooms) == []
    without = {room: floor for room, floor in floors.items() if room != "fspmd.rules"}
    assert _is_wrong(without, rooms) == ["fspmd.rules is not in the picture"]
    raised = floors | {"fspmd.spec": 99}
    assert "fspmd.variance imports fspmd.spec, which is on a higher floor" in _is_wrong(raised, rooms)


def _room(name: str) -> str:
    """The folder that a module is in, or the module itself."""
    return ".".join(name.split(".")[:2])


def _torch_names(path: Path) -> set[str]:
    """The dotted names of a file that begin with torch, and those it imports from torch."""
    found: set[str] = set()
    heads: dict[str, str] = {}
    for node in _nodes(path):
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
    assert len(private.pop("torch_internals.py")) > 30
    assert {path: names for path, names in private.items() if names} == {}


def test_private_names_of_torch_are_told_what_they_give() -> None:
    lines = (PACKAGE / "torch_internals.py").read_text().splitlines()
    untold = [
        line for before, line in pairwise(lines) if re.match(r"\w+(: Any)? = ", line) and not before.startswith("#: ")
    ]
    assert untold == []


def test_only_transports_know_how_a_simulation_holds_its_blocks() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if "LocalTensor" in path.read_text()}
    assert rooms == {"transport"}


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.strip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert len(homes) > 200
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


#: words that say of any value what they say of this one
EMPTY_NAMES = {"apart", "found", "held", "one"}


def test_names_of_values_say_what_they_are() -> None:
    named = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}"
        for path in PACKAGE.rglob("*.py")
        for node in _nodes(path)
        for name in (
            node.arg if isinstance(node, ast.arg) else None,
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None,
            node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else None,
        )
        if name is not None and name.strip("_") in EMPTY_NAMES
    ]
    assert named == []


def test_caches_of_functions_can_be_forgotten() -> None:
    """What `functools` keeps for good, on the level of a module, would keep meshes."""
    kept = [
        (path.relative_to(PACKAGE).as_posix(), node.name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if re.match(r"(functools\.)?(lru_)?cache\b", ast.unparse(decorator))
    ]
    assert kept == [("inspection/agreements.py", "_agreed_in")]  # a state, of one world


#: factories of rules that serve several families, so that they stand beside no body
SHARED_RULES = {
    "notation",  # the pattern itself stands in the row
    "over",  # an argument of the call names the dims that must be whole: reductions, extremes, scans, softmaxes
}
#: factories of rules for one family, which each family gives a name in its file
FACTORIES = {"keeping"}


def _is_beside(rule: Rule, home: str) -> bool:
    """Whether a rule stands in the module of its body, or serves several families."""
    factory = rule.__qualname__.partition(".")[0]
    if factory in FACTORIES:
        return any(rule is value for value in vars(sys.modules[home]).values())
    return rule.__module__ == home or factory in SHARED_RULES


def _parted(rows: Mapping[Any, Row]) -> list[Any]:
    """The rows of fspmd whose rule stands in another module than their body."""
    bodies = {name: str(row.body.body.__module__) for name, row in rows.items() if row.body is not None}
    ours = {name: home for name, home in bodies.items() if home.startswith("fspmd.rules.")}
    return [name for name, home in ours.items() if not _is_beside(rows[name].rule, home)]


def test_a_rule_stands_beside_its_body() -> None:
    rows = {**ROWS, **_BY_FUNCTION, **_ROWS}
    assert sum(row.body is not None for row in rows.values()) > 100
    assert _parted(rows) == []
    moved = {"flip": replace(ROWS["flip"], body=ROWS["cat"].body), "sum": ROWS["sum"], "cat": ROWS["cat"]}
    assert _parted(moved) == ["flip"]
