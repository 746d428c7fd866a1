"""Reads the model of a run folder without its optimizer, data or devices."""

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
    """A model after ``update`` updates, on the first device of this process."""

    update: int
    model: Model


def read_model(workdir: RunPath, update: int | None = None) -> SavedModel:
    """Reads the model of a run, by default of its newest undamaged checkpoint."""
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
        match found:
            case _Replicas():
                found = model_of(found.replicas)
            case _AnchoredReplicas():
                found = model_of(found.replicas, found.outer.anchor)
        return SavedModel(update, found)
    raise DamagedCheckpointError("; ".join(failures))


# The parts of a `LocalState`, of an `Outer`, and of a `LocalState` with one.
class _Replicas(struct.PyTreeNode):
    replicas: Model


class _Anchor(struct.PyTreeNode):
    anchor: Any


class _AnchoredReplicas(struct.PyTreeNode):
    replicas: Model
    outer: _Anchor


def _part_of(saved: dict[str, Any]) -> Model | _Replicas | _AnchoredReplicas:
    """Returns shapes and types of the part of a state to read."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shapes(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree
        )

    try:
        state = saved.get("replicas", saved)
        part = Model(shapes(state["params"]), shapes(state["model_state"]))
        if state is saved:
            return part
        if not saved["outer"]:
            return _Replicas(part)
        return _AnchoredReplicas(part, _Anchor(shapes(saved["outer"]["anchor"])))
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"a checkpoint holds no state of a training ({error!r})"
        ) from error
