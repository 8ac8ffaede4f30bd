"""The traits of torch functions for the type tracker: whether they write, draw, branch, or are linear.

Traits are data, by name. Most torch functions need no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError
from fspmd.ops.linearity import LINEAR, WHEN, Predicate, argument, words
from fspmd.ops.operators import OPERATORS
from fspmd.ops.schemas import facts_of
from fspmd.torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket, custom_function_call, schema_of
from fspmd.variance import get_variance


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of one torch function. The tracker has a fast path for calls that are not ``special``."""

    name: str
    special: bool = False
    sometimes: Predicate | None = None  # whether it is special, given its arguments
    asks: bool = False  # gives no tensor and reads no values: a shape, a dtype
    python_value: Predicate | None = None  # whether it gives Python one value, which Python may branch on
    writes: bool = False  # writes into an operand
    draws: Predicate | None = None  # whether it draws random numbers
    ragged: Predicate | None = None  # whether the sizes of its result depend on values
    indexes: bool = False  # takes indices that may be 0-d tensors
    elementwise: bool = False  # takes lists of tensors and treats the i-th of each together
    backward: tuple[str, int, str] | None = None  # runs backward: name of its outputs, place and name of its cotangents
    hook: bool = False  # registers a function of the gradient
    dual: bool = False  # gives the gradient of its operand
    in_copies: bool = False  # writes into values made of its operands: a simulation must hold all of them alike
    calls: str = ""  # the parameter that takes a function of tensors
    constant: bool = False  # takes only dtype and device of its first operand, and makes a value of other data
    linear: str = ""  # sum, product, first (`linearity.py`), or metadata (`_METADATA`)
    linear_when: Predicate = lambda *args, **kwargs: True  # whether ``linear`` holds

    @property
    def shown(self) -> str:
        """The name of the call in messages."""
        return _SHOWN.get(self.name, f"{self.name}()")

    @property
    def advice(self) -> str:
        """The advice of messages about this function, where the common advice does not fit."""
        return _INSTEAD.get(self.name, "")

    @property
    def pure(self) -> bool:
        """Whether a call computes new values of its operands and has no other effect."""
        special = self.special or self.sometimes or self.linear == "metadata"
        return self.name == "batch_norm" or self.in_copies or not special


_PYTHON_VALUE: Final = words(
    "__bool__ __int__ __float__ __complex__ __index__ __array__ __dlpack__ _to_dlpack __contains__ item tolist numpy "
    "is_nonzero equal allclose"
)
#: functions of Python numbers: they read a tensor among their arguments as a number
_OF_NUMBERS: Final = words(
    "zeros ones empty full rand randn randint randperm arange linspace logspace range eye empty_strided scalar_tensor"
)
#: the same for arguments after the first
_SIZED: Final = words("view reshape expand repeat tile new_zeros new_ones new_empty new_full unflatten roll")
_SHOWN: Final = {
    "__bool__": "a branch (if, while, and, or, not, assert)",
    **{f"__{name}__": f"{name}()" for name in ("int", "float", "complex")},
    "__index__": "a Python index (in range(), of a list)",
    "__array__": "numpy",
    "__contains__": "the operator in",
    "__format__": "a format such as f'{x:.3f}'",
    "__setitem__": "x[...] = y",
    "set data": "x.data = y",
    "set grad": "x.grad = y",
    **{f"__i{name}__": f"x {sign}= y" for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"))},
    **{name: f"torch.{name}()" for name in ("equal", "allclose", "tensor", "is_nonzero", *_OF_NUMBERS)},
    **{name: f"x.{name}()" for name in ("__dlpack__", "item", "tolist", "numpy", "new")},
    "__new__": "torch.Tensor()",
}
_STATISTICS: Final = (
    "its running statistics would be each rank's own: keep none (track_running_stats=False), or compute mean and "
    "variance with pmean"
)
_INSTEAD: Final = {
    **dict.fromkeys(("tensor", "as_tensor", "asarray", "new", "__new__"), "join tensors with torch.stack or torch.cat"),
    "one_hot": "pass num_classes",
    "batch_norm": _STATISTICS,
    "instance_norm": _STATISTICS,
    "set grad": "the gradient of a value that is equal on all ranks is a sum over them: psum it first",
}
_NOT_WRITES: Final = words("requires_grad_ detach_ share_memory_ rename_ coalesce_ is_shared_")
_IN_PLACE_DUNDERS: Final = words(
    "__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ "
    "__ilshift__ __irshift__ __idiv__"
)
#: random functions that torch does not tag as such
_RANDOM: Final = words(
    "dropout1d dropout2d dropout3d gumbel_softmax trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ "
    "xavier_normal_ orthogonal_ sparse_ fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices multi_head_attention_forward"
)
_RECURRENT: Final = words("lstm gru rnn_tanh rnn_relu")
_IN_COPIES: Final = _RECURRENT | words("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell linalg_matrix_rank")
_CALLS: Final = {"triplet_margin_with_distance_loss": "distance_function"}
#: functions of which the sizes of the result depend on values, in all calls
RAGGED: Final = words("nonzero argwhere masked_select unique unique_consecutive bincount")
#: functions that read no values, so that operands may have any type
_METADATA: Final = words(
    "size dim stride numel nelement ndimension element_size storage_offset data_ptr is_contiguous is_floating_point "
    "is_complex is_signed is_conj is_neg is_inference requires_grad_ register_hook "
    "register_post_accumulate_grad_hook retain_grad backward __len__ __repr__ __format__ __hash__ get_device "
    "empty_like new_empty is_same_size is_pinned __deepcopy__ untyped_storage"
)
#: functions of `_METADATA` that give no tensor, and properties
_ASKS: Final = words(
    "size dim stride numel nelement ndimension element_size storage_offset data_ptr is_contiguous is_floating_point "
    "is_complex is_signed is_conj is_neg is_inference __len__ __hash__ get_device is_same_size is_pinned"
) | {f"get {name}" for name in words("shape ndim dtype device layout itemsize nbytes requires_grad is_leaf grad_fn")}
_ALWAYS: Final[Predicate] = lambda *args, **kwargs: True  # noqa: E731


def _draws_in_attention(*args: Any, **kwargs: Any) -> bool:
    return bool(argument(args, kwargs, 4, "dropout_p", 0.0))


def _draws_in_dropout(*args: Any, **kwargs: Any) -> bool:
    training = argument(args, kwargs, 2, "training", kwargs.get("train", True))
    return bool(training) and bool(argument(args, kwargs, 1, "p", 0.5))


def _draws_in_recurrent(*args: Any, **kwargs: Any) -> bool:
    """Whether a recurrent layer drops out: (input, hx, weights, biases, layers, dropout, train, ...).

    A packed input counts as two arguments.
    """
    dropout, train = args[6:8] if isinstance(args[3], (tuple, list)) else args[5:7]
    return bool(dropout and train)


def _draws_in_rrelu(*args: Any, **kwargs: Any) -> bool:
    return bool(argument(args, kwargs, 3, "training", False))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in lists, tuples and slices among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif type(value) is slice:
            yield from tensors_in((value.start, value.stop, value.step))


def _tensor_as_size(*args: Any, **kwargs: Any) -> bool:
    """Whether an argument after the first is a 0-d tensor that varies."""
    return any(not x.ndim and get_variance(x).varying for x in tensors_in((*args[1:], *kwargs.values())))


def _varies_later(*args: Any, **kwargs: Any) -> bool:
    """Whether an argument after the first is a tensor that varies."""
    return any(get_variance(x).varying for x in tensors_in((*args[1:], *kwargs.values())))


def _of_list(*args: Any, **kwargs: Any) -> bool:
    return isinstance(argument(args, kwargs, 0, "data", None), (list, tuple))


def _list_later(*args: Any, **kwargs: Any) -> bool:
    """Whether an argument after the first is a list with tensors, which torch reads as numbers."""
    return any(isinstance(x, (list, tuple)) for x in args[1:]) and _tensor_as_size(*args)


def _unknown_classes(*args: Any, **kwargs: Any) -> bool:
    return bool(argument(args, kwargs, 1, "num_classes", -1) == -1)


_BRANCHES: Final[dict[str, Predicate]] = {
    **dict.fromkeys((*_PYTHON_VALUE, *_OF_NUMBERS), _ALWAYS),
    **dict.fromkeys(_SIZED, _tensor_as_size),
    "tensor_split": _varies_later,
    **dict.fromkeys(("new", "__new__"), _list_later),
    "one_hot": _unknown_classes,
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), _of_list),  # torch reads 0-d tensors in a list as numbers
    "__format__": lambda *args, **kwargs: len(args) > 1 and args[1] != "",
}
#: random functions -> whether a call draws
_DRAWS: Final[dict[str, Predicate]] = {
    **dict.fromkeys(_RANDOM, _ALWAYS),
    "scaled_dot_product_attention": _draws_in_attention,
    **dict.fromkeys(
        words(
            "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout "
            "feature_dropout_ feature_alpha_dropout feature_alpha_dropout_"
        ),
        _draws_in_dropout,
    ),
    **dict.fromkeys(("rrelu", "rrelu_"), _draws_in_rrelu),
    **dict.fromkeys(_RECURRENT, _draws_in_recurrent),
}


def _draws(name: str, func: Any) -> Predicate | None:
    """Return the predicate that says which calls of a function draw random numbers, or None."""
    if name in _DRAWS:
        return _DRAWS[name]
    ops = [func] if isinstance(func, OpOverload) else _tagged(name, _SEEDED)
    facts = next((facts for facts in map(facts_of, ops) if facts.random), None)
    return None if facts is None else lambda *args, **kwargs: facts.draws(args, kwargs)


_SEEDED: Final = torch.Tag.nondeterministic_seeded


def _ragged_index(*args: Any, **kwargs: Any) -> bool:
    """Whether an index has a mask, or a slice with tensors as bounds."""
    index = args[1] if len(args) > 1 else None
    return any(
        any(isinstance(bound, Tensor) for bound in (entry.start, entry.stop, entry.step))
        if type(entry) is slice
        else isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
        for entry in (index if isinstance(index, tuple) else (index,))
    )


_RAGGED_WHEN: Final[dict[str, Predicate]] = {
    **dict.fromkeys(RAGGED, _ALWAYS),
    "__getitem__": _ragged_index,
    "where": lambda *args, **kwargs: len(args) + len(kwargs) == 1,
    "repeat_interleave": lambda *args, **kwargs: not isinstance(argument(args, kwargs, 1, "repeats", None), int),
}


def _tensor_later(*args: Any, **kwargs: Any) -> bool:
    """Whether there is a tensor after the first argument."""
    return _any_tensor(args[1:]) or (bool(kwargs) and _any_tensor(kwargs.values()))


def _any_tensor(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is int:
            continue
        if isinstance(value, Tensor):
            return True
        if (isinstance(value, (tuple, list)) and _any_tensor(value)) or (
            kind is slice and _any_tensor((value.start, value.stop, value.step))
        ):
            return True
    return False


_BACKWARD: Final[dict[Any, tuple[str, int, str]]] = {
    torch.autograd.grad: ("outputs", 2, "grad_outputs"),
    torch.autograd.backward: ("tensors", 1, "grad_tensors"),
    Tensor.backward: ("self", 1, "gradient"),
}

#: functions of which few calls are special -> whether a call is; true wherever one of the predicates above is
_SOMETIMES: Final[dict[str, Predicate]] = {
    **dict.fromkeys((*_SIZED, "__getitem__", "narrow", "select", "tensor_split"), _tensor_later),
    "where": _RAGGED_WHEN["where"],
    "__format__": _BRANCHES["__format__"],
    "scaled_dot_product_attention": _draws_in_attention,
    **{name: draws for name, draws in _DRAWS.items() if draws in (_draws_in_dropout, _draws_in_rrelu)},
}

OPS: Final[dict[Any, Traits]] = {}


#: advice in errors for functions that torch compiles together with the functions that they call
INSTEAD_OF_COMPILED = (
    "For while_loop, cond, scan and map write Python's own while, if and for, with x.item() for a condition; for "
    "flex_attention write F.scaled_dot_product_attention(q, k, v, attn_mask=...), or run it rank by rank: "
    "fspmd.shard_map(lambda q, k, v: fspmd.rank_map(flex_attention, q, k, v), ...)"
)


def learn(func: Any) -> Traits:
    """Return the traits of a torch function, method, property getter or op of ``torch.ops``, and keep them in `OPS`.

    Raises:
        ArgumentError: The function runs functions that torch compiles; the types of their results are unknown.
    """
    name = name_of(func)
    if isinstance(func, HigherOrderOperator) and func is not custom_function_call:
        raise ArgumentError(f"{name}() in a body runs functions that torch compiles. {INSTEAD_OF_COMPILED}")
    is_op = isinstance(func, (OpOverload, OpOverloadPacket))
    elementwise = name.startswith(("_foreach_", "_fused_"))
    written = name not in _NOT_WRITES and (
        writes(func)
        or name in _IN_PLACE_DUNDERS
        or name in ("batch_norm", "instance_norm", "set data", "set grad")
        or (is_op and bool(_written_arguments(func)))
    )
    traits: dict[str, Any] = {
        "python_value": _BRANCHES.get(name),
        "writes": written,
        "draws": _draws(name, func),
        "ragged": _RAGGED_WHEN.get(name),
        "indexes": name in ("__getitem__", "__setitem__", "narrow", "select"),
        "elementwise": elementwise,
        "backward": _BACKWARD.get(func),
        "hook": name == "register_hook",
        "dual": name == "get grad",
        "in_copies": name in _IN_COPIES,
        "calls": _CALLS.get(name, ""),
        "constant": name == "new_tensor",
    }
    plain = plain_name(name)
    linear = "metadata" if name in _METADATA or name.startswith("get ") else LINEAR.get(plain, "")
    sometimes = _SOMETIMES.get(name) if not is_op and not written else None
    special = any(traits.values()) and sometimes is None
    when = WHEN.get(plain, _ALWAYS)
    op = OPS[func] = Traits(name, special, sometimes, asks=name in _ASKS, linear=linear, linear_when=when, **traits)
    return op


def declare_linear(func: Any, linear: str) -> None:
    """Keep the linearity that a rule gives a function. Without one it is that of `LINEAR` again."""
    op = learn(func)
    if linear:
        OPS[func] = replace(op, linear=linear, linear_when=_ALWAYS)


@cached
def name_of(func: Any) -> str:
    """Return the name of a torch function, method, property or op; of a property that is not linear, ``get name``."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        return str(packet).replace(".", "::", 1).removeprefix("aten::")
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if name == "__get__" and attribute in LINEAR else f"{name.strip('_')} {attribute}"
    return str(name)


@cached
def writes(func: Any) -> bool:
    """Whether a function writes into its first operand. By torch's convention its name then ends in an underscore."""
    name = name_of(func)
    return (name.endswith("_") and not name.startswith("__")) or name == "__setitem__"


def plain_name(name: str) -> str:
    """Return the name of a function without the underscores of operators and of writes.

    >>> plain_name("__iadd__"), plain_name("mul_"), plain_name("__rtruediv__"), plain_name("_fft_r2c")
    ('add', 'mul', 'rdiv', '_fft_r2c')
    """
    if name.startswith("__"):
        operator = name.strip("_")
        _, function = OPERATORS.get(operator) or OPERATORS.get(operator.removeprefix("i")) or ("", "")
        return function or name
    return name.removesuffix("_")


@cached
def is_torch(func: Any) -> bool:
    """Whether a function is of torch: an op of aten, a method, or a function in one of its modules."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return str(func).startswith(("aten.", "prims."))
    return not isinstance(func, FunctionType) or (func.__module__ or "").startswith("torch")


@cached
def is_tagged(name: str, tag: torch.Tag) -> bool:
    """Whether torch gives a tag to an op of this name whose result is a tensor.

    >>> is_tagged("relu", torch.Tag.pointwise), is_tagged("mm", torch.Tag.pointwise)
    (True, False)
    """
    return bool(_tagged(name, tag))


def _tagged(name: str, tag: torch.Tag) -> list[OpOverload]:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return []
    ops = [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in ops if tag in op.tags and [str(out.type) for out in schema_of(op).returns[:1]] == ["Tensor"]]


def written_operands(func: Any, op: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call writes into."""
    targets: list[Any] = [kwargs["out"]] if kwargs.get("out") is not None else []
    if op.name in ("batch_norm", "instance_norm"):
        functional = func is torch.nn.functional.batch_norm or func is torch.nn.functional.instance_norm
        training = ("training", False) if op.name == "batch_norm" else ("use_input_stats", True)
        if argument(args, kwargs, 5, *training):
            first = 1 if functional else 3
            targets += [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    elif op.writes:
        is_op = isinstance(func, (OpOverload, OpOverloadPacket))
        for i, name in _written_arguments(func) if is_op else ((0, "input"),):
            targets.append(args[i] if i < len(args) else kwargs.get(name))
    for target in targets:
        for x in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(x, Tensor):
                yield x


@cached
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an op writes into, by position and name: those of all overloads, except ``out=``."""
    overloads = [func] if isinstance(func, OpOverload) else [getattr(func, name) for name in func.overloads()]
    written = {
        (i, arg.name)
        for overload in overloads
        for i, arg in enumerate(schema_of(overload).arguments)
        if arg.alias_info is not None and arg.alias_info.is_write and (overload is func or not arg.kwarg_only)
    }
    return tuple(sorted(written))


def autocasts() -> tuple[Any, ...]:
    """Return (device type, dtype) for each device with autocast."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run functions of torch in the dtypes of their operands."""
    with ExitStack() as stack:
        for kind, _ in autocasts():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
