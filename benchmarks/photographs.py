"""The trainer fed by real photographs, decoded on many cores and on few."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import Result, drive
from echo_jax.config import Config, load_config
from echo_jax.config.run import RunSpec
from echo_jax.data.prepare import Settings, prepare_images
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed
from echo_jax.training.feeds.of_config import open_feed
from echo_jax.training.measure import measure_loader, measure_step
from echo_jax.training.processes import Watchdog
from echo_jax.workloads import build

_CORES = (16, 2)
_CAP = 4
# Batches that each worker may have read ahead, at most.
_AHEAD = 6


def h2(*, small: bool = False) -> Iterator[Result]:
    """ResNet-50 on the ImageNet sample: how busy the accelerator is kept.

    A process of its own measures each number of cores: it binds itself to them before
    any library has started a thread.
    """
    if "ECHO_JAX_DATA" not in os.environ:
        raise SystemExit(
            "H2 decodes real photographs: set ECHO_JAX_DATA to a folder with "
            "imagenet_sample/images.tar"
        )
    archive = Path(os.environ["ECHO_JAX_DATA"]) / "imagenet_sample" / "images.tar"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "photographs"
        prepare_images([f"train={archive}"], Settings(out=source))
        for cores in _CORES:
            command = [sys.executable, "-m", "benchmarks.photographs", str(source)]
            command += [str(cores), *(["--small"] * small)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            yield Result(**json.loads(done.stdout.splitlines()[-1]))


def _measure(source: str, asked: int, small: bool) -> Result:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))[:asked]
        os.sched_setaffinity(0, allowed)
        cores = len(allowed)
    config = RunSpec.of(_config(source, cores, small))
    workload = build(config)
    compiled = CompiledFunctions(config, workload)
    state = compiled.init(compiled.init_key)
    watchdog = Watchdog(config, print)
    t_up_s, sample = measure_loader(config, workload, watchdog=watchdog)
    with closing(open_feed(config, workload, compiled.mesh, sample=sample)) as feed:
        ratio = t_up_s / measure_step(compiled, state, feed)
    held = open_feed(config, workload, compiled.mesh, sample=sample)
    fed = open_feed(config, workload, compiled.mesh, sample=sample)
    states = {"held": state, "fed": compiled.copy(state)}

    def update(name: str, feed: Feed) -> Any:
        inputs = feed.hold(1) if feed is held else feed.take(1)
        states[name], report = compiled.step(states[name], feed, inputs)
        return report

    steps, rounds = (4, 2) if small else (25, 6)
    with closing(held), closing(fed):

        def alone_s(steps: int) -> float:
            return drive(lambda: update("held", held), steps)

        def fed_s(steps: int) -> float:
            return drive(lambda: update("fed", fed), steps)

        alone_s(4)  # Compiles.
        before = alone_s(steps)
        # Workers read ahead while the other feed trains: these batches are used first.
        fed_s(steps if small else _AHEAD * cores)
        took = [fed_s(steps) for _ in range(rounds)]
        alone = (before + alone_s(steps)) / 2
    busy = [alone / each for each in took]
    network = "a small network" if small else "ResNet-50, 224 px"
    return Result(
        f"H2-{asked}",
        f"device-busy: {network}, of photographs decoded on {cores} cores",
        statistics.median(busy),
        ">= 0.97",
        "of the time",
        "one held batch in the same trainer, before and after",
        busy,
        f"R={ratio:.2f}; adaptive, cap {_CAP}; batch {config.batch_size}; a step of "
        f"{1e3 * alone:.3g} ms, a fresh batch in {1e3 * t_up_s:.3g} ms; "
        f"{workload.metadata['data']['train_examples']} images again and again; on "
        f"{jax.devices()[0].device_kind}",
    )


def _config(source: str, cores: int, small: bool) -> Config:
    """Returns the config of ImageNet, echoed on the devices as batches come."""
    config = load_config(
        "configs/imagenet.py:" + ("tiny,device" if small else "device")
    )
    batch = config.batch_size = 32 if small else 256
    config.data.source = source
    config.data.eval_split = "train"
    config.data.augment = ("crop", "flip", "colour")
    config.data.workers = 0 if small else cores
    config.echo.mode = "adaptive"
    config.echo.max_uses = _CAP
    config.echo.factor = 1.0
    config.echo.order = "consecutive"
    config.echo.buffer = 16 * batch
    return config


if __name__ == "__main__":
    folder, number = sys.argv[1:3]
    result = _measure(folder, int(number), "--small" in sys.argv[3:])
    print(json.dumps(asdict(result)))
