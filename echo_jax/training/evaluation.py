"""Evaluation over a split: exact sums and counts, and an optional evaluator."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from echo_jax.config import Config
from echo_jax.echo.instrument.stopwatch import MAX_IN_FLIGHT
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.processes.distributed import all_gather, this_shard
from echo_jax.training.processes.sharding import put_batch
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.training.update.recompute import with_recomputed_statistics
from echo_jax.workloads.base import Batch, Evaluator, Workload

__all__ = ["evaluate", "evaluate_split"]


def evaluate_split(
    config: Config,
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
    """Returns all metrics of the task over a split, and those of an evaluator."""
    num_devices = compiled.mesh.size // jax.process_count()
    parts = []
    in_flight: deque[tuple[Batch, Any]] = deque()

    def finish(*, leave: int) -> None:
        while len(in_flight) > leave:
            batch, outputs = in_flight.popleft()
            jax.block_until_ready(outputs)
            if evaluator is not None:
                evaluator.add(_rows_of_all(batch), jax.device_get(outputs[1]))

    for batch in batches:
        if len(batch["mask"]) % num_devices:
            raise ValueError(
                f"an evaluation batch of {len(batch['mask'])} does not divide over "
                f"the {num_devices} devices of this process; pad it with mask 0"
            )
        outputs = compiled.evaluate(model, put_batch(batch, compiled.mesh))
        parts.append(outputs[0])
        in_flight.append((batch, outputs))
        finish(leave=MAX_IN_FLIGHT)
    finish(leave=0)

    sums: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, list[float]] = defaultdict(list)
    for part in jax.device_get(parts):
        for name, (total, count) in part.items():
            sums[name].append(float(total))
            counts[name].append(float(count))
    if not any(map(any, counts.values())):
        raise ValueError("the evaluation split has no example; give one at least")
    metrics = {name: math.fsum(sums[name]) / math.fsum(counts[name]) for name in sums}
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
