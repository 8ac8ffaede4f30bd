"""communication_log: what is recorded, with which cause, in every place where something moves."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from processes import Processes
from simulated import F64
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fspmd
from fspmd import (
    CommunicationLog,
    P,
    communication_log,
    device_get,
    device_put,
    make_mesh,
    pairs,
    pmax,
    psum,
    psum_scatter_into,
    reshard,
    shard_map,
)

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")


def put(*shape: int, spec: P = P(), mesh: Any = LINE, grad: bool = True) -> Any:  # noqa: B008
    generator = torch.Generator().manual_seed(sum(shape))
    return device_put(torch.randn(shape, generator=generator, dtype=F64), spec, mesh=mesh).requires_grad_(grad)


def kinds(log: list[fspmd.Communication]) -> list[str]:
    return [one.kind for one in log]


def test_nothing_is_recorded_of_what_needs_no_communication() -> None:
    x, y, b = put(8, 6, spec=P("x")), put(8, 6, spec=P("x")), put(6, grad=False)
    with communication_log() as log:
        z = torch.tanh(x * y + b).transpose(0, 1).reshape(2, 3, 8)[..., None].permute(2, 0, 1, 3)
        z = torch.stack([z, z * 2]).sum((0, 2, 3, 4)).unflatten(0, (4, 2)) / 3
        total = F.softmax(F.layer_norm(x, (6,)), 1).sum() + z.sum()
        total.backward()
    assert not log
    assert str(log) == "nothing is communicated"


#: functions, and operands of which the first dim is a batch
_BATCHES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "searchsorted": (lambda x, y: torch.searchsorted(x.sort(-1).values, y), ((8, 5), (8, 3))),
    "searchsorted in one row": (lambda x: torch.searchsorted(torch.arange(5.0).double(), x, right=True), ((8, 3),)),
    "embedding_bag": (lambda x: F.embedding_bag((x > 0).long(), torch.ones(3, 4).double(), mode="sum"), ((8, 3),)),
    "solve": (torch.linalg.solve, ((8, 3, 3), (8, 3, 2))),
    "solve for vectors": (lambda x, y: torch.linalg.solve_ex(x, y, check_errors=True)[0], ((8, 3, 3), (8, 3))),
    "inv": (torch.linalg.inv, ((8, 3, 3),)),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT), ((8, 3, 3),)),
    "lu_factor": (torch.linalg.lu_factor, ((8, 3, 3),)),
    "bilinear": (lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 5).double()), ((8, 4), (8, 5))),
    "max_unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ((8, 2, 4, 4),)),
    "gaussian_nll_loss": (lambda x, y: F.gaussian_nll_loss(x, y, y * y, reduction="none"), ((8, 4), (8, 4))),
}


@pytest.mark.parametrize("name", _BATCHES)
def test_batches_need_none(name: str) -> None:
    function, shapes = _BATCHES[name]
    operands = [put(*shape, spec=P("x")) for shape in shapes]
    plain = [device_get(x.detach()).requires_grad_() for x in operands]
    with communication_log() as log:
        found = function(*operands)
        first = found[0] if isinstance(found, tuple) else found
        if first.requires_grad:
            first.sum().backward()
    assert str(log) == "nothing is communicated"
    want = function(*plain)
    want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(device_get(first.detach()), want.detach())
    if want.requires_grad:
        want.sum().backward()
        for x, whole in zip(operands, plain, strict=True):
            torch.testing.assert_close(device_get(x.grad), whole.grad)


def test_column_and_row_parallel_layers_cost_one_sum_forward_and_one_backward() -> None:
    x, up, down = put(5, 4), put(4, 8, spec=P(None, "x")), put(8, 4, spec=P("x"))
    with communication_log() as log:
        y = torch.relu(x @ up) @ down
        assert not log  # pending until somebody needs it
        reshard(y, P()).square().sum().backward()
    assert kinds(log) == ["psum_unreduced", "psum"]
    assert [(one.backward, one.cause.what, one.cause.written) for one in log] == [
        (False, "reshard", True),
        (True, "@", False),
    ]
    assert [one.shape for one in log] == [(5, 4), (5, 4)]
    assert log[1].cause.text == "y = torch.relu(x @ up) @ down"
    assert (log.forward, log.backward, log.implicit) == (log[:1], log[1:], log[1:])


def test_projections_of_one_value_share_one_sum_in_backward() -> None:
    x, ws = put(6, 4), [put(4, 8, spec=P(None, "x")) for _ in range(3)]
    with communication_log() as log:
        q, k, v = (x @ w for w in ws)
        (q * k * v).sum().backward()
    assert kinds(log) == ["psum"]


def test_a_batch_parallel_loss_sums_each_parameter_once() -> None:
    x, target, w = put(8, 4, spec=P("x"), grad=False), put(8, 2, spec=P("x"), grad=False), put(4, 2)
    with communication_log() as log:
        loss = F.mse_loss(x @ w, target)
        assert not log
        loss.backward()  # the scalar stays pending: its cotangent is one on every rank
        gradient = fspmd.grad(lambda w: F.mse_loss(x @ w, target))(w)
    assert [(one.kind, one.shape, one.cause.what) for one in log] == [("psum", (4, 2), "@")] * 2
    whole = device_get(w).detach().requires_grad_()
    F.mse_loss(device_get(x) @ whole, device_get(target)).backward()
    assert w.grad is not None
    torch.testing.assert_close(device_get(w.grad), whole.grad)
    torch.testing.assert_close(device_get(gradient), whole.grad)


def test_a_weight_gathered_for_a_batch_scatters_its_gradient() -> None:
    for rows in (32, 30):
        x, w = put(rows, 4, spec=P("x"), grad=False), put(4, 2, spec=P("x"))
        with communication_log() as log:
            (x @ w).sum().backward()
        assert [(one.kind, one.price.moved) for one in log] == [
            ("all_gather_reduced", 48),
            ("psum_scatter_unreduced", 48),
        ]
        assert w.grad is not None
        torch.testing.assert_close(device_get(w.grad), device_get(x).sum(0)[:, None].expand(4, 2))


def test_uses_beside_shards_of_a_whole_value_share_one_gather_in_backward() -> None:
    x, near, far = put(8, 4), put(8, 4, spec=P("x"), grad=False), put(8, 4, spec=P("x"), grad=False)
    with communication_log() as log:
        F.triplet_margin_loss(x, near, far + 1).backward()
    assert [(one.kind, one.shape) for one in log.backward] == [("all_gather_invariant", (2, 4))]
    whole = device_get(x).detach().requires_grad_()
    F.triplet_margin_loss(whole, device_get(near), device_get(far) + 1).backward()
    assert x.grad is not None
    torch.testing.assert_close(device_get(x.grad), whole.grad)


def test_the_greatest_of_all_gathers_no_rows() -> None:
    x = put(256, 64, 128, spec=P("x"), grad=False)  # by price: to gather a few rows takes fewer messages
    for function in (torch.max, torch.amax, torch.aminmax):
        with communication_log() as log:
            function(x)
        assert log.moved <= 3 * 3 * 8 * 2


def test_bytes_are_those_of_a_ring() -> None:
    x = put(8, 4, spec=P("x"))
    with communication_log() as log:
        reshard(x, P())
        reshard(x, P(None, "x"))
        reshard(put(8, 4, spec=P(unreduced={"x"})), P())
    assert [one.price.moved for one in log] == [3 * 64, 3 / 4 * 64, 2 * 3 / 4 * 256]
    assert log.moved == 192 + 48 + 384


def test_what_caused_it_is_named() -> None:
    x = put(8, 4, spec=P("x"))
    with communication_log() as log:
        device_get(x)
        device_put(x, P(), mesh=LINE)
        fspmd.with_spec(x, P())
        shard_map(lambda a: a, mesh=LINE, in_specs=P(None, "x"), out_specs=P(None, "x"))(x)
        shard_map(lambda a: psum(a, "x"), mesh=LINE, in_specs=P("x"), out_specs=P())(x)
        x.sum().item()
        x.nonzero()
        F.softmax(x, 0)
        x.reshape(4, 2, 4).flatten().sort()
    whats = [one.cause.what for one in log]
    assert whats[:7] == ["device_get", "device_put", "with_spec", "shard_map entry", "psum", "item()", "nonzero()"]
    assert set(whats[7:]) == {"softmax()", "sort()"}
    assert {one.cause.written for one in log[:5]} == {True}
    assert {one.cause.written for one in log[5:]} == {False}
    assert {one.cause.where.partition(":")[0] for one in log} == {"test_communication_log.py"}


def test_no_line_of_pythons_library_is_the_users() -> None:
    with communication_log() as log, ExitStack() as stack:
        stack.callback(device_get, put(8, 4, spec=P("x")))
    assert log[0].cause.text == "with communication_log() as log, ExitStack() as stack:"


def test_collectives_of_bodies_nested_and_in_backward() -> None:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        return psum(x * w, "y")

    def body(x: Tensor, w: Tensor) -> Any:
        y = shard_map(inner, in_specs=(P("y"), P()), out_specs=P(), axis_names={"y"})(x, w)
        return pmax(y, "x")

    x, w = put(12, 2, spec=P(("x", "y")), mesh=GRID, grad=False), put(2, mesh=GRID)
    whole = shard_map(body, mesh=GRID, in_specs=(P("x"), P()), out_specs=P(), axis_names={"x"})
    with communication_log() as log:
        out = whole(reshard(x, P("x")), w)
        forward = len(log)
        out.sum().backward()
    assert Counter(one.cause.what for one in log[:forward]) == {"reshard": 1, "psum": 1, "pmax": 1}
    assert all(one.backward for one in log[forward:])
    assert "pmax" in {one.cause.what for one in log[forward:]}  # how many attain it is summed
    assert {one.axes for one in log if one.kind == "psum" and one.cause.text.startswith("return psum")} >= {("y",)}


def test_a_cast_in_a_body_causes_the_sum_of_its_gradient() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return psum((x * w).sum(), "x")

    gradient = fspmd.grad(shard_map(loss, mesh=LINE, in_specs=(P("x"), P()), out_specs=P()), argnums=1)
    with communication_log() as log:
        gradient(put(8, grad=False), put(2, grad=False))
    (forward, backward) = log
    assert (forward.cause.what, forward.cause.written, forward.backward) == ("psum", True, False)
    assert (backward.cause.written, backward.backward, backward.shape) == (False, True, (2,))
    assert backward.cause.text == forward.cause.text == 'return psum((x * w).sum(), "x")'


@pytest.mark.parametrize("check", [True, False])
def test_under_vmap_a_collective_is_one(check: bool) -> None:
    def body(x: Tensor) -> Any:
        return fspmd.vmap(lambda row: psum(row, "x"))(x)

    with communication_log() as log:
        shard_map(body, mesh=LINE, in_specs=P(None, "x"), out_specs=P(), check_vma=check)(put(3, 8, grad=False))
    assert [(one.shape, one.cause.what) for one in log] == [((3, 2), "psum")]


def test_collectives_that_overlap_and_those_into_a_tensor() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        handle = psum(x, "x", wait=False)
        return psum_scatter_into(y.new_empty(1), y.detach(), "x") + handle.wait()[:1]

    f = shard_map(body, mesh=LINE, in_specs=P("x"), out_specs=P("x"))
    with communication_log() as log:
        f(put(16), put(16, grad=False)).sum().backward()
    assert kinds(log.forward) == ["psum", "psum_scatter"]


def test_derivatives_of_derivatives_keep_the_cause() -> None:
    x, w = put(8, spec=P("x"), grad=False), put(8)
    second = fspmd.grad(lambda w: fspmd.grad(lambda w: reshard((x * w**3).sum(), P()))(w).sum())
    with communication_log() as log:
        second(w)
    assert log
    assert {one.cause.what for one in log} <= {"*", "reshard", "mul()"}


def test_backward_of_what_ran_before_the_log_is_told_without_its_cause() -> None:
    x, up = put(5, 4), put(4, 8, spec=P(None, "x"))
    y = (x @ up).sum()
    with communication_log() as log:
        y.backward()
    assert [(one.kind, one.backward, one.cause.what) for one in log] == [("psum", True, "backward()")]


def test_logs_nest_and_see_all_threads() -> None:
    x = put(8, spec=P("x"))
    with communication_log() as outer:
        with communication_log() as inner:
            device_get(x)
        thread = threading.Thread(target=lambda: device_get(x))
        thread.start()
        thread.join()
    device_get(x)
    assert (len(outer), len(inner)) == (2, 1)
    assert pairs._watch is None


def test_backward_on_another_thread_keeps_the_cause() -> None:
    x, up = put(5, 4), put(4, 8, spec=P(None, "x"))
    with communication_log() as log:
        y = (x @ up).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert [(one.kind, one.backward, one.cause.text) for one in log] == [("psum", True, "y = (x @ up).sum()")]


def test_a_log_is_a_table() -> None:
    x = put(8, 4, spec=P("x"))
    with communication_log() as log:
        device_get(x)
    where = log[0].cause.where
    assert str(log) == (
        f"forward  all_gather_invariant over 'x'  f64[2, 4]  192 B  13 µs  device_get  {where}  device_get(x)\n"
        "1 collective, 0 of them backward: each rank sends 192 B"
    )


def _step(mesh: Any) -> tuple[CommunicationLog, list[Tensor]]:
    x, up, down = put(6, 5, mesh=mesh), put(5, 10, spec=P(None, "x"), mesh=mesh), put(10, 5, spec=P("x"), mesh=mesh)
    rows, across = put(32, 4, spec=P("x"), mesh=mesh), put(4, 3, spec=P("x"), mesh=mesh)
    with communication_log() as log:
        (rows @ across).square().sum().backward()
        y = reshard(torch.relu(x @ up) @ down, P("x"))
        y = F.layer_norm(reshard(y, P(None, "x")), (5,))
        y.square().sum().backward()
        body = shard_map(lambda a: psum(a * a, "x"), mesh=mesh, in_specs=P(None, "x"), out_specs=P())
        body(device_put(torch.ones(3, 8), P(), mesh=mesh))
    return log, [device_get(one.grad) for one in (x, up, down, rows, across) if one.grad is not None]


def _rows(log: CommunicationLog) -> list[Any]:
    return [
        (one.kind, one.axes, one.shape, one.price.moved, one.backward, one.cause.what, one.cause.line) for one in log
    ]


def _in_process() -> tuple[list[Any], list[Tensor]]:
    log, gradients = _step(make_mesh((4,), ("x",), device="cpu"))
    return _rows(log), gradients


def _scattered() -> list[Any]:
    mesh = make_mesh((4,), ("x",), device="cpu")
    source = mesh.coordinate() == (0,)
    with communication_log() as log:
        whole = torch.ones(8, 2, dtype=F64, requires_grad=True) if source else None
        device_put(whole, P("x"), mesh=mesh, src=0).sum().backward()
    return [(one.kind, one.price.moved, one.backward, one.cause.what) for one in log]


def test_what_one_process_hands_out_is_recorded_on_both_sides() -> None:
    with Processes(4) as pool:
        found = pool.run(_scattered)
    for rank, rows in enumerate(found):
        moved = 32 * (1 if rank else 3)
        assert rows == [("scatter", moved, False, "device_put"), ("collect", moved, True, "backward()")]


def test_processes_record_what_a_simulation_does() -> None:
    log, gradients = _step(LINE)
    with Processes(4) as pool:
        found = pool.run(_in_process)
    assert found[0][0] == _rows(log)
    for rows, others in found:
        assert [row[:2] + row[4:] for row in rows] == [row[:2] + row[4:] for row in _rows(log)]
        for mine, theirs in zip(gradients, others, strict=True):
            torch.testing.assert_close(mine, theirs)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


def test_what_a_style_moves_has_the_path_of_the_module_and_the_name_of_the_style() -> None:
    model = torch.nn.Sequential(_Block(), _Block())
    styles = {"*.up": fspmd.ColwiseParallel(), "*.down": fspmd.RowwiseParallel()}
    params, plan = fspmd.parallelize(dict(model.named_parameters()), styles, LINE)
    x = put(3, 8, grad=True).to(torch.float32)
    with communication_log() as log:
        fspmd.functional_call(model, params, x, styles=plan).sum().backward()
    told = [(one.backward, one.cause.what, one.cause.written, "self.down(" in one.cause.text) for one in log]
    assert told[:2] == [(False, f"{i}.down: RowwiseParallel", True, True) for i in (0, 1)]


class _Encoder(torch.nn.Module):
    """Its blocks are called through a method, and checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Block(), _Block()])

    def encode(self, x: Any) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_what_moves_while_a_module_runs_has_its_path() -> None:
    """Forward, backward and computed again, called straight and through a method, replayed by a record."""
    model = _Encoder()
    specs = {name: P("x") if ".up." in name else P() for name, _ in model.named_parameters()}
    params = {
        name: device_put(w.detach(), specs[name], mesh=LINE).requires_grad_() for name, w in model.named_parameters()
    }
    x = put(8, 8, spec=P("x"), grad=False).to(torch.float32)
    expected = {f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")}

    def step(params: Any) -> Any:
        with fspmd.attached(model, params):
            loss = model.encode(x).square().sum()
        return torch.autograd.grad(loss, list(params.values()))

    replayed = fspmd.jit(step, passes=())
    replayed(params)
    for f in (step, replayed):
        with communication_log() as log:
            f(params)
        assert {one.cause.module for one in log} == expected
        assert {one.cause.module for one in log.backward} == expected
    assert all(one.cause.by == f"{one.cause.module}: linear()" in str(log) for one in log)
    layer = {name.removeprefix("layers.0."): w for name, w in params.items() if "layers.0" in name}
    with communication_log() as log:  # a part that is called by itself has its path in the model
        fspmd.functional_call(model.layers[0], layer, x)
    assert {one.cause.module for one in log} == {"layers.0.up", "layers.0.down"}
    del model.layers[0]
    with communication_log() as log:
        step({name.replace("layers.1", "layers.0"): w for name, w in params.items() if "layers.1" in name})
    assert {one.cause.module for one in log} == {"layers.0.up", "layers.0.down"}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("repeats", [False, True], ids=["kept", "checkpoint"])
def test_a_recorded_layer_gathers_its_parameters_as_often_as_an_eager_one(trained: bool, repeats: bool) -> None:
    """Of parameters that have a gradient themselves that of `value_and_grad` may be differentiated again: if it is."""

    def layer(w: Any, x: Any) -> Any:
        return torch.tanh(x @ w)

    def loss(layer: Callable[..., Any]) -> Callable[..., Any]:
        return fspmd.value_and_grad(lambda ws, x: layer(ws[1], layer(ws[0], x)).square().sum())

    ws, x = [put(8, 8, spec=P("x"), grad=trained) for _ in range(2)], put(16, 8, spec=P("x"), grad=False)
    kept = fspmd.checkpoint(layer) if repeats else layer
    expected = Counter(all_gather_reduced=4 if repeats else 2, psum_scatter_unreduced=2)
    for f in (loss(kept), loss(fspmd.jit(kept)), fspmd.jit(loss(kept)), fspmd.jit(loss(fspmd.jit(kept)))):
        for _ in range(2):  # recorded, replayed
            with communication_log() as log:
                value, (g, _) = f(ws, x)
            assert Counter(kinds(log)) == expected
        assert all(one.cause.text == "return torch.tanh(x @ w)" for one in log)
        if trained and not repeats:
            (h,) = torch.autograd.grad((g * g).sum(), ws[0])
            torch.testing.assert_close(device_get(h), device_get(_second(loss(layer), ws, x)))
    torch.testing.assert_close(device_get(value), device_get(loss(layer)(ws, x)[0]))


def _second(f: Callable[..., Any], ws: Any, x: Any) -> Any:
    _, (g, _) = f(ws, x)
    return torch.autograd.grad((g * g).sum(), ws[0])[0]


def _ranges(f: Callable[[], Any]) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        f()
    return Counter(event.name for event in traced.events() if event.name.startswith("fspmd::"))


def test_a_trace_of_torchs_profiler_names_collectives_and_the_users_line() -> None:
    """Forward and backward, in the global view, in bodies, and when a record is replayed."""
    x, w = put(8, 4, spec=P("x"), grad=False), put(4, 4)
    body = shard_map(lambda x: psum(x, "x"), mesh=LINE, in_specs=P("x"), out_specs=P())

    def step(w: Any) -> Any:
        return fspmd.value_and_grad(lambda w: (x @ w).relu().sum() * body(x).sum())(w)

    with communication_log() as log:
        step(w)
    expected = Counter(f"fspmd::{c.kind}[{', '.join(c.axes)}] {c.cause.what} ({c.cause.where})" for c in log)
    assert any(" psum (test_communication_log.py:" in name for name in expected)
    assert _ranges(lambda: step(w)) == expected
    replayed = fspmd.jit(step, passes=())
    replayed(w)
    assert _ranges(lambda: replayed(w)) == expected
    assert not _ranges(lambda: x * 2)


def test_what_depends_on_values_says_so() -> None:
    x = device_put(torch.arange(8.0), P("x"), mesh=LINE)
    with communication_log() as log:
        torch.where(x > 3)
        torch.relu(device_put(torch.ones(4), P(unreduced={"x"}), mesh=LINE))
    assert [one.cause.why for one in log] == ["its result, or the shape of it, depends on values", ""]
    assert "where() (implicit: its result, or the shape of it, depends on values)" in str(log)
