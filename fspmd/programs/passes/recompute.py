"""`Recompute`: backward computes values of forward again, to stay within a memory budget."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf, prod
from typing import Final

from torch import fx

from fspmd.programs.communication import price_of_step
from fspmd.programs.flops import flops_of
from fspmd.programs.keys import check_bytes, check_choice
from fspmd.programs.memory import memory_of_program
from fspmd.programs.program import Program, copied, copy_node, leave_all, owner
from fspmd.programs.schedule import bytes_of
from fspmd.programs.steps import Aliases, is_collective, is_pure
from fspmd.redistribution.cost import moves, topology, work

_BUDGETS: Final = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16, 0)  # budgets to try, as shares of the bytes kept


@dataclass(frozen=True, slots=True)
class Recompute:
    """A pass for `jit`: keep at most ``budget`` bytes for backward, and compute the rest again.

    A repeated value is held from its first to its last use in backward, so a smaller budget may raise the peak. Without
    a ``budget`` the pass keeps the amount with the lowest predicted peak.

    By the topology, the values that free most bytes per µs of computation go first. Random draws are never repeated,
    nor are steps whose operands are written into meanwhile. With ``collectives=True``, collectives are repeated if all
    blocks are even, so that all ranks choose alike. Arguments and results do not count. Single numbers are kept.

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
        """Run the pass. Returns the number of bytes that are no longer kept."""
        if self.budget is not None:
            return self._within(program, self.budget)
        total = 0
        while freed := self._within(program, self._lowest(program)):
            total += freed
        return total

    def _lowest(self, program: Program) -> float:
        """The budget of `_BUDGETS` with the lowest peak; of several, the largest."""
        plan = _Recomputation(program, self.collectives)
        kept = plan.kept
        peaks: dict[int, int] = {}  # by the number of dropped groups: a smaller budget drops the same groups first

        def peak(budget: float) -> int:
            plan.keep(budget)
            if len(plan.dropped) not in peaks:
                copy = copied(program)
                self._within(copy, budget)
                peaks[len(plan.dropped)] = memory_of_program(copy, scratch=False).peak
            return peaks[len(plan.dropped)]

        return min((kept * share for share in _BUDGETS), key=peak) if kept else 0.0

    def _within(self, program: Program, budget: float) -> int:
        """Keep at most ``budget`` bytes. Returns the number of bytes that are no longer kept."""
        plan = _Recomputation(program, self.collectives)
        before = plan.kept
        plan.keep(budget)
        plan.rewrite()
        return before - plan.kept


class _Recomputation:
    """The values kept for backward, grouped by memory, and the steps that are repeated.

    A group is named by the representative of its memory (`Aliases.of`).
    """

    def __init__(self, program: Program, collectives: bool) -> None:
        self.graph = program.graph
        self.collectives = collectives and not leave_all(program, "recompute", "all collectives", even=True)
        self.memory = memory = Aliases(program)
        self.ends = {*program.results, *program.gradients}
        backward = program.deferred or [node for node in program.steps if node.meta["backward"]]
        self.backward = dict.fromkeys(backward)
        self.first: dict[fx.Node, fx.Node] = {}  # the first step of backward that needs each group
        self.groups: dict[fx.Node, list[fx.Node]] = {}
        for step in backward:
            for node in step.all_input_nodes:
                root = memory.of(node)
                if (
                    node.op != "call_function"
                    or node in self.backward
                    or memory.is_outside(node)
                    or memory.is_in_results(node)
                ):
                    continue
                self.first.setdefault(root, step)
                group = self.groups.setdefault(root, [])
                if node not in group:
                    group.append(node)
        self.owners = {owner(node) for group in self.groups.values() for node in group}
        self.dropped: set[fx.Node] = set()  # groups that are no longer kept
        self.repeated: dict[fx.Node, None] = {}
        self.kept = sum(map(self.bytes_of, self.groups))  # bytes
        self.waiting = [(-inf, i, group) for i, group in enumerate(self.groups) if not self.is_number(group)]

    def keep(self, budget: float) -> None:
        """Drop groups until at most ``budget`` bytes are kept, if that many can be computed again."""
        while self.waiting and self.kept > budget:
            _, i, group = heapq.heappop(self.waiting)
            cost = self.cost(group)
            if cost is None:
                continue
            rank = -(self.bytes_of(group) / cost if cost else inf)
            if self.waiting and (rank, i) > self.waiting[0][:2]:  # its cost has grown: another group may be better
                heapq.heappush(self.waiting, (rank, i, group))
                continue
            self.drop(group)
            self.kept -= self.bytes_of(group)

    def bytes_of(self, group: fx.Node) -> int:
        """The bytes of the tensors of a group."""
        owners = dict.fromkeys(owner(node) for node in self.groups[group])
        return sum(tensor.meta["value"].nbytes for tensor in owners if "value" in tensor.meta)

    def is_number(self, group: fx.Node) -> bool:
        """Whether a group has single elements, such as a loss, for which all of forward would run again."""
        return all(prod(node.meta["value"].shape) <= 1 for node in self.groups[group] if "value" in node.meta)

    def cost(self, group: fx.Node) -> float | None:
        """µs to compute a group again from the kept values; None if this is impossible."""
        steps = self._steps(group)
        return None if steps is None else sum(map(_cost, steps))

    def drop(self, group: fx.Node) -> None:
        """Compute a group again instead of keeping it."""
        self.repeated.update(self._steps(group) or {})
        self.dropped.add(group)

    def _steps(self, group: fx.Node) -> dict[fx.Node, None] | None:
        """The steps to repeat for a group, besides those already repeated; None if one cannot be repeated."""
        steps: dict[fx.Node, None] = {}
        waiting = list(self.groups[group])
        while waiting:
            node = waiting.pop()
            if node in steps or node in self.repeated or self._is_kept(node, group):
                continue
            if not self._is_repeatable(node, self.first[group]):
                return None
            steps[node] = None
            waiting += node.all_input_nodes
        return steps

    def _is_kept(self, node: fx.Node, group: fx.Node) -> bool:
        """Whether backward has a value, if it drops ``group``."""
        root = self.memory.of(node)
        if node.op != "call_function" or node in self.backward:
            return True
        return root is not group and root in self.groups and root not in self.dropped and owner(node) in self.owners

    def _is_repeatable(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a step that runs again before ``user`` gives the same value."""
        if is_collective(node):
            call = node.meta["call"]
            may_repeat = bool(node.meta["waits"]) and (not moves(call.pair.kernel) or self.collectives)
        else:
            may_repeat = is_pure(node)
        return (
            may_repeat
            and not self.memory.is_written(node, node)
            and not any(self.memory.is_written(x, node, user) for x in node.all_input_nodes)
        )

    def rewrite(self) -> None:
        """Insert copies of repeated steps before the first step of backward that needs them, and use the copies."""
        copies: dict[fx.Node, fx.Node] = {}
        for step in self.backward:
            if any(map(self._is_dropped, step.all_input_nodes)):
                with self.graph.inserting_before(step):
                    for node in step.all_input_nodes:
                        if self._is_dropped(node):
                            step.replace_input_with(node, self._copy(node, step, copies))
            if owner(step) in copies:  # a view
                step.meta["memory"] = copies[owner(step)]
        for node in sorted(self.repeated, key=self.memory.place.__getitem__, reverse=True):
            if not node.users and node not in self.ends:
                self.graph.erase_node(node)

    def _is_dropped(self, node: fx.Node) -> bool:
        return node in self.repeated or (self.memory.of(node) in self.dropped and node not in self.backward)

    def _copy(self, node: fx.Node, step: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """The copy of a step before ``step``, with copies of its operands. Adds them to ``copies``."""
        if node in copies:
            return copies[node]
        for operand in node.all_input_nodes:
            if self._is_dropped(operand):
                self._copy(operand, step, copies)
        copy = copies[node] = copy_node(self.graph, node, lambda operand: copies.get(operand, operand))
        copy.meta.update(deferred=step.meta["deferred"], backward=True, repeats=True)
        if "memory" in node.meta:
            memory = owner(node)
            copy.meta["memory"] = copy if memory is node else copies.get(memory, memory)
        return copy


def _cost(node: fx.Node) -> float:
    """µs of a step."""
    price = price_of_step(node)
    return price.time if price is not None else work(flops_of(node) / 2, bytes_of(node), topology())
