"""Full disks: a simulated one at the n-th write, and a real one that is too small."""

import builtins
import contextlib
import errno
import functools
import io
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.faults.campaign import NotHereError


def fill_at(number: int, name: str, patch: Callable[..., None]) -> None:
    """Lets a write find the disk full, after half of its content.

    That is the first write after the `number`-th opening of a file, from 1, whose name
    contains `name`. `patch` replaces an attribute, as pytest's ``setattr`` does.
    """
    whole_open, openings = builtins.open, itertools.count(1)

    def open_filling(file: Any, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        opened: Any = whole_open(file, mode, *args, **options)
        path = Path(os.readlink(f"/proc/self/fd/{opened.fileno()}"))
        if mode[0] != "r" and name in path.name and next(openings) == number:
            opened.write = functools.partial(_write_half, opened.write)
        return opened

    for module in (builtins, io):
        patch(module, "open", open_filling)


def _write_half(write: Callable[[Any], int], content: Any) -> None:
    write(content[: len(content) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mounts a disk in memory, with pages of 4 kB, and yields its folder."""
    folder.mkdir()
    resize(folder, num_bytes, options="")
    try:
        yield folder
    finally:
        # Lazily, because a killed process may not have gone yet.
        subprocess.run(["umount", "--lazy", folder], check=True)


def resize(folder: Path, num_bytes: int, options: str = "remount,") -> None:
    """Changes the size of a disk of `small_disk`, and keeps its files."""
    options += f"size={num_bytes}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotHereError(f"no disk can be mounted: {done.stderr.strip()}")
