"""Options that commands share, and the end of a command that failed."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from etils import epath

from echo_jax.config import Config, load_with_flags
from echo_jax.files.folders import FolderError, run_folder, typed_path
from echo_jax.terminal.failures import sentence

FAILED = 1
"""The exit status of a command that failed."""

WRONG_USE = 2
"""The exit status of a command that cannot be run as it was typed."""


class Exit(Exception):
    """The end of a command without success; `status` is the exit status."""

    def __init__(self, message: str | BaseException, status: int = WRONG_USE):
        is_error = isinstance(message, BaseException)
        super().__init__(sentence(message) if is_error else message)
        self.status = status


# The module is an argument because importing it imports jax.
@contextlib.contextmanager
def exits_of(runs: ModuleType) -> Iterator[None]:
    """Turns the errors of the module `echo_jax.runs` into exits."""
    try:
        yield
    except (runs.ConfigRefusedError, FolderError) as error:
        raise Exit(error) from error
    except (runs.DamagedCheckpointError, runs.NonFiniteLossError) as error:
        raise Exit(error, FAILED) from error
    except (
        runs.DataTimeoutError,
        runs.Interrupted,
        runs.LostWorkerError,
        runs.StudyStopped,
    ) as error:
        raise Exit(error, error.exit_code) from error


def add_number(
    parser: argparse.ArgumentParser, flag: str, default: float, metavar: str, about: str
) -> None:
    """Adds an option that takes a number of the default's type."""
    said = f"{about} (default: %(default)g)"
    parser.add_argument(
        flag, type=type(default), default=default, metavar=metavar, help=said
    )


def path_argument(text: str) -> Path:
    """Reads a local path, as a type for `argparse`; refuses ``""``."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path; name one")
    try:
        return typed_path(text)
    except FolderError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def typed_folder(path: str) -> epath.Path:
    """Opens a run folder; exits if that is impossible."""
    try:
        return run_folder(path)
    except FolderError as error:
        raise Exit(error) from error


def typed_config(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config with its flags; exits if that is impossible."""
    try:
        return load_with_flags(path, flags_given)
    except OSError as error:
        raise Exit(error) from error
    except (AttributeError, TypeError, ValueError) as error:
        # The message may be the config file's own, for example about its variants.
        raise Exit(str(error)) from error
