"""The command ``echo-jax report``: its options and its output."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich
from etils import epath

from echo_jax.cli.command_end import (
    Exit,
    add_number,
    exits_of,
    typed_config,
    typed_folder,
)
from echo_jax.files.folders import FolderError
from echo_jax.studies.runs import StudyError, read_runs, read_study
from echo_jax.terminal.countdown import Countdown
from echo_jax.terminal.printable import printable

_EPILOG = """\
The word study may be left out. For a folder named like a word, type ./study.

examples:
  echo-jax report runs/quickstart
  echo-jax report runs/baseline runs/spread --workdir runs/compared
  echo-jax report scaling runs/on_1 runs/on_4 runs/on_16 --workdir runs/scaling
  echo-jax report examples runs/lm

Each word has a --help of its own."""

_STUDY_EPILOG = """\
It prints a table, and writes table.md, figures (PNG and SVG) and report.html.

several studies that searched   which variant of each is the fastest at which R;
                                studies without a search are points of the figure
several studies that differ     the costs of each variant over the seeds
only in the seed

examples:
  echo-jax report study runs/quickstart
  echo-jax report runs/baseline runs/spread --workdir runs/compared
  echo-jax report results/s2_8 results/s2_32 --workdir runs/best
  echo-jax report results/s2_32 results/seconds/R4_seed0 --workdir runs/clocked
  echo-jax report runs/quickstart runs/quickstart_1 --workdir runs/seeds"""

_SCALING_EPILOG = """\
It prints throughput and efficiency, and writes scaling.md and scaling.png.

example:
  echo-jax report scaling runs/on_1 runs/on_4 runs/on_16 --workdir runs/scaling"""

_EXAMPLES_EPILOG = """\
It writes examples.html, which shows every use of each example as updates see it.
Every field of a --config is a flag: --config.FIELD=VALUE.

examples:
  echo-jax report examples runs/lm
  echo-jax report examples --config configs/shapes.py:tiny --workdir runs/looked_at"""


def add_command(add: Callable[..., Any]) -> None:
    """Adds the command with its words, and the options of each."""
    report = add("report", "compare finished runs", _EPILOG)
    words = report.add_subparsers(dest="word", required=True, metavar="WORD")
    about = "compare the variants of a study, several runs, or several studies"
    study = add("study", about, _STUDY_EPILOG, words)
    about = "compare runs of one training on different numbers of devices"
    scaling = add("scaling", about, _SCALING_EPILOG, words)
    about = "draw the first examples of a run or a config"
    examples = add("examples", about, _EXAMPLES_EPILOG, words)
    report.words = tuple(words.choices)
    about = "here or gs://BUCKET/FOLDER; may be repeated"
    for word, what in ((study, "a study or run"), (scaling, "a run")):
        word.add_argument(
            "folders", nargs="+", metavar="FOLDER", help=f"{what}, {about}"
        )
    given = examples.add_mutually_exclusive_group(required=True)
    given.add_argument("run", nargs="?", metavar="RUN", help="a run folder")
    about = "a config, instead of a run"
    given.add_argument("--config", metavar="CONFIG[:VARIANT]", help=about)
    add_number(
        examples, "--updates", 100, "N", "draw the examples of at most N updates"
    )
    about = "receives the report"
    scaling.add_argument("--workdir", required=True, metavar="FOLDER", help=about)
    for word, own in ((study, "the study, or the only run"), (examples, "the run")):
        said = f"{about} (default: {own})"
        word.add_argument("--workdir", metavar="FOLDER", help=said)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.word == "examples":
        return _show_examples(args)
    folders = [typed_folder(folder) for folder in args.folders]
    make = _show_scaling if args.word == "scaling" else show
    return make(folders, _workdir(args, folders))


def _workdir(args: argparse.Namespace, folders: Sequence[epath.Path]) -> epath.Path:
    if args.workdir is None and len(folders) != 1:
        raise Exit("the report needs a folder of its own; add --workdir FOLDER")
    return folders[0] if args.workdir is None else typed_folder(args.workdir)


@contextlib.contextmanager
def _refused_studies() -> Iterator[None]:
    """Turns run folders that cannot be compared into an exit."""
    try:
        yield
    except (FolderError, StudyError) as error:
        raise Exit(error) from error


def check_drawing() -> None:
    """Exits if matplotlib cannot be imported."""
    try:
        # Imported here: matplotlib takes a second, and --help does not need it.
        from echo_jax.studies import figures  # noqa: F401
    except (OSError, ValueError) as error:
        raise Exit(
            f"matplotlib, which draws the figures, cannot be imported: {error}; mend "
            "or remove its settings file 'matplotlibrc', or set MPLCONFIGDIR to a "
            "folder that can be written"
        ) from error


@_refused_studies()
def show(folders: Sequence[epath.Path], workdir: epath.Path) -> int:
    """Prints the table of a study or of runs; writes it with figure and page."""
    check_drawing()
    report = _report(folders)
    files = report.write(workdir)
    return _shown([report], files[0], files[-1])


def _report(folders: Sequence[epath.Path]) -> Any:
    """Returns the report on folders, which depends on what they hold."""
    from echo_jax.searches.comparison import is_searched, read_search
    from echo_jax.searches.fastest import best_variants, fastest_report
    from echo_jax.searches.table import search_report
    from echo_jax.studies.seeds import read_seeds, seeds_report
    from echo_jax.studies.table import study_report

    are_studies = [(folder / "study.json").exists() for folder in folders]
    searched = [folder for folder in folders if is_searched(folder)]
    if searched and len(folders) == 1:
        return search_report(read_search(folders[0]))
    if searched and all(are_studies):
        found = [(each, best_variants(each)) for each in map(read_search, searched)]
        clocked = [read_study(each) for each in folders if each not in searched]
        return fastest_report(found, clocked=clocked)
    if len(folders) > 1 and all(are_studies):
        return seeds_report(read_seeds(folders))
    study = read_study(folders[0]) if are_studies == [True] else read_runs(folders)
    return study_report(study)


@_refused_studies()
def _show_scaling(folders: Sequence[epath.Path], workdir: epath.Path) -> int:
    """Prints throughput by devices; writes it with its figure."""
    check_drawing()
    from echo_jax.studies.scaling import read_scaling, scaling_reports, write_scaling

    groups = read_scaling(folders)
    files = write_scaling(groups, workdir)
    return _shown(scaling_reports(groups), *files)


def _show_examples(args: argparse.Namespace) -> int:
    """Draws the first examples of a config or a run, with all their uses."""
    runs_given = [] if args.run is None else [typed_folder(args.run)]
    config = runs_given[0] if runs_given else typed_config(args.config, args.fields)
    folder = _workdir(args, runs_given)
    # Imported here: it imports jax.
    from echo_jax import runs

    with exits_of(runs), Countdown(line_every_s=10.0) as countdown:
        page = runs.show_examples(
            config, folder, updates=args.updates, on_progress=countdown.show
        )
    print(printable(page))
    return 0


def _shown(reports: Sequence[Any], *files: epath.Path) -> int:
    """Prints the tables of reports, and the files that were written."""
    for report in reports:
        rich.print()
        rich.print(report.terminal())
    print("", *map(printable, files), sep="\n")
    return 0
