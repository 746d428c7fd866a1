"""The report of a study: one HTML file that needs no other file."""

import html
import os
from collections.abc import Sequence
from urllib.parse import quote

from etils import epath

from echo_jax.files.folders import run_folder, write
from echo_jax.files.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.studies.figures import write_figure
from echo_jax.studies.page import figure, items, page, plain_json, table
from echo_jax.studies.runs import Study
from echo_jax.studies.table import arm_rows, cells, headings, notes, write_markdown

# The file names of `echo-jax report examples` and `echo-jax evaluate --report`.
_PAGES = {"examples.html": "first examples", "evaluation.html": "evaluation"}
_COMMANDS = (
    "<code>echo-jax report examples RUN</code> draws the first examples of a run with "
    "each of their uses, and <code>echo-jax evaluate RUN --report RUN</code> what its "
    "model makes of others; the next report links these pages."
)


def write_report(study: Study, folder: str | os.PathLike[str]) -> epath.Path:
    """Writes table, figure and ``report.html``; returns the path of the page."""
    folder = run_folder(folder)
    with FolderLock(folder, name=REPORT_LOCK_NAME):
        write_markdown(study, folder / "table.md")
        _, svg = write_figure(study, folder / "figure")
        report = folder / "report.html"
        write(report, _page(study, svg.read_bytes().decode(), folder))
    return report


def _page(study: Study, svg: str, folder: epath.Path) -> str:
    measured: list[str] = []
    if study.calibration:
        title = "<h2>Measured before the arms ran</h2>"
        measured = [title, plain_json(study.calibration)]
    parts = [
        figure(svg),
        "<h2>To the target</h2>",
        table(headings(study), map(cells, arm_rows(study)), texts=2),
        items(notes(study)),
        *_picture_links(folder, [run.name for run in study.runs]),
        "<h2>What it ran on</h2>",
        plain_json(study.runs[0].environment),
        *measured,
        *_configs(study),
    ]
    return page(study.name, ", ".join(study.caveats), parts)


def _configs(study: Study) -> list[str]:
    details = [
        f"<details><summary>{html.escape(run.name)}</summary>{plain_json(run.config)}"
        "</details>"
        for run in study.runs
        if run.config
    ]
    return ["<h2>Configs</h2>", *details] if details else []


# A page is linked if it is a file (not a link) in the run's folder within the report's
# folder, or beside the report of a single run.
def _picture_links(folder: epath.Path, names: Sequence[str]) -> list[str]:
    """Returns the HTML that links to the pages of examples and predictions."""
    lines, is_whole = [], True
    for name in names:
        places = [name, ""] if len(names) == 1 else [name]
        found = [_link(folder, places, page) for page in _PAGES]
        is_whole = is_whole and all(found)
        if any(found):
            lines.append(f"<li>{html.escape(name)}: {', '.join(filter(None, found))}")
    parts = ["<h2>Examples and predictions</h2>"]
    if lines:
        parts.append(f"<ul>{''.join(f'{line}</li>' for line in lines)}</ul>")
    if not is_whole:
        parts.append(f"<p>{_COMMANDS}</p>")
    return parts


def _link(folder: epath.Path, places: Sequence[str], page: str) -> str:
    """Returns the link to a page in the first of the places that has it, or ""."""
    for place in places:
        path = f"{place}/{page}" if place else page
        if (folder / path).is_file():
            return f'<a href="{quote(path)}">{_PAGES[page]}</a>'
    return ""
