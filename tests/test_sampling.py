"""The next tokens: equal on all meshes, with the probabilities of the definition, without a gather of logits."""

from functools import partial
from typing import Any

import pytest
import torch
from sampling_programs import SETTINGS, all_drawn, best, drawn, probabilities
from torch import Tensor

from fspmd import P, communication_log, jit, make_mesh, shard_map
from fspmd.errors import ArgumentError, ShapeError
from fspmd.nn import greedy, sample
from fspmd.random import key, split


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_the_mesh(dtype: torch.dtype) -> None:
    for sizes in ((1, 2), (1, 3), (2, 2), (3, 4)):
        assert all_drawn(sizes, "simulation", dtype) == all_drawn((1, 1), "simulation", dtype)


def test_a_limit_that_a_sum_hits_exactly_does_not_depend_on_the_mesh() -> None:
    """Sums of floats in another order are below such a limit on one mesh, and above it on another."""
    torch.manual_seed(0)
    for seed in range(8):
        weights = torch.randint(1, 12, (256, 48)).float()
        sums = weights.sort(1, descending=True).values.cumsum(1)
        share = sums.gather(1, torch.randint(3, 45, (256, 1)))[:, 0] / sums[:, -1]
        keys, at = split(key(seed), 256), torch.zeros(256, dtype=torch.int64)
        expected = sample(weights.log(), keys, at, top_p=share)
        for n in (1, 2, 3, 8):
            call = shard_map(
                lambda x, keys, at, share: sample(x, keys, at, "tp", vocabulary=48, top_p=share),
                mesh=make_mesh((n,), ("tp",), transport="simulation"),
                in_specs=(P(None, "tp"), P(), P(), P()),
                out_specs=P(),
            )
            assert torch.equal(call(weights.log(), keys, at, share).local, expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_have_the_probabilities_of_the_definition(settings: dict[str, Any]) -> None:
    """The statistic of Pearson's test, and no token that has no probability."""
    torch.manual_seed(2)
    count = 6 if any(isinstance(x, Tensor) for x in settings.values()) else 1
    rows, n = torch.randn(6, 21)[:count] * 2, 6000 // count
    many = {name: x.repeat_interleave(n) if isinstance(x, Tensor) else x for name, x in settings.items()}
    found = drawn((1, 2), rows.repeat_interleave(n, 0), **many).view(count, n)
    for slot in range(count):
        here = {name: x[slot].item() if isinstance(x, Tensor) else x for name, x in settings.items()}
        p = probabilities(rows[slot], here.get("temperature", 1.0) or 1e-9, here.get("top_k"), here.get("top_p"))
        times, seen = found[slot].bincount(minlength=21).double(), p > 0
        assert times[~seen].sum() == 0
        freedom = int(seen.sum()) - 1
        statistic = float(((times - n * p)[seen] ** 2 / (n * p[seen])).sum())
        assert statistic <= freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_limits_keep_what_sorting_keeps(dtype: torch.dtype) -> None:
    """Also with equal logits, infinite ones, zeros of both signs and numbers that differ in the last bit alone."""
    row = torch.tensor([0.0, -0.0, 1.0, 1.0, -torch.inf, 3.0, 2.5, -4.0, 2.5, 1.0], dtype=dtype)
    row[5] = torch.nextafter(row[6], row[5]) if dtype is not torch.float16 else row[5]
    for top_k, top_p in [(k, None) for k in range(1, 12)] + [(None, p / 16) for p in range(1, 17)] + [(4, 0.7)]:
        options = {name: x for name, x in (("top_k", top_k), ("top_p", top_p)) if x is not None}
        found = drawn((1, 2), row.expand(400, -1), temperature=8.0, **options).unique().tolist()
        assert found == probabilities(row, 8.0, top_k, top_p).nonzero().flatten().tolist(), options


def test_the_first_of_the_best_is_taken() -> None:
    rows = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-torch.inf, -3.0, -2.0, -2.0, -9.0]])
    for n in (1, 2, 3, 4, 7):
        assert best((1, n), rows).tolist() == [1, 0, 2]
        assert drawn((1, n), rows, temperature=0).tolist() == [1, 0, 2]


def test_draws_depend_on_the_key_and_the_position() -> None:
    logits, keys = torch.zeros(3, 1000), split(key(0), 3)
    first, second = (sample(logits, keys, torch.full((3,), i)) for i in (4, 5))
    assert not (first == second).any()
    assert len(set(first.tolist())) == 3
    order = torch.tensor([2, 0, 1])
    assert torch.equal(sample(logits, keys[order], torch.full((3,), 4)), first[order])


def test_what_moves_is_what_a_closed_form_says() -> None:
    n, slots = 4, 6
    mesh = make_mesh((n,), ("tp",), transport="simulation")
    logits, keys, at = torch.randn(slots, 20), split(key(0), slots), torch.zeros(slots, dtype=torch.int64)
    reduce = 2 * (n - 1) / n
    gather = (n - 1) * slots * 16
    digits = 4 * reduce * slots * 256 * 4  # of counts in int32; probabilities are int64
    for options, count, moved in (
        ({}, 1, gather),
        ({"top_k": 3}, 5, gather + digits),
        ({"top_p": 0.5}, 7, gather + 2 * digits + reduce * slots * (4 + 8)),
        ({"top_k": 3, "top_p": 0.5}, 11, gather + 3 * digits + reduce * slots * (4 + 8)),
    ):
        call = shard_map(
            lambda x, keys, at, options=options: sample(x, keys, at, "tp", **options),
            mesh=mesh,
            in_specs=(P(None, "tp"), P(), P()),
            out_specs=P(),
        )
        for run in (call, jit(call)):
            run(logits, keys, at)
            with communication_log() as log:
                run(logits, keys, at)
            assert (len(list(log)), sum(event.price.moved for event in log)) == (count, moved)


def test_a_record_draws_the_same_tokens() -> None:
    logits = torch.randn(6, 21)
    for options in SETTINGS[4:6]:
        assert torch.equal(drawn((1, 2), logits, jitted=True, **options), drawn((1, 2), logits, **options))


def test_what_does_not_fit_is_refused() -> None:
    logits, keys, at = torch.randn(3, 8), split(key(0), 3), torch.zeros(3, dtype=torch.int64)
    for error, match, call in (
        (ShapeError, r"floats \[slots, tokens\]", lambda: greedy(logits[0])),
        (ShapeError, r"floats \[slots, tokens\]", lambda: sample(logits.long(), keys, at)),
        (ShapeError, "for 3 sequences", lambda: sample(logits, keys[:2], at)),
        (ShapeError, "for 3 sequences", lambda: sample(logits, keys, at[0])),
        (ShapeError, "for 3 sequences", lambda: sample(logits, keys, at, temperature=torch.ones(2))),
        (ArgumentError, "for keys", lambda: sample(logits, keys.double(), at)),
        (ArgumentError, "for positions", lambda: sample(logits, keys, 3)),
        (ArgumentError, "temperature=-1", lambda: sample(logits, keys, at, temperature=-1)),
        (ArgumentError, "top_k=0", lambda: sample(logits, keys, at, top_k=0)),
        (ArgumentError, "the float 1.5 for top_k", lambda: sample(logits, keys, at, top_k=1.5)),
        (ArgumentError, "top_p=0", lambda: sample(logits, keys, at, top_p=0)),
        (ArgumentError, "top_p=1.1", lambda: sample(logits, keys, at, top_p=1.1)),
    ):
        with pytest.raises(error, match=match):
            call()
    mesh = make_mesh((3,), ("tp",), transport="simulation")
    for vocabulary, match in ((None, "pass the size"), (9, "parts of 3, 3, 3")):
        body = partial(greedy, axis="tp", vocabulary=vocabulary)
        with pytest.raises(ShapeError, match=match):
            shard_map(body, mesh=mesh, in_specs=P(None, "tp"), out_specs=P())(logits)
