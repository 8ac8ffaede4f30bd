"""The cause of a communication: the user's line, its expression, and the path of the module that runs.

Also the position of a rank in its program: the collective that runs, and the user's line. All is read off the stack, so
that it costs nothing while nobody watches.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from fspmd.flights import land
from fspmd.global_view.refusals import shown
from fspmd.messages import quoted
from fspmd.pairs import Call, StandIn
from fspmd.spec import describe
from fspmd.torch_internals import current_autograd_node
from fspmd.user_code import is_library


def expression_at(frame: FrameType) -> str:
    """The source of the expression that a frame evaluates, on one line; "" where the source is unknown.

    >>> import sys
    >>> def f(x):
    ...     return expression_at(sys._getframe(1))
    >>> 1 + f([2,
    ...        3]).upper().count("F")
    2
    """
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, last, start, end = position
    if line is None or last is None or start is None or end is None:
        return ""
    lines = [text.encode() for text in linecache.getlines(frame.f_code.co_filename)[line - 1 : last]]
    if len(lines) != last - line + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return " ".join(text.decode().strip() for text in lines)


def operands_of(expression: str, what: str, count: int) -> list[str]:
    """The sources of the ``count`` positional arguments of the function ``what``.

    [] where the expression is not a call of ``what`` with as many arguments.

    >>> operands_of("x @ f(w)", "@", 2), operands_of("relu(h[0])", "relu()", 1), operands_of("a.sum(0)", "sum()", 2)
    (['x', 'f(w)'], ['h[0]'], ['a', '0'])
    >>> operands_of("model(x)", "relu()", 1)
    []
    """
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return []
    operands: list[ast.expr] = []
    if isinstance(tree, ast.Call):
        name = tree.func.attr if isinstance(tree.func, ast.Attribute) else getattr(tree.func, "id", "")
        operands = list(tree.args) if name and what.removesuffix("()").endswith(name) else []
        if isinstance(tree.func, ast.Attribute) and what.endswith(f"{name}()") and len(operands) == count - 1:
            operands.insert(0, tree.func.value)
    elif what.endswith("()"):
        return []
    elif isinstance(tree, ast.BinOp):
        operands = [tree.left, tree.right]
    elif isinstance(tree, ast.Compare):
        operands = [tree.left, *tree.comparators]
    elif isinstance(tree, ast.UnaryOp):
        operands = [tree.operand]
    elif isinstance(tree, ast.Subscript):
        operands = [tree.value, tree.slice]
    if len(operands) != count or any(isinstance(operand, ast.Starred) for operand in operands):
        return []
    return [ast.unparse(operand) for operand in operands]


_CALL: Final = nn.Module.__call__.__code__
#: model -> module -> its path in the model; None for a module of another model
_paths: Final[WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str | None]]] = WeakKeyDictionary()


def name_modules_of(model: nn.Module) -> None:
    """Make the modules of a model known to `path_of`, from now on."""
    if model not in _paths:
        _paths[model] = WeakKeyDictionary()


def path_of(frame: FrameType | None) -> str:
    """The path of the innermost module that runs at a frame, such as ``layers.0.mlp.up``.

    It is empty for a model itself, and where no module runs. The path of a module of no known model begins at the
    outermost module that runs.
    """
    running = []
    for module in _running(frame):
        running.append(module)
        if (path := _known(module)) is not None:
            return path
    if not running:
        return ""
    name_modules_of(running[-1])
    return next((path for module in running if (path := _known(module)) is not None), "")


def _running(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose calls are on the stack, innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _known(module: nn.Module) -> str | None:
    """The longest path of a module in any known model. A part of a model may have been called as a model, too."""
    models = [model for ref in _paths.keyrefs() if (model := ref()) is not None]
    return max((path for model in models if (path := _path(model, module)) is not None), key=len, default=None)


def _path(model: nn.Module, module: nn.Module) -> str | None:
    """The path of a module in a model, which may have got other modules since the last call."""
    paths = _paths[model]
    if module not in paths or ((path := paths[module]) is not None and not _is_path_of(model, path, module)):
        paths.update({part: path for path, part in model.named_modules()})
        if module not in paths or not _is_path_of(model, paths[module] or "", module):
            paths[module] = None
    return paths[module]


def _is_path_of(model: nn.Module, path: str, module: nn.Module) -> bool:
    try:
        return model.get_submodule(path) is module
    except AttributeError:
        return False


_HERE: Final = str(Path(__file__).parents[1])
_RECORDERS: Final = f"{_HERE}/programs/"  # runs functions of the user
_DISPATCH: Final = f"{_HERE}/global_view/dispatch.py", "dispatch"
#: the functions, by file and name, whose argument ``func`` is a torch function
_OPS: Final = frozenset((_DISPATCH, (f"{_HERE}/local_view/tracking.py", "__torch_function__")))
#: the function that lays out values for a style
_STYLES: Final = f"{_HERE}/modules/plans.py", "arranged_by"
#: the function that runs torch functions whose results depend on values, on global tensors
_GATHERED: Final = f"{_HERE}/global_view/unruled.py", "gathered"
#: file -> the public name, where the outermost of our functions has another name
_NAMES: Final = {
    "entry.py": "shard_map entry",
    "exit.py": "shard_map exit",
    "shard_map.py": "shard_map",
    "parallel.py": "parallelize",
    "hooks.py": "autograd.Function.apply",
    "transforms.py": "torch.func",
}
#: the same for the entries and exits of a body, by path
_EDGES: Final = {f"{_HERE}/local_view/{name}": _NAMES[name] for name in ("entry.py", "exit.py")}


@dataclass(frozen=True, slots=True)
class Cause:
    """The torch function or the function of fspmd that the user called, and the user's line.

    Attributes:
        what: The name of the function.
        written: The user asked for the communication itself, and not for a computation that implies it.
        why: The reason why no plan moves less; empty where there is none.
        module: The path of the module that ran, ``layers.0.mlp.up``; empty for the model itself, and where no module
            ran.
    """

    what: str
    written: bool
    file: str = ""
    line: int = 0
    why: str = ""
    module: str = field(default="", compare=False)

    @property
    def by(self) -> str:
        """``layers.0.mlp.up: linear()``: the module, and the function that it called."""
        named = not self.module or self.what.startswith(f"{self.module}: ")  # the cause is a style of the module
        return self.what if named else f"{self.module}: {self.what}"

    @property
    def where(self) -> str:
        """``train.py:12``."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "?"

    @property
    def text(self) -> str:
        """The user's line."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True, slots=True)
class Trace:
    """The frames between a communication and the user's line that caused it."""

    dispatches: tuple[FrameType, ...]  # frames of `dispatch`, innermost first
    user: FrameType | None
    cause: Cause


def trace(frame: FrameType | None = None) -> Trace:
    """Find the cause of the call that runs: the nearest frame that is neither ours nor torch's, and the function that
    it called. ``frame``: the innermost frame of another thread."""
    dispatches: list[FrameType] = []
    op: FrameType | None = None
    outermost: FrameType | None = None
    style = edge = why = ""  # the style that lays out values; the name of a body's entries or exits
    innermost = frame = frame or sys._getframe(1)
    while frame is not None and is_library[path := frame.f_code.co_filename]:
        if path.startswith(_HERE) and not path.startswith(_RECORDERS):
            outermost = frame
            place = path, frame.f_code.co_name
            if place in _OPS:
                op = frame
                if place == _DISPATCH:
                    dispatches.append(frame)
            elif place == _STYLES:
                style = f"{frame.f_locals['self'].path or 'the module'}: {type(frame.f_locals['style']).__name__}"
            elif place == _GATHERED:
                why = "its result, or the shape of it, depends on values"
            elif path in _EDGES:
                edge = _EDGES[path]
        frame = frame.f_back
    what = shown(op.f_locals["func"]) if op is not None else style or _name(outermost, edge)
    written = op is None and what != _NAMES["hooks.py"]
    line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
    return Trace(tuple(dispatches), frame, Cause(what, written, *line, why, path_of(innermost)))


def _name(outermost: FrameType | None, edge: str) -> str:
    """The public name of the outermost of our functions; ``edge`` is that of the entries or exits that run."""
    if outermost is None or current_autograd_node() is not None:
        return "backward()"
    file = Path(outermost.f_code.co_filename).name
    if file == "shard_map.py" and edge:
        return edge
    return _NAMES.get(file) or outermost.f_code.co_qualname.partition(".<locals>")[0]


#: the name under which a replay has the causes of its steps, by the lines of its code
CAUSES: Final = "fspmd_causes"


def collective_text(kind: str, mesh: Any, axes: tuple[str, ...], dtype: Any, shape: Any) -> str:
    """``psum over 'x' of mesh(x=4), f32[4]``."""
    return f"{kind} over {quoted(axes or mesh.axis_names)} of {mesh!r}, {describe(dtype, shape)}"


class Rendezvous:
    """A wait for other ranks that is no collective. Functions that wait for it name it ``agreement``."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self.what, self.ranks = what, ranks


def position(innermost: FrameType | None = None) -> tuple[str, tuple[int, ...]]:
    """The text of the collective that this thread runs, and the ranks of its group; () if it is of no mesh.

    ``innermost``: the innermost frame of another thread, about which to tell.
    """
    frame: FrameType | None = innermost or sys._getframe(1)
    call: Call | None = None
    replayed: Cause | None = None
    forward, operand = "", None
    while frame is not None and is_library[frame.f_code.co_filename]:
        named = frame.f_locals
        caller = named["flight"].trip.call if frame.f_code is land.__code__ else named.get("call", named.get("self"))
        if isinstance(caller, StandIn) and not forward:
            line = getattr(caller.by, "where", "")  # a recorder is at no line
            forward = line and f", for {line}"
        if call is None and isinstance(caller, Call):
            call, operand = caller, named.get("x")
        replayed = replayed or frame.f_globals.get(CAUSES, {}).get(frame.f_lineno)
        if isinstance(agreement := named.get("agreement"), Rendezvous):
            return f"{agreement.what} ({trace(innermost).cause.where})", agreement.ranks
        frame = frame.f_back
    cause = replayed or trace(innermost).cause
    backward = current_autograd_node() is not None
    here = f" ({'backward, ' * backward}{cause.where}{forward if backward else ''})"
    if call is None:
        return f"{cause.what}{here}", ()
    axes = call.axes or call.mesh.axis_names
    if operand is None:
        return f"{call.pair.name} over {quoted(axes)} of {call.mesh!r}{here}", call.mesh.group_ranks(axes)
    text = collective_text(call.pair.name, call.mesh, call.axes, operand.dtype, tuple(operand.shape))
    return text + here, call.mesh.group_ranks(axes)
