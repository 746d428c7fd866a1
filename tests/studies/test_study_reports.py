"""Reports of studies: pages that need no other file, figures, and several seeds."""

import html
import math
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from study_folders import ECHO, change, make_run, make_study, read_table

from echo_jax.cli import main
from echo_jax.studies import StudyError, read_runs, read_seeds, read_study, study_report

# Markup, what a legend may leave out, a broken formula, a cell's border; escape
# sequences, rich's markup, and characters that XML does not have.
HOSTILE = [
    *('<img src=x onerror="alert(1)">', "_hidden", "$x_$", "a&b|c"),
    *("\x1b]0;title\x07", "[red]x", "a\nb", "\u202eabc"),
]


def tags(page):
    return {*re.findall(r"<\s*([a-zA-Z]+)", page)}


def links(page):
    return re.findall(r'<a href="([^"]*)"', page)


def drawn(folder):
    """The texts of a figure: matplotlib draws paths and notes what they spell."""
    svg = (folder / "figure.svg").read_text()
    return [html.unescape(x.strip()) for x in re.findall(r"<!--(.*?)-->", svg, re.S)]


def test_a_report_needs_nothing_and_is_the_same_wherever_it_is_made(tmp_path):
    adaptive = {"factor": 1.0, "mode": "adaptive", "max_uses": 8, **ECHO}
    arms = {
        "baseline": {"restored": [4, 8]},
        "arm": {"losses": (4.0, 3.5)},
        "third": {"losses": (2.0, math.nan), "echo": adaptive},
    }
    study = make_study(tmp_path, arms)
    (study / "arm/config.json").unlink()
    out = tmp_path / "deep" / "out"
    *_, page = study_report(read_study(study)).write(out)
    page = page.read_text()
    names = {"table.md", "figure.png", "figure.svg", "report.html"}
    assert {path.name for path in out.iterdir()} == names
    width, height = struct.unpack(">2I", (out / "figure.png").read_bytes()[16:24])
    assert 2 * height < width < 4 * height  # Three panels.
    assert not {"script", "link", "img", "iframe"} & tags(page)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"url\((?!#)", page)
    assert "<!DOCTYPE svg" not in page and page.count("<svg") == 1
    assert '<td class="text">none</td><td>3,000 (1.00x)</td>' in page
    assert "adaptive up to 8x after augment" in page
    assert "<li>Simulated storage: 2.5 ms a read (constant).</li>" in page
    assert '<p class="caveats">simulated storage</p>' in page
    assert "since the checkpoint of update 4, 8 was damaged.</li>" in page
    assert re.findall(r"<summary>(\w+)", page) == ["baseline", "third"]
    assert "Measured before the variants ran" in page

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
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_only_files_are_linked_and_by_their_names(tmp_path):
    names = ("folder", "javascript:alert(1)")
    runs = [make_run(tmp_path / name) for name in names]
    out = tmp_path / "out"
    for name in names:
        (out / name).mkdir(parents=True)
    (out / "folder/examples.html").mkdir()
    (out / names[-1] / "examples.html").write_text("a page")
    *_, page = study_report(read_runs(runs)).write(out)
    page = page.read_text()
    assert links(page) == ["javascript%3Aalert%281%29/examples.html"]


def test_hostile_names_are_escaped_everywhere(tmp_path, capsys):
    """In page, table, figure and terminal; and nine arms are drawn."""
    facts = {"workload": "l\x1b[2Jm", "simulated_storage": True, "target": 0.5}
    runs = [make_run(tmp_path / name, **facts) for name in (*HOSTILE, "ninth")]
    change(runs[0] / "config.json", x="\x1b<script>")
    out = tmp_path / "out"
    assert main(["report", *map(str, runs), "--workdir", str(out)]) == 0
    said = capsys.readouterr().out
    assert "[red]x" in said and "\\x1b]0;tit" in said
    page = (out / "report.html").read_text()
    assert not {"script", "img"} & tags(page)
    assert '">&lt;img src=x onerror=&quot;alert(1)&quot;&gt;</td>' in page
    table = (out / "table.md").read_text()
    assert "| a&amp;b&#124;c |" in table and "- a&amp;b&#124;c did not" in table
    for text in (page, table, said):
        assert all(line.isprintable() for line in text.split("\n"))
    ET.fromstring((out / "figure.svg").read_text())
    texts = drawn(out)
    assert [text for text in texts if text in HOSTILE] == [*HOSTILE[:4], "[red]x"]
    assert "ninth" in texts
    assert any(x.startswith("Simulated storage;  R = 4.0 as measured;") for x in texts)
    axes = ("fresh examples", "updates", "seconds of training", "evaluation loss")
    assert [texts.count(label) for label in axes] == [1] * 4


# The baseline syncs the target after 300, 200 and 200 updates, of 0.5 s each.
LOSSES = ((3.0, 2.0, 1.0), (3.0, 1.0, 0.5), (2.0, 0.75, 0.25))


@pytest.fixture
def make_seeds(tmp_path):
    def make(arm=lambda seed: {}, base=lambda seed: {}):
        return [
            make_study(
                tmp_path / f"{seed}",
                {"baseline": {"losses": losses}, "arm": arm(seed)},
                {"seed": seed, **base(seed)},
            )
            for seed, losses in enumerate(LOSSES)
        ]

    return make


def test_an_arm_has_the_mean_least_and_largest_over_seeds(tmp_path, make_seeds, capsys):
    folders = make_seeds(lambda seed: {"factor": 2.0, "losses": (3.0, 1.0, 0.5 + seed)})
    out = tmp_path / "out"
    assert main(["report", *map(str, folders), "--workdir", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("baseline"))
    assert line.split() == ["baseline", "3", "2,333", "233", "116.7", "0.5833"]
    assert max(len(line) for line in lines if str(out) not in line) <= 80
    assert {"table.md", "figure.png", "figure.svg", "report.html"} == {*os.listdir(out)}
    (baseline, arm), others = read_table(out / "table.md")
    assert others[0] == "**a study, seeds 0, 1, 2, simulated storage**"
    assert baseline["n"] == arm["n"] == "3"
    assert baseline["fresh examples"] == "2,333 (2,000 to 3,000)"
    assert baseline["updates"] == "233 (200 to 300)"
    assert baseline["seconds"] == "116.7 (100.0 to 150.0)"
    # Always the same: no range. Beside the baseline of the same seed it is one.
    assert arm["fresh examples"] == "1,000"
    assert arm["fresh, ratio"] == "0.44 (0.33 to 0.50)"
    assert arm["final loss"] == "1.500 (0.5000 to 2.500)"
    assert arm["best loss"] == "0.8333 (0.5000 to 1.000)"


def test_seeds_that_missed_the_target_or_diverged_are_said(tmp_path, make_seeds):
    folders = make_seeds(lambda seed: {"losses": (2.0, 1.5 - 0.5 * seed)})
    facts = (folders[1] / "arm/summary.json").read_text()
    (folders[1] / "arm/summary.json").unlink()
    (folders[1] / "arm/diverged.json").write_text(facts)
    change(folders[1] / "arm/diverged.json", update=250, rows=4)
    out = tmp_path / "out"
    assert main(["report", *map(str, folders), "--workdir", str(out)]) == 0
    (_, arm), others = read_table(out / "table.md")
    assert (arm["n"], arm["updates"]) == ("1 of 3", "200")
    assert any("Costs are those of the n seeds that reached it." in x for x in others)
    assert "- arm, seed 1, diverged at update 250." in others
    assert "arm (x: 1 of 3 diverged)" in drawn(out)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("study.json", {"base_config": {"seed": 5, "x": {"lr": 1}}}, r"x\.lr \(1, 0"),
        ("study.json", {"base_config": {"seed": 0}}, "two of the studies have seed 0"),
        ("study.json", {"calibration": {"storage_ratio": 2.0}}, "in storage_ratio"),
        ("arm/config.json", {"eval_every": 7}, r"in arm: eval_every \(7, 100\)"),
    ],
)
def test_studies_that_differ_in_more_or_less_than_the_seed_are_refused(
    make_seeds, file, fields, message
):
    # A latency that was chosen for one ratio is no difference.
    storage = lambda seed: {"data": {"storage": {"latency_s": seed / 1e3}}}  # noqa: E731
    folders = make_seeds(base=lambda seed: {"x": {"lr": 0}, **storage(seed)})
    # Nor is a field of another version.
    change(folders[0] / "arm/config.json", old=1)
    assert read_seeds(folders).seeds == [0, 1, 2]
    change(folders[1] / file, **fields)
    with pytest.raises(StudyError, match=message):
        read_seeds(folders)
