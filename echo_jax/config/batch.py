"""The batch of an update: its parts, its growth, and its batch norm."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from echo_jax.config.group import Count, Group


@dataclass(frozen=True)
class BatchSpec(Group):
    """The batch of an update; it may grow during training (Smith et al. 2018).

    A smaller batch is a part of one of the config's batches. Data and echo do not
    change; several updates use the parts of a batch.
    """

    micro: Count = 1  # gradient accumulation: parts on each device
    # Updates after which the batch grows by each of the factors, up to batch_size.
    boundaries: tuple[int, ...] = ()
    # How many times as large the batch is after each of the boundaries.
    factors: tuple[int, ...] = ()
    # The devices whose examples give the statistics of batch norm. They are of an
    # update or, with micro above 1, of a part of it. Replicas have their own.
    statistics: Literal["all", "device"] = "all"
    # The batch norm statistics in evaluation: moving (averages over updates) | last (of
    # the last update) | recompute (of norm_batches fresh batches, each time)
    norm: Literal["moving", "last", "recompute"] = "moving"
    norm_batches: Count = 16  # fresh batches for norm=recompute

    def __post_init__(self):
        super().__post_init__()
        ends, factors = self.boundaries, self.factors
        are_updates = all(type(each) is int and 0 < each < 2**31 for each in ends)
        if not are_updates or any(a >= b for a, b in itertools.pairwise(ends)):
            rule = "must be numbers of updates, each above the one before"
            fix = tuple(sorted({*ends})) if are_updates else ()
            self.refuse("boundaries", rule, fix)
        is_whole = all(type(each) is int and each > 1 for each in factors)
        if len(factors) != len(ends) or not is_whole:
            rule = f"must be {len(ends)} whole numbers above 1, one for each boundary"
            self.refuse("factors", rule, (2,) * len(ends))
        if split := self.first_split():
            rule = f"has {split[0]}, where a batch of batch_size is not used up"
            fix = tuple(split[1] if each == split[0] else each for each in ends)
            self.refuse("boundaries", rule, fix)

    def parts(self, update: int) -> int:
        """Returns the number of parts of a batch after `update` updates."""
        return math.prod(
            factor for boundary, factor in self.steps() if update < boundary
        )

    def steps(self) -> list[tuple[int, int]]:
        """Returns each boundary with its factor."""
        return list(zip(self.boundaries, self.factors, strict=True))

    def number(self, update: int) -> int:
        """Returns the part of a batch that an update uses; see `parts`."""
        begun = max((b for b in self.boundaries if b <= update), default=0)
        return (update - begun) % self.parts(update)

    def first_split(self) -> tuple[int, int] | None:
        """Returns the first boundary within a batch and the next valid one, or None."""
        begun = 0
        for boundary in self.boundaries:
            parts = self.parts(boundary - 1)
            if left := (boundary - begun) % parts:
                return boundary, boundary + parts - left
            begun = boundary
        return None
