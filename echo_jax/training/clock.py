"""The time of a run: on the host by phase, on the devices by work.

`DeviceTime` sees only the loop's side of the devices' work. Devices perform dispatches
one after another. They begin one when it is sent, or when the one before ends, if that
is later. The loop observes an end exactly if it waits for it. Otherwise it knows the
last look before the end and the first look after it. Between the two, the end is put
where a step of the usual length would end.

So intervals of work never overlap, and no period has more work than time. An interval
whose two ends were observed is a measurement of the step. The usual length is the
median of the latest measurements. A loop that always waits for data observes few ends,
so now and then it must wait for one: see `DeviceTime.is_due`.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# train: computing, and the loop itself. wait: blocked on the input. pause: start-up,
# compilation, evaluation and checkpointing.
Phase = Literal["train", "wait", "pause"]

# The usual step is the median of this many measurements. After this many dispatches
# without a measurement, the loop waits for one; where data is late, that is free.
_LATEST = 33
_MEASURE_EVERY = 32


class Clock:
    """Attributes every second of a run to one phase. Phases nest."""

    def __init__(self, *, now: Callable[[], float] = time.perf_counter):
        self._spent: dict[Phase, float] = {"train": 0.0, "wait": 0.0, "pause": 0.0}
        self._now = now
        self._phase: Phase = "pause"
        self._since = now()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Spends the time of a block on a phase."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds the `seconds` of the run before it was resumed."""
        for phase in self._spent:
            self._spent[phase] += seconds[f"{phase}_s"]

    def seconds(self) -> dict[str, float]:
        """Returns ``train_s``, ``wait_s``, ``pause_s``, ``wall_s`` (train and wait)."""
        self._switch(self._phase)
        spent = {f"{phase}_s": seconds for phase, seconds in self._spent.items()}
        return {"wall_s": spent["train_s"] + spent["wait_s"], **spent}

    def _switch(self, phase: Phase) -> Phase:
        now, before = self._now(), self._phase
        self._spent[before] += now - self._since
        self._phase, self._since = phase, now
        return before


@dataclass(eq=False)
class Work:
    """A dispatch, as `DeviceTime` sees it."""

    sent_s: float
    updates: int
    is_done: Callable[[], bool]  # Does not wait.
    running_s: float  # When it was last seen unfinished.
    is_finished: bool = False  # Whether its time is counted already.


class DeviceTime:
    """Estimates how long the devices worked, from the loop's view of its dispatches."""

    # `step_s` was measured before the run. Only dispatches of `steps` updates are
    # measured.
    def __init__(
        self, step_s: float, *, steps: int, now: Callable[[], float] = time.perf_counter
    ):
        self.now = now
        self._start_s, self._steps = step_s, steps
        self._measured: deque[float] = deque(maxlen=_LATEST)
        self._in_flight: deque[Work] = deque()
        self._spent_s = 0.0
        # The end of the last work, and whether it was observed.
        self._free_s, self._is_seen = now(), True
        self._unmeasured = 0

    @property
    def step_s(self) -> float:
        """Seconds of device work per update: the run's median, or else `step_s`."""
        return statistics.median(self._measured or [self._start_s])

    @property
    def is_due(self) -> bool:
        """Whether the loop should wait for the work that it has just sent."""
        # It waits only if the devices were idle, and for few dispatches. Where data is
        # late, there is time for it.
        return self._unmeasured >= _MEASURE_EVERY and len(self._in_flight) == 1

    def sent(self, sent_s: float, updates: int, is_done: Callable[[], bool]) -> Work:
        """Records a dispatch; call `look` right before it is sent."""
        work = Work(sent_s, updates, is_done, running_s=sent_s)
        self._in_flight.append(work)
        self._unmeasured += 1
        if len(self._in_flight) == 1 and is_done():
            # On a CPU, a small program is done when the call returns.
            self.finished(work)
        return work

    def look(self) -> None:
        """Records the end of all work that is done by now."""
        while self._in_flight and self._in_flight[0].is_done():
            work, at_s = self._in_flight[0], self.now()
            usual_s = self._begin_s(work) + work.updates * self.step_s
            self._finish(min(max(usual_s, work.running_s), at_s), is_seen=False)
        for work in self._in_flight:
            work.running_s = self.now()

    def finished(self, work: Work) -> None:
        """Records that the oldest work is done; call it right after waiting for it."""
        # The `look` before the wait has counted work that was done by then.
        if not work.is_finished:
            self._finish(self.now(), is_seen=True)

    def seconds(self) -> float:
        """Returns for how many seconds the devices have worked until now."""
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
        # If the previous work ended before this was sent, its end need not be exact.
        is_exact = is_seen and (self._is_seen or self._free_s < work.sent_s)
        if is_exact and work.updates == self._steps:
            self._measured.append((end_s - begin_s) / work.updates)
            self._unmeasured = 0
        self._spent_s += end_s - begin_s
        self._free_s, self._is_seen = end_s, is_seen
