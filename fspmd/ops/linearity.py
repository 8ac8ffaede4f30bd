"""The torch functions that are linear, and the operands in which they are.

A linear function of a sum is the sum of its results, so a pending sum stays pending through it: in bodies
(`local_view/type_rules.py`) and in the global view (`rules/table.py`). Names are those of torch's functions, methods
and ops, without the underscores of operators and of writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fspmd.spec import is_float

Predicate = Callable[..., bool]


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


#: linear in all operands together; a Python number may be one of the first two
_ADDS: Final = words("add sub subtract rsub")
#: linear in the first operand and the last together; the operands between are indices
BETWEEN: Final = words("index_add scatter_add scatter_reduce index_put _unsafe_index_put")
#: linear in all operands together
_JOINS: Final = words(
    "cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag diagonal_scatter "
    "select_scatter slice_scatter complex copy"
)
#: products -> the place of the operand that is added to the product
ADDED: Final = {
    **dict.fromkeys(words("addmm addmv addr baddbmm addbmm"), 0),
    **dict.fromkeys(words("linear convolution"), 2),
    **{f"{kind}{n}d": 2 for kind in ("conv", "conv_transpose") for n in (1, 2, 3)},
    "bilinear": 3,
}
#: linear in each operand
_PRODUCTS: Final = words(
    "mul multiply rmul matmul __rmatmul__ mm bmm mv dot vdot inner outer tensordot einsum kron cross linalg_cross"
) | frozenset(ADDED)
#: linear in the first operand, unless it has integers, which these functions round
AVERAGES: Final = words(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d "
    "interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
)
#: linear in the first operand
_FIRST: Final = AVERAGES | words(
    "neg negative positive pos clone alias alias_copy lift_fresh_copy contiguous to type type_as float double half "
    "bfloat16 _to_copy detach data real imag conj conj_physical _conj _conj_physical _neg_view resolve_conj "
    "resolve_neg deg2rad rad2deg div divide true_divide zeros_like new_zeros zero "
    # sums
    "sum mean sum_to_size cumsum diff trace fold col2im "
    # views, and their copies
    "reshape view view_as reshape_as _unsafe_view view_copy transpose transpose_copy permute permute_copy t t_copy T "
    "mT H mH adjoint squeeze squeeze_copy unsqueeze unsqueeze_copy expand expand_as broadcast_to flatten unflatten "
    "ravel movedim moveaxis swapaxes swapdims atleast_1d atleast_2d atleast_3d view_as_real view_as_complex "
    # elements in other places
    "getitem slice narrow narrow_copy select index_select index _unsafe_index gather take take_along_dim split chunk "
    "unbind unbind_copy tensor_split unsafe_split unsafe_chunk split_with_sizes split_with_sizes_copy hsplit vsplit "
    "dsplit diagonal diagonal_copy diag diag_embed diagflat tril triu roll flip fliplr flipud rot90 tile repeat "
    "repeat_interleave unfold unfold_copy im2col pad constant_pad_nd reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d channel_shuffle pixel_shuffle "
    "pixel_unshuffle "
    # spectra
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn "
    "fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift _fft_r2c _fft_c2c _fft_c2r"
)
#: function -> "sum": linear in all operands together; "product": in each of them; "first": in the first
LINEAR: Final[dict[str, str]] = {
    **dict.fromkeys(_FIRST, "first"),
    **dict.fromkeys(_PRODUCTS, "product"),
    **dict.fromkeys(_ADDS | BETWEEN | _JOINS, "sum"),
}


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    """Return an argument of a call by its place or its name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def _adds_no_number(*args: Any, **kwargs: Any) -> bool:
    numbers = [x for x in args[:2] if not isinstance(x, torch.Tensor)]
    return len(args) > 1 and all(type(x) in (int, float, complex) and x == 0 for x in numbers)


def _divides_exactly(*args: Any, **kwargs: Any) -> bool:
    return argument(args, kwargs, 2, "rounding_mode", None) is None


def _keeps_its_dtype(*args: Any, **kwargs: Any) -> bool:
    return not any(isinstance(x, torch.dtype) for x in (*args[1:2], *kwargs.values()))


def _pads_with_zeros(*args: Any, **kwargs: Any) -> bool:
    constant = argument(args, kwargs, 2, "mode", "constant") == "constant"
    return not (constant and argument(args, kwargs, 3, "value", None))


def _of_one_tensor(*args: Any, **kwargs: Any) -> bool:
    tensors = [isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())]
    return tensors[0] and sum(tensors) == 1


def _accumulates(*args: Any, **kwargs: Any) -> bool:
    return argument(args, kwargs, 3, "accumulate", False) is True


def _has_no_integers(*args: Any, **kwargs: Any) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and is_float(args[0].dtype)


#: function -> whether it is linear, given its arguments in the order of the parameters (`signatures.in_order`)
WHEN: Final[dict[str, Predicate]] = {
    **dict.fromkeys(_ADDS, _adds_no_number),
    **dict.fromkeys(words("div divide true_divide"), _divides_exactly),
    "view": _keeps_its_dtype,  # in another dtype the same bits are other numbers
    "pad": _pads_with_zeros,
    "constant_pad_nd": lambda *args, **kwargs: not argument(args, kwargs, 2, "value", 0),
    "scatter_reduce": lambda *args, **kwargs: argument(args, kwargs, 4, "reduce", "") == "sum",
    **dict.fromkeys(words("index_put _unsafe_index_put"), _accumulates),  # otherwise one of several values remains
    **dict.fromkeys(words("diff atleast_1d atleast_2d atleast_3d"), _of_one_tensor),
    **dict.fromkeys(AVERAGES, _has_no_integers),
}


def stay_sums(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether sums stay sums if a dtype becomes another one: not if floats are rounded to integers, or made bool.

    >>> stay_sums(torch.int64, torch.float32), stay_sums(torch.float32, torch.int64), stay_sums(torch.int64, torch.bool)
    (True, False, False)
    """
    if after is torch.bool:
        return before is torch.bool
    return is_float(after) or not is_float(before)
