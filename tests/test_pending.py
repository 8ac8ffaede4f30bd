"""Pending sums stay pending through what is linear in them: nothing moves, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fspmd import (
    P,
    Sharded,
    VarianceError,
    communication_log,
    device_get,
    device_put,
    make_mesh,
    shard_map,
    value_and_grad,
)

F64 = torch.float64
LINE, GRID = make_mesh((4,), ("x",)), make_mesh((2, 3), ("x", "y"))
ROWS, ORDER = torch.tensor([3, 0, 0, 5]), torch.tensor([2, 0, 1, 3, 5, 4])

#: of one value of [6, 8], pending: in the global view and in bodies alike
ONE: dict[str, Callable[[Any], Any]] = {
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, 1),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "windows of an image": lambda x: F.unfold(x[None, None], 2),
    "fold": lambda x: F.fold(x.reshape(1, 12, 4), (3, 3), 2) if x.dim() else x,
    "zero pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "zero pad by number": lambda x: F.pad(x, (1, 2), value=0),
    "reflect": lambda x: F.pad(x[None], (1, 2), mode="reflect"),
    "replicate": lambda x: F.pad(x[None], (1, 2), mode="replicate"),
    "circular": lambda x: F.pad(x[None], (1, 2), mode="circular"),
    "index_select": lambda x: x.index_select(0, ROWS.to(x.device)),
    "gather": lambda x: x.gather(0, ORDER[:, None].expand(6, 8)),
    "take": lambda x: x.take(ROWS),
    "take_along_dim": lambda x: x.take_along_dim(ORDER[:, None], 0),
    "x[rows]": lambda x: x[ROWS],
    "x[rows, columns]": lambda x: x[ROWS, ORDER[:4]],
    "average pool": lambda x: F.avg_pool1d(x[None], 2),
    "adaptive average pool": lambda x: F.adaptive_avg_pool2d(x[None], (3, 1)),
    "nearest": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x[None, None], size=(5, 9), mode="bilinear"),
    "rfft, back": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), 6, dim=0),
    "complex": lambda x: torch.complex(x, 2 * x).conj().imag,
    "diff": lambda x: x.diff(dim=0),
    "rot90": lambda x: x.rot90(),
    "degrees": lambda x: x.rad2deg(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:, 0] * 2),
    "cross": lambda x: torch.linalg.cross(x[:3], torch.ones(3, 8, dtype=F64), dim=0),
}
#: of one of [6, 8] and one of [4, 8], both pending
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "index_put": lambda x, y: x.index_put((ROWS,), y, accumulate=True),
    "index_put_": lambda x, y: x.clone().index_put_((ROWS,), y, accumulate=True),
    "index_add": lambda x, y: x.index_add(0, ROWS, y),
    "index_add, less": lambda x, y: x.index_add(0, ROWS, y, alpha=-2),
    "scatter_add": lambda x, y: x.scatter_add(0, ROWS[:, None].expand(4, 8), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, ROWS[:, None].expand(4, 8), y, "sum"),
}


def _terms(*shape: int, mesh: Any = LINE) -> tuple[Tensor, Any]:
    """A sum of as many terms as ranks, and the value as their pending sum."""
    n = prod(mesh.shape.values())
    terms = torch.randn(n, *shape, dtype=F64)
    spec = P(mesh.axis_names)
    pending = shard_map(
        lambda x: x[0], mesh=mesh, in_specs=spec, out_specs=P(unreduced={*mesh.axis_names}), check_vma=False
    )(device_put(terms, spec, mesh=mesh))
    return terms.sum(0), pending


def _check(f: Callable[..., Any], given: list[Any], plain: list[Tensor]) -> None:
    """It settles nothing, forward or backward, and the sum of its terms is right."""
    leaves = [x.detach().requires_grad_() for x in given]
    wanted = [x.clone().requires_grad_() for x in plain]
    expected = f(*wanted)
    with communication_log() as log:
        out = f(*leaves)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=F64).reshape(expected.shape)
    assert [one.kind for one in log] == [], str(log)
    assert out.spec.partition.unreduced == given[0].spec.partition.unreduced
    torch.testing.assert_close(device_get(out), expected)
    with communication_log() as log:
        out.backward(weights)
    assert [one.kind for one in log] == [], str(log)
    expected.backward(weights)
    for leaf, one in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(device_get(leaf.grad), one.grad)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_in_the_global_view(name: str, mesh: Any) -> None:
    shapes = [(6, 8)] if name in ONE else [(6, 8), (4, 8)]
    if name == "fold":
        shapes = [(6, 8)]
    pairs = [_terms(*shape, mesh=mesh) for shape in shapes]
    _check((ONE | TWO)[name], [x for _, x in pairs], [x for x, _ in pairs])


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_in_a_body(name: str) -> None:
    f = (ONE | TWO)[name]
    pairs = [_terms(*shape) for shape in ([(6, 8)] if name in ONE else [(6, 8), (4, 8)])]
    pending = P(unreduced={"x"})
    wanted = [x.clone().requires_grad_() for x, _ in pairs]
    expected = f(*wanted)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=F64).reshape(expected.shape)
    expected.backward(weights)

    def loss(*xs: Any) -> Any:
        out = shard_map(f, mesh=LINE, in_specs=(pending,) * len(xs), out_specs=pending)(*xs)
        assert isinstance(out, Sharded)
        torch.testing.assert_close(device_get(out), expected.detach())
        return (out * weights).sum()

    _, grads = value_and_grad(loss, argnums=tuple(range(len(pairs))))(*[x for _, x in pairs])
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(device_get(grad), one.grad)


#: of a value that is cut, and pending over another axis: bodies of rules work on the terms
MIXED = ("tril", "unfold", "zero pad", "reflect", "average pool", "bilinear", "x[rows]", "index_select", "rot90")


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("spec", [P("y", unreduced={"x"}), P(None, "y", unreduced={"x"})], ids=["rows", "columns"])
def test_where_dims_are_cut_over_other_axes(name: str, spec: P) -> None:
    terms = torch.randn(2, 6, 8, dtype=F64)
    before = device_put(terms, P("x", *spec), mesh=GRID)
    x = shard_map(lambda x: x[0], mesh=GRID, in_specs=P("x", *spec), out_specs=spec, check_vma=False)(before)
    leaf, plain = x.detach().requires_grad_(), terms.sum(0).requires_grad_()
    expected, out = ONE[name](plain), ONE[name](leaf)
    torch.testing.assert_close(device_get(out), expected)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=F64).reshape(expected.shape)
    out.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(device_get(leaf.grad), plain.grad)


SETTLED: dict[str, Callable[[Any, Any], Any]] = {
    "pad with one": lambda x, y: F.pad(x, (1, 1), value=1.0),
    "pad with one, an int": lambda x, y: F.pad(x, (1, 1), value=1),
    "index_put": lambda x, y: x.index_put((ORDER[:4],), y),
    "index_copy": lambda x, y: x.index_copy(0, ORDER[:4], y),
    "scatter": lambda x, y: x.scatter(0, ORDER[:4, None].expand(4, 8), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, ROWS[:, None].expand(4, 8), y, "amax"),
}


@pytest.mark.parametrize("name", SETTLED)
def test_what_is_not_linear_settles_them_first(name: str) -> None:
    (plain, x), (other, y) = _terms(6, 8), _terms(4, 8)
    F.pad(x, (1, 1))  # whose plan is another
    out = SETTLED[name](x, y)
    assert not out.spec.partition.unreduced
    torch.testing.assert_close(device_get(out), SETTLED[name](plain, other))
    with pytest.raises(VarianceError, match="still pending"):
        shard_map(SETTLED[name], mesh=LINE, in_specs=P(unreduced={"x"}), out_specs=P(unreduced={"x"}))(x, y)


def test_what_is_added_to_a_value_that_all_have_counts_once() -> None:
    base, (added, y) = torch.randn(6, 8, dtype=F64), _terms(4, 8)
    for name, f in TWO.items():
        torch.testing.assert_close(device_get(f(device_put(base, P(), mesh=LINE), y)), f(base, added), msg=name)


@pytest.mark.parametrize("name", ["view_as", "reshape_as", "expand_as", "type_as"])
def test_only_the_shape_and_dtype_of_another_value_count(name: str) -> None:
    """torch finds the node of a leaf, for hooks on several gradients, by ``x.view_as(x)``."""
    x = device_put(torch.ones(6, 8), P(unreduced={"x"}), mesh=LINE).requires_grad_()
    for other in (x, device_put(torch.ones(6, 8), P("x"), mesh=LINE)):
        with communication_log() as log:
            assert getattr(x, name)(other).spec is x.spec
        assert not log
    found: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((x,), found.extend)
    (x * 2).sum().backward()
    assert torch.equal(device_get(found[0]), torch.full((6, 8), 2.0))


def test_places_that_are_pending_are_settled() -> None:
    plain, x = _terms(6, 8)
    terms = torch.tensor([[1, 0], [1, 2], [0, 1], [0, 0]])
    rows = shard_map(lambda i: i[0], mesh=LINE, in_specs=P("x"), out_specs=P(unreduced={"x"}), check_vma=False)(
        device_put(terms, P("x"), mesh=LINE)
    )
    assert torch.equal(device_get(x.index_select(0, rows)), plain[terms.sum(0)])
    assert torch.equal(device_get(x[rows]), plain[terms.sum(0)])


#: what is no sum of terms, written into a pending sum of [6, 8]
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clamp_": lambda x, w: x.clamp_(min=0.1),
    "sigmoid_": lambda x, w: x.sigmoid_(),
    "add_ of a number": lambda x, w: x.add_(1.5),
    "pow_": lambda x, w: x.pow_(2),
    "lerp_": lambda x, w: x.lerp_(w, w),
    "masked_fill_": lambda x, w: x.masked_fill_(w > 0, 3.0),
    "fill_": lambda x, w: x.fill_(2.0),
    "by itself": lambda x, w: x.mul_(x),
    "a row": lambda x, w: x[2].exp_(),
    "relu in place": lambda x, w: F.relu(x, inplace=True),
    "a list": lambda x, w: torch._foreach_clamp_min_([x], 0.1),
}


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_what_is_no_sum_is_of_the_value(name: str, mesh: Any, followed: bool) -> None:
    """It lies as before, views that were taken before see the write, and gradients are those of torch."""
    if followed and name in ("a list", "by itself"):
        return  # which torch cannot
    plain, x = _terms(6, 8, mesh=mesh)
    w, found = torch.randn(6, 8, dtype=F64), []
    for value, weight in ((plain, w.clone()), (x, device_put(w, P(), mesh=mesh))):
        leaves = [one.detach().requires_grad_(followed) for one in (value, weight)]
        written = leaves[0] * 2.0
        rows = written[1:4]
        written.sin()  # settled once, which the write ends
        WRITES[name](written, leaves[1])
        assert value is plain or written.spec is x.spec
        found.append([written.detach(), rows.detach(), (written * 1.0).sin().detach()])
        if followed:
            (written.sin().sum() + (rows * rows).sum()).backward()
            found[-1] += [one.grad for one in leaves if one.grad is not None]
    torch.testing.assert_close([device_get(one) for one in found[1]], found[0])
