"""The model of a run folder, alone: without its optimizer, its data or its devices."""

import warnings
from typing import Any, NamedTuple

import jax
from flax import struct

from echo_jax.files.folders import RunPath
from echo_jax.training.saving.checkpoint_reader import (
    CheckpointReader,
    DamagedCheckpointError,
)
from echo_jax.training.saving.model import Model
from echo_jax.training.update.local import model_of

__all__ = ["SavedModel", "read_model"]


class SavedModel(NamedTuple):
    """A trained model.

    Attributes:
      update: Updates done.
      model: On the first device of this process.
    """

    update: int
    model: Model


def read_model(workdir: RunPath, update: int | None = None) -> SavedModel:
    """Reads the model of a run, whatever devices it was trained on.

    A run that is still training, or that replicas share, can be read as well; nothing
    in the folder is changed.

    Args:
      workdir: The run folder.
      update: Of which checkpoint; None for the newest. Where that one is damaged, the
        one before it is read, and a warning says so.

    Raises:
      ValueError: The folder holds no whole checkpoint, or none of that update.
      DamagedCheckpointError: What it holds is not what was saved.
      FolderError: What lies there is no file.
    """
    if not (workdir / "checkpoints").exists():
        raise ValueError(f"{workdir} holds no checkpoint yet; train it for longer")
    reader = CheckpointReader(workdir / "checkpoints")
    try:
        return _restore(reader, workdir, update)
    finally:
        reader.close()


def _restore(
    reader: CheckpointReader, folder: RunPath, wanted: int | None
) -> SavedModel:
    there = reader.updates()
    if not there:
        raise ValueError(f"{folder} holds no whole checkpoint yet; train it for longer")
    if wanted is not None and wanted not in there:
        raise ValueError(
            f"{folder} holds no checkpoint of update {wanted}; it holds "
            f"{', '.join(map(str, sorted(there)))}"
        )
    failures: list[str] = []
    for update in there if wanted is None else [wanted]:
        try:
            part = _part_of(reader.shapes(update))
            found, _ = reader.restore(update, part, is_part=True)
        except DamagedCheckpointError as error:
            failures.append(str(error))
            continue
        for each in failures:
            warnings.warn(f"{each}; that of update {update} is used", stacklevel=2)
        return SavedModel(update, found.model())
    raise DamagedCheckpointError("; ".join(failures))


class _State(struct.PyTreeNode):
    """The part of a `TrainState` that a model is made of."""

    params: Any
    model_state: Any

    def model(self) -> Model:
        return Model(self.params, self.model_state)


class _Replicas(struct.PyTreeNode):
    """That of a `LocalState`."""

    replicas: _State

    def model(self) -> Model:
        return model_of(self.replicas)


class _Anchor(struct.PyTreeNode):
    """That of its `Outer`."""

    anchor: Any


class _AnchoredReplicas(struct.PyTreeNode):
    """That of a `LocalState` with an outer optimizer."""

    replicas: _State
    outer: _Anchor

    def model(self) -> Model:
        return model_of(self.replicas, self.outer.anchor)


def _part_of(saved: dict[str, Any]) -> _State | _Replicas | _AnchoredReplicas:
    """Returns shapes and types of what is read of a state."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shapes(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree
        )

    try:
        state = saved.get("replicas", saved)
        part = _State(shapes(state["params"]), shapes(state["model_state"]))
        if state is saved:
            return part
        if not saved["outer"]:
            return _Replicas(part)
        return _AnchoredReplicas(part, _Anchor(shapes(saved["outer"]["anchor"])))
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"a checkpoint holds no state of a training ({error!r})"
        ) from error
