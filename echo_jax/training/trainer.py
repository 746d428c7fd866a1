"""The trainer: the state, the step, and the loop, in this order.

1. The update: `TrainState`, `StepReport` and `RunInputs`, and the pure functions
   `init_state` and `train_step`.
2. The loop: `train`, whose order is a contract, and `train_checked`, which runs it.
3. The run: `Trainer` has one method for each step of the loop, in the loop's order:
   evaluate, save, take, dispatch, read. At the end it makes the summary.

`training.feeds.feed` makes the input of an update, `training.compiled` compiles the
update, and `training.window` sums its losses.
"""

import contextlib
import itertools
import os
import signal
import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from rich.console import Console

from echo_jax.config import Config
from echo_jax.config.run import RunSpec
from echo_jax.echo.instrument.measure import MAX_IN_FLIGHT
from echo_jax.echo.stats import Waits
from echo_jax.files.folders import RunPath, run_folder
from echo_jax.files.json_files import read_if_whole
from echo_jax.files.lock import FolderLock
from echo_jax.training.clock import Clock, DeviceTime, Work
from echo_jax.training.compiled import CompiledFunctions, next_group
from echo_jax.training.evaluation import (
    check_branches,
    check_norm,
    evaluate_split,
    has_branch,
    metric_after_fresh,
)
from echo_jax.training.feeds.loader import data_ended
from echo_jax.training.feeds.of_config import check_data, check_echo, log_name
from echo_jax.training.measure import Rates, decide
from echo_jax.training.processes import peers
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    call_with_host_arrays,
    is_main_process,
)
from echo_jax.training.processes.interrupt import (
    DataTimeoutError,
    Interrupted,
    StopSignal,
)
from echo_jax.training.processes.sharding import idle_on_one_device
from echo_jax.training.processes.watchdog import Stalled, Watchdog, describe_data
from echo_jax.training.records.environment import (
    check_replicas,
    check_saved,
    check_shared,
    check_workdir,
    claim_workdir,
    describe_environment,
    identity,
    lock_workdir,
)
from echo_jax.training.records.loggers import check_loggers
from echo_jax.training.records.metrics import AFTER_FRESH, RowMaker, Totals
from echo_jax.training.records.progress import show_run
from echo_jax.training.records.runfiles import RunLog, write_json_once
from echo_jax.training.records.summary import DECIDES_THE_END, is_finished, make_summary
from echo_jax.training.saving.checkpoint import Checkpoints, params_sha256
from echo_jax.training.saving.model import MODEL_FILE, size_of, write_table, write_task
from echo_jax.training.saving.saved_model import WarmStart, replaced, warm_start
from echo_jax.training.saving.weights import flat_arrays
from echo_jax.training.start import moved_by_updates
from echo_jax.training.update.gradients import Gradient, squared_norm, whole_gradient
from echo_jax.training.update.local import Meetings
from echo_jax.training.update.loss_scale import (
    LossScale,
    Precision,
    ScaleReport,
    adjust,
    scale_numbers,
)
from echo_jax.training.update.optim import Hyperparams, Optimizer, hyperparams
from echo_jax.training.window import (
    MAX_METRICS,
    GradientWindow,
    LossWindow,
    NonFiniteLossError,
    is_finite,
    metric_means,
    named_metrics,
    stacked_metrics,
)
from echo_jax.training.xla import Profile, UpdateFlops, count_flops, sent_bytes
from echo_jax.workloads.base import Batch, Sums, Task, Variables, Workload


class TrainState(struct.PyTreeNode):
    """The training state: all arrays that an update changes.

    Attributes:
      update: Updates done, ``int32[]``.
      model_state: Flax collections other than the parameters (batch statistics).
      window: Losses since the last logged update.
      metrics: Sum and count of each task metric since then, sorted by name,
        ``float32[MAX_METRICS, 2]``.
      first_bad_update: The update whose non-finite loss ends the run, ``int32[]``,
        counted from 1; 0 while there is none.
    """

    update: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    window: LossWindow
    gradients: GradientWindow
    metrics: jax.Array
    first_bad_update: jax.Array
    loss_scale: LossScale | None


class StepReport(struct.PyTreeNode):
    """The numbers of an update that the host may read; not donated with the state.

    Attributes:
      metrics: Sum and count of each task metric since the last logged update.
      replica_spread: Distance of the replicas from their mean when they last
        synchronised: a root mean square, relative to the norm of the mean.
    """

    window: LossWindow
    gradients: GradientWindow
    metrics: Sums
    learning_rate: jax.Array
    first_bad_update: jax.Array
    loss_scale: ScaleReport | None
    replica_spread: Any = None

    def row(self) -> dict[str, float]:
        """Returns the report's columns of a logged row; waits for the numbers."""
        report = jax.device_get(self)
        spread, scaler = report.replica_spread, report.loss_scale
        scale = {} if scaler is None else scaler._asdict()
        return {
            "loss": report.window.mean(),
            "learning_rate": float(report.learning_rate),
            **{name: number.item() for name, number in scale.items()},
            **report.gradients.row(),
            **({} if spread is None else {"replica_spread": float(spread)}),
            **report.window.mean_by_repeat(),
            **metric_means(report.metrics),
        }


class RunInputs(NamedTuple):
    """Arguments of the compiled step that are the same at every update of a run.

    Attributes:
      key: Random key of the run; each update folds in its own number.
      log_every: Updates in a window, ``int32[]``.
      loss_scale: From `scale_numbers`, ``float32[3]``; None without a loss scale.
    """

    key: jax.Array
    log_every: jax.Array
    hyperparams: Hyperparams
    loss_scale: Any


def run_inputs(config: RunSpec, key: jax.Array) -> RunInputs:
    """Returns the `RunInputs` of a config."""
    return RunInputs(
        key, jnp.int32(config.log_every), hyperparams(config), scale_numbers(config)
    )


def init_state(
    key: jax.Array,
    taken: Variables,
    *,
    task: Task,
    optimizer: Optimizer,
    precision: Precision,
) -> TrainState:
    """Returns the state before the first update; `taken` variables are not drawn."""
    variables = replaced(task.init(key), taken)
    params = variables.pop("params")
    params = jax.tree.map(lambda x: x.astype(precision.params), params)
    return TrainState(
        update=jnp.zeros((), jnp.int32),
        params=params,
        model_state=variables,
        opt_state=optimizer.init(params),
        window=LossWindow.empty(),
        gradients=GradientWindow.empty(),
        metrics=jnp.zeros((MAX_METRICS, 2), jnp.float32),
        first_bad_update=jnp.zeros((), jnp.int32),
        loss_scale=None if precision.loss_scale == "none" else LossScale.at_start(),
    )


# Pure: its randomness is fold_in(run.key, state.update).
def train_step(
    state: TrainState,
    batch: Batch,
    run: RunInputs,
    *,
    task: Task,
    optimizer: Optimizer,
    precision: Precision,
    gradient: Gradient = whole_gradient,
) -> tuple[TrainState, StepReport]:
    """Performs one update; returns the new state and the update's report."""
    batch = dict(batch)
    repeat = batch.pop("repeat")  # int32[B], the use index of every example.
    key = jax.random.fold_in(run.key, state.update)
    scaler = state.loss_scale
    factor: Any = None if scaler is None else scaler.factor(run.loss_scale)
    variables = {"params": state.params, **state.model_state}
    found = gradient(task, variables, batch, key, factor)

    numbers = optimizer.at(state.update, run.hyperparams)
    changes, opt_state = optimizer.update(
        found.gradient, state.opt_state, state.params, numbers
    )

    is_new_window = state.update % run.log_every == 0
    window, gradients, sums = jax.tree.map(
        lambda kept: jnp.where(is_new_window, 0, kept),
        (state.window, state.gradients, state.metrics),
    )
    skipped = state.replace(
        update=state.update + 1, window=window, gradients=gradients, metrics=sums
    )
    with jax.numpy_dtype_promotion("standard"):  # Parameters may be bfloat16.
        params = optax.apply_updates(state.params, changes)
    new_state = skipped.replace(
        params=params,
        model_state=found.model_state,
        opt_state=opt_state,
        window=window.add(found.losses, repeat),
        gradients=gradients.add(squared_norm(found.gradient), found.noise),
        metrics=sums + stacked_metrics(found.metrics),
    )
    loss = found.losses.mean()
    if scaler is None:
        scale_report, is_bad = None, ~jnp.isfinite(loss)
    else:
        is_used = is_finite((loss, found.gradient, found.model_state))
        new_state = jax.tree.map(
            lambda new, old: jnp.where(is_used, new, old), new_state, skipped
        )
        is_dynamic = precision.loss_scale == "dynamic"
        scaler, is_bad = adjust(scaler, run.loss_scale, is_used, is_dynamic=is_dynamic)
        scale_report = ScaleReport(factor, scaler.skipped_updates)
    is_first_bad = (state.first_bad_update == 0) & is_bad
    first_bad = jnp.where(is_first_bad, state.update + 1, state.first_bad_update)
    new_state = new_state.replace(first_bad_update=first_bad, loss_scale=scaler)
    sums = named_metrics(new_state.metrics, found.metrics)
    return new_state, StepReport(
        new_state.window,
        new_state.gradients,
        sums,
        numbers["lr"],
        first_bad,
        scale_report,
    )


def compile_functions(config: RunSpec, workload: Workload) -> CompiledFunctions:
    """Returns the functions of a run; each is compiled at its first call."""
    return CompiledFunctions(config, workload, run_inputs, init_state, train_step)


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
    run, give its ``tape.json`` to ``echo.replay``.

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
      Interrupted: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2; the run is saved. A
        second signal raises KeyboardInterrupt without saving.
      DataTimeoutError: The data did not come for ``config.data.timeout_s`` seconds;
        the run is saved.

    Example:
      >>> config = load_config("configs/lm.py:tiny")
      >>> summary = train(config, lm.build(config), "runs/lm_tiny")
      >>> summary["updates"]
      60
    """
    config = RunSpec.of(config)
    workdir = run_folder(workdir)
    with lock_workdir(workdir) as lock:
        if is_main_process():
            check_workdir(workdir, config, workload.metadata)
        return train_checked(config, workload, workdir, lock, console=console)


# The caller holds the lock. Under it, `check_workdir` has accepted the folder.
def train_checked(
    config: RunSpec,
    workload: Workload,
    workdir: RunPath,
    lock: FolderLock,
    *,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a checked config in a checked, locked folder; see `train`."""
    compiled = compile_functions(config, workload)
    # Refuse an impossible run before anything is written.
    check_echo(config, workload, compiled.mesh)
    check_data(config, workload)
    check_norm(config, compiled, workload)
    check_branches(config, workload)
    check_loggers(config.log.to, workdir)
    if is_main_process():
        workdir.remove_unfinished()
    kept = read_if_whole(workdir / "summary.json", DECIDES_THE_END)
    summary = broadcast_from_first(kept)
    if summary is not None and is_finished(summary, config):
        return summary

    with ExitStack() as stack:
        before = read_if_whole(workdir / "environment.json") or {}
        environment = describe_environment(workload.metadata)
        environment["xla_options"] = dict(compiled.xla_options)
        if compiled.local:
            replicas = environment["replicas"] = compiled.mesh.size
            if is_main_process():
                check_replicas(workdir, replicas)
        trainer = Trainer(config, workload, workdir, compiled, console, stack)
        # A start that fails before this line leaves the config that the folder had.
        moved = moved_by_updates(workdir, config)
        if is_main_process():
            claim_workdir(workdir, config)
            write_task(workdir, workload)
        check_shared(workdir)
        if trainer.warm_start:
            environment["init_from"] = trainer.warm_start.report()
        elif "init_from" in before and trainer.totals.updates:
            environment["init_from"] = before["init_from"]
        write_json_once(workdir / "environment.json", environment)
        if trainer.totals.updates and moved:
            trainer.progress.note(moved)
        stop = stack.enter_context(StopSignal(trainer.watchdog.stop))
        profile = stack.enter_context(closing(Profile(trainer)))
        stack.enter_context(trainer.clock.phase("train"))
        # Looking up a config field is slow, so it is done outside the loop.
        last, eval_every = config.updates, config.eval_every
        save_every, stop_at_target = config.checkpoint_every, config.stop_at_target

        while True:
            lock.check()
            updates = trainer.totals.updates
            if signum := stop.asked(updates):
                trainer.save()
                raise Interrupted(updates, signum)
            is_last = updates >= last
            if is_last or updates % eval_every == 0:
                trainer.evaluate()
            is_last = is_last or (stop_at_target and trainer.log.met)
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
      warm_start: The variables taken from another model; None if there are none, or
        if the run is resumed.
      totals: Counts over all dispatched updates.
    """

    def __init__(
        self,
        config: RunSpec,
        workload: Workload,
        workdir: RunPath,
        compiled: CompiledFunctions,
        console: Console | None,
        stack: ExitStack,
    ):
        self.config, self.workdir, self.compiled = config, workdir, compiled
        self.clock = Clock()
        self._workload = workload
        self.progress = stack.enter_context(show_run(config, console))
        note = self.progress.note
        folder = workdir / "checkpoints"
        self._checkpoints = Checkpoints(folder, keep=config.keep_checkpoints)
        stack.callback(self._close_checkpoints)
        with self.progress.slow("looking for a checkpoint, and reading it"):
            restored = self._checkpoints.restore_newest(compiled.abstract_state)
        before = restored.host if restored else None
        self.warm_start: WarmStart | None = None
        self.state: TrainState
        if restored:
            check_saved(config, workload.metadata, restored.update, restored.host)
            self.progress.resumes(restored)
            self.state = restored.state
        else:
            # Printed before anything is compiled.
            size = size_of(compiled.variables["params"])
            self.progress.begins(config, workload, f"{size}; see {MODEL_FILE}")
            if compiled.local:
                each = f"{compiled.mesh.size} replicas, one on each device"
                note(each.replace("1 replicas", "1 replica"))
            if idle := idle_on_one_device(config, compiled.mesh):
                note(idle)
            if is_main_process():
                write_table(workdir, workload.task)
            with self.progress.slow("initialising the model"):
                taken = {}
                if config.init_from:
                    self.warm_start = warm_start(config.init_from, compiled.variables)
                    taken = self.warm_start.taken
                    note(str(self.warm_start))
                self.state = call_with_host_arrays(
                    compiled.init, compiled.init_key, taken
                )
        self.totals = Totals.resumed(before["totals"] if before else [])
        # The totals include the devices' work before the run was resumed.
        self._busy_before_s = self.totals.busy_s
        self._unsaved = "nothing was trained yet"
        self.watchdog = Watchdog(
            describe_data(config),
            timeout_s=config.data.timeout_s,
            is_shared=jax.process_count() > 1,
            note=peers.here().shared_note(note),
            end=self._end_stalled,
        )
        stack.enter_context(self.watchdog)
        peers.here().when_stop_asked(partial(self.watchdog.stop, signal.SIGTERM))
        # A resumed run keeps the decisions of its checkpoint.
        with self.progress.slow("compiling the update, and measuring it"):
            self.decided = decide(
                config,
                workload,
                compiled,
                self.state,
                before=before,
                watchdog=self.watchdog,
                note=note,
            )
        self.feed = self.decided.feed
        stack.enter_context(self.watchdog.closing(self.feed))
        if before:
            data = [before["data"][shard.index] for shard in self.decided.shards]
            what = "the items in use, to be read again"
            slow = self.progress.slow(f"waiting for {what}")
            with slow, self.watchdog.waiting(what):
                self.feed.set_state(data)
            self.clock.add(before["clock"])
        self.log = RunLog(config, workload, workdir, restored, self.progress)
        stack.callback(self.log.close)
        if not restored:
            self.log.examples(self.decided.sample)
        traced = compiled.trace(self.state, self.feed)
        self._flops = count_flops(traced, compiled.mesh)
        if config.batch.boundaries:
            self._flops = UpdateFlops(None, None)  # They differ by update.
        self._meetings = Meetings(config)
        # This compiles the programs that were not measured.
        with self.progress.slow("compiling what the update sends"):
            self._bytes_sent = {
                meets: sent_bytes(
                    compiled.trace(self.state, self.feed, meets=meets).lower().compile()
                )
                for meets in ([False, True] if compiled.local else [False])
            }
        wall_s = self.clock.seconds()["wall_s"]
        self._rows = RowMaker(self.totals, wall_s, self._flops)
        self.device_time = DeviceTime(
            self.decided.rates.t_down_s, steps=config.dispatch.steps
        )
        self._waits = Waits()
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
        # Why the run cannot be saved during a wait; empty if it can.
        self._unsaved = ""
        if jax.process_count() > 1:
            # The other processes may be inside an update, and a save needs all of them.
            self._unsaved = "a save takes all processes"

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

    def save(self, data: list[Any] | None = None) -> None:
        """Saves the run; the files are written in the background."""
        self.read(leave=0)
        slow = self.progress.slow(f"saving update {self.totals.updates}")
        with self.clock.phase("pause"), slow:
            if not jax.device_get(self.compiled.is_finite(self.state)):
                done, saved = self.totals.updates, self._checkpoints.latest()
                raise NonFiniteLossError("the state after update", done, saved)
            totals = self._totals_of_each()
            if data is None:
                for shard, log in self.feed.logs.items():
                    (self.workdir / log_name(shard)).write(log.to_text())
                data = self.feed.get_state()
            host = {
                **identity(self.config, self._workload.metadata),
                "data": [*itertools.chain(*all_gather(data))],
                "totals": [asdict(each) for each in totals],
                "clock": self.clock.seconds(),
                "num_lanes": self.feed.num_lanes,
                "rows": len(self.log.file.rows),
            }
            self.log.file.flush()
            self._checkpoints.save(self.totals.updates, self.state, host)

    def _close_checkpoints(self) -> None:
        with self.progress.slow("writing the last checkpoint"):
            self._checkpoints.close()

    def _end_stalled(self, stalled: Stalled) -> Interrupted | DataTimeoutError:
        """Saves the run if that is possible; returns the error that ends it."""
        with contextlib.suppress(OSError):  # The terminal may be closed.
            self.progress.note(f"gives up waiting {stalled.what}")
        unsaved = self._unsaved
        if not self.totals.updates:
            unsaved = "nothing was trained yet"
        elif stalled.is_stuck and not stalled.is_known:
            unsaved = "it is not known where the data stands"
        elif not unsaved and stalled.state is None:
            try:
                self.feed.get_state()
            except (RuntimeError, TypeError, ValueError) as error:
                unsaved = str(error)
        if not unsaved:
            # The wait may have changed the feed, so this is its state before the wait.
            self.save(stalled.state)
            if stalled.is_stuck:
                self._checkpoints.close()
        elif (saved := self._checkpoints.latest()) is not None:
            lost = self.totals.updates - saved
            stands = "stands" if self._checkpoints.settle() else "was not whole yet"
            unsaved += f"; the last checkpoint, of update {saved}, {stands}"
            unsaved += f", and {lost} updates are lost" if lost else ""
        if stalled.signum:
            if name := peers.here().name:
                unsaved = f"{name} waited {stalled.what}, and {unsaved}"
            error = Interrupted(self.totals.updates, stalled.signum, unsaved=unsaved)
        else:
            error = DataTimeoutError(stalled.what, self.totals.updates, unsaved=unsaved)
        peers.here().tell(error.exit_code, str(error))
        return error

    def take(self) -> Any:
        """Returns the input of the next updates; its time counts as waiting."""
        num_updates = self._group(self.totals.updates)
        if self._ended_after is None:
            state = self.feed.state_before_take()
            what = f"the input of update {self.totals.updates + 1}"
            waiting = self.watchdog.waiting(what, state, anywhere=state is not None)
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
        meets = self._meetings.after(self.totals.updates)
        self.state, report = self.compiled.step(
            self.state, self.feed, inputs, meets=meets
        )
        is_done = cast(Any, report.first_bad_update).is_ready
        work = self.device_time.sent(sent_s, len(repeat), is_done)
        self.totals = self.totals.after(repeat, bytes_sent=self._bytes_sent[meets])
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
                start_s, bounds = self.decided.rates.t_up_s, self.feed.t_up_bounds
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
        start = self.decided.rates
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
