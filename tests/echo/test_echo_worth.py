"""What a repeat is worth, from two trainings that part from one state."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echo_jax as ej

falls = st.floats(0.01, 10)
parts = st.floats(0, 0.95)
worths = st.floats(-2, 2)


def branch(fell, part, worth):
    """Two trainings of which the echoed one gained what its examples are worth."""
    gained = fell * (part + worth * (1 - part))
    return ej.RepeatWorth(5.0, 5.0 - gained, 5.0 - fell, part)


@given(st.lists(st.tuples(falls, parts), min_size=1, max_size=5), worths)
def test_worth_is_what_makes_fresh_examples_and_repeats_add_up(branches, worth):
    found = ej.mean_worth([branch(fell, part, worth) for fell, part in branches])
    assert found == pytest.approx(worth, abs=1e-6)


@given(falls, parts)
def test_a_repeat_as_good_as_fresh_is_worth_1_and_one_without_use_0(fell, part):
    assert branch(fell, part, 1.0).worth == pytest.approx(1)
    assert branch(fell, part, 0.0).worth == pytest.approx(0, abs=1e-6)


def test_where_nothing_is_repeated_or_learnt_nobody_can_tell():
    assert math.isnan(ej.RepeatWorth(5.0, 4.0, 4.0, fresh_part=1.0).worth)
    assert math.isnan(ej.RepeatWorth(5.0, 4.0, 5.1, fresh_part=0.5).worth)
    assert math.isnan(ej.mean_worth([]))


def test_both_branches_begin_where_the_training_is():
    seen = []

    def step(state, batch):
        seen.append((state, batch))
        return state - batch

    found = ej.worth_of_repeats(
        step, 10, echoed=[1, 1], fresh=[1, 2], score=float, fresh_part=0.5
    )
    assert seen == [(10, 1), (9, 1), (10, 1), (9, 2)]
    assert found == ej.RepeatWorth(10.0, 8.0, 7.0, 0.5)
    # 2 of 3 were gained, with half of the examples: 2 / 3 = 1 / 2 + worth / 2.
    assert found.worth == pytest.approx(1 / 3)


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
        ej.worth_of_repeats(
            lambda state, batch: state,
            0,
            echoed=echoed,
            fresh=fresh,
            score=float,
            fresh_part=part,
        )
