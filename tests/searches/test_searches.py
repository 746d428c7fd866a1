"""Studies that searched: their plan, and their comparison by hand-computed numbers."""

import html
import itertools
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from echo_jax.cli import main
from echo_jax.files import run_folder
from echo_jax.searches import (
    LostWorkerError,
    Protocol,
    Searched,
    Space,
    Trial,
    Unit,
    VariantResult,
    best_of,
    best_variants,
    crossing,
    expected_best,
    fastest_report,
    mean_interval,
    mean_points,
    read_search,
    run_search,
    search_report,
    speedup_by_clock,
    write_unit,
)
from echo_jax.studies import StudyError, read_study

RESULTS = Path(__file__).parents[2] / "results"
LR = {"optim.lr": 1e-3}
BASE = {
    "workload": "lm",
    "batch_size": 32,
    "model": {"d_model": 8},
    "data": {"source": "stdlib"},
    "optim": {"name": "adamw", "schedule": "constant", "warmup_updates": 5},
}
# Updates to the target, by variant: of two searches' best points, on three streams.
COSTS = {
    "baseline": [[100, 110, 120], [90, 105, 100]],
    "spread": [[105, 120, 118], [95, 100, 104]],
}
LOGS = np.log(COSTS["spread"]) - np.log(COSTS["baseline"])
FACTORS = {"baseline": 1, "spread": 4}


def trial(number, cost, factor=1, point=LR, *, reached=True, **facts):
    fresh = cost * 32 / factor
    met = {"score": fresh, "updates_to_target": cost, "fresh_to_target": fresh}
    known = {
        **{"stream": number, "outcome": "cut", "limit": 1000, "best": 1.9},
        **{"final": 1.95, "updates": [0, 60, 130], "values": [5.0, 3.0, 1.95]},
        "fresh": [0, 60 * 32 // factor, 130 * 32 // factor],
        **({"outcome": "reached", **met} if reached else {}),
    }
    return Trial(number=number, point=point, **{**known, **facts})


@pytest.fixture
def make(tmp_path):
    """Makes a study that searched."""

    def make(name="a", costs=COSTS, *, target=2.0, falsifiers=()):
        space = {"optim": {"lr": "log:1e-4:1e-2"}}
        metadata = {
            "name": "A study",
            "arms": list(costs),
            "base_config": {**BASE, "target": target},
            "search": {"space": space, "points": 2, "repeats": 2, "seed": 0},
            "confirm": {"streams": 3},
            "stop": {"cut": 2.0},
            "falsifiers": list(falsifiers),
            "paper": {"spread": 0.312},
        }
        (tmp_path / name / "trials").mkdir(parents=True)
        (tmp_path / name / "study.json").write_text(json.dumps(metadata))
        folder = run_folder(tmp_path / name)
        for variant, searches in costs.items():
            factor = FACTORS[variant]
            for repeat, streams in enumerate(searches):
                points = {"optim.lr": 9.9e-3}, {"optim.lr": 1e-3 * (repeat + 1)}
                tried = [trial(0, 300, factor, points[0], reached=False)]
                tried.append(trial(1, 101, factor, points[1]))
                write_unit(folder, Unit(variant, "search", repeat), "", tried)
                found = [
                    trial(k, updates or 500, factor, points[1], reached=bool(updates))
                    for k, updates in enumerate(streams)
                ]
                write_unit(folder, Unit(variant, "confirm", repeat), "", found)
        return folder

    return make


def change(folder, by):
    """Changes study.json as a stranger would."""
    file = Path(str(folder)) / "study.json"
    metadata = json.loads(file.read_text())
    by(metadata)
    file.write_text(json.dumps(metadata))


def test_ratios_are_geometric_means_over_pairs_with_their_interval(make):
    search = read_search(make())
    assert [variant.name for variant in search.variants] == ["baseline", "spread"]
    baseline, spread = search.variants
    assert spread.updates.value == pytest.approx(math.exp(LOGS.mean()))
    assert spread.updates.low < spread.updates.value < spread.updates.high
    # At a quarter of the reads: the same interval, four times smaller.
    assert [*spread.fresh] == pytest.approx([end / 4 for end in spread.updates])
    assert baseline.fresh is None and not spread.is_bound
    assert spread.expected_best(1) == 101 * 8
    assert spread.best_scores == [101 * 8] * 2 and spread.infeasible == 0


def test_the_command_says_what_each_arm_needed(make, tmp_path, capsys):
    folder = make()
    unit, made = Unit("spread", "confirm", 0), {"python": "3.11.7", "commit": "abc"}
    found = [trial(k, updates, 4) for k, updates in enumerate(COSTS["spread"][0])]
    write_unit(folder, unit, "", found, [made, {**made, "metric": "perplexity"}])
    out = tmp_path / "out"
    assert main(["report", str(folder), "--workdir", str(out)]) == 0
    assert "spread" in capsys.readouterr().out
    drawn = {"curves", "ratios", "trials"}
    names = {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == {*names, "table.md", "report.html"}
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 3 and "prefers-color-scheme: dark" in page
    assert page.count("&quot;commit&quot;: &quot;abc&quot;") == 2
    assert "evaluation perplexity" in texts(out, "curves")


def test_without_a_target_published_differences_are_beside_those_measured(
    make, tmp_path
):
    lines = search_report(read_search(make(target=0.0))).markdown().splitlines()
    names, _, *variants = [line.split(" | ") for line in lines if line.startswith("|")]
    at = names.index("published")
    assert names[at - 1] == "final minus the baseline's"
    assert [variant[at] for variant in variants] == ["—", "+0.312"]
    change(tmp_path / "a", lambda m: m.update(paper={}))
    assert "published" not in search_report(read_search(tmp_path / "a")).markdown()


def test_streams_that_missed_the_target_or_met_it_at_once_are_counted(make, tmp_path):
    # The first met it before its first update, which counts as one.
    costs = {**COSTS, "spread": [[1e-9, 120, 0], [95, 100, 104]]}
    search = read_search(make("a", costs))
    logs = np.log([1, 120, 130, 95, 100, 104]) - np.log(np.ravel(COSTS["baseline"]))
    assert search.variants[1].updates.value == pytest.approx(math.exp(logs.mean()))
    table = search_report(search).markdown()
    assert "| ≥ 0." in table and "missed the target with 1 of 6" in table


@pytest.mark.parametrize(
    "change",
    [
        *({"scores": 1}, {"outcome": "won"}, {"number": 7}, {"values": [5.0]}),
        {"point": 3},
    ],
)
def test_a_damaged_file_of_trials_is_refused(make, tmp_path, change):
    folder = make()
    path = tmp_path / "a/trials/baseline.search-0.json"
    rows = [asdict(trial(0, 100)) | change]
    path.write_text(json.dumps({"made_of": "", "trials": rows}))
    with pytest.raises(StudyError, match=r"baseline\.search-0\.json"):
        read_search(folder)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (lambda m: m["search"].update(repeats=10**12), "'search.repeats' is 100000000"),
        (lambda m: m.update(arms=["../../x"]), "its 'arms' are not names"),
        (
            lambda m: m.update(falsifiers=[{"says": "so"}]),
            "'falsifiers', it lacks 'arm'",
        ),
        (lambda m: m.update(paper={"spread": "0"}), "'paper.spread' is not a number"),
        (lambda m: m["base_config"].update(batch_size=0), "batch_size' is below 1"),
        (lambda m: m["search"].update(space={"seed": "log:1:2"}), "of another space"),
        (lambda m: m.update(arms=["other"]), "holds no trials yet"),
    ],
)
def test_a_stranger_s_study_is_refused_in_a_sentence(make, capsys, by, said):
    change(folder := make(), by)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@settings(max_examples=25)
@given(st.integers(1, 33), st.integers(0, 5))
def test_more_points_begin_with_those_of_fewer(number, seed):
    space = Space.parse({"optim": {"lr": "log:1e-4:1e-2", "b1": "log1m:0.01:0.5"}})
    points = space.points(number, seed)
    assert points == space.points(64, seed)[:number]
    assert len({point["optim.lr"] for point in points}) == number
    assert all(1e-4 <= point["optim.lr"] <= 1e-2 for point in points)
    assert all(0.5 <= point["optim.b1"] <= 0.99 for point in points)


def test_an_axis_is_even_on_its_scale():
    for text, low, middle, edge in (
        ("linear:-1:3", -1.0, 1.0, 2.7),
        ("log:1e-4:1", 1e-4, 1e-2, 0.5),
        ("log1m:0.01:1", 0.99, 0.9, 0.989),
    ):
        axis = Space.parse({"lr": text}).axes["lr"]
        assert axis.at(0.0) == low and axis.at(0.5) == middle
        assert axis.is_edge(edge) and not axis.is_edge(middle)


@pytest.mark.parametrize(
    "text", ["log:0:1", "log:1:0.1", "cubic:0:1", "log:1", "log:a:b", "choice:", "3"]
)
def test_what_is_no_space_is_refused_with_an_example(text):
    with pytest.raises(
        ValueError, match=r"optim\.lr: .* is not a space to search; give"
    ):
        Space.parse({"optim": {"lr": text}})


class Broken:
    """A variant whose loader has lost a process."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        raise BrokenPipeError("the loader")


@pytest.mark.slow
def test_a_trial_that_fails_ends_the_search_with_its_error(tmp_path):
    protocol = Protocol(("a",), Space.parse({"seed": "choice:1,2"}), 1, 1, 1, 0, 2.0)
    with pytest.raises(LostWorkerError, match="BrokenPipeError: the loader"):
        run_search(protocol, {"a": Broken()}, run_folder(tmp_path), jobs=1)


def test_the_first_of_equal_scores_is_best():
    tried = [trial(0, 9, reached=False), trial(1, 5)]
    assert best_of(tried) is best_of([*tried, trial(2, 5)]) is tried[1]
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


def test_the_fastest_arm_follows_from_the_counts_at_every_ratio(make):
    at_1, at_2, at_8 = best_variants(read_search(make()), [1.0, 2.0, 8.0])
    # At R = 1 a repeat costs what a fresh example costs, and is worth less.
    assert at_1.name == "baseline" and tuple(at_1.speedup) == (1.0, 1.0, 1.0)
    interval = mean_interval(-LOGS).exp()
    assert at_1.alike == (["spread"] if interval.high >= 1 else [])
    # At R = 2 the baseline waits, and an echo of 4 does not; at R = 8 both do.
    assert at_2.name == at_8.name == "spread" and not at_8.alike
    assert at_2.speedup.value == pytest.approx(2 / math.exp(LOGS.mean()))
    assert [*at_8.speedup] == pytest.approx([4 * end for end in interval])


def test_trainings_by_a_clock_are_points_beside_the_fastest_arms(
    make, tmp_path, capsys
):
    clocked = [str(RESULTS / "seconds" / f"R4_seed{seed}") for seed in range(2)]
    folders = [str(make("a")), str(make("b")), *clocked]
    out = tmp_path / "c"
    assert main(["report", *folders, "--workdir", str(out)]) == 0
    assert "no echo" in capsys.readouterr().out
    assert (out / "table.md").read_text().count("| A study | spread | 8 | 3.8") == 2
    assert {"best.png", "report.html"} <= {path.name for path in out.iterdir()}
    assert "measured seconds, at the baseline's measured R" in texts(out, "best")
    # As results/seconds/R4_seed*/table.md have it.
    points = [speedup_by_clock(read_study(folder)) for folder in clocked]
    assert points == [
        (pytest.approx(2.70, abs=0.005), pytest.approx(1 / 0.33, rel=0.02)),
        (pytest.approx(2.46, abs=0.005), pytest.approx(1 / 0.37, rel=0.02)),
    ]


@pytest.mark.parametrize(("size", "later"), [(64, "8"), (32, None)])
def test_studies_of_several_batch_sizes_say_whether_the_fastest_arm_rises(
    make, size, later
):
    # With batches of 32 it needs nine times the updates, with larger ones hardly more.
    slow = [[9 * updates for updates in row] for row in COSTS["spread"]]
    folders = [make("b"), make("a", {**COSTS, "spread": slow})]
    change(folders[0], lambda m: m["base_config"].update(batch_size=size))
    found = [(s, best_variants(s, [1.0, 2.0, 8.0])) for s in map(read_search, folders)]
    said = fastest_report(found).markdown()
    wanted = f"batches of 32 to {size} it surely comes later at R = {later}, and surely"
    assert (wanted in said, "Prediction" in said) == (bool(later), bool(later))


def texts(folder, name):
    """What matplotlib has drawn, which it notes as comments."""
    svg = (folder / f"{name}.svg").read_text()
    return [html.unescape(x.strip()) for x in re.findall(r"<!--(.*?)-->", svg, re.S)]


def mean_of(search, *curves):
    """The mean curve, by updates, of streams of (updates, values) each."""
    found = [
        trial(0, 1, updates=updates, fresh=[32 * u for u in updates], values=values)
        for updates, values in curves
    ]
    variant = VariantResult("arm", [Searched([], None, found)], None, None, None, False)
    return mean_points(
        replace(search, variants=[variant]), variant, lambda updates, fresh: updates
    )


def test_a_mean_curve_to_a_target_ends_at_the_mean_cost_of_it(make):
    search = read_search(make())
    points = mean_of(search, ([0, 10], [4.0, 2.0]), ([0, 20, 30], [4.0, 3.0, 1.0]))
    # Of 2.0 the second stream is at 25.
    assert points[0] == (0, 4.0) and points[-1] == (pytest.approx(17.5), 2.0)
    # What one of them has not met has no mean.
    points = mean_of(search, ([0, 10], [4.0, 2.0]), ([0, 20], [4.0, 3.0]))
    assert points[-1][1] >= 3.0
    # Without a target it is the mean of the values, up to the end of the shortest.
    search = read_search(make("b", target=0.0))
    points = mean_of(search, ([0, 10], [4.0, 2.0]), ([0, 30, 40], [5.0, 3.0, 1.0]))
    assert points == [(0, 4.5), (20, 2.5)]


def test_an_interval_is_as_long_as_student_s_and_leans_as_that_of_scipy_does():
    numbers = np.array([0.1, 0.4, 0.2, 0.3, 0.25, 0.8, 0.35, 0.15])
    found = mean_interval(numbers[None])
    mean = numbers.mean()
    assert found.value == pytest.approx(mean)
    length = 2 * stats.t.ppf(0.975, 7) * stats.sem(numbers)
    assert found.high - found.low == pytest.approx(length)
    low, high = stats.bootstrap(
        (numbers,),
        lambda x, axis: x.mean(axis=axis),
        n_resamples=4999,
        method="BCa",
        rng=np.random.default_rng(1),
    ).confidence_interval
    leans = (high - mean) / (mean - low)
    assert leans > 1.3
    assert (found.high - mean) / (mean - found.low) == pytest.approx(leans, rel=0.1)
    # Streams alone, or searches alone: the same numbers; and it follows them.
    assert mean_interval(numbers[:, None]) == found
    expected = pytest.approx([7 * end + 1e3 for end in found])
    assert [*mean_interval(7 * numbers[None] + 1e3)] == expected
    # One number has no interval, and equal ones have none that is wider.
    assert np.isnan(mean_interval([[0.5]])[1:]).all()
    assert mean_interval([[0.5, 0.5], [0.5, 0.5]]) == (0.5, 0.5, 0.5)
    assert found.exp().value == pytest.approx(math.exp(mean))


def test_searches_and_streams_count_with_the_degrees_of_freedom_of_their_own():
    def length(table):
        found = mean_interval(table)
        return (found.high - found.low) / 2

    # Without a rest, so that both variances are seen as they are.
    searches, streams = np.array([[-0.3], [0.1], [0.2]]), np.array([0, 0.1, 0.3, 0.4])
    of_searches = stats.t.ppf(0.975, 2) * stats.sem(searches.ravel())
    of_streams = stats.t.ppf(0.975, 3) * stats.sem(streams)
    expected = pytest.approx(math.hypot(of_searches, of_streams))
    assert length(searches + streams) == expected
    # What streams differ by, as it is left to chance, is in the searches already.
    apart = np.array([[0.0, 0.1], [0.5, 0.4], [1.0, 1.1], [0.2, 0.2]])
    alone = stats.t.ppf(0.975, 3) * stats.sem(apart.mean(axis=1))
    assert length(apart) == pytest.approx(alone)
    # Searches that agree by luck are no surer than chance within them allows.
    lucky = np.array([[0.1, -0.1, 0.2, 0.0], [-0.1, 0.1, 0.0, 0.201]])
    rest = lucky - lucky.mean(axis=1, keepdims=True) - lucky.mean(axis=0) + lucky.mean()
    chance = stats.t.ppf(0.975, 3) * math.sqrt((rest**2).sum() / 3 / 8)
    assert length(lucky) == pytest.approx(chance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("searches", "streams", "search", "stream", "noise"),
    [
        (1, 8, 0.0, 0.05, 0.05),
        (3, 8, 0.0, 0.05, 0.05),
        # As of s5's echo_512 and s4_8's lag_4.
        (3, 8, 0.031, 0.006, 0.018),
        (3, 8, 0.096, 0.052, 0.062),
        (5, 16, 0.1, 0.05, 0.05),
    ],
)
def test_an_interval_holds_the_truth_as_often_as_it_says(
    searches, streams, search, stream, noise
):
    rng, held = np.random.default_rng(0), 0

    def variant(of_streams):
        tuned = rng.normal(0, search, (searches, 1))
        own = rng.normal(0, stream, streams)
        return of_streams + tuned + own + rng.normal(0, noise, (searches, streams))

    for _ in range(1000):
        of_streams = rng.normal(0, 0.2, streams)  # The same for both variants.
        found = mean_interval(variant(of_streams) - variant(of_streams))
        held += found.low <= 0 <= found.high
    # Somewhat more often where searches do not differ more than streams.
    assert 930 <= held <= (970 if searches == 1 else 980)


@settings(max_examples=40)
@given(
    st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 7)
)
def test_the_expected_best_is_the_mean_over_all_draws(scores, k):
    k = min(k, len(scores))
    bests = [
        min(found)
        for draw in itertools.combinations(scores, k)
        if (found := [score for score in draw if score is not None])
    ]
    expected = pytest.approx(sum(bests) / len(bests)) if bests else None
    assert expected_best(scores, k) == expected
    with pytest.raises(ValueError, match="must be between 1 and the"):
        expected_best(scores, len(scores) + 1)
