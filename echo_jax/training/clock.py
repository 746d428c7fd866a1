"""Where the time of a run goes: training, waiting for input, and pauses."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

__all__ = ["Clock", "Phase"]

Phase = Literal["train", "wait", "pause"]


class Clock:
    """Attributes every second to one phase; the seconds of a run add up.

    A clock starts in ``pause``. `phase` switches for the length of a block and
    switches back, so phases nest: waiting for a batch inside of training is waiting.

    Args:
      now: The time in seconds; monotonic.

    Example:
      >>> clock = Clock()
      >>> with clock.phase("train"):
      ...     with clock.phase("wait"):
      ...         batch = next(iterator)
      ...     state = step(state, batch)
      >>> sorted(clock.seconds())
      ['pause_s', 'train_s', 'wait_s', 'wall_s']
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter):
        self._spent: dict[Phase, float] = {"train": 0.0, "wait": 0.0, "pause": 0.0}
        self._now = now
        self._phase: Phase = "pause"
        self._since = now()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Spends the time of a block on a phase.

        Args:
          phase: ``"train"`` (computing, and the loop itself), ``"wait"`` (blocked
            on the input iterator) or ``"pause"`` (start-up, compilation,
            evaluation, checkpointing).
        """
        before = self._phase
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds of the sittings before this one.

        Args:
          seconds: What `seconds` returned at the end of the last of them.
        """
        for phase in self._spent:
            self._spent[phase] += seconds[f"{phase}_s"]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds so far, of this sitting and earlier ones.

        Returns:
          ``train_s``, ``wait_s``, ``pause_s``, and ``wall_s``: the first two
          together, the time to train without the pauses.
        """
        self._switch(self._phase)
        spent = {f"{phase}_s": seconds for phase, seconds in self._spent.items()}
        return {"wall_s": spent["train_s"] + spent["wait_s"], **spent}

    def _switch(self, phase: Phase) -> None:
        now = self._now()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now
