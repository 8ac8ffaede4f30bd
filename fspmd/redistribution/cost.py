"""The price of a collective: the alpha-beta model over ring algorithms, with the links of a machine as data.

A message of ``b`` bytes over a link takes ``latency + b / bandwidth``. Rings of ``n`` ranks: Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), sections 3 to 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from fspmd.cache import cached
from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described, micros


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks: latency in µs, and bandwidth in one direction in bytes per µs (1 GB/s = 1000)."""

    latency: float
    bandwidth: float


#: figures of the vendors, for each rank, in one direction
NVLINK: Final = Link(1.0, 450e3)  # NVLink 4, 18 links of 25 GB/s
PCIE: Final = Link(1.5, 32e3)  # PCIe 4.0 x16
INFINIBAND: Final = Link(5.0, 50e3)  # NDR, 400 Gb/s
ETHERNET: Final = Link(30.0, 12.5e3)  # 100 Gb/s


@dataclass(frozen=True, slots=True)
class Topology:
    """The speed of a machine. A host has ``per_host`` consecutive ranks.

    ``inside`` is the link within a host, and ``between`` the link from host to host. ``axes`` overrides the link of
    single mesh axes, by name. ``launch`` is the time in µs to begin any collective; it makes one collective over two
    axes cheaper than two in a row. ``memory`` is the speed at which a rank reads or writes its own memory, in bytes per
    µs; of two plans that move the same, it makes the plan that holds less the cheaper. ``flops`` is the number of
    operations of a rank in a µs. The bytes of blocks beyond ``capacity`` count as moved out over ``spill``, so plans
    avoid steps that do not fit.

    Raises:
        ArgumentError: A figure is not a number or too small, or ``axes`` is not a tuple of (name, link) pairs.
    """

    inside: Link = NVLINK
    between: Link = INFINIBAND
    per_host: int = 8
    launch: float = 10.0
    memory: float = 3e6
    flops: float = 4e8
    capacity: float = float("inf")
    spill: Link = PCIE
    axes: tuple[tuple[str, Link], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)  # part of many keys

    def __post_init__(self) -> None:
        if wrong := [f"{name}={value!r}" for name, value, least in _figures(self) if not _is_figure(value, least)]:
            raise ArgumentError(
                f"Topology got {', '.join(wrong)}; latency and launch are numbers of µs from 0 on, bandwidths, memory, "
                "flops and capacity are above 0 per µs or in bytes, per_host is an int from 1 on, and axes is a tuple "
                "of pairs, axes=(('x', Link(latency=2.0, bandwidth=450e3)),)"
            )
        figures = (self.inside, self.between, self.per_host, self.launch, self.memory, self.flops, self.capacity)
        object.__setattr__(self, "_hash", hash((*figures, self.spill, self.axes)))

    def __hash__(self) -> int:
        return self._hash

    def link(self, mesh: Mesh, axes: tuple[str, ...]) -> Link:
        """Return the slowest link between the ranks of a group along ``axes``."""
        if not self.axes:
            return self._between_hosts(mesh, axes)
        named = dict(self.axes)
        links = [named[axis] for axis in axes if axis in named]
        others = tuple(axis for axis in axes if axis not in named)
        if others:
            links.append(self._between_hosts(mesh, others))
        return _slowest(links)

    def _between_hosts(self, mesh: Mesh, axes: tuple[str, ...]) -> Link:
        """Return `link` for axes without links of their own."""
        if not _leaves_host(mesh, axes, self.per_host):
            return self.inside
        return _slowest([self.between, self.inside]) if _stays(mesh, axes, self.per_host) else self.between


def _figures(topology: Topology) -> Iterator[tuple[str, Any, float]]:
    """Yield the name, the value and the least allowed value of each figure. A value of a wrong type is never enough."""
    links = {"inside": topology.inside, "between": topology.between, "spill": topology.spill}
    for name, link in (*links.items(), *(topology.axes if _is_pairs(topology.axes) else (("axes", topology.axes),))):
        if isinstance(link, Link):
            yield from ((f"{name}.latency", link.latency, 0), (f"{name}.bandwidth", link.bandwidth, _ABOVE))
        else:
            yield name, link, float("inf")
    yield "per_host", topology.per_host, 1 if isinstance(topology.per_host, int) else float("inf")
    yield "launch", topology.launch, 0
    yield from ((name, getattr(topology, name), _ABOVE) for name in ("memory", "flops", "capacity"))


def _is_pairs(axes: Any) -> bool:
    """Return whether ``axes`` is a tuple of pairs that begin with a name."""
    pairs = axes if isinstance(axes, tuple) else (None,)
    return all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)


_ABOVE: Final = 5e-324  # the least float that is above 0


def _is_figure(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least


def _slowest(links: list[Link]) -> Link:
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


@cached(maxsize=1024)
def _stays(mesh: Mesh, axes: tuple[str, ...], per_host: int) -> bool:
    """Return whether some axis of a group stays on a host, so that data also passes the links of the host."""
    return any(mesh.shape[axis] > 1 and not _leaves_host(mesh, (axis,), per_host) for axis in axes)


@cached(maxsize=1024)
def _leaves_host(mesh: Mesh, axes: tuple[str, ...], per_host: int) -> bool:
    """Return whether the corners of a group along the axes stand on more than one host."""
    corners = [(0,) * len(mesh.axis_names)]
    for place, axis in enumerate(mesh.axis_names):
        if axis in axes:
            last = mesh.shape[axis] - 1
            corners += [(*at[:place], last, *at[place + 1 :]) for at in corners]
    return len({mesh.rank_at(at) // per_host for at in corners}) > 1


@cached(maxsize=256)
def links_differ(mesh: Mesh, topology: Topology) -> bool:
    """Return whether some axes of a mesh are quicker than others, or than all axes together."""
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    groups = [(axis,) for axis in axes] + [axes] * (len(axes) > 1)
    return len({topology.link(mesh, group) for group in groups}) > 1


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a collective for each rank."""

    moved: float  # bytes that a rank sends, or receives
    time: float  # µs
    peak: int  # bytes that a rank holds at once: its blocks before and after

    def __str__(self) -> str:
        return f"each rank sends {self.moved:,.0f} B in {micros(self.time)} and holds {self.peak:,} B at most"

    def __add__(self, other: Price) -> Price:
        return Price(self.moved + other.moved, self.time + other.time, max(self.peak, other.peak))

    @property
    def rank(self) -> tuple[float, int]:
        """A key to choose by: the quickest, and of equally quick ones the one that holds least."""
        return self.time, self.peak


FREE: Final = Price(0.0, 0.0, 0)

#: kernel -> function of n ranks, bytes before and bytes after -> (messages one after another, bytes that a rank sends)
_FORMULAS: Final[dict[str, Callable[[int, int, int], tuple[int, float]]]] = {
    "gather": lambda n, before, after: (n - 1, (n - 1) * after / n),
    "reduce_scatter": lambda n, before, after: (n - 1, (n - 1) * before / n),
    "reduce": lambda n, before, after: (2 * (n - 1), 2 * (n - 1) * before / n),
    "exchange": lambda n, before, after: (n - 1, (n - 1) * before / n),
    "permute": lambda n, before, after: (1, before),
    "broadcast": lambda n, before, after: (n - 1, before),
}
_KERNELS: Final = {
    **{name: name for name in _FORMULAS},
    **{"gather_once": "gather", "reduce_once": "reduce", "mean": "reduce", "reduce_to_root": "reduce"},
    "broadcast_once": "broadcast",
}
_IN_PARTS: Final = frozenset({"gather", "reduce_scatter", "exchange"})  # a message is the overlap of two ranks' blocks
VIEWS: Final = frozenset({"alias", "per_rank", "pick", "slice", "view"})  # kernels that read and write nothing


def moves(kernel: str) -> bool:
    """Return whether a kernel moves data between ranks."""
    return kernel in _KERNELS or kernel in ("ragged", "reblock")


def price(
    kernel: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    before: int,
    after: int,
    topology: Topology | None = None,
    traffic: tuple[int, int] | None = None,
    ranks: int | None = None,
    message: int | None = None,
) -> Price:
    """Return the price of a kernel over ``axes`` on blocks of ``before`` bytes that become blocks of ``after`` bytes.

    A kernel that moves nothing between ranks costs the time to read and write the blocks; a kernel that makes a view
    is free. ``traffic`` gives the messages and bytes that the busiest rank receives. It serves kernels without a
    formula, whose traffic depends on the layouts; they assemble the new block piece by piece. ``ranks`` is the size of
    a group where axes are cut into several groups. ``message`` gives the bytes of the longest message, for which all
    ranks wait, where blocks are uneven.

    >>> from fspmd import make_mesh
    >>> slow = Topology(Link(1.0, 1000.0), launch=2.0, memory=float("inf"))
    >>> price("gather", make_mesh((4,), ("x",)), ("x",), 1000, 4000, slow)
    Price(moved=3000.0, time=8.0, peak=5000)
    """
    topology = topology or _current
    axes = axes or mesh.axis_names
    n, passed = ranks or prod([mesh.shape[axis] for axis in axes]), before + after
    local = 0.0 if kernel in VIEWS or traffic is not None else passed / topology.memory
    local += max(0.0, passed - topology.capacity) / topology.spill.bandwidth
    name = _KERNELS.get(kernel)
    rounds, moved = (0, 0.0) if name is None or n == 1 else _FORMULAS[name](n, before, after)
    if message is not None and name in _IN_PARTS:
        moved = rounds * message
    if traffic is not None:
        rounds, moved = traffic
        local += 2 * after / topology.memory
    if not rounds or not moved:  # an empty collective is not launched
        return Price(0.0, local, passed)
    return Price(moved, _sending(rounds, moved, topology.link(mesh, axes), topology) + local, passed)


def native_time(kernel: str, n: int, before: int, after: int, link: Link, topology: Topology) -> float:
    """Return the time of `price` for a kernel with a formula, over 2 or more ranks, whose blocks fit into memory."""
    return _sending(*_FORMULAS[kernel](n, before, after), link, topology) + (before + after) / topology.memory


def _sending(rounds: int, moved: float, link: Link, topology: Topology) -> float:
    return topology.launch + rounds * link.latency + moved / link.bandwidth


def work(multiplications: float, nbytes: float, topology: Topology) -> float:
    """Return the µs to compute so many products and sums, on operands and results of ``nbytes`` bytes."""
    return max(2 * multiplications / topology.flops, nbytes / topology.memory)


_current = Topology()
_planned: list[Callable[[], None]] = []


def topology() -> Topology:
    """Return the topology by which prices are computed."""
    return _current


def replan_with(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever a topology is set, so that it drops the plans of the old one."""
    _planned.append(forget)


def set_topology(topology: Topology) -> None:
    """Compute prices by ``topology`` from now on in this process, and plan anew. Every rank must set the same one.

    Raises:
        ArgumentError: ``topology`` is not a Topology.
    """
    global _current
    if not isinstance(topology, Topology):
        raise ArgumentError(
            f"set_topology got {described(topology)}; give it a Topology, such as "
            "Topology(inside=Link(latency=2.0, bandwidth=450e3), per_host=8)"
        )
    changed, _current = topology != _current, topology
    if changed:  # other threads plan by the new topology from now on
        for forget in _planned:
            forget()
