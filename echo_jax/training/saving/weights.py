"""The arrays of a trained model, from a run folder or from a safetensors file.

Other programs read such a file, too. A run may begin with the arrays of another one:
``config.init_from``.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import struct, traverse_util

from echo_jax.files.folders import (
    FolderError,
    is_in_bucket,
    run_file,
    run_folder,
    write,
)
from echo_jax.training.arrays import fetch_global
from echo_jax.training.saving.checkpoint import Checkpoints, DamagedCheckpointError
from echo_jax.training.saving.model import Model
from echo_jax.training.update.local import model_of
from echo_jax.workloads.base import Variables

SUFFIX = ".safetensors"

# The metadata's key for the hashes of the arrays, by name.
_SUMS = "sha256"
# How many arrays of each kind are named.
_MOST_NAMED = 4


class WarmStart(NamedTuple):
    """The arrays that a run takes from another one."""

    taken: Variables  # The arrays, as nested dicts: a part of the variables.
    # Plain data for the run folder: the source, the names of the arrays that are taken
    # and made (initialised), and why others of the source are skipped, by name.
    report: dict[str, Any]

    def __str__(self) -> str:
        source, taken, skipped, made = self.report.values()
        parts = [f"init_from={source}: {len(taken)} arrays taken"]
        if skipped:
            why = [f"{name} ({reason})" for name, reason in skipped.items()]
            parts.append(f"{len(why)} skipped: {_some(why)}")
        if made:
            parts.append(f"{len(made)} newly made: {_some(made)}")
        return "; ".join(parts)


def warm_start(source: str, shapes: Variables) -> WarmStart:
    """Reads the arrays of the same name and shape from a run or a weights file."""
    try:
        if source.endswith(SUFFIX):
            arrays = read_weights(source)
        else:
            arrays = flat_arrays(read_model(run_folder(source))[1].variables)
    except (FolderError, ValueError) as error:
        raise ValueError(f"config.init_from={source!r}: {error}") from error
    wanted: dict[str, Any] = traverse_util.flatten_dict(shapes, sep="/")
    taken, skipped = {}, {}
    for name, array in arrays.items():
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
    made = [name for name in wanted if name not in taken]
    report = {"source": source, "taken": sorted(taken), "skipped": skipped}
    return WarmStart(
        traverse_util.unflatten_dict(taken, sep="/"), {**report, "made": made}
    )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def replaced(variables: Variables, taken: Variables) -> Variables:
    """Returns variables with the taken arrays in their place, cast to their types."""
    if not taken:
        return dict(variables)
    flat: dict[Any, Any] = traverse_util.flatten_dict(variables, keep_empty_nodes=True)
    for path, array in traverse_util.flatten_dict(taken).items():
        flat[path] = jnp.asarray(array, flat[path].dtype)
    return traverse_util.unflatten_dict(flat)


def read_model(workdir: epath.Path, update: int | None = None) -> tuple[int, Model]:
    """Returns a run's update and its model, on the first device of this process.

    Without an update, it is that of the newest undamaged checkpoint.
    """
    folder = workdir / "checkpoints"
    if not folder.exists():
        raise ValueError(f"{workdir} holds no checkpoint yet; train it for longer")
    with contextlib.closing(Checkpoints(folder, keep=0)) as checkpoints:
        saved = checkpoints.updates()
        if not saved:
            raise ValueError(
                f"{workdir} holds no whole checkpoint yet; train it for longer"
            )
        if update not in (None, *saved):
            raise ValueError(
                f"{workdir} holds no checkpoint of update {update}; it holds "
                f"{', '.join(map(str, sorted(saved)))}"
            )
        failures: list[str] = []
        for number in saved if update is None else [update]:
            try:
                part = _part_of(checkpoints.shapes(number))
                model, _ = checkpoints.restore(number, part, is_part=True)
            except DamagedCheckpointError as error:
                failures.append(str(error))
                continue
            for each in failures:
                warnings.warn(f"{each}; that of update {number} is used", stacklevel=2)
            if isinstance(model, _Replicas):
                model = model_of(model.replicas, model.outer and model.outer.anchor)
            return number, model
    raise DamagedCheckpointError("; ".join(failures))


# The parts of an `Outer` and of a `LocalState` to read.
class _Outer(struct.PyTreeNode):
    anchor: Any


class _Replicas(struct.PyTreeNode):
    replicas: Model
    outer: _Outer | None


def _part_of(saved: dict[str, Any]) -> Model | _Replicas:
    """Returns shapes and types of the part of a state to read."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shapes(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree
        )

    try:
        state = saved.get("replicas", saved)
        model = Model(shapes(state["params"]), shapes(state["model_state"]))
        if state is saved:
            return model
        outer = saved["outer"] and _Outer(shapes(saved["outer"]["anchor"]))
        return _Replicas(model, outer or None)
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"a checkpoint holds no state of a training ({error!r})"
        ) from error


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
    library = _safetensors()
    # safetensors saves a non-contiguous array wrongly, without an error.
    arrays = {
        name: np.asarray(array, order="C")
        for name, array in flat_arrays(variables).items()
    }
    sums = {name: _sum(array) for name, array in arrays.items()}
    about = {**metadata, _SUMS: sums}
    texts = {name: json.dumps(value) for name, value in about.items()}
    write(run_file(path), library.numpy.save(arrays, metadata=texts))


def read_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of a file by name, and checks the hashes of `write_weights`."""
    library, file = _safetensors(), run_file(path)
    try:
        with _on_disk(file) as name, library.safe_open(name, "np") as opened:
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            sums = (opened.metadata() or {}).get(_SUMS)
    except FileNotFoundError as error:
        raise FolderError(f"there is no file {str(file)!r}") from error
    except library.SafetensorError as error:
        raise FolderError(
            f"{str(file)!r} is no file of safetensors: {error}"
        ) from error
    if sums is not None and (what := _damage(arrays, sums)):
        raise FolderError(
            f"{str(file)!r} is damaged: {what}; export the weights again, or use a "
            "copy of the file"
        )
    return arrays


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


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"files of {SUFFIX} need safetensors: pip install 'echo-jax[export]'"
        ) from error
    return safetensors
