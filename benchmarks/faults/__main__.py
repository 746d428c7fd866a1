"""Runs campaigns of faults, and prints and saves how their trials ended."""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import (
    Bench,
    CannotBeginError,
    Fault,
    NotHereError,
    Verdict,
    run_trial,
)
from benchmarks.faults.commands import prepare_environment
from benchmarks.faults.damaged import F4
from benchmarks.faults.hostile import F6, F11
from benchmarks.faults.stops import F1, F2, F3, F5
from benchmarks.harness import machine, versions
from echo_jax.training.records import code_commit

FAULTS: dict[str, Fault] = {each.name: each for each in (F1, F2, F3, F4, F5, F6, F11)}
_NUMBERS = ("trials", "kills", *(verdict.value for verdict in Verdict))
_Counts = dict[str, Any]  # of a kind of trial, as `results/faults` has them


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaigns that the arguments name; returns 1 if a trial did not hold."""
    parser = argparse.ArgumentParser(
        description="Breaks files, processes and disks, and checks what follows.",
        epilog="; ".join(f"{name}: {fault.title}" for name, fault in FAULTS.items()),
    )
    parser.add_argument("names", nargs="+", choices=FAULTS, metavar="FAULT")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--trials", type=int, help="most trials of each fault")
    parser.add_argument("--minutes", type=float, help="of all faults together")
    parser.add_argument("--trial", type=int, help="number of the only trial")
    parser.add_argument("--json", type=Path, help="file that receives the counts")
    args = parser.parse_args(argv)
    if args.trials is args.minutes is args.trial is None:
        parser.error("how many trials? Use --trials 20 or --minutes 60")
    found: list[_Counts] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        prepare_environment(Path(root) / "compiled")
        is_whole = _run(args, Path(root), found)
    print(f"{'fault':6}{'kind':20}", *(f"{name:>9}" for name in _NUMBERS))
    for counts in found:
        kind = f"{counts['id']:6}{counts['kind']:20}"
        print(kind, *(f"{counts[name]:9}" for name in _NUMBERS))
    if args.json:
        words = sys.argv[1:] if argv is None else argv
        record = {
            "command": " ".join(["python -m benchmarks.faults", *words]),
            "commit": code_commit(),
            "seed": args.seed,
            "interrupted": not is_whole,
            "campaigns": found,
            "machine": machine(),
            "versions": versions(),
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not is_whole or any(counts["failures"] for counts in found))


def _run(args: argparse.Namespace, root: Path, found: list[_Counts]) -> bool:
    """Runs campaigns, adds their counts to `found`; False if they were cut short."""
    minutes = math.inf if args.minutes is None else args.minutes / len(args.names)
    try:
        for fault in (FAULTS[name] for name in args.names):
            (root / fault.name).mkdir()
            bench, begin = Bench(root / fault.name), time.monotonic()
            none = dict.fromkeys(_NUMBERS, 0)
            kinds: list[_Counts] = [
                {"id": fault.name, "kind": kind, **none, "failures": []}
                for kind in fault.trials
            ]
            found += kinds
            numbers = range(sys.maxsize if args.trials is None else args.trials)
            for number in numbers if args.trial is None else [args.trial]:
                if time.monotonic() - begin >= 60 * minutes:
                    break
                _run_one(fault, args.seed, number, bench, kinds[number % len(kinds)])
    except KeyboardInterrupt:
        return False
    except CannotBeginError as error:
        print(f"cannot begin: {error}")
        return False
    return True


def _run_one(
    fault: Fault, seed: int, number: int, bench: Bench, counts: _Counts
) -> None:
    """Runs a trial, counts it, and prints a failure with the command to repeat it."""
    what = f"{fault.name}, {fault.kind(number)}"
    try:
        outcome = run_trial(fault, seed, number, bench)
    except NotHereError as error:
        print(f"{what}: skipped: {error}")
        return
    verdict = outcome.verdict.value
    counts["trials"] += 1
    counts["kills"] += bench.kills
    counts[verdict] += 1
    if outcome.verdict is not Verdict.HELD:
        failure = {"trial": number, "verdict": verdict, "note": outcome.note}
        counts["failures"].append(failure)
        print(f"{what}: {verdict}: {outcome.note}")
        words = f"{fault.name} --seed {seed} --trial {number}"
        print(f"  python -m benchmarks.faults {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
