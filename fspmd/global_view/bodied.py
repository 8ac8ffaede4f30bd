"""A sharded body as the local call of a plan: blocks in and blocks out, its collectives and casts its own affair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fspmd.body import Body
from fspmd.local_view.entry import typed_entry
from fspmd.local_view.exit import leave_as
from fspmd.local_view.modes import again
from fspmd.local_view.tracking import Tracker
from fspmd.rules import Bodied, Site
from fspmd.spec import TensorSpec


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
        with again(body, Tracker(body)):
            out = bodied.body(site, *values[: len(args)], **given)
        if isinstance(out, Tensor):
            return leave_as(out, results[0], body, "result")
        left = [leave_as(x, spec, body, f"result[{i}]") for i, (x, spec) in enumerate(zip(out, results, strict=True))]
        return type(out)(left)

    return local
