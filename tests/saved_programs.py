"""What processes run in `test_gloo` and `test_mesh`: pickled meshes and blocks, and global tensors in checkpoints."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fspmd import Flat, FspmdError, Mesh, P, device_get, device_put, make_mesh

_SPECS = (P("x"), P("x", "y"), P(("y", "x")), P(None, "y"), P())
_WHOLE = {
    "even": torch.arange(48.0).view(8, 6),
    "uneven": torch.arange(35, dtype=torch.int64).view(5, 7),
    "empty": torch.zeros(0, 3),
    "thin": torch.arange(3.0).view(1, 3),
    "number": torch.tensor(2.5),
}


def _tree(mesh: Mesh, specs: tuple[P, ...], zero: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {"step": torch.tensor(0.0 if zero else 7.0), "name": "zero" if zero else "one"}
    for name, whole in _WHOLE.items():
        for i, spec in enumerate(specs if whole.ndim else (P(),)):
            x = device_put(whole * 0 if zero else whole, spec, mesh=mesh)
            tree.setdefault(name, {})[str(i)] = x.requires_grad_() if whole.is_floating_point() else x
    return tree


def _differs(tree: dict[str, Any]) -> list[str]:
    found = device_get(tree)
    rows = ((name, i, x, whole) for name, whole in _WHOLE.items() for i, x in found[name].items())
    return [f"{name} {i}" for name, i, x, whole in rows if not torch.equal(x, whole)]


def _shared_folder() -> str:
    made = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    return made[0]


def _complaint(call: Callable[[], Any]) -> str:
    try:
        return f"gave {call()!r}"
    except FspmdError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # of torch, whose CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"


def checkpoints() -> list[Any]:
    """What differs after a checkpoint has been read: on the same mesh, on another, in a simulation and out of one."""
    import torch.distributed.checkpoint as dcp

    grid = make_mesh((2, 2), ("x", "y"), device="cpu")
    line = make_mesh((4,), ("z",), device="cpu")
    simulated = make_mesh((3, 2), ("x", "y"), transport="simulation", device="cpu")
    folders = [_shared_folder() for _ in range(2)]
    dcp.save(_tree(grid, _SPECS, zero=False), checkpoint_id=folders[0])
    if dist.get_rank() == 0:
        dcp.save(_tree(simulated, _SPECS, zero=False), checkpoint_id=folders[1], no_dist=True)
    dist.barrier()
    wrong: list[Any] = []
    others = (P("z"), P(None, "z"), P(), P(None, "z"), P("z"))
    for folder in folders:
        for mesh, specs in ((grid, _SPECS), (grid, _SPECS[::-1]), (line, others), (simulated, _SPECS[::-1])):
            tree = _tree(mesh, specs, zero=True)
            dcp.load(tree, checkpoint_id=folder)
            wrong += _differs(tree)
            wrong += [] if tree["step"] == 7 and tree["name"] == "one" else ["the rest"]
    bad = (
        {"x": device_put(torch.ones(4), P(unreduced={"x"}), mesh=grid)},
        {"x": device_put(torch.ones(24), P(Flat((4, None), (6, "x"))), mesh=grid)},
        {"x": (device_put(torch.ones(4), P("x"), mesh=grid),)},
    )
    return [wrong, *(_complaint(lambda b=b: dcp.save(b, checkpoint_id=_shared_folder())) for b in bad)]


def optimizer_states() -> list[bool]:
    """Of torch.optim, saved by each rank for itself, and as a checkpoint."""
    import torch.distributed.checkpoint as dcp

    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")

    def trained(steps: int) -> tuple[Any, torch.optim.Optimizer]:
        w = device_put(torch.arange(35.0).view(5, 7), P("x", "y"), mesh=mesh).requires_grad_()
        made = torch.optim.Adam([w])
        for _ in range(steps):
            made.zero_grad()
            (w**2).sum().backward()
            made.step()
        return w, made

    folder, found = _shared_folder(), []
    _, saved = trained(3)
    moments = device_get(saved.state_dict()["state"][0]["exp_avg"])
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    _, other = trained(1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    found.append(torch.equal(device_get(other.state_dict()["state"][0]["exp_avg"]), moments))
    states = {"adam": {"exp_avg": saved.state_dict()["state"][0]["exp_avg"]}}
    dcp.save(states, checkpoint_id=folder)
    read = {"adam": {"exp_avg": device_put(torch.zeros(5, 7), P("y"), mesh=mesh)}}
    dcp.load(read, checkpoint_id=folder)
    return [*found, torch.equal(device_get(read["adam"]["exp_avg"]), moments)]


def pickled_blocks() -> list[Any]:
    """Whether blocks come back here, in every way; and what is said of the first rank's, which all load."""
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    pair = Mesh.concatenate([mesh["y"]], "y") if dist.get_rank() < 2 else None
    whole = torch.arange(35.0).view(5, 7)
    tree = {"w": device_put(whole, P("x"), mesh=mesh).requires_grad_(), "r": device_put(whole, P(), mesh=mesh)}
    raw = io.BytesIO()
    torch.save(tree, raw)
    loaded = [torch.load(io.BytesIO(raw.getvalue()), weights_only=only) for only in (True, False)]
    loaded += [pickle.loads(pickle.dumps(tree, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    loaded += [copy.deepcopy(tree), copy.copy(tree)]
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(pickle.dumps(tree))
    loaded.append(pickle.loads(queue.get()))
    same = all(torch.equal(device_get(x[name]), whole) for x in loaded for name in tree)
    kept = all(x["w"].requires_grad and not x["r"].requires_grad and x["w"].spec is tree["w"].spec for x in loaded)
    of_first = [raw.getvalue(), pickle.dumps(tree["r"]), pickle.dumps(pair and device_put(whole, P("y"), mesh=pair))]
    dist.broadcast_object_list(of_first)
    told = [_complaint(lambda: sorted(torch.load(io.BytesIO(of_first[0]), weights_only=True)))]
    told += [_complaint(lambda raw=raw: pickle.loads(raw).shape) for raw in of_first[1:]]
    return [same and kept, of_first[0], *told]


def pickled_mesh(data: bytes) -> tuple[Any, ...]:
    mesh = pickle.loads(data)
    return str(mesh), mesh.groups("tp"), mesh.coordinate(3), mesh == pickle.loads(pickle.dumps(mesh))
