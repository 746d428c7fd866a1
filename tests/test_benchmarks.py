"""The benchmark commands: records, tables, figures and refusals; never a time."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import collectives
from benchmarks.__main__ import _BENCHMARKS, _ON_REAL_DATA, _PEERS, main
from benchmarks.harness import Result
from benchmarks.table import Session, write_rows

ROOT = Path(__file__).parents[1]
ON = ["--config", f"{ROOT}/configs/lm.py:tiny", "--config.mesh.data=4"]


def test_named_benchmarks_are_recorded_and_documented(tmp_path, capsys):
    record, docs = tmp_path / "out.json", tmp_path / "benchmarks.md"
    assert main(["P16", "P20", "--json", str(record), "--docs", str(docs)]) == 0
    results = json.loads(record.read_text())
    assert [result["id"] for result in results] == ["P16a", "P16b", "P16c", "P20"]
    assert all(result["met"] for result in results)  # exact counts, not times
    known = {"value", "goal", "unit", "peer", "repeats", "machine", "versions"}
    assert known <= set(results[0])
    page = docs.read_text()
    assert "(P20) | benchmarks/loops/plain.py against echoed.py | 2 lines |" in page
    assert "P16b: 0 of 2500" in capsys.readouterr().out


def test_what_was_measured_is_kept_where_a_later_benchmark_fails(tmp_path, monkeypatch):
    record = tmp_path / "out.json"
    monkeypatch.setitem(_BENCHMARKS, "P16", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["P20", "P16", "P15", "--json", str(record)])
    assert [each["id"] for each in json.loads(record.read_text())] == ["P20"]


def test_what_is_not_there_is_missed_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(_PEERS, "P7", "no_such_package")
    for names, said in (
        (["P20", "P7"], "no_such_package is compared with and not installed"),
        (["P5", "P99"], "unknown: P99; use P1, P2"),
    ):
        with pytest.raises(SystemExit):
            main(names)
        out, err = capsys.readouterr()
        assert not out and said in err


def result(id_, value, goal=">= 20"):
    spread = [value - 1, value, value + 1]
    return Result(id_, "a title", value, goal, "x", "a peer", spread)


HEAD = """# Speed

By hand.

<!-- measured: begin -->

| what (id) | compared with | values | goal | met | machine |
| --- | --- | --- | --- | --- | --- |
| **A group** | | | | | |
"""
PAGE = f"""{HEAD}| my words (P5; P6) | my peer | old | old | old | old |
| kept (P7) | a peer | TODO | TODO | | TODO |

<!-- measured: end -->

- A note by hand.
"""


def test_a_page_gets_the_rows_that_were_measured_and_keeps_all_else(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(PAGE)
    first = Session.now([result("P5", 22.0), result("P6", 30.0)])
    records = [each.as_json() for each in first.results]
    read = Session.of(json.loads(json.dumps(records)))
    assert read == first
    there = {"processor": "x86_64 Intel(R) Xeon(R) Processor (cpu family 6, model 207)"}
    second = [result("P5", 19.0), result("P6", 31.0), result("P8", 4.0, ">= 0")]
    sessions = [read, Session.now(second)]
    sessions = [each._replace(machine=there) for each in sessions]
    write_rows(page, sessions)
    old = "| my words (P5; P6) | my peer | old | old | old | old |"
    new = (
        "| my words (P5; P6) | my peer | 22, 19 (18 to 23); 30, 31 (29 to 32) | >= 20 "
        "| **no**; yes | Intel Xeon |"
    )
    last = "| kept (P7) | a peer | TODO | TODO | | TODO |"
    added = "| a title (P8) | a peer | 4 (3 to 5) |  |  | Intel Xeon |"
    expected = PAGE.replace(old, new).replace(last, f"{last}\n{added}")
    assert page.read_text() == expected
    write_rows(page, sessions)
    assert page.read_text() == expected


def test_a_page_without_marks_or_sessions_of_two_machines_are_refused(tmp_path, capsys):
    page = tmp_path / "benchmarks.md"
    page.write_text("# By hand\n")
    with pytest.raises(SystemExit):
        main(["P20", "--docs", str(page)])
    assert "no marks <!-- measured: begin -->" in capsys.readouterr().err
    here = Session.now([result("P5", 22.0)])
    with pytest.raises(ValueError, match="no marks"):
        write_rows(page, [here])
    there = here._replace(machine={**here.machine, "cores": 1000})
    with pytest.raises(ValueError, match="several machines"):
        write_rows(page, [there, here])
    assert page.read_text() == "# By hand\n"


def test_the_page_of_benchmarks_has_rows_for_the_command():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    table = page.partition("<!-- measured: begin -->")[2]
    table = table.partition("<!-- measured: end -->")[0]
    ids = [
        id_
        for line in table.splitlines()
        if (found := re.match(r"\| [^|]*\(([^()]+)\) \|", line))
        for id_ in found[1].split("; ")
    ]
    assert len(ids) == len(set(ids))
    for name in [*_BENCHMARKS, *_ON_REAL_DATA]:
        # As P9-tiny of P9, and P21a of P21.
        assert any(re.fullmatch(rf"{name}(-.+|[a-c])?", id_) for id_ in ids), name


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_what_is_for_an_accelerator_runs_small_anywhere(tmp_path):
    record = tmp_path / "out.json"
    names = ["H1", "H5"]
    assert main([*names, "--small", "--json", str(record)]) == 0
    results = json.loads(record.read_text())
    assert [result["id"].partition("-")[0] for result in results] == names
    assert all(result["value"] > 0 for result in results)
    assert all("cpu" in result["note"].lower() for result in results)


def test_bytes_that_cross_to_the_device_are_counted(tmp_path):
    record = tmp_path / "out.json"
    assert main(["P10", "--json", str(record)]) == 0
    (result,) = json.loads(record.read_text())
    # A quarter of the batch of 3072 + 4 bytes a row, with 4 bytes for the slot of each
    # of its rows; and for every row 4 bytes of the slot read and of the repeat each,
    # and a key of 8.
    assert result["value"] == pytest.approx((3076 + 4) / 4 / 3076 + 16 / 3076, rel=1e-3)


@pytest.mark.usefixtures("compiled_soon")
def test_it_says_what_an_update_sends_and_what_that_costs(capsys):
    # Of the cost of 8 devices, with 8 examples of the 32 in 10 ms on each of 4.
    cost = ["--bandwidth=0.1", "--devices=8", "--compute-ms=10"]
    assert collectives.main([*ON, *cost]) == 0
    out = capsys.readouterr().out
    assert "all-reduce" in out and "f32: 103,0" in out
    assert "An update on 4 cpu, for each of them" in out
    # 103,040 parameters, so 412,160 bytes: 2 * 7/8 of them at 0.1 GB/s are 7.21 ms, and
    # 16 times as many through a server 65.9 ms.
    assert "parameter server 65.9 ms, ring 7.21 ms" in out
    assert "efficiency 0.581 if" in out
    # 2 N and 2 (N - 1)/N times 400 MB at 2 GB/s.
    assert collectives.exchange_s(400e6, 8, 2e9) == pytest.approx((3.2, 0.35))
    with pytest.raises(SystemExit):
        collectives.main([*ON, "--config.local.sync_schedule=every"])
    assert "set local.sync_schedule=none" in capsys.readouterr().err
