"""Calls of torch functions in which a float can be another: op_db's samples, and what they leave to defaults."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from opinfo.sweep import dtype_of, function_of, gradients, is_tensor, samples
from torch import Tensor

from fspmd import Sharded
from fspmd.ops.traits import name_of

#: the second value of which op_db's op may, or must, be planned or traced anew, and why
ANEW = {
    **dict.fromkeys(
        ("interpolate.", "upsample_", "_upsample_", "fractional_max_pool"), "scales of sizes are shapes of results"
    ),
    "histc": "bounds that are equal are those of the elements",
    **dict.fromkeys(("cdist", "pdist", "linalg.norm"), "of some orders norms are other functions"),
    "quantile": "the places that it lies between are part of the graph",
    "linalg.matrix_rank": "a bound of 0 is one of the elements' size",
    "logspace": "the base is worked out where there are no tensors",
}


@dataclass(frozen=True)
class Numbered:
    """A function of some tensors and a float, ``of(v)(tensors)``, and values of it; the first two are ordinary ones."""

    name: str
    tensors: list[Tensor]
    of: Callable[[float], Callable[[Sequence[Any]], tuple[list[Any], Any]]]
    values: list[float]


def may_be_planned_anew(name: str) -> bool:
    return any(part in name for part in ANEW)


def numbered(op: Any, sizes: str, most: int) -> Iterator[Numbered]:
    """Each float of each sample."""
    dtype = dtype_of(op)
    seen = set()
    for sample in samples(op, dtype, sizes, 100) if dtype is not None else ():
        whole = (sample.input, tuple(sample.args), dict(sample.kwargs))
        leaves, treedef = optree.tree_flatten(whole, none_is_leaf=True)
        paths = optree.tree_paths(whole, none_is_leaf=True)
        places = [i for i, x in enumerate(leaves) if is_tensor(x)]
        given = {str(path): (i, x) for i, (path, x) in enumerate(zip(paths, leaves, strict=True)) if type(x) is float}
        given |= {name: (name, x) for name, x in _defaults(op.op, sample).items()}
        for what, (where, value) in given.items():
            if len([one for one in seen if one[0] == what]) >= most or not places:
                continue
            case = _case(op, what, leaves, treedef, places, where, value)
            if case is not None:
                seen.add((what, len(seen)))
                yield case


def _case(
    op: Any, what: str, leaves: list[Any], treedef: Any, places: list[int], where: int | str, value: float
) -> Numbered | None:
    function, tensors = function_of(op), [leaves[i] for i in places]

    def of(v: float) -> Callable[[Sequence[Any]], tuple[list[Any], Any]]:
        def call(values: Sequence[Any]) -> tuple[list[Any], Any]:
            filled = list(leaves)
            for i, x in zip(places, values, strict=True):
                filled[i] = x
            if isinstance(where, int):
                filled[where] = v
            first, args, kwargs = treedef.unflatten(filled)
            torch.manual_seed(1)
            out = function(first, *args, **kwargs, **({where: v} if isinstance(where, str) else {}))
            return optree.tree_flatten(out, is_leaf=lambda x: isinstance(x, Sharded))[0], type(out)

        return call

    def fits(v: float) -> bool:
        plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
        try:
            gradients(of(v)([x * 1 if x.requires_grad else x for x in plain])[0], plain)
        except Exception:
            return False
        return True

    ordinary = [v for v in (value, value + 1 / 16, value * 0.75, value + 1, 0.25, 0.5) if math.isfinite(v) and v]
    chosen = list(itertools.islice(filter(fits, dict.fromkeys(ordinary)), 2))
    special = [v for v in (0.0, 1.0, 2.0, math.inf) if v not in chosen and fits(v)]
    return Numbered(what, tensors, of, [*chosen, *special]) if len(chosen) == 2 else None


def _defaults(func: Any, sample: Any) -> dict[str, float]:
    """The floats that a sample leaves to their defaults, by name; 0.5 where that is None."""
    names, found = {*sample.kwargs}, {}
    try:
        parameters = [*inspect.signature(func).parameters.values()][1 + len(sample.args) :]
        for one in parameters:
            if one.name not in names and (type(one.default) is float or "float" in str(one.annotation)):
                found[one.name] = one.default if type(one.default) is float else 0.5
        return found
    except (TypeError, ValueError):  # in C
        packet = getattr(torch.ops.aten, name_of(func), None)
    for overload in packet.overloads() if packet is not None else ():
        parameters = getattr(packet, overload)._schema.arguments
        if any(
            ("Tensor" in str(one.type)) != is_tensor(sample.kwargs.get(one.name))
            for one in parameters
            if one.name in names
        ):
            continue
        for i, one in enumerate(parameters):
            is_float = str(one.type) in ("float", "Optional[float]", "number", "Optional[number]")
            if is_float and one.name not in names and (one.kwarg_only or i > len(sample.args)):
                found[one.name] = float(one.default_value) if type(one.default_value) in (int, float) else 0.5
    return found
