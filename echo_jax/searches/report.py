"""The report of a study that searched: table, figures, and a page with both."""

import os

from echo_jax.files.folders import RunPath, run_folder
from echo_jax.files.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.searches.comparison import Search
from echo_jax.searches.figures import write_search_figures
from echo_jax.searches.table import headings, notes, rows, write_search_markdown
from echo_jax.studies.page import figure, items, page, plain_json, table

__all__ = ["write_search_report"]

_PICTURES = (
    "<p>Trials leave no run folders behind: <code>echo-jax report examples --config "
    "CONFIG --workdir FOLDER</code> draws the first examples of a training, with each "
    "of their uses.</p>"
)


def write_search_report(search: Search, folder: str | os.PathLike[str]) -> RunPath:
    """Writes table, figures and ``report.html``; returns the path of the page."""
    folder = run_folder(folder)
    with FolderLock(folder, name=REPORT_LOCK_NAME):
        write_search_markdown(search, folder / "table.md")
        drawn = write_search_figures(search, folder)
        parts = [
            *(figure(path.read_bytes().decode()) for path in drawn),
            table(headings(search), rows(search), texts=2),
            items(notes(search)),
            _PICTURES,
            *["<h2>What it ran on</h2>"] * bool(search.environments),
            *map(plain_json, search.environments),
            "<h2>The config of the arms</h2>",
            plain_json(search.base),
        ]
        report = folder / "report.html"
        report.write(page(search.name, search.setting, parts))
    return report
