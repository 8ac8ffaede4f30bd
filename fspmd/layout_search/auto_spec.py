"""`auto_spec`: finds the layouts of arguments that are cheapest for all that a function computes.

Under a memory limit, the bytes of a plan are those that its recorded program holds. The model of the search leaves out
values that live only while an op runs, and counts values that `checkpoint` does not keep. So the limit of the model is
lowered or raised until the program fits the memory limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from types import NoneType
from typing import Any

import optree

from fspmd.errors import ArgumentError, FspmdError, MeshError, SpecError
from fspmd.foreign import refuse_foreign
from fspmd.layout_search.apply import Layouts, PlannedOp, applied
from fspmd.layout_search.cost_model import CostModel, Ties, ties
from fspmd.layout_search.op_graph import Op, OpGraph, is_value, record
from fspmd.layout_search.search import BYTES, DoesNotFit, LayeredSearch, LayoutPlan
from fspmd.layout_search.solvers import TooWide
from fspmd.meshes.mesh import Mesh, make_mesh, mesh_advice
from fspmd.messages import described
from fspmd.modules.paths import matches, near
from fspmd.programs.jit import jit
from fspmd.programs.lower import Lowered
from fspmd.programs.memory import memory_of_program
from fspmd.redistribution.cost import topology
from fspmd.spec import P, TensorSpec, complain
from fspmd.trees import parameter_names

_ROUNDS = 5  # the number of limits of the model to try
_MORE = 1.2  # times the least bytes by the model: the program with the least bytes often has more by the model
_FEW, _MANY, _OPS = 12, 60, 6000  # the least and most further plans to record, and the ops of all of them
_SHARE = 0.6  # of the bytes by the model: few programs hold less
_ENOUGH = 0.98  # of the limit: a plan that holds so much can hardly be improved
_ROUNDING, _TIE = 1e-6, 1e-12


class _Recorded:
    """The plans that were recorded, each once: the bytes that they hold, and the plans that fit."""

    def __init__(self, limit: float, peak: Callable[[LayoutPlan], int | None]) -> None:
        self._limit, self._peak = limit, peak
        self._known: dict[tuple[int, ...], float] = {}
        self._fit: dict[frozenset[Any], tuple[LayoutPlan, float]] = {}  # by the layouts of arguments
        self.has_peaks = True  # whether programs can be recorded; else the bytes by the model count
        self.over_counts = False  # whether a program held less than by the model
        self.least = inf

    def __contains__(self, plan: LayoutPlan) -> bool:
        return plan.chosen in self._known

    def peak_of(self, plan: LayoutPlan) -> float:
        """The most bytes that a rank holds."""
        if plan not in self:
            self._known[plan.chosen] = peak_bytes = self._measured(plan)
            self.least = min(self.least, peak_bytes)
            self.over_counts |= peak_bytes < plan.memory
            if peak_bytes <= self._limit:
                known = self._fit.get(plan.names)
                if known is None or plan.time < known[0].time:
                    self._fit[plan.names] = plan, peak_bytes
        return self._known[plan.chosen]

    def _measured(self, plan: LayoutPlan) -> float:
        """The peak of a plan. Without a record it is the bytes by the model; infinity if only other plans have one."""
        peak = self._peak(plan) if self.has_peaks else None
        self.has_peaks &= bool(self._known) or peak is not None
        if not self.has_peaks:
            return plan.memory
        return inf if peak is None else peak

    @property
    def fit(self) -> list[tuple[LayoutPlan, float]]:
        """The plans that fit and their bytes, the quickest first."""
        return sorted(self._fit.values(), key=lambda entry: entry[0].time)

    def quicker(self, time: float) -> int:
        """The number of plans that fit and take at most this time."""
        return sum(plan.time <= time * (1 + _ROUNDING) for plan, _ in self._fit.values())


def peak_of(f: Callable[..., Any], args: tuple[Any, ...], layouts: Layouts) -> int | None:
    """The most bytes that a rank holds while the program runs; None if ``f`` cannot be recorded.

    They are those of the first rank, whose blocks are the largest, so all processes have the same number. Memory within
    kernels depends on the machine, and does not count.
    """
    mesh = layouts.mesh
    ranks = make_mesh(tuple(mesh.shape.values()), mesh.axis_names, transport="abstract")

    def given(x: Any, partition: P | None) -> Any:
        return x if partition is None else TensorSpec(ranks, partition, tuple(x.shape), x.dtype)

    with suppress(FspmdError):
        specs = optree.tree_map(given, args, layouts.specs, is_leaf=is_value, none_is_leaf=True)
        jitted: Any = jit(applied(f, ranks, layouts.steps, layouts.results))
        program: Lowered = jitted.lower(*specs)
        return memory_of_program(program.program, scratch=False).peak
    return None


def fitting(
    limit: float, search: LayeredSearch, peak: Callable[[LayoutPlan], int | None], count: int
) -> list[tuple[LayoutPlan, int | None]]:
    """The quickest plan that holds at most ``limit`` bytes, and up to ``count`` runners-up that do, with their peaks.

    First, the best plans by the model are recorded, under limits of the model that are set anew a few times. Second,
    the runners-up without a limit are recorded in order, until enough plans fit that are as quick: values that live
    only while an op runs may take far less memory in them. Third, the runners-up at the last price of a byte are
    recorded; if no plan has fitted, those with the least bytes. A peak is None if the function cannot be recorded; then
    the bytes by the model count.

    If the model counts more bytes for some plan than its program holds, a plan may fit that the model excludes. Then
    the only known bound of the time is the best plan without a limit.

    Raises:
        DoesNotFit: no recorded plan fits.
    """
    quickest = search.best()
    recorded = _Recorded(limit, peak)
    peak_bytes = recorded.peak_of(quickest)
    best, bound = quickest, inf
    if peak_bytes > limit:
        best, bound = _limited(limit, search, quickest, peak_bytes, recorded)
    more = min(max(_OPS // max(len(quickest.model.graph.ops), 1), _FEW), _MANY)
    for plan in itertools.islice(search.runners_up(quickest), more):
        if recorded.quicker(plan.time) > count:
            break
        if _SHARE * plan.memory <= limit:
            recorded.peak_of(plan)
    priced = best if recorded.fit else replace(best, price=BYTES)
    for plan in itertools.islice(search.runners_up(priced), more) if priced is not quickest else ():
        if len(recorded.fit) > count:
            break
        recorded.peak_of(plan)
    if not recorded.fit:
        raise DoesNotFit(recorded.least)
    bound = quickest.bound if recorded.over_counts or bound == inf else bound
    fit = [(plan, round(peak_bytes) if recorded.has_peaks else None) for plan, peak_bytes in recorded.fit[: count + 1]]
    best = fit[0][0]
    return [(replace(best, bound=min(bound, best.time)), fit[0][1]), *fit[1:]]


def _limited(
    limit: float, search: LayeredSearch, quickest: LayoutPlan, peak_bytes: float, recorded: _Recorded
) -> tuple[LayoutPlan, float]:
    """The last plan of those under limits of the model that are set anew, and a bound of the time by the model.

    ``peak_bytes``: the bytes that the quickest plan holds, which are too many.
    """
    over, bound = quickest.memory, inf  # bytes by the model that are too many
    allowed = over * limit / peak_bytes * (1 + _TIE)
    for _ in range(_ROUNDS):
        smallest = False
        try:
            plan = search.best(allowed)
        except DoesNotFit as error:
            smallest = True
            plan = search.best(allowed := error.least * _MORE)
        if plan in recorded:
            break
        peak_bytes, fit = recorded.peak_of(plan), recorded.fit
        bound = min(bound, plan.bound)
        guess = plan.memory * limit / max(peak_bytes, 1) * (1 + _TIE)
        if peak_bytes <= limit:
            if peak_bytes > _ENOUGH * limit:
                break
            allowed = guess if guess < over else (plan.memory + over) / 2
        elif smallest:  # the smallest plan by the model; another plan may hold less
            allowed = plan.memory * _MORE
        else:
            over = min(over, plan.memory)
            allowed = max(guess, (plan.memory + fit[0][0].memory) / 2) if fit else guess
    return plan, bound


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
