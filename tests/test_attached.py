"""`attached`, `attach`, and checkpoints within a module's forward, beside the same module called as it is."""

from __future__ import annotations

import copy
import functools
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential

import fspmd
from fspmd import (
    ArgumentError,
    ColwiseParallel,
    Mesh,
    P,
    RowwiseParallel,
    Sharded,
    attach,
    attached,
    communication_log,
    device_get,
    device_put,
    functional_call,
    grad,
    jit,
    make_mesh,
    parallelize,
    pcast,
    reshard,
    shard_map,
    value_and_grad,
    vmap,
)

F64 = torch.float64
MESHES = {
    shape: make_mesh(shape, tuple(names), transport="simulation")
    for shape, names in {(2,): "x", (3,): "x", (4,): "x", (2, 3): "yx", (2, 2, 2): "zyx"}.items()
}
LINE = MESHES[4,]


class Block(nn.Module):
    """A residual layer with a weight that it uses without a module, and a bias that is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x * self.gain)))


class Model(nn.Module):
    """Blocks, each within a checkpoint of some kind; the head is the embedding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def run(self, x: Any) -> Any:
        for block in self.blocks:
            x = CHECKPOINTS[self.kind](block, x)
        return x

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = torch_checkpoint(self.run, x, use_reentrant=False) if "nested" in self.kind else self.run(x)
        return x @ self.embed.weight.T


def weight_alone(block: Any, x: Any) -> Any:
    """A checkpoint of a function in which no module is called."""
    return block(torch_checkpoint(lambda x: torch.sin(x * block.gain) * block.up.bias.sum(), x, use_reentrant=False))


CHECKPOINTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "none": lambda block, x: block(x),
    "not reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
    "reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "nested": functools.partial(torch_checkpoint, use_reentrant=False),
    "nested reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "sequential": lambda block, x: checkpoint_sequential([block.up, nn.Tanh(), block.down], 2, x * block.gain, False),
    "of fspmd": lambda block, x: fspmd.checkpoint(block)(x),
    "weight alone": weight_alone,
}
LAYOUTS: list[dict[str, Any]] = [
    {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
    {"": fspmd.Style(weight=0, vector=0)},
]
EXPECTED: dict[str, Any] = {}
IDS = torch.tensor([[1, 2, 9], [0, 2, 5]])


def made(kind: str) -> tuple[Model, dict[str, Tensor]]:
    """On the meta device, and what its parameters are to be."""
    torch.manual_seed(0)
    params = {name: x.detach().to(F64) for name, x in Model(kind).named_parameters()}
    with torch.device("meta"):
        return Model(kind), params


def loss_of(out: Any) -> Any:
    return (out.sin() * torch.arange(1.0, out.numel() + 1, dtype=F64).view(out.shape).cos()).sum()


def expected_of(kind: str, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
    """Without checkpoints, since torch computes alike with them, on one device."""
    module, params = made("none")
    if kind in ("sequential", "weight alone"):
        module.kind = kind
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    with torch.no_grad():
        whole = Model(module.kind).to(F64)
        whole.load_state_dict(leaves)
    loss = loss_of(whole(ids))
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in whole.named_parameters()}  # type: ignore[misc]


def by_backward(module: nn.Module, params: Any, plan: Any) -> Any:
    leaves = {name: x.requires_grad_() for name, x in params.items()}
    loss = loss_of(functional_call(module, leaves, IDS, styles=plan))
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in leaves.items()}


def on_another_thread(module: nn.Module, params: Any, plan: Any) -> Any:
    """While this one has the module with other leaves."""
    leaves = {name: x.requires_grad_() for name, x in params.items()}
    loss = loss_of(functional_call(module, leaves, IDS, styles=plan))
    other = threading.Thread(target=loss.backward)
    with attached(module, {name: x * 2 for name, x in params.items()}):
        other.start()
        other.join(0.05)
    other.join(300)
    return loss.detach(), {name: x.grad for name, x in leaves.items()}


def in_a_block(module: nn.Module, params: Any, plan: Any) -> Any:
    """Backward when the block has ended, and other leaves are there."""
    leaves = {name: x.requires_grad_() for name, x in params.items()}
    with attached(module, leaves, styles=plan) as it:
        assert it is module
        loss = loss_of(module(IDS))
    with attached(module, {name: x.detach() * 2 for name, x in params.items()}, styles=plan):
        functional_call(module, leaves, IDS)
        loss.backward()
    return loss.detach(), {name: x.grad for name, x in leaves.items()}


def for_good(module: nn.Module, params: Any, plan: Any) -> Any:
    leaves = {name: x.requires_grad_() for name, x in params.items()}
    there = attach(module, leaves, styles=plan)
    loss = loss_of(module(IDS))
    there.detach()
    assert all(x.is_meta for x in module.parameters())
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in leaves.items()}


def by_value_and_grad(module: nn.Module, params: Any, plan: Any) -> Any:
    return value_and_grad(lambda q: loss_of(functional_call(module, q, IDS, styles=plan)))(params)


def by_value_and_grad_of_jit(module: nn.Module, params: Any, plan: Any) -> Any:
    run = jit(lambda q: loss_of(functional_call(module, q, IDS, styles=plan)))
    value_and_grad(run)(params)
    return value_and_grad(run)(params)


WAYS: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
    "backward": by_backward,
    "another thread": on_another_thread,
    "a block": in_a_block,
    "for good": for_good,
    "value_and_grad": by_value_and_grad,
    "jit of value_and_grad": lambda module, params, plan: jit(lambda q: by_value_and_grad(module, q, plan))(params),
    "value_and_grad of jit": by_value_and_grad_of_jit,
}


CASES = [(kind, way) for kind in CHECKPOINTS for way in WAYS if "jit" not in way or "reentrant" in kind]


@pytest.mark.one_of(6)
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_checkpoints_within_forward(kind: str, way: str) -> None:
    value, gradients = EXPECTED.setdefault(kind, expected_of(kind))
    turn = len(way) + len(kind)
    for shape in ((4,), [*MESHES][turn % len(MESHES)]) if way in ("backward", "for good") else ((4,),):
        module, params = made(kind)
        placed, plan = parallelize(params, LAYOUTS[turn % 2], MESHES[shape], axis="x")
        loss, found = WAYS[way](module, placed, plan)
        torch.testing.assert_close(device_get(loss), value)
        for name, gradient in gradients.items():
            torch.testing.assert_close(device_get(found[name]), gradient, msg=name)


def check_checkpoints(mesh: Mesh) -> None:
    """The same on processes."""
    for kind in ("not reentrant", "reentrant"):
        value, gradients = expected_of(kind)
        module, params = made(kind)
        placed, plan = parallelize(params, LAYOUTS[1], mesh, axis=mesh.axis_names[-1])
        for way in (by_backward, for_good):
            leaves = {name: x.detach() for name, x in placed.items()}
            loss, found = way(module, leaves, plan)
            torch.testing.assert_close(device_get(loss), value)
            for name, gradient in gradients.items():
                torch.testing.assert_close(device_get(found[name]), gradient, msg=name)


def test_calls_with_several_leaves_before_backward() -> None:
    """Each checkpoint computes again with those of its own call, an inner call's too."""
    module, params = made("not reentrant")
    expected = expected_of("none")[1]
    leaves = [{name: device_put(x, P("x"), mesh=LINE).requires_grad_() for name, x in params.items()} for _ in range(2)]
    other = {name: x.detach() * 2 for name, x in leaves[0].items()}
    losses = [loss_of(functional_call(module, own, IDS)) for own in (*leaves, other)]
    for loss in losses[:2]:
        loss.backward()
    for own in leaves:
        for name, x in own.items():
            torch.testing.assert_close(device_get(x.grad), expected[name], msg=name)


def test_random_numbers_second_derivatives_and_bodies() -> None:
    class Drops(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.part, self.checkpointed = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)), checkpointed

        def forward(self, x: Any) -> Any:
            return torch_checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)

    params = {name: x.detach() for name, x in Drops(False).to(F64).named_parameters()}
    x = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6)

    def twice(module: nn.Module, q: Any) -> Any:
        def loss(q: Any) -> Any:
            torch.manual_seed(3)
            return functional_call(module, q, x).sin().sum()

        def squares(q: Any) -> Any:
            return sum((g * g).sum() for g in grad(loss)(q).values())

        return {"once": grad(loss)(q)["part.0.weight"], "twice": grad(squares)(q)["part.0.weight"]}

    placed = {name: device_put(x, P("x"), mesh=LINE) for name, x in params.items()}
    for name, value in twice(Drops(False), placed).items():
        torch.testing.assert_close(device_get(twice(Drops(True), placed)[name]), device_get(value), msg=name)

    def by_rows(module: nn.Module) -> Any:
        return vmap(lambda x: grad(lambda q: functional_call(module, q, x).sum())(placed))(x)["part.0.bias"]

    torch.testing.assert_close(device_get(by_rows(Drops(True).eval())), device_get(by_rows(Drops(False).eval())))

    def in_body(checkpointed: bool) -> Any:
        @shard_map(mesh=MESHES[3,], in_specs=(P(None, "x"), P()), out_specs=P(unreduced={"x"}))
        def body(w: Tensor, x: Tensor) -> Any:
            leaves = {"part.0.weight": w.repeat(1, 3), "part.0.bias": w[:, 0]}
            return pcast(functional_call(Drops(checkpointed).eval(), leaves, x).sum(), "x", to="unreduced")

        return grad(lambda w: body(w, x))(params["part.0.weight"])

    torch.testing.assert_close(in_body(True), in_body(False))


def test_an_attached_module_is_the_module() -> None:
    """Its own methods, and optimizers over its parameters."""
    torch.manual_seed(0)
    whole: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).to(F64)
    x = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6).sin()
    tensors = {name: x.detach().clone() for name, x in whole.state_dict().items()}
    with torch.device("meta"):
        module: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    placed = {name: device_put(value, P("x") if value.ndim else P(), mesh=LINE) for name, value in tensors.items()}
    for name, _ in module.named_parameters():
        placed[name].requires_grad_()
    there = attach(module, placed)
    for model in (whole, module):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x).sin() ** 2).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert [type(value) for value in module.state_dict().values()] == [Sharded] * 7
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(device_get(module.state_dict()[name]), value, msg=name)
    second = attach(module, {name: x.detach() * 2 for name, x in placed.items()})
    torch.testing.assert_close(device_get(module[0].weight), whole[0].weight.detach() * 2)
    there.detach()
    assert isinstance(module[0].weight, Sharded)
    second.detach()
    second.detach()
    assert all(x.is_meta for x in module.state_dict().values())


def test_what_was_attached_is_not_kept() -> None:
    module = nn.LSTM(2, 3)
    params = {name: device_put(x.detach(), P(), mesh=LINE) for name, x in module.named_parameters()}
    attach(module, params)
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None
    assert not fspmd.tracing.LASTING


def test_messages() -> None:
    module = nn.Linear(2, 3)
    for name, f in {"attach": attach, "attached": lambda *given, **more: attached(*given, **more).__enter__()}.items():
        call: Any = f
        with pytest.raises(
            ArgumentError, match=rf"^{name} got the dict {{}} for module; .*: {name}\(module, params\)$"
        ):
            call({}, module)
        with pytest.raises(fspmd.TreeError, match=f"^{name} of Linear: params does not fit the module\n.*'w'"):
            call(module, {"w": torch.ones(1)})
        with pytest.raises(ArgumentError, match=rf"^{name} got the dict {{}} for styles; .* plan = parallelize"):
            call(module, {}, styles={})
    assert isinstance(module.weight, nn.Parameter)


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to(torch.float32),
    "bfloat16": nn.Module.bfloat16,
    "half": nn.Module.half,
    "to device and dtype": lambda module: module.to("cpu", torch.float32),
    "type": lambda module: module.type(torch.float32),
    "nothing": nn.Module.double,
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_an_attached_module_is_converted(name: str, shape: tuple[int, ...]) -> None:
    """Parameters and gradients in place, so that optimizers keep theirs; buffers anew."""
    torch.manual_seed(0)
    whole: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).to(F64)
    module: Any = copy.deepcopy(whole).to("meta")
    tensors = whole.state_dict()
    placed = {key: device_put(x, P("x") if x.ndim else P(), mesh=MESHES[shape]) for key, x in tensors.items()}
    for key, _ in module.named_parameters():
        placed[key].requires_grad_()
    there = attach(module, placed)
    x = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6).sin()
    for model in (whole, module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = list(model.parameters())
        for convert in (lambda model: model, CONVERSIONS[name], nn.Module.double):
            optimizer.zero_grad()
            (model(x.to(model[0].weight.dtype)).sin() ** 2).sum().backward()
            convert(model)
            optimizer.state.clear()  # of the old dtype
            optimizer.step()
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert all(one is placed[key] for key, one in module.named_parameters())
    assert torch.empty_like(module[0].weight).dtype is F64
    close = {"rtol": 1e-6, "atol": 1e-6} if name not in ("bfloat16", "half") else {"rtol": 3e-2, "atol": 3e-2}
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(device_get(module.state_dict()[key]), value, msg=key, **close)
    there.detach()
    assert placed["1.running_mean"].dtype is F64


def test_data_is_replaced() -> None:
    x = device_put(torch.arange(5.0), P("x"), mesh=LINE).requires_grad_()
    y = device_put(torch.arange(5.0, dtype=F64) * 3, P("x"), mesh=LINE)
    first = (x * x).sum()
    with torch.no_grad():
        device_get(x), reshard(x, P())  # remembered moves end
    x.data = y
    assert device_get(reshard(x, P())).tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert (x.dtype, x.is_leaf, x.requires_grad) == (F64, True, True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert device_get(x.grad).tolist() == [0.0, 6.0, 12.0, 18.0, 24.0]
    assert first.dtype is torch.float32
    for wrong in (reshard(y[:4], P()), torch.ones(5)):
        with pytest.raises(ArgumentError, match=r"^x.data = y got .*: write into x"):
            x.data = wrong


LIES = (P(), P("x"), P(unreduced={"x"}), P(reduced={"x"}))


@pytest.mark.parametrize("target", LIES, ids=repr)
@pytest.mark.parametrize("spec", LIES, ids=repr)
def test_data_is_moved(spec: P, target: P) -> None:
    """It lies as it did, with the numbers, the dtype and the strides of other data; gradients follow as before."""
    whole = torch.arange(15.0, dtype=F64).view(5, 3)
    y = reshard(device_put(whole, P(), mesh=LINE), spec).t()
    x = reshard(device_put(torch.zeros(3, 5), P(), mesh=LINE), target).detach().requires_grad_()
    lay = x.spec.partition
    x.data = y.clone()  # where nothing moves they share memory, as in torch
    assert (x.spec.partition, x.dtype, x.stride(), x.requires_grad) == (lay, F64, (1, 3), True)
    (x**2).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(device_get(x.grad), 2 * whole.t())
    with torch.no_grad():
        x.mul_(2)
    torch.testing.assert_close(device_get(x.detach()), 2 * whole.t())


@pytest.mark.parametrize("target", LIES, ids=repr)
@pytest.mark.parametrize("spec", LIES, ids=repr)
def test_a_gradient_is_moved(spec: P, target: P) -> None:
    """It lies as backward would leave it, also after a conversion of the module."""
    whole = torch.arange(15.0, dtype=F64).view(5, 3)
    y = reshard(device_put(whole, P(), mesh=LINE), spec)
    x = nn.Parameter(reshard(device_put(whole, P(), mesh=LINE), target).detach())
    module = nn.ParameterList([x])
    x.grad = y
    for dtype in (F64, torch.float32):
        assert module.to(dtype)[0] is x
        assert x.grad.spec is x.spec.dual
        torch.testing.assert_close(device_get((x.detach(), x.grad)), (whole.to(dtype), whole.to(dtype)))
    for wrong in (y, y[:4].float(), whole.float()):
        with pytest.raises(ArgumentError, match=r"^x.grad = y got .*; it takes None, or a Sharded of the same shape"):
            x.grad = wrong


def _linear(placed: bool) -> nn.Linear:
    module = nn.Linear(6, 5).to(F64)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(torch.linspace(-1, 1, x.numel(), dtype=F64).sin().view_as(x))
    if placed:
        specs = {"weight": P("x"), "bias": P()}
        leaves = device_put({name: x.detach() for name, x in module.named_parameters()}, specs, mesh=LINE)
        attach(module, {name: x.requires_grad_() for name, x in leaves.items()})
    return module


def _assign(module: nn.Linear) -> None:
    module.load_state_dict({name: x * 2 for name, x in module.state_dict().items()}, assign=True)


def _by_one_vector(module: nn.Linear) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 2, module.parameters())


class _Tied(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.register_parameter("weight", weight)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "assign": _assign,
    "assign whole": lambda module: module.load_state_dict(
        {name: device_get(x) * 2 for name, x in module.state_dict().items()}, assign=True
    ),
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "prune rows": lambda module: prune.ln_structured(module, "weight", 0.4, 2, 0),
    "set": lambda module: setattr(module, "weight", nn.Parameter(module.weight * 2)),
    "tie": lambda module: setattr(module, "tied", _Tied(module.weight)),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "one vector": _by_one_vector,
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", CHANGES)
def test_attached_parameters_are_parameters(name: str) -> None:
    """Torch's own tools exchange and tie them; a checkpoint computes again with what is there then."""
    x = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6).cos()
    found = []
    for module in (_linear(False), _linear(True)):
        CHANGES[name](module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (torch_checkpoint(lambda x, to=module: to(x).sin(), x, use_reentrant=False) ** 2).sum().backward()
            optimizer.step()
        found.append({key: device_get(value) for key, value in module.state_dict().items()})
    torch.testing.assert_close(found[1], found[0])


def test_threads_of_autograd_have_the_turn_of_the_one_that_waits_for_them() -> None:
    """On an accelerator backward runs in threads of autograd, while the one that asked for it may have the module."""
    module, done = nn.Linear(2, 3, bias=False), threading.Lock()
    done.acquire()

    def of_autograd() -> None:
        assert functional_call(module, {"weight": torch.zeros(3, 2)}, torch.ones(1, 2)).sum() == 0
        done.release()

    def _engine_run_backward() -> bool:  # as torch calls it, which waits below Python
        threading.Thread(target=of_autograd, daemon=True).start()
        return done.acquire(timeout=300)

    with attached(module, {"weight": torch.ones(3, 2)}):
        assert _engine_run_backward()
        assert module.weight.sum() == 6


def _pruned() -> tuple[nn.Linear, Tensor, Any]:
    module = nn.Linear(2, 4, bias=False)
    weight = device_put(torch.ones(4, 2), P("x"), mesh=make_mesh((2,), ("x",))).requires_grad_()
    return module, module.weight, weight


def test_pruning_while_attached_for_a_block_is_told() -> None:
    """The module has other parameters then than the leaves that are to leave it."""
    module, own, weight = _pruned()
    with (
        pytest.raises(ArgumentError, match=r"^attached: the module has removed its 'weight', as torch.nn.utils.prune"),
        attached(module, {"weight": weight}),
    ):
        prune.l1_unstructured(module, "weight", 0.5)
    (found,) = module.named_parameters()
    assert found[0] == "weight_orig"
    assert found[1] is own


@pytest.mark.parametrize("again", [False, True])
def test_pruned_modules_are_detached_once_nothing_is_pruned(again: bool) -> None:
    module, own, weight = _pruned()
    there = attach(module, {"weight": weight})
    prune.l1_unstructured(module, "weight", 0.5)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"before detach\(\) write prune.remove\(module, 'weight'\)"):
            attach(module, {}) if again else there.detach()
        assert dict(module.named_parameters())["weight_orig"] is weight
    prune.remove(module, "weight")
    there.detach()
    assert module.weight is own


@pytest.mark.filterwarnings("error")
def test_pruned_modules_that_are_gone_are_not_told() -> None:
    module, _, weight = _pruned()
    at = weakref.ref(module)
    attach(module, {"weight": weight})
    prune.l1_unstructured(module, "weight", 0.5)
    del module
    gc.collect()
    assert at() is None


def test_a_module_is_saved_with_its_leaves_and_styles() -> None:
    """By `torch.save`, and as a copy: each lays out its values as the module does."""
    module, params = made("none")
    params, plan = parallelize(params, LAYOUTS[0], LINE)
    attach(module, {name: x.requires_grad_() for name, x in params.items()}, styles=plan)
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    loss, gradients = expected_of("none")
    for again in (torch.load(file, weights_only=False), copy.deepcopy(module), module):
        with communication_log() as log:
            found = loss_of(again(IDS))
            found.backward()
        torch.testing.assert_close(device_get(found).detach(), loss)
        for name, x in again.named_parameters():
            torch.testing.assert_close(device_get(x.grad), gradients[name])
        assert [call.kind for call in log].count("psum_unreduced") == 2  # one a block
