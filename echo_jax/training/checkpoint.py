"""Checkpoints: everything a run needs to go on as if it had never stopped."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from echo_jax.folders import RunPath, in_bucket
from echo_jax.training.distributed import fetch_global
from echo_jax.training.step import TrainState

__all__ = ["Checkpoints", "params_sha256"]


class Checkpoints:
    """One item-set per update: the state on the devices, and the host's part.

    Device state and data position are saved as one, because a checkpoint that
    holds one without the other resumes with the wrong data. Saving is asynchronous;
    a save that was cut short is never taken for a checkpoint. Nothing is pickled.

    Args:
      directory: Holds one folder per checkpoint.
      keep: How many of the newest are kept.
    """

    def __init__(self, directory: RunPath, *, keep: int):
        # create=True makes missing parents too; a stale, half-written save of an
        # killed process is removed, so that its update can be saved again.
        self._manager = ocp.CheckpointManager(
            directory if in_bucket(directory) else directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
        )

    def latest(self) -> int | None:
        """Returns the update of the newest whole checkpoint, None without one."""
        return self._manager.latest_step()

    def save(self, update: int, state: TrainState, host: dict[str, Any]) -> None:
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
        self._manager.save(
            update,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                host=ocp.args.JsonSave(host),
            ),
        )

    def restore(
        self, update: int, abstract_state: TrainState
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          update: Of a whole checkpoint.
          abstract_state: Shapes, types and shardings to restore to; these need not
            be the devices that saved it.

        Returns:
          The state, and the host's part.
        """
        item = self._manager.restore(
            update,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state),
                host=ocp.args.JsonRestore(),
            ),
        )
        return item["state"], item["host"]

    def close(self) -> None:
        """Waits until all saves are whole."""
        self._manager.wait_until_finished()
        self._manager.close()


def params_sha256(params: Any) -> str:
    """Hashes parameters: names, types, shapes and every bit.

    Args:
      params: A pytree of arrays, sharded in any way.

    Returns:
      64 hexadecimal digits; equal for equal parameters on any mesh.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        value = np.ascontiguousarray(fetch_global(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} ".encode())
        digest.update(f"{value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
