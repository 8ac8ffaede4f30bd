"""Experts on ranks: values and gradients by a loop in float64, what moves, mistakes."""

import itertools
from typing import Any

import pytest
import torch
from experts_programs import CASES, F64, Case, compute, second_derivatives, told_of_little_room, worst
from full import FULL, sample
from processes import Processes
from torch import Tensor

from fspmd import P, TensorSpec, communication_log, device_get, device_put, grad, jit, make_mesh, shard_map
from fspmd.errors import ArgumentError, RecordError, ShapeError, VarianceError
from fspmd.nn import balance, combine, dispatch, experts, grouped_matmul, route


def close(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for mine, right in pairs:
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", sample(CASES, 10), ids=str)
def test_values_and_gradients_are_those_of_the_loop(case: Case) -> None:
    close(compute(case))


def test_experts_may_be_mapped_over_matrices() -> None:
    x, router, sets = torch.randn(6, 4, dtype=F64), torch.randn(4, 4, dtype=F64), torch.randn(5, 4, 4, 3, dtype=F64)

    def body(x: Tensor, router: Tensor, sets: Tensor) -> Tensor:
        routing, sets = route(x @ router, 2, axes="ep"), sets.detach().requires_grad_()

        def of_set(w: Tensor) -> Tensor:
            return experts(x, routing, lambda rows, counts: grouped_matmul(rows, w, counts), axis="ep")[0]

        return torch.autograd.grad(torch.func.vmap(of_set)(sets).square().sum(), sets)[0]

    specs = P("ep"), P(), P(None, "ep")
    found = device_get(
        shard_map(body, mesh=make_mesh((2,), ("ep",)), in_specs=specs, out_specs=specs[2])(x, router, sets)
    )
    leaf = sets.requires_grad_()
    weights, chosen = (x @ router).softmax(1).topk(2, 1)
    weights = weights / weights.sum(1, keepdim=True)
    of_all = torch.einsum("ta,seab->steb", x, leaf).gather(2, chosen[None, ..., None].expand(5, -1, -1, 3))
    close([(found, torch.autograd.grad((of_all * weights[..., None]).sum(2).square().sum(), leaf)[0])])


SOME = [c for c in CASES if (c.k == 1 and c.total <= c.sizes[1]) or c.tokens == 11]


@pytest.mark.parametrize("case", sample(SOME, 5), ids=str)
def test_a_record_gives_the_same(case: Case) -> None:
    close(compute(case, jitted=True))


@pytest.mark.parametrize("case", sample(SOME, 5, "recomputed"), ids=str)
def test_recomputation_gives_the_same_counts_and_gradients(case: Case) -> None:
    close(compute(case, recomputed=True))


def test_a_multiple_of_the_loss_has_the_multiple_of_gradients() -> None:
    close(compute(Case((2, 2, 2), 24, 4, 2, "random"), scale=64.0))


@pytest.mark.parametrize("total", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (2, 4)])
def test_two_axes_may_cut_experts_that_no_rank_has_equally_many_of(sizes: tuple[int, int], total: int) -> None:
    """Six experts lie as 2, 1, 2, 1 on 2 x 2 ranks: each axis cuts the blocks of the axis before it."""
    torch.manual_seed(0)
    mesh, axes, k = make_mesh(sizes, ("ep", "tp"), transport="simulation"), ("ep", "tp"), min(2, total)
    x, logits = torch.randn(13, 4, dtype=F64), torch.randn(13, total, dtype=F64)
    w = torch.randn(total, 4, 3, dtype=F64, requires_grad=True)
    weights, chosen = logits.softmax(1).topk(k, 1)
    each = torch.einsum("ta,tkab->tkb", x, w[chosen])
    right = (each * (weights / weights.sum(1, keepdim=True))[..., None]).sum(1)
    counts = torch.bincount(chosen.flatten(), minlength=total)
    for capacity in (None, 13):

        def body(x: Tensor, logits: Tensor, w: Tensor, capacity: Any = capacity) -> Any:
            sent, routing = dispatch(x, route(logits, k), axes, capacity=capacity), route(logits, k)
            return combine(grouped_matmul(sent.rows, w, sent.counts), sent, routing, axes), sent.counts

        mine = w.detach().clone().requires_grad_()
        call = shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
        out, rows = call(x, logits, mine)
        grads = [torch.autograd.grad(y.square().sum(), v, retain_graph=True)[0] for y, v in ((out, mine), (right, w))]
        close([(device_get(out), right), (grads[0], grads[1])])
        if capacity is None:
            assert device_get(rows).tolist() == counts.tolist()


def test_processes_give_the_same() -> None:
    cases = [case for case in CASES if case.sizes in ((1, 4, 1), (2, 2, 1), (1, 2, 2))]
    with Processes(4) as pool:
        for jitted in (False, True):
            for found in pool.run(worst, sample(cases, 2, str(jitted)), jitted, seconds=3000 if FULL else 300):
                assert not [row for row in found if not row[1] < 1e-11]


def test_processes_without_tokens_have_second_derivatives() -> None:
    """Their products have graphs like those of others. Without one they raised while others waited for them."""
    with Processes(4) as pool:
        for tokens, dtype in itertools.product((1, 5, 8), (F64, torch.float32)):
            assert max(pool.run(second_derivatives, tokens, dtype)) < (1e-11 if dtype is F64 else 1e-4)
            assert second_derivatives(tokens, dtype, "simulation") < (1e-11 if dtype is F64 else 1e-4)


def test_all_ranks_hear_of_little_room() -> None:
    told = "dispatch got rows=3, but a rank gets {} rows; give it so many, or a capacity"
    with Processes(4) as pool:
        for sizes, jitted in itertools.product(((1, 4), (2, 2)), (False, True)):
            message = told.format(2 * sizes[1])
            assert told_of_little_room("simulation", sizes, jitted) == message
            assert pool.run(told_of_little_room, "process_group", sizes, jitted) == [message] * 4


def errors_in_bfloat16(ranks: int, total: int) -> list[float]:
    """Of the result and the gradients of tokens, logits and matrices: the norm of the error, beside float64."""
    torch.manual_seed(0)
    k, mesh = 2, make_mesh((ranks,), ("ep",), transport="simulation")
    x, logits, w, cotangent = (
        torch.randn(96, 16),
        torch.randn(96, total),
        torch.randn(total, 16, 16),
        torch.randn(96, 16),
    )
    x, w, cotangent = (v.bfloat16() for v in (x, w, cotangent))

    def body(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        routing = route(logits, k, axes="ep")
        return experts(x, routing, lambda rows, counts: grouped_matmul(rows, w, counts).tanh(), axis="ep")[0]

    mine = [v.clone().requires_grad_() for v in (x, logits, w)]
    right = [v.double().requires_grad_() for v in (x, logits, w)]
    out = device_get(shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(*mine))
    top = right[1].softmax(1).topk(k)
    each = torch.einsum("ta,tkab->tkb", right[0], right[2][top.indices]).tanh()
    whole = (each * (top.values / top.values.sum(1, keepdim=True))[..., None]).sum(1)
    found = [out, *torch.autograd.grad(out, mine, cotangent)]
    wanted = [whole, *torch.autograd.grad(whole, right, cotangent.double())]
    return [float((a.double() - b).norm()) for a, b in zip(found, wanted, strict=True)]


def test_bfloat16_is_as_exact_on_more_ranks() -> None:
    for total, many in ((8, (2, 4, 8)), (6, (4,))):
        one = errors_in_bfloat16(1, total)
        for ranks in many:
            for error, least in zip(errors_in_bfloat16(ranks, total), one, strict=True):
                assert 0 < error <= 1.1 * least


def test_a_rank_without_experts_computes_nothing() -> None:
    """Without gradients a simulation runs steps on all blocks at once."""
    mesh = make_mesh((4,), ("ep",), transport="simulation")
    x, w, logits = torch.randn(8, 4), torch.randn(5, 4, 4), torch.randn(8, 5)
    expected = torch.einsum("ta,tab->tb", x, w[logits.argmax(1)])
    for dtype in (torch.float32, F64):
        for capacity in (None, 2):

            def body(x: Tensor, logits: Tensor, w: Tensor, capacity: Any = capacity) -> Any:
                sent = dispatch(x, route(logits, 1), "ep", capacity=capacity)
                return combine(grouped_matmul(sent.rows, w, sent.counts), sent, route(logits, 1), "ep"), sent.counts

            call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            out, rows = call(x.to(dtype), logits, w.to(dtype))
            torch.testing.assert_close(device_get(out), expected.to(dtype))
            assert rows.shape == (5,)
            if capacity is None:
                assert device_get(rows).tolist() == torch.bincount(logits.argmax(1), minlength=5).tolist()


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 3, 0, 4], [0, 0, 0, 0], [10, 0, 0, 0], [2, 3, 4, 1]])
def test_rows_past_the_last_group_are_zero_and_have_gradients_of_zero(counts: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, cotangent = torch.randn(10, 5), torch.randn(4, 5, 3), torch.randn(10, 3)
    x, w, cotangent = (v.to(dtype) for v in (x, w, cotangent))
    past = sum(counts)
    x[past:] = cotangent[past:] = torch.nan
    mine, right = (x, w), (x[:past].double(), w.double())
    for v in (*mine, *right):
        v.requires_grad_()
    out = grouped_matmul(*mine, torch.tensor(counts))
    parts = [rows @ right[1][g] for g, rows in enumerate(right[0].split(counts))]
    expected = torch.cat(parts)
    grads = torch.autograd.grad(out, mine, cotangent)
    wanted = torch.autograd.grad(expected, right, cotangent[:past].double())
    assert not out[past:].any()
    assert not grads[0][past:].any()
    near = 1e-12 if dtype is F64 else 1e-5 if dtype is torch.float32 else 5e-2
    for a, b in ((out[:past], expected), (grads[0][:past], wanted[0]), (grads[1], wanted[1])):
        torch.testing.assert_close(a.double(), b, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_groups_do_not_see_each_other(dtype: torch.dtype) -> None:
    """What is not finite in the rows, the matrix or the gradient of a group stays there."""
    x, w, counts = torch.ones(6, 4, dtype=dtype), torch.ones(3, 4, 2, dtype=dtype), torch.tensor([2, 2, 2])
    cotangent = torch.ones(6, 2, dtype=dtype)
    x[2], w[1], cotangent[3] = torch.nan, torch.inf, torch.nan
    x.requires_grad_(), w.requires_grad_()
    out = grouped_matmul(x, w, counts)
    of_rows, of_matrices = torch.autograd.grad(out, (x, w), cotangent)
    for rows, found in ((out, 4.0), (of_rows, 2.0)):
        assert (rows[[0, 1, 4, 5]] == found).all()
    assert (of_matrices[[0, 2]] == 2).all()


@pytest.mark.parametrize("capacity", [None, 1, 3])
def test_backward_of_dispatch_is_its_transpose(capacity: int | None) -> None:
    """Row r of rank q is a token of rank p or zero. So <dispatch(x), y> is <x, transpose(y)>, for the matrix of it."""
    torch.manual_seed(0)
    mesh, n, width = make_mesh((3,), ("ep",), transport="simulation"), 12, 2
    logits = torch.randn(n, 6, dtype=F64)

    def body(x: Tensor, logits: Tensor) -> Tensor:
        return dispatch(x, route(logits, 2, axes="ep"), "ep", capacity=capacity).rows

    call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    x = torch.randn(n, width, dtype=F64, requires_grad=True)
    out = call(x, logits)
    y = torch.randn(out.shape, dtype=F64)
    (back,) = torch.autograd.grad((out * y).sum(), x)
    # the matrix, from which tokens the rows are: a token of one number each
    names = torch.arange(1, n + 1, dtype=F64)[:, None].expand(n, width)
    whose = device_get(call(names, logits))[:, 0].round().long()
    matrix = torch.zeros(len(whose), n, dtype=F64)
    for row, token in enumerate(whose.tolist()):
        if token:
            matrix[row, token - 1] = 1
    torch.testing.assert_close(device_get(out).detach(), matrix @ x.detach())
    torch.testing.assert_close(back, matrix.T @ y)


@pytest.mark.parametrize("n", [2, 4])
def test_what_moves_with_a_capacity_is_what_a_closed_form_says(n: int) -> None:
    """Two exchanges forward and two backward, each of E * capacity rows, less those that stay."""
    mesh, width, total, capacity = make_mesh((n,), ("ep",), transport="simulation"), 8, 8, 3
    x = device_put(torch.randn(16, width, dtype=F64), P("ep"), mesh=mesh).requires_grad_()
    logits = device_put(torch.randn(16, total, dtype=F64), P("ep"), mesh=mesh)

    def body(x: Tensor, logits: Tensor) -> Tensor:
        return experts(x, route(logits, 2), lambda rows, counts: rows * 2, axis="ep", capacity=capacity)[0]

    call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with communication_log() as there:
        out = call(x, logits)
    total_out = out.sum()
    with communication_log() as back:
        torch.autograd.grad(total_out, x)
    rows = 2 * total * capacity * (n - 1) / n
    for log in (there, back):
        assert len(list(log)) == 2
        assert sum(event.price.moved for event in log) == rows * width * 8


@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_moves_without_a_capacity_is_what_a_closed_form_says(n: int) -> None:
    """The counts, and each chosen row there and back, less those that stay; backward the same, without the counts."""
    torch.manual_seed(0)
    mesh, width, total, k, each = make_mesh((n,), ("ep",), transport="simulation"), 8, 8, 2, 6
    x = device_put(torch.randn(each * n, width, dtype=F64), P("ep"), mesh=mesh).requires_grad_()
    logits = torch.randn(each * n, total, dtype=F64)

    def body(x: Tensor, logits: Tensor) -> Tensor:
        return experts(x, route(logits, k), lambda rows, counts: rows * 2, axis="ep")[0]

    call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with communication_log() as there:
        out = call(x, logits)
    total_out = out.sum()
    with communication_log() as back:
        torch.autograd.grad(total_out, x)
    away = logits[:each].topk(k).indices >= total // n  # of the first rank, whose experts are the first
    row = width * 8
    assert [event.price.moved for event in there if event.kind == "all_gather_invariant"] == [total * 8 * (n - 1)] * (
        n > 1
    )
    sent, returned = (event.price.moved for event in there if event.kind == "ragged_all_to_all") if n > 1 else (0, 0)
    assert sent == int(away.sum()) * row
    came = logits[each:].topk(k).indices < total // n  # a rank returns what came
    assert returned == int(came.sum()) * row
    assert [event.price.moved for event in back] == ([sent, returned] if n > 1 else [])


@pytest.mark.parametrize("transport", ["abstract", "simulation"])
def test_lowered_exchanges_are_those_of_an_even_choice(transport: str) -> None:
    """Without values each expert has as many tokens. Such a choice moves as much, and has as many FLOPs."""
    n, width, hidden, each, k = 4, 8, 16, 16, 2
    mesh = make_mesh((n,), ("ep",), transport=transport)
    rows = each * k if transport == "simulation" else None

    def body(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        routing = route(logits, k)
        return experts(x, routing, lambda rows, counts: grouped_matmul(rows, w, counts), axis="ep", rows=rows)[0]

    call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    step = grad(lambda x, w, logits: call(x, logits, w).sum(), argnums=(0, 1))
    shapes = (n * each, width), (8, width, hidden), (n * each, 8)
    program = jit(step).lower(*(TensorSpec(mesh, P("ep"), shape, torch.float32) for shape in shapes))
    counts, row = 8 * 8 * (n - 1), each * k * 4 * (n - 1) // n
    moved = [event.price.moved for event in program.collectives()]
    assert moved == [counts, row * width, row * hidden, row * hidden, row * width]
    assert program.cost().moved == sum(moved)
    assert program.cost().flops == 3 * 2 * each * k * width * hidden
    if transport == "simulation":
        even = torch.stack([torch.eye(8)[i % 8] + torch.eye(8)[(i + 3) % 8] for i in range(n * each)])
        with communication_log() as log:
            step(*device_put((torch.ones(shapes[0]), torch.ones(shapes[1]), even), P("ep"), mesh=mesh))
        assert [event.price.moved for event in log] == moved


@pytest.mark.parametrize("n", [1, 2, 4])
def test_flops_with_a_capacity_have_a_closed_form(n: int) -> None:
    """Of the rows that a rank has room for: those of its experts, from each rank. A product forward, two backward."""
    total, capacity, width, hidden = 8, 3, 8, 16
    mesh = make_mesh((n,), ("ep",), transport="abstract")

    def body(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        def f(rows: Tensor, counts: Tensor) -> Tensor:
            return grouped_matmul(rows, w, counts)

        return experts(x, route(logits, 2), f, axis="ep", capacity=capacity)[0]

    call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    step = grad(lambda x, w, logits: call(x, logits, w).sum(), argnums=(0, 1))
    shapes = (16, width), (total, width, hidden), (16, total)
    program = jit(step).lower(*(TensorSpec(mesh, P("ep"), shape, torch.float32) for shape in shapes))
    assert program.cost().flops == 3 * 2 * (total * capacity) * width * hidden
    assert len(list(program.collectives())) == (4 if n > 1 else 0)


def test_the_norm_of_cut_experts_and_whole_routers_is_the_true_one() -> None:
    torch.manual_seed(0)
    mesh = make_mesh((2, 2), ("dp", "ep"), transport="simulation")
    grads = [torch.randn(4, 3, 3, dtype=F64), torch.randn(3, 4, dtype=F64)]
    params = [
        device_put(torch.zeros_like(g), spec, mesh=mesh).requires_grad_()
        for g, spec in zip(grads, (P("ep"), P()), strict=True)
    ]
    for p, g in zip(params, grads, strict=True):
        p.grad = device_put(g, p.spec.partition, mesh=mesh)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    right = torch.cat([g.flatten() for g in grads]).norm()
    torch.testing.assert_close(float(norm), float(right))
    torch.testing.assert_close(device_get(params[0].grad), grads[0] / (right + 1e-6))


def test_a_bias_evens_out_the_load() -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(512, 8) + torch.arange(8) / 4, torch.zeros(8)
    before = route(logits, 2, score="sigmoid").counts
    for _ in range(200):
        bias = balance(bias, route(logits, 2, score="sigmoid", bias=bias).counts, 0.01)
    after = route(logits, 2, score="sigmoid", bias=bias).counts
    assert before.max() > 2 * 128
    assert after.max() < 1.2 * 128


def test_a_loss_without_its_sum_is_an_error() -> None:
    mesh = make_mesh((2,), ("ep",), transport="simulation")

    def of_rank(x: Tensor) -> Tensor:
        return route(x, 1).balance_loss

    call = shard_map(of_rank, mesh=mesh, in_specs=P("ep"), out_specs=P())
    with pytest.raises(VarianceError, match="psum") as caught:
        call(torch.randn(4, 2))
    (note,) = caught.value.__notes__
    assert note.endswith(f"which begins at {__file__}:{of_rank.__code__.co_firstlineno}")


def test_mistakes_are_told_before_anything_moves() -> None:
    mesh = make_mesh((2,), ("ep",), transport="simulation")

    def told(kind: type[Exception], match: str, total: int = 4, **options: object) -> None:
        def body(x: Tensor, logits: Tensor) -> Tensor:
            return dispatch(x, route(logits, 1), "ep", **options).rows  # type: ignore[arg-type]

        call = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        with communication_log() as log, pytest.raises(kind, match=match):
            call(torch.randn(6, 2), torch.randn(6, total))
        assert not list(log)

    told(ArgumentError, "the int -1 for capacity; give it an int from 0 on", capacity=-1)
    told(ArgumentError, "a capacity decides", capacity=1, rows=2)
    call = shard_map(lambda x: dispatch(x, route(x, 1), "ep").rows, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(RecordError, match="give rows="):
        jit(call)(torch.randn(6, 4))
    with pytest.raises(ArgumentError, match="from 1 to 4"):
        route(torch.randn(2, 4), 5)
    with pytest.raises(ShapeError, match="for logits"):
        route(torch.randn(4), 1)
    with pytest.raises(ShapeError, match="must be"):
        grouped_matmul(torch.randn(2, 3), torch.randn(2, 4, 3), torch.tensor([1, 1]))
