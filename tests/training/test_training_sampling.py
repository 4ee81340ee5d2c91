"""Poisson sampling: independent coins at a public rate, from entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlora.errors import PrivacyParameterError
from fedlora.training.sampling import OsCoins, PoissonSampler, SeededCoins, ShuffleSampler


def _z(observed: float, expected: float, variance: float) -> float:
    return (observed - expected) / math.sqrt(variance)


@pytest.mark.parametrize(("records", "rate"), [(1000, 0.07), (37, 0.5), (5000, 0.01)])
def test_h14_batch_sizes_vary_as_poisson_sampling_says(records: int, rate: float) -> None:
    sampler = PoissonSampler(records, rate, SeededCoins(1, "a", 1))
    sizes = np.array([len(sampler.draw()) for _ in range(4000)])
    mean, variance = records * rate, records * rate * (1 - rate)
    assert abs(_z(float(sizes.sum()), 4000 * mean, 4000 * variance)) < 4.5
    # the variance of independent coins, not 0 as with fixed batches
    assert sizes.var() == pytest.approx(variance, rel=0.12)


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_the_rate_test_rejects_five_percent_off(wrong: float) -> None:
    rate, records, draws = 0.07, 1000, 4000
    sampler = PoissonSampler(records, rate * wrong, SeededCoins(2, "a", 1))
    total = sum(len(sampler.draw()) for _ in range(draws))
    assert abs(_z(total, draws * records * rate, draws * records * rate * (1 - rate))) > 4.5


def test_records_are_included_independently() -> None:
    sampler = PoissonSampler(2, 0.3, SeededCoins(3, "a", 1))
    both = first = second = 0
    draws = 40_000
    for _ in range(draws):
        chosen = set(sampler.draw().tolist())
        first, second = first + (0 in chosen), second + (1 in chosen)
        both += chosen == {0, 1}
    assert abs(_z(both, draws * 0.09, draws * 0.09 * 0.91)) < 4.5
    assert abs(_z(first, draws * 0.3, draws * 0.21)) < 4.5
    assert abs(_z(second, draws * 0.3, draws * 0.21)) < 4.5


@pytest.mark.parametrize("records", [0, 1, 30])
def test_h16_empty_draws_are_ordinary(records: int) -> None:
    sampler = PoissonSampler(records, 1 / 30, OsCoins())
    sizes = [len(sampler.draw()) for _ in range(300)]
    assert min(sizes) == 0
    assert all(isinstance(size, int) for size in sizes)


def test_h23_coins_do_not_repeat_and_do_not_follow_a_seed() -> None:
    np.random.seed(42)  # noqa: NPY002  (an experiment's seed must have no influence)
    one = OsCoins().words(64)
    np.random.seed(42)  # noqa: NPY002
    two = OsCoins().words(64)
    assert not np.array_equal(one, two)
    assert OsCoins.private
    assert not SeededCoins.private


@pytest.mark.parametrize(
    ("left", "right"), [((1, "a", 1), (1, "b", 1)), ((1, "a", 1), (1, "a", 2)), ((1, "a", 1), (2, "a", 1))]
)
def test_seeded_streams_differ_by_seed_client_and_round(
    left: tuple[int, str, int], right: tuple[int, str, int]
) -> None:
    assert np.array_equal(SeededCoins(*left).words(8), SeededCoins(*left).words(8))
    assert not np.array_equal(SeededCoins(*left).words(8), SeededCoins(*right).words(8))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_rate_outside_zero_to_one_is_refused(rate: float) -> None:
    with pytest.raises(PrivacyParameterError, match="sample_rate"):
        PoissonSampler(10, rate, OsCoins())


def test_rate_one_takes_everyone() -> None:
    assert PoissonSampler(5, 1.0, OsCoins()).draw().tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 60), st.floats(1e-6, 1.0))
def test_draws_are_ascending_positions_without_repeats(records: int, rate: float) -> None:
    chosen = PoissonSampler(records, rate, OsCoins()).draw()
    assert np.all(np.diff(chosen) > 0)
    assert all(0 <= one < records for one in chosen.tolist())


def test_the_realised_rate_is_never_above_the_stated_one() -> None:
    class Fixed:
        private = False

        def words(self, count: int) -> np.ndarray:
            return np.full(count, math.floor(0.3 * 2.0**64), dtype=np.uint64)

    assert len(PoissonSampler(3, 0.3, Fixed()).draw()) == 0


def test_shuffle_passes_over_every_record_once() -> None:
    sampler = ShuffleSampler(10, 4, np.random.default_rng(0))
    seen = np.concatenate([sampler.draw() for _ in range(3)])
    assert sorted(seen.tolist()) == list(range(10))
    assert not sampler.private
