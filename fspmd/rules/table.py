"""The rule of every torch function, by name: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fspmd.op_kinds import name_of
from fspmd.rules import reductions, views
from fspmd.rules.contractions import einsum, matmul, with_added
from fspmd.rules.elementwise import elementwise
from fspmd.rules.reductions import along, mean_of_blocks, one_reduced
from fspmd.rules.views import joined, parts, permuted
from fspmd.rules.whole import Rule, notation


@dataclass(frozen=True, slots=True)
class Row:
    """What a torch function does with dims, and with pending sums."""

    rule: Rule
    linear: str = ""  # "sum": of a sum of operands; "product": in each of them; "first": in the first alone
    free: bool = False  # Python numbers among the arguments do not bear on layouts
    local: Callable[..., Any] | None = None  # what runs on blocks in place of the function, given also the global shape
    blocks: Callable[..., Any] | None = None  # the same, given the factors and the global shapes before and after


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_POINTWISE: Final = _names(
    "relu sigmoid tanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh asinh acosh "
    "atanh erf erfc abs absolute sign sgn square reciprocal ceil floor round trunc frac gelu silu mish softplus elu "
    "selu celu leaky_relu hardtanh relu6 hardsigmoid hardswish logsigmoid softsign tanhshrink clamp clamp_min "
    "clamp_max clip pow rpow rdiv float_power atan2 arctan2 maximum minimum fmax fmin hypot logaddexp logaddexp2 "
    "remainder fmod floor_divide eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift where masked_fill lerp "
    "addcmul addcdiv copysign nan_to_num logit xlogy digamma lgamma threshold hardshrink softshrink"
)
_RESHAPES: Final = _names("reshape view flatten ravel unflatten squeeze unsqueeze view_as reshape_as")
_WHOLE_REDUCTIONS: Final = _names(
    "amax amin prod all any logsumexp argmax argmin max min var std count_nonzero aminmax median nanmedian"
)

ROWS: Final[dict[str, Row]] = {
    **{name: Row(elementwise, free=True) for name in _POINTWISE},
    **{name: Row(elementwise, "first") for name in _names("neg negative positive clone contiguous to type")},
    **{name: Row(elementwise, "first") for name in _names("float double half bfloat16")},
    **{name: Row(elementwise, "sum", free=True) for name in _names("add sub subtract radd rsub")},
    **{name: Row(elementwise, "product", free=True) for name in _names("mul multiply rmul")},
    **{name: Row(elementwise, "first", free=True) for name in _names("div divide true_divide")},
    "matmul": Row(matmul, "product"),
    "mm": Row(notation("m k, k n -> m n"), "product"),
    "bmm": Row(notation("b m k, b k n -> b m n"), "product"),
    "mv": Row(notation("m k, k -> m"), "product"),
    "dot": Row(notation("k, k ->"), "product"),
    "outer": Row(notation("m, n -> m n"), "product"),
    "linear": Row(with_added("... k, n k, n -> ... n", 2), "product"),
    "addmm": Row(with_added("m n, m k, k n -> m n", 0), "product"),
    "baddbmm": Row(with_added("b m n, b m k, b k n -> b m n", 0), "product"),
    "einsum": Row(einsum, "product"),
    "sum": Row(reductions.summed, "first"),
    "mean": Row(reductions.summed, "first", local=mean_of_blocks),
    **{name: Row(reductions.reduced) for name in _WHOLE_REDUCTIONS},
    "mode": Row(one_reduced(1, "dim", -1)),
    "kthvalue": Row(one_reduced(2, "dim", -1)),
    **{name: Row(along(1, "dim")) for name in _names("softmax log_softmax softmin cumprod cummax cummin logcumsumexp")},
    "cumsum": Row(along(1, "dim"), "first"),
    **{name: Row(along(1, "dim", -1)) for name in _names("sort argsort")},
    "topk": Row(along(2, "dim", -1)),
    "flip": Row(along(1, "dims"), "first"),
    "layer_norm": Row(reductions.layer_norm),
    "embedding": Row(reductions.embedding),
    **{name: Row(permuted(views.transposed), "first") for name in _names("transpose swapaxes swapdims")},
    "permute": Row(permuted(views.in_order), "first"),
    **{name: Row(permuted(views.moved), "first") for name in _names("movedim moveaxis")},
    **{name: Row(permuted(views.last_swapped), "first") for name in _names("t mT mH")},
    "T": Row(permuted(lambda whole: tuple(reversed(range(whole.ndim)))), "first"),
    **{name: Row(views.reshaped, "first", blocks=views.reshape_blocks) for name in _RESHAPES},
    **{name: Row(views.expanded, "first", blocks=views.expand_blocks) for name in _names("expand broadcast_to")},
    "getitem": Row(views.indexed, "first"),
    "select": Row(parts(1, "dim", gone=True), "first"),
    "narrow": Row(parts(1, "dim"), "first"),
    "unbind": Row(parts(1, "dim", gone=True), "first"),
    **{name: Row(parts(2, "dim"), "first") for name in _names("split chunk tensor_split")},
    **{name: Row(joined(), "sum") for name in _names("cat concat concatenate")},
    "stack": Row(joined(new=True), "sum"),
}
#: operators, and those with the operands the other way round
_OPERATORS: Final = {
    **{name: name for name in _names("add sub mul matmul pow neg pos abs eq ne lt le gt ge radd rsub rmul rdiv rpow")},
    **{"truediv": "div", "rtruediv": "rdiv", "floordiv": "floor_divide", "rfloordiv": "floor_divide"},
    **{"mod": "remainder", "rmod": "remainder", "invert": "bitwise_not", "getitem": "getitem"},
    **{r + name: f"bitwise_{name}" for r in ("", "r") for name in _names("and or xor")},
}


def row_of(func: Any) -> Row | None:
    """The row of a torch function, a method or a property; None where there is none."""
    name = name_of(func)
    if name.startswith("__"):
        name = _OPERATORS.get(name.strip("_"), "")
    if writes(func):
        row = _WRITES.get(name) or ROWS.get(name.removesuffix("_"))
        return row if row is not None and row.rule is elementwise else None
    return ROWS.get(name)


def is_ragged(func: Any) -> bool:
    """Whether the result, or its shape, depends on values: a number for Python, the places of true elements."""
    return name_of(func) in _RAGGED


_RAGGED: Final = frozenset(
    _names(
        "nonzero argwhere masked_select unique unique_consecutive bincount equal allclose is_nonzero item tolist "
        "is_same_size"
    )
)


def writes(func: Any) -> bool:
    """Whether a function writes into its first operand: by torch's custom its name ends in an underscore."""
    name = name_of(func)
    return name.endswith("_") and not name.startswith("__")


_WRITES: Final = {
    "zero_": Row(elementwise, "first"),
    "fill_": Row(elementwise, free=True),
    "copy_": Row(elementwise, "sum"),
}
