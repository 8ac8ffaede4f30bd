"""Which Python numbers among the arguments of a torch function bear on no layout: their values are in no key."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

Kinds = frozenset[type]

FLOATS: Final[Kinds] = frozenset((float, complex))
NUMBERS: Final[Kinds] = FLOATS | {int}
#: where floats, too, bear on shapes, or on what must be whole
NONE: Final[Kinds] = frozenset()


class Free(NamedTuple):
    """The numbers of a function that do not count: of these ``kinds``, ints at these ``places`` (or by these names).

    Numbers that are ``distinct`` each have a plan of their own; others have one.
    """

    kinds: Kinds = FLOATS
    places: frozenset[int | str] = frozenset()
    distinct: frozenset[float] = frozenset()


#: ints that are values, of functions of which others are dims or sizes
_VALUES: Final[dict[str, frozenset[int | str]]] = {
    **dict.fromkeys(("index_fill", "index_fill_", "scatter", "scatter_", "pad"), frozenset((3, "value"))),
    "constant_pad_nd": frozenset((2, "value")),
    "layer_norm": frozenset((4, "eps")),
    "rms_norm": frozenset((3, "eps")),
    "__setitem__": frozenset((2,)),
}
#: nothing is dropped, smoothed or added, and norms are greatest elements
_APART: Final = dict.fromkeys(
    (
        *("scaled_dot_product_attention", "cross_entropy", "linear_cross_entropy"),
        *("constant_pad_nd", "linalg_vector_norm", "_cdist_forward", "_pdist_forward"),
    ),
    frozenset((0.0, inf, -inf)),
)


def free(name: str, kinds: Kinds) -> Free:
    """Of a function of a name, which by its row has these kinds."""
    distinct = _APART.get(name, frozenset[float]())
    return Free(kinds - {float} if distinct else kinds, _VALUES.get(name, frozenset()), distinct)
