"""Rules in factor notation, after einops and Shardy: each dim of an operand or result is a *factor* of the computation.

In ``"... m k, ... k n -> ... m n"`` the function sums over ``k``, which no result has. A dim ``[d]`` must be whole.
``...`` stands for leading dims that broadcast.

At the end are rules that serve several families, such as `elementwise`, and `over` for functions along dims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fspmd.cache import cached
from fspmd.errors import ArgumentError

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]  # the factor of each dim; None for a dim of size 1 that broadcasts
_NO: Final[Mapping[Any, int]] = MappingProxyType({})


class Factors(NamedTuple):
    """The factors of one call, whose shapes are known. Sets of ints are factors, or numbers of operands."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[int] = frozenset()  # factors summed over: if they are sharded, the results are pending sums
    whole: frozenset[int] = frozenset()  # factors that must not be sharded, except by a body
    added: frozenset[int] = frozenset()  # operands that are added to the sum of the others, such as a bias
    places: frozenset[int] = frozenset()  # operands that are indices: never a term of a sum
    #: whole factors that a body need not move, if blocks are the same shares of all their dims
    near: frozenset[int] = frozenset()
    scaled: frozenset[int] = frozenset()  # factors whose dims may differ in size, if blocks are the same shares
    pieces: Mapping[int, int] = _NO  # factor -> number of equal pieces, of which none may be cut
    names: Mapping[Any, int] = _NO  # names of factors in a sharded body; without a name it is the number
    alternatives: tuple[Factors, ...] = ()  # other readings of the same call, which may be cheaper
    multiplications: int = 1  # multiplications per combination of the factors' indices


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A parsed rule: the names of the dims, ``...`` among them. `parse` returns the same object for the same text."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    broadcasts: bool


@cached
def parse(text: str) -> Pattern:
    """Parse a rule such as ``"m k, k n -> m n"``; raises `ArgumentError` for other texts."""
    before, arrow, after = text.partition("->")
    sides = [tuple(tuple(part.split()) for part in side.split(",")) for side in (before, after)]
    if not arrow:
        raise ArgumentError(f"the rule {text!r} has no '->'; write operands, '->', results: 'm k, k n -> m n'")
    for name in (name for side in sides for names in side for name in names):
        if name not in ("...", "1") and not _NAME.fullmatch(name):
            raise ArgumentError(
                f"the rule {text!r} has {name!r}; write a name for a dim, [name] if it must be whole, 1 or ..."
            )
    known = {name.strip("[]") for names in sides[0] for name in names}
    if unknown := [name for names in sides[1] for name in names if name.strip("[]") not in {*known, "1", "..."}]:
        raise ArgumentError(
            f"the rule {text!r} has a result with {unknown[0]!r}, which no operand has; write 1 for a dim of its own"
        )
    return Pattern(text, sides[0], sides[1], any("..." in names for names in (*sides[0], *sides[1])))


_NAME: Final = re.compile(r"[\w.]+|\[[\w.]+\]")


def match(pattern: Pattern, shapes: Sequence[Shape]) -> Factors:
    """Return the factors of a call on operands of these shapes. Trailing operands may be missing."""
    if not pattern.broadcasts:  # shapes do not matter
        return _named(pattern, len(shapes))
    return _matched(pattern, shapes)


@cached
def _named(pattern: Pattern, operands: int) -> Factors:
    return _matched(pattern, [()] * operands)


def _matched(pattern: Pattern, shapes: Sequence[Shape]) -> Factors:
    numbers: dict[str | int, int] = {}
    whole: set[int] = set()

    def number(name: str | int) -> int:
        return numbers.setdefault(name, len(numbers))

    batch = max((len(s) - len(p) + 1 for p, s in zip(pattern.operands, shapes, strict=False) if "..." in p), default=0)
    sizes: list[int] = [1] * batch  # of the broadcast dims, leading first
    for names, shape in zip(pattern.operands, shapes, strict=False):
        if "..." in names:
            at = names.index("...")
            broadcast = shape[at : len(shape) - (len(names) - 1 - at)]
            for i, size in enumerate(reversed(broadcast), 1):
                sizes[-i] = size if sizes[-i] == 1 else sizes[-i]

    def dims(names: tuple[str, ...], shape: Shape | None) -> Dims:
        factors: list[int | None] = []
        for at, name in enumerate(names):
            if name == "...":
                n = batch if shape is None else len(shape) - len(names) + 1
                for i in range(batch - n, batch):
                    size = sizes[i] if shape is None else shape[at + i - batch + n]
                    factors.append(number(i) if size == sizes[i] else None)
            elif name != "1":
                factor = number(name.strip("[]"))
                if name.startswith("["):
                    whole.add(factor)
                factors.append(factor)
            else:
                factors.append(None)
        return tuple(factors)

    operands = tuple(dims(names, shape) for names, shape in zip(pattern.operands, shapes, strict=False))
    results = tuple(dims(names, None) for names in pattern.results)
    whole |= {f for dims in operands for f in dims if f is not None and dims.count(f) > 1}  # a diagonal
    kept = {factor for result in results for factor in result}
    summed = {factor for operand in operands for factor in operand if factor is not None and factor not in kept}
    return Factors(operands, results, frozenset(summed - whole), frozenset(whole), names=numbers)


class ShapedCall(NamedTuple):
    """A call on tensors of known shapes."""

    shapes: Sequence[Shape]  # of the tensors, in the order of the parameters
    args: Sequence[Any]  # with None for each tensor
    kwargs: dict[str, Any]
    results: Sequence[Shape]

    @property
    def ndim(self) -> int:
        """The number of dims of the first tensor."""
        return len(self.shapes[0])

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def dims(self, place: int, name: str, default: Any = None) -> tuple[int, ...]:
        """Return the dims of the first tensor that an argument names; None means all. ``dims`` may be several ints."""
        given = self.argument(place, name, default)
        if type(given) is bool:  # an argument of another overload
            given = None
        if isinstance(given, int):
            one_by_one = name == "dims" and len(self.args) > place
            given = [d for d in self.args[place:] if type(d) is int] if one_by_one else [given]
        if not given:
            return tuple(range(self.ndim))
        n = len(self.shapes[0]) or 1
        for d in given:
            if not -n <= d < n:
                raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {d})")
        return tuple([d % n for d in given])


Rule = Callable[[ShapedCall], Factors]

#: the answer of a rule to a call that it does not cover
NO_RULE: Final = Factors((), ())


def notation(text: str) -> Rule:
    """Return the rule of a text in factor notation."""
    pattern = parse(text)
    return lambda call: match(pattern, call.shapes)


_PATTERNS: Final = {
    (n, results): parse(", ".join(["..."] * n) + " -> " + ", ".join(["..."] * results))
    for n in range(1, 8)
    for results in (1, 2)
}


def elementwise(call: ShapedCall) -> Factors:
    """The rule of an elementwise function of any number of operands."""
    if all(shape == call.shapes[0] for shape in call.shapes):
        every = tuple(range(call.ndim))
        return Factors((every,) * len(call.shapes), (every,) * len(call.results), names=dict(enumerate(every)))
    return match(_PATTERNS[len(call.shapes), len(call.results)], call.shapes)


def over(place: int = 1, name: str = "dim", default: int | None = None, *, kept: bool = False) -> Rule:
    """Return the rule of a function along dims that must be whole.

    Further operands lie alike if they have the shape of the first, and are whole otherwise.

    Args:
        place: The place of the argument that names the dims.
        name: Its name.
        default: The dim if it is missing; None means all dims.
        kept: The result has these dims too.
    """
    return lambda call: along(call, call.dims(place, name, default), kept=kept)


def along(call: ShapedCall, dims: Sequence[int], *, kept: bool = False) -> Factors:
    """Return the factors of a function along ``dims``, which must be whole (see `over`)."""
    every: Dims = tuple(range(call.ndim))
    first = call.shapes[0]
    operands = [every if shape == first else (None,) * len(shape) for shape in call.shapes]
    results = [every if kept and shape == first else without(call, dims, shape) for shape in call.results]
    return Factors(tuple(operands), tuple(results), whole=frozenset(dims))


def without(call: ShapedCall, dims: Sequence[int], shape: Shape) -> Dims:
    """Return the dims of a result in which ``dims`` are missing, or have another size; new dims may follow."""
    if len(shape) >= call.ndim:
        return (*(None if d in dims else d for d in range(call.ndim)), *(None,) * (len(shape) - call.ndim))
    kept = [d for d in range(call.ndim) if d not in dims]
    return (*kept, *(None,) * (len(shape) - len(kept)))


def keeping(dims: Callable[[ShapedCall], Iterable[int]]) -> Rule:
    """Return the rule of a function of one operand whose result has the same dims. Those of ``dims`` must be whole."""

    def rule(call: ShapedCall) -> Factors:
        every = tuple(range(call.ndim))
        return Factors((every,), (every,), whole=frozenset(dims(call)))

    return rule


def batched(*trailing: int) -> Rule:
    """Return a rule in which ``trailing`` dims of each operand must be whole, and the leading dims broadcast.

    The last number also holds for all further operands.
    """

    def rule(call: ShapedCall) -> Factors:
        counts = [*trailing, *(trailing[-1],) * len(call.shapes)][: len(call.shapes)]
        if any(len(shape) < count for shape, count in zip(call.shapes, counts, strict=True)):
            return NO_RULE
        text = ", ".join("... " + " ".join(f"[{i}.{k}]" for k in range(n)) for i, n in enumerate(counts))
        batch = match(parse(f"{text} -> ..."), call.shapes)
        return batch._replace(results=tuple((*batch.results[0], *_whole_dims(call, i, batch)) for i in _each(call)))

    return rule


def _each(call: ShapedCall) -> range:
    return range(len(call.results))


def _whole_dims(call: ShapedCall, result: int, batch: Factors) -> Dims:
    return (None,) * (len(call.results[result]) - len(batch.results[0]))


def gathered(call: ShapedCall) -> Factors:
    """The rule of a function that takes whole operands: no dim may be sharded."""
    return Factors(
        tuple((None,) * len(shape) for shape in call.shapes), tuple((None,) * len(shape) for shape in call.results)
    )
