"""Reads the model of a run folder alone; begins a run with it: ``config.init_from``."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import struct, traverse_util

from echo_jax.files.folders import FolderError, run_folder
from echo_jax.training.saving.checkpoint_reader import (
    CheckpointReader,
    DamagedCheckpointError,
)
from echo_jax.training.saving.model import Model
from echo_jax.training.saving.weights import SUFFIX, flat_arrays, read_weights
from echo_jax.training.update.local import model_of
from echo_jax.workloads.base import Variables

# How many arrays of each kind are named.
_MOST_NAMED = 4


@dataclass(frozen=True)
class WarmStart:
    """The arrays that a run takes from another one."""

    source: str  # ``config.init_from``.
    taken: Variables  # The arrays, as nested dicts: a part of the variables.
    # Reasons why other arrays of the source were skipped, by name.
    skipped: Mapping[str, str]
    made: tuple[str, ...]  # Names of the arrays that are initialised.

    def report(self) -> dict[str, Any]:
        """Returns a record for the run folder, as plain data."""
        taken = sorted(traverse_util.flatten_dict(self.taken, sep="/"))
        return {
            "source": self.source,
            "taken": taken,
            "skipped": dict(self.skipped),
            "made": [*self.made],
        }

    def __str__(self) -> str:
        parts = [f"init_from={self.source}: {len(self.report()['taken'])} arrays taken"]
        if self.skipped:
            why = [f"{name} ({reason})" for name, reason in self.skipped.items()]
            parts.append(f"{len(why)} skipped: {_some(why)}")
        if self.made:
            parts.append(f"{len(self.made)} made anew: {_some(self.made)}")
        return "; ".join(parts)


def warm_start(source: str, shapes: Variables) -> WarmStart:
    """Reads the arrays of the same name and shape from a run or a weights file."""
    try:
        found = _arrays_of(source)
    except (FolderError, ValueError) as error:
        raise ValueError(f"config.init_from={source!r}: {error}") from error
    wanted: dict[str, Any] = traverse_util.flatten_dict(shapes, sep="/")
    taken, skipped = {}, {}
    for name, array in found.items():
        if name not in wanted:
            skipped[name] = "not in this model"
        elif array.shape != wanted[name].shape:
            skipped[name] = f"{array.shape} there, {wanted[name].shape} here"
        else:
            taken[name] = array
    if not taken:
        raise ValueError(
            f"config.init_from={source!r} has no array that this model has, too, such "
            f"as {next(iter(wanted))} {next(iter(wanted.values())).shape}; name a run "
            "of the same model, or set --config.init_from=''"
        )
    made = tuple(name for name in wanted if name not in taken)
    return WarmStart(
        source, traverse_util.unflatten_dict(taken, sep="/"), skipped, made
    )


def replaced(variables: Variables, taken: Variables) -> Variables:
    """Returns variables with the taken arrays in their place, cast to their types."""
    if not taken:
        return dict(variables)
    flat: dict[Any, Any] = traverse_util.flatten_dict(variables, keep_empty_nodes=True)
    for path, array in traverse_util.flatten_dict(taken).items():
        flat[path] = jnp.asarray(array, flat[path].dtype)
    return traverse_util.unflatten_dict(flat)


def _arrays_of(source: str) -> dict[str, np.ndarray]:
    if source.endswith(SUFFIX):
        return read_weights(source)
    return flat_arrays(read_model(run_folder(source)).model.variables)


def _some(names: Any) -> str:
    names = [*names]
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class SavedModel(NamedTuple):
    """A model after ``update`` updates, on the first device of this process."""

    update: int
    model: Model


def read_model(workdir: epath.Path, update: int | None = None) -> SavedModel:
    """Reads the model of a run, by default of its newest undamaged checkpoint."""
    if not (workdir / "checkpoints").exists():
        raise ValueError(f"{workdir} holds no checkpoint yet; train it for longer")
    reader = CheckpointReader(workdir / "checkpoints")
    try:
        return _restore(reader, workdir, update)
    finally:
        reader.close()


def _restore(
    reader: CheckpointReader, folder: epath.Path, wanted: int | None
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
