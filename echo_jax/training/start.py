"""How a sitting starts: from nothing, or from a checkpoint."""

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
from rich.console import Console

from echo_jax.config import Config
from echo_jax.echo.instrument.rates import advised_factor
from echo_jax.echo.shard import Part
from echo_jax.folders import RunPath
from echo_jax.training.checkpoint import Checkpoints
from echo_jax.training.clock import Clock
from echo_jax.training.environment import config_sha256
from echo_jax.training.feed import Feed
from echo_jax.training.feeds import open_feed
from echo_jax.training.inner import LOOP, Inner
from echo_jax.training.measure import Rates, measure_loader, measure_step
from echo_jax.training.metrics import Totals
from echo_jax.training.processes import is_first, own_parts
from echo_jax.training.progress import Progress
from echo_jax.training.runfiles import MetricsFile
from echo_jax.training.setup import Setup
from echo_jax.training.sitting import Sitting
from echo_jax.training.state import TrainState
from echo_jax.training.strategy import choose_inner
from echo_jax.workloads.base import Workload

__all__ = ["start_sitting"]


def start_sitting(
    config: Config,
    workload: Workload,
    workdir: RunPath,
    setup: Setup,
    *,
    clock: Clock,
    console: Console | None,
    stack: ExitStack,
) -> Sitting:
    """Starts a sitting where the last one stopped.

    What a run decides by measuring, the echo factor and the inner steps, it decides
    once: a resumed run takes it from the checkpoint.

    Args:
      config: A checked training config.
      workload: Made from this config.
      workdir: The run folder, of this config.
      setup: The run's functions.
      clock: Gets the seconds of earlier sittings.
      console: See `echo_jax.training.loop.train`.
      stack: Closes what was opened.

    Returns:
      The sitting, which alone holds the state.

    Raises:
      ValueError: The echo is impossible, or the checkpoint is of another config.
    """
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints)
    stack.enter_context(closing(checkpoints))
    start = checkpoints.latest()
    state, host = _state(setup, checkpoints, config)
    totals = Totals.of_all([Totals(**each) for each in host["totals"]] if host else [])
    if not is_first():
        # What was counted before counts once: for the process that speaks for all.
        totals = replace(totals, fresh=0, repeats=0)
    mark = "[one batch held]" if config.data.hold_batch else ""
    # One process speaks for all.
    console = console if is_first() else Console(quiet=True)
    progress = Progress(console, total=config.updates, done=totals.updates, mark=mark)
    if config.data.hold_batch:
        progress.note("shows the ceiling of speed, and writes no checkpoint")
    if start is not None:
        progress.note(f"resumes after update {start}")
    num_parts = len(host["data"]) if host else config.data.parts or jax.process_count()
    parts = own_parts(num_parts)
    decided = _decide(config, workload, setup, state, host, parts, progress)
    stack.enter_context(closing(decided.feed))
    if host:
        decided.feed.set_state([host["data"][part.number] for part in parts])
        clock.add(host["clock"])
    metrics = MetricsFile(
        workdir / "metrics.jsonl", resumed_from=start, writes=is_first()
    )
    stack.callback(metrics.flush)
    return Sitting(
        config=config,
        workload=workload,
        workdir=workdir,
        setup=setup,
        state=state,
        totals=totals,
        feed=decided.feed,
        inner=decided.inner,
        factor=decided.factor,
        rates=decided.rates,
        clock=clock,
        checkpoints=checkpoints,
        metrics=metrics,
        progress=progress,
    )


def _state(
    setup: Setup, checkpoints: Checkpoints, config: Config
) -> tuple[TrainState, dict[str, Any] | None]:
    """Returns the state to start from, and the host's part of its checkpoint."""
    update = checkpoints.latest()
    if update is None:
        return setup.program.init(setup.init_key), None
    state, host = checkpoints.restore(update, setup.program.abstract_state)
    if host["config_sha256"] != config_sha256(config):
        raise ValueError(
            f"the checkpoint of update {update} was saved with another config than "
            "config.json; use another --workdir"
        )
    return state, host


@dataclass(frozen=True)
class _Decided:
    """What a run decides by measuring, and the feed that was made for it."""

    feed: Feed
    inner: Inner
    factor: float
    rates: Rates


def _decide(
    config: Config,
    workload: Workload,
    setup: Setup,
    state: TrainState,
    host: dict[str, Any] | None,
    parts: Sequence[Part],
    progress: Progress,
) -> _Decided:
    """Measures, decides what was not decided before, and compiles what is used.

    The feed is not started yet: its threads would disturb what is measured.
    """
    t_up_s, sample = measure_loader(workload, config, parts=parts)
    opened = partial(
        open_feed,
        config,
        workload,
        setup.mesh,
        sample=sample,
        parts=parts,
        num_lanes=host["num_lanes"] if host else 0,
        note=progress.note,
    )
    is_open = config.echo.factor == "auto" and not host
    factor = host["factor"] if host else cast(float, config.echo.factor)
    feed = opened(factor=config.echo.cap if is_open else factor)
    t_down_s = measure_step(setup, state, feed)
    if host:
        inner, why = Inner(**host["inner"]), ""
    else:
        inner, why = choose_inner(
            config,
            setup,
            state,
            feed,
            step_s=t_down_s,
            data_s=t_up_s / _most_updates(config, t_up_s / t_down_s),
        )
    if why:
        progress.note(why)
    if inner != LOOP:
        t_down_s = measure_step(setup, state, feed, inner=inner)
    rates = Rates(t_up_s=t_up_s, t_down_s=t_down_s)
    if is_open:
        # The old feed first gives its buffer back.
        feed.close()
        del feed
        factor = _advised(config, rates, progress)
        feed = opened(factor=factor)
        for strategy in {LOOP, inner}:
            measure_step(setup, state, feed, inner=strategy)  # Compiles.
    return _Decided(feed, inner, factor, rates)


def _most_updates(config: Config, ratio: float) -> float:
    """Returns how many updates a fresh batch serves at most."""
    if config.data.hold_batch:
        return math.inf
    load = config.echo.load
    if config.echo.mode == "stochastic":
        return max(v if load.of == "e" else 1 / v for v in (load.start, load.end))
    if config.echo.mode == "adaptive":
        return config.echo.cap
    if config.echo.factor == "auto":
        return advised_factor(ratio, config.echo.cap)
    return config.echo.factor


def _advised(config: Config, rates: Rates, progress: Progress) -> float:
    """Returns the echo factor that the rates advise."""
    # More digits than were measured would only be hard to read.
    factor = round(advised_factor(rates.ratio, config.echo.cap), 2)
    progress.note(
        f"echo factor {factor:g}: a fresh batch takes {rates.ratio:.2f} times as long "
        f"as a step, and the cap is {config.echo.cap}"
    )
    return factor
