"""`debug_print`: print values when a program runs, recorded or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import Body, state
from fspmd.errors import ArgumentError
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.placement.device_put import device_get
from fspmd.sharded import Sharded, is_plain
from fspmd.torch_internals import NO_LEVEL, NOT_MAPPED, DisableTorchFunction, batch_dim_of, level_of, wrapped_by
from fspmd.tracing import outside_transforms, reading
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import column, common_frame


def debug_print(fmt: str, *values: Any, **named: Any) -> None:
    """Print ``fmt.format(*values, **named)``. Under `jit`, each replay prints.

    In a body each rank prints, with its coordinates in front. Outside of bodies the first rank prints, and a `Sharded`
    value is printed as the global tensor. Under `vmap` each example is printed, in order. Under `grad`, `jvp` and other
    transforms the value is printed without derivatives, and gradients are unchanged. Code that runs again, as in
    `checkpoint`, prints again.

    Communication: outside of bodies, an all-gather per sharded dim of each `Sharded` value. Backward: none.

    Args:
        fmt: a format, as for ``str.format``.
        values: trees of tensors, `Sharded` values and other values.
        named: the same, by name.

    Raises:
        ArgumentError: ``fmt`` is no string, or does not fit the values.

    >>> from fspmd import P, device_put, jit, make_mesh, psum, shard_map
    >>> mesh = make_mesh((2,), ("x",))
    >>> def body(x):
    ...     debug_print("sum {:.1f} of {}", x.sum(), x)
    ...     return psum(x.sum(), "x")
    >>> total = jit(shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P()))(torch.arange(4.0))
    [x=0] sum 1.0 of tensor([0., 1.])
    [x=1] sum 5.0 of tensor([2., 3.])
    >>> debug_print("{x}", x=device_put(torch.arange(3), P("x"), mesh=mesh))
    tensor([0, 1, 2])
    """
    if not isinstance(fmt, str):
        raise ArgumentError(
            f"debug_print got {described(fmt)} for its format; write debug_print('{{}}', x), as for str.format"
        )
    leaves, treedef = optree.tree_flatten((values, named), none_is_leaf=True)
    body = state.body
    meshes = [x.spec.mesh for x in leaves if isinstance(x, Sharded)]
    if body is None and meshes:
        with torch.no_grad():
            leaves = device_get(leaves)
    peeled = [_peeled(x) for x in leaves]
    examples = tuple(levels for _, levels in peeled)
    _print(_Line(fmt, treedef, examples, body, meshes[0] if meshes else None), [x for x, _ in peeled])


@dataclass(frozen=True, slots=True)
class _Line:
    """The line that a step prints, without the values."""

    fmt: str
    treedef: optree.PyTreeSpec
    batched: tuple[tuple[tuple[int, int], ...], ...]  # for each leaf the (level, dim) of each vmap, outermost first
    body: Body | None
    mesh: Mesh | None

    def text(self, values: Sequence[Any]) -> str:
        """The text for the values of one rank and one example."""
        args, kwargs = self.treedef.unflatten(values)
        try:
            return self.fmt.format(*args, **kwargs)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"debug_print({self.fmt!r}) cannot format its values: {error}; write one {{}} for each value"
            ) from error


def _peeled(x: Any) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """The value within wrappers of ``torch.func``, and the (level, dim) of each `vmap`, outermost first."""
    levels: list[tuple[int, int]] = []
    while isinstance(x, Tensor) and level_of(x) != NO_LEVEL:
        if batch_dim_of(x) != NOT_MAPPED:
            levels.append((level_of(x), batch_dim_of(x)))
        x = wrapped_by(x)
    return x, tuple(reversed(levels))


@reading
def _print(line: _Line, values: list[Any]) -> None:
    with DisableTorchFunction(), outside_transforms(), torch.no_grad():
        for prefix, prints, local in _of_ranks(line, [x.detach() if is_plain(x) else x for x in values]):
            for example in _of_examples(line, local):
                text = prefix + line.text(example)
                if prints:
                    print(text, flush=True)


def _of_ranks(line: _Line, values: list[Any]) -> Iterator[tuple[str, bool, Sequence[Any]]]:
    """For each rank of this process: the prefix, whether it prints, and its values."""
    body = line.body
    if state.rank_mapped:
        yield f"[rank={world.rank()}] ", True, values
    elif body is None:
        place = line.mesh.coordinate() if line.mesh is not None else (world.rank(),)
        yield "", place is not None and not any(place), values
    elif body.mesh.transport == "simulation":
        ranks = common_frame(values, frame_over(body.mesh, body.axes))
        assert ranks is not None
        columns = [column(x, ranks) for x in values]
        for i, place in enumerate(ranks.coordinates()):
            yield _prefix(ranks.axes, place), True, [shards[i] for shards in columns]
    else:
        places = dict(zip(body.mesh.axis_names, body.mesh.coordinate() or (), strict=False))
        axes = body.mesh.ordered(body.axes)
        is_first = not any(place for axis, place in places.items() if axis not in axes)
        yield _prefix(axes, [places[axis] for axis in axes]), is_first, values


def _prefix(axes: Sequence[str], place: Sequence[int]) -> str:
    return f"[{', '.join(f'{axis}={i}' for axis, i in zip(axes, place, strict=True))}] "


def _of_examples(line: _Line, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The values of each example of `vmap`."""
    sizes: dict[int, int] = {}
    for x, levels in zip(values, line.batched, strict=True):
        shape = list(x.shape) if levels else []
        sizes.update((level, shape.pop(dim)) for level, dim in levels)
    for places in product(*(range(sizes[level]) for level in sorted(sizes))):
        at = dict(zip(sorted(sizes), places, strict=True))
        yield [_example(x, levels, at) for x, levels in zip(values, line.batched, strict=True)]


def _example(x: Any, levels: tuple[tuple[int, int], ...], places: dict[int, int]) -> Any:
    """The example of a value at a place for each level of `vmap`."""
    for level, dim in levels:
        x = x.select(dim, places[level])
    return x
