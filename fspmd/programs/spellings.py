"""Calls of aten functions by torch's public functions and methods, which take less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from fspmd.cache import cached
from fspmd.torch_internals import TensorBase, VariableFunctions, nn_functions

aten: Final = torch.ops.aten


def _named(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


#: aten functions that are faster, by some 0.5 µs, through torch's Python functions and methods with the same arguments
PUBLIC: Final = _named(
    "abs add.Tensor add_.Tensor addmm amax amin argmax bitwise_not bmm cat clamp clone constant_pad_nd copy_ cos "
    "div.Tensor div_.Tensor eq.Tensor exp expand gather ge.Scalar gt.Scalar index_select le.Scalar le.Tensor log "
    "logical_not lt.Scalar lt.Tensor masked_fill.Scalar max.dim maximum mean.dim minimum mm mul.Tensor mul_.Tensor "
    "native_layer_norm neg permute pow.Tensor_Scalar reciprocal relu rsqrt scatter_.src select.int sigmoid silu sin "
    "split.Tensor sqrt squeeze.dim stack sub.Tensor sub_.Tensor sum sum.dim_IntList t tanh transpose.int unsqueeze "
    "view where.self zero_ _log_softmax _log_softmax_backward_data _scaled_dot_product_flash_attention_for_cpu "
    "_softmax _softmax_backward_data"
)


@cached
def callable_of(overload: Any) -> Callable[..., Any]:
    """The fastest function that calls an aten function.

    In place of ``view`` it is ``reshape``: a record may be wrong about the strides of a kernel's result. Torch's shape
    functions are, for some kernels that compute gradients. A reshape then copies, as it does in the function itself.
    """
    name = overload._schema.name.removeprefix("aten::")
    if overload is aten.view.default:
        return TensorBase.reshape  # type: ignore[no-any-return]
    if overload.name() not in PUBLIC:
        return overload._op  # type: ignore[no-any-return]
    places = (VariableFunctions, TensorBase, nn_functions)
    public: Any = next(getattr(place, name) for place in places if hasattr(place, name))
    return public  # type: ignore[no-any-return]


class Spelling(NamedTuple):
    """A call of a method of ``x``. ``text`` follows the operand, and has {} for each of ``args``."""

    x: Any
    text: str
    args: tuple[Any, ...] = ()


def spelling(node: fx.Node) -> Spelling | None:
    """Another spelling of a step that does the same, and is faster by some 1 to 2 µs, if there is one."""
    find = _FOUND.get(node.target)
    return None if find is None else find(node)


def _cast(node: fx.Node) -> Spelling | None:
    """``x.double()`` for a copy in another dtype."""
    x, *rest = node.args
    method = _CASTS.get(node.kwargs.get("dtype"))
    if method is None or rest or len(node.kwargs) > 1 or _dtype(x) in (None, _dtype(node)):
        return None
    return Spelling(x, f".{method}()")


def _indexed(node: fx.Node) -> Spelling | None:
    """``x[:, i]``. torch would read the values of an index without dims."""
    x, indices = node.args
    given: Any = indices
    if node.meta.get("frame", False) is not None or not all(i is None or _shape(i) for i in given):
        return None
    return Spelling(
        x, f"[{', '.join(':' if i is None else '{}' for i in given)}]", tuple(i for i in given if i is not None)
    )


def _pieces(node: fx.Node) -> Spelling | None:
    """``x.split_with_sizes((3, 3, 1), dim)``"""
    given: Any = *node.args, 0
    x, size, dim, *_ = given
    shape = _shape(x)
    if node.kwargs or not shape or not size or not shape[dim]:
        return None
    sizes = tuple(min(size, shape[dim] - at) for at in range(0, shape[dim], size))
    return Spelling(x, ".split_with_sizes({}, {})", (sizes, dim))


def _shape(x: Any) -> tuple[int, ...]:
    return x.meta["value"].shape if "value" in x.meta else ()


def _dtype(x: Any) -> torch.dtype | None:
    return x.meta["value"].dtype if "value" in x.meta else None


_CASTS: Final[dict[Any, str]] = {
    getattr(torch, name): name for name in ("double", "float", "half", "bfloat16", "long", "int", "bool")
}
_FOUND: Final[dict[Any, Callable[[fx.Node], Spelling | None]]] = {
    aten._to_copy.default: _cast,
    aten.index.Tensor: _indexed,
    aten.split.Tensor: _pieces,
}
