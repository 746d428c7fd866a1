"""Checkpoints: everything a run needs to go on as if it had never stopped."""

import contextlib
import gc
import hashlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from echo_jax.folders import RunPath
from echo_jax.training.checksum import checksums
from echo_jax.training.distributed import (
    all_gather,
    broadcast_from_first,
    fetch_global,
    is_main_process,
)

__all__ = ["Checkpoints", "DamagedCheckpointError", "Restored", "params_sha256"]

State = TypeVar("State")

# Larger files hold arrays, which have checksums of their own.
_SUMMED_BYTES = 1 << 18
# How long reads take that are under way where another failed.
_READS_END_S = 0.2
# How long the end of a run is held up for a save under way.
_SETTLE_S = 5.0


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read, or holds something else than was saved."""


class Restored(NamedTuple, Generic[State]):
    """What a run goes on from.

    Attributes:
      update: Updates done.
      state: On the devices.
      host: The host's part, plain data.
      damaged: What is wrong with newer checkpoints, which were passed over.
    """

    update: int
    state: State
    host: dict[str, Any]
    damaged: dict[int, str]


class Checkpoints:
    """One item-set per update: the state on the devices, and the host's part.

    Device state and data position are saved as one, because a checkpoint that
    holds one without the other resumes with the wrong data. Saving is asynchronous;
    a save that was cut short is never taken for a checkpoint. Nothing is pickled.

    A checkpoint holds the checksums of all its arrays and of the host's part, and what
    is restored is compared with them: see `training.checksum`. And beside it lie the
    sizes of its files and the checksums of the small ones, by which Orbax lays out what
    it reads, so that it never sees a damaged one. They are written with the next save,
    or the close; the last checkpoint of a run that is killed is read without. A
    bucket's objects have checksums of the service's.

    Args:
      directory: Holds one folder per checkpoint.
      keep: How many of the newest are kept.
    """

    def __init__(self, directory: RunPath, *, keep: int):
        # create=True makes missing parents too; a stale, half-written save of an
        # killed process is removed, so that its update can be saved again.
        self._directory = directory
        path = directory.for_others()
        self._manager = ocp.CheckpointManager(
            path if directory.in_bucket else path.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
        )
        self._unsealed: int | None = None  # the checkpoint whose files have no sums
        self._sealing = ThreadPoolExecutor(1)

    def latest(self) -> int | None:
        """Returns the update of the newest whole checkpoint, None without one.

        The one that is being saved counts; see `settle`.
        """
        return self._manager.latest_step()

    def settle(self) -> bool:
        """Waits for a save under way, for seconds; returns whether all are whole."""
        end = time.monotonic() + _SETTLE_S
        while self._manager.is_saving_in_progress():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def save(self, update: int, state: Any, host: dict[str, Any]) -> None:
        """Starts a save; does nothing if this update is saved already.

        Args:
          update: Updates done.
          state: On the devices; may be donated as soon as the call returns.
          host: Plain data, integers of any size.

        Raises:
          TypeError: The host's part is not plain data.
        """
        if update == self.latest():
            return
        # Orbax writes it later, in another thread: a copy does not change until
        # then, and what JSON cannot hold is found out here.
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
                    host=ocp.args.JsonSave({**content, "sha256": _sha256(content)}),
                ),
            )

    def restore(
        self, update: int, abstract_state: State
    ) -> tuple[State, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          update: Of a whole checkpoint.
          abstract_state: Shapes, types and shardings to restore to; these need not
            be the devices that saved it.

        Returns:
          The state, and the host's part.

        Raises:
          DamagedCheckpointError: It cannot be read, or is not what was saved.
        """
        where = f"the checkpoint of update {update} in {self._directory}"
        differing = broadcast_from_first(
            self._differing_files(update) if is_main_process() else []
        )
        if differing:
            raise DamagedCheckpointError(
                f"{where} is damaged: {differing[0]} is not what was saved"
            )
        with _one_sentence(where):
            item = self._manager.restore(
                update,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract_state),
                    host=ocp.args.JsonRestore(),
                ),
            )
        state, content = item["state"], item["host"]
        if isinstance(content, dict) and "sums" not in content:
            raise DamagedCheckpointError(
                f"{where} was saved by an earlier version, whose checksums are not "
                "known to this one"
            )
        if not isinstance(content, dict) or content.pop("sha256", "") != _sha256(
            content
        ):
            raise DamagedCheckpointError(
                f"{where} is damaged: its host part is not what was saved"
            )
        saved, found = content["sums"], checksums(state)
        differing = [path for path in found if saved.get(path) != found[path]]
        if differing or len(saved) != len(found):
            raise DamagedCheckpointError(
                f"{where} is damaged: {len(differing)} of {len(found)} arrays are not "
                f"what was saved, such as {(differing or [*saved])[0]}"
            )
        return state, content["host"]

    def restore_newest(self, abstract_state: State) -> Restored[State] | None:
        """Reads the newest checkpoint that is not damaged, and sets newer ones aside.

        Args:
          abstract_state: See `restore`.

        Returns:
          None where there is no checkpoint.

        Raises:
          DamagedCheckpointError: All that there are.
        """
        damaged: dict[int, str] = {}
        for update in sorted(self._manager.all_steps(), reverse=True):
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
        """Says where it was, in errors of the system on files that Orbax has open."""
        try:
            yield
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(self._directory)
            raise

    def _seal(self) -> None:
        """Has the checksums noted of the files of the last checkpoint, now whole."""
        with self._named_in_errors():
            self._manager.wait_until_finished()
        if self._unsealed is None or self._directory.in_bucket or not is_main_process():
            return
        self._sealing.submit(self._note_sums, self._unsealed)
        self._unsealed = None

    def _note_sums(self, update: int) -> None:
        # It may be removed meanwhile, as one too many.
        with contextlib.suppress(FileNotFoundError):
            content = {"files": self._file_sums(update)}
            text = json.dumps({**content, "sha256": _sha256(content)}, indent=1)
            self._sums_of(update).write(text + "\n")
        for path in Path(self._directory).glob("*.sums.json"):
            number = path.name.partition(".")[0]
            if not path.with_name(number).exists():
                self._forget_sums(number)

    def _forget_sums(self, update: int | str) -> None:
        if not self._directory.in_bucket and is_main_process():
            Path(self._sums_of(update)).unlink(missing_ok=True)

    def _differing_files(self, update: int) -> list[str]:
        """Returns the files of a checkpoint that are not as they were."""
        try:
            content = json.loads(self._sums_of(update).read_text())
            is_whole = content.pop("sha256") == _sha256(content)
            saved = content["files"] if is_whole else {}
        except (AttributeError, KeyError, OSError, TypeError, ValueError):
            return []
        if not saved:
            return []
        found = self._file_sums(update)
        names = sorted(saved.keys() | found.keys())
        return [name for name in names if saved.get(name) != found.get(name)]

    def _file_sums(self, update: int) -> dict[str, str]:
        """Returns the size of every file of a checkpoint, of small ones the CRC-32."""
        folder = str(Path(self._directory / str(update)))
        return {
            os.path.relpath(path, folder): _sum(path)
            for within, _, names in os.walk(folder)
            for path in [os.path.join(within, name) for name in names]
        }

    def _sums_of(self, update: int | str) -> RunPath:
        return self._directory / f"{update}.sums.json"

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
        self._manager.close()


def params_sha256(params: Any) -> str:
    """Hashes parameters: names, types, shapes and every bit.

    All processes have to call it.

    Args:
      params: A pytree of arrays, sharded in any way.

    Returns:
      64 hexadecimal digits; equal for equal parameters on any mesh.

    Raises:
      RuntimeError: The processes hold different ones: they did not train the same
        model.
    """
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


@contextlib.contextmanager
def _one_sentence(where: str) -> Iterator[None]:
    """Raises one sentence for whatever Orbax and TensorStore stumble over.

    Where one read fails, others are under way, and what their threads run into would
    be printed: as exceptions that nobody can be raised, by the logger of asyncio, and
    as warnings. It is kept back, and lost where a read fails.
    """
    hook, kept = sys.unraisablehook, []
    sys.unraisablehook = kept.append
    try:
        yield
    except Exception as error:
        reason = _first_cause(error)
        sys.unraisablehook = _ignore
        kept.clear()
        _forget(error)
        raise DamagedCheckpointError(
            f"{where} cannot be read ({reason:.300})"
        ) from None
    finally:
        sys.unraisablehook = hook
        for each in kept:
            hook(each)


def _ignore(unraisable: object) -> None:
    del unraisable


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _forget(error: BaseException | None) -> None:
    """Lets go what a failed restore holds, when the reads under way have ended."""
    logger = logging.getLogger("asyncio")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error.__traceback__, error = None, error.__context__
            time.sleep(_READS_END_S)
            gc.collect()
    finally:
        logger.setLevel(level)


def _sum(path: str) -> str:
    size = os.stat(path).st_size
    if size > _SUMMED_BYTES:
        return str(size)
    with open(path, "rb") as file:
        return f"{size}:{zlib.crc32(file.read()):08x}"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
