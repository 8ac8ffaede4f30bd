"""`auto_spec`: layouts of arguments, found by solving for the cheapest ones of all that a function computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import optree

from fspmd.errors import ArgumentError, MeshError, SpecError
from fspmd.layout_search.apply import PlannedOp, short
from fspmd.layout_search.cost_model import CostModel
from fspmd.layout_search.elimination import TooWide
from fspmd.layout_search.found_layouts import Layouts
from fspmd.layout_search.memory_limit import fitting, peak_of
from fspmd.layout_search.op_graph import Op, OpGraph, is_value, record
from fspmd.layout_search.repeated_layers import Ties, ties
from fspmd.layout_search.search import DoesNotFit, LayeredSearch, LayoutPlan
from fspmd.meshes.mesh import Mesh, mesh_advice
from fspmd.messages import described
from fspmd.modules.paths import matches, near
from fspmd.redistribution.cost import topology
from fspmd.spec import P, complain
from fspmd.trees import parameter_names


def auto_spec(
    f: Callable[..., Any],
    mesh: Mesh,
    *args: Any,
    fixed: Mapping[str, P] | None = None,
    carried: Mapping[str, str] | None = None,
    memory_limit: float | None = None,
    alternatives: int = 3,
    solver: str | None = None,
) -> Layouts:
    """Find the cheapest layout of the arguments of ``f``, and with it of all that it computes.

    ``f`` runs on values without data, once, or twice where gradients have gradients, and its ops are written down. For
    each there are all ways to lay it out: each mesh axis shards a dim of the computation, or none, or leaves a sum
    pending. What a way computes, what must be moved between ops, and back for gradients, has a price by the figures of
    `set_topology`; the cheapest of all combinations is found exactly. Nothing is communicated.

    What counts is what ``f`` does: of ``value_and_grad(loss)`` or of a whole step forward and backward, of a loss only
    forward. A gradient lies as what it is of. `checkpoint` changes nothing of that: what it computes and moves again is
    left out of the time, and what it does not keep is counted among the bytes. Of gradients of gradients the moves are
    counted as often as they run; for the collectives of functions that communicate within, such as a softmax along a
    sharded dim, that is an estimate.

    Args:
        f: A function of global tensors, as `jit` takes; it is given `Sharded` values.
        mesh: Where it will run.
        args: Its arguments: pytrees of tensors (on any device, "meta" too), `Sharded` or `TensorSpec`, of which only
            shape, dtype and ``requires_grad`` count.
        fixed: Layouts that are given, by glob on key paths: ``{"params.*.w": P("x"), "x": P("x")}``.
        carried: Results that are arguments of the next call, so that they lie alike, by key paths: of a step that
            returns ``(loss, params, moments)`` it is ``{"1": "params", "2": "moments"}``.
        memory_limit: Bytes that a rank may hold; what would not fit is sharded though that takes longer. What counts is
            the peak of the program, as ``jit(layouts.apply(f)).lower(...).memory()`` tells it. What is solved has
            another count (`Layouts.memory`), whose limit is set anew a few times until the program fits. Where ``f``
            cannot be lowered that count alone is held to the limit. It takes SciPy (``pip install fspmd[auto]``), whose
            HiGHS finds what fits.
        alternatives: How many runners-up are wanted: the cheapest plans in which some argument lies otherwise than in
            any before, whatever axes that are alike are called; where layers repeat, plans in which these lie alike.
        solver: ``"elimination"``, which is built in and exact, and quick on what is nearly a chain or a tree; or
            ``"milp"``, HiGHS alone. By default the first, where its tables fit.

    Raises:
        RecordError: ``f`` looks at values, or uses `shard_map`, vmap or jvp.
        ArgumentError, SpecError: a pattern that matches nothing, a layout that does not fit, a limit under which
            nothing does, or no SciPy where it is needed.

    >>> import torch
    >>> from fspmd import make_mesh, value_and_grad
    >>> def mlp(w, x):
    ...     return (torch.relu(x @ w["up"]) @ w["down"]).sum()
    >>> w = {"up": torch.empty(4096, 16384, device="meta"), "down": torch.empty(16384, 4096, device="meta")}
    >>> x = torch.empty(64, 4096, device="meta")
    >>> found = auto_spec(value_and_grad(mlp), make_mesh((4,), ("x",)), w, x)
    >>> found.specs
    ({'up': P(None, 'x'), 'down': P('x', None)}, P(None, None))
    """
    _check(f, mesh, {"fixed": fixed, "carried": carried}, memory_limit, alternatives, solver)
    leaves, treedef = optree.tree_flatten(args, is_leaf=is_value)
    names = _names(f, args)
    given = _given(fixed or {}, [name for name, x in zip(names, leaves, strict=True) if is_value(x)], leaves, mesh)
    graph = record(f, mesh, leaves, treedef)
    of_leaves = [name for name, x in zip(names, leaves, strict=True) if is_value(x)]
    numbers = dict(zip(of_leaves, graph.leaves, strict=True))
    own = {numbers[name]: spec for name, spec in given.items()}
    _carry(graph, carried or {}, numbers, own)
    tables: dict[Any, Any] = {}

    def model(tied: Ties) -> CostModel:
        return CostModel(graph, topology(), own, tied, tables)

    def laid(plan: LayoutPlan, peak: int | None = None) -> Layouts:
        return replace(_layouts(plan, leaves, treedef, of_leaves), peak=peak)

    try:
        search = LayeredSearch(model, ties(graph, own), solver)
        if memory_limit is None:
            best = search.best()
            plans = [laid(plan) for plan in (best, *itertools.islice(search.runners_up(best), alternatives))]
        else:
            fit = fitting(memory_limit, search, lambda plan: peak_of(f, args, laid(plan)), alternatives)
            plans = [laid(*one) for one in fit]
    except DoesNotFit as error:
        raise ArgumentError(
            f"auto_spec: nothing fits in memory_limit={memory_limit:,.0f} bytes; the least that was found is "
            f"{error.least:,.0f}"
        ) from None
    except TooWide:
        raise ArgumentError(
            "auto_spec: the graph of this function is too wide for solver='elimination'; write solver='milp', or leave "
            "it out"
        ) from None
    return replace(plans[0], alternatives=tuple(plans[1:]))


def _layouts(plan: LayoutPlan, leaves: Sequence[Any], treedef: Any, names: Sequence[str]) -> Layouts:
    graph = plan.model.graph
    own = iter(plan.arguments)
    tree = treedef.unflatten([next(own).partition if is_value(x) else None for x in leaves])
    named = tuple(zip(names, plan.arguments, strict=True))
    ends = {op.operands[0]: plan.layout(op.results[0]) for op in graph.ops if op.carried}
    results = tuple(ends[n].partition if n in ends else None for n in graph.outputs)
    return Layouts(graph.mesh, tree, plan.time, plan.bound, round(plan.memory), named, tuple(_steps(plan)), results)


def _steps(plan: LayoutPlan) -> Iterator[PlannedOp]:
    """The ops; where the function says how a value lies is none."""
    for i, op in enumerate(plan.model.graph.ops):
        if op.pinned is None and not op.carried:
            way, before = plan.way(i), tuple(map(plan.layout, op.operands))
            needs, casts = tuple(need.spec for need in way.needs), tuple(need.casts for need in way.needs)
            yield PlannedOp(op.name, before, needs, casts, way.results, way.computing, way.within)


def _names(f: Any, args: tuple[Any, ...]) -> list[str]:
    """The key path of each leaf, which begins with the name of a parameter of ``f``."""
    roots = parameter_names(f, len(args))
    found = []
    for root, arg in zip(roots, args, strict=True):
        found += [".".join(map(str, (root, *path))) for path in optree.tree_paths(arg, is_leaf=is_value)]
    return found


def _check(f: Any, mesh: Any, by_path: dict[str, Any], memory_limit: Any, alternatives: Any, solver: Any) -> None:
    """Raises for what no function, mesh or option can be."""
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"auto_spec got {described(mesh)} for mesh; write auto_spec(f, mesh, *args), where mesh is "
            f"{mesh_advice(mesh)}"
        )
    if not callable(f):
        raise ArgumentError(f"auto_spec got {described(f)} for f; write auto_spec(f, mesh, *args)")
    if solver not in (None, "elimination", "milp"):
        raise ArgumentError(f"auto_spec got solver={solver!r}; write 'elimination', 'milp', or None")
    for name, patterns in by_path.items():
        if not isinstance(patterns, (Mapping, NoneType)):
            raise ArgumentError(f"auto_spec got {described(patterns)} for {name}; write a dict, from key paths")
        paths = list(patterns or ()) + (list(patterns.values()) if name == "carried" and patterns else [])
        for path in paths:
            if not isinstance(path, str):
                raise ArgumentError(
                    f"auto_spec got {described(path)} for a key path in {name}; write strings: the names of arguments, "
                    "such as 'params.w', and for results '0', or '0.w'"
                )
    if memory_limit is not None and not (type(memory_limit) in (int, float) and memory_limit >= 1):
        raise ArgumentError(f"auto_spec got memory_limit={memory_limit!r}; write a number of bytes, such as 80e9")
    if type(alternatives) is not int or alternatives < 0:
        raise ArgumentError(f"auto_spec got alternatives={alternatives!r}; write how many are wanted, such as 3, or 0")


def _given(fixed: Mapping[str, P], names: Sequence[str], leaves: Sequence[Any], mesh: Mesh) -> dict[str, P]:
    """The layouts that are given, by name."""
    found: dict[str, P] = {}
    shapes = dict(zip(names, (tuple(x.shape) for x in leaves if is_value(x)), strict=True))
    for pattern, spec in fixed.items():
        matched = [name for name in names if matches(pattern, name)]
        if not matched:
            raise ArgumentError(f"auto_spec: fixed has {pattern!r}, which matches no argument{near(pattern, names)}")
        for name in matched:
            complaint = complain(spec, mesh, len(shapes[name]))
            if complaint is None and (spec.unreduced or spec.reduced):
                complaint = "an argument that is put on the mesh is no pending sum, nor reduced; name dims alone"
            if complaint:
                raise SpecError(f"auto_spec: fixed[{pattern!r}] for {name}, of shape {shapes[name]}: {complaint}")
            found[name] = spec
    return found


def _carry(graph: OpGraph, carried: Mapping[str, str], leaves: Mapping[str, int], fixed: Mapping[int, P]) -> None:
    """One more op for each result that is an argument of the next call."""
    outputs = dict(zip(graph.results, graph.outputs, strict=True))
    for result, argument in carried.items():
        matched = [name for name in outputs if name == result or name.startswith(f"{result}.") or not result]
        if not matched:
            raise ArgumentError(f"auto_spec: carried has {result!r}, which is no result{near(result, outputs)}")
        for name in matched:
            rest = name.removeprefix(result).strip(".")
            target = f"{argument}.{rest}" if rest else argument
            number = leaves.get(target)
            if number is None or graph.values[number] is not graph.values[outputs[name]]:
                given = short(graph.values[outputs[name]])
                raise ArgumentError(
                    f"auto_spec: carried has {result!r}: {argument!r}, but the result {name!r} is {given}, and there "
                    f"is no argument {target!r} of that shape and dtype{near(target, leaves)}"
                )
            graph.ops.append(
                Op("result", None, (outputs[name],), (number,), frozenset(), fixed.get(number), carried=True)
            )
