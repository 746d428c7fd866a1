"""A disk that is full at the n-th write of a run folder's small files."""

import errno
import os
from collections.abc import Callable
from typing import Any

from echo_jax.folders import RunPath

__all__ = ["fill_at"]


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
