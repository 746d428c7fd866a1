"""Checks a config before it runs, and trains the variants of a study."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from echo_jax.config import Config
from echo_jax.config.run import RunSpec
from echo_jax.config.study import arm_names
from echo_jax.files.json_files import read_json
from echo_jax.files.lock import FolderInUseError, FolderLock
from echo_jax.terminal.notes import Notes
from echo_jax.training.arrays import idle_on_one_device, make_mesh
from echo_jax.training.feeds.of_config import check_data, check_echo
from echo_jax.training.loop import train_checked
from echo_jax.training.measure import calibrate
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.records.metrics import read_diverged, write_diverged
from echo_jax.training.start import Run, check_start
from echo_jax.training.window import NonFiniteLossError
from echo_jax.workloads import build
from echo_jax.workloads.base import Workload

# A variant's name is also the name of a folder, and a heading.
_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


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


def read_workload(config: RunSpec, workdir: epath.Path) -> Run:
    """Builds what is trained; checks the run, with a line on the console if slow."""
    notes = Notes(quiet=not is_main_process())
    with notes.slow("reading the data"):
        return check_start(config, build(config), workdir)


def variant_configs(config: Config) -> dict[str, RunSpec]:
    """Returns the checked training config of every variant, in order."""
    if "arms" not in config:
        raise ValueError("this config is not a study; run it with 'echo-jax train'")
    if not config.storage_ratio >= 0:
        raise ValueError(
            f"config.storage_ratio={config.storage_ratio} must be at least 0, which "
            "leaves the storage as it is"
        )
    variants = {}
    for name in arm_names(config):
        differences = config.arms[name]
        if not _VARIANT_NAME.fullmatch(name):
            raise ValueError(
                f"variant {name!r} cannot name a folder; use letters, digits, '_', '-'"
            )
        # Not through a plain dict, which loses the fields' types.
        variant = copy.deepcopy(config.base).lock()
        try:
            variant.update(differences.to_dict())
            variants[name] = RunSpec.of(variant)
            refuse_processes(variants[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"variant {name}: {error}") from error
    return variants


def check_echoes(variants: Mapping[str, RunSpec], workdir: epath.Path) -> None:
    """Refuses a study with an impossible variant, by name, before it runs."""
    # Devices first: opening the data of all variants takes long.
    for name, variant in variants.items():
        with _named(name):
            mesh = make_mesh(variant.mesh.data, variant.mesh.fsdp, variant.batch_size)
            if idle := idle_on_one_device(variant, mesh):
                raise ValueError(idle)
    for name, variant in variants.items():
        # The log of an earlier variant may not exist yet.
        is_made = variant.echo.replay.startswith(f"{workdir}/")
        with _named(name):
            checked_workload(
                variant.changed({"echo.replay": ""}) if is_made else variant
            )


@contextlib.contextmanager
def _named(variant: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"variant {variant}: {error}") from error


def ready_for_trials(variants: Mapping[str, RunSpec]) -> dict[str, RunSpec]:
    """Returns variants without fields by which two trials of a seed would differ."""
    for name, variant in variants.items():
        if variant.echo.mode == "adaptive" and not variant.echo.pattern:
            raise ValueError(
                f"variant {name}: a trial must not depend on measured times; give the "
                "adaptive echo its decisions, such as echo.replay=pattern:1000"
            )
    unsaved = {"checkpoint_every": 0}
    return {name: variant.changed(unsaved) for name, variant in variants.items()}


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


def train_variant(config: RunSpec, workdir: epath.Path, lock: FolderLock) -> int | None:
    """Trains a variant to its end; returns the update of its divergence, or None."""
    update = read_diverged(workdir, config)
    if update is not None:
        return update
    with errors_of_the_config():
        run = read_workload(config, workdir)
    try:
        train_checked(run, lock)
    except NonFiniteLossError as error:
        write_diverged(workdir, config, run.workload, error)
        return error.update
    return None
