"""examples/pretrain.py: losses on many meshes beside a dense model in plain float64 torch, checkpoints, and plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from full import FULL
from processes import Processes

import fspmd

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 20 if FULL else 2
TINY = {
    "layers": 4 if FULL else 2,
    "width": 24,
    "hidden": 32,
    "length": 24,
    "batch": 24,
    "dtype": "float64",
    "text": __file__,
}
MOE = "--experts=4"
MESHES = [
    "dp=2 --microbatches=3",
    "fsdp=3 --jit",
    "cp=4",
    "cp=3,tp=2",
    "ep=2,fsdp=2 --microbatches=3",
    "pp=2 --schedule=zero-bubble",
    "pp=2,fsdp=2,tp=2 --jit",
    "pp=2,dp=3 --schedule=gpipe",
    "dp=2,cp=2,tp=2 --jit",
    "dp=2,fsdp=2 --jit --loss-scale=1024 --compute=float64 --microbatches=3",
    "pp=2,dp=1,fsdp=2,ep=1,cp=2,tp=2",
    f"tp=2 {MOE}",
    f"ep=4 {MOE} --microbatches=3",
    f"fsdp=2,ep=2,cp=2 {MOE} --microbatches=3",
    f"pp=2,ep=2,tp=2 {MOE}",
]


def pretrain() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("pretrain")


def arguments(text: str, **options: Any) -> list[str]:
    mesh, *flags = text.split()
    known = {"steps": STEPS, "mesh": mesh, "microbatches": 4 if FULL else 2, "text": __file__, **TINY, **options}
    return [*(f"--{name}={value}" for name, value in known.items()), *flags]


def train(given: list[str]) -> str:
    """What a run prints, in this process."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        pretrain().main(given)
    return printed.getvalue()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- the judge: a dense model of plain torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    length, width = x.shape[-2:]
    angle = torch.arange(length).double()[:, None] / 10000.0 ** (torch.arange(0, width, 2).double() / width)
    turned = torch.complex(x[..., : width // 2], x[..., width // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def dense_mlp(p: dict[str, Any], h: torch.Tensor, chosen: int) -> torch.Tensor:
    def one(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (F.silu(h @ gate) * (h @ up)) @ down

    if "router" not in p:
        return one(p["gate"], p["up"], p["down"])
    weights, best = (h @ p["router"]).softmax(-1).topk(chosen, -1)
    share = torch.zeros(*h.shape[:2], len(p["gate"])).double()
    share = share.scatter(-1, best, weights / weights.sum(-1, keepdim=True))
    results = torch.stack([one(*ws) for ws in zip(p["gate"], p["up"], p["down"], strict=True)], -1)
    return (results * share[..., None, :]).sum(-1)


def dense_loss(params: dict[str, Any], ids: torch.Tensor, targets: torch.Tensor, chosen: int) -> torch.Tensor:
    x = params["embedding"][ids]
    for i in range(len(params["layers"]["wq"])):
        p = {name: w[i] for name, w in params["layers"].items()}
        h = F.rms_norm(x, x.shape[-1:], p["norm1"], 1e-6)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", h, p[name]) for name in ("wq", "wk", "wv"))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        heads = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + torch.einsum("bhsk,hkd->bsd", heads, p["wo"])
        x = x + dense_mlp(p, F.rms_norm(x, x.shape[-1:], p["norm2"], 1e-6), chosen)
    logits = F.rms_norm(x, x.shape[-1:], params["norm"], 1e-6) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@functools.cache
def expected(flags: str) -> list[float]:
    """The losses of a dense run by torch's AdamW."""
    module = pretrain()
    args = module.parse(arguments(f"dp=1 {flags}"))
    c, mesh = module.config(args), fspmd.make_mesh((1,) * 6, module.AXES, transport="simulation")
    params = fspmd.device_get(module.init_params(c, mesh, args.seed, torch.float64))
    leaves = dict(zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True))
    for x in leaves.values():
        x.requires_grad_()
    groups = [
        {
            "params": [x for path, x in leaves.items() if path[-1].startswith("norm") is plain],
            "weight_decay": 0.1 * (not plain),
        }
        for plain in (True, False)
    ]
    optimizer, losses = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []
    text = module.text_data.load_text(args.text)[0]
    batches = module.text_data.random_batches(text, args.batch, c.S, args.seed)
    for step, (ids, targets) in zip(range(1, STEPS + 1), batches, strict=False):
        loss = dense_loss(params, ids, targets, c.chosen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / min(20, STEPS), (STEPS + 1 - step) / STEPS, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(tmp_path: Path, text: str, pool: Processes | None = None) -> None:
    given = arguments(text, losses=tmp_path / "losses.json", out=tmp_path, log=tmp_path / "log.txt")
    printed = train(given) if pool is None else "".join(pool.run(train, given))
    assert printed.count(f"step {STEPS}/{STEPS}") == 1  # one process prints
    found = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert found == pytest.approx(expected(MOE if MOE in text else ""), rel=1e-10)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == STEPS
    assert (tmp_path / "pretrain.png").stat().st_size > 1000


@pytest.mark.one_of(14)
@pytest.mark.parametrize("text", MESHES)
def test_losses_do_not_depend_on_the_mesh(text: str, tmp_path: Path) -> None:
    check(tmp_path, text)


#: on processes, and how many
ON_PROCESSES = [
    ("pp=2,fsdp=2 --jit", 4),
    (f"ep=4 {MOE} --microbatches=3", 4),
    ("pp=2,fsdp=2,tp=2", 8),
    (f"pp=2,ep=2,cp=2 {MOE}", 8),
]


@pytest.mark.parametrize(("text", "ranks"), ON_PROCESSES if FULL else ON_PROCESSES[:1])
def test_losses_on_processes(text: str, ranks: int, tmp_path: Path) -> None:
    with Processes(ranks) as pool:
        check(tmp_path, text, pool)


@pytest.mark.parametrize("text", ["fsdp=2", "pp=2,tp=2", f"pp=2,fsdp=2 {MOE}"])
def test_validation_is_the_dense_loss_and_runs_no_backward(text: str) -> None:
    module = pretrain()
    args = module.parse(arguments(text))
    c, mesh = module.config(args), fspmd.make_mesh(tuple(args.mesh.values()), module.AXES, transport="simulation")
    params = module.init_params(c, mesh, args.seed, torch.float64)
    text_of_batches = module.text_data.load_text(args.text)[0]
    batches = list(itertools.islice(module.text_data.random_batches(text_of_batches, args.batch, c.S, 1), 2))
    alone = module.losses_of(c, mesh, args.schedule, args.microbatches)[1]
    with fspmd.communication_log() as log:
        found = module.validate(c, mesh, args, alone, params, batches)
    dense = [dense_loss(fspmd.device_get(params), *batch, c.chosen) for batch in batches]
    assert found == pytest.approx(sum(map(float, dense)) / 2, rel=1e-12)
    assert not any(call.backward for call in log)
    if "pp" in text:  # each microbatch travels once
        assert sum(call.kind == "ppermute" for call in log) == 2 * args.microbatches


@pytest.mark.parametrize(
    "text",
    [
        "pp=2 --schedule=interleaved",
        "pp=2,fsdp=2 --schedule=zbv --jit",
        "pp=2,dp=2 --schedule=dual-pipe-v",
        "cp=2,tp=2 --attention=gathered",
        "cp=2,fsdp=2 --attention=ulysses --jit",
    ],
)
def test_losses_do_not_depend_on_the_schedule_or_the_way_of_attention(text: str, tmp_path: Path) -> None:
    assert run_losses(f"{text} --layers=4", tmp_path) == pytest.approx(expected("--layers=4"), rel=1e-10)


def test_adafactor_is_the_same_on_any_mesh(tmp_path: Path) -> None:
    one, two = (run_losses(f"{mesh} --optimizer=adafactor", tmp_path) for mesh in ("dp=1", "pp=2,fsdp=2,tp=2"))
    assert one == pytest.approx(two, rel=1e-10)


@pytest.mark.parametrize("text", ["dp=2,cp=2", "pp=2,dp=2", "dp=2,fsdp=2 --compute=bfloat16 --reduce=float32"])
def test_gradients_are_summed_over_copies_once_a_step(text: str) -> None:
    """Whatever the number of microbatches; and in the dtype of --reduce."""
    module, found = pretrain(), []
    for microbatches in (1, 3):
        args = module.parse([*arguments(text), f"--microbatches={microbatches}"])
        c, mesh = module.config(args), fspmd.make_mesh(tuple(args.mesh.values()), module.AXES, transport="simulation")
        params = module.init_params(c, mesh, args.seed, getattr(torch, args.dtype))
        batch = next(module.text_data.random_batches(module.text_data.load_text(args.text)[0], args.batch, c.S, 1))
        both = module.losses_of(c, mesh, args.schedule, microbatches)[0]
        with fspmd.communication_log() as log:
            both(params, module.put(c, mesh, batch, microbatches))
        sums = [call for call in log if "dp" in call.axes and "psum" in call.kind and call.shape not in ((), (2,))]
        found.append(sorted((tuple(call.shape), str(call.dtype)) for call in sums))
    assert found[0] == found[1]
    assert len(found[0]) >= len(optree.tree_leaves(params))
    assert {dtype for _, dtype in found[0]} == {"torch.float32" if "reduce" in text else "torch.float64"}


def run_losses(text: str, folder: Path) -> list[float]:
    train(arguments(text, losses=folder / "losses.json", out=folder))
    found: list[float] = json.loads((folder / "losses.json").read_text())["losses"]
    return found


def test_losses_in_narrow_dtypes_are_near(tmp_path: Path) -> None:
    for flags in ("--compute=bfloat16 --reduce=float32", "--compute=float16 --loss-scale=64"):
        assert run_losses(f"fsdp=2,tp=2 {flags}", tmp_path) == pytest.approx(expected(""), rel=3e-4)


@pytest.mark.parametrize("jitted", ["", "--jit"])
def test_a_step_whose_gradients_overflow_is_left_out(jitted: str, tmp_path: Path) -> None:
    """Then losses are those of parameters that do not change."""
    found = run_losses(f"fsdp=2 {jitted} --compute=float16 --loss-scale={2.0**100}", tmp_path)
    assert found == pytest.approx(expected("--lr=0"), rel=1e-4)
    assert found != pytest.approx(expected(""), rel=3e-3)


def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    folder, file = tmp_path / "steps", tmp_path / "losses.json"
    options = {"checkpoint": folder, "every": 1, "losses": file, "out": tmp_path}
    train(arguments("fsdp=2 --resume", **options))
    shutil.rmtree(folder / f"step-{STEPS:08}")
    assert f"resumed at step {STEPS - 1}/{STEPS}" in train(arguments("pp=2,tp=2 --resume", **options))
    assert json.loads(file.read_text())["losses"] == pytest.approx(expected(""), rel=1e-10)


def test_a_run_goes_on_with_another_schedule(tmp_path: Path) -> None:
    """A rank has its layers in the order of the schedule; checkpoints have them in their own."""
    folder, file = tmp_path / "steps", tmp_path / "losses.json"
    options = {"checkpoint": folder, "every": 1, "losses": file, "out": tmp_path}
    train(arguments("pp=2 --schedule=zbv --layers=4", **options))
    shutil.rmtree(folder / f"step-{STEPS:08}")
    assert "resumed" in train(arguments("pp=2,tp=2 --schedule=interleaved --layers=4 --resume", **options))
    assert json.loads(file.read_text())["losses"] == pytest.approx(expected("--layers=4"), rel=1e-10)


def test_a_plan_for_ranks_that_do_not_exist() -> None:
    """Of 16,384 ranks, with experts. What a rank holds is counted by hand."""
    given = "pp=4,dp=8,fsdp=8,ep=8,cp=2,tp=4 --plan --experts=16 --accelerator=100"
    sizes = {"layers": 8, "batch": 1024, "length": 64, "width": 64, "heads": 8, "microbatches": 2}
    before = fspmd.topology()
    try:
        printed = train([*arguments(given, **sizes), "--kv-heads=4"])
    finally:
        fspmd.set_topology(before)  # other tests of this process have no such accelerator
    assert "16,384 ranks: pp=4, dp=8, fsdp=8, ep=8, cp=2, tp=4" in printed
    (gate,) = (line for line in printed.splitlines() if " layers.gate " in line)
    assert " ".join(gate.split()[1:]) == "f64[2, 16@ep, 64@fsdp, 32@tp] 2,048 B a rank"
    assert "A step of 2 microbatches" in printed
    assert "stages are idle 60.0% of" in printed  # (p - 1) / (m + p - 1)


@pytest.mark.parametrize("text", ["fsdp=2,tp=2 --vocabulary=64000", f"ep=2,cp=2 {MOE}"])
def test_a_plan_of_many_layers_is_that_of_a_record_of_all(text: str) -> None:
    """Time and memory at each moment, from records of two and three layers. A large vocabulary: the peak moves."""
    module = pretrain()
    many = 6 if FULL else 4
    args = module.parse(arguments(f"{text} --plan --layers={many}"))
    c, mesh = module.config(args), fspmd.make_mesh(tuple(args.mesh.values()), module.AXES, transport="abstract")
    two, three, whole = (module.recorded(dataclasses.replace(c, layers=n), mesh, args) for n in (2, 3, many))
    predicted = two.with_layers(many - 2, three)
    assert predicted[:2] == pytest.approx(whole[:2], rel=1e-9)
    assert {line: max(held) for line, held in predicted.held.items()} == {k: max(v) for k, v in whole.held.items()}
    assert max(map(max, two.held.values())) < max(map(max, whole.held.values()))


@pytest.mark.parametrize(
    ("text", "word"), [("tp=3", "kv-heads"), ("pp=3", "layers"), ("ep=2 --experts=4 --jit", "capacity")]
)
def test_what_does_not_fit_is_refused(text: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pretrain().parse(arguments(text))
    assert f"--{word}" in capsys.readouterr().err
