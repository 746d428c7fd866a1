"""The benchmark command: its record, its table, its refusals; never a time."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import Result


def test_named_benchmarks_are_recorded_and_documented(tmp_path, capsys):
    record, docs = tmp_path / "out.json", tmp_path / "benchmarks.md"
    assert main(["P16", "P20", "--json", str(record), "--docs", str(docs)]) == 0
    results = json.loads(record.read_text())
    assert [result["id"] for result in results] == ["P16a", "P16b", "P16c", "P20"]
    assert all(result["met"] for result in results)  # exact counts, not times
    assert {"value", "goal", "unit", "peer", "repeats", "machine", "versions"} <= set(
        results[0]
    )
    page = docs.read_text()
    assert "`python -m benchmarks P16 P20 --docs docs/benchmarks.md`" in page
    assert "| P20 |" in page
    assert "P16b: 0 of 2500" in capsys.readouterr().out


def test_an_unknown_benchmark_is_named(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["P5", "P99"])
    assert caught.value.code == 2
    assert "unknown: P99; use P5, P6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (">= 20", 20.0, True),
        (">= 20", 19.9, False),
        ("<= 1.05", 1.06, False),
        ("== 0", 0.0, True),
        ("== 0", 1.0, False),
    ],
)
def test_a_goal_is_met_or_not(goal, value, met):
    assert Result("P0", "", value, goal, "x", "").met is met
