"""Samples of cases."""

import itertools

import pytest
from full import FULL, fields, sample, spread

CASES = [*itertools.product(("a", "b", "c"), (1, 2, 3), (True, False))]


@pytest.mark.parametrize("count", [3, 4, 6, 9])
def test_a_sample_has_each_value_about_equally_often(count: int) -> None:
    chosen = [CASES[i] for i in spread([str(case) for case in CASES], [[*fields(case)] for case in CASES], count)]
    assert len({*chosen}) == count
    for place, values in enumerate(zip(*CASES, strict=True)):
        often = [sum(case[place] == value for case in chosen) for value in {*values}]
        assert max(often) - min(often) <= 1

    assert len(sample(CASES, count)) == (len(CASES) if FULL else count)


def test_names_choose_other_cases() -> None:
    values = [[*fields(case)] for case in CASES]
    samples = [spread([f"{name}{case}" for case in CASES], values, 4) for name in ("one", "one", "two", "three")]
    assert samples[0] == samples[1]
    assert len({*map(frozenset, samples)}) > 1
    assert spread([str(case) for case in CASES], values, 99) == {*range(len(CASES))}
