"""The training loop: read this first, then `training.trainer` and `training.step`."""

import os
from contextlib import ExitStack, closing
from typing import Any

from rich.console import Console

from echo_jax.config import Config
from echo_jax.config_check import check_config
from echo_jax.folders import RunPath, run_folder
from echo_jax.json_files import read_if_whole, write_json
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.distributed import (
    all_gather,
    broadcast_from_first,
    is_main_process,
)
from echo_jax.training.environment import claim_workdir, describe_environment
from echo_jax.training.feeds import check_echo
from echo_jax.training.interrupt import Interrupted, StopSignal
from echo_jax.training.profile import Profile
from echo_jax.training.summary import is_finished
from echo_jax.training.trainer import Trainer
from echo_jax.workloads.base import Workload

__all__ = ["train", "train_checked"]


def train(
    config: Config,
    workload: Workload,
    workdir: str | os.PathLike[str],
    *,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a workload, or goes on training it.

    The order is a contract. Between two dispatches the loop

    1. stops and saves, if a signal asked for it;
    2. evaluates the state as it is, if due;
    3. saves it, if due: after the evaluation, so that a resumed run need not do it
       again;
    4. takes the input of the next update, or group of them: see `training.dispatch`;
    5. dispatches them;
    6. reads the numbers of the dispatch before the last one. So at most two of them
       are in flight whenever the loop waits for data, and what it measures is true:
       see `training.clock.DeviceTime`.

    The last three of them are traced where ``config.profile`` asks for it: see
    `training.profile`.

    A run that is stopped at any point and started again with the same arguments
    ends, on the same devices, with the same parameters bit for bit; what was
    logged after the last checkpoint is dropped and done again. A finished run is
    not trained again: its summary is returned. It can be extended by more updates,
    but a schedule that decays until the end of the run then decays anew from where
    the longer run would be.

    Two runs from the start end alike in the same way, if nothing is left to be
    measured: neither ``echo.factor="auto"`` nor, where the last bits matter,
    ``dispatch.mode="auto"``. An adaptive run is repeated with its tape.

    Args:
      config: The shared fields of `echo_jax.config.default_config`, and the
        workload's.
      workload: Made from this config.
      workdir: The run folder, see `echo_jax.folders`; made if there is none.
      console: Where progress is shown; None for standard output.

    Returns:
      The content of ``summary.json``.

    Raises:
      ValueError: The config has an impossible value, or the folder holds a run of
        another config.
      FolderError: The folder cannot be opened.
      NonFiniteLossError: The loss became NaN or infinite.
      Interrupted: Ctrl-C or SIGTERM; the run is saved. A second Ctrl-C raises
        KeyboardInterrupt without saving.

    Example:
      >>> config = load_config("configs/lm.py:tiny")
      >>> summary = train(config, lm.build(config), "runs/lm_tiny")
      >>> summary["updates"]
      60
    """
    check_config(config)
    return train_checked(config, workload, workdir, console=console)


def train_checked(
    config: Config,
    workload: Workload,
    workdir: str | os.PathLike[str],
    *,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains as `train` does, by a config that `check_config` has let pass."""
    compiled = CompiledFunctions(config, workload)
    # Here, so that an impossible echo is refused before anything is written.
    check_echo(config, workload, compiled.mesh)
    workdir = run_folder(workdir)
    if is_main_process():
        claim_workdir(workdir, config)
    summary = broadcast_from_first(read_if_whole(workdir / "summary.json"))
    _check_shared(workdir)
    if summary is not None and is_finished(summary, config):
        return summary
    environment = describe_environment(workload.metadata)
    _write_json(workdir / "environment.json", environment)

    with ExitStack() as stack:
        trainer = Trainer(config, workload, workdir, compiled, console, stack)
        _write_json(
            workdir / "environment.json", {**environment, "chosen": trainer.chosen}
        )
        stack.enter_context(trainer.progress)
        stop = stack.enter_context(StopSignal())
        profile = stack.enter_context(closing(Profile(trainer)))
        stack.enter_context(trainer.clock.phase("train"))

        while True:
            updates = trainer.totals.updates
            if signum := stop.asked(updates):
                trainer.save()
                raise Interrupted(updates, signum, saved=not config.data.hold_batch)
            is_last = updates >= config.updates
            if is_last or updates % config.eval_every == 0:
                trainer.evaluate()
            is_last = is_last or (config.stop_at_target and trainer.met_target)
            if is_last or _is_due(updates, config.checkpoint_every):
                trainer.save()
            if is_last:
                break
            with profile.around():
                trainer.dispatch(trainer.take())
                trainer.read()

        summary = trainer.summary(profile.result())
    # After the last checkpoint is whole: a finished run can always be extended.
    _write_json(workdir / "summary.json", summary)
    return summary


def _check_shared(workdir: RunPath) -> None:
    """Makes sure that all processes see the folder that the first one has made.

    Raises:
      ValueError: One does not.
    """
    seen = all_gather((workdir / "config.json").exists())
    if not all(seen):
        raise ValueError(
            f"process {seen.index(False)} of {len(seen)} does not see {workdir}; give "
            "all of them one --workdir, on a disk that they share or gs://BUCKET/FOLDER"
        )


def _write_json(path: RunPath, content: Any) -> None:
    """Writes a file of the run folder, which one process does for all."""
    if is_main_process():
        write_json(path, content)


def _is_due(updates: int, every: int) -> bool:
    return every > 0 and updates > 0 and updates % every == 0
