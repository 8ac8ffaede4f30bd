"""examples/pretrain.py: losses on many meshes beside a dense model in plain float64 torch, checkpoints, and plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    "layers": 4,
    "width": 24,
    "hidden": 32,
    "length": 24,
    "batch": 24,
    "dtype": "float64",
    "text": __file__,
}
MOE = "--experts=4"
BALANCED = "--balance=0.01 --balance-loss=0.1"
OF_THE_MODEL = (
    "--experts",
    "--balance",
    "--microbatches",
    "--window",
    "--documents",
    "--sinks",
    "--prefix",
    "--optimizer",
    "--lr",
)  # flags that a dense run has too
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
    "pp=2,fsdp=2 --schedule=interleaved --optimizer=adafactor",
    "pp=2,dp=2,tp=2 --schedule=zbv --zero1 --jit",
    f"pp=2,ep=2 --schedule=dual-pipe-v --optimizer=muon {MOE} {BALANCED}",
    f"ep=2,tp=2,cp=2 {MOE} {BALANCED} --loss-scale=1024 --with-master",
    "dp=2,fsdp=2 --zero1 --with-master --jit --microbatches=3",
    f"dp=2,ep=2 --jit {MOE} {BALANCED} --capacity=144 --microbatches=3",
    "pp=2,fsdp=2 --jit --loss-scale=1024 --compute=float64",
    "cp=2,tp=2 --attention=ulysses --window=7 --jit",
    "fsdp=2,cp=3 --attention=gathered --window=40 --with-master",
    "cp=2,tp=2 --layout=balanced --documents=10 --sinks --jit",
    "pp=2,cp=3 --layout=striped --sinks --optimizer=muon",
    "cp=2,tp=2 --attention=ulysses --layout=contiguous --documents=16 --sinks",
    "cp=2,tp=2 --layout=balanced --prefix=9 --jit",
    "pp=2,cp=2,fsdp=2 --schedule=zbv --documents=10 --prefix=4",
    f"ep=2,cp=2 {MOE} {BALANCED} --prefix=24 --microbatches=3",
    "dp=2,fsdp=2,tp=2 --optimizer=muon --zero1 --jit --microbatches=3",
    "dp=2,fsdp=3 --optimizer=adafactor --zero1",
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


def dense_mlp(p: dict[str, Any], h: torch.Tensor, chosen: int, beside: list[Any]) -> torch.Tensor:
    """``beside`` gets the counts of experts, and the loss of their balance (Switch Transformers, eq. 4)."""

    def one(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (F.silu(h @ gate) * (h @ up)) @ down

    if "router" not in p:
        return one(p["gate"], p["up"], p["down"])
    scores = (h @ p["router"]).softmax(-1)
    best = (scores + p["bias"]).topk(chosen, -1).indices
    weights = scores.gather(-1, best)
    n, tokens = scores.shape[-1], scores[..., 0].numel()
    counts = F.one_hot(best, n).sum((0, 1, 2))
    beside.append((counts, n * (counts.double() / (tokens * chosen) * scores.sum((0, 1)) / tokens).sum()))
    share = torch.zeros(*h.shape[:2], len(p["gate"])).double()
    share = share.scatter(-1, best, weights / weights.sum(-1, keepdim=True))
    results = torch.stack([one(*ws) for ws in zip(p["gate"], p["up"], p["down"], strict=True)], -1)
    return (results * share[..., None, :]).sum(-1)


def dense_loss(
    params: dict[str, Any], ids: torch.Tensor, targets: torch.Tensor, c: Any, beside: list[Any], first: int = 0
) -> torch.Tensor:
    """``first``: the first position whose next token is to be predicted."""
    return F.cross_entropy(dense_logits(params, ids, c, beside)[:, first:].flatten(0, 1), targets[:, first:].flatten())


def dense_logits(params: dict[str, Any], ids: torch.Tensor, c: Any, beside: list[Any]) -> torch.Tensor:
    x, positions = params["embedding"][ids], torch.arange(ids.shape[1])
    seen = c.mask.allows(positions[:, None], positions)
    for i in range(len(params["layers"]["wq"])):
        p = {name: w[i] for name, w in params["layers"].items()}
        h = F.rms_norm(x, x.shape[-1:], p["norm1"], 1e-6)
        q, k, v = ((h @ p[name]).unflatten(-1, (-1, c.K)).transpose(1, 2) for name in ("wq", "wk", "wv"))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = (rotated(q) @ rotated(k).mT * c.K**-0.5).masked_fill(~seen, -torch.inf)
        if c.sinks:
            scores = torch.cat([scores, p["sinks"][:, None, None].expand(*scores.shape[:-1], 1)], -1)
        heads = scores.softmax(-1)[..., : ids.shape[1]] @ v
        x = x + heads.transpose(1, 2).flatten(2) @ p["wo"]
        x = x + dense_mlp(p, F.rms_norm(x, x.shape[-1:], p["norm2"], 1e-6), c.chosen, beside)
    logits: torch.Tensor = F.rms_norm(x, x.shape[-1:], params["norm"], 1e-6) @ params["head"]
    return logits


class DenseMuon:
    """torch's Muon for each matrix of each stack, and torch's AdamW for all else. Muon iterates in float64 here."""

    def __init__(self, stacks: list[torch.Tensor], groups: list[dict[str, Any]]) -> None:
        self.stacks = stacks
        self.parts = [[x.clone() for x in w.detach().view(-1, *w.shape[-2:])] for w in stacks]
        matrices = list(itertools.chain(*self.parts))
        muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self.optimizers = muon, torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> None:
        for w, parts in zip(self.stacks, self.parts, strict=True):
            for x, g in zip(parts, w.grad.view(-1, *w.shape[-2:]), strict=True):  # type: ignore[union-attr]
                x.grad = g
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            for each in self.optimizers:
                each.step()
        for w, parts in zip(self.stacks, self.parts, strict=True):
            w.data.copy_(torch.stack(parts).view_as(w))


def dense_optimizer(name: str, leaves: dict[Any, torch.Tensor]) -> Any:
    def is_matrix(path: Any) -> bool:
        return name == "muon" and path[-1] in ("wq", "wk", "wv", "wo", "gate", "up", "down")

    groups = [
        {
            "params": [x for path, x in leaves.items() if path[-1].startswith("norm") is plain and not is_matrix(path)],
            "weight_decay": 0.1 * (not plain),
        }
        for plain in (True, False)
    ]
    if name == "muon":
        return DenseMuon([x for path, x in leaves.items() if is_matrix(path)], groups)
    return torch.optim.Adafactor(groups) if name == "adafactor" else torch.optim.AdamW(groups, betas=(0.9, 0.95))


def expected(text: str) -> list[float]:
    """The losses of a dense run with the same flags."""
    return dense_losses(*(flag for flag in text.split() if flag.startswith(OF_THE_MODEL)))


@functools.cache
def dense_losses(*flags: str) -> list[float]:
    """By torch's optimizers."""
    module = pretrain()
    args = module.parse(arguments(" ".join(["dp=1", *flags])))
    c, mesh = module.config(args), fspmd.make_mesh((1,) * 6, module.AXES, transport="simulation")
    params = fspmd.device_get(module.init_params(c, mesh, args.seed, torch.float64))
    leaves = dict(zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True))
    for path, x in leaves.items():
        x.requires_grad_(path[-1] != "bias")
    optimizer, losses = dense_optimizer(args.optimizer, leaves), []
    text = module.text_data.load_text(args.text)[0]
    batches = module.text_data.random_batches(text, args.batch, c.S, args.seed)
    for step, (ids, targets) in zip(range(1, STEPS + 1), batches, strict=False):
        loss, counts = torch.zeros((), dtype=torch.float64), torch.zeros(())
        for part in zip(ids.chunk(args.microbatches), targets.chunk(args.microbatches), strict=True):
            beside: list[Any] = []
            loss = loss + dense_loss(params, *part, c, beside, module.shown(args)) / args.microbatches
            if beside:
                loss = loss + args.balance_loss * sum(more for _, more in beside) / args.microbatches
                counts = counts + torch.stack([count for count, _ in beside])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / min(20, STEPS), (STEPS + 1 - step) / STEPS, 1.0)
        optimizer.step()
        if args.balance:
            with torch.no_grad():
                leaves["layers", "bias"] += args.balance * (counts.double().mean(-1, keepdim=True) - counts).sign()
        for x in leaves.values():
            x.grad = None
        losses.append(loss.item())
    return losses


def check(tmp_path: Path, text: str, pool: Processes | None = None) -> None:
    given = arguments(text, losses=tmp_path / "losses.json", out=tmp_path, **{"text-log": tmp_path / "log.txt"})
    printed = train(given) if pool is None else "".join(pool.run(train, given, seconds=3000 if FULL else 300))
    assert printed.count(f"step {STEPS}/{STEPS}") == 1  # one process prints
    found = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert found == pytest.approx(expected(text), rel=1e-10)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == STEPS
    assert (tmp_path / "pretrain.png").stat().st_size > 1000


@pytest.mark.one_of(22)
@pytest.mark.parametrize("text", MESHES)
def test_losses_do_not_depend_on_the_mesh(text: str, tmp_path: Path) -> None:
    check(tmp_path, text)


#: on processes, and how many
ON_PROCESSES = [
    ("pp=2,fsdp=2 --jit", 4),
    (f"ep=4 {MOE} --microbatches=3", 4),
    ("cp=2,tp=2 --layout=balanced --documents=10 --sinks --jit", 4),
    ("pp=2,fsdp=2,tp=2", 8),
    (f"pp=2,ep=2,cp=2 {MOE}", 8),
    ("dp=2,pp=2,tp=2 --schedule=zbv --optimizer=muon --zero1", 8),
    (f"pp=2,ep=2 --schedule=interleaved {MOE} {BALANCED} --optimizer=adafactor", 4),
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
    alone = module.losses_of(c, mesh, args, args.microbatches)[1]
    with fspmd.communication_log() as log:
        found = module.validate(c, mesh, args, alone, params, batches)
    dense = [dense_loss(fspmd.device_get(params), *batch, c, []) for batch in batches]
    assert found == pytest.approx(sum(map(float, dense)) / 2, rel=1e-12)
    assert not any(call.backward for call in log)
    if "pp" in text:  # each microbatch travels once
        assert sum(call.kind == "ppermute" for call in log) == 2 * args.microbatches


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,cp=2,fsdp=2",
        "pp=2,dp=2 --schedule=zero-bubble",
        f"dp=2,ep=2 {MOE}",
        "dp=2,fsdp=2 --compute=bfloat16 --reduce=float32",
        "pp=2,dp=2 --compute=bfloat16 --reduce=float32",
    ],
)
def test_gradients_are_summed_over_replicas_once_a_step(text: str) -> None:
    module = pretrain()

    def sums(microbatches: int) -> list[Any]:
        args = module.parse([*arguments(text), f"--microbatches={microbatches}"])
        c, mesh = module.config(args), fspmd.make_mesh(tuple(args.mesh.values()), module.AXES, transport="simulation")
        params = module.init_params(c, mesh, args.seed, torch.float64)
        batch = next(module.text_data.random_batches(module.text_data.load_text(args.text)[0], args.batch, c.S, 1))
        both = module.losses_of(c, mesh, args, microbatches)[0]
        with fspmd.communication_log() as log:
            both(params, module.put(c, mesh, args, batch))
        return [
            (call.axes, call.shape, call.dtype)
            for call in log
            if {"dp"} <= {*call.axes} <= {"dp", "cp"} and math.prod(call.shape) > 8 and call.shape != (4, 4)
        ]

    assert sums(1) == sums(3)
    assert {dtype for *_, dtype in sums(1)} == {torch.float32 if "reduce" in text else torch.float64}
    leaves = module.llama.leaves(module.config(module.parse([*arguments(text), "--microbatches=1"])))
    assert len(sums(1)) == len(optree.tree_leaves(module.learned(leaves)))


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


@pytest.mark.parametrize(
    "text",
    [
        "fsdp=2,tp=2",
        "cp=3 --window=5",
        "cp=2,tp=2 --documents=7 --sinks",
        "cp=3 --prefix=8",
        f"pp=2,ep=2,cp=2 --schedule=zbv {MOE}",
        f"dp=2,tp=2 {MOE} --capacity=12",
    ],
)
def test_samples_are_those_of_the_dense_model(text: str) -> None:
    """Token by token, the most probable one."""
    module = pretrain()
    args = module.parse([*arguments(text), "--sample=9", "--temperature=0"])
    c, mesh = module.config(args), fspmd.make_mesh(tuple(args.mesh.values()), module.AXES, transport="simulation")
    params = module.init_params(c, mesh, args.seed, torch.float64)
    held_out, whole = module.text_data.load_text(args.text)[1], fspmd.device_get(params)
    rows = module.continued(c, mesh, args, params, held_out)
    assert len(rows) == math.prod(mesh.shape[axis] for axis in module.llama.BATCH)
    for row in rows:
        best = dense_logits(whole, torch.tensor([row[:-1]]), c, [])[0].argmax(-1).tolist()
        assert len(row) == c.S // 2 + 9
        assert row[c.S // 2 :] == best[c.S // 2 - 1 :]


ANOTHER = [  # the mesh of a run, that on which it goes on, and flags of both
    ("fsdp=2", "pp=2,tp=2", ""),
    ("pp=2,fsdp=2 --schedule=zbv", "dp=2,tp=2 --zero1", "--optimizer=muon"),
    ("dp=2,fsdp=2 --zero1 --microbatches=3", "pp=2 --schedule=interleaved", "--optimizer=adafactor --with-master"),
]


@pytest.mark.parametrize(("first", "second", "flags"), ANOTHER)
def test_a_run_goes_on_on_another_mesh(first: str, second: str, flags: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "steps", tmp_path / "losses.json"
    options = {"checkpoint": folder, "every": 1, "losses": file, "out": tmp_path}
    train(arguments(f"{first} {flags} --resume", **options))
    shutil.rmtree(folder / f"step-{STEPS:08}")
    assert f"resumed at step {STEPS - 1}/{STEPS}" in train(arguments(f"{second} {flags} --resume", **options))
    found = json.loads(file.read_text())["losses"]
    assert found == pytest.approx(expected(flags), rel=1e-10)
    train(arguments(f"{first} {flags} --resume", **options, steps=STEPS + 1))
    assert json.loads(file.read_text())["losses"][:-1] == found


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
    assert "the bubble is 60.0%" in printed  # (p - 1) / (m + p - 1)


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


def test_a_plan_may_have_fewer_steps_for_larger_values() -> None:
    """As the update under --zero1 of a model of 32 layers: what moves is cheaper in one step than in two."""
    two, three = (pretrain().Predicted(1.0, 0.0, {"update": held}) for held in ([5, 9, 5], [12, 6]))
    assert two.with_layers(2, three).held == {"update": [15]}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tp=3", "kv-heads"),
        ("pp=3", "layers"),
        ("pp=4 --schedule=zbv", "layers"),
        ("cp=3 --attention=ulysses", "heads"),
        ("ep=2 --experts=4 --jit", "capacity"),
        ("dp=1 --window=0", "window"),
        ("dp=1 --loss-scale=0", "loss-scale"),
        ("dp=1 --loss-scale=nan", "loss-scale"),
        ("dp=1 --every=0", "every"),
        ("dp=1 --batch=0", "batch"),
        ("dp=1 --sample=-1", "sample"),
        ("dp=1 --steps=0", "steps"),
        ("dp=1 --layers=0", "layers"),
        ("dp=1 --hidden=0", "hidden"),
        ("dp=1 --lr=-1", "lr"),
        ("dp=1 --lr=nan", "lr"),
        ("dp=1 --temperature=-1", "temperature"),
        ("dp=1 --vocabulary=255", "vocabulary"),
        ("dp=1 --accelerator=0", "accelerator"),
        ("dp=1 --experts=-1", "experts"),
        (f"dp=1 {MOE} --chosen=0", "chosen"),
        (f"dp=1 {MOE} --chosen=5", "chosen"),
        (f"dp=1 {MOE} --capacity=0", "capacity"),
        (f"dp=1 {MOE} --balance=-1", "balance"),
        (f"dp=1 {MOE} --balance-loss=inf", "balance-loss"),
        ("dp=0", "mesh"),
        ("dp", "mesh"),
        ("dp=two", "mesh"),
        ("dp=2,dp=4", "mesh"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pretrain().parse(arguments(text))
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"--{word}" in told
    assert "is to be" in told or "give" in told


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_all_states_are_cut_over_replicas(name: str) -> None:
    """Master weights too. Means over a dim that dp cuts are not cut by it."""
    module = pretrain()
    args = module.parse(arguments(f"dp=2,fsdp=2 --zero1 --with-master --microbatches=3 --optimizer={name}"))
    c, mesh = module.config(args), fspmd.make_mesh((1, 2, 2, 1, 1, 1), module.AXES, transport="simulation")
    state = module.optimizer(c, args)[0](module.learned(module.init_params(c, mesh, 0, torch.float64)))
    leaves = optree.tree_leaves(state["master"], is_leaf=lambda x: isinstance(x, fspmd.Sharded))
    assert {frozenset(x.spec.partition.axes) & {"dp", "fsdp"} for x in leaves} == {frozenset({"dp", "fsdp"})}
    assert all(math.prod(x.spec.block_shape) * 4 == x.numel() for x in leaves)
