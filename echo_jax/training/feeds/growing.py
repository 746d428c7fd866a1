"""A feed of growing batches: several updates use parts of one batch of the pipeline."""

from collections.abc import Mapping
from typing import Any

import jax

from echo_jax.config.specs import BatchSpec
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.training.feeds.feed import Feed


# The other feed is used as it would be without parts. So an echo's order, and the
# examples of a batch, do not depend on how it grows.
class GrowingFeed:
    """Hands out the parts of another feed's batches, one for each update."""

    def __init__(self, feed: Feed, growth: BatchSpec, *, groups: int):
        # The groups are the lanes or the data shards of this process. Each has as many
        # consecutive rows of a batch, and as many examples in a part.
        self._feed, self._growth, self._groups = feed, growth, groups
        self.num_lanes, self.batching = feed.num_lanes, feed.batching
        self._updates = 0
        # The batch in use, and the other feed's state before it was taken.
        self._batch: Any = None
        self._before: list[Any] = []

    @property
    def arrays(self) -> Any:
        return self._feed.arrays

    @property
    def logs(self) -> Mapping[int, DecisionLog]:
        return self._feed.logs

    @property
    def t_up_bounds(self) -> tuple[float, float]:
        """Seconds per fresh part of a batch, at least and at most."""
        parts = self._growth.parts(self._updates)
        least, most = self._feed.t_up_bounds
        return least / parts, most / parts

    def take(self, num_updates: int) -> Any:
        # All inputs of a group must have one size, so groups are not used.
        assert num_updates == 1
        if self._growth.number(self._updates) == 0:
            if self._growth.parts(self._updates) > 1:
                self._before = self._feed.get_state()
            batch = self._feed.take(1)
            if batch is None:
                return None
            self._batch = batch
        part = self._part(self._batch, self._updates)
        self._updates += 1
        return part

    def hold(self, num_updates: int) -> Any:
        """Returns an input of as many examples as the next update has."""
        number = self._growth.number(self._updates)
        return self._part(self._feed.hold(num_updates), self._updates - number)

    def hold_sizes(self) -> list[Any]:
        """Returns held inputs, one for each size that batches grow to."""
        held = self._feed.hold(1)
        return [self._part(held, boundary) for boundary in self._growth.boundaries]

    def _part(self, batch: Any, update: int) -> Any:
        parts, number = self._growth.parts(update), self._growth.number(update)
        if parts == 1:
            return batch
        # The axis of examples is the one that is split over the devices.
        axis = len(self.batching.input_sharding.spec) - 1

        def part_of(x: Any) -> Any:
            before, behind = x.shape[:axis], x.shape[axis + 1 :]
            rows = x.reshape(*before, self._groups, parts, -1, *behind)
            part = rows.take(number, axis=axis + 1)
            return part.reshape(*before, -1, *behind)

        return jax.tree.map(part_of, batch)

    def get_state(self) -> list[Any]:
        is_inside = self._growth.number(self._updates) > 0
        state = self._before if is_inside else self._feed.get_state()
        return [{"feed": each, "updates": self._updates} for each in state]

    def set_state(self, state: list[Any]) -> None:
        before = [each["feed"] for each in state]
        self._feed.set_state(before)
        self._updates = state[0]["updates"]
        if self._growth.number(self._updates):
            self._before, self._batch = before, self._feed.take(1)
            if self._batch is None:
                raise ValueError("the training data ended before where the run stood")

    def close(self) -> None:
        self._feed.close()
