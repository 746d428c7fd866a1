"""The files of a run folder: strict JSON, whole or not there at all."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MetricsFile", "read_json", "write_json"]


def read_json(path: Path) -> Any | None:
    """Reads a JSON file.

    Args:
      path: The file.

    Returns:
      Its content, or None if there is no such file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file so that a reader sees the old file or the new one.

    Args:
      path: The file; replaced if it exists.
      content: Plain data. NaN and infinities become null, which JSON has.
    """
    _replace(path, json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, each with ``updates``.

    Opening it forgets what a resumed run will do again: rows after the update
    that it resumes from, and a line that a kill left half written.

    Args:
      path: The file; made if there is none.
      resumed_from: The update of the checkpoint that the run resumes from; None
        for a run from the start, which drops all rows.
      writes: Whether this process keeps the file, or another one does.
    """

    def __init__(self, path: Path, *, resumed_from: int | None, writes: bool = True):
        self._path, self._writes = path, writes
        self.rows = [] if resumed_from is None else _rows_until(path, resumed_from)
        if writes:
            _replace(path, "".join(_line(row) for row in self.rows))

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; it is in the file when the call returns.

        Args:
          row: Plain data. NaN and infinities become null.
        """
        self.rows.append(_plain(row))
        if not self._writes:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(self.rows[-1]))


def _rows_until(path: Path, update: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # Only the last line can be torn, and it is newer than the checkpoint.
            break
        if row["updates"] <= update:
            rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Returns the value with null in place of every float that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _replace(path: Path, text: str) -> None:
    # Beside the file, because a rename is atomic within one file system only.
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
