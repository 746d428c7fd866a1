"""Evaluation over a split: exact sums and counts, and an optional evaluator.

Moving averages of batch norm belong to parameters that have changed since. With
averaged replicas, they belong to each replica's own parameters. ``batch.norm`` may
instead be recomputed for the parameters that are evaluated: some fresh batches go
through the model as it is (Wu and Johnson 2021, section 3; Akiba et al. 2017 do so at
the end of a training).

A run may also be evaluated after a branch on fresh data alone, which measures the worth
of its repeats; see `echo_jax.echo.instrument.rates`. The run itself is the other
branch. So a branch costs its updates, their fresh batches and one evaluation.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from echo_jax.config.run import RunSpec
from echo_jax.echo.instrument.measure import BoundedSteps
from echo_jax.echo.keys import seed_for_use
from echo_jax.training.arrays import put_batch
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import next_batch, unechoed
from echo_jax.training.processes.distributed import all_gather, this_shard
from echo_jax.training.processes.stop import Watchdog
from echo_jax.workloads.base import Batch, Evaluator, Workload

# The random stream of a run's seed for the order of a branch's data.
_STREAM = 0xB4
# What an echo adds to a batch.
_TAGS = ("fresh_index", "repeat")


def evaluate_split(
    config: RunSpec,
    compiled: CompiledFunctions,
    state: Any,
    workload: Workload,
    watchdog: Watchdog,
) -> dict[str, float]:
    """Returns all metrics of a workload over its split, derived ones included."""
    model = compiled.model(state)
    if config.batch.norm == "recompute":
        model = with_recomputed_statistics(config, compiled, model, workload, watchdog)
    batches = workload.eval_batches(shard=this_shard())
    metrics = evaluate(
        compiled,
        model,
        watchdog.each(batches, "a batch of the evaluation"),
        evaluator=workload.evaluator() if workload.evaluator else None,
    )
    return metrics | workload.task.derive(metrics)


# Sums and counts, because a mean of the batches' means would give too much weight to
# the examples of a part-filled last batch. Each batch has this process' rows and mask.
def evaluate(
    compiled: CompiledFunctions,
    model: Any,
    batches: Iterable[Batch],
    *,
    evaluator: Evaluator | None = None,
) -> dict[str, float]:
    """Returns all metrics of the task and of an evaluator over a split."""
    num_devices = compiled.mesh.size // jax.process_count()
    parts = []

    def start(batch: Batch) -> tuple[Batch, Any]:
        if (size := len(batch["mask"])) % num_devices:
            raise ValueError(
                f"an evaluation batch of {size} does not divide over "
                f"the {num_devices} devices of this process; pad it with mask 0"
            )
        outputs = compiled.evaluate(model, put_batch(batch, compiled.mesh))
        parts.append(outputs[0])
        return batch, outputs

    def finish(started: tuple[Batch, Any]) -> None:
        batch, outputs = started
        jax.block_until_ready(outputs)
        if evaluator is not None:
            evaluator.add(_rows_of_all(batch), jax.device_get(outputs[1]))

    steps = BoundedSteps(start, finish)
    for batch in batches:
        steps(batch)
    steps.finish()
    sums: dict[str, Any] = {}
    if parts:
        sums = jax.tree.map(lambda *each: math.fsum(each), *jax.device_get(parts))
    if not any(count for _, count in sums.values()):
        raise ValueError("the evaluation split has no example; give one at least")
    metrics = {name: total / count for name, (total, count) in sums.items()}
    return metrics if evaluator is None else {**metrics, **evaluator.result()}


def _rows_of_all(batch: Batch) -> Batch:
    """Returns the batch; of several processes, their joined arrays of one axis."""
    if jax.process_count() == 1:
        return batch
    own = {name: x.tolist() for name, x in batch.items() if np.ndim(x) == 1}
    rows = all_gather(own)
    return {
        name: np.concatenate([np.asarray(row[name], batch[name].dtype) for row in rows])
        for name in own
    }


def check_evaluation(
    config: RunSpec, compiled: CompiledFunctions, workload: Workload
) -> None:
    """Refuses statistics without a batch norm, and branches without `with_seed`."""
    norm = config.batch.norm
    model = jax.eval_shape(compiled.model, compiled.abstract_state)
    if norm != "moving" and not jax.tree.leaves(model.model_state):
        raise ValueError(
            f"config.batch.norm={norm!r} needs a model with batch norm, and workload "
            f"{workload.name!r} has none. Use --config.batch.norm=moving."
        )
    if config.probe_repeats and workload.with_seed is None:
        raise ValueError(
            f"config.probe_repeats={config.probe_repeats} needs a workload with "
            f"with_seed, and that of {workload.name!r} has none; set "
            "--config.probe_repeats=0"
        )


def with_recomputed_statistics(
    config: RunSpec,
    compiled: CompiledFunctions,
    model: Any,
    workload: Workload,
    watchdog: Watchdog,
) -> Any:
    """Returns a model whose batch norms have the statistics of fresh batches."""
    statistics: list[Any] = []
    count = config.batch.norm_batches
    # Always the first batches of a new iterator, augmented as in training. So a resumed
    # run evaluates alike, and the run's own data does not move.
    for batch in fresh_batches(config, workload, watchdog, count, "for batch norm"):
        arrays = {name: x for name, x in batch.items() if name not in _TAGS}
        # At most two batches are in memory.
        jax.block_until_ready(statistics[-1:])
        statistics.append(compiled.statistics(model, put_batch(arrays, compiled.mesh)))
    return model.replace(model_state=compiled.merge(statistics))


def has_branch(config: RunSpec, update: int) -> bool:
    """Whether a branch begins after an update and ends within the run."""
    every = config.probe_repeats
    # Before the model has learnt anything, all data is worth the same.
    is_due = every > 0 and update > 0 and update % every == 0
    return is_due and update + config.eval_every <= config.updates


def metric_after_fresh(
    config: RunSpec,
    compiled: CompiledFunctions,
    state: object,
    update: int,
    workload: Workload,
    watchdog: Watchdog,
) -> float:
    """Returns the metric after `eval_every` updates on fresh data, on a copy."""
    assert workload.with_seed is not None  # By `check_evaluation`.
    # The order depends on the seed and the update, so a resumed run has the same
    # branches. The run's own data does not move. The branch's data is new to the model
    # as long as the run has seen a small part of all data.
    other = workload.with_seed(int(seed_for_use(config.seed, _STREAM, update)))
    branch, report, count = compiled.copy(state), None, config.eval_every
    for batch in fresh_batches(config, other, watchdog, count, "of the branch"):
        # At most two updates are in flight.
        jax.block_until_ready(report)
        branch, report = compiled.step_on_batch(branch, batch)
    metrics = evaluate_split(config, compiled, branch, workload, watchdog)
    return metrics[workload.metric]


def fresh_batches(
    config: RunSpec, workload: Workload, watchdog: Watchdog, count: int, purpose: str
) -> Iterator[Batch]:
    """Yields the first batches of a new iterator without an echo; watches each wait."""
    dataset = workload.train_dataset(unechoed(config), this_shard())
    with watchdog.closing(JoinedBatches([dataset])) as batches:
        for number in range(count):
            what = f"batch {number + 1} of {count} {purpose}"
            with watchdog.waiting(what):
                batch = next_batch(batches, workload, f"before {what}")
            yield batch
