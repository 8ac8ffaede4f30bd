"""Each rank keeps a hash of its replays in a group. It depends on them alone, and differs once ranks have parted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fspmd.inspection import replays
from fspmd.inspection.replays import Trail

BLOCK = 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_BLOCK", BLOCK)


def _trail(numbers: Sequence[int], seed: int) -> Trail:
    """The trail of replays of records with these numbers, which are sorted some at a time."""
    draw, trail, at = random.Random(seed), Trail("group", (0, 1)), 0
    while at < len(numbers):
        count = draw.randint(1, 4 * BLOCK)
        trail.extend([_step(number) for number in numbers[at : at + count]])
        at += count
    return trail


def _step(number: int) -> Any:
    return SimpleNamespace(name=f"jit(f{number})", groups={"group": (number, (0, 1), "psum")})


@pytest.mark.parametrize("seed", range(20))
def test_a_hash_depends_on_the_replays_alone(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [draw.randrange(3) for _ in range(draw.randrange(1, 12 * BLOCK))]
    one, other = _trail(numbers, seed), _trail(numbers, seed + 1)
    whole = {count: _trail(numbers[:count], 0).hash_after(count) for count in range(1, len(numbers) + 1)}
    assert len({*whole.values()}) == len(numbers)
    for trail in (one, other):
        assert trail.count == len(numbers)
        assert len(trail.steps) < 3 * BLOCK
        assert {
            count: trail.hash_after(count) for count in range(trail.base + 1, trail.count + 1)
        }.items() <= whole.items()
        ends = range(BLOCK, len(numbers) + 1, BLOCK)
        assert trail.due == [(end, whole[end]) for end in ends]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_differ_from_the_first_other_replay_on(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [draw.randrange(3) for _ in range(10 * BLOCK)]
    place = draw.randrange(8 * BLOCK + 1, 10 * BLOCK)  # within the last two blocks
    others = numbers[: place - 1] + [3] + numbers[place:]
    rings = []
    for each in (numbers, others):
        texts, ring = json.loads(_trail(each, seed).ring_text(3 * BLOCK))
        rings.append({count: (number, texts[text]) for count, number, text in ring})
    first = min(count for count in rings[0] if rings[0][count][0] != rings[1][count][0])
    assert first == place
    assert rings[1][first][1] == "jit(f3), which begins with psum"
    assert all(rings[0][count][0] != rings[1][count][0] for count in range(place, 10 * BLOCK + 1))
