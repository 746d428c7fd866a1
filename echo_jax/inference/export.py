"""Exports a trained run to files for other programs: its weights, or its program."""

import os
from typing import Any

import jax
from etils import epath
from jax import export

from echo_jax.files.folders import run_file, write
from echo_jax.inference.run import TrainedRun
from echo_jax.training.saving.weights import write_weights

KINDS = ("safetensors", "stablehlo")
"""What a run can be exported to."""

_PLATFORMS = ("cpu", "cuda", "tpu")


def export_run(
    run: TrainedRun, to: str, path: str | os.PathLike[str] = ""
) -> epath.Path:
    """Writes a trained run into a file.

    ``"safetensors"``: all variables, by names such as ``params/head/kernel``, with the
    config and the meaning of the outputs as metadata. ``config.init_from`` reads it.

    ``"stablehlo"``: the program of `Task.predict` with the weights in it, for CPUs,
    GPUs and TPUs and batches of any size. It needs neither echo_jax nor flax:
    ``jax.export.deserialize(data).call(batch)``. jax reads programs that are at most
    half a year old, so also keep the weights.

    Args:
      run: From `load_run`.
      to: ``"safetensors"`` or ``"stablehlo"``.
      path: The file, local or in a bucket; by default in the run folder.

    Returns:
      The file.

    Raises:
      ValueError: `to` is unknown.
      ModuleNotFoundError: The extra ``export`` is not installed.
      OSError: The file cannot be written.

    Example:
      >>> str(export_run(load_run("runs/cifar10"), "safetensors"))
      'runs/cifar10/model.safetensors'
    """
    if to not in KINDS:
        raise ValueError(f"to={to!r} is unknown; use one of {', '.join(KINDS)}")
    file = run_file(path) if path else run.workdir / f"model.{to}"
    if to == "safetensors":
        about = {"task": dict(run.task_info), "update": run.update}
        about["config"] = run.config.to_dict()
        write_weights(file, run.variables, about)
    else:
        write(file, _program(run))
    return file


def _program(run: TrainedRun) -> bytes:
    try:
        import flatbuffers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to export a program needs flatbuffers: pip install 'echo-jax[export]'"
        ) from error
    (size,) = export.symbolic_shape("batch")
    shapes: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((size, *shape.shape[1:]), shape.dtype)
        for name, shape in run.task.input_shapes(1).items()
    }
    predict = jax.jit(lambda batch: run.task.predict(run.variables, batch))
    return bytes(export.export(predict, platforms=_PLATFORMS)(shapes).serialize())
