"""The examples run, in simulation and on processes with Gloo, and check themselves against unsharded torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import optree
import pytest
import torch
from full import FULL
from processes import Processes, forks
from torch.distributed.run import parse_args

import fspmd

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ["first_steps", "data_parallel", "pipeline", "halo_exchange", "ring_matmul", "uneven_shards"]
TINY = {"steps": 12, "layers": 1, "width": 32, "length": 32, "batch": 8, "sample": 8, "dtype": "float64"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(script: str) -> str:
    """What a short example prints, on simulated ranks or as one of the pool's processes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    return printed.getvalue()


def _printed(name: str, arguments: list[str]) -> str:
    """What an example prints, run by this process."""
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(name).main(arguments)
    return printed.getvalue()


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    """4 processes with Gloo, launched as by torchrun."""
    with Processes(4) as pool:
        yield pool


def on_processes(pool: Processes, name: str, arguments: list[str]) -> str:
    """What an example prints on all processes."""
    return "".join(pool.run(_printed, name, arguments))


@pytest.mark.parametrize("script", SHORT)
def test_short_example_runs_on_simulated_ranks(script: str) -> None:
    assert run(script).strip()
    assert len((EXAMPLES / f"{script}.py").read_text().splitlines()) < 60


def test_short_examples_print_the_same_on_processes(pool: Processes) -> None:
    for script in SHORT[:: 1 if FULL else 2]:
        assert "".join(pool.run(run, script)) == run(script)


def test_losses_of_the_language_model_do_not_depend_on_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Processes
) -> None:
    """One rank, 8 simulated (recorded, too) and 4 Gloo ranks: the same losses to 1e-10 over 12 steps in float64."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}, and half of it is {n * n / 2}" for n in range(2000)))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    train_lm = importlib.import_module("train_lm")
    reports = []
    for mesh, processes, *flags in (("1x1", 1), ("2x4", 1), ("2x4", 1, "--jit"), ("2x2", 4)):
        file = tmp_path / f"{mesh}.json"
        options = TINY | {"mesh": mesh, "text": text, "losses": file, "out": tmp_path}
        arguments = [*(f"--{name}={value}" for name, value in options.items()), *flags]
        if processes == 1:
            train_lm.main(arguments)
        else:
            printed = on_processes(pool, "train_lm", arguments)
            assert printed.count("step 12/12") == 1  # one process prints
        reports.append(json.loads(file.read_text()))
    alone = reports[0]
    assert len(alone["losses"]) == 12
    assert alone["losses"][-1] < alone["losses"][0] - 0.5
    for other in reports[1:]:
        assert other["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert other["validation"] == pytest.approx(alone["validation"], rel=1e-10)
        assert other["bigram"] == alone["bigram"]
    assert (tmp_path / "train_lm.png").stat().st_size > 1000


def _trained(is_sharded: bool) -> tuple[float, float]:
    """Losses of the example of the Trainer, or of the Trainer itself on an unsharded model."""
    from transformers import Trainer

    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    example = importlib.import_module("huggingface_trainer")
    with contextlib.ExitStack() as stack:
        if not is_sharded:
            stack.enter_context(mock.patch.object(fspmd, "attach"))
            stack.enter_context(mock.patch.object(example.ShardedTrainer, "_prepare_inputs", Trainer._prepare_inputs))
            stack.enter_context(mock.patch.object(example.ShardedTrainer, "prediction_step", Trainer.prediction_step))
        losses: tuple[float, float] = example.main(epochs=1)
    return losses


def test_the_trainer_of_transformers_gives_the_losses_of_an_unsharded_model(pool: Processes) -> None:
    """Its losses are in float32."""
    alone = _trained(False)
    assert alone[1] < alone[0] - 0.1
    for found in (_trained(True), *pool.run(_trained, True)):
        assert found == pytest.approx(alone, rel=1e-6)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of train_lm for a short run that saves every third of 9 steps."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = TINY | {"steps": 9, "sample": 0, "text": EXAMPLES / "train_lm.py", "out": tmp_path}
    return [*(f"--{name}={value}" for name, value in options.items()), "--every=3"]


def _losses(tmp_path: Path, *arguments: str) -> list[float]:
    file = tmp_path / "losses.json"
    importlib.import_module("train_lm").main([*arguments, f"--losses={file}"])
    losses: list[float] = json.loads(file.read_text())["losses"]
    return losses


def test_training_goes_on_from_a_checkpoint(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the bit on the same mesh, and within rounding on another."""
    alone, folder = _losses(tmp_path, *job), tmp_path / "steps"
    assert _losses(tmp_path, *job, f"--checkpoint={folder}", "--resume") == alone
    assert fspmd.latest_step(folder) == 9
    for mesh, exact in (("2x4", True), ("1x2", False)):
        shutil.rmtree(folder / "step-00000009")
        capsys.readouterr()
        found = _losses(tmp_path, *job, f"--checkpoint={folder}", "--resume", f"--mesh={mesh}")
        assert "resumed at step 6/9" in capsys.readouterr().out
        assert found == (alone if exact else pytest.approx(alone, rel=1e-10))


def test_training_goes_on_where_processes_are_left_over(job: list[str], tmp_path: Path, pool: Processes) -> None:
    """Four processes, of which the mesh has two: the others end at once."""
    folder, file = tmp_path / "steps", tmp_path / "two.json"
    alone = _losses(tmp_path, *job, "--mesh=1x2", f"--checkpoint={folder}")
    shutil.rmtree(folder / "step-00000009")
    given = [*job, "--mesh=1x2", f"--checkpoint={folder}", "--resume", f"--losses={file}"]
    assert "resumed at step 6/9" in on_processes(pool, "train_lm", given)
    assert json.loads(file.read_text())["losses"] == pytest.approx(alone, rel=1e-10)


def _program(arguments: list[str], launcher: list[str], log: Path) -> None:
    """Of a process: train_lm, or torchrun whose workers are forks and run it. What they print goes into a file."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(EXAMPLES))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if launcher:
        from torch.distributed.run import main

        main([*launcher, "--run-path", "--start-method=fork", str(EXAMPLES / "train_lm.py"), *arguments])
    else:
        importlib.import_module("train_lm").main(arguments)


@contextlib.contextmanager
def _started(arguments: list[str], launcher: list[str], tmp_path: Path) -> Iterator[BaseProcess]:
    """Training in another process, once a step is saved. It ends within the block."""
    folder, log = tmp_path / "steps", tmp_path / "log.txt"
    log.touch()
    arguments = [*arguments, f"--checkpoint={folder}", "--resume"]
    process = forks().Process(target=_program, args=(arguments, launcher, log))
    process.start()

    def begun() -> bool:
        """A rank is killed after a save, not within, where the other would wait until the launcher kills it."""
        return "step 4/" in log.read_text() if launcher else (folder / "latest").exists()

    end = time.monotonic() + 120
    while not begun() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.02)
    yield process
    process.join(300)
    process.kill()
    assert process.exitcode == 0, log.read_text()


def test_training_goes_on_after_a_rank_was_killed(job: list[str], tmp_path: Path) -> None:
    """The launcher starts all ranks again, and the losses are those of an undisturbed run, to the bit."""
    file, launcher = tmp_path / "killed.json", ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with _started([*job, "--mesh=1x2", f"--losses={file}"], launcher, tmp_path) as process:
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[1]), signal.SIGKILL)
    assert "resumed at step" in (tmp_path / "log.txt").read_text()
    assert json.loads(file.read_text())["losses"] == _losses(tmp_path, *job, "--mesh=1x2")


def test_a_told_process_saves_and_ends(job: list[str], tmp_path: Path) -> None:
    with _started([*job, "--steps=100000"], [], tmp_path) as process:
        os.kill(process.pid, signal.SIGTERM)
    stopped = f"stopped after step {fspmd.latest_step(tmp_path / 'steps')}"
    assert stopped in (tmp_path / "log.txt").read_text()


def test_a_process_told_while_it_resumes_ends_after_a_step(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def resume(*_: object) -> list[float]:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(importlib.import_module("train_lm"), "resume", resume)
    try:
        importlib.import_module("train_lm").main([*job, f"--checkpoint={tmp_path / 'steps'}", "--resume"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "stopped after step 1" in capsys.readouterr().out
    assert fspmd.latest_step(tmp_path / "steps") == 1


def test_wrong_options_end_with_a_message(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for option, text in (("--every=0", "must be at least 1"), ("--resume", "--resume needs --checkpoint")):
        with pytest.raises(SystemExit):
            importlib.import_module("train_lm").main([*job, option])
        assert text in capsys.readouterr().err


def test_global_view_has_the_losses_of_train_lm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pool: Processes
) -> None:
    """In simulation and, recorded, on Gloo the losses that train_lm has on one rank; so has an nn.Transformer."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    global_view, train_lm = (importlib.import_module(name) for name in ("global_view", "train_lm"))
    files = {name: tmp_path / f"{name}.json" for name in ("alone", "simulated", "gloo")}
    options = TINY | {"steps": 5, "text": EXAMPLES / "train_lm.py", "batch": 16, "out": tmp_path}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    train_lm.main([*arguments, "--mesh=1x1", f"--losses={files['alone']}"])
    capsys.readouterr()
    global_view.main([*arguments, "--mesh=2x4", f"--losses={files['simulated']}"])
    here = capsys.readouterr().out
    there = on_processes(pool, "global_view", [*arguments, "--mesh=2x2", f"--losses={files['gloo']}", "--jit"])
    alone, *others = (json.loads(file.read_text()) for file in files.values())
    assert alone["losses"][-1] < alone["losses"][0]
    for other in others:
        assert other["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert other["validation"] == pytest.approx(alone["validation"], rel=1e-10)
    assert here.splitlines()[-1].startswith("nn.Transformer: ")
    assert here.splitlines()[-1] == there.splitlines()[-1]
    assert len((EXAMPLES / "global_view.py").read_text().splitlines()) <= 150


def test_a_model_of_70_billion_parameters_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of its layers; the state of a rank is what the specs say."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plan = importlib.import_module("plan_70b")
    plan.main(["--layers=2", "--ranks=64", "--batch=64"])
    printed = capsys.readouterr().out
    assert "The quickest that fits is mesh(dp=" in printed
    mesh = fspmd.make_mesh((2, 4, 8), ("dp", "fsdp", "tp"), transport="abstract")
    config = plan.Config(layers=1, B=64)
    program = plan.lower(config, mesh)
    held = sum(math.prod(spec.block_shape) * 4 for spec in optree.tree_leaves(plan.parameters(config, mesh)))
    tokens = 2 * 8 * 4096 * 8  # and targets; ranks know their own places, too
    assert program.memory().given == pytest.approx(3 * held + tokens, abs=200)  # parameters and Adam's states
    for part in ("all_gather_reduced over 'fsdp'", "psum_scatter_unreduced over 'fsdp'", "psum_unreduced over 'dp'"):
        assert part in str(program.collectives())
    c, tokens = config, config.B * config.S
    weights = c.layers * (2 * c.D * c.H * c.K + 2 * c.D * c.G * c.K + 3 * c.D * c.F) + c.D * c.V
    pairs = c.B * c.S * (c.S + 1) // 2  # of a query and a key that it sees
    assert program.cost().model_flops == 6 * weights * tokens + 12 * c.layers * pairs * c.H * c.K


def test_the_bigram_model_is_the_one_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text_data = importlib.import_module("text_data")
    text = text_data.as_tensor(bytearray(b"abababac"))  # after a: b 3 times of 4, c once; after b: always a
    inputs, targets = text_data.windows(text, torch.tensor([0]), 2)
    assert (inputs.tolist(), targets.tolist()) == ([[97, 98]], [[98, 97]])
    loss = text_data.bigram_loss(text, [(inputs, targets)], prior=0.0)
    assert loss == pytest.approx(-torch.tensor(0.75).log().item() / 2)


@pytest.mark.parametrize("name", ["train_lm", "pretrain", "global_view"])
def test_torchrun_leaves_the_options_of_examples_alone(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses those that begin as two of its own do, also behind the script: --log, --master."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with contextlib.suppress(SystemExit):
        importlib.import_module(name).main(["--help"])
    options = {*re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out)} - {"--nproc-per-node"}
    assert "--mesh" in options
    for option in options:
        assert parse_args(["--nproc-per-node", "4", "x.py", option, "1"]).training_script_args == [option, "1"]
