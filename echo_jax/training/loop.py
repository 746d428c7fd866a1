"""The training loop."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_jax.config import Config, check_config
from echo_jax.training.checkpoint import Checkpoints
from echo_jax.training.clock import Clock
from echo_jax.training.environment import (
    claim_workdir,
    config_sha256,
    describe_environment,
)
from echo_jax.training.interrupt import Interrupted, StopSignal
from echo_jax.training.measure import measure_rates
from echo_jax.training.metrics import Totals
from echo_jax.training.progress import Progress
from echo_jax.training.runfiles import MetricsFile, read_json, write_json
from echo_jax.training.setup import Setup, make_echo_spec, make_setup
from echo_jax.training.sitting import Sitting
from echo_jax.training.state import TrainState, params_sha256
from echo_jax.training.summary import is_finished, make_summary
from echo_jax.workloads.base import Workload

__all__ = ["train"]


def train(
    config: Config,
    workload: Workload,
    workdir: str | Path,
    *,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a workload, or goes on training it.

    The order is a contract. Between two updates the loop

    1. stops and saves, if a signal asked for it;
    2. evaluates the state as it is, if due;
    3. saves it, if due: after the evaluation, so that a resumed run need not do it
       again;
    4. takes the next batch;
    5. dispatches the update;
    6. reads the numbers of the update before the last one. So at most two updates
       are in flight whenever the loop waits for data, and what it measures is true.

    A run that is stopped at any point and started again with the same arguments
    ends, on the same devices, with the same parameters bit for bit; what was
    logged after the last checkpoint is dropped and done again. A finished run is
    not trained again: its summary is returned. It can be extended by more updates,
    but a schedule that decays until the end of the run then decays anew from where
    the longer run would be.

    Args:
      config: The shared fields of `echo_jax.config.default_config`, and the
        workload's.
      workload: Made from this config.
      workdir: The run folder; made if there is none.
      console: Where progress is shown; None for standard output.

    Returns:
      The content of ``summary.json``.

    Raises:
      ValueError: The config has an impossible value, or the folder holds a run of
        another config.
      NonFiniteLossError: The loss became NaN or infinite.
      Interrupted: Ctrl-C or SIGTERM; the run is saved. A second Ctrl-C raises
        KeyboardInterrupt without saving.

    Example:
      >>> config = load_config("configs/lm.py:tiny")
      >>> summary = train(config, lm.build(config), "runs/lm_tiny")
      >>> summary["updates"]
      60
    """
    check_config(config)
    # Made here, so that an impossible echo is refused before anything is written.
    dataset = workload.train_dataset(make_echo_spec(config))
    workdir = Path(workdir)
    claim_workdir(workdir, config)
    summary = read_json(workdir / "summary.json")
    if summary is not None and is_finished(summary, config):
        return summary
    write_json(workdir / "environment.json", describe_environment(workload.facts))

    clock = Clock()
    setup = make_setup(config, workload)
    with ExitStack() as stack:
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints)
        stack.enter_context(closing(checkpoints))
        start = checkpoints.latest()
        state, host = _start(setup, checkpoints, config)
        # Before the run's own pipeline starts, whose threads would disturb it.
        rates = measure_rates(setup, state, workload, config)
        iterator = iter(dataset)
        stack.enter_context(closing(iterator))
        totals = Totals()
        if host:
            iterator.set_state(host["data"])
            totals = Totals(**host["totals"])
            clock.add(host["clock"])
        progress = Progress(console, total=config.updates, done=totals.updates)
        sitting = Sitting(
            config=config,
            workload=workload,
            setup=setup,
            state=state,
            totals=totals,
            iterator=iterator,
            step_s=rates.t_down_s,
            clock=clock,
            checkpoints=checkpoints,
            metrics=MetricsFile(workdir / "metrics.jsonl", resumed_from=start),
            progress=progress,
        )
        # The sitting alone holds the state: a second reference would be to
        # memory that the first update takes away.
        del state
        stack.enter_context(progress)
        stop = stack.enter_context(StopSignal())
        stack.enter_context(clock.phase("train"))
        if start is not None:
            progress.note(f"resumed after update {start}")

        while True:
            updates = sitting.totals.updates
            if stop.received:
                sitting.save()
                raise Interrupted(updates, stop.received)
            is_last = updates >= config.updates
            if is_last or updates % config.eval_every == 0:
                sitting.evaluate()
            is_last = is_last or (config.stop_at_target and sitting.met_target)
            if is_last or _is_due(updates, config.checkpoint_every):
                sitting.save()
            if is_last:
                break
            batch = sitting.take()
            sitting.dispatch(batch)
            sitting.read()

        summary = make_summary(
            config,
            workload,
            rows=sitting.metrics.rows,
            totals=sitting.totals,
            seconds=clock.seconds(),
            rates=rates,
            params_sha256=params_sha256(sitting.state.params),
        )
    # After the last checkpoint is whole: a finished run can always be extended.
    write_json(workdir / "summary.json", summary)
    return summary


def _start(
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


def _is_due(updates: int, every: int) -> bool:
    return every > 0 and updates > 0 and updates % every == 0
