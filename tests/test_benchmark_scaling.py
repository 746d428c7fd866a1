"""The command behind docs/scaling.md: what it writes, and where."""

from pathlib import Path

import pytest

from benchmarks.scaling import main

PAGE = Path(__file__).parents[1] / "docs/scaling.md"
BEGIN, END = "<!-- simulated: begin -->\n", "<!-- simulated: end -->\n"


@pytest.mark.slow
def test_tables_and_figure_are_written(tmp_path):
    page = tmp_path / "scaling.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert main([str(tmp_path), "--small"]) == 0
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    before, _, rest = page.read_text().partition(BEGIN)
    tables, _, after = rest.partition(END)
    assert (before, after) == ("before\n", "after\n")
    lines = tables.splitlines()
    assert [line for line in lines if line.startswith("**R")] == [
        f"**R = {ratio}, simulated**: % of the time in training / on fresh data"
        for ratio in ("0.8", "2")
    ]
    rows = [line.split(" | ") for line in lines if " / " in line and line[0] == "|"]
    assert len(rows) == 2 * 3 * 4
    for _, policy, *cells in rows:
        shares = [[int(x) for x in cell.strip(" |").split(" / ")] for cell in cells]
        assert len(shares) == 6
        assert all(0 <= fresh <= busy <= 100 for busy, fresh in shares)
        if policy == "no echo":
            assert all(fresh == busy for busy, fresh in shares)
        if policy == "fixed, e = 4":
            assert all(abs(4 * fresh - busy) <= 3 for busy, fresh in shares)


def test_a_page_without_a_place_for_the_tables_is_refused(tmp_path, capsys):
    (tmp_path / "scaling.md").write_text("no marks\n")
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path)])
    assert caught.value.code == 2
    assert "has no marks <!-- simulated: begin -->" in capsys.readouterr().err


def test_the_page_holds_the_tables_of_its_command():
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tables, end, _ = rest.partition(END)
    assert end
    assert "`python -m benchmarks.scaling docs`" in before
    assert tables.count("| no echo |") == 2 * 3
