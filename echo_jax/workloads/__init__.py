"""The workloads, one file each: data, model, loss, metric and target."""

from collections.abc import Mapping
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config.run import RunSpec
from echo_jax.workloads import cifar, coco, heat, imagenet, lm, shapes
from echo_jax.workloads.base import Batch, Task, Variables, Workload

__all__ = ["WORKLOADS", "Batch", "Task", "Variables", "Workload", "build", "make_task"]

WORKLOADS = {
    "cifar": cifar,
    "coco": coco,
    "heat": heat,
    "imagenet": imagenet,
    "lm": lm,
    "shapes": shapes,
}
"""The module of each workload, by name: with ``build(config)``, and ``task_of(config,
task_info)`` for its task alone, where its data is not."""


def build(config: Config | RunSpec) -> Workload:
    """Builds the workload of a config with its data; refuses an impossible model."""
    config = RunSpec.of(config)
    workload = _module(config).build(config)
    jax.eval_shape(lambda: workload.task.init(jax.random.key(0)))
    return workload


def make_task(config: RunSpec, task_info: Mapping[str, Any]) -> Task:
    """Makes the task of a config without its data, from a `Workload.task_info`."""
    return _module(config).task_of(config, task_info)


def _module(config: RunSpec) -> Any:
    if config.workload not in WORKLOADS:
        raise ValueError(
            f"workload={config.workload!r} is unknown; use one of "
            f"{', '.join(sorted(WORKLOADS))}."
        )
    return WORKLOADS[config.workload]
