"""Parts that all workloads share: splits, and the assembly from a task and its data."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import SplitData
from echo_jax.data.augment import Augment
from echo_jax.data.images.host_augment import HostAugment, choose_stages
from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.pipeline.evaluation import (
    THREADS,
    eval_batches,
    sample_indices,
    stream_eval_batches,
)
from echo_jax.data.pipeline.stages import Guarded, Read, RecordSource, Stages, stacked
from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.data.sources.source import DescribedSource, Kind, Subset, open_source
from echo_jax.echo.keys import seed_for_use
from echo_jax.workloads.base import Evaluator, Task, Workload


# `keeps_evaluated`: whether evaluation records are decoded once and kept, instead of
# at each evaluation.
def make_workload(
    config: RunSpec,
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
    augment_on_device: Callable[..., Any] | None = None,
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

    def reads(seed: int) -> dict[str, Any]:
        pipeline = replace(config.pipeline, seed=seed)
        return {
            "train_dataset": functools.partial(train_dataset, stages, pipeline),
            "fresh_dataset": functools.partial(fresh_batches, stages, pipeline),
            "stage_calls": functools.partial(_stage_calls, stages, pipeline),
        }

    workload = Workload(
        **reads(config.seed),
        name=config.workload,
        task=task,
        metric=metric,
        mode=mode,
        num_examples=len(stages.source),
        num_evaluated=min(most_evaluated or all_evaluated, all_evaluated),
        first_items=first_items,
        with_seed=lambda seed: replace(workload, **reads(seed)),
        eval_batches=evaluation,
        evaluator=evaluator,
        augment_on_device=augment_on_device,
        metadata={
            "data": dict(data_metadata),
            "storage": config.data.storage.metadata(),
        },
        task_info=task_info,
        task_files=task_files or {},
    )
    return workload


# Each name stands for a change on the host and the same one on the devices.
def augmentations(
    names: tuple[str, ...], on_host: Mapping[str, Any], on_device: Mapping[str, Any]
) -> tuple[HostAugment | None, Augment | None]:
    """Returns the random changes that ``data.augment`` names, if any."""
    if not names:
        return None, None
    return (
        HostAugment(choose_stages(names, on_host)),
        Augment(choose_stages(names, on_device)),
    )


@dataclass(frozen=True)
class Splits:
    """The two splits of a run."""

    train: RecordSource
    evaluation: RecordSource  # The records to evaluate, from `evaluation_source`.
    evaluation_source: DescribedSource
    # Decodes a record of either split to a dict.
    decode_record: Callable[[Any], dict[str, Any]]
    metadata: Mapping[str, Any]  # A description of the data, for ``environment.json``.

    @property
    def info(self) -> dict[str, Any]:
        return self.evaluation_source.info


# If both splits are the same one, ``data.train_examples`` limits the evaluation too.
def open_splits(config: RunSpec, kind: Kind) -> Splits:
    """Opens the splits of ``config.data``, whose records must be of `kind`."""
    data: SplitData = config.data
    source, decode_record = open_source(data.source, data.train_split, kind)
    train = limited(source, data.train_examples, data.train_split)
    if data.eval_split == data.train_split:
        evaluation_source, evaluation = source, train
    else:
        evaluation_source, _ = open_source(data.source, data.eval_split, kind)
        evaluation = evaluation_source
    return Splits(
        train=train,
        evaluation=evaluation,
        evaluation_source=evaluation_source,
        decode_record=decode_record,
        metadata={
            "synthetic": False,
            "train_examples": len(train),
            "train": source.metadata(),
            "evaluation": evaluation_source.metadata(),
        },
    )


def limited(source: RecordSource, wanted: int, split: str) -> RecordSource:
    """Returns always the same `wanted` examples of a source, or all for 0."""
    if not 0 <= wanted <= len(source):
        raise ValueError(
            f"data.train_examples={wanted} is none of 0 to {len(source)}, which split "
            f"{split!r} has; set --config.data.train_examples=0 for all."
        )
    if not wanted:
        return source
    return Subset(source, sample_indices(len(source), wanted))


def _stage_calls(
    stages: Stages, pipeline: PipelineSpec
) -> dict[str, Callable[[], Any]]:
    """Returns calls by stage name; each does the work of one batch."""
    read_one = Read(stages.source, SimulatedStorage(pipeline.storage, pipeline.seed))
    decode, augment = stages.decode, stages.augment
    numbers = itertools.count()

    def read() -> list[Any]:
        return [
            read_one(
                index, int(seed_for_use(pipeline.seed, index, 0)) % len(stages.source)
            )
            for index in itertools.islice(numbers, pipeline.batch_size)
        ]

    # Only "read" takes new records in each call; the other calls reuse these.
    records = read()
    items = [decode(record) for record in records]
    calls: dict[str, Callable[[], Any]] = {"read": read}
    calls["decode"] = lambda: [decode(record) for record in records]
    if augment is not None:
        calls["augment"] = lambda: [
            augment(item, seed) for seed, item in enumerate(items)
        ]
    calls["batch"] = lambda: stacked(items)
    return calls
