"""Many simulated hosts that train one model together, each with its own producer.

They run one program: an update starts when every host has its part of the batch, so
that the slowest host sets the pace. What a producer does on average then says little;
its tail decides, the more the more hosts there are.
"""

from typing import Protocol

import numpy as np

from echo_jax.echo.instrument.simulation import (
    Adaptive,
    Fixed,
    FixedUses,
    Outcome,
    check_positive,
)

__all__ = ["simulate_hosts"]

_NOT_WAITING = np.iinfo(np.int32).max


def simulate_hosts(
    service_s: np.ndarray,
    t_down_s: float,
    policy: Fixed | Adaptive,
    *,
    prefetch: int = 2,
) -> Outcome:
    """Follows hosts that update in step, as `simulate` follows one.

    Each decides for itself, when the update before has ended, what its part of the
    next batch is. A host that takes a fresh batch does so as soon as it is ready, so
    that its producer goes on while the host waits for others. The time that is
    simulated ends when the first producer would have made all of its batches.

    Args:
      service_s: Seconds that each producer works on each batch, ``float[N, n]``.
      t_down_s: Seconds of a training step, the same for all hosts and updates, its
        collectives included.
      policy: What each host trains on.
      prefetch: Finished batches that a producer keeps, at least 1.

    Returns:
      What the hosts did together. ``busy_fraction`` is that of each of them.

    Raises:
      ValueError: If a number or a shape is out of its range.

    Example:
      Two hosts, each slow in another half of the time, are slow all the time.

      >>> slow_s, fast_s = np.full(500, 0.4), np.full(500, 0.1)
      >>> service_s = np.array([[*slow_s, *fast_s], [*fast_s, *slow_s]])
      >>> [round(simulate_hosts(service_s[:n], 0.1, Fixed(1)).busy_fraction, 2)
      ...  for n in (1, 2)]
      [0.4, 0.25]
    """
    check_positive(t_down_s=t_down_s)
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch} must be at least 1")
    if service_s.ndim != 2 or 0 in service_s.shape:
        raise ValueError(
            f"service_s has the shape {service_s.shape}; give a row of times for each "
            "host, np.stack([service_times(...) for each host])"
        )
    num_hosts = len(service_s)
    producers = _Producers(service_s, prefetch)
    rule: _Rule = (
        _Fixed(policy, num_hosts)
        if isinstance(policy, Fixed)
        else _Adaptive(policy, num_hosts)
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
    """When the batches of producers with bounded queues are ready.

    Batch k is begun when batch k - 1 is finished and batch k - prefetch - 1 is taken.
    So the times at which the next prefetch + 1 batches are ready are always known.

    Attributes:
      next_ready: When each host's next batch is finished, ``float[N]``; never after
        the last.
    """

    def __init__(self, service_s: np.ndarray, prefetch: int):
        num_hosts, num_batches = service_s.shape
        never = np.full((num_hosts, prefetch + 1), np.inf)
        self._service = np.concatenate([service_s, never], axis=1)
        self._ahead = prefetch + 1
        self._num_batches = num_batches
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
        last_ready = self._ready[hosts, slots - 1]
        begun = np.maximum(last_ready, at[hosts])
        self._ready[hosts, slots] = begun + self._service[hosts, first + self._ahead]
        self._taken[hosts] += 1
        self.next_ready[hosts] = self._ready[hosts, (slots + 1) % self._ahead]

    def produced(self, until: float) -> int:
        """How many batches were finished by some time, over all hosts."""
        return int(np.sum(self._taken) + np.count_nonzero(self._ready <= until))


class _Rule(Protocol):
    """Which hosts take a fresh batch, and the how-manieth use theirs is then."""

    most_uses: int

    def takes(self, ready: np.ndarray) -> np.ndarray: ...

    def use(self, takes: np.ndarray) -> np.ndarray: ...


class _Fixed:
    """All hosts take and repeat at the same updates, so one decides for all."""

    def __init__(self, policy: Fixed, num_hosts: int):
        self._uses = FixedUses(policy)
        self._hosts = np.ones(num_hosts, np.int64)
        self.most_uses = self._uses.most_uses

    def takes(self, ready: np.ndarray) -> np.ndarray:
        return np.full(ready.shape, self._uses.must_take)

    def use(self, takes: np.ndarray) -> np.ndarray:
        if takes[0]:
            self._uses.take()
        return self._uses.use() * self._hosts


class _Adaptive:
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
