"""Checks before a run begins, and the arms of a study: how each one runs."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath
from rich.console import Console

from echo_jax.config import Config
from echo_jax.config.run import RunSpec
from echo_jax.config.study import arm_names
from echo_jax.files.json_files import read_json
from echo_jax.files.lock import FolderInUseError, FolderLock
from echo_jax.terminal.notes import Notes
from echo_jax.training.arrays import idle_on_one_device, make_mesh
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.of_config import check_data, check_echo
from echo_jax.training.loop import train_checked
from echo_jax.training.measure import calibrate
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.records.metrics import read_diverged, write_diverged
from echo_jax.training.start import check_start
from echo_jax.training.window import NonFiniteLossError
from echo_jax.workloads import build
from echo_jax.workloads.base import Workload

# An arm's name is also the name of a folder, and a heading.
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class ConfigRefusedError(ValueError):
    """A config cannot be run as it is; the message says what to change."""


@contextlib.contextmanager
def errors_of_the_config() -> Iterator[None]:
    """Turns errors of a preparation into ConfigRefusedErrors."""
    try:
        yield
    except FolderInUseError:
        raise
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # An error of the system does not come from the config.
        raise ConfigRefusedError(str(error)) from error


def refuse_processes(config: RunSpec) -> None:
    """Refuses a config of several processes."""
    wanted = config.distributed.num_processes
    if wanted > 1:
        raise ValueError(
            f"config.distributed.num_processes={wanted}: a study and a probe run in "
            "one process; train in several with 'echo-jax train'"
        )


def checked_workload(config: RunSpec) -> Workload:
    """Returns the workload of a checked config, after a check of data and echo."""
    workload = build(config)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.batch_size)
    check_echo(config, workload, mesh)
    check_data(config, workload)
    return workload


def read_workload(
    config: RunSpec, workdir: epath.Path
) -> tuple[Workload, CompiledFunctions]:
    """Builds what is trained; checks the run, with a line on the console if slow."""
    notes = Notes(Console(quiet=not is_main_process()))
    with notes.slow("reading the data"):
        workload = build(config)
        return workload, check_start(config, workload, workdir)


def arm_configs(config: Config) -> dict[str, RunSpec]:
    """Returns the checked training config of every arm, in order."""
    if "arms" not in config:
        raise ValueError("this config has no arms; run it with 'echo-jax train'")
    if not config.storage_ratio >= 0:
        raise ValueError(
            f"config.storage_ratio={config.storage_ratio} must be at least 0, which "
            "leaves the storage as it is"
        )
    arms = {}
    for name in arm_names(config):
        differences = config.arms[name]
        if not _ARM_NAME.fullmatch(name):
            raise ValueError(
                f"arm {name!r} cannot name a folder; use letters, digits, '_', '-'"
            )
        # Not through a plain dict, which loses the fields' types.
        arm = copy.deepcopy(config.base).lock()
        try:
            arm.update(differences.to_dict())
            arms[name] = RunSpec.of(arm)
            refuse_processes(arms[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"arm {name}: {error}") from error
    return arms


def check_echoes(arms: Mapping[str, RunSpec], workdir: epath.Path) -> None:
    """Refuses a study with an impossible arm before it runs; names the arm."""
    # Devices first: opening the data of all arms takes long.
    for name, arm in arms.items():
        with _named(name):
            mesh = make_mesh(arm.mesh.data, arm.mesh.fsdp, arm.batch_size)
            if idle := idle_on_one_device(arm, mesh):
                raise ValueError(idle)
    for name, arm in arms.items():
        # The log of an earlier arm may not exist yet.
        is_made = arm.echo.replay.startswith(f"{workdir}/")
        with _named(name):
            checked_workload(arm.changed({"echo.replay": ""}) if is_made else arm)


@contextlib.contextmanager
def _named(arm: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"arm {arm}: {error}") from error


def ready_for_trials(arms: Mapping[str, RunSpec]) -> dict[str, RunSpec]:
    """Returns arms without the fields by which two trials of a seed would differ."""
    for name, arm in arms.items():
        if arm.echo.mode == "adaptive" and not arm.echo.pattern:
            raise ValueError(
                f"arm {name}: a trial must not depend on measured times; give the "
                "adaptive echo its decisions, such as echo.replay=pattern:1000"
            )
    unsaved = {"checkpoint_every": 0}
    return {name: arm.changed(unsaved) for name, arm in arms.items()}


def kept_calibration(config: Config, workdir: epath.Path) -> dict[str, float] | None:
    """Returns an earlier call's measurements: None before the first, {} if none."""
    kept = read_json(workdir / "study.json", {"calibration": dict})
    if kept is None:
        return None
    calibration = kept["calibration"]
    if calibration and not isinstance(calibration.get("latency_s"), int | float):
        raise ValueError(
            f"{workdir / 'study.json'} is damaged: its calibration has no latency_s; "
            "use another --workdir"
        )
    if calibration.get("storage_ratio", 0.0) != config.storage_ratio:
        raise ValueError(
            f"{workdir} holds a study of another storage_ratio; resume it with the "
            "old one, or use another --workdir"
        )
    return calibration


# The result has ``storage_ratio`` and, in seconds, ``t_down_s``,
# ``t_up_without_latency_s`` and ``latency_s`` of one read. It is {} without a wanted R.
def calibrate_storage(config: Config, say: Callable[[str], Any]) -> dict[str, float]:
    """Measures the base and chooses the latency that gives the wanted R."""
    ratio, base = config.storage_ratio, RunSpec.of(config.base)
    if not ratio:
        return {}
    with errors_of_the_config():
        workload = build(base)
    say(f"Measuring a training step, to simulate a storage with R = {ratio:g}")
    rates = calibrate(base, workload, note=say)
    # Concurrent reads wait in parallel.
    readers = max(base.data.threads, 1) * max(base.data.workers, 1)
    wait_s = max(ratio * rates.t_down_s - rates.t_up_s, 0.0)
    latency_s = wait_s * readers / base.batch_size
    say(
        f"A step takes {rates.t_down_s * 1e3:.1f} ms: "
        f"a read will take {latency_s * 1e3:.2f} ms"
    )
    return {
        "storage_ratio": ratio,
        "t_down_s": rates.t_down_s,
        "t_up_without_latency_s": rates.t_up_s,
        "latency_s": latency_s,
    }


def train_arm(config: RunSpec, workdir: epath.Path, lock: FolderLock) -> int | None:
    """Trains an arm to its end; returns the update at which it diverged, or None."""
    update = read_diverged(workdir, config)
    if update is not None:
        return update
    with errors_of_the_config():
        workload, compiled = read_workload(config, workdir)
    try:
        train_checked(config, workload, workdir, compiled, lock)
    except NonFiniteLossError as error:
        write_diverged(workdir, config, workload, error)
        return error.update
    return None
