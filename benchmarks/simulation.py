"""Simulated hosts: how busy producers whose rates vary keep their accelerators.

Hosts that train together run one program: an update starts when every host has its
part of the batch, so the slowest host sets the pace. A producer is a list of times, one
for each batch, so policies are compared on the same input. Nothing sleeps.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import outputs_of
from echo_jax.echo.schedule import exact_fraction
from echo_jax.echo.spec import AdaptiveSpec

Producer = Literal[
    "constant", "exponential", "bursty", "switching", "stalling", "pareto"
]

_SWITCH_BATCHES = 64
_PARETO_SHAPE, _PARETO_MOST = 1.5, 1000.0
_NOT_WAITING = np.iinfo(np.int32).max
# The examples of a batch, and those of a producer.
_ROWS, _ENDLESS = 16, 1 << 40


def service_times(kind: Producer, mean_s: float, n: int, seed: int = 0) -> np.ndarray:
    """Returns how long a producer works on each batch, ``float64[n]``, in seconds.

    Args:
      kind: ``constant``. ``exponential``. ``bursty``: 90 % take 0.4 of the mean, 10 %
        take 6.4. ``switching``: 64 batches at 1/4.5 of the mean and 64 at 8/4.5 in
        turn. ``stalling``: half of the mean, but one in 200 takes 100.5 of it, as a
        storage that fails over. ``pareto``: heavy-tailed, 0.34 to 344 of the mean, a
        Pareto distribution of shape 1.5 that is cut at 1,000 times its least.
        Transfers of files have shapes from 1 to 2 (Crovella and Bestavros 1997).
      mean_s: Mean seconds per batch.
      n: How many batches.
      seed: Names the random choices.
    """
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
        a, most = _PARETO_SHAPE, _PARETO_MOST
        mean = a / (a - 1) * (1 - most ** (1 - a)) / (1 - most**-a)
        times = (1 - rng.random(n) * (1 - most**-a)) ** (-1 / a)
        return mean_s / mean * times
    names = ", ".join(map(repr, get_args(Producer)))
    raise ValueError(f"kind={kind!r} is unknown; use one of {names}")


@dataclass(frozen=True)
class Fixed:
    """Batch k is used floor((k+1)e) - floor(ke) times, for the factor e >= 1."""

    factor: float


@dataclass(frozen=True)
class Adaptive:
    """Fresh if ready, else the longest unused below the cap, else wait.

    `simulate` asks the real plan, for batches of 16 examples. `simulate_hosts` repeats
    whole batches, as the plan does where a batch has one example: a thousand plans
    would take too long.

    Attributes:
      cap: Uses of a batch at most.
      buffer: How many batches are kept.
    """

    cap: int = 4
    buffer: int = 16


@dataclass(frozen=True)
class Outcome:
    """What all hosts of one program did together.

    Attributes:
      seconds: Time that was simulated.
      updates: Training steps done.
      busy_fraction: Share of the time in which each accelerator trained.
      produced: Batches that were made upstream, by all hosts.
      used: Batches of them that were trained on.
      uses_by_repeat: How often a batch was used for the first, second, ... time,
        ``float64[r]``; their sum is ``updates`` times the number of hosts.
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
    """Returns the outcome of one host, whose producer takes ``float[n]`` seconds.

    Example:
      >>> outcome = simulate(service_times("constant", 0.4, 1000), 0.1, Fixed(2))
      >>> round(outcome.busy_fraction, 2), outcome.uses_by_repeat.tolist()
      (0.5, [999.0, 999.0])
    """
    service, horizon = [*service_s.tolist(), math.inf], float(np.sum(service_s))
    ready, taken, repeats, now = [service[0]], [], [], 0.0

    def finished(number: int) -> float:
        """When a batch is, of which the one prefetch + 1 before it was taken."""
        free = taken[number - prefetch - 1] if number > prefetch else 0.0
        return max(ready[number - 1], free) + service[min(number, len(service) - 1)]

    batches = _uses_of(policy, lambda: ready[-1] <= now)
    for takes, of_batch in batches:
        if takes:
            now = max(now, ready[-1])
        if now + t_down_s > horizon:
            break
        if takes:
            taken.append(now)
            ready.append(finished(len(taken)))
        now += t_down_s
        repeats.append(of_batch)
    for number in range(len(ready), len(taken) + prefetch + 1):
        ready.append(finished(number))
    return Outcome(
        seconds=horizon,
        updates=len(repeats),
        busy_fraction=len(repeats) * t_down_s / horizon,
        produced=sum(each <= horizon for each in ready),
        used=len(taken),
        uses_by_repeat=np.bincount(np.ravel(repeats)) / np.size(repeats[:1]),
    )


def _uses_of(
    policy: Fixed | Adaptive, is_ready: Callable[[], bool]
) -> Iterator[tuple[bool, Any]]:
    """Yields whether each update takes a fresh batch, and the repeats in its batch."""
    if isinstance(policy, Fixed):
        factor = exact_fraction(policy.factor)
        for batch in itertools.count():
            uses = math.floor((batch + 1) * factor) - math.floor(batch * factor)
            yield from ((not repeat, [repeat]) for repeat in range(uses))
    else:
        plan = make_plan(AdaptiveSpec(policy.cap, policy.buffer * _ROWS, _ROWS))
        for slots, uses in outputs_of(plan, _ENDLESS, _ROWS, is_ready):
            yield slots.size > 0, uses.repeat[0]


def simulate_hosts(
    service_s: np.ndarray,
    t_down_s: float,
    policy: Fixed | Adaptive,
    *,
    prefetch: int = 2,
) -> Outcome:
    """Follows hosts that update in step, each with its own producer.

    A producer works on one batch at a time and keeps ``prefetch`` finished ones; if
    these are not taken it waits with the next one in its hands. When an update has
    ended, each host decides for itself what its part of the next batch is. A host that
    takes a fresh batch does so as soon as it is ready, so its producer goes on while
    the host waits for others. The simulation ends when the first producer would have
    made all of its batches.

    Args:
      service_s: Seconds that each producer works on each batch, ``float[N, n]``.
      t_down_s: Seconds of a training step, collectives included.
      policy: What each host trains on.
      prefetch: Finished batches that a producer keeps, at least 1.

    Example:
      Two hosts, each slow in another half of the time, are slow all the time.

      >>> slow_s, fast_s = np.full(500, 0.4), np.full(500, 0.1)
      >>> service_s = np.array([[*slow_s, *fast_s], [*fast_s, *slow_s]])
      >>> [round(simulate_hosts(service_s[:n], 0.1, Fixed(1)).busy_fraction, 2)
      ...  for n in (1, 2)]
      [0.4, 0.25]
    """
    num_hosts = len(service_s)
    producers = _Producers(service_s, prefetch)
    rule = (
        _FixedRule(policy, num_hosts)
        if isinstance(policy, Fixed)
        else _AdaptiveRule(policy, num_hosts)
    )
    horizon = float(np.min(np.sum(service_s, axis=1)))
    now, updates = 0.0, 0
    uses = np.zeros(rule.most_uses, np.int64)
    while True:
        takes = rule.takes(producers.next_ready <= now)
        taken_at = np.maximum(now, producers.next_ready)
        end = np.max(taken_at, where=takes, initial=now) + t_down_s
        if end > horizon:
            break
        producers.take(takes, taken_at)
        uses += np.bincount(rule.use(takes), minlength=uses.size)
        now, updates = end, updates + 1
    return Outcome(
        seconds=horizon,
        updates=updates,
        busy_fraction=updates * t_down_s / horizon,
        produced=producers.produced(horizon),
        used=int(uses[0]),
        uses_by_repeat=np.trim_zeros(uses, "b"),
    )


class _Producers:
    """When each host's next batch is finished: ``next_ready``, ``float[N]``.

    Batch k is begun when batch k - 1 is finished and batch k - prefetch - 1 is taken.
    So the times at which the next prefetch + 1 batches are ready are always known.
    """

    def __init__(self, service_s: np.ndarray, prefetch: int):
        num_hosts = len(service_s)
        never = np.full((num_hosts, prefetch + 1), np.inf)
        self._service = np.concatenate([service_s, never], axis=1)
        self._ahead = prefetch + 1
        self._hosts = np.arange(num_hosts)
        self._taken = np.zeros(num_hosts, np.int64)
        # Batch k of a host is at k modulo their number.
        self._ready = np.cumsum(self._service[:, : self._ahead], axis=1)
        self.next_ready = self._ready[:, 0].copy()

    def take(self, takes: np.ndarray, at: np.ndarray) -> None:
        """Takes the next batch of some hosts, at times of their own."""
        hosts = self._hosts[takes]
        first = self._taken[hosts]
        slots = first % self._ahead
        begun = np.maximum(self._ready[hosts, slots - 1], at[hosts])
        self._ready[hosts, slots] = begun + self._service[hosts, first + self._ahead]
        self._taken[hosts] += 1
        self.next_ready[hosts] = self._ready[hosts, (slots + 1) % self._ahead]

    def produced(self, until: float) -> int:
        return int(np.sum(self._taken) + np.count_nonzero(self._ready <= until))


class _FixedRule:
    """All hosts take and repeat at the same updates, so one decides for all."""

    def __init__(self, policy: Fixed, num_hosts: int):
        self._factor = exact_fraction(policy.factor)
        self.most_uses = math.ceil(self._factor)
        self._num_hosts = num_hosts
        self._batches = self._left = self._repeat = 0

    def takes(self, ready: np.ndarray) -> np.ndarray:
        return np.full(ready.shape, self._left == 0)

    def use(self, takes: np.ndarray) -> np.ndarray:
        self._repeat += 1
        if takes[0]:
            before = math.floor(self._batches * self._factor)
            self._batches += 1
            self._left = math.floor(self._batches * self._factor) - before
            self._repeat = 0
        self._left -= 1
        return np.full(self._num_hosts, self._repeat)


class _AdaptiveRule:
    """The last batches of each host, each used at most ``cap`` times.

    Batch k of a host is at k modulo the buffer, where it overwrites the batch that
    leaves.
    """

    def __init__(self, policy: Adaptive, num_hosts: int):
        self.most_uses = policy.cap
        self._hosts = np.arange(num_hosts)
        self._taken = np.zeros(num_hosts, np.int64)
        shape = num_hosts, policy.buffer
        self._uses = np.zeros(shape, np.int32)
        # The update of the last use, if there may be another.
        self._last_use = np.full(shape, _NOT_WAITING)
        self._longest_unused = np.zeros(num_hosts, np.int64)
        self._update = 0

    def takes(self, ready: np.ndarray) -> np.ndarray:
        self._longest_unused = np.argmin(self._last_use, axis=1)
        last_use = self._last_use[self._hosts, self._longest_unused]
        return ready | (last_use == _NOT_WAITING)

    def use(self, takes: np.ndarray) -> np.ndarray:
        hosts = self._hosts
        newest = self._taken % self._uses.shape[1]
        slots = np.where(takes, newest, self._longest_unused)
        self._taken += takes
        repeat = np.where(takes, 0, self._uses[hosts, slots])
        self._uses[hosts, slots] = repeat + 1
        again = repeat + 1 < self.most_uses
        self._last_use[hosts, slots] = np.where(again, self._update, _NOT_WAITING)
        self._update += 1
        return repeat
