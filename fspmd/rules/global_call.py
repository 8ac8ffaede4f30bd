"""A call on global tensors as rules see it: the shapes of its tensors, and its other arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fspmd.rules.factors import Factors, Shape, match, parse


class Whole(NamedTuple):
    """One call on global tensors."""

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


Rule = Callable[[Whole], Factors]

#: the answer of a rule to a call that it does not cover
NO_RULE: Final = Factors((), ())


def notation(text: str) -> Rule:
    """Return the rule of a text in factor notation."""
    pattern = parse(text)
    return lambda whole: match(pattern, whole.shapes)
