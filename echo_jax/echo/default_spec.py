"""The echo of a call without a spec, or of a spec that leaves something out."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo_jax.echo.spec import AdaptiveSpec, AnySpec, completed

_CHOSEN = {"order": "spread"}
_MAX_BATCHES = 64
_MEMORY_SHARE = 10  # the buffer takes at most one part in ten of the free memory


def chosen_spec(
    spec: AnySpec | None, rows: int, bytes_per_item: int, free_bytes: int
) -> AnySpec:
    """Returns the whole spec of an echo of a loader's batches, and logs it."""
    spec = spec or AdaptiveSpec()
    size = spec.batch_size or rows
    fits = free_bytes // _MEMORY_SHARE // max(size * bytes_per_item, 1)
    batches = max(1, min(_MAX_BATCHES, fits))
    whole = completed(spec, {**_CHOSEN, "buffer": batches * size, "batch_size": size})
    size = f"{whole.buffer * bytes_per_item / 1e6:.1f} MB"
    logging.getLogger("echo_jax").info(
        "The echo is %s. Its buffer takes %s.", whole, size
    )
    return whole


def split_off_spec(state: Any, spec: AnySpec | None) -> tuple[dict[str, Any], AnySpec]:
    """Returns the state of an echo without its chosen spec, and that spec."""
    rest = dict(state) if isinstance(state, Mapping) else {}
    chosen = rest.pop("spec", None)
    if not isinstance(chosen, Mapping) or set(chosen) != {"batch_size", "buffer"}:
        raise ValueError(
            "the state is not one of an echo that chose its spec. Make the echo with "
            "the spec that it had when the state was saved."
        )
    try:
        return rest, completed(spec or AdaptiveSpec(), {**_CHOSEN, **chosen})
    except TypeError as error:
        raise ValueError(f"the state is damaged: {error}") from error


def free_memory() -> int:
    """Returns the free memory of the host or its container in bytes."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    group = [_read(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")]
    if all(number.strip().isdigit() for number in group):
        free.append(max(0, int(group[0]) - int(group[1])))
    return min(free)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def free_on(device: Any, num_devices: int) -> int | None:
    """Returns the free bytes of a jax device; a CPU device has a part of the host's."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return None
    return free_memory() // num_devices
