"""`measure_topology`: the links of a mesh, measured by timed collectives."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import torch

from fspmd.body import the_mesh
from fspmd.errors import MeshError
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call, call
from fspmd.redistribution.cost import Link, Topology, topology
from fspmd.transport import Options, arrived, transport_named

_SECONDS: Final = 1.0  # for all axes together, without the start of their groups
_SMALL: Final = 8  # bytes of a block
_LARGE: Final = range(16, 29, 2)  # exponents of two: bytes of a block, tried until a gather takes `_LONG`
_LONG: Final = 20e3  # µs
_REPEATS: Final = 3

#: transport without links -> the reason why it cannot be measured
_NO_LINKS: Final = {
    "simulation": "is simulated in one process, where nothing moves between ranks",
    "abstract": "is abstract: it has no ranks, and nothing to measure",
}


def measure_topology(mesh: Mesh | None = None) -> Topology:
    """Measure the links along each axis of a mesh, for `set_topology`. Every rank returns the same figures.

    For each axis of more than one rank all-gathers are timed, on all groups of the axis at once. A block of 8 bytes
    gives the latency. Blocks that grow until a gather takes 20 ms give the bandwidth. All axes together take about a
    second. Each time is the best of three, and each of the three is that of the slowest rank. ``launch`` is the time to
    begin a collective, ``memory`` the speed of a copy. Other figures are those of the present `topology()`.

    Communication: all-gathers of up to 256 MiB a rank over each axis, and all-reduces of one number.

    Raises:
        MeshError: the mesh is simulated, so that nothing moves, or abstract, so that it has no ranks.

    >>> from fspmd import make_mesh
    >>> measure_topology(make_mesh((4,), ("x",)))
    Traceback (most recent call last):
    fspmd.errors.MeshError: measure_topology: mesh(x=4) is simulated in one process, where nothing moves between \
ranks; measure under torchrun, or give figures: set_topology(Topology(inside=Link(latency=2.0, bandwidth=450e3)))
    """
    mesh = the_mesh(mesh, "measure_topology")
    if mesh.transport in _NO_LINKS:
        raise MeshError(
            f"measure_topology: {mesh!r} {_NO_LINKS[mesh.transport]}; measure under torchrun, or give figures: "
            "set_topology(Topology(inside=Link(latency=2.0, bandwidth=450e3)))"
        )
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    before = topology()
    measured: list[tuple[str, Link]] = []
    launch = before.launch
    for axis in axes:
        gather = call("all_gather", mesh, (axis,))
        small, begun = _time(gather, _SMALL), _time(gather, _SMALL, begin=True)
        launch = begun if not measured else max(launch, begun)
        measured.append((axis, _link(gather, small, begun, _SECONDS / len(axes))))
    kept = tuple(pair for pair in before.axes if pair[0] not in axes)
    return replace(before, launch=launch, memory=_memory(mesh), axes=(*kept, *measured))


def _link(gather: Call, small: float, begun: float, seconds: float) -> Link:
    """The link of one axis: its latency from a small gather, its bandwidth from the extra time of a large one."""
    rounds, spent = gather.mesh.axis_size(gather.axes) - 1, 0.0
    for power in _LARGE:
        large = _time(gather, 1 << power)  # the same on all ranks, so that all stop at the same size
        spent += (_REPEATS + 1) * large
        if large > _LONG or 4 * spent > seconds * 1e6:
            break
    bandwidth = rounds * (1 << power) / max(large - small, 1e-3)
    return Link(max(small - begun, 0.0) / rounds, bandwidth)


def _time(gather: Call, size: int, *, begin: bool = False) -> float:
    """The time in µs of a gather of blocks of ``size`` bytes; with ``begin`` only the time to begin it."""
    mesh = gather.mesh
    x = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    gather.run(x)
    best = float("inf")
    for _ in range(_REPEATS):
        _slowest(0.0, mesh)  # all ranks begin together
        start = time.perf_counter()
        pending = gather.start(x)
        begun = time.perf_counter()
        pending.wait()
        _settle(mesh)
        took = (begun if begin else time.perf_counter()) - start
        best = min(best, _slowest(took * 1e6, mesh))
    return best


def _memory(mesh: Mesh) -> float:
    """The bytes per µs that a copy reads and writes."""
    x = torch.zeros(1 << 24, dtype=torch.uint8, device=mesh.device)
    best = float("inf")
    for _ in range(_REPEATS):
        _settle(mesh)
        start = time.perf_counter()
        x.clone()
        _settle(mesh)
        best = min(best, (time.perf_counter() - start) * 1e6)
    return 2 * x.numel() / _slowest(best, mesh)


def _slowest(figure: float, mesh: Mesh) -> float:
    """The largest figure of all ranks."""
    x = torch.tensor([figure], dtype=torch.float32, device=mesh.device)
    return float(arrived(transport_named(mesh.transport).reduce(x, mesh, mesh.axis_names, Options(op="max"))))


def _settle(mesh: Mesh) -> None:
    """Wait for the device."""
    if mesh.device_type != "cpu":
        torch.get_device_module(mesh.device_type).synchronize()
