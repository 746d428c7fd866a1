"""The display of a run: a bar on a terminal, lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

from rich import progress
from rich.console import Console

from echo_jax.config.run import RunSpec
from echo_jax.terminal.notes import Notes, silent_s
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.records.metrics import train_metrics
from echo_jax.training.saving.checkpoint import Restored
from echo_jax.workloads.base import Workload

# Without a bar, a line is printed after this time without one.
_LINE_EVERY_S = 10.0


def _describe_splits(config: RunSpec, workload: Workload) -> str:
    data = config.data
    trained = getattr(data, "train_split", "train")
    evaluated = getattr(data, "eval_split", "validation")
    said = f"data: {data.source}, {workload.num_examples:,} examples of {trained}"
    if getattr(data, "train_examples", 0):
        said += " (data.train_examples)"
    if left_out := workload.metadata.get("data", {}).get("left_out"):
        said += f"; {left_out} of the whole split"
    if evaluated == trained:
        return (
            f"{said}; evaluated on {workload.num_evaluated:,} of the same "
            "(data.eval_split), which it may know by heart"
        )
    return f"{said}; evaluated on {workload.num_evaluated:,} of {evaluated}"


class Progress(Notes):
    """Shows a run as a bar with the time left, or as lines with the time of day.

    The first process shows it for all.
    """

    def __init__(self, console: Console | None, *, total: int):
        super().__init__(console if is_main_process() else Console(quiet=True))
        self._total, self._first, self._done = total, 0, 0
        self._started: float | None = None  # When the first update was computed.
        self._bar, self._numbers = None, ""
        if self._console.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("update", markup=False),
                progress.MofNCompleteColumn(),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[numbers]}", markup=False),
                progress.TimeElapsedColumn(),
                progress.TextColumn("ETA"),
                progress.TimeRemainingColumn(),
                console=self._console,
                # A low rate, because the trainer needs the host's cores.
                refresh_per_second=2,
            )
            self._task = self._bar.add_task("train", total=total, numbers="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def begins(self, config: RunSpec, workload: Workload, model: str) -> None:
        """Prints the model, the data and the echo."""
        self.note(f"model: {model}")
        if None not in (workload.num_examples, workload.num_evaluated):
            self.note(_describe_splits(config, workload))
        self.note(str(config.echo))

    def resumes(self, restored: Restored) -> None:
        """Prints where the run resumes, and which checkpoints are damaged."""
        for reason in restored.damaged.values():
            self.note(f"{reason}; it is set aside")
        self.note(f"resumes after update {restored.update}")
        if self._bar:
            self._bar.reset(self._task, completed=restored.update)

    def update(self, done: int) -> None:
        """Moves the bar to a number of computed updates of the whole run."""
        if self._started is None:
            # The time until then is mostly compilation.
            self._first, self._started = done, time.perf_counter()
        self._done = done
        if self._bar:
            self._bar.update(self._task, completed=done)
        elif self._done > self._first and silent_s() >= _LINE_EVERY_S:
            self.note(f"update {done}/{self._total}  {self._eta()}")

    def row(self, row: Mapping[str, Any]) -> None:
        """Shows a row of ``metrics.jsonl``."""
        if row["kind"] == "eval":
            metrics = "  ".join(
                f"{name} {value:.4g}"
                for name, value in row.items()
                if name.startswith("eval_")
            )
            self.note(f"update {row['updates']}  {metrics}")
            return
        numbers = (
            f"loss {row['loss']:.4f}  {row['examples_per_s']:.0f} examples/s  "
            f"idle {row['idle_fraction']:.0%}"
        )
        for name, value in train_metrics(row).items():
            numbers += f"  {name} {value:.4g}"
        if "mfu" in row:
            numbers += f"  MFU {row['mfu']:.0%}"
        if self._bar:
            self._numbers = numbers
            self._bar.update(self._task, numbers=numbers)
        else:
            self.note(
                f"update {row['updates']}/{self._total}  {numbers}  {self._eta()}"
            )

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Shows a slow step: beside the bar, or as `Notes` does."""
        if not self._bar:
            with super().slow(what):
                yield
            return
        self._bar.update(self._task, numbers=f"{what} ...")
        try:
            yield
        finally:
            self._bar.update(self._task, numbers=self._numbers)

    def _eta(self) -> str:
        elapsed_s = time.perf_counter() - (self._started or 0.0)
        speed = (self._done - self._first) / elapsed_s
        seconds = round((self._total - self._done) / speed) if speed else 0
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
