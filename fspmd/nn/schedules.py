"""Schedules of pipelines as data: which rank computes which stage of which microbatch at which tick."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.nn.arguments import Size, checked


class Action(NamedTuple):
    """One cell of a schedule.

    ``kind`` is F (forward), B (the whole backward), I (the gradient of a stage's input) or W (that of its parameters).
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Costs(NamedTuple):
    """The durations of F, I and W, in one unit of your choice. B takes ``input_gradient + weight_gradient``."""

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1

    def of(self, action: Action) -> float:
        f, i, w = self
        return {"F": f, "I": i, "W": w, "B": i + w}[action.kind]


EQUAL = Costs()


@dataclass(frozen=True)
class Schedule:
    """A table of actions, [ticks x ranks], and the rank of each stage.

    ``ranks_of_stages[s]`` is the rank that holds stage ``s``. ``limits[r]`` is the number of activations that rank
    ``r`` may hold: those of a microbatch and stage live from F to the end of its B, or of its W.

    >>> print(one_f_one_b(2, 3))
    one_f_one_b: 2 stages on 2 ranks, 3 microbatches
    tick       0    1    2    3    4    5    6    7
    rank 0  F0.0 F0.1    . B0.0 F0.2 B0.1    . B0.2
    rank 1     . F1.0 B1.0 F1.1 B1.1 F1.2 B1.2    .
    bubble 25.0 %, peak of live activations 2 1
    """

    name: str
    microbatches: int
    ranks_of_stages: tuple[int, ...]
    ticks: tuple[tuple[Action | None, ...], ...]
    limits: tuple[int, ...]
    _moves: list[tuple[tuple[tuple[int, int, Action], ...], ...]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def stages(self) -> int:
        return len(self.ranks_of_stages)

    @property
    def ranks(self) -> int:
        return max(self.ranks_of_stages) + 1

    @property
    def order(self) -> tuple[int, ...]:
        """The stages in the order of ranks: row ``i`` of stacked parameters belongs to stage ``order[i]``."""
        return tuple(sorted(range(self.stages), key=lambda s: (self.ranks_of_stages[s], s)))

    @property
    def trains(self) -> bool:
        """Whether the table has backwards."""
        return any(action is not None and action.kind != "F" for row in self.ticks for action in row)

    def forwards(self) -> Schedule:
        """The forwards alone, in the order of this table, for a loss without gradients. No activation lives on.

        >>> print(one_f_one_b(2, 3).forwards())
        one_f_one_b, forward: 2 stages on 2 ranks, 3 microbatches
        tick       0    1    2    3
        rank 0  F0.0 F0.1 F0.2    .
        rank 1     . F1.0 F1.1 F1.2
        bubble 25.0 %, peak of live activations 0 0
        """
        columns = zip(*self.ticks, strict=True)
        lists = [[action for action in column if action is not None and action.kind == "F"] for column in columns]
        return _in_order(f"{self.name}, forward", self.ranks_of_stages, self.microbatches, lists)

    def moves(self) -> list[tuple[tuple[tuple[int, int, Action], ...], ...]]:
        """For each tick the permutes after it: edges (source, destination, the action whose result travels).

        A rank sends at most once a tick. A second permute is needed only if a rank receives from both sides.
        """
        if not self._moves:
            self._moves.extend(self._rounds(row) for row in self.ticks)
        return self._moves

    def _rounds(self, row: Iterable[Action | None]) -> tuple[tuple[tuple[int, int, Action], ...], ...]:
        rounds: list[list[tuple[int, int, Action]]] = []
        for source, action in enumerate(row):
            to = None if action is None else self.successor(action)
            if action is None or to is None or (rank := self.ranks_of_stages[to.stage]) == source:
                continue
            free = next((r for r in rounds if all(rank != other for _, other, _ in r)), None)
            if free is None:
                rounds.append(free := [])
            free.append((source, rank, action))
        return tuple(map(tuple, rounds))

    def successor(self, action: Action) -> Action | None:
        """The forward or backward of the neighbouring stage that takes the result of an action, if there is one."""
        kind, stage, microbatch = action
        if kind == "W":
            return None
        stage += 1 if kind == "F" else -1
        return Action("F" if kind == "F" else "B", stage, microbatch) if 0 <= stage < self.stages else None

    def validate(self) -> Schedule:
        """Return the schedule itself.

        Raises:
            ArgumentError: an action is missing, occurs twice, stands on another rank than its stage, comes before what
                it needs, or a rank holds more activations than its limit. The error names tick, rank and microbatch.
        """
        self._check_kinds()
        done: dict[Action, int] = {}
        live, trains = [0] * self.ranks, self.trains
        for tick, row in enumerate(self.ticks):
            if len(row) != self.ranks:
                raise ArgumentError(f"{self.name}: tick {tick} has {len(row)} cells, but there are {self.ranks} ranks")
            for rank, action in enumerate(row):
                if action is not None:
                    self._check(action, tick, rank, done)
                    live[rank] += _change_of_live(action) if trains else 0
                    if live[rank] > self.limits[rank]:
                        raise ArgumentError(
                            f"{self._at(action, tick, rank)}: the rank then holds {live[rank]} activations, but its "
                            f"limit is {self.limits[rank]}"
                        )
            done.update((action, tick) for action in row if action is not None)
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                kinds = {kind for kind in "FBIW" if Action(kind, stage, microbatch) in done}
                if kinds not in (({"F", "B"}, {"F", "I", "W"}) if trains else ({"F"},)):
                    raise ArgumentError(
                        f"{self.name}: rank {self.ranks_of_stages[stage]} runs "
                        f"{''.join(sorted(kinds)) or 'nothing'} for stage {stage} of microbatch "
                        f"{microbatch}; it needs F and B, or F, I and W"
                    )
        return self

    def _check_kinds(self) -> None:
        """Raise unless the table is made of what its fields say."""
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise ArgumentError(f"{self.name} has {described(self.microbatches)} for microbatches; give it 1 or more")
        ranks = self.ranks_of_stages
        if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ArgumentError(f"{self.name} has ranks_of_stages={ranks!r}; give it the rank of each stage, from 0 on")
        if len(self.limits) != self.ranks:
            raise ArgumentError(
                f"{self.name} has {len(self.limits)} limits for {self.ranks} ranks; give it one of each"
            )
        for tick, row in enumerate(self.ticks):
            for rank, cell in enumerate(row):
                if cell is not None and not (isinstance(cell, Action) and [*map(type, cell)] == [str, int, int]):
                    raise ArgumentError(
                        f"{self.name}: tick {tick} of rank {rank} is {described(cell)}; give it an action, such as "
                        'Action("F", 0, 0), or None'
                    )

    def _at(self, action: Action, tick: int, rank: int) -> str:
        return f"{self.name}: {action} (microbatch {action.microbatch}) at tick {tick} of rank {rank}"

    def _check(self, action: Action, tick: int, rank: int, done: dict[Action, int]) -> None:
        kind, stage, microbatch = action
        if kind not in tuple("FBIW") or not (0 <= stage < self.stages and 0 <= microbatch < self.microbatches):
            raise ArgumentError(f"{self._at(action, tick, rank)}: there is no such action")
        if self.ranks_of_stages[stage] != rank:
            raise ArgumentError(
                f"{self._at(action, tick, rank)}: stage {stage} lies on rank {self.ranks_of_stages[stage]}"
            )
        if action in done:
            raise ArgumentError(f"{self._at(action, tick, rank)}: it ran at tick {done[action]} already")
        for needed in self.needs(action):
            if not any(option in done for option in needed):
                raise ArgumentError(f"{self._at(action, tick, rank)}: {needed[0]} must run at an earlier tick")

    def needs(self, action: Action) -> list[tuple[Action, ...]]:
        """What must run before an action. Of each tuple, one."""
        kind, stage, m = action
        if kind == "W":
            return [(Action("I", stage, m),)]
        if kind == "F":
            return [(Action("F", stage - 1, m),)] if stage else []
        after = [(Action("B", stage + 1, m), Action("I", stage + 1, m))] if stage + 1 < self.stages else []
        return [(Action("F", stage, m),), *after]

    @checked
    def makespan(self, costs: Costs = EQUAL) -> float:
        """The time from the first action to the end of the last. Each rank runs its actions in order, and at once."""
        ends: dict[Action, float] = {}
        free = [0.0] * self.ranks
        for row in self.ticks:
            for rank, action in enumerate(row):
                if action is not None:
                    ready = (ends[x] for options in self.needs(action) for x in options if x in ends)
                    free[rank] = ends[action] = max(free[rank], *ready, 0.0) + costs.of(action)
        return max(free)

    @checked
    def bubble(self, costs: Costs = EQUAL) -> float:
        """The fraction of the ranks' time in which they wait."""
        busy = sum(costs.of(action) for row in self.ticks for action in row if action is not None)
        time = self.makespan(costs) * self.ranks
        if not time > 0:
            raise ArgumentError(f"{self.name}: with {costs} no action takes time; give actions durations above 0")
        return 1 - busy / time

    def peaks(self) -> tuple[int, ...]:
        """The largest number of live activations of each rank."""
        live, peaks = [0] * self.ranks, [0] * self.ranks
        if not self.trains:
            return tuple(peaks)
        for row in self.ticks:
            for rank, action in enumerate(row):
                if action is not None:
                    live[rank] += _change_of_live(action)
                    peaks[rank] = max(peaks[rank], live[rank])
        return tuple(peaks)

    def __str__(self) -> str:
        cells = [[str(action or ".") for action in row] for row in self.ticks]
        width = max(len(cell) for row in cells for cell in row)
        head = f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} microbatches"
        lines = ["tick    " + " ".join(str(i).rjust(width) for i in range(len(cells)))]
        for rank in range(self.ranks):
            lines.append(f"rank {rank}  ".ljust(8) + " ".join(row[rank].rjust(width) for row in cells))
        peaks = " ".join(map(str, self.peaks()))
        return "\n".join(
            [head, *lines, f"bubble {self.bubble():.1%}".replace("%", " %") + f", peak of live activations {peaks}"]
        )


def _change_of_live(action: Action) -> int:
    """By how many activations an action changes those that live."""
    return (action.kind == "F") - (action.kind in "BW")


@checked
def gpipe(ranks: Size, microbatches: Size) -> Schedule:
    """All forwards, then all backwards. The bubble is (p - 1) / (m + p - 1), and m activations live."""
    return _alternating("gpipe", ranks, microbatches, 1, lambda rank: microbatches)


@checked
def one_f_one_b(ranks: Size, microbatches: Size) -> Schedule:
    """Backward follows forward at once. The bubble is that of `gpipe`, and at most p - r activations live on rank r."""
    return _alternating("one_f_one_b", ranks, microbatches, 1, lambda rank: ranks - rank - 1)


@checked
def interleaved(ranks: Size, microbatches: Size, chunks: Size = 2) -> Schedule:
    """`one_f_one_b` with several stages a rank: stage s lies on rank s % p.

    The bubble is (p - 1) / (v m + p - 1) with v chunks, if p divides m (Megatron-LM, arXiv 2104.04473).
    """
    warmup = (chunks - 1) * ranks
    return _alternating("interleaved", ranks, microbatches, chunks, lambda rank: 2 * (ranks - rank - 1) + warmup)


@checked
def zero_bubble(ranks: Size, microbatches: Size) -> Schedule:
    """Backward in two parts, of which W fills the bubble (ZB-H1, arXiv 2401.10241). At most p activations live.

    With F = I = W the ranks take 3 m + p - 1 ticks, if m is at least p.
    """
    return _by_turns("zero_bubble", ranks, microbatches, microbatches, _zero_turns, 1)


@checked
def zbv(ranks: Size, microbatches: Size) -> Schedule:
    """`zero_bubble` on a V: rank r holds the stages r and 2 p - 1 - r (arXiv 2405.15362). At most 2 p activations live.

    With F = I = W the ranks take 6 m + p - 1 ticks, if m is at least 2 p - 1.
    """
    return _by_turns("zbv", ranks, microbatches, max(microbatches, 2 * ranks - 1), _zbv_turns)


@checked
def dual_pipe_v(ranks: Size, microbatches: Size) -> Schedule:
    """DualPipe on a V, as in DeepSeek-V3 (arXiv 2412.19437): F of one microbatch stands beside B of another.

    The two are two ticks, in which a kernel may overlap them. At most 2 p + 1 activations live.
    """
    return _by_turns("dual_pipe_v", ranks, microbatches, max(microbatches, 2 * ranks), _dual_turns)


def _zero_turns(p: int, r: int, m: int) -> str:
    """The kinds and chunks of a rank, in order. The gradients of parameters follow r microbatches behind."""
    steady = ["I0 " + "W0 " * (i >= r) + "F0 " * (i + p - r < m) for i in range(m)]
    return "F0 " * min(p - r, m) + "".join(steady) + "W0 " * min(r, m)


def _zbv_turns(p: int, r: int, m: int) -> str:
    """In the steady state each chunk runs F, I, W in turn."""
    start = "F0 " * (2 * (p - r) - 1) + "F1 F0 " * r + "F1 I1 W1 " * (p - r)
    both = m - (2 * (p - r) - 1 + r)  # the forwards of chunk 0 that are left
    late = m - p - both
    steady = "F0 I0 W0 F1 I1 W1 " * both + "I0 W0 F1 I1 W1 " * late
    return start + steady + "I0 I1 " * r + "I0 W0 " * (p - r) + "W1 " * r + "W0 " * r


def _dual_turns(p: int, r: int, m: int) -> str:
    start = "F0 " * (2 * (p - r - 1)) + "F0 F1 " * (r + 1) + "I1 W1 F1 " * (p - r - 1)
    steady = "F0 B1 F1 B0 " * (m - 2 * p + r + 1) + "B1 F1 B0 " * (p - r - 1)
    last = "10" * (r + 1) + "0" * (p - r - 1)  # chunks of the backwards that are left
    split = last[r + 1 :]  # those that are in two parts
    end = [f"B{c}" for c in last[: r + 1]] + [f"I{c}" for c in split[: r + 1]]
    for c in split[: p - r - 1]:
        end += [f"W{c}", "I0"]
    return start + steady + " ".join([*end, *(f"W{c}" for c in split[p - r - 1 :])])


def _by_turns(
    name: str, ranks: int, microbatches: int, needed: int, turns: Callable[[int, int, int], str], chunks: int = 2
) -> Schedule:
    """The order of ``turns`` for ``needed`` microbatches, without those that do not exist. Two chunks make a V."""
    lists = []
    for rank in range(ranks):
        counts: dict[str, int] = {}
        steps = []
        for turn in turns(ranks, rank, needed).split():
            kind, chunk = turn[0], turn[1]
            for counted in "IW" if kind == "B" else kind:
                m = counts[counted + chunk] = counts.get(counted + chunk, -1) + 1
            stage = (rank, 2 * ranks - 1 - rank)[int(chunk)]
            if m < microbatches:
                steps.append(Action(kind, stage, m))
        lists.append(steps)
    return _in_order(name, [*range(ranks), *reversed(range(ranks))][: chunks * ranks], microbatches, lists)


def _alternating(name: str, ranks: int, microbatches: int, chunks: int, warmup: Callable[[int], int]) -> Schedule:
    """Each rank runs some forwards, then a forward and a backward in turn. Stage s lies on rank ``s % ranks``."""
    groups = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    lists = []
    for rank in range(ranks):
        mine = range(rank, ranks * chunks, ranks)
        forward = [Action("F", stage, m) for group in groups for stage in mine for m in group]
        backward = [Action("B", stage, m) for group in groups for stage in reversed(mine) for m in group]
        first, late = forward[: warmup(rank)], forward[warmup(rank) :]
        steady = [action for pair in zip(late, backward, strict=False) for action in pair]
        lists.append([*first, *steady, *backward[len(late) :]])
    return _in_order(name, [stage % ranks for stage in range(ranks * chunks)], microbatches, lists)


def _in_order(name: str, placement: Iterable[int], microbatches: int, lists: Sequence[list[Action]]) -> Schedule:
    """Each rank runs its list in order, each action at the first tick at which it is ready."""
    ranks_of_stages = tuple(placement)
    empty = Schedule(name, microbatches, ranks_of_stages, (), ())
    left = [list(reversed(actions)) for actions in lists]
    done: set[Action] = set()
    ticks: list[tuple[Action | None, ...]] = []
    while any(left):
        row = [
            actions.pop()
            if actions and all(any(option in done for option in options) for options in empty.needs(actions[-1]))
            else None
            for actions in left
        ]
        done.update(action for action in row if action is not None)
        if not any(row):
            waiting = [str(actions[-1]) for actions in left if actions]
            raise ArgumentError(f"{name}: at tick {len(ticks)} all ranks wait, to run {', '.join(waiting)}")
        ticks.append(tuple(row))
    table = Schedule(name, microbatches, ranks_of_stages, tuple(ticks), ())
    return replace(table, limits=table.peaks()).validate()
