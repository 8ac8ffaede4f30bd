"""`functional_call`: unmodified modules on Sharded parameters, beside the same module called as it is."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fspmd import (
    ArgumentError,
    Mesh,
    P,
    Sharded,
    TreeError,
    checkpoint,
    device_get,
    device_put,
    functional_call,
    grad,
    make_mesh,
    pcast,
    shard_map,
)
from fspmd.modules.paths import leaves_by_name

F64 = torch.float64
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
MESHES = {"line": LINE, "grid": GRID}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().to(F64)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def sharded_state(module: nn.Module, mesh: Mesh, spec: Callable[[Tensor], P]) -> dict[str, Sharded]:
    placed = {}
    for name, x in state_of(module).items():
        placed[name] = device_put(x.detach().clone(), spec(x), mesh=mesh)
        if x.requires_grad:
            placed[name].requires_grad_()
    return placed


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *way, last = name.split(".")
        node = tree
        for key in way:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


class Attention(nn.Module):
    """Grouped queries by hand: six heads share two of keys and values."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wq, self.wk, self.wv = nn.Linear(width, 12), nn.Linear(width, 4), nn.Linear(width, 4)
        self.wo = nn.Linear(12, width, bias=False)

    def forward(self, x: Any) -> Any:
        h = self.norm(x)
        b, t = h.shape[0], h.shape[1]
        q = self.wq(h).reshape(b, t, 2, 3, 2).permute(0, 2, 3, 1, 4)
        k = self.wk(h).reshape(b, t, 2, 1, 2).permute(0, 2, 3, 1, 4)
        v = self.wv(h).reshape(b, t, 2, 1, 2).permute(0, 2, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 2**0.5).softmax(-1)
        return x + self.wo((scores @ v).permute(0, 3, 1, 2, 4).reshape(b, t, 12))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.tanh(self.embed(ids)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5)),
        lambda: torch.linspace(-1, 1, 18).view(3, 6),
    ),
    "attention": (Attention, lambda: torch.linspace(-1, 1, 120).view(2, 5, 12).sin()),
    "tied": (Tied, lambda: torch.tensor([[1, 2, 9], [0, 2, 5]])),
    "embedding and norm": (
        lambda: nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        lambda: torch.tensor([[1, 2, 6], [0, 2, 5]]),
    ),
}
LAYOUTS: dict[str, Callable[[Tensor], P]] = {
    "replicated": lambda x: P(),
    "rows": lambda x: P("x"),
    "columns": lambda x: P(*(None,) * (x.ndim - 1), "x"),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_values_and_gradients(mesh: str, model: str, layout: str) -> None:
    make, make_input = MODELS[model]
    module, x = seeded(make), make_input()
    x = x.to(F64) if x.is_floating_point() else x
    expected = module(x)
    weight = torch.arange(1.0, expected.numel() + 1, dtype=F64).view(expected.shape).cos()
    (expected * weight).sum().backward()
    placed = sharded_state(module, MESHES[mesh], LAYOUTS[layout])
    with torch.device("meta"):
        skeleton = make()
    for params in (placed, nested(placed)):
        out = functional_call(skeleton, params, device_put(x, P("x"), mesh=MESHES[mesh]))
        assert isinstance(out, Sharded)
        torch.testing.assert_close(device_get(out), expected)
        for leaf in placed.values():
            leaf.local.grad = None
        (device_get(out) * weight).sum().backward()
        for name, parameter in module.named_parameters():
            grad = placed[name].grad
            assert grad is not None
            torch.testing.assert_close(device_get(grad), parameter.grad, msg=f"{name} {grad!r}")


def test_the_module_is_as_it_was_after_a_call_and_after_an_error() -> None:
    module = seeded(lambda: nn.Linear(6, 5))
    before = state_of(module)
    placed = sharded_state(module, LINE, LAYOUTS["rows"])
    functional_call(module, placed, torch.ones(2, 6, dtype=F64))
    with pytest.raises(ValueError, match="same reduction dim"):
        functional_call(module, placed, torch.ones(2, 7, dtype=F64))
    after = state_of(module)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_a_call_within_a_call_has_its_own_parameters() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Any, deeper: bool = False) -> Any:
            inner = functional_call(self, {"w": torch.tensor(10.0)}, x) if deeper else 0
            return self.w * x + inner

    module = Twice()
    w = device_put(torch.tensor(3.0), P(), mesh=LINE)
    assert device_get(functional_call(module, {"w": w}, torch.tensor(1.0), deeper=True)) == 13
    assert module(torch.tensor(1.0)) == 1


def test_threads_wait_for_each_other() -> None:
    entered, go_on = threading.Event(), threading.Event()
    seen = []

    class Slow(nn.Linear):
        def forward(self, x: Any) -> Any:
            if not entered.is_set():
                entered.set()
                go_on.wait(10)
            seen.append(float(self.weight))
            return x

    module = Slow(1, 1, bias=False)

    def call(value: float) -> None:
        functional_call(module, {"weight": torch.full((1, 1), value)}, torch.ones(1))

    threads = [threading.Thread(target=call, args=(value,)) for value in (1.0, 2.0)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(300)
    assert seen == [1.0, 2.0]


def test_plain_leaves_in_a_body_and_outside() -> None:
    """A row-parallel layer by hand: in the body the module's functions see blocks."""
    module = seeded(lambda: nn.Linear(8, 3, bias=False))
    x = torch.linspace(-1, 1, 16, dtype=F64).view(2, 8)

    @shard_map(mesh=LINE, in_specs=(P(None, "x"), P(None, "x")), out_specs=P(unreduced={"x"}))
    def body(w: Tensor, x: Tensor) -> Tensor:
        return pcast(functional_call(module, {"weight": w}, x), "x", to="unreduced")

    torch.testing.assert_close(device_get(body(module.weight.detach(), x)), module(x).detach())
    double = functional_call(module, {"weight": module.weight * 2}, x)
    torch.testing.assert_close(double, module(x) * 2)


def test_buffers_written_and_replaced_are_seen_by_the_caller() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("written", torch.zeros(5))
            self.register_buffer("replaced", torch.zeros(5))

        def forward(self, x: Any) -> Any:
            self.written.add_(x)
            self.replaced = self.replaced + x
            return x

    module = nn.Sequential(Counter())
    for pack in (
        lambda d: {f"0.{name}": x for name, x in d.items()},
        lambda d: {"0": d},
        lambda d: [d],
        lambda d: ({0: d},),
    ):
        params = pack({name: device_put(torch.zeros(5), P("x"), mesh=LINE) for name in ("written", "replaced")})
        held = {name.split(".")[-1]: (holder, key, x) for name, x, holder, key in leaves_by_name(params)}
        functional_call(module, params, device_put(torch.ones(5), P("x"), mesh=LINE))
        for name, (holder, key, first) in held.items():
            assert (holder[key] is first) == (name == "written")
            assert device_get(holder[key]).tolist() == [1.0] * 5
    assert module[0].written.tolist() == module[0].replaced.tolist() == [0.0] * 5


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Any) -> Any:
        return (x - self.mean) * self.weight * self.scale


def test_a_tuple_of_dicts_and_what_is_left_out() -> None:
    weights = {"weight": device_put(torch.full((4,), 2.0), P("x"), mesh=LINE)}
    out = functional_call(Centre(), (weights, {"mean": torch.ones(4)}), torch.full((3, 4), 5.0))
    assert device_get(out).tolist() == [[4.0] * 4] * 3


def said(f: Callable[[], Any]) -> str:
    with pytest.raises((TreeError, ArgumentError)) as caught:
        f()
    return str(caught.value)


def test_messages() -> None:
    module, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)
    w, b = torch.ones(3, 2), torch.ones(3)
    assert said(lambda: functional_call(module, {"0.weigth": w, "0.bias": "b"}, x)) == (
        "functional_call of Sequential: params does not fit the module\n"
        "  * the module has no '0.weigth'; near it: '0.weight'\n"
        "  * '0.bias' is the string 'b'; expected a tensor"
    )
    assert said(lambda: functional_call(module, {"head": w}, x)) == (
        "functional_call of Sequential: params does not fit the module\n"
        "  * the module has no 'head'; it has '0.weight', '0.bias'"
    )
    assert said(lambda: functional_call(module.to("meta"), {"0": {"weight": w}}, x)) == (
        "functional_call of Sequential: params does not fit the module\n"
        "  * '0.bias' is left out, and the module has it on the meta device"
    )
    assert said(lambda: functional_call(module, ({"0.weight": w, "0.bias": b}, {"0": {"weight": w}}), x)) == (
        "functional_call of Sequential: params does not fit the module\n  * '0.weight' is given twice; give it once"
    )
    assert said(lambda: functional_call(Tied(), {"embed.weight": w, "head.weight": w + 1}, x)) == (
        "functional_call of Tied: params does not fit the module\n"
        "  * 'embed.weight', 'head.weight' are one tensor in the module, but params gives several; give it once"
    )
    assert said(lambda: functional_call(nn.Linear(2, 3, bias=False), {"weight": w, "bias": b}, x)) == (
        "functional_call of Linear: params does not fit the module\n"
        "  * the module has no 'bias': it is None there; leave it out"
    )
    assert said(lambda: functional_call(module, w, x)) == (
        "functional_call of Sequential: params does not fit the module\n"
        "  * params is a tensor of shape (3, 2); give it a dict by name, such as dict(m.named_parameters())\n"
        "  * '0.weight' is left out, and the module has it on the meta device\n"
        "  * '0.bias' is left out, and the module has it on the meta device"
    )
    assert re.match("functional_call got the function said for module", said(lambda: functional_call(said, {}, x)))


def test_recurrent_modules() -> None:
    """Their list of weights beside the parameters is exchanged, too."""
    module = seeded(lambda: nn.GRU(3, 4, batch_first=True))
    x = torch.linspace(-1, 1, 12, dtype=F64).view(2, 2, 3)
    doubled = {name: value * 2 for name, value in module.named_parameters()}
    kept = module._flat_weights
    out, _ = functional_call(module, doubled, x)
    assert module._flat_weights is kept
    other = seeded(lambda: nn.GRU(3, 4, batch_first=True))
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(2)
    torch.testing.assert_close(out, other(x)[0])


def check_whole_module(make: Callable[[], nn.Module], inputs: tuple[Any, ...], mesh: Mesh) -> None:
    """Values, gradients and buffers of a module of torch, every leaf cut along its first dim or its last."""
    for layout in LAYOUTS.values():
        module = seeded(make)
        placed = sharded_state(module, mesh, lambda x, layout=layout: layout(x) if x.ndim else P())
        expected = module(*inputs)
        expected = expected[0] if isinstance(expected, tuple) else expected
        weight = torch.arange(1.0, expected.numel() + 1, dtype=F64).view(expected.shape).cos()
        (expected * weight).sum().backward()
        out = functional_call(seeded(make), placed, device_put(inputs[0], P("x"), mesh=mesh), *inputs[1:])
        out = out[0] if isinstance(out, tuple) else out
        torch.testing.assert_close(device_get(out), expected)
        (device_get(out) * weight).sum().backward()
        for name, parameter in module.named_parameters():
            assert placed[name].grad is not None, name
            torch.testing.assert_close(device_get(placed[name].grad), parameter.grad, msg=name)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(device_get(placed[name]), buffer, msg=name)


X = torch.linspace(-1, 1, 80, dtype=F64).view(2, 5, 8).sin()
Y = torch.linspace(-2, 1, 48, dtype=F64).view(2, 3, 8).cos()
IMAGES = torch.linspace(-1, 1, 4 * 3 * 36, dtype=F64).view(4, 3, 6, 6).sin()
CAUSAL = nn.Transformer.generate_square_subsequent_mask(3, dtype=F64)
WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (X,)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (X, Y, Y)),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True),
        (X, Y, None, CAUSAL),
    ),
    "batch norm": (lambda: nn.BatchNorm2d(3), (IMAGES,)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.MaxPool2d(2), nn.Flatten()),
        (IMAGES,),
    ),
    "lstm": (lambda: nn.LSTM(8, 3, batch_first=True), (X,)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), (X,)),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("mesh", MESHES)
def test_modules_of_torch(mesh: str, name: str) -> None:
    check_whole_module(*WHOLE[name], MESHES[mesh])


def test_batch_norm_without_statistics_and_in_evaluation() -> None:
    x = device_put(X, P("x"), mesh=LINE)
    module = nn.BatchNorm1d(5, affine=False, track_running_stats=False)
    torch.testing.assert_close(device_get(functional_call(module, {}, x)), module(X))
    module = seeded(lambda: nn.BatchNorm1d(5)).eval()
    placed = sharded_state(module, LINE, lambda x: P("x") if x.ndim else P())
    torch.testing.assert_close(device_get(functional_call(module, placed, x)), module(X))
    torch.testing.assert_close(device_get(placed["running_var"]), torch.ones(5, dtype=F64))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        functional_call(module.train(), placed, device_put(X[:1, :, 0], P(), mesh=LINE))


def test_derivatives_and_checkpoint_around_the_call() -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)))
    x = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6)
    plain = {name: value.detach() for name, value in module.named_parameters()}
    expected = torch.func.grad(lambda q: torch.func.functional_call(module, q, (x,)).cos().sum())(plain)
    params = {name: device_put(value, P("x"), mesh=LINE) for name, value in plain.items()}

    def out(q: Any) -> Any:
        return functional_call(module, q, x)

    for loss in (lambda q: out(q).cos().sum(), lambda q: checkpoint(out)(q).cos().sum()):
        found = grad(loss)(params)
        for name, value in expected.items():
            torch.testing.assert_close(device_get(found[name]), value)
