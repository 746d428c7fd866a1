"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A checkpoint holds the state on the devices and the host's part, which includes the data
position. Both are saved as one, because either without the other resumes with the
wrong data. Saving is asynchronous; an interrupted save never counts as a checkpoint.
Nothing is pickled.

A checkpoint also holds checksums of its arrays and of the host's part. A restore
compares them: see `checkpoint_reader`.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from echo_jax.training.arrays import fetch_global
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    is_main_process,
)
from echo_jax.training.saving.checkpoint_reader import (
    CheckpointReader,
    DamagedCheckpointError,
    checksums,
    sha256_of,
)

State = TypeVar("State")


class Restored(NamedTuple, Generic[State]):
    """The checkpoint from which a run continues."""

    update: int
    state: State
    host: dict[str, Any]  # The host's part, plain data.
    damaged: dict[int, str]  # Reasons why newer checkpoints were skipped, by update.


class Checkpoints(CheckpointReader):
    """Saves and restores the checkpoints of a folder; keeps the newest `keep`."""

    def __init__(self, directory: epath.Path, *, keep: int):
        # create=True makes missing parents too. A killed process's half-written save is
        # removed, so that its update can be saved again.
        super().__init__(
            directory,
            ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
        )

    def save(self, update: int, state: Any, host: dict[str, Any]) -> None:
        """Starts a save unless this update is saved; then the state may be donated."""
        if update == self.latest():
            return
        # Orbax writes it later, in another thread: a copy does not change until then,
        # and a value that JSON cannot hold raises here.
        host = json.loads(json.dumps(host, allow_nan=False))
        content = {"sums": checksums(state), "host": host}
        with self._named_in_errors():
            self._manager.save(
                update,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    host=ocp.args.JsonSave({**content, "sha256": sha256_of(content)}),
                ),
            )

    def restore_newest(self, abstract_state: State) -> Restored[State] | None:
        """Restores the newest undamaged checkpoint and sets newer ones aside."""
        damaged: dict[int, str] = {}
        for update in self.updates():
            found, failure = None, ""
            try:
                found = self.restore(update, abstract_state)
            except DamagedCheckpointError as error:
                failure = str(error)
            failures = [each for each in all_gather(failure) if each]
            if found and not failures:
                for number in damaged:
                    self._set_aside(number)
                self._manager.reload()
                return Restored(update, *found, damaged)
            damaged[update] = failures[0]
        if damaged:
            reasons = "; ".join(damaged.values())
            raise DamagedCheckpointError(
                f"no checkpoint can be gone on from: {reasons}; start the run anew in "
                "another --workdir"
            )
        return None

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(self._directory)
            raise

    def _set_aside(self, update: int) -> None:
        """Renames a damaged checkpoint, so that its update can be saved again."""
        if is_main_process():
            path = self._directory
            number = 0
            while (aside := path / f"{update}.damaged-{number}").exists():
                number += 1
            (path / str(update)).rename(aside)
        broadcast_from_first(None)

    def close(self) -> None:
        """Waits until all saves are whole."""
        with self._named_in_errors():
            super().close()


def params_sha256(params: Any) -> str:
    """Hashes parameters on any mesh, in 64 hex digits; all processes call it."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        value = np.ascontiguousarray(fetch_global(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} ".encode())
        digest.update(f"{value.shape}\n".encode())
        digest.update(value.tobytes())
    found = all_gather(digest.hexdigest())
    if len({*found}) > 1:
        raise RuntimeError(
            f"the processes ended with different parameters: {', '.join(found)}; "
            "nothing of this run is to be trusted"
        )
    return found[0]
