"""The benchmark command: its record, its table, its refusals; never a time."""

import json
import os
from subprocess import CalledProcessError

import pytest

from benchmarks.__main__ import _BENCHMARKS, _PEERS, _in_own_process, main
from benchmarks.figures import draw_free_echo
from benchmarks.harness import Result
from benchmarks.table import Session, write_table


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


def test_what_was_measured_is_kept_where_a_later_benchmark_fails(tmp_path, monkeypatch):
    record = tmp_path / "out.json"
    monkeypatch.setitem(_BENCHMARKS, "P16", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["P20", "P16", "P15", "--json", str(record)])
    assert [each["id"] for each in json.loads(record.read_text())] == ["P20"]


def test_what_a_process_of_its_own_measured_is_read():
    assert [each.id for each in _in_own_process("P20")] == ["P20"]
    with pytest.raises(CalledProcessError):
        list(_in_own_process("P20", "--no-such-option"))


def test_a_peer_that_is_not_installed_is_missed_before_anything_is_measured(
    monkeypatch, capsys
):
    monkeypatch.setitem(_PEERS, "P7", "no_such_package")
    with pytest.raises(SystemExit):
        main(["P20", "P7"])
    out, err = capsys.readouterr()
    assert not out and "no_such_package is compared with and not installed" in err


def result(id_, value):
    spread = [value - 1, value, value + 1]
    return Result(id_, "a title", value, ">= 20", "x", "a peer", spread)


def test_a_page_shows_every_session_and_keeps_what_was_written_by_hand(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text("# Old\n\n| old |\n\n## By hand\n\nText.\n\n## More\n")
    first = Session.now([result("P5", 22.0), result("P6", 30.0)])
    records = [each.as_json() for each in first.results]
    read = Session.of(json.loads(json.dumps(records)))
    assert read == first
    write_table(page, [read, Session.now([result("P5", 19.0)])], "the command")
    written = page.read_text()
    assert (
        "| **22 x** (21 to 23), **19 x** (18 to 20) | 3 | >= 20 | **no** |" in written
    )
    assert "in two sessions" in written and "| old |" not in written
    assert written.endswith("|\n\n## By hand\n\nText.\n\n## More\n")


def test_sessions_of_several_machines_are_not_mixed(tmp_path):
    here = Session.now([result("P5", 22.0)])
    there = here._replace(machine={**here.machine, "cores": 1000})
    with pytest.raises(ValueError, match="several machines"):
        write_table(tmp_path / "benchmarks.md", [there, here], "the command")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_what_is_for_an_accelerator_runs_small_anywhere(tmp_path):
    record = tmp_path / "out.json"
    names = ["H1", "H3", "H4", "H5", "H6", "H7"]
    assert main([*names, "--small", "--json", str(record)]) == 0
    results = json.loads(record.read_text())
    found = [result["id"].partition("-")[0] for result in results]
    assert found == [*names, "H7", "H7"]  # the last for three networks
    assert all(result["value"] > 0 for result in results)
    assert all("cpu" in result["note"].lower() for result in results)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="ECHO_JAX_DATA is unset")
@pytest.mark.parametrize(
    ("name", "ids", "images"),
    [("P21", ["P21a", "P21b"], "20 images"), ("H2", ["H2-16", "H2-2"], "64 images")],
)
def test_what_is_for_real_photographs_runs_small(tmp_path, name, ids, images):
    record = tmp_path / "out.json"
    assert main([name, "--small", "--json", str(record)]) == 0
    results = json.loads(record.read_text())
    assert [result["id"] for result in results] == ids
    assert all(value > 0 for result in results for value in result["repeats"])
    # As many as were really read.
    assert all(images in result["note"] for result in results)


def test_bytes_that_cross_to_the_device_are_counted(tmp_path):
    record = tmp_path / "out.json"
    assert main(["P10", "--json", str(record)]) == 0
    (result,) = json.loads(record.read_text())
    # A quarter of the batch of 3072 + 4 bytes a row, with 4 bytes for the slot of each
    # of its rows; and for every row 4 bytes of the slot read and of the repeat each,
    # and a key of 8.
    assert result["value"] == pytest.approx((3076 + 4) / 4 / 3076 + 16 / 3076, rel=1e-3)


def test_the_figure_of_free_echoes_is_drawn(tmp_path):
    results = [
        Result(f"P2-e{e}", "", 1.01, "<= 1.02", "x", "", [1.0, 1.02])
        for e in (2, 3, 4, 5)
    ]
    draw_free_echo(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_benchmark_is_named(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["P5", "P99"])
    assert caught.value.code == 2
    assert "unknown: P99; use P1, P2" in capsys.readouterr().err


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
