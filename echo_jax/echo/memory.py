"""How much memory is free, on the host and on devices."""

import os
from pathlib import Path
from typing import Any

__all__ = ["free_memory", "free_on"]


def free_memory() -> int:
    """Returns the free memory of the host or its container in bytes."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    free = [pages * size]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, used = (
        _read(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")
    )
    if limit.strip().isdigit() and used.strip().isdigit():
        free.append(max(0, int(limit) - int(used)))
    return min(free)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def free_on(device: Any, num_devices: int) -> int | None:
    """Returns the free bytes of a jax device, or None if it does not tell.

    CPU devices share the memory of the host, so each has a part of it.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return None
    return free_memory() // num_devices
