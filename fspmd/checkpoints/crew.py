"""The processes that save or load together, and what they tell each other without a collective."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from fspmd.body import check_outside, the_mesh
from fspmd.errors import ArgumentError, CheckpointError, FspmdError, RecordError
from fspmd.inspection.long_waits import ended
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh, current_mesh, make_mesh
from fspmd.placement.broadcast import hear_all
from fspmd.torch_internals import store_of_ranks
from fspmd.tracing import is_recording
from fspmd.transport.reports import beside, own_store

_PAUSES: Final = (0.0005, 0.05)  # the shortest and the longest pause in seconds between two looks into the store
_SECONDS: Final = 1800.0  # how long a rank waits for the others' writes
_PERIOD: Final = 1.0  # seconds between two signs of life
_SILENCE: Final = 8.0  # seconds without one, after which a rank counts as gone
_FAREWELL: Final = 30.0  # how long the first rank waits until the others have read the outcome


Report = dict[str, Any]  # for JSON; a failure has the key "failure"


@dataclass(frozen=True, slots=True)
class Crew:
    """The processes of a call. The first decides for all."""

    what: str
    mesh: Mesh
    ranks: tuple[int, ...]  # global ranks; a simulation has one process
    place: int  # of this process among them

    def hear(self, make: Callable[[], Any]) -> list[Any]:
        """Call ``make`` on each process and return all results. The first error is raised on all."""

        def made() -> Any:
            try:
                return make()
            except FspmdError:
                raise
            except Exception as error:
                raise CheckpointError(f"{self.what}: {type(error).__name__}: {error}") from error

        if len(self.ranks) == 1:
            return [made()]
        try:
            told = hear_all(lambda: (self.what, made()), self.mesh)
        except RuntimeError as error:  # of torch: a process has ended
            raise CheckpointError(f"{self.what}: a rank is gone, or does not call {self.what}: {error}") from error
        for rank, (what, _) in zip(self.ranks, told, strict=True):
            if what != told[0][0]:
                raise ArgumentError(
                    f"rank {rank} calls {what}, but rank {self.ranks[0]} {told[0][0]}; all ranks must call the same"
                )
        return [result for _, result in told]

    def decide(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` on the first process, and return its result on all."""
        return self.hear(lambda: make() if self.place == 0 else None)[0]

    def settlement(self, token: str) -> Settlement:
        """Return how the processes settle one save. All of them pass the same token."""
        if len(self.ranks) == 1:
            return Settlement(self, None, None)
        return Settlement(self, own_store(f"fspmd.checkpoint/{token}"), store_of_ranks(""))


def crew_of(mesh: Mesh | None, what: str) -> Crew:
    """Return the processes of a mesh, by default those of `set_mesh`, or else all."""
    check_outside(what)
    if is_recording():
        raise RecordError(f"{what} was called within jit, where values are unknown; call it before or after")
    if mesh is None and current_mesh() is None:
        mesh = make_mesh((world.world_size(),), ("process",))
    mesh = the_mesh(mesh, what)
    me = world.process_rank()
    if mesh.transport != "process_group":
        return Crew(what, mesh, (me,), 0)
    ranks = tuple(mesh.ranks)
    return Crew(what, mesh, ranks, ranks.index(me))


@dataclass(slots=True)
class Settlement:
    """Each process reports once, the first decides, and all hear the outcome. It passes through torch's store.

    A thread may run this while other threads communicate: it sends no collective, makes no group, and never waits
    inside the store, so it holds nobody up.
    """

    crew: Crew
    store: Any  # over a connection on which no other thread waits
    kept: Any  # the store of torch, which the user may destroy meanwhile
    gone: set[int] = field(default_factory=set)  # the places of processes that have ended or are stopped

    @contextmanager
    def signs_of_life(self) -> Iterator[None]:
        """Within the block a thread tells the others that this process lives."""
        if self.store is None:
            yield
            return
        ended = threading.Event()

        def tell() -> None:
            with contextlib.suppress(Exception):  # the store has ended
                while not ended.is_set():
                    self.store.add(f"alive/{self.crew.place}", 1)
                    ended.wait(_PERIOD)
                self.store.delete_key(f"alive/{self.crew.place}")

        beside(tell, "fspmd save lives")
        try:
            yield
        finally:
            ended.set()

    def settle(self, report: Report, decide: Callable[[list[Report]], Report]) -> Report:
        """Return what ``decide`` returned on the first process, on all. One that waits too long has its own failure."""
        if self.store is None:
            return decide([report])
        crew, store = self.crew, self.store
        store.set(f"report/{crew.place}", json.dumps(report, separators=(",", ":")))
        if crew.place == 0:
            keys = {f"report/{place}": place for place in range(len(crew.ranks))}
            if failure := self._wait(keys, _SECONDS):
                outcome: Report = {"failure": failure}
            else:
                outcome = decide([json.loads(store.get(key)) for key in keys])
            store.set("outcome", json.dumps(outcome))
            read = {f"read/{place}": place for place in keys.values() if place and place not in self.gone}
            if not self._wait(read, _FAREWELL):
                for key in (*keys, *read, *(f"alive/{place}" for place in keys.values()), "outcome"):
                    store.delete_key(key)
            return outcome
        if failure := self._wait({"outcome": 0}, 2 * _SECONDS):
            return {"failure": f"whether the step is complete is not known: {failure}"}
        outcome = json.loads(store.get("outcome"))
        store.set(f"read/{crew.place}", "")
        return outcome

    def _wait(self, keys: dict[str, int], seconds: float) -> str:
        """Wait for keys of the processes in these places. Return a text about those that did not set theirs, or ""."""
        start = looked = time.monotonic()
        heard: dict[int, tuple[int, float]] = {}  # by place the last sign of life, and when it came
        while keys and not self.store.check(list(keys)):
            now = time.monotonic()
            if now - looked > _PERIOD:
                late = {place for key, place in keys.items() if not self.store.check([key])}
                if late and now - start > seconds:
                    return f"{self._named(late)} did not finish within {seconds:.0f} s"
                if failure := self._lost(late, heard):
                    return failure
                looked = now
            time.sleep(min(max(_PAUSES[0], (now - start) / 20), _PAUSES[1]))
        return ""

    def _lost(self, late: set[int], heard: dict[int, tuple[int, float]]) -> str:
        """Return a text about processes that have ended on this machine, or give no sign of life, or ""."""
        ranks = {self.crew.ranks[place]: place for place in late}
        if causes := ended(ranks):
            self.gone.update(ranks[rank] for rank in causes)
            return "; ".join(f"rank {rank} {text}" for rank, text in sorted(causes.items()))
        begin = time.monotonic()
        signs = {place: self.store.add(f"alive/{place}", 0) for place in late}  # `get` would wait for a deleted key
        now = time.monotonic()
        for place, sign in signs.items():
            if place not in heard or heard[place][0] != sign or now - begin > _PERIOD:  # the store has been slow
                heard[place] = sign, now
        if silent := {place for place in late if now - heard[place][1] > _SILENCE}:
            self.gone |= silent
            return f"{self._named(silent)} gave no sign of life for {_SILENCE:.0f} s, and ended or was stopped"
        return ""

    def _named(self, places: Iterable[int]) -> str:
        ranks = sorted(self.crew.ranks[place] for place in places)
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
