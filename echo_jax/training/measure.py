"""Measures a loader and a step: at the start of a run, and without a training."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.echo.instrument.advice import OptionNames, ProbeReport
from echo_jax.echo.instrument.measure import (
    MAX_IN_FLIGHT,
    BoundedSteps,
    probe,
    time_calls,
)
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed, JoinedBatches
from echo_jax.training.feeds.growing import GrowingFeed
from echo_jax.training.feeds.loader import next_batch, unechoed, upstream_of_feed
from echo_jax.training.feeds.of_config import EchoedData, open_feed
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    own_shards,
)
from echo_jax.training.processes.stop import Watchdog
from echo_jax.workloads.base import Batch, Workload

# Seconds and calls to measure the loader, and the step. A run starts with at most
# _QUICK_CALLS; without a training there are at most _MOST_CALLS.
BUDGET_S = 2.0
_LEAST_CALLS, _QUICK_CALLS, _MOST_CALLS = 3, 20, 1000
_TOGETHER_CALLS = 8


@dataclass(frozen=True)
class Rates:
    """The two speeds of a run.

    Attributes:
      t_up_s: Seconds per fresh batch of the input pipeline alone.
      t_down_s: Seconds per training step on a held input. A batch in host memory is
        sent to the devices in this time, but not made in it.
    """

    t_up_s: float
    t_down_s: float

    @property
    def ratio(self) -> float:
        """R of the paper: above 1 the trainer waits for its input."""
        return self.t_up_s / self.t_down_s


class MeasuredFeed(NamedTuple):
    """The feed of a run, and what was measured before it is started."""

    shards: Sequence[DataShard]  # Those that this process reads.
    feed: Feed  # Not started: its threads would disturb the measurements.
    rates: Rates
    sample: Batch  # A batch of the data upstream of the feed, on the host.


def measured_feed(
    config: RunSpec,
    workload: Workload,
    compiled: CompiledFunctions,
    state: Any,
    *,
    data: EchoedData,
    before: Mapping[str, Any] | None,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> MeasuredFeed:
    """Measures the rates, opens the feed, and compiles; `before` is a checkpoint's."""
    num_shards = config.data.shards or jax.process_count()
    shards = own_shards(len(before["data"]) if before else num_shards)
    t_up_s, sample = measure_loader(config, workload, shards=shards, watchdog=watchdog)
    feed = open_feed(
        config,
        workload,
        compiled.mesh,
        sample=sample,
        data=data,
        shards=shards,
        num_lanes=before["num_lanes"] if before else 0,
        note=note,
    )
    t_down_s = measure_step(compiled, state, feed)
    if (steps := config.dispatch.steps) > 1:
        t_down_s = measure_step(compiled, state, feed, num_updates=steps)
    if isinstance(feed, GrowingFeed):
        # Compile each batch size now, because later this would stop the training.
        for held in feed.hold_sizes():
            jax.block_until_ready(compiled.step(compiled.copy(state), feed, held))
    return MeasuredFeed(shards, feed, Rates(t_up_s, t_down_s), sample)


def calibrate(
    config: RunSpec,
    workload: Workload,
    *,
    note: Callable[[str], Any] = lambda line: None,
) -> Rates:
    """Measures the rates of a config on this machine, without training."""
    compiled = CompiledFunctions(config, workload)
    state = compiled.init(compiled.init_key)
    with Watchdog(config, note) as watchdog:
        t_up_s, sample = measure_loader(
            config, workload, most=_MOST_CALLS, watchdog=watchdog
        )
        with closing(open_feed(config, workload, compiled.mesh, sample=sample)) as feed:
            t_down_s = measure_step(compiled, state, feed, most=_MOST_CALLS)
    return Rates(t_up_s, t_down_s)


def measure_loader(
    config: RunSpec,
    workload: Workload,
    *,
    shards: Sequence[DataShard] = (SINGLE,),
    most: int = _QUICK_CALLS,
    watchdog: Watchdog,
) -> tuple[float, Batch]:
    """Returns the seconds per fresh batch of the pipeline alone, and a host batch."""
    with watchdog.closing(upstream_of_feed(workload, config, shards)) as batches:
        load = partial(_load, batches, workload, watchdog)
        sample = load()  # Starts threads, fills caches.
        # Threads that began together end together, so batches come in groups. The rest
        # of a group comes in no time after its first batch.
        together = max(1, batches.held)
        for _ in range(batches.held):
            load()
        up = time_calls(
            load,
            window_s=BUDGET_S,
            least=_LEAST_CALLS,
            most=math.ceil(most / together) * together,
            stride=together,
        )
    # The mean, because slow storage may come in bursts. The slowest process counts,
    # because the others wait for it. A part of a batch takes that part of the time.
    return max(all_gather(statistics.mean(up))) / config.batch.parts(0), sample


def _load(batches: Iterator[Batch], workload: Workload, watchdog: Watchdog) -> Batch:
    with watchdog.waiting("a batch, to see how fast they come"):
        return next_batch(batches, workload, "while it was measured")


def measure_step(
    compiled: CompiledFunctions,
    state: Any,
    feed: Feed,
    *,
    num_updates: int = 1,
    most: int = _QUICK_CALLS,
) -> float:
    """Returns the median seconds per step on a held input; compiles the step."""
    state = compiled.copy(state)

    def step(inputs: Any) -> Any:
        nonlocal state
        state, report = compiled.step(state, feed, inputs)
        return report

    steps = BoundedSteps(step)
    steps(feed.hold(num_updates))  # Compiles.
    steps.finish()
    # All processes must make the same number of steps, or some would wait forever.
    alone = jax.process_count() == 1
    # As many steps are in flight as in training.
    for _ in range(MAX_IN_FLIGHT):
        steps(feed.hold(num_updates))
    down = time_calls(
        lambda: steps(feed.hold(num_updates)),
        window_s=BUDGET_S,
        least=_LEAST_CALLS if alone else _TOGETHER_CALLS,
        most=most if alone else _TOGETHER_CALLS,
    )
    steps.finish()
    # The median, because another process may have disturbed some steps.
    return broadcast_from_first(statistics.median(down) / num_updates)


def probe_config(
    config: RunSpec,
    workload: Workload,
    *,
    seconds: float,
    stages: Mapping[str, Callable[[], Any]],
    on_progress: Callable[[str, float], None],
    flag: str = "--config",
) -> ProbeReport:
    """Probes the trainer of a config without an echo; its advice names fields."""
    compiled = CompiledFunctions(config, workload)
    part_done = 0.0

    def show(what: str, done: float | None = None) -> None:
        nonlocal part_done
        part_done = part_done if done is None else done
        on_progress(what, part_done)

    def timed(stage: str) -> Any:
        with watchdog.waiting(f"the stage {stage} of a batch"):
            return stages[stage]()

    batches = JoinedBatches([workload.train_dataset(unechoed(config))])
    with Watchdog(config, show) as watchdog, watchdog.closing(batches):
        return probe(
            iter(partial(_load, batches, workload, watchdog), None),
            compiled.step_on_batch,
            state=compiled.init(compiled.init_key),
            seconds=seconds,
            max_uses=config.echo.max_uses,
            stages={name: partial(timed, name) for name in stages},
            options=_options(flag),
            on_progress=show,
        )


def _options(flag: str) -> OptionNames:
    return OptionNames(
        threads=f"{flag}.data.threads",
        workers=f"{flag}.data.workers",
        prefetch=f"{flag}.data.prefetch",
        seconds="--seconds",
        worth=f"{flag}.probe_repeats",
        min_uses=f"{flag}.echo.min_uses={{factor}} {flag}.echo.max_uses={{most}}",
        device=f"on the accelerator ({flag}.echo.buffer_on=device)",
        placements=("decode", "augment", "batch"),
        echo=(
            f"{flag}.echo.factor={{factor}} {flag}.echo.stage={{after}} "
            f"{flag}.echo.order=spread {flag}.echo.buffer={{buffer}}"
        ),
    )
