"""Makes every table and figure of the published studies from their trials.

``python -m benchmarks.published --workdir runs/published`` reads the trials in
``results/``. It writes the tables and figures there, the tables of the pages in
``docs/``, and one page of all studies, ``report.html``, in the work directory.
It trains nothing, and takes a minute.
"""

import argparse
import html
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import progress_bar
from benchmarks.published_tables import FACTORS, Studies, in_words, write_tables
from benchmarks.worth import read_points, write_worth
from echo_jax.cli.command_end import path_argument
from echo_jax.searches.comparison import is_searched, read_search
from echo_jax.searches.fastest import best_variants, fastest_report
from echo_jax.searches.table import search_report
from echo_jax.studies import page, read_study

_TITLE = "What echoing is worth, with every variant tuned"
_PREDICTION_HEADINGS = (
    "study",
    "refutes the prediction, written beforehand",
    "refuted",
    "found",
    "if below",
    "compares",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--workdir",
        type=path_argument,
        required=True,
        metavar="FOLDER",
        help="receives report.html, and the reports of each study",
    )
    for option, held in (("results", "trials"), ("docs", "pages")):
        parser.add_argument(
            f"--{option}", type=path_argument, default=option, help=f"holds the {held}"
        )
    args = parser.parse_args(argv)
    results, workdir = args.results, args.workdir
    folders = sorted(folder for folder in results.iterdir() if is_searched(folder))
    studies = {}
    with progress_bar() as bar:
        for folder in bar.track(folders, description="studies"):
            studies[folder.name] = search = read_search(folder)
            search_report(search).write(workdir / folder.name)
            _publish(workdir / folder.name, folder)
        found = [(studies[name], best_variants(studies[name])) for name in FACTORS]
        clocked = [
            read_study(path) for path in sorted(results.glob("seconds/R*_seed*"))
        ]
        fastest_report(found, clocked=clocked).write(workdir / "best")
        _publish(workdir / "best", results / "best")
        write_worth(read_points(results / "worth"), workdir / "worth")
        _publish(workdir / "worth", results / "worth")
        write_tables(studies, results, args.docs)
    report = workdir / "report.html"
    report.write_text(_report(studies, workdir), encoding="utf-8")
    print(report)
    return 0


def _publish(report: Path, folder: Path) -> None:
    """Copies the published files of a report."""
    for path in (report / "table.md", *sorted(report.glob("*.png"))):
        shutil.copy(path, folder)


def _report(studies: Studies, workdir: Path) -> str:
    """Returns the page of all studies: predictions, figures and tables."""
    parts = [page.table(_PREDICTION_HEADINGS, _prediction_rows(studies), texts=3)]
    for name, search in studies.items():
        title = html.escape(f"{name}: {search.name}")
        parts += [f"<h2>{title}</h2>", page.items([search.setting])]
        parts += search_report(search).html(_svgs(workdir / name))
    parts += ["<h2>Which variant is the fastest at which R</h2>"]
    parts += map(page.figure, _svgs(workdir / "best"))
    parts += ["<h2>Predicted and measured worth of a repeat</h2>"]
    parts += map(page.figure, _svgs(workdir / "worth"))
    return page.page(_TITLE, "", parts)


def _prediction_rows(studies: Studies) -> list[tuple[str, ...]]:
    refuted = {True: "yes", False: "no", None: "not significant"}
    rows = []
    for name, search in studies.items():
        what = f"final {search.metric}, {{}} - {{}}"
        if search.has_target:
            what = "fresh examples, {} / {}"
        for each in search.predictions:
            found, bound = in_words(each.ratio, 3), f"{each.bound:.3g}"
            compared = what.format(each.variant, each.over)
            rows.append(
                (name, each.says, refuted[each.is_refuted], found, bound, compared)
            )
    return rows


def _svgs(folder: Path) -> list[str]:
    paths = sorted(folder.glob("*.svg"))
    return [path.read_text(encoding="utf-8") for path in paths]


if __name__ == "__main__":
    sys.exit(main())
