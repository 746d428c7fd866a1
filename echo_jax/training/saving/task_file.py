"""The task of a run folder, so that the model can be used without the data.

``task.json`` holds the parts of a task beside its config, such as the names of classes.
Files of the task, such as a tokenizer's, are in the same folder.
"""

import hashlib
from typing import Any, NamedTuple

from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import DamagedFileError, read_json, write_json
from echo_jax.workloads.base import Workload

__all__ = ["TASK_FILE", "SavedTask", "read_task", "write_task"]

TASK_FILE = "task.json"


class SavedTask(NamedTuple):
    """The `Workload.task_info` and `Workload.task_files` of a run folder."""

    info: dict[str, Any]
    files: dict[str, bytes]


def write_task(workdir: RunPath, workload: Workload) -> None:
    """Writes ``task.json`` and the task's files to the run folder."""
    for name, content in workload.task_files.items():
        (workdir / name).write(content)
    hashes = {name: _sha256(content) for name, content in workload.task_files.items()}
    write_json(workdir / TASK_FILE, {"info": dict(workload.task_info), "files": hashes})


def read_task(workdir: RunPath) -> SavedTask:
    """Reads the task of a run folder; raises if a file differs from the written one."""
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
        try:
            files[name] = (workdir / name).read_bytes()
        except FileNotFoundError as error:
            raise DamagedFileError(path, f"{name!r} is gone") from error
        if _sha256(files[name]) != wanted:
            raise DamagedFileError(workdir / name, "it has another hash")
    return SavedTask(content["info"], files)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
