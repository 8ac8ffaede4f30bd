"""`rewrites`: two collectives in a row become one, or none. A table has the pairs and their conditions.

Rows name kernels, since a recorded program has no types. One collective replaces two only if no other step uses the
result of the first, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import fx

from fspmd.pairs import Call, call
from fspmd.programs.program import Program, leave, leave_all, nbytes_of, owner, shape_of
from fspmd.programs.steps import (
    CASTS,
    Aliases,
    add_collective,
    add_step,
    add_view,
    compact,
    is_aten,
    is_collective,
    is_view,
    replace,
    written,
)
from fspmd.redistribution.cost import price
from fspmd.torch_internals import aten_unsafe_view

aten: Final = torch.ops.aten

SUMS: Final = ("reduce", "reduce_once")
GATHERS: Final = ("gather", "gather_once")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule: one call, or a cast of ``x``, replaces ``second(first(x))``.

    Attributes:
        picture: the rule in words.
        first: kernels of the first call.
        second: kernels of the second call.
        result: the call or cast for two calls; None if the rule does not apply.
        must_pay: whether one call may take longer than two, so that prices decide.
    """

    picture: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    result: Callable[[Call, Call], Call | None]
    must_pay: bool = False


def _scattered(first: Call, second: Call) -> Call | None:
    """The reduce-scatter for a sum and a slice over the same axes."""
    if first.axes != second.axes or first.options.op != "sum":
        return None
    return call("psum_scatter", first.mesh, first.axes, second.options)


def _undone(first: Call, second: Call) -> Call | None:
    """The cast for a gather or slice that undoes the first call."""
    same = first.options.dim == second.options.dim and first.options.sizes == second.options.sizes
    if first.axes != second.axes or not same:
        return None
    return call("invariant_to_varying" if second.pair.kernel != "gather_once" else "held_once", first.mesh, first.axes)


def _exchanged_back(first: Call, second: Call) -> Call | None:
    """The cast for an all-to-all and its transpose."""
    if second is not first.transposed:
        return None
    return call("invariant_to_varying", first.mesh, first.axes)


def _over_other_axes(first: Call, second: Call) -> bool:
    """Whether two calls differ in their axes alone, and share none."""
    alike = first.options == second.options and first.pair.kernel == second.pair.kernel
    return alike and set(first.axes).isdisjoint(second.axes)


def _over_all_axes(order: Callable[[Call, Call], tuple[str, ...]], even: bool = True) -> Callable[..., Call | None]:
    """The rule that two calls become one over all axes in an ``order``. ``even``: only if blocks are even."""

    def result(first: Call, second: Call) -> Call | None:
        if not _over_other_axes(first, second) or (even and first.options.sizes is not None):
            return None
        return call(second.pair.name, first.mesh, order(first, second), second.options)

    return result


_merged: Final = _over_all_axes(lambda a, b: a.mesh.ordered(frozenset(a.axes + b.axes)), even=False)
_gathered: Final = _over_all_axes(lambda a, b: b.axes + a.axes)  # the axes of the second are the major ones
_scattered_twice: Final = _over_all_axes(lambda a, b: a.axes + b.axes)  # those of the first are

ROWS: Final = (
    Rewrite("all-reduce, slice: reduce-scatter", SUMS, ("slice",), _scattered),
    Rewrite("slice, gather: nothing", ("slice",), GATHERS, _undone),
    Rewrite("gather, slice: nothing", GATHERS, ("slice",), _undone),
    Rewrite("all-to-all, and back: nothing", ("exchange",), ("exchange",), _exchanged_back),
    Rewrite("all-reduces over x and y: one over both", SUMS, SUMS, _merged, True),
    Rewrite("gathers over y and x: one over both", GATHERS, GATHERS, _gathered, True),
    Rewrite(
        "reduce-scatters over x and y: one over both",
        ("reduce_scatter",),
        ("reduce_scatter",),
        _scattered_twice,
        True,
    ),
)

_FIRSTS: Final = frozenset(kernel for row in ROWS for kernel in row.first)
_SECONDS: Final = frozenset(kernel for row in ROWS for kernel in row.second)


def rewrites(program: Program) -> int:
    """Rewrite as long as a row applies. Returns the number of rewrites."""
    nodes = [node for node in program.graph.nodes if "call" in node.meta]
    if not any(_may_be_second(node) and _before(node)[0] is not None for node in nodes):
        return 0
    if leave_all(program, "rewrites", "collectives in a row"):
        return 0
    memory = Aliases(program)
    count = 0
    for node in nodes:
        step: fx.Node | None = node
        while step is not None and (step := _rewritten(memory, step)) is not None:
            count += 1
    return count


def _rewritten(memory: Aliases, node: fx.Node) -> fx.Node | None:
    """Apply a row to a step and the collective before it. Returns the new step; None if no row applies."""
    if not _may_be_second(node):
        return None
    first, between = _before(node)
    if first is None:
        return None
    (x,) = first.all_input_nodes
    before, after = first.meta["call"], node.meta["call"]
    for row in ROWS:
        applies = before.pair.kernel in row.first and after.pair.kernel in row.second
        result = row.result(before, after) if applies else None
        if result is None or before.mesh != after.mesh:
            continue
        why = _why_separate(memory, first, between, node)
        new = None
        if not why and result.pair.kernel in CASTS:
            new = _operand_for(memory, node, x, result)
            why = "the caller may write into its result, or into"
        elif not why and not (why := _why_two(row, first, between, node, result)):
            with node.graph.inserting_before(node):
                new = add_collective(node.graph, result, x, node)
        if new is None:
            leave(node, "rewrites", f"({row.picture}) {why}", first)
            continue
        memory.stands_for(new, node)
        replace(node, new)
        for step in (*between, first):
            if not step.users:
                step.graph.erase_node(step)
        return new
    return None


def _may_be_second(node: fx.Node) -> bool:
    return is_collective(node, *_SECONDS) and bool(node.meta["waits"])


def _why_separate(memory: Aliases, first: fx.Node, between: list[fx.Node], second: fx.Node) -> str:
    """Why two steps stay separate: writes, or casts that the second does not undo; empty for no reason."""
    before, after = first.meta["call"], second.meta["call"]
    if before.options.index_groups or after.options.index_groups:
        return "calls with groups within an axis are never rewritten, neither this nor"
    if first.meta["deferred"] != second.meta["deferred"]:
        return "a step of backward is not joined with"
    casts = [step.meta["call"] for step in between if "call" in step.meta]
    if not all({*before.axes, *after.axes}.issuperset(cast.axes) for cast in casts):
        return "a cast over other axes follows"
    (x,) = first.all_input_nodes
    is_written = any(memory.is_written(step, first, second) for step in (x, first, *between))
    return "a step writes into the operand, or the result, of" if is_written else ""


def _why_two(row: Rewrite, first: fx.Node, between: list[fx.Node], second: fx.Node, both: Call) -> str:
    """Why one call may not replace two; empty if it may."""
    if any(len(step.users) > 1 for step in (first, *between)):
        return "other steps use"
    return "one call would take longer than this and" if row.must_pay and not _pays(first, second, both) else ""


def _before(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The collective whose result a step takes, if a row may apply to it; and the casts and copies between them."""
    between = []
    (before,) = node.all_input_nodes
    while is_collective(before, *CASTS) or before.target is aten.clone.default:
        between.append(before)
        (before,) = before.all_input_nodes
    return (before if is_collective(before, *_FIRSTS) and before.meta["waits"] else None), between


def _operand_for(memory: Aliases, node: fx.Node, x: fx.Node, cast: Call) -> fx.Node | None:
    """A step with the value of ``x``, to replace a result that equals ``x``; a copy if a caller may write into both.

    None if steps of the program write into one of them.
    """
    if memory.is_written(node, node) or memory.is_written(x, node):
        return None
    graph, value = node.graph, node.meta["value"]
    with graph.inserting_before(node):
        if cast.mesh.transport == "simulation":
            x = add_collective(graph, cast, x, node)
            x.meta["memory"] = owner(x.all_input_nodes[0])
            memory.stands_for(x, x.all_input_nodes[0])
        if memory.may_be(node, x):
            return add_view(graph, compact, (x,), node, value.shape)
        return add_step(graph, aten.clone.default, (x,), node, value, memory_format=torch.contiguous_format)


def _pays(first: fx.Node, second: fx.Node, both: Call) -> bool:
    """Whether one call takes no more time than two. The sizes are known to all ranks that take part."""
    (x,) = first.all_input_nodes
    before, between, after = map(nbytes_of, (x, first, second))
    outer, inner = first.meta["call"], second.meta["call"]
    separate = price(outer.pair.kernel, outer.mesh, outer.axes, before, between) + price(
        inner.pair.kernel, inner.mesh, inner.axes, between, after
    )
    return price(both.pair.kernel, both.mesh, both.axes, before, after).time <= separate.time


Shape = tuple[int, ...]
#: views that keep the order of elements
_RESHAPES: Final = (
    aten.view.default,
    aten_unsafe_view,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


def collective_before(node: fx.Node) -> tuple[fx.Node | None, list[Call]]:
    """The collective whose result is reshaped to a matrix, and the casts after it; None and [] if there is none."""
    casts, end, may_reorder = [], node, False
    while is_reshaped(node) and prod(shape_of(node)) == prod(shape_of(node.all_input_nodes[0])):
        if is_collective(node):
            casts.append(node.meta["call"])
        may_reorder |= node.target not in _RESHAPES and not is_collective(node)
        node = node.all_input_nodes[0]
    if not is_collective(node) or (may_reorder and not _in_order(node, end)):
        return None, []
    return node, casts[::-1]


def last_of(product: fx.Node) -> tuple[fx.Node, list[Call], fx.Node | None, list[Call]]:
    """The last view in the chain of single uses of a product, or of its sum with another value.

    Returns this view, the casts of the product, the other summand (or None), and the casts of the sum.
    """
    view, casts = _last_view(product)
    total = next(iter(view.users)) if len(view.users) == 1 else product
    if total.target is not aten.add.Tensor or total.kwargs:
        return view, casts, None, []
    other = total.args[total.args[0] is view]
    if not isinstance(other, fx.Node) or other is view or not _like(other, view) or not _like(total, view):
        return view, casts, None, []
    last, after = _last_view(total)
    return (last, casts, other, after) if _like(last, total) else (view, casts, None, [])


def _last_view(node: fx.Node) -> tuple[fx.Node, list[Call]]:
    """The last view in the chain of single uses of a value, with its elements in the same order; and the casts."""
    casts: list[Call] = []
    last, may_reorder = node, False
    while len(last.users) == 1:
        user = next(iter(last.users))
        if not is_reshaped(user) or prod(shape_of(user)) != prod(shape_of(last)):
            break
        if is_collective(user):
            casts.append(user.meta["call"])
        may_reorder |= user.target not in _RESHAPES and not is_collective(user)
        last = user
    return (node, []) if may_reorder and not _in_order(node, last) else (last, casts)


def _like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one shape and dtype."""
    return bool(node.meta["value"] == other.meta["value"])


def is_reshaped(node: fx.Node) -> bool:
    """Whether a step is a view or a cast of its only operand."""
    return is_collective(node, *CASTS) or (
        is_aten(node)
        and is_view(node)
        and "value" in node.meta
        and len(node.all_input_nodes) == 1
        and not written(node)
    )


def _in_order(*nodes: fx.Node) -> bool:
    """Whether values are contiguous. Such values have their elements in one order if they lie in one memory."""
    return all(node.meta.get("strides") is None for node in nodes)


def matrix_of(node: fx.Node) -> Shape:
    """The shape of a matrix, or of the matrix in a batch of one."""
    shape = shape_of(node)
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def reshaped(node: fx.Node) -> list[fx.Node]:
    """The reshaped values of a value. Each follows its operand."""
    views = [user for user in node.users if is_reshaped(user)]
    return views + [inner for view in views for inner in reshaped(view)]


def users_of(node: fx.Node) -> list[fx.Node]:
    """The steps that use a result, or reshaped values of it."""
    views = reshaped(node)
    return [user for value in (node, *views) for user in value.users if user not in views]
