"""The report of a study: one HTML file that needs no other file."""

import html
import os

from echo_jax.files.folders import RunPath, run_folder
from echo_jax.files.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.studies.figures import write_figure
from echo_jax.studies.page import figure, items, page, plain_json, table
from echo_jax.studies.pictures import picture_links
from echo_jax.studies.runs import Study
from echo_jax.studies.table import arm_rows, cells, headings, notes, write_markdown

__all__ = ["write_report"]


def write_report(study: Study, folder: str | os.PathLike[str]) -> RunPath:
    """Writes table, figure and ``report.html``; returns the path of the page."""
    folder = run_folder(folder)
    with FolderLock(folder, name=REPORT_LOCK_NAME):
        write_markdown(study, folder / "table.md")
        _, svg = write_figure(study, folder / "figure")
        report = folder / "report.html"
        report.write(_page(study, svg.read_bytes().decode(), folder))
    return report


def _page(study: Study, svg: str, folder: RunPath) -> str:
    parts = [
        figure(svg),
        "<h2>To the target</h2>",
        table(headings(study), map(cells, arm_rows(study)), texts=2),
        items(notes(study)),
        *picture_links(folder, [run.name for run in study.runs]),
        "<h2>What it ran on</h2>",
        plain_json(study.runs[0].environment),
        *_before_the_arms(study),
        *_configs(study),
    ]
    return page(study.name, ", ".join(study.caveats), parts)


def _before_the_arms(study: Study) -> list[str]:
    if not study.calibration:
        return []
    return ["<h2>Measured before the arms ran</h2>", plain_json(study.calibration)]


def _configs(study: Study) -> list[str]:
    details = [
        f"<details><summary>{html.escape(run.name)}</summary>{plain_json(run.config)}"
        "</details>"
        for run in study.runs
        if run.config
    ]
    return ["<h2>Configs</h2>", *details] if details else []
