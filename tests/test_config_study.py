"""The fields of a study: arms in their order, and how each is searched."""

import pytest
from ml_collections import ConfigDict

from echo_jax.config import (
    arm_names,
    default_config,
    default_study,
    protocol_of,
    set_arms,
)
from echo_jax.runs import ConfigRefusedError, run_study

SPACE = {"optim": {"lr": "log:1e-4:1e-2"}}
GIVEN = {"mode": "adaptive", "buffer": 128, "replay": "pattern:1000"}


def study(**changes):
    made = default_study("a study", default_config(), {"b": {}, "a": {"seed": 1}})
    made.update_from_flattened_dict(changes)
    return made


def test_arms_run_in_the_order_in_which_they_are_written():
    made = study()
    assert arm_names(made) == ["b", "a"]
    set_arms(made, {"z": {}, "b": {}})
    assert arm_names(made) == ["z", "b"] and "a" not in made.arms
    # Those that the order does not name come last.
    made.arms = ConfigDict({"c": {}, "z": {}, "b": {}, "d": {}})
    assert arm_names(made) == ["z", "b", "c", "d"]
    del made["order"]
    assert arm_names(made) == ["b", "c", "d", "z"]


def test_an_arm_whose_name_no_flag_could_hold_is_refused():
    with pytest.raises(ValueError, match=r"arm 'a\.b' has a dot, .* name it 'a_b'"):
        default_study("a study", default_config(), {"a.b": {}})


def test_a_protocol_is_what_the_fields_say():
    made = study()
    assert protocol_of(made) is None
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
    units = [str(unit) for unit in protocol_of(made).units()]
    assert units == ["b.confirm-0", "a.confirm-0"]


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
        ({"storage_ratio": -1.0}, r"storage_ratio=-1.0 must be at least 0"),
        ({"arms.a": {"echo": {"mode": "adaptive"}}}, "arm a: a trial must not depend"),
        # With its decisions given it is a trial, on more devices than there are.
        (
            {"arms.a": {"echo": GIVEN, "mesh": {"data": 16}}},
            "arm a: .*16",
        ),
        ({"arms.a.seeds": 1}, "arm a: .*seeds"),
        ({"arms": {"a b": {}}}, "arm 'a b' cannot name a folder; use lett"),
    ],
)
def test_impossible_values_are_refused_with_the_fix(changes, message, tmp_path):
    made = study()
    with made.unlocked():
        for name, value in changes.items():
            *groups, last = name.split(".")
            group = made
            for part in groups:
                group = group[part]
            group[last] = ConfigDict(value) if isinstance(value, dict) else value
    made.search.space = ConfigDict(SPACE)
    with pytest.raises(ConfigRefusedError, match=message):
        run_study(made, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_processes_without_a_search_are_refused(tmp_path):
    with pytest.raises(ConfigRefusedError, match="jobs=2: processes make the trials"):
        run_study(study(), tmp_path, jobs=2)
