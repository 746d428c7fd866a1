"""Disks that are full: at the n-th write of a run folder's small files, or really."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import NotHereError
from echo_jax.files.folders import RunPath


def fill_at(number: int, name: str = "", patch: Callable[..., None] = setattr) -> None:
    """Lets a write find the disk full, with half of it written.

    Args:
      number: Which write, from 1.
      name: Of the file whose writes count; all if it is empty.
      patch: Replaces a method, for good or, as pytest's does, for a while.
    """
    count = 0
    append = RunPath.append

    def filling(method: Callable[..., None]) -> Callable[..., None]:
        def write(path: RunPath, content: Any, **options: Any) -> None:
            nonlocal count
            counts = not name or path.name == name
            count += counts
            if not counts or count != number:
                return method(path, content, **options)
            if method is append:
                append(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        return write

    patch(RunPath, "append", filling(append))
    patch(RunPath, "write", filling(RunPath.write))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a disk in memory, of pages of 4 kB.

    Args:
      folder: Where; it is made.
      size: Of the disk, in bytes.

    Yields:
      The folder.

    Raises:
      NotHereError: Nothing can be mounted here.
    """
    folder.mkdir()
    _mount(f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        # Also where what was killed there has not gone yet.
        subprocess.run(["umount", "--lazy", folder], check=True)


def resize(folder: Path, size: int) -> None:
    """Changes the size in bytes of a disk of `small_disk`, with what is on it."""
    _mount(f"remount,size={size}", str(folder))


def _mount(options: str, *what: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, *what]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise NotHereError(f"no disk can be mounted: {str(said).strip()}") from error
