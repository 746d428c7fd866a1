"""Weights as a file that other programs read, too: safetensors."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from flax import traverse_util

from echo_jax.folders import FolderError, RunPath, run_file
from echo_jax.training.distributed import fetch_global

__all__ = ["SUFFIX", "flat_arrays", "read_weights", "write_weights"]

SUFFIX = ".safetensors"


def flat_arrays(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of nested dicts on the host, by names joined by ``/``.

    All processes of a run have to call it.

    Example:
      >>> [*flat_arrays({"params": {"head": {"kernel": jnp.ones(3)}}})]
      ['params/head/kernel']
    """
    flat = traverse_util.flatten_dict(dict(variables), sep="/")
    return {name: fetch_global(cast(Any, array)) for name, array in flat.items()}


def write_weights(
    path: str | os.PathLike[str],
    variables: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> None:
    """Writes variables, so that a reader sees the old file or the new one.

    Args:
      path: The file, here or ``gs://BUCKET/FOLDER/FILE``.
      variables: Nested dicts of arrays.
      metadata: Plain data; each value is kept as a JSON text.

    Raises:
      ModuleNotFoundError: safetensors is not installed; the message says how.
      OSError: The file cannot be written.
    """
    _check_installed()
    from safetensors import numpy

    # An array that is not contiguous would be saved wrong, without a word.
    arrays = {
        name: np.asarray(array, order="C")
        for name, array in flat_arrays(variables).items()
    }
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    run_file(path).write(numpy.save(arrays, metadata=texts))


def read_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, by their names.

    Args:
      path: The file, here or ``gs://BUCKET/FOLDER/FILE`` as text.

    Raises:
      ModuleNotFoundError: safetensors is not installed; the message says how.
      FolderError: There is no such file, or it is none of safetensors.
    """
    _check_installed()
    from safetensors import SafetensorError, safe_open

    file = run_file(path)
    try:
        with _on_disk(file) as name, safe_open(name, framework="np") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FolderError(f"there is no file {str(file)!r}") from error
    except SafetensorError as error:
        raise FolderError(
            f"{str(file)!r} is no file of safetensors: {error}"
        ) from error


@contextlib.contextmanager
def _on_disk(file: RunPath) -> Iterator[str]:
    """Gives the name of a file as it is, or of a copy of one in a bucket.

    From a file alone safetensors reads bfloat16 into NumPy, not from bytes.
    """
    if not file.in_bucket:
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
