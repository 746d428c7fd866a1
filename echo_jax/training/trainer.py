"""A run under way: what the loop does between updates.

What one update computes stands in `training.step`; `training.compiled` compiles it,
and a `training.feed` makes its input.
"""

import itertools
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console

from echo_jax.config import Config
from echo_jax.echo.instrument.fresh_time import bounds_of_all, within
from echo_jax.echo.instrument.stopwatch import MAX_IN_FLIGHT
from echo_jax.folders import RunPath
from echo_jax.training.checkpoint import Checkpoints, Restored, params_sha256
from echo_jax.training.clock import Clock, DeviceTime, Work
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.decide import decide
from echo_jax.training.dispatch import log_stops
from echo_jax.training.distributed import (
    all_gather,
    is_main_process,
    own_shards,
    this_shard,
)
from echo_jax.training.environment import config_sha256
from echo_jax.training.evaluation import evaluate
from echo_jax.training.feed import Input
from echo_jax.training.feeds import log_name
from echo_jax.training.flops import count_flops
from echo_jax.training.measure import data_ended
from echo_jax.training.metrics import RowMaker, Totals, eval_row, first_to_meet
from echo_jax.training.progress import Progress
from echo_jax.training.runfiles import MetricsFile
from echo_jax.training.step import StepReport
from echo_jax.training.summary import make_summary
from echo_jax.workloads.base import Workload

__all__ = ["NonFiniteLossError", "Trainer"]


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


class Trainer:
    """A run under way: what it holds, and what it does between updates.

    Attributes:
      config: The run's config.
      workdir: The run folder.
      compiled: The run's functions.
      state: After all dispatched updates; perhaps not computed yet.
      totals: Of all dispatched updates; their time at work is known when they are
        read.
      clock: Where the host's time goes.
      device_time: How long the devices worked since the start, or the resumption.
      progress: What is shown of the run.
      met_target: Whether an evaluation met the target.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        workdir: RunPath,
        compiled: CompiledFunctions,
        console: Console | None,
        stack: ExitStack,
    ):
        """Starts a run, or goes on from its last checkpoint.

        What a run decides by measuring, it decides once: a resumed run takes it from
        the checkpoint.

        Args:
          config: A checked training config.
          workload: Made from this config.
          workdir: The run folder, of this config.
          compiled: The run's functions.
          console: See `training.loop.train`.
          stack: Closes what was opened.

        Raises:
          ValueError: The echo is impossible, or the checkpoint is of another config.
        """
        self.config, self.workdir, self.compiled = config, workdir, compiled
        self.clock = Clock()
        self._workload = workload
        self._checkpoints = Checkpoints(
            workdir / "checkpoints", keep=config.keep_checkpoints
        )
        stack.enter_context(closing(self._checkpoints))
        restored = self._restore()
        saved, before = (restored.update, restored.host) if restored else (None, None)
        self.state = restored.state if restored else compiled.init(compiled.init_key)
        self.totals = Totals.of_all(
            [Totals(**each) for each in before["totals"]] if before else []
        )
        # The devices' work before is counted already.
        self._busy_before_s = self.totals.busy_s
        if not is_main_process():
            # What was counted before counts once: for all processes together.
            self.totals = replace(self.totals, fresh=0, repeats=0)
        self.progress = self._show(console, restored)

        num_shards = config.data.shards or jax.process_count()
        shards = own_shards(len(before["data"]) if before else num_shards)
        decided = decide(
            config,
            workload,
            compiled,
            self.state,
            before=before,
            shards=shards,
            note=self.progress.note,
        )
        self.feed, self._dispatch = decided.feed, decided.dispatch
        self._factor, self._rates = decided.factor, decided.rates
        stack.enter_context(closing(self.feed))
        if before:
            self.feed.set_state([before["data"][shard.index] for shard in shards])
            self.clock.add(before["clock"])
        self._metrics = MetricsFile(
            workdir / "metrics.jsonl", resumed_from=saved, writes=is_main_process()
        )
        if lines := self._metrics.damaged:
            self.progress.note(f"metrics.jsonl: lines {lines} are damaged, and dropped")
        stack.callback(self._metrics.flush)
        if restored and restored.damaged:
            damaged = sorted(restored.damaged)
            row = {"kind": "restored", "updates": saved, "damaged": damaged}
            self._metrics.append(row)
        self._flops = count_flops(compiled, self.state, self.feed)
        self._rows = RowMaker(self.totals, self.clock.seconds(), self._flops)
        self.device_time = DeviceTime(self._rates.t_down_s, steps=self._dispatch.steps)
        self._in_flight: deque[tuple[Totals, StepReport, Work]] = deque()
        # After how many updates the data of this process ended, if it did.
        self._ended_after: int | None = None
        self._look_back()

    @property
    def chosen(self) -> dict[str, Any]:
        """What was decided by measuring, for ``environment.json``."""
        return {"echo_factor": self._factor, "dispatch": asdict(self._dispatch)}

    def take(self) -> Input:
        """Returns the input of the next updates; the time it takes is waiting.

        Where the data of one of several processes ended, it goes on with a held batch,
        for the others wait for its share of every update, until all of them hear of
        it: where totals are gathered, before anything is logged or saved.

        Raises:
          ValueError: The data ended.
        """
        num_updates = self._dispatch.group(
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
        scan = self._dispatch.mode == "scan" and len(repeat) > 1
        self.device_time.look()
        sent_s = self.device_time.now()
        self.state, report = self.compiled.step(
            self.state, self.feed, inputs, scan=scan
        )
        is_done = cast(Any, report.first_bad_update).is_ready
        work = self.device_time.sent(sent_s, len(repeat), is_done)
        self.totals = self.totals.after(repeat)
        self._in_flight.append((self.totals, report, work))
        self.progress.update(self.totals.updates)

    def read(self, *, leave: int = MAX_IN_FLIGHT) -> None:
        """Waits for the oldest dispatches in flight, and logs those that are due.

        Args:
          leave: How many of the newest dispatches may still be in flight.

        Raises:
          NonFiniteLossError: A loss that was read is not finite.
        """
        if self.device_time.is_due:
            self._wait(self._in_flight[-1])
        while len(self._in_flight) > leave:
            totals, report, _ = dispatched = self._in_flight.popleft()
            self._wait(dispatched)
            # Reading costs a transfer, so the losses of the updates in between
            # are not read: the first bad one is remembered on the device.
            if totals.updates % self.config.log_every == 0 or not leave:
                self._check_loss(report)
            if totals.updates % self.config.log_every == 0:
                totals = Totals.of_all(self._totals_of_each(totals))
                step_s = self.device_time.step_s
                seconds = self.clock.seconds()
                self._log(self._rows.train_row(totals, seconds, report, step_s=step_s))

    def _wait(self, dispatched: tuple[Totals, StepReport, Work]) -> None:
        _, report, work = dispatched
        self.device_time.look()
        jax.block_until_ready(report)
        self.device_time.finished(work)

    def evaluate(self) -> None:
        """Evaluates the state, once all updates are computed.

        Does nothing if this update is evaluated already.
        """
        if self._evaluated == self.totals.updates:
            return
        self.read(leave=0)
        seconds, totals = self.clock.seconds(), self._totals_of_all()
        with self.clock.phase("pause"):
            make_evaluator = self._workload.evaluator
            metrics = evaluate(
                self.compiled,
                self.state,
                self._workload.eval_batches(shard=this_shard()),
                evaluator=make_evaluator() if make_evaluator else None,
            )
            metrics |= self._workload.task.derive(metrics)
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
            if not self.compiled.is_finite(self.state):
                raise NonFiniteLossError(
                    "the state after update",
                    self.totals.updates,
                    self._checkpoints.latest(),
                )
            if self.config.data.hold_batch:
                return
            totals = self._totals_of_each()
            for shard, log in self.feed.logs.items():
                (self.workdir / log_name(shard)).write(log.to_text())
            host = {
                "config_sha256": config_sha256(self.config),
                "data": [*itertools.chain(*all_gather(self.feed.get_state()))],
                "totals": [asdict(each) for each in totals],
                "clock": self.clock.seconds(),
                "dispatch": asdict(self._dispatch),
                "factor": self._factor,
                "num_lanes": self.feed.num_lanes,
            }
            self._metrics.flush()
            self._checkpoints.save(self.totals.updates, self.state, host)

    def summary(self, profile: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the content of ``summary.json``.

        Args:
          profile: From `Profile.result`.
        """
        t_up_bounds = bounds_of_all(all_gather(self.feed.t_up_bounds))
        return make_summary(
            self.config,
            self._workload,
            rows=self._metrics.rows,
            totals=self._totals_of_all(),
            seconds=self.clock.seconds(),
            rates=self._rates,
            t_up_s=within(self._rates.t_up_s, t_up_bounds),
            # Where another process' data is late, a step seems to take longer.
            step_s=min(all_gather(self.device_time.step_s)),
            factor=self._factor,
            dispatch=self._dispatch,
            flops=self._flops,
            profile=profile,
            params_sha256=_equal_in_all(params_sha256(self.state.params)),
        )

    def _restore(self) -> Restored | None:
        """Returns what the run goes on from; None if that is its start."""
        restored = self._checkpoints.restore_newest(self.compiled.abstract_state)
        if restored and restored.host["config_sha256"] != config_sha256(self.config):
            raise ValueError(
                f"the checkpoint of update {restored.update} was saved with another "
                "config than config.json; use another --workdir"
            )
        return restored

    def _show(self, console: Console | None, restored: Restored | None) -> Progress:
        is_held = self.config.data.hold_batch
        progress = Progress(
            # The main process shows what all of them do.
            console if is_main_process() else Console(quiet=True),
            total=self.config.updates,
            done=self.totals.updates,
            mark="[one batch held]" if is_held else "",
        )
        if is_held:
            progress.note("shows the ceiling of speed, and writes no checkpoint")
        if restored:
            for reason in restored.damaged.values():
                progress.note(f"{reason}; it is set aside")
            progress.note(f"resumes after update {restored.update}")
        return progress

    def _look_back(self) -> None:
        """Derives from the rows what was evaluated, so that no copy can differ."""
        evals = [row for row in self._metrics.rows if row["kind"] == "eval"]
        self._evaluated: int | None = evals[-1]["updates"] if evals else None
        self.met_target = bool(
            first_to_meet(
                evals,
                metric=self._workload.metric,
                mode=self._workload.mode,
                target=self.config.target,
            )
        )

    def _check_loss(self, report: StepReport) -> None:
        first_bad = int(report.first_bad_update)
        if first_bad:
            raise NonFiniteLossError(
                "the loss of update", first_bad, self._checkpoints.latest()
            )

    def _totals_of_all(self) -> Totals:
        """Returns the totals over all processes, which all have to ask for."""
        return Totals.of_all(self._totals_of_each())

    def _totals_of_each(self, totals: Totals | None = None) -> list[Totals]:
        """Returns the totals of every process, as they are now or as given.

        Their time at work is that until now.

        Raises:
          ValueError: The data of one of them ended.
        """
        busy_s = self._busy_before_s + self.device_time.seconds()
        own = asdict(replace(totals or self.totals, busy_s=busy_s))
        gathered = all_gather([own, self._ended_after])
        ends = [after for _, after in gathered if after is not None]
        if ends:
            raise data_ended(self._workload, f"after {min(ends)} updates")
        return [Totals(**each) for each, _ in gathered]

    def _log(self, row: dict) -> None:
        if self.config.data.hold_batch:
            row = {**row, "hold_batch": True}
        self._metrics.append(row)
        self.progress.row(row)


def _equal_in_all(sha256: str) -> str:
    """Returns the hash of the parameters, which all processes must have found.

    Raises:
      RuntimeError: They have not: they did not train the same model.
    """
    found = all_gather(sha256)
    if len({*found}) > 1:
        raise RuntimeError(
            f"the processes ended with different parameters: {', '.join(found)}; "
            "nothing of this run is to be trusted"
        )
    return sha256
