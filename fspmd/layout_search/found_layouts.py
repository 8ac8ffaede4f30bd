"""The layouts that `auto_spec` found: of arguments, and of what is computed from them."""

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
    steps: tuple[PlannedOp, ...]
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
