"""What processes run in `test_checkpoints`, and the trees that it saves."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from fault_shim import kill_at, watched
from torch import Tensor

import fspmd
from fspmd import Flat, Mesh, P, Sharded, TensorSpec, device_get, device_put, make_mesh
from fspmd.checkpoints import load, save


def bits(x: Any) -> Any:
    """A global tensor as its bytes, or another value itself."""
    if isinstance(x, Sharded):
        x = device_get(x.detach())
    if isinstance(x, Tensor):
        return str(x.dtype), tuple(x.shape), bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
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
