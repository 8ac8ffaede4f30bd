"""Each rank keeps a hash of its replays in a group. It depends on them alone, and differs once ranks have parted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fspmd.inspection import replays
from fspmd.inspection.histories import History, ring_text
from fspmd.inspection.replays import Replayed

BLOCK = 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replays, "_BLOCK", BLOCK)
    yield
    replays._forget()


def _trail(numbers: Sequence[int], seed: int) -> History:
    """The trail of replays of records with these numbers, which are sorted some at a time."""
    replays._forget()
    draw, at = random.Random(seed), 0
    while at < len(numbers):
        count = draw.randint(1, 4 * BLOCK)
        replays.log.extend([_step(number) for number in numbers[at : at + count]])
        replays._sort()
        at += count
    return replays._trails["group"]


def _step(number: int) -> Replayed:
    entry = (1, number, "psum", None, None, (), 0, 0.0)
    history: Any = SimpleNamespace(key="group", hash=number, ranks=(0, 1), ring=[entry])
    return Replayed(f"jit(f{number})", [history])


@pytest.mark.parametrize("seed", range(20))
def test_a_hash_depends_on_the_replays_alone(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [draw.randrange(3) for _ in range(draw.randrange(1, 12 * BLOCK))]
    one, other = _trail(numbers, seed), _trail(numbers, seed + 1)
    whole = {count: _trail(numbers[:count], 0).hash for count in range(1, len(numbers) + 1)}
    assert len({*whole.values()}) == len(numbers)
    for trail in (one, other):
        assert trail.count == len(numbers)
        assert len(trail.ring) == min(len(numbers), 3 * BLOCK)
        assert {count: number for count, number, *_ in trail.ring}.items() <= whole.items()
        ends = range(BLOCK, len(numbers) + 1, BLOCK)
        assert trail.due == {end: (whole[end], None) for end in ends}


@pytest.mark.parametrize("seed", range(20))
def test_ranks_differ_from_the_first_other_replay_on(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [draw.randrange(3) for _ in range(10 * BLOCK)]
    place = draw.randrange(8 * BLOCK + 1, 10 * BLOCK)  # within the last two blocks
    others = numbers[: place - 1] + [3] + numbers[place:]
    rings = []
    for each in (numbers, others):
        texts, ring = json.loads(ring_text(_trail(each, seed)))
        rings.append({count: (number, texts[text]) for count, number, text in ring})
    first = min(count for count in rings[0] if rings[0][count][0] != rings[1][count][0])
    assert first == place
    assert rings[1][first][1] == "jit(f3), which begins with psum"
    assert all(rings[0][count][0] != rings[1][count][0] for count in range(place, 10 * BLOCK + 1))


class _Store:
    """A store in which the first rank has told all, and which runs ``meanwhile`` when it is asked."""

    def __init__(self, told: dict[str, str], meanwhile: Callable[[], None]) -> None:
        self.told, self.meanwhile = told, meanwhile

    def check(self, keys: Sequence[str]) -> bool:
        self.meanwhile()
        return all(key in self.told for key in keys)

    def get(self, key: str) -> str:
        return self.told[key]


def test_two_threads_drop_what_is_due_once() -> None:
    """While a thread compares, the other one may compare or drop the same, and more may become due."""
    trail = _trail([*range(4 * BLOCK)], 0)
    told = {f"hash/group/{count}": json.dumps([number, 0]) for count, (number, _) in trail.due.items()}

    def meanwhile() -> None:
        trail.due.clear()
        trail.due[5 * BLOCK] = 7, None

    assert not list(trail.compare_due(_Store(told, meanwhile), 1, 16))
    assert trail.due == {5 * BLOCK: (7, None)}
