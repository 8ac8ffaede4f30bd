"""Every row of the pair table is the linear map its picture shows, and its transpose is the row it names.

The judge is a model on lists of tensors, one per rank of a group, written from the pictures. Gradients are judged by
the inner product: ``<A x, y> = <x, A^T y>`` for all x and y, where a value equal on all ranks counts once and a pending
sum meets a value that is equal on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fspmd import Mesh, P, TensorSpec, make_mesh
from fspmd.entries import Flat
from fspmd.flights import depart, land
from fspmd.pairs import PAIRS, Call, apply, call
from fspmd.transport import Options
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import LocalTensor, shards_of
from fspmd.transport.rows import Routes, plan_route
from fspmd.transport.windows import Reblock, Regroup

Blocks = list[Tensor]
Where = tuple[int, ...]

MESHES = {
    "one axis": ((4,), ("x",), ("x",)),
    "a single rank": ((1,), ("x",), ("x",)),
    "the minor axis": ((2, 3), ("x", "y"), ("y",)),
    "the major axis": ((3, 2), ("x", "y"), ("x",)),
    "two axes": ((2, 3), ("x", "y"), ("x", "y")),
    "two axes, minor first": ((2, 3), ("x", "y"), ("y", "x")),
    "outer and inner of three": ((2, 1, 3), ("x", "y", "z"), ("z", "x")),
}


# --- the model: one group, its blocks in rank order -----------------------------------------------------------------


def split(x: Tensor, o: Options, n: int) -> tuple[Tensor, ...]:
    sizes = o.sizes or (x.shape[o.dim] // n,) * n
    return x.split(sizes, o.dim)


def total(blocks: Blocks) -> Tensor:
    result = torch.zeros_like(blocks[0])
    for block in blocks:
        result = result + block
    return result


def reduce(b: Blocks, o: Options) -> Blocks:
    return [total(b)] * len(b)


def gather(b: Blocks, o: Options) -> Blocks:
    return [torch.cat(b, o.dim)] * len(b)


def reduce_scatter(b: Blocks, o: Options) -> Blocks:
    return list(split(total(b), o, len(b)))


def cut(b: Blocks, o: Options) -> Blocks:
    return [split(x, o, len(b))[i] for i, x in enumerate(b)]


def exchange(b: Blocks, o: Options) -> Blocks:
    return [torch.cat([split(x, o, len(b))[i] for x in b], o.concat_dim) for i in range(len(b))]


def permute(b: Blocks, o: Options) -> Blocks:
    source = {destination: source for source, destination in o.perm}
    return [b[source[i]] if i in source else torch.zeros_like(x) for i, x in enumerate(b)]


def broadcast(b: Blocks, o: Options) -> Blocks:
    return [b[o.root]] * len(b)


def reduce_to_root(b: Blocks, o: Options) -> Blocks:
    return [total(b) if i == o.root else torch.zeros_like(x) for i, x in enumerate(b)]


def reblock(b: Blocks, o: Options) -> Blocks:
    """From columns to rows, or back."""
    assert o.move is not None
    before, after = (1, 0) if o.move.source.partition[0] is None else (0, 1)
    return list(torch.cat(b, before).chunk(len(b), after))


def view(b: Blocks, o: Options) -> Blocks:
    """Two dims as one, or back."""
    return [x.flatten(0, 1) if x.ndim == 3 else x.unflatten(0, (2, -1)) for x in b]


def ragged(b: Blocks, o: Options) -> Blocks:
    """Rank i sends min(i, j, 2) + 1 of its rows from j on to rank j, which puts them at 3 * i; or the way back."""
    n = len(b)
    forward = b[0].shape[o.dim] == 2 * n
    rows = 3 * n if forward else 2 * n
    out = [x.new_zeros(*x.shape[: o.dim], rows, *x.shape[o.dim + 1 :]) for x in b]
    for i, j in itertools.product(range(n), repeat=2):
        for k in range(min(i, j, 2) + 1):
            here, there = (i, j + k), (j, 3 * i + k)
            (source, row), (target, place) = (here, there) if forward else (there, here)
            out[target].select(o.dim, place).add_(b[source].select(o.dim, row))
    return out


def ragged_routes(mesh: Mesh, axes: tuple[str, ...]) -> Routes:
    """The routes of `ragged` on every rank."""
    n, found = mesh.axis_size(axes), {}
    for members in groups(mesh, axes):
        for i, at in enumerate(members):
            sizes = [min(i, j, 2) + 1 for j in range(n)]
            offsets = [3 * j for j in range(n)]
            found[at] = plan_route(list(range(n)), sizes, offsets, sizes, (2 * n, 3 * n), n, torch.device("cpu"))
    return Routes(tuple(found[at] for at in coordinates(mesh)), frame_over(mesh, mesh.axis_names))


def same(b: Blocks, o: Options) -> Blocks:
    return b


def first(b: Blocks, o: Options) -> Blocks:
    return [b[0]] * len(b)


def at_root(b: Blocks, o: Options) -> Blocks:
    return [x if i == o.root else torch.zeros_like(x) for i, x in enumerate(b)]


def scaled(b: Blocks, o: Options) -> Blocks:
    return [x * o.factor for x in b]


def mean(b: Blocks, o: Options) -> Blocks:
    return [total(b) * o.factor] * len(b)


MODEL: dict[str, Callable[[Blocks, Options], Blocks]] = {
    "psum": reduce,
    "invariant_to_varying": same,
    "psum_unreduced": reduce,
    "invariant_to_reduced": same,
    "psum_to_reduced": reduce,
    "reduced_to_varying": same,
    "varying_to_unreduced": same,
    "invariant_to_unreduced": at_root,
    "reduced_to_invariant": same,
    "all_gather": gather,
    "psum_scatter": reduce_scatter,
    "all_gather_invariant": gather,
    "slice": cut,
    "all_gather_reduced": gather,
    "psum_scatter_unreduced": reduce_scatter,
    "all_to_all": exchange,
    "ragged_all_to_all": ragged,
    "ppermute": permute,
    "reblock": reblock,
    "view": view,
    "pbroadcast": broadcast,
    "psum_to_root": reduce_to_root,
    "broadcast_invariant": broadcast,
    "invariant_to_root": at_root,
    "per_rank": same,
    "identity": same,
    "held_once": first,
    "psum_varying": reduce,
    "leave_unchecked": first,
    "share_unchecked": scaled,
    "mean_unchecked": mean,
}
OF_EQUALS = {"leave_unchecked", "held_once"}  # rows of equal copies only
DUAL = {"I": "I", "V": "V", "U": "R", "R": "U"}  # the type of a gradient


def coordinates(mesh: Mesh) -> Iterator[Where]:
    return itertools.product(*(range(n) for n in mesh.shape.values()))


def groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[Where]]:
    """Coordinates that differ along ``axes`` only, in the order of a tuple of axes: major first."""
    rest = [a for a in mesh.axis_names if a not in axes]
    found = []
    for fixed in itertools.product(*(range(mesh.shape[a]) for a in rest)):
        members = []
        for moving in itertools.product(*(range(mesh.shape[a]) for a in axes)):
            at = dict(zip(rest, fixed, strict=True)) | dict(zip(axes, moving, strict=True))
            members.append(tuple(at[a] for a in mesh.axis_names))
        found.append(members)
    return found


def modelled(c: Call, x: dict[Where, Tensor]) -> dict[Where, Tensor]:
    out: dict[Where, Tensor] = {}
    for members in groups(c.mesh, c.axes):
        blocks = MODEL[c.pair.name]([x[at] for at in members], c.options)
        out.update(zip(members, blocks, strict=True))
    return out


def inner(x: dict[Where, Tensor], y: dict[Where, Tensor], kinds: tuple[str, str], c: Call) -> Tensor:
    """The pairing of a value and a cotangent: over ranks, or, of two invariant ones, once per group."""
    once = kinds == ("I", "I")
    places = [members[0] for members in groups(c.mesh, c.axes)] if once else list(coordinates(c.mesh))
    return torch.stack([(x[at] * y[at]).sum() for at in places]).sum()


# --- the code under test --------------------------------------------------------------------------------------------


def as_value(mesh: Mesh, x: dict[Where, Tensor], kind: str, axes: tuple[str, ...]) -> Tensor:
    """A simulated value of the blocks: held apart over all axes, or all but ``axes`` where it is equal there."""
    held = frame_over(mesh, mesh.axis_names if kind in "VU" else tuple(a for a in mesh.axis_names if a not in axes))
    zero = {mesh.axis_names.index(a) for a in mesh.axis_names if a not in held.axes}
    places = [at for at in coordinates(mesh) if not any(at[i] for i in zero)]
    shards = [x[at].clone() for at in places]
    return LocalTensor(shards, held) if held.axes else shards[0]


def blocks_of(mesh: Mesh, value: Tensor) -> dict[Where, Tensor]:
    shards = shards_of(value, frame_over(mesh, mesh.axis_names))
    return dict(zip(coordinates(mesh), (shard.detach() for shard in shards), strict=True))


def randoms(mesh: Mesh, shape_at: Callable[[Where], tuple[int, ...]], equal_over: tuple[str, ...], seed: int) -> Any:
    """A float64 block per coordinate; equal along ``equal_over``."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[Where, Tensor] = {}
    for at in coordinates(mesh):
        key = tuple(0 if a in equal_over else c for a, c in zip(mesh.axis_names, at, strict=True))
        if key not in drawn:
            drawn[key] = torch.randn(shape_at(at), generator=generator, dtype=torch.float64)
        drawn[at] = drawn[key]
    return {at: drawn[at] for at in coordinates(mesh)}


def equal_axes(c: Call, kind: str) -> tuple[str, ...]:
    return c.axes if kind in "IR" else ()


def position(c: Call, at: Where) -> int:
    (place,) = [members.index(at) for members in groups(c.mesh, c.axes) if at in members]
    return place


def calls() -> Iterator[tuple[str, str, bool]]:
    for name in PAIRS:
        for mesh in MESHES:
            yield name, mesh, False
            if PAIRS[name].kernel in ("gather", "reduce_scatter", "slice", "exchange"):
                yield name, mesh, True


def chunks(size: int, n: int) -> tuple[int, ...]:
    each = -(-size // n)
    return tuple(max(0, min(each, size - i * each)) for i in range(n))


def prepared(name: str, where: str, uneven: bool) -> tuple[Call, Any]:
    """A call, and the shape of its operand at each coordinate."""
    shape, names, axes = MESHES[where]
    mesh = make_mesh(shape, names, transport="simulation")
    n = mesh.axis_size(axes)
    kernel = PAIRS[name].kernel
    pairs = tuple((i, (i * 2 + 1) % n) for i in range(n)) if n % 2 else tuple((i, (i + 1) % n) for i in range(n - 1))
    lengths = chunks(n + 1, n) if n > 1 else (3,)
    whole = sum(lengths)
    options = Options(perm=pairs, root=n - 1, factor=1 / n)
    if kernel in ("gather", "reduce_scatter", "slice"):
        options = Options(dim=1, sizes=lengths if uneven else None)
    elif kernel == "exchange":
        options = Options(
            dim=1,
            concat_dim=0,
            sizes=lengths if uneven else None,
            concat_sizes=chunks(2 * n + 1, n) if uneven else None,
        )
    elif kernel == "reblock":
        columns, rows = (
            TensorSpec(mesh, P(*entries), (2 * n, 3 * n), torch.float64) for entries in ((None, axes), (axes,))
        )
        options = Options(move=Reblock(columns, rows))
    elif kernel == "view":
        dims, flat = (
            TensorSpec(mesh, P(*e), s, torch.float64)
            for e, s in (
                ((None, axes, None), (2, 2 * n + 1, 3)),
                ((Flat((2, None), (2 * n + 1, axes)), None), (4 * n + 2, 3)),
            )
        )
        options = Options(dims=Regroup(dims, flat))
    elif kernel == "ragged":
        options = Options(dim=1, routes=ragged_routes(mesh, axes))
    c = call(name, mesh, axes, options)

    def shape_at(at: Where) -> tuple[int, ...]:
        if kernel == "gather":
            return (2, lengths[position(c, at)] if uneven else 2, 3)
        if kernel == "exchange":
            return (options.concat_sizes[position(c, at)] if options.concat_sizes else 2, whole if uneven else 2 * n)
        if kernel == "reblock":
            return (2 * n, 3)
        if kernel == "view":
            return dims.local_shape(at)
        return (2, whole if uneven else 2 * n)

    return c, shape_at


def test_the_model_has_every_row() -> None:
    assert sorted(MODEL) == sorted(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_the_transpose_of_the_transpose_is_the_row_itself(name: str) -> None:
    row = PAIRS[name]
    back = PAIRS[row.transpose]
    # a transpose keeps copies apart as they are; of equal copies the first is the mean
    assert PAIRS[back.transpose].name == {
        "per_rank": "identity",
        "held_once": "identity",
        "leave_unchecked": "mean_unchecked",
    }.get(name, name)
    assert (back.source, back.target) == (DUAL[row.target], DUAL[row.source])


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "where", "uneven"), list(calls()))
def test_forward_is_the_model(name: str, where: str, uneven: bool) -> None:
    c, shape_at = prepared(name, where, uneven)
    x = randoms(c.mesh, shape_at, equal_axes(c, c.pair.source), 1)
    found = blocks_of(c.mesh, c.run(as_value(c.mesh, x, c.pair.source, c.axes)))
    for at, expected in modelled(c, x).items():
        torch.testing.assert_close(found[at], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "where", "uneven"), list(calls()))
def test_gradients_satisfy_the_inner_product(name: str, where: str, uneven: bool) -> None:
    """And so does the gradient of the gradient, which is the row again."""
    c, shape_at = prepared(name, where, uneven)
    source, target = c.pair.source, c.pair.target
    blocks = randoms(c.mesh, shape_at, equal_axes(c, source), 1)
    if name in OF_EQUALS:
        blocks = randoms(c.mesh, shape_at, c.axes, 1)
    x = as_value(c.mesh, blocks, source, c.axes).requires_grad_()
    y = apply(x, c)
    out_shapes = {at: tuple(block.shape) for at, block in modelled(c, blocks).items()}
    cotangent = randoms(c.mesh, out_shapes.__getitem__, equal_axes(c, DUAL[target]), 2)
    g = as_value(c.mesh, cotangent, DUAL[target], c.axes).requires_grad_()
    (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
    forward = inner(modelled(c, blocks), cotangent, (target, DUAL[target]), c)
    backward = inner(blocks, blocks_of(c.mesh, grad), (source, DUAL[source]), c)
    torch.testing.assert_close(backward, forward, rtol=1e-12, atol=1e-12)
    # the gradient's blocks are those of the transposed row
    for at, expected in modelled(c.transposed, cotangent).items():
        torch.testing.assert_close(blocks_of(c.mesh, grad)[at], expected, rtol=1e-12, atol=1e-12)
    # grad is linear in g: its derivative along v is the row applied to v
    v = randoms(c.mesh, shape_at, equal_axes(c, source), 3)
    if name in OF_EQUALS:
        v = randoms(c.mesh, shape_at, c.axes, 3)
    (second,) = torch.autograd.grad(grad, g, as_value(c.mesh, v, source, c.axes))
    for at, expected in modelled(c, v).items():
        torch.testing.assert_close(blocks_of(c.mesh, second)[at], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "where", "uneven"), list(calls()))
def test_forward_mode_is_the_row_itself(name: str, where: str, uneven: bool) -> None:
    c, shape_at = prepared(name, where, uneven)
    source = c.pair.source
    x = randoms(c.mesh, shape_at, equal_axes(c, source), 1)
    t = randoms(c.mesh, shape_at, equal_axes(c, source), 2)
    values = (as_value(c.mesh, blocks, source, c.axes) for blocks in (x, t))
    out, tangent = torch.func.jvp(lambda v: apply(v, c), (next(values),), (next(values),))
    for found, blocks in ((out, x), (tangent, t)):
        for at, expected in modelled(c, blocks).items():
            torch.testing.assert_close(blocks_of(c.mesh, found)[at], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_a_started_collective_lands_with_the_same_value_and_gradients(name: str) -> None:
    c, shape_at = prepared(name, "the minor axis", False)
    source = c.pair.source
    equal = c.axes if name in OF_EQUALS else equal_axes(c, source)
    blocks = randoms(c.mesh, shape_at, equal, 1)

    def derivatives(run: Callable[[Tensor], Tensor]) -> list[dict[Where, Tensor]]:
        x = as_value(c.mesh, blocks, source, c.axes).requires_grad_()
        y = run(x)
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        return [blocks_of(c.mesh, value) for value in (y, g, h)]

    waited = derivatives(lambda x: apply(x, c))
    flown = derivatives(lambda x: land(depart(x, c)))
    for a, b in zip(waited, flown, strict=True):
        for at in a:
            torch.testing.assert_close(a[at], b[at], rtol=0, atol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_a_batch_is_mapped_by_the_row_with_one_more_dim(name: str) -> None:
    c, shape_at = prepared(name, "the minor axis", False)
    source = c.pair.source
    rows = [randoms(c.mesh, shape_at, equal_axes(c, source), seed) for seed in range(3)]
    stacked = {at: torch.stack([row[at] for row in rows], 1) for at in rows[0]}
    mapped = torch.func.vmap(lambda v: apply(v, c), in_dims=1)(as_value(c.mesh, stacked, source, c.axes))
    for i, row in enumerate(rows):
        for at, expected in modelled(c, row).items():
            torch.testing.assert_close(blocks_of(c.mesh, mapped)[at][i], expected, rtol=1e-12, atol=1e-12)


def test_calls_are_interned_and_transposes_close_the_circle() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    c = call("all_gather", mesh, ("x",), Options(dim=1))
    held = frame_over(mesh, ("x",))
    for other in range(9000):  # more than the caches in front keep
        call("all_gather", mesh, ("x",), Options(dim=other + 2))
    for size in range(2, 1100):
        frame_over(make_mesh((size,), ("y",), transport="abstract"), ("y",))
    assert frame_over(mesh, ("x",)) is held
    assert call("all_gather", mesh, ("x",), Options(dim=1)) is c
    assert c.transposed.transposed is c
    assert repr(c) == "all_gather over ('x',)"
