"""A branch of a run on fresh data alone, which says what the run's repeats are worth.

See `echo_jax.echo.instrument.worth`. The run itself is the other branch, evaluated
anyway: so a branch costs its updates, as many fresh batches, and one evaluation.
"""

import jax

from echo_jax.config import Config
from echo_jax.echo.keys import use_seed
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.evaluation import evaluate_split
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import next_batch, unechoed
from echo_jax.training.processes.distributed import this_shard
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.workloads.base import Workload

__all__ = ["check_branches", "has_branch", "metric_after_fresh"]

# Names the order of a branch's data among what a run draws from its seed.
_STREAM = 0xB4


def check_branches(config: Config, workload: Workload) -> None:
    """Refuses branches of a run whose data has no other order.

    Raises:
      ValueError: As described.
    """
    if config.probe_repeats and workload.with_seed is None:
        raise ValueError(
            f"config.probe_repeats={config.probe_repeats} needs a workload with "
            f"with_seed, and that of {workload.name!r} has none; set "
            "--config.probe_repeats=0"
        )


def has_branch(config: Config, update: int) -> bool:
    """Whether a branch begins after an update, and the run is evaluated at its end."""
    every = config.probe_repeats
    # Of nothing learnt yet, everything is worth as much.
    is_due = every > 0 and update > 0 and update % every == 0
    return is_due and update + config.eval_every <= config.updates


def metric_after_fresh(
    config: Config,
    compiled: CompiledFunctions,
    state: object,
    update: int,
    workload: Workload,
    watchdog: Watchdog,
) -> float:
    """Returns the metric after as many updates on fresh data as evaluations are apart.

    The data comes in an order of its own, decided by the seed and the update, so that
    a resumed run's branches are the same, and the run's own data stays where it is. As
    long as the run has seen a small part of its data, what comes is new to the model.

    Args:
      config: A checked training config.
      compiled: The run's functions.
      state: Of the run; not changed.
      update: After which it is.
      workload: Made from the config.
      watchdog: Looks after the waits for data.

    Raises:
      ValueError: The data ended.
    """
    assert workload.with_seed is not None  # By `check_branches`.
    other = workload.with_seed(int(use_seed(config.seed, _STREAM, update)))
    dataset = other.train_dataset(unechoed(config), this_shard())
    branch, report = compiled.copy(state), None
    with watchdog.closing(JoinedBatches([dataset])) as batches:
        for number in range(config.eval_every):
            what = f"batch {number + 1} of {config.eval_every} of the branch"
            with watchdog.waiting(what):
                batch = next_batch(batches, workload, f"before {what}")
            # No more than two updates in flight.
            jax.block_until_ready(report)
            branch, report = compiled.step_on_batch(branch, batch)
    metrics = evaluate_split(config, compiled, branch, workload, watchdog)
    return metrics[workload.metric]
