"""Runs that are compared: which are read, and the table of their costs."""

import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from study_folders import change, make_run, make_study, read_table

from echo_jax.studies import StudyError, read_run, read_runs, read_study, study_report

RESULTS = Path(__file__).parents[2] / "results"
# Evaluations every 100 updates of 10 examples. The baseline syncs 1.0 after 400
# updates: 4000 fresh examples, 200 s. The arm syncs it after 500: it emitted 5000
# uses of 1250 fresh examples, so 3750 repeats stood for 2750 fresh ones.
ARMS = {
    "baseline": {"losses": (4.0, 3.0, 2.0, 1.0, 0.9)},
    "spread": {
        "factor": 4.0,
        "losses": (4.0, 3.0, 2.0, 1.5, 0.99),
        "seconds_per_update": 0.125,
    },
    "batch_echo": {"factor": 4.0, "losses": (4.0, 3.5)},
}


ARMS_OF_README = "batch_echo", "spread", "adaptive"


@pytest.fixture
def shown(tmp_path):
    """Gives the rows of a study's table, and its title and notes."""

    def shown(study):
        (tmp_path / "table.md").write_text(study_report(study).markdown())
        return read_table(tmp_path / "table.md")

    return shown


def test_a_study_has_its_baseline_first_and_then_its_order(tmp_path):
    study = read_study(make_study(tmp_path, {"z": {}, "baseline": {}, "a": {}}))
    assert [run.name for run in study.runs] == ["baseline", "z", "a"]
    # Published ones lie without the configs of their runs.
    for folder in ("bursty", "fed", "quickstart", "which"):
        assert read_study(RESULTS / folder).baseline.config == {}


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (["metrics.jsonl"], r"metrics\.jsonl is missing; run it again"),
        (["summary.json"], r"no summary\.json: the run is not finished; resume it"),
        (["summary.json", "config.json"], "config.json, so it is not a run folder"),
        (["."], "nowhere is not a folder; name the --workdir"),
    ],
)
def test_a_missing_file_is_named_with_the_fix(tmp_path, lost, message):
    folder = make_run(tmp_path / "arm")
    for name in lost if lost != ["."] else ():
        (folder / name).unlink()
    with pytest.raises(StudyError, match=message):
        read_run(folder if lost != ["."] else tmp_path / "nowhere")
    with pytest.raises(StudyError, match=r"holds no study\.json"):
        read_study(folder)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"name": "b", "target": 2}, r"different target .*'a': 1\.0, 'b': 2"),
        ({"name": "x/a"}, "two run folders are named 'a'; rename one"),
        ({"name": "b", "metric": "accuracy"}, r"\['eval_loss'\], but not eval_acc"),
    ],
)
def test_what_does_not_compare_is_refused(tmp_path, facts, message):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / facts.pop("name"), **facts)]
    with pytest.raises(StudyError, match=message):
        read_runs(runs)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", "{", r"summary\.json is damaged"),
        ("summary.json", {"metric": 3}, "is damaged: 'metric' is 3; run it again"),
        ("summary.json", {"echo": {}}, "is damaged: it lacks 'echo.factor'"),
        ("summary.json", {"rows": 9}, "holds 6 rows of the 9 that summary.json counts"),
        ("summary.json", {"updates_to_target": 7}, "holds no evaluation of update 7"),
        ("environment.json", {"workload": None}, "it lacks 'workload.data.synthetic'"),
        ("config.json", {"mesh": {"data": "all"}}, "'mesh.data' is 'all'"),
        ("study.json", {"arms": "arm"}, r"study\.json is damaged: 'arms' is 'arm'"),
        ("study.json", {"arms": [3]}, "its 'arms' are not names"),
        ("study.json", {"arms": ["../a"]}, "its 'arms' are not names"),
        ("metrics.jsonl", '{"kind": "eval"\n', r"metrics\.jsonl, line 7, is damaged"),
        ("metrics.jsonl", '{"kind": "eval", "eval_loss": 1}', "it lacks 'updates'"),
        ("metrics.jsonl", None, r"set --config\.eval_every below"),
    ],
)
def test_damage_is_named(tmp_path, file, content, message):
    folder = make_study(tmp_path, {"arm": {}})
    path = folder / file if file == "study.json" else folder / "arm" / file
    if isinstance(content, dict):
        change(path, **content)
    elif file == "metrics.jsonl" and content:
        path.write_text(path.read_text() + content)
    else:
        path.write_text(content or '{"kind": "train"}\n')
    with pytest.raises(StudyError, match=message):
        read_study(folder)


def test_a_run_that_diverged_is_read_unless_it_finished_later(tmp_path):
    folder = make_run(tmp_path / "arm")
    facts = {**json.loads((folder / "summary.json").read_text()), "rows": 6}
    # Of 300 updates it finished; then it went on.
    for update, found in ((300, None), (350, 350)):
        change(folder / "diverged.json", **facts, update=update)
        assert read_run(folder).diverged == found
    (folder / "summary.json").unlink()
    run = read_run(folder)
    assert not run.reached and run.summary["R"] is None
    assert run.summary["updates"] == 300 and run.best == 1.0


def test_the_table_has_every_arm_and_says_what_it_means(tmp_path, shown):
    rows, (title, *notes) = shown(read_study(make_study(tmp_path, ARMS)))
    assert title == "**a study, simulated storage**"
    assert rows[1] == {
        "variant": "spread",
        "echo": "4x after augment, spread, buffer 512",
        "fresh examples": "1,250 (0.31x)",
        "updates": "500 (1.25x)",
        "seconds": "62.5 (0.31x)",
        "final loss": "0.9900",
        "best loss": "0.9900",
        "idle": "75%",
        "R": "4.00",
        "repeat's value": "0.73",
    }
    assert (rows[0]["echo"], rows[0]["repeat's value"]) == ("none", "—")
    costs = [rows[2][name] for name in ("fresh examples", "updates", "seconds")]
    assert costs == ["not in 500", "not in 200", "not in 100.0"]
    assert "- batch_echo did not reach the target; its best was 3.5." in notes
    assert "- Target: eval loss at most 1, evaluated every 100 updates." in notes
    assert "- Simulated storage: 2.5 ms a read (constant)." in notes


def test_nothing_is_relative_where_the_baseline_failed(tmp_path, shown):
    baseline = make_run(tmp_path / "baseline", losses=(4.0, 2.0))
    runs = [baseline, make_run(tmp_path / "spread", **ARMS["spread"])]
    costs = ("fresh examples", "updates", "seconds")
    rows, _ = shown(read_runs(runs))
    assert [rows[-1][name] for name in costs] == ["1,250", "500", "62.5"]


@pytest.mark.parametrize(
    ("facts", "cells"),
    [
        ({"losses": (3.0, 1.25, 2.00049)}, {"final": "2.000", "best": "1.250"}),
        ({"losses": (math.nan,)}, {"final": "—", "best": "—", "updates": "100"}),
        # A step was faster than the one that was timed.
        ({"idle_fraction": -0.04}, {"idle": "0%", "fresh examples": "3,000"}),
        ({"R": None, "idle_fraction": None}, {"idle": "—", "R": "—"}),
    ],
)
def test_without_a_target_the_costs_are_those_of_the_run(tmp_path, shown, facts, cells):
    run = make_run(tmp_path / "baseline", target=0.0, **facts)
    (row,), notes = shown(read_runs([run]))
    row |= {"final": row["final loss"], "best": row["best loss"]}
    assert row | cells == row
    assert any("The runs had no target" in note for note in notes)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"synthetic_data": True}, "Synthetic data: the examples were made by a prog"),
        (
            {"cores": 1},
            "One CPU core: the input pipeline takes its time from the steps",
        ),
        ({"rows_lost": 2}, "arm lost 2 rows of metrics.jsonl to damage"),
        ({"mode": "max"}, "eval loss at least 1"),
    ],
)
def test_notes_say_what_a_reader_must_know(tmp_path, shown, facts, said):
    baseline = make_run(tmp_path / "baseline", mode=facts.get("mode", "min"))
    _, notes = shown(read_runs([baseline, make_run(tmp_path / "arm", **facts)]))
    assert any(said in note for note in notes)


def test_a_last_line_that_is_half_written_is_left_out_and_said(tmp_path, shown):
    folder = make_run(tmp_path / "arm", losses=(3.0, 1.0, 2.0), rows=6)
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[:-9])
    study = read_runs([folder])
    assert [row["eval_loss"] for row in study.runs[0].evals] == [3.0, 1.0]
    said = "arm: the last line of metrics.jsonl is half written, and is left out"
    assert any(said in note for note in shown(study)[1])
    path.write_bytes(b"".join(lines[:5])[:-9])
    with pytest.raises(StudyError, match="holds 4 rows of the 6"):
        read_runs([folder])


def test_the_table_of_the_readme_is_that_of_its_five_runs():
    text = (RESULTS.parent / "README.md").read_text()
    said = re.findall(r"(?m)^\| .*? \| (0\.\d.*) \|$", text)
    days = {
        "quickstart_heat": ("fresh", "updates", "seconds"),
        "quickstart_heat_again": ("seconds",),
    }
    found: dict[str, list[str]] = {name: [] for name in ARMS_OF_README}
    for folder, costs in days.items():
        studies = [read_study(RESULTS / folder / str(seed)) for seed in range(5)]
        assert [run.name for run in studies[0].runs][1:] == list(ARMS_OF_README)
        for name, cost in itertools.product(ARMS_OF_README, costs):
            of = f"{cost}_to_target"
            ratios = sorted(
                next(r for r in study.runs if r.name == name).summary[of]
                / study.baseline.summary[of]
                for study in studies
            )
            median, ends = statistics.median(ratios), (ratios[0], ratios[-1])
            found[name].append(f"{median:.2f} ({ends[0]:.2f}–{ends[1]:.2f})")  # noqa: RUF001
    assert said == [" | ".join(cells) for cells in found.values()]
