"""`auto_spec`: finds the layouts of arguments that are cheapest for all that a function computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import optree

from fspmd.errors import ArgumentError, MeshError, SpecError
from fspmd.foreign import refuse_foreign
from fspmd.layout_search.apply import Layouts, PlannedOp
from fspmd.layout_search.cost_model import CostModel, Ties, ties
from fspmd.layout_search.memory_limit import fitting, peak_of
from fspmd.layout_search.op_graph import Op, OpGraph, is_value, record
from fspmd.layout_search.search import DoesNotFit, LayeredSearch, LayoutPlan
from fspmd.layout_search.solvers import TooWide
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
    """Find the cheapest layouts of the arguments of ``f``, and of all values that it computes.

    ``f`` runs on values without data, once, or twice where gradients have gradients, and its ops are recorded. Each op
    has all its strategies: each mesh axis shards a dim of the computation, or none, or leaves a sum pending. A strategy
    has a price by the figures of `set_topology`: its computation, the moves between ops, and the moves of gradients
    back. The cheapest combination is found exactly. Nothing is communicated.

    The cost is that of ``f`` as it is given: for ``value_and_grad(loss)`` or a whole step it includes forward and
    backward, for a loss only forward. A gradient has the layout of its argument. `checkpoint` does not change the plan:
    computation and moves that it repeats do not count in the time, and values that it does not keep count in the bytes.
    In gradients of gradients, moves count as often as they run. For functions that communicate within, such as a
    softmax along a sharded dim, this is an estimate.

    Args:
        f: A function of global tensors, as for `jit`. It is called with `Sharded` values.
        mesh: The mesh on which ``f`` will run.
        args: The arguments of ``f``: pytrees of tensors (on any device, also "meta"), `Sharded` or `TensorSpec`. Only
            shape, dtype and ``requires_grad`` count.
        fixed: Given layouts, by globs on key paths: ``{"params.*.w": P("x"), "x": P("x")}``.
        carried: Results that are arguments of the next call, and so get their layouts, by key paths. For a step that
            returns ``(loss, params, moments)`` write ``{"1": "params", "2": "moments"}``.
        memory_limit: The most bytes that a rank may hold. Values are sharded to fit, even if that takes longer. The
            limit is for the peak of the program, ``jit(layouts.apply(f)).lower(...).memory()``, without the memory
            within kernels, which depends on the machine. The search counts other bytes (`Layouts.memory`), whose limit
            is set anew a few times until the program fits. If ``f`` cannot be lowered, the limit is for the bytes of
            the search. A limit needs HiGHS of SciPy (``pip install fspmd[auto]``).
        alternatives: The number of runners-up: the cheapest plans, each with another layout of some argument than every
            plan before it. Layouts that differ by the names of alike axes count as equal. Where layers repeat,
            runners-up have the same layouts in all of them.
        solver: ``"elimination"``, which is built in and exact, and fast on graphs that are nearly a chain or a tree; or
            ``"milp"``, HiGHS alone. The default is elimination where its tables fit in memory, else HiGHS.

    Raises:
        RecordError: ``f`` reads values, or uses `shard_map`, vmap or jvp.
        ArgumentError: a pattern matches nothing, no plan fits in the limit, or SciPy is needed and missing.
        SpecError: a given layout does not fit its argument.

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
    names = [name for name, x in zip(_names(f, args), leaves, strict=True) if is_value(x)]
    for x in leaves:
        refuse_foreign(x, "auto_spec got")
    given = _given(fixed or {}, names, leaves, mesh)
    graph = record(f, mesh, leaves, treedef)
    numbers = dict(zip(names, graph.leaves, strict=True))
    partitions = {numbers[name]: spec for name, spec in given.items()}
    _carry(graph, carried or {}, numbers, partitions)
    tables: dict[Any, Any] = {}

    def model(tied: Ties) -> CostModel:
        return CostModel(graph, topology(), partitions, tied, tables)

    def layouts(plan: LayoutPlan, peak: int | None = None) -> Layouts:
        return replace(_layouts(plan, leaves, treedef, names), peak=peak)

    try:
        search = LayeredSearch(model, ties(graph, partitions), solver)
        if memory_limit is None:
            best = search.best()
            plans = [layouts(plan) for plan in (best, *itertools.islice(search.runners_up(best), alternatives))]
        else:
            fit = fitting(memory_limit, search, lambda plan: peak_of(f, args, layouts(plan)), alternatives)
            plans = [layouts(plan, peak) for plan, peak in fit]
    except DoesNotFit as error:
        raise ArgumentError(
            f"auto_spec found no plan for memory_limit={memory_limit:,.0f} bytes; the least that was found is "
            f"{error.least:,.0f}: write a larger limit, or use a mesh of more ranks"
        ) from None
    except TooWide:
        raise ArgumentError(
            "auto_spec got solver='elimination', but the graph of this function is too wide for it; write "
            "solver='milp', or leave the option out"
        ) from None
    return replace(plans[0], alternatives=tuple(plans[1:]))


def _layouts(plan: LayoutPlan, leaves: Sequence[Any], treedef: Any, names: Sequence[str]) -> Layouts:
    """The layouts of a plan. ``names``: the key paths of the tensors among the leaves."""
    graph = plan.model.graph
    arguments = iter(plan.arguments)
    tree = treedef.unflatten([next(arguments).partition if is_value(x) else None for x in leaves])
    named = tuple(zip(names, plan.arguments, strict=True))
    ends = {op.operands[0]: plan.layout(op.results[0]) for op in graph.ops if op.carried}
    results = tuple(ends[n].partition if n in ends else None for n in graph.outputs)
    return Layouts(graph.mesh, tree, plan.time, plan.bound, round(plan.memory), named, tuple(_steps(plan)), results)


def _steps(plan: LayoutPlan) -> Iterator[PlannedOp]:
    """The planned ops. Ops that pin or carry a value are left out."""
    for i, op in enumerate(plan.model.graph.ops):
        if op.pinned is None and not op.carried:
            choice, before = plan.strategy(i), tuple(map(plan.layout, op.operands))
            needs, casts = tuple(need.spec for need in choice.needs), tuple(need.casts for need in choice.needs)
            yield PlannedOp(op.name, before, needs, casts, choice.results, choice.computing, choice.within)


def _names(f: Any, args: tuple[Any, ...]) -> list[str]:
    """The key path of each leaf. It begins with the name of a parameter of ``f``."""
    roots = parameter_names(f, len(args))
    paths = []
    for root, arg in zip(roots, args, strict=True):
        paths += [".".join(map(str, (root, *path))) for path in optree.tree_paths(arg, is_leaf=is_value)]
    return paths


def _check(f: Any, mesh: Any, by_path: dict[str, Any], memory_limit: Any, alternatives: Any, solver: Any) -> None:
    """Raise an error for a mesh, a function or an option of a wrong kind."""
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
            raise ArgumentError(f"auto_spec got {described(patterns)} for {name}; write a dict with key paths as keys")
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
        raise ArgumentError(f"auto_spec got alternatives={alternatives!r}; write an int >= 0, such as 3")


def _given(fixed: Mapping[str, P], names: Sequence[str], leaves: Sequence[Any], mesh: Mesh) -> dict[str, P]:
    """The given layouts by name. ``names``: the key paths of the tensors among the leaves."""
    given: dict[str, P] = {}
    shapes = dict(zip(names, (tuple(x.shape) for x in leaves if is_value(x)), strict=True))
    for pattern, spec in fixed.items():
        matched = [name for name in names if matches(pattern, name)]
        if not matched:
            raise ArgumentError(f"auto_spec got {pattern!r} in fixed, which matches no argument{near(pattern, names)}")
        for name in matched:
            complaint = complain(spec, mesh, len(shapes[name]))
            if complaint is None and (spec.unreduced or spec.reduced):
                complaint = "an argument cannot be unreduced or reduced; write axes of dims alone"
            if complaint:
                raise SpecError(f"auto_spec: fixed[{pattern!r}] for {name}, of shape {shapes[name]}: {complaint}")
            given[name] = spec
    return given


def _carry(graph: OpGraph, carried: Mapping[str, str], leaves: Mapping[str, int], fixed: Mapping[int, P]) -> None:
    """Add an op for each result that is an argument of the next call."""
    outputs = dict(zip(graph.results, graph.outputs, strict=True))
    for result, argument in carried.items():
        matched = [name for name in outputs if name == result or name.startswith(f"{result}.") or not result]
        if not matched:
            raise ArgumentError(f"auto_spec got {result!r} in carried, which is no result{near(result, outputs)}")
        for name in matched:
            rest = name.removeprefix(result).strip(".")
            target = f"{argument}.{rest}" if rest else argument
            number = leaves.get(target)
            if number is None or graph.values[number] is not graph.values[outputs[name]]:
                given = graph.values[outputs[name]].text
                raise ArgumentError(
                    f"auto_spec got {result!r}: {argument!r} in carried, but the result {name!r} is {given}, and no "
                    f"argument {target!r} has this shape and dtype{near(target, leaves)}"
                )
            graph.ops.append(
                Op("result", None, (outputs[name],), (number,), frozenset(), fixed.get(number), carried=True)
            )
