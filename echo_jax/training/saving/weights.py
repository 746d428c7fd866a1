"""Weights as a safetensors file, which other programs read, too."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from etils import epath
from flax import traverse_util

from echo_jax.files.folders import FolderError, is_in_bucket, run_file, write
from echo_jax.training.arrays import fetch_global

SUFFIX = ".safetensors"

# The metadata's key for the hashes of the arrays, by name.
_SUMS = "sha256"


def flat_arrays(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns host arrays by names joined with ``/``; all processes call it."""
    flat = traverse_util.flatten_dict(dict(variables), sep="/")
    return {name: fetch_global(cast(Any, array)) for name, array in flat.items()}


def write_weights(
    path: str | os.PathLike[str],
    variables: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> None:
    """Writes variables atomically; metadata values are kept as JSON texts."""
    _check_installed()
    from safetensors import numpy

    # safetensors saves a non-contiguous array wrongly, without an error.
    arrays = {
        name: np.asarray(array, order="C")
        for name, array in flat_arrays(variables).items()
    }
    sums = {name: _sum(array) for name, array in arrays.items()}
    about = {**metadata, _SUMS: sums}
    texts = {name: json.dumps(value) for name, value in about.items()}
    write(run_file(path), numpy.save(arrays, metadata=texts))


def read_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of a file by name, and checks the hashes of `write_weights`."""
    _check_installed()
    from safetensors import SafetensorError, safe_open

    file = run_file(path)
    try:
        with _on_disk(file) as name, safe_open(name, framework="np") as opened:
            found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            sums = (opened.metadata() or {}).get(_SUMS)
    except FileNotFoundError as error:
        raise FolderError(f"there is no file {str(file)!r}") from error
    except SafetensorError as error:
        raise FolderError(
            f"{str(file)!r} is no file of safetensors: {error}"
        ) from error
    if sums is not None and (what := _damage(found, sums)):
        raise FolderError(
            f"{str(file)!r} is damaged: {what}; export the weights again, or use a "
            "copy of the file"
        )
    return found


def _sum(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _damage(arrays: Mapping[str, np.ndarray], sums: str) -> str:
    try:
        wanted = json.loads(sums)
    except ValueError as error:
        return f"its hashes cannot be read ({error})"
    if not isinstance(wanted, dict) or wanted.keys() != arrays.keys():
        return "its hashes do not match its arrays"
    differ = [name for name, array in arrays.items() if _sum(array) != wanted[name]]
    return f"{min(differ)!r} is not what was written" if differ else ""


@contextlib.contextmanager
def _on_disk(file: epath.Path) -> Iterator[str]:
    """Yields the path of a local file, or of a copy of a bucket's file."""
    # safetensors reads bfloat16 into NumPy from a file only, not from bytes.
    if not is_in_bucket(file):
        if file.exists() and not Path(file).is_file():  # It would wait for a pipe.
            raise FolderError(f"{str(file)!r} is no file; name one of safetensors")
        yield os.fspath(file)
        return
    with tempfile.NamedTemporaryFile(suffix=SUFFIX) as copy:
        copy.write(file.read_bytes())
        copy.flush()
        yield copy.name


def _check_installed() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"files of {SUFFIX} need safetensors: pip install 'echo-jax[export]'"
        ) from error
