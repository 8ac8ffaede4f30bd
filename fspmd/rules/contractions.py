"""Contractions, such as einsum, which sum products; and functions of trailing dims, batched over the leading ones."""

from __future__ import annotations

from math import inf
from typing import Any, Final

import torch

from fspmd.rules.factors import NO_RULE, Dims, Factors, Rule, Shape, ShapedCall, match, parse
from fspmd.rules.halos import near


def einsum(call: ShapedCall) -> Factors:
    """The rule of ``einsum``, given by its equation. An ellipsis, or another form of the call, has no rule."""
    if not isinstance(call.args[0], str) or "." in call.args[0]:
        return NO_RULE
    operands, arrow, result = call.args[0].replace(" ", "").partition("->")
    if not arrow:  # the result has the letters that stand once, in alphabetical order
        result = "".join(sorted(c for c in operands if c != "," and operands.count(c) == 1))
    return match(parse(f"{', '.join(map(' '.join, operands.split(',')))} -> {' '.join(result)}"), call.shapes)


def distances(call: ShapedCall) -> Factors:
    """The rule of ``cdist``. Columns may be sharded by a body that sums powers of differences, if ``p`` is finite."""
    return match(_DISTANCES[call.argument(2, "p", 2.0) == inf], call.shapes)


_DISTANCES: Final = {False: parse("... m [k], ... n [k] -> ... m n"), True: parse("... m 1, ... n 1 -> ... m n")}


def distances_within(call: ShapedCall) -> Factors:
    """The rule of ``pdist``, the distances between the rows of one matrix."""
    return match(_WITHIN[call.argument(1, "p", 2.0) == inf], call.shapes)


_WITHIN: Final = {False: parse("1 [k] -> 1"), True: parse("1 1 -> 1")}


def convolution(call: ShapedCall) -> Factors:
    """The rule of aten's convolution of x ``[n, i, ...]``, weight ``[o, i, ...]`` and bias ``[o]``.

    The weight of a transposed convolution is ``[i, o, ...]``. With several groups, channels of operand and result are
    cut alike, between groups.
    """
    window = " ".join("1" for _ in call.shapes[0][2:])
    kernel = "i o" if call.args[6] else "o i"
    space = " ".join(f"[{d}]" for d in range(2, call.ndim))
    groups = call.args[8]
    if groups == 1:
        factors = match(parse(f"n i {space}, {kernel} {window}, o -> n o {space}"), call.shapes)
    else:
        factors = match(parse(f"n c {space}, c 1 {window}, c -> n c {space}"), call.shapes)
        channels = factors.names["c"]
        factors = factors._replace(scaled=frozenset({channels}), pieces={channels: groups})
    return factors._replace(added=frozenset({2}), near=near(factors, call, call.shapes[1][2:], *call.args[3:7]))


def convolution_of_blocks(shape: Shape, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """Run the convolution with the groups of the block; ``shape`` is the global shape of x."""
    groups = args[-1] if args[-1] == 1 else args[-1] * x.shape[1] // shape[1]
    return _convolve(x, weight, bias, *args[:-1], groups)


_convolve: Any = torch.convolution


def with_added(text: str, place: int) -> Rule:
    """Return the rule of a contraction plus the operand at ``place``, which broadcasts."""
    pattern = parse(text)

    def rule(call: ShapedCall) -> Factors:
        shapes = list(call.shapes)
        if place >= len(shapes):
            return match(pattern, shapes)
        bias = shapes.pop(place)
        factors = match(pattern, shapes)
        result = factors.results[0]
        sizes = call.results[0][len(result) - len(bias) :]
        trailing = result[len(result) - len(bias) :]
        added = tuple(f if size == n else None for f, size, n in zip(trailing, bias, sizes, strict=True))
        operands = (*factors.operands[:place], added, *factors.operands[place:])
        return factors._replace(operands=operands, added=frozenset({place}))

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


def solved(call: ShapedCall) -> Factors:
    """The rule of ``linalg.solve``: the columns of the right-hand side may be sharded (rows if ``left=False``)."""
    left, (a, b) = call.argument(2, "left", True), call.shapes
    vectors = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    out, given = ("... 1", "... [p]") if vectors else ("... 1 k", "... [p] k") if left else ("... k 1", "... k [p]")
    return match(parse(f"... [n] [m], {given} -> {out}, ... 1 1, ... 1, ..."), call.shapes)


def _each(call: ShapedCall) -> range:
    return range(len(call.results))


def _whole_dims(call: ShapedCall, result: int, batch: Factors) -> Dims:
    return (None,) * (len(call.results[result]) - len(batch.results[0]))


def gathered(call: ShapedCall) -> Factors:
    """The rule of a function that takes whole operands: no dim may be sharded."""
    return Factors(
        tuple((None,) * len(shape) for shape in call.shapes), tuple((None,) * len(shape) for shape in call.results)
    )
