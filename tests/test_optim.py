"""Optimizers, clipping and parametrizations on `Sharded` parameters, beside the same steps on unsharded ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from dispatch_cases import values
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from fspmd import ArgumentError, P, Sharded, attach, device_get, device_put, from_local, make_mesh

GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
SPECS = [(P("x", "y"), P("y")), (P(None, ("y", "x")), P()), (P(reduced={"x"}), P("x"))]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD of lists": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "AdamW of lists": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "foreach": True}),
    "maxima of Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "fused": True}),
    "fused Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "fused SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
}


def _leaves(specs: tuple[P, ...] | None) -> list[Any]:
    plain = values(((5, 3), (4,)))
    placed = plain if specs is None else [device_put(x, spec, mesh=GRID) for x, spec in zip(plain, specs, strict=True)]
    return [x.detach().clone().requires_grad_() for x in placed]


def _step(optimizer: torch.optim.Optimizer, params: list[Any]) -> None:
    def loss() -> Any:
        optimizer.zero_grad()
        total = sum((x**4 + x).sum() for x in params)
        total.backward()
        return total

    optimizer.step(loss)  # type: ignore[arg-type]


def _same(found: list[Any], want: list[Tensor]) -> None:
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(device_get(x), y)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("specs", SPECS, ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_states(name: str, specs: tuple[P, ...]) -> None:
    make, options = OPTIMIZERS[name]
    plain, ours = _leaves(None), _leaves(specs)
    want, found = make(plain, **options), make(ours, **options)
    if "fused" in options and specs[0].reduced:
        with pytest.raises(ArgumentError, match=r"_fused_.*_\(\), .* stands beside Sharded .*; write foreach=True"):
            _step(found, ours)
        return
    for _ in range(2):
        _step(want, plain)
        _step(found, ours)
    _same(ours, plain)
    state = found.state_dict()
    assert list(state["state"]) == list(want.state_dict()["state"])
    _step(want, plain)
    for saved in (copy.deepcopy(state), device_get(state)):  # as it lies, and whole
        again = [x.detach().clone().requires_grad_() for x in ours]
        restored = make(again, **options)
        restored.load_state_dict(saved)
        _step(restored, again)
        _same(again, plain)


MEMORIES = {
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "one number": lambda x: x.sum().expand(x.shape),
}


@pytest.mark.parametrize("specs", SPECS[:2], ids=repr)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" in name])
def test_fused_steps_where_gradients_lie_otherwise_in_memory(name: str, memory: str, specs: tuple[P, ...]) -> None:
    """The judge is the step that is not fused: torch's fused kernel for the CPU does not look at strides."""
    make, options = OPTIMIZERS[name]
    plain, ours, lies = _leaves(None), _leaves(specs), MEMORIES[memory]
    if memory != "one number":  # nobody may write into that
        ours[0] = from_local(lies(ours[0].detach().local), specs[0], mesh=GRID).requires_grad_()
    want, found = make(plain, **options | {"fused": False}), make(ours, **options)
    found.grad_scale, found.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for _ in range(2):
        for x, y in zip(plain, ours, strict=True):
            gradient = torch.randn(x.shape, dtype=x.dtype)
            placed = device_put(2 * gradient, y.spec.partition, mesh=GRID)
            x.grad, y.grad = (lies(gradient), lies(placed)) if x.ndim > 1 else (gradient, placed)
        want.step()
        found.step()
        if memory != "one number":
            _same([y.grad for y in ours], [x.grad for x in plain])  # the step divides them by their scale
    _same(ours, plain)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("spec", [P(), P("x"), P("y")], ids=repr)
def test_complex_parameters(spec: P, foreach: bool) -> None:
    """Optimizers write into the real views of these, which they make without autograd."""
    plain = [torch.randn(6, dtype=torch.complex128, requires_grad=True)]
    ours = [device_put(plain[0].detach().clone(), spec, mesh=GRID).requires_grad_()]
    want, found = (torch.optim.RMSprop(params, 0.1, foreach=foreach) for params in (plain, ours))
    for _ in range(2):
        plain[0].grad = torch.randn(6, dtype=torch.complex128)
        ours[0].grad = device_put(plain[0].grad.clone(), spec, mesh=GRID)
        want.step()
        found.step()
    _same(ours, plain)


def test_an_optimizer_that_does_not_call_the_constructor_of_torch() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.param_groups, self.defaults = [], {}
            self.add_param_group({"params": params})

    assert len(Wrapper([nn.Parameter(torch.ones(2))]).param_groups) == 1


def test_fused_step_of_parameters_that_share_memory() -> None:
    matrix = device_put(torch.zeros(3, 4), P(), mesh=GRID).requires_grad_()
    params = [matrix, matrix.detach().t().requires_grad_()]
    for x, gradient in zip(params, (1.0, 10.0), strict=True):
        x.grad = device_put(torch.full(x.shape, gradient), P(), mesh=GRID)
    torch.optim.SGD(params, lr=1.0, fused=True).step()
    torch.testing.assert_close(device_get(matrix.detach()), torch.full((3, 4), -11.0))


def test_scaled_fused_step_with_an_expanded_gradient() -> None:
    x = device_put(torch.zeros(2, 3), P(), mesh=GRID).requires_grad_()
    x.grad = device_put(torch.tensor(8.0), P(), mesh=GRID).expand(2, 3)
    optimizer: Any = torch.optim.SGD([x], lr=1.0, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    optimizer.step()
    torch.testing.assert_close(device_get(x.detach()), torch.full((2, 3), -4.0))
    torch.testing.assert_close(device_get(x.grad), torch.full((2, 3), 4.0))


ELSEWHERE = [
    (make_mesh((3,), ("x",), transport="simulation"), (P("x"), P("x")), torch.float64),
    (make_mesh((4,), ("z",), transport="simulation"), (P(None, "z"), P()), torch.float64),
    (make_mesh((2, 2, 2), ("a", "x", "y"), transport="simulation"), (P(("y", "a")), P("x")), torch.float64),
    (GRID, (P("y", "x"), P("x")), torch.float32),
]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_loaded_as_the_parameters_lie(name: str) -> None:
    """On other meshes, under other specs, of another dtype, and where some parameter is plain."""
    make, options = OPTIMIZERS[name]
    plain, ours = _leaves(None), _leaves(SPECS[0])
    want, found = make(plain, **options), make(ours, **options)
    for _ in range(2):
        _step(want, plain)
        _step(found, ours)
    before = [x.detach().clone() for x in plain]
    _step(want, plain)
    for mesh, specs, dtype in ELSEWHERE:
        for whole in (False, True):
            again = [device_put(x.to(dtype), spec, mesh=mesh) for x, spec in zip(before, specs, strict=True)]
            again = [x.requires_grad_() for x in (before[0].to(dtype).clone() if whole else again[0], again[1])]
            if whole and name == "LBFGS":  # one vector of all parameters
                continue
            restored = make(again, **options)
            restored.load_state_dict(copy.deepcopy(found.state_dict()))
            for x in again if name != "LBFGS" else ():
                for key, y in restored.state[x].items():
                    if isinstance(y, Sharded):
                        assert y.spec.mesh == mesh
                        assert key == "step" or y.dtype is dtype
                        assert y.shape != x.shape or y.spec is x.spec
            _step(restored, again)
            for x, y in zip(again, plain, strict=True):
                torch.testing.assert_close(device_get(x).double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "LBFGS"])
def test_states_of_sharded_parameters_are_loaded_by_plain_ones(name: str) -> None:
    """As when a model that was trained on a mesh goes on without one."""
    make, options = OPTIMIZERS[name]
    plain, ours = _leaves(None), _leaves(SPECS[0])
    want, found = make(plain, **options), make(ours, **options)
    for _ in range(2):
        _step(want, plain)
        _step(found, ours)
    again = [x.detach().clone().requires_grad_() for x in plain]
    restored = make(again, **options)
    restored.load_state_dict(copy.deepcopy(found.state_dict()))
    assert not any(isinstance(y, Sharded) for x in again for y in restored.state[x].values())
    _step(restored, again)
    _step(want, plain)
    _same(again, plain)


def test_groups_and_names() -> None:
    x, b = _leaves(SPECS[0])
    plain = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": x, "lr": 0.5}, {"params": (p for p in (b, plain))}], lr=0.1)
    assert [group["params"] for group in optimizer.param_groups] == [[x], [b, plain]]
    assert torch.optim.SGD([("x", x), ("b", b)], lr=0.1).param_groups[0]["param_names"] == ["x", "b"]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        torch.optim.SGD([{"params": [x]}, {"params": [b, x]}], lr=0.1)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 3.0, float("inf")])
def test_clipping(foreach: bool | None, order: float) -> None:
    plain, ours = _leaves(None), _leaves(SPECS[0])
    for params in (plain, ours):
        sum((x**3).sum() for x in params).backward()  # type: ignore[union-attr]
    norms = [nn.utils.clip_grad_norm_(iter(params), 1.0, order, True, foreach) for params in (plain, ours)]
    _same([norms[1]], [norms[0]])
    _same([x.grad for x in ours], [x.grad for x in plain])
    for params in (plain, ours):
        nn.utils.clip_grads_with_norm_(params, 0.5, nn.utils.get_total_norm([x.grad for x in params]), foreach)
        nn.utils.clip_grad_value_(params, 0.05, foreach)
        nn.utils.clip_grad_norm_(params[0], 1e-3)
    _same([x.grad for x in ours], [x.grad for x in plain])
    assert ours[0].grad.spec is ours[0].spec


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_clipping_and_steps_over_several_meshes(foreach: bool | None, order: float) -> None:
    line = make_mesh((4,), ("z",), transport="simulation")
    plain = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((5, 4), (6, 3), (3,))]
    layouts = ((P("z"), line), (P("x", "y"), GRID))
    ours = [
        device_put(x.detach().clone(), s, mesh=m).requires_grad_() for x, (s, m) in zip(plain, layouts, strict=False)
    ]
    ours.append(plain[2].detach().clone().requires_grad_())
    for params in (plain, ours):
        for x in params:
            (x**3).sum().backward()
    norms = [nn.utils.clip_grad_norm_(iter(params), 1.0, order, True, foreach) for params in (plain, ours)]
    torch.testing.assert_close(norms[1], norms[0])
    _same([x.grad for x in ours], [x.grad for x in plain])
    for params in (plain, ours):
        torch.optim.AdamW(params, lr=0.1, foreach=foreach).step()
    _same(ours, plain)
    ours[0].grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ours, 1.0, order, True, foreach)


def _net(specs: dict[str, P] | None = None) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    if specs is not None:
        whole = {name: x for name, x in net.state_dict().items() if name in specs}
        placed = device_put(whole, {name: specs[name] for name in whole}, mesh=GRID)
        attach(net, {name: x.requires_grad_(name.endswith(("weight", "bias"))) for name, x in placed.items()})
    return net


NET: dict[str, P] = {"0.weight": P("x", "y"), "0.bias": P(), "1.weight": P("y"), "1.bias": P("x")}
BUFFERS: dict[str, P] = {"1.running_mean": P("x"), "1.running_var": P(), "1.num_batches_tracked": P()}
AVERAGES: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "of buffers": {"use_buffers": True},
    "of lists": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "of each": {"avg_fn": get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("specs", [NET, NET | BUFFERS], ids=["plain buffers", "all placed"])
@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name: str, specs: dict[str, P]) -> None:
    """A copy of a module with attached parameters: its averages, and the statistics of its batches afterwards."""
    plain, ours = _net(), _net(specs)
    want, found = AveragedModel(plain, **AVERAGES[name]), AveragedModel(ours, **AVERAGES[name])
    steps = torch.randn(3, 7, 6, dtype=torch.float64)
    for net, average in ((plain, want), (ours, found)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in steps:
            optimizer.zero_grad()
            (net(x) ** 3).sum().backward()
            optimizer.step()
            average.update_parameters(net)
    torch.testing.assert_close(device_get(dict(found.state_dict())), dict(want.state_dict()))
    for average in (want, found):
        update_bn(steps, average)
    torch.testing.assert_close(device_get(dict(found.state_dict())), dict(want.state_dict()))
    assert found.module[0].weight.spec is ours[0].weight.spec


class _Exponential(nn.Module):
    """Keeps the logarithm of a weight."""

    def forward(self, x: Any) -> Any:
        return x.exp()

    def right_inverse(self, x: Any) -> Any:
        return x.abs().log()


PARAMETRIZED: dict[str, Any] = {
    "an inverse": lambda net: parametrize.register_parametrization(net[0], "weight", _Exponential()),
    "no inverse": lambda net: parametrize.register_parametrization(net[0], "bias", nn.Tanh()),
    "a norm": lambda net: parametrizations.weight_norm(net[0]),
}


@pytest.mark.parametrize("specs", [NET, {**NET, "0.weight": P(None, ("y", "x")), "0.bias": P("x")}], ids=repr)
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrizations(name: str, specs: dict[str, P]) -> None:
    """Register, train, and remove: torch puts the values into the parameters with ``set_``."""
    plain, ours = _net(), _net(specs)
    x = torch.randn(7, 6, dtype=torch.float64)
    for net in (plain, ours):
        PARAMETRIZED[name](net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            (net(x) ** 3).sum().backward()
            optimizer.step()
    torch.testing.assert_close(device_get(dict(ours.state_dict())), dict(plain.state_dict()))
    for net in (plain, ours):
        for key in list(net[0].parametrizations):
            parametrize.remove_parametrizations(net[0], key)
    torch.testing.assert_close(device_get(dict(ours.state_dict())), dict(plain.state_dict()))


def test_set_takes_a_value_and_no_memory() -> None:
    x, b = _leaves(SPECS[0])
    with pytest.raises(ArgumentError, match="a leaf that requires grad; call it under"):
        b.set_(b.detach())
    with torch.no_grad():
        for args in ((), (torch.zeros(4),), (b, 0, (4,))):
            with pytest.raises(ArgumentError, match=r"set_\(\) needs the memory of .* with a Sharded y"):
                b.set_(*args)
        with pytest.raises(ArgumentError, match="got a Sharded of shape"):
            b.set_(x)
        assert b.set_(2 * b) is b
