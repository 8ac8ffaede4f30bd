"""`init_sharded`: the constructor's own values, the same on any mesh under any spec, the whole of none on a rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from processes import Processes
from test_modules import Tied
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fspmd import (
    ColwiseParallel,
    FspmdError,
    Mesh,
    P,
    RowwiseParallel,
    VocabParallel,
    device_get,
    functional_call,
    init_sharded,
    make_mesh,
    parallelize,
)

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")


class Known(nn.Module):
    """Tensors made in every way, none of them at random."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.full((3, 4), 2.0) * 0.25 + 1)
        self.filled = nn.Parameter(torch.empty(6))
        self.filled.data.fill_(4)
        self.filled.data[2:4] = 3
        self.parts = nn.Parameter(torch.zeros(5, 6, dtype=torch.float64))
        with torch.no_grad():
            self.parts[3].fill_(7)
            self.parts[1:, -2:].add_(2)
            self.parts[0] = torch.arange(6.0)
            self.parts[::2, 1] = 9
        self.copied = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.copied.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        self.replaced = nn.Linear(2, 2)
        self.replaced.weight.data = torch.eye(2)
        self.replaced.bias = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.replaced.weight
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.conv.weight)
        nn.init.constant_(self.conv.bias, 0.5)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        self.register_buffer("frequencies", 1.0 / (10 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("outside", torch.from_numpy(np.arange(3)))


class Written(nn.Module):
    """Values written in every way that initialisers are written in."""

    def __init__(self) -> None:
        super().__init__()
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Linear(4, 3)
        torch.set_default_dtype(default)
        nn.init.constant_(tensor=self.wide.weight, val=2.0)
        nn.init.zeros_(tensor=self.wide.bias)
        self.identity = nn.Parameter(torch.empty(5, 4))
        nn.init.eye_(self.identity)
        self.old = nn.Parameter(torch.Tensor(6, 4))  # in memory that no mode sees
        self.old.data.fill_(3)
        self.old.data[1:3].mul_(2)
        self.unseen = nn.Parameter(torch.Tensor(4).fill_(1), requires_grad=False)
        self.gates = nn.Parameter(torch.zeros(12, 5))
        with torch.no_grad():
            for i, gate in enumerate(self.gates.chunk(3)):
                gate.add_(i)
            for i, row in enumerate(self.gates.t().unbind()):
                row[::2] = i
            first, second = self.gates.split([5, 7])
            first[:, 1].copy_(torch.arange(5.0))
            second.t()[2, 3:].sub_(torch.arange(4.0))
            torch.mul(self.gates, 2.0, out=self.gates)
            self.gates[torch.tensor([0, 11])] = 7.0
            self.gates.view(3, 4, 5)[1, 2].fill_(-1)
            self.gates.fill_diagonal_(9)
            torch.ops.aten.add_(self.gates, 1)
        self.loaded = nn.Linear(2, 3)
        self.loaded.load_state_dict({"weight": torch.from_numpy(np.ones((3, 2), np.float32)), "bias": torch.ones(3)})
        self.given = nn.Parameter(torch.empty(4, 2))
        self.given.data = torch.from_numpy(np.arange(8, dtype=np.float32).reshape(4, 2))
        self.given.data.mul_(torch.from_numpy(np.full(2, 3, np.float32)))
        self.small = nn.Linear(3, 4).half()
        nn.init.ones_(self.small.weight)
        self.small.bias.data.zero_()
        self.small.to(self.wide.weight.device, torch.bfloat16)
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t_())
        self.copies = copy.deepcopy(self.loaded)
        self.drops = [round(x.item(), 3) for x in torch.linspace(0, 1, 3)]
        self.scale = nn.Parameter(torch.full((4,), float(torch.arange(5).sum())))
        if self.scale.device.type != "meta" and not self.scale.is_meta:  # as libraries ask
            nn.init.constant_(self.scale, self.drops[1])
        self.register_buffer("positions", torch.arange(6, device=self.scale.device).expand((1, -1)))
        self.register_buffer(
            "table", torch.cat([torch.arange(6.0)[:, None] * x for x in (torch.ones(3), torch.eye(3)[0])], 1)
        )


class Reused(nn.Module):
    """Values that come from arrays and tensors outside of the record, which are written into before, between and after.

    The last ones are views that one call gives together, and casts by name.
    """

    def __init__(self) -> None:
        super().__init__()
        row = np.zeros(4, np.float32)
        shared = torch.from_numpy(row)
        self.rows = nn.Parameter(torch.zeros(3, 4))
        self.sums = nn.Parameter(torch.zeros(3, 4))
        with torch.no_grad():
            for i in range(3):
                row[:] = i + 1
                self.register_buffer(f"row{i}", torch.tensor(row))
                self.rows[i] = torch.from_numpy(row)
                self.sums[i].copy_(shared).add_(shared)
                shared.mul_(7)
        table = torch.from_numpy(np.ones((4, 4), np.float32))
        table[0] = torch.arange(4.0)
        table[1:, ::2].add_(torch.full((2,), 2.0))
        torch.mul(torch.ones(4), 3.0, out=table[2])
        self.table = nn.Parameter(table)
        self.register_buffer("twice", table * torch.full((4,), 2.0))
        row[:] = table[:] = 50
        x, y = torch.meshgrid(torch.arange(2.0), torch.arange(1.0, 4.0), indexing="ij")
        self.register_buffer("grid", torch.stack([x, y]))
        self.register_buffer("kept", y)
        self.register_buffer("cast", torch.arange(4).to(dtype=torch.float64))
        self.register_buffer("like", torch.arange(4).to(self.rows))


def last(name: str, shape: tuple[int, ...]) -> P:
    return P(*(None,) * (len(shape) - 1), "x") if shape else P()


SPECS: dict[str, Any] = {"whole": P(), "rows": P("x"), "columns": last}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("make", [Known, Written, Reused])
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("mesh", [LINE, GRID, WIDE])
def test_values_of_the_constructor(mesh: Mesh, specs: str, make: Callable[[], nn.Module]) -> None:
    plain = make()
    module, params, buffers = init_sharded(make, SPECS[specs], mesh=mesh)
    assert all(x.is_meta for x in module.parameters())
    assert list(params) == list(dict(plain.named_parameters()))
    assert list(buffers) == list(dict(plain.named_buffers()))
    for name, x in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        found = {**params, **buffers}[name]
        torch.testing.assert_close(device_get(found).detach(), x.detach(), rtol=0, atol=0, msg=name)
        assert found.requires_grad == x.requires_grad
        if specs == "rows" and x.ndim:
            assert found.spec.partition[0] == "x"


def unlike(x: Tensor, y: Tensor) -> float:
    """Kolmogorov and Smirnov's distance between two samples, beside that which equal distributions have: 1 in 1e5."""
    x, y = x.double().flatten().sort().values, y.double().flatten().sort().values
    at = torch.cat([x, y])
    below = [torch.searchsorted(one, at, right=True) / len(one) for one in (x, y)]
    return float((below[0] - below[1]).abs().max()) / (2.5 * math.sqrt(1 / len(x) + 1 / len(y)))


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 30, padding_idx=3)
        self.linear = nn.Linear(30, 50)
        self.attention = nn.MultiheadAttention(20, 2)
        self.wide = nn.Parameter(torch.randn(50, 40) * 0.02)
        self.truncated = nn.Parameter(torch.empty(50, 40))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.5, b=1.0)
        self.orthogonal = nn.Parameter(torch.empty(8, 6))
        nn.init.orthogonal_(self.orthogonal)
        self.sparse = nn.Parameter(torch.empty(20, 30))
        nn.init.sparse_(tensor=self.sparse, sparsity=0.3, std=0.2)
        self.recurrent = nn.LSTM(10, 12)
        for name, x in self.recurrent.named_parameters():
            for gate in x.data.chunk(4):
                nn.init.zeros_(gate) if "bias" in name else nn.init.orthogonal_(gate)
        self.recurrent.bias_ih_l0.data[12:24].fill_(1.0)
        self.halves = nn.Parameter(torch.Tensor(40, 30))
        with torch.no_grad():
            self.halves[:13].uniform_(-1, 0)
            self.halves.t()[:, 13:].exponential_(2.0)
            self.halves[20:, ::2].mul_(torch.rand(20, 15)).add_(3)
        self.rows = nn.Parameter(torch.stack([torch.randn(30) * i for i in range(1, 5)]))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(30, 20))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 20, batch_first=True), 2)
        self.apply(self.again)

    def again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)


def drawn(mesh: Mesh, specs: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    _, params, _ = init_sharded(Drawn, specs, mesh=mesh)
    return {name: device_get(x).detach() for name, x in params.items()}


def test_random_values_have_the_constructor_s_distribution() -> None:
    x = drawn(LINE, P("x"))
    for name, own in [(name, own) for _ in range(4) for name, own in Drawn().named_parameters()]:
        assert unlike(x[name], own.detach()) < 1, name
    for name in ("recurrent.weight_ih_l0", "recurrent.weight_hh_l0"):
        for gate in x[name].chunk(4):
            torch.testing.assert_close(gate.T @ gate, torch.eye(len(gate.T)), rtol=1e-5, atol=1e-5)
    assert x["recurrent.bias_ih_l0"].tolist() == [0.0] * 12 + [1.0] * 12 + [0.0] * 24
    assert [int((column == 0).sum()) for column in x["sparse"].T] == [6] * 30
    copied = [x[f"layers.layers.{i}.self_attn.in_proj_weight"] for i in range(2)]
    assert torch.equal(*copied)
    norms = x["normed.parametrizations.weight.original0"][:, 0]
    torch.testing.assert_close(x["normed.parametrizations.weight.original1"].norm(dim=1), norms)
    assert x["table.weight"][3].count_nonzero() == 0
    assert x["table.weight"].std().item() == pytest.approx(math.sqrt(39 / 40), rel=0.1)
    assert x["linear.weight"].mean().item() == pytest.approx(1.0, rel=0.02)
    assert x["linear.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert 0.1 < x["linear.bias"].abs().max().item() <= 1 / math.sqrt(30)
    assert x["attention.in_proj_weight"].abs().max().item() == pytest.approx(math.sqrt(6 / 80), rel=0.02)
    assert x["wide"].std().item() == pytest.approx(0.02, rel=0.1)
    torch.manual_seed(0)
    want = nn.init.trunc_normal_(torch.empty(200, 200), std=0.5, a=-0.5, b=1.0)
    assert x["truncated"].min().item() >= -0.5
    assert x["truncated"].max().item() <= 1.0
    assert x["truncated"].mean().item() == pytest.approx(want.mean().item(), abs=0.03)
    assert x["truncated"].std().item() == pytest.approx(want.std().item(), rel=0.05)
    torch.testing.assert_close(x["orthogonal"].T @ x["orthogonal"], torch.eye(6), rtol=1e-5, atol=1e-5)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mesh", [LINE, GRID, WIDE])
def test_random_values_do_not_depend_on_the_layout(mesh: Mesh) -> None:
    first = drawn(LINE, P())
    for specs in SPECS.values():
        for name, x in drawn(mesh, specs).items():
            torch.testing.assert_close(x, first[name], rtol=1e-6, atol=1e-7, msg=name)


def test_styles_and_ties() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Tied(), nn.Linear(10, 8), nn.Linear(8, 4))

    styles = {"*": RowwiseParallel(), "1": ColwiseParallel(), "0.embed": VocabParallel()}
    module, params, buffers = init_sharded(build, styles, mesh=GRID, axis="y")
    assert buffers == {}
    assert {name: x.spec.partition for name, x in params.items()} == {
        "0.embed.weight": P("y", None),
        "1.weight": P("y", None),
        "1.bias": P("y"),
        "2.weight": P(None, "y"),
        "2.bias": P(None),
    }
    again, plan = parallelize(params, {"1": ColwiseParallel(), "2": RowwiseParallel()}, GRID, axis="y")
    out = functional_call(module, again, torch.tensor([[1, 2]]), styles=plan)
    plain = build()
    plain.load_state_dict({name: device_get(x) for name, x in params.items()}, strict=False)
    plain[0].head.weight = plain[0].embed.weight
    torch.testing.assert_close(device_get(out), plain(torch.tensor([[1, 2]])))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and not x.is_meta:
                self.elements = max(self.elements, x.numel())
        return out


def _in_blocks() -> None:
    mesh = make_mesh((4,), ("x",))
    torch.manual_seed(0)
    with Largest() as largest:
        _, params, _ = init_sharded(lambda: nn.Embedding(4000, 50, padding_idx=1), P("x"), mesh=mesh)
        _, more, _ = init_sharded(lambda: nn.Linear(500, 400), P("x"), mesh=mesh)
    assert largest.elements <= 50_000, largest.elements
    assert params["weight"].local.shape == (1000, 50)
    whole = {"embedding": device_get(params["weight"]).detach(), "linear": device_get(more["weight"]).detach()}
    torch.manual_seed(0)
    line = make_mesh((1,), ("x",), transport="simulation")
    _, params, _ = init_sharded(lambda: nn.Embedding(4000, 50, padding_idx=1), P(), mesh=line)
    _, more, _ = init_sharded(lambda: nn.Linear(500, 400), P(), mesh=line)
    torch.testing.assert_close(whole["embedding"], device_get(params["weight"]).detach())
    torch.testing.assert_close(whole["linear"], device_get(more["weight"]).detach())


def test_no_rank_ever_holds_the_whole() -> None:
    with Processes(4) as pool:
        pool.run(_in_blocks)


def said(f: Callable[[], Any]) -> str:
    with pytest.raises(FspmdError) as caught:
        f()
    return str(caught.value)


def test_messages() -> None:
    def linear() -> nn.Module:
        return nn.Linear(2, 3)

    assert said(lambda: init_sharded(nn.Linear(2, 3), P(), mesh=LINE)) == (
        "init_sharded got a Linear for module_fn; give it a function that makes the module: lambda: Transformer(config)"
    )
    assert said(lambda: init_sharded(lambda: 3, P(), mesh=LINE)) == (
        "init_sharded: module_fn returned the int 3; return the module"
    )
    assert said(lambda: init_sharded(linear, {"wieght": P("x")}, mesh=LINE)) == (
        "init_sharded: styles do not fit\n  * 'wieght' (Style) matches nothing; near it: 'weight'\n"
        "for a module without parameters write PrepareInput(...)"
    )
    assert said(lambda: init_sharded(linear, "x", mesh=LINE)) == (
        "init_sharded got the string 'x' for specs; write P('x'), {'layers.*.wq': P('x')}, or a function of a name "
        "and a shape"
    )
    with torch.device("meta"):
        made_before = nn.Linear(2, 3)
    assert said(lambda: init_sharded(lambda: made_before, P(), mesh=LINE)) == (
        "init_sharded: 'weight' is on the meta device, but module_fn did not make it; make all tensors of the module "
        "in module_fn"
    )

    def on_purpose() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(2, 3)

    assert said(lambda: init_sharded(on_purpose, P(), mesh=LINE)) == (
        "init_sharded: module_fn itself puts 'weight' on the meta device, where libraries initialise nothing; leave "
        "torch.device('meta') out: init_sharded gives no tensor memory before it is laid out"
    )

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [x.item() for x in torch.rand(3)]

    assert said(lambda: init_sharded(Looks, P(), mesh=LINE)) == (
        "init_sharded: the constructor asks for values of a tensor by item(), but runs on the meta device, where "
        "tensors have none; compute them in Python or numpy"
    )

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            given = torch.from_numpy(np.ones(3))
            given.copy_(torch.rand(3))
            self.weight = nn.Parameter(given)

    assert said(lambda: init_sharded(Mixed, P(), mesh=LINE)) == (
        "init_sharded: the constructor asks for values of a tensor by copy_(), but runs on the meta device, where "
        "tensors have none; compute them in Python or numpy"
    )
    assert init_sharded(nn.Tanh, P("x"), mesh=LINE)[1:] == ({}, {})
    before = nn.Linear(2, 3)
    weight = before.weight
    _, params, _ = init_sharded(lambda: nn.Sequential(before), P(), mesh=LINE)
    torch.testing.assert_close(device_get(params["0.weight"]), weight)
