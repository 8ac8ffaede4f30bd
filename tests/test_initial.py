"""`init_sharded`: the constructor's own values, the same on any mesh under any spec, the whole of none on a rank."""

from __future__ import annotations

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


def last(name: str, shape: tuple[int, ...]) -> P:
    return P(*(None,) * (len(shape) - 1), "x") if shape else P()


SPECS: dict[str, Any] = {"whole": P(), "rows": P("x"), "columns": last}


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("mesh", [LINE, GRID, WIDE])
def test_values_of_the_constructor(mesh: Mesh, specs: str) -> None:
    plain = Known()
    module, params, buffers = init_sharded(Known, SPECS[specs], mesh=mesh)
    assert all(x.is_meta for x in module.parameters())
    assert list(params) == list(dict(plain.named_parameters()))
    assert list(buffers) == list(dict(plain.named_buffers()))
    for name, x in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        found = {**params, **buffers}[name]
        torch.testing.assert_close(device_get(found).detach(), x.detach(), rtol=0, atol=0, msg=name)
        assert found.requires_grad == x.requires_grad
        if specs == "rows" and x.ndim:
            assert found.spec.partition[0] == "x"


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
        pool.run(_in_blocks, seconds=60)


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
        "init_sharded: module_fn gave the int 3; return the module"
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

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [x.item() for x in torch.linspace(0, 1, 3)]

    assert said(lambda: init_sharded(Looks, P(), mesh=LINE)) == (
        "init_sharded: the constructor asks for values of a tensor by item(), but runs where tensors have none; "
        "compute them in Python or numpy"
    )
