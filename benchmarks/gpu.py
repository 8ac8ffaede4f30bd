"""All that needs a GPU, by one command on a machine that has one: ``make gpu``, in under ten minutes.

    python benchmarks/gpu.py                  # tests and times; the figures go to RESULTS.md, as they are
    python benchmarks/gpu.py --wheels FOLDER  # with Python packages carried along, such as optree
    python benchmarks/gpu.py --device cpu     # tries the parts out on a CPU, and writes nothing

Each part runs in a process of its own with a time limit of its own, so that one that fails hides no other. The machine
needs torch 2.11 or later, and no network. This script itself needs Python alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
TITLE: Final = "## On one GPU"
SECONDS: Final = 570.0  # of all parts

#: programs of tests/device_programs.py, and the seconds that each may take
TESTS: Final = {
    "simulated collectives": 60,
    "simulated model": 60,
    "simulated training": 60,
    "simulated recurrent layers": 60,
    "simulated layouts": 60,
    "checkpoints": 60,
    "random numbers": 60,
    "sequences": 60,
    "sequences in 16 bits": 90,
    "kernels of attention": 90,
    "groups of rows": 60,
    "experts, state, pipelines": 90,
    "decoding": 90,
    "replay": 60,
    "streams": 60,
    "a group of one rank": 90,
    "CUDA graphs": 90,
    "inductor": 150,
    "Gloo on four processes": 200,
}


class Times(NamedTuple):
    """A part of benchmarks/one_gpu.py, its seconds, and the table of its rows."""

    part: str
    seconds: int
    title: str
    head: tuple[str, ...]


TIMES: Final = (
    Times("host", 60, "What the host takes per call", ("call", "plain", "fspmd", "DTensor")),
    Times("draws", 45, "A million random numbers", ("", "torch", "fspmd", "ratio")),
    Times(
        "attention",
        45,
        "Attention, forward and backward",
        ("", "F.scaled_dot_product_attention", "one call of fspmd.nn", "attend_block, a part in float32"),
    ),
    Times(
        "groups",
        45,
        "Products of groups of rows, forward and backward",
        ("", "F.grouped_mm", "grouped_matmul", "ratio"),
    ),
    Times("decoding", 60, "A step of decoding of small layers", ("", "a step", "ratio", "host")),
    Times("checkpoints", 60, "A checkpoint of 512 MiB", ("", "takes", "of all bytes")),
    Times("overlap", 60, "Gathers of weights beside products, on two processes with Gloo", ("", "takes", "ratio")),
    Times("memory", 90, "The peak of a step of the 1B model", ("", "predicted", "measured", "ratio")),
    Times("layer", 120, "A transformer layer, 2048 wide: loss, gradients, update", ("", "a step", "ratio", "host")),
    Times("1B", 200, "A model of 1B parameters: loss, gradients, update", ("", "a step", "ratio", "host")),
)
_ASK: Final = """
import torch, optree
found = torch.cuda.is_available()
print(f"torch {torch.__version__}, optree {optree.__version__}, " + (
    f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if found else "no GPU"))
"""


class Outcome(NamedTuple):
    ok: bool
    seconds: float
    output: str


class Runner:
    """Runs Python in processes, each in what is left of the time."""

    def __init__(self, packages: Path | None) -> None:
        paths = [ROOT, ROOT / "tests", *([packages] if packages else [])]
        known = os.environ.get("PYTHONPATH")
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *([known] if known else [])]),
            "PYTHONUNBUFFERED": "1",
        }
        self._end = time.monotonic() + SECONDS

    def run(self, seconds: float, *arguments: str) -> Outcome:
        """What a process prints, and whether it ended well and in time."""
        start = time.monotonic()
        allowed = min(seconds, self._end - start)
        if allowed <= 1:
            return Outcome(False, 0.0, "not run: the time of all parts was up")
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(allowed)
                why = ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # with the processes that it started
                code, why = process.wait(), f"\nended after {allowed:.0f} s, its limit"
            output.seek(0)
            return Outcome(code == 0, time.monotonic() - start, output.read() + why)


def unpacked(wheels: Path, into: Path) -> Path | None:
    """The packages of those wheels in a folder that this Python can load."""
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(wheels.glob("*.whl")) if wheels.is_dir() else ():
        tags, machine = wheel.stem.split("-")[-3:-1], wheel.stem.split("-")[-1]
        if (mine == tags[0] or tags[0].startswith("py3") or "abi3" in tags) and (
            machine == "any" or platform.machine() in machine
        ):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
    return into if any(into.iterdir()) else None


def told(outcome: Outcome) -> str:
    """The line of an output that says why it failed."""
    lines = [line.strip() for line in outcome.output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|ended after|not run", line)]
    return (errors or lines or ["no output"])[-1].replace("|", "\\|")[:200]


def table(head: tuple[str, ...], rows: list[list[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join([*row, *[''] * (len(head) - len(row))])} |"
    yield ""


def tested(runner: Runner, device: str) -> Iterator[str]:
    """The section's part on tests, which run side by side."""
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        every = pool.map(lambda name: runner.run(TESTS[name], "tests/device_programs.py", name, device), TESTS)
        for name, found in zip(TESTS, every, strict=True):
            rows.append([name, "right" if found.ok else f"fails: {told(found)}", f"{found.seconds:.0f} s"])
            print(*rows[-1], sep=": ", flush=True)
            if not found.ok:
                print(found.output[-3000:], flush=True)
    yield from table(("test", "outcome", "took"), rows)


def timed(runner: Runner, device: str) -> Iterator[str]:
    """The section's part on times."""
    for part, seconds, title, head in TIMES:
        found = runner.run(seconds, "benchmarks/one_gpu.py", part, device)
        rows = [json.loads(line) for line in found.output.splitlines() if line.startswith('["')]
        if not found.ok:
            rows.append(["fails", told(found)])
            print(found.output[-3000:], flush=True)
        print(title, *rows, sep="\n  ", flush=True)
        yield f"### {title}"
        yield from table(head, rows)


def written(text: str, section: str) -> str:
    """The text with its section on a GPU replaced, or added at the end."""
    start = text.find(f"{TITLE}\n")
    if start < 0:
        return f"{text.rstrip()}\n\n{section}"
    end = text.find("\n## ", start + 1)
    return text[:start] + section + (text[end:] if end >= 0 else "")


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the parts out")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="a folder of wheels to use")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as packages:
        runner = Runner(unpacked(options.wheels, Path(packages)))
        asked = runner.run(120, "-c", _ASK)
        if not asked.ok:
            sys.exit(f"{told(asked)}\nput the wheel of what is missing into {options.wheels}, as docs/gpu.md says")
        versions = asked.output.strip().splitlines()[-1]
        if options.device == "cuda" and versions.endswith("no GPU"):
            sys.exit(
                f"make gpu needs a machine with an NVIDIA GPU that torch can use; here is {versions}. Nothing was run"
            )
        print(versions, flush=True)
        start = time.monotonic()
        found = [*tested(runner, options.device), *timed(runner, options.device)]
    heading = [TITLE, "", f"{datetime.date.today()}, {versions}, Python {platform.python_version()}, by `make gpu`."]
    ending = [f"All parts took {time.monotonic() - start:.0f} s."]
    section = "\n".join([*heading, *found, *ending, ""])
    if options.device == "cuda":
        results = ROOT / "benchmarks" / "RESULTS.md"
        results.write_text(written(results.read_text(), section))
    else:
        print(section)


if __name__ == "__main__":
    main()
