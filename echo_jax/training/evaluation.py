"""Evaluation over a split: sums and counts, merged exactly."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable

import jax

from echo_jax.echo.stopwatch import MAX_IN_FLIGHT
from echo_jax.training.setup import Setup
from echo_jax.training.sharding import put_batch
from echo_jax.training.state import TrainState
from echo_jax.workloads.base import Batch

__all__ = ["evaluate"]


def evaluate(
    setup: Setup, state: TrainState, batches: Iterable[Batch]
) -> dict[str, float]:
    """Returns every metric of the task over a split.

    A mean of the batches' means would weigh the examples of a part-filled last
    batch more than others; sums and counts do not.

    Args:
      setup: The run's functions.
      state: The state to evaluate; not changed.
      batches: One pass over the split, each with ``"mask"``.

    Returns:
      ``{metric: sum over the split / count over the split}``.

    Raises:
      ValueError: There is no example, or a batch does not divide over the devices.
    """
    num_devices = setup.mesh.size
    parts = []
    in_flight = deque()
    for batch in batches:
        if len(batch["mask"]) % num_devices:
            raise ValueError(
                f"an evaluation batch of {len(batch['mask'])} does not divide over "
                f"the {num_devices} devices of the mesh; pad it with mask 0"
            )
        parts.append(setup.program.evaluate(state, put_batch(batch, setup.mesh)))
        in_flight.append(parts[-1])
        if len(in_flight) > MAX_IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())

    sums: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, list[float]] = defaultdict(list)
    for part in jax.device_get(parts):
        for name, (total, count) in part.items():
            sums[name].append(float(total))
            counts[name].append(float(count))
    if not any(map(any, counts.values())):
        raise ValueError("the evaluation split has no example; give one at least")
    return {name: math.fsum(sums[name]) / math.fsum(counts[name]) for name in sums}
