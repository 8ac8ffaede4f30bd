"""torch's own op database through the global view: values, shapes and gradients against the unsharded call.

``python tests/opinfo/sweep.py`` runs every op (or those named) and prints a table; `test_opinfo.py` runs a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import optree
import torch
import torch.testing._internal.common_methods_invocations as common
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core

from fspmd import FspmdError, Mesh, P, Sharded, device_get, device_put, make_mesh
from fspmd.rules import Bodied
from fspmd.rules.table import ROWS

#: sizes of op_db's samples: its own, which four ranks do not divide, and such as they do
SIZES = {"uneven": {"L": 20, "M": 10, "S": 5, "XS": 3}, "even": {"L": 24, "M": 12, "S": 4, "XS": 2}}
MESHES = {
    "line": ((4,), ("x",)),
    "grid": ((2, 2), ("x", "y")),
    "six": ((6,), ("x",)),
    "wide": ((2, 3), ("x", "y")),
}
#: how calls are written: as the database has them; with all arguments by name, the last first; with NumPy's numbers;
#: or with pending sums for values
WRITTEN = ("plain", "named", "numpy", "pending")
#: of these dtypes operands are pending sums, where they are to be
_PENDING = frozenset({torch.float64, torch.complex128, torch.int64})
_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)


@dataclass
class Report:
    """What became of one op."""

    name: str
    status: str = "clean"  # or "refused", "wrong", "crash"
    runs: int = 0
    refused: int = 0
    gradients: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@functools.cache
def ops() -> dict[str, Any]:
    return {name_of(op): op for op in common.op_db}


def dtype_of(op: Any, device: str = "cpu") -> torch.dtype | None:
    dtypes = op.supported_dtypes(device)
    return next((dtype for dtype in _DTYPES if dtype in dtypes), None)


#: ops whose samples torch can make of its own sizes alone; of others the first two read memory that is not theirs
_OF_OWN_SIZES = frozenset({"_segment_reduce.offsets", "_segment_reduce.lengths", "argwhere", "cumprod", "prod"})


def _seed(seed: int = common_utils.SEED) -> None:
    """As torch's `set_rng_seed`, for the CPU alone: for each other kind of device that one formats the stack."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


common_utils.set_rng_seed = _seed  # which runs before each sample
core.extract_test_fn = common_utils.extract_test_fn = lambda: None  # it looks through every module for each sample


def samples(op: Any, dtype: torch.dtype, sizes: str, most: int, device: str = "cpu") -> Iterator[Any]:
    sizes = "uneven" if name_of(op) in _OF_OWN_SIZES else sizes
    before = {name: getattr(common, name) for name in SIZES[sizes]}
    try:
        for name, size in SIZES[sizes].items():
            setattr(common, name, size)
        _seed(0)
        every = list(op.sample_inputs(device, dtype, requires_grad=op.supports_autograd and dtype.is_floating_point))
    finally:
        for name, size in before.items():
            setattr(common, name, size)
    step = max(1, len(every) // most)
    yield from every[::step][:most]


def specs_of(mesh: Mesh, ndim: int) -> list[P]:
    """Whole, and every dim over every axis, or one dim over all."""
    axes = mesh.axis_names
    found = [P()]
    for places in itertools.product(range(-1, ndim), repeat=len(axes)):
        entries: list[tuple[str, ...]] = [()] * ndim
        for axis, place in zip(axes, places, strict=True):
            if place >= 0:
                entries[place] += (axis,)
        if any(entries):
            found.append(P(*entries))
    return found


def placements(tensors: Sequence[Tensor], mesh: Mesh, most: int) -> list[tuple[P, ...]]:
    """Specs for each tensor: all combinations up to a cap, taken evenly."""
    options = [specs_of(mesh, x.dim()) for x in tensors]
    total = 1
    for one in options:
        total *= len(one)
    step = max(1, -(-total // most))
    found = []
    for number in range(total // 3 % step, total, step):
        chosen, stride = [], 1
        for one in reversed(options):
            chosen.append(one[number // stride % len(one)])
            stride *= len(one)
        found.append(tuple(reversed(chosen)))
    return found


def is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


class Wrong(Exception):
    """A number that is not what the unsharded call gives."""


def run_op(
    op: Any,
    *,
    sizes: str,
    mesh: str,
    most_samples: int,
    most_placements: int,
    transport: str = "simulation",
    written: str = "plain",
    device: str = "cpu",
) -> Report:
    """Every sample under every choice of layouts, up to the given numbers."""
    report = Report(name_of(op))
    start = time.perf_counter()
    dtype = dtype_of(op, device)
    shape, names = MESHES[mesh]
    on = make_mesh(shape, names, transport=transport, device=device)
    try:
        given = list(samples(op, dtype, sizes, most_samples, device)) if dtype is not None else []
    except Exception as error:
        report.status, given = "no samples", []
        report.notes.append(f"{error!r}"[:300])
    for sample in given:
        run_sample(op, sample, on, most_placements, report, written)
    report.seconds = round(time.perf_counter() - start, 2)
    return report


_ORDER = ("clean", "no samples", "refused", "crash", "wrong")


def _note(report: Report, status: str, text: str) -> None:
    report.status = max(report.status, status, key=_ORDER.index)
    if len(report.notes) < 4:
        report.notes.append(f"{status}: {text}")


def run_sample(op: Any, sample: Any, mesh: Mesh, most: int, report: Report, written: str = "plain") -> None:
    given: Any = (sample.input, tuple(sample.args), dict(sample.kwargs))
    function = function_of(op)
    if written == "named":
        function = by_name(op.op, given)
    elif written == "numpy":
        numbers = optree.tree_map(in_numpy, given, none_is_leaf=True)
        function, given = function if is_taken(function, numbers) else None, numbers
    elif written == "pending":
        given = optree.tree_map(in_steps, given, none_is_leaf=True)
    if function is None:
        return
    leaves, treedef = optree.tree_flatten(given, none_is_leaf=True)
    places = [i for i, x in enumerate(leaves) if is_tensor(x)]
    tensors = [leaves[i] for i in places]
    if not tensors:
        return

    def call(values: Sequence[Any]) -> tuple[list[Any], Any]:
        filled = list(leaves)
        for i, x in zip(places, values, strict=True):
            filled[i] = x
        first, args, kwargs = treedef.unflatten(filled)
        _seed(1)
        out = function(first, *args, **kwargs)
        return optree.tree_flatten(out, is_leaf=lambda x: isinstance(x, Sharded))[0], type(out)

    plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    try:
        expected, kind = call(_of_leaves(plain))
        grads = gradients(expected, plain)
    except Exception:
        return  # the sample itself fails
    if name_of(op).removesuffix(".with_train") in DRAWS or sample.kwargs.get("dropout_p"):
        expected, grads = on_one_rank(call, tensors, expected)
    for specs in placements(tensors, mesh, most):
        report.runs += 1
        try:
            compared = name_of(op) not in UNDEFINED
            compare(call, tensors, specs, mesh, expected, grads, kind, report, compared, pending=written == "pending")
        except FspmdError as error:
            report.refused += 1
            _note(report, "refused", str(error)[:240])
        except Wrong as error:
            _note(report, "wrong", f"{described(tensors, specs, sample)}: {error}"[:600])
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            _note(
                report, "crash", f"{described(tensors, specs, sample)}: {error!r} at {where.name}:{where.lineno}"[:500]
            )


def by_name(function: Any, given: Any) -> Callable[..., Any] | None:
    """The function with every argument named, the last first; None where torch takes them by no names of its own."""

    def named(names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return function(**dict(reversed([*zip(names, args, strict=False), *kwargs.items()])))

    for names in _signatures(function):
        written = functools.partial(named, names)
        if len(names) > len(given[1]) and is_taken(written, given):
            return written
    return None


def _signatures(function: Any) -> Iterator[list[str]]:
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    for overload in packet.overloads() if hasattr(packet, "overloads") else ():
        found = [argument.name for argument in getattr(packet, overload)._schema.arguments]
        yield from (["input" if name == "self" else name for name in found], found)
    with contextlib.suppress(TypeError, ValueError):
        yield list(inspect.signature(function).parameters)


def is_taken(function: Callable[..., Any], given: Any) -> bool:
    """Whether torch takes a call that is written so."""
    first, args, kwargs = optree.tree_map(lambda x: x.detach().clone() if is_tensor(x) else x, given, none_is_leaf=True)
    try:
        function(first, *args, **kwargs)
    except Exception:
        return False
    return True


def in_numpy(x: Any) -> Any:
    """A number of NumPy's for one of Python's."""
    return np.int64(x) if type(x) is int else np.float64(x) if type(x) is float else x


def in_steps(x: Any) -> Any:
    """A value of which sums of few terms are exact: so it can be a pending sum."""
    if not is_tensor(x) or x.dtype not in _PENDING:
        return x
    parts = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    exact = parts.mul(2**18).round().div(2**18) if x.dtype is not torch.int64 else parts
    exact = torch.where(parts.abs() < 2**20, exact, parts).to(parts.dtype)
    return (torch.view_as_complex(exact) if x.is_complex() else exact).requires_grad_(x.requires_grad)


def terms_of(x: Tensor, count: int) -> Tensor:
    """So many terms, which add up to it."""
    shape = count, *x.shape
    on: Any = {"device": x.device, "dtype": x.dtype}
    terms = torch.randint(-3, 4, shape, **on) if x.dtype is torch.int64 else in_steps(torch.randn(shape, **on))
    terms[-1] = x - terms[:-1].sum(0)
    return terms


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: numbers of their own: judged by one rank's, once their shapes and dtypes are torch's
DRAWS = names(
    "cauchy exponential geometric log_normal normal.in_place normal normal.number_mean uniform bernoulli multinomial "
    "randn_like rand_like randint_like nn.functional.rrelu nn.functional.dropout nn.functional.dropout2d "
    "nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout "
    "nn.functional.multi_head_attention_forward"
)
#: ops that are refused, and why
REFUSED = {
    "sparse.sampled_addmm": "sparse tensors have no blocks",
    "sparse.mm.reduce": "sparse tensors have no blocks",
    "to_sparse": "sparse tensors have no blocks",
    "resize_": "a write that changes the shape of its operand",
    "resize_as_": "a write that changes the shape of its operand",
}
#: what memory held before
UNDEFINED = names("empty_like new_empty new_empty_strided")


def on_one_rank(
    call: Callable[[Sequence[Any]], tuple[list[Any], Any]], tensors: Sequence[Tensor], like: Sequence[Any]
) -> tuple[list[Any], list[Tensor | None]]:
    alone = make_mesh((1,), ("x",), transport="simulation", device=tensors[0].device.type)
    given = [device_put(x.detach().clone(), P(), mesh=alone).requires_grad_(x.requires_grad) for x in tensors]
    found, _ = call([x * 1 if x.requires_grad else x for x in given])
    wholes = [device_get(x) for x in found]
    for whole, want in zip(wholes, like, strict=True):
        assert (whole.shape, whole.dtype) == (want.shape, want.dtype)
    followed = [x for x in wholes if x.requires_grad]
    if followed:
        sum((x * weight_of(x)).sum() for x in followed).backward()
    return wholes, [None if x.grad is None else device_get(x.grad) for x in given]


_METHODS = {
    **{name: f"{name}_" for name in ("cauchy", "exponential", "geometric", "log_normal", "uniform")},
    **{"normal.in_place": "normal_", "item": "item"},
}


def function_of(op: Any) -> Callable[..., Any]:
    """Methods of `torch.Tensor` looked up on the first argument, as users write them."""
    name = _METHODS.get(name_of(op))
    if type(op.op).__name__ in ("method_descriptor", "wrapper_descriptor"):
        name = op.op.__name__
    if name is not None:
        return lambda first, *args, **kwargs: getattr(first, name)(*args, **kwargs)
    function: Callable[..., Any] = op.op
    return function


def _of_leaves(leaves: Sequence[Any]) -> list[Any]:
    """What an op that writes may write into: no leaf."""
    return [x * 1 if x.requires_grad else x.clone() for x in leaves]


def weight_of(x: Tensor) -> Tensor:
    found = torch.arange(1.0, x.numel() + 1, dtype=torch.float64).mul(0.7).cos().add(0.1).reshape(x.shape)
    return found.to(x.device, x.dtype)


def gradients(outs: Sequence[Any], leaves: Sequence[Any]) -> list[Tensor | None]:
    followed = [x for x in outs if isinstance(x, Tensor) and x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if not followed or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(followed, wanted, [weight_of(x) for x in followed], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]


def compare(
    call: Callable[[Sequence[Any]], tuple[list[Any], Any]],
    tensors: Sequence[Tensor],
    specs: Sequence[P],
    mesh: Mesh,
    expected: Sequence[Any],
    grads: Sequence[Tensor | None],
    kind: Any,
    report: Report,
    compared: bool,
    *,
    pending: bool = False,
) -> None:
    pends = [pending and x.dtype in _PENDING for x in tensors]
    axis = mesh.axis_names[0]
    given = []
    for x, spec, waits in zip(tensors, specs, pends, strict=True):
        value, lies = x.detach().clone(), spec
        if waits:
            value = terms_of(value, mesh.shape[axis])
            entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
            lies = P(axis, *(tuple(a for a in entry if a not in (None, axis)) for entry in entries))
        put = device_put(value, lies, mesh=mesh)
        given.append(put.requires_grad_() if x.requires_grad else put)
    operands = [x.sum(0) if waits else x * 1 if x.requires_grad else x for x, waits in zip(given, pends, strict=True)]
    found, found_kind = call(operands)
    if len(found) != len(expected) or (kind in (tuple, list) and found_kind is not kind):
        raise Wrong(f"{len(found)} results ({found_kind}), expected {len(expected)} ({kind})")
    total: Any = None
    for out, want in zip(found, expected, strict=True):
        if not isinstance(want, Tensor):
            if str(out) != str(want):
                raise Wrong(f"{out!r}, expected {want!r}")
            continue
        whole = device_get(out) if isinstance(out, Sharded) else out
        if not isinstance(whole, Tensor) or (whole.shape, whole.dtype) != (want.shape, want.dtype):
            raise Wrong(f"{type(whole).__name__} {whole}, expected {want.dtype} {tuple(want.shape)}")
        if isinstance(out, Sharded) and (out.shape, out.dtype) != (tuple(want.shape), want.dtype):
            raise Wrong(f"{out!r} is told, but it is {want.dtype} {tuple(want.shape)}")
        if compared:
            _same(whole, want, "value")
        if want.requires_grad and whole.requires_grad:
            whole = whole.to(torch.complex64) if whole.dtype is torch.complex32 else whole
            part = (whole * weight_of(want).to(whole.dtype).conj()).sum().real
            total = part if total is None else total + part
    if total is not None:
        total.backward()
        report.gradients += 1
    for leaf, want, waits in zip(given, grads, pends, strict=True):
        if want is not None:
            if leaf.grad is None:
                if want.abs().max() > 0 if want.numel() else False:
                    raise Wrong("no gradient")
                continue
            gradient = device_get(leaf.grad)
            _same(gradient, want.expand_as(gradient) if waits else want, "gradient")


def _same(found: Any, want: Any, what: str) -> None:
    if found.layout is not torch.strided:
        found, want = found.to_dense(), want.to_dense()
    precise = want.dtype in (torch.float64, torch.complex128)
    try:
        tolerance = {"rtol": 1e-6, "atol": 1e-8} if precise else {}
        torch.testing.assert_close(found.detach(), want.detach(), equal_nan=True, **tolerance)
    except AssertionError as error:
        raise Wrong(f"{what}: {str(error)[:300]}") from None


def described(tensors: Sequence[Tensor], specs: Sequence[P], sample: Any) -> str:
    given = ", ".join(f"{tuple(x.shape)} {spec}" for x, spec in zip(tensors, specs, strict=True))
    rest = [a for a in sample.args if not isinstance(a, Tensor)], sample.kwargs
    return f"{given} {rest}"[:300]


def run_named(job: tuple[str, dict[str, Any]]) -> Report:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    name, options = job
    if options.pop("bodies_free"):
        for row_name, row in ROWS.items():
            ROWS[row_name] = replace(row, body=row.body and Bodied(row.body.body, lambda *_: 0.0))
    return run_op(ops()[name], **options)


def run_all(names: Sequence[str], settings: dict[str, Any], jobs: int) -> Iterator[Report]:
    """The report of each op; one that ends its process is told from those that ran beside it, and crashed."""
    left = list(names)
    while left:
        try:
            with ProcessPoolExecutor(jobs) as pool:
                for report in pool.map(run_named, [(name, settings) for name in left]):
                    left.pop(0)
                    yield report
        except BrokenProcessPool:
            try:
                with ProcessPoolExecutor(1) as alone:
                    yield alone.submit(run_named, (left[0], settings)).result()
            except BrokenProcessPool:
                yield Report(left[0], "crash", notes=["its process ended"])
            left.pop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ops (all by default); a name ending in * is a prefix")
    parser.add_argument("--sizes", choices=SIZES, default="uneven")
    parser.add_argument("--mesh", choices=MESHES, default="line")
    parser.add_argument("--written", choices=WRITTEN, default="plain", help="how calls are written")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--placements", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--bodies", action="store_true", help="sharded bodies cost nothing, so that small blocks use them"
    )
    parser.add_argument("--json", help="where to write the reports")
    options = parser.parse_args()
    chosen = [
        name
        for name in ops()
        if not options.names or any(name == n or (n.endswith("*") and name.startswith(n[:-1])) for n in options.names)
    ]
    settings = {
        "sizes": options.sizes,
        "mesh": options.mesh,
        "written": options.written,
        "device": options.device,
        "most_samples": options.samples,
        "most_placements": options.placements,
        "bodies_free": options.bodies,
    }
    reports = []
    for report in run_all(chosen, settings, options.jobs):
        reports.append(report)
        if report.status != "clean" or options.names:
            print(f"{report.status:8} {report.name} ({report.runs} runs, {report.refused} refused)", flush=True)
            for note in report.notes[: 4 if options.names else 1]:
                print("    ", note.replace("\n", " "), flush=True)
    counts = {status: sum(r.status == status for r in reports) for status in _ORDER}
    print(f"{len(reports)} ops, {sum(r.runs for r in reports)} runs: {counts}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) for r in reports], file, indent=1)
    sys.exit(counts["wrong"] + counts["crash"] > 0)


if __name__ == "__main__":
    main()
