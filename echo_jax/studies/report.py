"""The report of a study: one HTML file that needs nothing else, on any machine."""

import html
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from echo_jax.folders import RunPath, run_folder
from echo_jax.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.studies.figures import write_figure
from echo_jax.studies.runs import Study
from echo_jax.studies.table import HEADINGS, arm_rows, cells, notes, write_markdown

__all__ = ["write_report"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.caveats { color: #8a3b00; margin-top: 0.2rem; }
.scroll { overflow-x: auto; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.8rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
ul { color: #444; }
pre { background: #f6f6f6; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
"""


def write_report(study: Study, folder: str | os.PathLike[str]) -> RunPath:
    """Writes everything that shows a study: table, figure and report.

    Args:
      study: The runs to compare.
      folder: Receives ``table.md``, ``figure.png``, ``figure.svg`` and
        ``report.html``; made if it does not exist.

    Returns:
      The path of ``report.html``, which holds the table and the figure and opens
      without a network.

    Example:
      >>> write_report(read_study("runs/quickstart"), "runs/quickstart")
    """
    folder = run_folder(folder)
    with FolderLock(folder, name=REPORT_LOCK_NAME):
        write_markdown(study, folder / "table.md")
        _, svg = write_figure(study, folder / "figure")
        report = folder / "report.html"
        report.write(_page(study, svg.read_bytes().decode()))
    return report


def _page(study: Study, svg: str) -> str:
    caveats = ", ".join(study.caveats)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(study.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(study.name)}</h1>",
        f'<p class="caveats">{html.escape(caveats)}</p>' if caveats else "",
        # From the tag on: an XML prologue names a DTD on the web.
        f'<div class="scroll">{svg[svg.index("<svg") :]}</div>',
        "<h2>To the target</h2>",
        f'<div class="scroll">{_table(study)}</div>',
        f"<ul>{_items(notes(study))}</ul>",
        "<h2>What it ran on</h2>",
        _json(study.runs[0].environment),
        *_before_the_arms(study),
        *_configs(study),
        "</body></html>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _table(study: Study) -> str:
    rows = [_row("th", HEADINGS), *(_row("td", cells(row)) for row in arm_rows(study))]
    return f"<table>{''.join(rows)}</table>"


def _row(tag: str, texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(t)}</{tag}>' for t in texts)}</tr>"


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(text)}</li>" for text in texts)


def _before_the_arms(study: Study) -> list[str]:
    if not study.calibration:
        return []
    return ["<h2>Measured before the arms ran</h2>", _json(study.calibration)]


def _configs(study: Study) -> list[str]:
    details = [
        f"<details><summary>{html.escape(run.name)}</summary>{_json(run.config)}"
        "</details>"
        for run in study.runs
        if run.config
    ]
    return ["<h2>Configs</h2>", *details] if details else []


def _json(value: Mapping[str, Any]) -> str:
    return f"<pre>{html.escape(json.dumps(value, indent=2, sort_keys=True))}</pre>"
