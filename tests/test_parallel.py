"""Parallel styles on pytrees and modules, beside unsharded torch in float64; their tables, moves and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from test_attached import check_checkpoints
from test_modules import Attention, Tied, nested, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from fspmd import (
    ArgumentError,
    ColwiseParallel,
    Flat,
    FspmdError,
    Mesh,
    P,
    PrepareInput,
    PrepareOutput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    ShapeError,
    Sharded,
    Style,
    VocabParallel,
    broadcast,
    communication_log,
    device_get,
    device_put,
    functional_call,
    make_mesh,
    pairs,
    parallelize,
    shard_map,
)
from fspmd.modules.paths import matches
from fspmd.modules.styles import laid_out

F64 = torch.float64
LINE = make_mesh((4,), ("tp",), transport="simulation")
GRID = make_mesh((2, 2), ("data", "tp"), transport="simulation")
MESHES = {"line": (LINE, P()), "grid": (GRID, P("data"))}


class Mlp(nn.Module):
    """Widths that four ranks share unevenly."""

    def __init__(self, width: int = 6, hidden: int = 9) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm, self.mlp, self.drop = nn.LayerNorm(6), Mlp(), nn.Dropout(0.0)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        return x + self.drop(self.mlp(self.norm(x)))


MLP: dict[str, Style] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Fused(nn.Module):
    """Gate and value of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 16, dtype=F64), nn.Linear(8, 6, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        out: Tensor = self.down(torch.tanh(gate) * value)
        return out


class MultiQuery(nn.Module):
    """Four heads of queries for one of keys and values, cut within it: their dims lie flat before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(6, 16, dtype=F64), nn.Linear(16, 6, dtype=F64)
        self.k, self.v = nn.Linear(6, 4, dtype=F64), nn.Linear(6, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (one.expand(-1, 4, -1, -1) for one in (k, v))
        out: Tensor = self.o((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1))
        return out


FLOATS = torch.linspace(-1, 1, 60, dtype=F64).view(2, 5, 6).sin()
IDS = torch.tensor([[1, 2, 10, 0, 4], [0, 2, 5, 6, 7]])
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Style], Tensor]] = {
    "mlp": (Mlp, MLP, FLOATS),
    "mlp, sequence": (Mlp, {"up": ColwiseParallel(), "down": RowwiseParallel(output=1)}, FLOATS),
    "mlp, pending": (Mlp, {"up": ColwiseParallel(), "down": RowwiseParallel(output="unreduced")}, FLOATS),
    "block": (
        Block,
        {
            "embed": VocabParallel(output=1),
            "norm": SequenceParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output=1),
            "drop": PrepareInput(input=1),
            "": PrepareOutput(output="replicated"),
        },
        IDS,
    ),
    "fused": (
        Fused,
        {"both": ColwiseParallel(specs={"*": P(Flat((2, None), (8, "tp")))}), "down": RowwiseParallel()},
        FLOATS,
    ),
    "multi-query": (
        MultiQuery,
        {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()},
        FLOATS,
    ),
    "embedding by columns": (
        Block,
        {"embed": ColwiseParallel(weight=-1), "norm": Replicated(), "mlp": PrepareInput(input="replicated")},
        IDS,
    ),
    "attention": (
        Attention,
        {
            "norm": SequenceParallel(output="replicated"),
            "w[qkv]": ColwiseParallel(),
            "wo": RowwiseParallel(output=1),
        },
        torch.linspace(-1, 1, 120, dtype=F64).view(2, 5, 12).sin(),
    ),
    "tied": (Tied, {"embed": VocabParallel(), "head": PrepareOutput(output="replicated")}, IDS % 10),
}


@pytest.mark.parametrize("shape", [lambda flat: flat, nested])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_modules(mesh: str, case: str, shape: Callable[[dict[str, Any]], Any]) -> None:
    on, batch = MESHES[mesh]
    check_module(*CASES[case], on, batch, shape)


def check_module(
    make: Callable[[], nn.Module],
    styles: dict[str, Style],
    x: Tensor,
    on: Mesh,
    batch: P,
    shape: Callable[[dict[str, Any]], Any],
) -> None:
    module = seeded(make)
    expected = module(x)
    weight = torch.arange(1.0, expected.numel() + 1, dtype=F64).view(expected.shape).cos()
    (expected * weight).sum().backward()
    params, plan = parallelize(shape(dict(module.named_parameters())), styles, on, axis="tp")
    out = functional_call(module, params, device_put(x, batch, mesh=on), styles=plan)
    assert isinstance(out, Sharded)
    torch.testing.assert_close(device_get(out), expected)
    (device_get(out) * weight).sum().backward()
    leaves = params if shape is not nested else {row.name: _at(params, row.name) for row in plan.rows}
    assert set(leaves) == set(dict(module.named_parameters()))
    for name, parameter in module.named_parameters():
        grad = leaves[name].grad
        assert grad is not None
        assert grad.spec.partition == leaves[name].spec.partition
        torch.testing.assert_close(device_get(grad), parameter.grad, msg=f"{name}: {grad!r}")


def _at(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


def test_layouts_of_results() -> None:
    module = seeded(Mlp)
    seen: dict[str, P] = {}
    for name in ("up", "down"):
        getattr(module, name).register_forward_hook(
            lambda _, args, out, name=name: seen.__setitem__(name, out.spec.partition)
        )
    params, plan = parallelize(dict(module.named_parameters()), MLP, GRID, axis="tp")
    out = functional_call(module, params, device_put(FLOATS, P("data"), mesh=GRID), styles=plan)
    assert seen["up"] == P("data", None, "tp")
    assert out.spec.partition == P("data", None, None)
    assert params["down.bias"].spec.partition == P(None)
    assert not module.up._forward_pre_hooks
    assert len(module.up._forward_hooks) == 1


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("local", [False, True])
def test_trees(mesh: str, local: bool) -> None:
    """Weights of ``x @ w``; with ``local`` each function runs on plain blocks."""
    on, batch = MESHES[mesh]
    plain = {"up": torch.rand(6, 9, dtype=F64), "down": torch.rand(9, 6, dtype=F64), "bias": torch.rand(6, dtype=F64)}
    plain = {name: x.requires_grad_() for name, x in plain.items()}
    expected = F.gelu(FLOATS @ plain["up"]) @ plain["down"] + plain["bias"]
    expected.cos().sum().backward()
    styles = {"up": ColwiseParallel(weight=-1), "down": RowwiseParallel(weight=-2)}
    params, plan = parallelize(plain, styles, on, axis="tp")
    kinds = []

    def up(x: Any, w: Any) -> Any:
        kinds.append(type(x) is Sharded)
        return F.gelu(x @ w)

    def down(x: Any, w: Any) -> Any:
        return x @ w

    first, second = (plan[name].local(f) if local else plan[name](f) for name, f in (("up", up), ("down", down)))
    x = device_put(FLOATS, batch, mesh=on)
    out = second(first(x, params["up"]), params["down"]) + params["bias"]
    assert kinds == [not local]
    torch.testing.assert_close(device_get(out), expected)
    device_get(out).cos().sum().backward()
    for name, x in plain.items():
        grad = params[name].grad
        assert grad is not None
        torch.testing.assert_close(device_get(grad), x.grad)


FREE = {"alias", "per_rank", "pick", "slice", "at_root"}


@pytest.mark.parametrize("local", [False, True])
def test_what_moves_is_one_sum_forward_and_one_backward(monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    """Column then row parallel: Megatron's two all-reduces."""
    kernels: list[str] = []
    run = pairs.Call.run

    def seen(self: pairs.Call, x: Tensor) -> Tensor:
        kernels.append(self.pair.kernel)
        return run(self, x)

    monkeypatch.setattr(pairs.Call, "run", seen)
    plain = {"up": torch.ones(8, 6, dtype=F64), "down": torch.ones(6, 8, dtype=F64)}
    params, plan = parallelize({name: x.requires_grad_() for name, x in plain.items()}, MLP, LINE)
    x = device_put(FLOATS, P(), mesh=LINE).requires_grad_()
    up, down = (plan[name].local(F.linear) if local else plan[name](F.linear) for name in ("up", "down"))
    kernels.clear()
    out = down(F.gelu(up(x, params["up"])), params["down"])
    assert [name for name in kernels if name not in FREE] == ["reduce_once"]
    kernels.clear()
    out.backward(torch.ones(2, 5, 6, dtype=F64))
    assert [name for name in kernels if name not in FREE] == ["reduce_once"]


@pytest.mark.parametrize("local", [False, True])
def test_a_cut_sequence_is_gathered_for_columns_and_scattered_by_rows(local: bool) -> None:
    """Megatron's sequence parallelism: an all-gather and a reduce-scatter, and the same backward."""
    plain = {"up": torch.ones(8, 6, dtype=F64), "down": torch.ones(6, 8, dtype=F64)}
    styles: dict[str, Style] = {"up": ColwiseParallel(), "down": RowwiseParallel(output=1)}
    params, plan = parallelize({name: x.requires_grad_() for name, x in plain.items()}, styles, LINE)
    x = device_put(FLOATS, P(None, "tp"), mesh=LINE).requires_grad_()
    up, down = (plan[name].local(F.linear) if local else plan[name](F.linear) for name in ("up", "down"))
    with communication_log() as log:
        down(F.gelu(up(x, params["up"])), params["down"]).sum().backward()
    assert [one.kind for one in log] == ["all_gather_reduced", "psum_scatter_unreduced"] * 2
    whole = FLOATS.clone().requires_grad_()
    F.linear(F.gelu(F.linear(whole, plain["up"])), plain["down"]).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(device_get(x.grad), whole.grad)


def test_a_bias_that_would_count_once_per_rank_is_refused() -> None:
    params = {"weight": torch.ones(6, 8), "bias": torch.ones(6)}
    params, plan = parallelize(params, {"": RowwiseParallel()}, LINE)
    layer = plan[""].local(F.linear)
    assert device_get(layer(torch.ones(8), params["weight"]) + params["bias"]).tolist() == [9.0] * 6
    assert said(lambda: layer(torch.ones(8), params["weight"], params["bias"])) == (
        "'': the results of the ranks are summed over 'tp', but a Sharded of shape (6,) is equal on all ranks "
        "and would count once per rank; add it to the result"
    )


def test_several_styles_at_one_place() -> None:
    """The later decides, field by field and leaf by leaf."""
    styles = {
        "**": Replicated(),
        "layers.*.up": ColwiseParallel(),
        "layers.1": RowwiseParallel(specs={"up.bias": P("tp")}),
        "layers.1.up": PrepareOutput(output="replicated"),
    }
    params = {"layers": [{"up": {"weight": torch.ones(8, 4), "bias": torch.ones(8)}} for _ in range(2)], "b": None}
    params, plan = parallelize(params, styles, LINE)
    assert params["b"] is None
    assert plan.specs == {
        "layers.0.up.weight": P("tp", None),
        "layers.0.up.bias": P("tp"),
        "layers.1.up.weight": P(None, "tp"),
        "layers.1.up.bias": P("tp"),
    }
    up = plan["layers.1.up"](F.linear)
    assert up(torch.ones(4), params["layers"][1]["up"]["weight"]).spec.partition == P(None)
    assert str(plan) == (
        "on mesh(tp=4)\n"
        "leaf                layout        pattern      style\n"
        "layers.0.up.weight  f32[8@tp, 4]  layers.*.up  ColwiseParallel(axis='tp')\n"
        "layers.0.up.bias    f32[8@tp]     layers.*.up  ColwiseParallel(axis='tp')\n"
        "layers.1.up.weight  f32[8, 4@tp]  layers.1     "
        "RowwiseParallel(axis='tp', specs={'up.bias': P('tp')})\n"
        "layers.1.up.bias    f32[8@tp]     layers.1     "
        "RowwiseParallel(axis='tp', specs={'up.bias': P('tp')})"
    )


def test_arguments_by_keyword_and_tuples() -> None:
    both = {"f": PrepareInput(input=(0, None), kwargs={"mask": -1}), "g": PrepareOutput(output=(0, "replicated"))}
    _, plan = parallelize({}, both, LINE)
    x = torch.ones(4, 4)
    seen = plan["f"](lambda a, b, c, mask, other: (a, b, c, mask, other))(x, x, x, mask=x, other=3)
    assert [y.spec.partition if isinstance(y, Sharded) else type(y) for y in seen] == [
        *(P("tp", None), Tensor, Tensor, P(None, "tp"), int),
    ]
    first, second = plan["g"](lambda x: [x, x + 1])(device_put(x, P("tp"), mesh=LINE))
    assert (first.spec.partition, second.spec.partition) == (P("tp", None), P(None, None))
    for out, count in (((x,), "1 result"), (x, "1 result"), ([], "0 results")):
        with pytest.raises(ArgumentError, match=rf"lay out 2 results by .* but the module returned {count};"):
            plan["g"](lambda out=out: out)()
    _, plan = parallelize({}, {"g": PrepareOutput(output=(0, None))}, LINE)
    assert plan["g"](lambda x: x)(x).spec.partition == P("tp", None)


def test_one_parameter_under_two_names_stays_one() -> None:
    w = torch.ones(8, 6)
    params, _ = parallelize(
        {"embed": w, "head": w, "other": w}, {"embed": VocabParallel(), "head": VocabParallel()}, LINE
    )
    assert params["embed"] is params["head"]
    assert params["other"].spec.partition == P(None, None)


def test_globs() -> None:
    yes = [
        ("", ""),
        ("**", ""),
        ("**", "a.b"),
        ("a.*", "a.b"),
        ("**.w", "w"),
        ("a.**.w", "a.w"),
        ("w[qk]", "wq"),
        ("w?", "wq"),
    ]
    no = [
        ("", "a"),
        ("*", "a.b"),
        ("*", ""),
        ("a.*", "a.b.c"),
        ("w[qk]", "wv"),
        ("w?", "w.q"),
        ("a.w", "a_w"),
        ("?", ""),
    ]
    assert [case for case in yes if not matches(*case)] == []
    assert [case for case in no if matches(*case)] == []


def said(f: Callable[[], Any]) -> str:
    with pytest.raises(FspmdError) as caught:
        f()
    return str(caught.value)


def test_messages() -> None:
    params = {"layers": [{"wq": torch.ones(4, 4), "b": torch.ones(4)}]}
    assert said(lambda: parallelize(params, {"layers.*.wk": ColwiseParallel(), "x": 3}, LINE)) == (
        "parallelize: styles do not fit\n"
        "  * 'x' is the int 3; write a style such as ColwiseParallel()\n"
        "  * 'layers.*.wk' (ColwiseParallel) matches nothing; near it: 'layers.0.wq', 'layers.0.b', 'layers.0'\n"
        "for a module without parameters write PrepareInput(...)"
    )
    assert said(lambda: parallelize(params, {"layers": ColwiseParallel()}, GRID)) == (
        "parallelize: styles do not fit\n"
        "  * 'layers' (ColwiseParallel) has no axis, and mesh(data=2, tp=2) has several\n"
        "write axis='tp'"
    )
    assert said(lambda: parallelize(params, {"layers": ColwiseParallel(axis="pt")}, GRID)) == (
        "parallelize: styles do not fit\n"
        "  * 'layers' (ColwiseParallel) has the axis 'pt', but mesh(data=2, tp=2) has only 'data', 'tp'"
    )
    assert said(lambda: parallelize(params, {"layers": ColwiseParallel(weight=2)}, LINE)) == (
        "parallelize: 'layers.0.wq' under 'layers' (ColwiseParallel(axis='tp', weight=2)): a style cuts dim 2, but the "
        "value has 2 dims; write another layout"
    )
    assert said(lambda: ColwiseParallel(output="sharded")) == (
        "ColwiseParallel got the string 'sharded' for output; expected a dim such as -1, one of 'replicated', "
        "'unreduced', 'reduced', a P, or None"
    )
    assert said(lambda: ColwiseParallel(specs=P("tp"))) == (  # type: ignore[arg-type]
        "ColwiseParallel got a P for specs; expected a dict of layouts"
    )
    assert said(lambda: parallelize({"w": 3}, {}, LINE)) == (
        "parallelize lays out trees of tensors\n  * 'w' is the int 3, not a tensor"
    )
    assert said(lambda: parallelize(torch.ones(2), {}, LINE)) == (
        "parallelize got a tensor of shape (2,) for params; give it a dict of tensors by name"
    )
    _, plan = parallelize(params, {"layers.0.wq": ColwiseParallel()}, LINE)
    assert said(lambda: plan["layers.0.wk"]) == "no style matches 'layers.0.wk'; near it: 'layers.0.wq'"
    module = seeded(Mlp)
    tree, plan = parallelize(dict(module.named_parameters()), {"uq": PrepareInput(input=0)}, LINE)
    assert said(lambda: functional_call(module, tree, FLOATS, styles=plan)) == (
        "functional_call of Mlp: styles do not fit the module\n  * no module at 'uq'; it has 'up', 'down'"
    )


def test_styles_in_a_body_are_refused() -> None:

    _, plan = parallelize({}, {"f": PrepareInput(input="replicated")}, LINE)
    body = shard_map(plan["f"](lambda x: x), mesh=LINE, in_specs=P("tp"), out_specs=P("tp"))
    assert said(lambda: body(torch.ones(4))) == (
        "the styles at 'f' lay out global values, but were used inside shard_map(<lambda>), whose values are this "
        "rank's blocks; "
        "use them outside"
    )


@pytest.mark.parametrize("case", ["fused", "multi-query"])
def test_flat_dims_move_at_most_to_meet_weights(case: str) -> None:
    make, styles, x = CASES[case]
    params, plan = parallelize(dict(seeded(make).named_parameters()), styles, LINE, axis="tp")
    with communication_log() as log:
        functional_call(seeded(make), params, x, styles=plan)
    assert [one.kind for one in log if "RowwiseParallel" in str(one.cause)] == [
        *(["all_to_all"] if case == "multi-query" else []),
        "psum_unreduced",
    ], str(log)


def test_a_flat_dim_of_other_axes() -> None:
    flat = P(Flat((4, None), (6, "data")))
    assert laid_out(flat, 1, "tp", "replicated") == flat
    assert laid_out(flat, 1, "data", "replicated") == P(None)
    assert laid_out(flat, 1, "data", 0) == P("data")
    assert laid_out(flat, 1, "data", 0, flat=True) == flat
    assert laid_out(flat, 1, "tp", 0) == P(Flat((4, "tp"), (6, "data")))


def on_processes(sizes: tuple[int, ...]) -> None:
    mesh = make_mesh(sizes, ("data", "tp")[-len(sizes) :])
    batch = P("data") if len(sizes) > 1 else P()
    for make, styles, x in CASES.values():
        check_module(make, styles, x, mesh, batch, lambda flat: flat)
    check_one_rank(mesh, torch.distributed.get_rank())
    check_checkpoints(mesh)


def check_one_rank(mesh: Mesh, rank: int) -> None:
    """Values of rank 3 alone: the others have other ones, none, or another tree, which all are told."""
    torch.manual_seed(rank)
    module = Tied().to(F64).requires_grad_(rank >= 0)
    expected = {name: x.detach() for name, x in broadcast(dict(module.named_parameters()), src=3, mesh=mesh).items()}
    if rank == 1:
        module = module.to("meta")
    tensors = dict(module.named_parameters(remove_duplicate=False))
    params, _ = parallelize(tensors, {"embed": VocabParallel()}, mesh, axis="tp", src_data_rank=3)
    assert params["embed.weight"].spec.partition == P("tp", None)
    for name, x in params.items():
        assert x.requires_grad
        torch.testing.assert_close(device_get(x).detach(), expected["embed.weight"], msg=name)
    if mesh.transport != "simulation":
        wrong = {"w": torch.ones(3 if rank == 2 else 4)}
        with pytest.raises(ShapeError, match="rank 2"):
            parallelize(wrong, {}, mesh, axis="tp", src_data_rank=3)


@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_values_of_one_rank(mesh: Mesh) -> None:
    check_one_rank(mesh, 0)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_on_processes(sizes: tuple[int, ...]) -> None:
    with Processes(4) as pool:
        pool.run(on_processes, sizes)


class Layer(nn.Module):
    """A block of a transformer, as libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(8), Projected()
        self.norm2, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(hidden=self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: Any) -> Any:
        q, k, v = (layer(hidden).unflatten(-1, (4, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


SEQUENCE: dict[str, Style] = {
    **{"norm1": SequenceParallel(), "attn.[qkv]": ColwiseParallel(), "attn.o": RowwiseParallel(output=1)},
    **{"norm2": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output=1)},
}
PREPARED = {
    "each for itself": SEQUENCE,
    **{
        f"prepared {layout}": {**SEQUENCE, "attn": PrepareInput(kwargs={"hidden": layout})}
        for layout in ("replicated", "reduced")
    },
}


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.parametrize("on", MESHES)
def test_layers_that_share_an_input_share_its_gather(name: str, on: str) -> None:
    """A gather and a reduce-scatter for each of attention and MLP, forward and backward; with second derivatives."""
    mesh, lies = MESHES[on]
    module = seeded(Layer).to(F64)
    plain = dict(module.named_parameters())
    params, plan = parallelize(plain, PREPARED[name], mesh, axis="tp")
    x = torch.linspace(-1, 1, 4 * 7 * 8, dtype=F64).view(4, 7, 8).sin()
    laid = device_put(x, P(*lies or (None,), "tp"), mesh=mesh).requires_grad_()
    x.requires_grad_()
    with communication_log() as log:
        out = functional_call(module, params, laid.sin(), styles=plan)
        mine = torch.autograd.grad(out.sin().sum(), [laid, *params.values()], create_graph=True)
    moved = [[one.kind for one in part if len(one.shape) == 3] for part in (log.forward, log.backward)]
    both = ["all_gather_reduced"] * 2 + ["psum_scatter_unreduced"] * 2
    assert [sorted(kinds) for kinds in moved] == [both, both]
    again = torch.autograd.grad(sum(g.square().sum() for g in mine), laid)
    theirs = torch.autograd.grad(module(x.sin()).sin().sum(), [x, *plain.values()], create_graph=True)
    others = torch.autograd.grad(sum(g.square().sum() for g in theirs), x)
    for one, other in zip((*mine, *again), (*theirs, *others), strict=True):
        torch.testing.assert_close(device_get(one), other)
