"""Sites: the lines at which a rank passes global values and layouts, and what it has passed there, as numbers.

A rank may make a call alone that does not communicate: it prints, for example. So calls are not numbered, as
collectives are. Ranks compare what they have passed at the same line, where both have come to it equally often.
The numbers are the same on all processes, though the memory and the hashes of Python are not.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.digests import digests, of_bytes
from fspmd.errors import join_failures
from fspmd.global_view.refusals import shown
from fspmd.inspection.histories import DIGEST, SHOWN, VALUES, key_of
from fspmd.meshes.mesh import Mesh
from fspmd.ops.signatures import parameters
from fspmd.ops.traits import name_of
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, describe
from fspmd.torch_internals import transforms_active
from fspmd.transport.known_values import ArgumentRow, layout_row
from fspmd.user_code import UserLine

#: types whose texts tell their values
_TOLD: Final = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, bytearray, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, P, TensorSpec, Mesh, Sharded),
)
_DEPTH: Final = 24  # of containers in containers


def number_of(value: Any) -> int:
    """A 64-bit number for a value. Other values have other numbers, unless only their types are known.

    Tensors count by their bits, and containers and objects by their parts. A function counts by its line. Of an object
    that is equal to itself alone, or that cannot be pickled, only the type counts.

    >>> number_of({"b": 1.0, "a": {"x", "y"}}) == number_of({"b": 1.0, "a": {"y", "x"}})
    True
    >>> number_of(1) == number_of(True), number_of((1, 2)) == number_of([1, 2]), number_of(0.0) == number_of(-0.0)
    (False, False, False)
    """
    return of_bytes(_value_text(value, _DEPTH).encode())


def is_told(x: Tensor) -> bool:
    """Whether the bits of a tensor count: it is a plain one, and has any."""
    return type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta and x.layout is torch.strided


def _value_text(value: Any, depth: int) -> str:
    kind: Any = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _TOLD:
        return f"{name} {value!r}"
    if isinstance(value, Tensor):
        return f"{name} {describe(value.dtype, value.shape)} {digests([value])[0] if is_told(value) else ''}"
    if isinstance(value, Enum):
        return f"{name} {value.name}"
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if not depth:
        return name
    if isinstance(value, torch.nn.Module):
        return _joined(name, [part for named in value.named_parameters() for part in named], depth)
    if isinstance(value, (set, frozenset)):
        return f"{name}({', '.join(sorted(_value_text(part, depth - 1) for part in value))})"
    if isinstance(value, dict):
        return _joined(name, [part for item in value.items() for part in item], depth)
    if isinstance(value, (tuple, list)):
        return _joined(name, value, depth)
    if kind.__eq__ is object.__eq__:
        return name
    try:
        made_of = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled
        return name
    if isinstance(made_of, str):
        return f"{name} {made_of}"
    return _joined(name, [list(part) if hasattr(part, "__next__") else part for part in made_of], depth)


def _joined(name: str, parts: Iterable[Any], depth: int) -> str:
    return f"{name}({', '.join(_value_text(part, depth - 1) for part in parts)})"


_NUMBERS: Final = frozenset((bool, int, float, complex))
_number_of: Final = cached(typed=True)(number_of)


def arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call, and in the place of a list its entries."""
    given: list[Any] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if type(x) is list or type(x) is tuple:
            given += x
        else:
            given.append(x)
    return given


def numbers_of(given: Sequence[Any]) -> tuple[int, ...]:
    """Return a number for each argument. Processes that have equal arguments have equal numbers."""
    plain = [x for x in given if isinstance(x, Tensor) and type(x) is not Sharded]
    if not plain:
        return tuple([_number(x) for x in given])
    told = [] if transforms_active() else [x for x in plain if is_told(x)]
    number_of = dict(zip(map(id, told), digests(told), strict=True))
    known = {id(x): number_of.get(id(x), 0) for x in plain}
    return tuple([known[id(x)] if id(x) in known else _number(x) for x in given])


def _number(x: Any) -> int:
    """Return the number of an argument that is no plain tensor."""
    kind = type(x)
    if kind is Sharded:
        return _number_of(x.spec)
    if kind in _NUMBERS and x:  # 0.0 == -0.0
        return _number_of(x)
    return number_of(x)


class _Shown(NamedTuple):
    """What is shown of a tensor that is no `Sharded`."""

    dtype: torch.dtype
    shape: torch.Size


def kept_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: tuple[int, ...]
) -> Callable[[], list[ArgumentRow]]:
    """Return a function that tells the arguments of a call in words. It keeps no tensor."""
    return partial(_rows, func, [_without_tensors(x) for x in (*args, *kwargs.values())], [*kwargs], numbers)


def _rows(func: Any, args: list[Any], names: list[str], numbers: tuple[int, ...]) -> list[ArgumentRow]:
    to = shown(func)
    return [
        layout_row(label, to, x)
        if type(x) is TensorSpec
        else ArgumentRow(f"{label} of {to}", _argument_text(x, number), False)
        for label, x, number in zip(_labels(func, args, names), arguments(args, {}), numbers, strict=True)
    ]


def _without_tensors(x: Any) -> Any:
    """Return what is shown of an argument: of a `Sharded` its layout, and of a list that of its entries."""
    kind = type(x)
    if kind is Sharded:
        return x.spec
    if kind in _NUMBERS:
        return x
    if kind is list or kind is tuple:
        return [_without_tensors(each) for each in x]
    return _Shown(x.dtype, x.shape) if isinstance(x, Tensor) else None


def _labels(func: Any, args: list[Any], names: list[str]) -> Iterator[str]:
    known = parameters(func)
    places = [known[i] if i < len(known) else f"argument {i + 1}" for i in range(len(args) - len(names))]
    for name, x in zip((*places, *names), args, strict=True):
        if type(x) is list or type(x) is tuple:
            yield from (f"{name}[{i}]" for i in range(len(x)))
        else:
            yield name


def _argument_text(x: Any, number: int) -> str:
    if type(x) in _NUMBERS:
        return f", {x!r}"
    kind = f", {describe(*x)}" if type(x) is _Shown else ""
    return f"{kind}, {DIGEST} {number & (1 << 64) - 1:016x}"


#: of each site: how often this rank has come, and the hash of what it has passed
Table = dict[str, list[int]]

#: tells what was passed
Rows = Callable[[], Iterable[ArgumentRow]]

_KEPT: Final = 64  # the last changes of a site
_LEAVES: Final = 4  # that a line of a message shows
_LAYOUTS: Final = "the layout of a value must not depend on the rank: give all ranks the same shapes, dtypes and specs"


class Change(NamedTuple):
    """A change in the values that a rank passes at a site, and the count from which it holds.

    ``rows``: the values, or a function that returns them.
    """

    came: int
    number: int
    rows: Any


class CallSite:
    """A line that passes values, under one line that calls its function, and what it has passed."""

    __slots__ = ("changes", "count", "hash", "key", "number", "ranks", "where")

    def __init__(self, key: str, ranks: tuple[int, ...], where: str) -> None:
        self.key, self.ranks, self.where = key, ranks, where
        self.count = self.hash = 0
        self.number: int | None = None  # of what was passed last
        self.changes: deque[Change] = deque(maxlen=_KEPT)

    def come(self, number: int, rows: Callable[[], Rows]) -> None:
        """Come to the line once more, and pass what has this number."""
        self.count += 1
        if number != self.number:
            self.number, self.hash = number, hash((self.hash, self.count, number))
            self.changes.append(Change(self.count, number, rows()))

    def text(self) -> str:
        """What other ranks read of it."""
        return json.dumps([self.where, [(came, number, [*rows()]) for came, number, rows in list(self.changes)]])


class CallSites:
    """All sites of a rank."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[Mesh, Any, int], CallSite] = {}
        self._by_ranks: dict[tuple[int, ...], dict[str, CallSite]] = {}

    def come(self, mesh: Mesh, to: Any, place: tuple[UserLine, int], number: int, rows: Callable[[], Rows]) -> None:
        """Come to a line that passes values on a mesh to a torch function, or to the function with a name."""
        line, number_of_place = place
        site = self._by_place.get((mesh, to, number_of_place))
        if site is None:
            ranks, name = tuple(sorted(mesh.ranks)), to if isinstance(to, str) else name_of(to)
            key = f"{of_bytes(f'{key_of(mesh, ())} {name} {number_of_place}'.encode()):x}"
            site = self._by_ranks.setdefault(ranks, {}).setdefault(key, CallSite(key, ranks, line.where))
            self._by_place[mesh, to, number_of_place] = site
        site.come(number, rows)

    def find(self, key: str) -> CallSite | None:
        """The site with a key."""
        return next((sites[key] for sites in list(self._by_ranks.values()) if key in sites), None)

    def ranks(self) -> set[int]:
        """All ranks that may have one of the sites."""
        return set().union(*self._by_ranks)

    def table(self, ranks: Iterable[int] = ()) -> Table:
        """The sites of meshes that have all of these ranks."""
        wanted = {*ranks}
        every = [sites for of_mesh, sites in list(self._by_ranks.items()) if wanted.issubset(of_mesh)]
        return {key: [site.count, site.hash] for sites in every for key, site in list(sites.items())}


def parted(mine: Table, theirs: Table) -> str:
    """The key of the first site at which two ranks have passed other values; "" if there is none."""
    for key, (count, number) in mine.items():
        if key in theirs and theirs[key][0] == count and theirs[key][1] != number:
            return key
    return ""


def site_text(told: dict[int, str]) -> str:
    """The error for ranks that have passed other values at a site, by what each tells of it ("": nothing)."""
    sites = {rank: json.loads(text) for rank, text in told.items() if text}
    changes = {rank: [Change(*each) for each in rows] for rank, (_, rows) in sites.items()}
    oldest = max(each[0].came for each in changes.values())
    comings = sorted({change.came for each in changes.values() for change in each if change.came >= oldest})
    passed = [
        {rank: [change for change in each if change.came <= came][-1] for rank, each in changes.items()}
        for came in comings
    ]
    first = next((now for now in passed if len({change.number for change in now.values()}) > 1), passed[-1])
    rows = {rank: {label: (text, is_layout) for label, text, is_layout in now.rows} for rank, now in first.items()}
    every = dict.fromkeys(label for each in rows.values() for label in each)
    others = [label for label in every if len({each.get(label) for each in rows.values()}) > 1]
    lines = []
    for rank in list(told)[:SHOWN]:
        if rank not in rows:
            lines.append(f"rank {rank}: has told of no such call")
            continue
        texts = [label + rows[rank][label][0] for label in others if label in rows[rank]]
        shown = "; ".join(texts[:_LEAVES]) or f"other values before its last {_KEPT}"
        more = f"; and {len(texts) - _LEAVES} more" if len(texts) > _LEAVES else ""
        lines.append(f"rank {rank}: {shown}{more} ({sites[rank][0]})")
    if any(each[label][1] for each in rows.values() for label in others if label in each):
        return join_failures("ranks pass values of other layouts:", lines, _LAYOUTS)
    return join_failures("ranks pass other values where all must pass one global value:", lines, VALUES)
