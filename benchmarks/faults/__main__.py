"""Runs campaigns of faults and prints, saves or documents how their trials ended."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from benchmarks.faults.aliasing import F12
from benchmarks.faults.campaign import (
    Bench,
    CannotBeginError,
    Fault,
    NotHereError,
    Outcome,
    Tally,
    Verdict,
    run_campaign,
    run_trial,
)
from benchmarks.faults.files import F4
from benchmarks.faults.hostile import F11
from benchmarks.faults.page import Campaign, as_json, document, read_campaign, table
from benchmarks.faults.parsers import F6
from benchmarks.faults.processes import prepare_environment
from benchmarks.faults.stops import F1, F2, F3
from benchmarks.faults.trainers import F5, F7, F8, F9, F10
from echo_jax.cli.command_end import path_argument
from echo_jax.training.records.environment import code_commit

_ALL = (F1, F2, F3, F4, F5, F6, F7, F8, F9, F10, F11, F12)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
_MINUTES = 60.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaigns that the arguments name; all without names.

    Returns:
      0 if every trial held, 1 if one did not, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description="Breaks files, processes and disks at random, and looks whether "
        "anything is lost.",
        epilog="example: python -m benchmarks.faults F1 F4 --seed 7 --minutes 30; a "
        "trial that failed is run again by F4 --seed 7 --trial 123",
    )
    known = ", ".join(f"{name} ({each.title})" for name, each in FAULTS.items())
    parser.add_argument(
        "names", nargs="*", metavar="FAULT", help=f"all if none: {known}"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of all trials (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"split over the faults that are named (default: {_MINUTES:g}, if there "
        "is no --trials)",
    )
    parser.add_argument(
        "--trials", type=int, metavar="N", help="of each fault, at most"
    )
    parser.add_argument(
        "--trial", type=int, metavar="N", help="run this one alone, of one fault"
    )
    parser.add_argument("--json", type=path_argument, help="write the counts as JSON")
    parser.add_argument(
        "--add",
        type=path_argument,
        action="append",
        default=[],
        metavar="JSON",
        help="add the counts of an earlier campaign; with --trials 0, only those",
    )
    parser.add_argument(
        "--docs",
        type=path_argument,
        help="write the table as Markdown, also after Ctrl-C",
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(FAULTS)):
        parser.error(f"unknown: {', '.join(unknown)}; use {', '.join(FAULTS)}")
    names = args.names or list(FAULTS)
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        prepare_environment(Path(root) / "compiled")
        if args.trial is not None:
            if len(names) != 1:
                parser.error("--trial needs the name of one fault")
            return _run_one(FAULTS[names[0]], args.seed, args.trial, Bench(Path(root)))
        minutes = args.minutes
        if minutes is None and args.trials is None:
            minutes = _MINUTES
        tallies, is_whole = _run(names, args.seed, args.trials, minutes, Path(root))
    words = [*args.names, f"--seed {args.seed}"]
    if args.trials is not None:
        words.append(f"--trials {args.trials}")
    if minutes is not None:
        words.append(f"--minutes {minutes:g}")
    command = " ".join(["python -m benchmarks.faults", *words])
    campaigns = [Campaign(command, code_commit(), args.seed, not is_whole, tallies)]
    campaigns = [*map(read_campaign, args.add), *campaigns[args.trials == 0 :]]
    Console().print(table(FAULTS, campaigns))
    if args.json:
        args.json.write_text(json.dumps(as_json(campaigns), indent=1) + "\n")
    if args.docs:
        args.docs.write_text(document(FAULTS, campaigns))
    if not is_whole:
        return _INTERRUPTED
    return int(
        any(tally.failures for kinds in tallies.values() for tally in kinds.values())
    )


def _run_one(fault: Fault, seed: int, number: int, bench: Bench) -> int:
    console = Console()
    try:
        outcome = run_trial(fault, seed, number, bench)
    except NotHereError as error:
        _print_skipped(console, fault, fault.kind(number), error)
        return 0
    _print(console, fault, number, seed, outcome)
    return int(outcome.verdict is not Verdict.HELD)


def _run(
    names: Sequence[str],
    seed: int,
    trials: int | None,
    minutes: float | None,
    root: Path,
) -> tuple[dict[str, Mapping[str, Tally]], bool]:
    """Runs campaigns; returns the counts, and whether nobody has interrupted them."""
    tallies: dict[str, Mapping[str, Tally]] = {}
    seconds = None if minutes is None else 60.0 * minutes / len(names)
    columns = (*Progress.get_default_columns()[:2], TextColumn("{task.fields[done]}"))
    with Progress(*columns, TimeRemainingColumn(), transient=True) as progress:
        try:
            for name in names:
                folder = root / name
                folder.mkdir()
                shown = _Shown(progress, FAULTS[name], seed, trials, seconds)
                for counts in run_campaign(
                    FAULTS[name],
                    seed,
                    Bench(folder),
                    trials=trials,
                    seconds=seconds,
                    on_trial=shown.add,
                    on_skip=partial(_print_skipped, progress.console, FAULTS[name]),
                ):
                    tallies[name] = counts
        except KeyboardInterrupt:
            return tallies, False
        except CannotBeginError as error:
            progress.console.print(f"cannot begin: {error}", markup=False)
            return tallies, False
    return tallies, True


class _Shown:
    """The bar of a campaign, and a line for each trial that has failed."""

    def __init__(
        self,
        progress: Progress,
        fault: Fault,
        seed: int,
        trials: int | None,
        seconds: float | None,
    ):
        self._progress, self._fault, self._seed = progress, fault, seed
        self._trials, self._seconds = trials, seconds
        self._task = progress.add_task(fault.name, total=1.0, done="")
        self._started = time.monotonic()

    def add(self, number: int, kind: str, outcome: Outcome) -> None:
        """Shows one more trial."""
        if outcome.verdict is not Verdict.HELD:
            _print(self._progress.console, self._fault, number, self._seed, outcome)
        parts = [0.0]
        if self._trials is not None:
            parts.append((number + 1) / self._trials)
        if self._seconds is not None:
            parts.append((time.monotonic() - self._started) / self._seconds)
        done = f"{number + 1} trials"
        self._progress.update(self._task, completed=min(1.0, max(parts)), done=done)


def _print(
    console: Console, fault: Fault, number: int, seed: int, outcome: Outcome
) -> None:
    console.print(
        f"{fault.name}, {fault.kind(number)}: {outcome.verdict.value}: {outcome.note}\n"
        f"  python -m benchmarks.faults {fault.name} --seed {seed} --trial {number}",
        markup=False,
        highlight=False,
    )


def _print_skipped(
    console: Console, fault: Fault, kind: str, why: str | NotHereError
) -> None:
    console.print(f"{fault.name}, {kind}: skipped: {why}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
