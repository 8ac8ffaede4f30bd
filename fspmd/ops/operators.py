"""Python's operators on tensors: the sign that a message shows, and the torch function that each is."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_BINARY: Final = (
    *(("add", "+", "add"), ("sub", "-", "sub"), ("mul", "*", "mul"), ("truediv", "/", "div"), ("pow", "**", "pow")),
    *(("floordiv", "//", "floor_divide"), ("mod", "%", "remainder"), ("matmul", "@", "matmul")),
    *(("and", "&", "bitwise_and"), ("or", "|", "bitwise_or"), ("xor", "^", "bitwise_xor")),
    *(("lshift", "<<", "bitwise_left_shift"), ("rshift", ">>", "bitwise_right_shift")),
)
#: binary operators: name without underscores -> (sign, torch function)
BINARY: Final = {
    **{name: (sign, function) for name, sign, function in _BINARY},
    **{name: (sign, name) for name, sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))},
    **{name: (sign, name) for name, sign in (("eq", "=="), ("ne", "!="))},
}
#: the same with reflected operands; some have a torch function of their own
REFLECTED: Final = {
    f"r{name}": (sign, {"sub": "rsub", "div": "rdiv", "pow": "rpow", "matmul": "", "remainder": "rmod"}.get(f, f))
    for name, sign, f in _BINARY
}
UNARY: Final = {"neg": ("-", "neg"), "pos": ("+", "pos"), "abs": ("abs()", "abs"), "invert": ("~", "bitwise_not")}
_OTHERS: Final = {
    "getitem": ("x[...]", "getitem"),
    "setitem": ("x[...] =", ""),
    "array": ("numpy", ""),
    "rdiv": ("/", "rdiv"),  # torch's own name for rtruediv
}
OPERATORS: Final = {**BINARY, **REFLECTED, **UNARY, **_OTHERS}
#: functions of torch that do the same as an operator, in less time
SOONER: Final[dict[Any, Any]] = {
    getattr(Tensor, f"__{name}__"): getattr(torch, function)
    for name, (_, function) in (BINARY | {"rsub": REFLECTED["rsub"]}).items()
    if name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "matmul", "rsub")
}
