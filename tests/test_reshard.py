"""`reshard`, `with_spec` and `explain`: by brute force over coordinates, from mesh to mesh too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reshard_programs
import torch
from full import FULL
from processes import Processes
from simulated import layouts
from test_redistribute import check_blocks, value

from fspmd import (
    ArgumentError,
    FspmdError,
    Mesh,
    MeshError,
    P,
    Sharded,
    SpecError,
    TensorSpec,
    TreeError,
    communication_log,
    device_get,
    device_put,
    explain,
    grad,
    make_mesh,
    reshard,
    set_mesh,
    shard_map,
    with_spec,
)
from fspmd.inspection.watch import communicates
from fspmd.redistribution.routes import Route
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

F64 = torch.float64


def mesh(sizes: tuple[int, ...], names: str, ranks: Any = None, transport: str | None = "simulation") -> Mesh:
    return make_mesh(sizes, tuple(names), ranks=ranks, transport=transport)


LINE = mesh((4,), "x")
#: (from, to): the same ranks cut otherwise, in another order, renamed, fewer, more, and others
MESHES: dict[str, tuple[Any, Any]] = {
    "split": (((4,), "x"), ((2, 2), "ab")),
    "joined": (((2, 2), "ab"), ((4,), "x")),
    "transposed": (((2, 2), "xy"), ((2, 2), "ab", (0, 2, 1, 3))),
    "reversed": (((4,), "x"), ((4,), "x", (3, 2, 1, 0))),
    "renamed": (((2, 2), "xy"), ((2, 2), "yx")),
    "three by two": (((2, 3), "xy"), ((3, 2), "ab")),
    "six": (((6,), "x"), ((2, 3), "ab")),
    "fewer": (((2, 2), "xy"), ((2,), "a", (1, 2))),
    "more": (((2,), "a", (1, 2)), ((2, 2), "xy")),
    "others": (((2,), "x"), ((2,), "x", (2, 3))),
}


def both(name: str, transport: str | None = "simulation") -> tuple[Mesh, Mesh]:
    before, after = MESHES[name]
    return mesh(*before, transport=transport), mesh(*after, transport=transport)


def ways(before: Mesh, after: Mesh, ndim: int, every: int, first: int = 0) -> list[tuple[P, P]]:
    return list(itertools.product(layouts(before, ndim), layouts(after, ndim)))[first::every]


@pytest.mark.one_of(10)
@pytest.mark.parametrize("shape", [(12, 12), (5, 7), (1, 4), (0, 6)])
@pytest.mark.parametrize("name", MESHES)
def test_from_mesh_to_mesh(name: str, shape: tuple[int, ...]) -> None:
    """Values, gradients, and the gradient's gradient, which is the weight again."""
    before, after = both(name)
    x, weight = value(shape), value(shape) + 2
    for source, target in ways(before, after, 2, 1 if FULL else 17, sum(shape) % 17):
        leaf = x.clone().requires_grad_()
        found = reshard(device_put(leaf, source, mesh=before), target, after)
        assert found.spec is TensorSpec(after, target, shape, F64)
        check_blocks(found, x)
        w = weight.clone().requires_grad_()
        (first,) = torch.autograd.grad((device_get(found) * w).sum(), leaf, create_graph=True)
        torch.testing.assert_close(first, weight, rtol=1e-14, atol=1e-14)
        (second,) = torch.autograd.grad((first * x).sum(), w)
        torch.testing.assert_close(second, x, rtol=1e-14, atol=1e-14)


def test_scalars_go_from_mesh_to_mesh() -> None:
    before, after = both("six")
    for source, target in ways(before, after, 0, 1):
        found = reshard(device_put(torch.tensor(3.0, dtype=F64), source, mesh=before), target, after)
        torch.testing.assert_close(device_get(found), torch.tensor(3.0, dtype=F64))


#: layouts that put the same blocks on the same ranks
SAME = (
    ("split", P("x"), P(("a", "b"))),
    ("split", P(), P()),
    ("split", P(unreduced={"x"}), P(unreduced={"a", "b"})),
    ("split", P(reduced={"x"}), P(reduced={"a", "b"})),
    ("joined", P(None, ("a", "b")), P(None, "x")),
    ("transposed", P("x", "y"), P("b", "a")),
    ("renamed", P("x", "y"), P("y", "x")),
    ("renamed", P("x", unreduced={"y"}), P("y", unreduced={"x"})),
    ("fewer", P(), P("a")),
)


@pytest.mark.parametrize(("name", "source", "target"), SAME)
def test_where_blocks_lie_alike_nothing_moves(name: str, source: P, target: P) -> None:
    before, after = both(name)
    price = explain(TensorSpec(before, source, (12, 12), F64), target, after).price
    assert price.moved == 0
    assert price.time < 1


def test_between_meshes_no_rank_receives_what_it_has() -> None:
    """Rows over four ranks to rows over two: half of the new block is there; a whole gather would be three quarters."""
    before, after = both("split")
    spec = TensorSpec(before, P("x"), (64, 8), F64)
    whole = 64 * 8 * 8
    assert explain(spec, P("a"), after).price.moved == whole / 4
    assert explain(spec, P("b"), after).price.moved == whole / 2
    assert explain(spec, P(None, "a"), after).price.moved == whole * 3 / 8
    assert explain(spec, P(), after).price.moved == whole * 3 / 4


def test_pending_sums_are_scattered_before_they_move() -> None:
    before, after = both("split")
    found = explain(TensorSpec(before, P(unreduced={"x"}), (64, 8), F64), P(("a", "b")), after)
    ((_, route),) = found.routes
    assert [step.call.pair.name for step in route.steps] == ["psum_scatter_unreduced", "reblock"]
    assert route.steps[1].price.moved == 0


#: uneven dims, of which no rank receives more than it lacks: (from, to, elements received by the busiest rank)
UNEVEN = (
    (P(("x", "y")), P("x"), 2 * 6),  # 3 rows of 5, of which the last rank of the group has 1
    (P("x"), P(("x", "y")), 0),
    (P(("x", "y")), P("y"), 3 * 6),  # a rank that holds row 3 and needs rows 0 to 2
)


@pytest.mark.parametrize(("source", "target", "elements"), UNEVEN)
def test_uneven_dims_move_only_what_is_lacking(source: P, target: P, elements: int) -> None:
    grid = mesh((2, 2), "xy")
    assert explain(TensorSpec(grid, source, (5, 6), F64), target).price.moved == elements * 8


def test_what_gradients_follow_is_explained_as_it_goes() -> None:
    """By way of other layouts forward, directly where that is quicker there and back."""
    cube, source, target = mesh((2, 2, 2), "xyz"), P("z", None, unreduced={"x"}), P("y", ("x", "z"))
    ran = []
    for followed in (False, True):
        x = device_put(value((64, 512)), source, mesh=cube).requires_grad_(followed)
        ((_, way),) = explain(x, target).routes
        with communication_log() as log:
            reshard(x, target)
        ran.append([(one.kind, one.axes) for one in log])
        assert [(step.call.pair.name, step.call.axes) for step in way.steps if communicates(step.call)] == ran[-1]
    assert ran[0] != ran[1]


#: meshes on which and from which to which each layout goes to each other
SITES = [*(((sizes, names), None) for sizes, names in (((4,), "x"), ((6,), "x"), ((2, 2), "xy"), ((2, 3), "xy")))]
SITES += [*MESHES.values()]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("shape", [(12, 12), (5, 7), (0, 6)])
@pytest.mark.parametrize(("here", "there"), SITES)
def test_what_is_explained_is_what_is_recorded(here: Any, there: Any, shape: tuple[int, ...]) -> None:
    """Step by step: what moves, over which axes, bytes, time and peak; every step by brute force over elements."""
    before = mesh(*here)
    after = mesh(*there) if there else before
    for source, target in ways(before, after, 2, 1 if FULL else 29, sum(shape) % 29):
        x = device_put(value(shape), source, mesh=before)
        ((_, way),) = explain(x, target, after).routes
        with communication_log() as log:
            reshard(x, target, after)
        explained = [step for step in way.steps if communicates(step.call)]
        assert [(s.call.pair.name, s.call.axes) for s in explained] == [(one.kind, one.axes) for one in log]
        for step, one in zip(explained, log, strict=True):
            expected = step.price.moved, step.price.time, step.price.peak
            assert (one.price.moved, one.price.time, one.price.peak) == pytest.approx(expected, rel=1e-12)
        check_accounts(x, way)


def check_accounts(x: Sharded, way: Route) -> None:
    """Run the steps: blocks fill the peak, and what a rank is said to receive is what it lacks.

    Collectives other than reblocks are reckoned with blocks of equal lengths.
    """
    held, spec = x.local, x.spec
    for step in way.steps:
        result = step.call.run(held)
        sizes = [
            [part.nbytes for part in shards_of(value, frame_over(on.mesh, on.mesh.axis_names))]
            for value, on in ((held, spec), (result, step.spec))
        ]
        assert max(sizes[0]) + max(sizes[1]) == step.price.peak
        name = step.call.pair.name
        if name == "reblock" or (name.startswith("all_") and all(n % 12 == 0 for n in spec.shape)):
            assert step.price.moved == lacked(spec, step.spec) * spec.dtype.itemsize
        held, spec = result, step.spec
    assert spec is way.target


def lacked(before: TensorSpec, after: TensorSpec) -> int:
    """Elements of its new block that the rank which lacks most has not."""
    most = 0
    for rank in after.mesh.ranks:
        blocks = []
        for spec in (before, after):
            at = spec.mesh.coordinate(rank)
            spans = [] if at is None else zip(spec.offset(at), spec.local_shape(at), strict=True)
            blocks.append(set() if at is None else {*itertools.product(*(range(a, a + n) for a, n in spans))})
        most = max(most, len(blocks[1] - blocks[0]))
    return most


def test_trees_take_a_prefix_of_specs() -> None:
    tree = {"a": torch.ones(8, 4), "b": [torch.zeros(4), torch.tensor(1.0)], "n": None}
    placed = device_put(tree, P(), mesh=LINE)
    moved = reshard(placed, {"a": P(None, "x"), "b": [P("x"), None], "n": P()})
    assert [x.spec.partition for x in (moved["a"], *moved["b"])] == [P(None, "x"), P("x"), P()]
    assert moved["n"] is None
    assert moved["b"][1] is placed["b"][1]
    assert str(explain(placed, P("x") and {"a": P("x"), "b": None, "n": None})).startswith("f32[8, 4] -> f32[8@x, 4]")


def test_with_spec_inside_a_function_has_gradients() -> None:
    x, w = value((8, 6)), value((6, 4))

    def loss(w: Any, x: Any) -> Any:
        h = with_spec(x @ w, P(None, "x"))
        return (with_spec({"h": h}, P("x"))["h"] ** 2).sum()

    expected = torch.func.grad(loss)(w, x)  # without a mesh plain tensors stay as they are
    placed = device_put(w, P("x"), mesh=LINE), device_put(x, P("x"), mesh=LINE)
    found = grad(loss)(*placed)
    assert found.spec.partition == P("x", None)
    torch.testing.assert_close(device_get(found), expected, rtol=1e-12, atol=1e-12)


def test_plain_tensors_are_cut_for_the_ambient_mesh() -> None:
    x = torch.arange(8.0)
    assert with_spec(x, P("x")) is x
    with set_mesh(LINE):
        assert with_spec(x, P("x")).spec.partition == P("x")
        torch.testing.assert_close(device_get(reshard(x, P("x"))), x)
    torch.testing.assert_close(device_get(reshard(x, P("x"), LINE)), x)
    with pytest.raises(MeshError, match=r"reshard has no mesh; pass mesh=make_mesh"):
        reshard(x, P("x"))


def in_body(f: Any) -> Any:
    return shard_map(lambda b: f(b, P("x")), mesh=LINE, in_specs=P("x"), out_specs=P("x"))


MISTAKES: tuple[tuple[Any, type[FspmdError], str], ...] = (
    (lambda x: reshard(x, P("z")), SpecError, r"tree of shape \(8,\): P\('z'\) names the axis 'z', but mesh\(x=4\)"),
    (lambda x: reshard([x, x], [P("x")]), TreeError, "specs has 1 entry, but tree has 2"),
    (lambda x: reshard({"a": x}, {"a": P(None, "x")}), SpecError, r"tree\['a'\] of shape \(8,\)"),
    (lambda x: with_spec({"a": x}, {"b": P()}), TreeError, "with_spec: specs does not match the tree"),
    (lambda x: reshard(x, P(), "x"), ArgumentError, "reshard got the string 'x' for mesh"),
    (lambda x: reshard(3.0, P(), LINE), ArgumentError, r"tree is the float 3.0; write torch.tensor\(3.0\)"),
    (lambda x: explain(torch.ones(3), P()), ArgumentError, "explain: tree is a tensor of shape"),
    (in_body(reshard), ArgumentError, "reshard was called inside shard_map"),
    (in_body(with_spec), ArgumentError, "with_spec was called inside shard_map"),
)


@pytest.mark.parametrize(("call", "error", "match"), MISTAKES)
def test_mistakes(call: Any, error: type[FspmdError], match: str) -> None:
    with pytest.raises(error, match=match):
        call(device_put(torch.arange(8.0), P("x"), mesh=LINE))


def _on_processes(name: str, shape: tuple[int, ...], every: int) -> None:
    before, after = both(name, None)
    simulated = both(name)
    x, weight = value(shape), value(shape) + 2
    here = after.coordinate()
    for source, target in ways(*simulated, 2, every, sum(shape) % every):
        spec = TensorSpec(before, source, shape, F64)
        leaf = x.clone().requires_grad_()
        placed = (
            Sharded(leaf.new_empty(0), spec) if before.coordinate() is None else device_put(leaf, source, mesh=before)
        )
        found = reshard(placed, target, after)
        expected = reshard(device_put(x, source, mesh=simulated[0]), target, simulated[1])
        if here is None:
            assert found.local.numel() == 0
            continue
        blocks = shards_of(expected.local, frame_over(simulated[1], simulated[1].axis_names))
        mine = blocks[list(itertools.product(*map(range, after.shape.values()))).index(here)]
        torch.testing.assert_close(found.local.detach(), mine, rtol=1e-14, atol=1e-14)
        if set(before.ranks) == set(after.ranks):
            (device_get(found) * weight).sum().backward()
            torch.testing.assert_close(leaf.grad, weight, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("count", "names"),
    [(4, ("split", "joined", "transposed", "reversed", "fewer", "more", "others")), (6, ("three by two", "six"))],
)
def test_on_processes_as_simulated(count: int, names: tuple[str, ...]) -> None:
    with Processes(count) as pool:
        for name in names:
            for shape in ((12, 12), (5, 7)):
                pool.run(_on_processes, name, shape, 7 if FULL else 211)


# --- dtypes on the way, and handles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("sizes", [(4,), (2, 3)])
def test_values_move_in_one_dtype_and_gradients_in_another(sizes: tuple[int, ...], wait: bool) -> None:
    """Beside casts of whole tensors: values forward, gradients by what their sum in a dtype gives."""
    mesh, half = make_mesh(sizes, ("x", "y")[: len(sizes)]), torch.bfloat16
    whole, weight = torch.randn(5, 6), torch.randn(5, 6)
    for source, target in ((P("x"), P()), (P(None, "x"), P("x")), (P(), P("x")), (P("x"), P("x"))):
        for forward, backward in ((half, None), (half, torch.float32), (None, half), (half, half)):
            x = device_put(whole, source, mesh=mesh).requires_grad_()
            with communication_log() as log:
                y = reshard(x, target, forward_dtype=forward, backward_dtype=backward, wait=wait)
                y = y if wait else y.wait()
                (y.to(torch.float32) * device_put(weight, target, mesh=mesh)).sum().backward()
            assert (y.dtype, x.grad.dtype) == (forward or torch.float32, torch.float32)
            torch.testing.assert_close(device_get(y), whole.to(y.dtype))
            bound = weight.to(y.dtype).to(backward or torch.float32).to(torch.float32)
            torch.testing.assert_close(device_get(x.grad), bound, rtol=0.02, atol=0.02)
            moved = [one for one in log if one.cause.what.startswith("reshard")]
            assert all(one.dtype == y.dtype for one in moved if not one.backward)
            assert all(one.dtype == (backward or torch.float32) for one in moved if one.backward)


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 3)])
def test_dtypes_of_both_ways_in_all_kinds_of_programs(sizes: tuple[int, ...]) -> None:
    reshard_programs.run(list(range(30 if FULL else 1)), sizes)


def test_gradients_of_gradients_go_both_ways() -> None:
    mesh = make_mesh((4,), ("x",))
    whole = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    x = device_put(whole.detach(), P("x"), mesh=mesh).requires_grad_()

    def second(x: Any, y: Any) -> Any:
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    y = reshard(x, P(), backward_dtype=torch.float32)
    expected = second(whole, whole * 1)
    torch.testing.assert_close(device_get(second(x, y)), expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_dtype_and_no_wait_is_refused() -> None:
    x = device_put(torch.ones(4), P("x"), mesh=make_mesh((4,), ("x",)))
    with pytest.raises(
        ArgumentError, match=r"reshard got .* for forward_dtype; expected a floating dtype such as torch\.bfloat16"
    ):
        reshard(x, P(), forward_dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"the dtype torch\.int32 for backward_dtype"):
        reshard(x, P(), backward_dtype=torch.int32)
    with pytest.raises(ArgumentError, match="for wait; expected True, or False for a handle"):
        reshard(x, P(), wait=1)  # type: ignore[arg-type]
    other = make_mesh((2, 2), ("a", "b"))
    with pytest.raises(ArgumentError, match="must be equal there; give the same backward_dtype"):
        reshard(x, P("a"), other, forward_dtype=torch.bfloat16)
