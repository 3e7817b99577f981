"""Tests the computed permutation: bijective for any n, and as even as chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spmd_core.errors import DataError
from spmd_data.order import MAX_SAMPLES, permuted

# The least probability that chance deviates as far as what was found. The seeds are fixed.
P_VALUE = 1e-4


def order(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permuted(np.arange(n), n, seed=seed, epoch=epoch)


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 10**9))
def test_every_sample_occurs_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(order(n, seed, epoch)), np.arange(n))


@given(st.integers(1, MAX_SAMPLES), st.data())
def test_different_positions_of_a_long_order_have_different_samples(
    n: int, data: st.DataObject
) -> None:
    places = np.unique(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50)))
    found = permuted(places, n, seed=3, epoch=1)
    assert found.dtype == np.int64
    assert len(np.unique(found)) == len(places)
    assert found.min() >= 0 and found.max() < n
    # One at a time, as together.
    assert permuted(places[-1], n, seed=3, epoch=1) == found[-1]


@pytest.mark.parametrize("n", [2, 3, 5, 24, 100])
def test_each_position_has_each_sample_equally_often(n: int) -> None:
    orders = np.stack([order(n, seed) for seed in range(20 * n)])
    for position in {0, n // 2, n - 1}:
        counts = np.bincount(orders[:, position], minlength=n)
        assert stats.chisquare(counts).pvalue > P_VALUE


def test_all_orders_of_four_samples_are_equally_frequent() -> None:
    orders = np.stack([order(4, epoch=epoch) for epoch in range(960)])
    counts = np.unique(orders @ 4 ** np.arange(4), return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > P_VALUE


@pytest.mark.parametrize("n", [1000, 65_536, 100_003])
def test_a_long_order_is_like_a_drawn_one(n: int) -> None:
    found = order(n, seed=7)
    # The place says nothing of the sample, nor of that of the next place.
    assert stats.pearsonr(np.arange(n), found).pvalue > P_VALUE
    assert stats.pearsonr(found[:-1], found[1:]).pvalue > P_VALUE
    # Differences of neighbours, and pairs of quantiles, are spread evenly.
    assert stats.chisquare(np.bincount(np.diff(found) % n * 20 // n)).pvalue > P_VALUE
    pairs = np.bincount(found[:-1] * 10 // n * 10 + found[1:] * 10 // n, minlength=100)
    assert stats.chisquare(pairs).pvalue > P_VALUE
    # A random permutation has one fixed point on average.
    assert np.count_nonzero(found == np.arange(n)) < 10


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    n = 1000
    orders = [order(n, seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1, 10)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 12
            assert stats.pearsonr(one, other).pvalue > P_VALUE


def test_the_order_is_the_same_on_every_machine_and_release() -> None:
    """A saved run goes on with another release, so these numbers never change."""
    assert order(10, seed=42, epoch=3).tolist() == [3, 1, 8, 5, 4, 7, 0, 9, 2, 6]
    far = permuted(np.array([0, 10**12]), MAX_SAMPLES, seed=0, epoch=0)
    assert far.tolist() == [967289234510, 923509231962]


@pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1])
def test_a_number_of_samples_out_of_range(n: int) -> None:
    with pytest.raises(DataError, match=r"from 1 to 1,099,511,627,776 samples; got"):
        permuted(np.arange(1), n, seed=0, epoch=0)


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_out_of_range(position: int) -> None:
    with pytest.raises(DataError, match=r"lies from 0 to 4; got positions from"):
        permuted(np.array([0, position]), 5, seed=0, epoch=0)
