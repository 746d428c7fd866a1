import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from echo_jax.studies.runs import StudyError, read_run, read_runs, read_study

RESULTS = Path(__file__).parents[2] / "results"


def test_a_run_is_read_with_its_evaluations_only(tmp_path, make_run):
    run = read_run(make_run(tmp_path / "arm", losses=(3.0, 1.5, 1.75), target=1.5))
    assert run.name == "arm"
    assert run.values == [3.0, 1.5, 1.75]
    assert run.best == 1.5
    assert run.reached
    assert run.simulated_storage
    assert not run.synthetic_data


def test_what_was_not_finite_is_never_the_best(tmp_path, make_run):
    run = read_run(make_run(tmp_path / "arm", losses=(math.nan, 2.0, 1.5)))
    assert math.isnan(run.values[0])
    assert run.best == 1.5


def test_best_follows_the_mode(tmp_path, make_run):
    run = read_run(make_run(tmp_path / "arm", losses=(3.0, 1.5, 1.75), mode="max"))
    assert run.best == 3.0


def test_no_target_is_not_reached(tmp_path, make_run):
    run = read_run(make_run(tmp_path / "arm", target=0.0))
    assert run.target is None
    assert not run.reached


def test_a_study_has_its_baseline_first_and_then_its_order(tmp_path, make_study):
    study = read_study(make_study(tmp_path, {"z": {}, "baseline": {}, "a": {}}))
    assert [run.name for run in study.runs] == ["baseline", "z", "a"]
    assert study.baseline is study.runs[0]
    assert study.calibration == {"t_down_s": 0.02}


def test_caveats_name_what_is_not_real(tmp_path, make_study):
    arms = {
        "baseline": {"simulated_storage": False},
        "arm": {"simulated_storage": False, "synthetic_data": True},
    }
    assert read_study(make_study(tmp_path / "s", arms)).caveats == ["synthetic data"]
    arms["arm"] = {"simulated_storage": True}
    assert read_study(make_study(tmp_path / "t", arms)).caveats == ["simulated storage"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("environment.json", r"environment\.json is missing; run the arm again"),
        ("metrics.jsonl", r"metrics\.jsonl is missing; run the arm again"),
        ("summary.json", r"no summary\.json: the run is not finished; resume it"),
    ],
)
def test_a_missing_file_is_named_with_the_fix(tmp_path, make_run, missing, message):
    folder = make_run(tmp_path / "arm")
    (folder / missing).unlink()
    with pytest.raises(StudyError, match=message):
        read_run(folder)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(StudyError, match=r"config\.json, so it is no run folder"):
        read_run(tmp_path)


def test_a_finished_run_is_read_without_its_config(tmp_path, make_run):
    folder = make_run(tmp_path / "arm", losses=(3.0, 1.5, 1.75), target=1.5)
    whole = read_run(folder)
    (folder / "config.json").unlink()
    assert read_run(folder) == replace(whole, config={})


def test_the_published_studies_can_be_read():
    for folder in ("bursty", "fed", "quickstart", "which"):
        assert read_study(RESULTS / folder).baseline is not None


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(StudyError, match=r"nowhere is no folder"):
        read_run(tmp_path / "nowhere")


def test_a_folder_that_is_no_study_is_named(tmp_path):
    with pytest.raises(StudyError, match=r"holds no study\.json"):
        read_study(tmp_path)


def test_a_broken_line_is_named_by_its_number(tmp_path, make_run):
    folder = make_run(tmp_path / "arm")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "upd')
    with pytest.raises(StudyError, match=r"metrics\.jsonl, line 7, is damaged"):
        read_run(folder)


def test_rows_that_are_gone_are_missed(tmp_path, make_run):
    folder = make_run(tmp_path / "arm", target=0.0, rows=6)
    whole = read_run(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(StudyError, match="holds 4 rows of the 6 that summary"):
        read_run(folder)
    # More of them are those of a run that goes on.
    (folder / "metrics.jsonl").write_text("".join([*lines, lines[-2]]))
    assert read_run(folder) == whole


def test_broken_json_is_named(tmp_path, make_run):
    folder = make_run(tmp_path / "arm")
    (folder / "summary.json").write_text("{")
    with pytest.raises(StudyError, match=r"summary\.json is damaged"):
        read_run(folder)


def test_a_run_without_evaluations_names_the_setting(tmp_path, make_run):
    folder = make_run(tmp_path / "arm")
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train"}) + "\n")
    with pytest.raises(StudyError, match=r"set --config\.eval_every below"):
        read_run(folder)


def test_a_summary_of_another_metric_is_refused(tmp_path, make_run):
    folder = make_run(tmp_path / "arm", metric="accuracy")
    with pytest.raises(StudyError, match=r"\['eval_loss'\], but not eval_accuracy"):
        read_run(folder)


def test_runs_of_different_targets_are_not_compared(tmp_path, make_run):
    folders = [make_run(tmp_path / "a", target=1.0), make_run(tmp_path / "b", target=2)]
    with pytest.raises(StudyError, match=r"different target .*'a': 1\.0, 'b': 2"):
        read_runs(folders)


def test_two_runs_of_one_name_are_refused(tmp_path, make_run):
    folders = [make_run(tmp_path / "x" / "arm"), make_run(tmp_path / "y" / "arm")]
    with pytest.raises(StudyError, match="two run folders are named 'arm'"):
        read_runs(folders)


def test_no_run_at_all_is_refused():
    with pytest.raises(StudyError, match="there is no run to report"):
        read_runs([])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", [], r"summary\.json is damaged: it holds a JSON list"),
        ("summary.json", {"metric": 3}, "is damaged: 'metric' is 3; run the arm again"),
        ("summary.json", {"echo": {}}, "is damaged: it lacks 'echo.factor'"),
        ("summary.json", {"storage": {}}, "it lacks 'storage.latency_s'"),
        ("summary.json", {"updates_to_target": 7}, "holds no evaluation of update 7"),
        ("environment.json", {"workload": None}, "it lacks 'workload.data.synthetic'"),
        ("config.json", {"mesh": {"data": "all"}}, "'mesh.data' is 'all'"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path, make_run, file, content, message
):
    path = make_run(tmp_path / "arm") / file
    if isinstance(content, dict):
        content = {**json.loads(path.read_text()), **content}
    path.write_text(json.dumps(content))
    with pytest.raises(StudyError, match=message):
        read_run(tmp_path / "arm")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], r"metrics\.jsonl, line 7, is damaged: it holds a JSON list"),
        ({"kind": "eval", "eval_loss": 1.0}, "is damaged: it lacks 'updates'"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, make_run, row, message):
    folder = make_run(tmp_path / "arm")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(StudyError, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arms", "arm", r"study\.json is damaged: 'arms' is 'arm'"),
        ("arms", [3], "its arms are no names"),
        ("calibration", None, "'calibration' is None"),
    ],
)
def test_a_damaged_study_is_named(tmp_path, make_study, field, value, message):
    file = make_study(tmp_path, {"arm": {}}) / "study.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(StudyError, match=message):
        read_study(tmp_path)


def test_a_run_that_diverged_is_read_unless_it_finished_later(tmp_path, make_run):
    folder = make_run(tmp_path / "arm", losses=(3.0, 2.0, 1.0))
    facts = json.loads((folder / "summary.json").read_text())
    diverged = folder / "diverged.json"
    # Of 300 updates it finished; then it went on.
    for update, found in ((300, None), (350, 350)):
        diverged.write_text(json.dumps({**facts, "update": update, "rows": 6}))
        assert read_run(folder).diverged == found
    (folder / "summary.json").unlink()
    run = read_run(folder)
    assert not run.reached and run.summary["R"] is None
    assert run.summary["updates"] == 300 and run.best == 1.0
    diverged.write_text(json.dumps({**facts, "update": "350", "rows": 6}))
    with pytest.raises(StudyError, match=r"diverged\.json is damaged: 'update' is"):
        read_run(folder)
