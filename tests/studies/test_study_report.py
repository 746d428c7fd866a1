import html
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import rich

from echo_jax.studies.report import write_report
from echo_jax.studies.runs import read_runs, read_study
from echo_jax.studies.table import terminal_table

ARMS = {
    "baseline": {"losses": (4.0, 3.0, 2.0, 1.0)},
    "spread": {"factor": 4.0, "losses": (4.0, 3.0, 1.0), "seconds_per_update": 0.125},
    "batch_echo": {"factor": 4.0, "losses": (4.0, 3.5)},
}
# Markup, what a legend may leave out, a broken formula, and a cell's border.
HOSTILE = ['<img src=x onerror="alert(1)">', "_hidden", "$x_$", "a&b|c"]


def _tags(page: str) -> list[str]:
    return re.findall(r"<\s*([a-zA-Z]+)", page)


def _comments(svg: str) -> list[str]:
    """The texts of a figure: matplotlib draws paths and notes what they spell."""
    comments = re.findall(r"<!--(.*?)-->", svg, re.DOTALL)
    return [html.unescape(comment.strip()) for comment in comments]


def test_everything_is_written_where_it_was_asked_for(tmp_path, make_study):
    study = read_study(make_study(tmp_path / "study", ARMS))
    out = tmp_path / "deep" / "out"
    assert str(write_report(study, out)) == str(out / "report.html")
    names = {path.name for path in out.iterdir()}
    assert names == {"table.md", "figure.png", "figure.svg", "report.html"}


def test_the_report_needs_nothing_from_elsewhere(tmp_path, make_study):
    study = read_study(make_study(tmp_path, ARMS))
    page = write_report(study, tmp_path).read_text()
    assert not {"script", "link", "img", "iframe"} & set(_tags(page))
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"url\((?!#)", page)
    assert "<!DOCTYPE svg" not in page
    assert page.count("<svg") == 1


def _links(page: str) -> list[str]:
    return re.findall(r'<a href="([^"]*)"', page)


def test_pages_of_examples_are_linked_where_they_lie_and_named_where_not(
    tmp_path, make_study
):
    study = read_study(make_study(tmp_path, {"baseline": {}, "arm": {}}))
    page = write_report(study, tmp_path).read_text()
    assert not _links(page) and "echo-jax report examples RUN" in page
    for name in ("baseline/examples.html", "arm/examples.html", "arm/evaluation.html"):
        (tmp_path / name).write_text("a page")
    # Beside a study it is none of its runs'.
    (tmp_path / "evaluation.html").write_text("a page")
    page = write_report(study, tmp_path).read_text()
    assert _links(page) == [
        *("baseline/examples.html", "arm/examples.html", "arm/evaluation.html")
    ]
    assert "echo-jax evaluate RUN" in page
    (tmp_path / "baseline/evaluation.html").write_text("a page")
    page = write_report(study, tmp_path).read_text()
    assert len(_links(page)) == 4 and "echo-jax evaluate RUN" not in page
    # The folder of a report that is elsewhere has none of them.
    assert not _links(write_report(study, tmp_path / "out").read_text())


def test_a_report_in_the_folder_of_its_run_links_the_pages_beside_it(
    tmp_path, make_run
):
    folder = make_run(tmp_path / "a")
    (folder / "evaluation.html").write_text("a page")
    page = write_report(read_runs([folder]), folder).read_text()
    assert _links(page) == ["evaluation.html"]
    assert _links(write_report(read_runs([folder]), tmp_path).read_text()) == [
        "a/evaluation.html"
    ]


def test_no_link_of_a_stranger_is_linked(tmp_path, make_study, make_run):
    elsewhere = tmp_path / "mine.html"
    elsewhere.write_text("mine")
    out = tmp_path / "out"
    make_study(out, {"baseline": {}, "arm": {}})
    (out / "arm/examples.html").symlink_to(elsewhere)
    (out / "arm/evaluation.html").mkdir()
    assert not _links(write_report(read_study(out), out).read_text())
    # Nor a page in a folder that is one, or by the name of a script.
    runs = [make_run(tmp_path / name) for name in ("linked", "javascript:alert(1)")]
    (runs[0] / "examples.html").write_text("a page")
    (out / "linked").symlink_to(runs[0])
    (out / "javascript:alert(1)").mkdir()
    (out / "javascript:alert(1)/examples.html").write_text("a page")
    page = write_report(read_runs(runs), out).read_text()
    assert _links(page) == ["javascript%3Aalert%281%29/examples.html"]


def test_the_report_shows_table_notes_and_configs(tmp_path, make_study):
    study = read_study(make_study(tmp_path, ARMS))
    page = write_report(study, tmp_path).read_text()
    words = '<td class="text">baseline</td><td class="text">none</td>'
    assert f"{words}<td>4,000 (1.00x)</td>" in page
    assert "<td>not in 500</td>" in page
    assert "<li>Simulated storage: 2.5 ms a read (constant).</li>" in page
    assert '<p class="caveats">simulated storage</p>' in page
    assert page.count("<details>") == 3
    assert "Measured before the arms ran" in page


def test_damage_that_a_run_went_on_after_is_said_below_the_table(tmp_path, make_study):
    arms = {"baseline": {}, "arm": {"restored": [4, 8], "rows_lost": 2}}
    said = [
        "arm went on from an older checkpoint where that of update 4, 8 was damaged.",
        "arm lost 2 rows of metrics.jsonl to damage.",
    ]
    page = write_report(read_study(make_study(tmp_path, arms)), tmp_path).read_text()
    table = (tmp_path / "table.md").read_text()
    assert all(f"<li>{note}</li>" in page and f"- {note}\n" in table for note in said)
    assert "baseline went" not in page


def test_a_report_shows_the_configs_that_there_are(tmp_path, make_study):
    folder = make_study(tmp_path / "s", {"baseline": {}, "arm": {}})
    (folder / "arm/config.json").unlink()
    page = write_report(read_study(folder), folder).read_text()
    assert [n for n in ("baseline", "arm") if f"<summary>{n}</summary>" in page] == [
        "baseline"
    ]
    (folder / "baseline/config.json").unlink()
    page = write_report(read_study(folder), folder).read_text()
    assert "<h2>Configs</h2>" not in page
    # Which the rows say, too.
    assert "looked at every 100 updates" in page


def test_a_report_of_runs_has_no_calibration(tmp_path, make_run):
    study = read_runs([make_run(tmp_path / "a", simulated_storage=False)])
    page = write_report(study, tmp_path).read_text()
    assert "Measured before the arms ran" not in page
    assert 'class="caveats"' not in page


def test_hostile_names_are_escaped_everywhere(tmp_path, make_run):
    runs = [make_run(tmp_path / name) for name in HOSTILE]
    study = read_runs(runs, name="<script>alert(2)</script>")
    page = write_report(study, tmp_path).read_text()
    assert not {"script", "img"} & set(_tags(page))
    assert '">&lt;img src=x onerror=&quot;alert(1)&quot;&gt;</td>' in page
    ET.fromstring((tmp_path / "figure.svg").read_text())


def test_no_text_of_a_file_steers_a_terminal_or_breaks_the_figure(
    tmp_path, make_run, capsys
):
    """Escape sequences, rich's markup, and characters that XML does not have."""
    names = ["\x1b]0;title\x07", "[red]x", "a\nb", "\u202eabc"]
    runs = [make_run(tmp_path / name, workload="l\x1b[2Jm") for name in names]
    config = json.loads((runs[0] / "config.json").read_text())
    (runs[0] / "config.json").write_text(json.dumps({**config, "x": "\x1b<script>"}))
    study = read_runs(runs, name="a [/] study")
    page = write_report(study, tmp_path).read_text()
    ET.fromstring((tmp_path / "figure.svg").read_text())
    rich.print(terminal_table(study))
    out = capsys.readouterr().out
    assert "[red]x" in out and "a [/] study" in out and "\\x1b]0;tit" in out
    for text in (page, (tmp_path / "table.md").read_text(), out):
        assert all(line.isprintable() for line in text.split("\n"))
    assert "script" not in _tags(page)


def test_the_figure_names_every_arm_once_and_the_caveat(tmp_path, make_run):
    runs = [make_run(tmp_path / name) for name in HOSTILE]
    write_report(read_runs(runs, name="a study"), tmp_path)
    texts = _comments((tmp_path / "figure.svg").read_text())
    assert [text for text in texts if text in HOSTILE] == HOSTILE
    assert any(
        text.startswith("Simulated storage;  R = 4.0 as measured;") for text in texts
    )
    for label in ("fresh examples read", "updates", "seconds of training"):
        assert texts.count(label) == 1
    assert texts.count("evaluation loss") == 1


@pytest.mark.parametrize(
    ("sent", "differ"), [((400, 25), True), ((400, 400), False), ((None, None), False)]
)
def test_bytes_are_an_axis_where_updates_differ_in_them(
    tmp_path, make_run, sent, differ
):
    runs = [
        make_run(tmp_path / name, bytes_per_update=each)
        for name, each in zip("ab", sent, strict=True)
    ]
    study = read_runs(runs)
    write_report(study, tmp_path)
    texts = _comments((tmp_path / "figure.svg").read_text())
    assert ("bytes sent by a device" in texts) == differ
    table = (tmp_path / "table.md").read_text()
    said = "Sent by each device in the whole run: a 120.0 kB, b 7.5 kB."
    assert (said in table) == differ


def test_a_report_is_the_same_wherever_it_is_made(tmp_path, make_study):
    write_report(read_study(make_study(tmp_path, ARMS)), tmp_path / "a")
    settings = "text.usetex: True\nfont.size: 30\nsavefig.facecolor: red\n"
    (tmp_path / "matplotlibrc").write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", "echo_jax", "report", ".", "--workdir", "b"],
        cwd=tmp_path,
        # As in a cell of a notebook whose kernel is another Python.
        env={**os.environ, "MPLBACKEND": "ipympl", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    for name in ("figure.svg", "figure.png", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes()


@pytest.mark.parametrize("losses", [(1.0,), (2.0, 2.0), (2.0, math.nan), (math.nan,)])
def test_a_short_flat_or_broken_run_is_drawn(tmp_path, make_run, losses):
    folder = make_run(tmp_path / "a", losses=losses, target=0.0)
    write_report(read_runs([folder]), tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_many_arms_are_drawn(tmp_path, make_run):
    runs = [make_run(tmp_path / f"arm{number}") for number in range(9)]
    write_report(read_runs(runs), tmp_path)
    texts = _comments((tmp_path / "figure.svg").read_text())
    assert [f"arm{number}" in texts for number in range(9)] == [True] * 9
