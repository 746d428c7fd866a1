"""Intervals and statistics of trials, against hand-computed and simulated truth."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from echo_jax.searches.statistics import (
    expected_best,
    mean_interval,
    relative_seconds,
)


def test_an_interval_is_that_of_scipy_at_the_level_of_students_t():
    numbers = np.array([0.1, 0.4, 0.2, 0.3, 0.25, 0.5, 0.35, 0.15])
    found = mean_interval(numbers[None])
    wide = stats.t.ppf(0.975, 7) * math.sqrt(8 / 7)
    expected = stats.bootstrap(
        (numbers,),
        lambda x, axis: x.mean(axis=axis),
        n_resamples=4999,
        confidence_level=1 - 2 * stats.norm.sf(wide),
        method="BCa",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.value == pytest.approx(numbers.mean())
    assert found.low == pytest.approx(expected.low, abs=0.01)
    assert found.high == pytest.approx(expected.high, abs=0.01)
    # Wider than what scipy gives for 95 %, which is too short for eight numbers.
    assert found.high - found.low > 0.17
    # Streams alone, or searches alone: the same numbers.
    assert mean_interval(numbers[:, None]) == found
    assert found.exp().value == pytest.approx(math.exp(numbers.mean()))


def test_one_number_has_no_interval_and_equal_ones_have_none_that_is_wider():
    assert mean_interval([[0.5]])[0] == 0.5
    assert np.isnan(mean_interval([[0.5]])[1:]).all()
    assert mean_interval([[0.5, 0.5], [0.5, 0.5]]) == (0.5, 0.5, 0.5)


def study(rng, searches, streams, *, search, stream, noise):
    """Log costs of two tuned arms whose true means are equal, as differences."""
    of_streams = rng.normal(0, 0.2, streams)  # the same for both

    def arm():
        tuned = rng.normal(0, search, (searches, 1))
        own = rng.normal(0, stream, streams)
        return of_streams + tuned + own + rng.normal(0, noise, (searches, streams))

    return arm() - arm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("searches", "streams", "spread"),
    [
        (1, 8, {"search": 0.0, "stream": 0.05, "noise": 0.05}),
        (1, 16, {"search": 0.0, "stream": 0.05, "noise": 0.05}),
        (3, 8, {"search": 0.02, "stream": 0.05, "noise": 0.05}),
        (5, 16, {"search": 0.02, "stream": 0.05, "noise": 0.05}),
        (5, 16, {"search": 0.1, "stream": 0.05, "noise": 0.05}),
    ],
)
def test_an_interval_holds_the_truth_as_often_as_it_says(searches, streams, spread):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        found = mean_interval(study(rng, searches, streams, **spread))
        held += found.low <= 0 <= found.high
    assert 930 <= held <= 970


@given(
    st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=7),
    st.integers(1, 7),
)
def test_the_expected_best_is_the_mean_over_all_draws(scores, k):
    k = min(k, len(scores))
    bests = [
        min(found)
        for draw in itertools.combinations(scores, k)
        if (found := [score for score in draw if score is not None])
    ]
    expected = pytest.approx(sum(bests) / len(bests)) if bests else None
    assert expected_best(scores, k) == expected


@pytest.mark.parametrize("k", [0, 4])
def test_no_more_trials_are_drawn_than_there_are(k):
    with pytest.raises(ValueError, match=f"k={k} must be between 1 and the 3 trials"):
        expected_best([1.0, 2.0, 3.0], k)


def test_seconds_are_those_of_the_slower_one():
    # 100 batches of 32 that take 4 steps each, used twice: the loader decides.
    assert relative_seconds(3200, 200, batch_size=32, ratio=4) == 400
    # Used eight times: the accelerator does.
    assert relative_seconds(3200, 800, batch_size=32, ratio=4) == 800
