"""Elementwise functions of operands that broadcast."""

from __future__ import annotations

from typing import Final

from fspmd.rules.factors import Factors, match, parse
from fspmd.rules.global_call import Rule, Whole

_PATTERNS: Final = {
    (n, results): parse(", ".join(["..."] * n) + " -> " + ", ".join(["..."] * results))
    for n in range(1, 8)
    for results in (1, 2)
}


def elementwise(whole: Whole) -> Factors:
    """The rule of an elementwise function of any number of operands."""
    if all(shape == whole.shapes[0] for shape in whole.shapes):
        every = tuple(range(whole.ndim))
        return Factors((every,) * len(whole.shapes), (every,) * len(whole.results), names=dict(enumerate(every)))
    return match(_PATTERNS[len(whole.shapes), len(whole.results)], whole.shapes)


def elementwise_over(place: int, name: str, default: int) -> Rule:
    """Return the rule of a function that is elementwise except along one dim of the result, which must be whole."""

    def rule(whole: Whole) -> Factors:
        factors = elementwise(whole)
        factor = factors.results[0][whole.argument(place, name, default)]
        return factors._replace(whole=frozenset(() if factor is None else (factor,)))

    return rule
