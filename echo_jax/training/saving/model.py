"""A trained model: the part of a training state that is evaluated, saved and used."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import struct

from echo_jax.files.folders import RunPath
from echo_jax.training.processes.distributed import call_with_host_arrays
from echo_jax.workloads.base import Task

__all__ = ["MODEL_FILE", "Model", "size_of", "write_table"]

MODEL_FILE = "model.txt"


# Parts of a model that are named by their size.
_MOST_NAMED = 4


class Model(struct.PyTreeNode):
    """A state without what training alone needs.

    Attributes:
      params: The parameters.
      model_state: The collections other than them.
    """

    params: Any
    model_state: Any

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> "Model":
        """Returns the model of a task's variables."""
        others = {name: x for name, x in variables.items() if name != "params"}
        return cls(variables["params"], others)

    @property
    def variables(self) -> dict[str, Any]:
        """All collections, as a task takes them."""
        return {"params": self.params, **self.model_state}


def size_of(params: Any) -> str:
    """Returns how many parameters a model has, and where the most of them are.

    Args:
      params: Nested dicts of arrays, or of their shapes.

    Example:
      >>> size_of({"head": {"kernel": jnp.ones((300, 10))}, "bias": jnp.ones(10)})
      '3,010 parameters in 2 arrays: head 3,000, bias 10'
    """
    leaves = jax.tree.leaves_with_path(params)
    parts: dict[str, int] = {}
    for path, array in leaves:
        part = jax.tree_util.keystr(path[:1], simple=True)
        parts[part] = parts.get(part, 0) + math.prod(array.shape)
    largest = sorted(parts, key=lambda part: -parts[part])[:_MOST_NAMED]
    named = ", ".join(f"{part} {parts[part]:,}" for part in largest)
    rest = len(parts) - len(largest)
    more = f" and {rest} more" if rest else ""
    total = sum(parts.values())
    return f"{total:,} parameters in {len(leaves)} arrays: {named}{more}"


def write_table(workdir: RunPath, task: Task) -> None:
    """Writes what a model consists of to ``model.txt``, for people.

    Args:
      workdir: The run folder.
      task: The model's.
    """
    (workdir / MODEL_FILE).write(_table(task))


@functools.lru_cache(maxsize=8)
def _table(task: Task) -> str:
    """Is kept by value, because the trials of a search have equal tasks."""
    return call_with_host_arrays(task.table)
