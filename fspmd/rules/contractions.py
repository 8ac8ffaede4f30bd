"""Sums of products: matmul and its kin."""

from __future__ import annotations

from math import inf
from typing import Any, Final

import torch

from fspmd.rules.factors import Factors, Shape, match, parse
from fspmd.rules.global_call import NO_RULE, Rule, Whole
from fspmd.rules.halos import near

_MATMUL: Final = {
    (1, 1): parse("k, k ->"),
    (2, 1): parse("... m k, k -> ... m"),
    (1, 2): parse("k, ... k n -> ... n"),
    (2, 2): parse("... m k, ... k n -> ... m n"),
}


def matmul(whole: Whole) -> Factors:
    """By the number of dims of both operands."""
    a, b = (min(len(shape), 2) for shape in whole.shapes)
    return match(_MATMUL[a, b], whole.shapes) if a and b else NO_RULE


def einsum(whole: Whole) -> Factors:
    """As the equation says; an ellipsis or another form of the call has no rule."""
    if not isinstance(whole.args[0], str) or "." in whole.args[0]:
        return NO_RULE
    operands, arrow, result = whole.args[0].replace(" ", "").partition("->")
    if not arrow:  # what stands once, in the order of the alphabet
        result = "".join(sorted(c for c in operands if c != "," and operands.count(c) == 1))
    return match(parse(f"{', '.join(map(' '.join, operands.split(',')))} -> {' '.join(result)}"), whole.shapes)


def distances(whole: Whole) -> Factors:
    """Of rows; along columns a body adds up powers of differences, which are none for the greatest difference."""
    return match(_DISTANCES[whole.argument(2, "p", 2.0) == inf], whole.shapes)


_DISTANCES: Final = {False: parse("... m [k], ... n [k] -> ... m n"), True: parse("... m 1, ... n 1 -> ... m n")}


def distances_within(whole: Whole) -> Factors:
    """The same between the rows of one matrix."""
    return match(_WITHIN[whole.argument(1, "p", 2.0) == inf], whole.shapes)


_WITHIN: Final = {False: parse("1 [k] -> 1"), True: parse("1 1 -> 1")}


def convolution(whole: Whole) -> Factors:
    """aten's: x ``[n, i, ...]``, weight ``[o, i, ...]`` (``[i, o, ...]`` transposed), a bias ``[o]``.

    With groups the result's channels are cut as the operand's, between groups.
    """
    window = " ".join("1" for _ in whole.shapes[0][2:])
    kernel = "i o" if whole.args[6] else "o i"
    space = " ".join(f"[{d}]" for d in range(2, whole.ndim))
    groups = whole.args[8]
    if groups == 1:
        found = match(parse(f"n i {space}, {kernel} {window}, o -> n o {space}"), whole.shapes)
    else:
        found = match(parse(f"n c {space}, c 1 {window}, c -> n c {space}"), whole.shapes)
        channels = found.names["c"]
        found = found._replace(scaled=frozenset({channels}), pieces={channels: groups})
    return found._replace(added=frozenset({2}), near=near(found, whole, whole.shapes[1][2:], *whole.args[3:7]))


def convolution_of_blocks(shape: Shape, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """With the groups that are in the block; ``shape`` is that of the global tensor."""
    groups = args[-1] if args[-1] == 1 else args[-1] * x.shape[1] // shape[1]
    return _convolve(x, weight, bias, *args[:-1], groups)


_convolve: Any = torch.convolution


def with_added(text: str, place: int) -> Rule:
    """A contraction to whose sum the operand at ``place``, which broadcasts, is added."""
    pattern = parse(text)

    def rule(whole: Whole) -> Factors:
        shapes = list(whole.shapes)
        if place >= len(shapes):
            return match(pattern, shapes)
        bias = shapes.pop(place)
        found = match(pattern, shapes)
        result = found.results[0]
        sizes = whole.results[0][len(result) - len(bias) :]
        own = result[len(result) - len(bias) :]
        added = tuple(f if size == n else None for f, size, n in zip(own, bias, sizes, strict=True))
        operands = (*found.operands[:place], added, *found.operands[place:])
        return found._replace(operands=operands, added=frozenset({place}))

    return rule
