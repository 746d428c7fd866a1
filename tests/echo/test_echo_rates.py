"""The arithmetic of the instrument by hand: rates, times of steps, worth of repeats."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_echo_probe import exactly

import echo_jax as ej
from echo_jax.echo.instrument.rates import ratio_interval, step_times


def test_the_model_by_hand():
    """t_up 6, t_down 1: the setting of the paper's wall-clock study, R = 6."""
    rates = ej.rates
    updates = [rates.seconds_per_update(6.0, 1.0, e) for e in (1, 2, 3, 6, 8)]
    assert updates == [6, 3, 2, 1, 1]
    advised = [rates.advised_factor(r) for r in (0.3, 1.05, 3.7, 8.0)]
    assert advised == [1, 1, 3.7, 4]
    assert rates.advised_factor(8.0, max_uses=16) == 8


def test_the_model_of_shared_cores_by_hand():
    found, rates = ej.rates.contention, ej.rates
    updates = [rates.seconds_per_update(2.0, 1.0, e, 0.5) for e in (1, 2)]
    assert updates == [exactly(2 ** (7 / 6)), exactly((1.5**6 + 1) ** (1 / 6))]
    assert found(2.0, 1.0, {1: updates[0], 2: updates[1]}) == 0.5
    # A run that is disturbed while the other one is not shows no contention.
    assert found(4.0, 1.0, {1: 4.3, 4: 1.0}) == found(8.0, 1.0, {1: 8.0, 4: 2.0}) == 0
    # An update takes 1.71, 1.30 and 1.10 with e = 1, 2 and 6.
    advised = [rates.advised_factor(1.5, 6, 0.4, w) for w in (0, 0.4, 0.65, 1)]
    assert advised == [1, 1, 6, 6]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("seconds_per_update", (float("nan"), 1.0, 2), "t_up_s=nan must be positive"),
        ("seconds_per_update", (1.0, 1.0, 0.5), "factor=0.5"),
        ("advised_factor", (2.0, 0.5), "max_uses=0.5"),
        ("advised_factor", (0.0, 4), "ratio=0.0 must be positive"),
    ],
)
def test_numbers_out_of_range_are_refused(name, args, message):
    with pytest.raises(ValueError, match=message):
        getattr(ej.rates, name)(*args)


# --- The mean of a step.


def test_slow_steps_count_if_most_rounds_have_some():
    usual, slow = [2.0] * 9, [2.0] * 8 + [12.0]
    for rounds in range(1, 6):
        times = step_times([slow] * rounds + [usual] * (5 - rounds))
        found = times.timed, times.slow, times.slow_s, times.others_s
        assert found == (45, rounds, 12, 2)
        counted_s = 2 + rounds * 10 / 45
        assert times.recur == (rounds > 2)
        assert times.mean_s == exactly(counted_s if times.recur else 2.0)
        assert times.round_means_s[-1] == 2.0 or rounds == 5
        # Each round may have seen one slow step too few, or too many.
        assert times.most_s == exactly(counted_s + 10 * 5 / 45)
        assert times.least_s == 2.0


def test_no_step_is_slow_on_a_machine_that_slows_down():
    times = step_times([[1.0] * 10] * 3 + [[3.0] * 10])
    assert (times.slow, times.mean_s, times.least_s, times.most_s) == (0, 1.5, 1.5, 1.5)


def test_the_interval_of_the_ratio_spans_the_rounds_and_what_is_open_about_slow_steps():
    few = step_times([[2.0] * 5 + [12.0] + [2.0] * 4] * 5)
    assert (few.mean_s, few.least_s, few.most_s) == (3.0, 2.0, 4.0)
    assert ratio_interval([[12.0]] * 5, few) == (3.0, 6.0)
    # Student's, by hand: 4, 5 and 6 have a standard deviation of 1.
    low, high = ratio_interval([[4.0], [5.0], [6.0]], step_times([[1.0] * 4] * 3))
    assert (5 - low, high - 5) == (exactly(4.303 / 3**0.5),) * 2


# --- The worth of a repeat, from two trainings that part from one state.

FALLS, PARTS = st.floats(0.01, 10), st.floats(0, 0.95)


@settings(max_examples=50)
@given(st.lists(st.tuples(FALLS, PARTS), min_size=1, max_size=5), st.floats(-2, 2))
def test_worth_is_what_makes_fresh_examples_and_repeats_add_up(falls, worth):
    branches = [
        ej.RepeatWorth(5.0, 5.0 - fell * (part + worth * (1 - part)), 5.0 - fell, part)
        for fell, part in falls
    ]
    assert ej.mean_worth(branches) == pytest.approx(worth, abs=1e-6)
    assert branches[0].worth == pytest.approx(worth, abs=1e-6)


def worth_of(echoed, fresh, part, seen):
    def step(state, batch):
        seen.append((state, batch))
        return state - batch

    batches = {"echoed": echoed, "fresh": fresh}
    return ej.worth_of_repeats(step, 10, **batches, score=float, fresh_part=part)


def test_both_branches_begin_where_the_training_is():
    seen = []
    found = worth_of([1, 1], [1, 2], 0.5, seen)
    assert seen == [(10, 1), (9, 1), (10, 1), (9, 2)]
    assert found == ej.RepeatWorth(10.0, 8.0, 7.0, 0.5)
    # 2 of 3 were gained, with half of the examples: 2 / 3 = 1 / 2 + worth / 2.
    assert found.worth == pytest.approx(1 / 3)
    # Without repeats nobody can tell.
    assert math.isnan(ej.RepeatWorth(5.0, 4.0, 4.0, fresh_part=1.0).worth)


@pytest.mark.parametrize(
    ("echoed", "fresh", "part", "says"),
    [
        ([1], [1, 2], 0.5, "1 echoed batches and 2 fresh ones"),
        ([], [], 0.5, "at least one"),
        ([1], [1], 4.0, "fresh_part=4.0 must be from 0 to 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(echoed, fresh, part, says):
    with pytest.raises(ValueError, match=says):
        worth_of(echoed, fresh, part, [])
