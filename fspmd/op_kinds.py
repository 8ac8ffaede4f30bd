"""What the type tracker must know of a torch function beyond its operands: does it write, draw, branch, is it linear.

Data, by name: most torch functions need no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Op:
    """The traits of one torch function. ``special`` is true when the tracker cannot take its fast path."""

    name: str
    special: bool = False
    python_value: bool = False  # gives Python one value: a branch
    writes: bool = False  # writes into an operand
    draws: Callable[..., bool] | None = None  # draws random numbers, given these arguments
    indexes: bool = False
    gradient: bool = False  # torch.autograd.grad
    dual: bool = False  # gives the gradient of its operand
    linear: str = ""  # sum, collect, product, or first: see the tables below


_ALWAYS: Final = lambda *args, **kwargs: True  # noqa: E731
_PYTHON_VALUE: Final = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__array__",
        "item",
        "tolist",
        "numpy",
        "is_nonzero",
        "equal",
        "allclose",
        "__contains__",
        "nonzero",
        "unique",
        "unique_consecutive",
        "masked_select",
    ]
)
_NOT_WRITES: Final = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_", "coalesce_", "is_shared_"])
_IN_PLACE_DUNDERS: Final = frozenset(
    [
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
        "__idiv__",
    ]
)
_RANDOM: Final = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "poisson",
        "binomial",
        "rand_like",
        "randn_like",
        "randint_like",
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "native_dropout",
        "rrelu",
        "rrelu_",
        "gumbel_softmax",
        "trunc_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "orthogonal_",
        "sparse_",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "multi_head_attention_forward",
    ]
)
#: a sum of unreduced values is unreduced
_SUMS: Final = frozenset(
    ["add", "sub", "subtract", "__add__", "__sub__", "__radd__", "__rsub__", "add_", "sub_", "__iadd__", "__isub__"]
)
_COLLECTS: Final = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"])
#: linear in each tensor operand; one of them may be unreduced
_PRODUCTS: Final = frozenset(
    [
        "mul",
        "multiply",
        "__mul__",
        "__rmul__",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "mv",
        "dot",
        "vdot",
        "inner",
        "outer",
        "tensordot",
        "einsum",
        "kron",
        "linear",
    ]
)
#: linear in the first operand
_FIRST: Final = frozenset(
    [
        "neg",
        "negative",
        "__neg__",
        "positive",
        "__pos__",
        "sum",
        "mean",
        "reshape",
        "view",
        "view_as",
        "reshape_as",
        "transpose",
        "permute",
        "t",
        "T",
        "mT",
        "squeeze",
        "unsqueeze",
        "__getitem__",
        "div",
        "divide",
        "true_divide",
        "__truediv__",
        "clone",
        "contiguous",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "expand",
        "expand_as",
        "flatten",
        "unflatten",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "narrow",
        "split",
        "chunk",
        "unbind",
        "select",
        "index_select",
        "roll",
        "flip",
        "trace",
        "diagonal",
        "cumsum",
        "detach",
        "real",
        "imag",
        "conj",
        "tile",
        "repeat",
        "nan_to_num_",
        "zeros_like",
        "new_zeros",
    ]
)
#: read no values, so every type passes
_METADATA: Final = frozenset(
    [
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "storage_offset",
        "data_ptr",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "requires_grad_",
        "register_hook",
        "retain_grad",
        "backward",
        "__len__",
        "__repr__",
        "__format__",
        "__hash__",
        "get_device",
        "type_as",
        "empty_like",
        "new_empty",
        "is_same_size",
        "is_pinned",
        "__deepcopy__",
        "untyped_storage",
    ]
)


def _draws_in_attention(*args: Any, **kwargs: Any) -> bool:
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def learn(func: Any) -> Op:
    """The traits of a torch function, method, property getter or op from ``torch.ops``."""
    name = _name(func)
    packet = getattr(func, "_schema", None)
    seeded = packet is not None and torch.Tag.nondeterministic_seeded in func.tags
    draws: Callable[..., bool] | None = _ALWAYS if name in _RANDOM or seeded else None
    if name == "scaled_dot_product_attention":
        draws = _draws_in_attention
    writes = name not in _NOT_WRITES and (
        name in _IN_PLACE_DUNDERS
        or name == "batch_norm"
        or (name.endswith("_") and not name.startswith("__"))
        or (packet is not None and packet.is_mutable)
    )
    linear = next(
        (
            kind
            for kind, names in (
                ("sum", _SUMS),
                ("collect", _COLLECTS),
                ("product", _PRODUCTS),
                ("first", _FIRST),
                ("metadata", _METADATA),
            )
            if name in names
        ),
        "metadata" if name.startswith("get ") else "",
    )
    traits: dict[str, Any] = {
        "python_value": name in _PYTHON_VALUE,
        "writes": writes,
        "draws": draws,
        "indexes": name in ("__getitem__", "__setitem__"),
        "gradient": func is torch.autograd.grad,
        "dual": name == "get grad",
    }
    return Op(name, special=any(traits.values()), linear=linear, **traits)


def _name(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.split("::")[-1]
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if attribute in _FIRST else f"get {attribute}"
    return str(name)


def written_operands(func: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes into."""
    targets: list[Any] = [kwargs["out"]] if kwargs.get("out") is not None else []
    if op.name == "batch_norm":
        training = kwargs.get("training", args[5] if len(args) > 5 else False)
        targets += [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")] if training else []
    elif op.writes and args:
        schema = getattr(func, "_schema", None)
        if schema is None:
            targets.append(args[0])
        else:
            for i, arg in enumerate(schema.arguments):
                if arg.alias_info is not None and arg.alias_info.is_write:
                    targets.append(args[i] if i < len(args) else kwargs.get(arg.name))
    for target in targets:
        for one in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(one, Tensor):
                yield one
