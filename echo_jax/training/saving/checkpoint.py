"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A checkpoint holds the state on the devices and the host's part, which includes the data
position. Both are saved as one, because either without the other resumes with the
wrong data. Saving is asynchronous; an interrupted save never counts as a checkpoint.
Nothing is pickled.

A checkpoint also holds checksums of all its arrays and of the host's part. A restore
compares them: see `checkpoint_reader`. A file beside it holds the sizes of its
files and the checksums of the small ones. Orbax reads the layout from those, so they
are checked first. The next save or the close writes that file. A killed run's last
checkpoint is read without it. In a bucket, the service keeps checksums of the objects.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from echo_jax.files.folders import RunPath
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    fetch_global,
    is_main_process,
)
from echo_jax.training.saving.checkpoint_reader import (
    CheckpointReader,
    DamagedCheckpointError,
    checksums,
    sha256_of,
)

State = TypeVar("State")

# How long the end of a run is delayed for a save in progress.
_SETTLE_S = 5.0


class Restored(NamedTuple, Generic[State]):
    """The checkpoint from which a run continues."""

    update: int
    state: State
    host: dict[str, Any]  # The host's part, plain data.
    damaged: dict[int, str]  # Reasons why newer checkpoints were skipped, by update.


class Checkpoints(CheckpointReader):
    """Saves and restores the checkpoints of a folder; keeps the newest `keep`."""

    def __init__(self, directory: RunPath, *, keep: int):
        # create=True makes missing parents too. A killed process's half-written save is
        # removed, so that its update can be saved again.
        super().__init__(
            directory,
            ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
        )
        self._unsealed: int | None = None  # The checkpoint whose files have no sums.
        self._sealing = ThreadPoolExecutor(1)

    def settle(self) -> bool:
        """Waits `_SETTLE_S` for a save to finish; returns whether all are whole."""
        end = time.monotonic() + _SETTLE_S
        while self._manager.is_saving_in_progress():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def save(self, update: int, state: Any, host: dict[str, Any]) -> None:
        """Starts a save unless this update is saved; then the state may be donated."""
        if update == self.latest():
            return
        # Orbax writes it later, in another thread: a copy does not change until then,
        # and a value that JSON cannot hold raises here.
        host = json.loads(json.dumps(host, allow_nan=False))
        content = {"sums": checksums(state), "host": host}
        self._seal()
        self._forget_sums(update)
        self._unsealed = update
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

    def _seal(self) -> None:
        """Starts to write the checksums of the last checkpoint's files, now whole."""
        with self._named_in_errors():
            self._manager.wait_until_finished()
        if self._unsealed is None or self._directory.in_bucket or not is_main_process():
            return
        self._sealing.submit(self._note_sums, self._unsealed)
        self._unsealed = None

    def _note_sums(self, update: int) -> None:
        # Orbax may remove it meanwhile, if there are more than `keep`.
        with contextlib.suppress(FileNotFoundError):
            content = {"files": self._file_sums(update)}
            text = json.dumps({**content, "sha256": sha256_of(content)}, indent=1)
            self._sums_of(update).write(text + "\n")
        for path in Path(self._directory).glob("*.sums.json"):
            number = path.name.partition(".")[0]
            if not path.with_name(number).exists():
                self._forget_sums(number)

    def _forget_sums(self, update: int | str) -> None:
        if not self._directory.in_bucket and is_main_process():
            Path(self._sums_of(update)).unlink(missing_ok=True)

    def _set_aside(self, update: int) -> None:
        """Renames a damaged checkpoint, so that its update can be saved again."""
        if is_main_process():
            path = self._directory.for_others()
            number = 0
            while (aside := path / f"{update}.damaged-{number}").exists():
                number += 1
            (path / str(update)).rename(aside)
            self._forget_sums(update)
        broadcast_from_first(None)

    def close(self) -> None:
        """Waits until all saves are whole."""
        self._seal()
        self._sealing.shutdown()
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
