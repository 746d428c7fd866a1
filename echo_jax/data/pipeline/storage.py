"""Simulated storage: reads take as long as reads over a network.

It sleeps and moves no data. The metadata of a run state that its storage is simulated,
because nothing was measured on a real network.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from echo_jax.echo.keys import seed_for_use

Distribution = Literal["constant", "exponential", "bursty"]

# Nine reads in ten take 0.4 of the mean and one takes 6.4: the mean stays 1.
_BURST_SHARE = 0.1
_FAST_LATENCY = 0.4
_SLOW_LATENCY = 6.4

# A late wake-up shortens the thread's next read, so that thousands of short sleeps add
# up to the right time. The limit keeps reads from being free after a suspended process.
_MAX_OVERSLEPT_S = 0.01


@dataclass(frozen=True)
class StorageSpec:
    """Latency and bandwidth of reads."""

    # Mean seconds of a read; concurrent reads wait at the same time.
    latency_s: float = 0.0
    # Bandwidth of the process, shared by its threads; 0 is unlimited.
    bytes_per_s: float = 0.0
    # ``"constant"``, ``"exponential"`` or ``"bursty"``.
    distribution: Distribution = "constant"

    def __post_init__(self):
        for name in ("latency_s", "bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{name}={value} must be a finite number >= 0; 0 switches it off."
                )
        if self.distribution not in get_args(Distribution):
            raise ValueError(
                f"distribution={self.distribution!r} is unknown; "
                f"use one of {', '.join(get_args(Distribution))}."
            )

    @property
    def is_simulated(self) -> bool:
        return self.latency_s > 0 or self.bytes_per_s > 0

    def metadata(self) -> dict[str, Any]:
        """Returns the settings as JSON values, for the metadata of a run."""
        return {"simulated": self.is_simulated, **asdict(self)}


class SimulatedStorage:
    """Delays reads as a `StorageSpec` says; safe to call from many threads."""

    def __init__(
        self,
        spec: StorageSpec,
        seed: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._spec = spec
        self._seed = seed
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._link_free_s = -math.inf
        self._thread = threading.local()

    def __reduce__(self):
        # Locks do not pickle, so every worker process has its own link.
        return SimulatedStorage, (self._spec, self._seed)

    def latency_s(self, read_index: int) -> float:
        """Returns the latency of a read, which seed and index alone decide."""
        mean_s = self._spec.latency_s
        if mean_s == 0 or self._spec.distribution == "constant":
            return mean_s
        # The upper 53 bits are the fraction of a double, in [0, 1).
        uniform = (int(seed_for_use(self._seed, read_index, 0)) >> 11) * 2.0**-53
        if self._spec.distribution == "exponential":
            return -mean_s * math.log1p(-uniform)
        return mean_s * (_SLOW_LATENCY if uniform < _BURST_SHARE else _FAST_LATENCY)

    def wait(self, read_index: int, num_bytes: int) -> None:
        """Sleeps until read `read_index` of `num_bytes` bytes would have arrived."""
        if not self._spec.is_simulated:
            return
        start_s = self._clock() - getattr(self._thread, "overslept_s", 0.0)
        arrival_s = start_s + self.latency_s(read_index)
        if self._spec.bytes_per_s > 0:
            self._sleep_until(arrival_s)
            # A read queues for the link only after its latency.
            transfer_s = num_bytes / self._spec.bytes_per_s
            with self._lock:
                arrival_s = max(arrival_s, self._link_free_s) + transfer_s
                self._link_free_s = arrival_s
        self._sleep_until(arrival_s)
        overslept_s = max(self._clock() - arrival_s, 0.0)
        self._thread.overslept_s = min(overslept_s, _MAX_OVERSLEPT_S)

    def _sleep_until(self, deadline_s: float) -> None:
        remaining_s = deadline_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
