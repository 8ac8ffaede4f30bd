"""One of four Gloo processes goes wrong: seconds until the others have ended, and whether they name rank and line.

Beside stands the same program in plain torch.distributed, with the same time limit. Ours runs under
``debug(seconds=LIMIT)``. Each rank is a program of its own, up to the end of its interpreter. A message names the rank
if it says "rank 2". It names the line if it has the line of the fault, or where a rank is gone or stopped, the line at
which the others wait for it; in the backward of a record, the line of the forward step.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from report import report
from timing import Table, show_seconds

import fspmd
from fspmd import P

RANKS, WRONG, STEPS, AT = 4, 2, 20, 10
SIDES = ("eager", "jit", "torch")
LIMIT = 10.0  # seconds that a collective may take, on both sides
CAP = 30.0  # seconds after which a program counts as hanging

# a fault and the mark at the end of the line that a message should name
PROGRAMS = {
    "one collective more": "more",
    "another shape": "shape",
    "another dtype": "dtype",
    "another axis": "axis",
    "another order": "order",
    "an exception": "exception",
    "out of memory": "memory",
    "SIGKILL": "first",
    "SIGSTOP for 13 s": "first",
    "3 s late": "",
}
STATES = {"data end early": "first", "a flipped bit": ""}

Sum = Callable[[torch.Tensor, str], torch.Tensor]


# --- the program ------------------------------------------------------------------------------------------------------


def exchange(t: torch.Tensor, psum: Sum, fault: str) -> torch.Tensor:
    """A sum over axis a, and one over b; or on one rank the fault."""
    match fault:
        case "one collective more":
            begin_fault()
            t = psum(t, "a")  # more
        case "another shape":
            begin_fault()
            return psum(psum(t.repeat(2), "a"), "b")[: len(t)]  # shape
        case "another dtype":
            begin_fault()
            return psum(psum(t.float(), "a"), "b").double()  # dtype
        case "another axis":
            begin_fault()
            return psum(psum(t, "b"), "b")  # axis
        case "another order":
            begin_fault()
            return psum(psum(t, "b"), "a")  # order
        case "an exception":
            begin_fault()
            raise ValueError("bad batch")  # exception
        case "out of memory":
            begin_fault()
            torch.empty(1 << 60)  # memory
        case "SIGKILL":
            begin_fault()
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP for 13 s":
            begin_fault()
            subprocess.Popen(["sh", "-c", f"sleep {LIMIT + 3}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        case "3 s late":
            begin_fault()
            time.sleep(3)
    t = psum(t, "a")  # first
    return psum(t, "b")  # first


def body(w: torch.Tensor, x: torch.Tensor, psum: Sum, forward: str, backward: str) -> torch.Tensor:
    """A step of training, with sums forward and backward."""
    w = w.detach().requires_grad_()
    h = x @ w  # forward
    h.register_hook(lambda g: exchange(g, psum, backward))
    scale = exchange(h.detach(), psum, forward)
    (grad,) = torch.autograd.grad((h * scale).sum(), w)
    return w.detach() - 1e-4 * psum(psum(grad, "a"), "b")


def begin_fault() -> None:
    """Note the time."""
    Path(f"{os.environ['FAULTS']}/begin").write_text(str(time.monotonic()))


@contextmanager
def ours(is_jitted: bool) -> Iterator[tuple[Any, ...]]:
    """The values, how to make a step, and a check of the parameters."""
    mesh = fspmd.make_mesh((2, 2), ("a", "b"), device="cpu")

    def step_of(forward: str, backward: str) -> Any:
        step = fspmd.shard_map(
            lambda w, x: body(w, x, fspmd.psum, forward, backward),
            mesh=mesh,
            in_specs=(P(), P(("a", "b"))),
            out_specs=P(),
            check_vma=False,
        )
        return fspmd.jit(step) if is_jitted else step

    w, x = values()
    with fspmd.debug(seconds=LIMIT):
        yield fspmd.device_put(w, P(), mesh=mesh), fspmd.device_put(x, P(("a", "b")), mesh=mesh), step_of


@contextmanager
def plain() -> Iterator[tuple[Any, ...]]:
    """The same in torch.distributed."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    rank = dist.get_rank()
    pairs = {"a": [(0, 2), (1, 3)], "b": [(0, 1), (2, 3)]}
    made = {name: [dist.new_group(pair) for pair in each] for name, each in pairs.items()}
    groups = {name: made[name][[rank in pair for pair in each].index(True)] for name, each in pairs.items()}

    def psum(t: torch.Tensor, axis: str) -> torch.Tensor:
        t = t.clone()
        dist.all_reduce(t, group=groups[axis])
        return t

    w, x = values()
    yield w, x.chunk(RANKS)[rank], lambda forward, backward: lambda w, x: body(w, x, psum, forward, backward)
    dist.destroy_process_group()


def values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((8,), (16, 8)))
    return w, x


def run(side: str, fault: str, where: str) -> None:
    """The program of a rank."""
    rank = int(os.environ["RANK"])
    with plain() if side == "torch" else ours(side == "jit") as (initial, x, step_of):
        w = initial
        right = step_of("", "")
        wrong = step_of(fault * (where == "forward"), fault * (where == "backward"))
        for i in range(STEPS):
            is_wrong = i == AT and rank == WRONG
            if is_wrong and fault == "data end early":
                begin_fault()
                break
            w = (wrong if is_wrong else right)(w, x)
            if is_wrong and fault == "a flipped bit":
                begin_fault()
                (w if side == "torch" else w.local).view(torch.int64)[3] ^= 1 << 40
            if side != "torch":
                fspmd.check_replicas(w, every=5)
        result = repr((w if side == "torch" else w.local).tolist())
    Path(f"{os.environ['FAULTS']}/result-{rank}").write_text(result)


# --- the nursery: a process that has imported everything and forks the ranks ------------------------------------------


def nursery() -> None:
    """For each line of the input fork the ranks, wait for them, and print what they did. A rank returns from here."""
    for line in sys.stdin:
        port, side, fault, where = json.loads(line)
        folder, ranks = tempfile.mkdtemp(), {}
        for rank in range(RANKS):
            process = os.fork()
            if not process:
                become(rank, port, folder)
                try:
                    return run(side, fault, where)
                finally:
                    Path(f"{folder}/told-{rank}").write_text(str(time.monotonic()))
            ranks[process] = rank
        print(json.dumps(watched(ranks, Path(folder))), flush=True)
        shutil.rmtree(folder)
    return None


def become(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(RANKS), FAULTS=folder)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")  # as with torchrun, the store outlives the ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    output = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)


def watched(ranks: dict[int, int], folder: Path) -> dict[str, Any]:
    """Wait for the ranks. Return their texts, and the seconds from the fault to the end of each main program."""
    start, hanging, ended = time.monotonic(), [], {}
    while ranks:
        process, _ = os.waitpid(-1, os.WNOHANG)
        if process:
            ended[ranks.pop(process)] = time.monotonic()
        elif time.monotonic() - start > CAP + 10:
            hanging = sorted(ranks.values())
            for each in ranks:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
            break
        else:
            time.sleep(0.01)
    read = {kind: [folder / f"{kind}-{rank}" for rank in range(RANKS)] for kind in ("output", "result", "told")}
    texts = {kind: [p.read_text() if p.exists() else "" for p in paths] for kind, paths in read.items()}
    begin = float((folder / "begin").read_text()) if (folder / "begin").exists() else start
    told = [
        float(text) if text else ended.get(rank) for rank, text in enumerate(texts["told"])
    ]  # Gloo may end a process
    seconds = [None if end is None else end - begin for end in told]
    return {"hanging": hanging, "seconds": seconds, **texts}


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """What the other ranks said: how long it took, and how many of them named the rank and the line."""

    how: str
    rank: int
    line: int

    @classmethod
    def of(cls, found: dict[str, Any], mark: str, right: list[str]) -> Told:
        others = [rank for rank in range(RANKS) if rank != WRONG]
        seconds = [found["seconds"][rank] for rank in others]
        texts = [found["output"][rank] for rank in others]
        lines = [f"faults.py:{line}" for line in (lines_of(mark) if mark else ())]
        if None in seconds or found["hanging"]:
            how = f"> {CAP:.0f} s"
        elif all(found["result"][rank] for rank in range(RANKS)):
            how = "right, no error" if found["result"] == right else "never: wrong"
        else:
            how = show_seconds(max(seconds))
        return cls(
            how,
            sum(f"rank {WRONG}" in text for text in texts),
            sum(any(line in text for line in lines) for text in texts),
        )

    def cells(self) -> list[str]:
        return [self.how, f"{self.rank} of 3" if self.rank else "no", f"{self.line} of 3" if self.line else "no"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table."""

    what: str
    where: str
    eager: Told
    jit: Told
    torch: Told

    HEAD: ClassVar = (
        "fault of rank 2",
        "where",
        *("eager", "rank", "line"),
        *("jit", "rank", "line"),
        "torch",
        "rank",
        "line",
    )
    met: ClassVar = None

    def cells(self) -> list[str]:
        return [self.what, self.where, *itertools.chain(*(x.cells() for x in (self.eager, self.jit, self.torch)))]


def lines_of(mark: str) -> list[int]:
    """The lines with a mark, and the line of the forward step, which a record names for its backward."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    return [i for i, line in lines if line.endswith((f"  # {mark}", "  # forward"))]


def measure() -> Table:
    """Run all faults, forward and backward."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "nursery"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None

        def ask(side: str, fault: str, where: str) -> dict[str, Any]:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            forks.stdin.write(json.dumps([store.port, side, fault, where]) + "\n")
            forks.stdin.flush()
            found = json.loads(forks.stdout.readline())
            if os.environ.get("FAULTS_SHOW"):
                print(side, fault, where, json.dumps(found, indent=1), file=sys.stderr, flush=True)
            return found

        right = {side: ask(side, "", "")["result"] for side in SIDES}
        assert all(right[side] == right["eager"] and all(right[side]) for side in SIDES), right
        cases = [(fault, where, mark) for fault, mark in PROGRAMS.items() for where in ("forward", "backward")]
        rows = []
        for fault, where, mark in [*cases, *((fault, "between steps", mark) for fault, mark in STATES.items())]:
            told = [Told.of(ask(side, fault, where), mark, right[side]) for side in SIDES]
            rows.append(Fault(fault, where, *told))
        forks.stdin.close()
    notes = (
        f"Four processes make {STEPS} steps, and rank 2 has one fault in step {AT}. A collective may take {LIMIT:.0f} "
        "s on both sides. Seconds run until the main programs of the other three have ended. Under jit, rank 2 records "
        "another program in that step, with the fault in it. Fake tensors take no memory, so there no memory is short, "
        "and the first passes make one sum of two, in any order."
    )
    return Table("Faults", rows, notes)


if __name__ == "__main__":
    if sys.argv[1:] == ["nursery"]:
        torch.set_num_threads(1)
        for late in ("sympy", "torch._dynamo.symbolic_convert"):  # torch would import them in each rank
            importlib.import_module(late)
        gc.freeze()  # the end of a rank then leaves out what it shares with the nursery
        nursery()
    else:
        report(__doc__, ("faults",))
