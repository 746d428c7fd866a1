"""What can be trained: data, model, loss, metric and target, one file each."""

from collections.abc import Mapping
from typing import Any

import jax

from echo_jax.workloads import cifar, coco, imagenet, lm, shapes
from echo_jax.workloads.base import Batch, Task, Variables, Workload

__all__ = [
    "WORKLOADS",
    "Batch",
    "Task",
    "Variables",
    "Workload",
    "build",
    "decode_input",
    "make_task",
]

WORKLOADS = {
    "cifar": cifar,
    "coco": coco,
    "imagenet": imagenet,
    "lm": lm,
    "shapes": shapes,
}
"""The module of each workload, by name: with ``build(config)``, and ``task_of(config,
task_info)`` for its task alone, where its data is not."""


def build(config: Any) -> Workload:
    """Builds the workload that a training config names.

    Args:
      config: A training config, as `echo_jax.config.default_config` describes.

    Returns:
      The workload, its data read or drawn.

    Raises:
      FileNotFoundError: If its data is not there.
      ValueError: If there is no workload of that name, or its data or its model
        cannot be as the config says.

    Example:
      >>> config = load_config("configs/lm.py:tiny")
      >>> build(config).metric
      'loss'
    """
    workload = _module(config).build(config)
    # Without computing anything: a model that cannot be is refused here and now.
    jax.eval_shape(lambda: workload.task.init(jax.random.key(0)))
    return workload


def make_task(config: Any, task_info: Mapping[str, Any]) -> Task:
    """Makes the task of a training config without its data.

    Args:
      config: See `build`.
      task_info: See `Workload.task_info`; of the same workload.

    Raises:
      ValueError: See `build`.
    """
    return _module(config).task_of(config, task_info)


def decode_input(config: Any, encoded: Any) -> dict[str, Any]:
    """Returns the item that a workload of images makes of a file, as in evaluation.

    Args:
      config: See `build`; its workload is one of images.
      encoded: The file's bytes, or ``uint8[height, width, 3 or 1]``, of any size.

    Raises:
      ValueError: It is no image.
    """
    return _module(config).decode_input(config, encoded)


def _module(config: Any) -> Any:
    if config.workload not in WORKLOADS:
        raise ValueError(
            f"workload={config.workload!r} is unknown; use one of "
            f"{', '.join(sorted(WORKLOADS))}."
        )
    for name, value in config.model.items():
        if type(value) is int and value < 1:
            raise ValueError(
                f"model.{name}={value} must be at least 1; set --config.model.{name}=1."
            )
    return WORKLOADS[config.workload]
