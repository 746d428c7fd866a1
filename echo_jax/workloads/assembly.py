"""Parts that all workloads share: their assembly from a task and its data."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.pipeline.evaluation import (
    THREADS,
    eval_batches,
    sample_indices,
    stream_eval_batches,
)
from echo_jax.data.pipeline.stage_calls import stage_calls
from echo_jax.data.pipeline.stages import Guarded, Stages
from echo_jax.workloads.base import Augment, Evaluator, Task, Workload

__all__ = ["compute_dtype", "make_workload", "module_table"]

# Wide enough for the longest row; a table is only as wide as it needs.
_TABLE_WIDTH = 400


def module_table(module: nn.Module, inputs: np.ndarray) -> str:
    """Returns Flax's table of a module, which is traced but not compiled."""
    made = module.tabulate(
        jax.random.key(0),
        inputs,
        train=False,
        console_kwargs={"width": _TABLE_WIDTH, "force_terminal": False},
    )
    return "\n".join(line.strip() for line in made.strip().split("\n")) + "\n"


def compute_dtype(config: Any) -> jnp.dtype:
    """Returns ``config.precision.compute``; refuses the old field ``model.dtype``."""
    if "dtype" in config.model:
        raise ValueError(
            f"model.dtype={config.model.dtype!r} is precision.compute now; remove it, "
            f"and set --config.precision.compute={config.model.dtype}."
        )
    return jnp.dtype(config.precision.compute)


# `keeps_evaluated`: whether evaluation records are decoded once and kept, instead of
# at each evaluation.
def make_workload(
    config: Any,
    *,
    task: Task,
    metric: str,
    mode: Literal["min", "max"],
    stages: Stages,
    evaluated: Stages,
    data_metadata: Mapping[str, Any],
    keeps_evaluated: bool = False,
    eval_threads: int = THREADS,
    evaluator: Callable[[], Evaluator] | None = None,
    augment_on_device: Augment | None = None,
    task_info: Mapping[str, Any],
    task_files: Mapping[str, bytes] | None = None,
) -> Workload:
    """Builds the workload ``config.workload``; see `Workload` for the fields."""
    most_evaluated = config.data.eval_examples
    all_evaluated = len(evaluated.source)
    evaluation = functools.partial(
        eval_batches if keeps_evaluated else stream_eval_batches,
        evaluated.source,
        evaluated.decode,
        batch_size=config.batch_size,
        max_examples=most_evaluated,
        threads=eval_threads,
    )
    if keeps_evaluated:
        evaluation = functools.cache(evaluation)

    def first_items() -> None:
        Guarded("decode", stages.decode)(stages.source[0])
        for index in sample_indices(all_evaluated, most_evaluated)[:1]:
            evaluated.decode(evaluated.source[index])

    def read_by(pipeline: PipelineSpec) -> Workload:
        return Workload(
            name=config.workload,
            task=task,
            metric=metric,
            mode=mode,
            train_dataset=functools.partial(train_dataset, stages, pipeline),
            fresh_dataset=functools.partial(fresh_batches, stages, pipeline),
            num_examples=len(stages.source),
            num_evaluated=min(most_evaluated or all_evaluated, all_evaluated),
            first_items=first_items,
            stage_calls=functools.partial(stage_calls, stages, pipeline),
            with_seed=lambda seed: read_by(replace(pipeline, seed=seed)),
            eval_batches=evaluation,
            evaluator=evaluator,
            augment_on_device=augment_on_device,
            metadata={
                "data": dict(data_metadata),
                "storage": pipeline.storage.metadata(),
            },
            task_info=task_info,
            task_files=task_files or {},
        )

    return read_by(PipelineSpec.from_config(config))
