"""The command line, ``echo-jax COMMAND``: what each command does.

What a command needs is imported inside its branch: jax alone takes seconds to
import, and ``--help`` and a mistyped field should answer at once.
"""

import argparse
import contextlib
import functools
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import rich
from rich.table import Table

from echo_jax import configs_command, ending, model_commands, prepare_command
from echo_jax.cli_parser import WRONG_USE, make_parser
from echo_jax.config import Config
from echo_jax.config_flags import load_with_flags
from echo_jax.countdown import Countdown
from echo_jax.failures import forget, quiet_libraries, sentence, status_of
from echo_jax.folders import FolderError, RunPath, run_folder
from echo_jax.printable import printable
from echo_jax.studies.runs import StudyError, read_runs, read_study

__all__ = ["main"]

_FAILED = 1
_LINE_EVERY_S = 10.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it; SIGTERM is 143, SIGHUP 129
_TRAINING = ("train", "study", "sweep", "probe")  # with jax, and threads in native code


class _Exit(Exception):
    """The end of a command that did not succeed: the status, and what to say."""

    def __init__(self, status: int, message: str | BaseException):
        is_error = isinstance(message, BaseException)
        super().__init__(sentence(message) if is_error else message)
        self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: The command line after the program's name; of this process if None.

    Returns:
      The exit status: 0, 1 if it failed or nobody reads on what is printed, 2 if
      what was typed cannot be run, 75 if the data did not come or another process was
      lost, 129, 130 or 143 if a signal stopped it. What failed is said in a line on
      standard error, and with ``--debug`` by a traceback before it.

    Raises:
      SystemExit: After ``--help``, and where the command itself is mistyped.

    Example:
      >>> main(["report", "runs/quickstart"])
      0
    """
    try:
        if argv is None and sys.argv[1:2] and sys.argv[1] in _TRAINING:
            with ending.EndsAtOnce(["echo-jax", *sys.argv[1:]]):
                return _of_this_process(sys.argv[1:])
        status = _run(sys.argv[1:] if argv is None else list(argv))
        ending.flush_output()
        return status
    except BrokenPipeError:
        # Another pipe, such as that of a worker process, is a failure like any other.
        # The rest goes nowhere, as the note on SIGPIPE in the documentation of Python's
        # `signal` has it, and as rich does where it prints.
        if not ending.drop_lost_outputs():
            raise
        return _FAILED


def _of_this_process(argv: list[str]) -> int:
    """Runs a command that has the process for itself."""
    status = _run(argv)
    ending.flush_output()
    if status > WRONG_USE:
        # Imported here: it imports jax.
        from echo_jax import runs

        if runs.is_alone() or runs.has_ended():
            # Threads that wait for data, or compile, are not waited for.
            ending.end(status)
    return status


def _run(argv: list[str]) -> int:
    args, extras = make_parser().parse_known_args(argv)
    with contextlib.nullcontext() if args.debug else quiet_libraries():
        try:
            return _COMMANDS[args.command](args, extras)
        except _Exit as end:
            error, status, message = end, end.status, str(end)
        except KeyboardInterrupt as end:
            error, status = end, _INTERRUPTED
            message = "interrupted; run the same command to resume"
        except Exception as end:
            if isinstance(end, BrokenPipeError) and ending.drop_lost_outputs():
                return _FAILED
            error, status, message = end, status_of(end), sentence(end)
        if args.debug:
            traceback.print_exception(error)
        forget(error)
    print(f"echo-jax {args.command}: {printable(_one_line(message))}", file=sys.stderr)
    if status > WRONG_USE:
        print(f"  {shlex.join(['echo-jax', *argv])}", file=sys.stderr)
    return status


def _one_line(message: str) -> str:
    """Joins the lines that a message was written in."""
    return " ".join(line.strip() for line in message.split("\n")).strip()


def _train(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = _load(args.config, extras)
    workdir = _folder(args.workdir)
    # Imported here: it imports jax.
    from echo_jax import runs

    with _exits_of(runs):
        runs.run_train(config, workdir, connect=True)
    if runs.is_main_process():
        print(f"\n{printable(workdir / 'summary.json')}")
    return 0


def _study(args: argparse.Namespace, extras: Sequence[str]) -> int:
    return _search(_load(args.config, extras), _folder(args.workdir), args.jobs)


def _search(study: Config, workdir: RunPath, jobs: int) -> int:
    """Runs a study, and shows it."""
    # Imported here: it imports jax.
    from echo_jax import runs

    with _exits_of(runs):
        runs.run_study(study, workdir, jobs=jobs)
    try:
        return _show([workdir], workdir)
    except _Exit as end:
        if not isinstance(end.__cause__, runs.FolderInUseError):
            raise
        # Another process has ended the same search just now.
        print(f"another process writes {printable(workdir / 'report.html')}")
        return 0


def _sweep(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = _load(args.config, extras)
    workdir = _folder(args.workdir)
    over = dict(each.partition("=")[::2] for each in args.over)
    # Imported here: it imports SciPy.
    from echo_jax.config_study import sweep_of

    try:
        study = sweep_of(
            config,
            over,
            name=f"{args.config}, over {', '.join(over)}",
            points=args.points,
            streams=args.seeds,
        )
    except ValueError as error:
        raise _Exit(WRONG_USE, error) from error
    return _search(study, workdir, args.jobs)


def _probe(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = _load(args.config, extras)
    file = Path(args.json) if args.json not in (None, "-") else None
    if args.json == "" or (file and file.is_dir()):
        raise _Exit(WRONG_USE, f"--json={args.json!r} is no file; name one, or -")
    if file and not file.parent.is_dir():
        raise _Exit(WRONG_USE, f"--json={file}: there is no folder {file.parent}")
    # Imported here: it imports jax.
    from echo_jax import runs

    with _exits_of(runs), Countdown() as countdown:
        report = runs.run_probe(
            config, seconds=args.seconds, on_progress=countdown.show
        )
    print(report.to_json() if args.json == "-" else report)
    if file:
        try:
            file.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            error.filename = str(file)  # An open file has none.
            raise
        print(f"\n{printable(file)}")
    return 0


@contextlib.contextmanager
def _exits_of(runs: ModuleType) -> Iterator[None]:
    """Turns how `echo_jax.runs` may end into exits of the command."""
    try:
        yield
    except (runs.ConfigRefusedError, FolderError) as error:
        raise _Exit(WRONG_USE, error) from error
    except (runs.DamagedCheckpointError, runs.NonFiniteLossError) as error:
        raise _Exit(_FAILED, error) from error
    except (
        runs.DataTimeoutError,
        runs.Interrupted,
        runs.LostWorkerError,
        runs.StudyStopped,
    ) as error:
        raise _Exit(error.exit_code, error) from error


# Of the command report: which of its words an option belongs to.
_OPTIONS_OF_WORDS = {
    "config": ("collectives", "precision"),
    "updates": ("precision",),
    **dict.fromkeys(("target", "bandwidth", "devices", "compute_ms"), ("collectives",)),
}


def _report(args: argparse.Namespace, extras: Sequence[str]) -> int:
    # The words, not paths: ./scaling is a folder.
    word = args.folders[0]
    for name, words in _OPTIONS_OF_WORDS.items():
        if getattr(args, name) is not None and word not in words:
            option, of = f"--{name.replace('_', '-')}", " and ".join(words)
            plural = "s" if len(words) > 1 else ""
            raise _Exit(
                WRONG_USE, f"{option} belongs to the word{plural} {of}; leave it out"
            )
    if word == "collectives":
        return _show_collectives(args, extras)
    if word == "precision":
        return _show_precision(args, extras)
    if extras:
        raise _Exit(WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    is_scaling = args.folders[0] == "scaling"
    folders = [_folder(folder) for folder in args.folders[is_scaling:]]
    if not folders:
        raise _Exit(
            WRONG_USE,
            "scaling needs run folders after it; a folder of that name is ./scaling",
        )
    if len(folders) > 1 and args.workdir is None:
        raise _Exit(
            WRONG_USE,
            "several run folders need a folder for the report: add --workdir FOLDER",
        )
    show = _show_scaling if is_scaling else _show
    return show(folders, folders[0] if args.workdir is None else _folder(args.workdir))


def _folder(path: str) -> RunPath:
    """Opens a run folder, or ends the command."""
    try:
        return run_folder(path)
    except FolderError as error:
        raise _Exit(WRONG_USE, error) from error


def _prepare(args: argparse.Namespace, extras: Sequence[str]) -> int:
    if extras:
        raise _Exit(WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    try:
        with Countdown(line_every_s=_LINE_EVERY_S) as countdown:
            said = prepare_command.run(args, countdown.show)
    except (FolderError, ValueError) as error:
        raise _Exit(WRONG_USE, error) from error
    print(said)
    return 0


def _use(
    command: Callable[[argparse.Namespace], list[Any]],
    args: argparse.Namespace,
    extras: Sequence[str],
) -> int:
    """Runs a command on a trained run, and prints what it says."""
    if extras:
        raise _Exit(WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    try:
        said = command(args)
    except (FolderError, ModuleNotFoundError, ValueError) as error:
        raise _Exit(WRONG_USE, error) from error
    for each in said:
        rich.print(each) if isinstance(each, Table) else print(each)
    return 0


def _show(folders: Sequence[RunPath], workdir: RunPath) -> int:
    """Prints the table of one study or of runs; writes it, figure and report."""
    # Imported here: matplotlib takes a second, and --help does without.
    from echo_jax.searches.best_arms import (
        best_arms,
        best_arms_table,
        write_best_arms,
    )
    from echo_jax.searches.comparison import is_searched, read_search
    from echo_jax.searches.report import write_search_report
    from echo_jax.searches.table import search_table
    from echo_jax.studies.report import write_report
    from echo_jax.studies.table import terminal_table

    if len(folders) == 1 and is_searched(folders[0]):
        with _refused_studies():
            search = read_search(folders[0])
            report = write_search_report(search, workdir)
        return _shown(search_table(search), workdir / "curves.png", report)
    if all(map(is_searched, folders)):
        with _refused_studies():
            found = [(each, best_arms(each)) for each in map(read_search, folders)]
            files = write_best_arms(found, workdir)
        return _shown(best_arms_table(found), *files)
    is_study = len(folders) == 1 and (folders[0] / "study.json").exists()
    with _refused_studies():
        study = read_study(folders[0]) if is_study else read_runs(folders)
        report = write_report(study, workdir)
    return _shown(terminal_table(study), workdir / "figure.png", report)


def _show_scaling(folders: Sequence[RunPath], workdir: RunPath) -> int:
    """Prints throughput by devices; writes it and its figure."""
    # Imported here: matplotlib takes a second, and --help does without.
    from echo_jax.studies.scaling import read_scaling, terminal_tables
    from echo_jax.studies.scaling_figure import write_scaling

    with _refused_studies():
        groups = read_scaling(folders)
        files = write_scaling(groups, workdir)
    return _shown(terminal_tables(groups), *files)


def _show_precision(args: argparse.Namespace, extras: Sequence[str]) -> int:
    """Prints what the precision of a config changes in its first updates."""
    if args.config is None or len(args.folders) > 1:
        raise _Exit(
            WRONG_USE,
            "precision needs a config: add --config FILE.py, and no folder; a folder "
            "of that name is ./precision",
        )
    config = _load(args.config, extras)
    # Imported here: it imports jax.
    from echo_jax import runs

    with _exits_of(runs):
        updates = 5 if args.updates is None else args.updates
        print(runs.describe_precision(config, updates=updates))
    return 0


def _show_collectives(args: argparse.Namespace, extras: Sequence[str]) -> int:
    """Prints what the compiled update of a config or a run sends, and what it costs."""
    config = _named_update(args, extras)
    for name in ("bandwidth", "devices", "compute_ms"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and not 0 < value < math.inf:
            raise _Exit(WRONG_USE, f"{option}={value:g} must be above 0, and finite")
        if value is not None and args.bandwidth is None:
            raise _Exit(
                WRONG_USE,
                f"{option} is for the cost of sending: add --bandwidth GB/S, what a "
                "device can send",
            )
    if args.target:
        # Read as jax is imported: no plugin looks for devices, and says that it has
        # found none.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Imported here: it imports jax.
    from echo_jax import runs
    from echo_jax.training.cost_model import describe_cost

    with _exits_of(runs):
        found = runs.describe_collectives(config, target=args.target or "")
    if args.target:
        print(f"Compiled for {args.target}, which is not here, and not run.")
    print(found)
    if args.bandwidth is not None:
        said = describe_cost(
            found.gradient_bytes,
            args.devices or found.num_devices,
            bytes_per_s=args.bandwidth * 1e9,
            examples_per_device=found.examples / found.num_devices,
            compute_s=None if args.compute_ms is None else args.compute_ms / 1e3,
        )
        print(f"\n{said}")
    return 0


def _named_update(args: argparse.Namespace, extras: Sequence[str]) -> Any:
    """Returns the config, or the run folder, whose update is meant."""
    runs_given = args.folders[1:]
    if (args.config is None) == (not runs_given):
        raise _Exit(
            WRONG_USE,
            "collectives needs a config or a run: add --config FILE.py, or one run "
            "folder; a folder of that name is ./collectives",
        )
    if args.config is not None:
        return _load(args.config, extras)
    if len(runs_given) > 1:
        raise _Exit(WRONG_USE, "collectives takes one run folder; leave the others out")
    if extras:
        raise _Exit(
            WRONG_USE,
            f"unknown option {extras[0]!r}: fields belong to --config FILE.py",
        )
    return _folder(runs_given[0])


@contextlib.contextmanager
def _refused_studies() -> Iterator[None]:
    """Turns run folders that cannot be compared into an exit."""
    try:
        yield
    except (FolderError, StudyError) as error:
        raise _Exit(WRONG_USE, error) from error


def _shown(table: Any, *files: RunPath) -> int:
    """Prints a table and the files that hold it."""
    rich.print()
    rich.print(table)
    print("", *map(printable, files), sep="\n")
    return 0


def _load(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config file with its flags, or ends the command."""
    try:
        return load_with_flags(path, flags_given)
    except OSError as error:
        raise _Exit(WRONG_USE, error) from error
    except (AttributeError, ValueError) as error:
        # Also in the words of the config file, such as those on its variants.
        raise _Exit(WRONG_USE, str(error)) from error


_COMMANDS = {
    "train": _train,
    "study": _study,
    "sweep": _sweep,
    "probe": _probe,
    "report": _report,
    "evaluate": functools.partial(_use, model_commands.run_evaluate),
    "predict": functools.partial(_use, model_commands.run_predict),
    "export": functools.partial(_use, model_commands.run_export),
    "configs": functools.partial(_use, configs_command.run),
    "prepare": _prepare,
}
