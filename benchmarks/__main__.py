"""Runs benchmarks by name and prints, saves or documents what they measured."""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks import (
    adaptive,
    augment,
    compiled,
    decode,
    device,
    draws,
    gpu,
    growth,
    host,
    language,
    photographs,
    plain_loop,
    reading,
    saves,
    starved,
    trainer,
    training_loop,
    verification,
)
from benchmarks.figures import draw_free_echo
from benchmarks.harness import Result
from benchmarks.table import Session, table_of, write_rows
from echo_jax.cli.command_end import path_argument

_BENCHMARKS: dict[str, Callable[[], Result | Iterable[Result]]] = {
    "P1": starved.p1,
    "P2": starved.p2,
    "P3": adaptive.p3,
    "P4": adaptive.p4,
    "P5": host.p5,
    "P6": host.p6,
    "P7": device.p7,
    "P8": device.p8,
    "P9": trainer.p9,
    "P10": device.p10,
    "P11": saves.p11,
    "P12": saves.p12,
    "P15": host.p15,
    "P16": host.p16,
    "P17": trainer.p17,
    "P18": adaptive.p18,
    "P19": trainer.p19,
    "P20": trainer.p20,
    "P22": reading.p22,
    "draw": device.draw,
    "draws": draws.draws,
    "growth": growth.growth,
    "language": language.language,
    "loop": plain_loop.plain_loop,
    "no-spec": starved.no_spec,
    "own": training_loop.training_loop,
    "memory": host.memory,
    "plan": host.plan_cost,
    "import": trainer.import_time,
    "restore": verification.restore,
    "reading": verification.reading,
}
# Packages that they compare with, of the extra bench.
_PEERS = {
    "P6": "tensorflow",
    "P7": "flashbax",
    "draws": "flashbax",
    "P11": "tensorflow",
    "P21": "tensorflow",
}
# For real data, a compiler for accelerators, or one of these; not among those that run
# without names.
_WITH_A_COMPILER: dict[str, Callable[[], list[Result]]] = {
    "v5e": compiled.v5e,
    "h100": compiled.h100,
}
_ON_REAL_DATA: dict[str, Callable[..., list[Result]]] = {"P21": decode.p21}
_ON_AN_ACCELERATOR: dict[str, Callable[..., Result | Iterable[Result]]] = {
    "H1": gpu.h1,
    "H2": photographs.h2,
    "H3": gpu.h3,
    "H4": augment.h4,
    "H5": gpu.h5,
    "H6": gpu.h6,
    "H7": gpu.h7,
}
# Of the accelerator's memory that jax takes; 0.75 by default, unless it is set.
_MEMORY_FRACTION = "0.92"


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks that the arguments name; all without names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures echo_jax against its peers, side by side.",
        epilog="example: python -m benchmarks P5 P17 --json out.json",
    )
    parser.add_argument(
        "names",
        nargs="*",
        help=f"which: {', '.join(_BENCHMARKS)}, all of them if none; for real "
        f"data, {', '.join(_ON_REAL_DATA)}; where a compiler for "
        f"them is installed, {', '.join(_WITH_A_COMPILER)}; and, for an accelerator, "
        f"{', '.join(_ON_AN_ACCELERATOR)}",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="shrink those for real data or an accelerator: a check",
    )
    parser.add_argument("--json", type=path_argument, help="write the results as JSON")
    parser.add_argument(
        "--add",
        type=path_argument,
        action="append",
        default=[],
        metavar="JSON",
        help="show an earlier session, of --json, before this one; may be repeated",
    )
    parser.add_argument(
        "--docs",
        type=path_argument,
        help="replace the rows of a Markdown page that these benchmarks have; the "
        "rest of the page stays",
    )
    parser.add_argument(
        "--figures",
        type=path_argument,
        metavar="FOLDER",
        help="draw what people look at (P2)",
    )
    args = parser.parse_args(argv)
    known = [*_BENCHMARKS, *_ON_REAL_DATA, *_WITH_A_COMPILER, *_ON_AN_ACCELERATOR]
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"unknown: {', '.join(unknown)}; use {', '.join(known)}")
    small = {
        name: functools.partial(benchmark, small=args.small)
        for name, benchmark in (_ON_REAL_DATA | _ON_AN_ACCELERATOR).items()
    }
    benchmarks = _BENCHMARKS | _WITH_A_COMPILER | small
    names = args.names or list(_BENCHMARKS)
    if missing := {
        _PEERS[name] for name in names if name in _PEERS and not find_spec(_PEERS[name])
    }:
        parser.error(
            f"{', '.join(sorted(missing))} is compared with and not installed; "
            "pip install -e '.[bench]'"
        )
    if args.docs:
        try:
            table_of(args.docs)
        except ValueError as error:
            parser.error(str(error))
    on_accelerator = set(names) & set(_ON_AN_ACCELERATOR)
    if on_accelerator:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_FRACTION)
    if on_accelerator and len(names) > 1 and not args.small:
        # Each needs most of the accelerator's memory, which a process keeps.
        apart = {name: functools.partial(_in_own_process, name) for name in names}
        benchmarks |= apart
    results = _run(names, benchmarks, args.json)
    if args.docs:
        records = [json.loads(path.read_text()) for path in args.add]
        write_rows(args.docs, [*map(Session.of, records), Session.now(results)])
    free = [result for result in results if result.id.startswith("P2-")]
    if args.figures and free:
        draw_free_echo(free, args.figures / "free_echo.png")
    return 0


def _run(
    names: list[str],
    benchmarks: Mapping[str, Callable[[], Result | Iterable[Result]]],
    record: Path | None,
) -> list[Result]:
    """Runs benchmarks; writes each result to a file as soon as it is measured."""
    console, results = Console(), []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("benchmarks", total=len(names))
        for name in names:
            progress.update(task, description=name)
            found = benchmarks[name]()
            for result in [found] if isinstance(found, Result) else found:
                results.append(result)
                if record:
                    _write(record, results)
                console.print(_line(result), markup=False, highlight=False)
            progress.advance(task)
    return results


def _write(record: Path, results: list[Result]) -> None:
    """Replaces the file, which is whole even where the process is killed."""
    whole = record.with_name(f"{record.name}.part")
    whole.write_text(json.dumps([each.as_json() for each in results], indent=1))
    whole.replace(record)


def _in_own_process(name: str, *options: str) -> Iterator[Result]:
    """Runs one benchmark in a new process, whose memory is free afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks", name, "--json", str(record)]
        # Its lines are printed again, among those of the others.
        done = subprocess.run([*command, *options], stdout=subprocess.DEVNULL)
        if record.exists():
            yield from map(Result.of_json, json.loads(record.read_text()))
        done.check_returncode()


def _line(result: Result) -> str:
    verdict = "met" if result.met else "NOT met"
    return (
        f"{result.id}: {result.value:.4g} {result.unit} (goal {result.goal}, "
        f"{verdict}; {result.spread}, n={len(result.repeats)}): {result.title}"
    )


if __name__ == "__main__":
    sys.exit(main())
