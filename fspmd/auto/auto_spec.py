"""`auto_spec`: layouts of arguments, found by solving for the cheapest ones of all that a function computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from types import NoneType
from typing import Any

import optree

from fspmd.auto.apply import Step, applied, short
from fspmd.auto.eliminate import TooWide
from fspmd.auto.fitting import fitting, peak_of
from fspmd.auto.model import Builder
from fspmd.auto.next_best import others, runners_up, smallest
from fspmd.auto.record import Op, Program, is_value, record
from fspmd.auto.repeats import Ties, ties
from fspmd.auto.solve import DoesNotFit, Found, Solver
from fspmd.errors import ArgumentError, MeshError, SpecError
from fspmd.meshes.mesh import Mesh, mesh_instead
from fspmd.messages import described
from fspmd.modules.paths import matches, near
from fspmd.redistribution.cost import topology
from fspmd.spec import P, TensorSpec, complain
from fspmd.trees import parameter_names

_ROUNDING = 1e-9
_LOOKED = 36  # plans, for one that fits
_SMALLEST = 6  # plans that are recorded where none of the quick ones fits


@dataclass(frozen=True)
class Layouts:
    """What `auto_spec` found; printing it shows a table."""

    mesh: Mesh
    """Where."""
    specs: Any
    """A tree like the arguments, with the `P` of each tensor, for ``device_put(args, layouts.specs, mesh=mesh)``."""
    time: float
    """µs of one call: computing, and collectives forward and backward."""
    bound: float
    """µs that no plan can beat: `time`, but where a search under a limit of memory ended before all was seen."""
    memory: int
    """Bytes that a rank holds: arguments, their gradients, results, and what backward keeps.

    What lives only while an op runs is left out, such as a weight that is gathered for it, and what `checkpoint` does
    not keep is counted; of ``jit(layouts.apply(f)).lower(...).memory()`` it is the other way round.
    """
    leaves: tuple[tuple[str, TensorSpec], ...]
    """Key path and layout of each tensor among the arguments."""
    steps: tuple[Step, ...]
    """Each op: how its operands lie, and how they must."""
    results: tuple[P | None, ...]
    """How the tensors that are returned must lie: as the arguments of the next call, or None."""
    alternatives: tuple[Layouts, ...] = ()
    """The runners-up, the quickest first: plans in which some argument lies otherwise than in those before."""
    peak: int | None = None
    """Bytes that a rank holds at most while the recorded program runs, where `memory_limit` was given."""

    @property
    def communication(self) -> float:
        """µs of `time` that are collectives."""
        return self.time - sum(step.computing for step in self.steps)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.leaves), default=0)
        above = self.time / self.bound - 1 if self.bound else 0.0
        gap = f"; at most {100 * above:.2g}% above what can be" if above > _ROUNDING else ""
        time = f"{self.time:,.1f} µs, of which {self.communication:,.1f} are collectives"
        held = f"{self.memory:,} B on each rank" if self.peak is None else f"at most {self.peak:,} B on a rank"
        lines = [f"{time}{gap}; {held}"]
        lines += [f"  {name:{width}}  {short(spec):<32} {spec.partition}" for name, spec in self.leaves]
        moved = [f"  {step}" for step in self.steps if str(step)]
        return "\n".join([*lines, *(["what is moved:", *moved] if moved else ["nothing is moved"])])

    __repr__ = __str__

    def apply(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` with intermediate values laid out as was found: operands are moved before each call, as by `reshard`.

        Of results pending sums end, or they are moved to where the next call has them. Communication is what was
        predicted, forward and backward.
        Without it each torch function by itself chooses what is cheapest for it alone. Apply it before `jit`.
        """
        return applied(f, self.mesh, self.steps, self.results)


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
            cannot be lowered that count alone is held to the limit.
        alternatives: How many runners-up are wanted: the cheapest plans in which some argument lies otherwise than in
            any before, whatever axes that are alike are called; where layers repeat, plans in which these lie alike.
        solver: ``"elimination"``, which is built in and exact, and quick on what is nearly a chain or a tree; or
            ``"milp"``, HiGHS through SciPy (``pip install fspmd[auto]``). By default the first, where its tables fit.

    Raises:
        RecordError: ``f`` looks at values, or uses `shard_map`, vmap or jvp.
        ArgumentError, SpecError: a pattern that matches nothing, a layout that does not fit, or a limit under which
            nothing does.

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
    program = record(f, mesh, leaves, treedef)
    of_leaves = [name for name, x in zip(names, leaves, strict=True) if is_value(x)]
    numbers = dict(zip(of_leaves, program.leaves, strict=True))
    own = {numbers[name]: spec for name, spec in given.items()}
    _carry(program, carried or {}, numbers, own)
    known: dict[Any, Any] = {}

    def solving(tied: Ties) -> Solver:
        return Solver(Builder(program, topology(), own, tied, known), "elimination" if tied.ops else solver)

    def solve(limit: float | None) -> tuple[Solver, Found]:
        return _solve(solving, ties(program, own) if solver != "milp" else Ties(), limit)

    def laid(solved: Solver, found: Found) -> Layouts:
        return _layouts(solved.builder, found, leaves, treedef, of_leaves)

    def peak(solved: Solver, found: Found) -> int | None:
        return peak_of(f, args, mesh, laid(solved, found))

    def in_order(solved: Solver, found: Found) -> Iterator[tuple[Solver, Found]]:
        return itertools.islice(others(solved, found), _LOOKED)

    def holding_least(solved: Solver) -> list[tuple[Solver, Found]]:
        return smallest(solved, _SMALLEST)

    try:
        if memory_limit is not None:
            fit = fitting(memory_limit, solve, peak, in_order, holding_least, alternatives, len(program.ops))
            if fit is not None:
                best, *after = [replace(laid(one.solver, one.found), peak=one.peak) for one in fit]
                return replace(best, alternatives=tuple(after))
        solved, found = solve(memory_limit)
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

    after = [laid(*one) for one in runners_up(solved, found, alternatives, memory_limit)]
    return replace(laid(solved, found), alternatives=tuple(after))


def _solve(solving: Callable[[Ties], Solver], tied: Ties, limit: float | None) -> tuple[Solver, Found]:
    """The best plan; where layers repeat and that loses nothing, one in which they lie alike.

    What they cost alike is quickly solved, and leaves few moves to be priced for the rest.
    """
    alike = found = None
    if tied.ops:
        with suppress(DoesNotFit, TooWide):
            alike = solving(tied)
            found = alike.best(limit)
    apart = solving(Ties())  # after the moves of the others are priced
    other = apart.best(limit, inf if found is None else found.time + 1e-12 * found.memory)
    if alike is None or found is None:
        return apart, other
    apart.alike = alike, found
    if other.time < found.time * (1 - _ROUNDING):
        return apart, other
    return alike, replace(found, bound=other.bound)


def _layouts(builder: Builder, found: Found, leaves: Sequence[Any], treedef: Any, names: Sequence[str]) -> Layouts:
    program = builder.program
    specs = [builder.chosen_value(number, found.chosen) for number in program.leaves]
    own = iter(specs)
    tree = treedef.unflatten([next(own).partition if is_value(x) else None for x in leaves])
    steps = tuple(_steps(builder, found))
    named = tuple(zip(names, specs, strict=True))
    ends = {op.operands[0]: builder.chosen_value(op.results[0], found.chosen) for op in program.ops if op.carried}
    results = tuple(ends[n].partition if n in ends else None for n in program.outputs)
    return Layouts(program.mesh, tree, found.time, found.bound, round(found.memory), named, steps, results)


def _steps(builder: Builder, found: Found) -> Iterator[Step]:
    """The ops; where the function says how a value lies is none."""
    for i, op in enumerate(builder.program.ops):
        if op.pinned is None and not op.carried:
            way = builder.chosen_way(i, found.chosen)
            before = tuple(builder.chosen_value(number, found.chosen) for number in op.operands)
            needs, casts = tuple(need.spec for need in way.needs), tuple(need.casts for need in way.needs)
            yield Step(op.name, before, needs, casts, way.results, way.computing, way.within)


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
            f"{mesh_instead(mesh)}"
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


def _carry(program: Program, carried: Mapping[str, str], leaves: Mapping[str, int], fixed: Mapping[int, P]) -> None:
    """One more op for each result that is an argument of the next call."""
    outputs = dict(zip(program.results, program.outputs, strict=True))
    for result, argument in carried.items():
        matched = [name for name in outputs if name == result or name.startswith(f"{result}.") or not result]
        if not matched:
            raise ArgumentError(f"auto_spec: carried has {result!r}, which is no result{near(result, outputs)}")
        for name in matched:
            rest = name.removeprefix(result).strip(".")
            target = f"{argument}.{rest}" if rest else argument
            number = leaves.get(target)
            if number is None or program.values[number] is not program.values[outputs[name]]:
                given = short(program.values[outputs[name]])
                raise ArgumentError(
                    f"auto_spec: carried has {result!r}: {argument!r}, but the result {name!r} is {given}, and there "
                    f"is no argument {target!r} of that shape and dtype{near(target, leaves)}"
                )
            program.ops.append(
                Op("result", None, (outputs[name],), (number,), frozenset(), fixed.get(number), carried=True)
            )
