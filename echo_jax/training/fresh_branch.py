"""A branch of a run on fresh data alone, which measures the worth of the run's repeats.

See `echo_jax.echo.instrument.worth`. The run itself is the other branch, and is
evaluated anyway. So a branch costs its updates, their fresh batches and one
evaluation.
"""

import jax

from echo_jax.config import Config
from echo_jax.echo.keys import use_seed
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.evaluation import evaluate_split
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.training.update.recompute import fresh_batches
from echo_jax.workloads.base import Workload

__all__ = ["check_branches", "has_branch", "metric_after_fresh"]

# The random stream of a run's seed for the order of a branch's data.
_STREAM = 0xB4


def check_branches(config: Config, workload: Workload) -> None:
    """Raises ValueError if the config asks for branches without `with_seed`."""
    if config.probe_repeats and workload.with_seed is None:
        raise ValueError(
            f"config.probe_repeats={config.probe_repeats} needs a workload with "
            f"with_seed, and that of {workload.name!r} has none; set "
            "--config.probe_repeats=0"
        )


def has_branch(config: Config, update: int) -> bool:
    """Whether a branch begins after an update and ends within the run."""
    every = config.probe_repeats
    # Before the model has learnt anything, all data is worth the same.
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
    """Returns the metric after `eval_every` updates on fresh data, on a copy."""
    assert workload.with_seed is not None  # By `check_branches`.
    # The order depends on the seed and the update, so a resumed run has the same
    # branches. The run's own data does not move. The branch's data is new to the model
    # as long as the run has seen a small part of all data.
    other = workload.with_seed(int(use_seed(config.seed, _STREAM, update)))
    branch, report = compiled.copy(state), None
    count = config.eval_every
    for batch in fresh_batches(config, other, watchdog, count, "of the branch"):
        # At most two updates are in flight.
        jax.block_until_ready(report)
        branch, report = compiled.step_on_batch(branch, batch)
    metrics = evaluate_split(config, compiled, branch, workload, watchdog)
    return metrics[workload.metric]
