"""Two real processes that train one model, beside the simulation of two hosts.

``python -m benchmarks.two_hosts results/scaling --json results/two_hosts.json`` writes
a table into its scaling.md, between its marks. It takes about ten minutes. The trainer,
its echo and its collectives are real. How long a batch takes to be made is drawn at
random and slept, and the simulation is given the same times.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from rich.console import Console

from benchmarks.pages import Place, progress_bar
from benchmarks.simulation import (
    Adaptive,
    Fixed,
    Outcome,
    Producer,
    service_times,
    simulate_hosts,
)
from echo_jax.cli.command_end import path_argument
from echo_jax.config import Config, load_config
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.training.loop import train
from echo_jax.training.processes.distributed import broadcast_from_first, connected
from echo_jax.workloads import Workload, build

_HOSTS, _RATIO, _PREFETCH, _CAP, _BUFFER = 2, 2.0, 2, 4, 128
_POLICIES: Mapping[str, tuple[Fixed | Adaptive, Mapping[str, Any]]] = {
    "no echo": (Fixed(1), {"echo.factor": 1.0}),
    "fixed, e = 2": (Fixed(2), {"echo.factor": 2.0}),
    "adaptive": (
        Adaptive(cap=_CAP, buffer=_BUFFER),
        {"echo.mode": "adaptive", "echo.factor": 1.0, "echo.max_uses": _CAP},
    ),
}
_PRODUCERS: tuple[Producer, ...] = ("constant", "exponential", "pareto")
_BATCHES, _FEW_BATCHES = 150, 16


@dataclass(frozen=True)
class _Row:
    """A real program and the simulated one of the same producers.

    Attributes:
      producer: How the times of batches are distributed.
      policy: What is trained on.
      t_down_s: Seconds of an update on a held batch, in a run just before.
      updates: Of both programs.
      seconds: Of an update, by program.
      fresh: The part of what was trained on that was fresh, by program.
    """

    producer: Producer
    policy: str
    t_down_s: float
    updates: int
    seconds: Mapping[str, float]
    fresh: Mapping[str, float]

    def shares(self, program: str) -> tuple[float, float]:
        """Returns the shares of the time in training, and on fresh data."""
        busy = self.t_down_s / self.seconds[program]
        return busy, busy * self.fresh[program]


def main(argv: list[str] | None = None) -> int:
    """Trains, simulates, and writes the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_hosts",
        description="Two real processes with irregular input, beside the simulation.",
        epilog="example: python -m benchmarks.two_hosts results/scaling",
    )
    parser.add_argument(
        "folder", type=path_argument, help="its scaling.md receives the table"
    )
    parser.add_argument(
        "--json", type=path_argument, help="receives all that was measured"
    )
    parser.add_argument("--repeats", type=int, default=2, help="programs of each kind")
    parser.add_argument(
        "--small",
        action="store_true",
        help=f"one producer, {_FEW_BATCHES} batches a host: a check",
    )
    args = parser.parse_args(argv)
    try:
        place = Place(args.folder / "scaling.md", "real")
    except ValueError as error:
        parser.error(str(error))
    rows = _measure(
        1 if args.small else len(_PRODUCERS),
        _FEW_BATCHES if args.small else _BATCHES,
        args.repeats,
    )
    place.write(_table(rows))
    if args.json:
        content = {
            "what": "two real processes; what a batch takes to be made is simulated",
            "ratio": _RATIO,
            "prefetch": _PREFETCH,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(producers: int, batches: int, repeats: int) -> list[_Row]:
    """Starts the processes, and returns what the first of them found."""
    port = _free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # Collectives of CPU devices need two threads for each.
        "NPROC": str(max(2, os.cpu_count() or 2)),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.two_hosts", "--process", folder]
        command += [str(producers), str(batches), str(repeats), str(port)]
        processes = [
            subprocess.Popen([*command, str(number)], env=environment)
            for number in range(_HOSTS)
        ]
        if any(process.wait() for process in processes):
            raise SystemExit("a process failed; what it said stands above")
        rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    return [_Row(**row) for row in rows]


def _free_port() -> int:
    """Returns a port that stays free: those that connections are given are higher."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _process(
    folder: Path, producers: int, batches: int, repeats: int, port: int, number: int
) -> None:
    """Is one of the processes: trains every case, at once fed and then as it is."""
    distributed = {
        "distributed.coordinator": f"127.0.0.1:{port}",
        "distributed.num_processes": _HOSTS,
        "distributed.process_id": number,
    }
    cases = list(itertools.product(range(repeats), _PRODUCERS[:producers], _POLICIES))
    rows = []
    bar = progress_bar(disable=number > 0)
    with connected(_config(distributed)), bar as progress:
        task = progress.add_task("training", total=len(cases))
        for at, (repeat, producer, policy) in enumerate(cases):
            rule, overrides = _POLICIES[policy]
            overrides = {**overrides, **distributed}
            # The speed of a machine changes, so it is looked at each time.
            fed = _train(
                {**overrides, "updates": 2 * batches},
                folder / f"fed{at}",
                np.zeros(2 * batches),
            )
            t_down_s = broadcast_from_first(fed["wall_s"] / fed["updates"])
            seeds = range(_HOSTS * repeat, _HOSTS * (repeat + 1))
            service_s = np.stack(
                [service_times(producer, _RATIO * t_down_s, batches, s) for s in seeds]
            )
            simulated = simulate_hosts(service_s, t_down_s, rule, prefetch=_PREFETCH)
            real = _train(
                {**overrides, "updates": simulated.updates},
                folder / f"real{at}",
                service_s[number],
            )
            rows.append(asdict(_row(producer, policy, t_down_s, simulated, real)))
            progress.advance(task)
    if number == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def _train(
    overrides: Mapping[str, Any], workdir: Path, service_s: np.ndarray | None = None
) -> dict[str, Any]:
    config = _config(overrides)
    workload = build(config)
    if service_s is not None:
        paced = _Paced(workload, service_s)
        workload = dataclasses.replace(workload, fresh_dataset=paced)
    return train(config, workload, workdir, console=Console(quiet=True))


def _row(
    producer: Producer,
    policy: str,
    t_down_s: float,
    simulated: Outcome,
    real: Mapping[str, Any],
) -> _Row:
    updates = simulated.updates
    used = real["fresh"] + real["repeats"]
    return _Row(
        producer=producer,
        policy=policy,
        t_down_s=t_down_s,
        updates=updates,
        seconds={
            "simulated": simulated.seconds / updates,
            "real": real["wall_s"] / updates,
        },
        fresh={
            "simulated": simulated.used / _HOSTS / updates,
            "real": real["fresh"] / used,
        },
    )


def _table(rows: Sequence[_Row]) -> str:
    """Makes a Markdown table of the means, in percent."""
    lines = [
        f"**Two processes, R = {_RATIO:g}**: % of the time in training / on fresh data",
        "",
        "| producer | echo | simulated | real | seconds an update, real / simulated |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    producers = dict.fromkeys(row.producer for row in rows)
    for producer, policy in itertools.product(producers, _POLICIES):
        found = [r for r in rows if (r.producer, r.policy) == (producer, policy)]
        cells = []
        for program in ("simulated", "real"):
            busy, fresh = np.mean([row.shares(program) for row in found], axis=0)
            cells.append(f"{100 * busy:.0f} / {100 * fresh:.0f}")
        ratios = [row.seconds["real"] / row.seconds["simulated"] for row in found]
        cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        lines.append(f"| {producer} | {policy} | {' | '.join(cells)} |")
    middle = statistics.median(
        row.seconds["real"] / row.seconds["simulated"] for row in rows
    )
    lines += ["", f"Median of the last column: {middle:.2f}, {len(rows)} programs."]
    return "\n".join(lines) + "\n"


def _config(overrides: Mapping[str, Any]) -> Config:
    """Returns a small language model, echoed on the devices batch by batch."""
    config = load_config("configs/lm.py:tiny,device")
    batch = config.batch_size
    fixed = {
        "log_every": 10**6,
        "eval_every": 10**6,
        "checkpoint_every": 0,
        "data.eval_examples": 16,
        "data.prefetch": _PREFETCH,
        "echo.order": "consecutive",
        "echo.buffer": _BUFFER * batch,
    }
    config.update_from_flattened_dict({**fixed, **overrides})
    return config


class _Paced:
    """Makes a few real batches, and hands them out after so many seconds each."""

    def __init__(self, workload: Workload, service_s: np.ndarray):
        self._make = workload.fresh_dataset
        self._service_s = service_s
        self._passes = 0

    def __call__(self, shard: DataShard = SINGLE) -> grain.IterDataset:
        batches = list(itertools.islice(self._make(shard), 4))
        # The loader is measured before it is trained on, which must not take long.
        self._passes += 1
        service_s = self._service_s if self._passes > 1 else np.zeros(1)

        def batch(index: int) -> Any:
            time.sleep(service_s[index % len(service_s)])
            return batches[index % len(batches)]

        endless = grain.MapDataset.range(10**9).map(batch)
        return endless.to_iter_dataset(grain.ReadOptions(0, 0))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        _process(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        sys.exit(main())
