"""Tools of the ecosystem on `Sharded` values and in bodies, beside themselves on plain tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import einops
import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchmetrics
from accelerate import Accelerator
from ecosystem_programs import (
    batches_of_processes,
    check_scaled,
    metrics_of_processes,
    on_processes,
    refusals_of_wrappers,
)
from einops.layers.torch import EinMix, Rearrange, Reduce
from jaxtyping import Float, Int, jaxtyped
from processes import Processes
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict, tensorclass
from torch import Tensor, nn
from torch.utils.data import default_collate
from torch.utils.tensorboard import SummaryWriter

from fspmd import (
    ArgumentError,
    P,
    Sharded,
    SpecError,
    Style,
    attach,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    parallelize,
    psum,
    reshard,
    shard_map,
)
from fspmd.trees import flatten, tree_text

LINE = make_mesh((4,), ("x",), transport="simulation")
MESHES = [LINE, *(make_mesh(s, n, transport="simulation") for s, n in (((3,), ("x",)), ((2, 2, 2), ("x", "y", "z"))))]
WHOLE = torch.linspace(-1, 1, 5 * 6 * 4, dtype=torch.float64).view(5, 6, 4)

#: by name: a function of a tensor [5, 6, 4]
EINOPS: dict[str, Callable[[Any], Any]] = {
    "rearrange": lambda x: einops.rearrange(x, "b (h s) d -> b h (s d)", h=2),
    "rearrange of all": lambda x: einops.rearrange(x, "b h d -> (d b) h"),
    "rearrange of a list": lambda x: einops.rearrange([x, x.cos()], "n b h d -> b (n h) d"),
    "reduce": lambda x: einops.reduce(x, "b (h s) d -> b h", "mean", s=3),
    "reduce to a maximum": lambda x: einops.reduce(x, "b h d -> d", "max"),
    "repeat": lambda x: einops.repeat(x, "b h d -> (b r) h d", r=2),
    "einsum": lambda x: einops.einsum(x, x.sin(), "b h d, c h d -> b c"),
    "pack": lambda x: einops.pack([x, x[:, 0]], "b * d")[0],
    "unpack": lambda x: einops.unpack(x, [(2, 2), ()], "b * d")[0] if x.shape[1] == 5 else x[:, :5].cos(),
    "parse_shape": lambda x: x * einops.parse_shape(x, "b h _")["h"],
    "Rearrange": Rearrange("b h d -> d h b"),
    "Reduce": Reduce("b (h s) d -> b h d", "sum", s=2),
    "EinMix": EinMix("b h d -> b h e", weight_shape="d e", d=4, e=3).double().requires_grad_(False),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", EINOPS)
def test_einops_on_global_tensors(name: str) -> None:
    """Values and gradients, on uneven blocks too, eager and recorded."""
    f = EINOPS[name]
    plain = WHOLE.clone().requires_grad_()
    wanted = f(plain)
    (expected,) = torch.autograd.grad(wanted.sin().sum(), plain)
    for mesh in MESHES:
        for spec in (P("x"), P(None, "x"), P(None, None, mesh.axis_names[-1]), P(unreduced={"x"})):
            x = device_put(WHOLE, spec, mesh=mesh)
            for run in (f, jit(f)):
                found = run(x)
                assert isinstance(found, Sharded)
                torch.testing.assert_close(device_get(found), wanted.detach())
            gradient = grad(lambda x: f(x).sin().sum())(x)
            torch.testing.assert_close(device_get(gradient), expected)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", EINOPS)
def test_einops_in_bodies(name: str) -> None:
    """Of each rank's blocks, joined along the first dim of what it gives."""
    f = EINOPS[name]
    blocks = WHOLE[:4].split(1)
    wanted = torch.stack([f(block) for block in blocks])
    for checked in (True, False):
        mapped = shard_map(lambda x: f(x)[None], mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=checked)
        for run in (mapped, jit(mapped)):
            torch.testing.assert_close(device_get(run(WHOLE[:4])), wanted)


def test_jaxtyping() -> None:
    x = device_put(WHOLE, P("x"), mesh=LINE)
    assert isinstance(x, Float[Tensor, "5 6 d"])
    assert isinstance(x, Float[Sharded, "..."])
    assert not isinstance(x, Float[Tensor, "5 7 d"])  # the global shape, not that of a block
    assert not isinstance(x, Int[Tensor, "..."])

    w = device_put(torch.ones(4, 3, dtype=torch.float64), P(None, "x"), mesh=LINE)
    with jaxtyped("context"):
        assert isinstance(x, Float[Tensor, "b h d"])
        assert isinstance(w, Float[Tensor, "d e"])
        assert isinstance(x @ w, Float[Tensor, "b h e"])
        assert not isinstance(w.T, Float[Tensor, "d e"])


@pytest.mark.parametrize("checked", [True, False])
def test_jaxtyping_in_bodies(checked: bool) -> None:
    def body(x: Tensor) -> Tensor:
        assert isinstance(x, Float[Tensor, "2 6 d"])
        return x

    shard_map(body, mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=checked)(torch.cat([WHOLE, WHOLE])[:8])


# --- TensorDict -----------------------------------------------------------------------------------------------------


@tensorclass
class Batch:
    """What a data loader gives."""

    x: Tensor
    name: str


def _tree(n: int = 5) -> TensorDict:
    inner = TensorDict({"b": torch.arange(n)}, batch_size=[n])
    return TensorDict({"a": torch.arange(2.0 * n).view(n, 2), "n": inner}, batch_size=[n])


def test_tensordicts_are_trees() -> None:
    placed = device_put(_tree(), P("x"), mesh=LINE)
    assert isinstance(placed, TensorDict)
    assert (placed.batch_size, placed["n", "b"].spec.partition) == ((5,), P("x"))
    assert torch.equal(device_get(placed)["a"], _tree()["a"])
    assert reshard(placed, P())["a"].spec.partition == P(None, None)
    batch = device_put(Batch(x=torch.ones(5), name="first", batch_size=[5]), P("x"), mesh=LINE)
    assert (type(batch), batch.name, batch.x.spec.partition) == (Batch, "first", P("x"))
    with pytest.raises(SpecError, match=r"d\['a'\] of shape .*\n.*d\['n'\]\['b'\] of shape"):
        shard_map(lambda d: d, mesh=LINE, in_specs=P("no"), out_specs=P())(_tree())


def test_texts_of_tensordicts_have_no_addresses() -> None:
    """Processes compare texts of trees. Those of a launcher have addresses of their own, forks of a pool have not."""
    text = tree_text(flatten(_tree())[1])
    assert "constructor" in text
    assert "0x" not in text


@pytest.mark.parametrize("jitted", [False, True])
def test_tensordicts_go_through_bodies(jitted: bool) -> None:
    def body(d: TensorDict, w: Tensor) -> tuple[TensorDict, Tensor]:
        assert d.batch_size[0] in (1, 2)
        return TensorDict({"a": d["a"] * w, "n": d["n"]}, batch_size=d.batch_size), psum((d["a"] * w).sum(), "x")

    f = shard_map(body, mesh=LINE, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    f = jit(f) if jitted else f
    for n in (4, 8, 4):
        for given in (_tree(n), device_put(_tree(n), P("x"), mesh=LINE)):
            found, total = f(given, torch.tensor(3.0))
            assert found.batch_size == (n,)
            assert torch.equal(device_get(found)["a"], _tree(n)["a"] * 3)
            assert torch.equal(device_get(found)["n", "b"], torch.arange(n))
            assert total.item() == 3 * n * (2 * n - 1)


@pytest.mark.parametrize("n", [4, 5, 8, 16])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_batch_sizes_of_tensordicts_are_those_of_their_values(n: int, width: int) -> None:
    """A block as long as it is wide looks to tensordict like a batch with one more dim."""
    f = shard_map(lambda d: d.apply(torch.neg), mesh=LINE, in_specs=P("x"), out_specs=P("x"))
    found = f(TensorDict({"a": torch.ones(n, width), "n": {"b": torch.ones(n)}}, batch_size=[n]))
    assert (found.batch_size, found["n"].batch_size) == ((n,), (n,))


def test_gradients_of_tensordicts() -> None:
    params = device_put(_tree().exclude("n"), P("x"), mesh=LINE)
    found = grad(lambda p: (p["a"] ** 2).sum())(params)
    assert torch.equal(device_get(found)["a"], 2 * _tree()["a"])


# --- training -------------------------------------------------------------------------------------------------------


def test_gradient_scaling() -> None:
    check_scaled(make_mesh((2, 2), ("x", "y"), transport="simulation"))


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def test_tools_on_processes(four: Processes) -> None:
    likely = torch.distributions.Normal(torch.zeros(12), 2.0).log_prob(torch.ones(12)).tolist()
    for text, postfix, found in four.run(on_processes):
        assert (text, postfix) == ("5.5", "loss=5.5000")
        assert found == pytest.approx(likely)


def test_tensordicts_on_processes(four: Processes) -> None:
    assert four.run(batches_of_processes) == [[((8,), True), ((7,), True)]] * 4


def test_metrics_on_processes(four: Processes) -> None:
    for found in four.run(metrics_of_processes):
        for name, ours, plain in found:
            torch.testing.assert_close(ours, plain, msg=name)


def test_modules_are_not_wrapped_by_torch(four: Processes) -> None:
    for ddp, fsdp in four.run(refusals_of_wrappers):
        assert ddp.startswith("DistributedDataParallel got a module with the parameter Sharded f32[8@y, 6]")
        assert fsdp.startswith("fully_shard got a module with the parameter Sharded f32[")
        assert "call the module as it is" in ddp
        assert ddp.partition(",")[2].endswith(fsdp[-60:])


def test_accelerate_trains_and_saves_what_is_whole(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    module, alone = (nn.Linear(6, 8).double() for _ in range(2))
    alone.load_state_dict(module.state_dict())
    attach(module, parallelize(dict(module.named_parameters()), {"**": Style(weight=0, vector=0)}, LINE)[0])
    found, wanted = (torch.optim.AdamW(one.parameters()) for one in (module, alone))
    model, optimizer = accelerator.prepare(module, found)
    for _ in range(2):
        accelerator.backward(model(WHOLE[:, :, 0]).square().sum())
        alone(WHOLE[:, :, 0]).square().sum().backward()
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(device_get(norm), nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
        optimizer.step()
        wanted.step()
    torch.testing.assert_close(device_get(model.state_dict()), alone.state_dict())
    with pytest.raises(
        ArgumentError, match=r"storage\(\) needs the memory of .* to save it, write fspmd\.save\(path, tree\)"
    ):
        accelerator.save_state(str(tmp_path))
    accelerator.save(device_get(model.state_dict()), tmp_path / "whole", safe_serialization=True)
    with torch.no_grad():
        model.weight.zero_()
    model.load_state_dict(load_file(tmp_path / "whole"))
    torch.testing.assert_close(device_get(model.weight.detach()), alone.weight.detach())
    accelerator.end_training()


# --- reports --------------------------------------------------------------------------------------------------------


def test_metrics_of_global_tensors() -> None:
    x, y = torch.rand(5, 3), torch.rand(5, 3)
    given = device_put((x, y), (P("x"), P(None, "x")), mesh=LINE)
    for make in (torchmetrics.MeanSquaredError, torchmetrics.MeanAbsoluteError):
        found, wanted = make(), make()
        for _ in range(2):
            found.update(*(v.flatten() for v in given))
            wanted.update(x.flatten(), y.flatten())
        torch.testing.assert_close(torch.as_tensor(device_get(found.compute())), wanted.compute())


def test_a_mean_of_losses() -> None:
    metric = torchmetrics.MeanMetric()
    x = device_put(WHOLE, P("x"), mesh=LINE)
    for value in (x, x.mean(), reshard(x.sum(), P())):
        metric.update(value)
    assert metric.compute().item() == pytest.approx(WHOLE.sum().item() * 2 / 122, abs=1e-6)


def test_tensorboard_writes_the_number(tmp_path: Path) -> None:
    x = device_put(torch.arange(8.0), P("x"), mesh=LINE)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("mean", x.mean(), 0)
        writer.add_scalar("mean", reshard(x.sum(), P()), 1)
        writer.add_histogram("x", x, 0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("mean")] == [3.5, 28.0]
    assert events.Histograms("x")[0].histogram_value.sum == 28.0


def test_values_are_compared_as_global_tensors() -> None:
    x = device_put(WHOLE, P("x"), mesh=LINE)
    torch.testing.assert_close(x, WHOLE)
    torch.testing.assert_close(x, reshard(x, P(None, "x")))
    with pytest.raises(AssertionError, match=r"(?s)Mismatched elements: 1 / 120 .*index \(4, 5, 3\)"):
        torch.testing.assert_close(x, WHOLE.clone().index_fill_(0, torch.tensor([]).long(), 0) + _last(WHOLE))


def _last(x: Tensor) -> Tensor:
    one = torch.zeros_like(x)
    one[-1, -1, -1] = 1
    return one


def test_batches_and_distributions() -> None:
    x = device_put(WHOLE, P("x"), mesh=LINE)
    batch = default_collate([{"x": x, "n": 1}, {"x": x + 1, "n": 2}])
    assert torch.equal(device_get(batch["x"]), torch.stack([WHOLE, WHOLE + 1]))
    for make in (lambda v: torch.distributions.Normal(v, 2.0), lambda v: torch.distributions.Laplace(0.5, v.exp())):
        torch.testing.assert_close(device_get(make(x).log_prob(x)), make(WHOLE).log_prob(WHOLE))
        torch.testing.assert_close(device_get(make(x).cdf(x)), make(WHOLE).cdf(WHOLE))
    chosen = torch.distributions.Categorical(logits=x)
    index = torch.arange(30).view(5, 6) % 4
    torch.testing.assert_close(device_get(chosen.entropy()), torch.distributions.Categorical(logits=WHOLE).entropy())
    torch.testing.assert_close(
        device_get(chosen.log_prob(device_put(index, P("x"), mesh=LINE))),
        torch.distributions.Categorical(logits=WHOLE).log_prob(index),
    )


def test_safetensors_saves_no_block_for_a_tensor() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for spec in (P("x"), P()):
            with pytest.raises(ArgumentError, match=r"this rank has only a block; .* or device_get\(x\)"):
                save_file({"x": device_put(WHOLE, spec, mesh=LINE)}, f"{folder}/x.safetensors")
        save_file(device_get({"x": device_put(WHOLE, P("x"), mesh=LINE)}), f"{folder}/x.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("spec", [P("x"), P()])
def test_files_of_one_block_hold_the_whole_or_are_refused(spec: P) -> None:
    """A simulation has several blocks in one process, and a file of safetensors one value of a name."""
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
        placed = {"x": device_put(WHOLE, spec, mesh=LINE)}
        if spec == P():
            dcp.save(placed, storage_writer=writer, no_dist=True)
            dcp.load(read := {"x": torch.zeros_like(placed["x"])}, storage_reader=dcp.HuggingFaceStorageReader(folder))
            assert torch.equal(device_get(read["x"]), WHOLE)
        else:
            with pytest.raises(
                dcp.api.CheckpointException, match="has several blocks; its file keeps one; save device"
            ):
                dcp.save(placed, storage_writer=writer, no_dist=True)


def test_leaves_for_everybody_else() -> None:
    """Libraries that walk trees with optree meet global tensors, in a TensorDict too."""
    placed = device_put({"d": _tree(), "w": torch.ones(4)}, P("x"), mesh=LINE)
    assert [type(leaf) for leaf in optree.tree_leaves(placed)] == [Sharded] * 3
