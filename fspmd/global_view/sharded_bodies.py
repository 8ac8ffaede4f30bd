"""A sharded body as the local call of a plan: blocks in and blocks out, its collectives and casts its own affair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from fspmd.body import Body
from fspmd.local_view.entry import typed_entry
from fspmd.local_view.exit import leave_as
from fspmd.local_view.modes import again
from fspmd.local_view.tracking import Tracker, convert
from fspmd.local_view.type_rules import tensors_of
from fspmd.redistribution.shared_moves import cast_once, keep
from fspmd.rules import Bodied, Site
from fspmd.spec import TensorSpec
from fspmd.variance import Variance


def as_local_call(
    bodied: Bodied,
    name: str,
    site: Site,
    operands: Sequence[tuple[int | tuple[int, int], TensorSpec]],
    results: Sequence[TensorSpec],
    *,
    linear: bool,
) -> Callable[..., Any]:
    """``bodied.body(site, *args)`` run with types tracked, on arguments of which those at ``operands`` are blocks.

    ``linear``: the function is, in operands that are pending sums, and so is each step of its body.
    """
    mesh = site.mesh
    body = Body(mesh, frozenset(mesh.axis_names), True, name)
    body.asks, body.linear = bodied.asks, linear
    if not all(spec.even for spec in (*(spec for _, spec in operands), *results)):
        body.mark_uneven()
    entries = [(place, typed_entry(spec)) for place, spec in operands]

    def local(*args: Any, **kwargs: Any) -> Any:
        values = [list(x) if isinstance(x, (list, tuple)) else x for x in (*args, *kwargs.values())]
        for place, enter in entries:
            if isinstance(place, tuple):
                values[place[0]][place[1]] = enter(values[place[0]][place[1]])
            else:
                values[place] = enter(values[place])
        given = dict(zip(kwargs, values[len(args) :], strict=True))
        tracker = _Sharing(body, values)
        with again(body, tracker):
            out = bodied.body(site, *values[: len(args)], **given)
        if tracker.kept:
            given_back = {id(x) for x in tensors_of((out,))}  # a graph that kept its own result would never end
            keep([one for one in tracker.kept if id(one) not in given_back], out, _KEPT)
        if isinstance(out, Tensor):
            return leave_as(out, results[0], body, "result")
        left = [leave_as(x, spec, body, f"result[{i}]") for i, (x, spec) in enumerate(zip(out, results, strict=True))]
        return type(out)(left)

    return local


_KEPT: Final = "_fspmd_body_casts"


class _Sharing(Tracker):
    """One whose casts of operands serve other calls of the same operands, too."""

    def __init__(self, body: Body, operands: Sequence[Any]) -> None:
        super().__init__(body)
        self.operands = {id(x) for x in tensors_of(operands)}
        self.kept: list[Tensor] = []

    def convert(self, x: Tensor, variance: Variance, to: Variance) -> Tensor:
        """The first cast of an operand is found again; it is a view that nobody writes into."""
        if id(x) not in self.operands:
            return super().convert(x, variance, to)
        y = convert(x, variance, to, self.body, cast_once)
        self.kept.append(y)
        return y
