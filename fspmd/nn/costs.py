"""Which way of attention over a cut sequence is the cheapest, by the cost model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fspmd.autodiff import value_and_grad
from fspmd.errors import ShapeError
from fspmd.local_view.shard_map import shard_map
from fspmd.nn.arguments import checked
from fspmd.nn.context import gathered_attention, ring_attention, ulysses_attention
from fspmd.nn.masks import Mask
from fspmd.nn.sequences import Axes, Ranks, SequenceLayout, names_of
from fspmd.programs.jit import jit
from fspmd.spec import TensorSpec

Made = Callable[[int, Ranks], SequenceLayout]  # such as `zigzag`


@checked
def attention_costs(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    axis: Axes,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | Made | None = None,
) -> dict[str, Any]:
    """The `Cost` of a step of attention, forward and backward, in each way that the shapes allow, the cheapest first.

    The ways are "ring", "gathered" and "ulysses"; and if ``axis`` is a tuple of axes, "ulysses in a ring", which is
    `ulysses_attention` over all axes but the first, with ``ring=`` the first. Each way is lowered for the specs, so
    that the mesh need not exist.

    Args:
        layout: That of `ring_attention` and of `gathered_attention`, or a function that makes one, such as `zigzag`:
            "ulysses in a ring" takes the one that it makes for the first axis, and otherwise a contiguous one. In
            `ulysses_attention` each rank has all positions.

    Raises:
        ShapeError, ArgumentError, AxisError: As `ring_attention`.

    >>> import torch
    >>> from fspmd import P, make_mesh
    >>> mesh = make_mesh((2, 4), ("cp", "sp"), transport="abstract")
    >>> spec = TensorSpec(mesh, P(None, ("cp", "sp")), (16, 8192, 64), torch.float32)
    >>> sorted(attention_costs(spec, spec, spec, ("cp", "sp")))
    ['gathered', 'ring', 'ulysses', 'ulysses in a ring']
    """
    axes = names_of(axis)
    sizes = tuple(query.mesh.shape.get(name, 1) for name in axes)
    make: Any = layout if callable(layout) and not isinstance(layout, SequenceLayout) else None
    whole: Any = layout if make is None else make(query.shape[-2], sizes)
    functions: dict[str, Callable[..., Any]] = {
        "ring": functools.partial(ring_attention, axis=axes, layout=whole),
        "gathered": functools.partial(gathered_attention, axis=axes, layout=whole),
        "ulysses": functools.partial(ulysses_attention, axis=axes),
    }
    if axes[1:]:
        of_ring = None if make is None else make(query.shape[-2], sizes[0])
        functions["ulysses in a ring"] = functools.partial(
            ulysses_attention, axis=axes[1:], ring=axes[0], layout=of_ring
        )
    specs = query.partition, key.partition, value.partition
    costs = {}
    for name, way in functions.items():
        call = shard_map(
            lambda q, k, v, way=way: way(q, k, v, mask=mask), mesh=query.mesh, in_specs=specs, out_specs=query.partition
        )
        step = value_and_grad(lambda q, k, v, call=call: call(q, k, v).sum(), argnums=(0, 1, 2))
        try:
            costs[name] = jit(step).lower(query, key, value).cost()
        except ShapeError:
            if not name.startswith("ulysses"):  # which alone needs a multiple of the ranks as heads
                raise
    return dict(sorted(costs.items(), key=lambda pair: pair[1].time))
