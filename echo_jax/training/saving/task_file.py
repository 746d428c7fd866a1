"""What a run folder keeps of its task, so that the model is used where the data is not.

``task.json`` says what a task was made with beside the config, such as the names of
classes; files that belong to it, such as a tokenizer's, lie beside it.
"""

import hashlib
from typing import Any, NamedTuple

from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import DamagedFileError, read_json, write_json
from echo_jax.workloads.base import Workload

__all__ = ["TASK_FILE", "SavedTask", "read_task", "write_task"]

TASK_FILE = "task.json"


class SavedTask(NamedTuple):
    """What a run folder keeps of its task.

    Attributes:
      info: See `Workload.task_info`.
      files: See `Workload.task_files`.
    """

    info: dict[str, Any]
    files: dict[str, bytes]


def write_task(workdir: RunPath, workload: Workload) -> None:
    """Writes what the run folder of a workload keeps of its task."""
    for name, content in workload.task_files.items():
        (workdir / name).write(content)
    hashes = {name: _sha256(content) for name, content in workload.task_files.items()}
    write_json(workdir / TASK_FILE, {"info": dict(workload.task_info), "files": hashes})


def read_task(workdir: RunPath) -> SavedTask:
    """Reads what a run folder keeps of its task.

    Raises:
      ValueError: The folder keeps nothing of it.
      DamagedFileError: A file is not what was written.
      FolderError: What lies there is no file.
    """
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
