"""Bytes moved, case by case, beside DTensor's: ``python benchmarks/opinfo_bytes.py``, some twenty minutes.

    python benchmarks/opinfo_bytes.py mm 'nn.functional.*'   # some ops
    python benchmarks/opinfo_bytes.py --json bytes.json      # every case that differs, with both sequences

Samples of torch's op database, each operand whole or sharded along one dim of a line of 4 ranks; both libraries get the
same blocks. A case is run forward, then backward from a cotangent laid out as the result. Counted are bytes that a rank
sends, by ring formulas, until each gradient lies as its operand. Results may be left pending, sharded or whole: so a
case counts twice, *as left*, and *to the end*, with what brings each result to the whole tensor. Links have no
latency here (of equals the fewest collectives are taken), and work takes no time, so the planner goes by bytes. Where
fspmd moves more, DTensor's values, gradients and written operands are judged by those of the unsharded call (torch's
LocalTensorMode runs all ranks).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from bodies import fake_world
from report import surroundings
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fspmd import P, Sharded, communication_log, device_put, make_mesh, reshard
from fspmd.redistribution.cost import Link, Topology, set_topology

_PATH = Path(__file__).parent.parent / "tests" / "opinfo" / "sweep.py"
_FOUND = importlib.util.spec_from_file_location("sweep", _PATH)
assert _FOUND is not None
assert _FOUND.loader is not None
sweep = importlib.util.module_from_spec(_FOUND)
sys.modules["sweep"] = sweep
_FOUND.loader.exec_module(sweep)

RANKS = 4
#: of samples: blocks of more than one row
sweep.SIZES["large"] = {"L": 32, "M": 16, "S": 8, "XS": 4}
#: collectives of functional c10d by name -> bytes that a rank sends, of n ranks and the bytes of the operand
_SENT: dict[str, Callable[[int, int], float]] = {
    "all_gather_into_tensor": lambda n, size: (n - 1) * size,
    "all_gather_into_tensor_coalesced": lambda n, size: (n - 1) * size,
    "reduce_scatter_tensor": lambda n, size: (n - 1) * size / n,
    "reduce_scatter_tensor_coalesced": lambda n, size: (n - 1) * size / n,
    "all_reduce": lambda n, size: 2 * (n - 1) * size / n,
    "all_reduce_": lambda n, size: 2 * (n - 1) * size / n,
    "all_reduce_coalesced": lambda n, size: 2 * (n - 1) * size / n,
    "all_to_all_single": lambda n, size: (n - 1) * size / n,
    "shard_dim_alltoall": lambda n, size: (n - 1) * size / n,
    "broadcast": lambda n, size: size,
    "broadcast_": lambda n, size: size,
}
_QUIET = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
STAGES = ("forward", "result whole", "backward", "gradients laid out")


@dataclasses.dataclass
class Moved:
    """Bytes that a rank sends in each stage, and the collectives in order."""

    bytes: list[float] = dataclasses.field(default_factory=lambda: [0.0] * len(STAGES))
    sequence: list[str] = dataclasses.field(default_factory=list)
    layouts: list[str] = dataclasses.field(default_factory=list)

    @property
    def left(self) -> float:
        return sum(self.bytes) - self.bytes[1]

    @property
    def end(self) -> float:
        return sum(self.bytes)


class Counting(TorchDispatchMode):
    """Collectives that DTensor starts."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()
        self.moved, self.stage = moved, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d"):
            name = func._schema.name.split("::")[1]
            if name not in _QUIET:
                given = [x for x in optree.tree_leaves(args) if isinstance(x, Tensor)]
                sent = _SENT[name](RANKS, sum(x.numel() * x.element_size() for x in given))
                self.moved.bytes[self.stage] += sent
                shown = ", ".join(f"{list(x.shape)}" for x in given)
                self.moved.sequence.append(f"{STAGES[self.stage]}: {name} {shown} {sent:,.0f} B")
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Case:
    """One call: its operands, and where they lie."""

    call: Callable[[Sequence[Any]], list[Any]]
    tensors: list[Tensor]
    specs: tuple[P, ...]
    shown: str


def cases(op: Any, sizes: str, most_samples: int, most_placements: int) -> Iterator[Case]:
    """Samples by placements, as the sweep takes them."""
    dtype, mesh = sweep.dtype_of(op), make_mesh((RANKS,), ("x",), transport="simulation")
    function = sweep.function_of(op)
    for sample in sweep.samples(op, dtype, sizes, most_samples) if dtype is not None else ():
        leaves, treedef = optree.tree_flatten(
            (sample.input, tuple(sample.args), dict(sample.kwargs)), none_is_leaf=True
        )
        places = [i for i, x in enumerate(leaves) if sweep.is_tensor(x)]
        tensors = [leaves[i] for i in places]

        def call(
            values: Sequence[Any], leaves: Any = leaves, treedef: Any = treedef, places: Any = places
        ) -> list[Any]:
            filled = list(leaves)
            for i, x in zip(places, values, strict=True):
                filled[i] = x * 1 if x.requires_grad else x
            first, args, kwargs = treedef.unflatten(filled)
            torch.manual_seed(1)
            out = function(first, *args, **kwargs)
            return list(optree.tree_leaves(out, is_leaf=lambda x: isinstance(x, Sharded)))

        try:
            call([x.detach().clone().requires_grad_(x.requires_grad) for x in tensors])
        except Exception:
            continue  # the sample itself fails
        for specs in sweep.placements(tensors, mesh, most_placements) if tensors else ():
            yield Case(call, tensors, specs, sweep.described(tensors, specs, sample))


def ours(case: Case) -> Moved:
    """What fspmd moves."""
    mesh, moved = make_mesh((RANKS,), ("x",), transport="simulation"), Moved()
    given = [
        device_put(x.detach().clone(), spec, mesh=mesh).requires_grad_(x.requires_grad)
        if x.requires_grad
        else device_put(x.detach().clone(), spec, mesh=mesh)
        for x, spec in zip(case.tensors, case.specs, strict=True)
    ]

    def stage(number: int, done: Callable[[], Any]) -> Any:
        with communication_log() as log:
            out = done()
        for one in log:
            moved.bytes[number] += one.price.moved
            cause = f"{one.cause.what}".replace("\n", " ")
            moved.sequence.append(f"{STAGES[number]}: {one.kind} {list(one.shape)} {one.price.moved:,.0f} B ({cause})")
        return out

    def whole() -> None:
        for x in outs:
            reshard(x.detach(), P())

    def back() -> None:
        torch.autograd.grad(
            [x.local for x in followed],
            [x.local for x in wanted],
            [torch.ones_like(x.local.detach()) for x in followed],
            allow_unused=True,
        )

    outs = [x for x in stage(0, lambda: case.call(given)) if isinstance(x, Sharded)]
    moved.layouts = [f"{x.spec!r}" for x in outs]
    stage(1, whole)
    followed, wanted = [x for x in outs if x.requires_grad], [x for x in given if x.requires_grad]
    if followed and wanted:
        stage(2, back)
    return moved


def _placed(spec: P) -> list[Placement]:
    dims = [dim for dim, entry in enumerate(spec) if entry]
    return [Shard(dims[0])] if dims else [Replicate()]


def theirs(case: Case, mesh: DeviceMesh, moved: Moved) -> tuple[list[Any], list[Any], list[Any]]:
    """What DTensor moves, told to ``moved``; whole results, gradients laid out as their operands, and the operands."""
    given = [
        distribute_tensor(x.detach().clone(), mesh, _placed(spec), src_data_rank=None).requires_grad_(x.requires_grad)
        for x, spec in zip(case.tensors, case.specs, strict=True)
    ]
    with Counting(moved) as counting:
        outs = case.call(given)
        moved.layouts = [f"{x.placements}" for x in outs if isinstance(x, DTensor)]
        counting.stage = 1
        wholes = [
            x.detach().redistribute(mesh, [Replicate()]).to_local() if isinstance(x, DTensor) else x for x in outs
        ]
        followed = [x for x in outs if isinstance(x, DTensor) and x.requires_grad]
        wanted = [x for x in given if x.requires_grad]
        if not followed or not wanted:
            return wholes, [None] * len(given), given
        counting.stage = 2
        found = torch.autograd.grad(followed, wanted, [_cotangent(x) for x in followed], allow_unused=True)
        counting.stage = 3
        homed = iter(
            [
                None if g is None else g.redistribute(mesh, list(x.placements))
                for g, x in zip(found, wanted, strict=True)
            ]
        )
        return wholes, [next(homed) if x.requires_grad else None for x in given], given


def _cotangent(x: DTensor) -> DTensor:
    places = [Replicate() if isinstance(one, Partial) else one for one in x.placements]
    ones = torch.ones_like(x.detach()._local_tensor)
    return DTensor.from_local(ones, x.device_mesh, places, run_check=False, shape=x.shape, stride=x.stride())


def is_right(case: Case) -> str:
    """Whether DTensor's values, gradients and written operands are the unsharded call's: right, wrong, or it fails."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in case.tensors]
    expected = case.call(leaves)
    followed, wanted = (
        [x for x in expected if isinstance(x, Tensor) and x.requires_grad],
        [x for x in leaves if x.requires_grad],
    )
    grads: list[Any] = [None] * len(leaves)
    if followed and wanted:
        found = iter(torch.autograd.grad(followed, wanted, [torch.ones_like(x) for x in followed], allow_unused=True))
        grads = [next(found) if x.requires_grad else None for x in leaves]
    try:
        with LocalTensorMode(RANKS):
            mesh = DeviceMesh("cpu", list(range(RANKS)))
            values, back, given = theirs(case, mesh, Moved())
            back = [None if g is None else g.redistribute(mesh, [Replicate()]).to_local() for g in back]
            after = [x.detach().redistribute(mesh, [Replicate()]).to_local() for x in given]
    except Exception as error:
        return f"fails ({type(error).__name__})"
    for found_one, want in zip([*values, *back, *after], [*expected, *grads, *leaves], strict=True):
        if not isinstance(want, Tensor):
            continue
        if found_one is None:
            if want.numel() and want.abs().max() > 0:
                return "wrong"
            continue
        every = found_one._local_tensors.values() if isinstance(found_one, LocalTensor) else [found_one]
        for one in every:
            if one.shape != want.shape or one.dtype != want.dtype:
                return "wrong"
            if not torch.allclose(one.detach(), want.detach(), rtol=1e-5, atol=1e-7, equal_nan=True):
                return "wrong"
    return "right"


@dataclasses.dataclass
class Result:
    """Cases of one op by outcome."""

    name: str
    counts: dict[str, int] = dataclasses.field(default_factory=lambda: collections.defaultdict(int))
    ours: float = 0.0
    theirs: float = 0.0
    more: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


Job = tuple[str, str, int, int, bool]  # op, sizes, samples, placements, whether every case is judged


def run_op(job: Job) -> Result:
    """Every case of one op."""
    name, sizes, most_samples, most_placements, verify = job
    _settle()
    result, start = Result(name), time.perf_counter()
    try:
        for case in cases(sweep.ops()[name], sizes, most_samples, most_placements):
            _run_case(case, result, verify)
    except Exception as error:
        result.counts[f"samples fail ({type(error).__name__})"] += 1
    result.seconds = round(time.perf_counter() - start, 1)
    result.counts = dict(result.counts)
    return result


def _run_case(case: Case, result: Result, verify: bool) -> None:
    counts, moved = result.counts, Moved()
    counts["cases"] += 1
    try:
        mine = ours(case)
    except Exception:
        counts["fspmd refuses"] += 1
        return
    try:
        theirs(case, DeviceMesh("cpu", list(range(RANKS))), moved)
    except Exception:
        counts["DTensor refuses"] += 1
        return
    result.ours, result.theirs = result.ours + mine.end, result.theirs + moved.end
    outcomes = {
        how: _compared(*pair) for how, pair in {"end": (mine.end, moved.end), "left": (mine.left, moved.left)}.items()
    }
    judged = is_right(case) if verify or "more" in outcomes.values() else "not judged"
    if judged.split()[0] not in ("right", "not"):
        counts[f"DTensor {judged.split()[0]}"] += 1
        return
    for how, outcome in outcomes.items():
        counts[f"{outcome} {how}"] += 1
    if set(outcomes.values()) == {"more"}:
        counts["more both"] += 1
    if "more" in outcomes.values():
        result.more.append(
            {"case": case.shown, **outcomes, "fspmd": dataclasses.asdict(mine), "DTensor": dataclasses.asdict(moved)}
        )


def _compared(mine: float, other: float) -> str:
    return "equal" if abs(mine - other) < 0.5 else "more" if mine > other else "less"


def _settle() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    fast = Link(0.0, 1000.0)
    free = float("inf")
    set_topology(Topology(inside=fast, between=fast, launch=1e-5, memory=free, flops=free, spill=fast))
    if not dist.is_initialized():
        fake_world(RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ops (all by default); a name ending in * is a prefix")
    parser.add_argument("--sizes", choices=sweep.SIZES, default="large")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--placements", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--judge", action="store_true", help="judge DTensor's numbers in every case, not only if fewer")
    parser.add_argument("--json", type=Path, help="where to write every case in which fspmd moves more")
    options = parser.parse_args()
    chosen = [
        name
        for name in sweep.ops()
        if not options.names or any(name == n or (n.endswith("*") and name.startswith(n[:-1])) for n in options.names)
    ]
    jobs = [(name, options.sizes, options.samples, options.placements, options.judge) for name in chosen]
    results = []
    for result in every(jobs, options.jobs):
        results.append(result)
        if result.counts.get("more both"):
            print(f"more: {result.name} {result.counts}", file=sys.stderr, flush=True)
    print(table(results, options))
    if options.json:
        found = {**surroundings(), "ops": [dataclasses.asdict(r) for r in results]}
        options.json.write_text(json.dumps(found, indent=1))


def every(jobs: list[Job], workers: int) -> Iterator[Result]:
    """All ops; one that ends its process is told, and the others go on."""
    while jobs:
        done = 0
        try:
            with ProcessPoolExecutor(workers) as pool:
                for result in pool.map(run_op, jobs):
                    done += 1
                    yield result
        except BrokenProcessPool:
            try:
                with ProcessPoolExecutor(1) as alone:
                    yield alone.submit(run_op, jobs[done]).result()
            except BrokenProcessPool:
                yield Result(jobs[done][0], {"the process ends": 1})
            done += 1
        jobs = jobs[done:]


def table(results: Sequence[Result], options: argparse.Namespace) -> str:
    """Totals, and the ops where fspmd moves more."""
    total: collections.Counter[str] = collections.Counter()
    for result in results:
        total.update(result.counts)
    lines = [
        f"{len(results)} ops, at most {options.samples} samples of each under at most {options.placements} placements",
        "",
    ]
    lines += ["| cases | number |", "|---|---|", *(f"| {key} | {n:,} |" for key, n in total.items())]
    lines += [
        "",
        "| op | cases | to the end: less | equal | more | as left: less | equal | more |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.more:
            cells = [
                r.counts.get(f"{how} {which}", 0) for which in ("end", "left") for how in ("less", "equal", "more")
            ]
            lines.append(f"| {r.name} | {r.counts['cases']} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
