"""Steps of a program: the functions that they run, how to add and replace them, their memory and their order.

A step without a schema may write into all its operands, and may return parts of them. Arguments and tensors closed over
may all be views of each other.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, fx

from fspmd.cache import cached
from fspmd.ops.schemas import facts_of
from fspmd.pairs import Call
from fspmd.programs.program import Program, Value, owner
from fspmd.torch_internals import OpOverload, schema_of
from fspmd.transport import Pending
from fspmd.transport.abstract import shape_after
from fspmd.transport.local_tensor import JOINED, shard_of
from fspmd.transport.rows import Routes

F = TypeVar("F", bound=Callable[..., Any])
#: kernels of casts, which give the same value another type; only simulations have steps for them
CASTS: Final = ("alias", "per_rank", "pick")
#: facts that a new step takes from the step for which it is made
_INHERITED = ("cause", "backward", "deferred", "repeats")


@cached
def runner(call: Call, waits: bool) -> Callable[[Tensor], Any]:
    """A function that runs a call, and makes its result contiguous, since recordings assume so."""
    if not waits:
        return call.start
    return (lambda x: call.run(x).contiguous()) if _has_gaps(call) else call.run


def _has_gaps(call: Call) -> bool:
    """Whether the result of a call may be not contiguous."""
    if call.mesh.transport == "simulation":
        return False
    kernel = call.pair.kernel
    return kernel in ("exchange", "reduce_scatter") or (
        kernel in ("gather", "gather_once", "ragged") and call.options.dim != 0
    )


class Routed:
    """A ragged call as a function of its operand and its routes, which the program computes."""

    def __init__(self, call: Call, waits: bool) -> None:
        self.__name__ = self.__qualname__ = call.pair.name
        self.call, self.waits = call, waits

    def __call__(self, x: Tensor, routes: Routes) -> Any:
        call = self.along(routes)
        return call.run(x) if self.waits else call.start(x)

    def along(self, routes: Routes) -> Call:
        """The call with these routes."""
        plain = self.call
        return Call(plain.pair.name, plain.mesh, plain.axes, plain.options._replace(routes=routes))


def moved_by(node: fx.Node) -> Call | None:
    """The call that a step runs or begins. That of a ragged call has the routes of the recording."""
    return node.meta.get("call") or node.meta.get("routed")


def transposed_routes(routes: Routes) -> Routes:
    """The routes of the transposed call."""
    return routes.transposed


def landed(pending: Pending) -> Tensor:
    """Wait for a result, and make it contiguous."""
    return pending.wait().contiguous()


def waiter(call: Call) -> Callable[[Pending], Tensor]:
    """The function that waits for a call which another step has begun."""
    return landed if _has_gaps(call) else Pending.wait


def is_wait(node: fx.Node) -> bool:
    """Whether a step waits for a collective that another step has begun."""
    return node.target is Pending.wait or node.target is landed


def compact(x: Tensor) -> Tensor:
    """The value itself if it is contiguous, else a contiguous copy."""
    return x.contiguous()


def is_collective(node: fx.Node, *kernels: str) -> bool:
    """Whether a step runs a call of the pair table without effects; if ``kernels`` are given, with one of these."""
    call = node.meta.get("call")
    return call is not None and not node.meta.get("effect") and (not kernels or call.pair.kernel in kernels)


def add_collective(graph: fx.Graph, call: Call, operand: fx.Node, like: fx.Node) -> fx.Node:
    """A step that begins a call and waits for it, at the graph's insertion point, with the cause of ``like``."""
    node = graph.create_node("call_function", runner(call, True), (operand,), {}, call.pair.name)
    _inherit(node, like)
    node.meta.update(call=call, waits=True, value=_value_after(call, operand), memory=node)
    return node


def _value_after(call: Call, operand: fx.Node) -> Value:
    before: Value = operand.meta["value"]
    shape = shape_after(call.pair.kernel, before.shape, call.mesh, call.axes, call.options)
    return Value(shape, before.dtype)


def add_begun(graph: fx.Graph, call: Call, operand: fx.Node, like: fx.Node) -> fx.Node:
    """A step that begins a call."""
    node = add_step(graph, runner(call, False), (operand,), like)
    node.meta.update(call=call, waits=False)
    return node


def add_wait(graph: fx.Graph, begun: fx.Node, like: fx.Node) -> fx.Node:
    """A step that waits for the call of the step ``begun``."""
    call = begun.meta["call"]
    return add_step(graph, waiter(call), (begun,), like, _value_after(call, begun.all_input_nodes[0]))


def add_step(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: fx.Node,
    value: Value | None = None,
    **kwargs: Any,
) -> fx.Node:
    """A step of any function. ``value``: the result, which lies in new memory."""
    node = graph.create_node("call_function", target, args, kwargs)
    _inherit(node, like)
    if value is not None:
        node.meta.update(value=value, memory=node)
    return node


def add_view(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, shape: Any) -> fx.Node:
    """A step whose result lies in the memory of its first argument."""
    node = add_step(graph, target, args, like)
    node.meta.update(value=Value(tuple(shape), args[0].meta["value"].dtype), memory=owner(args[0]))
    return node


def _inherit(node: fx.Node, like: fx.Node) -> None:
    node.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
    node.meta["constant"] = False


def reads_result_alone(function: F) -> F:
    """Mark a function that returns a part of a value, and reads no other part."""
    setattr(function, "reads_result_alone", True)  # noqa: B010 (not known to type checkers)
    return function


def replace(node: fx.Node, other: fx.Node) -> None:
    """Replace a step by another one, and erase it. Its views become views of the other step."""
    before, after = owner(node), owner(other)
    for view in _views(node, before) if before is not after else ():
        view.meta["memory"] = after
    node.meta["memory"] = after
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _views(node: fx.Node, memory: fx.Node) -> Iterator[fx.Node]:
    """The views of a value that lie in ``memory``."""
    for user in node.users:
        if "memory" not in user.meta or (owner(user) is memory and user is not memory):
            yield from _views(user, memory)
            if "memory" in user.meta:
                yield user


def is_aten(node: fx.Node) -> bool:
    """Whether a step is a function of torch with a schema."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def is_pure(node: fx.Node) -> bool:
    """Whether a step only computes its result: run again on equal operands, it gives an equal one. Not collectives."""
    if not is_aten(node):
        return node.target in PARTS
    facts = facts_of(node.target)
    return facts.pure or facts.is_pure(node.args, node.kwargs)


def repeatable(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The steps that give equal results on equal operands: those that are pure, and collectives that are waited for."""
    return [x for x in nodes if x.op == "call_function" and (x.meta["waits"] if is_collective(x) else is_pure(x))]


#: steps between a value and the blocks of simulated ranks
OF_RANKS: Final = frozenset((shard_of, JOINED))
#: steps that split or join values
PARTS: Final = OF_RANKS | {operator.getitem}


_LARGEST: Final = 1 << 16  # bytes of a tensor that is made once, and kept


class Aliases:
    """The shared memory of a program. Passes report their changes by `merge` and `stands_for`."""

    def __init__(self, program: Program) -> None:
        nodes = list(program.graph.nodes)
        self.place = {node: i for i, node in enumerate(nodes)}
        self._above: dict[fx.Node, fx.Node] = {}
        before = [node for node in nodes if node.op in ("placeholder", "get_attr")]
        for node in before:
            self._join(before[0], node)
        for node in nodes:
            for other in _shares(node):
                self._join(node, other)
        self._writes: dict[fx.Node, list[int]] = {}
        self._reshaped: set[fx.Node] = set()
        for i, node in enumerate(nodes):
            for x in written(node):
                self._writes.setdefault(self.of(x), []).append(i)
                if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                    self._reshaped.add(self.of(x))
        ends = [*program.results, *(g for g in program.gradients if g is not None)]
        self.outside = frozenset(self.of(node) for node in before[:1])
        self.escaping = set(map(self.of, ends))
        self.kept = set(map(self.of, program.kept))

    def of(self, node: fx.Node) -> fx.Node:
        """The representative of a value's memory: one node for all values that may share it."""
        root = node
        while (above := self._above.get(root)) is not None:
            root = above
        while node is not root:
            self._above[node], node = root, self._above[node]
        return root

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        a, b = self.of(a), self.of(b)
        if a is not b:
            self._above[b] = a

    def merge(self, node: fx.Node, other: fx.Node) -> None:
        """Note that the values of both memories now share one memory."""
        before = {self.of(node), self.of(other)}
        self._join(other, node)
        root = self.of(other)
        self._writes[root] = sorted(i for memory in before for i in self._writes.get(memory, ()))
        for marked in (self._reshaped, self.escaping, self.kept):
            if marked & before:
                marked.add(root)

    def stands_for(self, new: fx.Node, node: fx.Node) -> None:
        """Note a new step, which replaces ``node`` or shares memory with it."""
        self.place[new] = self.place[node]
        self.merge(new, node)

    def is_written(self, node: fx.Node, after: fx.Node, before: fx.Node | None = None) -> bool:
        """Whether a step after ``after``, and before ``before`` if given, may write into the memory of a value."""
        places = self._writes.get(self.of(node), ())
        first = bisect_right(places, self.place[after])
        return first < len(places) and (before is None or places[first] < self.place[before])

    def is_in_results(self, node: fx.Node) -> bool:
        """Whether results of the program lie in the memory of a value."""
        return self.of(node) in self.escaping

    def is_outside(self, node: fx.Node) -> bool:
        """Whether a value lies in the memory of an argument or of a tensor closed over."""
        return self.of(node) in self.outside

    def may_be(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether a value may replace an equal value.

        Views of one memory may replace each other, unless their shape is changed in place. Other values may not if a
        later step writes into either, if users may write into both, or if users may write into a value that deferred
        steps need.
        """
        if is_view(node) and is_view(other) and self.of(node) is self.of(other):
            return self.of(node) not in self._reshaped
        first = min(node, other, key=self.place.__getitem__)
        if self.is_written(node, first) or self.is_written(other, first):
            return False
        visible = [self.is_in_results(value) or self.is_outside(value) for value in (node, other)]
        kept = any(self.of(value) in self.kept for value in (node, other))
        return not all(visible) and not (kept and (self.is_in_results(node) or self.is_in_results(other)))


def is_view(node: fx.Node) -> bool:
    """Whether the result of a step is a part of an operand, or of several results."""
    return owner(node) is not node or node.target in (shard_of, operator.getitem)


def written(node: fx.Node) -> list[fx.Node]:
    """The values that a step may write into."""
    if node.op != "call_function":
        return []
    if is_aten(node):
        facts = facts_of(node.target)
        return [x for value in facts.written(node.args, node.kwargs) for x in _nodes_in(value)] if facts.writes else []
    return list(node.all_input_nodes) if is_unknown(node) else []


def made_once(steps: Sequence[fx.Node], ends: Collection[Any], of_a_rank: bool = False) -> dict[fx.Node, None]:
    """The steps that a replay runs only once: small tensors that depend on nothing, and that nobody writes into.

    Args:
        steps: the steps of a program.
        ends: their results. The caller may write into them.
        of_a_rank: for a simulation, the steps that the replay of a process would run only once.
    """
    fixed: dict[fx.Node, None] = {}
    exposed: set[fx.Node] | None = None
    for node in steps:
        if not fixed.keys() >= set(node.all_input_nodes) or not is_aten(node) or "value" not in node.meta:
            continue
        if not of_a_rank and not is_of_one_rank(node):
            continue
        if exposed is None:
            given = [x for step in steps for x in (written(step) if is_aten(step) else step.all_input_nodes)]
            exposed = {owner(x) for x in (*ends, *given) if isinstance(x, fx.Node)}
        fits = node.meta["value"].nbytes <= _LARGEST and owner(node) not in exposed
        if fits and facts_of(node.target).is_pure(node.args, node.kwargs):
            fixed[node] = None
    return fixed


def is_of_one_rank(node: fx.Node) -> bool:
    """Whether the result of a step is a tensor, and not simulated."""
    return "value" in node.meta and node.meta.get("frame", False) is None


def _shares(node: fx.Node) -> Iterable[fx.Node]:
    """Other values in whose memory the result of a step may lie."""
    sharing = [owner(node)]
    if is_unknown(node) or node.target in PARTS:  # steps of several tensors
        sharing += node.all_input_nodes
    return sharing


def is_unknown(node: fx.Node) -> bool:
    """Whether a step may write into any of its operands."""
    if node.op != "call_function" or is_aten(node) or is_collective(node) or getattr(node.target, "reads", False):
        return False
    return bool(node.meta.get("effect")) or schema_of(node.target) is not None


def _nodes_in(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [x for entry in value for x in _nodes_in(entry)] if isinstance(value, (list, tuple)) else []


def in_flight(node: fx.Node) -> bool:
    """Whether a step begins a collective that another step waits for."""
    return is_collective(node) and not node.meta["waits"]


def wait_of(node: fx.Node) -> fx.Node | None:
    """The step that waits for the collective which a step begins; None if there is none."""
    return next((user for user in node.users if is_wait(user)), None)


def dependencies(program: Program) -> dict[fx.Node, set[fx.Node]]:
    """For each step, the earlier steps that it cannot overtake."""
    memory = Aliases(program)
    earlier: dict[fx.Node, set[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}  # the last writer of each memory
    readers: dict[fx.Node, list[fx.Node]] = {}  # the readers after the last writer
    effect: fx.Node | None = None
    for node in program.graph.nodes:
        before = set(node.all_input_nodes)
        uses = set(map(memory.of, before))
        if is_wait(node):  # the operand is read until the wait
            uses.update(memory.of(x) for begun in node.all_input_nodes for x in begun.all_input_nodes)
        before.update(writer[used] for used in uses if used in writer)
        for changed in set(map(memory.of, written(node))):
            before.update(readers.pop(changed, ()))
            writer[changed] = node
        for used in uses:
            readers.setdefault(used, []).append(node)
        if node.op == "call_function" and has_effect(node):
            if effect is not None:
                before.add(effect)
            effect = node
        before.discard(node)
        earlier[node] = before
    return earlier


def has_effect(node: fx.Node) -> bool:
    """Whether a step does more than return its result and write into its operands."""
    target = node.target
    if not isinstance(target, OpOverload):
        return bool(node.meta.get("effect"))
    schema, facts = schema_of(target), facts_of(target)
    checks = not schema.returns and not schema.is_mutable
    return checks or facts.draws(node.args, node.kwargs) or (target.namespace != "aten" and not facts.pure)
