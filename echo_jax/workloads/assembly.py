"""Parts that all workloads share: splits, and the assembly from a task and its data."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import SplitData
from echo_jax.data.augment import Augment
from echo_jax.data.images.host_augment import HostAugment, choose_stages
from echo_jax.data.pipeline import evaluation
from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.pipeline.stages import Guarded, Read, RecordSource, Stages, stacked
from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.data.sources.source import DescribedSource, Kind, Subset, open_source
from echo_jax.echo.keys import seed_for_use
from echo_jax.workloads.base import Task, Workload


# `keeps_evaluated`: whether evaluation records are decoded once and kept, instead of
# at each evaluation.
def make_workload(
    config: RunSpec,
    task_of: Callable[[RunSpec, Mapping[str, Any]], Task],
    task_info: Mapping[str, Any],
    *,
    stages: Stages,
    evaluated: Stages,
    data_metadata: Mapping[str, Any],
    keeps_evaluated: bool = False,
    eval_threads: int = evaluation.THREADS,
    **fields: Any,
) -> Workload:
    """Builds the workload ``config.workload``; see `Workload` for the fields."""
    chosen = evaluation.sample_indices(len(evaluated.source), config.data.eval_examples)
    batches = functools.partial(
        evaluation.eval_batches if keeps_evaluated else evaluation.stream_eval_batches,
        evaluated.source,
        evaluated.decode,
        batch_size=config.batch_size,
        max_examples=config.data.eval_examples,
        threads=eval_threads,
    )

    def first_items() -> None:
        Guarded("decode", stages.decode)(stages.source[0])
        for index in chosen[:1]:
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
        task=task_of(config, task_info),
        task_info=task_info,
        num_examples=len(stages.source),
        num_evaluated=len(chosen),
        first_items=first_items,
        with_seed=lambda seed: replace(workload, **reads(seed)),
        eval_batches=functools.cache(batches) if keeps_evaluated else batches,
        metadata={"data": data_metadata, "storage": config.data.storage.metadata()},
        **fields,
    )
    return workload


# Each name stands for a change on the host and the same one on the devices.
def augmentations(
    config: RunSpec, known: Mapping[str, tuple[Any, Any]]
) -> tuple[HostAugment | None, Augment | None]:
    """Returns the random changes that ``data.augment`` names, if any."""
    if not config.data.augment:
        return None, None
    on_host, on_device = zip(*choose_stages(config.data.augment, known), strict=True)
    return HostAugment(on_host), Augment(on_device)


@dataclass(frozen=True)
class Splits:
    """The two splits of a run."""

    train: RecordSource
    evaluation: RecordSource  # The records to evaluate, from `evaluation_source`.
    evaluation_source: DescribedSource
    # Decodes a record of either split to a dict.
    decode_record: Callable[[Any], dict[str, Any]]
    metadata: Mapping[str, Any]  # A description of the data, for ``environment.json``.


# If both splits are the same one, ``data.train_examples`` limits the evaluation too.
def open_splits(config: RunSpec, kind: Kind) -> Splits:
    """Opens the splits of ``config.data``, whose records must be of `kind`."""
    data: SplitData = config.data
    source, decode_record = open_source(data.source, data.train_split, kind)
    train = limited(source, data.train_examples, data.train_split)
    judged, chosen = source, train
    if data.eval_split != data.train_split:
        judged, _ = open_source(data.source, data.eval_split, kind)
        chosen = judged
    metadata = {
        "synthetic": False,
        "train_examples": len(train),
        "train": source.metadata(),
        "evaluation": judged.metadata(),
    }
    return Splits(train, chosen, judged, decode_record, metadata)


def limited(source: RecordSource, wanted: int, split: str) -> RecordSource:
    """Returns always the same `wanted` examples of a source, or all for 0."""
    if not 0 <= wanted <= len(source):
        raise ValueError(
            f"data.train_examples={wanted} is none of 0 to {len(source)}, which split "
            f"{split!r} has; set --config.data.train_examples=0 for all."
        )
    if wanted:
        source = Subset(source, evaluation.sample_indices(len(source), wanted))
    return source


def _stage_calls(stages: Stages, pipeline: PipelineSpec) -> dict[str, Any]:
    """Returns calls by stage name; each does the work of one batch."""
    read_one = Read(stages.source, SimulatedStorage(pipeline.storage, pipeline.seed))
    numbers, size = itertools.count(), len(stages.source)

    def read() -> list[Any]:
        taken = itertools.islice(numbers, pipeline.batch_size)
        seeds = ((index, int(seed_for_use(pipeline.seed, index, 0))) for index in taken)
        return [read_one(index, seed % size) for index, seed in seeds]

    # Only "read" takes new records in each call; the other calls reuse these.
    records = read()
    items = [*map(stages.decode, records)]
    calls: dict[str, Any] = {"read": read}
    calls["decode"] = lambda: [*map(stages.decode, records)]
    if augment := stages.augment:
        calls["augment"] = lambda: [*map(augment, items, range(len(items)))]
    return {**calls, "batch": lambda: stacked(items)}
