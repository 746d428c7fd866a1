"""Trials of a search: what is made, cut, kept and shared."""

import dataclasses
import itertools
import math
import platform

import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.files.folders import run_folder
from echo_jax.files.lock import FolderLock
from echo_jax.searches import making as search
from echo_jax.searches.making import make_trials, num_missing
from echo_jax.searches.space import Space
from echo_jax.searches.trials import (
    Protocol,
    Unit,
    best_of,
    read_environments,
    read_unit,
)

SPACE = {"optim": {"lr": "log:1e-3:1e-1"}}


def build(config):
    workload = make_workload(config)
    return dataclasses.replace(workload, metadata={"data": {"synthetic": True}})


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(search, "build", build)


def arms(**options):
    options = {"updates": 40, "eval_every": 4, "target": 2.0, **options}
    options |= {"stop_at_target": options["target"] != 0}
    base = tiny_config(**options)
    echoed = tiny_config(**options, echo__factor=2.0)
    return {"baseline": base, "batch": echoed}


def protocol(**changes):
    given = Protocol(("baseline", "batch"), Space.parse(SPACE), 4, 1, 2, 0, 2.0)
    return dataclasses.replace(given, **changes)


def make(workdir, wanted=None, of=None, on_made=lambda unit, trial: None):
    make_trials(wanted or protocol(), of or arms(), run_folder(workdir), on_made)


def trials(workdir, name):
    arm, _, rest = name.partition(".")
    kind, _, repeat = rest.partition("-")
    return read_unit(run_folder(workdir), Unit(arm, kind, int(repeat)))


def files(workdir):
    return {p.name: p.read_bytes() for p in (workdir / "trials").glob("*.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of all trials, made without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "build", build)
        make(folder)
    return folder, files(folder)


def test_every_search_and_every_confirmation_is_made_once(whole):
    folder, made = whole
    assert len(made) == 2 * 2
    for arm in ("baseline", "batch"):
        found = trials(folder, f"{arm}.search-0")
        assert [trial.point for trial in found] == protocol().space.points(4, 0)
        assert {trial.stream for trial in found} == {0}
        best = best_of(found)
        assert best is not None
        assert best.score == min(t.score for t in found if t.score is not None)
        confirmed = trials(folder, f"{arm}.confirm-0")
        assert [t.point for t in confirmed] == [best.point] * 2
        # New streams, the same for all arms.
        assert [t.stream for t in confirmed] == [1000, 1001]


def test_a_file_says_on_what_its_trials_were_made(whole):
    for unit in protocol().units():
        (found,) = read_environments(run_folder(whole[0]), unit)
        assert found["python"] == platform.python_version()
        assert found["workload"]["data"] == {"synthetic": True}


def test_fresh_examples_and_updates_are_counted_until_the_target(whole):
    for name in ("baseline.confirm-0", "batch.confirm-0"):
        for trial in trials(whole[0], name):
            factor = 1 if "baseline" in name else 2
            assert trial.outcome == "reached"
            assert [f * factor for f in trial.fresh] == [8 * u for u in trial.updates]
            last, met = trial.updates[-2:], trial.updates_to_target
            assert last[0] < met <= last[1]
            part = (trial.values[-2] - 2.0) / (trial.values[-2] - trial.values[-1])
            assert met == pytest.approx(last[0] + 4 * part)
            assert trial.fresh_to_target == pytest.approx(met * 8 / factor, rel=0.1)


def test_a_trial_ends_after_so_many_times_the_updates_of_the_best_before_it(whole):
    limits = []
    for name in ("baseline.search-0", "batch.search-0"):
        found = trials(whole[0], name)
        for number, trial in enumerate(found):
            best = best_of(found[:number])
            limit = 40
            if best is not None:
                limit = min(40, math.ceil(2 * best.updates_to_target / 4) * 4)
            assert trial.limit == limit
            assert trial.updates[-1] <= limit
            if trial.outcome not in ("reached", "diverged"):
                assert trial.outcome == ("cut" if limit < 40 else "short")
                assert trial.updates[-1] == limit
            limits.append(limit)
    assert min(limits) < 40


@pytest.mark.slow
def test_what_is_cut_has_learnt_as_if_it_were_not(tmp_path):
    of = arms(optim__schedule="cosine")
    of.pop("batch")
    for name, cut in (("cut", 1.2), ("whole", 0.0)):
        make(tmp_path / name, protocol(arms=("baseline",), cut=cut), of)
    both = [trials(tmp_path / name, "baseline.search-0") for name in ("cut", "whole")]
    for one, other in zip(*both, strict=True):
        assert one.values == other.values[: len(one.values)]
    assert any(len(a.values) < len(b.values) for a, b in zip(*both, strict=True))


def test_a_search_that_is_stopped_goes_on_and_ends_alike(tmp_path, whole):
    made, stop_after = itertools.count(1), 2

    def stop(unit, trial):
        if next(made) == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, on_made=stop)
    before = files(tmp_path)
    rest = []
    make(tmp_path, on_made=lambda unit, trial: rest.append((str(unit), trial.number)))
    assert files(tmp_path) == whole[1]
    # Nothing is made twice.
    assert len(rest) == len({*rest}) == 2 * (4 + 2) - stop_after
    assert before


IN_BUCKET = "gs://bucket/runs/s"


def in_bucket(bucket):
    found = bucket.files("runs/s/trials")
    return {name: found[name] for name in found if name.endswith(".json")}


@pytest.mark.slow
def test_a_search_in_a_bucket_is_stopped_and_goes_on_as_in_a_folder(bucket, whole):
    made = itertools.count(1)

    def stop(unit, trial):
        if next(made) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(IN_BUCKET, on_made=stop)
    assert 0 < len(in_bucket(bucket)) < len(whole[1])
    rest = []
    make(IN_BUCKET, on_made=lambda unit, trial: rest.append((str(unit), trial.number)))
    assert in_bucket(bucket) == whole[1]
    assert len(rest) == len({*rest}) == 2 * (4 + 2) - 6


@pytest.mark.slow
def test_two_machines_share_a_search_in_a_bucket(bucket, whole):
    ours, theirs = [], []

    def meanwhile(unit, trial):
        if not ours:
            # The other machine comes as soon as we have made one trial.
            make(IN_BUCKET, on_made=lambda unit, t: theirs.append((unit.arm, t.number)))
        ours.append((unit.arm, trial.number))

    make(IN_BUCKET, on_made=meanwhile)
    assert in_bucket(bucket) == whole[1]
    numbers = [*range(4), *range(2)]
    assert ours == [("baseline", number) for number in numbers]
    assert theirs == [("batch", number) for number in numbers]


def test_what_another_process_has_locked_is_left_to_it(tmp_path, whole):
    class Held(FolderLock):
        def __enter__(self):
            if self._name == ".baseline.search-0.lock":
                raise search.FolderInUseError("by another")
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "FolderLock", Held)
        make(tmp_path)
    missing = {"baseline.search-0.json", "baseline.confirm-0.json"}
    assert files(tmp_path) == {k: v for k, v in whole[1].items() if k not in missing}
    units = [unit for unit in protocol().units() if unit.arm == "baseline"]
    folder = run_folder(tmp_path)
    missing = [num_missing(protocol(), arms()[u.arm], folder, u) for u in units]
    # Of what is to be confirmed nothing is known yet.
    assert missing == [4, 0]


def test_a_diverged_trial_is_a_result_and_the_search_goes_on(tmp_path):
    space = Space.parse({"optim": {"lr": "choice:0.01,1e30"}})
    wanted = protocol(space=space, streams=1, arms=("baseline",))
    make(tmp_path, wanted)
    found = trials(tmp_path, "baseline.search-0")
    outcomes = {t.point["optim.lr"]: t.outcome for t in found}
    assert outcomes[1e30] == "diverged" and outcomes[0.01] in ("reached", "cut")
    assert "not finite" in next(t.message for t in found if t.outcome == "diverged")
    assert len(found) == 4
    again = []
    make(tmp_path, wanted, on_made=lambda *made: again.append(made))
    assert not again


def test_a_point_that_cannot_be_trained_is_marked_with_the_reason(tmp_path):
    space = Space.parse({"echo": {"factor": "choice:2.0,0.5"}})
    wanted = protocol(space=space, streams=1, arms=("batch",))
    make(tmp_path, wanted)
    found = trials(tmp_path, "batch.search-0")
    failed = [trial for trial in found if trial.outcome == "failed"]
    assert {trial.point["echo.factor"] for trial in failed} == {0.5}
    assert "echo factor 0.5 is outside" in failed[0].message
    assert [t.outcome for t in trials(tmp_path, "batch.confirm-0")] == ["reached"]


def test_nothing_is_confirmed_where_no_trial_met_the_target(tmp_path):
    wanted = protocol(points=2)
    of = arms(target=1e-9)
    make(tmp_path, wanted, of)
    assert [*files(tmp_path)] and not trials(tmp_path, "batch.confirm-0")
    assert {t.outcome for t in trials(tmp_path, "batch.search-0")} == {"short"}
    units = wanted.units()
    folder = run_folder(tmp_path)
    assert not any(num_missing(wanted, of[u.arm], folder, u) for u in units)


def test_without_a_target_the_last_value_decides(tmp_path):
    wanted = protocol(points=2, streams=1, arms=("baseline",))
    make(tmp_path, wanted, arms(target=0.0))
    found = trials(tmp_path, "baseline.search-0")
    assert {trial.outcome for trial in found} == {"ended"}
    best = min(found, key=lambda trial: trial.final)
    assert trials(tmp_path, "baseline.confirm-0")[0].point == best.point


def test_arms_without_a_search_are_trained_on_every_stream(tmp_path):
    wanted = protocol(space=Space({}), streams=3)
    make(tmp_path, wanted)
    assert {*files(tmp_path)} == {"baseline.confirm-0.json", "batch.confirm-0.json"}
    found = trials(tmp_path, "batch.confirm-0")
    assert [t.stream for t in found] == [1000, 1001, 1002]
    assert len({t.fresh_to_target for t in found}) == 3


def test_more_points_searches_and_streams_keep_what_was_made(tmp_path, whole):
    make(tmp_path, protocol(points=2, streams=1))
    made = []
    make(tmp_path, on_made=lambda unit, trial: made.append((str(unit), trial.number)))
    assert files(tmp_path) == whole[1]
    assert ("baseline.search-0", 2) in made and ("baseline.search-0", 1) not in made


@pytest.mark.parametrize(
    ("changes", "options"),
    [({"seed": 1}, {}), ({"cut": 3.0}, {}), ({}, {"batch_size": 16})],
)
def test_trials_of_another_study_are_refused(tmp_path, changes, options):
    make(tmp_path, protocol(points=1, streams=0))
    with pytest.raises(ValueError, match="of another config or search; use another"):
        make(tmp_path, protocol(**changes), arms(**options))
