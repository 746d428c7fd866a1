"""The start of a run: what it refuses, restores, measures and writes before it trains.

`check_start` refuses what cannot run, before anything is written. `start` returns what
the loop needs.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import jax
from etils import epath
from rich.console import Console

from echo_jax.config.run import RunSpec
from echo_jax.config.specs import CHANGING
from echo_jax.files.json_files import read_if_whole, read_json
from echo_jax.training.arrays import call_with_host_arrays, idle_on_one_device
from echo_jax.training.clock import Clock
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.evaluation import check_evaluation
from echo_jax.training.feeds.feed import Feed
from echo_jax.training.feeds.of_config import EchoedData, check_data, check_echo
from echo_jax.training.measure import Rates, measured_feed
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.processes.stop import Watchdog
from echo_jax.training.records.environment import (
    check_replicas,
    check_saved,
    check_shared,
    claim_workdir,
    describe_environment,
)
from echo_jax.training.records.loggers import check_loggers
from echo_jax.training.records.metrics import Totals
from echo_jax.training.records.progress import Progress
from echo_jax.training.records.runfiles import RunLog, write_json_once
from echo_jax.training.saving.checkpoint import Checkpoints
from echo_jax.training.saving.model import MODEL_FILE, size_of, write_table, write_task
from echo_jax.training.saving.weights import WarmStart, warm_start
from echo_jax.training.step import TrainState
from echo_jax.training.xla import UpdateFlops, count_flops, sent_bytes
from echo_jax.workloads.base import Workload

# They end with the run, unless the config sets their end.
_DECAYING = ("linear", "cosine", "slow_start", "onecycle", "warmup_stable_decay")


@dataclass(frozen=True)
class Run:
    """A run that `check_start` accepted, before it writes anything."""

    config: RunSpec
    workload: Workload
    workdir: epath.Path
    compiled: CompiledFunctions
    data: EchoedData


@dataclass
class Started:
    """What the loop of a run needs."""

    state: TrainState
    totals: Totals
    progress: Progress
    clock: Clock
    checkpoints: Checkpoints
    watchdog: Watchdog
    feed: Feed
    rates: Rates
    log: RunLog
    flops: UpdateFlops
    # What an update sends, without and with a synchronisation of replicas.
    bytes_sent: dict[bool, int]


def check_start(config: RunSpec, workload: Workload, workdir: epath.Path) -> Run:
    """Refuses an impossible run; compiles and writes nothing."""
    compiled = CompiledFunctions(config, workload)
    data = check_echo(config, workload, compiled.mesh)
    check_data(config, workload)
    check_evaluation(config, compiled, workload)
    check_loggers(config.log.to, workdir)
    if compiled.local and is_main_process():
        check_replicas(workdir, compiled.mesh.size)
    return Run(config, workload, workdir, compiled, data)


def start(run: Run, console: Console | None, stack: ExitStack) -> Started:
    """Restores or begins a run, measures it, and writes what the run folder says of it.

    The caller's `stack` closes what it opens.
    """
    config, workload, compiled = run.config, run.workload, run.compiled
    clock = Clock()
    progress = stack.enter_context(Progress(console, total=config.updates))
    checkpoints = Checkpoints(run.workdir / "checkpoints", keep=config.keep_checkpoints)
    stack.callback(_close, checkpoints, progress)
    with progress.slow("looking for a checkpoint, and reading it"):
        restored = checkpoints.restore_newest(compiled.abstract_state)
    before, warm = restored.host if restored else None, None
    if restored:
        check_saved(config, workload.metadata, restored.update, restored.host)
        progress.resumes(restored)
        state = restored.state
    else:
        state, warm = _first_state(run, progress)
    totals = Totals.resumed(before["totals"] if before else [])

    watchdog = stack.enter_context(Watchdog(config, _note_of(progress)))
    # A resumed run keeps the decisions of its checkpoint.
    with progress.slow("compiling the update, and measuring it"):
        measured = measured_feed(
            config,
            workload,
            compiled,
            state,
            data=run.data,
            before=before,
            watchdog=watchdog,
            note=progress.note,
        )
    feed = measured.feed
    stack.enter_context(watchdog.closing(feed))
    if before:
        what = "the items in use, to be read again"
        with progress.slow(f"waiting for {what}"), watchdog.waiting(what):
            feed.set_state([before["data"][shard.index] for shard in measured.shards])
        clock.add(before["clock"])
    log = RunLog(config, workload, run.workdir, restored, progress)
    stack.callback(log.close)
    if not restored:
        log.examples(measured.sample)
    trace = partial(compiled.trace, state, feed)
    flops = count_flops(trace(), compiled.mesh)
    if config.batch.boundaries:
        flops = UpdateFlops(None, None)  # They differ by update.
    # This compiles the programs that were not measured.
    with progress.slow("compiling what the update sends"):
        bytes_sent = {
            syncs: sent_bytes(trace(syncs=syncs).lower().compile())
            for syncs in ([False, True] if compiled.local else [False])
        }
    _write_facts(run, totals, warm, progress)
    return Started(
        state=state,
        totals=totals,
        progress=progress,
        clock=clock,
        checkpoints=checkpoints,
        watchdog=watchdog,
        feed=feed,
        rates=measured.rates,
        log=log,
        flops=flops,
        bytes_sent=bytes_sent,
    )


def _first_state(run: Run, progress: Progress) -> tuple[TrainState, WarmStart | None]:
    """Returns the state before the first update, and what it took from another run."""
    config, workload, compiled = run.config, run.workload, run.compiled
    # Printed before anything is compiled.
    size = size_of(compiled.variables["params"])
    progress.begins(config, workload, f"{size}; see {MODEL_FILE}")
    if compiled.local:
        each = f"{compiled.mesh.size} replicas, one on each device"
        progress.note(each.replace("1 replicas", "1 replica"))
    if idle := idle_on_one_device(config, compiled.mesh):
        progress.note(idle)
    if is_main_process():
        write_table(run.workdir, workload.task)
    with progress.slow("initialising the model"):
        warm, taken = None, {}
        if config.init_from:
            warm = warm_start(config.init_from, compiled.variables)
            taken = warm.taken
            progress.note(str(warm))
        return call_with_host_arrays(compiled.init, compiled.init_key, taken), warm


def _write_facts(
    run: Run, totals: Totals, warm: WarmStart | None, progress: Progress
) -> None:
    """Writes the config, the task and the environment of a run that can begin."""
    workdir, compiled = run.workdir, run.compiled
    before = read_if_whole(workdir / "environment.json") or {}
    environment = describe_environment(run.workload.metadata)
    environment["xla_options"] = dict(compiled.xla_options)
    if compiled.local:
        environment["replicas"] = compiled.mesh.size
    # A start that fails before this line leaves the config that the folder had.
    moved = moved_by_updates(workdir, run.config)
    if is_main_process():
        claim_workdir(workdir, run.config)
        write_task(workdir, run.workload)
    check_shared(workdir)
    if warm:
        environment["init_from"] = warm.report
    elif "init_from" in before and totals.updates:
        environment["init_from"] = before["init_from"]
    write_json_once(workdir / "environment.json", environment)
    if totals.updates and moved:
        progress.note(moved)


def _note_of(progress: Progress) -> Callable[[str], None]:
    """Returns what prints a line of this process; its `progress` may be silent."""
    if is_main_process():
        return progress.note
    name = f"process {jax.process_index()} of {jax.process_count()}"
    return lambda line: print(f"{name} {line}", file=sys.stderr, flush=True)


def _close(checkpoints: Checkpoints, progress: Progress) -> None:
    with progress.slow("writing the last checkpoint"):
        checkpoints.close()


def moved_by_updates(workdir: epath.Path, config: RunSpec) -> str:
    """Returns a note if another number of updates moves the rest of a resumed run."""
    optim, local, updates = config.optim, config.local.sync_schedule, config.updates
    old = read_json(workdir / "config.json", {"updates": int})
    before = old["updates"] if old else updates
    if before == updates:
        return ""
    moved = []
    if optim.schedule in _DECAYING and not (optim.decay_updates or optim.boundaries):
        moved.append(
            f"the {optim.schedule} schedule decays to the end of the run, so from here "
            f"on the learning rate is that of a run of {updates} updates; a run that "
            "is begun with --config.optim.decay_updates=N keeps its learning rates"
        )
    if local in CHANGING:
        moved.append(
            "replicas synchronise by a schedule that ends with the run, so from here "
            f"on as often as in one of {updates} updates"
        )
    elif local != "none":
        moved.append(
            f"replicas synchronised after update {before}, the end of that run; a run "
            f"that is begun with {updates} updates may not synchronise there"
        )
    said = "; and ".join(moved)
    return said and f"config.updates was {before} and is {updates}: {said}"
