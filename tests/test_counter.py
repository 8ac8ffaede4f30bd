"""The counter-based generator: published vectors, blocks that agree with the whole, and what the numbers are like."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fspmd.random import distributions
from fspmd.random.counter import Block, Distribution, derived, draw, key_of, words

CPU = torch.device("cpu")
ONES = (1 << 64) - 1


def drawn(law: Distribution, *shape: int, seed: int = 1) -> Tensor:
    return draw(Block(shape, (0,) * len(shape), shape), law, seed, CPU)


def lea(z: int) -> int:
    """The mixing function ``mixLea64`` of Java's package ``java.util.random``."""
    z = (z ^ z >> 32) * 0xDABA0B6EB09322E3 & ONES
    z = (z ^ z >> 32) * 0xDABA0B6EB09322E3 & ONES
    return z ^ z >> 32


def test_words_are_hashes_of_a_sequence() -> None:
    """Of tensors, of whole blocks and of keys, as Python's unbounded integers have them."""
    key = key_of(-5)
    expected = [lea(key.state + (i + 1) * key.gamma & ONES) for i in range(100)]
    assert [x & ONES for x in words(torch.arange(100), key).tolist()] == expected
    bits = drawn(distributions.integers(0, 1 << 64, torch.int64), 100, seed=-5)
    assert [x & ONES for x in bits.tolist()] == expected
    root = (0x9E3779B97F4A7C15 + 3) & ONES
    child = lea(lea(root) + 8 * 0x9E3779B97F4A7C15 & ONES)
    assert derived(torch.tensor(3), 7, 1).item() & ONES == child


def test_keys_have_steps_of_irregular_bits() -> None:
    keys = [key_of(seed, stream) for seed in (0, 1, 2, ONES, 1 << 63) for stream in range(40)]
    assert len({key.state for key in keys}) == len({key.gamma for key in keys}) == len(keys)
    for key in keys:
        assert key.gamma % 2 == 1
        assert (key.gamma ^ key.gamma >> 1).bit_count() >= 24


def test_a_bit_of_the_counter_changes_half_the_bits_of_a_word() -> None:
    """Avalanche, within four standard deviations for each bit of the counter and of the word."""
    n, key = 4096, key_of(7)
    counters = torch.randint(0, 1 << 62, (n,), generator=torch.Generator().manual_seed(0))
    for bit in range(0, 62, 3):
        changed = words(counters, key) ^ words(counters ^ (1 << bit), key)
        share = torch.stack([(changed >> i & 1).double().mean() for i in range(64)])
        assert (share - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(n)


def test_elements_beyond_32_bits_have_numbers_of_their_own() -> None:
    whole = (1 << 36, 3)
    law = distributions.uniform(torch.float64)
    far = draw(Block(whole, (1 << 35, 0), (4, 3)), law, 1, CPU)
    near = draw(Block(whole, (0, 0), (4, 3)), law, 1, CPU)
    assert not torch.equal(far, near)
    word = words(torch.tensor([3 << 35]), key_of(1)).item()
    assert far[0, 0].item() == (word >> 11) * 2.0**-53 + 0.5


LAWS = {
    "uniform f32": distributions.uniform(torch.float32),
    "uniform f64": distributions.uniform(torch.float64),
    "uniform bf16": distributions.uniform(torch.bfloat16),
    "normal f32": distributions.normal(torch.float32),
    "normal f64": distributions.normal(torch.float64),
    "exponential": distributions.exponential(torch.float32),
    "bernoulli": distributions.bernoulli(0.3),
    "integers": distributions.integers(-3, 10, torch.int32),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("shape", [(5, 7, 6), (4, 1, 8), (9,), (), (3, 1)])
def test_a_block_is_a_part_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    whole = drawn(LAWS[name], *shape)
    choose = random.Random(0)
    for _ in range(40):
        offset = tuple(choose.randrange(n) for n in shape)
        size = tuple(choose.randrange(n - o + 1) for n, o in zip(shape, offset, strict=True))
        block = draw(Block(shape, offset, size), LAWS[name], 1, CPU)
        assert torch.equal(block, whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))])
        assert block.is_contiguous()
        assert block.untyped_storage().nbytes() == block.numel() * block.element_size()


def test_pieces_that_fit_the_cache_join_without_a_seam() -> None:
    n = 300_000
    whole = drawn(LAWS["normal f32"], n)
    assert torch.equal(whole[200_001:], draw(Block((n,), (200_001,), (n - 200_001,)), LAWS["normal f32"], 1, CPU))


def test_threads_that_draw_at_once_share_no_memory() -> None:
    """Nor does it matter that the first draw of a thread was made in inference mode."""
    law = LAWS["normal f32"]

    def one(seed: int) -> Tensor:
        with torch.inference_mode(seed % 2 == 0):
            return drawn(law, 70_001 + seed, seed=seed)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(24)))
    for seed, x in enumerate(found):
        assert torch.equal(x, drawn(law, 70_001 + seed, seed=seed))


def test_seeds_and_streams_are_apart() -> None:
    law, block = LAWS["uniform f64"], Block((1000,), (0,), (1000,))
    found = [draw(block, law, seed, CPU, stream) for seed in (0, 1, 1 << 40) for stream in (0, 1)]
    correlations = torch.corrcoef(torch.stack(found)) - torch.eye(6, dtype=torch.float64)
    assert correlations.abs().max() < 0.12


def distance(sample: Tensor, cdf: Tensor) -> float:
    """Kolmogorov and Smirnov's statistic, of ``cdf`` at the sorted sample, times the root of its size."""
    n = len(sample)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((cdf - steps[:-1]).abs().max(), (steps[1:] - cdf).abs().max())) * math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_have_their_distributions(dtype: torch.dtype) -> None:
    """Kolmogorov and Smirnov's test: beyond 1.95 in one of a thousand samples."""
    n = 100_003
    x = drawn(distributions.uniform(dtype), n).double().sort().values
    assert distance(x, x) < 1.95
    assert x[0] >= 0
    assert x[-1] < 1
    x = drawn(distributions.normal(dtype), n).double().sort().values
    assert distance(x, torch.special.ndtr(x)) < 1.95
    x = drawn(distributions.exponential(dtype), n).double().sort().values
    assert distance(x, -torch.expm1(-x)) < 1.95
    assert x[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_have_their_moments_and_are_independent(dtype: torch.dtype) -> None:
    n = 1 << 18
    x = drawn(distributions.normal(dtype), n).double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(variance / n)
    for lag in (1, 2, 3, 4, 8):
        assert abs((x[lag:] * x[:-lag]).mean()) < 4 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_uniforms_stay_below_one(dtype: torch.dtype) -> None:
    x = drawn(distributions.uniform(dtype), 100_000)
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.double().mean() - 0.5) < 0.01


@pytest.mark.parametrize(("low", "count"), [(0, 2), (-5, 10), (3, 127), (0, 1000)])
def test_integers_are_equally_likely(low: int, count: int) -> None:
    """Pearson's chi-square, beyond four standard deviations of its own in one of ten thousand samples."""
    n = 200_000
    x = drawn(distributions.integers(low, low + count, torch.int64), n)
    assert low <= x.min()
    assert x.max() < low + count
    counts = torch.bincount(x - low, minlength=count).double()
    square = float(((counts - n / count) ** 2 / (n / count)).sum())
    assert abs(square - (count - 1)) < 4 * math.sqrt(2 * (count - 1)) + 3


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1 << 31), (0, 3 << 31), (-5, 1 << 40), (-(1 << 63), 1 << 63), (7, (1 << 63) - 1)]
)
def test_wide_integers(low: int, high: int) -> None:
    """Each is the upper half of a product of 128 bits, computed here by Python."""
    x = drawn(distributions.integers(low, high, torch.int64), 64)
    bits = drawn(distributions.integers(0, 1 << 64, torch.int64), 64)
    expected = [low + ((int(b) & (1 << 64) - 1) * (high - low) >> 64) for b in bits]
    assert x.tolist() == expected


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli(p: float) -> None:
    n = 100_000
    x = drawn(distributions.bernoulli(p), n).double()
    assert abs(x.mean() - p) <= 4 * math.sqrt(p * (1 - p) / n)
