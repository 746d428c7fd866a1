"""A simulated host: how busy a producer whose rate varies keeps an accelerator.

The producer is a list of times, one for each batch, so that policies are compared on
the same input. Nothing sleeps: ten thousand updates take some tens of milliseconds.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from echo_jax.echo.schedule import exact_fraction

__all__ = [
    "Adaptive",
    "Fixed",
    "FixedUses",
    "Outcome",
    "Producer",
    "check_positive",
    "service_times",
    "simulate",
]

Producer = Literal[
    "constant", "exponential", "bursty", "switching", "stalling", "pareto"
]

_SWITCH_BATCHES = 64
_PARETO_SHAPE, _PARETO_MOST = 1.5, 1000.0


def service_times(kind: Producer, mean_s: float, n: int, seed: int = 0) -> np.ndarray:
    """Returns how long a producer works on each batch, ``float64[n]``, in seconds.

    Args:
      kind: ``constant``. ``exponential``. ``bursty``: 90 % take 0.4 of the mean, 10 %
        take 6.4. ``switching``: 64 batches at 1/4.5 of the mean and 64 at 8/4.5 in
        turn, so that R goes between 1 and 8 if its mean is 4.5. ``stalling``: half of
        the mean, but one in 200 takes 100.5 of it, as a storage that fails over. The
        shares are exact and their places random. ``pareto``: heavy-tailed, 0.34 to
        344 of the mean, a Pareto distribution of shape 1.5 that is cut at 1,000 times
        its least, where a read would time out. Transfers of files have shapes from 1
        to 2 (Crovella and Bestavros 1997, IEEE/ACM Transactions on Networking 5(6)).
      mean_s: Mean seconds per batch.
      n: How many batches.
      seed: Names the random choices.

    Raises:
      ValueError: If the kind is unknown or a number is out of its range.
    """
    check_positive(mean_s=mean_s)
    rng = np.random.Generator(np.random.Philox(seed))
    if kind == "constant":
        return np.full(n, mean_s)
    if kind == "exponential":
        return rng.exponential(mean_s, n)
    if kind == "bursty":
        return mean_s * np.where(rng.permutation(n) < n / 10, 6.4, 0.4)
    if kind == "switching":
        slow = np.arange(n) // _SWITCH_BATCHES % 2
        return mean_s * np.where(slow, 8.0, 1.0) / 4.5
    if kind == "stalling":
        return mean_s * np.where(rng.permutation(n) < n / 200, 100.5, 0.5)
    if kind == "pareto":
        return mean_s / _pareto_mean() * _pareto(rng.random(n))
    names = ", ".join(map(repr, get_args(Producer)))
    raise ValueError(f"kind={kind!r} is unknown; use one of {names}")


def _pareto(probability: np.ndarray) -> np.ndarray:
    """Quantiles of the bounded Pareto distribution whose least value is 1."""
    beyond = _PARETO_MOST**-_PARETO_SHAPE
    return (1 - probability * (1 - beyond)) ** (-1 / _PARETO_SHAPE)


def _pareto_mean() -> float:
    a, most = _PARETO_SHAPE, _PARETO_MOST
    return a / (a - 1) * (1 - most ** (1 - a)) / (1 - most**-a)


@dataclass(frozen=True)
class Fixed:
    """Every batch is used ``factor`` times: batch k floor((k+1)e) - floor(ke) times.

    Attributes:
      factor: e, at least 1; as in an `EchoSpec`, the nearest simple fraction.
    """

    factor: float

    def __post_init__(self):
        exact_fraction(self.factor)  # refuses what is no factor


@dataclass(frozen=True)
class Adaptive:
    """Fresh if ready, else the longest unused below the cap, else wait.

    Attributes:
      cap: Uses of a batch at most.
      buffer: How many batches are kept.
    """

    cap: int = 4
    buffer: int = 16

    def __post_init__(self):
        for name in ("cap", "buffer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Outcome:
    """What a simulated host did, or all hosts of one program together.

    Attributes:
      seconds: Time that was simulated.
      updates: Training steps done.
      busy_fraction: Share of the time in which the accelerators trained.
      produced: Batches that were made upstream, by all hosts.
      used: Batches of them that were trained on.
      uses_by_repeat: How often a batch was used for the first, second, ... time,
        ``int64[r]``; their sum is ``updates`` times the number of hosts.
    """

    seconds: float
    updates: int
    busy_fraction: float
    produced: int
    used: int
    uses_by_repeat: np.ndarray


def simulate(
    service_s: np.ndarray,
    t_down_s: float,
    policy: Fixed | Adaptive,
    *,
    prefetch: int = 2,
) -> Outcome:
    """Follows one host whose producer takes the given time for each batch.

    The producer works on one batch at a time and keeps ``prefetch`` finished ones; if
    these are not taken it waits with the next one in its hands.
    The time that is simulated is what the producer alone would take for all batches,
    so that policies are compared over the same time.

    Args:
      service_s: Seconds that the producer works on each batch, ``float[n]``.
      t_down_s: Seconds of a training step.
      policy: What is trained on.
      prefetch: Finished batches that the producer keeps, at least 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> slow = service_times("constant", 0.4, 1000)
      >>> outcome = simulate(slow, 0.1, Fixed(2))
      >>> round(outcome.busy_fraction, 2), outcome.uses_by_repeat.tolist()
      (0.5, [999, 999])
    """
    check_positive(t_down_s=t_down_s)
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch} must be at least 1")
    producer = _Producer(service_s, prefetch)
    source = FixedUses(policy) if isinstance(policy, Fixed) else _LongestUnused(policy)
    horizon = float(np.sum(service_s))
    now = 0.0
    repeats: list[int] = []
    while True:
        if source.must_take or (source.may_take and producer.next_ready <= now):
            now = max(now, producer.next_ready)
            if now + t_down_s > horizon:
                break
            producer.take(now)
            source.take()
        now += t_down_s
        if now > horizon:
            break
        repeats.append(source.use())
    return Outcome(
        seconds=horizon,
        updates=len(repeats),
        busy_fraction=len(repeats) * t_down_s / horizon,
        produced=producer.produced(horizon),
        used=repeats.count(0),
        uses_by_repeat=np.bincount(np.array(repeats, np.int64)),
    )


class _Producer:
    """When the batches of a producer with a bounded queue are ready.

    Attributes:
      next_ready: When the next batch to be taken is finished; never after the last.
    """

    def __init__(self, service_s: np.ndarray, prefetch: int):
        self._service = service_s.tolist()
        self._prefetch = prefetch
        self._ready: deque[float] = deque()  # of the batches that are made, not taken
        self._made = 0
        self._free = 0.0  # when the producer can start with the next batch
        self._make()

    def _make(self) -> None:
        """Makes batches until the producer holds one more than the queue."""
        while len(self._ready) <= self._prefetch and self._made < len(self._service):
            self._free += self._service[self._made]
            self._ready.append(self._free)
            self._made += 1
        self.next_ready = self._ready[0] if self._ready else math.inf

    def take(self, now: float) -> None:
        """Takes the next batch, which is ready."""
        was_full = len(self._ready) > self._prefetch
        self._ready.popleft()
        if was_full:
            # The producer had a batch in its hands, perhaps since before.
            self._free = max(self._free, now)
        self._make()

    def produced(self, until: float) -> int:
        """How many batches were finished by some time."""
        return self._made - sum(ready > until for ready in self._ready)


class FixedUses:
    """Batch k is used floor((k+1)e) - floor(ke) times, one after the other.

    Attributes:
      most_uses: Of a batch.
    """

    may_take = False

    def __init__(self, policy: Fixed):
        self._factor = exact_fraction(policy.factor)
        self.most_uses = math.ceil(self._factor)
        self._batches = 0
        self._left = 0
        self._repeat = 0

    @property
    def must_take(self) -> bool:
        """Whether the next use is of a fresh batch."""
        return self._left == 0

    def take(self) -> None:
        """Takes a fresh batch."""
        before, after = self._batches * self._factor, (self._batches + 1) * self._factor
        self._left = math.floor(after) - math.floor(before)
        self._batches += 1
        self._repeat = 0

    def use(self) -> int:
        """Uses the batch; returns its repeat."""
        self._left -= 1
        self._repeat += 1
        return self._repeat - 1


class _LongestUnused:
    """The last batches, each used at most ``cap`` times, the longest unused first."""

    def __init__(self, policy: Adaptive):
        self._cap, self._buffer = policy.cap, policy.buffer
        self._batches = 0
        self._is_fresh = False  # the newest batch was not used yet
        # Batches below the cap and their uses; those that have left the buffer are
        # skipped when they come up.
        self._waiting: deque[tuple[int, int]] = deque()

    @property
    def must_take(self) -> bool:
        gone = self._batches - self._buffer
        while self._waiting and self._waiting[0][0] < gone:
            self._waiting.popleft()
        return not self._is_fresh and not self._waiting

    @property
    def may_take(self) -> bool:
        return not self._is_fresh

    def take(self) -> None:
        self._batches += 1
        self._is_fresh = True

    def use(self) -> int:
        newest = (self._batches - 1, 0)
        batch, repeat = newest if self._is_fresh else self._waiting.popleft()
        self._is_fresh = False
        if repeat + 1 < self._cap:
            self._waiting.append((batch, repeat + 1))
        return repeat


def check_positive(**numbers: float) -> None:
    """Refuses a number that is not positive and finite, by its name."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
