"""Two real processes beside the simulation: the command, and the table in the docs."""

import json
from pathlib import Path

import pytest

from benchmarks.two_hosts import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scaling.md"
BEGIN, END = "<!-- real: begin -->\n", "<!-- real: end -->\n"


@pytest.mark.slow
def test_a_table_and_what_was_measured_are_written(tmp_path):
    page = tmp_path / "scaling.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    found = tmp_path / "found.json"
    assert main([str(tmp_path), "--small", "--repeats=1", "--json", str(found)]) == 0
    rows = json.loads(found.read_text())["rows"]
    # The other producers differ in the seconds that are slept alone.
    assert [row["policy"] for row in rows] == ["no echo", "fixed, e = 2", "adaptive"]
    for row in rows:
        assert 0 < row["fresh"]["real"] <= 1
        if row["policy"] == "no echo":
            assert row["fresh"] == {"real": 1.0, "simulated": 1.0}
        if row["policy"] == "fixed, e = 2":
            # Updates may be odd.
            assert row["fresh"]["real"] == pytest.approx(0.5, abs=1 / row["updates"])
    before, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    assert (before, after) == ("before\n", "after\n")
    assert sum(line.startswith("| ") for line in table.splitlines()) == 2 + 3


def test_the_page_holds_the_table_of_what_was_measured():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, end, _ = rest.partition(END)
    assert end
    rows = json.loads((ROOT / "results/two_hosts.json").read_text())["rows"]
    assert f"{len(rows)} programs" in table
    for row in rows:
        ratio = row["seconds"]["real"] / row["seconds"]["simulated"]
        (line,) = [
            line
            for line in table.splitlines()
            if line.startswith(f"| {row['producer']} | {row['policy']} |")
        ]
        assert f"{ratio:.2f}" in line
