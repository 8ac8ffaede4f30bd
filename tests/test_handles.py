"""Collectives with wait=False on four Gloo processes: one rank begins late, and the others are not held up.

Rank 0 begins a collective only after the other ranks have told that they are past its start, and in backward only after
they have computed the gradient of what stands between start and wait. Where something waited early, all would wait for
each other until the time limit of the pool.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from processes import Processes, free_port
from torch import Tensor

import fspmd
from fspmd import P, make_mesh, shard_map
from fspmd.transport.groups import gather_integers

F64 = torch.float64
LATE = datetime.timedelta(seconds=20)
#: of a block of 8 rows
STARTED: dict[str, Callable[[Tensor], Any]] = {
    "psum": lambda x: fspmd.psum(x, "x", wait=False),
    "psum of a tree": lambda x: fspmd.psum({"a": x, "b": [x.sin(), x.float()]}, "x", wait=False),
    "pmean": lambda x: fspmd.pmean(x, "x", wait=False),
    "all_gather": lambda x: fspmd.all_gather(x, "x", wait=False),
    "all_gather of a tree": lambda x: fspmd.all_gather((x, x[0]), "x", tiled=False, wait=False),
    "all_gather to invarying": lambda x: fspmd.all_gather(x, "x", axis=1, tiled=True, to="invarying", wait=False),
    "psum_scatter": lambda x: fspmd.psum_scatter(x, "x", tiled=True, wait=False),
    "psum_scatter, uneven": lambda x: fspmd.psum_scatter(x[:7], "x", tiled=True, size=7, wait=False),
    "all_to_all": lambda x: fspmd.all_to_all(x, "x", 0, 1, tiled=True, wait=False),
    "ppermute": lambda x: fspmd.ppermute(x, "x", [(0, 1), (1, 2), (2, 3), (3, 0)], wait=False),
    "pshuffle": lambda x: fspmd.pshuffle(x, "x", [1, 2, 3, 0], wait=False),
    "pswapaxes": lambda x: fspmd.pswapaxes(x[:4], "x", 0, wait=False),
    "pbroadcast": lambda x: fspmd.pbroadcast(x, "x", 2, wait=False),
    "pmax": lambda x: fspmd.pmax(x, "x", wait=False),
    "pmin of a tree": lambda x: fspmd.pmin({"a": x, "b": x[:2]}, "x", wait=False),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes


def total(tree: Any) -> Tensor:
    leaves: list[Tensor] = optree.tree_leaves(tree)
    return torch.stack([leaf.double().sum() for leaf in leaves]).sum()


def begin_late(name: str, check_vma: bool) -> list[str]:
    """What happened on this rank, in order, if it happened at all."""
    mesh = make_mesh((4,), ("x",))
    gather_integers([0], mesh)  # the connections are there
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mark = f"{name} {check_vma}"
    events = []

    def tell(what: str) -> None:
        events.append(what)
        store.set(f"{mark} {what} {rank}", "")

    def hear(what: str) -> None:
        store.wait([f"{mark} {what} {other}" for other in (1, 2, 3)], LATE)
        events.append(what)

    def body(x: Tensor, y: Tensor) -> Tensor:
        if rank == 0:
            hear("started")
        handle = STARTED[name](x)
        if rank:
            tell("started")
        between = y.sin()
        if rank:
            between.register_hook(lambda g: tell("between"))
        landed = total(handle.wait())
        if rank == 0 and not name.startswith(("pmax", "pmin")):  # whose gradient counts first, and needs that at once
            landed.register_hook(lambda g: hear("between"))
        return fspmd.psum(landed * between.sum(), "x")

    x, y = (torch.linspace(0, 1, 64, dtype=F64).view(32, 2).requires_grad_() for _ in range(2))
    mapped = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=check_vma)
    fspmd.device_get(mapped(x, y)).backward()
    assert x.grad is not None
    assert y.grad is not None
    return events


@pytest.mark.one_of(4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", STARTED)
def test_nothing_waits_before_wait_forward_or_backward(pool: Processes, name: str, check_vma: bool) -> None:
    first, *others = pool.run(begin_late, name, check_vma)
    assert others == [["started", "between"]] * 3
    assert first == ["started"] + ["between"] * (not name.startswith(("pmax", "pmin")))


def writes_before_wait(transport: Any) -> dict[str, str]:
    """The error of each collective whose operand is written into before `wait`, forward only and with a gradient."""
    mesh = make_mesh((4,), ("x",), transport=transport, device="cpu")
    found = {}
    ones = torch.ones(4, dtype=torch.int64)
    into = {
        "all_gather_into": lambda x: fspmd.all_gather_into(x.new_empty(32, 2), x, "x", wait=False),
        "psum_scatter_into": lambda x: fspmd.psum_scatter_into(x.new_empty(2, 2), x, "x", wait=False),
        "ragged_all_to_all": lambda x: fspmd.ragged_all_to_all(
            x, x.new_zeros(8, 2), torch.arange(4), ones, fspmd.axis_index("x") * ones, ones, axis_name="x", wait=False
        ),
    }
    for name, start in {**STARTED, **into}.items():
        for with_gradient, of_data in ((False, False), (True, False), (False, True)):

            def body(x: Tensor, start: Any = start, of_data: bool = of_data) -> Tensor:
                x = x * 1
                handle = start(x)
                (x.data if of_data else x.detach())[:1].fill_(-1)  # a view, which shares the memory
                return fspmd.psum(total(handle.wait()), "x")

            x = torch.linspace(0, 1, 64, dtype=F64).view(32, 2)
            if name in into and with_gradient:
                continue
            try:
                shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(x.requires_grad_(with_gradient))
            except fspmd.ArgumentError as error:
                found[f"{name} {with_gradient} {of_data}"] = str(error)
            else:
                found[f"{name} {with_gradient} {of_data}"] = ""
    x = fspmd.device_put(torch.arange(8.0), P("x"), mesh=mesh)
    for name, write in (("reshard", x.mul_), ("reshard of data", x.data.mul_)):
        handle = fspmd.reshard(x, P(), wait=False)
        write(2)
        try:
            handle.wait()
        except fspmd.ArgumentError as error:
            found[name] = str(error)
    return found


def test_a_write_into_the_operand_before_wait_is_an_error_on_every_transport(pool: Processes) -> None:
    simulated = writes_before_wait("simulation")
    assert all("was written into before wait()" in error for error in simulated.values()), simulated
    assert len(simulated) == 3 * len(STARTED) + 2 * 3 + 2
    assert pool.run(writes_before_wait, "process_group") == [simulated] * 4


def tensors_without_memory(transport: Any) -> list[tuple[Any, ...]]:
    mesh, found = make_mesh((4,), ("x",), transport=transport, device="cpu"), []

    def body(x: Tensor) -> Tensor:
        t = torch.empty(4, 2, device="meta")
        ring = [(i, (i + 1) % 4) for i in range(4)]
        for y in (fspmd.ppermute(t, "x", ring), fspmd.pshuffle(t, "x", [1, 2, 3, 0]), fspmd.all_gather(t, "x")):
            found.append((y.device.type, *y.shape))
        return x

    shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(torch.ones(4))
    return found


def test_messages_of_tensors_without_memory_have_their_shapes(pool: Processes) -> None:
    simulated = tensors_without_memory("simulation")
    assert simulated == [("meta", 4, 2), ("meta", 4, 2), ("meta", 4, 4, 2)]
    assert pool.run(tensors_without_memory, "process_group") == [simulated] * 4


#: both ranks send to each other, wait for no message, and end
NOT_WAITED_FOR = """
import torch, fspmd
from fspmd import P
mesh = fspmd.make_mesh((2,), ("x",))
kept = []
def body(x):
    kept.append(fspmd.ppermute(x, "x", [(0, 1), (1, 0)], wait=False))
    return x
fspmd.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(2))
"""


def test_messages_that_have_come_do_not_hold_up_the_end_of_a_program() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", NOT_WAITED_FOR],
            env=os.environ | place | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], told
        assert not any("under way" in each for each in told), told
    finally:
        for process in ranks:
            process.kill()
            process.wait(20)


#: rank 0 begins a collective and ends. Rank 1 never joins it, and ends after rank 0, when its input does.
LEFT_ALONE = """
import sys, torch, fspmd
from fspmd import P
from fspmd.meshes import process_groups, world
process_groups._PATIENCE = 0.5
mesh = fspmd.make_mesh((2,), ("x",))
device = fspmd.device_get(fspmd.device_put(torch.ones(2), P("x"), mesh=mesh))
kept = []
def body(x):
    if world.rank() == 0:
        kept.append(fspmd.all_gather(x, "x", wait=False))
    return x
fspmd.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(2))
print("begun", flush=True)
if world.rank() == 1:
    sys.stdin.read()
"""


def test_a_collective_that_nobody_joins_does_not_hold_up_the_end_of_a_program() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEFT_ALONE],
            env=os.environ | place | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, told = ranks[0].communicate(timeout=300)
        assert (ranks[0].returncode, out) == (0, "begun\n"), told
        assert "rank 0 ends with 1 collective(s) under way that other ranks have not joined" in told
        assert ranks[1].poll() is None  # it was there all the time
        assert "begun" in ranks[1].communicate("", timeout=300)[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait(20)
