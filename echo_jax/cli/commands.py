"""Runs the commands of ``echo-jax``.

Each command imports its modules inside its branch. The import of jax alone takes
seconds, and ``--help`` and the error for a mistyped field should come at once.
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
from etils import epath
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
from echo_jax.files.folders import FolderError
from echo_jax.terminal import ending
from echo_jax.terminal.countdown import Countdown
from echo_jax.terminal.failures import forget, quiet_libraries, sentence, status_of
from echo_jax.terminal.notes import Notes
from echo_jax.terminal.printable import printable

_LINE_EVERY_S = 10.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_TRAINING = ("train", "study", "sweep", "probe")  # with jax, and threads in native code


# `echo-jax train --help` lists the exit statuses.
def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command (by default of this process) and returns its exit status."""
    try:
        if argv is not None:
            return _run(list(argv))
        argv = sys.argv[1:]
        # A command in a notebook's cell inherits the notebook's backend. If that is not
        # installed, matplotlib cannot be imported. Figures are files.
        os.environ.pop("MPLBACKEND", None)
        for stream in (sys.stdout, sys.stderr):
            # With ASCII outputs, other characters become "?".
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with contextlib.ExitStack() as stack:
            if argv and argv[0] in _TRAINING:
                stack.enter_context(ending.owning_process(["echo-jax", *argv]))
            return _of_this_process(argv)
    except BrokenPipeError:
        # Another broken pipe, such as a worker's, is an ordinary failure. Otherwise the
        # rest of the output is dropped, as Python's documentation of SIGPIPE advises
        # and as rich does.
        if not ending.drop_lost_outputs():
            raise
        return FAILED


def _of_this_process(argv: list[str]) -> int:
    """Runs a command that owns the process."""
    status = _run(argv)
    # If it is not imported, no thread has started; its import takes seconds.
    runs = sys.modules.get("echo_jax.runs")
    if status and (runs is None or runs.is_alone()):
        # Do not wait for threads that wait for data, compile, or fail to save a
        # checkpoint: their errors have been printed.
        ending.end(status)
    return status


def _run(argv: list[str]) -> int:
    args, args.fields = make_parser().parse_known_args(argv)
    with contextlib.nullcontext() if args.debug else quiet_libraries():
        try:
            if args.fields and getattr(args, "config", None) is None:
                said = f"unknown option {args.fields[0]!r}; see {args.prog} --help"
                raise Exit(said)
            status = _COMMANDS[args.command](args)
            # An error at Python's exit could not be caught.
            print(end="", flush=True)
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
            print(end="", flush=True)
        said = f"echo-jax {args.command}: {printable(_one_line(message))}"
        print(said, file=sys.stderr)
        if status > WRONG_USE:
            print(f"  {shlex.join(['echo-jax', *argv])}", file=sys.stderr)
    return status


def _one_line(message: str) -> str:
    return " ".join(line.strip() for line in message.split("\n")).strip()


def _import_runs(config: Config) -> ModuleType:
    """Imports the training code; the first process prints a line if it is slow."""
    is_first = not config.get("distributed", {}).get("process_id", 0)
    with Notes(quiet=not is_first).slow("importing jax"):
        # Imported here: it imports jax.
        from echo_jax import runs
    return runs


def _train(args: argparse.Namespace) -> int:
    config = typed_config(args.config, args.fields)
    workdir = typed_folder(args.workdir)
    runs = _import_runs(config)
    with exits_of(runs):
        runs.run_train(config, workdir, connect=True)
    if runs.is_main_process():
        print(f"\n{printable(workdir / 'summary.json')}")
    return 0


def _study(args: argparse.Namespace) -> int:
    study = typed_config(args.config, args.fields)
    return _search(study, typed_folder(args.workdir), args.jobs)


def _search(study: Config, workdir: epath.Path, jobs: int) -> int:
    """Runs a study and shows it."""
    # Check early: a study that cannot draw would fail after hours.
    report_command.check_drawing()
    runs = _import_runs(study)
    with exits_of(runs):
        runs.run_study(study, workdir, jobs=jobs)
    try:
        return report_command.show([workdir], workdir)
    except Exit as end:
        if not isinstance(end.__cause__, runs.FolderInUseError):
            raise
        # Another process has just ended the same search.
        print(f"another process writes {printable(workdir / 'report.html')}")
        return 0


def _sweep(args: argparse.Namespace) -> int:
    config = typed_config(args.config, args.fields)
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
        raise Exit(error) from error
    return _search(study, workdir, args.jobs)


def _probe(args: argparse.Namespace) -> int:
    config = typed_config(args.config, args.fields)
    file = None if args.json is None or str(args.json) == "-" else args.json
    if file and file.is_dir():
        raise Exit(f"--json={file} is a folder; name a file, or -")
    if file and not file.parent.is_dir():
        raise Exit(f"--json={file}: there is no folder {file.parent}")
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


def _prepare(args: argparse.Namespace) -> int:
    try:
        with Countdown(line_every_s=_LINE_EVERY_S) as countdown:
            said = prepare_command.run(args, countdown.show)
    except (FolderError, ValueError) as error:
        raise Exit(error) from error
    print(said)
    return 0


def _use(
    command: Callable[[argparse.Namespace], list[Any]], args: argparse.Namespace
) -> int:
    """Runs a command on a trained run and prints its result."""
    try:
        said = command(args)
    except (FolderError, ImportError, ValueError) as error:
        raise Exit(error) from error
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
