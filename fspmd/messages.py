"""Parts that error messages share: counted nouns, mesh axes, descriptions of values, one message for many leaves."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fspmd.errors import ArgumentError, FspmdError, join_failures
from fspmd.foreign import foreign_name, loose_kind

_SHOWN = 60  # characters of a value's own text, and keys of a dict


def counted(n: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "entry"), counted(2, "entry"), counted(3, "dim")
    ('1 entry', '2 entries', '3 dims')
    """
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun[:-1]}ies" if noun.endswith("y") else f"{n} {noun}s"


def quoted(names: Iterable[object]) -> str:
    """Return names in quotes, with commas.

    >>> quoted(("x", "y"))
    "'x', 'y'"
    """
    return ", ".join(map(repr, names))


def as_axis_name(axes: Sequence[str]) -> str:
    """Return the ``axis_name`` of a collective as a user writes it.

    >>> as_axis_name(("x",)), as_axis_name(("x", "y"))
    ("'x'", "('x', 'y')")
    """
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def a(noun: str) -> str:
    """Return a noun with its article.

    >>> a("tensor"), a("int")
    ('a tensor', 'an int')
    """
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"


def described(x: Any) -> str:
    """Describe a value of a wrong kind in a few words.

    >>> described(0.1), described("sgd"), described(None), described([1, 2]), described(torch.zeros(2, 3))
    ('the float 0.1', "the string 'sgd'", 'None', 'the list [1, 2]', 'a tensor of shape (2, 3)')
    """
    if x is None:
        return "None"
    name = type(x).__name__
    if isinstance(x, torch.Tensor):
        if name != "Sharded" and (kind := loose_kind(x)):
            return f"a {kind}"
        return f"a {name if name == 'Sharded' else foreign_name(x) or 'tensor'} of shape {tuple(x.shape)}"
    if name == "ndarray":
        return f"a numpy array of shape {x.shape}"
    if isinstance(x, torch.dtype):
        return f"the dtype {x}"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
        return f"the function {x.__name__}"
    if isinstance(x, (set, frozenset)):
        return f"the {name} {{{', '.join(sorted(map(repr, x)))}}}"
    if isinstance(x, (int, float, complex, str, list, tuple, dict)):
        text = repr(x)
        if len(text) <= _SHOWN and "\n" not in text:
            return f"the {'string' if name == 'str' else name} {text}"
    return a(name)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing leaf: its message, the class of the error that it alone would raise, and what to write instead."""

    text: str
    error: type[FspmdError]
    advice: str = ""


def holds_all_ranks(label: str) -> Failure:
    """Return the failure of a leaf that holds the blocks of all simulated ranks, where a global tensor belongs."""
    text = f"{label} holds the blocks of all simulated ranks: it is x.local of a Sharded, or comes from a body"
    return Failure(text, ArgumentError, "pass the Sharded itself, or a global tensor")


def refuse(header: str, failures: Sequence[Failure]) -> NoReturn:
    """Raise one error for all failures, of the class of the first. Each advice is given once."""
    advice = "\n".join(dict.fromkeys(failure.advice for failure in failures if failure.advice))
    raise failures[0].error(join_failures(header, [failure.text for failure in failures], advice))


def one_python_value(call: str, shown: str, axes: Iterable[str], advice: str = "") -> str:
    """Return the message for a call that needs a Python value of a varying value."""
    equal = (
        "make it equal first (psum, pmax, all_gather to='invarying'), choose with torch.where, or run it in rank_map, "
        "rank by rank"
    )
    over = quoted(sorted(axes))
    return f"{call} needs one Python value for all ranks, but {shown} varies over {over}; {advice or equal}"


def written_in_place(call: str, shown: str, axes: Iterable[str], advice: str = "") -> str:
    """Return the message for a call that writes a varying value into a value that is equal on all ranks."""
    new = "compute a new tensor (x = x + y, not x += y), or write into one that varies: torch.zeros_like(y)"
    return (
        f"{call} would write a value that varies over {quoted(sorted(axes))} into {shown}, which is equal on all ranks "
        f"there; {advice or new}"
    )


WRITTEN_CAST = (
    "{} would write into the result of pcast, which shares its memory with its argument; write into a copy: "
    "pcast(...).clone()"
)


def micros(time: float) -> str:
    """Return the text of a time, to three digits or to the µs.

    >>> micros(3.14159), micros(51031.0)
    ('3.14 µs', '51,031 µs')
    """
    return f"{time:.3g} µs" if time < 999.5 else f"{time:,.0f} µs"


def style_by_rows(path: str, axis: str = "") -> str:
    """Return the argument that makes the modules at a path run on each rank's rows.

    >>> style_by_rows("layers.0.moe", "x")
    'styles={"layers.*.moe": OnBlocks(axis="x", input=None, result=None, output=None)}'
    """
    pattern = ".".join("*" if key.isdecimal() else key for key in path.split("."))
    over = f'axis="{axis}", ' if axis else ""
    return f'styles={{"{pattern}": OnBlocks({over}input=None, result=None, output=None)}}'
