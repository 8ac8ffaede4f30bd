"""Launchers, devices and process groups: what depends on the environment, in processes of its own."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import Processes, free_port

from fspmd import P, axis_index, device_put, shard_map, with_spec
from fspmd.errors import MeshError
from fspmd.meshes import process_groups, world
from fspmd.meshes.mesh import Mesh, make_mesh
from fspmd.torch_internals import time_limit
from fspmd.transport import Options
from fspmd.transport.groups import group_of

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes


# ------------------------------------------------------------------------------------------------------- one process


def test_without_a_launcher_there_is_one_process(no_launcher: pytest.MonkeyPatch) -> None:
    assert not world.launched()
    assert not world.initialised()
    assert (world.process_rank(), world.rank(), world.world_size()) == (0, 0, 1)
    assert world.default_device_type() == torch.get_default_device().type
    assert world.local_device("cpu") == torch.device("cpu")
    assert world.local_device("meta") == torch.device("meta")


def test_a_launcher_shows_in_the_environment(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("RANK", "3")
    assert not world.launched()
    no_launcher.setenv("WORLD_SIZE", "6")
    assert world.launched()
    assert (world.process_rank(), world.rank(), world.world_size()) == (3, 3, 6)
    with world.simulated_rank(1):
        assert (world.process_rank(), world.rank(), world.simulated()) == (3, 1, 1)
    assert world.simulated() is None


def test_simulated_ranks_nest_and_are_per_thread(no_launcher: pytest.MonkeyPatch) -> None:
    seen = []
    with world.simulated_rank(2):
        with contextlib.suppress(KeyError), world.simulated_rank(5):
            assert world.rank() == 5
            raise KeyError
        assert world.rank() == 2
        thread = threading.Thread(target=lambda: seen.append(world.rank()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_simulation_can_be_forced_under_a_launcher(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("RANK", "1")
    no_launcher.setenv("WORLD_SIZE", "2")
    mesh = make_mesh((8,), ("x",), device="cpu", transport="simulation")
    assert mesh.transport == "simulation"
    assert mesh.coordinate() == (0,)
    assert not world.initialised()


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            {"shape": (2, 3)},
            "make_mesh((2, 3), ('x', 'y')): 6 ranks are more than the world has, 4: start 6 processes "
            '(torchrun --nproc-per-node 6), make a smaller mesh, or pass transport="simulation"',
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            {"ranks": (0, 4)},
            "make_mesh((2, 1), ('x', 'y')): ranks must be in range(4), the world, but one is 4",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"},
            {},
            "RANK and WORLD_SIZE are set, but MASTER_ADDR not: start the program with torchrun, call "
            'torch.distributed.init_process_group first, or pass transport="simulation"',
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "many"},
            {},
            "the environment variable WORLD_SIZE must be an integer >= 0, but it is 'many'",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1", "MASTER_ADDR": "127.0.0.1"},
            {"device": "xpu"},
            "this process sees no device of type 'xpu': pass device=\"cpu\"",
        ),
    ],
)
def test_errors_come_before_any_communication(
    no_launcher: pytest.MonkeyPatch, environment: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    for name, value in environment.items():
        no_launcher.setenv(name, value)
    with pytest.raises(MeshError) as caught:
        make_mesh(arguments.pop("shape", (2, 1)), ("x", "y"), **({"device": "cpu"} | arguments))
    assert str(caught.value) == message
    assert not world.initialised()


def test_a_mesh_over_process_groups_loads_where_there_are_none(no_launcher: pytest.MonkeyPatch) -> None:
    load, state = make_mesh((4,), ("x",)).__reduce__()
    mesh = pickle.loads(pickle.dumps(load(*state[:-1], "process_group")))
    assert mesh.transport == "process_group"
    assert mesh.groups("x") == [(0, 1, 2, 3)]
    with pytest.raises(MeshError, match=r"torch\.distributed is not initialised, or was destroyed: make the mesh with"):
        mesh.process_group("x")


def test_importing_costs_nothing_beyond_torch() -> None:
    """The modules that importing fspmd.meshes adds are fspmd's own and small ones of the standard library."""
    program = (
        "import sys, types, torch, optree, torch.distributed, torch.utils._device\n"
        "package = types.ModuleType('fspmd'); package.__path__ = [sys.argv[1]]; sys.modules['fspmd'] = package\n"
        "before = set(sys.modules)\n"
        "import fspmd.meshes.mesh\n"
        "print(sorted(n for n in set(sys.modules) - before if not n.startswith('fspmd')))"
    )
    folder = world.__file__.rsplit("/", 2)[0]
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, timeout=300, check=True)
    assert done.stdout.decode().strip() == "[]"


@pytest.fixture
def two_gpus(no_launcher: pytest.MonkeyPatch) -> tuple[pytest.MonkeyPatch, list[tuple[str, object]]]:
    """A process that sees two GPUs, of which only what is asked of them is noted down."""
    asked: list[tuple[str, object]] = []
    no_launcher.setattr(torch.cuda, "is_available", lambda: True)
    no_launcher.setattr(torch.cuda, "device_count", lambda: 2)
    no_launcher.setattr(torch.cuda, "current_device", lambda: 0)
    no_launcher.setattr(torch.cuda, "set_device", lambda index: asked.append(("set_device", index)))
    no_launcher.setattr(process_groups, "rendezvous", lambda url: iter([(dist.HashStore(), 0, 1)]))
    no_launcher.setattr(dist, "init_process_group", lambda backend, **place: asked.append(("init", backend)))
    no_launcher.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return no_launcher, asked


@pytest.mark.parametrize(
    ("environment", "index"), [({"LOCAL_RANK": "1"}, 1), ({}, 1), ({"LOCAL_RANK": "0"}, 0)], ids=str
)
def test_gpus_get_nccl_and_each_rank_its_own(
    two_gpus: tuple[pytest.MonkeyPatch, list[tuple[str, object]]], environment: dict[str, str], index: int
) -> None:
    patch, asked = two_gpus
    base = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (base | environment).items():
        patch.setenv(name, value)
    mesh = make_mesh((4,), ("x",))
    assert asked == [("set_device", index), ("init", "nccl")]
    assert (mesh.device_type, mesh.transport) == ("cuda", "process_group")
    if environment:
        assert mesh.device == torch.device("cuda", index)


def test_more_processes_than_gpus_is_an_error(
    two_gpus: tuple[pytest.MonkeyPatch, list[tuple[str, object]]],
) -> None:
    patch, asked = two_gpus
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        patch.setenv(name, value)
    patch.setenv("MASTER_ADDR", "127.0.0.1")
    patch.setenv("MASTER_PORT", "1")
    with pytest.raises(MeshError) as caught:
        make_mesh((4,), ("x",))
    assert str(caught.value) == (
        "this process has LOCAL_RANK=2, but sees 2 device(s) of type 'cuda': start at most 2 processes on this host, "
        'or pass device="cpu"'
    )
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setenv("CUDA_VISIBLE_DEVICES", "2")
    make_mesh((4,), ("x",))
    assert asked == [("set_device", 0), ("init", "nccl")]


def test_a_simulated_mesh_of_gpus_uses_the_current_one(
    two_gpus: tuple[pytest.MonkeyPatch, list[tuple[str, object]]],
) -> None:
    patch, asked = two_gpus
    patch.setattr(torch.cuda, "current_device", lambda: 1)
    patch.setenv("LOCAL_RANK", "0")  # without RANK and WORLD_SIZE, no launcher
    mesh = make_mesh((4,), ("x",), device="cuda")
    assert (mesh.transport, mesh.device) == ("simulation", torch.device("cuda", 1))
    assert asked == []


# ------------------------------------------------------------------------------------------- torch's fake process group


@contextlib.contextmanager
def fake_world(rank: int, size: int, backend: str = "fake") -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_an_initialised_world_is_taken_as_found(no_launcher: pytest.MonkeyPatch) -> None:
    with fake_world(rank=5, size=8):
        mesh = make_mesh((2, 4), ("dp", "tp"))
        assert (mesh.transport, mesh.device_type) == ("process_group", "cpu")
        assert mesh.coordinate() == (1, 1)
        assert list(mesh["tp"].ranks) == [4, 5, 6, 7]
        assert dist.get_process_group_ranks(mesh.process_group("dp")) == [1, 5]
        assert mesh.process_group(("tp", "dp")) is dist.group.WORLD
        with world.simulated_rank(0):  # says nothing about meshes of processes
            assert mesh.coordinate() == (1, 1)
    assert make_mesh((2, 4), ("dp", "tp")).transport == "simulation"


def test_a_backend_for_another_device_is_an_error(no_launcher: pytest.MonkeyPatch) -> None:
    with fake_world(rank=0, size=2, backend="cuda:fake"):
        with pytest.raises(MeshError) as caught:
            make_mesh((2,), ("x",), device="cpu")
        assert str(caught.value) == (
            "torch.distributed is initialised with backends for ['cuda'], none of them for a mesh on 'cpu': "
            "pass device='cuda', or initialise with a backend for both, such as "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )


def test_a_group_of_ranks_outside_the_world_is_an_error(no_launcher: pytest.MonkeyPatch) -> None:
    with fake_world(rank=0, size=2):
        with pytest.raises(
            MeshError, match=r"ranks \(0, 1, 2, 3\) needs different ranks, all in range\(2\), the world"
        ):
            process_groups.process_group((0, 1, 2, 3))
        with pytest.raises(MeshError, match=r"rank 0 asked for the process group of ranks \(1,\), of which it is no"):
            process_groups.process_group((1,))


def test_groups_are_not_split_from_a_bound_default_group(
    no_launcher: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splitting takes all ranks of the default group, making a group only its members."""
    seen = []
    with fake_world(rank=0, size=4):
        default = dist.group.WORLD
        assert default is not None
        default.bound_device_id = torch.device("cuda", 0)
        original = process_groups.make_group

        def spy(*args: Any) -> Any:
            seen.append(default.bound_device_id)
            return original(*args)

        monkeypatch.setattr(process_groups, "make_group", spy)
        process_groups.process_group((0, 2))
        assert default.bound_device_id == torch.device("cuda", 0)
        default.bound_device_id = None
    assert seen == [None]


def test_gpus_meet_before_some_of_them_transfer(no_launcher: pytest.MonkeyPatch) -> None:
    """Once for all meshes that share a group: NCCL's first call of one is a call of all its ranks."""
    watched, on_gpus = mock.MagicMock(), torch.device("meta")
    with fake_world(rank=0, size=4):
        groups = [group_of(make_mesh(sizes, names), ("x",), Options()) for sizes, names in _SHARING]
        for group in groups:
            group._pg = lambda: watched
            group.meet(torch.device("cpu"))
        assert watched.allreduce.call_count == 0
        for group in groups * 2:
            group.meet(on_gpus)
    assert watched.allreduce.call_count == 1


#: meshes whose "x" has the same ranks
_SHARING: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((4,), ("x",)), ((1, 4), ("y", "x"))]


# ----------------------------------------------------------------------------------------------- four processes of Gloo


def _all_reduce(group: Any, value: int) -> int:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def _sums() -> dict[str, Any]:
    mesh = make_mesh((2, 2), ("dp", "tp"))
    rank = world.rank()
    assert mesh.transport == "process_group"
    assert mesh.coordinate() == divmod(rank, 2)
    sums = {axes: _all_reduce(mesh.process_group(axes), 10**rank) for axes in ("dp", "tp", ("dp", "tp"))}
    return {"backend": dist.get_backend(), "device": str(mesh.device), "sums": sums}


def test_make_mesh_initialises_gloo_under_a_launcher(pool: Processes) -> None:
    results = pool.run(_sums)
    assert [r["backend"] for r in results] == ["gloo"] * 4
    assert [r["device"] for r in results] == ["cpu"] * 4
    assert [r["sums"]["tp"] for r in results] == [11, 11, 1100, 1100]
    assert [r["sums"]["dp"] for r in results] == [101, 1010, 101, 1010]
    assert [r["sums"]["dp", "tp"] for r in results] == [1111] * 4


@contextlib.contextmanager
def _count_new_groups() -> Iterator[list[Any]]:
    calls: list[Any] = []
    original = process_groups.make_group

    def spy(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    process_groups.make_group = spy
    try:
        yield calls
    finally:
        process_groups.make_group = original


def _shared(port: int) -> list[bool]:
    _new_world(port)
    a, b = make_mesh((2, 2), ("dp", "tp")), make_mesh((2, 2), ("p", "q"), ranks=(3, 2, 1, 0))
    with _count_new_groups() as calls:
        again = pickle.loads(pickle.dumps(a))
        groups = [a.process_group("tp"), b.process_group("q"), a["tp"].process_group("tp"), again.process_group("tp")]
        whole = [a.process_group(("dp", "tp")), b.flatten(("q", "p"), "all").process_group("all"), dist.group.WORLD]
    return [
        all(group is groups[0] for group in groups),
        all(group is whole[0] for group in whole),
        len(calls) == 1,
        again == a,
        # the order on the axis is the mesh's own, the group's is ascending
        b.group_ranks("q") == tuple(reversed(dist.get_process_group_ranks(groups[0]))),
    ]


def test_equal_groups_are_made_once_whatever_meshes_ask(pool: Processes) -> None:
    assert pool.run(_shared, free_port()) == [[True] * 5] * 4


def _small() -> dict[str, Any]:
    """Groups that only some ranks are in, then one across those that have some and those that have none."""
    rank = world.process_rank()
    pair, across = make_mesh((2,), ("x",), ranks=(2, 0)), make_mesh((3,), ("y",), ranks=(3, 0, 1))
    found: dict[str, Any] = {"coordinates": (pair.coordinate(), across.coordinate())}
    if pair.coordinate() is not None:
        found["pair"] = _all_reduce(pair.process_group("x"), 10**rank)
    else:
        with pytest.raises(MeshError) as caught:
            pair.process_group("x")
        found["error"] = str(caught.value)
    if across.coordinate() is not None:
        found["across"] = _all_reduce(across.process_group("y"), 10**rank)
    return found


def test_meshes_smaller_than_the_world(pool: Processes) -> None:
    results = pool.run(_small)
    assert [r["coordinates"] for r in results] == [((1,), (1,)), (None, (2,)), ((0,), None), (None, (0,))]
    assert [r.get("pair") for r in results] == [101, None, 101, None]
    assert [r.get("across") for r in results] == [1011, 1011, None, 1011]
    assert results[1]["error"] == (
        "group_ranks('x'): rank 1 is no member of mesh(x=2): ask where mesh.coordinate() is not None only"
    )


def _new_world(port: int) -> None:
    if world.initialised():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)


def _from_device_mesh(port: int) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh

    _new_world(port)
    given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with _count_new_groups() as calls:
        mesh = Mesh.from_device_mesh(given)
        own = [mesh.process_group("a"), mesh.process_group("b")]
        back = mesh.to_device_mesh()
        part = Mesh.from_device_mesh(given["b"])
    return [
        calls == [],
        mesh == make_mesh((2, 2), ("a", "b")),
        own == [given.get_group("a"), given.get_group("b")],
        own == [back.get_group("a"), back.get_group("b")],
        back.mesh.tolist() == [[0, 1], [2, 3]],
        back.mesh_dim_names == ("a", "b"),
        tuple(back.get_coordinate()) == mesh.coordinate(),
        part == mesh["b"],
        Mesh.from_device_mesh(back) == mesh,
    ]


def _device_mesh_errors() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    unnamed = init_device_mesh("cpu", (2, 2))
    some = DeviceMesh(
        "cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), _init_backend=False, _rank=world.process_rank()
    )
    assert Mesh.from_device_mesh(some).groups("b") == [(0, 1), (2, 3)]
    with pytest.raises(MeshError) as caught:
        Mesh.from_device_mesh(unnamed)
    return [str(caught.value)]


def _to_device_mesh() -> list[Any]:
    from torch.distributed.tensor import DTensor, Shard

    rank = world.process_rank()
    mesh = make_mesh((2, 1), ("x", "y"), ranks=(3, 1))
    dm = mesh.to_device_mesh()
    found: list[Any] = [dm.mesh.tolist(), dm.get_coordinate() is None]
    if mesh.coordinate() is not None:
        whole = DTensor.from_local(torch.full((1,), float(rank)), dm["x"], [Shard(0)]).full_tensor()
        found.append(sorted(whole.tolist()))
    return found


def test_device_meshes_share_the_groups(pool: Processes) -> None:
    assert pool.run(_from_device_mesh, free_port()) == [[True] * 9] * 4
    grid = [[3], [1]]
    members = [[grid, False, [1.0, 3.0]], [grid, True]]
    assert pool.run(_to_device_mesh) == [members[1], members[0], members[1], members[0]]


def test_a_device_mesh_needs_names(pool: Processes) -> None:
    assert pool.run(_device_mesh_errors)[0] == [
        "from_device_mesh(DeviceMesh((2, 2), 'cpu', stride=(2, 1))): its dims have no names, make it with "
        "init_device_mesh(..., mesh_dim_names=('axis0', 'axis1'))"
    ]


def _again(port: int) -> list[Any]:
    mesh = make_mesh((2, 2), ("dp", "tp"))
    before = mesh.process_group("tp")
    _new_world(port)
    with pytest.raises(MeshError, match=r"torch\.distributed is not initialised, or was destroyed"):
        mesh.process_group("tp")
    assert make_mesh((2, 2), ("dp", "tp")) == mesh
    after = mesh.process_group("tp")
    return [after is not before, _all_reduce(after, 10 ** world.rank()), mesh.process_group("tp") is after]


def test_groups_are_made_anew_in_a_new_world(pool: Processes) -> None:
    results = pool.run(_again, free_port())
    assert results == [[True, 11, True], [True, 11, True], [True, 1100, True], [True, 1100, True]]


AFTER_THE_EXIT = """
import atexit, pathlib
@atexit.register  # registered first, so it runs last
def report():
    names = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
    print(sorted(name for name in names if "gloo" in name))

import torch
from fspmd import P, make_mesh, psum, shard_map
mesh = make_mesh((1, 1), ("x", "y"))
kept = shard_map(lambda x: psum(x, ("x", "y")), mesh=mesh, in_specs=P(("x", "y")), out_specs=P())(torch.ones(4))
from fspmd.transport.groups import gather_integers, group_of
from fspmd.transport.call import Options
print(gather_integers([3], mesh), group_of(mesh, ("x",), Options()).size)
import torch.distributed.nn.functional  # as torch.func.grad does: its default arguments hold the default group
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_of_a_group_outlives_the_interpreter() -> None:
    """Such a thread may drop its last tensor while the interpreter shuts down, and abort the process."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", AFTER_THE_EXIT],
        env=os.environ | place,
        capture_output=True,
        timeout=300,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "Warning" not in done.stderr


# ------------------------------------------------------------------------------------ worlds one after another, threads


def _worlds_of_one_store(port: int, from_launcher: bool, late: int) -> list[int]:
    """Sums over a sub-group in three worlds, whose ranks meet at one port, and in the next attempt of a launcher."""
    sums = []
    with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE=str(from_launcher)):
        for attempt in ("0", "0", "0", "1"):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
            if sums and world.rank() == late:
                time.sleep(0.5)
            _new_world(port)
            if attempt == "1":
                process_groups._initialised = 0  # a process that was started anew
            mesh = make_mesh((2, 2), ("dp", "tp"))
            sums.append(_all_reduce(mesh.process_group("tp"), 10 ** world.rank()))
            dist.barrier()  # no rank ends this world, and rank 0 its store, before all have made their groups
        _new_world(port)
        return sums


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("from_launcher", [False, True])
def test_a_new_world_at_the_port_of_the_last_one(pool: Processes, from_launcher: bool, late: int) -> None:
    """A launcher keeps one store for all attempts. Its keys have the addresses of ranks that have ended.

    Without a launcher the store ends with rank 0's world, to which the others may have come once more.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if from_launcher else None
    results = pool.run(_worlds_of_one_store, free_port() if server is None else server.port, from_launcher, late)
    assert results == [[11] * 4, [11] * 4, [1100] * 4, [1100] * 4]


def _limits(port: int) -> list[Any]:
    _new_world(port)
    mesh = make_mesh((2, 2), ("dp", "tp"), timeout=70)
    groups = [mesh.process_group(axes) for axes in ("dp", "tp", ("dp", "tp"))]
    assert make_mesh((4,), ("x",)) == make_mesh((4,), ("x",), timeout=datetime.timedelta(seconds=70))
    with pytest.raises(MeshError, match=r"timeout=5 s, but torch.distributed is initialised with a time limit of 70 s"):
        make_mesh((4,), ("x",), timeout=5)
    return [time_limit(group) for group in groups]


def test_groups_have_the_time_limit_of_the_world(pool: Processes) -> None:
    assert pool.run(_limits, free_port()) == [[datetime.timedelta(seconds=70)] * 3] * 4


@pytest.mark.parametrize("timeout", [0, -1.0, "60", True, float("nan"), float("inf")])
def test_a_time_limit_is_a_positive_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(MeshError, match=r"is no time, give seconds, such as timeout=60"):
        make_mesh((4,), ("x",), timeout=timeout)


def _places(port: int) -> tuple[int, list[float], int]:
    """What needs this rank's place alone, over other axes first on some ranks; and the number of groups made."""
    _new_world(port)
    mesh = make_mesh((2, 2), ("x", "y"))
    whole = torch.arange(8.0)
    axes = ("x", "y") if world.rank() in (0, 3) else ("y", "x")

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + sum(10 ** (axis == "y") * axis_index(axis) for axis in axes)

    with _count_new_groups() as calls:
        for axis in axes:
            device_put(whole, P(axis), mesh=mesh)
            device_put(whole, P(unreduced={axis}), mesh=mesh)
            with_spec(device_put(whole, P(), mesh=mesh), P(axis))
        block = shard_map(body, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")))(whole).local
    return len(calls), block.tolist(), len(process_groups._groups)


def test_what_needs_a_place_makes_no_group(pool: Processes) -> None:
    blocks = [[0.0, 1.0], [12.0, 13.0], [5.0, 6.0], [17.0, 18.0]]
    assert pool.run(_places, free_port()) == [(0, block, 0) for block in blocks]


def _in_threads(port: int) -> dict[str, int]:
    """Groups over two axes, made by two threads, in another order on half of the ranks."""
    _new_world(port)
    mesh = make_mesh((2, 2), ("x", "y"))
    sums = {}

    def add_over(axis: str) -> None:
        sums[axis] = _all_reduce(mesh.process_group(axis), 10 ** world.rank())

    threads = [threading.Thread(target=add_over, args=(axis,)) for axis in "xy"]
    for thread in threads if world.rank() in (0, 3) else reversed(threads):
        thread.start()
        time.sleep(0.3)  # it waits for the other members
    for thread in threads:
        thread.join()
    return sums


def test_threads_make_groups_in_any_order(pool: Processes) -> None:
    assert [[found[axis] for axis in "xy"] for found in pool.run(_in_threads, free_port())] == [
        [101, 11],
        [1010, 11],
        [101, 1100],
        [1010, 1100],
    ]
