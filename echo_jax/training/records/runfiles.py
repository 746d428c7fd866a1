"""The rows of a run, and the file that they are in."""

import time
from collections.abc import Mapping
from typing import Any

from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import json_line, plain, read_line, write_json
from echo_jax.training.processes.distributed import is_main_process

__all__ = ["MetricsFile", "write_json_once"]

# How old the file in a bucket, which is written as a whole, may become.
_WRITE_EVERY_S = 30.0


def write_json_once(path: RunPath, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as `write_json` does, in one process for all.

    Args:
      path: The file; replaced if it exists.
      content: Plain data, the same in all processes.
    """
    if is_main_process():
        write_json(path, content)


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, each with ``updates`` and a checksum.

    Opening it forgets what a resumed run will do again: rows after the update
    that it resumes from, and a line that a kill left half written. Other lines that
    are not as they were written are damage: they are dropped, and counted. So are rows
    that the checkpoint saw and that are gone: a file may be cut where a line ends.

    A row is in the file at once. In a bucket, which cannot append, it is there
    after `flush`, and with the first row that comes half a minute after the last
    write: the file is written as a whole each time.

    Args:
      path: The file; made if there is none.
      resumed_from: The update of the checkpoint that the run resumes from; None
        for a run from the start, which drops all rows.
      num_rows: Rows that there were when that checkpoint was saved.
      writes: Whether this process keeps the file, or another one does.

    Attributes:
      rows: All rows.
      damaged: The numbers of the lines that were dropped as damaged.
      num_missing: How many of ``num_rows`` are gone.
      num_lost: How many rows are gone, also where ``num_rows`` is not known.
    """

    def __init__(
        self,
        path: RunPath,
        *,
        resumed_from: int | None,
        num_rows: int = 0,
        writes: bool = True,
    ):
        self._path, self._writes = path, writes
        self._is_behind = False
        self.rows: list[dict[str, Any]] = []
        self.damaged: list[int] = []
        if resumed_from is not None:
            self.rows, self.damaged = _rows_until(path, resumed_from)
        self.num_missing = max(0, num_rows - len(self.rows))
        self.num_lost = self.num_missing if num_rows else len(self.damaged)
        if writes:
            self._write()

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row.

        Args:
          row: Plain data. NaN and infinities become null.
        """
        self.rows.append(plain(row))
        if not self._writes:
            return
        if not self._path.in_bucket:
            self._path.append(json_line(self.rows[-1]))
            return
        self._is_behind = True
        if time.monotonic() >= self._written_s + _WRITE_EVERY_S:
            self._write()

    def flush(self) -> None:
        """Makes sure that all rows are in the file.

        To be called before a checkpoint is saved: a run that resumes from it then
        finds every row up to it.
        """
        if self._is_behind:
            self._write()

    def _write(self) -> None:
        self._path.write("".join(map(json_line, self.rows)))
        self._is_behind, self._written_s = False, time.monotonic()


def _rows_until(path: RunPath, update: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the rows up to an update, and the numbers of lines that are none."""
    if not path.exists():
        return [], []
    rows, damaged = [], []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = read_line(line)
            if not (type(row["updates"]) is int and isinstance(row["kind"], str)):
                raise ValueError
            if row["updates"] <= update:
                rows.append(row)
        except (KeyError, TypeError, ValueError):
            # A kill tears the last line, which is newer than the checkpoint.
            if number < len(lines):
                damaged.append(number)
    return rows, damaged
