"""Where the time of a run goes: on the host by phase, on the devices by work."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Clock", "DeviceTime", "Phase", "Work"]

Phase = Literal["train", "wait", "pause"]

# How many steps the usual one is the median of, and after how many dispatches without
# a measurement a loop waits for one: where data is late, it costs nothing that shows.
_LATEST = 33
_MEASURE_EVERY = 32


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

    def phase(self, phase: Phase) -> "_Spending":
        """Spends the time of a block on a phase.

        Args:
          phase: ``"train"`` (computing, and the loop itself), ``"wait"`` (blocked
            on the input iterator) or ``"pause"`` (start-up, compilation,
            evaluation, checkpointing).
        """
        return _Spending(self._switch, phase)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds before the run was resumed.

        Args:
          seconds: What `seconds` returned at the end of the last of them.
        """
        for phase in self._spent:
            self._spent[phase] += seconds[f"{phase}_s"]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds so far, also before the run was resumed.

        Returns:
          ``train_s``, ``wait_s``, ``pause_s``, and ``wall_s``: the first two
          together, the time to train without the pauses.
        """
        self._switch(self._phase)
        spent = {f"{phase}_s": seconds for phase, seconds in self._spent.items()}
        return {"wall_s": spent["train_s"] + spent["wait_s"], **spent}

    def _switch(self, phase: Phase) -> Phase:
        """Spends what follows on a phase; returns the one before."""
        now, before = self._now(), self._phase
        self._spent[before] += now - self._since
        self._phase, self._since = phase, now
        return before


class _Spending:
    """A block whose time is spent on a phase.

    A class, because a generator takes several times as long, at every update.
    """

    def __init__(self, switch: Callable[[Phase], Phase], phase: Phase):
        self._switch = switch
        self._phase: Phase = phase

    def __enter__(self) -> None:
        self._before: Phase = self._switch(self._phase)

    def __exit__(self, *error: object) -> None:
        self._switch(self._before)


@dataclass(eq=False)
class Work:
    """A dispatch, as `DeviceTime` sees it.

    Attributes:
      sent_s: When the loop began to send it.
      updates: How many updates it performs.
      is_done: Whether the devices have finished it; returns at once.
      running_s: When it was last seen unfinished.
      is_finished: Whether its time is counted already.
    """

    sent_s: float
    updates: int
    is_done: Callable[[], bool]
    running_s: float
    is_finished: bool = False


class DeviceTime:
    """Tells how long the devices worked, from what a loop sees of its dispatches.

    Devices perform dispatches one after another: they work on one from when it was
    sent, or from the end of the one before if that is later, until its own end. A loop
    that waits for an end has seen it. Of one that passed while the loop was elsewhere,
    such as waiting for data, it knows the last look before and the first after; between
    them the end is put where a step of the usual length puts it.

    So intervals of work never overlap, and no stretch of a run holds more work than
    time: what is left of it is idle, without a correction. And where both ends of an
    interval were seen, it is a measurement of the step in the conditions of the run:
    the median of the latest is the usual length. A loop that always waits for data sees
    few ends; now and then it must wait for one, see `is_due`.

    Args:
      step_s: Seconds of an update, as measured before the run.
      steps: Updates of a usual dispatch; others are no measurement.
      now: The time in seconds; monotonic.

    Example:
      >>> device = DeviceTime(0.01, steps=1)
      >>> device.look()
      >>> sent_s = device.now()
      >>> state, report = step(state, batch)
      >>> work = device.sent(sent_s, 1, report.is_ready)
      >>> report.block_until_ready()
      >>> device.finished(work)
      >>> device.seconds(), device.step_s
      (0.012, 0.012)
    """

    def __init__(
        self, step_s: float, *, steps: int, now: Callable[[], float] = time.perf_counter
    ):
        self.now = now
        self._start_s, self._steps = step_s, steps
        self._measured: deque[float] = deque(maxlen=_LATEST)
        self._in_flight: deque[Work] = deque()
        self._spent_s = 0.0
        # The end of the last work, and whether it was seen.
        self._free_s, self._is_seen = now(), True
        self._unmeasured = 0

    @property
    def step_s(self) -> float:
        """Seconds of an update at work: measured in the run, or else before it."""
        return statistics.median(self._measured or [self._start_s])

    @property
    def is_due(self) -> bool:
        """Whether the loop should wait for the work that it has just sent.

        Only devices that had nothing to do are waited for, and one dispatch of many:
        where data is late, the time is there.
        """
        return self._unmeasured >= _MEASURE_EVERY and len(self._in_flight) == 1

    def sent(self, sent_s: float, updates: int, is_done: Callable[[], bool]) -> Work:
        """Takes note of a dispatch.

        Args:
          sent_s: When the loop began to send it, right after a `look`.
          updates: How many updates it performs.
          is_done: Whether the devices have finished it; returns at once.
        """
        work = Work(sent_s, updates, is_done, running_s=sent_s)
        self._in_flight.append(work)
        self._unmeasured += 1
        if len(self._in_flight) == 1 and is_done():
            # A small program on a CPU is done when the call returns.
            self.finished(work)
        return work

    def look(self) -> None:
        """Takes note of all work that is done by now."""
        while self._in_flight and self._in_flight[0].is_done():
            work, at_s = self._in_flight[0], self.now()
            usual_s = self._begin_s(work) + work.updates * self.step_s
            self._finish(min(max(usual_s, work.running_s), at_s), is_seen=False)
        for work in self._in_flight:
            work.running_s = self.now()

    def finished(self, work: Work) -> None:
        """Takes note that work is done, right after the loop has waited for it.

        Args:
          work: The oldest that was not said to be finished; a `look` right before the
            loop began to wait has counted it, if it was done then.
        """
        if not work.is_finished:
            self._finish(self.now(), is_seen=True)

    def seconds(self) -> float:
        """Returns how long the devices worked so far, up to this moment."""
        self.look()
        begun = [max(self.now() - self._begin_s(work), 0) for work in self._in_flight]
        return self._spent_s + (begun[0] if begun else 0.0)

    def _begin_s(self, work: Work) -> float:
        return max(work.sent_s, self._free_s)

    def _finish(self, end_s: float, *, is_seen: bool) -> None:
        work = self._in_flight.popleft()
        work.is_finished = True
        begin_s = self._begin_s(work)
        end_s = max(end_s, begin_s)
        # An end that lies before the sending does not matter, seen or not.
        is_exact = is_seen and (self._is_seen or self._free_s < work.sent_s)
        if is_exact and work.updates == self._steps:
            self._measured.append((end_s - begin_s) / work.updates)
            self._unmeasured = 0
        self._spent_s += end_s - begin_s
        self._free_s, self._is_seen = end_s, is_seen
