"""The model of a training state, and the files of a run folder that describe it.

``task.json`` holds the parts of a task beside its config, such as the names of classes,
so that the model can be used without the data. Files of the task, such as a
tokenizer's, are in the same folder.
"""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from flax import struct

from echo_jax.files.folders import is_name, write
from echo_jax.files.json_files import DamagedFileError, read_json, write_json
from echo_jax.training.arrays import call_with_host_arrays
from echo_jax.workloads.base import Task, Workload

MODEL_FILE, TASK_FILE = "model.txt", "task.json"

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
    parts: Counter[str] = Counter()
    for path, array in leaves:
        parts[jax.tree_util.keystr(path[:1], simple=True)] += math.prod(array.shape)
    largest = parts.most_common(_MOST_NAMED)
    named = ", ".join(f"{part} {size:,}" for part, size in largest)
    rest = len(parts) - len(largest)
    more = f" and {rest} more" if rest else ""
    return f"{parts.total():,} parameters in {len(leaves)} arrays: {named}{more}"


def write_table(workdir: epath.Path, task: Task) -> None:
    """Writes a readable table of the model's layers to ``model.txt``."""
    write(workdir / MODEL_FILE, _table(task))


# The cache is by value, because the trials of a search have equal tasks.
@functools.lru_cache(maxsize=8)
def _table(task: Task) -> str:
    return call_with_host_arrays(task.table)


def write_task(workdir: epath.Path, workload: Workload) -> None:
    """Writes ``task.json`` and the task's files to the run folder."""
    for name, content in workload.task_files.items():
        write(workdir / name, content)
    files = workload.task_files.items()
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files}
    write_json(workdir / TASK_FILE, {"info": dict(workload.task_info), "files": hashes})


def read_task(workdir: epath.Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns a run's `Workload.task_info` and `Workload.task_files`, as written."""
    path = workdir / TASK_FILE
    content = read_json(path, {"info": dict, "files": dict})
    if content is None:
        raise ValueError(
            f"{workdir} holds no {TASK_FILE}, which says what the model's outputs "
            "mean: it is no run folder, or one of an earlier echo_jax; name the "
            "--workdir of 'echo-jax train'"
        )
    files = {}
    for name, wanted in content["files"].items():
        if not is_name(name):
            raise DamagedFileError(path, f"{name!r} is no name of a file")
        try:
            files[name] = (workdir / name).read_bytes()
        except FileNotFoundError as error:
            raise DamagedFileError(path, f"{name!r} is gone") from error
        if hashlib.sha256(files[name]).hexdigest() != wanted:
            raise DamagedFileError(workdir / name, "it has another hash")
    return content["info"], files
