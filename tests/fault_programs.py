"""Programs for `test_faults.py`: four processes do the same, but for one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fspmd
from fspmd import (
    FspmdError,
    Mesh,
    P,
    Sharded,
    all_gather,
    all_to_all,
    axis_index,
    deadline,
    debug,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    pbroadcast,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    ragged_all_to_all,
    reshard,
    shard_map,
)
from fspmd.inspection import long_waits, replays
from fspmd.inspection.comparison import Comparison


def fresh(port: int, shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("x",)) -> tuple[Mesh, int]:
    """A mesh on a new default group, and this process's rank. The last program may have broken its groups, or seeds."""
    torch.manual_seed(0)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    mesh = make_mesh(shape, names, device="cpu")
    return mesh, int(os.environ["RANK"])


def outcome(act: Callable[[], object], context: AbstractContextManager[Any]) -> tuple[str, float]:
    """The error of ``act`` within a context, and the seconds until then."""
    begin = time.monotonic()
    try:
        with context:
            act()
    except (FspmdError, KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", time.monotonic() - begin


def _x(mesh: Mesh) -> Sharded:
    return device_put(torch.linspace(0, 1, 8, dtype=torch.float64), P(mesh.axis_names[0]), mesh=mesh)


def _sum(mesh: Mesh, x: Any, axis: str = "x") -> Any:
    return shard_map(lambda b: psum(b, axis), mesh=mesh, in_specs=P("x"), out_specs=P("x" if axis != "x" else None))(x)


# --- each of these returns the error and the seconds -----------------------------------------------------------------


def another_kind(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(400):
            reduce = pmax if i == 5 and rank == 1 else psum
            shard_map(lambda b: reduce(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)  # noqa: B023 - called now

    return outcome(act, debug(every=4))


def one_more(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(4):
            if i == 2 and rank == 1:
                shard_map(lambda b: psum(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)  # alone
            _sum(mesh, x)

    return outcome(act, debug())


def another_shape(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(20):
            n = [3 if i == 7 and rank == 3 else 2]  # in a list it is no value that ranks compare
            shard_map(lambda b: psum(b.repeat(n), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)  # noqa: B023

    return outcome(act, debug(every=1))


def _one_of(kind: str, b: Tensor, wait: bool = True) -> Any:
    """A collective of a block of rows."""
    if kind == "all_gather":
        return all_gather(b, "x", tiled=True, wait=wait)
    if kind == "psum_scatter":
        return psum_scatter(b, "x", tiled=True, wait=wait)
    if kind == "all_to_all":
        return all_to_all(b, "x", 0, 0, tiled=True, wait=wait)
    if kind == "ppermute":
        return ppermute(b, "x", [(i, (i + 1) % 4) for i in range(4)], wait=wait)
    return psum(b, "x", wait=wait)


def another_size(port: int, kind: str, wrong: int) -> tuple[str, float]:
    """One rank comes with more, or fewer, rows than the others expect. Gloo would end a process."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def body(b: Tensor, rows: int) -> Tensor:
        return _one_of(kind, b[:1].repeat(rows, 1)).sum()

    def act() -> None:
        for i in range(14):
            rows = [wrong if i == 11 and rank == 1 else 8]  # in a list it is no value that ranks compare
            step = shard_map(lambda b: body(b, *rows), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)  # noqa: B023
            step(x)

    return outcome(act, debug())


def another_order(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    x = _x(mesh)
    _sum(mesh, x), _sum(mesh, x, "y")

    def act() -> None:
        for axis in ("y", "x") if rank in (0, 3) else ("x", "y"):  # each waits for the next one of a circle
            _sum(mesh, x, axis)

    return outcome(act, debug(seconds=4.5))


def another_dtype(port: int) -> tuple[str, float]:
    """The bytes are as many, so a wrong number comes out until ranks compare."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(20):
            dtype = torch.int64 if i == 7 and rank == 3 else torch.float64
            shard_map(lambda b: psum(b.to(dtype), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)  # noqa: B023

    return outcome(act, debug(every=1))


def another_axis(port: int) -> tuple[str, float]:
    """One rank sums over another axis, so others wait in groups in which no hash differs."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    x = device_put(torch.ones(8), P(("x", "y")), mesh=mesh)

    def act() -> None:
        for i in range(20):
            right = shard_map(lambda b: psum(psum(b, "x"), "y"), mesh=mesh, in_specs=P(("x", "y")), out_specs=P())
            wrong = shard_map(
                lambda b: psum(psum(b, "y"), "y"),  # wrong axis
                mesh=mesh,
                in_specs=P(("x", "y")),
                out_specs=P(),
                check_vma=False,
            )
            (wrong if i == 5 and rank == 2 else right)(x)

    return outcome(act, debug(seconds=20))


def axes_in_another_order(port: int) -> tuple[str, float]:
    """Each group sees as many sums, and none waits for long. Rank 1 is in no group with rank 2."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    x = device_put(torch.ones(8), P(("x", "y")), mesh=mesh)

    def act() -> None:
        for i in range(10):
            one = shard_map(lambda b: psum(psum(b, "x"), "y"), mesh=mesh, in_specs=P(("x", "y")), out_specs=P())
            other = shard_map(lambda b: psum(psum(b, "y"), "x"), mesh=mesh, in_specs=P(("x", "y")), out_specs=P())
            (other if i == 5 and rank == 2 else one)(x)

    return outcome(act, debug(seconds=20))


def axes_in_another_order_at_one_line(port: int, how: str) -> tuple[str, float]:
    """One rank takes the axes in another order, as from a set of names. Each group sees as many sums, of one size."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    x, axes = device_put(torch.ones(8), P(("x", "y")), mesh=mesh), ["y", "x"] if rank == 2 else ["x", "y"]

    def body(b: Tensor) -> Tensor:
        for axis in axes:
            b = psum(2 * b, axis) + 1
        return b

    step = shard_map(body, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(), check_vma=how != "unchecked")
    if how == "recorded":
        return outcome(lambda: jit(step)(x), nullcontext())
    return outcome(lambda: step(x), fspmd.lockstep(5) if how == "in lockstep" else debug())


def another_shape_in_a_record(port: int) -> tuple[str, float]:
    """One rank records sums of other sizes at the same line."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def step(n: list[int]) -> Callable[..., Any]:
        return jit(shard_map(lambda b: psum(b.repeat(n), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))

    right, wrong = step([2]), step([1])
    right(x), wrong(x)  # the ranks agree on both

    def act() -> None:
        for i in range(20):
            (wrong if i == 5 and rank == 0 else right)(x)

    return outcome(act, debug(every=1))


def another_option(port: int, what: str, is_jitted: bool, is_locked: bool) -> tuple[str, float]:
    """One rank passes another option at the same line. The shapes agree, and the numbers would be wrong."""
    mesh, rank = fresh(port)
    wrong = rank == 2
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "op": lambda b: (pmax if wrong else psum)(b, "x"),
        "dim": lambda b: all_gather(b, "x", axis=int(wrong), tiled=True).view(-1, 4),
        "to dim": lambda b: all_to_all(b, "x", int(wrong), int(not wrong), tiled=True).view(4, 4),
        "root": lambda b: pbroadcast(b, "x", source=3 * wrong),
    }
    step = shard_map(calls[what], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    step = jit(step) if is_jitted else step
    x = device_put(torch.arange(64.0).view(16, 4), P("x"), mesh=mesh)
    return outcome(lambda: [step(x) for _ in range(4)], fspmd.lockstep(20) if is_locked else debug(every=2))


def meetings(port: int) -> tuple[str, float]:
    """How often this rank waits for the others in each step, with new data and another factor."""
    mesh, _ = fresh(port)
    found: list[int] = []
    step = shard_map(lambda b, t: psum(b * t.sum(), "x"), mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    meeting = mock.patch.object(Comparison, "_meet_first", autospec=True, side_effect=Comparison._meet_first)
    with meeting as meet, debug():
        for i in range(8):
            before = meet.call_count
            step(_x(mesh), torch.full((4,), float(i))) * (0.5 * i + 1)
            found.append(meet.call_count - before)
    return str(found), 0.0


def no_memory(port: int) -> tuple[str, float]:
    mesh, _ = fresh(port)

    def body(b: Tensor) -> Tensor:
        if dist.get_rank() == 2:
            torch.empty(1 << 60)
        return psum(b, "x")

    def act() -> None:
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(_x(mesh))

    return outcome(act, debug(seconds=30))


def early_end(port: int) -> tuple[str, float]:
    """The data of one rank ends early."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for _ in range(5 if rank == 2 else 6):
            _sum(mesh, x)

    return outcome(act, debug(seconds=30))


def lost(port: int) -> None:
    """One rank ends without a word, under `debug`."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(20):
            if i == 5 and rank == 2:
                time.sleep(0.5)  # it has told where it stands
                os.kill(os.getpid(), signal.SIGKILL)
            _sum(mesh, x)

    raise AssertionError(outcome(act, debug(seconds=30)))


def in_a_record(port: int) -> tuple[str, float]:
    """One rank replays another record."""
    mesh, rank = fresh(port)
    x = _x(mesh)
    step, other = jit(lambda x: (x * x).sum()), jit(lambda x: torch.cat([x, x]).max())
    step(x), other(x)  # the ranks agree on both

    def act() -> None:
        for i in range(30):
            (other if i == 9 and rank == 2 else step)(x)
            _sum(mesh, x)

    return outcome(act, debug(every=2))


def not_recorded(port: int) -> tuple[str, float]:
    """One rank runs the function of a record as it is. It runs each collective before it tells of the next."""
    mesh, rank = fresh(port)
    x = _x(mesh)
    step = shard_map(lambda b: pmax(psum(b, "x"), "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    return outcome(lambda: (step if rank == 1 else jit(step, passes=()))(x), debug())


def another_record(port: int) -> tuple[str, float]:
    """One rank records another program. Nothing watches."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def f(x: Sharded) -> Any:
        y = x.sum()
        return (x * (x.max() if rank == 1 else x.sum()) + y).square()  # parts

    return outcome(lambda: jit(f)(x), nullcontext())


def swapped(port: int) -> tuple[str, float]:
    """One rank swaps two collectives of one kind. Only their lines differ."""
    mesh, rank = fresh(port)

    def f(b: Tensor) -> Tensor:
        if rank == 3:
            y = psum(2 * b, "x")  # swapped
            return psum(b, "x") * y
        return psum(b, "x") * psum(b * 2, "x")

    step = jit(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()), passes=())
    return outcome(lambda: step(_x(mesh)), nullcontext())


def _two_records(mesh: Mesh, rows: int = 1) -> tuple[Callable[..., Any], Callable[..., Any], Sharded]:
    """Two recorded functions, on which the ranks have agreed, and their argument."""

    def first(x: Sharded) -> Any:
        return shard_map(lambda b: psum(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

    def second(x: Sharded) -> Any:
        return shard_map(lambda b: psum(100 * b.repeat(rows), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

    records, x = (jit(first), jit(second)), _x(mesh)
    for record in records:
        record(x)
    return *records, x


def known_records_in_another_order(port: int, where: str) -> tuple[str, float]:
    """Rank 1 swaps two replays. Sizes agree, so numbers are wrong, until ranks talk."""
    mesh, rank = fresh(port)
    first, second, x = _two_records(mesh)
    for record in (second, first) if rank == 1 else (first, second):
        record(x)

    def act() -> None:
        match where:
            case "check_replicas":
                fspmd.check_replicas({"x": x})
            case "barrier":
                fspmd.barrier(mesh=mesh)
            case "save":
                fspmd.save(f"/tmp/never-written-{port}", {"x": x}, mesh=mesh)
            case "a new record":
                jit(lambda x: x.max())(x)
            case "other axes":
                fspmd.barrier(mesh=make_mesh((2, 2), ("a", "b"), device="cpu"))

    return outcome(act, nullcontext())


def backwards_in_another_order(port: int) -> tuple[str, float]:
    """Rank 1 swaps two backwards. Their sums have one shape."""
    mesh, rank = fresh(port)
    x, w = _x(mesh), device_put(torch.ones(8, dtype=torch.float64), P(), mesh=mesh).requires_grad_()

    def first(w: Sharded) -> Any:
        return (x * w).sum()

    def second(w: Sharded) -> Any:
        return (100 * x * w).sum()

    def act() -> None:
        losses = [jit(f)(w) for f in (first, second)]
        for loss in reversed(losses) if rank == 1 else losses:
            loss.backward()  # in turn
        fspmd.barrier(mesh=mesh)

    return outcome(act, nullcontext())


def tried_again(port: int) -> tuple[str, float]:
    """A replay fails on rank 1 before it has communicated, and is tried again."""
    mesh, rank = fresh(port)
    body = shard_map(lambda x: psum(torch.linalg.cholesky(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    recorded, blocks = jit(body), [torch.eye(2, dtype=torch.float64)[None]] * 2
    good = fspmd.from_local(blocks[0], P("x"), mesh=mesh)
    bad = fspmd.from_local(-blocks[0] if rank == 1 else blocks[1], P("x"), mesh=mesh)

    def act() -> None:
        recorded(good)
        if rank == 1:
            try:
                recorded(bad)
            except RuntimeError:
                recorded(good)
        else:
            recorded(bad)
        fspmd.barrier(mesh=mesh)

    return outcome(act, nullcontext())


def many_replays(port: int) -> tuple[str, float]:
    """Ranks do nothing but replay. After each block of replays they compare."""
    mesh, rank = fresh(port)
    first, second, x = _two_records(mesh)

    def act() -> None:
        for i in range(64):
            (second if i % 8 == 0 or (i == 9 and rank == 3) else first)(x)
            replays.sort()

    before, replays._BLOCK = replays._BLOCK, 8
    try:
        return outcome(act, nullcontext())
    finally:
        replays._BLOCK = before


def known_records_of_other_shapes(port: int) -> tuple[str, float]:
    """Rank 1 swaps two replays. Sizes differ, so all ranks wait."""
    mesh, rank = fresh(port)
    first, second, x = _two_records(mesh, rows=2)

    def act() -> None:
        for record in (second, first) if rank == 1 else (first, second):
            record(x)

    return outcome(act, nullcontext())


def other_replays_of_other_groups(port: int) -> tuple[str, float]:
    """Nothing is wrong: each row of ranks replays in its own order, and one rank has its own needs."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    row, x = mesh["y"], _x(mesh).requires_grad_()
    by_row = device_put(torch.ones(4, dtype=torch.float64), P("y"), mesh=row)
    steps = [jit(lambda x: x.max()), jit(lambda x: (x * x).max())]
    grow = jit(lambda x: x * 2)  # its backward alone communicates

    def act() -> None:
        for i in range(6):
            for step in steps if rank < 2 else reversed(steps):
                step(by_row)
            if i == rank:
                grow(device_put(torch.ones(8), P(), mesh=mesh).requires_grad_())
            fspmd.check_replicas(steps[0](x), mesh=mesh)
            if i == 3 and rank == 1:
                with fspmd.explicit("warn"):
                    steps[0](x)
            elif i == 3:
                steps[0](x)
            fspmd.barrier(mesh=mesh)
        fresh(port + 1, (2, 2), ("x", "y"))
        steps[1](x)
        fspmd.barrier(mesh=mesh)

    return outcome(act, nullcontext())


def a_larger_message(port: int) -> None:
    """Rank 1 sends more than the others expect. Gloo ends a process."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(3):
            n = [100_000 if i == 1 and rank == 1 else 2]
            step = shard_map(
                lambda b: all_gather(b[:1].repeat(*n), "x").sum(),  # noqa: B023 - called now
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P(),
                check_vma=False,
            )
            step(x)

    raise AssertionError(outcome(act, nullcontext()))


def a_hit_and_a_miss(port: int) -> tuple[str, float]:
    """One rank records a new program while the others replay one that they have."""
    mesh, rank = fresh(port)
    x = _x(mesh)
    step = jit(lambda x: x.max())  # recorded
    other = jit(lambda x: torch.cat([x, x]).max())

    def act() -> None:
        for i in range(4):
            (other if i == 2 and rank == 2 else step)(x)  # replayed

    return outcome(act, nullcontext())


def a_record_alone(port: int) -> tuple[str, float]:
    """One rank records a program anew that all have agreed on. A mesh of one rank agrees with nobody."""
    mesh, rank = fresh(port)
    x = _x(mesh)
    step = jit(lambda x: x.max())

    def act() -> None:
        for _ in range(2):
            assert float(step(x)) == 1
            if rank == 1:
                step.clear_cache()
        alone = make_mesh((1,), ("x",), device="cpu", ranks=[rank])
        assert float(jit(lambda x: x.max())(_x(alone))) == 1

    return outcome(act, nullcontext())


def raised_alone(port: int) -> tuple[str, float]:
    """A body raises on one rank, whose process goes on. There is no deadline."""
    mesh, rank = fresh(port)

    def body(b: Tensor) -> Tensor:
        if rank == 2:
            raise KeyError("mine")
        return psum(b, "x")

    def act() -> None:
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(_x(mesh))

    return outcome(act, nullcontext())


def raised_before_a_message(port: int) -> tuple[str, float]:
    """One rank raises in its body, and another waits for its message. There is no deadline."""
    mesh, _ = fresh(port)
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def body(b: Tensor) -> Tensor:
        for i in range(3):
            if i == 1 and dist.get_rank() == 2:
                raise KeyError("mine")
            b = ppermute(b, "x", ring)
        return b

    def act() -> None:
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(_x(mesh))

    return outcome(act, nullcontext())


def raised_before_a_group(port: int) -> tuple[str, float]:
    """One rank raises in its body, before the first collective of its group. There is no deadline."""
    mesh, _ = fresh(port, (2, 2), ("x", "y"))

    def body(b: Tensor) -> Tensor:
        if dist.get_rank() == 2:
            raise KeyError("mine")
        return psum(b, "y")

    def act() -> None:
        shard_map(body, mesh=mesh, in_specs=P(None, "y"), out_specs=P())(torch.ones(2, 2))

    return outcome(act, nullcontext())


def another_tensor(port: int) -> tuple[str, float]:
    """One rank passes another plain tensor."""
    mesh, rank = fresh(port)

    def act() -> None:
        for i in range(100):
            t = torch.full((8,), 1.5 if i == 4 and rank == 2 else 1.0)
            shard_map(lambda given: psum(given, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(t)

    return outcome(act, debug(every=5))


def another_global_shape(port: int) -> tuple[str, float]:
    """One rank passes a `Sharded` of another global shape. The collective has the same shape on all ranks."""
    mesh, rank = fresh(port)
    x = device_put(torch.ones(8 if rank != 1 else 16), P("x"), mesh=mesh)
    total = shard_map(lambda given: psum(given.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    return outcome(lambda: total(x), debug())


def another_spec_of_a_value(port: int) -> tuple[str, float]:
    """One rank lays out a value otherwise, and nothing moves."""
    mesh, rank = fresh(port)
    specs = {"w": P("x"), "b": P("x") if rank == 3 else P()}
    tree = {"w": torch.ones(8), "b": torch.ones(4)}
    return outcome(lambda: device_put(tree, specs, mesh=mesh), debug())


def another_spec(port: int) -> tuple[str, float]:
    """After some steps one rank cuts an argument of an unchecked body that the others have whole."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    trees = {"w": _x(mesh), "b": device_put(torch.ones(8), P(), mesh=mesh)}

    def act() -> None:
        for i in range(40):
            in_specs = {"w": P("x"), "b": P("y") if i == 4 and rank == 2 else P()}
            step = shard_map(
                lambda tree: psum(tree["b"].sum() + tree["w"].sum(), "x"),
                mesh=mesh,
                in_specs=(in_specs,),
                out_specs=P(),
                check_vma=False,
            )
            step(trees)

    return outcome(act, debug(every=5))


def another_global_shape_in_a_record(port: int) -> tuple[str, float]:
    """As `another_global_shape`, of a jitted function. Nothing is sent."""
    mesh, rank = fresh(port)
    x = device_put(torch.ones(8 if rank != 1 else 16), P("x"), mesh=mesh)
    return outcome(lambda: jit(lambda given: given * 2)(x), debug())


def another_operand(port: int, what: str) -> tuple[str, float]:
    """One rank gives another value to a torch function on `Sharded` values, once. Sizes agree."""
    mesh, rank = fresh(port)
    x = _x(mesh).requires_grad_()
    whole, cut = (device_put(torch.ones(8), spec, mesh=mesh) for spec in (P(), P("x")))

    def act() -> None:
        for i in range(24):
            wrong = i == 7 and rank == 2
            match what:
                case "a number":
                    y = x * (0.25 if wrong else 0.5)
                case "a zero":
                    y = x * (-0.0 if wrong else 0.0)
                case "a kind of number":
                    y = x * (1.0 if wrong else 1)
                case "a number by name":
                    y = torch.add(x, x, alpha=2 + wrong)
                case "a tensor":
                    y = torch.full((8,), 1.5 + wrong) - x
                case "a tensor in a list":
                    y = torch.cat([x, torch.full((8,), 1.5 + wrong, dtype=torch.float64)])
                case "a dim":
                    y = x.view(2, 4).sum(int(wrong), keepdim=True)
                case "a layout":
                    y = ((whole if wrong else cut) + 1) * x.detach()
            if what != "a layout":
                y.sum().backward()

    return outcome(act, debug(every=4))


def alone(port: int) -> tuple[str, float]:
    """One rank makes calls that do not communicate: it prints, and warms up. Seeds and options are alike."""
    mesh, rank = fresh(port)
    x, w = _x(mesh).float(), device_put(torch.ones(8), P(), mesh=mesh).requires_grad_()
    optimizer = torch.optim.AdamW([w], lr=0.1, foreach=True)

    def scaled(x: Sharded, by: float) -> Sharded:
        return x * by

    def act() -> None:
        for i in range(10):
            loss = (torch.nn.functional.dropout(scaled(w, i) - 0.1 * x, 0.25) + torch.ones(8)).square().sum()
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            known = reshard(loss.detach(), P())
            if rank == 1:
                float(100 * known), str(scaled(w, 7.5 + i).local), w.detach().clamp(max=i), jit(lambda w: 2 * w)(w)
            total = [scaled(w.detach(), 3.0) for _ in range(3 + rank)]
            assert total[0].shape == (8,)

    return outcome(act, debug(every=1))


def placed_in_any_order(port: int) -> tuple[str, float]:
    """Ranks lay out values in other orders: where nothing moves, and in threads."""
    mesh, rank = fresh(port)
    sizes = [8, 12, 16, 20]
    values = {n: device_put(torch.ones(n), P("x"), mesh=mesh) for n in sizes}

    def act() -> None:
        for n in sizes if rank != 1 else reversed(sizes):
            values[n] = device_put(values[n], P("x"), mesh=mesh)
        with ThreadPoolExecutor(3) as pool:
            for n in sizes if rank != 2 else reversed(sizes):
                pool.submit(device_put, values[n], P("x"), mesh=mesh).result()

    return outcome(act, debug(every=1))


def one_comes_late(port: int) -> tuple[str, float]:
    """Two ranks differ while another, which lives, has come to no collective yet."""
    mesh, rank = fresh(port)

    def act() -> None:
        if rank == 2:
            time.sleep(4)
        else:
            reduce = pmax if rank == 1 else psum
            shard_map(lambda b: reduce(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(_x(mesh))

    return outcome(act, debug())


def another_leaf(port: int) -> tuple[str, float]:
    """One rank lays out another plain tensor. Nothing is sent."""
    mesh, rank = fresh(port)

    def act() -> None:
        device_put({"w": torch.ones(3), "b": torch.ones(8) * (1 + (rank == 3))}, P(), mesh=mesh)

    return outcome(act, debug())


def another_seed(port: int, what: str = "randn") -> tuple[str, float]:
    mesh, rank = fresh(port)
    on: Any = {"spec": P("x"), "mesh": mesh}
    rates = _x(mesh)
    noisy = jit(lambda x: torch.nn.functional.dropout(x).sum())
    draws: dict[str, Callable[[], object]] = {
        "randn": lambda: fspmd.randn(8, **on),
        "randperm": lambda: fspmd.randperm(8, **on),
        "poisson": lambda: torch.poisson(rates),
        "a record": lambda: noisy(rates),
    }

    def act() -> None:
        torch.manual_seed(rank // 3)
        draws[what]()

    return outcome(act, debug())


def another_seed_of_a_body(port: int, what: str) -> tuple[str, float]:
    """A body draws what is equal on all ranks, where they have one seed."""
    mesh, rank = fresh(port)
    draws: dict[str, Callable[[Tensor], Tensor]] = {
        "rand": lambda w: torch.rand(2),
        "dropout": torch.nn.functional.dropout,
        "normal_": lambda w: torch.zeros_like(w).normal_(),
    }

    def act() -> None:
        torch.manual_seed(rank // 3)
        specs = P("x"), P()
        shard_map(
            lambda b, w: psum(b * draws[what.removeprefix("torch.")](w), "x"), mesh=mesh, in_specs=specs, out_specs=P()
        )(_x(mesh), torch.ones(2))

    return outcome(act, debug())


def another_order_of_keys(port: int) -> tuple[str, float]:
    """The body of one rank iterates in another order, over blocks of one shape. Without `debug` the sums are mixed."""
    mesh, rank = fresh(port)
    keys = "ab" if rank != 1 else "ba"
    tree = {key: device_put(torch.full((4,), float(ord(key))), P("x"), mesh=mesh) for key in keys}

    def act() -> None:
        step = shard_map(lambda p: {k: psum(b, "x") for k, b in p.items()}, mesh=mesh, in_specs=P("x"), out_specs=P())
        step(tree)

    return outcome(act, debug())


def _keys_of_one_rank(
    port: int,
    keys: str,
    call: Callable[[Mesh], Callable[[Any], Any]],
    *more: str,
    kind: Any = dict,
    again: bool = False,
) -> Any:
    """Calls of trees with the same keys in another order on rank 1, and in ``more`` orders that all ranks share.

    ``again``: whether rank 1 catches the error, and calls once more.
    """
    mesh, rank = fresh(port)

    def act() -> None:
        step = call(mesh)
        for of_all in more:
            step({key: _x(mesh) for key in of_all})
        if rank == 1:
            time.sleep(0.5)
        tree = {"w": [kind({key: _x(mesh) for key in (keys if rank != 1 else keys[::-1])})]}
        if again and rank == 1:
            with suppress(fspmd.LockstepError):
                step(tree)
        step(tree)

    return outcome(act, nullcontext())


def _iterated(tree: Any) -> list[Any]:
    return list((tree["w"][0] if "w" in tree else tree).values())


def _of_bodies(mesh: Mesh) -> Callable[[Any], Any]:
    return shard_map(lambda p: [psum(b, "x") for b in _iterated(p)], mesh=mesh, in_specs=P("x"), out_specs=P())


def _of_records(mesh: Mesh) -> Callable[[Any], Any]:
    return jit(lambda p: [reshard(b, P()) for b in _iterated(p)])


def keys_in_another_order(port: int) -> tuple[str, float]:
    return _keys_of_one_rank(port, "ab", _of_bodies)


def keys_in_another_order_after_others(port: int) -> tuple[str, float]:
    return _keys_of_one_rank(port, "abc", _of_bodies, "ab", "ba", "cab", "ab")


def keys_in_another_order_in_a_record(port: int) -> tuple[str, float]:
    return _keys_of_one_rank(port, "abc", _of_records, "ab", "ba")


def keys_of_an_ordered_dict_in_another_order(port: int) -> tuple[str, float]:
    return _keys_of_one_rank(port, "ab", _of_bodies, kind=OrderedDict)


def keys_of_a_default_dict_in_another_order(port: int) -> tuple[str, float]:
    """The function that makes missing values is written otherwise on each rank."""
    return _keys_of_one_rank(port, "ab", _of_bodies, kind=partial(defaultdict, partial(int, os.environ["RANK"])))


def keys_in_another_order_once_more(port: int) -> tuple[str, float]:
    return _keys_of_one_rank(port, "ab", _of_bodies, again=True)


def keys_in_another_order_in_a_record_once_more(port: int) -> tuple[str, float]:
    return _keys_of_one_rank(port, "ab", _of_records, again=True)


def keys_in_many_orders(port: int) -> tuple[str, float]:
    """The same on all ranks. A rank has made a plan more, and another records again."""
    mesh, rank = fresh(port)

    def act() -> None:
        for i, order in enumerate(("abc", "cba", "bac", "abc", "cab")):
            for _ in range(1 + (rank == i % 4)):
                made = shard_map(lambda p: p["a"] + p["b"], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
                made({key: _x(mesh) for key in order})

    return outcome(act, nullcontext())


def another_static_argument(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    words = {"a", "b", "c", "d"} - ({"d"} if rank == 1 else set())

    def act() -> None:
        shard_map(lambda b, known: b, mesh=mesh, in_specs=(P("x"), None), out_specs=P("x"))(_x(mesh), [words])

    return outcome(act, debug())


def another_closed_over_tensor(port: int) -> tuple[str, float]:
    """A body closes over a module that one rank has initialised by another seed."""
    mesh, rank = fresh(port)
    torch.manual_seed(rank // 3)
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)

    def act() -> None:
        shard_map(lambda b: -model(b), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(_x(mesh))

    return outcome(act, debug())


class Scale:
    """An object of the user, with a tensor of its own and one that no method names."""

    def __init__(self, factor: Tensor, unused: Tensor) -> None:
        self.factors, self.unused = [factor], unused

    def __call__(self, b: Tensor) -> Tensor:
        return psum(self.scaled(b), "x")

    def scaled(self, b: Tensor, times: int = 1) -> Tensor:
        return self.scaled(b, times - 1) if times else b * self.factors[0]


def another_tensor_of_an_object(port: int, how: str) -> tuple[str, float]:
    """A body is an object or its method, or calls one. What the body does not name may differ from rank to rank."""
    mesh, rank = fresh(port)
    scale = Scale(torch.full((2,), float(rank // 3)), torch.full((2,), float(rank)))
    norm = torch.nn.BatchNorm1d(2, dtype=torch.float64).eval()
    if how == "a buffer":
        norm.running_mean += rank // 3  # type: ignore[operator]
    bodies: dict[str, Callable[[Tensor], Tensor]] = {
        "an object": scale,
        "a method": scale.scaled,
        "a call of a method": lambda b: -scale.scaled(b),
        "a part": partial(lambda b, by: scale.scaled(b) * by, by=2),
        "a buffer": lambda b: norm(b[None])[0],
    }
    spec = P() if how == "an object" else P("x")
    return outcome(lambda: shard_map(bodies[how], mesh=mesh, in_specs=P("x"), out_specs=spec)(_x(mesh)), debug())


def another_closed_over_number(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    rate = 0.5 if rank else 0.25

    def act() -> None:
        shard_map(lambda b: b * rate, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(_x(mesh))

    return outcome(act, debug())


def another_write(port: int, into: str) -> tuple[str, float]:
    """An unchecked body writes other numbers on each row of ranks into a value of which they hold copies."""
    mesh, _ = fresh(port, (2, 2), ("x", "y"))
    x = device_put(torch.ones(4), P(), mesh=mesh)
    rows, t = device_put(torch.ones(4), P("y"), mesh=mesh), torch.ones(4)
    into_x, into_rows, into_t = (into == name for name in ("an argument", "a cut argument", "a tensor closed over"))

    def body(x: Tensor, rows: Tensor) -> Tensor:
        rows.add_(axis_index("y"))  # alike along x
        x.add_(axis_index("x") * into_x), rows.add_(axis_index("x") * into_rows), t.add_(axis_index("x") * into_t)
        return x + t

    written = shard_map(body, mesh=mesh, in_specs=(P(), P("y")), out_specs=P(), check_vma=False)
    return outcome(lambda: written(x, rows), debug(every=1))


def another_tensor_of_a_record(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    x = _x(mesh)
    step = jit(lambda x, tree: (x * tree["t"]).sum())
    step(x, {"t": torch.zeros(8)})

    def act() -> None:
        for i in range(8):
            step(x, {"t": torch.full((8,), 1.0 + (i == 3 and rank == 2))})

    return outcome(act, debug(every=2))


def another_static_argument_of_a_record(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    x = _x(mesh)
    step = jit(lambda x, *, power: (x**power).sum(), static_argnames="power")
    return outcome(lambda: step(x, power=(-2 if rank == 3 else -1)), debug())


def another_closed_over_tensor_of_a_record(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    x, weights = _x(mesh), [torch.ones(8), torch.full((8,), float(rank // 3))]
    return outcome(lambda: jit(lambda x: x * weights[0] + weights[1])(x), debug())


def another_order_of_keys_in_a_record(port: int) -> tuple[str, float]:
    mesh, rank = fresh(port)
    tree = {key: _x(mesh) for key in ("ab" if rank != 1 else "ba")}
    return outcome(lambda: jit(lambda tree: {k: x.sum() for k, x in tree.items()})(tree), debug())


def alike(port: int) -> tuple[str, float]:
    """Static arguments and closed-over values that are alike, or have no number that all ranks could know."""
    mesh, _ = fresh(port)
    x, rate, words, mine, talks = _x(mesh), 0.5, frozenset(map(str, range(99))), object(), dist.get_rank() == 0
    model = torch.nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)

    def body(b: Tensor, *known: Any) -> Tensor:
        return model(b) * rate + len(words) + (mine is known[0]) + x.local.sum() * (not talks)

    step = shard_map(body, mesh=mesh, in_specs=(P("x"), *[None] * 5), out_specs=P("x"))
    record = jit(step, static_argnums=(1, 2, 3, 4, 5))
    alone = jit(lambda t: t * 2)

    def act() -> None:
        for _ in range(3):
            step(x, mine, words, lambda: 0, open, talks)
            record(x, mine, words, step, open, talks)
            alone(torch.ones(2) * dist.get_rank())  # of no mesh

    with debug(every=1):
        return outcome(act, nullcontext())


def in_step(port: int) -> tuple[str, float]:
    """Nothing is wrong: uneven blocks, gradients, records, two axes."""
    mesh, _ = fresh(port, (2, 2), ("x", "y"))
    x = device_put(torch.ones(7, 5), P("x"), mesh=mesh).requires_grad_()
    w = device_put(torch.ones(5, 3), P(None, "y"), mesh=mesh).requires_grad_()
    step = jit(lambda x, w: (x @ w).square().sum())

    def act() -> None:
        for _ in range(10):
            ((x @ w).square().sum() + step(x, w)).backward()
            reshard(x.detach(), P()), _sum(mesh, _x(mesh)), _sum(mesh, _x(mesh), "y")
            shard_map(lambda b: all_gather(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(8))

    with deadline(20), debug(every=3), deadline(10):
        inner = outcome(act, nullcontext())
    return inner


def in_stages(port: int) -> tuple[str, float]:
    """The ranks of one half of a mesh run a function with collectives more often than those of the other half."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    mine = device_put(torch.ones(8, 4), P("y"), mesh=mesh["y"])
    all_of_us = device_put(torch.ones(8, 4), P("x"), mesh=mesh)

    def act() -> None:
        for _ in range(3):
            for x in [mine] * (1 + rank // 2) + [all_of_us]:
                x.cumsum(0)

    return outcome(act, debug(every=2))


def in_backward(port: int) -> tuple[str, float]:
    """One rank does not come to a collective of backward."""
    mesh, rank = fresh(port)
    w = device_put(torch.ones(8), P(), mesh=mesh).requires_grad_()

    def act() -> None:
        y = (_x(mesh).float() * w).square()  # forward
        loss = y.sum()
        if rank != 2:
            loss.backward()  # backward
            [float(g) for g in w.grad.local[:1]]
        else:
            time.sleep(2.5)

    return outcome(act, deadline(1))


def late(port: int, kind: str, is_handle: bool, is_backward: bool) -> tuple[str, float]:
    """One rank does not come to a collective, in forward or backward."""
    mesh, rank = fresh(port)
    x = device_put(torch.ones(32, 1), P("x"), mesh=mesh).requires_grad_()

    def body(b: Tensor) -> Tensor:
        c = _one_of(kind, b, not is_handle)
        return (c.wait() if is_handle else c).square()

    step = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    torch.autograd.grad(step(x).sum(), x)  # what is made once

    def act() -> None:
        if rank != 2 or is_backward:
            y = step(x).sum()
            if rank != 2 and is_backward:
                torch.autograd.grad(y, x)
        if rank == 2:
            time.sleep(2.5)

    return outcome(act, deadline(1))


def stopped(port: int) -> tuple[str, float]:
    """One rank is stopped for a while, longer than the deadline. It finds itself alone."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(5):
            if i == 3 and rank == 2:
                seconds = f"import os, signal, time; time.sleep(4); os.kill({os.getpid()}, signal.SIGCONT)"
                waker = subprocess.Popen([sys.executable, "-c", seconds])
                os.kill(os.getpid(), signal.SIGSTOP)
                waker.wait()
            _sum(mesh, x)

    return outcome(act, deadline(2))


def stopped_for_a_while(port: int) -> tuple[str, float]:
    """One rank is stopped before a collective that is new after the last seven, longer than others wait for a sign."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        for i in range(8):
            if i == 4 and rank == 2:
                waker = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                waker.wait()
            shard_map(lambda b: (psum(b, "x"), pmax(b, "x")), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

    return outcome(act, debug(seconds=10))


def slow(port: int) -> tuple[str, float]:
    """One rank is slow, but within the deadline."""
    mesh, rank = fresh(port)

    def act() -> None:
        x = _x(mesh)
        for f in (
            lambda b: psum(b, "x"),
            lambda b: ppermute(b, "x", [(0, 1), (1, 2), (2, 3), (3, 0)]),
            lambda b: b * 2,
        ):
            time.sleep(1 if rank == 2 else 0)
            shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)
        _sum(mesh, x)

    return outcome(act, deadline(10))


def a_slow_record(port: int) -> tuple[str, float]:
    """One rank comes late to a record, whose collectives of sizes run while it is made."""
    mesh, rank = fresh(port)

    def body(x: Tensor, sizes: Tensor) -> Tensor:
        time.sleep(1.5 if rank == 2 else 0)
        starts, received = torch.arange(4), all_to_all(sizes, "x", 0, 0, tiled=True)
        every = all_gather(sizes, "x")
        before = (every.cumsum(0) - every)[axis_index("x")]
        return ragged_all_to_all(x, x.new_zeros(4), starts, sizes, before, received, axis_name="x")

    def act() -> None:
        sent = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        step = jit(grad(lambda x, sizes: device_get(sent(x, sizes)).sum()))
        assert step(torch.arange(16.0), torch.ones(16, dtype=torch.int64)).tolist() == [1] * 16

    return outcome(act, nullcontext())


def a_new_world(port: int) -> tuple[str, float]:
    """A rank is slow. A long wait uses the store of the ranks, which must end with their world."""

    def act() -> None:
        for _ in range(2):
            mesh, rank = fresh(port)
            x = _x(mesh)
            time.sleep(2 if rank == 2 else 0)
            _sum(mesh, x)
            time.sleep(2 if rank == 1 else 0)
            step = shard_map(lambda b: ppermute(b, "x", [(1, 3)]), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            step(x)

    return outcome(act, nullcontext())


def no_message(port: int) -> tuple[str, float]:
    """One rank does not send."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        if rank == 2:
            time.sleep(2)
        else:
            step = shard_map(lambda b: ppermute(b, "x", [(2, 1), (1, 3)]), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            step(x)

    return outcome(act, deadline(1))


def raised(port: int) -> tuple[str, float]:
    """A body raises on one rank."""
    mesh, rank = fresh(port)

    def body(b: Tensor) -> Tensor:
        if rank == 2:
            raise KeyError("mine")
        return psum(b, "x")

    def act() -> None:
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(_x(mesh))

    return outcome(act, deadline(30))


def interrupted_in_a_message(port: int) -> tuple[str, float]:
    """Ctrl-C on a rank that waits for a message."""
    mesh, rank = fresh(port)
    x, ring = _x(mesh), [(i, (i + 1) % 4) for i in range(4)]

    def body(b: Tensor) -> Tensor:
        return ppermute(b, "x", ring)  # waits for a message

    step = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    step(x)
    if rank == 2:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()

    def act() -> None:
        try:
            with deadline(30):
                if rank == 1:
                    _sum(mesh, x)
                step(x)
        except KeyboardInterrupt as error:
            raise KeyError("interrupted") from error

    return outcome(act, nullcontext())


def interrupted_outside_blocks(port: int, when: str) -> tuple[str, float]:
    """Ctrl-C on a rank before or in its wait for a message of a late rank, in a program that may handle it."""
    mesh, rank = fresh(port)
    x, ring = _x(mesh), [(i, (i + 1) % 4) for i in range(4)]
    step = shard_map(lambda b: ppermute(b, "x", ring), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    step(x)
    before, interrupt = signal.getsignal(signal.SIGINT), partial(os.kill, os.getpid(), signal.SIGINT)
    if rank == 2:
        if when == "handled":
            signal.signal(signal.SIGINT, lambda *_: None)
        if when == "before":
            with suppress(KeyboardInterrupt):
                interrupt()
                time.sleep(10)
        else:
            threading.Timer(1, interrupt).start()

    def act() -> None:
        try:
            if rank == 1:
                time.sleep(8 if when == "within" else 3)
            step(x)
        except KeyboardInterrupt as error:
            raise KeyError("interrupted") from error

    try:
        return outcome(act, nullcontext())
    finally:
        signal.signal(signal.SIGINT, before)


def raised_around(port: int) -> tuple[str, float]:
    """One rank has had blocks of its own before, and leaves the outer of two blocks, in which the others wait."""
    mesh, rank = fresh(port)
    x = _x(mesh)
    for _ in range(3 * (rank == 1)):
        with deadline(30):
            pass

    def act() -> None:
        if rank == 1:
            raise KeyError("mine")
        with deadline(20):
            _sum(mesh, x)

    return outcome(act, deadline(30))


def first_of_a_group(port: int) -> tuple[str, float]:
    """One rank alone begins the first collective of a group, which makes the group."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    x = _x(mesh)

    def act() -> None:
        if rank == 2:
            _sum(mesh, x, "y")  # alone on y

    return outcome(act, deadline(3))


def killed(port: int) -> None:
    """One rank ends without a word. The others fail with what they have been told."""
    mesh, rank = fresh(port)
    x = _x(mesh)

    def act() -> None:
        _sum(mesh, x)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        _sum(mesh, x)

    raise AssertionError(outcome(act, deadline(1.5)))


def killed_before_a_group(port: int) -> None:
    """The rank that holds the store ends without a word. Two others make a group, for which they need the store."""
    mesh, rank = fresh(port, (2, 2), ("x", "y"))
    x = _x(mesh)
    fspmd.barrier(mesh=mesh)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 2:
        time.sleep(0.5)
        raise AssertionError(outcome(lambda: _sum(mesh, x), nullcontext()))


def killed_before_a_message(port: int) -> None:
    """One rank ends without a word. Another sends to it some time later."""
    mesh, rank = fresh(port)
    x, there = _x(mesh), [(1, 2), (2, 1)]

    def act() -> None:
        swap = shard_map(lambda b: ppermute(b, "x", there), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        swap(x)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
        swap(x)

    raise AssertionError(outcome(act, nullcontext()))


def waits_that_the_end_of_a_process_ends() -> list[bool]:
    """A rank waits for a message in vain. Whether the threads that wait on are alive at the end, before and after."""
    mesh = make_mesh((2,), ("x",), device="cpu")
    x, there = _x(mesh), [(0, 1), (1, 0)]
    swap = shard_map(lambda b: ppermute(b, "x", there), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    swap(x)
    if mesh.coordinate() == (1,):
        return [True, False]
    with suppress(fspmd.DeadlineError), deadline(1):
        swap(x)
    before = [thread.is_alive() for thread in long_waits._left]
    long_waits._end_waits()
    return before + [thread.is_alive() for thread in long_waits._left]


def left_alone() -> None:
    """A program: rank 1 is stopped for good, and rank 0 ends by an error."""
    mesh = make_mesh((2,), ("x",), device="cpu")
    x = _x(mesh)
    _sum(mesh, x)
    with deadline(3):
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        _sum(mesh, x)


if __name__ == "__main__":
    left_alone()
