"""The expression that a frame evaluates, and the sources of its operands."""

from __future__ import annotations

import ast
import itertools
import linecache
from types import FrameType


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
