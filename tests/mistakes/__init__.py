"""Small programs with one mistake each, and the exact message a user gets for it.

Each module holds the mistakes of one kind. ``@mistake(SpecError)`` registers a program, whose docstring is the message
to the letter. It takes a `Setting`, whose meshes are simulated or, on Gloo, made of real processes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fspmd import Mesh, P, make_mesh, shard_map
from fspmd.errors import FspmdError


@dataclass(frozen=True)
class Setting:
    """Meshes of four ranks, and ``shard_map`` with or without types."""

    check_vma: bool

    @property
    def line(self) -> Mesh:
        """Four ranks along x."""
        return _mesh((4,), ("x",))

    @property
    def grid(self) -> Mesh:
        """Two by two ranks along x and y."""
        return _mesh((2, 2), ("x", "y"))

    def map(self, f: Any, in_specs: Any, out_specs: Any, *, mesh: Mesh | None = None, **options: Any) -> Any:
        """``shard_map`` on the line, or another mesh."""
        return shard_map(
            f, mesh=mesh or self.line, in_specs=in_specs, out_specs=out_specs, check_vma=self.check_vma, **options
        )

    def inside(self, f: Any, *args: Any, **options: Any) -> Any:
        """Run ``f`` in a body on the line, on blocks of 2 by 4 by default, along x in and out."""
        return self.map(f, P("x"), P("x"), **options)(*(args or (torch.arange(32.0).view(8, 4),)))


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return make_mesh(shape, names)


Program = Callable[[Setting], object]


@dataclass(frozen=True)
class Mistake:
    """A program, what it raises, and where: with and without types, on simulated ranks and on real processes."""

    name: str
    program: Program
    error: type[FspmdError]
    text: str
    settings: tuple[tuple[bool, str], ...]  # (check_vma, transport)

    def text_for(self, check_vma: bool) -> str:
        """The text; without types, a value shows none: f32[2,4], not f32[2,4]{V:x}."""
        return self.text if check_vma else re.sub(r"(?<=\])\{V:[^}]*\}", "", self.text)


MISTAKES: dict[str, Mistake] = {}
BOTH = (True, False)
TRANSPORTS = ("simulation", "gloo")


def mistake(
    error: type[FspmdError], *, checked: tuple[bool, ...] = BOTH, transports: tuple[str, ...] = TRANSPORTS
) -> Callable[[Program], Program]:
    """Register a program that must raise ``error`` with exactly the text of its docstring."""

    def register(program: Program) -> Program:
        name = f"{program.__module__.rpartition('.')[2]}.{program.__name__}"
        settings = tuple((check, transport) for check in checked for transport in transports)
        MISTAKES[name] = Mistake(name, program, error, _text(program.__doc__ or ""), settings)
        return program

    return register


def _text(doc: str) -> str:
    """A docstring without its indentation (but for list items); a continued line has one space where it was broken."""
    lines = [re.sub(r"(?<=\S) {2,}", " ", line.strip()) for line in doc.strip().splitlines()]
    return "\n".join(f"  {line}" if line.startswith("* ") else line for line in lines)
