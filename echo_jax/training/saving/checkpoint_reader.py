"""Reads checkpoints: a restore returns the saved state, or refuses a damaged one."""

import contextlib
import hashlib
import json
import os
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import orbax.checkpoint as ocp

from echo_jax.files.folders import RunPath
from echo_jax.terminal.failures import forget, quiet_libraries
from echo_jax.training.processes.distributed import (
    broadcast_from_first,
    is_main_process,
)
from echo_jax.training.saving.checksum import checksums

__all__ = ["CheckpointReader", "DamagedCheckpointError", "sha256_of"]

State = TypeVar("State")

# Larger files hold arrays, which have checksums of their own.
_SUMMED_BYTES = 1 << 18
# How long the reads in progress take to end after another read failed.
_READS_END_S = 0.2


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read, or differs from the saved state."""


class CheckpointReader:
    """Reads the whole checkpoints of a folder, also during a run; changes nothing."""

    def __init__(
        self,
        directory: RunPath,
        options: ocp.CheckpointManagerOptions | None = None,
    ):
        self._directory = directory
        path = directory.for_others()
        self._manager = ocp.CheckpointManager(
            path if directory.in_bucket else path.absolute(),
            options=options or ocp.CheckpointManagerOptions(create=False),
        )

    def latest(self) -> int | None:
        """Returns the newest update, counting a save in progress; None without one."""
        return self._manager.latest_step()

    def updates(self) -> list[int]:
        """Returns the updates of all whole checkpoints, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    # The devices need not be those that saved it. With `is_part` the nodes of
    # `abstract_state` may lack saved fields, which are not read.
    def restore(
        self, update: int, abstract_state: State, *, is_part: bool = False
    ) -> tuple[State, dict[str, Any]]:
        """Reads the state and the host's part of a checkpoint."""
        where = self._check_files(update)
        wanted: Any = ocp.args.StandardRestore(abstract_state)
        if is_part:
            wanted = ocp.args.PyTreeRestore(
                item=abstract_state,
                restore_args=ocp.checkpoint_utils.construct_restore_args(
                    abstract_state
                ),
                partial_restore=True,
            )
        with _one_sentence(where):
            item = self._manager.restore(
                update,
                args=ocp.args.Composite(
                    state=wanted,
                    host=ocp.args.JsonRestore(),
                ),
            )
        state, content = item["state"], item["host"]
        if not isinstance(content, dict) or content.pop("sha256", "") != sha256_of(
            content
        ):
            raise DamagedCheckpointError(
                f"{where} is damaged: its host part is not what was saved"
            )
        saved, found = content["sums"], checksums(state)
        differing = [path for path in found if saved.get(path) != found[path]]
        is_all = is_part or len(saved) == len(found)
        if differing or not is_all:
            raise DamagedCheckpointError(
                f"{where} is damaged: {len(differing)} of {len(found)} arrays are not "
                f"what was saved, such as {(differing or [*saved])[0]}"
            )
        return state, content["host"]

    def shapes(self, update: int) -> dict[str, Any]:
        """Returns a state as nested dicts of objects with ``shape`` and ``dtype``."""
        where = self._check_files(update)
        with _one_sentence(where):
            handler = ocp.PyTreeCheckpointHandler()
            found = handler.metadata(self._manager.directory / str(update) / "state")
        return found.tree

    def _check_files(self, update: int) -> str:
        """Returns a checkpoint's name for errors, if its files are as saved."""
        where = f"the checkpoint of update {update} in {self._directory}"
        differing = broadcast_from_first(
            self._differing_files(update) if is_main_process() else []
        )
        if differing:
            raise DamagedCheckpointError(
                f"{where} is damaged: {differing[0]} is not what was saved"
            )
        return where

    def close(self) -> None:
        self._manager.close()

    def _differing_files(self, update: int) -> list[str]:
        """Returns the files of a checkpoint that differ from the saved ones."""
        try:
            content = json.loads(self._sums_of(update).read_text())
            is_whole = content.pop("sha256") == sha256_of(content)
            saved = content["files"] if is_whole else {}
        except (AttributeError, KeyError, OSError, TypeError, ValueError):
            return []
        if not saved:
            return []
        found = self._file_sums(update)
        names = sorted(saved.keys() | found.keys())
        return [name for name in names if saved.get(name) != found.get(name)]

    def _file_sums(self, update: int) -> dict[str, str]:
        """Returns the size of each file, and the CRC-32 of small ones, by path."""
        folder = str(Path(self._directory / str(update)))
        return {
            os.path.relpath(path, folder): _sum(path)
            for within, _, names in os.walk(folder)
            for path in [os.path.join(within, name) for name in names]
        }

    def _sums_of(self, update: int | str) -> RunPath:
        return self._directory / f"{update}.sums.json"


@contextlib.contextmanager
def _one_sentence(where: str) -> Iterator[None]:
    """Raises one sentence for any error of Orbax or TensorStore."""
    # After a failed read, other reads go on. Their threads' errors would be printed as
    # unraisable exceptions, by asyncio's logger, and as warnings. They are dropped if
    # a read fails, and shown otherwise.
    hook, kept = sys.unraisablehook, []
    sys.unraisablehook = kept.append
    try:
        yield
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        reason = f"{type(first).__name__}: {first}".partition("\n")[0]
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            time.sleep(_READS_END_S)
            forget(error)
        kept.clear()
        raise DamagedCheckpointError(
            f"{where} cannot be read ({reason:.300})"
        ) from None
    finally:
        sys.unraisablehook = hook
        for each in kept:
            hook(each)


def _sum(path: str) -> str:
    size = os.stat(path).st_size
    if size > _SUMMED_BYTES:
        return str(size)
    with open(path, "rb") as file:
        return f"{size}:{zlib.crc32(file.read()):08x}"


def sha256_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
