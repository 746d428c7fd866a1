import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from echo_jax.studies.runs import read_run, read_runs, read_study
from echo_jax.studies.table import (
    arm_rows,
    cells,
    headings,
    notes,
    terminal_table,
    write_markdown,
)

# Evaluations every 100 updates of 10 examples. The baseline meets 1.0 after 400
# updates: 4000 fresh examples, 200 s. The arm meets it after 500: it emitted 5000
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


def _text(study) -> str:
    file = io.StringIO()
    Console(width=80, file=file).print(terminal_table(study))
    return file.getvalue()


def test_costs_are_relative_to_the_baseline_exactly(tmp_path, make_study):
    baseline, spread, _ = arm_rows(read_study(make_study(tmp_path, ARMS)))
    assert (baseline.fresh, baseline.updates, baseline.seconds) == (4000, 400, 200.0)
    assert baseline.relative == (1.0, 1.0, 1.0)
    assert baseline.repeat_worth is None
    assert (spread.fresh, spread.updates, spread.seconds) == (1250, 500, 62.5)
    assert spread.relative == (1250 / 4000, 500 / 400, 62.5 / 200)
    assert spread.repeat_worth == 2750 / 3750


def test_an_arm_that_did_not_reach_the_target_says_so(tmp_path, make_study):
    study = read_study(make_study(tmp_path, ARMS))
    row = arm_rows(study)[2]
    assert not row.reached
    assert row.relative is None
    assert row.repeat_worth is None
    assert cells(row)[2:5] == ("not in 500", "not in 200", "not in 100.0")
    assert "batch_echo did not reach the target; its best was 3.5." in notes(study)


def test_nothing_is_relative_to_a_baseline_that_failed(tmp_path, make_study):
    arms = {"baseline": {"losses": (4.0, 2.0)}, "spread": ARMS["spread"]}
    baseline, spread = arm_rows(read_study(make_study(tmp_path, arms)))
    assert not baseline.reached
    assert spread.reached
    assert spread.relative is None
    assert cells(spread)[2:5] == ("1,250", "500", "62.5")


def test_nothing_is_relative_without_a_baseline(tmp_path, make_run):
    study = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    assert [row.relative for row in arm_rows(study)] == [None, None]
    assert "No run is named 'baseline', so nothing is relative to it." in notes(study)


def test_without_a_target_the_costs_are_those_of_the_run(tmp_path, make_run):
    study = read_runs([make_run(tmp_path / "baseline", target=0.0)])
    (row,) = arm_rows(study)
    assert (row.fresh, row.updates, row.seconds) == (3000, 300, 150.0)
    assert cells(row)[2] == "3,000"
    assert any(note.startswith("The runs had no target") for note in notes(study))


def test_cells_match_the_headings(tmp_path, make_study):
    study = read_study(make_study(tmp_path, ARMS))
    _, spread, _ = arm_rows(study)
    assert dict(zip(headings(study), cells(spread), strict=True)) == {
        "arm": "spread",
        "echo": "4x after augment, spread, buffer 512",
        "fresh examples": "1,250 (0.31x)",
        "updates": "500 (1.25x)",
        "seconds": "62.5 (0.31x)",
        "final loss": "0.9900",
        "best loss": "0.9900",
        "idle": "75%",
        "R": "4.00",
        "repeat's worth": "0.73",
    }


def test_steps_faster_than_the_timed_one_are_no_negative_idle(tmp_path, make_run):
    study = read_runs([make_run(tmp_path / "arm", idle_fraction=-0.04)])
    (row,) = arm_rows(study)
    assert row.idle_fraction == -0.04
    assert cells(row)[headings(study).index("idle")] == "0%"


def test_every_row_has_the_final_and_the_best_value_without_a_target_too(
    tmp_path, make_run
):
    losses = (3.0, 1.25, 2.00049)
    study = read_runs([make_run(tmp_path / "arm", losses=losses, target=0.0)])
    found = dict(zip(headings(study), cells(arm_rows(study)[0]), strict=True))
    assert (found["final loss"], found["best loss"]) == ("2.000", "1.250")
    study = read_runs([make_run(tmp_path / "nan", losses=(math.nan,), target=0.0)])
    assert cells(arm_rows(study)[0])[5:7] == ("—", "—")


def test_a_note_in_markdown_is_text_whatever_it_names(tmp_path, make_run):
    run = read_run(make_run(tmp_path / "arm", target=0.5))
    study = read_runs([make_run(tmp_path / "arm2")])
    study = replace(study, runs=[replace(run, name="<b>|x")])
    write_markdown(study, tmp_path / "table.md")
    (line,) = [
        line
        for line in (tmp_path / "table.md").read_text().splitlines()
        if "did not reach" in line
    ]
    assert line.startswith("- &lt;b&gt;&#124;x did not reach the target")


@pytest.mark.parametrize(
    ("echo", "words"),
    [
        ({"mode": "fixed", "factor": 1.0}, "none"),
        ({"where": "device"}, "1x after decode, spread, on the device, buffer 512"),
        (
            {"mode": "adaptive", "where": "device", "cap": 3, "factor": 1.0},
            "adaptive up to 3x after decode, on the device, buffer 512",
        ),
        ({"mode": "stochastic", "buffer": 1}, "stochastic after decode"),
    ],
)
def test_modes_and_places_of_an_echo_are_named(tmp_path, make_run, echo, words):
    folder = make_run(tmp_path / "arm")
    summary = json.loads((folder / "summary.json").read_text())
    factor = 1.0 if "mode" in echo else 1.5
    summary["echo"] |= {"after": "decode", "factor": factor, **echo}
    (folder / "summary.json").write_text(json.dumps(summary))
    (row,) = arm_rows(read_runs([folder]))
    assert cells(row)[1] == words.replace("1x", "1.5x")


def test_what_was_not_measured_is_a_dash(tmp_path, make_run):
    folder = make_run(tmp_path / "baseline", R=None, idle_fraction=None)
    (row,) = arm_rows(read_runs([folder]))
    assert cells(row)[7:] == ("—", "—", "—")


def test_notes_say_what_is_simulated(tmp_path, make_run):
    run = make_run(tmp_path / "baseline", synthetic_data=True)
    lines = notes(read_runs([run]))
    assert "Simulated storage: 2.5 ms a read (constant)." in lines
    assert "Synthetic data: the examples were made by a program." in lines
    real = make_run(tmp_path / "real", simulated_storage=False)
    assert not any("imulated" in note for note in notes(read_runs([real])))


@pytest.mark.parametrize(("slowest", "is_told"), [(0.024, False), (0.03, True)])
def test_notes_say_that_the_machine_was_busy(tmp_path, make_run, slowest, is_told):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", t_down_s=slowest)]
    told = [note for note in notes(read_runs(runs)) if note.startswith("A step took")]
    assert [note.split(",")[0] for note in told] == (
        ["A step took 20 to 30 ms"] if is_told else []
    )


def test_the_terminal_table_fits_into_80_columns(tmp_path, make_study):
    text = _text(read_study(make_study(tmp_path, ARMS)))
    lines = text.splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("spread"))
    assert lines[at].split() == [
        *("spread", "1,250", "500", "62.5", "0.9900", "0.9900", "4.00", "0.73")
    ]
    assert lines[at + 1].split() == ["(0.31x)", "(1.25x)", "(0.31x)"]
    assert "final" in text and "75%" not in text and "Idle" not in text
    assert "a study, simulated storage" in text


def test_a_name_in_brackets_is_no_markup(tmp_path, make_run):
    text = _text(read_runs([make_run(tmp_path / "[red]a[bold]")]))
    assert "[red]a[bold]" in text


def test_markdown_holds_every_cell_and_note(tmp_path, make_study):
    study = read_study(make_study(tmp_path, ARMS))
    write_markdown(study, tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "**a study, simulated storage**"
    assert lines[2] == f"| {' | '.join(headings(study))} |"
    assert lines[4] == (
        "| baseline | none | 4,000 (1.00x) | 400 (1.00x) | 200.0 (1.00x) "
        "| 0.9000 | 0.9000 | 75% | 4.00 | — |"
    )
    assert [line[2:] for line in lines if line.startswith("- ")] == notes(study)


def test_markdown_escapes_hostile_names(tmp_path, make_run):
    study = read_runs([make_run(tmp_path / "a|<script>")])
    write_markdown(study, tmp_path / "table.md")
    text = (tmp_path / "table.md").read_text()
    assert "<script>" not in text
    assert "| a&#124;&lt;script&gt; |" in text


def test_the_repeats_are_those_of_the_evaluation_that_met_the_target(
    tmp_path, make_run
):
    # The target is met at the first evaluation, and the run goes on after it.
    baseline = make_run(tmp_path / "baseline", losses=(2.0, 1.0))
    arm = make_run(tmp_path / "arm", factor=2.0, losses=(1.0, 0.9, 0.8))
    row = arm_rows(read_runs([baseline, arm]))[1]
    assert row.repeat_worth == (2000 - 500) / 500
    assert read_run(arm).summary["repeats"] == 1500
