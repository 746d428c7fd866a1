"""The command ``echo-jax report``: its options and its output."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich

from echo_jax.cli.command_end import Exit, exits_of, typed_config, typed_folder
from echo_jax.files.folders import FolderError, RunPath
from echo_jax.studies.runs import StudyError, read_runs, read_study
from echo_jax.terminal.countdown import Countdown
from echo_jax.terminal.printable import printable

_EPILOG = """\
It prints a table, and writes table.md, figure.png, figure.svg and report.html. Of
several studies that searched, it says which arm of each is the fastest at which R, and
studies beside them that did not search are points of its figure, by their clock; of
several others that differ in the seed alone, what each arm needed over the seeds.
After the word scaling, runs of one training on different numbers of devices are
compared instead: throughput and efficiency. (A folder of that name is ./scaling.)
After the word examples, the first examples of a run, or of a --config, are drawn, with
each of their uses as updates see them: examples.html.

examples:
  echo-jax report runs/quickstart
  echo-jax report runs/baseline runs/spread --workdir runs/compared
  echo-jax report results/s2_8 results/s2_32 --workdir runs/best
  echo-jax report results/s2_32 results/seconds/R4_seed0 --workdir runs/clocked
  echo-jax report runs/quickstart runs/quickstart_1 --workdir runs/seeds
  echo-jax report scaling runs/on_1 runs/on_4 runs/on_16 --workdir runs/scaling
  echo-jax report examples --config configs/shapes.py:tiny --workdir runs/looked_at"""


def add_command(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Adds the command with its options."""
    report = add("report", "compare finished runs", _EPILOG)
    report.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="a study, or runs to compare; each may be gs://BUCKET/FOLDER; before "
        "them perhaps the word scaling or examples",
    )
    report.add_argument(
        "--workdir",
        metavar="FOLDER",
        help="receives the report (default: the study, or the only run)",
    )
    report.add_argument(
        "--config",
        metavar="CONFIG[:VARIANT]",
        help="for examples: the config; its fields are flags",
    )
    report.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="for examples: at most so many updates (default: 100)",
    )


def run(args: argparse.Namespace, extras: Sequence[str]) -> int:
    """Runs the command; `extras` are fields of a config."""
    # A word, not a path: ./scaling is a folder.
    word = args.folders[0]
    for name in ("config", "updates"):
        if getattr(args, name) is not None and word != "examples":
            raise Exit(f"--{name} belongs to the word examples; leave it out")
    if word == "examples":
        return _show_examples(args, extras)
    if extras:
        raise Exit(f"unknown option {extras[0]!r}; see --help")
    is_scaling = args.folders[0] == "scaling"
    folders = [typed_folder(folder) for folder in args.folders[is_scaling:]]
    if not folders:
        raise Exit(
            "scaling needs run folders after it; a folder of that name is ./scaling"
        )
    if len(folders) > 1 and args.workdir is None:
        raise Exit(
            "several run folders need a folder for the report: add --workdir FOLDER"
        )
    workdir = folders[0] if args.workdir is None else typed_folder(args.workdir)
    return (_show_scaling if is_scaling else show)(folders, workdir)


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
def show(folders: Sequence[RunPath], workdir: RunPath) -> int:
    """Prints the table of a study or of runs; writes it with figure and report."""
    check_drawing()
    from echo_jax.searches.comparison import is_searched, read_search
    from echo_jax.searches.fastest import best_arms, best_arms_table, write_best_arms
    from echo_jax.searches.table import search_table, write_search_report
    from echo_jax.studies.report import write_report
    from echo_jax.studies.seeds import read_seeds, seeds_table, write_seeds_report
    from echo_jax.studies.table import terminal_table

    if len(folders) == 1 and is_searched(folders[0]):
        search = read_search(folders[0])
        report = write_search_report(search, workdir)
        return _shown(search_table(search), workdir / "curves.png", report)
    are_studies = [(folder / "study.json").exists() for folder in folders]
    searched = [folder for folder in folders if is_searched(folder)]
    if searched and all(are_studies):
        found = [(each, best_arms(each)) for each in map(read_search, searched)]
        clocked = [read_study(each) for each in folders if each not in searched]
        files = write_best_arms(found, workdir, clocked=clocked)
        return _shown(best_arms_table(found), *files)
    if len(folders) > 1 and all(are_studies):
        seeds = read_seeds(folders)
        files = write_seeds_report(seeds, workdir)
        return _shown(seeds_table(seeds), *files)
    study = read_study(folders[0]) if are_studies == [True] else read_runs(folders)
    report = write_report(study, workdir)
    return _shown(terminal_table(study), workdir / "figure.png", report)


@_refused_studies()
def _show_scaling(folders: Sequence[RunPath], workdir: RunPath) -> int:
    """Prints throughput by devices; writes it with its figure."""
    check_drawing()
    from echo_jax.studies.scaling import read_scaling, terminal_tables, write_scaling

    groups = read_scaling(folders)
    files = write_scaling(groups, workdir)
    return _shown(terminal_tables(groups), *files)


def _show_examples(args: argparse.Namespace, extras: Sequence[str]) -> int:
    """Draws the first examples of a config or a run, with all their uses."""
    config = _config_or_run(args, extras)
    if args.workdir is None and args.config is not None:
        raise Exit("examples needs a folder for its page: add --workdir FOLDER")
    folder = typed_folder(args.workdir or args.folders[1])
    # Imported here: it imports jax.
    from echo_jax import runs

    updates = 100 if args.updates is None else args.updates
    with exits_of(runs), Countdown(line_every_s=10.0) as countdown:
        page = runs.show_examples(
            config, folder, updates=updates, on_progress=countdown.show
        )
    print(printable(page))
    return 0


def _config_or_run(args: argparse.Namespace, extras: Sequence[str]) -> Any:
    """Returns the given config or run folder."""
    runs_given = args.folders[1:]
    if (args.config is None) == (not runs_given):
        raise Exit(
            "examples needs a config or a run: add --config FILE.py, or one run folder;"
            " a folder of that name is ./examples"
        )
    if args.config is not None:
        return typed_config(args.config, extras)
    if len(runs_given) > 1:
        raise Exit("examples takes one run folder; leave the others out")
    if extras:
        raise Exit(f"unknown option {extras[0]!r}: fields belong to --config FILE.py")
    return typed_folder(runs_given[0])


def _shown(table: Any, *files: RunPath) -> int:
    """Prints a table and its files."""
    rich.print()
    rich.print(table)
    print("", *map(printable, files), sep="\n")
    return 0
