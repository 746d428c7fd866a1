"""Trials of a search: what is made, cut, kept and shared; and variants that diverge."""

import dataclasses
import json
import math
import platform

import pytest
from ml_collections import ConfigDict
from tiny_workload import as_synthetic, registered, tiny_config

from echo_jax import cli, runs
from echo_jax.config import RunSpec
from echo_jax.files import FolderLock, run_folder
from echo_jax.searches import (
    Protocol,
    Space,
    Unit,
    best_of,
    make_trials,
    num_missing,
    read_environments,
    read_unit,
)

SPACE = {"optim": {"lr": "log:1e-3:1e-1"}}


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with registered(as_synthetic):
        yield


def arms(**options):
    options = {"updates": 40, "eval_every": 4, "target": 2.0, **options}
    options |= {"stop_at_target": options["target"] != 0}
    echoed = tiny_config(**options, echo__factor=2.0)
    found = {"baseline": tiny_config(**options), "batch": echoed}
    return {name: RunSpec.of(config) for name, config in found.items()}


def protocol(**changes):
    given = Protocol(("baseline", "batch"), Space.parse(SPACE), 3, 1, 2, 0, 2.0)
    return dataclasses.replace(given, **changes)


def make(workdir, wanted=None, of=None, on_made=lambda unit, trial: None):
    make_trials(wanted or protocol(), of or arms(), run_folder(workdir), on_made)


def made_in(workdir, wanted=None):
    """Makes what is missing; its units and numbers."""
    made = []
    make(workdir, wanted, on_made=lambda unit, t: made.append((str(unit), t.number)))
    return made


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
    make(folder)
    return folder, files(folder)


def test_every_search_and_every_confirmation_is_made_once(whole):
    folder, made = whole
    assert len(made) == 2 * 2
    for arm in ("baseline", "batch"):
        found = trials(folder, f"{arm}.search-0")
        assert [trial.point for trial in found] == protocol().space.points(3, 0)
        assert {trial.stream for trial in found} == {0}
        best = best_of(found)
        assert best is not None
        assert best.score == min(t.score for t in found if t.score is not None)
        confirmed = trials(folder, f"{arm}.confirm-0")
        assert [t.point for t in confirmed] == [best.point] * 2
        # New streams, the same for all arms.
        assert [t.stream for t in confirmed] == [1000, 1001]
    (found,) = read_environments(run_folder(folder), protocol().units()[0])
    assert found["python"] == platform.python_version()
    assert found["workload"]["data"] == {"synthetic": True}


@pytest.mark.parametrize(("arm", "factor"), [("baseline", 1), ("batch", 2)])
def test_fresh_examples_and_updates_are_counted_until_the_target(whole, arm, factor):
    for trial in trials(whole[0], f"{arm}.confirm-0"):
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


def test_a_search_that_is_stopped_or_grows_keeps_what_was_made(tmp_path, whole):
    def stop_after_two(unit, trial):
        if trial.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, protocol(points=2, num_seeds=1), on_made=stop_after_two)
    before = files(tmp_path)
    assert before and before.keys() < whole[1].keys()
    rest = made_in(tmp_path)
    assert files(tmp_path) == whole[1]
    assert ("baseline.search-0", 2) in rest and ("baseline.search-0", 1) not in rest
    assert len(rest) == len({*rest}) == 2 * (3 + 2) - 2


def test_what_another_process_has_locked_is_left_to_it(tmp_path):
    folder = run_folder(tmp_path)
    wanted = protocol(points=1, num_seeds=1)
    (folder / "trials").mkdir()
    with FolderLock(folder / "trials", name=".baseline.search-0.lock"):
        make(tmp_path, wanted)
    assert files(tmp_path).keys() == {"batch.search-0.json", "batch.confirm-0.json"}
    units = [unit for unit in wanted.units() if unit.variant == "baseline"]
    # Of what is to be confirmed nothing is known yet.
    assert [num_missing(wanted, arms()[u.variant], folder, u) for u in units] == [1, 0]


def test_a_diverged_trial_is_a_result_and_the_search_goes_on(tmp_path):
    space = Space.parse({"optim": {"lr": "choice:0.01,1e30"}})
    wanted = protocol(variants=("baseline",), space=space, points=4, num_seeds=1)
    make(tmp_path, wanted)
    found = trials(tmp_path, "baseline.search-0")
    outcomes = {t.point["optim.lr"]: t.outcome for t in found}
    assert outcomes[1e30] == "diverged" and outcomes[0.01] in ("reached", "cut")
    assert "not finite" in next(t.message for t in found if t.outcome == "diverged")
    assert len(found) == 4 and not made_in(tmp_path, wanted)


def test_a_point_that_cannot_be_trained_is_marked_with_the_reason(tmp_path):
    space = Space.parse({"echo": {"factor": "choice:2.0,0.5"}})
    make(tmp_path, protocol(space=space, num_seeds=1, variants=("batch",)))
    found = trials(tmp_path, "batch.search-0")
    (failed,) = {t.message for t in found if t.outcome == "failed"}
    assert "echo factor 0.5 is outside" in failed
    assert [t.outcome for t in trials(tmp_path, "batch.confirm-0")] == ["reached"]


@pytest.mark.parametrize(
    ("changes", "options"),
    [({"seed": 1}, {}), ({"cut": 3.0}, {}), ({}, {"batch_size": 16})],
)
def test_trials_of_another_study_are_refused(whole, changes, options):
    with pytest.raises(ValueError, match="of another config or search; use another"):
        make(whole[0], protocol(**changes), arms(**options))


def test_trials_go_on_with_the_same_data_at_another_place(whole, tmp_path):
    """By its hash, or by its place where it has none."""

    def at(source, points=2, **facts):
        def build(config):
            data = {"data": {"synthetic": True, "source": source, **facts}}
            return dataclasses.replace(as_synthetic(config), metadata=data)

        with registered(build):
            of = arms(data__source=source)
            return make(tmp_path, protocol(points=points, num_seeds=1), of)

    at("here", sha256="a")
    before = files(tmp_path)
    for source, facts in (("there", {"sha256": "b"}), ("there", {})):
        with pytest.raises(ValueError, match=r"on other data than .*'there' holds"):
            at(source, 3, **facts)
    assert files(tmp_path) == before
    at("there", 3, sha256="a")
    names = ("baseline.search-0", "baseline.confirm-0")
    expected = [[*t.point.values(), t.final] for t in trials(whole[0], names[0])]
    assert [
        [*t.point.values(), t.final] for t in trials(tmp_path, names[0])
    ] == expected


def study(updates=6):
    base = tiny_config(updates=updates, log_every=2, eval_every=2, target=1e-9)
    of = {"hot": {"optim": {"lr": 1e30}}, "last": {}}
    fields = {"name": "two", "base": base.to_dict(), "arms": of, "storage_ratio": 0.0}
    return ConfigDict(fields)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    runs.run_study(study(), folder)
    return folder


def test_a_diverged_arm_is_trained_again_only_if_its_record_is_damaged(
    diverged, capsys
):
    finished = json.loads((diverged / "last" / "summary.json").read_text())
    assert finished["updates"] == 6
    assert not (diverged / "last" / "diverged.json").exists()
    assert not (diverged / "hot" / "summary.json").exists()
    record, rows = (diverged / "hot" / n for n in ("diverged.json", "metrics.jsonl"))
    whole, before = record.read_text(), rows.read_bytes()
    for content, is_trained in ((whole, False), (whole[:-9], True)):
        record.write_text(content)
        runs.run_study(study(), diverged)
        assert "hot diverged at update 2: the study marks" in capsys.readouterr().out
        assert (rows.read_bytes() != before) == is_trained
    assert json.loads(record.read_text())["update"] == 2
    # One that ends before it diverges is another matter.
    runs.run_study(study(updates=1), diverged)
    assert "diverged" not in capsys.readouterr().out


def test_table_page_figure_and_terminal_say_when_an_arm_diverged(diverged, capsys):
    assert cli.main(["report", str(diverged), "--workdir", str(diverged)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "hot diverged: its loss" in printed and "from update 2 on" in printed
    rows = (diverged / "table.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith("| hot |")]
    assert "| — | diverged at update 2 | — | — |" in row
    assert "<td>diverged at update 2</td>" in (diverged / "report.html").read_text()
    figure = (diverged / "figure.svg").read_text()
    assert "<!-- hot (x: diverged at update 2) -->" in figure
