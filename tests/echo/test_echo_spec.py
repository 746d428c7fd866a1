"""Specs: frozen, hashable, fit for other processes, and refused where wrong."""

import dataclasses
import pickle
import re
from fractions import Fraction

import pytest

import echo_jax as ej
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.plans import make_plan
from echo_jax.echo.spec import AdaptiveSpec, StochasticSpec

HALF = LoadSchedule(start=0.5, end=0.5)
# Each makes a new one, equal to the last.
MAKE = {
    "fixed": lambda: ej.EchoSpec(Fraction(5, 2), 8, "shuffle", 4, 1),
    "adaptive": lambda: AdaptiveSpec(2, 8, 4, 1, DecisionLog([True, False])),
    "stochastic": lambda: StochasticSpec(HALF, 8, 4, 1),
}
MODES = pytest.mark.parametrize("mode", MAKE)


@MODES
def test_a_spec_is_frozen(mode):
    spec = MAKE[mode]()
    for field in dataclasses.fields(spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, field.name, getattr(spec, field.name))


@MODES
def test_a_spec_is_equal_and_hashed_by_its_fields(mode):
    spec, same = MAKE[mode](), MAKE[mode]()
    assert spec == same and hash(spec) == hash(same)
    assert len({spec, same, *(make() for make in MAKE.values())}) == 3
    for name in ("buffer", "batch_size", "seed"):
        assert dataclasses.replace(spec, **{name: 16}) != spec


@MODES
def test_a_spec_comes_back_from_another_process(mode):
    spec = MAKE[mode]()
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    # And it means the same: a state of the one is a state of the other.
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
        (lambda: AdaptiveSpec(cap=0), "got 0. Use cap=1."),
        (lambda: AdaptiveSpec(cap=1.5), "got 1.5. Use cap=2."),
        (
            lambda: StochasticSpec(0.5),
            "load=0.5 must be a LoadSchedule, such as LoadSchedule(start=0.5, end=0.5)",
        ),
    ],
)
def test_a_wrong_field_is_named_with_the_fix(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_a_replay_may_be_any_decisions():
    assert AdaptiveSpec(replay=[True, False]) == AdaptiveSpec(
        replay=DecisionLog([True, False])
    )
