"""`rewrites`: two collectives in a row become one, or none. A table has the pairs, each with its condition.

Rows name kernels, since types have done their part when a program is recorded. Only the second collective may use the
result of the first, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fspmd.pairs import Call, call
from fspmd.programs.passes.aliases import Aliases
from fspmd.programs.program import Program, leave, leave_all, owner
from fspmd.programs.steps import add_collective, add_step, add_view, compact, is_collective, replace
from fspmd.redistribution.cost import price

aten: Final = torch.ops.aten

SUMS: Final = ("reduce", "reduce_once")
GATHERS: Final = ("gather", "gather_once")
NAMES: Final = ("alias", "per_rank", "pick")  # other types of the same value; simulations have steps for them


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule: ``second(first(x))`` is ``result``, where this is not None: one call, or a cast of ``x``."""

    picture: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    result: Callable[[Call, Call], Call | None]
    must_pay: bool = False  # one call may take longer than two


def _scattered(first: Call, second: Call) -> Call | None:
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
    if second is not first.transposed:
        return None
    return call("invariant_to_varying", first.mesh, first.axes)


def _over_other_axes(first: Call, second: Call) -> bool:
    alike = first.options == second.options and first.pair.kernel == second.pair.kernel
    return alike and set(first.axes).isdisjoint(second.axes)


def _over_all_axes(first: Call, second: Call) -> Call | None:
    """Sums, or extrema, over some axes and then over others."""
    if not _over_other_axes(first, second):
        return None
    return call(second.pair.name, first.mesh, first.mesh.ordered(frozenset(first.axes + second.axes)), second.options)


def _gathered_over_all_axes(first: Call, second: Call) -> Call | None:
    """Gathers over minor and then over major axes."""
    if not _over_other_axes(first, second) or first.options.sizes is not None:
        return None
    return call(second.pair.name, first.mesh, second.axes + first.axes, second.options)


def _scattered_over_all_axes(first: Call, second: Call) -> Call | None:
    if not _over_other_axes(first, second) or first.options.sizes is not None:
        return None
    return call(second.pair.name, first.mesh, first.axes + second.axes, second.options)


ROWS: Final = (
    Rewrite("all-reduce, slice: reduce-scatter", SUMS, ("slice",), _scattered),
    Rewrite("slice, gather: nothing", ("slice",), GATHERS, _undone),
    Rewrite("gather, slice: nothing", GATHERS, ("slice",), _undone),
    Rewrite("all-to-all, and back: nothing", ("exchange",), ("exchange",), _exchanged_back),
    Rewrite("all-reduces over x and y: one over both", SUMS, SUMS, _over_all_axes, True),
    Rewrite("gathers over y and x: one over both", GATHERS, GATHERS, _gathered_over_all_axes, True),
    Rewrite(
        "reduce-scatters over x and y: one over both",
        ("reduce_scatter",),
        ("reduce_scatter",),
        _scattered_over_all_axes,
        True,
    ),
)

_FIRSTS: Final = frozenset(kernel for row in ROWS for kernel in row.first)
_SECONDS: Final = frozenset(kernel for row in ROWS for kernel in row.second)


def rewrites(program: Program) -> int:
    """Rewrite as long as a row applies; gives the number of rewrites."""
    nodes = [node for node in program.graph.nodes if "call" in node.meta]
    if not any(_may_be_second(node) and _before(node)[0] is not None for node in nodes):
        return 0
    if leave_all(program, "rewrites", "collectives in a row"):
        return 0
    memory = Aliases(program)
    count = 0
    for node in nodes:
        here: fx.Node | None = node
        while here is not None and (here := _rewritten(memory, here)) is not None:
            count += 1
    return count


def _rewritten(memory: Aliases, node: fx.Node) -> fx.Node | None:
    """The step that replaces a step to which a row applies; else None."""
    if not _may_be_second(node):
        return None
    first, between = _before(node)
    if first is None:
        return None
    (x,) = first.all_input_nodes
    one, two = first.meta["call"], node.meta["call"]
    for row in ROWS:
        found = row.result(one, two) if one.pair.kernel in row.first and two.pair.kernel in row.second else None
        if found is None or one.mesh != two.mesh:
            continue
        why = _why_separate(memory, first, between, node)
        new = None
        if not why and found.pair.kernel in NAMES:
            new = _as_it_was(memory, node, x, found)
            why = "who gets the result may write into it, or into"
        elif not why and not (why := _in_place(row, first, between, node, found)):
            with node.graph.inserting_before(node):
                new = add_collective(node.graph, found, x, node)
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
    """Why two steps stay apart: writes, or casts that the second does not undo; empty for no reason."""
    one, two = first.meta["call"], second.meta["call"]
    if one.options.index_groups or two.options.index_groups:
        return "groups within an axis are taken as they are, here and in"
    if first.meta["deferred"] != second.meta["deferred"]:
        return "a step of backward is not joined with"
    casts = [step.meta["call"] for step in between if "call" in step.meta]
    if not all({*one.axes, *two.axes}.issuperset(cast.axes) for cast in casts):
        return "a cast over other axes stands behind"
    (x,) = first.all_input_nodes
    is_written = any(memory.is_written(step, first, second) for step in (x, first, *between))
    return "something is written into the operand, or the result, of" if is_written else ""


def _in_place(row: Rewrite, first: fx.Node, between: list[fx.Node], second: fx.Node, both: Call) -> str:
    """Why one call may not replace two; empty for no reason."""
    if any(len(step.users) > 1 for step in (first, *between)):
        return "other steps use"
    return "one call would take longer than this and" if row.must_pay and not _pays(first, second, both) else ""


def _before(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The collective whose result another one takes, and the casts and copies between."""
    between = []
    (before,) = node.all_input_nodes
    while is_collective(before, *NAMES) or before.target is aten.clone.default:
        between.append(before)
        (before,) = before.all_input_nodes
    return (before if is_collective(before, *_FIRSTS) and before.meta["waits"] else None), between


def _as_it_was(memory: Aliases, node: fx.Node, x: fx.Node, names: Call) -> fx.Node | None:
    """The operand, in place of a result that equals it; a copy where both may be written into."""
    if memory.is_written(node, node) or memory.is_written(x, node):
        return None
    graph, value = node.graph, node.meta["value"]
    with graph.inserting_before(node):
        if names.mesh.transport == "simulation":
            x = add_collective(graph, names, x, node)
            x.meta["memory"] = owner(x.all_input_nodes[0])
            memory.stands_for(x, x.all_input_nodes[0])
        if memory.may_be(node, x):
            return add_view(graph, compact, (x,), node, value.shape)
        return add_step(graph, aten.clone.default, (x,), node, value, memory_format=torch.contiguous_format)


def _pays(first: fx.Node, second: fx.Node, both: Call) -> bool:
    """Whether one call takes no more time than two; all ranks that take part know the sizes."""
    (x,) = first.all_input_nodes
    before, between, after = (step.meta["value"].nbytes for step in (x, first, second))
    one, two = first.meta["call"], second.meta["call"]
    apart = price(one.pair.kernel, one.mesh, one.axes, before, between) + price(
        two.pair.kernel, two.mesh, two.axes, between, after
    )
    return price(both.pair.kernel, both.mesh, both.axes, before, after).time <= apart.time
