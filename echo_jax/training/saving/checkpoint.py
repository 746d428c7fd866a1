"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A checkpoint holds the state on the devices and the host's part, which includes the data
position. Both are saved as one, because either without the other resumes with the
wrong data. Saving is asynchronous; an interrupted save never counts as a checkpoint.
Nothing is pickled.

A restore returns the saved state, or refuses a damaged one. It compares checksums of
all arrays and of the host's part, because Orbax does not notice a changed bit on the
disk: of 24 flips in saved arrays, it restored all in silence.
"""

import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from etils import epath

from echo_jax.files.folders import is_in_bucket
from echo_jax.terminal.failures import forget, quiet_libraries
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    is_main_process,
)
from echo_jax.training.saving.hashes import checksums, sha256_of

# How long the reads in progress take to end after another read failed.
_READS_END_S = 0.2


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read, or differs from the saved state."""


class Restored(NamedTuple):
    """The checkpoint from which a run continues."""

    update: int
    state: Any
    host: dict[str, Any]  # The host's part, plain data.
    damaged: dict[int, str]  # Reasons why newer checkpoints were skipped, by update.


class Checkpoints:
    """Saves and restores the checkpoints of a folder, and keeps the newest `keep`.

    With ``keep=0`` it only reads them, also during a run, and changes nothing.
    """

    def __init__(self, directory: epath.Path, *, keep: int):
        self._directory = directory
        # Orbax takes absolute paths alone.
        path = directory if is_in_bucket(directory) else os.path.abspath(directory)
        self._manager = ocp.CheckpointManager(
            path,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep or None,
                create=keep > 0,  # Makes missing parents too.
                # What a killed process left, so that its update can be saved again.
                cleanup_tmp_directories=keep > 0,
            ),
        )

    def latest(self) -> int | None:
        """Returns the newest update, counting a save in progress; None without one."""
        return self._manager.latest_step()

    def updates(self) -> list[int]:
        """Returns the updates of all whole checkpoints, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

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

    def restore_newest(self, abstract_state: Any) -> Restored | None:
        """Restores the newest undamaged checkpoint and sets newer ones aside."""
        damaged: dict[int, str] = {}
        for update in self.updates():
            saved, failure = None, ""
            try:
                saved = self.restore(update, abstract_state)
            except DamagedCheckpointError as error:
                failure = str(error)
            failures = [each for each in all_gather(failure) if each]
            if saved and not failures:
                for number in damaged:
                    self._set_aside(number)
                self._manager.reload()
                return Restored(update, *saved, damaged)
            damaged[update] = failures[0]
        if damaged:
            reasons = "; ".join(damaged.values())
            raise DamagedCheckpointError(
                f"no checkpoint can be used: {reasons}; start it again in "
                "another --workdir"
            )
        return None

    # The devices need not be those that saved it. With `is_part` the nodes of
    # `abstract_state` may lack saved fields, which are not read.
    def restore(
        self, update: int, abstract_state: Any, *, is_part: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Reads the state and the host's part of a checkpoint."""
        name = self._name(update)
        wanted: Any = ocp.args.StandardRestore(abstract_state)
        if is_part:
            shardings = ocp.checkpoint_utils.construct_restore_args(abstract_state)
            wanted = ocp.args.PyTreeRestore(
                abstract_state, restore_args=shardings, partial_restore=True
            )
        args = ocp.args.Composite(state=wanted, host=ocp.args.JsonRestore())
        with _one_sentence(name):
            item = self._manager.restore(update, args=args)
        state, content = item["state"], item["host"]
        if not isinstance(content, dict) or content.pop("sha256", "") != sha256_of(
            content
        ):
            raise DamagedCheckpointError(
                f"{name} is damaged: its host part is not what was saved"
            )
        saved, read = content["sums"], checksums(state)
        differing = [path for path in read if saved.get(path) != read[path]]
        is_all = is_part or len(saved) == len(read)
        if differing or not is_all:
            raise DamagedCheckpointError(
                f"{name} is damaged: {len(differing)} of {len(read)} arrays are not "
                f"what was saved, such as {(differing or [*saved])[0]}"
            )
        return state, content["host"]

    def shapes(self, update: int) -> dict[str, Any]:
        """Returns a state as nested dicts of objects with ``shape`` and ``dtype``."""
        with _one_sentence(self._name(update)):
            handler = ocp.PyTreeCheckpointHandler()
            saved = handler.metadata(self._manager.directory / str(update) / "state")
        return saved.tree

    def close(self) -> None:
        """Waits until all saves are whole."""
        with self._named_in_errors():
            self._manager.close()

    def _name(self, update: int) -> str:
        return f"the checkpoint of update {update} in {self._directory}"

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
            damaged = (f"{update}.damaged-{number}" for number in itertools.count())
            paths = (self._directory / name for name in damaged)
            free = next(path for path in paths if not path.exists())
            (self._directory / str(update)).rename(free)
        broadcast_from_first(None)


@contextlib.contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Raises one sentence for any error of Orbax or TensorStore."""
    # After a failed read, other reads go on. Their threads' errors would be printed as
    # unraisable exceptions, by asyncio's logger, and as warnings.
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        except Exception as error:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            reason = f"{type(first).__name__}: {first}".partition("\n")[0]
            time.sleep(_READS_END_S)
            forget(error)
            raise DamagedCheckpointError(
                f"{name} cannot be read ({reason:.300})"
            ) from None
