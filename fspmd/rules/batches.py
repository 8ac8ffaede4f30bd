"""Functions of the trailing dims of their operands, batched over the leading ones: of matrices, of images."""

from __future__ import annotations

from fspmd.rules.factors import NO_RULE, Dims, Factors, Rule, Whole, match, parse


def batched(*trailing: int) -> Rule:
    """Return a rule in which ``trailing`` dims of each operand must be whole, and the leading dims broadcast.

    The last number also holds for all further operands.
    """

    def rule(whole: Whole) -> Factors:
        counts = [*trailing, *(trailing[-1],) * len(whole.shapes)][: len(whole.shapes)]
        if any(len(shape) < count for shape, count in zip(whole.shapes, counts, strict=True)):
            return NO_RULE
        text = ", ".join("... " + " ".join(f"[{i}.{k}]" for k in range(n)) for i, n in enumerate(counts))
        batch = match(parse(f"{text} -> ..."), whole.shapes)
        return batch._replace(results=tuple((*batch.results[0], *_whole_dims(whole, i, batch)) for i in _each(whole)))

    return rule


def solved(whole: Whole) -> Factors:
    """The rule of ``linalg.solve``: the columns of the right-hand side may be sharded (rows if ``left=False``)."""
    left, (a, b) = whole.argument(2, "left", True), whole.shapes
    vectors = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    out, given = ("... 1", "... [p]") if vectors else ("... 1 k", "... [p] k") if left else ("... k 1", "... k [p]")
    return match(parse(f"... [n] [m], {given} -> {out}, ... 1 1, ... 1, ..."), whole.shapes)


def _each(whole: Whole) -> range:
    return range(len(whole.results))


def _whole_dims(whole: Whole, result: int, batch: Factors) -> Dims:
    return (None,) * (len(whole.results[result]) - len(batch.results[0]))


def leading(count: int) -> Rule:
    """Return a rule in which only ``count`` leading dims of the first operand may be sharded, and no other operand."""

    def rule(whole: Whole) -> Factors:
        first = (*range(count), *(None,) * whole.ndim)[: whole.ndim]
        others = tuple((None,) * len(shape) for shape in whole.shapes[1:])
        results = tuple((*range(count), *(None,) * len(shape))[: len(shape)] for shape in whole.results)
        return Factors((first, *others), results)

    return rule


def gathered(whole: Whole) -> Factors:
    """The rule of a function that takes whole operands: no dim may be sharded."""
    return Factors(
        tuple((None,) * len(shape) for shape in whole.shapes), tuple((None,) * len(shape) for shape in whole.results)
    )
