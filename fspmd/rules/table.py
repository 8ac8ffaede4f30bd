"""The table of torch functions: one row for each, by name. Rows of users precede it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd.cache import cached
from fspmd.ops.linearity import LINEAR, WHEN
from fspmd.ops.operators import OPERATORS
from fspmd.ops.signatures import FLOATS, NONE, NUMBERS, Free, Kinds, free
from fspmd.ops.traits import RAGGED, declare_linear, is_tagged, is_torch, name_of, plain_name, writes
from fspmd.rules import (
    attention,
    contractions,
    convolutions,
    diagonals,
    layers,
    lookups,
    pools,
    reductions,
    shifts,
    slices,
    softmaxes,
    views,
)
from fspmd.rules.bodies import Bodied
from fspmd.rules.composites import CHOICES, COMPOSITES, has_composite
from fspmd.rules.contractions import (
    groups_of_columns,
    own_columns,
    own_groups,
    pointing,
    rows_by_groups,
    with_added,
)
from fspmd.rules.extremes import EXTREMES, SCANS, max_or_min
from fspmd.rules.factors import Rule, batched, elementwise, gathered, notation, over
from fspmd.rules.handlers import ENGINE, HANDLED, OF_LISTS, handler_of
from fspmd.rules.losses import ELEMENTWISE, alike, ctc, gaussian, of_rows, of_samples
from fspmd.rules.normalizations import sums_of_groups
from fspmd.rules.pools import RESIZES, pooled
from fspmd.rules.slices import joined, parts
from fspmd.rules.softmaxes import labelled, labelled_on_blocks, of_labels, ratio
from fspmd.rules.spectra import SPECTRA, gathered_along
from fspmd.rules.views import permuted
from fspmd.torch_internals import OpOverload, OpOverloadPacket, op_of

Linear = str | Callable[..., str]  # a function takes the arguments in order, tensors among them


@dataclass(frozen=True, slots=True)
class Row:
    """A rule as data, with the other facts about a torch function that decide its plan."""

    rule: Rule
    #: the operands in which it is linear: "sum": all together; "product": each; "first": the first; "": none
    linear: Linear = ""
    free: Kinds = FLOATS  # types of Python numbers among the arguments that bear on no layout
    local: Callable[..., Any] | None = None  # runs on blocks in place of the function; also takes the global shape
    empty: bool = True  # torch takes empty blocks
    kept: bool = False  # the result has the shape of the first operand, and its dtype if all operands have one dtype
    sized: bool = False  # for two operands of one dtype the result has that dtype, and the sizes of its factors
    body: Bodied | None = None  # runs where a dim that must be whole is sharded
    blocks: Callable[..., Any] | None = None  # as ``local``; takes the factors, and the global shapes before and after
    weighs: bool = False  # sums of gradients of whole operands count, since these operands are not weights
    divides: bool = False  # the first operand is divided by the second
    sets: bool = False  # sets elements of the first operand; its gradients do not depend on their old values
    as_is: bool = False  # may give its operand, or a view equal to it, whatever the strides of its blocks
    registered: bool = False  # of a function of users or of fspmd: it precedes all else that is known of the function


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: elementwise functions that torch does not tag as pointwise
_POINTWISE: Final = _names(
    "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh fix floor_divide gammainc gammaincc hardswish "
    "isclose isreal log_sigmoid_forward logsigmoid polar rdiv rpow softsign special_ndtr tanhshrink _threshold "
    "_dirichlet_grad "
    "bool byte cdouble cfloat chalf char int long short"
)
#: functions of one operand that keep its values, negate or scale them, or change the dtype
_CASTS: Final = _names(
    "neg negative positive clone contiguous to type float double half bfloat16 _to_copy alias detach lift_fresh_copy "
    "conj conj_physical _conj _conj_physical deg2rad rad2deg _neg_view resolve_conj resolve_neg real imag "
    "alias_copy type_as"
)
_GATHERED: Final = _names(
    "as_strided as_strided_copy as_strided_scatter masked_scatter put segment_reduce native_group_norm embedding_bag "
    "_ctc_loss nonzero_static hash_tensor linalg_lstsq linalg_tensorsolve "
    "linalg_tensorinv binomial _standard_gamma _sample_dirichlet"
)
_RESHAPES: Final = _names("reshape view _unsafe_view flatten ravel unflatten view_copy")
_SCATTERS: Final = _names("scatter scatter_add scatter_reduce")
_SLICE_WRITES: Final = _names("index_add index_copy index_reduce")
#: functions along whole dims -> place, name and default of the argument that names them
_ALONG: Final[dict[str, Any]] = {
    **dict.fromkeys(_names("sort argsort"), (1, "dim", -1)),
    "msort": (1, "dim", 0),
    "mode": (1, "dim", -1),
    "kthvalue": (2, "dim", -1),
    **dict.fromkeys(_names("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"), (2, "dim", -1)),
    **dict.fromkeys(_names("_fft_r2c _fft_c2c _fft_c2r"), (1, "dim")),
}
#: functions of matrices, of images and of pairs, batched over the leading dims
_BATCHED: Final[dict[str, Rule]] = {
    **{
        name: notation(text)
        for names, text in (
            ("cholesky cholesky_inverse linalg_matrix_exp", "... [m] [n] -> ... 1 1"),
            ("linalg_svdvals linalg_eigvals _linalg_eigvals", "... [m] [n] -> ... 1"),
            ("linalg_eig", "... [m] [n] -> ... 1, ... 1 1"),
            ("geqrf", "... [m] [n] -> ... 1 1, ... 1"),
            ("linalg_inv_ex linalg_cholesky_ex", "... [m] [n] -> ... 1 1, ..."),
            ("linalg_lu_factor_ex linalg_ldl_factor_ex", "... [m] [n] -> ... 1 1, ... 1, ..."),
            ("_linalg_det", "... [m] [n] -> ..., ... 1 1, ... 1"),
            ("_linalg_slogdet", "... [m] [n] -> ..., ..., ... 1 1, ... 1"),
            ("linalg_pinv", "... [m] [n], ..., ... -> ... 1 1"),
            ("linalg_householder_product", "... [m] [n], ... [k] -> ... 1 1"),
            ("cholesky_solve linalg_solve_triangular max_unpool2d", "... [m] [n], ... [p] [q] -> ... 1 1"),
            ("triangular_solve", "... [m] [n], ... [p] [q] -> ... 1 1, ... 1 1"),
            ("ormqr linalg_lu_solve linalg_ldl_solve", "... [m] [n], ... [k], ... [p] [q] -> ... 1 1"),
            ("max_pool2d_with_indices_backward", "... [m] [n], ... [p] [q], ... [r] [s] -> ... 1 1"),
            ("grid_sampler_2d max_unpool3d", "... [l] [m] [n], ... [o] [p] [q] -> ... 1 1 1"),
            ("grid_sampler_3d", "... [k] [l] [m] [n], ... [o] [p] [q] [r] -> ... 1 1 1 1"),
            ("view_as_complex", "... [p] -> ..."),
        )
        for name in _names(names)
    },
    **dict.fromkeys(_names("_linalg_svd linalg_qr _linalg_eigh linalg_lu lu"), batched(2)),
    "lu_unpack": batched(2, 1),
}

#: the row of elementwise functions
POINTWISE: Final = Row(elementwise, free=NUMBERS)
_BY_DIMS: Final[dict[str, Row]] = {
    **dict.fromkeys(_POINTWISE, POINTWISE),
    "complex": Row(elementwise, weighs=True),
    **{name: Row(elementwise) for name in ELEMENTWISE},  # ints count: as ops they take one for their reduction
    **{name: Row(elementwise) for name in _CASTS},
    "contiguous": Row(elementwise, as_is=True),
    **{name: Row(elementwise, free=NUMBERS, sized=True) for name in _names("add sub subtract rsub mul multiply")},
    **{name: Row(elementwise, free=NUMBERS, sized=True, divides=True) for name in _names("div divide true_divide")},
    "matmul": Row(contractions.matmul, sized=True),
    "mm": Row(notation("m k, k n -> m n"), sized=True),
    "bmm": Row(notation("b m k, b k n -> b m n"), sized=True),
    "mv": Row(notation("m k, k -> m"), sized=True),
    "dot": Row(notation("k, k ->"), sized=True),
    "vdot": Row(notation("k, k ->"), sized=True),
    "outer": Row(notation("m, n -> m n"), sized=True),
    "linear": Row(with_added("... k, n k -> ... n", 2)),
    "addmm": Row(with_added("m k, k n -> m n", 0)),
    "addmv": Row(with_added("m k, k -> m", 0), empty=False),
    "addr": Row(with_added("m, n -> m n", 0)),
    "baddbmm": Row(with_added("b m k, b k n -> b m n", 0)),
    "addbmm": Row(with_added("b m k, b k n -> m n", 0)),
    "einsum": Row(contractions.einsum),
    "linalg_cross": Row(contractions.cross),
    "copy": Row(elementwise, local=lambda _, x, source: source.to(x.dtype).expand(x.shape).clone()),
    "_cdist_forward": Row(reductions.distances, body=reductions.distances_body),
    "_pdist_forward": Row(reductions.distances_within, body=reductions.distances_within_body),
    "bilinear": Row(with_added("... i, ... j, o i j -> ... o", 3), empty=False),
    "_trilinear": Row(gathered),
    "sum": Row(reductions.summed),
    "mean": Row(reductions.summed, local=reductions.mean_of_blocks),
    **{name: Row(over()) for name in _names("median nanmedian")},
    "count_nonzero": Row(reductions.summed),
    "prod": Row(reductions.product_rule, local=reductions.product_of_blocks, body=reductions.prod_body),
    **{name: Row(over(), body=body) for name, body in reductions.COUNTS.items()},
    "linalg_vector_norm": Row(over(2, "dim"), body=reductions.vector_norm),
    **{name: Row(over(), body=EXTREMES[name]) for name in _names("amax amin aminmax argmax argmin")},
    **{name: Row(max_or_min, body=EXTREMES[name]) for name in _names("max min")},
    "topk": Row(over(2, "dim", -1), body=EXTREMES["topk"]),
    **{name: Row(over(*where), local=SPECTRA.get(name)) for name, where in _ALONG.items()},
    **{name: Row(over(kept=True), kept=True, body=softmaxes.softmax) for name in _names("softmax _softmax")},
    **{
        name: Row(over(kept=True), kept=True, body=softmaxes.log_softmax) for name in _names("log_softmax _log_softmax")
    },
    "_softmax_backward_data": Row(over(2, "dim", kept=True), body=softmaxes.softmax_backward),
    "_log_softmax_backward_data": Row(over(2, "dim", kept=True), body=softmaxes.log_softmax_backward),
    "_safe_softmax": Row(over(kept=True), body=softmaxes.safe_softmax),
    "logsumexp": Row(over(), body=softmaxes.logsumexp),
    **{name: Row(over(kept=True), body=body) for name, body in SCANS.items()},
    "flip": Row(shifts.flipped, body=shifts.flip),
    "roll": Row(shifts.rolled, local=shifts.roll_blocks, body=shifts.roll),
    "channel_shuffle": Row(notation("n [c] ... -> n [c] ..."), body=shifts.shuffle),
    "tril": Row(notation("... [m] [n] -> ... [m] [n]"), body=diagonals.tril),
    "triu": Row(notation("... [m] [n] -> ... [m] [n]"), body=diagonals.triu),
    **{
        name: Row(convolutions.unfolded, local=convolutions.unfold_blocks, body=convolutions.unfold)
        for name in _names("unfold unfold_copy")
    },
    **{name: Row(over(), body=body) for name, body in reductions.MOMENTS.items()},
    "layer_norm": Row(reductions.layer_norm_rule, kept=True, body=reductions.layer_norm),
    "native_layer_norm": Row(reductions.layer_norm_rule, body=reductions.native_layer_norm),
    "rms_norm": Row(reductions.layer_norm_rule, kept=True, body=reductions.rms_norm),
    "embedding": Row(lookups.torch_embedding, body=lookups.torch_embedding_body, empty=False),
    **{name: Row(permuted(views.transposed)) for name in _names("transpose transpose_copy swapaxes swapdims")},
    **{name: Row(permuted(views.in_order)) for name in _names("permute permute_copy")},
    **{name: Row(permuted(views.moved)) for name in _names("movedim moveaxis")},
    **{name: Row(permuted(views.last_swapped)) for name in _names("t mT mH t_copy")},
    **{name: Row(permuted(views.reversed_dims)) for name in _names("T H")},
    **{name: Row(views.reshaped, blocks=views.reshape_blocks, body=views.reshape, as_is=True) for name in _RESHAPES},
    **{name: Row(views.squeezed, blocks=views.reshape_blocks) for name in _names("squeeze squeeze_copy")},
    **{name: Row(views.unsqueezed) for name in _names("unsqueeze unsqueeze_copy")},
    **{name: Row(views.expanded, blocks=views.expand_blocks) for name in _names("expand broadcast_to")},
    **{name: Row(shifts.repeated, body=shifts.repeat) for name in _names("repeat tile")},
    "view_as_real": Row(notation("... -> ... 1")),
    "constant_pad_nd": Row(shifts.padded, body=shifts.pad),
    **{
        f"{name}_pad{n}d": Row(shifts.padded, empty=False, body=body)
        for name, body in (("reflection", shifts.reflect), ("replication", shifts.replicate))
        for n in (1, 2, 3)
    },
    "pad": Row(shifts.wrapped, empty=False, body=shifts.wrap),
    "getitem": Row(slices.indexed, body=slices.getitem),
    "slice": Row(slices.sliced, body=slices.cut),
    **{name: Row(diagonals.diagonal, body=diagonals.take) for name in _names("diagonal diagonal_copy")},
    "diag_embed": Row(diagonals.embedded, body=diagonals.embed),
    "diagonal_scatter": Row(diagonals.diagonal_scattered, body=diagonals.put),
    "slice_scatter": Row(lookups.slice_scattered, body=lookups.set_slice),
    "select_scatter": Row(lookups.select_scattered, body=lookups.set_row),
    "renorm": Row(reductions.renorm),
    "select": Row(parts(1, "dim", gone=True), body=slices.select),
    **{name: Row(parts(1, "dim", gone=True)) for name in _names("unbind unbind_copy")},
    **{name: Row(parts(1, "dim"), body=slices.narrow) for name in _names("narrow narrow_copy")},
    **{
        name: Row(parts(2, "dim"), body=slices.split)
        for name in _names("split chunk split_with_sizes split_with_sizes_copy")
    },
    "unsafe_chunk": Row(parts(2, "dim", copied=True), local=slices.chunk_blocks, body=slices.split),
    "unsafe_split": Row(parts(2, "dim", copied=True), local=slices.split_blocks, body=slices.split),
    **{name: Row(joined(), body=slices.cat) for name in _names("cat concat concatenate")},
    "stack": Row(joined(new=True)),
    **{name: Row(rule, empty=False) for name, rule in _BATCHED.items()},
    "_linalg_solve_ex": Row(contractions.solved, empty=False),
    "convolution": Row(
        convolutions.convolution,
        local=convolutions.convolution_of_blocks,
        empty=False,
        body=convolutions.convolution_body,
    ),
    **{f"avg_pool{n}d": Row(pooled(n, dilated=False), empty=False, body=pools.avg_pool(n)) for n in (1, 2, 3)},
    "max_pool1d": Row(pooled(1, dilated=True), empty=False, body=pools.max_pool(1, places=False)),
    **{f"max_pool{n}d_with_indices": Row(pooled(n, dilated=True), empty=False, body=pools.max_pool(n)) for n in (2, 3)},
    **{
        f"{private}adaptive_avg_pool{n}d": Row(pooled(n, added=True), empty=False, body=pools.adaptive_avg(n))
        for private in ("", "_")
        for n in (1, 2, 3)
    },
    **{f"adaptive_max_pool{n}d": Row(pooled(n), empty=False, body=pools.adaptive_max(n)) for n in (2, 3)},
    **{name: Row(notation(text), free=NONE, empty=False, body=body) for name, (text, body) in RESIZES.items()},
    "col2im": Row(convolutions.folded, empty=False, body=convolutions.fold),
    "scaled_dot_product_attention": Row(attention.attention, empty=False, body=attention.attend),
    **{name: Row(layers.sequences, free=NONE, empty=False, body=body) for name, body in layers.LAYERS.items()},
    "gather": Row(lookups.gather, body=lookups.gather_body, weighs=True),
    **{
        name: Row(lookups.scatter, body=lookups.setting(getattr(torch, name)), sets=name != "scatter_reduce")
        for name in _SCATTERS
    },
    "index_select": Row(lookups.select, body=lookups.index_select_body),
    **{
        name: Row(
            lookups.put_slices,
            body=lookups.setting(getattr(torch, name)),
            weighs=True,
            sets=name != "index_reduce",
        )
        for name in _SLICE_WRITES
    },
    "index_fill": Row(lookups.put_slices, body=lookups.setting(torch.index_fill, wraps=True), sets=True),
    **{name: Row(lookups.index, body=lookups.index_body) for name in _names("index _unsafe_index")},
    **{
        name: Row(lookups.index_put, body=lookups.index_put_body, sets=True)
        for name in _names("index_put _unsafe_index_put")
    },
    "take": Row(lookups.take_by_element),
    "bucketize": Row(notation("..., b -> ...")),  # the place is the sum, over blocks, of the boundaries below the value
    "searchsorted": Row(lookups.searched),
    "histc": Row(reductions.histogram, free=NONE),  # equal bounds stand for the extremes of the elements
    **{name: Row(gathered) for name in _GATHERED},
    **{f"fractional_max_pool{n}d": Row(gathered, free=NONE) for n in (2, 3)},  # floats are ratios of sizes
}


def _linear(name: str) -> Linear:
    """Return the linearity of a function, as `linearity.py` has it."""
    plain = plain_name(name)
    kind, when = LINEAR.get(plain, ""), WHEN.get(plain)
    return kind if when is None else lambda *args, **kwargs: kind if when(*args, **kwargs) else ""


def _rows(by_dims: dict[str, Row]) -> dict[str, Row]:
    return {name: replace(row, linear=_linear(name)) for name, row in by_dims.items()}


ROWS: Final = _rows(_BY_DIMS)
#: rows by function, for functions that share a name with another
_BY_FUNCTION: Final[dict[Any, Row]] = {
    F.embedding: Row(lookups.embedding, body=lookups.embedding_body, empty=False),
    F.embedding_bag: Row(lookups.embedding_bag, empty=False),
    torch.ops.aten.view.dtype: Row(views.bits),
}


@cached
def row_of(func: Any) -> Row | None:
    """Return the row of a function, method or property; None if there is none."""
    if func in _ROWS:
        return _ROWS[func]
    if not is_torch(func):
        return None
    name = name_of(func)
    if name.startswith("__"):
        name = OPERATORS.get(name.strip("_"), ("", ""))[1]
    if writes(func) and name in _REWRITTEN:
        return None
    if writes(func):
        row = _WRITES.get(name) or _row_by_name(name.removesuffix("_"))
        return row if row is not None and (row.sets or row.rule is elementwise) else None
    return _BY_FUNCTION.get(func) or _row_by_name(name)


def _row_by_name(name: str) -> Row | None:
    """Return a row of the table, or `POINTWISE` if torch tags the function as pointwise."""
    row = ROWS.get(name)
    if row is None and is_tagged(name, torch.Tag.pointwise) and not is_tagged(name, torch.Tag.nondeterministic_seeded):
        return POINTWISE
    return row


def is_gathered(func: Any, tensors: int, args: tuple[Any, ...]) -> bool:
    """Whether a call runs on gathered operands; ``tensors`` is the number of its tensors."""
    name = name_of(func)
    if name in layers.LAYERS:
        return layers.is_packed(args)
    return name in _RUN_GATHERED or (name in _SIZED_BY_SECOND and tensors > 1)


#: functions whose shapes depend on values, that give Python values, or whose result no block has a part of
_RUN_GATHERED: Final = RAGGED | frozenset(
    _names(
        "equal allclose is_nonzero item tolist numpy __array__ is_same_size _assert_async _functional_assert_async "
        "histogram histogramdd _pad_packed_sequence"
    )
)
#: functions whose second tensor says sizes
_SIZED_BY_SECOND: Final = frozenset(_names("tensor_split repeat_interleave narrow"))
#: functions, and names of functions, of which something other than a row decides some calls
_ASIDE: Final = frozenset(
    (*HANDLED, *ENGINE, *COMPOSITES, *CHOICES, *layers.LAYERS, *_RUN_GATHERED, *_SIZED_BY_SECOND)
    + ("to", "type_as", "cpu", "cuda")
)


@cached
def is_ruled(func: Any) -> bool:
    """Whether a row decides every call of a function in C without keyword arguments."""
    if row_of(func) is None or isinstance(func, FunctionType):
        return False
    name = name_of(func)
    return not (func in _ASIDE or name in _ASIDE or name.startswith(OF_LISTS))


@cached
def without_write(func: Any) -> Callable[..., Any]:
    """Return the function without a write that computes the value which ``func`` writes into its first operand."""
    name = name_of(func).removesuffix("_")
    if isinstance(func, OpOverload):
        return getattr(getattr(torch.ops.aten, name), func.__name__.rpartition(".")[2])  # type: ignore[no-any-return]
    return getattr(Tensor, name)  # type: ignore[no-any-return]


#: writes that run as new values: torch's write, or its backward, needs the sizes of uneven simulated blocks as ints
_REWRITTEN: Final = frozenset(_names("eq_ ne_ lt_ le_ gt_ ge_ sgn_ copysign_ nextafter_"))
_WRITES: Final = _rows({"zero_": Row(elementwise), "fill_": Row(elementwise, free=NUMBERS), "copy_": Row(elementwise)})


# --- rows by function, of users and of fspmd, which precede the table -----------------------------------------------

#: Python functions that pass their operand, ``dim`` and ``dtype`` on to a function in C, unless ``dim`` is None; torch
#: dispatches them with both as keyword arguments
IN_C: Final[dict[Any, Any]] = {F.softmax: torch.softmax, F.log_softmax: torch.log_softmax}
_ROWS: Final[dict[Any, Row]] = {
    func: replace(row, registered=True)
    for func, row in {
        alike: Row(of_rows),
        gaussian: Row(elementwise),
        ctc: Row(of_samples, empty=False),
        rows_by_groups: Row(pointing("[s] k, [g] k n, 1 -> [s] n", "g"), "product", body=own_groups),
        groups_of_columns: Row(pointing("m [s], [s] n, 1 -> 1 m n", "s"), "product", body=own_columns),
        of_labels: Row(labelled, body=labelled_on_blocks),
        ratio: Row(notation("[a] -> ")),
        sums_of_groups: Row(notation("n c, c -> n 1"), "first", free=NONE),
        gathered_along: Row(over(1, "dims", kept=True), "first"),
    }.items()
}


def register(func: Any, row: Row) -> None:
    """Make a row the rule of a function, and of the ops that its calls are dispatched as."""
    for key in (func, *_overloads(func)):
        _ROWS[key] = replace(row, registered=True)
        IN_C.pop(key, None)
        if isinstance(row.linear, str):
            declare_linear(key, row.linear)  # for bodies


def _overloads(func: Any) -> list[Any]:
    """Return the ops behind an object of ``torch.library.custom_op`` or ``torch.ops``."""
    op = op_of(func)
    packet = getattr(op, "overloadpacket", op)
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [packet, *(getattr(packet, name) for name in packet.overloads())]


def is_registered(func: Any) -> bool:
    """Whether a function has a row here, which precedes everything else that is known of it."""
    return func in _ROWS


def free_numbers(func: Any) -> Free:
    """Return the Python numbers among the arguments of a function that bear on no layout."""
    if func in _ROWS:
        return Free(_ROWS[func].free)
    row = row_of(func)
    kinds = FLOATS if row is None else row.free
    return free(name_of(func), NUMBERS if handler_of(func) is not None or has_composite(func) else kinds)
