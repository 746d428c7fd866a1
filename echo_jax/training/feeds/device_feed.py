"""The feed of an echo on the devices, as a config describes it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.device import DeviceFeed, EchoBuffer, plan_of_size
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.plans.lanes import Lanes, joined_state, lanes_are_alike, split_state
from echo_jax.echo.processes import Placement
from echo_jax.echo.spec import AnySpec
from echo_jax.training.arrays import put
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.workloads.base import Augment, Batch

# A different stream from those that the host's pipeline derives from the seed.
_AUGMENT_STREAM = 1 << 20


def count_lanes(config: RunSpec, mesh: Mesh, num_shards: int = 1, kept: int = 0) -> int:
    """Returns the lanes of a buffer; a resumed run keeps its number of lanes."""
    multiple = math.lcm(mesh.size, num_shards)
    lanes = kept or config.echo.lanes or multiple
    if lanes % multiple:
        raise ValueError(
            f"echo.lanes={lanes} is not a multiple of {multiple}, for {mesh.size} "
            f"devices and {num_shards} data shards; use fewer of them, or start "
            "another run with --config.echo.lanes=0"
        )
    return lanes


@dataclass(frozen=True)
class DeviceBatching:
    """Reads batches from the buffer, and augments every use."""

    buffer: EchoBuffer
    augment: Augment | None

    @property
    def arrays_sharding(self) -> NamedSharding:
        return self.buffer.sharding

    @property
    def input_sharding(self) -> NamedSharding:
        return self.buffer.input_sharding

    def __call__(self, arrays: Any, inputs: Any) -> list[Batch]:
        batches = self.buffer.draw(arrays, inputs, self.augment)
        return [{**batch, "repeat": inputs[k, 1]} for k, batch in enumerate(batches)]

    def repeats(self, inputs: Any) -> Any:
        return inputs[:, 1]

    def send(self, inputs: Any) -> Any:
        # Inputs are small enough to be sent by the call that uses them.
        return inputs if jax.process_count() == 1 else put(inputs, self.input_sharding)


class DeviceEchoFeed:
    """Draws batches from a buffer on the devices, which it allocates at once."""

    def __init__(
        self,
        batches: JoinedBatches,
        config: RunSpec,
        spec: AnySpec,
        *,
        mesh: Mesh,
        num_lanes: int,
        shards: Sequence[DataShard] = (SINGLE,),
        sample: Batch,
        augment: Augment | None = None,
        max_batches: int = 1,
        note: Callable[[str], None] = lambda line: None,
    ):
        first, count, num_shards = shards[0].index, len(shards), shards[0].count
        # Else data shards may be at different items after an update.
        if count > 1 and not lanes_are_alike(spec):
            raise ValueError(
                "on the devices, echo.mode=adaptive and the orders window_shuffle and "
                "shuffle_buffer need a process for each of the "
                f"{num_shards} data shards, for every shard takes fresh batches at "
                f"updates of its own, and this process would have {count}; use as "
                "many processes as the run was begun with"
            )
        layout = EchoBuffer.of(sample, num_lanes=num_lanes, mesh=mesh)
        self._place = place = Placement.of(layout.sharding, num_lanes)
        lanes = Lanes(config.batch_size, num_lanes, place.lanes)
        plan = plan_of_size(
            spec, lanes, layout.bytes_per_item, config.echo.buffer_bytes, max_batches
        )
        buffer = replace(layout, num_slots=plan.num_slots)
        note(str(buffer))
        # Each process reads and writes only the buffer of its own devices.
        own = replace(buffer, num_lanes=len(place.lanes), sharding=place.own)
        self.num_lanes = num_lanes
        seed = int(seed_for_use(config.seed, _AUGMENT_STREAM, 0))
        self._sample = sample
        self._batches = batches
        self._first_shard, self._num_shards = first, count
        self._batch_rows = config.batch_size // num_shards * count
        self._feed = DeviceFeed(
            batches,
            plan,
            own,
            seed=None if augment is None else seed,
            prefetch=config.data.prefetch,
        )
        self.batching = DeviceBatching(buffer, augment)
        self._own_arrays: Any = None

    @property
    def arrays(self) -> Any:
        """The slots of all processes."""
        own = self._feed.arrays
        if own is not self._own_arrays:
            self._arrays, self._own_arrays = self._place.joined(own), own
        return self._arrays

    @property
    def logs(self) -> dict[int, DecisionLog]:
        log = self._feed.log
        return {} if log is None else {self._first_shard: log}

    @property
    def t_up_bounds(self) -> tuple[float, float]:
        return self._batches.t_up_bounds

    def take(self, num_updates: int) -> np.ndarray | None:
        inputs = self._feed.take(num_updates)
        if inputs is None or inputs.shape[2] < self._batch_rows:
            return None
        return inputs

    def hold(self, num_updates: int) -> np.ndarray:
        """Returns an input that reads the first slots at every update."""
        held = self._feed.hold(self._sample)
        return np.tile(held, (num_updates, 1, 1))

    def get_state(self) -> list[Any]:
        own = self._feed.get_state()
        plans = split_state(own["plan"], self._num_shards)
        return [
            {"plan": plan, "skip": own["skip"], "upstream": upstream}
            for plan, upstream in zip(plans, own["upstream"], strict=True)
        ]

    def set_state(self, state: list[Any]) -> None:
        self._feed.set_state(
            {
                "plan": joined_state([each["plan"] for each in state]),
                "skip": state[0]["skip"],
                "upstream": [each["upstream"] for each in state],
            }
        )

    def close(self) -> None:
        self._feed.close()
        self._batches.close()
