"""`Overlap`: begin each collective as soon as its operand is computed, and wait where its result is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Final

from torch import fx

from fspmd.programs.keys import check_bytes, check_choice
from fspmd.programs.program import Program, leave, leave_all
from fspmd.programs.steps import (
    Routed,
    add_begun,
    add_wait,
    dependencies,
    in_flight,
    is_collective,
    is_view,
    is_wait,
    wait_of,
    written,
)
from fspmd.redistribution.cost import moves

#: the order before a step: begins of collectives, waits, begins of collectives that need a waited result; and the step
_BEGIN, _WAIT, _AFTER_WAIT, _STEP = range(4)
_BLOCKING: Final = ("mean",)  # kernels that wait as soon as they begin
Place = tuple[int, int]  # a place before a step: the index of the step, and the order there


@dataclass(frozen=True, slots=True)
class Overlap:
    """A pass for `jit`: begin collectives early, and wait for them late.

    Collectives keep their order, so all ranks begin them in one order. A collective stays a single step if nothing can
    be computed meanwhile, or if it exceeds the budget.

    Attributes:
        budget: the most bytes of results that are under way at any time.
        overtake: whether collectives may begin before earlier ones, such as gathers of the weights of the next layer.
            This is for functions whose Python makes the same choices on all ranks. If a block of the program is uneven,
            the order stays.

    >>> import torch
    >>> from fspmd import P, jit, make_mesh, psum, shard_map
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = shard_map(lambda x: psum(x, "x") * x.exp().sum(), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    >>> [jit(f, passes=p).lower(torch.ones(1 << 20)).cost().overlapped > 0.1 for p in ([], [Overlap()])]
    [False, True]
    """

    budget: float = 1 << 29
    overtake: bool = False

    def __post_init__(self) -> None:
        check_bytes("Overlap(budget=...)", self.budget)
        check_choice("Overlap(overtake=...)", self.overtake)

    def __call__(self, program: Program) -> int:
        """Run the pass. Returns the number of collectives that now run beside other steps."""
        nodes = list(program.graph.nodes)
        overtake = self.overtake and not leave_all(program, "overlap", "the order of collectives", even=True)
        schedule = _IssueOrder(nodes, dependencies(program), self.budget, overtake)
        flights, views = schedule.flights, schedule.moved
        placed = [(views.get(node, (i, _STEP)), node) for i, node in enumerate(nodes)]
        for flight in flights:
            placed += zip((flight.begin, flight.wait), _split(flight.node), strict=True)
        order = [node for _, node in sorted(placed, key=itemgetter(0))]
        for node, after in pairwise(order):
            if node.next is not after:
                node.append(after)
        for flight in flights:
            program.graph.erase_node(flight.node)
        return len(flights)


@dataclass(frozen=True, slots=True)
class _CollectiveFlight:
    """A collective between its begin and its wait."""

    node: fx.Node
    views: list[fx.Node]  # the views that make its operand, and move with it
    begin: Place
    wait: Place


@dataclass(slots=True)
class _IssueOrder:
    """The places of begins and waits, which are decided for one collective after another in the order of begins."""

    nodes: Sequence[fx.Node]
    before: dict[fx.Node, set[fx.Node]]  # for each step, the earlier steps that it cannot overtake
    budget: float
    overtake: bool
    flights: list[_CollectiveFlight] = field(default_factory=list)
    moved: dict[fx.Node, Place] = field(default_factory=dict)  # new places of views
    _index: dict[fx.Node, int] = field(default_factory=dict)
    _needed: dict[fx.Node, int] = field(default_factory=dict)  # the first step that needs each step
    _landed: dict[fx.Node, Place] = field(default_factory=dict)  # places from which the results of flights exist
    _load: list[float] = field(default_factory=list)  # bytes under way before and during each step

    def __post_init__(self) -> None:
        self._index = {node: i for i, node in enumerate(self.nodes)}
        for i, node in enumerate(self.nodes):
            for earlier in self.before[node]:
                self._needed.setdefault(earlier, i)
        self._load = [0.0] * (2 * len(self.nodes))
        work = [0, *accumulate(map(_computes, self.nodes))]
        for node in filter(in_flight, self.nodes):
            if (wait := wait_of(node)) is not None:
                self._fly(2 * self._index[node] + 1, 2 * self._index[wait] + 1, wait.meta["value"].nbytes)
        last: Place = 0, _BEGIN
        for i, node in enumerate(self.nodes):
            with_effect = "call" in node.meta and not is_collective(node)
            if with_effect or isinstance(node.target, Routed):
                last = max(last, (i + 1, _BEGIN))
            if not is_collective(node) or not moves(node.meta["call"].pair.kernel):
                continue
            flight = self._flight(node, (0, _BEGIN) if self.overtake else last) if _can_fly(node) else None
            if flight is None or work[flight.wait[0]] == work[flight.begin[0]]:
                last = max(last, (i + 1, _BEGIN))
                meanwhile = f"with at most {self.budget:,.0f} bytes under way"
                leave(node, "overlap", f"nothing could be computed while it is under way, {meanwhile}")
                continue
            self.flights.append(flight)
            for view in flight.views:
                self.moved[view] = min(flight.begin, self.moved.get(view, flight.begin))
            self._landed[node] = flight.wait[0], _AFTER_WAIT
            self._fly(_moment(flight.begin), _moment(flight.wait), node.meta["value"].nbytes)
            last = max(last, flight.begin)

    def _fly(self, begin: int, wait: int, nbytes: int) -> None:
        """Add a flight between two moments to the load."""
        for i in range(begin, wait + 1):
            self._load[i] += nbytes

    def _flight(self, node: fx.Node, last: Place) -> _CollectiveFlight | None:
        """The longest flight of a collective within the budget; None if there is none. ``last``: the earliest begin."""
        index, wait = self._index[node], self._needed.get(node, 0)
        earliest = max([last, *map(self._ready, self.before[node])])
        moment, room = 2 * wait + 1, self.budget - node.meta["value"].nbytes
        while moment > _moment(earliest) and self._load[moment - 1] <= room:
            moment -= 1
        begin = moment // 2, _AFTER_WAIT if moment % 2 else _BEGIN
        if begin[0] > index or wait <= index:
            return None
        views = [view for view in _views_of(node) if self._index[view] >= begin[0]]
        return _CollectiveFlight(node, views, max(earliest, begin), (wait, _WAIT))

    def _ready(self, node: fx.Node) -> Place:
        """The place from which the result of a step exists. A view exists when its operand exists."""
        if node in self._landed:
            return self._landed[node]
        if _is_moved_along(node):
            return max([(0, _BEGIN), *map(self._ready, self.before[node])])
        return self._index[node] + 1, _BEGIN


def _moment(place: Place) -> int:
    """A place as a moment. A step has a moment before its waits, and a moment after them."""
    return 2 * place[0] + (place[1] == _AFTER_WAIT)


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The views that make the operand of a collective."""
    views = [operand for operand in node.all_input_nodes if _is_moved_along(operand)]
    return list(dict.fromkeys([step for view in views for step in (*_views_of(view), view)]))


def _can_fly(node: fx.Node) -> bool:
    """Whether a collective may begin in one step and be waited for in another."""
    call = node.meta["call"]
    return bool(node.meta["waits"]) and call.pair.kernel not in _BLOCKING and call.mesh.axis_size(call.axes) > 1


def _is_moved_along(node: fx.Node) -> bool:
    """Whether a step is a view, which moves with the collective that uses it."""
    return node.op == "call_function" and is_view(node) and not is_wait(node) and not written(node)


def _computes(node: fx.Node) -> bool:
    """Whether a step takes time that can hide a collective."""
    return node.op == "call_function" and not (is_collective(node) or is_wait(node) or _is_moved_along(node))


def _split(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Split a collective into a step that begins it and a step that waits."""
    with node.graph.inserting_before(node):
        begun = add_begun(node.graph, node.meta["call"], node.all_input_nodes[0], node)
        wait = add_wait(node.graph, begun, node)
    begun.meta["left"] = node.meta.get("left", {})
    wait.meta.update(value=node.meta["value"], frame=node.meta.get("frame"))
    node.meta["memory"] = wait
    node.replace_all_uses_with(wait)
    return begun, wait
