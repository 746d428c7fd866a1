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

HALF = ej.FetchSchedule(start=0.5, end=0.5)
# Each makes a new one, equal to the last.
MAKE = {
    "fixed": lambda: ej.EchoSpec(Fraction(5, 2), 8, "window_shuffle", 4, 1),
    "adaptive": lambda: ej.AdaptiveSpec(2, 8, 4, 1, ej.DecisionLog([True, False])),
    "stochastic": lambda: ej.StochasticSpec(HALF, 8, 4, 1),
}
MODES = pytest.mark.parametrize("mode", MAKE)


@MODES
def test_a_spec_is_equal_and_hashed_by_its_fields_and_pickled(mode):
    spec, same = MAKE[mode](), MAKE[mode]()
    assert spec == same and hash(spec) == hash(same)
    # It comes back from another process and means the same.
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    make_plan(again).check_state(make_plan(spec).get_state())


@pytest.mark.parametrize(
    ("mode", "name", "value", "message"),
    [
        *((mode, "buffer", 0, "got 0. Use buffer=1.") for mode in MAKE),
        ("adaptive", "buffer", True, "got True. Use buffer=1."),
        *((mode, "batch_size", "4", "got '4'. Use batch_size=4.") for mode in MAKE),
        *((mode, "seed", -1, "got -1. Use seed=0.") for mode in MAKE),
        ("fixed", "order", "random", "order='random' is unknown; use one of 'consecu"),
        ("adaptive", "max_uses", 1.5, "got 1.5. Use max_uses=2."),
        ("adaptive", "min_uses", 0, "got 0. Use min_uses=1."),
        ("adaptive", "min_uses", 5, "at most max_uses=2. Use min_uses=2."),
        ("stochastic", "fetch", 0.5, "must be a FetchSchedule, such as FetchSchedule("),
    ],
)
def test_a_wrong_field_is_named_with_the_fix(mode, name, value, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        dataclasses.replace(MAKE[mode](), **{name: value})


# --- How often each item is used, exactly.

FRACTION = st.fractions(1, 50, max_denominator=1000)
FACTOR = st.one_of(
    FRACTION,
    st.builds(lambda a, b, at: {0: a, at: b}, FRACTION, FRACTION, st.integers(1, 90)),
    st.builds(
        lambda units: ej.FactorByItem(lambda k: units[k % len(units)] / 10**6, 9),
        st.lists(st.integers(10**6, 9 * 10**6), min_size=1, max_size=9),
    ),
)


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
        (np.float32(1.5), [1, 2, 1, 2]),
        ({2: "3/2", 0: 1.5}, [1, 2, 1, 2]),
        (ej.FactorByItem(lambda k: 1.5 + k, max_factor=9), [1, 3, 3, 5]),
        (ej.FactorByItem(lambda k: 2.2, max_factor=2.2), [2, 2, 2, 2]),
    ],
)
def test_uses_by_hand(factor, uses):
    assert schedule_of(factor).uses(0, 4, 0)[0].tolist() == uses


@settings(max_examples=60)
@given(FACTOR, st.integers(0, 100), st.integers(0, 50))
def test_uses_are_exact_from_any_start(factor, start, count):
    def factor_of(k):
        if isinstance(factor, dict):
            return factor[max(at for at in factor if at <= k)]
        if isinstance(factor, Fraction):
            return factor
        return Fraction(round(factor.function(k) * 10**6), 10**6)

    schedule = schedule_of(factor)
    whole, end = schedule.uses(0, start + count, 0)
    assert whole.tolist() == counted(factor_of, start + count)
    head, carry = schedule.uses(0, start, 0)
    tail, after = schedule.uses(start, count, carry)
    assert np.concatenate([head, tail]).tolist() == whole.tolist()
    assert after == end
    assert type(carry) is int
    assert 0 <= carry < schedule.denominator


def test_floats_are_counted_exactly():
    assert math.floor(100 * 1.15) == 114
    assert schedule_of(1.15).uses(0, 100, 0)[0].sum() == 115
    assert schedule_of(7 / 3).constant == Fraction(7, 3)
    assert schedule_of(0.1 + 0.2 + 1).constant == Fraction(13, 10)
    # 10^12 items of factor 23/20, reached by the carry alone.
    start = 10**12 + 7
    uses, _ = schedule_of("23/20").uses(start, 40, start * 23 % 20)
    sums = [k * 23 // 20 for k in range(start, start + 41)]
    assert uses.tolist() == [b - a for a, b in itertools.pairwise(sums)]


@pytest.mark.parametrize(
    ("factor", "error", "parts"),
    [
        (0.5, ValueError, ["0.5", "outside [1, 1000000]", "give a factor of at least"]),
        (10**7, ValueError, ["10000000", "outside [1, 1000000]"]),
        (float("nan"), ValueError, ["nan", "not a finite number", "give a factor"]),
        ("2x", ValueError, ["'2x'", "not a finite number", "give a factor"]),
        (True, TypeError, ["True", "not a number", "give a factor"]),
        ([2], TypeError, ["[2]", "not a number", "give a factor"]),
        (
            Fraction(10**6 + 4, 10**6 + 3),
            ValueError,
            ["Fraction(1000004, 1000003)", "denominator over", "give 1000001/1000000"],
        ),
        ({5: 2}, ValueError, ["[5]", "a piece that starts at 0"]),
        ({0: 2, -1: 2}, ValueError, ["first item of a piece", "got -1. Use 0."]),
        (
            {0: Fraction(10**5 + 1, 10**5), 9: Fraction(99_990, 99_989)},
            ValueError,
            ["100001/100000, 99990/99989", "9998900000", "rounder"],
        ),
        (lambda k: 2, TypeError, ["bound", "FactorByItem(function, max_factor=...)"]),
    ],
)
def test_a_bad_factor_is_refused_with_its_value_and_the_cure(factor, error, parts):
    with pytest.raises(error) as caught:
        ej.EchoSpec(factor)
    assert not [part for part in parts if part not in str(caught.value)]


@pytest.mark.parametrize("value", [3.5, float("nan")])
def test_a_function_that_leaves_its_range_is_caught_when_it_does(value):
    factor = ej.FactorByItem(lambda k: value if k == 1 else 2, max_factor=3)
    with pytest.raises(ValueError) as caught:
        schedule_of(factor).uses(0, 2, 0)
    assert f"fresh item 1 is {value!r}, outside [1, max_factor=3]" in str(caught.value)
    assert "mend the function or raise max_factor" in str(caught.value)
