"""A trained model: the part of a training state to evaluate, save and use."""

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


# How many parts of a model are named, the largest first.
_MOST_NAMED = 4


class Model(struct.PyTreeNode):
    """The parameters and the other collections of a training state."""

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
    """Says how many parameters a model has, and which parts have the most."""
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
    """Writes a readable table of the model's layers to ``model.txt``."""
    (workdir / MODEL_FILE).write(_table(task))


# The cache is by value, because the trials of a search have equal tasks.
@functools.lru_cache(maxsize=8)
def _table(task: Task) -> str:
    return call_with_host_arrays(task.table)
