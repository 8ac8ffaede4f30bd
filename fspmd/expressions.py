"""The expression that a frame is at, and the source of its operands."""

from __future__ import annotations

import ast
import itertools
import linecache
from types import FrameType


def expression_at(frame: FrameType) -> str:
    """The source of the expression that a frame evaluates, on one line; "" where it is not known.

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


def operands_of(expression: str, count: int) -> list[str]:
    """The sources of the ``count`` positional arguments of the function an expression calls; [] where they are unclear.

    >>> operands_of("x @ f(w)", 2), operands_of("torch.relu(h[0])", 1), operands_of("a.b.sum(0)", 2)
    (['x', 'f(w)'], ['h[0]'], ['a.b', '0'])
    """
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return []
    found: list[ast.expr] = []
    if isinstance(tree, ast.BinOp):
        found = [tree.left, tree.right]
    elif isinstance(tree, ast.Compare):
        found = [tree.left, *tree.comparators]
    elif isinstance(tree, ast.UnaryOp):
        found = [tree.operand]
    elif isinstance(tree, ast.Subscript):
        found = [tree.value, tree.slice]
    elif isinstance(tree, ast.Call):
        found = list(tree.args)
        if len(found) == count - 1 and isinstance(tree.func, ast.Attribute):
            found.insert(0, tree.func.value)
    if len(found) != count or any(isinstance(one, ast.Starred) for one in found):
        return []
    return [ast.unparse(one) for one in found]
