"""Steps of a program: functions that run collectives, and how to add steps to a graph or replace them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from torch import Tensor, fx

from fspmd.cache import cached
from fspmd.ops.schemas import facts_of
from fspmd.pairs import Call
from fspmd.programs.program import Value, owner
from fspmd.torch_internals import OpOverload
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
    return node.target in PARTS or (is_aten(node) and facts_of(node.target).is_pure(node.args, node.kwargs))


#: steps between a value and the blocks of simulated ranks
OF_RANKS: Final = frozenset((shard_of, JOINED))
#: steps that split or join values
PARTS: Final = OF_RANKS | {operator.getitem}
