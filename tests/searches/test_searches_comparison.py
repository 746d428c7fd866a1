"""Studies that searched, read back and compared: against hand-computed numbers."""

import json
import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_folders import COSTS, make_study, trial

from echo_jax.cli import main
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import read_json, write_json
from echo_jax.searches import best_arms as best_arms_module
from echo_jax.searches import figures
from echo_jax.searches.best_arms import best_arms, best_arms_table
from echo_jax.searches.comparison import read_search
from echo_jax.searches.space import Axis, Space
from echo_jax.searches.statistics import mean_interval
from echo_jax.searches.table import headings, notes, rows
from echo_jax.searches.trials import Unit, best_of, crossing, write_unit
from echo_jax.studies.runs import StudyError

RESULTS = Path(__file__).parents[2] / "results"


def test_ratios_are_geometric_means_over_pairs_with_their_interval(tmp_path):
    search = read_search(make_study(tmp_path))
    assert [arm.name for arm in search.arms] == ["baseline", "spread"]
    spread = search.arms[1]
    logs = np.log(COSTS["spread"]) - np.log(COSTS["baseline"])
    assert spread.updates.value == pytest.approx(math.exp(logs.mean()))
    assert spread.fresh.value == pytest.approx(math.exp(logs.mean()) / 4)
    assert spread.updates.low < spread.updates.value < spread.updates.high
    # At a quarter of the reads: the same interval, four times smaller.
    for one, other in zip(spread.fresh, spread.updates, strict=True):
        assert one == pytest.approx(other / 4)
    assert search.arms[0].fresh is None and not spread.is_bound
    assert spread.expected_best(1) == 101 * 8
    assert spread.best_scores == [101 * 8] * 2 and spread.infeasible == 0
    assert spread.n == "2 x 3"


def test_the_table_says_what_each_arm_needed(tmp_path):
    search = read_search(make_study(tmp_path))
    names = headings(search)
    table = [dict(zip(names, row, strict=True)) for row in rows(search)]
    assert table[1]["expected best of 1"] == table[1]["best of searches"][:3] == "808"
    assert table[1]["tuned"] == "lr 0.001" and table[1]["published"] == "0.31"
    mean = np.mean(COSTS["spread"]) * 8
    assert table[1]["fresh examples"] == f"{mean:,.0f}"
    # At R = 1 the updates decide, at R = 8 the reads.
    updates = np.mean(COSTS["spread"]) / np.mean(COSTS["baseline"])
    assert table[1]["s at R=1"] == f"{updates:.2f}"
    assert table[1]["s at R=8"] == f"{updates / 4:.2f}"
    assert any("each arm: 2, of 2 points" in note for note in notes(search))


def test_the_table_says_how_many_searches_have_their_best_at_the_edge(tmp_path):
    folder = make_study(tmp_path)
    tried = [trial(k, 99 + k, 4, {"optim.lr": 9.9e-3 / (k + 1)}) for k in range(2)]
    # Of the two the other search found the better point.
    tried = [replace(row, score=row.score + 100) for row in tried]
    write_unit(folder, Unit("spread", "search", 1), "", tried)
    search = read_search(folder)
    assert (
        rows(search)[1][1] == "lr 0.001 (*1 of 2)" and rows(search)[0][1] == "lr 0.001"
    )
    assert any("*1 of 3: of so many searches" in note for note in notes(search))


def test_a_stream_that_missed_the_target_counts_with_what_it_read(tmp_path):
    costs = {**COSTS, "spread": [[105, 120, 0], [95, 100, 104]]}
    search = read_search(make_study(tmp_path, costs))
    spread = search.arms[1]
    expected = np.log([105, 120, 130, 95, 100, 104]) - np.log(
        np.ravel(COSTS["baseline"])
    )
    assert spread.is_bound
    assert spread.updates.value == pytest.approx(math.exp(expected.mean()))
    assert any("missed the target on 1 of 6" in note for note in notes(search))
    assert rows(search)[1][headings(search).index("fresh, ratio")].startswith("≥ ")


def test_without_a_target_the_last_values_are_subtracted(tmp_path):
    folder = make_study(tmp_path, target=0.0)
    for repeat in range(2):
        for arm, final in (("baseline", 2.0), ("spread", 1.75)):
            unit = Unit(arm, "confirm", repeat)
            row = replace(trial(0, 100, 1, {"optim.lr": 1e-3}), final=final)
            found = [replace(row, number=k) for k in range(3)]
            write_unit(folder, unit, "", found)
    search = read_search(folder)
    assert search.arms[1].final == (-0.25, -0.25, -0.25)
    assert search.arms[1].fresh is None
    assert "final less the baseline's" in headings(search)


@pytest.mark.parametrize(
    ("below", "verdict"), [(0.5, "It is: "), (0.1, "It is not"), (0.258, "Nobody can")]
)
def test_what_would_show_an_expectation_to_be_wrong_is_judged(tmp_path, below, verdict):
    given = {"says": "so", "arm": "spread", "over": "baseline", "below": below}
    search = read_search(make_study(tmp_path, falsifiers=[given]))
    (found,) = search.falsifiers
    assert found.ratio == search.arms[1].fresh
    line = notes(search)[-1]
    assert f'"so", if spread / baseline is below {below:.3g}. {verdict}' in line


def test_the_command_writes_the_table_the_figures_and_the_page(tmp_path, capsys):
    folder = make_study(tmp_path / "study")
    assert main(["report", str(folder), "--workdir", str(tmp_path / "report")]) == 0
    names = {path.name for path in (tmp_path / "report").iterdir()}
    figures = {
        f"{n}.{kind}" for n in ("curves", "ratios", "trials") for kind in ("png", "svg")
    }
    assert names == figures | {"table.md", "report.html"}
    assert "spread" in capsys.readouterr().out
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<svg") == 3 and "prefers-color-scheme: dark" in page


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("score"),
        lambda row: row.update(outcome="won"),
        lambda row: row.update(number=7),
        lambda row: row["values"].pop(),
        lambda row: row.update(updates=["0", 1, 2]),
        lambda row: row.update(point=3),
    ],
)
def test_a_damaged_file_of_trials_is_refused(tmp_path, change):
    folder = make_study(tmp_path)
    row = asdict(trial(0, 100, 1, {"optim.lr": 1e-3}))
    change(row)
    path = tmp_path / "trials" / "baseline.search-0.json"
    path.write_text(json.dumps({"made_of": "", "trials": [row]}))
    with pytest.raises(StudyError, match=r"baseline\.search-0\.json is damaged"):
        read_search(folder)


def test_the_page_says_on_what_the_trials_were_made(tmp_path):
    folder = make_study(tmp_path)
    unit, made = Unit("spread", "confirm", 0), {"python": "3.11.7", "commit": "abc"}
    trials = [trial(0, 100, 4, {"optim.lr": 1e-3})]
    write_unit(folder, unit, "", trials, [made, {**made, "commit": "def"}])
    assert [each["commit"] for each in read_search(folder).environments] == [
        "abc",
        "def",
    ]
    assert main(["report", str(tmp_path)]) == 0
    assert (
        "&quot;commit&quot;: &quot;def&quot;" in (tmp_path / "report.html").read_text()
    )


def test_a_flipped_bit_in_a_file_of_trials_is_seen(tmp_path):
    folder = make_study(tmp_path)
    path = tmp_path / "trials" / "spread.confirm-1.json"
    path.write_text(path.read_text().replace("95", "94", 1))
    with pytest.raises(StudyError, match="checksum that it was written with"):
        read_search(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m["search"].update(repeats=10**12),
            "'search.repeats' is 1000000000",
        ),
        (lambda m: m["search"].update(repeats=0), "'search.repeats' is 0"),
        (lambda m: m.update(arms=["baseline", 3]), "its arms are no names"),
        (lambda m: m.update(arms=["../../x"]), "'..' is no name of something in"),
        (lambda m: m.update(falsifiers=["no"]), "of its falsifiers, one is none"),
        (lambda m: m.update(falsifiers=[{"says": "so"}]), "falsifiers, it lacks 'arm'"),
        (
            lambda m: m.update(paper={"spread": "a third"}),
            "'paper.spread' is no number",
        ),
        (lambda m: m["base_config"].update(batch_size=0), "batch_size' is below 1"),
        (lambda m: m["search"].update(space={"seed": "log:1:2"}), "of another space"),
        (lambda m: m["search"].update(space={"seed": "log"}), "is no space to search"),
    ],
)
def test_a_stranger_s_study_is_refused_in_a_sentence(tmp_path, capsys, change, said):
    folder = make_study(tmp_path)
    metadata = json.loads((tmp_path / "study.json").read_text())
    del metadata["crc32"]
    change(metadata)
    (tmp_path / "study.json").write_text(json.dumps(metadata))
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_target_that_is_met_before_the_first_update_counts_as_one(tmp_path):
    folder = make_study(tmp_path)
    for repeat in range(2):
        met = replace(
            trial(0, 100, 4, {"optim.lr": 1e-3}), updates_to_target=0, fresh_to_target=0
        )
        found = [replace(met, number=k) for k in range(3)]
        write_unit(folder, Unit("spread", "confirm", repeat), "", found)
    search = read_search(folder)
    expected = -np.log(COSTS["baseline"]).mean()
    assert search.arms[1].updates.value == pytest.approx(math.exp(expected))
    assert len(rows(search)) == 2


def test_a_study_without_trials_is_refused(tmp_path):
    folder = make_study(tmp_path, {"baseline": []})
    with pytest.raises(StudyError, match="holds no trials yet"):
        read_search(folder)


@given(st.integers(1, 33), st.integers(0, 5))
def test_more_points_begin_with_those_of_fewer(number, seed):
    space = Space.parse({"optim": {"lr": "log:1e-4:1e-2", "b1": "log1m:0.01:0.5"}})
    points = space.points(number, seed)
    assert points == space.points(64, seed)[:number]
    assert len({point["optim.lr"] for point in points}) == number
    assert all(1e-4 <= point["optim.lr"] <= 1e-2 for point in points)
    assert all(0.5 <= point["optim.b1"] <= 0.99 for point in points)


@pytest.mark.parametrize(
    ("text", "low", "middle", "edge"),
    [
        ("linear:-1:3", -1.0, 1.0, 2.7),
        ("log:1e-4:1", 1e-4, 1e-2, 0.5),
        ("log1m:0.01:1", 0.99, 0.9, 0.989),
    ],
)
def test_an_axis_is_even_on_its_scale(text, low, middle, edge):
    axis = Axis.parse(text)
    assert axis.at(0.0) == low and axis.at(0.5) == middle
    assert axis.is_edge(edge) and not axis.is_edge(middle)


@pytest.mark.parametrize(
    "text", ["log:0:1", "log:1:0.1", "cubic:0:1", "log:1", "log:a:b", "choice:", "3"]
)
def test_what_is_no_space_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"optim\.lr: .* is no space to search; give"):
        Space.parse({"optim": {"lr": text}})


def test_the_first_of_equal_scores_is_best():
    tried = [trial(k, u, 1, {}, reached=r) for k, u, r in [(0, 9, False), (1, 5, True)]]
    assert best_of(tried) is tried[1]
    assert best_of([*tried, trial(2, 5, 1, {})]) is tried[1]
    assert best_of(tried[:1]) is None


@pytest.mark.parametrize(
    ("values", "target", "mode", "expected"),
    [
        ([5.0, 3.0, 2.0], 2.25, "min", (17.5, 560.0)),
        ([0.1, 0.3, 0.5], 0.4, "max", (15.0, 480.0)),
        ([5.0, None, 2.0], 2.25, "min", (20.0, 640.0)),
        ([2.0, 3.0, 1.0], 2.25, "min", (0.0, 0.0)),
        ([5.0, 2.25, 3.0], 2.25, "min", (10.0, 320.0)),
        ([5.0, 4.0, 3.0], 2.25, "min", None),
    ],
)
def test_a_target_is_met_on_the_line_between_two_evaluations(
    values, target, mode, expected
):
    assert crossing([0, 10, 20], [0, 320, 640], values, target, mode) == expected


def test_the_fastest_arm_follows_from_the_counts_at_every_ratio(tmp_path, capsys):
    folder = make_study(tmp_path / "a")
    logs = np.log(COSTS["spread"]) - np.log(COSTS["baseline"])
    at_1, at_2, at_8 = best_arms(read_search(folder), [1.0, 2.0, 8.0])
    # At R = 1 a repeat costs what a fresh example costs, and is worth less.
    assert at_1.name == "baseline" and tuple(at_1.speedup) == (1.0, 1.0, 1.0)
    assert at_1.alike == (["spread"] if -mean_interval(logs).low >= 0 else [])
    # At R = 2 the baseline waits, and an echo of 4 does not; at R = 8 both do.
    assert at_2.name == at_8.name == "spread" and not at_8.alike
    assert at_2.speedup.value == pytest.approx(2 / math.exp(logs.mean()))
    assert at_8.speedup.value == pytest.approx(4 / math.exp(logs.mean()))
    interval = mean_interval(-logs).exp()
    assert at_8.speedup.low == pytest.approx(4 * interval.low)

    make_study(tmp_path / "b")
    command = ["report", *(str(tmp_path / name) for name in "ab")]
    assert main([*command, "--workdir", str(tmp_path / "c")]) == 0
    assert "no echo" in capsys.readouterr().out
    table = (tmp_path / "c" / "table.md").read_text()
    assert table.count("| A study | spread | 8 | 3.8") == 2
    assert {"best.png", "best.svg", "report.html"} <= {*os.listdir(tmp_path / "c")}


def test_trainings_by_a_clock_are_points_at_the_r_that_their_baseline_saw(
    tmp_path, monkeypatch
):
    points = []
    draw = best_arms_module._draw
    monkeypatch.setattr(
        best_arms_module, "_draw", lambda f, p: points.extend(p) or draw(f, p)
    )
    clocked = [RESULTS / "seconds" / f"R4_seed{seed}" for seed in range(2)]
    command = ["report", str(make_study(tmp_path / "a")), *map(str, clocked)]
    assert main([*command, "--workdir", str(tmp_path / "c")]) == 0
    # As results/seconds/R4_seed*/table.md have it.
    assert points == [
        (pytest.approx(2.70, abs=0.005), pytest.approx(1 / 0.33, rel=0.02)),
        (pytest.approx(2.46, abs=0.005), pytest.approx(1 / 0.37, rel=0.02)),
    ]
    assert "by a clock" in (tmp_path / "c" / "best.svg").read_text()


def test_a_training_by_a_clock_needs_a_baseline_that_met_its_target(tmp_path, capsys):
    shutil.copytree(RESULTS / "seconds" / "R4_seed0", tmp_path / "b")
    file = run_folder(tmp_path / "b") / "study.json"
    metadata = read_json(file)
    metadata["arms"].remove("baseline")
    write_json(file, metadata)
    command = ["report", str(make_study(tmp_path / "a")), str(tmp_path / "b")]
    assert main([*command, "--workdir", str(tmp_path / "c")]) == 2
    assert "has no arm 'baseline' that met a target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axis", "bounds"),
    [("log:1e-4:1e-2", [1e-4, 1e-2]), ("log1m:0.05:0.8", [0.95, 0.2])],
)
def test_the_trials_are_drawn_between_the_bounds_of_the_search(tmp_path, axis, bounds):
    search = read_search(make_study(tmp_path))
    space = Space.parse({"optim": {"lr": axis}})
    search = replace(search, protocol=replace(search.protocol, space=space))
    (ax,) = figures._trials(search).axes
    drawn = [line.get_xdata() for line in ax.lines if line.get_linestyle() == "--"]
    assert [x[0] for x in drawn] == pytest.approx(bounds)


@pytest.mark.parametrize(("size", "later"), [(64, "8"), (32, None)])
def test_studies_of_several_batch_sizes_say_whether_the_fastest_arm_rises(
    tmp_path, size, later
):
    # With batches of 32 it needs nine times the updates, with larger ones hardly more.
    slow = [[9 * updates for updates in row] for row in COSTS["spread"]]
    make_study(tmp_path / "a", {**COSTS, "spread": slow})
    folder = make_study(tmp_path / "b")
    metadata = json.loads((tmp_path / "b" / "study.json").read_text())
    del metadata["crc32"]
    metadata["base_config"]["batch_size"] = size
    write_json(folder / "study.json", metadata)
    searches = [read_search(tmp_path / name) for name in "ba"]
    found = [(each, best_arms(each, [1.0, 2.0, 8.0])) for each in searches]
    said = best_arms_table(found).caption.plain
    wanted = f"batches of 32 to {size} it surely comes later at R = {later}, and surely"
    assert (wanted in said, "Falsifier" in said) == (bool(later), bool(later))


def test_a_study_without_a_fastest_arm_is_refused_in_a_sentence(tmp_path, capsys):
    make_study(tmp_path / "a")
    make_study(tmp_path / "b", {"spread": COSTS["spread"]})
    command = ["report", *(str(tmp_path / name) for name in "ab")]
    assert main([*command, "--workdir", str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert "no arm 'baseline'" in said and said.count("\n") == 1
