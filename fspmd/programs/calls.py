"""Collectives as steps of a program: what runs them, and how one is added to a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from torch import Tensor, fx

from fspmd.pairs import Call
from fspmd.programs.program import Value, owner
from fspmd.torch_internals import OpOverload
from fspmd.transport import Pending
from fspmd.transport.abstract import shape_after
from fspmd.transport.rows import Routes

F = TypeVar("F", bound=Callable[..., Any])
#: kernels that give what they are given, where each process has a block of its own
NAMES_ALONE: Final = frozenset({"alias", "apart", "pick"})
#: what a step is told by the step in whose place, or for whose sake, it is made
_INHERITED = ("cause", "backward", "deferred", "repeats")


@functools.lru_cache(maxsize=4096)
def runner(call: Call, waits: bool) -> Callable[[Tensor], Any]:
    """What runs a call, so that its result lies in memory without gaps, as it is imagined."""
    if not waits:
        return call.start
    return (lambda x: call.run(x).contiguous()) if _has_gaps(call) else call.run


def _has_gaps(call: Call) -> bool:
    if call.mesh.transport == "simulation":
        return False
    kernel = call.pair.kernel
    return kernel in ("exchange", "reduce_scatter") or (
        kernel in ("gather", "gather_once", "ragged") and call.options.dim != 0
    )


class Routed:
    """What runs a ragged call along routes that the program works out of values."""

    def __init__(self, call: Call, waits: bool) -> None:
        self.__name__ = self.__qualname__ = call.pair.name
        self.call, self.waits = call, waits

    def __call__(self, x: Tensor, routes: Routes) -> Any:
        made = self.along(routes)
        return made.run(x) if self.waits else made.start(x)

    def along(self, routes: Routes) -> Call:
        """The call that is run."""
        plain = self.call
        return Call(plain.pair.name, plain.mesh, plain.axes, plain.options._replace(routes=routes))


def way_back(routes: Routes) -> Routes:
    """The routes of the transposed call."""
    return routes.transposed


def landed(pending: Pending) -> Tensor:
    """Wait for a result, and have it without gaps in memory."""
    return pending.wait().contiguous()


def waiter(call: Call) -> Callable[[Pending], Tensor]:
    """What waits for a call that was begun."""
    return landed if _has_gaps(call) else Pending.wait


def is_wait(node: fx.Node) -> bool:
    """Whether a step waits for a collective that another one has begun."""
    return node.target is Pending.wait or node.target is landed


def compact(x: Tensor) -> Tensor:
    """The same value, copied where it lies in memory with gaps."""
    return x.contiguous()


def is_collective(node: fx.Node, *kernels: str) -> bool:
    """Whether a step runs a call of the pair table for its result alone; of one of these kernels, if some are named."""
    call = node.meta.get("call")
    return call is not None and not node.meta.get("effect") and (not kernels or call.pair.kernel in kernels)


def add_collective(graph: fx.Graph, call: Call, operand: fx.Node, like: fx.Node) -> fx.Node:
    """A step that begins a call and waits for it, where the graph is being added to, in the name of ``like``."""
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
    """A step that waits for what was begun."""
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
    """A step of another kind; ``value``: of its result, which has a memory of its own."""
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


def reading_what_it_gives(function: F) -> F:
    """A step that gives a part of a value, and reads no more of it."""
    setattr(function, "reads_what_it_gives", True)  # noqa: B010 (not known to type checkers)
    return function


def replace(node: fx.Node, other: fx.Node) -> None:
    """Whoever used a step uses another one; the step goes, and its views are views of the other."""
    before, now = owner(node), owner(other)
    for view in _views(node, before) if before is not now else ():
        view.meta["memory"] = now
    node.meta["memory"] = now
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _views(node: fx.Node, memory: fx.Node) -> Iterator[fx.Node]:
    """The steps that give parts of a value, which lies in a memory."""
    for user in node.users:
        if "memory" not in user.meta or (owner(user) is memory and user is not memory):
            yield from _views(user, memory)
            if "memory" in user.meta:
                yield user


def is_aten(node: fx.Node) -> bool:
    """Whether a step is a function of torch whose schema says what it does."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"
