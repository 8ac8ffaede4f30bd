"""Optimizers as pure functions: beside ``torch.optim``, over layouts. Also master weights and loss scales."""

from collections import Counter
from typing import Any

import optree
import pytest
import torch
from full import FULL, sample
from optimizer_programs import F64, Case, cases, compute, worst
from processes import Processes

from fspmd import (
    P,
    clip_by_global_norm,
    communication_log,
    device_get,
    device_put,
    jit,
    make_mesh,
    shard_map,
    typeof,
    value_and_grad,
)
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.nn import LossScale, accumulate, adafactor, adamw, all_finite, gathered, muon, selected, with_master

CASES = cases()


@pytest.mark.one_of(32)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_optimizers_are_those_of_torch(case: Case) -> None:
    for mine, right in compute(case):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


@pytest.mark.one_of(48)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_recorded_optimizers_are_those_of_torch(case: Case) -> None:
    for mine, right in compute(case, jitted=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


def test_processes_update_as_torch() -> None:
    fitting = [case for case in CASES if case[0] in ("4", "2x2")]
    with Processes(4) as pool:
        for jitted in (False, True):
            for found in pool.run(worst, sample(fitting, 2, str(jitted)), jitted, seconds=3000 if FULL else 300):
                assert not [row for row in found if not row[1] < 1e-11]


def test_muon_in_bfloat16_is_near_that_of_torch() -> None:
    torch.manual_seed(0)
    mesh = make_mesh((4,), ("s",), transport="simulation")
    value, grad = torch.randn(2, 32, 16)
    leaf = value.clone().requires_grad_()
    leaf.grad = grad.clone()
    torch.optim.Muon([leaf], 0.1, 0.0).step()
    init, update = muon(0.1, decay=0.0)
    w, g = device_put((value, grad), P("s"), mesh=mesh)
    mine = device_get(update(g, init(w), w)[0])
    torch.testing.assert_close(mine - value, leaf.detach() - value, rtol=0.1, atol=0.004)


def test_adamw_in_a_body() -> None:
    torch.manual_seed(0)
    mesh = make_mesh((4,), ("s",), transport="simulation")
    w, g = torch.randn(2, 8, 3, dtype=F64)
    init, update = adamw(0.1, decay=0.1)

    def body(w: Any, g: Any) -> Any:
        return update(g, init(w), w)

    specs = {"step": P(), "mean": P("s"), "square": P("s")}
    inside, state = shard_map(body, mesh=mesh, in_specs=P("s"), out_specs=(P("s"), specs))(w, g)
    right, whole_state = update(g, init(w), w)
    assert torch.equal(device_get(inside), right)
    assert torch.equal(device_get(state["square"]), whole_state["square"])


@pytest.mark.parametrize("view", ["global", "body", "unchecked"])
def test_what_each_rank_orthogonalises(view: str) -> None:
    mesh = make_mesh((2, 2), ("r", "s"), transport="simulation")
    params = device_put([torch.randn(8, 4) for _ in range(8)], P("s"), mesh=mesh)
    init, update = muon()
    step, state = update, init(params)
    if view != "global":
        slots = {"step": P(), "mean": P("s")}
        step = shard_map(
            muon(specs=P("s")).update,
            mesh=mesh,
            in_specs=(P("s"), slots, P("s")),
            out_specs=(P("s"), slots),
            check_vma=view == "body",
        )
        for x, y in zip(
            *(optree.tree_leaves(device_get(f(params, state, params))) for f in (step, update)), strict=True
        ):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-7)
    lowered = jit(step).lower(params, state, params)
    # of one matrix: the product with its transpose, the square of that, and the product with the matrix
    products = 5 * (2 * 4 * 8 * 4 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 8)
    flops = sum(event.flops for event in lowered.schedule() if "bmm" in str(event.node.target))
    assert flops == products * 8 / 4
    moved = sum(call.price.moved for call in lowered.collectives())
    block = 8 * 8 * 4 * 2 / 2  # of the stack in bfloat16: halves of matrices. A rank keeps those of its place along "r"
    assert moved == 2 * (block / 2) / 2 + block / 2  # an all-to-all over "s" and one back, and a gather over "r"


def squares(params: Any, x: Any) -> Any:
    return (x @ gathered(params, "s")["w"]).square().sum(), len(x)


# what a step moves between n ranks, in bytes of parameters times (n - 1) / n: forward and backward, and the update
ZERO = {
    "replicas": (P(), None, None, {"psum_unreduced": 2}),
    "ZeRO 1": (P(), None, P("s"), {"psum_unreduced": 2, "all_gather_invariant": 1}),
    "ZeRO 2": (P(), P("s"), P("s"), {"psum_scatter_unreduced": 1, "all_gather_invariant": 1}),
    "ZeRO 3": (P("s"), None, None, {"all_gather_reduced": 1, "psum_scatter_unreduced": 1}),
}


@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("jitted", [False, True])
def test_zero_is_a_choice_of_specs(stage: str, jitted: bool) -> None:
    torch.manual_seed(0)
    lies, grads_lie, state_lies, moves = ZERO[stage]
    n, value, x = 4, torch.randn(16, 8, dtype=F64), torch.randn(8, 16, dtype=F64)
    mesh = make_mesh((n,), ("s",), transport="simulation")
    params = device_put({"w": value}, lies, mesh=mesh)
    batches = [device_put(part, P("s"), mesh=mesh) for part in x.chunk(2)]
    init, update = adamw(0.1, specs=state_lies)
    state = init(params)

    def step(params: Any, state: Any, batches: Any) -> Any:
        mean, grads = accumulate(squares, "s", grads=grads_lie)(params, batches)
        return mean, update(grads, state, params)

    run = jit(step) if jitted else step
    run(params, state, batches)
    with communication_log() as log:
        mean, (news, state) = run(params, state, batches)
    share = value.numel() * 8 * (n - 1) / n
    found: Counter[str] = Counter()
    for call in log:
        if call.price.moved > 64:
            found[call.kind] += call.price.moved / share  # type: ignore[assignment]
    assert found == moves
    assert state["mean"]["w"].spec.partition.axes == (state_lies or lies).axes
    leaf = value.clone().requires_grad_()
    loss = (x @ leaf).square().sum() / len(x)
    loss.backward()
    torch.optim.AdamW([leaf], 0.1).step()
    torch.testing.assert_close(device_get(mean), loss.detach())
    torch.testing.assert_close(device_get(news["w"]), leaf.detach())


def test_clipping_over_mixed_meshes() -> None:
    torch.manual_seed(0)
    line, grid = make_mesh((4,), ("x",), transport="simulation"), make_mesh((2, 2), ("a", "b"), transport="simulation")
    values = [torch.randn(shape, dtype=F64) for shape in ((5, 3), (6, 4), (3,), (7,))]
    lies = [(P("x"), line), (P("b", "a"), grid), (P(), grid), (P(("a", "b")), grid)]
    tree = [device_put(x, spec, mesh=mesh) for x, (spec, mesh) in zip(values, lies, strict=True)]
    clipped, norm = clip_by_global_norm(tree, 0.5)
    leaves = [x.clone().requires_grad_() for x in values]
    for leaf, x in zip(leaves, values, strict=True):
        leaf.grad = x.clone()
    right = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
    torch.testing.assert_close(norm, right)
    for mine, leaf in zip(clipped, leaves, strict=True):
        torch.testing.assert_close(device_get(mine), leaf.grad)


def test_master_weights_keep_what_bfloat16_loses() -> None:
    mesh = make_mesh((2,), ("s",), transport="simulation")
    w = device_put(torch.ones(4, dtype=torch.bfloat16), P("s"), mesh=mesh)
    ends = {}
    for name, (init, update) in (("plain", adamw(1e-4, decay=0)), ("master", with_master(adamw(1e-4, decay=0)))):
        p, state = w, init(w)
        for _ in range(100):
            p, state = update(w, state, p)
        ends[name] = float(device_get(p)[0])
        assert p.dtype == torch.bfloat16
    assert ends["plain"] == 1
    assert ends["master"] == pytest.approx(0.99, abs=2**-9)


@pytest.mark.parametrize("jitted", [False, True])
def test_master_weights_may_be_cut_as_the_rest_of_the_state(jitted: bool) -> None:
    """ZeRO 1. New parameters are gathered in their own dtype."""
    mesh = make_mesh((4,), ("s",), transport="simulation")
    w = device_put(torch.randn(16, 8, dtype=torch.bfloat16), P(), mesh=mesh)
    grads = device_put(torch.randn(16, 8, dtype=torch.bfloat16), P(), mesh=mesh)
    init, update = with_master(adamw(0.1, specs=P("s")), specs=P("s"))
    whole_init, whole_update = with_master(adamw(0.1))
    state, whole = init(w), whole_init(w)
    assert repr(state["master"].spec) == "f32[16@s, 8] on mesh(s=4)"
    run = jit(update) if jitted else update
    run(grads, state, w)
    with communication_log() as log:
        new, state = run(grads, state, w)
    assert [(call.kind, call.price.moved) for call in log] == [("all_gather_invariant", 16 * 8 * 2 * 3 / 4)]
    right, whole = whole_update(grads, whole, w)
    assert new.spec == right.spec
    assert torch.equal(device_get(new), device_get(right))
    assert repr(state["master"].spec) == "f32[16@s, 8] on mesh(s=4)"
    assert torch.equal(device_get(state["master"]), device_get(whole["master"]))
    with pytest.raises(ArgumentError, match="with_master got specs in a body"):
        shard_map(lambda w: init(w)["step"], mesh=mesh, in_specs=P(), out_specs=P())(w)


def test_master_weights_share_no_memory_with_parameters() -> None:
    """So a step may be given both of them, also where they have one dtype."""
    init, update = with_master(adamw(0.1, decay=0))
    step = jit(update, donate_argnums=(1, 2))
    params = {"w": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    grads = {name: torch.ones_like(x) for name, x in params.items()}
    state = init(params)
    for _ in range(3):
        params, state = step(grads, state, params)
    assert torch.equal(params["w"], state["master"]["w"])
    assert params["w"].tolist() == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("bad", [None, 0, 3])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(bad: int | None) -> None:
    mesh = make_mesh((4,), ("s",), transport="simulation")
    value = torch.ones(4)
    if bad is not None:
        value[bad] = float("inf")
    params, scale = device_put(torch.ones(4), P("s"), mesh=mesh), LossScale.of(8.0)
    init, update = adamw(0.5, decay=0)
    state = init(params)

    @jit
    def step(params: Any, state: Any, scale: LossScale, x: Any) -> Any:
        _, grads = value_and_grad(lambda p: scale.scaled((p * x).sum()))(params)
        grads, finite = scale.unscaled(grads)
        new_params, new_state = update(grads, state, params)
        return grads, finite, *selected(finite, (new_params, new_state), (params, state)), scale.after(finite)

    x = device_put(value, P("s"), mesh=mesh)
    grads, finite, news, new_state, new_scale = step(params, state, scale, x)
    assert bool(finite) is (bad is None)
    assert torch.equal(device_get(grads), value)
    assert float(new_state["step"]) == (bad is None)
    assert torch.allclose(device_get(news), torch.full((4,), 0.5 if bad is None else 1.0))
    assert (float(new_scale.scale), int(new_scale.steps)) == ((8.0, 1) if bad is None else (4.0, 0))


def test_scales_grow() -> None:
    scale = LossScale.of(2.0)
    for _ in range(6):
        scale = scale.after(torch.tensor(True), interval=3)
    assert (float(scale.scale), int(scale.steps)) == (8.0, 0)


def test_scales_stay_finite_and_above_zero() -> None:
    """From an infinity no step would bring the scale back: it times 0 is no number. Nor from 0, by which it divides."""
    scale = LossScale.of(2.0**126)
    for _ in range(3):
        scale = scale.after(torch.tensor(True), interval=1)
    assert float(scale.scale) == 2.0**127
    scale = LossScale.of(2.0**-125)
    for _ in range(3):
        scale = scale.after(torch.tensor(False))
    assert float(scale.scale) == 2.0**-126
    assert float(scale.after(torch.tensor(True), interval=1).scale) == 2.0**-125


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_loss_in_float16_is_scaled_in_float32(dtype: torch.dtype) -> None:
    """65,536 is an infinity in float16."""
    mesh = make_mesh((2,), ("s",), transport="simulation")
    x = torch.tensor([3.0, 1.0], dtype=dtype, requires_grad=True)
    loss, scale = x.sum(), LossScale.of()
    scaled = scale.scaled(loss)
    assert (scaled.dtype, float(scaled.detach())) == (torch.promote_types(dtype, torch.float32), 4 * 65536.0)
    pending = device_put(x.detach(), P("s"), mesh=mesh)
    assert float(device_get(scale.scaled(pending.sum()))) == 4 * 65536.0
    (grad,) = torch.autograd.grad(LossScale.of(2.0**15).scaled(x[0] * 0.5), x)
    assert grad.tolist() == [2.0**14, 0.0]


def test_a_finite_check_in_a_body_is_invariant() -> None:
    mesh = make_mesh((2, 2), ("r", "s"), transport="simulation")
    seen = []

    def body(a: Any, b: Any, c: Any) -> Any:
        finite = all_finite([a, b, c])
        seen.append(str(typeof(finite)))
        return finite

    call = shard_map(body, mesh=mesh, in_specs=(P("r"), P(("r", "s")), P()), out_specs=P())
    good, wrong = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, float("nan")])
    assert [bool(device_get(call(*x))) for x in ((good, good, good), (good, wrong, good), (wrong, good, good))] == [
        True,
        False,
        False,
    ]
    assert set(seen) == {"bool[]"}


@pytest.mark.parametrize("make", [adamw, adafactor, muon])
@pytest.mark.parametrize("shape", [(1, 2), (4, 1), (4, 3)])
def test_a_state_of_another_shape_is_an_error(make: Any, shape: tuple[int, int]) -> None:
    """That of another model is, although torch would broadcast some: as global values, and as blocks in a body."""
    mesh = make_mesh((2,), ("s",), transport="simulation")
    w, other = torch.ones(4, 2), torch.ones(shape)
    init, update = make(specs=P())
    text = r"update got state\['\w+'\] of shape .* for params\['w'\] of shape \(4, 2\); give it one of shape"
    with pytest.raises(ShapeError, match=text):
        update({"w": w}, init({"w": other}), {"w": w})
    laid, state = device_put({"w": w}, P("s"), mesh=mesh), init(device_put({"w": other}, P("s"), mesh=mesh))
    with pytest.raises(ShapeError, match=text):
        update(laid, state, laid)

    def step(w: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        new: torch.Tensor = update({"w": w}, init({"w": other}), {"w": w})[0]["w"]
        return new

    with pytest.raises(ShapeError, match=text):
        shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P())(w, other)


def test_errors_of_optimizers() -> None:
    mesh = make_mesh((2,), ("s",), transport="simulation")
    w = device_put({"w": torch.ones(4, 2)}, P("s"), mesh=mesh)
    init, update = adamw()
    with pytest.raises(ArgumentError, match=r"an optimizer got a parameter that is .*int"):
        init({"w": 1})
    with pytest.raises(ArgumentError, match="update got grads that is no tree like params"):
        update({"v": w["w"]}, init(w), w)
    with pytest.raises(ArgumentError, match="an optimizer got a decay that does not match the parameters"):
        adamw(decay={"v": 1}).update(w, init(w), w)
    with pytest.raises(ShapeError, match=r"muon got a parameter of shape \(4,\); it takes matrices"):
        muon().init(torch.ones(4))
    with pytest.raises(ArgumentError, match="muon got adjustment='none'; expected one of 'original'"):
        muon(adjustment="none")
    for make in (adafactor, muon):
        with pytest.raises(VarianceError, match=r"in a body got f32\[2,2\]{V:s}, a block"):
            shard_map(lambda x, make=make: make().init(x)["step"], mesh=mesh, in_specs=P("s"), out_specs=P())(w["w"])
    with pytest.raises(VarianceError, match=r"params is f32\[2,2\]{V:s}, but P\(\) says otherwise over 's'"):
        shard_map(lambda x: adamw(specs=P()).init(x)["step"], mesh=mesh, in_specs=P("s"), out_specs=P())(w["w"])


def test_numbers_of_groups() -> None:
    """Decay by group is a tree, and the rate a function of the step."""
    value = {"w": torch.ones(2, 2, dtype=F64), "b": torch.ones(2, dtype=F64)}
    init, update = adamw(lambda step: 0.1 / step, decay={"w": 0.5, "b": 0})
    params, state = value, init(value)
    for _ in range(2):
        params, state = update(value, state, params)
    for name, decay in (("w", 0.5), ("b", 0)):
        leaf = value[name].clone().requires_grad_()
        optimizer = torch.optim.AdamW([leaf], 0.1, weight_decay=decay)
        for rate in (0.1, 0.05):
            optimizer.param_groups[0]["lr"] = rate
            leaf.grad = value[name].clone()
            optimizer.step()
        torch.testing.assert_close(params[name], leaf.detach())
