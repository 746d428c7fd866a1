"""One sitting of a run: what it holds, and what it does between updates."""

from collections import deque
from dataclasses import asdict, dataclass, field

import jax
import numpy as np
from grain import DatasetIterator

from echo_jax.config import Config
from echo_jax.training.checkpoint import Checkpoints
from echo_jax.training.clock import Clock
from echo_jax.training.environment import config_sha256
from echo_jax.training.evaluation import evaluate
from echo_jax.training.metrics import RowMaker, Totals, eval_row, first_to_meet
from echo_jax.training.progress import Progress
from echo_jax.training.runfiles import MetricsFile
from echo_jax.training.setup import Setup, next_batch
from echo_jax.training.state import TrainState
from echo_jax.training.step import StepReport
from echo_jax.workloads.base import Batch, Workload

__all__ = ["NonFiniteLossError", "Sitting"]

# Enough to hide the host's work; with more, the host would run ahead of what it
# measures, and collectives of many queued steps can hang on few CPU cores.
_MAX_IN_FLIGHT = 2


class NonFiniteLossError(FloatingPointError):
    """A run went to NaN or infinity; nothing of that was saved.

    Attributes:
      update: The first update whose loss is not finite; if all losses are finite,
        the update after which the state is not.
    """

    def __init__(self, what: str, update: int, saved: int | None):
        self.update = update
        last = f"the last checkpoint, of update {saved}, is finite" if saved else ""
        super().__init__(
            f"{what} {update} is not finite{last and '; ' + last}; use another "
            "--workdir with a lower --config.optim.lr or --config.optim.clip_norm=1.0"
        )


@dataclass
class Sitting:
    """The moving parts of a run, from one start of the process to its end.

    Attributes:
      config: The run's config.
      workload: What is trained.
      setup: The run's functions.
      state: After all dispatched updates; perhaps not computed yet.
      totals: Of all dispatched updates.
      iterator: The training data.
      step_s: The step time with the input held.
      clock: Where the time goes.
      checkpoints: Where the run is saved.
      metrics: Where its rows go.
      progress: What is shown of it.
      met_target: Whether an evaluation met the target.
    """

    config: Config
    workload: Workload
    setup: Setup
    state: TrainState
    totals: Totals
    iterator: DatasetIterator
    step_s: float
    clock: Clock
    checkpoints: Checkpoints
    metrics: MetricsFile
    progress: Progress
    met_target: bool = field(init=False, default=False)

    def __post_init__(self):
        self._rows = RowMaker(self.totals, self.clock.seconds(), self.step_s)
        self._in_flight: deque[tuple[Totals, StepReport]] = deque()
        self._look_back()

    def take(self) -> Batch:
        """Returns the next training batch; the time it takes is waiting."""
        with self.clock.phase("wait"):
            when = f"after {self.totals.updates} updates"
            return next_batch(self.iterator, self.workload, when)

    def dispatch(self, batch: Batch) -> None:
        """Starts an update.

        Args:
          batch: From `take`.
        """
        self.state, report = self.setup.step(self.state, batch)
        self.totals = self.totals.after(np.asarray(batch["repeat"]), self.step_s)
        self._in_flight.append((self.totals, report))
        self.progress.update(self.totals.updates)

    def read(self, *, leave: int = _MAX_IN_FLIGHT) -> None:
        """Waits for the oldest updates in flight, and logs those that are due.

        Args:
          leave: How many of the newest updates may still be in flight.

        Raises:
          NonFiniteLossError: A loss that was read is not finite.
        """
        while len(self._in_flight) > leave:
            totals, report = self._in_flight.popleft()
            jax.block_until_ready(report)
            # Reading costs a transfer, so the losses of the updates in between
            # are not read: the first bad one is remembered on the device.
            if totals.updates % self.config.log_every == 0 or not leave:
                self._check_loss(report)
            if totals.updates % self.config.log_every == 0:
                self._log(self._rows.train_row(totals, self.clock.seconds(), report))

    def evaluate(self) -> None:
        """Evaluates the state, once all updates are computed.

        Does nothing if this update is evaluated already.
        """
        if self._evaluated == self.totals.updates:
            return
        self.read(leave=0)
        seconds = self.clock.seconds()
        with self.clock.phase("pause"):
            batches = self.workload.eval_batches()
            metrics = evaluate(self.setup, self.state, batches)
            self._log(eval_row(self.totals, seconds, metrics))
            self._look_back()

    def save(self) -> None:
        """Saves the run, once all updates are computed; the writing goes on behind.

        Raises:
          NonFiniteLossError: The state, or a loss on the way to it, is not finite.
        """
        self.read(leave=0)
        with self.clock.phase("pause"):
            if not self.setup.program.is_finite(self.state):
                raise NonFiniteLossError(
                    "the state after update",
                    self.totals.updates,
                    self.checkpoints.latest(),
                )
            host = {
                "config_sha256": config_sha256(self.config),
                "data": self.iterator.get_state(),
                "totals": asdict(self.totals),
                "clock": self.clock.seconds(),
            }
            self.checkpoints.save(self.totals.updates, self.state, host)

    def _look_back(self) -> None:
        """Derives from the rows what was evaluated, so that no copy can differ."""
        evals = [row for row in self.metrics.rows if row["kind"] == "eval"]
        self._evaluated: int | None = evals[-1]["updates"] if evals else None
        self.met_target = bool(
            first_to_meet(
                evals,
                metric=self.workload.metric,
                mode=self.workload.mode,
                target=self.config.target,
            )
        )

    def _check_loss(self, report: StepReport) -> None:
        first_bad = int(report.first_bad_update)
        if first_bad:
            raise NonFiniteLossError(
                "the loss of update", first_bad, self.checkpoints.latest()
            )

    def _log(self, row: dict) -> None:
        self.metrics.append(row)
        self.progress.row(row)
