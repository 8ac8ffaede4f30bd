"""Models of transformers as they are, on 8 simulated ranks (2 of "dp", 4 of "tp"), beside themselves unsharded.

    python benchmarks/models.py [model ...] > table.md

Prints the table of `tests/model_cases.py` in Markdown. In float64, but for what a model computes in float32: the
largest errors of logits and loss, and of gradients. In float32: the collectives of a step, with styles, without, and
what an expert would write; the time of a step. The models are tiny, so times tell what the host does, and in a
simulation one process does the work of 8 ranks.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from model_cases import CASES, Collectives
from model_programs import Placed, batch_of, unsharded

import fspmd

REPEATS = 7
HEAD = (
    *("model", "logits", "gradients", "collectives with styles", "without", "ideal"),
    *("step unsharded", "eager", "jitted"),
)


def main(names: list[str]) -> None:
    """One row a model."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = fspmd.make_mesh((2, 4), ("dp", "tp"), transport="simulation")
    print(
        "Collectives of a step: over tp alone forward + backward, with dp forward + backward (one a parameter there)."
    )
    print("Times are milliseconds of one core, which does the work of all 8 ranks.\n")
    print("|", " | ".join(HEAD), "|")
    print("|", " | ".join("---" for _ in HEAD), "|")
    for name in names:
        print("|", " | ".join(row(name, mesh)), "|", flush=True)


def row(name: str, mesh: fspmd.Mesh) -> list[str]:
    """The cells; what fails says so."""
    styled, plain = told(lambda: step(name, mesh, True), 3), told(lambda: step(name, mesh, False), 3)
    times = [told(lambda f=f: [milliseconds(f(name, mesh))], 1)[0] for f in (alone, eager, jitted)]
    return [name, *styled, plain[2], shown(CASES[name].ideal), *times]


def told(cells: Callable[[], list[str]], count: int) -> list[str]:
    """So many cells, or that they fail."""
    try:
        return cells()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ["fails"] * count


def step(name: str, mesh: fspmd.Mesh, styled: bool) -> list[str]:
    """Errors of values and of gradients, and collectives."""
    found, _ = Placed(CASES[name], mesh, styled=styled).step()
    _, count = Placed(CASES[name], mesh, torch.float32, styled).step()
    return [*(f"{error:.1e}" for error in found.error(unsharded(name))), shown(count)]


def shown(count: Collectives) -> str:
    return f"{count.forward} + {count.backward}, {count.data} + {count.gradients}"


def alone(name: str, _: fspmd.Mesh) -> Callable[[], object]:
    """Without a mesh."""
    case = CASES[name]
    model, batch = case.make(torch.float32), batch_of(case, torch.float32)

    def run() -> None:
        model(**batch).loss.backward()

    return run


def eager(name: str, mesh: fspmd.Mesh) -> Callable[[], object]:
    """By `functional_call` and ``backward()``, with styles."""
    placed = Placed(CASES[name], mesh, torch.float32)

    def run() -> None:
        placed(placed.params, placed.buffers, placed.batch).loss.backward()

    return run


def jitted(name: str, mesh: fspmd.Mesh) -> Callable[[], object]:
    """The same as a recorded function of parameters that have no gradient themselves."""
    placed = Placed(CASES[name], mesh, torch.float32)
    params = {name: x.detach() for name, x in placed.params.items()}
    run = fspmd.jit(fspmd.value_and_grad(lambda *args: placed(*args).loss))
    return lambda: run(params, placed.buffers, placed.batch)


def milliseconds(f: Callable[[], object]) -> str:
    """The median of a few calls, in processor time."""
    f()
    found = []
    for _ in range(REPEATS):
        start = time.thread_time()
        f()
        found.append(time.thread_time() - start)
    return f"{statistics.median(found) * 1e3:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
