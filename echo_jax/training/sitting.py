"""One sitting of a run: what it holds, and what it does between updates."""

import itertools
from collections import deque
from dataclasses import asdict, dataclass, field

import jax
import numpy as np

from echo_jax.config import Config
from echo_jax.echo.instrument.stopwatch import MAX_IN_FLIGHT
from echo_jax.folders import RunPath
from echo_jax.training.checkpoint import Checkpoints
from echo_jax.training.clock import Clock
from echo_jax.training.environment import config_sha256
from echo_jax.training.evaluation import evaluate
from echo_jax.training.feed import Feed, Input
from echo_jax.training.flops import UpdateFlops, count_flops
from echo_jax.training.inner import Inner
from echo_jax.training.measure import Rates
from echo_jax.training.metrics import RowMaker, Totals, eval_row, first_to_meet
from echo_jax.training.processes import gathered, tape_file, this_part
from echo_jax.training.progress import Progress
from echo_jax.training.runfiles import MetricsFile, write_json
from echo_jax.training.setup import Setup, data_ended
from echo_jax.training.state import TrainState
from echo_jax.training.step import StepReport
from echo_jax.training.strategy import log_stops
from echo_jax.workloads.base import Workload

__all__ = ["NonFiniteLossError", "Sitting"]


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
      workdir: The run folder.
      setup: The run's functions.
      state: After all dispatched updates; perhaps not computed yet.
      totals: Of all dispatched updates.
      feed: The training data.
      inner: How updates are dispatched.
      factor: The echo factor, which the config may leave open.
      rates: As measured at the start of the sitting.
      clock: Where the time goes.
      checkpoints: Where the run is saved.
      metrics: Where its rows go.
      progress: What is shown of it.
      met_target: Whether an evaluation met the target.
      flops: Of an update.
    """

    config: Config
    workload: Workload
    workdir: RunPath
    setup: Setup
    state: TrainState
    totals: Totals
    feed: Feed
    inner: Inner
    factor: float
    rates: Rates
    clock: Clock
    checkpoints: Checkpoints
    metrics: MetricsFile
    progress: Progress
    met_target: bool = field(init=False, default=False)
    flops: UpdateFlops = field(init=False)
    _ended_after: int | None = field(init=False, default=None)

    def __post_init__(self):
        self.flops = count_flops(self.setup, self.state, self.feed)
        self._rows = RowMaker(
            self.totals, self.clock.seconds(), self.rates.t_down_s, self.flops
        )
        self._in_flight: deque[tuple[Totals, StepReport]] = deque()
        self._look_back()

    @property
    def held(self) -> bool:
        """Whether one batch is trained on again and again."""
        return self.config.data.hold_batch

    def take(self) -> Input:
        """Returns the input of the next updates; the time it takes is waiting.

        Where the data of one of several processes ended, it goes on with a held batch,
        for the others wait for its share of every update, until all of them hear of
        it: where totals are gathered, before anything is logged or saved.

        Raises:
          ValueError: The data ended.
        """
        num_updates = self.inner.group(
            self.totals.updates,
            total=self.config.updates,
            stops=log_stops(self.config),
        )
        if self._ended_after is None:
            with self.clock.phase("wait"):
                inputs = self.feed.take(num_updates)
            if inputs is not None:
                return inputs
            self._ended_after = self.totals.updates
        if jax.process_count() == 1:
            self._totals_of_each()  # Raises: there is nobody to wait for.
        return self.feed.hold(num_updates)

    def dispatch(self, inputs: Input) -> None:
        """Starts the updates of an input.

        Args:
          inputs: From `take`.
        """
        repeat = np.asarray(inputs.repeat)
        scan = self.inner.strategy == "scan" and len(repeat) > 1
        self.state, report = self.setup.update(self.state, self.feed, inputs, scan=scan)
        self.totals = self.totals.after(repeat, self.rates.t_down_s)
        self._in_flight.append((self.totals, report))
        self.progress.update(self.totals.updates)

    def read(self, *, leave: int = MAX_IN_FLIGHT) -> None:
        """Waits for the oldest dispatches in flight, and logs those that are due.

        Args:
          leave: How many of the newest dispatches may still be in flight.

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
                totals = Totals.of_all(self._totals_of_each(totals))
                self._log(self._rows.train_row(totals, self.clock.seconds(), report))

    def evaluate(self) -> None:
        """Evaluates the state, once all updates are computed.

        Does nothing if this update is evaluated already.
        """
        if self._evaluated == self.totals.updates:
            return
        self.read(leave=0)
        seconds, totals = self.clock.seconds(), self.totals_of_all()
        with self.clock.phase("pause"):
            make_evaluator = self.workload.evaluator
            metrics = evaluate(
                self.setup,
                self.state,
                self.workload.eval_batches(part=this_part()),
                evaluator=make_evaluator() if make_evaluator else None,
            )
            metrics |= self.workload.task.derive(metrics)
            self._log(eval_row(totals, seconds, metrics))
            self._look_back()

    def save(self) -> None:
        """Saves the run, once all updates are computed; the writing goes on behind.

        A run on one held batch is not worth a checkpoint, and gets none.

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
            if self.held:
                return
            totals = self._totals_of_each()
            if self.feed.tape is not None:
                write_json(self.workdir / tape_file(), self.feed.tape.to_json())
            host = {
                "config_sha256": config_sha256(self.config),
                "data": [*itertools.chain(*gathered(self.feed.get_state()))],
                "totals": [asdict(each) for each in totals],
                "clock": self.clock.seconds(),
                "inner": asdict(self.inner),
                "factor": self.factor,
                "num_lanes": self.feed.num_lanes,
            }
            self.metrics.flush()
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

    def totals_of_all(self) -> Totals:
        """Returns the totals over all processes, which all have to ask for."""
        return Totals.of_all(self._totals_of_each())

    def _totals_of_each(self, totals: Totals | None = None) -> list[Totals]:
        """Returns the totals of every process, as they are now or as given.

        Raises:
          ValueError: The data of one of them ended.
        """
        facts = gathered([asdict(totals or self.totals), self._ended_after])
        ends = [after for _, after in facts if after is not None]
        if ends:
            raise data_ended(self.workload, f"after {min(ends)} updates")
        return [Totals(**each) for each, _ in facts]

    def _log(self, row: dict) -> None:
        if self.held:
            row = {**row, "hold_batch": True}
        self.metrics.append(row)
        self.progress.row(row)
