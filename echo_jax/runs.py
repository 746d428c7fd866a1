"""The commands as functions for notebooks and programs: train, run a study, probe."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from echo_jax.config import Config
from echo_jax.config.run import RunSpec
from echo_jax.config.saved import read_config, refuse_code
from echo_jax.config.study import arm_names
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import DamagedFileError, read_json, write_json
from echo_jax.files.lock import FolderInUseError, FolderLock
from echo_jax.inference.examples import write_examples
from echo_jax.searches.making import num_missing, refuse_other_predictions
from echo_jax.searches.trials import protocol_of
from echo_jax.searches.workers import LostWorkerError, StudyStopped, run_search
from echo_jax.terminal.notes import Notes
from echo_jax.training.loop import train_checked
from echo_jax.training.measure import probe_config
from echo_jax.training.processes import distributed
from echo_jax.training.processes.stop import DataTimeoutError, Interrupted
from echo_jax.training.records.environment import check_workdir, lock_workdir
from echo_jax.training.saving.checkpoint import DamagedCheckpointError
from echo_jax.training.window import NonFiniteLossError
from echo_jax.variants import (
    ConfigRefusedError,
    calibrate_storage,
    check_echoes,
    checked_workload,
    errors_of_the_config,
    kept_calibration,
    read_workload,
    ready_for_trials,
    refuse_processes,
    train_variant,
    variant_configs,
)
from echo_jax.workloads import build

__all__ = [
    "ConfigRefusedError",
    "DamagedCheckpointError",
    "DataTimeoutError",
    "FolderInUseError",
    "Interrupted",
    "LostWorkerError",
    "NonFiniteLossError",
    "StudyStopped",
    "is_alone",
    "is_main_process",
    "run_probe",
    "run_study",
    "run_train",
    "show_examples",
]


is_alone = distributed.is_alone
is_main_process = distributed.is_main_process


def run_train(
    config: Config, workdir: str | os.PathLike[str], *, connect: bool = False
) -> dict[str, Any]:
    """Trains one config; the same call with the same folder resumes.

    Args:
      config: A training config, see `echo_jax.config.default_config`.
      workdir: The run folder, a path or ``gs://BUCKET/FOLDER``; made if it does
        not exist.
      connect: Whether to connect the processes of ``config.distributed``. A program
        does this once, before it asks for a device.

    Returns:
      The content of ``summary.json``.

    Raises:
      ConfigRefusedError: The config cannot be run here, or the folder holds a run
        of another config.
      FolderInUseError: Another process has the folder.
      NonFiniteLossError: Training diverged.
      Interrupted: A signal stopped it; it is saved, unless its data hangs.
      DataTimeoutError: The data did not come; it goes on from the last checkpoint.

    Example:
      >>> config = load_config("configs/lm.py:tiny", {"echo.factor": 2.0})
      >>> run_train(config, "runs/lm")["updates"]
      60
    """
    with errors_of_the_config():
        workdir = run_folder(workdir)
        if "arms" in config:
            raise ValueError("this config is a study; run it with 'echo-jax study'")
        spec = RunSpec.of(config)
    with contextlib.ExitStack() as stack:
        with errors_of_the_config():
            if connect:
                is_first = spec.distributed.process_id == 0
                notes = Notes(quiet=not is_first)
                with notes.slow("looking for the other processes"):
                    stack.enter_context(distributed.connected(spec))
            run = read_workload(spec, workdir)
            locked = lock_workdir(workdir, spec, run.workload.metadata)
            lock = stack.enter_context(locked)
        return train_checked(run, lock)


def run_study(
    config: Config, workdir: str | os.PathLike[str], *, jobs: int = 0
) -> None:
    """Trains the variants of a study, in order.

    The same call with the same folder resumes: a finished variant is kept, and an
    unfinished one goes on. A variant that diverges is also a result: it is marked in
    its folder, and not trained again. Without a search and without seeds to confirm it
    (`echo_jax.config.study.default_study`), a variant is one run in this process. With
    them it is many small trials. Several processes make them, and other calls with the
    same folder can take part on any machine.

    With a ``storage_ratio``, the step time of the base is measured before the first
    variant. ``data.storage.latency_s`` of all variants is set so that a fresh batch
    takes that many steps. It is kept in ``study.json``, and a resumed study reads from
    the same storage.

    Args:
      config: A study, see `echo_jax.config.study.default_study`.
      workdir: The study's folder; each variant gets a run folder in it, or its trials
        are written to the folder ``trials``.
      jobs: Processes that make trials; 0 for one on each core of a CPU, or one on an
        accelerator.

    Raises:
      LostWorkerError, StudyStopped: A worker or a signal ended the trials.
      ConfigRefusedError, FolderInUseError, Interrupted, DataTimeoutError: As in
        `run_train`. The folders of all variants are locked from the first to the last.

    Example:
      >>> run_study(load_config("configs/quickstart.py:tiny"), "runs/quickstart")
    """
    with errors_of_the_config():
        workdir = run_folder(workdir)
        variants = variant_configs(config)
        protocol = protocol_of(config)
        if jobs < 0 or (jobs and protocol is None):
            raise ValueError(
                f"jobs={jobs}: processes make the trials of a search; leave it out"
            )
        if protocol:
            variants = ready_for_trials(variants)
        with Notes().slow("looking at the data of every variant"):
            check_echoes(variants, workdir)
        if protocol:
            _refuse_other_study(workdir, is_searched=True)
            refuse_other_predictions(config.falsifiers, workdir)
            for unit in protocol.units():
                # This refuses the trials of another study.
                num_missing(protocol, variants[unit.variant], workdir, unit)
    if protocol:
        workdir.mkdir(parents=True, exist_ok=True)
        _write_study(config, workdir, calibration={})
        run_search(protocol, variants, workdir, jobs=jobs)
        return
    with contextlib.ExitStack() as stack:
        with errors_of_the_config():
            folders = [workdir, *(workdir / name for name in variants)]
            lock = stack.enter_context(FolderLock(*folders))
        _run_variants(config, variants, workdir, lock)


def _run_variants(
    config: Config,
    variants: Mapping[str, RunSpec],
    workdir: epath.Path,
    lock: FolderLock,
) -> None:
    note = Notes().note
    with errors_of_the_config():
        _refuse_other_study(workdir, is_searched=False)
        calibration = kept_calibration(config, workdir)
    if calibration is None:
        calibration = calibrate_storage(config, say=note)
    storage = config.base.data.storage.to_dict()
    if calibration:
        storage["latency_s"] = calibration["latency_s"]
        slow = {"data.storage.latency_s": calibration["latency_s"]}
        variants = {name: variant.changed(slow) for name, variant in variants.items()}
    with errors_of_the_config():
        # Check now, so that no variant runs for minutes before a later one is refused.
        for name, variant in variants.items():
            check_workdir(workdir / name, variant)
    _write_study(config, workdir, calibration, storage)
    for number, (name, variant) in enumerate(variants.items(), start=1):
        note(f"variant {number} of {len(variants)}: {name}")
        lock.check()
        update = train_variant(variant, workdir / name, lock)
        if update is not None:
            note(f"{name} diverged at update {update}: the study marks it")


def _write_study(
    config: Config,
    workdir: epath.Path,
    calibration: Mapping[str, float],
    storage: Mapping[str, Any] | None = None,
) -> None:
    metadata = {
        "name": config.name,
        "base_config": config.base.to_dict(),
        "arms": [*arm_names(config)],
        "storage": storage or config.base.data.storage.to_dict(),
        "calibration": calibration,
    }
    if protocol_of(config):
        metadata["arm_configs"] = config.arms.to_dict()
        for name in ("search", "confirm", "stop"):
            metadata[name] = config[name].to_dict()
        metadata["paper"] = config.paper.to_dict()
        metadata["falsifiers"] = [*map(dict, config.falsifiers)]
    write_json(workdir / "study.json", metadata)


def _refuse_other_study(workdir: epath.Path, *, is_searched: bool) -> None:
    kept = read_json(workdir / "study.json", {"name": str})
    if kept is not None and ("search" in kept) != is_searched:
        kinds = "runs", "trials of a search"
        raise ValueError(
            f"{workdir} holds a study of {kinds[not is_searched]}, and this one is of "
            f"{kinds[is_searched]}; use another --workdir"
        )


def run_probe(
    config: Config,
    *,
    seconds: float = 20.0,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> Any:
    """Measures how long the accelerator waits for data, and whether an echo helps.

    The config is measured without its echo. For a study, its base is measured with the
    simulated storage of `run_study`.

    Args:
      config: A training config, or a study.
      seconds: The duration of the measurement, without compiling.
      on_progress: Called with the next measurement and the fraction that is done.

    Returns:
      The `echo_jax.echo.instrument.advice.ProbeReport`; print it.

    Raises:
      ConfigRefusedError: The config cannot be run here.
      DataTimeoutError: The data did not come.

    Example:
      >>> run_probe(load_config("configs/quickstart.py")).advised_factor
      4.0
    """
    with errors_of_the_config():
        if not seconds > 0:
            raise ValueError(f"seconds={seconds} must be above 0; 20 is a good choice")
        is_study = "arms" in config
        if is_study:
            variant_configs(config)
        base = RunSpec.of(config.base if is_study else config)
        refuse_processes(base)
    if is_study:
        found = calibrate_storage(config, say=lambda what: on_progress(what, 0.0))
        if found:
            base = base.changed({"data.storage.latency_s": found["latency_s"]})
    with errors_of_the_config():
        on_progress("Reading the data", 0.0)
        workload = build(base)
        stages = workload.stage_calls()
    return probe_config(
        base,
        workload,
        seconds=seconds,
        stages=stages,
        on_progress=on_progress,
        # The advice can be appended to the typed command.
        flag="--config.base" if is_study else "--config",
    )


def show_examples(
    config: Config | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    updates: int = 100,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> epath.Path:
    """Draws the first examples of a training, as updates get them at each use.

    Args:
      config: A training config, or a run folder.
      folder: Receives ``examples.html``.
      updates: Maximum number of updates to read.
      on_progress: Called with the current step and the fraction that is done.

    Returns:
      The page.

    Raises:
      ConfigRefusedError: The config cannot be run here.

    Example:
      >>> show_examples(load_config("configs/shapes.py:tiny"), "runs/looked_at").name
      'examples.html'
    """
    with errors_of_the_config():
        if updates < 1:
            raise ValueError(f"updates={updates} must be at least 1; 100 is a good one")
        is_run = isinstance(config, str | os.PathLike)
        if not is_run and "arms" in config:
            raise ValueError("a study has several trainings; name a config to train")
        read = read_config(run_folder(config)) if is_run else RunSpec.of(config)
        if is_run:
            refuse_code(read)
        refuse_processes(read)
        try:
            workload = checked_workload(read)
        except (ArithmeticError, AttributeError, LookupError) as error:
            if not is_run:
                raise
            # Its model or data is one that no config file of ours has.
            path = run_folder(config) / "config.json"
            raise DamagedFileError(path, error) from error
        return write_examples(
            read, workload, folder, most_updates=updates, on_progress=on_progress
        )
