"""The rows of a run, and their file ``metrics.jsonl``.

Each line of the file is a JSON object with ``updates`` and a checksum. Opening the file
drops the rows that a resumed run makes again: rows after its checkpoint, and a last
line that a kill cut. Other changed lines are damaged: they are dropped and counted.
Missing rows that the checkpoint saw are counted too, as a file may be cut at a line
end.

A row is in the file at once. A bucket cannot append, so the whole file is written by
`MetricsFile.flush`, and with the first row 30 s after the last write.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from echo_jax.config.run import RunSpec
from echo_jax.files.folders import append, is_in_bucket, write
from echo_jax.files.json_files import json_line, plain, read_line, write_json
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.records.loggers import LOGGERS, scalars_of
from echo_jax.training.records.metrics import first_to_meet
from echo_jax.training.records.progress import Progress
from echo_jax.training.saving.checkpoint import Restored
from echo_jax.workloads.base import Batch, Workload

# How many images of a batch are shown.
_IMAGES = 16

# Least time between two writes of a file in a bucket, each of the whole file.
_WRITE_EVERY_S = 30.0


def write_json_once(path: epath.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as `write_json` does, in one process for all."""
    if is_main_process():
        write_json(path, content)


class MetricsFile:
    """``metrics.jsonl`` of a run that starts, or resumes from an update.

    The first process writes it.

    Attributes:
      damaged: The numbers of the lines that were dropped as damaged.
      num_missing: How many of the ``num_rows`` of the checkpoint are missing.
    """

    def __init__(
        self, path: epath.Path, *, resumed_from: int | None, num_rows: int = 0
    ):
        self._path, self._writes = path, is_main_process()
        self._is_behind = False
        self.rows: list[dict[str, Any]] = []
        self.damaged: list[int] = []
        if resumed_from is not None:
            self.rows, self.damaged = _rows_until(path, resumed_from)
        self.num_missing = max(0, num_rows - len(self.rows))
        if self._writes:
            self._write()

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row of plain data; NaN and infinities become null."""
        self.rows.append(plain(row))
        if not self._writes:
            return
        if not is_in_bucket(self._path):
            append(self._path, json_line(self.rows[-1]))
            return
        self._is_behind = True
        if time.monotonic() >= self._written_s + _WRITE_EVERY_S:
            self._write()

    def flush(self) -> None:
        """Writes all rows to the file; to be called before a checkpoint is saved."""
        if self._is_behind:
            self._write()

    def _write(self) -> None:
        write(self._path, "".join(map(json_line, self.rows)))
        self._is_behind, self._written_s = False, time.monotonic()


def _rows_until(
    path: epath.Path, update: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the rows up to an update, and the numbers of damaged lines."""
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
            # A kill may cut the last line, which is newer than the checkpoint.
            if number < len(lines):
                damaged.append(number)
    return rows, damaged


class RunLog:
    """Writes the rows of a run to ``metrics.jsonl``, the console and loggers.

    Attributes:
      file: All rows, also those from before the run was resumed.
      evaluated: The update of the last evaluation; None before the first.
      met: The row of the first evaluation that met the target; None without one.
    """

    def __init__(
        self,
        config: RunSpec,
        workload: Workload,
        workdir: epath.Path,
        restored: Restored | None,
        progress: Progress,
    ):
        self._config, self._workload, self._progress = config, workload, progress
        saved = restored.update if restored else None
        self.file = MetricsFile(
            workdir / "metrics.jsonl",
            resumed_from=saved,
            num_rows=restored.host["rows"] if restored else 0,
        )
        if lines := self.file.damaged:
            progress.note(f"metrics.jsonl: lines {lines} are damaged, and dropped")
        if number := self.file.num_missing:
            progress.note(f"metrics.jsonl: {number} rows up to update {saved} are gone")
        damaged, lost = restored.damaged if restored else {}, self.file.num_missing
        if damaged or lost:
            row = {"kind": "restored", "updates": saved, "damaged": sorted(damaged)}
            self.file.append({**row, "rows_lost": lost})
        names = config.log.to if is_main_process() else ()
        self._loggers = [LOGGERS[name](workdir, config, saved or 0) for name in names]
        self._look_back()

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes and shows a row of `echo_jax.training.records.metrics`."""
        self.file.append(row)
        self._progress.row(row)
        for logger in self._loggers:
            logger.scalars(row["updates"], scalars_of(row))
        if row["kind"] == "eval":
            self._look_back()

    def arrays(self, update: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Shows arrays as histograms in the loggers."""
        for logger in self._loggers:
            logger.histograms(update, arrays)

    def examples(self, batch: Batch) -> None:
        """Shows the images of a first batch on the host, if there are any."""
        images = {
            f"examples/{name}": np.asarray(x[:_IMAGES])
            for name, x in batch.items()
            if x.dtype == np.uint8 and x.ndim == 4 and x.shape[-1] == 3
        }
        for logger in self._loggers:
            logger.images(0, images)

    def close(self) -> None:
        self.file.flush()
        for logger in self._loggers:
            logger.close()

    def _look_back(self) -> None:
        """Derives the evaluation state from the rows, so that no copy can differ."""
        evals = [row for row in self.file.rows if row["kind"] == "eval"]
        self.evaluated: int | None = evals[-1]["updates"] if evals else None
        self.met = first_to_meet(
            evals,
            metric=self._workload.metric,
            mode=self._workload.mode,
            target=self._config.target,
        )
