"""Attention over cut sequences: autocast, uneven batches, inference mode, and what is refused."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_programs import F64, dense, refusals, refused, seen_by
from processes import Processes
from torch import Tensor

from fspmd import P, device_get, device_put, jit, jvp, make_mesh, ppermute, shard_map
from fspmd.errors import ArgumentError, ShapeError
from fspmd.nn import (
    Causal,
    Documents,
    Mask,
    Prefix,
    SequenceLayout,
    SlidingWindow,
    attend_block,
    balanced,
    contiguous,
    gathered_attention,
    ring_attention,
    striped,
    ulysses_attention,
    zigzag,
)
from fspmd.nn.ring import turns_of

WAYS = [ring_attention, gathered_attention, ulysses_attention]
ROWS = P(None, "cp")


def operands(length: int = 6, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(heads, length, 3, dtype=F64, **options) for heads in (4, 2, 2)]


def mapped(body: Callable[..., Any], n: int = 2, rows: P = ROWS) -> Callable[..., Any]:
    mesh = make_mesh((n,), ("cp",), transport="simulation")
    return shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows)


def right(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    return dense(q, k, v, seen_by("causal", q.shape[-2]), 3**-0.5, sinks)


@pytest.mark.parametrize("length", [11, 264], ids=["one tile", "tiles"])
@pytest.mark.parametrize("way", WAYS)
def test_tangents(way: Any, length: int) -> None:
    """In a body and around it, where a rank has queries that see none of the keys of a step."""
    lies = contiguous(length, 4)
    mask, seen = Causal() & SlidingWindow(5), torch.ones(length, length, dtype=torch.bool).tril().triu(-4)
    primals, tangents = ([*operands(length), torch.randn(4, dtype=F64)] for _ in range(2))
    tangents = [torch.randn_like(x) for x in tangents]
    rows = ROWS, ROWS, ROWS, P()

    def attend(*x: Tensor) -> Tensor:
        return way(*x[:3], "cp", mask=mask, layout=lies, sinks=x[3])

    def within(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
        return torch.func.jvp(attend, x, t)

    mesh = make_mesh((4,), ("cp",), transport="simulation")
    around = shard_map(attend, mesh=mesh, in_specs=rows, out_specs=ROWS)
    inside = shard_map(within, mesh=mesh, in_specs=(rows, rows), out_specs=(ROWS, ROWS))
    want = torch.func.jvp(lambda *x: dense(*x[:3], seen, 3**-0.5, x[3]), tuple(primals), tuple(tangents))
    for found in (jvp(around, primals, tangents), inside(tuple(primals), tuple(tangents))):
        for mine, expected in zip(found, want, strict=True):
            torch.testing.assert_close(device_get(mine), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outer", [torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("inner", [torch.func.jacfwd, torch.func.jacrev])
def test_second_derivatives_of_each_kind(inner: Any, outer: Any, way: Any) -> None:
    q, k, v = operands()
    call = mapped(lambda q, k, v: way(q, k, v, "cp", mask=Causal()))

    def hessian(attend: Callable[..., Tensor]) -> Tensor:
        return outer(inner(lambda q: attend(q, k, v).square().sum()))(q)

    torch.testing.assert_close(hessian(lambda *x: device_get(call(*x))), hessian(right), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_autocast_does_not_touch_parts(way: Any) -> None:
    leaves = [x.float() for x in operands(64)]
    call = mapped(lambda q, k, v: way(q, k, v, "cp", mask=Causal()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = device_get(call(*leaves))
    torch.testing.assert_close(found.double(), right(*(x.double() for x in leaves)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_may_be_uneven(way: Any) -> None:
    """Torch made no zeros for a gradient that nothing had asked for."""
    leaves = [x.expand(3, -1, -1, -1).clone().requires_grad_() for x in operands()]
    leaves.append(torch.randn(4, dtype=F64, requires_grad=True))
    mesh, rows = make_mesh((2, 2), ("dp", "cp"), transport="simulation"), P("dp", None, "cp")
    call = shard_map(
        lambda *x: way(*x[:3], "cp", mask=Causal(), sinks=x[3]),
        mesh=mesh,
        in_specs=(rows, rows, rows, P()),
        out_specs=rows,
    )
    grads = torch.autograd.grad(device_get(call(*leaves)).sin().sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(right(*leaves).sin().sum(), leaves))


def test_layouts_and_tables_do_not_take_the_default_device() -> None:
    """On the meta device they had no values, for all later calls."""
    leaves, mask = operands(38), Causal() & SlidingWindow(37)
    mesh = make_mesh((2,), ("cp",), transport="simulation")
    near = torch.arange(38)[:, None] < torch.arange(38) + 37
    expected = dense(*leaves, seen_by("causal", 38) * near, 3**-0.5, None)
    for make in (contiguous, striped, zigzag, lambda *x: balanced(*x, Causal(), 19)):
        with torch.device("meta"):
            lies = make(38, 2)
            attend = shard_map(
                lambda *x, lies=lies: (ring_attention(*x, "cp", mask=mask, layout=lies), lies.positions("cp")),
                mesh=mesh,
                in_specs=ROWS,
                out_specs=(ROWS, P("cp")),
            )
            out, places = attend(*(lies.store(x, 1) for x in leaves))
        torch.testing.assert_close(lies.restore(device_get(out), 1), expected)
        assert torch.equal(device_get(places), lies.order)
        assert sorted(lies.order.tolist()) == list(range(38))


def test_documents_of_a_new_step_share_tables() -> None:
    torch.manual_seed(0)
    leaves = operands(40)
    made = turns_of.cache_info().misses
    for _ in range(4):
        ids = torch.randint(3, (40,)).sort().values
        out = mapped(lambda *x, ids=ids: ring_attention(*x, "cp", mask=Causal() & Documents(ids)))(*leaves)
        seen = seen_by("causal", 40) * (ids[:, None] == ids)
        torch.testing.assert_close(device_get(out), dense(*leaves, seen, 3**-0.5, None))
    assert turns_of.cache_info().misses == made + 1


def test_what_inference_made_serves_training() -> None:
    with torch.inference_mode():
        zigzag(34, 2)
    x = torch.randn(34, requires_grad=True)
    assert zigzag(34, 2).store(x, 0).requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_no_axis_is_attention_to_what_a_rank_has(way: Any) -> None:
    q, k, v = torch.randn(3, 2, 6, 4, dtype=torch.float64).requires_grad_()

    def body(*operands: Tensor) -> Tensor:
        return way(*operands, (), mask=Causal())

    spec = P("cp")
    found = device_get(shard_map(body, mesh=make_mesh((2,), ("cp",)), in_specs=spec, out_specs=spec)(q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, right)
    cotangent = torch.randn_like(right)
    for mine, other in zip(*(torch.autograd.grad(y, (q, k, v), cotangent) for y in (found, right)), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_is_refused(way: Any) -> None:
    for (error, match, _, _), (raised, message, _) in zip(refused(way, 2), refusals(way, 2), strict=True):
        assert raised == error.__name__, message
        assert re.search(match, message)


def test_processes_refuse_alike_before_they_communicate() -> None:
    with Processes(4) as pool:
        for way in WAYS:
            first, *others = pool.run(refusals, way, 4, "process_group")
            assert all(other == first for other in others)
            for (error, match, _, _), (raised, message, communicated) in zip(refused(way, 4), first, strict=True):
                assert raised == error.__name__, message
                assert re.search(match, message)
                assert communicated == 0


def test_axes_must_cut_as_the_layout_does() -> None:
    """Two axes of 2 cut 13 positions into 4, 3, 3, 3. A layout for 4 ranks has 4, 4, 4, 1."""
    mesh, axes = make_mesh((2, 2), ("a", "b"), transport="simulation"), ("a", "b")
    lies, rows = zigzag(13, 4), P(None, ("a", "b"))
    call = shard_map(lambda *x: ring_attention(*x, axes, layout=lies), mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(ShapeError, match=r"give the layout the sizes of the axes, such as contiguous\(13, \(2, 2\)\)"):
        call(*operands(13))
    where = shard_map(lambda x: lies.positions(axes), mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    assert torch.equal(device_get(where(torch.arange(13))), lies.order)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale_is_right(scale: float) -> None:
    """The CPU's kernel gives NaN in causal calls whose scale is not positive."""
    mesh, rows = make_mesh((2,), ("cp",), transport="simulation"), P(None, "cp")
    q, k, v = operands(8)
    attend = functools.partial(ring_attention, axis="cp", mask=Causal(), scale=scale, layout=zigzag(8, 2))
    call, lies = shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows), zigzag(8, 2)
    found = lies.restore(device_get(call(*(lies.store(x, 1) for x in (q, k, v)))), 1)
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    torch.testing.assert_close(found, (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v)


def test_masks_of_your_own_are_told_apart() -> None:
    class Near(Mask):
        def __init__(self, size: int) -> None:
            object.__setattr__(self, "size", size)

        def allows(self, query: Tensor, key: Tensor) -> Tensor:
            return (query - key).abs() < self.size  # type: ignore[attr-defined]

        def over(self, queries: range, keys: range) -> bool | None:
            return SlidingWindow(self.size).over(queries, keys)  # type: ignore[attr-defined]

    assert Near(1) != Near(16)
    mesh, rows = make_mesh((2,), ("cp",), transport="simulation"), P(None, "cp")
    for size in (1, 16):
        found, want = (
            device_get(shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)(*operands(16)))
            for f in (
                functools.partial(ring_attention, axis="cp", mask=mask) for mask in (Near(size), SlidingWindow(size))
            )
        )
        assert torch.equal(found, want)


def test_gradients_of_what_sees_nothing_have_gradients() -> None:
    mesh, rows = make_mesh((2,), ("cp",), transport="simulation"), P(None, "cp")
    q = operands(8)[0].requires_grad_()
    attend = functools.partial(ring_attention, axis="cp", mask=Prefix(0))
    out = shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)(q, q, q)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(device_get(first).sum(), q)
    assert not second.any()


def test_wrong_arguments_are_told() -> None:
    q = torch.randn(2, 2, 4, 8)
    for seen in (torch.ones(2, 4, 4).bool(), torch.ones(4, 4), torch.ones(4, 5).bool()):
        with pytest.raises(ShapeError, match="for allowed"):
            attend_block(q, q, q, seen)
    mesh = make_mesh((2,), ("cp",), transport="simulation")
    with pytest.raises(ArgumentError, match="Sharded"):
        attend_block(*[device_put(q, P("cp"), mesh=mesh)] * 3)
    for wrong in (
        lambda: zigzag(8, 2).store(torch.arange(16), 0),
        lambda: zigzag(8, 2).restore(torch.arange(6), 0),
        lambda: balanced(8, 2, Documents(torch.arange(3)), 2),
    ):
        with pytest.raises(ShapeError):
            wrong()
    for wrong in (
        lambda: SlidingWindow(-1),
        lambda: Documents(torch.randn(4)),
        lambda: SequenceLayout(torch.arange(4), 0),
        lambda: SequenceLayout(torch.arange(4.0), 2),
        lambda: balanced(8, 2, Causal(), 0),
    ):
        with pytest.raises(ArgumentError):
            wrong()


class _Swapped(torch.autograd.Function):
    """The gradient is a collective of a saved tensor."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * ppermute(x, "cp", [(0, 1), (1, 0)])


def test_a_saved_tensor_of_a_transform_that_has_ended_moves() -> None:
    """A simulation took it, in its wrapper, for a value that is equal on all ranks."""
    x = torch.arange(4.0)

    def body(x: Tensor) -> Tensor:
        (g,) = torch.func.vjp(_Swapped.apply, x)[1](torch.ones_like(x))
        return g

    assert device_get(mapped(body, rows=P("cp"))(x)).tolist() == [2, 3, 0, 1]


def test_a_layout_may_be_made_where_a_record_is() -> None:
    """The check of its order read a value, which no record can hold."""
    mesh, order = make_mesh((2,), ("cp",), transport="simulation"), zigzag(8, 2).order
    x = torch.randn(1, 2, 8, 4)

    def body(x: torch.Tensor) -> torch.Tensor:
        return ulysses_attention(x, x, x, "cp", mask=Causal(), layout=SequenceLayout(order, 1))

    rows = P(None, None, "cp")
    call = shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows)
    assert torch.equal(device_get(jit(call)(x)), device_get(call(x)))


def test_a_layout_of_as_many_ranks_but_other_blocks_is_told_the_sizes_of_the_axes() -> None:
    """Two axes cut 7 positions into other blocks than one axis of as many ranks does."""
    mesh, spec = make_mesh((3, 2), ("r", "h"), transport="simulation"), P(None, ("r", "h"))
    for ranks, match in ((6, r"such as contiguous\(7, \(3, 2\)\)"), (5, r"got a layout of 5")):
        call = shard_map(
            lambda q, n=ranks: ulysses_attention(q, q, q, "h", ring="r", layout=contiguous(7, n)),  # type: ignore[misc]
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
        with pytest.raises(ShapeError, match=match):
            call(torch.ones(2, 7, 4))
