"""Refuses an impossible config before a command begins."""

import contextlib
from collections.abc import Iterator

from rich.console import Console

from echo_jax.config import Config
from echo_jax.files.lock import FolderInUseError
from echo_jax.terminal.notes import Notes
from echo_jax.training.feeds.of_config import check_data, check_echo
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.processes.sharding import make_mesh
from echo_jax.workloads import build
from echo_jax.workloads.base import Workload

__all__ = [
    "ConfigRefusedError",
    "checked_workload",
    "errors_of_the_config",
    "read_workload",
    "refuse_processes",
]


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


def refuse_processes(config: Config) -> None:
    """Refuses a config of several processes."""
    wanted = config.distributed.num_processes
    if wanted > 1:
        raise ValueError(
            f"config.distributed.num_processes={wanted}: a study and a probe run in "
            "one process; train in several with 'echo-jax train'"
        )


def checked_workload(config: Config) -> Workload:
    """Returns the workload of a checked config, after a check of data and echo."""
    workload = build(config)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.batch_size)
    check_echo(config, workload, mesh)
    check_data(config, workload)
    return workload


def read_workload(config: Config) -> Workload:
    """Returns `checked_workload`, with a line on the console if it is slow."""
    notes = Notes(Console(quiet=not is_main_process()))
    with notes.slow("reading the data"):
        return checked_workload(config)
