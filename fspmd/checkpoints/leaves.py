"""The leaves of a saved tree: their names, which are global key paths, and their kinds."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.errors import ArgumentError, TreeError
from fspmd.foreign import misfit
from fspmd.messages import Failure, described, holds_all_ranks, refuse
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec, describe
from fspmd.transport.local_tensor import is_simulated
from fspmd.trees import adopt

Path = tuple[str | int, ...]
_PLAIN: Final = frozenset((bool, int, float, complex, str, bytes))  # every load brings them back
_BITS: Final = 2039  # torch's safe load takes no integers of more
_INSTEAD: Final = "save tensors, numbers, strings, None, and lists of them; of NumPy x.item(), or torch.from_numpy(x)"


class NamedLeaf(NamedTuple):
    """A leaf of a tree, or a list or tuple of plain values, which is saved as a whole."""

    name: str  # as torch.distributed.checkpoint names it: the keys of the path, with dots
    path: Path
    label: str  # the Python expression
    value: Any
    place: int  # in the order of the treedef


def named_leaves(tree: Any, what: str, root: str, kinds: tuple[type, ...]) -> tuple[list[NamedLeaf], Any]:
    """Return the leaves, sorted by name, and the treedef.

    Raises:
        TreeError: two leaves have one name.
        ArgumentError: a leaf cannot be saved. The error names all of them.
    """
    adopt()
    accessors, values, treedef = optree.tree_flatten_with_accessor(tree, _is_plain_list, none_is_leaf=True)
    found: list[NamedLeaf] = []
    for place, (accessor, value) in enumerate(zip(accessors, values, strict=True)):
        path = tuple(key if isinstance(key, int) and _indexes(entry) else str(key) for key, entry in _keys(accessor))
        found.append(NamedLeaf(".".join(map(str, path)) or "value", path, accessor.codify(root), value, place))
    failures = [failure for leaf in found if (failure := _failure(leaf, kinds))]
    names: dict[str, NamedLeaf] = {}
    for leaf in found:
        if names.setdefault(leaf.name, leaf) is not leaf:
            both = f"{names[leaf.name].label} and {leaf.label} have one name, {leaf.name!r}"
            failures.append(Failure(both, TreeError, "give them keys that differ with dots between"))
    if failures:
        refuse(f"{what} got leaves that it cannot take:", failures)
    return sorted(found), treedef


def _keys(accessor: Any) -> list[tuple[Any, Any]]:
    return [(entry.entry, entry) for entry in accessor]


def _indexes(entry: Any) -> bool:
    return isinstance(entry, optree.SequenceEntry)


def _is_plain_list(x: Any) -> bool:
    """Whether a value is a list or tuple without dicts and tensors, which torch's checkpoints keep whole, too."""
    return type(x) in (list, tuple) and all(_is_plain_list(y) or _is_plain_value(y) for y in x)


def _is_plain_value(x: Any) -> bool:
    return x is None or (type(x) in _PLAIN and (type(x) is not int or x.bit_length() < _BITS))


def _failure(leaf: NamedLeaf, kinds: tuple[type, ...]) -> Failure | None:
    value = leaf.value
    if is_simulated(value):
        return holds_all_ranks(leaf.label)
    if isinstance(value, Sharded):
        return None
    if isinstance(value, Tensor):
        if wrong := misfit(value):
            return Failure(f"{leaf.label} is {wrong[0]}", ArgumentError, wrong[1])
        if value.is_meta and TensorSpec not in kinds:
            return Failure(f"{leaf.label} is a meta tensor, which has no values", ArgumentError)
        return None
    if isinstance(value, TensorSpec) and TensorSpec not in kinds:
        return Failure(f"{leaf.label} is a TensorSpec, which has no values", ArgumentError)
    if isinstance(value, torch.nn.Module):
        return Failure(f"{leaf.label} is {described(value)}", ArgumentError, "pass its module.state_dict()")
    if isinstance(value, torch.optim.Optimizer):
        return Failure(f"{leaf.label} is {described(value)}", ArgumentError, "pass its optimizer.state_dict()")
    if isinstance(value, (TensorSpec, torch.Generator)) or _is_plain_value(value) or _is_plain_list(value):
        return None
    try:
        decoded(encoded(value))
    except (pickle.PickleError, RuntimeError, TypeError, AttributeError):
        text = f"{leaf.label} is {described(value)}, which no safe load brings back"
        return Failure(text, ArgumentError, _INSTEAD)
    return None


def encoded(value: Any) -> bytes:
    """Return the bytes of a plain value, as torch.distributed.checkpoint writes them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def canonical(value: Any) -> bytes:
    """Return bytes that equal plain values share. Those of `encoded` tell also which parts are one object."""
    is_plain = _is_plain_value(value) or _is_plain_list(value)
    return repr(value).encode() if is_plain else encoded(value)


def decoded(data: bytes) -> Any:
    """Return the value of bytes. No code runs that they could name."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def is_tensor(value: Any) -> bool:
    """Whether a leaf is saved as a tensor: a tensor, a layout or a generator's state."""
    return isinstance(value, (Tensor, TensorSpec, torch.Generator))


def kind_of(value: Any) -> str:
    """Return the kind of a plain value. Numbers of all types are of one kind.

    >>> kind_of(1.5), kind_of("adam"), kind_of(None), kind_of((0.9, 0.999))
    ('number', 'str', 'None', 'list of 2')
    """
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, complex)):
        return "number"
    if type(value) in (list, tuple):
        return f"list of {len(value)}"
    return type(value).__name__


def shown(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return the text of a tensor in an error: ``f32[4, 2]``."""
    return describe(dtype, shape)
