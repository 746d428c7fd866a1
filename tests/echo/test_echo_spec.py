"""Specs: frozen, hashable, exact in their numbers of uses, refused where wrong."""

import dataclasses
import itertools
import math
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.plans import make_plan

HALF = ej.LoadSchedule(start=0.5, end=0.5)
# Each makes a new one, equal to the last.
MAKE = {
    "fixed": lambda: ej.EchoSpec(Fraction(5, 2), 8, "shuffle", 4, 1),
    "adaptive": lambda: ej.AdaptiveSpec(2, 8, 4, 1, ej.DecisionLog([True, False])),
    "stochastic": lambda: ej.StochasticSpec(HALF, 8, 4, 1),
}
MODES = pytest.mark.parametrize("mode", MAKE)


@MODES
def test_a_spec_is_frozen_and_equal_and_hashed_by_its_fields(mode):
    spec, same = MAKE[mode](), MAKE[mode]()
    for field in dataclasses.fields(spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, field.name, getattr(spec, field.name))
    assert spec == same and hash(spec) == hash(same)
    assert len({spec, same, *(make() for make in MAKE.values())}) == 3
    for name in ("buffer", "batch_size", "seed"):
        assert dataclasses.replace(spec, **{name: 16}) != spec
    # It comes back from another process and means the same.
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    make_plan(again).check_state(make_plan(spec).get_state())


@MODES
def test_the_defaults_of_a_spec_can_be_carried_out(mode):
    plan = make_plan(type(MAKE[mode]())())
    assert plan.write(plan.need(1).must).shape == (1, 1)
    batch = plan.next(1)
    assert (batch.fresh_index.tolist(), batch.repeat.tolist()) == ([[0]], [[0]])


@MODES
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("buffer", 0, "got 0. Use buffer=1."),
        ("buffer", 2.0, "got 2.0. Use buffer=2."),
        ("buffer", True, "got True. Use buffer=1."),
        ("batch_size", 0, "got 0. Use batch_size=1."),
        ("batch_size", "4", "got '4'. Use batch_size=4."),
        ("seed", -1, "got -1. Use seed=0."),
        ("seed", None, "got None. Use seed=0."),
    ],
)
def test_a_wrong_number_is_named_with_the_fix(mode, name, value, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        dataclasses.replace(MAKE[mode](), **{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ej.EchoSpec(order="random"),
            "order='random' is unknown; use one of 'consecutive', 'shuffle', "
            "'shuffle_buffer', 'spread'",
        ),
        (lambda: ej.AdaptiveSpec(cap=0), "got 0. Use cap=1."),
        (lambda: ej.AdaptiveSpec(cap=1.5), "got 1.5. Use cap=2."),
        (
            lambda: ej.StochasticSpec(0.5),
            "load=0.5 must be a LoadSchedule, such as LoadSchedule(start=0.5, end=0.5)",
        ),
    ],
)
def test_a_wrong_field_is_named_with_the_fix(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_a_replay_may_be_any_decisions():
    assert ej.AdaptiveSpec(replay=[True, False]) == ej.AdaptiveSpec(
        replay=ej.DecisionLog([True, False])
    )


# --- How often each item is used, exactly.

FACTOR = st.fractions(1, 1000, max_denominator=1000)


def schedule_of(factor):
    return ej.EchoSpec(factor).schedule


def counted(factor_of, count):
    """Numbers of uses of the first items, by the definition."""
    totals = list(
        itertools.accumulate(map(factor_of, range(count)), initial=Fraction())
    )
    return [math.floor(b) - math.floor(a) for a, b in itertools.pairwise(totals)]


@pytest.mark.parametrize(
    ("factor", "uses"),
    [
        (1, [1, 1, 1, 1]),
        (2.5, [2, 3, 2, 3]),
        ("7/3", [2, 2, 3, 2]),
        (Fraction(4, 3), [1, 1, 2, 1]),
        (np.float32(1.5), [1, 2, 1, 2]),
        (np.int64(3), [3, 3, 3, 3]),
        ({0: 1, 2: 3}, [1, 1, 3, 3]),
        ({2: "3/2", 0: 1.5}, [1, 2, 1, 2]),
        (ej.FactorByItem(lambda k: 1.5 + k, max_factor=9), [1, 3, 3, 5]),
        (ej.FactorByItem(lambda k: 2.2, max_factor=2.2), [2, 2, 2, 2]),
    ],
)
def test_uses_by_hand(factor, uses):
    assert schedule_of(factor).uses(0, 4, 0)[0].tolist() == uses


def test_floats_are_counted_exactly():
    assert math.floor(100 * 1.15) == 114
    assert schedule_of(1.15).uses(0, 100, 0)[0].sum() == 115
    assert schedule_of(7 / 3).constant == Fraction(7, 3)
    assert schedule_of(0.1 + 0.2 + 1).constant == Fraction(13, 10)


def test_whole_numbers_of_uses_are_reached():
    # 49 * (1 / 49) is below 1 in floats; some denominators betray any rounding.
    for denominator in range(1, 101):
        factor = Fraction(denominator + 1, denominator)
        uses, carry = schedule_of(factor).uses(0, 3 * denominator, 0)
        assert (uses.sum(), carry) == (3 * (denominator + 1), 0)
        assert uses[:denominator].tolist() == [1] * (denominator - 1) + [2]


@settings(max_examples=50)
@given(FACTOR, st.integers(0, 300))
def test_a_constant_is_exact(factor, count):
    uses, _ = schedule_of(factor).uses(0, count, 0)
    assert uses.tolist() == counted(lambda _: factor, count)
    assert uses.sum() == math.floor(count * factor)


@settings(max_examples=50)
@given(st.floats(1, 1000), st.integers(1, 300))
def test_a_float_means_its_nearest_fraction(factor, count):
    exact = Fraction(factor).limit_denominator(10**6)
    uses, _ = schedule_of(factor).uses(0, count, 0)
    assert uses.sum() == math.floor(count * exact)


@settings(max_examples=50)
@given(
    st.dictionaries(st.integers(1, 100), st.fractions(1, 9, max_denominator=20)),
    st.fractions(1, 9, max_denominator=20),
    st.integers(0, 150),
)
def test_pieces_are_exact(pieces, first, count):
    pieces = {0: first} | dict(itertools.islice(pieces.items(), 3))
    uses, _ = schedule_of(pieces).uses(0, count, 0)
    expected = counted(lambda k: pieces[max(s for s in pieces if s <= k)], count)
    assert uses.tolist() == expected


@settings(max_examples=50)
@given(st.lists(st.integers(10**6, 9 * 10**6), max_size=100))
def test_a_function_is_exact_in_millionths(units):
    factor = ej.FactorByItem(lambda k: units[k] / 10**6, max_factor=9)
    uses, _ = schedule_of(factor).uses(0, len(units), 0)
    assert uses.tolist() == counted(lambda k: Fraction(units[k], 10**6), len(units))


@settings(max_examples=50)
@given(
    st.one_of(
        FACTOR,
        st.builds(lambda a, b, at: {0: a, at: b}, FACTOR, FACTOR, st.integers(1, 90)),
        st.just(ej.FactorByItem(lambda k: 1 + (k % 7) / 3, max_factor=3)),
    ),
    st.integers(0, 100),
    st.integers(0, 50),
)
def test_any_start_continues_the_sequence(factor, start, count):
    schedule = schedule_of(factor)
    whole, end = schedule.uses(0, start + count, 0)
    head, carry = schedule.uses(0, start, 0)
    tail, after = schedule.uses(start, count, carry)
    assert np.concatenate([head, tail]).tolist() == whole.tolist()
    assert after == end
    assert type(carry) is int
    assert 0 <= carry < schedule.denominator


def test_far_items_do_not_overflow():
    # 10^12 items of factor 23/20, reached by the carry alone.
    factor = Fraction(23, 20)
    start = 10**12 + 7
    carry = start * factor.numerator % factor.denominator
    uses, _ = schedule_of(factor).uses(start, 40, carry)
    expected = [
        math.floor((k + 1) * factor) - math.floor(k * factor)
        for k in range(start, start + 40)
    ]
    assert uses.tolist() == expected


@pytest.mark.parametrize(
    ("factor", "error", "parts"),
    [
        (0.5, ValueError, ["0.5", "outside [1, 1000000]", "give a factor of at least"]),
        (0, ValueError, ["factor 0 ", "at least 1"]),
        (-3, ValueError, ["-3", "at least 1"]),
        (Fraction(2, 3), ValueError, ["Fraction(2, 3)", "at least 1"]),
        (10**7, ValueError, ["10000000", "outside [1, 1000000]"]),
        (float("nan"), ValueError, ["nan", "not finite", "give a factor"]),
        (float("inf"), ValueError, ["inf", "not finite", "give a factor"]),
        ("nan", ValueError, ["'nan'", "no number", "give a factor"]),
        ("2x", ValueError, ["'2x'", "no number", "give a factor"]),
        ("1/0", ValueError, ["'1/0'", "no number", "give a factor"]),
        (True, TypeError, ["True", "not a number", "give a factor"]),
        (None, TypeError, ["None", "not a number", "give a factor"]),
        ([2], TypeError, ["[2]", "not a number", "give a factor"]),
        (
            Fraction(10**6 + 4, 10**6 + 3),
            ValueError,
            ["Fraction(1000004, 1000003)", "denominator over", "give 1000001/1000000"],
        ),
        ({}, ValueError, ["[]", "a piece that starts at 0"]),
        ({5: 2}, ValueError, ["[5]", "a piece that starts at 0"]),
        ({0: 2, -1: 2}, ValueError, ["first item of a piece", "got -1. Use 0."]),
        ({0: 2, 1.5: 2}, TypeError, ["first item of a piece", "got 1.5"]),
        ({0: 2, 9: 0.5}, ValueError, ["0.5", "at least 1"]),
        (
            {0: Fraction(10**5 + 1, 10**5), 9: Fraction(99_990, 99_989)},
            ValueError,
            ["100001/100000, 99990/99989", "9998900000", "rounder"],
        ),
        (lambda k: 2, TypeError, ["bound", "FactorByItem(function, max_factor=...)"]),
        (ej.FactorByItem(lambda k: 2, max_factor=0.5), ValueError, ["0.5", "least 1"]),
    ],
)
def test_a_bad_factor_is_refused_with_its_value_and_the_cure(factor, error, parts):
    with pytest.raises(error) as caught:
        ej.EchoSpec(factor)
    assert not [part for part in parts if part not in str(caught.value)]


@pytest.mark.parametrize("value", [0.5, 3.5, float("nan")])
def test_a_function_that_leaves_its_range_is_caught_when_it_does(value):
    factor = ej.FactorByItem(lambda k: value if k == 1 else 2, max_factor=3)
    with pytest.raises(ValueError) as caught:
        schedule_of(factor).uses(0, 2, 0)
    assert f"fresh item 1 is {value!r}, outside [1, max_factor=3]" in str(caught.value)
    assert "mend the function or raise max_factor" in str(caught.value)


@settings(max_examples=30)
@given(FACTOR)
def test_strings_and_fractions_mean_the_same(factor):
    found = [schedule_of(each).constant for each in (factor, str(factor))]
    assert found == [factor] * 2
