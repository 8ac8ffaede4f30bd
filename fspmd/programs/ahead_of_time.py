"""A lowered program as a function: recorded ahead of time, for arguments of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fspmd.errors import ArgumentError, MeshError, RecordError
from fspmd.meshes.mesh import Mesh
from fspmd.programs.keys import key_of
from fspmd.programs.misses import Facts, differences, facts_of
from fspmd.programs.program import Program
from fspmd.programs.records import Record, replayed, stale
from fspmd.torch_internals import FakeTensor


class Compiled:
    """What ``jit(f).lower(...).compile()`` gives: the program, for arguments of the kind that it was lowered for.

    Raises:
        ArgumentError: an argument is of another kind; it says which, and what differs.
    """

    def __init__(self, function: Callable[..., Any], record: Record, marked: Callable[..., Any]) -> None:
        self._function, self._record, self._marked = function, record, marked
        self._accepted: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        args, kwargs = self._marked(args, kwargs)
        known, values, strides = key_of(args, kwargs)
        if known not in self._accepted or self._record.closed or self._record.modules:
            self._accept(facts_of(self._function, args, kwargs))
            self._accepted.add(known)
        return replayed(self._record, values, strides)

    def _accept(self, facts: Facts) -> None:
        reasons = stale(self._record) or differences(facts, self._record.facts)
        if reasons:
            raise ArgumentError(
                f"{self._function.__name__} was lowered for other arguments: {'; '.join(reasons)}; lower it for these, "
                "or call jit(f), which records what it does not know"
            )


def check_runs(program: Program, mesh: Mesh | None) -> None:
    """Raises for a program that nobody can run."""
    if mesh is not None and mesh.transport == "abstract":
        raise MeshError(
            f"compile() of a program on {mesh!r}, which is abstract: no ranks are there to run it; lower it for a mesh "
            'of transport="simulation" or "process_group"'
        )
    if any(isinstance(x, FakeTensor) for x in program.constants.values()):
        raise RecordError("compile() of a program that closes over a tensor without values; call jit(f) instead")
