"""`Recompute`: backward computes values of forward again, as far as a memory budget asks for it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf, prod
from typing import Final

from torch import fx

from fspmd.ops.schemas import facts_of
from fspmd.programs.communication import price_of_step
from fspmd.programs.flops import flops_of
from fspmd.programs.memory import memory_of_program
from fspmd.programs.options import check_bytes, check_choice
from fspmd.programs.passes.aliases import Aliases
from fspmd.programs.program import Program, copied, copy_node, leave_all, owner
from fspmd.programs.schedule import bytes_of
from fspmd.programs.steps import PARTS, is_aten, is_collective
from fspmd.redistribution.cost import moves, topology, work

_PARTS: Final = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16, 0)  # budgets to try, as parts of the bytes kept now


@dataclass(frozen=True, slots=True)
class Recompute:
    """A pass for `jit`: keep at most ``budget`` bytes for backward, and compute the rest again.

    A value that is computed again is held from its first to its last use. So keeping less may raise the peak. Without a
    ``budget`` the pass keeps the amount with the lowest predicted peak.

    Values that free most bytes per µs of computing go first, by the topology. Random draws are never repeated, nor are
    steps whose operands are written into meanwhile. Collectives are repeated with ``collectives=True`` where all blocks
    are even, so that all ranks choose alike. Arguments and results do not count, and single numbers are kept.

    >>> import torch
    >>> from fspmd import grad, jit
    >>> f = grad(lambda x: sum((x * i).exp().sin().sum() for i in range(4)))
    >>> peaks = [jit(f, passes=p).lower(torch.ones(1000)).memory().peak for p in ([], [Recompute()])]
    >>> peaks[1] < peaks[0]
    True
    """

    budget: float | None = None
    collectives: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_bytes("Recompute(budget=...)", self.budget)
        check_choice("Recompute(collectives=...)", self.collectives)

    def __call__(self, program: Program) -> int:
        """The number of bytes that are no longer kept."""
        if self.budget is not None:
            return self._within(program, self.budget)
        gained = 0
        while found := self._within(program, self._lowest(program)):
            gained += found
        return gained

    def _lowest(self, program: Program) -> float:
        """The tried budget with the lowest peak; of equal ones the one that computes less."""
        plan = _Recomputation(program, False)
        kept = sum(map(plan.bytes_of, plan.groups))

        def peak(budget: float) -> int:
            tried = copied(program)
            self._within(tried, budget)
            return memory_of_program(tried).peak

        return min((kept * part for part in _PARTS), key=peak) if kept else 0.0

    def _within(self, program: Program, budget: float) -> int:
        """Keep at most ``budget`` bytes; gives the number of bytes that are no longer kept."""
        plan = _Recomputation(program, self.collectives)
        before = held = sum(map(plan.bytes_of, plan.groups))
        waiting = [(-inf, i, group) for i, group in enumerate(plan.groups) if not plan.is_number(group)]
        while waiting and held > budget:
            _, i, group = heapq.heappop(waiting)
            cost = plan.cost(group)
            if cost is None:
                continue
            rank = -(plan.bytes_of(group) / cost if cost else inf)
            if waiting and (rank, i) > waiting[0][:2]:  # others may be better: costs only grow
                heapq.heappush(waiting, (rank, i, group))
                continue
            plan.drop(group)
            held -= plan.bytes_of(group)
        plan.rewrite()
        return int(before - held)


class _Recomputation:
    """The kept values by their memory, and the steps that are computed again."""

    def __init__(self, program: Program, collectives: bool) -> None:
        self.graph = program.graph
        self.collectives = collectives and not leave_all(program, "recompute", "all collectives", even=True)
        self.memory = memory = Aliases(program)
        self.ends = {*program.results, *program.gradients}
        late = program.deferred or [node for node in program.steps if node.meta["backward"]]
        self.late = dict.fromkeys(late)
        self.first: dict[fx.Node, fx.Node] = {}  # the first step that needs each kept memory
        self.groups: dict[fx.Node, list[fx.Node]] = {}
        for step in late:
            for node in step.all_input_nodes:
                root = memory.of(node)
                if (
                    node.op != "call_function"
                    or node in self.late
                    or memory.is_outside(node)
                    or memory.is_in_results(node)
                ):
                    continue
                self.first.setdefault(root, step)
                group = self.groups.setdefault(root, [])
                if node not in group:
                    group.append(node)
        self.owners = {owner(node) for group in self.groups.values() for node in group}
        self.dropped: set[fx.Node] = set()
        self.again: dict[fx.Node, None] = {}

    def bytes_of(self, group: fx.Node) -> int:
        """Bytes of the tensors in one memory."""
        owners = dict.fromkeys(owner(node) for node in self.groups[group])
        return sum(one.meta["value"].nbytes for one in owners if "value" in one.meta)

    def is_number(self, group: fx.Node) -> bool:
        """Whether a memory has single elements, such as a loss, for which all of forward would run again."""
        return all(prod(node.meta["value"].shape) <= 1 for node in self.groups[group] if "value" in node.meta)

    def cost(self, group: fx.Node) -> float | None:
        """µs to compute a memory again from the kept values; None where this is impossible."""
        steps = self._steps(group)
        return None if steps is None else sum(map(_cost, steps))

    def drop(self, group: fx.Node) -> None:
        """Compute a memory again."""
        self.again.update(self._steps(group) or {})
        self.dropped.add(group)

    def _steps(self, group: fx.Node) -> dict[fx.Node, None] | None:
        found: dict[fx.Node, None] = {}
        waiting = list(self.groups[group])
        while waiting:
            node = waiting.pop()
            if node in found or node in self.again or self._is_there(node, group):
                continue
            if not self._may_run_again(node, self.first[group]):
                return None
            found[node] = None
            waiting += node.all_input_nodes
        return found

    def _is_there(self, node: fx.Node, group: fx.Node) -> bool:
        root = self.memory.of(node)
        if node.op != "call_function" or node in self.late:
            return True
        return root is not group and root in self.groups and root not in self.dropped and owner(node) in self.owners

    def _may_run_again(self, node: fx.Node, user: fx.Node) -> bool:
        if is_collective(node):
            call = node.meta["call"]
            again = bool(node.meta["waits"]) and (not moves(call.pair.kernel) or self.collectives)
        else:
            again = node.target in PARTS or (is_aten(node) and facts_of(node.target).pure)
        return (
            again
            and not self.memory.is_written(node, node)
            and not any(self.memory.is_written(x, node, user) for x in node.all_input_nodes)
        )

    def rewrite(self) -> None:
        """Put copies of dropped steps before the first step that needs them, and let all use these."""
        copies: dict[fx.Node, fx.Node] = {}
        for step in self.late:
            if any(map(self._is_gone, step.all_input_nodes)):
                with self.graph.inserting_before(step):
                    for node in step.all_input_nodes:
                        if self._is_gone(node):
                            step.replace_input_with(node, self._copy(node, step, copies))
            if owner(step) in copies:  # a view
                step.meta["memory"] = copies[owner(step)]
        for node in sorted(self.again, key=self.memory.place.__getitem__, reverse=True):
            if not node.users and node not in self.ends:
                self.graph.erase_node(node)

    def _is_gone(self, node: fx.Node) -> bool:
        return node in self.again or (self.memory.of(node) in self.dropped and node not in self.late)

    def _copy(self, node: fx.Node, step: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        if node in copies:
            return copies[node]
        for one in node.all_input_nodes:
            if self._is_gone(one):
                self._copy(one, step, copies)
        made = copies[node] = copy_node(self.graph, node, lambda one: copies.get(one, one))
        made.meta.update(deferred=step.meta["deferred"], backward=True, repeats=True)
        if "memory" in node.meta:
            above = owner(node)
            made.meta["memory"] = made if above is node else copies.get(above, above)
        return made


def _cost(node: fx.Node) -> float:
    price = price_of_step(node)
    return price.time if price is not None else work(flops_of(node) / 2, bytes_of(node), topology())
