"""Rates: how long updates take, by model and by simulation.

The model is that of Choi et al. 2019, section 2: an upstream that makes a fresh
batch in t_up and a training step of t_down run in parallel, so that one fresh batch
and its e updates take max(t_up, e t_down) (Eq. 1). It holds for constant rates. For
rates that vary, `simulate` follows one host update by update.
"""

import math
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

__all__ = [
    "Adaptive",
    "Fixed",
    "Outcome",
    "Producer",
    "advised_factor",
    "idle_fraction",
    "ratio",
    "seconds_per_fresh",
    "seconds_per_update",
    "service_times",
    "simulate",
]

Producer = Literal["constant", "exponential", "bursty", "switching", "stalling"]

_SWITCH_CHUNKS = 64


def ratio(t_up_s: float, t_down_s: float) -> float:
    """Returns R, how much longer a fresh batch takes than a training step.

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.

    Raises:
      ValueError: If one of them is not positive and finite.
    """
    _check_positive(t_up_s=t_up_s, t_down_s=t_down_s)
    return t_up_s / t_down_s


def seconds_per_fresh(t_up_s: float, t_down_s: float, factor: float) -> float:
    """Returns the seconds that a fresh batch and its updates take: max(t_up, e t_down).

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> seconds_per_fresh(0.4, 0.1, 4), seconds_per_fresh(0.4, 0.1, 5)
      (0.4, 0.5)
    """
    _check_positive(t_up_s=t_up_s, t_down_s=t_down_s)
    _check_factor(factor)
    return max(t_up_s, factor * t_down_s)


def seconds_per_update(t_up_s: float, t_down_s: float, factor: float) -> float:
    """Returns the seconds that an update takes: max(t_up / e, t_down).

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> [seconds_per_update(0.4, 0.1, factor) for factor in (1, 2, 4, 8)]
      [0.4, 0.2, 0.1, 0.1]
    """
    return seconds_per_fresh(t_up_s, t_down_s, factor) / factor


def idle_fraction(t_up_s: float, t_down_s: float, factor: float = 1) -> float:
    """Returns the share of time in which the accelerator waits for data.

    Without echoing it is 1 - 1/R, if R is above 1.

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> idle_fraction(0.4, 0.1), idle_fraction(0.4, 0.1, 2)
      (0.75, 0.5)
    """
    return 1 - t_down_s / seconds_per_update(t_up_s, t_down_s, factor)


def advised_factor(ratio: float, cap: float = 4) -> float:
    """Returns the echo factor to use: R, but at most the cap and at least 1.

    Below R the updates that echoing adds are free, beyond it they slow fresh data
    down. The cap is the number of uses after which a repeat is worth nothing. By the
    figures of Choi et al. 2019 (figure 5) it is about 4 for a Transformer on LM1B at
    batch 1024, and at least 16 at batch 4096; their own advice, e = R, is wrong for
    an R beyond it.

    Args:
      ratio: R, seconds per fresh batch over seconds per training step.
      cap: The largest factor that is worth its updates, at least 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> [advised_factor(r) for r in (0.5, 2.6, 9.0)]
      [1.0, 2.6, 4.0]
    """
    _check_positive(ratio=ratio)
    if not cap >= 1:
        raise ValueError(f"cap={cap} must be at least 1")
    return float(max(1, min(ratio, cap)))


def service_times(kind: Producer, mean_s: float, n: int, seed: int = 0) -> np.ndarray:
    """Returns how long a producer works on each chunk, ``float64[n]``, in seconds.

    Args:
      kind: ``constant``. ``exponential``. ``bursty``: 90 % take 0.4 of the mean, 10 %
        take 6.4. ``switching``: 64 chunks at 1/4.5 of the mean and 64 at 8/4.5 in
        turn, so that R goes between 1 and 8 if its mean is 4.5. ``stalling``: half of
        the mean, but one in 200 takes 100.5 of it, as a storage that fails over. The
        shares are exact and their places random.
      mean_s: Mean seconds per chunk.
      n: How many chunks.
      seed: Names the random choices.

    Raises:
      ValueError: If the kind is unknown or a number is out of its range.
    """
    _check_positive(mean_s=mean_s)
    rng = np.random.Generator(np.random.Philox(seed))
    if kind == "constant":
        return np.full(n, mean_s)
    if kind == "exponential":
        return rng.exponential(mean_s, n)
    if kind == "bursty":
        return mean_s * np.where(rng.permutation(n) < n / 10, 6.4, 0.4)
    if kind == "switching":
        slow = np.arange(n) // _SWITCH_CHUNKS % 2
        return mean_s * np.where(slow, 8.0, 1.0) / 4.5
    if kind == "stalling":
        return mean_s * np.where(rng.permutation(n) < n / 200, 100.5, 0.5)
    names = ", ".join(map(repr, get_args(Producer)))
    raise ValueError(f"kind={kind!r} is unknown; use one of {names}")


@dataclass(frozen=True)
class Fixed:
    """Every chunk is used ``factor`` times: chunk k floor((k+1)e) - floor(ke) times.

    Attributes:
      factor: e, at least 1; taken as the fraction that its decimals say.
    """

    factor: float

    def __post_init__(self):
        _check_factor(self.factor)


@dataclass(frozen=True)
class Adaptive:
    """Fresh if ready, else the longest unused below the cap, else wait.

    Attributes:
      cap: Uses of a chunk at most.
      buffer: How many chunks are kept.
    """

    cap: int = 4
    buffer: int = 16

    def __post_init__(self):
        for name in ("cap", "buffer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Outcome:
    """What a simulated host did.

    Attributes:
      seconds: Time that was simulated.
      updates: Training steps done.
      busy_fraction: Share of the time in which the accelerator trained.
      produced: Chunks that were made upstream.
      used: Chunks of them that were trained on.
      uses_by_repeat: How many updates were the first, second, ... use of their
        chunk, ``int64[r]``; their sum is ``updates``.
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
    """Follows one host whose producer takes the given time for each chunk.

    The producer works on one chunk at a time and keeps ``prefetch`` finished ones; if
    these are not taken it waits with the next one in its hands. A chunk is a batch.
    The time that is simulated is what the producer alone would take for all chunks,
    so that policies are compared over the same time.

    Args:
      service_s: Seconds that the producer works on each chunk, ``float[n]``.
      t_down_s: Seconds of a training step.
      policy: What is trained on.
      prefetch: Finished chunks that the producer keeps, at least 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> slow = service_times("constant", 0.4, 1000)
      >>> outcome = simulate(slow, 0.1, Fixed(2))
      >>> round(outcome.busy_fraction, 2), outcome.uses_by_repeat.tolist()
      (0.5, [999, 999])
    """
    _check_positive(t_down_s=t_down_s)
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch} must be at least 1")
    chunks = _Chunks(service_s, prefetch)
    source = _FixedUses(policy) if isinstance(policy, Fixed) else _LongestUnused(policy)
    horizon = float(np.sum(service_s))
    now = 0.0
    repeats: list[int] = []
    while True:
        if source.must_take or (source.may_take and chunks.next_ready <= now):
            now = max(now, chunks.next_ready)
            if now + t_down_s > horizon:
                break
            chunks.take(now)
            source.take()
        now += t_down_s
        if now > horizon:
            break
        repeats.append(source.use())
    return Outcome(
        seconds=horizon,
        updates=len(repeats),
        busy_fraction=len(repeats) * t_down_s / horizon,
        produced=chunks.produced(horizon),
        used=repeats.count(0),
        uses_by_repeat=np.bincount(np.array(repeats, np.int64)),
    )


class _Chunks:
    """When the chunks of a producer with a bounded queue are ready.

    Attributes:
      next_ready: When the next chunk to be taken is finished; never after the last.
    """

    def __init__(self, service_s: np.ndarray, prefetch: int):
        self._service = service_s.tolist()
        self._prefetch = prefetch
        self._ready: deque[float] = deque()  # of the chunks that are made, not taken
        self._made = 0
        self._free = 0.0  # when the producer can start with the next chunk
        self._make()

    def _make(self) -> None:
        """Makes chunks until the producer holds one more than the queue."""
        while len(self._ready) <= self._prefetch and self._made < len(self._service):
            self._free += self._service[self._made]
            self._ready.append(self._free)
            self._made += 1
        self.next_ready = self._ready[0] if self._ready else math.inf

    def take(self, now: float) -> None:
        """Takes the next chunk, which is ready."""
        was_full = len(self._ready) > self._prefetch
        self._ready.popleft()
        if was_full:
            # The producer had a chunk in its hands, perhaps since before.
            self._free = max(self._free, now)
        self._make()

    def produced(self, until: float) -> int:
        """How many chunks were finished by some time."""
        return self._made - sum(ready > until for ready in self._ready)


class _FixedUses:
    """Chunk k is used floor((k+1)e) - floor(ke) times, one after the other."""

    may_take = False

    def __init__(self, policy: Fixed):
        self._factor = Fraction(str(policy.factor))
        self._chunks = 0
        self._left = 0
        self._repeat = 0

    @property
    def must_take(self) -> bool:
        return self._left == 0

    def take(self) -> None:
        before, after = self._chunks * self._factor, (self._chunks + 1) * self._factor
        self._left = math.floor(after) - math.floor(before)
        self._chunks += 1
        self._repeat = 0

    def use(self) -> int:
        self._left -= 1
        self._repeat += 1
        return self._repeat - 1


class _LongestUnused:
    """The last chunks, each used at most ``cap`` times, the longest unused first."""

    def __init__(self, policy: Adaptive):
        self._cap, self._buffer = policy.cap, policy.buffer
        self._chunks = 0
        self._is_fresh = False  # the newest chunk was not used yet
        # Chunks below the cap and their uses; those that have left the buffer are
        # skipped when they come up.
        self._waiting: deque[tuple[int, int]] = deque()

    @property
    def must_take(self) -> bool:
        gone = self._chunks - self._buffer
        while self._waiting and self._waiting[0][0] < gone:
            self._waiting.popleft()
        return not self._is_fresh and not self._waiting

    @property
    def may_take(self) -> bool:
        return not self._is_fresh

    def take(self) -> None:
        self._chunks += 1
        self._is_fresh = True

    def use(self) -> int:
        newest = (self._chunks - 1, 0)
        chunk, repeat = newest if self._is_fresh else self._waiting.popleft()
        self._is_fresh = False
        if repeat + 1 < self._cap:
            self._waiting.append((chunk, repeat + 1))
        return repeat


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")


def _check_factor(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be an echo factor, at least 1")
