"""The counts of a run: of this process, and over all processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from echo_jax.training.feeds.loader import data_ended
from echo_jax.training.processes.distributed import all_gather, is_main_process
from echo_jax.workloads.base import Workload

__all__ = ["Totals", "gather_totals"]


@dataclass(frozen=True)
class Totals:
    """Counts since the start of the run, also before it was resumed.

    Attributes:
      updates: Optimizer steps.
      fresh: Examples used for the first time.
      repeats: Examples used again.
      skipped: Bad fresh examples, which others replaced.
      bytes_sent: Bytes that the updates' collectives returned on each device.
      busy_s: Seconds of work of the devices, until the last reading of `DeviceTime`.
    """

    updates: int = 0
    fresh: int = 0
    repeats: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    busy_s: float = 0.0

    def after(self, repeat: np.ndarray, *, bytes_sent: int) -> "Totals":
        """Returns the totals after K updates with repeat indices ``int32[K, B]``."""
        repeats = int(np.count_nonzero(repeat))
        # `replace` takes four times as long, and this runs at every update.
        return Totals(
            self.updates + len(repeat),
            self.fresh + repeat.size - repeats,
            self.repeats + repeats,
            self.skipped,
            self.bytes_sent + len(repeat) * bytes_sent,
            self.busy_s,
        )

    @classmethod
    def resumed(cls, before: Sequence[Mapping[str, Any]]) -> "Totals":
        """Returns the totals of this process at the start or resumption of a run."""
        # The first process keeps the earlier counts for all, so they count once.
        totals = cls.of_all([cls(**each) for each in before])
        if is_main_process():
            return totals
        return replace(totals, **dict.fromkeys(_COUNTED, 0))

    @classmethod
    def of_all(cls, totals: Sequence["Totals"]) -> "Totals":
        """Returns the totals over all processes."""
        if not totals:
            return cls()
        counts = {name: sum(getattr(t, name) for t in totals) for name in _COUNTED}
        # While one process waits for its data, the devices of the others wait within a
        # collective and seem to work. So the least time at work counts.
        busy_s = min(each.busy_s for each in totals)
        return replace(totals[0], busy_s=busy_s, **counts)

    def counts(self) -> dict[str, int]:
        """Returns all fields but ``busy_s``."""
        counts = asdict(self)
        del counts["busy_s"]
        return counts


# Counts that differ between the processes.
_COUNTED = ("fresh", "repeats", "skipped")


def gather_totals(
    own: Totals, workload: Workload, *, ended_after: int | None
) -> list[Totals]:
    """Returns every process's totals; raises if the data of one of them ended."""
    gathered = all_gather([asdict(own), ended_after])
    ends = [after for _, after in gathered if after is not None]
    if ends:
        raise data_ended(workload, f"after {min(ends)} updates")
    return [Totals(**each) for each, _ in gathered]
