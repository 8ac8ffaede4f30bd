"""Training on cut parameters: gathers, microbatches, dtypes. Values, gradients, counts, bytes, errors."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from full import FULL, sample
from processes import Processes
from state_programs import F64, Case, cases, compute, worst

from fspmd import (
    Overlap,
    P,
    TensorSpec,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    pcast,
    psum,
    shard_map,
)
from fspmd.errors import ArgumentError, AxisError, ShapeError, TreeError, VarianceError
from fspmd.nn import LossScale, Precision, accumulate, balance, gathered, route

CASES = cases()


@pytest.mark.one_of(48)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_steps_are_those_of_one_device(case: Case) -> None:
    for mine, right in compute(case):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.one_of(72)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_recorded_steps_are_those_of_one_device(case: Case) -> None:
    for mine, right in compute(case, jitted=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_processes_compute_what_one_device_does() -> None:
    fitting = [case for case in CASES if case[0] in ("4", "2x2")]
    with Processes(4) as pool:
        for jitted in (False, True):
            for found in pool.run(worst, sample(fitting, 2, str(jitted)), jitted, seconds=3000 if FULL else 300):
                assert not [row for row in found if not row[1] < 1e-11]


def test_the_gradient_of_a_pending_scalar_in_a_body() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    w, x = torch.tensor([2.0, 3.0]), torch.arange(8.0)

    def body(w: Any, x: Any) -> Any:
        return grad(lambda w, x: pcast((w.sum() * x.sin()).sum(), "x", to="unreduced"), argnums=(0, 1))(w, x)

    found = device_get(shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")))(w, x))
    torch.testing.assert_close(found, (x.sin().sum().expand(2), 5 * x.cos()))


def squares(params: Any, x: Any) -> Any:
    return (x @ params["w"]).square().sum(), len(x)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("layout", "kinds", "moved"), [(P("s"), "gather and scatter", 2), (P(), "psum", 2)])
def test_one_reduction_for_any_number_of_microbatches(count: int, layout: P, kinds: str, moved: float) -> None:
    mesh = make_mesh((4,), ("s",), transport="simulation")
    params = device_put({"w": torch.ones(8, 6)}, layout, mesh=mesh)
    batches = [device_put(torch.ones(4, 8), P("s"), mesh=mesh)] * count
    with communication_log() as log:
        accumulate(squares, "s")(params, batches)
    expected = ["all_gather_reduced", "psum_scatter_unreduced"] if "scatter" in kinds else ["psum_unreduced"]
    assert Counter(call.kind for call in log) == Counter([*expected, "psum_unreduced"])
    last = [call for call in log if not call.shape or call.shape == (2,)]  # of the loss and the count
    assert len(last) == 1
    size, n = 8 * 6 * 4, 4
    assert sum(call.price.moved for call in log if call not in last) == moved * size * (n - 1) / n


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("cut", [P(), P("s"), P(None, "s")])
def test_flops_of_a_rank_are_its_share_of_the_dense_ones(count: int, cut: P) -> None:
    """A product forward and one backward, for the rows of this rank."""
    mesh, n = make_mesh((4,), ("s",), transport="abstract"), 4
    params, x = {"w": TensorSpec(mesh, cut, (8, 16), F64)}, TensorSpec(mesh, P("s"), (12, 8), F64)
    for step in (accumulate(squares, "s"), accumulate(lambda p, x: squares(gathered(p, "s"), x))):
        assert jit(step).lower(params, [x] * count).cost().flops == count * 2 * 2 * (12 / n) * 8 * 16


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_of_narrow_parameters_are_summed_over_ranks_once_and_in_the_dtype_that_is_named(
    count: int, reduce: torch.dtype, jitted: bool
) -> None:
    """They stay pending in the wide dtype: in a body, too, and with the same numbers."""
    torch.manual_seed(0)
    mesh, layouts = make_mesh((4,), ("s",), transport="simulation"), {"w": P("s"), "b": P()}
    params = device_put({"w": torch.randn(8, 6), "b": torch.randn(6)}, layouts, mesh=mesh)
    batches = [device_put(torch.randn(8, 8, dtype=torch.bfloat16), P("s"), mesh=mesh) for _ in range(count)]
    precision = Precision(compute=torch.bfloat16, reduce=reduce)

    def loss(params: Any, x: Any) -> Any:
        return (x @ params["w"] + params["b"]).float().square().sum(), len(x)

    def within(params: Any, *batches: Any) -> Any:
        def pending(params: Any, x: Any) -> Any:
            return pcast(loss(params, x)[0], "s", to="unreduced"), 4 * len(x)

        return accumulate(pending, "s", precision=precision)(params, batches)

    step = accumulate(loss, "s", precision=precision)
    step = jit(step) if jitted else step
    step(params, batches)
    with communication_log() as log:
        _, grads = step(params, batches)
    specs = layouts, *[P("s")] * count
    _, right = shard_map(within, mesh=mesh, in_specs=specs, out_specs=(P(), layouts))(params, *batches)
    moved = [(call.kind, call.dtype) for call in log if call.shape and call.shape != (2,)]
    expected = [("all_gather_reduced", torch.bfloat16), ("psum_scatter_unreduced", reduce), ("psum_unreduced", reduce)]
    assert sorted(moved, key=str) == sorted(expected, key=str)
    torch.testing.assert_close(device_get(grads), device_get(right), rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("jitted", [False, True])
def test_hybrid_layouts_scatter_within_a_host_and_sum_once_across(count: int, jitted: bool) -> None:
    """A record gathers anew for each microbatch, too: it would otherwise hold whole parameters throughout."""
    mesh = make_mesh((2, 3), ("r", "s"), transport="simulation")
    params = device_put({"w": torch.ones(12, 6)}, P("s"), mesh=mesh)
    batches = [device_put(torch.ones(6, 12), P(("r", "s")), mesh=mesh)] * count
    step = accumulate(lambda p, x: squares(gathered(p, "s"), x), "r")
    step = jit(step) if jitted else step
    step(params, batches)
    with communication_log() as log:
        step(params, batches)
    size = 12 * 6 * 4
    found = Counter((call.kind, call.axes, call.price.moved) for call in log if call.price.moved > 32)
    assert found == Counter(
        {
            ("all_gather_reduced", ("s",), size * 2 / 3): count,
            ("psum_scatter_unreduced", ("s",), size * 2 / 3): count,
            ("psum_unreduced", ("r",), 2 * (size / 3) / 2): 1,
        }
    )


def test_records_gather_a_layer_during_the_layer_before_it() -> None:
    mesh = make_mesh((8,), ("s",), transport="abstract")
    params = [TensorSpec(mesh, P("s"), (2048, 2048), torch.bfloat16) for _ in range(3)]
    x = TensorSpec(mesh, P("s"), (16384, 2048), torch.bfloat16)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = torch.tanh(x @ gathered(w, "s"))
        return x.square().sum(), len(x)

    plain, ahead = (
        jit(accumulate(loss), passes=passes).lower(params, [x]) for passes in ([], [Overlap(overtake=True)])
    )
    assert plain.cost().moved == ahead.cost().moved
    assert plain.cost().overlapped == pytest.approx(0, abs=1e-6)  # us, a difference of two sums
    steps = [*ahead.program.steps]
    is_gather = [
        node.meta.get("call") is not None and node.meta["call"].pair.name == "all_gather_reduced" for node in steps
    ]
    begins = [i for i, node in enumerate(steps) if is_gather[i] and not node.meta["waits"]]
    products = [i for i, node in enumerate(steps) if node.target is torch.ops.aten.mm.default]
    assert len(begins) >= 2
    assert begins[-1] < products[1]  # the gather of the last layer, and the product of the layer before it
    assert ahead.cost().exposed < 0.65 * plain.cost().exposed


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_what_a_loss_returns_beside_is_added_up(cut: bool, jitted: bool) -> None:
    """As experts are balanced: by a bias of the choice, changed once a step by the counts of all microbatches."""
    torch.manual_seed(0)
    params = {name: torch.randn(8, 6, dtype=F64) for name in ("router", "w")}
    bias, x = torch.randn(6, dtype=F64), torch.randn(24, 8, dtype=F64)

    def loss(params: Any, bias: Any, x: Any, axes: Any = ()) -> Any:
        p = gathered(params, axes) if axes else params
        chosen = route(x @ p["router"], 2, bias=bias, axes=axes)
        total = ((x @ p["w"]).square().mean(1) * chosen.weights[:, 0]).sum()
        return (psum(total, axes) if axes else total) + chosen.balance_loss * 8, chosen.counts

    inside = functools.partial(loss, axes="s")
    mesh, given = make_mesh((4,), ("s",), transport="simulation"), (params, bias, x.split(8))
    if cut:
        inside = shard_map(inside, mesh=mesh, in_specs=(P("s"), P(), P("s")), out_specs=(P(), P()))
        given = tuple(device_put(v, spec, mesh=mesh) for v, spec in zip(given, (P("s"), P(), P("s")), strict=True))

    def step(params: Any, bias: Any, batches: Any) -> Any:
        def one(params: Any, x: Any) -> Any:
            total, counts = (inside if cut else loss)(params, bias, x)
            return (total, len(x)), counts

        (mean, counts), grads = accumulate(one, has_aux=True)(params, batches)
        return mean, grads, balance(bias, counts, 0.25)

    leaves = {name: v.clone().requires_grad_() for name, v in params.items()}
    totals, counts = zip(*(loss(leaves, bias, part) for part in x.split(8)), strict=True)
    mean, total = sum(totals) / 24, sum(counts).double()
    grads = dict(zip(leaves, torch.autograd.grad(mean, list(leaves.values())), strict=True))
    right = mean.detach(), grads, bias + 0.25 * (total.mean() - total).sign()
    found = device_get((jit(step) if jitted else step)(*given))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("view", ["plain", "global", "body"])
def test_sums_of_what_a_loss_returns_beside_have_the_dtypes_of_torch(view: str) -> None:
    """Bools are counted, and 258 ones in bfloat16 are 258. A logical or of bools would say nothing."""
    mesh = make_mesh((2,), ("s",), transport="simulation")
    w, x = torch.ones(2), torch.tensor([1.0, -1.0])

    def loss(w: Any, x: Any) -> Any:
        beside = {"some": x > 0, "ones": torch.ones_like(x).bfloat16(), "small": (x > 0).to(torch.uint8)}
        return ((w * x).sum(), 1), beside

    def step(w: Any, x: Any) -> Any:
        return accumulate(loss, has_aux=True)(w, [x] * 258)[0][1]

    if view == "global":
        w, x = device_put((w, x), P("s"), mesh=mesh)
    if view == "body":
        step = shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    found = device_get(step(w, x))
    assert {name: (value.dtype, value.tolist()) for name, value in found.items()} == {
        "some": (torch.int64, [258, 0]),
        "ones": (torch.bfloat16, [258.0, 258.0]),
        "small": (torch.int64, [258, 0]),
    }
    with pytest.raises(ArgumentError, match="the string 'x' in aux; expected tensors and numbers"):
        accumulate(lambda w, x: (((w * x).sum(), 1), "x"), has_aux=True)(w, [x])


def test_gradients_scale_with_the_loss() -> None:
    mesh = make_mesh((2, 2), ("r", "s"), transport="simulation")
    params = device_put({"w": torch.randn(5, 3, dtype=F64)}, P("s"), mesh=mesh)
    batches = [device_put(torch.randn(n, 5, dtype=F64), P(("r", "s")), mesh=mesh) for n in (4, 8)]
    one, more = (
        device_get(accumulate(lambda p, x, c=c: (squares(p, x)[0] * c, len(x)), ("r", "s"))(params, batches)[1])
        for c in (1, 8)
    )
    assert torch.equal(more["w"], 8 * one["w"])


def test_microbatches_are_summed_in_their_own_dtype() -> None:
    mesh = make_mesh((2,), ("s",), transport="simulation")
    w = device_put(torch.zeros(4), P("s"), mesh=mesh)
    batches = [device_put(torch.eye(2, 4), P("s"), mesh=mesh)] * 257

    def loss(w: Any, x: Any) -> Any:
        return (x.to(w.dtype) @ w).sum(), 1 / 257

    def last(accumulated: torch.dtype) -> float:
        precision = Precision(compute=torch.bfloat16, reduce=torch.float32, accumulate=accumulated)
        return float(device_get(accumulate(loss, "s", precision=precision)(w, batches)[1])[0])

    assert last(torch.float32) == 257
    assert last(torch.bfloat16) == 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_many_microbatches_are_added_up_wide(dtype: torch.dtype) -> None:
    w, n = torch.ones((), dtype=dtype), 2100  # 2048 in float16, plus 1, is 2048
    mean, _ = accumulate(lambda w, x: (w * x, 1))(w, [torch.ones((), dtype=dtype)] * n)
    assert (mean.dtype, mean.item()) == (dtype, 1)


def test_parameters_are_stored_in_the_dtype_that_a_precision_names() -> None:
    """Gradients end in it. A loss that gathers over another axis gets parameters that were cast before."""
    mesh = make_mesh((2, 2), ("r", "s"), transport="simulation")
    for stored in (torch.float32, torch.bfloat16):
        precision = Precision(param=stored, compute=torch.bfloat16)
        params = device_put({"w": torch.ones(8, 6, dtype=stored), "n": torch.arange(4)}, P("s"), mesh=mesh)
        batches = [device_put(torch.ones(4, 8, dtype=torch.bfloat16), P(("r", "s")), mesh=mesh)] * 2

        def loss(params: Any, x: Any, precision: Any = precision) -> Any:
            return squares({"w": gathered(params, "s", dtype=precision)["w"]}, x)

        step = accumulate(lambda w, x, n=params["n"]: loss({"w": w, "n": n}, x), "r", precision=precision)  # type: ignore[misc]
        _, grad_of_w = step(params["w"], batches)
        assert grad_of_w.dtype is stored
        wrong = {"w": params["w"], "v": params["w"].double()}
        told = r" got params\['v'\] of torch.float64, where Precision"
        with pytest.raises(ArgumentError, match=f"^accumulate{told}"):
            accumulate(squares, "s", precision=precision)(wrong, batches)
        with pytest.raises(ArgumentError, match=f"^gathered{told}"):
            gathered(wrong, "s", dtype=precision)
    with pytest.raises(ArgumentError, match=r"gathered got params of torch.float64"):
        in_body(lambda x: gathered(x, "s", dtype=Precision()), torch.ones(8, dtype=F64))


@pytest.mark.parametrize("body", [False, True])
def test_dtypes_of_moves(body: bool) -> None:
    mesh = make_mesh((4,), ("s",), transport="simulation")
    params = device_put({"w": torch.ones(8, 6)}, P("s"), mesh=mesh)
    x = device_put(torch.ones(4, 8, dtype=torch.bfloat16), P("s"), mesh=mesh)

    def loss(params: Any, x: Any) -> Any:
        out = (x @ gathered(params, "s", dtype=Precision(compute=torch.bfloat16, reduce=torch.float64))["w"]).sum()
        return psum(out, "s") if body else out

    step: Any = shard_map(loss, mesh=mesh, in_specs=(P("s"), P("s")), out_specs=P()) if body else loss
    with communication_log() as log:
        grads = grad(step)(params, x)
    assert grads["w"].dtype == torch.float32
    moved = {call.kind: call.dtype for call in log}
    assert moved["all_gather_reduced"] is torch.bfloat16
    assert moved["psum_scatter_unreduced"] is torch.float64


def test_a_gathered_value_stays() -> None:
    mesh = make_mesh((4,), ("s",), transport="simulation")
    w = device_put(torch.arange(6.0), P("s"), mesh=mesh)
    whole = gathered(w, "s")
    assert whole.spec.partition.shortened == P(reduced={"s"})
    assert gathered(whole, "s").local is whole.local
    assert gathered({"a": 1, "b": None}, "s") == {"a": 1, "b": None}


def test_other_axes_stay_as_they_are() -> None:
    mesh = make_mesh((2, 3), ("t", "s"), transport="simulation")
    value = torch.arange(60.0, dtype=F64).view(12, 5)
    for partition, left in (
        (P(("t", "s")), P("t", reduced={"s"})),
        (P(("s", "t")), P("t", reduced={"s"})),
        (P("t", "s"), P("t", reduced={"s"})),
    ):
        x = device_put(value, partition, mesh=mesh)
        assert gathered(x, "s").spec.partition.shortened == left

        def body(block: Any, known: Any = x.spec) -> Any:
            return gathered(block, "s", known)

        inside = shard_map(body, mesh=mesh, in_specs=partition, out_specs=left)(x)
        assert torch.equal(device_get(gathered(x, "s")), value)
        assert torch.equal(device_get(inside), value)


def in_body(call: Any, value: Any) -> Any:
    mesh = make_mesh((4,), ("s",), transport="simulation")
    return shard_map(call, mesh=mesh, in_specs=P("s"), out_specs=P())(device_put(value, P("s"), mesh=mesh))


def test_errors_of_gathers() -> None:
    mesh = make_mesh((4,), ("s",), transport="simulation")
    w = device_put({"w": torch.ones(8)}, P("s"), mesh=mesh)
    with pytest.raises(AxisError, match=r"gathered got the axis 'dp', but params\['w'\] lies on mesh\(s=4\)"):
        gathered(w, "dp")
    with pytest.raises(ArgumentError, match="gathered got specs outside of a body; a Sharded has its spec"):
        gathered(w, "s", P("s"))
    with pytest.raises(ArgumentError, match="gathered got the int 3 for dtype; give it a floating dtype"):
        gathered(w, "s", dtype=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Precision got the dtype torch.int64 for reduce; give it a floating"):
        Precision(reduce=torch.int64)
    pending = shard_map(
        lambda x: pcast(x.sum(), "s", to="unreduced"), mesh=mesh, in_specs=P("s"), out_specs=P(unreduced={"s"})
    )(torch.ones(8))
    with pytest.raises(VarianceError, match=r"params is .*, a pending sum over 's'; settle it first: reshard"):
        gathered(pending, "s")
    with pytest.raises(VarianceError, match=r"params is f32\[\]{U:s}, a pending sum over 's'; settle it: psum"):
        in_body(lambda x: gathered(pcast(x.sum(), "s", to="unreduced"), "s"), torch.ones(8))
    with pytest.raises(
        VarianceError, match=r"params is f32\[2\]{V:s}, but P\(\) says otherwise over 's'; give the spec"
    ):
        in_body(lambda x: gathered(x, "s", P()), torch.ones(8))
    with pytest.raises(
        ShapeError, match=r"blocks may be uneven, so give the layout, TensorSpec\(mesh, P\('s'\), shape"
    ):
        in_body(lambda x: gathered(x, "s"), torch.ones(5))
    with pytest.raises(TreeError, match="expected a P such as"):
        in_body(lambda x: gathered(x, "s", "s"), torch.ones(8))
    spec = TensorSpec(mesh, P("s"), (9,), torch.float32)
    with pytest.raises(ShapeError, match=r"params is f32\[2\]{V:s}; .* has blocks of"):
        in_body(lambda x: gathered(x, "s", spec), torch.ones(8))


def test_errors_of_microbatches() -> None:
    with pytest.raises(ArgumentError, match="accumulate got no microbatch"):
        accumulate(squares)({"w": torch.ones(3)}, [])
    with pytest.raises(TreeError, match=r"the loss returns a pair, \(total, count\), but it returned"):
        accumulate(lambda p, x: p.sum())(torch.ones(3), [1])
    with pytest.raises(ArgumentError, match="the count is the string 'x'; expected a scalar tensor or a number"):
        accumulate(lambda p, x: (p.sum(), "x"))(torch.ones(3), [1])
    with pytest.raises(VarianceError, match=r"the total is f32\[\]{V:s}, a number of each rank; .* pcast\(x, 's', to="):
        in_body(lambda x: accumulate(lambda w, x: ((w * x).sum(), 1))(torch.ones(2), [x])[0], torch.ones(8))
    with pytest.raises(
        TreeError, match=r"has_aux=True the loss returns \(\(total, count\), aux\), but it returned the tuple"
    ):
        accumulate(lambda p, x: (p.sum(), 1), has_aux=True)(torch.ones(3), [1])
    with pytest.raises(TreeError, match="one structure of aux for all microbatches"):
        accumulate(lambda p, x: ((p.sum(), 1), [p] * x), has_aux=True)(torch.ones(3), [1, 2])
    with pytest.raises(TreeError, match=r"of the same shapes: one of shape \(3,\) and one of \(1,\)"):
        accumulate(lambda p, x: ((p.sum(), 1), p[:x]), has_aux=True)(torch.ones(3), [3, 1])


@pytest.mark.parametrize("checked", [True, False])
def test_bodies_without_types_gather_as_well(checked: bool) -> None:
    torch.manual_seed(0)
    mesh = make_mesh((2, 3), ("r", "s"), transport="simulation")
    w, b, x = (torch.randn(shape, dtype=F64) for shape in ((6, 4), (4,), (12, 6)))

    def body(w: Any, b: Any, x: Any) -> Any:
        w, b = gathered((w, b), ("r", "s"), (P("s"), P()))
        return psum((x @ w + b).square().sum(), ("r", "s"))

    specs = P("s"), P(), P(("r", "s"))
    call = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
    leaves = w.clone().requires_grad_(), b.clone().requires_grad_()
    right = torch.autograd.grad((x @ leaves[0] + leaves[1]).square().sum(), leaves)
    torch.testing.assert_close(device_get(grad(call, argnums=(0, 1))(w, b, x)), right)


def test_gradients_in_float16_are_divided_by_numbers_beyond_its_range() -> None:
    """65536 is infinite in float16, and what is divided by it would be 0."""
    w = torch.ones(2, dtype=torch.float16)
    _, gradient = accumulate(lambda w, x: ((w.float() * x * 131072.0).sum(), 131072))(w, [torch.tensor(0.125)] * 2)
    assert gradient.dtype is torch.float16
    assert gradient.tolist() == [0.125, 0.125]
    grads, finite = LossScale.of().unscaled({"w": torch.tensor([65504.0, 256.0], dtype=torch.float16)})
    assert finite
    assert grads["w"].tolist() == [0.99951171875, 0.00390625]


def test_gradients_of_reduced_parameters_stay_pending_in_any_dtype() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), transport="simulation")
    w = device_put(torch.ones(4, 2, dtype=torch.bfloat16), P("dp", reduced={"tp"}), mesh=mesh)
    x = device_put([torch.ones(2, 4)], P("dp"), mesh=mesh)
    precision = Precision(torch.bfloat16, torch.float32)
    _, gradient = accumulate(lambda w, x: ((x @ w).sum(), len(x)), "dp", precision=precision)(w, x)
    assert gradient.spec is w.spec.dual
