"""What processes run in `test_checkpoints`, and the trees that it saves."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from fault_shim import kill_at, watched
from torch import Tensor

import fspmd
from fspmd import Flat, Mesh, P, Sharded, TensorSpec, device_get, device_put, load, make_mesh, save
from fspmd.checkpoints import writing


def bits(x: Any) -> Any:
    """A global tensor as its bytes, or another value itself."""
    if isinstance(x, Sharded):
        x = device_get(x.detach())
    if isinstance(x, Tensor):
        return (
            str(x.dtype),
            tuple(x.shape),
            bytes(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()),
        )
    return x.get_state().tolist() if isinstance(x, torch.Generator) else x


def tree_bits(tree: Any) -> list[Any]:
    """The bits of all leaves."""
    import optree

    return [bits(x) for x in optree.tree_leaves(tree, none_is_leaf=True)]


DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
SHAPES = ((8, 6), (5, 7), (1, 3), (0, 3), (6,), ())


def wholes() -> dict[str, Tensor]:
    """Random bits of every dtype, in every shape."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in DTYPES:
        for i, shape in enumerate(SHAPES):
            if dtype is torch.bool:
                x = torch.randint(0, 2, shape, generator=generator).bool()
            else:
                size = (torch.Size(shape).numel() * dtype.itemsize,)
                x = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype).view(shape)
            found[f"{dtype}".removeprefix("torch.") + f"/{i}"] = x
    return found


def cut(spec: P, ndim: int) -> P:
    """The first entries of a spec."""
    return P(*spec.entries[:ndim])


def small_tree(mesh: Mesh, k: int) -> dict[str, Any]:
    """A tree whose values depend on a number."""
    w = torch.arange(35.0).view(5, 7) + k
    return {
        "w": device_put(w, P("x"), mesh=mesh),
        "count": k,
        "list": [k, "a", None],
        "table": {"0": torch.full((3,), k)},
    }


def kill_in_save(path: str, number: int, keep: int | None) -> None:
    """Save the second step, and end at one of the calls."""
    mesh = make_mesh((2, 2), ("x", "y"), transport="simulation", device="cpu")
    with watched(kill_at(number)):
        save(path, small_tree(mesh, 2), step=2, keep=keep)


def save_meanwhile(path: str) -> None:
    """Save the third step."""
    save(path, small_tree(make_mesh((2,), ("x",), transport="simulation", device="cpu"), 3), step=3)


def shared_folder() -> str:
    """A new folder, of which all processes know."""
    made = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    return made[0]


def complaint(call: Any) -> str:
    """The error of a call."""
    try:
        return f"gave {call()!r}"
    except fspmd.FspmdError as error:
        return f"{type(error).__name__}: {error}"


SPECS = (P("x"), P("x", "y"), P(("y", "x")), P(None, "y"), P())


def steps_between_transports() -> list[str]:
    """What differs after saving and loading between meshes of processes, and simulations."""
    grid = make_mesh((2, 2), ("x", "y"), device="cpu")
    line = make_mesh((4,), ("z",), device="cpu")
    some = make_mesh((3,), ("z",), ranks=(2, 0, 3), device="cpu")
    simulated = make_mesh((3, 2), ("x", "y"), transport="simulation", device="cpu")
    wrong: list[str] = []
    values = wholes()
    for mesh in (grid, simulated, line):
        specs = SPECS if mesh is not line else (P("z"), P(None, "z"), P(), P("z"), P("z"))
        tree: dict[str, Any] = {
            name: device_put(x, cut(specs[i % 5], x.ndim), mesh=mesh) for i, (name, x) in enumerate(values.items())
        }
        tree |= {"number": 3, "plain": torch.arange(5), "sum": device_put(torch.ones(6), P(specs[0][0]), mesh=mesh)}
        if mesh is grid:
            tree["sum"] = device_put(torch.ones(6), P("x", unreduced={"y"}), mesh=mesh)
        handle = save(shared_folder(), tree, asynchronous=mesh is line)
        for other, others in ((grid, SPECS[::-1]), (line, (P("z"), P(), P(None, "z"))), (simulated, SPECS)):
            like = {
                name: TensorSpec(other, cut(others[i % len(others)], x.ndim), x.shape, x.dtype)
                for i, (name, x) in enumerate(values.items())
            }
            last = (
                P(Flat((2, None), (3, "x"))) if other is grid else P(unreduced={others[0][0]}) if other is line else P()
            )
            like["sum"] = TensorSpec(other, last, (6,), torch.float32)
            found = load(
                os.path.dirname(handle.folder), {**like, "number": 0, "plain": torch.zeros(5, dtype=torch.int64)}
            )
            wrong += [name for name, x in values.items() if bits(found[name]) != bits(x)]
            wrong += [] if found["number"] == 3 and bits(found["plain"]) == bits(torch.arange(5)) else ["plain"]
            wrong += [] if bits(found["sum"]) == bits(torch.ones(6)) else ["sum"]
            wrong += [name for name in like if found[name].spec is not like[name]]
    whole = torch.arange(35.0).view(5, 7)
    part = fspmd.reshard(device_put(whole, P("z"), mesh=line), P("z"), some)
    folder = shared_folder()
    save(folder, {"w": part})
    wrong += (
        []
        if bits(load(folder, {"w": TensorSpec(grid, P("y", "x"), (5, 7), torch.float32)})["w"]) == bits(whole)
        else ["w"]
    )
    back = load(folder, {"w": part})["w"]
    at_home = fspmd.reshard(back, P(), line)
    return wrong + ([] if bits(at_home) == bits(whole) else ["back"])


def steps_of_torch() -> list[str]:
    """What differs where torch.distributed.checkpoint with DTensors reads our steps, and we read its folders."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    grid = make_mesh((2, 2), ("x", "y"), device="cpu")
    device_mesh = grid.to_device_mesh()
    whole = torch.arange(35.0).view(5, 7)
    placements = ((Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(1)), (Replicate(), Replicate()))

    def dtensors(x: Tensor) -> dict[str, Any]:
        return {str(i): distribute_tensor(x, device_mesh, of) for i, of in enumerate(placements)}

    def ours(x: Tensor) -> dict[str, Any]:
        return {
            str(i): device_put(x, spec, mesh=grid) for i, spec in enumerate((P("y"), P("y", "x"), P(), P(("x", "y"))))
        }

    rest = {
        "rate": 0.5,
        "betas": [0.9, 0.99],
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "t": torch.arange(3),
        "none": None,
    }
    empty = {
        "rate": 0,
        "betas": [0, 0],
        "groups": [{"lr": 0, "params": [0, 0]}],
        "t": torch.zeros(3).long(),
        "none": None,
    }
    wrong = []
    handle = save(shared_folder(), {"w": ours(whole), **rest})
    read: dict[str, Any] = {"w": dtensors(whole * 0), **empty}
    dcp.load(read, checkpoint_id=handle.folder)
    for i, x in read.pop("w").items():
        assert isinstance(x, DTensor)
        wrong += [] if torch.equal(x.full_tensor(), whole) else [f"torch reads {i}"]
    wrong += [] if tree_bits(read) == tree_bits(rest) else [f"torch reads {read}"]
    folder = shared_folder()
    dcp.save({"w": dtensors(whole), **rest}, checkpoint_id=folder)
    found = load(folder, {"w": ours(whole * 0), **empty})
    wrong += [f"we read {i}" for i, x in found.pop("w").items() if bits(x) != bits(whole)]
    return wrong + ([] if tree_bits(found) == tree_bits(rest) else [f"we read {found}"])


def losses_go_on() -> list[str]:
    """What differs where AdamW goes on, on another mesh, from the state of a checkpoint."""
    grid = make_mesh((2, 2), ("x", "y"), device="cpu")
    line = make_mesh((4,), ("x",), device="cpu")
    simulated = make_mesh((3,), ("x",), transport="simulation", device="cpu")
    x = torch.arange(40.0, dtype=torch.float64).view(8, 5).sin()

    def steps(w: Any, optimizer: Any, n: int) -> list[float]:
        losses = []
        for _ in range(n):
            optimizer.zero_grad()
            loss = ((device_put(x, P(), mesh=w.spec.mesh) @ w).tanh() ** 2).sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def begun(mesh: Mesh, spec: P) -> tuple[Any, Any]:
        w = device_put(torch.arange(35.0, dtype=torch.float64).view(5, 7).cos(), spec, mesh=mesh).requires_grad_()
        return w, torch.optim.AdamW([w], lr=0.1)

    w, optimizer = begun(grid, P(None, "x"))
    steps(w, optimizer, 3)
    folder = shared_folder()
    save(folder, {"w": w, "optimizer": optimizer.state_dict()})
    expected, wrong = steps(w, optimizer, 3), []
    for mesh, spec in ((grid, P(None, "x")), (line, P(None, "x")), (simulated, P(None, "x")), (grid, P())):
        w, optimizer = begun(mesh, spec)
        steps(w, optimizer, 1)  # makes the state whose layouts are wanted
        found = load(folder, {"w": w, "optimizer": optimizer.state_dict()})
        w, optimizer = found["w"], torch.optim.AdamW([found["w"]], lr=0.1)
        optimizer.load_state_dict(found["optimizer"])
        losses = steps(w, optimizer, 3)
        same = (
            losses == expected
            if mesh is grid and spec == P(None, "x")
            else torch.allclose(*map(torch.tensor, (losses, expected)), rtol=1e-13)
        )
        wrong += [] if same else [f"{mesh} {spec}: {losses}, not {expected}"]
    return wrong


def _no_memory(*_: Any) -> Any:
    raise MemoryError("no memory")


def failures_alike() -> list[str]:
    """What is said on this rank of trees and arguments that differ by rank, and of a disk that is full on one."""
    from fault_shim import FULL, fail_at

    grid = make_mesh((2, 2), ("x", "y"), device="cpu")
    rank = dist.get_rank()
    w, folder = device_put(torch.ones(5, 7), P("x", "y"), mesh=grid), shared_folder()
    told = [
        complaint(lambda: save(folder, {"w": w, "seed": rank // 3})),
        complaint(lambda: save(folder, {"w": w, "state": torch.full((2,), rank)})),
        complaint(lambda: save(folder, {"w": w}, step=rank // 2)),
        complaint(lambda: save(folder, {"w": w, **({"extra": 1} if rank == 1 else {})})),
        complaint(lambda: save(folder, {"w": w, "f": print})),
        complaint(lambda: load(folder, {"w": w}) if rank else save(folder, {"w": w})),
    ]
    name = "adam" + str(rank // 4)  # equal on all ranks, and on one of them one object
    save(folder, {"w": w, "names": [name, name if rank else "adam" + str(rank // 4)]}, step=0, keep=1)
    save(folder, {"w": w}, step=1)

    def full(**options: Any) -> Any:
        with watched(fail_at(0 if rank == 2 else 1000, FULL)):
            handle = save(folder, {"w": w * 2}, step=2, **options)
            if handle._thread:
                handle._thread.join()
            return handle

    told.append(complaint(full))
    full(asynchronous=True)
    told.append(complaint(lambda: save(folder, {"w": w}, step=3)))
    handle = full(asynchronous=True)
    if rank == 3:  # one rank is told by its handle, and the others are not
        complaint(handle.wait)
    told.append(complaint(lambda: load(folder, {"w": w})))
    copied, writing._copied = writing._copied, _no_memory if rank == 1 else writing._copied  # type: ignore[assignment]
    handle = save(folder, {"w": w}, step=2, asynchronous=True)
    writing._copied = copied
    told.append(complaint(handle.wait))
    told.append(str(bits(load(folder, {"w": w})["w"]) == bits(w)))
    if rank == 0:
        with open(os.path.join(folder, "latest", "__2_0.distcp"), "r+b") as file:
            file.seek(700)
            file.write(b"\xff\x00\xff")
    dist.barrier()
    told.append(complaint(lambda: load(folder, {"w": w})))
    told.append(complaint(lambda: load(folder, {"v": TensorSpec(grid, P(), (5, 7), torch.float32), "w": w.double()})))
    told.append(complaint(lambda: load(folder, {"w": w}, step=7)))
    return [text.replace(folder, "PATH") for text in told]


def kill_one_of_two(path: str, rank: int, port: int, victim: int, number: int) -> None:
    """Save the second step on two processes, of which one ends at a call. If told in time, the other ends with 7."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    tree = small_tree(make_mesh((2,), ("x",), device="cpu"), 2)
    begin = time.monotonic()
    try:
        with watched(kill_at(number) if rank == victim else lambda *_: None):
            save(path, tree, step=2)
    except fspmd.FspmdError:
        os._exit(7 if time.monotonic() - begin < 10 else 8)
    os._exit(0)


def lose_one_of_two(path: str, rank: int, port: int) -> None:
    """Save in the background on two processes, of which the second is killed. The first ends with 7 if it is told so.

    The first writes for longer than a rank may be silent. It may be on another machine.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from fspmd.checkpoints import crew, writing

    told = "rank 1 has ended: its process "
    if not path.endswith("lost"):
        crew._PERIOD, crew._SILENCE = 0.1, 1.5  # type: ignore[misc]
        crew.ended = lambda ranks: {}
        told = "rank 1 gave no sign of life for 2 s"
    real = writing._write

    def slow(*args: Any) -> Any:
        time.sleep(2.5)
        if rank == 1 and not path.endswith("slow"):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    writing._write = slow
    handle = save(path, small_tree(make_mesh((2,), ("x",), device="cpu"), 2), step=2, asynchronous=True)
    try:
        handle.wait()
    except fspmd.CheckpointError as error:
        os._exit(7 if told in str(error) else 8)
    os._exit(0)


def training_goes_on() -> list[Any]:
    """What differs where other collectives run while saves are under way, on groups that are made meanwhile, too."""
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    folder, rank, wrong = shared_folder(), dist.get_rank(), []
    real = os.write

    def slow(*args: Any) -> int:
        time.sleep(0.002 * rank)
        return real(*args)

    w = device_put(torch.arange(35.0).view(5, 7), P("x", "y"), mesh=mesh)
    os.write = slow  # type: ignore[assignment]
    try:
        for step in range(4):
            handle = save(folder, {"w": w, "step": step}, step=step, keep=2, asynchronous=True)
            for _ in range(20):
                total = float((w * w).sum())
                wrong += [] if total == sum((i + step) ** 2 for i in range(35)) else [(step, total)]
            make_mesh((2,), (f"a{step}",), ranks=(0, step + 1) if step < 3 else (1, 2), device="cpu")
            w = w + 1
            dist.new_group([0, 1, 2, 3])
    finally:
        os.write = real
    handle.wait()
    for step in (2, 3):
        found = load(folder, {"w": w, "step": 0}, step=step)
        wrong += (
            [] if found["step"] == step and bits(found["w"]) == bits(torch.arange(35.0).view(5, 7) + step) else [step]
        )
    return wrong


def end_at_once(path: str, rank: int, port: int) -> None:
    """Begin a save on two processes, of which one writes slowly, and end."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    mesh = make_mesh((2,), ("x",), device="cpu")
    real = os.write
    os.write = lambda *args: (time.sleep(0.1 * rank), real(*args))[1]  # type: ignore[assignment]
    save(path, small_tree(mesh, 2), step=2, asynchronous=True)
    dist.destroy_process_group()
