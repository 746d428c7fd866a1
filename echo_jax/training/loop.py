"""The loop of a training, and a run in progress.

1. The loop: `train`, whose order is a contract, and `train_checked`, which runs it.
2. The run: `Trainer` has one method for each step of the loop, in the loop's order:
   evaluate, save, take, dispatch, read. At the end it makes the summary.

`training.step` has the update, `training.feeds.feed` makes its input, and
`training.compiled` compiles it.
"""

import itertools
import os
import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from rich.console import Console

from echo_jax.config import Config
from echo_jax.config.run import RunSpec
from echo_jax.echo.instrument.measure import MAX_IN_FLIGHT
from echo_jax.echo.stats import Waits
from echo_jax.files.folders import remove_unfinished, run_folder, write
from echo_jax.files.lock import FolderLock
from echo_jax.training.clock import DeviceTime, Work
from echo_jax.training.compiled import next_group
from echo_jax.training.evaluation import evaluate_split, has_branch, metric_after_fresh
from echo_jax.training.feeds.loader import data_ended
from echo_jax.training.feeds.of_config import log_name
from echo_jax.training.measure import Rates
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    is_main_process,
)
from echo_jax.training.processes.stop import Interrupted, StopSignal
from echo_jax.training.records.environment import identity, lock_workdir
from echo_jax.training.records.metrics import (
    AFTER_FRESH,
    RowMaker,
    Totals,
    finished_summary,
    make_summary,
)
from echo_jax.training.records.runfiles import write_json_once
from echo_jax.training.saving.hashes import params_sha256
from echo_jax.training.saving.weights import flat_arrays
from echo_jax.training.start import Run, Started, check_start, start
from echo_jax.training.step import StepReport
from echo_jax.training.update.local import sync_updates
from echo_jax.training.window import NonFiniteLossError
from echo_jax.training.xla import Profile
from echo_jax.workloads.base import Workload


def train(
    config: Config | RunSpec,
    workload: Workload,
    workdir: str | os.PathLike[str],
    *,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a workload, or resumes its training.

    The order is a contract. Between two dispatches the loop

    1. stops and saves, if a signal asked for it;
    2. evaluates the current state, if due;
    3. saves it, if due. It saves after the evaluation, so that a resumed run need not
       evaluate again;
    4. takes the input of the next update, or group of updates: see
       `training.compiled.next_group`;
    5. dispatches them;
    6. reads the numbers of the dispatch before the last one. So at most two dispatches
       are in flight while the loop waits for data. `training.clock.DeviceTime` relies
       on this.

    With ``config.profile``, steps 4 to 6 are traced: see `training.xla`.

    A run may be stopped at any point and started again with the same arguments. On the
    same devices it ends with the same parameters, bit for bit. Rows that were logged
    after the last checkpoint are dropped and computed again.

    A finished run is not trained again: its summary is returned. It can be extended by
    more updates. If its schedule decays until the end of the run, the learning rate
    continues as in the longer run, and a note says so.

    A folder in which nothing was saved is free for a run of another config.

    Two runs from the start also end with the same parameters. To repeat an adaptive
    run, give its ``decisions.json`` to ``echo.replay``.

    Args:
      config: The shared fields of `echo_jax.config.default_config`, and the
        workload's.
      workload: Made from this config.
      workdir: The run folder, see `echo_jax.files.folders`; created if missing.
      console: Shows the progress; None for standard output.

    Returns:
      The content of ``summary.json``.

    Raises:
      ValueError: The config has an impossible value, or the folder holds a run of
        another config.
      FolderError: The folder cannot be opened, or another process has locked it: see
        `echo_jax.files.lock`.
      NonFiniteLossError: The loss became NaN or infinite. With a loss scale: too many
        updates were skipped.
      Interrupted: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2; the run is saved, unless
        its data hangs. A second signal raises KeyboardInterrupt without saving.
      DataTimeoutError: The data did not come for ``config.data.timeout_s`` seconds.
        The run is not saved: it goes on from the last checkpoint.

    Example:
      >>> config = load_config("configs/lm.py:tiny")
      >>> summary = train(config, lm.build(config), "runs/lm_tiny")
      >>> summary["updates"]
      60
    """
    config = RunSpec.of(config)
    workdir = run_folder(workdir)
    with lock_workdir(workdir, config, workload.metadata) as lock:
        run = check_start(config, workload, workdir)
        return train_checked(run, lock, console=console)


# The caller holds the lock. Under it, `check_workdir` has accepted the folder.
def train_checked(
    run: Run, lock: FolderLock, *, console: Console | None = None
) -> dict[str, Any]:
    """Trains a run that `check_start` accepted, in a checked, locked folder."""
    config, workdir = run.config, run.workdir
    if is_main_process():
        remove_unfinished(workdir)
    if summary := broadcast_from_first(finished_summary(workdir, config)):
        return summary

    with ExitStack() as stack:
        trainer = Trainer(run, start(run, console, stack))
        stop = stack.enter_context(StopSignal(trainer.watchdog.stop))
        profile = stack.enter_context(closing(Profile(trainer)))
        stack.enter_context(trainer.clock.phase("train"))
        save_every = config.checkpoint_every

        while True:
            lock.check()
            updates = trainer.totals.updates
            if signum := stop.asked(updates):
                trainer.save()
                raise Interrupted(updates, signum)
            is_last = updates >= config.updates
            if is_last or updates % config.eval_every == 0:
                trainer.evaluate()
            is_last = is_last or (config.stop_at_target and trainer.log.met)
            if is_last or (updates and save_every and updates % save_every == 0):
                trainer.save()
            if is_last:
                break
            with profile.around():
                trainer.dispatch(trainer.take())
                trainer.read()

        profile.say_if_missed()
        summary = trainer.summary()
    # Written after the last checkpoint is complete, so that every finished run can be
    # extended.
    write_json_once(workdir / "summary.json", summary)
    return summary


class _Dispatched(NamedTuple):
    totals: Totals  # After these updates.
    report: StepReport
    work: Work
    longest_wait: dict[str, float]  # Since the last logged update, if one is logged.


class Trainer:
    """A run in progress, with one method for each step of the loop.

    Attributes:
      state: After all dispatched updates; perhaps not computed yet.
      totals: Counts over all dispatched updates.
    """

    def __init__(self, run: Run, started: Started):
        self.config = config = run.config
        self.workdir, self.compiled = run.workdir, run.compiled
        self._workload, self.progress = run.workload, started.progress
        self.state, self.totals, self.feed = started.state, started.totals, started.feed
        self.clock, self.log = started.clock, started.log
        self.watchdog = started.watchdog
        self._checkpoints, self._rates = started.checkpoints, started.rates
        # The totals include the devices' work before the run was resumed.
        self._busy_before_s = self.totals.busy_s
        self._flops, self._bytes_sent = started.flops, started.bytes_sent
        self._is_synced, self._waits = sync_updates(config), Waits()
        wall_s = self.clock.seconds()["wall_s"]
        self._rows = RowMaker(self.totals, wall_s, self._flops)
        self.device_time = DeviceTime(self._rates.t_down_s, steps=config.dispatch.steps)
        self._log_every = config.log_every
        self._group = partial(
            next_group,
            steps=config.dispatch.steps,
            total=config.updates,
            stops=(config.log_every, config.eval_every, config.checkpoint_every),
        )
        self._in_flight: deque[_Dispatched] = deque()
        # The updates done when the data of this process ended; None before that.
        self._ended_after: int | None = None

    def evaluate(self) -> None:
        """Evaluates the state when all its updates are done, once for each update."""
        if self.log.evaluated == self.totals.updates:
            return
        self.read(leave=0)
        seconds, totals = self.clock.seconds(), Totals.of_all(self._totals_of_each())
        slow = self.progress.slow(
            f"evaluating update {totals.updates}, which is compiled at first"
        )
        with self.clock.phase("pause"), slow:
            given = self._workload, self.watchdog
            metrics = evaluate_split(self.config, self.compiled, self.state, *given)
            row = {"kind": "eval", **totals.counts(), **seconds}
            row |= {f"eval_{name}": value for name, value in metrics.items()}
            if has_branch(self.config, totals.updates):
                row[AFTER_FRESH] = metric_after_fresh(
                    self.config, self.compiled, self.state, totals.updates, *given
                )
            self.log.add(row)
            if self.config.log.to:
                params = self.compiled.model(self.state).params
                self.log.arrays(totals.updates, flat_arrays({"params": params}))

    def save(self) -> None:
        """Saves the run; the files are written in the background."""
        self.read(leave=0)
        slow = self.progress.slow(f"saving update {self.totals.updates}")
        with self.clock.phase("pause"), slow:
            if not jax.device_get(self.compiled.is_finite(self.state)):
                done, saved = self.totals.updates, self._checkpoints.latest()
                raise NonFiniteLossError("the state after update", done, saved)
            totals = self._totals_of_each()
            for shard, log in self.feed.logs.items():
                write(self.workdir / log_name(shard), log.to_text())
            host = {
                **identity(self.config, self._workload.metadata),
                "data": [*itertools.chain(*all_gather(self.feed.get_state()))],
                "totals": [asdict(each) for each in totals],
                "clock": self.clock.seconds(),
                "num_lanes": self.feed.num_lanes,
                "rows": len(self.log.file.rows),
            }
            self.log.file.flush()
            self._checkpoints.save(self.totals.updates, self.state, host)

    def take(self) -> Any:
        """Returns the input of the next updates; its time counts as waiting."""
        num_updates = self._group(self.totals.updates)
        if self._ended_after is None:
            what = f"the input of update {self.totals.updates + 1}"
            waiting = self.watchdog.waiting(what)
            began = time.perf_counter()
            with self.clock.phase("wait"), waiting:
                inputs = self.feed.take(num_updates)
            self._waits.add(self.totals.updates, time.perf_counter() - began)
            if inputs is not None:
                return inputs
            # The other processes need this one's share of every update. So it goes on
            # with a held batch until all learn of the end: when they gather their
            # totals, before anything is logged or saved.
            self._ended_after = self.totals.updates
        if jax.process_count() == 1:
            self._totals_of_each()  # Raises: no other process waits.
        return self.feed.hold(num_updates)

    def dispatch(self, inputs: Any) -> None:
        """Starts the updates of an input."""
        repeat = np.asarray(self.feed.batching.repeats(inputs))
        self.device_time.look()
        sent_s = self.device_time.now()
        syncs = bool(self._is_synced[self.totals.updates])
        self.state, report = self.compiled.step(
            self.state, self.feed, inputs, syncs=syncs
        )
        is_done = cast(Any, report.first_bad_update).is_ready
        work = self.device_time.sent(sent_s, len(repeat), is_done)
        self.totals = self.totals.after(repeat, bytes_sent=self._bytes_sent[syncs])
        is_logged = self.totals.updates % self._log_every == 0
        longest = self._waits.longest(since_last=True) if is_logged else {}
        self._in_flight.append(_Dispatched(self.totals, report, work, longest))

    def read(self, *, leave: int = MAX_IN_FLIGHT) -> None:
        """Waits until `leave` dispatches are in flight; logs the rows that are due."""
        if self.device_time.is_due:
            self._wait(self._in_flight[-1])
        while len(self._in_flight) > leave:
            totals, report, _, longest_wait = dispatched = self._in_flight.popleft()
            self._wait(dispatched)
            self.progress.update(totals.updates)
            # Reading costs a transfer, so losses between logged updates are not read.
            # The device remembers the first bad update.
            is_logged = totals.updates % self._log_every == 0
            if not is_logged and leave:
                continue
            report = self.compiled.read(report)
            if first_bad := int(jax.device_get(report.first_bad_update)):
                saved, scale, what = self._checkpoints.latest(), None, "the loss"
                if report.loss_scale is not None:
                    scale = float(jax.device_get(report.loss_scale.loss_scale))
                    what = "the loss or the gradient"
                what += " of update"
                raise NonFiniteLossError(what, first_bad, saved, scale=scale)
            if is_logged:
                totals = Totals.of_all(self._totals_of_each(totals))
                start_s, bounds = self._rates.t_up_s, self.feed.t_up_bounds
                row = self._rows.train_row(
                    totals,
                    self.clock.seconds(),
                    report.row(),
                    t_up_s=float(np.clip(start_s, *bounds)),
                    step_s=self.device_time.step_s,
                )
                self.log.add(row | longest_wait)

    def _wait(self, dispatched: _Dispatched) -> None:
        self.device_time.look()
        # All outputs of a program are ready together.
        dispatched.report.first_bad_update.block_until_ready()
        self.device_time.finished(dispatched.work)

    def summary(self) -> dict[str, Any]:
        """Returns the content of ``summary.json``."""
        bounds = np.max(all_gather(self.feed.t_up_bounds), axis=0)
        start = self._rates
        # A step seems longer on processes that wait for another one's data.
        step_s = min(all_gather(self.device_time.step_s))
        # The state of replicas has no such field, and they have no loss scale.
        scaler = getattr(self.state, "loss_scale", None)
        skipped = int(jax.device_get(scaler.skipped_updates)) if scaler else 0
        return make_summary(
            self.config,
            self._workload,
            rows=self.log.file.rows,
            met=self.log.met,
            totals=Totals.of_all(self._totals_of_each()),
            seconds=self.clock.seconds(),
            rates=(start, Rates(float(np.clip(start.t_up_s, *bounds)), step_s)),
            flops=self._flops,
            skipped_updates=skipped,
            params_sha256=params_sha256(self.compiled.model(self.state).params),
        )

    def _totals_of_each(self, totals: Totals | None = None) -> list[Totals]:
        """Returns the totals of each process; all processes must call this."""
        busy_s = self._busy_before_s + self.device_time.seconds()
        own = replace(totals or self.totals, busy_s=busy_s)
        gathered = all_gather([asdict(own), self._ended_after])
        if ends := [after for _, after in gathered if after is not None]:
            raise data_ended(self._workload, f"after {min(ends)} updates")
        return [Totals(**counts) for counts, _ in gathered]
