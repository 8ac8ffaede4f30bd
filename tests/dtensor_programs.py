"""What processes run in `test_gloo`: DTensors as `Sharded` values and back, and beside what takes none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fspmd
from fspmd import FspmdError, Mesh, P, Sharded, device_get, device_put, from_dtensor, make_mesh, shard_map, to_dtensor

_SIZES = (8, 12, 24, 7, 5, 1, 0)


def _placed(whole: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
    """A DTensor whose block is what its own placements split off."""
    from torch.distributed.tensor import DTensor

    block = whole
    for axis, place in enumerate(placements):
        if place.is_partial():
            block = block / mesh.shape[axis]
        elif not place.is_replicate():
            parts, _ = place._split_tensor(block, mesh.shape[axis], with_padding=False, contiguous=True)
            block = parts[mesh.get_coordinate()[axis]]
    return DTensor.from_local(
        block.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _full(x: Any, whole: Tensor) -> Tensor:
    """What torch puts together; the tensor itself where it refuses, as of a dim of 5 over two axes."""
    try:
        full: Tensor = x.full_tensor()
    except Exception:  # each version has its own
        return whole
    return full


def _some(meshes: dict[str, Any], count: int) -> Iterator[tuple[Any, tuple[Any, ...], int]]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = [Replicate(), Shard(0), Shard(1), Partial(), *(_StridedShard(0, split_factor=n) for n in (2, 3, 4))]
    every = [
        (mesh, placements, size)
        for mesh in meshes.values()
        for placements in itertools.product(kinds, repeat=mesh.ndim)
        for size in _SIZES
    ]
    yield from random.Random(0).sample(every, count)


def layouts_of_dtensors(count: int) -> tuple[int, list[str]]:
    """How many layouts have an equal, and those where a value, its memory or its way back differ."""
    from torch.distributed.device_mesh import init_device_mesh

    meshes = {str(n): init_device_mesh("cpu", n, mesh_dim_names=("a", "b")[: len(n)]) for n in ((4,), (2, 2))}
    found, wrong = 0, []
    for mesh, placements, size in _some(meshes, count):
        whole = torch.arange(1.0, size * 6 + 1).view(size, 6)
        theirs = _placed(whole, mesh, placements)
        case = f"{mesh} {placements} {size}"
        try:
            ours = from_dtensor(theirs)
        except FspmdError as error:
            wrong += [case] if "Strided" not in case or "no spec gives" not in str(error) else []
            continue
        found += 1
        back = to_dtensor(ours)
        same = ours.local.data_ptr() == theirs.to_local().data_ptr() == back.to_local().data_ptr()
        values = [device_get(ours), _full(back, whole), _full(theirs, whole)]
        if not same or back.device_mesh != mesh or not all(torch.allclose(x, whole) for x in values):
            wrong.append(case)
    return found, wrong


def flattened_dtensors() -> list[str]:
    """What differs of DTensors whose dims torch has flattened: their shards are strided, and cut into pieces."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []
    for shape in ((2, 2, 2), (3, 2, 4), (2, 4, 2), (4, 2, 6)):
        whole = torch.arange(prod(shape)).view(shape)
        for placements in itertools.product([Replicate(), *map(Shard, range(3))], repeat=2):
            if placements[0] == placements[1] or any(p.is_shard() and shape[p.dim] % 2 for p in placements):
                continue
            try:
                theirs = distribute_tensor(whole, mesh, placements).flatten()
            except RuntimeError:  # torch 2.11 flattens only what is cut in its first dim
                if Shard(1) in placements or Shard(2) in placements:
                    continue
                raise
            if not torch.equal(theirs.full_tensor(), whole.flatten()):
                continue
            ours = from_dtensor(theirs)
            if (
                not torch.equal(device_get(ours), whole.flatten())
                or ours.local.data_ptr() != theirs.to_local().data_ptr()
            ):
                wrong.append(f"{shape} {placements}")
    return wrong


def dtensors_in_fewer_pieces() -> list[str]:
    """What differs of strided shards whose pieces do not divide the dim, so that torch makes fewer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []
    for size, first, second in (
        (8, Replicate(), _StridedShard(0, split_factor=6)),
        (8, _StridedShard(0, split_factor=6), Replicate()),
        (8, Shard(0), _StridedShard(0, split_factor=3)),
        (12, Shard(0), _StridedShard(0, split_factor=4)),
    ):
        whole = torch.arange(1.0, size + 1)
        theirs = _placed(whole, mesh, (first, second))
        ours = from_dtensor(theirs)
        values = [device_get(ours), _full(theirs, whole)]
        same = ours.local.data_ptr() == theirs.to_local().data_ptr()
        if not same or not all(torch.equal(x, whole) for x in values):
            wrong.append(f"{size} {first} {second}")
    return wrong


def specs_as_dtensors() -> list[str]:
    """What differs of values that lie in every way, and of what is no DTensor why."""
    from fspmd import Flat

    grid = make_mesh((2, 2), ("a", "b"), device="cpu")
    wrong = []
    for size, entry in itertools.product((8, 5, 0), (None, "a", "b", ("a", "b"), ("b", "a"))):
        for other in (None, *({"a", "b"} - {*([entry] if isinstance(entry, str) else entry or ())})):
            whole = torch.arange(size * 6.0).view(size, 6).requires_grad_()
            x = device_put(whole, P(entry, other), mesh=grid)
            y = to_dtensor(x)
            weight = torch.arange(size * 6.0).view(size, 6).sin()
            (y * _like(y, weight)).sum().full_tensor().backward()
            if not torch.equal(_full(y, whole), whole) or not torch.allclose(_known(whole.grad), weight):
                wrong.append(f"{x!r} as {y.placements}")
    flat = device_put(torch.arange(24.0), P(Flat((4, None), (6, "b"))), mesh=grid)
    transposed = device_put(torch.arange(24.0).view(4, 6), P("a"), mesh=grid).t()
    if not torch.equal(_full(to_dtensor(flat), torch.arange(24.0)), torch.arange(24.0)):
        wrong.append(f"{flat!r}")
    if to_dtensor(transposed).stride() != (1, 6):
        wrong.append(f"strides {to_dtensor(transposed).stride()}")
    for partition in (P(reduced={"a"}), P(Flat((3, None), (8, ("b", "a"))))):
        wrong.append(_complaint(lambda p=partition: to_dtensor(device_put(torch.ones(24), p, mesh=grid))))
    return wrong


def _like(y: Any, whole: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    same = DTensor.from_local(whole, y.device_mesh, [Replicate()] * y.device_mesh.ndim, run_check=False)
    return same.redistribute(placements=y.placements)


def _known(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def gradients_of_dtensors() -> list[bool]:
    """Of a parameter that is a DTensor, through a Sharded; twice, since the same leaf is used again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    whole = torch.arange(20.0).view(5, 4)
    found = []
    for place in (Shard(0), Shard(1), Replicate()):
        w = torch.nn.Parameter(distribute_tensor(whole, mesh, [place]))
        loss = (from_dtensor(w).sin() ** 2).sum() + from_dtensor({"w": w})["w"].sum()
        loss.backward()
        expected = 2 * whole.sin() * whole.cos() + 1
        found += [w.grad.placements == (place,), torch.allclose(w.grad.full_tensor(), expected)]
    pending = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    row = pending.sum(0)  # a Partial
    assert row.placements == (Partial(),), row.placements
    (from_dtensor(row) ** 2).sum().backward()
    found.append(torch.allclose(pending.grad.full_tensor(), (2 * whole.sum(0)).expand(5, 4)))
    return found


def _complaint(call: Callable[[], Any]) -> str:
    try:
        return f"gave {call()}"
    except FspmdError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"no error of ours: {error!r}"


def dtensors_where_none_are_taken() -> dict[str, str]:
    """What is said of each use of a DTensor, or of a DeviceMesh, in the place of what is ours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    theirs = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    mesh = Mesh.from_device_mesh(theirs)
    whole = torch.arange(32.0).view(8, 4)
    d = distribute_tensor(whole, theirs, [Shard(0)])
    same = distribute_tensor(whole, theirs, [Replicate()])
    s = device_put(whole, P("x"), mesh=mesh)
    unnamed = DTensor.from_local(whole, init_device_mesh("cpu", (4,)), [Replicate()], run_check=False)
    box = SimpleNamespace(held=same)

    def mapped(body: Callable[..., Any], check: bool = True) -> Callable[..., Any]:
        return shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check)

    def hidden() -> Any:
        return box.held

    known = mapped(lambda x: x["a"] * 2)
    known({"a": whole})
    calls: dict[str, Callable[[], Any]] = {
        "Sharded": lambda: Sharded(d, s.spec),
        "from_local": lambda: fspmd.from_local(d, P("x"), mesh=mesh),
        "device_put": lambda: device_put({"a": torch.nn.Parameter(d)}, P("x"), mesh=mesh),
        "reshard": lambda: fspmd.reshard(d, P("x"), mesh=mesh),
        "broadcast": lambda: fspmd.broadcast(d, src=0, mesh=mesh),
        "beside": lambda: s + d,
        "beside, the other way": lambda: d + s,
        "in a list": lambda: torch.cat([s, d]),
        "written": lambda: s.copy_(d),
        "argument": lambda: mapped(lambda x: x)(d),
        "argument of a later call": lambda: known({"a": d}),
        "closed over": lambda: mapped(lambda x: x @ same.t())(s),
        "closed over, local": lambda: mapped(lambda x: x * same.to_local().sum(), check=False)(s),
        "found": lambda: mapped(lambda x: x * hidden().sum())(s),
        "collective": lambda: mapped(lambda x: x + fspmd.psum(hidden(), "x"))(s),
        "returned": lambda: mapped(lambda x: hidden())(s),
        "returned unchecked": lambda: mapped(lambda x: hidden(), check=False)(s),
        "jit": lambda: fspmd.jit(lambda x: x * 2)(d),
        "jit over": lambda: fspmd.jit(lambda x: (x * 2, d * 2))(s),
        "lower": lambda: fspmd.jit(lambda x: x * 2).lower(d),
        "device_get": lambda: fspmd.device_get({"a": d}),
        "typeof": lambda: fspmd.typeof(d),
        "global_norm": lambda: fspmd.global_norm([s, d]),
        "clip_by_global_norm": lambda: fspmd.clip_by_global_norm([d], 1.0),
        "pad_to_blocks": lambda: fspmd.pad_to_blocks(d, P("x"), mesh=mesh),
        "attach": lambda: fspmd.attach(torch.nn.Linear(4, 8, bias=False), {"weight": d}),
        "functional_call": lambda: fspmd.functional_call(torch.nn.Linear(4, 8, bias=False), {"weight": d}, whole),
        "process_allgather": lambda: fspmd.process_allgather({"a": d}, mesh=mesh),
        "assert_equal": lambda: fspmd.assert_equal({"a": d}, mesh=mesh),
        "auto_spec": lambda: fspmd.auto_spec(lambda x: x * 2, mesh, d),
        "cotangent": lambda: (s.detach().requires_grad_() * 1).backward(d),
    }
    meshes: dict[str, Callable[[], Any]] = {
        "mesh of device_put": lambda: device_put(whole, P("x"), mesh=theirs),
        "mesh of zeros": lambda: fspmd.zeros((4,), spec=P("x"), mesh=theirs),
        "mesh of reshard": lambda: fspmd.reshard(s, P("x"), theirs),
        "mesh of shard_map": lambda: shard_map(lambda x: x, mesh=theirs, in_specs=P(), out_specs=P()),
        "mesh of set_mesh": lambda: fspmd.set_mesh(theirs),
        "mesh of TensorSpec": lambda: fspmd.TensorSpec(theirs, P("x"), (4,), torch.float32),
        "mesh of auto_spec": lambda: fspmd.auto_spec(lambda x: x, theirs, whole),
        "mesh of init_sharded": lambda: fspmd.init_sharded(lambda: torch.nn.Linear(4, 4), {"*": P("x")}, mesh=theirs),
    }
    others: dict[str, Callable[[], Any]] = {
        "max": lambda: from_dtensor(DTensor.from_local(whole, theirs, [Partial("max")], run_check=False)),
        "unnamed": lambda: from_dtensor(unnamed),
        "named": lambda: from_dtensor(unnamed, mesh=mesh).spec,
        "other mesh": lambda: from_dtensor(unnamed, mesh=make_mesh((2, 2), ("x", "y"), device="cpu")),
        "in a body": lambda: mapped(lambda x: from_dtensor(hidden()))(s),
        "simulated": lambda: to_dtensor(
            device_put(whole, P("x"), mesh=make_mesh((4,), ("x",), transport="simulation", device="cpu"))
        ),
    }
    return {name: _complaint(call) for name, call in {**calls, **meshes, **others}.items()}
