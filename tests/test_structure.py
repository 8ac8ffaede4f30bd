"""Imports of the package point down, as the design draws them; what belongs together stands in one module."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.dlpack

from fspmd import torch_internals
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


#: private names of Python, each with its reason
OF_PYTHON = {
    "_getframe": "the frames of the stack, to find the user's line",
    "_current_frames": "the frames of other threads",
    "_replace": "a documented method of `NamedTuple`",
    "_asdict": "a documented method of `NamedTuple`",
    "_fields": "a documented attribute of `NamedTuple`",
    "_lru_cache_wrapper": "the class of caches",
    "_local": "pickles of paths name `pathlib._local`",
}

#: private names of other libraries, each with its reason
OF_LIBRARIES = {
    "_keys_to_ignore_on_load_unexpected": "an attribute of models of transformers",
    "_keys_to_ignore_on_save": "an attribute of models of transformers",
}

#: public functions of torch, by the names that they have in the tables of rules
PUBLIC_FUNCTIONS = {"_threshold": F.threshold, "_to_dlpack": torch.utils.dlpack.to_dlpack}

#: folders that know torch's functions by their names
BY_NAME = {"fspmd.rules", "fspmd.ops", "fspmd.global_view"}

PRIVATE = re.compile(r"(?<![\w:])_[a-zA-Z]\w*")


def _is_name_of_function(name: str) -> bool:
    """Whether aten functions have the name, or begin with it. It is in torch's schemas, and no name of Python."""
    return name in PUBLIC_FUNCTIONS or any(f"::{name}" in op for op in torch._C._dispatch_get_all_op_names())


def _defined(path: Path) -> set[str]:
    """The names that a module and its classes define, and those of attributes that methods set."""
    nodes = _nodes(path)
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_set(node)}
    for line in (line for node in nodes if isinstance(node, ast.Module | ast.ClassDef) for line in node.body):
        if isinstance(line, ast.ClassDef | ast.FunctionDef):
            found.add(line.name)
        elif isinstance(line, ast.Assign | ast.AnnAssign):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            found |= names
            if "__slots__" in names and line.value is not None:
                found |= {str(part.value) for part in ast.walk(line.value) if isinstance(part, ast.Constant)}
    return found


def _is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def _defined_for(name: str) -> set[str]:
    """The names that a module of the package defines, and the modules that it imports, whose classes it may extend."""
    modules = {name, *_graph()[name]} - {"fspmd.torch_internals"}
    return {found for module in modules for found in _defined(_path(module))}


def _path(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _texts(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """The strings that are no docstrings, and the names in imports and of keyword arguments, each with its line."""
    docs = {node.value for node in nodes if isinstance(node, ast.Expr)}
    rests = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node.lineno, node.value if node not in rests else f"x{node.value}"  # the rest of a word
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            yield node.lineno, "_some_name" if node.values[0].value == "_" else ""
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fspmd"):
            yield node.lineno, " ".join([node.module or "", *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            yield node.lineno, " ".join(alias.name for alias in node.names)
        elif isinstance(node, ast.keyword):
            yield node.lineno, node.arg or ""


def _private_names(nodes: list[ast.AST], folder: str, defined: Collection[str] = ()) -> set[tuple[int, str]]:
    """The private names in a module of a folder that are not ``defined`` and not Python's, each with its line."""
    own = {*OF_PYTHON, *OF_LIBRARIES, *defined}
    reads = [(node.lineno, node.attr) for node in nodes if isinstance(node, ast.Attribute)]
    found = {(line, name) for line, name in reads if PRIVATE.fullmatch(name) and name not in own}
    for line, text in _texts(nodes):
        names = {name for name in PRIVATE.findall(text) if not name.startswith("_fspmd_")} - own
        found |= {(line, name) for name in names if folder not in BY_NAME or not _is_name_of_function(name)}
    return found


def test_private_names_of_torch_stand_in_one_module() -> None:
    found = {
        (module, line, name)
        for module in _graph()
        if module != "fspmd.torch_internals"
        for line, name in _private_names(_nodes(_path(module)), _room(module), _defined_for(module))
    }
    read = {name for names in torch_internals.ATTRIBUTES.values() for name in names}
    assert sorted(place for place in found if place[2] not in read) == []
    assert read == {name for _, _, name in found}  # all others are gone
    assert all(function.__name__ == name for name, function in PUBLIC_FUNCTIONS.items())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._inductor", "_inductor"),
        ("from torch import _foreach_mul as mul", "_foreach_mul"),
        ("from torch._functorch import vmap", "_functorch"),
        ("import torch as t; t._C", "_C"),
        ("vmap_module._remove_batch_dim(x)", "_remove_batch_dim"),
        ("x._spec", "_spec"),
        ("self._allow_unsafe_data_ptr_access", "_allow_unsafe_data_ptr_access"),
        ("aten._grouped_mm.default", "_grouped_mm"),
        ("getattr(optim, '_cuda_graph_capture_health_check')", "_cuda_graph_capture_health_check"),
        ("modules['torch._dynamo.eval_frame']", "_dynamo"),
        ("lines.append(f'{x}._typed_storage()')", "_typed_storage"),
        ("getattr(torch, f'_{name}')", "_some_name"),
        ("getattr(node, f'_saved_{name}')", "_saved_"),
        ("DeviceMesh(ranks, _init_backend=False)", "_init_backend"),
    ],
)
def test_private_names_of_torch_are_found_in_all_spellings(source: str, name: str) -> None:
    assert [found for _, found in _private_names(list(ast.walk(ast.parse(source))), "fspmd.programs")] == [name]


def test_private_names_of_others_are_none_of_torch() -> None:
    source = "sys._getframe(), options._replace(dim=1), f'{what}_argnums={x}', 'aten::_softmax', '_fspmd_variance'"
    assert _private_names(list(ast.walk(ast.parse(source))), "fspmd.programs") == set()
    table = list(ast.walk(ast.parse("rows = {'softmax _softmax _foreach_': 1}")))
    assert _private_names(table, "fspmd.rules") == set()
    assert _private_names(table, "fspmd.programs") == {(1, "_softmax"), (1, "_foreach_")}


def test_private_names_of_torch_are_told_what_they_give() -> None:
    path = PACKAGE / "torch_internals.py"
    lines = path.read_text().splitlines()
    untold = [
        line for before, line in pairwise(lines) if re.match(r"\w+(: .*|, \w+)? = ", line) and before[:3] != "#: "
    ]
    functions = [node for node in _nodes(path) if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    untold += [function.name for function in functions if not ast.get_docstring(function)]
    assert untold == []
    assert len(functions) > 10


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
