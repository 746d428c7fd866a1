"""The command line: ``echo-jax train | study | probe | report | prepare``.

What a command needs is imported inside its branch: jax alone takes seconds to
import, and ``--help`` and a mistyped field should answer at once.
"""

import argparse
import contextlib
import functools
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import rich

from echo_jax import ending, prepare_command
from echo_jax.config import Config
from echo_jax.config_flags import load_with_flags
from echo_jax.countdown import Countdown
from echo_jax.failures import forget, quiet_libraries, sentence, status_of
from echo_jax.folders import FolderError, RunPath, run_folder
from echo_jax.printable import printable
from echo_jax.studies.runs import StudyError, read_runs, read_study

__all__ = ["main"]

_FAILED, _WRONG_USE = 1, 2
_LINE_EVERY_S = 10.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it; SIGTERM is 143, SIGHUP 129
_TRAINING = ("train", "study", "probe")  # with jax, and threads in native code

_EPILOG = """\
examples:
  echo-jax study --config configs/quickstart.py --workdir runs/quickstart
  echo-jax train --config configs/lm.py:tiny --workdir runs/lm
  echo-jax probe --config configs/quickstart.py
  echo-jax report runs/quickstart
  echo-jax prepare images photos/ --holdout 0.05 --out data/photos

Each command has a --help of its own."""

_TRAIN_EPILOG = """\
Every field of the config is a flag: --config.FIELD=VALUE. echo_jax/config.py says what
each means; a mistyped one is answered with those that there are.
The same command with the same workdir resumes.

Ctrl-C, SIGTERM or SIGHUP saves and ends, also while the data hangs; a second one ends
at once. Data that does not come is said after 30 s, and ends the run, saved, after
--config.data.timeout_s seconds. Exit status: 0; 1 if training failed; 2 if it cannot be
run as it was typed; 75 if the data did not come; 129, 130, 143 after SIGHUP, Ctrl-C,
SIGTERM.

examples:
  echo-jax train --config configs/lm.py:tiny --workdir runs/fixed \\
      --config.echo.factor=3.0 --config.echo.order=spread --config.echo.buffer=512
  echo-jax train --config configs/lm.py:tiny --workdir runs/adaptive \\
      --config.echo.mode=adaptive --config.echo.buffer=512
  echo-jax train --config configs/lm.py:tiny --workdir runs/lion \\
      --config.optim.name=optax.lion --config.optim.lr=3e-4"""

_STUDY_EPILOG = """\
The arms run one after another. A field of all arms is --config.base.FIELD=VALUE; of one
arm, if the config file sets it there, --config.arms.ARM.FIELD=VALUE.
The same command with the same workdir resumes: finished arms are kept.

example:
  echo-jax study --config configs/quickstart.py --workdir runs/quickstart"""

_PROBE_EPILOG = """\
It measures the loader alone, the step alone and both together, in turns, without
the config's echo, and leaves nothing behind. Of a study it measures the base.
Every field of the config is a flag: --config.FIELD=VALUE, and of a study's base
--config.base.FIELD=VALUE.

examples:
  echo-jax probe --config configs/quickstart.py
  echo-jax probe --config configs/lm.py:bytes --seconds 60 --json probe.json"""

_REPORT_EPILOG = """\
It prints a table, and writes table.md, figure.png, figure.svg and report.html.
After the word scaling, runs of one training on different numbers of devices are
compared instead: throughput and efficiency. (A folder of that name is ./scaling.)

examples:
  echo-jax report runs/quickstart
  echo-jax report runs/baseline runs/spread --workdir runs/compared
  echo-jax report scaling runs/on_1 runs/on_4 runs/on_16 --workdir runs/scaling"""

_PREPARE_EPILOG = """\
It writes shards of records, and a dataset.json last. The same command goes on where it
was stopped. Train on the folder with --config.data.source=FOLDER.

examples:
  echo-jax prepare images train=train.tar.gz validation=test.tar.gz --out data/cifar10
  echo-jax prepare coco train=instances.json.gz:train.tar --out data/coco
  echo-jax prepare text train=train.txt.xz validation=valid.txt.xz --out data/wikitext2

Each kind has a --help of its own."""


class _Exit(Exception):
    """The end of a command that did not succeed: the status, and what to say."""

    def __init__(self, status: int, message: str | BaseException):
        is_error = isinstance(message, BaseException)
        super().__init__(sentence(message) if is_error else message)
        self.status = status


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        said = printable(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(_WRONG_USE, f"{said}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        _flush()
        super().exit(status, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: The command line after the program's name; of this process if None.

    Returns:
      The exit status: 0, 1 if it failed or nobody reads on what is printed, 2 if
      what was typed cannot be run, 75 if the data did not come, 129, 130 or 143 if a
      signal stopped it. What failed is said in a line on standard error, and with
      ``--debug`` by a traceback before it.

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
        _flush()
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
    _flush()
    if status > _WRONG_USE:
        # Imported here: it imports jax.
        from echo_jax import runs

        if runs.is_alone():
            # Threads that wait for data, or compile, are not waited for.
            ending.end(status)
    return status


def _run(argv: list[str]) -> int:
    args, extras = _parser().parse_known_args(argv)
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
    if status > _WRONG_USE:
        print(f"  {shlex.join(['echo-jax', *argv])}", file=sys.stderr)
    return status


def _one_line(message: str) -> str:
    """Joins the lines that a message was written in."""
    return " ".join(line.strip() for line in message.split("\n")).strip()


def _flush() -> None:
    """Writes what was printed now: while Python ends nobody could catch an error."""
    print(end="", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="echo-jax",
        description="Train with data echoing, and compare what it is worth.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, about: str, epilog: str, to: Any = commands
    ) -> argparse.ArgumentParser:
        command = to.add_parser(
            name,
            help=about,
            description=about[:1].upper() + about[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # --config.seed is a field, not a shortened --config.
            allow_abbrev=False,
        )
        command.add_argument(
            "--debug",
            action="store_true",
            help="show the traceback of a failure, and what libraries say of it",
        )
        return command

    train = add("train", "train one model", _TRAIN_EPILOG)
    study = add("study", "train the arms of a study and compare them", _STUDY_EPILOG)
    probe = add("probe", "measure whether an echo would help", _PROBE_EPILOG)
    for command in (train, study, probe):
        command.add_argument(
            "--config",
            required=True,
            metavar="FILE.py[:VARIANT]",
            help="the config file, and which of its variants",
        )
    for command in (train, study):
        command.add_argument(
            "--workdir",
            required=True,
            metavar="FOLDER",
            help="receives the results, here or in gs://BUCKET/FOLDER; resumes what "
            "it already holds",
        )
    probe.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="how long to measure (default: 20)",
    )
    probe.add_argument(
        "--json",
        metavar="FILE",
        help="also write the report to a file, as JSON; - prints the JSON instead",
    )
    report = add("report", "compare finished runs", _REPORT_EPILOG)
    report.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="a study, or runs to compare; each may be gs://BUCKET/FOLDER",
    )
    report.add_argument(
        "--workdir",
        metavar="FOLDER",
        help="receives the report (default: the study, or the only run)",
    )
    prepare = add(
        "prepare", "turn files of yours into data to train on", _PREPARE_EPILOG
    )
    kinds = prepare.add_subparsers(dest="kind", required=True, metavar="KIND")
    prepare_command.add_kinds(functools.partial(add, to=kinds))
    return parser


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
    config = _load(args.config, extras)
    workdir = _folder(args.workdir)
    # Imported here: it imports jax.
    from echo_jax import runs

    with _exits_of(runs):
        runs.run_study(config, workdir)
    return _show([workdir], workdir)


def _probe(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = _load(args.config, extras)
    file = Path(args.json) if args.json not in (None, "-") else None
    if args.json == "" or (file and file.is_dir()):
        raise _Exit(_WRONG_USE, f"--json={args.json!r} is no file; name one, or -")
    if file and not file.parent.is_dir():
        raise _Exit(_WRONG_USE, f"--json={file}: there is no folder {file.parent}")
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
        raise _Exit(_WRONG_USE, error) from error
    except (runs.DamagedCheckpointError, runs.NonFiniteLossError) as error:
        raise _Exit(_FAILED, error) from error
    except (runs.DataTimeoutError, runs.Interrupted) as error:
        raise _Exit(error.exit_code, error) from error


def _report(args: argparse.Namespace, extras: Sequence[str]) -> int:
    if extras:
        raise _Exit(_WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    # The word, not a path: ./scaling is a folder.
    is_scaling = args.folders[0] == "scaling"
    folders = [_folder(folder) for folder in args.folders[is_scaling:]]
    if not folders:
        raise _Exit(
            _WRONG_USE,
            "scaling needs run folders after it; a folder of that name is ./scaling",
        )
    if len(folders) > 1 and args.workdir is None:
        raise _Exit(
            _WRONG_USE,
            "several run folders need a folder for the report: add --workdir FOLDER",
        )
    show = _show_scaling if is_scaling else _show
    return show(folders, folders[0] if args.workdir is None else _folder(args.workdir))


def _folder(path: str) -> RunPath:
    """Opens a run folder, or ends the command."""
    try:
        return run_folder(path)
    except FolderError as error:
        raise _Exit(_WRONG_USE, error) from error


def _prepare(args: argparse.Namespace, extras: Sequence[str]) -> int:
    if extras:
        raise _Exit(_WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    try:
        with Countdown(line_every_s=_LINE_EVERY_S) as countdown:
            said = prepare_command.run(args, countdown.show)
    except (FolderError, ValueError) as error:
        raise _Exit(_WRONG_USE, error) from error
    print(said)
    return 0


def _show(folders: Sequence[RunPath], workdir: RunPath) -> int:
    """Prints the table of one study or of runs; writes it, figure and report."""
    # Imported here: matplotlib takes a second, and --help does without.
    from echo_jax.studies.report import write_report
    from echo_jax.studies.table import terminal_table

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


@contextlib.contextmanager
def _refused_studies() -> Iterator[None]:
    """Turns run folders that cannot be compared into an exit."""
    try:
        yield
    except (FolderError, StudyError) as error:
        raise _Exit(_WRONG_USE, error) from error


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
    except (AttributeError, OSError, ValueError) as error:
        raise _Exit(_WRONG_USE, error) from error


_COMMANDS = {
    "train": _train,
    "study": _study,
    "probe": _probe,
    "report": _report,
    "prepare": _prepare,
}
