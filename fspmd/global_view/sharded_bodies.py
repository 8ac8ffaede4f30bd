"""A sharded body as the local call of a plan: it takes and returns blocks, and communicates and casts by itself."""

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
    """Return a local call that runs ``bodied.body(site, *args)`` with types tracked.

    Args:
        operands: The places of the blocks among the arguments, with their layouts.
        linear: The function is linear in its pending sums, and so is each step of its body.
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
            results_ids = {id(x) for x in tensors_of((out,))}  # a graph that keeps its own result is never freed
            keep([cast for cast in tracker.kept if id(cast) not in results_ids], out, _KEPT)
        if isinstance(out, Tensor):
            return leave_as(out, results[0], body, "result")
        left = [leave_as(x, spec, body, f"result[{i}]") for i, (x, spec) in enumerate(zip(out, results, strict=True))]
        return type(out)(left)

    return local


_KEPT: Final = "_fspmd_body_casts"


class _Sharing(Tracker):
    """A tracker that shares the casts of operands with other calls on the same operands."""

    def __init__(self, body: Body, operands: Sequence[Any]) -> None:
        super().__init__(body)
        self.operands = {id(x) for x in tensors_of(operands)}
        self.kept: list[Tensor] = []

    def convert(self, x: Tensor, variance: Variance, to: Variance) -> Tensor:
        """Cast a value. A cast of an operand is made once; it is a view that nothing writes into."""
        if id(x) not in self.operands:
            return super().convert(x, variance, to)
        y = convert(x, variance, to, self.body, cast_once)
        self.kept.append(y)
        return y
