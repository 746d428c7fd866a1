"""The figures of studies that searched: what is drawn where, and what axes say."""

import html
import re
from dataclasses import replace

import pytest
from search_folders import make_study, trial

from echo_jax.searches.comparison import ArmResult, Searched, read_search
from echo_jax.searches.figures import fence, mean_points, write_search_figures
from echo_jax.searches.trials import Unit, read_unit, write_unit


def texts(folder, name):
    """What matplotlib has drawn, which it notes as comments."""
    svg = (folder / f"{name}.svg").read_text()
    return [html.unescape(x.strip()) for x in re.findall(r"<!--(.*?)-->", svg, re.S)]


def arm_of(*curves):
    """An arm of new streams: (updates, values) each, at 32 fresh examples an update."""
    found = []
    for updates, values in curves:
        fresh = [32 * each for each in updates]
        row = trial(0, 1, 1, {"optim.lr": 1e-3})
        found.append(replace(row, updates=updates, fresh=fresh, values=values))
    return ArmResult("arm", [Searched([], None, found)], None, None, None, False)


def updates_of(updates, fresh):
    assert fresh == pytest.approx(32 * updates)
    return updates


def test_a_mean_curve_to_a_target_ends_at_the_mean_cost_of_it(tmp_path):
    search = read_search(make_study(tmp_path))
    arm = arm_of(([0, 10], [4.0, 2.0]), ([0, 20, 30], [4.0, 3.0, 1.0]))
    search = replace(search, arms=[arm])
    points = mean_points(search, arm, updates_of)
    # Of 2.0 the second stream is at 25, of 3.0 they are at 5 and 20.
    assert points[-1] == (pytest.approx(17.5), 2.0)
    costs = {round(value, 6): cost for cost, value in points}
    assert costs[4.0] == 0
    near = min(costs, key=lambda value: abs(value - 3.0))
    assert costs[near] == pytest.approx(12.5, abs=0.5)
    # What one of them has not met has no mean.
    arm = arm_of(([0, 10], [4.0, 2.0]), ([0, 20], [4.0, 3.0]))
    assert mean_points(search, arm, updates_of)[-1][1] >= 3.0


def test_a_mean_curve_without_a_target_is_the_mean_of_the_values(tmp_path):
    search = read_search(make_study(tmp_path, target=0.0))
    arm = arm_of(([0, 10], [4.0, 2.0]), ([0, 30], [5.0, 3.0]))
    assert mean_points(search, arm, updates_of) == [(0, 4.5), (20, 2.5)]


def test_what_lies_far_beyond_the_others_is_drawn_apart_and_said(tmp_path):
    assert fence([2.0, 2.1, 2.2, 2.4, 38.0]) == 2.4
    assert fence([2.0, 2.1, 2.2, 2.4]) == 2.4
    folder = make_study(tmp_path, target=0.0)
    scores = [2.0, 2.1, 2.2, 38.5]
    found = [
        replace(trial(k, 1, 1, {"optim.lr": 1e-3}), score=score, final=score)
        for k, score in enumerate(scores)
    ]
    for arm in ("baseline", "spread"):
        write_unit(folder, Unit(arm, "search", 0), "", found)
        write_unit(folder, Unit(arm, "search", 1), "", found[:3])
    write_search_figures(read_search(folder), tmp_path / "out")
    drawn = texts(tmp_path / "out", "trials")
    assert "beyond: 38.5 to 38.5" in drawn
    assert "last evaluation loss (x: diverged)" in drawn
    ticks = [float(text) for text in drawn if re.fullmatch(r"\d+(\.\d+)?", text)]
    assert ticks and max(ticks) < 2.5


def test_axes_say_what_is_evaluated(tmp_path):
    folder = make_study(tmp_path)
    write_search_figures(read_search(folder), tmp_path / "out")
    assert "evaluation loss" in texts(tmp_path / "out", "curves")
    unit = Unit("spread", "confirm", 0)
    found = read_unit(folder, unit)
    write_unit(folder, unit, "", found, [{"metric": "perplexity"}])
    write_search_figures(read_search(folder), tmp_path / "out")
    assert "evaluation perplexity" in texts(tmp_path / "out", "curves")
