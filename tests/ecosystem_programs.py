"""What processes run in `test_ecosystem`, apart from the libraries that take long to import."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from fspmd import (
    ArgumentError,
    P,
    attach,
    communication_log,
    device_get,
    device_put,
    from_process_local,
    functional_call,
    make_mesh,
    reshard,
)


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))


SPECS = {"0.weight": P("y"), "0.bias": P("y"), "2.weight": P(None, "y"), "2.bias": P()}


def _trained(make: Any, overflow: int, mesh: Any = None) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    """Losses and scales of steps in half precision, and the parameters after them."""
    module = _module()
    x, y = torch.randn(12, 6), torch.randn(12, 5)
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    if mesh is not None:
        params, (x, y) = device_put(params, SPECS, mesh=mesh), device_put((x, y), P("x"), mesh=mesh)
    params = {name: p.requires_grad_() for name, p in params.items()}
    optimizer, scaler = make(list(params.values())), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    steps, sent = [], 0
    for i in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            out = functional_call(module, params, x) if mesh else torch.func.functional_call(module, params, (x,))
        loss = F.mse_loss(out.float(), y) * (1e38 if i == overflow else 1)
        scaler.scale(loss).backward()
        with communication_log() as log:
            scaler.unscale_(optimizer)
        sent = len(log)
        nn.utils.clip_grad_norm_(list(params.values()), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append((loss.item(), scaler.get_scale()))
    return steps, params, sent


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
}


def check_scaled(mesh: Any) -> None:
    for make in OPTIMIZERS.values():
        for overflow in (-1, 2):
            steps, params, sent = _trained(make, overflow, mesh)
            wanted, expected, _ = _trained(make, overflow)
            torch.testing.assert_close(torch.tensor(steps), torch.tensor(wanted), rtol=2e-3, atol=1e-3)
            assert [scale for _, scale in steps] == [scale for _, scale in wanted]  # it shrinks at the same step
            torch.testing.assert_close(device_get(params), expected, rtol=1e-2, atol=5e-3)
            assert sent == 1  # a number over y, in which gradients are cut


def refusals_of_wrappers() -> list[str]:
    """What torch's wrappers of modules, which sum gradients and cut parameters themselves, say of `Sharded` ones."""
    from torch.distributed.fsdp import fully_shard  # which takes long

    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    module, said = _module(), []
    params = device_put({name: p.detach() for name, p in module.named_parameters()}, SPECS, mesh=mesh)
    attach(module, {name: p.requires_grad_() for name, p in params.items()})
    for wrapper in (nn.parallel.DistributedDataParallel, fully_shard):
        with pytest.raises(ArgumentError) as raised:
            wrapper(module)
        said.append(str(raised.value))
    return said


def on_processes() -> tuple[str, str, list[float]]:
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    check_scaled(mesh)
    x = device_put(torch.arange(12.0).view(6, 2), P("x", "y"), mesh=mesh)
    torch.testing.assert_close(x, torch.arange(12.0).view(6, 2))
    with pytest.raises(AssertionError, match="not close"):  # on ranks whose block is the same, too
        torch.testing.assert_close(x, torch.arange(12.0).view(6, 2) + torch.tensor([[1.0, 0.0]] + [[0.0, 0.0]] * 5))
    likely = torch.distributions.Normal(x, 2.0).log_prob(x + 1)
    bar = tqdm(total=1, file=io.StringIO())
    bar.set_postfix(loss=reshard(x.mean(), P()))
    return f"{reshard(x.mean(), P())}", str(bar.postfix), device_get(likely).flatten().tolist()


def batches_of_processes() -> list[tuple[tuple[int, ...], bool]]:
    """The batch sizes of TensorDicts that processes have loaded, even and not, and whether the values are whole."""
    from tensordict import TensorDict  # which takes long

    mesh, found = make_mesh((4,), ("x",), device="cpu"), []
    for n in (8, 7):
        whole = torch.arange(2.0 * n).view(n, 2)
        mine = whole.chunk(4)[torch.distributed.get_rank()]
        batch: Any = from_process_local(TensorDict({"a": mine}, batch_size=[len(mine)]), P("x"), mesh=mesh)
        found.append((tuple(batch.batch_size), torch.equal(device_get(batch["a"]), whole)))
    return found


def metrics_of_processes() -> list[tuple[str, Tensor, Tensor]]:
    """Metrics of global tensors, beside those of plain tensors: torchmetrics must not add them up over processes."""
    import torchmetrics  # which takes long

    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    likely, labels = torch.rand(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 5
    makers: dict[str, Any] = {
        "sum": (torchmetrics.SumMetric, {}),
        "mean": (torchmetrics.MeanMetric, {}),
        "max": (torchmetrics.MaxMetric, {}),
        "accuracy": (torchmetrics.Accuracy, {"task": "multiclass", "num_classes": 5}),
        "confusion": (torchmetrics.ConfusionMatrix, {"task": "multiclass", "num_classes": 5}),
    }
    found = []
    for name, (make, options) in makers.items():
        values = (likely, labels) if options else (likely,)
        ours, plain = (make(**options, sync_on_compute=False) for _ in range(2))
        for _ in range(2):
            ours.update(*device_put(values, P("x"), mesh=mesh))
            plain.update(*values)
        found.append((name, torch.as_tensor(device_get(ours.compute())), torch.as_tensor(plain.compute())))
    cut = torchmetrics.MaxMetric()
    cut.update(device_put(likely, P("x"), mesh=mesh))
    with pytest.raises(ArgumentError, match=r"torch.distributed's all_gather\(\) got a Sharded"):
        cut.compute()
    return found
