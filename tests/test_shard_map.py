"""`shard_map`: how arguments bind and enter, how results leave, plans, partial-manual and nested maps, beside torch."""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from processes import Processes
from torch import Tensor, nn

import fspmd
from fspmd import (
    FspmdError,
    Mesh,
    P,
    Sharded,
    all_gather,
    axis_index,
    axis_size,
    device_get,
    device_put,
    from_local,
    grad,
    make_mesh,
    pmean,
    psum,
    psum_scatter,
    set_mesh,
    shard_map,
    typeof,
    vjp,
)

F64 = torch.float64
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")
CUBE = make_mesh((2, 1, 2), ("x", "y", "z"), transport="simulation")


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# --- values and gradients beside unsharded torch --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A mapped function of (x [N, K], w [K, M]) on a mesh, and what it is of the global tensors."""

    map: Callable[[Mesh, bool], Callable[..., Any]]
    reference: Callable[[Tensor, Tensor], Any]
    unchecked: bool = True  # whether it runs with check_vma=False as well


def case(body: Any, in_specs: Any, out_specs: Any, reference: Any, unchecked: bool = True) -> Case:
    """Bodies and specs are functions of the axes: all of the mesh, the first, and the last."""

    def mapped(mesh: Mesh, check_vma: bool) -> Callable[..., Any]:
        axes = mesh.axis_names, mesh.axis_names[0], mesh.axis_names[-1]
        specs = in_specs(*axes), out_specs(*axes)
        return shard_map(body(*axes), mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=check_vma)

    return Case(mapped, reference, unchecked)


def _partial_manual(mesh: Mesh, check_vma: bool) -> Callable[..., Any]:
    first = mesh.axis_names[0]
    return shard_map(
        lambda x, w: psum((x @ w).sin().sum(0), first),
        mesh=mesh,
        in_specs=(P(first), P()),
        out_specs=P(),
        axis_names={first},
        check_vma=check_vma,
    )


def _nested(mesh: Mesh, check_vma: bool) -> Callable[..., Any]:
    """Rows over the first axis, then columns over the others inside, where the first stays bound."""
    first, *others = mesh.axis_names
    rest = tuple(others)

    def inner(x: Tensor, w: Tensor) -> Any:
        return (x @ w).sin() * psum(torch.ones((), dtype=F64), first)

    def outer(x: Tensor, w: Tensor) -> Any:
        if not rest:
            return inner(x, w)
        y: Tensor = shard_map(inner, in_specs=(P(), P(None, rest)), out_specs=P(None, rest), check_vma=check_vma)(x, w)
        return y.cos()

    return shard_map(
        outer, mesh=mesh, in_specs=(P(first), P()), out_specs=P(first), axis_names={first}, check_vma=check_vma
    )


def _scattered(a: Any, f: Any, z: Any) -> Any:
    return lambda x, w: psum_scatter(x @ w, a, tiled=True, size=x.shape[0])


CASES = {
    "data parallel": case(
        lambda a, f, z: lambda x, w: psum((x @ w).tanh().square().sum(), a),
        lambda a, f, z: (P(a), P()),
        lambda a, f, z: P(),
        lambda x, w: (x @ w).tanh().square().sum(),
    ),
    "column parallel": case(
        lambda a, f, z: lambda x, w: (x @ w).sin(),
        lambda a, f, z: (P(), P(None, a)),
        lambda a, f, z: P(None, a),
        lambda x, w: (x @ w).sin(),
    ),
    "row parallel": case(
        lambda a, f, z: lambda x, w: psum(x @ w, a).sin(),
        lambda a, f, z: (P(None, a), P(a)),
        lambda a, f, z: P(),
        lambda x, w: (x @ w).sin(),
    ),
    "scattered": case(_scattered, lambda a, f, z: (P(None, a), P(a)), lambda a, f, z: P(a), lambda x, w: x @ w),
    "gathered weights": case(
        lambda a, f, z: lambda x, w: x @ all_gather(w, a, tiled=True, size=x.shape[1]),
        lambda a, f, z: (P(a), P(a)),
        lambda a, f, z: P(a),
        lambda x, w: x @ w,
    ),
    "two dims": case(
        lambda a, f, z: lambda x, w: (x @ w).exp(),
        lambda a, f, z: (P(f), P(None, z) if z != f else P()),
        lambda a, f, z: P(f, z if z != f else None),
        lambda x, w: (x @ w).exp(),
    ),
    "a tree of results": case(
        lambda a, f, z: lambda x, w: {"rows": (x @ w).sin(), "sum": [psum(x.sum(), a), w.cos()]},
        lambda a, f, z: (P(a), P()),
        lambda a, f, z: {"rows": P(a), "sum": P()},
        lambda x, w: {"rows": (x @ w).sin(), "sum": [x.sum(), w.cos()]},
    ),
    "nothing varies": case(
        lambda a, f, z: lambda x, w: pmean(x @ w, a), lambda a, f, z: P(), lambda a, f, z: P(), lambda x, w: x @ w
    ),
    "partial-manual": Case(_partial_manual, lambda x, w: (x @ w).sin().sum(0)),
}
MESHES = {"one": ((1,), ("x",)), "2x3": ((2, 3), ("x", "y")), "2x1x2": ((2, 1, 2), ("x", "y", "z"))}
#: of x [N, K] and w [K, M]: even on all meshes, uneven, and with empty blocks
SIZES = ((12, 12, 12), (7, 5, 9), (3, 2, 1))
#: plain tensors, and Sharded that lie elsewhere (both moved)
GIVEN: dict[str, Callable[[Tensor, Tensor, Mesh], Any]] = {
    "plain": lambda x, w, mesh: (x, w),
    "Sharded": lambda x, w, mesh: tuple(
        device_put([x, w], [P(None, mesh.axis_names[0]), P(mesh.axis_names[-1])], mesh=mesh)
    ),
}


def deviation(name: str, mesh: Mesh, sizes: tuple[int, int, int], given: str, check_vma: bool) -> float:
    """The largest difference from unsharded torch, of values and gradients."""
    n, k, m = sizes
    tested = CASES[name]

    def outcome(f: Callable[[Tensor, Tensor], Any]) -> list[Tensor]:
        leaves = [drawn(n, k).requires_grad_(), drawn(k, m, seed=1).requires_grad_()]
        results: Any = optree.tree_leaves(f(*leaves))
        weighted = torch.stack([(r * drawn(*r.shape, seed=i + 2)).sum() for i, r in enumerate(results)]).sum()
        grads = torch.autograd.grad(weighted, leaves, materialize_grads=True)
        return [*results, *grads]

    f = tested.map(mesh, check_vma)
    ours = outcome(lambda x, w: device_get(f(*GIVEN[given](x, w, mesh))))
    judged = outcome(tested.reference)
    if [x.shape for x in ours] != [x.shape for x in judged]:
        return float("inf")
    pairs = zip(ours, judged, strict=True)
    return max(float(((a - b).abs().max() / (1 + b.abs().max())).detach()) if b.numel() else 0.0 for a, b in pairs)


def settings(check_vma: bool) -> list[tuple[str, tuple[int, int, int], str]]:
    names = [name for name, tested in CASES.items() if check_vma or tested.unchecked]
    return list(itertools.product(names, SIZES, GIVEN))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_values_and_gradients_are_those_of_torch(mesh: str, check_vma: bool) -> None:
    shape, names = MESHES[mesh]
    on = make_mesh(shape, names, transport="simulation")
    far = {case: d for case in settings(check_vma) if (d := deviation(case[0], on, *case[1:], check_vma)) > 1e-12}
    assert far == {}


def deviations(check_vma: bool) -> dict[Any, float]:
    on = make_mesh((2, 2), ("x", "y"), device="cpu")
    found = {case: deviation(case[0], on, *case[1:], check_vma) for case in settings(check_vma)}
    return {case: d for case, d in found.items() if d > 1e-12}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_processes_give_the_same(four: Processes, check_vma: bool) -> None:
    assert four.run(deviations, check_vma) == [{}] * 4


@pytest.mark.parametrize("sizes", SIZES[:1])
@pytest.mark.parametrize("mesh", [GRID, CUBE])
def test_a_nested_map_has_the_outer_axes_bound(mesh: Mesh, sizes: tuple[int, int, int]) -> None:
    n, k, m = sizes
    for check_vma in (True, False):
        leaves = [drawn(n, k).requires_grad_(), drawn(k, m, seed=1).requires_grad_()]
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        ours = device_get(_nested(mesh, check_vma)(*leaves))
        judged = ((copies[0] @ copies[1]).sin() * 2).cos()
        torch.testing.assert_close(ours, judged, rtol=1e-12, atol=1e-12)
        ct = drawn(n, m, seed=3)
        ours.backward(ct)
        judged.backward(ct)
        for leaf, copy in zip(leaves, copies, strict=True):
            torch.testing.assert_close(leaf.grad, copy.grad, rtol=1e-12, atol=1e-12)


# --- partial-manual and nested --------------------------------------------------------------------------------------


def test_axes_not_named_are_not_bound_and_values_are_whole_over_them() -> None:
    def body(x: Tensor) -> Tensor:
        assert tuple(x.shape) == (2, 6)
        assert axis_size("y") == 3
        with pytest.raises(FspmdError, match="'x'"):
            axis_index("x")
        return x * 2

    x = drawn(6, 6)
    y = shard_map(body, mesh=GRID, in_specs=P("y"), out_specs=P("y"), axis_names={"y"})(x)
    assert y.spec.partition is P("y", None)
    assert torch.equal(device_get(y), x * 2)


def test_a_sharded_over_another_axis_is_made_whole_on_the_way_in() -> None:
    x = drawn(6, 6)
    y = shard_map(lambda x: x.cumsum(1), mesh=GRID, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(
        device_put(x, P("x", "y"), mesh=GRID)
    )
    torch.testing.assert_close(device_get(y), x.cumsum(1))


def nested_in_uneven(check_vma: bool) -> Any:
    """A nested map whose values differ in size along the outer axis: results, and a gradient."""
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")

    def inner(b: Tensor) -> tuple[Tensor, Tensor]:
        each = b * (1 + axis_index("y"))
        return psum(each, "y"), each[None]

    def outer(b: Tensor) -> tuple[Tensor, Tensor]:
        total, rows = shard_map(inner, in_specs=P(), out_specs=(P(), P("y")), check_vma=check_vma)(b)
        return total, rows.sum(0)

    f = shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=check_vma)
    loss: Any = lambda x: sum(device_get(y).square().sum() for y in f(x))  # noqa: E731
    x = drawn(5, 3)
    return [*map(device_get, f(x)), grad(loss)(x)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_nested_map_of_blocks_that_are_uneven_over_the_outer_axes(four: Processes, check_vma: bool) -> None:
    x = drawn(5, 3)
    expected = [3 * x, 3 * x, 36 * x]
    for found in (nested_in_uneven(check_vma), *four.run(nested_in_uneven, check_vma)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rows", [8, 5])
def test_a_sharded_on_another_mesh_of_the_same_ranks_is_moved(rows: int, check_vma: bool) -> None:
    flat, turned = CUBE.flatten(("x", "y"), "xy"), CUBE["z", "x", "y"]
    x = drawn(rows, 3)
    for mesh, spec in ((flat, P("xy")), (flat, P(("z", "xy"))), (turned, P(("x", "z"))), (turned, P(("y", "x"), "z"))):
        for lies in (P(("x", "y")), P("z"), P("x", "y"), P()):
            f = shard_map(lambda x: x * x, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
            out, pull = vjp(f, device_put(x, lies, mesh=CUBE))
            torch.testing.assert_close(device_get(out), x * x)
            torch.testing.assert_close(device_get(pull(torch.ones_like(x))[0]), 2 * x)


def test_types_of_blocks_in_a_nested_body() -> None:
    seen: list[tuple[str, ...]] = []

    def inner(x: Tensor, w: Tensor) -> Any:
        seen.append((repr(typeof(x)), repr(typeof(w)), repr(typeof(x.sum() * axis_index("y")))))
        return psum((x * w).sum(), ("x", "y"))

    @shard_map(mesh=GRID, in_specs=(P("x"), P()), out_specs=P(), axis_names={"x"})
    def outer(x: Tensor, w: Tensor) -> Tensor:
        total: Tensor = shard_map(inner, in_specs=(P(None, "y"), P("y")), out_specs=P())(x, w)
        seen.append((repr(typeof(total)),))
        return total

    x, w = drawn(4, 6), drawn(6)
    torch.testing.assert_close(device_get(outer(x, w)), (x * w).sum())
    assert seen == [("f64[2,2]{V:x,y}", "f64[2]{V:y}", "f64[]{V:x,y}"), ("f64[]",)]


# --- how a function is wrapped and its arguments bind ---------------------------------------------------------------


def test_as_a_function_a_decorator_and_partially_applied() -> None:
    def scale(x: Tensor, by: Tensor) -> Tensor:
        """Scales."""
        return x * by

    x, by = drawn(5), torch.tensor(3.0, dtype=F64)
    called = shard_map(scale, mesh=LINE, in_specs=(P("x"), P()), out_specs=P("x"))
    decorated = shard_map(mesh=LINE, in_specs=(P("x"), P()), out_specs=P("x"))(scale)
    by_partial = functools.partial(shard_map, mesh=LINE, in_specs=(P("x"), P()), out_specs=P("x"))(scale)
    of_partial = shard_map(functools.partial(scale, by=by), mesh=LINE, in_specs=(P("x"),), out_specs=P("x"))
    bound = functools.partial(called, x)
    for y in (called(x, by), decorated(x, by), by_partial(x, by), of_partial(x), bound(by), called(x, by=by)):
        assert torch.equal(device_get(y), x * 3)
    assert (called.__name__, called.__doc__, called.__wrapped__) == ("scale", "Scales.", scale)  # type: ignore[attr-defined]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def test_modules_methods_builtins_and_lambdas() -> None:
    module, x = Shift(), drawn(5)
    for f in (module, module.forward, lambda x: torch.add(x, 2.0), lambda *xs: xs[0] + 2):
        y = shard_map(f, mesh=LINE, in_specs=P("x"), out_specs=P("x"))(x)
        assert torch.equal(device_get(y), x + 2)
    y = shard_map(torch.add, mesh=LINE, in_specs=(P("x"), P()), out_specs=P("x"))(x, module.by)
    device_get(y).sum().backward()
    assert torch.equal(device_get(y), x + 2)
    assert module.by.grad is not None
    assert float(module.by.grad) == 5


def test_keyword_arguments_take_the_specs_of_their_parameters() -> None:
    seen: list[tuple[int, ...]] = []

    @shard_map(mesh=LINE, in_specs=(P("x"), P(), P(None, "x")), out_specs=P("x"))
    def f(a: Tensor, b: Tensor | None = None, *, c: Tensor | None = None) -> Tensor:
        seen.append(tuple(0 if t is None else t.numel() for t in (a, b, c)))
        return a

    a, b, c = drawn(8), drawn(8), drawn(2, 8)
    for call in (
        lambda: f(a, b, c=c),
        lambda: f(a, c=c, b=b),
        lambda: f(c=c, b=b, a=a),
        lambda: f(a, c=c),
        lambda: f(b=b, a=a),
    ):
        assert torch.equal(device_get(call()), a)
    assert seen == [(2, 8, 4)] * 3 + [(2, 0, 4), (2, 8, 0)]


def test_none_marks_what_is_handed_on_as_it_is() -> None:
    config, seen = {"n": 2, "act": torch.tanh, "rates": (0.5, None)}, []

    @shard_map(mesh=LINE, in_specs=(P("x"), None, None, P()), out_specs=(P("x"), None, P()))
    def f(x: Tensor, config: Any, whole: Any, absent: Any) -> Any:
        seen.append((config, whole, absent))
        return config["act"](x) * config["n"], config["n"], absent

    x, whole = drawn(4), device_put(drawn(4), P("x"), mesh=LINE)
    y, n, absent = f(x, config, whole, None)
    assert torch.equal(device_get(y), x.tanh() * 2)
    assert n == 2
    assert absent is None
    got = seen[0][0]
    assert got == config
    assert isinstance(seen[0][1], Sharded)  # a static Sharded stays one
    assert seen[0][1].local is whole.local
    for n in (3, 5):  # static values are not part of the plan
        assert torch.equal(device_get(f(x, {**config, "n": n}, whole, None)[0]), x.tanh() * n)


# --- trees ----------------------------------------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


class Params:
    """A class of the user's own, registered with optree below."""

    def __init__(self, w: Any, b: Any, name: str) -> None:
        self.w, self.b, self.name = w, b, name


optree.register_pytree_node(
    Params,
    lambda p: ((p.w, p.b), p.name, ("w", "b")),
    lambda name, children: Params(*children, name),
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def test_specs_are_prefixes_of_arguments_and_results() -> None:
    tree = {"layers": [{"w": drawn(4, 4), "b": drawn(4)}, {"w": drawn(8, 4), "b": drawn(8)}], "scale": drawn()}
    shapes = []

    def body(tree: Any, point: Any) -> Any:
        shapes.append([tuple(t.shape) for t in optree.tree_leaves(tree)])
        return tree["layers"], (tree["scale"], point)

    mapped = shard_map(
        body,
        mesh=LINE,
        in_specs=({"layers": [P("x"), P(("x",))], "scale": P()}, P("x")),
        out_specs=(P("x"), [P(), Point(P("x"), P("x"))]),
    )
    layers, (scale, point) = mapped(tree, Point(drawn(4), drawn(8)))
    assert shapes == [[(1,), (1, 4), (2,), (2, 4), ()]]
    assert optree.tree_map(torch.equal, device_get([layers, scale]), [tree["layers"], tree["scale"]])
    assert type(point) is Point


def test_results_keep_their_tree_types() -> None:
    x = drawn(4)

    def trees(x: Tensor) -> dict[str, Any]:
        return {
            "point": Point(x, [x]),
            "ordered": OrderedDict([("z", x), ("a", x)]),
            "params": Params(x, None, "layer"),
            "none": None,
            "empty": {},
            "tuple": (x,),
        }

    seen: list[Any] = []
    f = shard_map(lambda t: (seen.append(t), t)[1], mesh=LINE, in_specs=P("x"), out_specs=P("x"))  # type: ignore[func-returns-value]
    for _ in range(2):
        out = f(trees(x))
        for got in (seen.pop(), out):
            assert list(got) == list(trees(x))
            assert type(got["point"]) is Point
            assert type(got["point"].y) is list
            assert type(got["ordered"]) is OrderedDict
            assert list(got["ordered"]) == ["z", "a"]
            assert (type(got["params"]), got["params"].name, got["params"].b) == (Params, "layer", None)
            assert (got["none"], got["empty"], type(got["tuple"])) == (None, {}, tuple)
        assert all(isinstance(s, Sharded) for s in optree.tree_leaves(out, is_leaf=lambda s: isinstance(s, Sharded)))
        assert optree.tree_structure(device_get(out)) == optree.tree_structure(trees(x))


def test_an_empty_result_and_no_arguments() -> None:
    assert shard_map(lambda: (), mesh=LINE, in_specs=(), out_specs=())() == ()
    made = shard_map(lambda: axis_index("x")[None], mesh=LINE, in_specs=(), out_specs=P("x"))()
    assert device_get(made).tolist() == [0, 1, 2, 3]
    assert shard_map(lambda x: {"a": None}, mesh=LINE, in_specs=P(), out_specs=P())(drawn(2)) == {"a": None}


# --- what moves -----------------------------------------------------------------------------------------------------


def test_a_sharded_of_the_right_spec_is_not_moved() -> None:
    x = device_put(drawn(8, 4), P("x"), mesh=LINE)
    seen: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    for check_vma in (True, False):
        for spec in (P("x"), P("x", None), P(("x",))):
            y = shard_map(body, mesh=LINE, in_specs=spec, out_specs=P("x"), check_vma=check_vma)(x)
            assert seen[-1] is x.local
            assert y.spec is x.spec
    shard_map(body, mesh=LINE, in_specs=P(None, "x"), out_specs=P(None, "x"))(x)
    assert tuple(seen[-1].shape) == (8, 1)


def test_results_lie_as_out_specs_say() -> None:
    y, z = shard_map(
        lambda x: (x, psum(x, "y")), mesh=GRID, in_specs=P("y", "x"), out_specs=(P("y", "x"), P(None, "x"))
    )(drawn(6, 4))
    assert repr(y) == "Sharded f64[6@y, 4@x] on mesh(x=2, y=3)"
    assert repr(z) == "Sharded f64[2, 4@x] on mesh(x=2, y=3)"


def test_types_of_a_sharded_do_not_outlive_the_call() -> None:
    x = device_put(drawn(4), P("x"), mesh=LINE)
    shard_map(lambda x: x * 1, mesh=LINE, in_specs=P("x"), out_specs=P("x"))(x)
    terms = from_local(x.local, P(unreduced={"x"}), mesh=LINE)  # the same blocks, as terms of a sum
    total = shard_map(lambda x: psum(x, "x"), mesh=LINE, in_specs=P(unreduced={"x"}), out_specs=P())(terms)
    torch.testing.assert_close(device_get(total), device_get(x).sum(0, keepdim=True))


# --- meshes ---------------------------------------------------------------------------------------------------------


def test_the_mesh_set_is_the_default_and_may_change_between_calls() -> None:
    f = shard_map(lambda x: psum(x, "x"), in_specs=P("x"), out_specs=P())
    x = torch.arange(4.0)
    for size, expected in ((2, [2.0, 4.0]), (4, [6.0]), (2, [2.0, 4.0])):
        with set_mesh(make_mesh((size,), ("x",), transport="simulation")):
            assert device_get(f(x)).tolist() == expected
    with set_mesh(LINE):
        on_grid = shard_map(lambda x: psum(x, "x"), mesh=GRID, in_specs=P("x"), out_specs=P())
        assert on_grid(x).spec.mesh is GRID


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is planned from now on, by the name of the body."""
    module = importlib.import_module("fspmd.local_view.shard_map")
    made: list[str] = []
    real = module.make_plan

    def counted(*args: Any) -> Any:
        plan = real(*args)
        made.append(plan.body.name)
        return plan

    monkeypatch.setattr(module, "make_plan", counted)
    return made


def test_a_call_is_planned_once_per_tree_and_specs(plans: list[str]) -> None:
    @shard_map(mesh=LINE, in_specs=(P("x"), P()), out_specs=P("x"))
    def f(tree: Any, w: Tensor) -> Any:
        return optree.tree_map(lambda t: t * w, tree)

    w = torch.tensor(2.0, dtype=F64)

    def check(tree: Any) -> int:
        before = len(plans)
        for _ in range(2):
            out = device_get(f(tree, w))
            optree.tree_map(lambda a, b: torch.testing.assert_close(a, b * 2), out, device_get(tree))
        return len(plans) - before

    assert check(drawn(4)) == 1
    assert check(drawn(8, 3)) == 0  # another shape
    assert check(drawn(5).requires_grad_()) == 0
    assert check(drawn(0, 2)) == 0
    assert check(drawn(4)) == 0
    assert check({"a": drawn(4)}) == 1
    assert check({"b": drawn(4)}) == 1
    assert check({"b": drawn(5)}) == 0
    assert check(device_put(drawn(4), P("x"), mesh=LINE)) == 1
    assert check(device_put(drawn(4), P(), mesh=LINE)) == 1
    assert check(device_put(drawn(4, seed=7), P(), mesh=LINE)) == 0
    assert check(device_put(drawn(5), P("x"), mesh=LINE)) == 1  # a spec holds the shape
    assert check(nn.Parameter(drawn(4))) <= 1
    assert check(nn.Parameter(drawn(5))) == 0


def test_plans_of_one_function_do_not_mix() -> None:
    seen: list[Any] = []

    @shard_map(mesh=LINE, in_specs=(P("x"), P("x")), out_specs=P("x"))
    def f(a: Any, b: Any = None) -> Any:
        seen.append((a is None, b is None))
        return b if a is None else a

    x = drawn(8)
    assert torch.equal(device_get(f(x, None)), x)
    assert torch.equal(device_get(f(None, x)), x)
    assert torch.equal(device_get(f(x, x + 1)), x)
    assert torch.equal(device_get(f(b=x, a=None)), x)
    assert torch.equal(device_get(f(a=x, b=None)), x)
    assert seen == [(False, True), (True, False), (False, False), (True, False), (False, True)]


def test_results_may_change_their_tree_from_call_to_call() -> None:
    f = shard_map(lambda x, n: [x] * n, mesh=LINE, in_specs=(P("x"), None), out_specs=P("x"))
    x = drawn(5)
    for n in (2, 0, 3, 2, 1):
        out = f(x, n)
        assert len(out) == n
        assert all(torch.equal(device_get(y), x) for y in out)


def test_an_error_in_the_body_leaves_nothing_behind() -> None:
    def body(x: Tensor, fail: bool) -> Any:
        if fail:
            raise RuntimeError("on purpose")
        return psum(x, "x")

    f = shard_map(body, mesh=LINE, in_specs=(P("x"), None), out_specs=P())
    for fail in (True, False, True, False):
        if fail:
            with pytest.raises(RuntimeError, match="on purpose"):
                f(torch.ones(4), fail)
            with pytest.raises(FspmdError, match="outside"):
                psum(torch.ones(2), "x")
        else:
            assert device_get(f(torch.ones(4), fail)).tolist() == [4.0]


# --- keys of dicts --------------------------------------------------------------------------------------------------


class _Name(enum.Enum):
    A = "a"
    B = "b"


@pytest.mark.parametrize(
    ("keys", "sort"),
    [
        (("b", "a"), True),
        ((2, 1.5), True),
        (("b", 1, (2, "c")), True),
        ((_Name.B,), True),
        ((None, "a"), True),
        ((_Name.B, _Name.A), False),
        ((frozenset("a"), frozenset("b")), False),
        ((object(), object()), False),
        ((("a", 1), ("a", "b")), False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_keys_of_dicts_must_sort_before_leaves_are_taken_in_order(
    keys: tuple[Any, ...], sort: bool, nested: bool
) -> None:
    """Optree takes other keys in the order in which each rank has put them in, and leaves would be mixed up."""
    mesh = make_mesh((2,), ("x",))

    def tree(x: Any) -> Any:
        made = dict.fromkeys(keys, x)
        return [x, {"t": (made,)}] if nested else made

    def mapped(body: Any, in_specs: Any, out_specs: Any) -> Any:
        return shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    x, laid = torch.arange(4.0), fspmd.device_put(torch.arange(4.0), P("x"), mesh=mesh)
    for call in (
        lambda: fspmd.device_put(tree(x), P("x"), mesh=mesh),
        lambda: fspmd.device_get(tree(laid)),
        lambda: fspmd.reshard(tree(laid), P()),
        lambda: mapped(lambda t: x.sum(), P("x"), P())(tree(x)),
        lambda: mapped(tree, P("x"), P("x"))(x),
        lambda: mapped(lambda t: fspmd.psum(tree(t), "x") and None, P("x"), None)(x),
    ):
        if sort:
            call()
        else:
            with pytest.raises(fspmd.TreeError, match="of a dict do not sort"):
                call()


def test_names_of_leaves_are_made_for_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh((2,), ("x",), transport="simulation")
    tree = {"b": [torch.arange(4.0), torch.ones(2)], "a": torch.ones(2)}
    codified = []
    codify = optree.PyTreeAccessor.codify
    monkeypatch.setattr(optree.PyTreeAccessor, "codify", lambda *args: codified.append(1) or codify(*args))
    x = fspmd.reshard(device_put(tree, P("x"), mesh=mesh), P("x"))
    out = shard_map(lambda tree: tree, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
    assert torch.equal(device_get(out)["b"][0], torch.arange(4.0))
    assert not codified
    with pytest.raises(FspmdError, match=r"tree\['b'\]\[1\] of shape"):
        device_put(tree, {"a": P("x"), "b": [P("x"), P("x", "y")]}, mesh=mesh)
