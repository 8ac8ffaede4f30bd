"""Keys of records: the kind of a call's arguments and of its surroundings, and the options that choose arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh, current_mesh
from fspmd.messages import counted, described, quoted
from fspmd.ops.traits import autocasts
from fspmd.programs.refusals import is_dense, not_dense
from fspmd.torch_internals import (
    DeviceContext,
    TensorGuards,
    function_mode_is_on,
    function_modes,
)
from fspmd.transport.local_tensor import blocks_of, has_overlaps, kinds_of
from fspmd.trees import flatten, flatten_args, flatten_trees, parameter_names
from fspmd.wrappers import wraps

_grad_enabled = torch.is_grad_enabled
autocast_is_on = torch.is_autocast_enabled  # of CUDA, unless another device is named
_strided = torch.strided
_default_dtype = torch.get_default_dtype
_PLAIN: Final = {Tensor, torch.nn.Parameter}
#: the grad mode, the default dtype, the mesh of `set_mesh`; with autocasts or modes: the autocasts, the default device
Surroundings = tuple[bool, torch.dtype, Mesh | None, tuple[Any, ...]]


def default_device() -> torch.device | None:
    """The device of ``with torch.device(...)``, on which new tensors are made."""
    return next((mode.device for mode in function_modes() if isinstance(mode, DeviceContext)), None)


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor], list[Any]]:
    """The key of a call; the tensors among the leaves of its arguments; their strides.

    Strides are no part of the key, since they may differ from process to process.
    """
    leaves, structure = flatten_call(args, kwargs)
    kinds, values, strides = kinds_of(leaves, identity)
    return ((*structure, *surroundings()), kinds), values, strides


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The leaves of the arguments of a call, and their structure as a part of its key."""
    if not kwargs:
        leaves, structure = flatten_args(args)  # which takes 4 µs less
        return leaves, (structure,)
    leaves, structure = flatten_trees((args, kwargs))
    return leaves, (structure, dict)  # the structure includes the dict


def surroundings() -> Surroundings:
    """The part of the key of a call that excludes its arguments."""
    is_usual = not (autocast_is_on() or autocast_is_on("cpu") or function_mode_is_on())
    return _grad_enabled(), _default_dtype(), current_mesh(), () if is_usual else (autocasts(), default_device())


def guard(leaves: Sequence[Any]) -> Callable[..., bool] | None:
    """A function that returns, by one call of torch, whether other leaves have the same kinds and strides.

    It may return False for leaves that have them. It returns False in transforms and in ``torch.jit.trace``, since
    torch's guards compare the dispatch keys that are on. Returns None where there is no leaf, a leaf is no
    plain tensor, or occurs twice, since torch's guards then always fail.
    """
    if not {*map(type, leaves)} <= _PLAIN or any(leaf.layout is not _strided for leaf in leaves):
        return None
    if not leaves or len({*map(id, leaves)}) < len(leaves):
        return None
    check: Callable[..., bool] = TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def identity(value: Any) -> Any:
    """A value as part of a key. It distinguishes 1, 1.0 and True, and the two zeros, also within containers."""
    kind = type(value)
    if kind is Static:
        return value
    if kind in _DISTINCT:
        return kind, value
    if kind is float or (isinstance(value, Number) and not isinstance(value, int)):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, value, tuple(map(identity, value))
    if kind is frozenset:
        return kind, frozenset(map(identity, value))
    if (parameters := getattr(kind, "__dataclass_params__", None)) is not None and parameters.eq:
        names = [field.name for field in fields(value) if field.compare and field.hash is not False]
        return kind, value, tuple(identity(getattr(value, name)) for name in names)
    return kind, value


#: types whose equal values cannot be distinguished
_DISTINCT: Final = frozenset({int, bool, str, type(None)})


def shared_strides(values: Sequence[Tensor]) -> tuple[Any, ...]:
    """The places and strides of tensors whose elements share memory. Other values do not fit into such memory."""
    return tuple((i, *(block.stride() for block in blocks_of(x))) for i, x in enumerate(values) if has_overlaps(x))


class Static:
    """A static argument as one leaf. Two are equal if their values have one type and are equal."""

    __slots__ = ("hash", "key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = identity(value)
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and bool(self.key == other.key)


def without_key(leaves: list[Any], error: Exception) -> Exception:
    """The error for leaves that have no kind: about a tensor that is not dense, else ``error``."""
    return next((not_dense(x) for x in leaves if isinstance(x, Tensor) and not is_dense(x)), error)


def not_hashable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError:
    """The error for a call that has no key."""
    for leaf in flatten((args, kwargs))[0]:
        try:
            hash(leaf)
        except TypeError:
            return ArgumentError(
                f"jit got {described(leaf)} for an argument, which has no hash; arguments other than tensors are part "
                "of the key of a record: pass tensors, numbers, strings, or trees of those"
            )
    return ArgumentError("jit got an argument that has no hash; pass tensors, numbers, strings, or trees of those")


Numbers = int | Sequence[int] | None
Names = str | Sequence[str] | None


#: the positions and names of the arguments that an option names
Chosen = frozenset[int | str]


def chosen(f: Callable[..., Any], option: str, numbers: Numbers, names: Names) -> Chosen:
    """The arguments that ``{option}_argnums`` and ``{option}_argnames`` name.

    Of a parameter that has a position and a name it has both, so that a call may pass it in either way.

    Raises:
        ArgumentError: a position is no int, a name no string, or ``f`` has no such parameter.
    """
    by_number = _sequence(f"{option}_argnums", numbers, int, "an int")
    by_name = _sequence(f"{option}_argnames", names, str, "a string")
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return frozenset((*(_from_start(i, f, option) for i in by_number), *by_name))
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    positions = set()
    for i in by_number:
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            positions.add(_from_start(i, f, option))
        elif not -len(positional) <= i < len(positional):
            raise ArgumentError(
                f"jit got {option}_argnums={numbers!r}, but {described(f)} takes "
                f"{counted(len(positional), 'positional argument')}{_listed(positional)}"
            )
        else:
            positions.add(i % len(positional))
    every = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in by_name:
        if name not in every and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ArgumentError(
                f"jit got {option}_argnames={names!r}, but {described(f)} has no parameter {name!r}{_listed(every)}"
            )
    named = {*by_name, *(positional[i] for i in positions if i < len(positional))}
    return frozenset((*positions, *(i for i, name in enumerate(positional) if name in named), *named))


def check_static_not_donated(f: Any, static: Chosen, donate: Chosen) -> None:
    """Raise `ArgumentError` where an argument is both static and donated."""
    if both := sorted(static & donate, key=str):
        raise ArgumentError(
            f"jit of {described(f)} got {quoted(both)} both in static_argnums or static_argnames and in "
            "donate_argnums or donate_argnames; tensors can be donated, and other values static: name it in one of them"
        )


def _sequence(option: str, given: Any, kind: type, noun: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    entries = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (given,)
    if any(not isinstance(entry, kind) or isinstance(entry, bool) for entry in entries):
        raise ArgumentError(f"jit got {described(given)} for {option}, which takes {noun} or a tuple of them")
    return entries


def _from_start(i: int, f: Any, option: str) -> int:
    if i < 0:
        raise ArgumentError(
            f"jit got {i} in {option}_argnums, but {described(f)} takes any number of positional arguments; write a "
            "position from 0 on"
        )
    return i


def _listed(names: Sequence[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def mark_static(
    f: Callable[..., Any], which: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with each static argument as a `Static` leaf.

    Raises:
        ArgumentError: a static argument has no hash, or is a tensor.
    """
    marked = tuple(_static(f, i, x) if i in which else x for i, x in enumerate(args))
    return marked, {name: _static(f, name, x) if name in which else x for name, x in kwargs.items()}


def _static(f: Any, where: int | str, value: Any) -> Static:
    fix = "it must be hashable: pass a number, a string, a tuple, a frozen dataclass, a function or a module"
    if isinstance(value, Tensor):
        fix = "a static argument is a constant of the record, and a tensor is not; leave it out of static_argnums"
    else:
        try:
            return Static(value)
        except TypeError:
            pass
    name = where if isinstance(where, str) else parameter_names(f, where + 1)[where]
    raise ArgumentError(f"the static argument {name} of {described(f)} is {described(value)}; {fix}")


def with_static(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``f`` with the values of `Static` arguments."""

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        return f(*map(_opened, args), **{name: _opened(x) for name, x in kwargs.items()})

    return run


def _opened(x: Any) -> Any:
    return x.value if type(x) is Static else x


def check_bytes(name: str, value: Any) -> None:
    """Raise `ArgumentError` unless the value is a number of bytes, or infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            f"{name} got {described(value)}; expected a number of bytes >= 0, such as 1 << 20, or math.inf"
        )


def check_choice(name: str, value: Any) -> None:
    """Raise `ArgumentError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} got {described(value)}; expected True or False")
