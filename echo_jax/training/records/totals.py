"""What a run counts: of this process, and over all of them."""

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
      skipped: Fresh examples that were bad, and in whose places others were used.
      bytes_sent: Of the updates, that came out of collectives on each device.
      busy_s: Seconds in which the devices worked, see `DeviceTime`; up to when the
        counts were last put beside the time.
    """

    updates: int = 0
    fresh: int = 0
    repeats: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    busy_s: float = 0.0

    def after(self, repeat: np.ndarray, *, bytes_sent: int) -> "Totals":
        """Returns the totals after more updates.

        Args:
          repeat: The repeat index of every example of them, ``int32[K, B]``.
          bytes_sent: Of each of them.
        """
        repeats = int(np.count_nonzero(repeat))
        # Not by `replace`, which takes four times as long: this is at every update.
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
        """Returns the totals of this process where a run starts or goes on.

        What was counted before counts once: in the first process, for all together.

        Args:
          before: The fields of every process' totals then; none at the start.
        """
        totals = cls.of_all([cls(**each) for each in before])
        if is_main_process():
            return totals
        return replace(totals, **dict.fromkeys(_COUNTED, 0))

    @classmethod
    def of_all(cls, totals: Sequence["Totals"]) -> "Totals":
        """Returns the totals over all processes.

        Every process has done all updates, on examples of its own. Where one waits
        for its data, the devices of the others seem to work: they wait within a
        collective. So the least time at work counts.

        Args:
          totals: Of each process; none at the start of a run.
        """
        if not totals:
            return cls()
        counts = {name: sum(getattr(t, name) for t in totals) for name in _COUNTED}
        busy_s = min(each.busy_s for each in totals)
        return replace(totals[0], busy_s=busy_s, **counts)

    def counts(self) -> dict[str, int]:
        """Returns ``updates``, ``fresh``, ``repeats``, ``skipped``, ``bytes_sent``."""
        counts = asdict(self)
        del counts["busy_s"]
        return counts


# What a process counts of its own rows.
_COUNTED = ("fresh", "repeats", "skipped")


def gather_totals(
    own: Totals, workload: Workload, *, ended_after: int | None
) -> list[Totals]:
    """Returns the totals of every process, which all have to ask for.

    Args:
      own: Of this process.
      workload: Whose data it is.
      ended_after: After how many updates the data of this process ended, if it did.

    Raises:
      ValueError: The data of one of them ended.
    """
    gathered = all_gather([asdict(own), ended_after])
    ends = [after for _, after in gathered if after is not None]
    if ends:
        raise data_ended(workload, f"after {min(ends)} updates")
    return [Totals(**each) for each, _ in gathered]
