"""The Python numbers among the arguments of a torch function that bear on no layout. Keys do not hold their values."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

Kinds = frozenset[type]

FLOATS: Final[Kinds] = frozenset((float, complex))
NUMBERS: Final[Kinds] = FLOATS | {int}
#: all numbers count: even floats bear on shapes, or on the dims that must be whole
NONE: Final[Kinds] = frozenset()


class Free(NamedTuple):
    """The numbers of a function that bear on no layout, so that calls with other such numbers share a plan."""

    kinds: Kinds = FLOATS  # the types of these numbers
    places: frozenset[int | str] = frozenset()  # places and names of ints among them
    distinct: frozenset[float] = frozenset()  # values that need a plan of their own


#: ints that are values, in functions whose other ints are dims or sizes
_VALUES: Final[dict[str, frozenset[int | str]]] = {
    **dict.fromkeys(("index_fill", "index_fill_", "scatter", "scatter_", "pad"), frozenset((3, "value"))),
    "constant_pad_nd": frozenset((2, "value")),
    "layer_norm": frozenset((4, "eps")),
    "rms_norm": frozenset((3, "eps")),
    "__setitem__": frozenset((2,)),
}
#: special values: a rate of 0 drops, smooths or adds nothing, and norms of order inf are maxima
_DISTINCT: Final = dict.fromkeys(
    (
        *("scaled_dot_product_attention", "cross_entropy", "linear_cross_entropy"),
        *("constant_pad_nd", "linalg_vector_norm", "_cdist_forward", "_pdist_forward"),
    ),
    frozenset((0.0, inf, -inf)),
)


def free(name: str, kinds: Kinds) -> Free:
    """Return the free numbers of a function by its name, given the types of its row."""
    distinct = _DISTINCT.get(name, frozenset[float]())
    return Free(kinds - {float} if distinct else kinds, _VALUES.get(name, frozenset()), distinct)
