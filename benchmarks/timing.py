"""Times measured side by side, and the tables they are shown in.

The candidates of one comparison take turns, A B A B ..., in many short samples, so that a drift of the machine meets
all of them alike; what is shown are medians over the samples. Garbage collection is off while the clock runs.

The clock is the processor time of the calling thread unless said otherwise: on a quiet machine it is the time on the
wall, for calls that wait for nobody, and on a busy one it leaves out what others take.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

#: runs something so many times and tells how many seconds that took
Sampler = Callable[[int], float]

REPEATS = 25
SECONDS = 0.005  # of one sample


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: the median over the samples, and the quartiles."""

    median: float
    low: float
    high: float
    repeats: int
    number: int  # calls in one sample

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a part of the median."""
        return (self.high - self.low) / self.median


def loop(statement: Callable[[], object], number: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds that so many calls take."""
    collects = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for _ in itertools.repeat(None, number):
            statement()
        return clock() - start
    finally:
        if collects:
            gc.enable()


def calls(statement: Callable[[], object]) -> Sampler:
    """The sampler of a plain call."""
    return lambda number: loop(statement, number)


def summary(seconds: Sequence[float], number: int = 1) -> Timing:
    """The `Timing` of some samples of ``number`` calls each."""
    low, median, high = statistics.quantiles([s / number for s in seconds], n=4, method="inclusive")
    return Timing(median, low, high, len(seconds), number)


def side_by_side(
    samplers: Mapping[str, Sampler], *, repeats: int = REPEATS, seconds: float = SECONDS, number: int | None = None
) -> dict[str, Timing]:
    """Time the candidates in turns.

    Args:
        samplers: What to measure, by name.
        repeats: Samples of each.
        seconds: About how long one sample is to take; a candidate that is slower is run once.
        number: Calls in a sample, where the processes of a group have to agree on it; by default as ``seconds`` says.
    """
    numbers = {name: number or _calibrate(sampler, seconds) for name, sampler in samplers.items()}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    gc.collect()
    for _ in range(repeats):
        for name, sampler in samplers.items():
            samples[name].append(sampler(numbers[name]))
    return {name: summary(found, numbers[name]) for name, found in samples.items()}


def _calibrate(sampler: Sampler, seconds: float) -> int:
    sampler(2)  # caches fill
    number = 1
    while True:
        taken = sampler(number)
        if taken >= seconds / 4:
            return max(1, round(number * seconds / taken))
        number *= 4


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goal:
    """An upper bound: of our time, of our time above the other, or of the ratio of the two."""

    bound: float
    of: Literal["ours", "difference", "ratio"] = "ours"

    def __str__(self) -> str:
        if self.of == "ratio":
            return f"≤ {self.bound:g}x"
        return f"≤ {show_seconds(self.bound)}{' over it' if self.of == 'difference' else ''}"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    what: str
    ours: Timing
    peer: str = ""
    theirs: Timing | None = None
    goal: Goal | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        value = self.ours.median
        if self.theirs is not None and self.goal.of == "difference":
            value -= self.theirs.median
        elif self.theirs is not None and self.goal.of == "ratio":
            value /= self.theirs.median
        return value <= self.goal.bound

    HEAD: ClassVar = ("what", "ours", "beside", "theirs", "ours - theirs", "ours / theirs", "goal", "spread")

    def cells(self) -> list[str]:
        """The row as text."""
        ours, theirs = self.ours, self.theirs
        spread = max(ours.spread, theirs.spread if theirs else 0.0)
        return [
            self.what,
            show_seconds(ours.median),
            self.peer,
            show_seconds(theirs.median) if theirs else "",
            show_seconds(ours.median - theirs.median) if theirs else "",
            show_ratio(ours.median / theirs.median) if theirs else "",
            f"{self.goal}: {'yes' if self.met else 'no'}" if self.goal else "",
            f"{spread:.0%}",
        ]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What two libraries cost above the same on plain tensors."""

    what: str
    plain: Timing
    ours: Timing
    theirs: Timing
    bound: float | None = None  # of our overhead, as a part of theirs

    HEAD: ClassVar = ("what", "plain", "ours", "DTensor", "our overhead", "its overhead", "ratio", "goal", "spread")

    @property
    def ratio(self) -> float:
        """Our overhead as a part of theirs."""
        return (self.ours.median - self.plain.median) / (self.theirs.median - self.plain.median)

    @property
    def met(self) -> bool | None:
        """Whether our overhead keeps to its bound; None without one."""
        return None if self.bound is None else self.ratio <= self.bound

    def cells(self) -> list[str]:
        """The row as text."""
        times = (self.plain, self.ours, self.theirs)
        above = (self.ours.median - self.plain.median, self.theirs.median - self.plain.median)
        return [
            self.what,
            *(show_seconds(one.median) for one in times),
            *map(show_seconds, above),
            f"{self.ratio:.3f}",
            f"≤ {self.bound:.2f}: {'yes' if self.met else 'no'}" if self.bound is not None else "",
            f"{max(one.spread for one in times):.0%}",
        ]


@dataclass(frozen=True, slots=True)
class Table:
    """One group of comparisons; its rows are all of one kind."""

    title: str
    rows: Sequence[Row | Overhead]
    notes: str = ""
    summary: str = ""

    def markdown(self) -> str:
        """The table in Markdown."""
        head = list(self.rows[0].HEAD)
        grid = [head, *(row.cells() for row in self.rows)]
        widths = [max(len(row[i]) for row in grid) for i in range(len(head))]
        lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in grid]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        return "\n".join([f"### {self.title}", "", *_paragraph(self.notes), *lines, "", *_paragraph(self.summary)])


def _paragraph(text: str) -> list[str]:
    return [text, ""] if text else []


def show_ratio(ratio: float) -> str:
    """Two figures: ``0.12x``, ``3.4x``, ``120x``."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def show_seconds(seconds: float) -> str:
    """Three figures with a unit: ``1.23 µs``."""
    size = abs(seconds)
    unit, scale = ("s", 1.0) if size >= 1 else ("ms", 1e-3) if size >= 1e-3 else ("µs", 1e-6)
    value = seconds / scale
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
