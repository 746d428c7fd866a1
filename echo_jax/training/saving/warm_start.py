"""Begins a run with the weights of another one: ``config.init_from``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from echo_jax.files.folders import FolderError, run_folder
from echo_jax.training.saving.saved_model import read_model
from echo_jax.training.saving.weights import SUFFIX, flat_arrays, read_weights
from echo_jax.workloads.base import Variables

__all__ = ["WarmStart", "replaced", "warm_start"]

# How many arrays of each kind are named.
_MOST_NAMED = 4


@dataclass(frozen=True)
class WarmStart:
    """The arrays that a run takes from another one.

    Attributes:
      source: ``config.init_from``.
      taken: The arrays, as nested dicts: a part of the variables.
      skipped: Reasons why other arrays of the source were skipped, by name.
      made: Names of the arrays that are initialised.
    """

    source: str
    taken: Variables
    skipped: Mapping[str, str]
    made: tuple[str, ...]

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
    """Returns all arrays of a source by their names, such as ``params/head/kernel``."""
    if source.endswith(SUFFIX):
        return read_weights(source)
    return flat_arrays(read_model(run_folder(source)).model.variables)


def _some(names: Any) -> str:
    names = [*names]
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
