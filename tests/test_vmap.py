"""`vmap` is a loop over the mapped dim: wherever it lies, outside and in a body, over a mesh axis, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from simulated import GRID
from torch import Tensor, func
from transform_programs import F64, close, leaves_of, same_layout

import fspmd
from fspmd import P, device_get, device_put, psum, shard_map

BATCH = 5
Dims = dict[str, int | None]  # the mapped dim of each argument, from the front
SHAPES = {"bias": (3,), "rows": (7, 3), "x": (3,)}
#: in_dims, out_dims
DIMS: list[tuple[Any, Any]] = [
    (0, 0),
    (-1, -1),
    ((0, None), 0),
    ((None, 0), {"y": 1, "s": -1, "b": None}),
    (({"rows": 1, "bias": None}, -1), {"y": -1, "s": 0, "b": None}),
    (({"rows": -2, "bias": 1}, 0), {"y": -2, "s": -1, "b": 1}),
    ([{"rows": 2, "bias": 0}, None], 0),
]


def once(tree: Any, x: Tensor, total: Callable[[Tensor], Tensor]) -> Any:
    y = (tree["rows"] @ x).sin() * tree["bias"][0]
    return {"y": y, "s": total(y.square().sum()), "b": tree["bias"].cos()}


def summed(x: Tensor) -> Tensor:
    total: Tensor = psum(x, "x")
    return total


def tree_of(values: dict[str, Any]) -> tuple[Any, Any]:
    return {"rows": values["rows"], "bias": values["bias"]}, values["x"]


def mapped_dims(in_dims: Any) -> Dims:
    first, x = in_dims if isinstance(in_dims, (tuple, list)) else (in_dims, in_dims)
    dims = {**(first if isinstance(first, dict) else {"rows": first, "bias": first}), "x": x}
    return {name: None if d is None else d % (len(SHAPES[name]) + 1) for name, d in dims.items()}


def arguments(dims: Dims) -> tuple[Any, Any]:
    values = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        dim = dims[name]
        whole = torch.Size(shape if dim is None else (*shape[:dim], BATCH, *shape[dim:]))
        values[name] = torch.linspace(-1 - i, 2, whole.numel(), dtype=F64).cos().view(whole)
    return tree_of(values)


def specs(dims: Dims, entry: str | None = None) -> tuple[Any, Any]:
    """Rows over x; the mapped dim over ``entry``."""
    found = {}
    for name, shape in SHAPES.items():
        dim, base = dims[name], ("x", None) if name == "rows" else (None,) * len(shape)
        found[name] = P(*base) if dim is None else P(*base[:dim], entry, *base[dim:])
    return tree_of(found)


def outs(out_dims: Any) -> dict[str, int | None]:
    return out_dims if isinstance(out_dims, dict) else dict.fromkeys("ysb", out_dims)


def looped(args: Any, dims: Dims, out_dims: Any) -> Any:
    """One call per place of the mapped dim."""
    (tree, x), results = args, []
    leaves = {**tree, "x": x}
    for i in range(BATCH):
        one = {name: v if dims[name] is None else v.select(dims[name], i) for name, v in leaves.items()}
        results.append(once(*tree_of(one), lambda s: s))
    return {
        key: results[0][key] if dim is None else torch.stack([result[key] for result in results], dim)
        for key, dim in outs(out_dims).items()
    }


sharded = shard_map(
    partial(once, total=summed),
    mesh=GRID,
    in_specs=({"rows": P("x"), "bias": P()}, P()),
    out_specs={"y": P("x"), "s": P(), "b": P()},
)


def in_a_body(in_dims: Any, out_dims: Any, checked: bool) -> Callable[..., Any]:
    return shard_map(
        fspmd.vmap(partial(once, total=summed), in_dims, out_dims),
        mesh=GRID,
        in_specs=specs(mapped_dims(in_dims)),
        out_specs={"y": P("x") if outs(out_dims)["y"] in (1, -1) else P(None, "x"), "s": P(), "b": P()},
        check_vma=checked,
    )


#: how it is mapped, and how the arguments lie, None for plain ones
WAYS: dict[str, Callable[[Any, Any], tuple[Callable[..., Any], Any]]] = {
    "plain": lambda i, o: (fspmd.vmap(sharded, i, o), None),
    "sharded": lambda i, o: (fspmd.vmap(sharded, i, o), specs(mapped_dims(i))),
    "as it lies": lambda i, o: (fspmd.vmap(sharded, i, o), specs(mapped_dims(i), "y")),
    "inside": lambda i, o: (in_a_body(i, o, True), None),
    "inside, unchecked": lambda i, o: (in_a_body(i, o, False), None),
    "over an axis": lambda i, o: (fspmd.vmap(sharded, i, o, spmd_axis_name="y"), specs(mapped_dims(i), "y")),
    "over an axis, moved": lambda i, o: (fspmd.vmap(sharded, i, o, spmd_axis_name="y"), specs(mapped_dims(i))),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("in_dims", "out_dims"), DIMS)
def test_vmap_is_a_loop(in_dims: Any, out_dims: Any, way: str) -> None:
    """Values and gradients. A mapped dim of 5 lies unevenly on an axis of 3."""
    dims = mapped_dims(in_dims)
    args = arguments(dims)
    f, layout = WAYS[way](in_dims, out_dims)
    given = args if layout is None else device_put(args, layout, mesh=GRID)
    results = f(*given)
    close(results, looped(args, dims, out_dims))
    if way.startswith("over an axis"):
        assert results["s"].spec.partition[outs(out_dims)["s"]] == "y"

    def total(results: Any) -> Tensor:
        return torch.stack([x.sin().sum() for x in leaves_of(device_get(results))]).sum()

    gradient = fspmd.grad(lambda args: total(f(*args)))(given)
    same_layout(gradient, given)
    close(gradient, func.grad(lambda args: total(looped(args, dims, out_dims)))(args))


@pytest.mark.parametrize("batch", [1, 4, 6, 7])
@pytest.mark.parametrize("layout", [P(), P("x"), P(None, "y")])
@pytest.mark.parametrize("named", [None, ("y", "x")])
def test_vmap_over_two_axes(batch: int, layout: P, named: tuple[str, ...] | None) -> None:
    """Blocks of the mapped dim, and of what all share, may be uneven or empty."""
    x, w = (torch.linspace(-1, 2, n * 5, dtype=F64).cos().view(n, 5) for n in (batch, 3))
    given = device_put(x, P(("y", "x")), mesh=GRID), device_put(w, layout, mesh=GRID)
    mapped = fspmd.vmap(lambda x, w: (w @ x).sin(), (0, None), spmd_axis_name=named)
    result = mapped(*given)
    assert result.spec.partition[0] == ("y", "x")
    close(result, (x @ w.T).sin())
    gradient = fspmd.grad(lambda x, w: mapped(x, w).square().sum(), argnums=(0, 1))(*given)
    close(gradient, func.grad(lambda x, w: (x @ w.T).sin().square().sum(), argnums=(0, 1))(x, w))


@pytest.mark.parametrize("within", ["eager", "jit", "vmap"])
def test_the_mesh_of_a_mapped_axis_is_that_of_a_shard_map_within(within: str) -> None:
    """Which runs up to there once more, so that what it draws is drawn once."""
    mesh = fspmd.make_mesh((2, 2), ("x", "y"), transport="simulation")
    inner = shard_map(lambda a: psum(a, "y"), mesh=mesh, in_specs=P("y"), out_specs=P())
    noise = within == "eager"
    f = fspmd.vmap(lambda a: inner(a + torch.rand(6) if noise else a), spmd_axis_name="x", randomness="same")
    x = torch.randn(3, 4, 6) if within == "vmap" else torch.randn(4, 6)
    torch.manual_seed(0)
    out = {"eager": f, "jit": fspmd.jit(f), "vmap": fspmd.vmap(f)}[within](x)
    assert out.spec.partition == (P(None, "x", None) if within == "vmap" else P("x", None))
    torch.manual_seed(0)
    want = (x + torch.rand(6) if noise else x).unflatten(-1, (2, 3)).sum(-2)
    torch.testing.assert_close(device_get(out), want)
    if within != "vmap":
        gradient = fspmd.grad(lambda x: device_get(f(x)).sum())(x)
        torch.testing.assert_close(gradient, torch.ones_like(x))
    with pytest.raises(fspmd.AxisError, match=r"there is no mesh; .* or use shard_map in f"):
        fspmd.vmap(torch.sin, spmd_axis_name="x")(x)


def test_the_search_for_a_mesh_writes_and_draws_nothing() -> None:
    body = shard_map(lambda x: psum(x, "x"), mesh=GRID, in_specs=P(), out_specs=P())
    mapped = fspmd.vmap(lambda x: body(x.add_(1) + torch.rand(())), spmd_axis_name="y", randomness="same")
    found = []
    for mesh in (None, GRID):
        torch.manual_seed(0)
        with fspmd.set_mesh(mesh) if mesh is not None else nullcontext():
            found.append(device_get(mapped(torch.zeros(3))))
    assert torch.equal(*found)


def _pulled(f: Any) -> Any:
    return lambda w, x: fspmd.vjp(lambda w: f(w, x), w)[1](torch.ones((), dtype=F64))[0]


#: how the gradient by what all elements share is taken: as an argument, or closed over
BY_SHARED: dict[str, Callable[[Any], Any]] = {
    "grad": fspmd.grad,
    "func.grad": func.grad,
    "vjp": _pulled,
    "jacrev": func.jacrev,
    "twice": lambda f: fspmd.grad(lambda w, x: fspmd.grad(f)(w, x).sin().sum()),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("batch", [2, 6, 7])
@pytest.mark.parametrize("entry", [None, "x", ("y", "x")])
@pytest.mark.parametrize("way", BY_SHARED)
def test_each_element_has_its_own_gradient_by_what_all_share(way: str, entry: Any, batch: int) -> None:
    """Not their sum over the ranks that the mapped dim is sharded over; but gradients of all are sums."""
    x, w = (torch.linspace(-1, 2, n, dtype=F64).cos() for n in (batch * 3, 3))
    x = x.view(batch, 3)
    given = device_put(x, P(entry), mesh=GRID)
    if entry is None and way in ("func.grad", "jacrev"):
        pytest.skip("blocks of a Sharded are no arguments of torch.func")

    def f(w: Any, x: Any) -> Any:
        return (torch.where(x > 0, x, w) * w).square().sum()

    by_w, judge = BY_SHARED[way](f), func.vmap(func.grad(f), (None, 0))
    if way == "twice":
        judge = func.vmap(func.grad(lambda w, x: func.grad(f)(w, x).sin().sum()), (None, 0))
    as_argument = fspmd.vmap(by_w, (None, 0))
    close(as_argument(w, given), judge(w, x))
    close(fspmd.vmap(lambda x: by_w(w, x))(given), judge(w, x))
    total = fspmd.grad(lambda w: device_get(as_argument(w, given)).sin().sum())(w)
    close(total, func.grad(lambda w: judge(w, x).sin().sum())(w))


def test_blocks_of_a_mapped_value_may_be_uneven() -> None:
    """What a transform wraps has strides that differ from rank to rank."""
    x, y = torch.linspace(-1, 2, 8, dtype=F64).view(4, 2), torch.tensor([1.0, 3.0], dtype=F64)
    given = device_put(x, P(None, ("y", "x")), mesh=GRID), device_put(y, P(("y", "x")), mesh=GRID)
    mapped = fspmd.vmap(lambda x, y: x[:, None] * y, (0, None))
    want = func.jvp(lambda x, y: x[:, :, None] * y, (x, y), (x.cos(), y.cos()))
    close(fspmd.jvp(mapped, given, tuple(one.cos() for one in given)), want)


@pytest.mark.parametrize("checked", [True, False])
def test_rows_of_uneven_blocks_are_mapped_in_a_body(checked: bool) -> None:
    """How many there are differs from rank to rank."""
    x, y = torch.linspace(-1, 2, 20, dtype=F64).view(2, 5, 2)
    body = fspmd.vmap(fspmd.grad(lambda x, y: (x * x @ y).sin()))
    mapped = shard_map(body, mesh=GRID, in_specs=P("y"), out_specs=P("y"), check_vma=checked)
    close(mapped(x, y), func.vmap(func.grad(lambda x, y: (x * x @ y).sin()))(x, y))


ALIKE: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda a: torch.nn.functional.dropout(a, 0.5),
    "rand_like": lambda a: a + torch.rand_like(a),
    "uniform_": lambda a: torch.empty_like(a).uniform_() * a,
    "bernoulli_": lambda a: a.clone().bernoulli_(0.5),
    "gumbel_softmax": torch.nn.functional.gumbel_softmax,
    "rand": lambda a: a * torch.rand(6, dtype=F64),
    "randperm": lambda a: a[torch.randperm(6)],
}


def _mapped_over_ranks(f: Any, x: Tensor, randomness: str, sharded: bool) -> Any:
    """Over a sharded dim, or over mesh axes that are named."""
    torch.manual_seed(0)
    if sharded:
        return device_get(fspmd.vmap(f, randomness=randomness)(device_put(x, P("y"), mesh=GRID)))
    with fspmd.set_mesh(GRID):
        return device_get(fspmd.vmap(f, randomness=randomness, spmd_axis_name="y")(x))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("name", ALIKE)
def test_all_elements_of_all_ranks_draw_the_same_numbers(name: str, sharded: bool) -> None:
    x = torch.linspace(-1, 2, 48, dtype=F64).view(8, 6)
    out = _mapped_over_ranks(ALIKE[name], x, "same", sharded)
    torch.manual_seed(0)
    close(out, func.vmap(ALIKE[name], randomness="same")(x))


@pytest.mark.parametrize("sharded", [True, False])
def test_elements_of_all_ranks_draw_different_numbers(sharded: bool) -> None:
    """What is drawn of no mapped value would be the same on all ranks."""
    x = torch.ones(8, 6, dtype=F64)
    for like in (torch.rand_like, lambda a: torch.empty_like(a).uniform_()):
        assert len(_mapped_over_ranks(like, x, "different", sharded).unique(dim=0)) == len(x)
    w = torch.ones(6, dtype=F64)
    for alone in (lambda a: a + torch.rand(6), lambda a: a * torch.nn.functional.dropout(w)):
        with pytest.raises(fspmd.ArgumentError, match=r"draws in a function mapped over 'y' .* draw like a mapped"):
            _mapped_over_ranks(alone, x, "different", sharded)
    dropped = _mapped_over_ranks(lambda a: torch.nn.functional.dropout(w + 0 * a), x, "different", sharded)
    assert len(dropped.unique(dim=0)) > 1


@pytest.mark.parametrize("draw", [torch.bernoulli, lambda p: torch.multinomial(p, 3), lambda p: torch.normal(p, 1)])
def test_what_torch_does_not_draw_alike_is_refused_in_our_words(draw: Any) -> None:
    p = torch.full((8, 6), 0.5, dtype=F64)
    for sharded in (True, False):
        with pytest.raises(fspmd.ArgumentError, match=r"by the values of each element, .*rand_like\(p\) < p"):
            _mapped_over_ranks(draw, p, "same", sharded)
    out = _mapped_over_ranks(lambda p: torch.rand_like(p) < p, p, "same", True)
    assert len(out.unique(dim=0)) == 1


@pytest.mark.parametrize("size", [1, 2, 5])
def test_functions_of_no_element_are_not_asked_for(size: int) -> None:
    """Torch maps these over one element or more, and some ranks have none; what is drawn is the same for all."""
    x = torch.linspace(-1, 2, size * 4, dtype=F64).view(size, 4)
    for f in (lambda y: y.cos() * y.sum(), lambda y: y.reshape(2, -1), lambda y: y + torch.rand(4, dtype=F64)):
        torch.manual_seed(0)
        out = fspmd.vmap(f, randomness="same")(device_put(x, P(("y", "x")), mesh=GRID))
        torch.manual_seed(0)
        close(out, func.vmap(f, randomness="same")(x))
        assert out.spec.partition[0] == ("y", "x")
