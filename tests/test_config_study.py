"""The fields of a study: arms in their order, and how each is searched."""

import pytest
from ml_collections import ConfigDict

from echo_jax.arms import arm_configs, make_ready_for_trials
from echo_jax.config import default_config
from echo_jax.config.study import arm_names, default_study, protocol_of, set_arms
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.training.feeds.of_config import make_echo_spec

SPACE = {"optim": {"lr": "log:1e-4:1e-2"}}


def study(**changes):
    made = default_study("a study", default_config(), {"b": {}, "a": {"seed": 1}})
    made.update_from_flattened_dict(changes)
    return made


def test_arms_run_in_the_order_in_which_they_are_written():
    assert arm_names(study()) == ["b", "a"]
    made = study()
    set_arms(made, {"z": {}, "b": {}})
    assert arm_names(made) == ["z", "b"] and "a" not in made.arms
    # A study that was written without an order has that of its names.
    del made["order"]
    assert arm_names(made) == ["b", "z"]


def test_an_arm_whose_name_no_flag_could_hold_is_refused():
    with pytest.raises(ValueError, match=r"arm 'a\.b' has a dot, .* name it 'a_b'"):
        default_study("a study", default_config(), {"a.b": {}})


def test_arms_that_the_order_does_not_name_come_last():
    made = study()
    made.arms = ConfigDict({"c": {}, "b": {}, "a": {}, "d": {}})
    assert arm_names(made) == ["b", "a", "c", "d"]


def test_a_study_without_a_space_and_streams_is_one_of_runs():
    assert protocol_of(study()) is None
    assert protocol_of(ConfigDict({"arms": {}})) is None


def test_a_protocol_is_what_the_fields_say():
    made = study()
    made.search.space = ConfigDict(SPACE)
    made.update_from_flattened_dict({"search.points": 8, "confirm.streams": 4})
    found = protocol_of(made)
    assert (found.arms, found.points, found.repeats) == (("b", "a"), 8, 5)
    assert (found.streams, found.seed, found.cut) == (4, 0, 2.0)
    units = [str(unit) for unit in found.units()]
    assert units[:4] == ["b.search-0", "b.confirm-0", "a.search-0", "a.confirm-0"]
    assert len(units) == 2 * 2 * 5
    # Without a search there is nothing to repeat.
    made.search.space = ConfigDict()
    assert [str(unit) for unit in protocol_of(made).units()] == [
        "b.confirm-0",
        "a.confirm-0",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search.points": 0}, r"search\.points=0 must be at least 1"),
        ({"search.repeats": 0}, r"search\.repeats=0 must be at least 1"),
        ({"search.seed": -1}, r"search\.seed=-1 must be at least 0"),
        ({"confirm.streams": -1}, r"streams=-1 and .* must be at least 0"),
        ({"stop.cut": 0.5}, r"cut=0.5 would end the best trials; use 2, or 0"),
        ({"stop.cut": float("nan")}, "cut=nan must be at least 0"),
        ({"storage_ratio": 4.0}, r"storage_ratio=4 is for seconds, and a search"),
    ],
)
def test_impossible_values_are_refused_with_the_fix(changes, message):
    made = study(**changes)
    made.search.space = ConfigDict(SPACE)
    with pytest.raises(ValueError, match=message):
        protocol_of(made)


@pytest.mark.parametrize("fields", [{"factor": "auto"}, {"mode": "adaptive"}])
def test_an_arm_that_measures_what_it_does_is_no_trial(fields):
    made = study()
    made.arms.a = ConfigDict({"echo": fields})
    arms = arm_configs(made)
    with pytest.raises(ValueError, match=r"arm a: what a trial does is decided by"):
        make_ready_for_trials(arms)


def test_an_adaptive_arm_whose_decisions_are_given_is_a_trial():
    made = study()
    echo = {"mode": "adaptive", "buffer": 128, "replay": "pattern:1000"}
    made.arms.a = ConfigDict({"echo": echo})
    arms = arm_configs(made)
    make_ready_for_trials(arms)
    spec = make_echo_spec(arms["a"])
    assert spec.replay == DecisionLog([True, False, False, False] * 250)
