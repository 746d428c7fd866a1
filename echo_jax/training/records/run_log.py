"""The log of a run: its rows, and the facts that it derives from them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.config import Config
from echo_jax.files.folders import RunPath
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.records.loggers import open_loggers, scalars_of
from echo_jax.training.records.metrics import first_to_meet, restored_row
from echo_jax.training.records.progress import Progress
from echo_jax.training.records.runfiles import MetricsFile
from echo_jax.training.saving.checkpoint import Restored
from echo_jax.workloads.base import Batch, Workload

__all__ = ["RunLog"]

# How many images of a batch are shown.
_IMAGES = 16


class RunLog:
    """Writes the rows of a run to ``metrics.jsonl``, the console and loggers.

    Attributes:
      rows: All rows, also from before the run was resumed.
      evaluated: The update of the last evaluation; None before the first.
      met_target: Whether an evaluation met the target.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        workdir: RunPath,
        restored: Restored | None,
        progress: Progress,
    ):
        self._config, self._workload, self._progress = config, workload, progress
        saved = restored.update if restored else None
        self._file = MetricsFile(
            workdir / "metrics.jsonl",
            resumed_from=saved,
            num_rows=restored.host["rows"] if restored else 0,
            writes=is_main_process(),
        )
        if lines := self._file.damaged:
            progress.note(f"metrics.jsonl: lines {lines} are damaged, and dropped")
        if number := self._file.num_missing:
            progress.note(f"metrics.jsonl: {number} rows up to update {saved} are gone")
        damaged, lost = restored.damaged if restored else {}, self._file.num_missing
        if damaged or lost:
            self._file.append(restored_row(saved, damaged, lost))
        self.rows = self._file.rows
        self._loggers = (
            open_loggers(config, workdir, saved or 0) if is_main_process() else ()
        )
        self._look_back()

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes and shows a row of `echo_jax.training.records.metrics`."""
        mark = {"hold_batch": True} if self._config.data.hold_batch else {}
        row = {**row, **mark}
        self._file.append(row)
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
        self.flush()
        for logger in self._loggers:
            logger.close()

    def flush(self) -> None:
        """Makes sure that all rows are in the file; see `MetricsFile.flush`."""
        self._file.flush()

    def _look_back(self) -> None:
        """Derives the evaluation state from the rows, so that no copy can differ."""
        evals = [row for row in self.rows if row["kind"] == "eval"]
        self.evaluated: int | None = evals[-1]["updates"] if evals else None
        self.met_target = bool(
            first_to_meet(
                evals,
                metric=self._workload.metric,
                mode=self._workload.mode,
                target=self._config.target,
            )
        )
