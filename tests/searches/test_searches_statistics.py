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


def test_an_interval_is_as_long_as_student_s_and_leans_as_that_of_scipy_does():
    numbers = np.array([0.1, 0.4, 0.2, 0.3, 0.25, 0.8, 0.35, 0.15])
    found = mean_interval(numbers[None])
    mean = numbers.mean()
    assert found.value == pytest.approx(mean)
    length = 2 * stats.t.ppf(0.975, 7) * stats.sem(numbers)
    assert found.high - found.low == pytest.approx(length)
    low, high = stats.bootstrap(
        (numbers,),
        lambda x, axis: x.mean(axis=axis),
        n_resamples=4999,
        method="BCa",
        rng=np.random.default_rng(1),
    ).confidence_interval
    leans = (high - mean) / (mean - low)
    assert leans > 1.3
    assert (found.high - mean) / (mean - found.low) == pytest.approx(leans, rel=0.1)
    # Streams alone, or searches alone: the same numbers.
    assert mean_interval(numbers[:, None]) == found
    assert found.exp().value == pytest.approx(math.exp(mean))


def test_searches_and_streams_count_with_the_degrees_of_freedom_of_their_own():
    searches, streams = np.array([[-0.3], [0.1], [0.2]]), np.array([0, 0.1, 0.3, 0.4])
    # Without a rest, so that both variances are seen as they are.
    found = mean_interval(searches + streams)
    of_searches = stats.t.ppf(0.975, 2) * stats.sem(searches.ravel())
    of_streams = stats.t.ppf(0.975, 3) * stats.sem(streams)
    assert found.high - found.low == pytest.approx(
        2 * math.hypot(of_searches, of_streams)
    )
    # What streams differ by, as it is left to chance, is in the searches already.
    apart = np.array([[0.0, 0.1], [0.5, 0.4], [1.0, 1.1], [0.2, 0.2]])
    alone = stats.t.ppf(0.975, 3) * stats.sem(apart.mean(axis=1))
    found = mean_interval(apart)
    assert found.high - found.low == pytest.approx(2 * alone)
    # Searches that agree by luck are no surer than chance within them allows.
    lucky = np.array([[0.1, -0.1, 0.2, 0.0], [-0.1, 0.1, 0.0, 0.201]])
    rest = lucky - lucky.mean(axis=1, keepdims=True) - lucky.mean(axis=0) + lucky.mean()
    chance = stats.t.ppf(0.975, 3) * math.sqrt((rest**2).sum() / 3 / 8)
    found = mean_interval(lucky)
    assert found.high - found.low == pytest.approx(2 * chance)


@pytest.mark.parametrize(("times", "more"), [(1, 0.7), (0.3, -1.3), (7, 1e3)])
def test_an_interval_follows_its_numbers(times, more):
    table = np.log([[105, 120, 118], [95, 100, 104]]) - np.log([100, 110, 120])
    expected = [times * end + more for end in mean_interval(table)]
    assert [*mean_interval(times * table + more)] == pytest.approx(expected)


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
    ("searches", "streams", "search", "stream", "noise"),
    [
        (1, 8, 0.0, 0.05, 0.05),
        (1, 16, 0.0, 0.05, 0.05),
        (3, 8, 0.0, 0.05, 0.05),
        (3, 8, 0.02, 0.05, 0.05),
        (3, 8, 0.05, 0.05, 0.05),
        (3, 8, 0.1, 0.05, 0.05),
        # As of s5's echo_512, s7's every, s2_32's e2 and s4_8's lag_4.
        (3, 8, 0.031, 0.006, 0.018),
        (3, 8, 0.037, 0.0, 0.02),
        (3, 8, 0.062, 0.013, 0.042),
        (3, 8, 0.096, 0.052, 0.062),
        (5, 16, 0.02, 0.05, 0.05),
        (5, 16, 0.1, 0.05, 0.05),
    ],
)
def test_an_interval_holds_the_truth_as_often_as_it_says(
    searches, streams, search, stream, noise
):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        table = study(rng, searches, streams, search=search, stream=stream, noise=noise)
        found = mean_interval(table)
        held += found.low <= 0 <= found.high
    # Somewhat more often where searches do not differ more than streams.
    assert 930 <= held <= (970 if searches == 1 else 980)


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
