"""The layouts that `auto_spec` found: of the arguments, and of all values computed from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fspmd.layout_search.apply import PlannedOp, applied, short
from fspmd.meshes.mesh import Mesh
from fspmd.spec import P, TensorSpec

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Layouts:
    """The result of `auto_spec`. Printing it shows a table."""

    mesh: Mesh
    """The mesh."""
    specs: Any
    """A tree like the arguments, with the `P` of each tensor, for ``device_put(args, layouts.specs, mesh=mesh)``."""
    time: float
    """µs of one call: computation, and collectives forward and backward."""
    bound: float
    """µs that no plan can beat. It is less than `time` if a search under a memory limit ended early."""
    memory: int
    """The bytes that a rank holds: arguments, their gradients, results, and values that backward keeps.

    Values that live only while an op runs do not count, such as a weight that is gathered for it. Values that
    `checkpoint` does not keep count. For ``jit(layouts.apply(f)).lower(...).memory()`` it is the other way round.
    """
    leaves: tuple[tuple[str, TensorSpec], ...]
    """The key path and the layout of each tensor among the arguments."""
    steps: tuple[PlannedOp, ...]
    """The ops, with the layouts of their operands and the layouts that they need."""
    results: tuple[P | None, ...]
    """For each result that is an argument of the next call, the layout of this argument; None for other results."""
    alternatives: tuple[Layouts, ...] = ()
    """The runners-up, the quickest first. Each has another layout of some argument than every plan before it."""
    peak: int | None = None
    """The most bytes that a rank holds while the recorded program runs, if `memory_limit` was given."""

    @property
    def communication(self) -> float:
        """µs of `time` that collectives take."""
        return self.time - sum(step.computing for step in self.steps)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.leaves), default=0)
        above = self.time / self.bound - 1 if self.bound else 0.0
        gap = f"; at most {100 * above:.2g}% above the optimum" if above > _ROUNDING else ""
        time = f"{self.time:,.1f} µs, of which {self.communication:,.1f} are collectives"
        held = f"{self.memory:,} B on each rank" if self.peak is None else f"at most {self.peak:,} B on a rank"
        lines = [f"{time}{gap}; {held}"]
        lines += [f"  {name:{width}}  {short(spec):<32} {spec.partition}" for name, spec in self.leaves]
        moved = [f"  {step}" for step in self.steps if str(step)]
        return "\n".join([*lines, *(["moves:", *moved] if moved else ["no moves"])])

    __repr__ = __str__

    def apply(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f`` with intermediate values in the layouts that were found.

        Operands are moved before each call, as by `reshard`. Pending sums of results are settled, or results are moved
        to the layouts of the arguments of the next call. Communication forward and backward is as predicted. Without
        this function, each torch function chooses the cheapest layouts for itself alone. Apply it before `jit`.
        """
        return applied(f, self.mesh, self.steps, self.results)
