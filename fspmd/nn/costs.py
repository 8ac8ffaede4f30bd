"""Which way of attention over a cut sequence is the cheapest, by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fspmd.autodiff import value_and_grad
from fspmd.errors import ShapeError
from fspmd.local_view.shard_map import shard_map
from fspmd.nn.context import gathered_attention, ring_attention, ulysses_attention
from fspmd.nn.masks import Mask
from fspmd.nn.sequences import Axes, SequenceLayout
from fspmd.programs.jit import jit
from fspmd.spec import TensorSpec

WAYS: dict[str, Callable[..., Any]] = {
    "ring": ring_attention,
    "gathered": gathered_attention,
    "ulysses": ulysses_attention,
}


def attention_costs(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    axis: Axes,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
) -> dict[str, Any]:
    """The `Cost` of a step of attention, forward and backward, in each way that the shapes allow, the cheapest first.

    Each way is lowered for the specs, so that the mesh need not exist. ``layout`` is that of `ring_attention` and of
    `gathered_attention`; in `ulysses_attention` each rank has all positions.

    >>> import torch
    >>> from fspmd import P, make_mesh
    >>> mesh = make_mesh((8,), ("cp",), transport="abstract")
    >>> spec = TensorSpec(mesh, P(None, "cp"), (16, 8192, 64), torch.float32)
    >>> sorted(attention_costs(spec, spec, spec, "cp"))
    ['gathered', 'ring', 'ulysses']
    """
    found = {}
    for name, way in WAYS.items():
        options = {"mask": mask} if name == "ulysses" else {"mask": mask, "layout": layout}
        specs = query.partition, key.partition, value.partition
        call = shard_map(
            lambda q, k, v, way=way, options=options: way(q, k, v, axis, **options),
            mesh=query.mesh,
            in_specs=specs,
            out_specs=query.partition,
        )
        try:
            step = value_and_grad(lambda q, k, v, call=call: call(q, k, v).sum(), argnums=(0, 1, 2))
            found[name] = jit(step).lower(query, key, value).cost()
        except ShapeError:
            continue
    return dict(sorted(found.items(), key=lambda pair: pair[1].time))
