"""Cache misses: the reasons why calls are recorded anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.inspection.causes import trace
from fspmd.messages import counted
from fspmd.programs.keys import Static, Surroundings, identity
from fspmd.sharded import Sharded, is_sharded
from fspmd.torch_internals import FakeTensor
from fspmd.transport.local_tensor import blocks_of, held_frame
from fspmd.trees import flatten_in_order, parameter_names, paths_of, tree_text

#: the parts of a key: for each path of a leaf, and for the surroundings (""), values by name
_Facts = dict[str, dict[str, Any]]
_log: Final = logging.getLogger("fspmd.jit")
_SHOWN: Final = 80
_VARYING: Final = "axes that it varies over"


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """A call that was recorded.

    Attributes:
        function: the name of the function.
        where: the user's line; empty if unknown.
        records: the number of records of the function before the call.
        reasons: why no record fitted the call.
    """

    function: str
    where: str
    records: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.function} is recorded at {self.where}" if self.where else f"{self.function} is recorded"
        if not self.records:
            return f"{head}: {self.reasons[0]}"
        nearest = "its record" if self.records == 1 else f"the nearest of its {self.records} records"
        return f"{head}; {nearest} differs in {counted(len(self.reasons), 'part')}:" + "".join(
            f"\n  * {reason}" for reason in self.reasons
        )


@dataclass(frozen=True, slots=True)
class CallOfKind:
    """The kind of a call: arguments of this kind, with or without values, and the surroundings."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: Surroundings

    def facts(self, f: Callable[..., Any]) -> _Facts:
        """The parts of the key of a call of ``f``, by the names of the parameters."""
        names = parameter_names(f, len(self.args))
        grad, dtype, mesh, (casts, device) = *self.around[:3], self.around[3] or ((), None)
        facts: _Facts = {
            "": {
                "arguments": ", ".join([*names, *(f"{name}=" for name in self.kwargs)]),
                "grad mode": grad,
                "default dtype": dtype,
                "default device": device,
                "autocast": casts,
                "mesh of set_mesh": mesh,
            }
        }
        for name, tree in (*zip(names, self.args, strict=True), *self.kwargs.items()):
            leaves, treedef = flatten_in_order(tree, is_sharded)
            if not optree.treespec_is_leaf(treedef):
                facts[name] = {"tree": tree_text(treedef)}
            for path, leaf in zip(paths_of(treedef, name), leaves, strict=True):
                facts[path] = _parts(leaf)
        return facts


#: the lists to which misses are added
LISTENING: Final[list[list[CacheMiss]]] = []


@contextmanager
def explain_cache_misses() -> Iterator[list[CacheMiss]]:
    """Explain why calls within the block are recorded: list the differences from the nearest record.

    Each recorded call gives a warning of the logger ``fspmd.jit`` and an entry of the list. Replays cost nothing more.

    >>> from fspmd import jit
    >>> logging.getLogger("fspmd.jit").setLevel(logging.ERROR)  # the list is enough here
    >>> double = jit(lambda batch: batch["x"] * 2)
    >>> with explain_cache_misses() as misses:
    ...     for rows in 4, 4, 5:
    ...         out = double({"x": torch.ones(rows, 8)})
    >>> [miss.reasons for miss in misses]
    [('it is called for the first time',), ("batch['x']: shape (4, 8) -> (5, 8)",)]
    """
    misses: list[CacheMiss] = []
    LISTENING.append(misses)
    try:
        yield misses
    finally:
        LISTENING[:] = [listener for listener in LISTENING if listener is not misses]


def report(f: Callable[..., Any], now: CallOfKind, before: Sequence[CallOfKind], stale: Sequence[str]) -> None:
    """Tell listeners why a call is recorded.

    Args:
        f: the function.
        now: the call.
        before: the calls for which there are records.
        stale: why the record with the key of the call is out of date.
    """
    reasons = stale or (_nearest(f, now, before) if before else ("it is called for the first time",))
    cause = trace().cause
    miss = CacheMiss(
        getattr(f, "__name__", None) or type(f).__name__, cause.where if cause.file else "", len(before), tuple(reasons)
    )
    for misses in LISTENING:
        misses.append(miss)
    _log.warning("%s", miss)


def _parts(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, Sharded):
        known = {"type": "Sharded", "shape": leaf.spec.shape, "spec": leaf.spec.partition, "mesh": leaf.spec.mesh}
        return {part: value for part, value in _parts(leaf.block).items() if part != _VARYING} | known
    if isinstance(leaf, Tensor):
        parts = {
            "type": "Tensor" if isinstance(leaf, (torch.nn.Parameter, FakeTensor)) else type(leaf).__name__,
            "shape": tuple(leaf.shape),
            "dtype": leaf.dtype,
            "requires_grad": leaf.requires_grad,
            "device": leaf.device,
            "layout": (leaf.layout, leaf.is_conj(), leaf.is_neg()),
        }
        if (frame := held_frame(leaf)) is not None:
            parts |= {_VARYING: frame.axes, "shape": tuple(tuple(x.shape) for x in blocks_of(leaf))}
        return parts
    if type(leaf) is Static:
        return {"static type": type(leaf.value).__name__, "static value": leaf}
    return {"type": type(leaf).__name__, "value": leaf}


def _nearest(f: Callable[..., Any], now: CallOfKind, known: Sequence[CallOfKind]) -> tuple[str, ...]:
    """The differences from the nearest record."""
    per_record = [differences(f, now, before) for before in known]
    return min(reversed(per_record), key=len) or (
        "an argument became a torch.nn.Parameter, or ceased to be one, or its blocks vary over other axes, or share "
        "memory of elements in another way",
    )


def differences(f: Callable[..., Any], new: CallOfKind, old: CallOfKind) -> tuple[str, ...]:
    """The differences between two calls of a function."""
    now, before = new.facts(f), old.facts(f)
    missing = [f"{path}: only the record has it" for path in before if path not in now]
    more = [f"{path}: the record lacks it" for path in now if path not in before]
    changed = [
        f"{path + ': ' if path else ''}{part} {_shown(before[path].get(part))} -> {_shown(parts.get(part))}"
        for path, parts in now.items()
        if path in before
        for part in dict.fromkeys((*before[path], *parts))
        if not _same(before[path].get(part), parts.get(part))
    ]
    return (*missing, *more, *changed)


def _same(x: Any, y: Any) -> bool:
    """Whether two values are equal in keys. Values with different hashes are different."""
    a, b = identity(x), identity(y)
    return hash(a) == hash(b) and bool(a == b)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value.value if type(value) is Static else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
