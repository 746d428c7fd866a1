"""The command line, ``echo-jax COMMAND``: what each command does.

What a command needs is imported inside its branch: jax alone takes seconds to
import, and ``--help`` and a mistyped field should answer at once.
"""

import argparse
import contextlib
import functools
import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import rich
from rich.console import Console
from rich.table import Table

from echo_jax.cli import (
    configs_command,
    model_commands,
    prepare_command,
    report_command,
)
from echo_jax.cli.command_end import (
    FAILED,
    WRONG_USE,
    Exit,
    exits_of,
    typed_config,
    typed_folder,
)
from echo_jax.cli.parser import make_parser
from echo_jax.config import Config
from echo_jax.files.folders import FolderError, RunPath
from echo_jax.terminal import ending
from echo_jax.terminal.countdown import Countdown
from echo_jax.terminal.failures import forget, quiet_libraries, sentence, status_of
from echo_jax.terminal.notes import Notes
from echo_jax.terminal.printable import printable

__all__ = ["main"]

_LINE_EVERY_S = 10.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_TRAINING = ("train", "study", "sweep", "probe")  # with jax, and threads in native code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: The command line after the program's name; of this process if None.

    Returns:
      The exit status: 0, 1 if it failed or nobody reads on what is printed, 2 if
      what was typed cannot be run, 75 if the data did not come or another process was
      lost, 128 + its number if a signal stopped it. What failed is said in a line on
      standard error, and with ``--debug`` by a traceback before it.

    Raises:
      SystemExit: After ``--help``, and where the command itself is mistyped.

    Example:
      >>> main(["report", "runs/quickstart"])
      0
    """
    try:
        if argv is not None:
            return _run(list(argv))
        argv = sys.argv[1:]
        # A notebook's backend, which a command in a cell inherits, may not be installed
        # here, and matplotlib is not imported then. Figures are files.
        os.environ.pop("MPLBACKEND", None)
        for stream in (sys.stdout, sys.stderr):
            # Where they take ASCII alone, a character that they lack is a "?".
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with contextlib.ExitStack() as stack:
            if argv and argv[0] in _TRAINING:
                stack.enter_context(ending.EndsAtOnce(["echo-jax", *argv]))
            return _of_this_process(argv)
    except BrokenPipeError:
        # Another pipe, such as that of a worker process, is a failure like any other.
        # The rest goes nowhere, as the note on SIGPIPE in the documentation of Python's
        # `signal` has it, and as rich does where it prints.
        if not ending.drop_lost_outputs():
            raise
        return FAILED


def _of_this_process(argv: list[str]) -> int:
    """Runs a command that has the process for itself."""
    status = _run(argv)
    # Without it no thread has been started, and importing it takes seconds.
    runs = sys.modules.get("echo_jax.runs")
    is_shared = runs is not None and not runs.is_alone()
    if status == WRONG_USE and is_shared:
        status = FAILED  # which is what the other processes were told
    if status and (runs is None or not is_shared or runs.has_ended()):
        # Threads that wait for data, compile, or find that a checkpoint cannot be
        # saved, are not waited for: what they would say is said.
        ending.end(status)
    return status


def _run(argv: list[str]) -> int:
    args, extras = make_parser().parse_known_args(argv)
    with contextlib.nullcontext() if args.debug else quiet_libraries():
        try:
            status = _COMMANDS[args.command](args, extras)
            # While Python ends nobody could catch an error.
            ending.flush_output()
            return status
        except Exit as end:
            error, status, message = end, end.status, str(end)
        except KeyboardInterrupt as end:
            error, status = end, _INTERRUPTED
            message = "interrupted; run the same command to resume"
        except Exception as end:
            if isinstance(end, BrokenPipeError) and ending.drop_lost_outputs():
                return FAILED
            error, status, message = end, status_of(end), sentence(end)
        if args.debug:
            traceback.print_exception(error)
        forget(error)
        with contextlib.suppress(OSError):
            ending.flush_output()
        said = f"echo-jax {args.command}: {printable(_one_line(message))}"
        print(said, file=sys.stderr)
        if status > WRONG_USE:
            print(f"  {shlex.join(['echo-jax', *argv])}", file=sys.stderr)
    return status


def _one_line(message: str) -> str:
    """Joins the lines that a message was written in."""
    return " ".join(line.strip() for line in message.split("\n")).strip()


def _import_runs(config: Config) -> ModuleType:
    """Imports what trains, and says so if it takes long: in the first process."""
    is_first = not config.get("distributed", {}).get("process_id", 0)
    with Notes(Console(quiet=not is_first)).slow("importing jax"):
        # Imported here: it imports jax.
        from echo_jax import runs
    return runs


def _train(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = typed_config(args.config, extras)
    workdir = typed_folder(args.workdir)
    runs = _import_runs(config)
    with exits_of(runs):
        runs.run_train(config, workdir, connect=True)
    if runs.is_main_process():
        print(f"\n{printable(workdir / 'summary.json')}")
    return 0


def _study(args: argparse.Namespace, extras: Sequence[str]) -> int:
    return _search(
        typed_config(args.config, extras), typed_folder(args.workdir), args.jobs
    )


def _search(study: Config, workdir: RunPath, jobs: int) -> int:
    """Runs a study, and shows it."""
    # Now: a study that cannot draw would fail after hours.
    report_command.check_drawing()
    runs = _import_runs(study)
    with exits_of(runs):
        runs.run_study(study, workdir, jobs=jobs)
    try:
        return report_command.show([workdir], workdir)
    except Exit as end:
        if not isinstance(end.__cause__, runs.FolderInUseError):
            raise
        # Another process has ended the same search just now.
        print(f"another process writes {printable(workdir / 'report.html')}")
        return 0


def _sweep(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = typed_config(args.config, extras)
    workdir = typed_folder(args.workdir)
    over = dict(each.partition("=")[::2] for each in args.over)
    # Imported here: it imports SciPy.
    from echo_jax.config.study import sweep_of

    try:
        study = sweep_of(
            config,
            over,
            name=f"{args.config}, over {', '.join(over)}",
            points=args.points,
            streams=args.seeds,
        )
    except ValueError as error:
        raise Exit(WRONG_USE, error) from error
    return _search(study, workdir, args.jobs)


def _probe(args: argparse.Namespace, extras: Sequence[str]) -> int:
    config = typed_config(args.config, extras)
    file = None if args.json is None or str(args.json) == "-" else args.json
    if file and file.is_dir():
        raise Exit(WRONG_USE, f"--json={file} is a folder; name a file, or -")
    if file and not file.parent.is_dir():
        raise Exit(WRONG_USE, f"--json={file}: there is no folder {file.parent}")
    # Imported here: it imports jax.
    from echo_jax import runs

    with exits_of(runs), Countdown() as countdown:
        report = runs.run_probe(
            config, seconds=args.seconds, on_progress=countdown.show
        )
    print(report.to_json() if args.json and not file else report)
    if file:
        try:
            file.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            error.filename = str(file)  # An open file has none.
            raise
        print(f"\n{printable(file)}")
    return 0


def _prepare(args: argparse.Namespace, extras: Sequence[str]) -> int:
    if extras:
        raise Exit(WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    try:
        with Countdown(line_every_s=_LINE_EVERY_S) as countdown:
            said = prepare_command.run(args, countdown.show)
    except (FolderError, ValueError) as error:
        raise Exit(WRONG_USE, error) from error
    print(said)
    return 0


def _use(
    command: Callable[[argparse.Namespace], list[Any]],
    args: argparse.Namespace,
    extras: Sequence[str],
) -> int:
    """Runs a command on a trained run, and prints what it says."""
    if extras:
        raise Exit(WRONG_USE, f"unknown option {extras[0]!r}; see --help")
    try:
        said = command(args)
    except (FolderError, ImportError, ValueError) as error:
        raise Exit(WRONG_USE, error) from error
    for each in said:
        rich.print(each) if isinstance(each, Table) else print(each)
    return 0


_COMMANDS = {
    "train": _train,
    "study": _study,
    "sweep": _sweep,
    "probe": _probe,
    "report": report_command.run,
    "evaluate": functools.partial(_use, model_commands.run_evaluate),
    "predict": functools.partial(_use, model_commands.run_predict),
    "export": functools.partial(_use, model_commands.run_export),
    "configs": functools.partial(_use, configs_command.run),
    "prepare": _prepare,
}
