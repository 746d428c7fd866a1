"""Evaluates a trained run again: on its own data, another split, or other data."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from echo_jax.config.run import RunSpec
from echo_jax.config.saved import refuse_code
from echo_jax.config.specs import LocalSpec
from echo_jax.data.prepare.archives import nfc
from echo_jax.inference.run import TrainedRun, class_names
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.evaluation import evaluate, with_recomputed_statistics
from echo_jax.training.processes.stop import Watchdog
from echo_jax.training.saving.model import Model
from echo_jax.workloads import Batch, Workload, build


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
      workdir: The folder of the run.
      update: The update of its checkpoint.
      source: The data, as in ``data.source``.
      split: The split; ``""`` where the workload has a single one for evaluation.
      asked_split: The requested split; ``""`` for the split of the run.
      max_examples: The requested number of examples, see `evaluate_run`.
      was_trained_on: Whether the run was trained on this split.
      metric: The metric of this workload's targets.
      metrics: All metrics by name, `metric` first.
    """

    workdir: str
    update: int
    source: str
    split: str
    asked_split: str
    max_examples: int | None
    was_trained_on: bool
    metric: str
    metrics: dict[str, float]

    @property
    def where(self) -> str:
        """The data and the split in words, with a note if the run was trained on it."""
        where = " ".join(filter(None, [self.source, self.split]))
        return f"{where}, which it was trained on" if self.was_trained_on else where


def evaluate_run(
    run: TrainedRun,
    *,
    source: str = "",
    split: str = "",
    max_examples: int | None = None,
    note: Callable[[str], Any] = lambda said: None,
) -> Evaluation:
    """Evaluates a trained run on as many devices as in training, or on all local ones.

    Args:
      run: From `load_run`.
      source: Other data, with the same tokens, or with some of the classes.
      split: By default the split on which the run was evaluated.
      max_examples: Number of examples, always the same ones; 0 for all; by default as
        in the run.
      note: Called with a text while data takes long.

    Raises:
      ValueError: The data does not exist, or has other tokens or unknown classes; or
        the workload has no such split.
      DataTimeoutError: The data did not come.

    Example:
      >>> evaluate_run(load_run("runs/cifar10"), split="test").metrics["accuracy"]
      0.8712
    """
    config, workload = open_evaluation(run, source, split, max_examples)
    compiled = CompiledFunctions(config, workload)
    model: Any = Model.of(run.variables)
    with Watchdog(config, note) as watchdog:
        if config.batch.norm == "recompute":
            own = _evaluation_config(run, "", "", None)
            model = with_recomputed_statistics(
                own, compiled, model, build(own), watchdog
            )
        metrics = evaluate(
            compiled,
            model,
            watchdog.each(workload.eval_batches(), "a batch of the evaluation"),
            evaluator=workload.evaluator() if workload.evaluator else None,
        )
    metrics |= workload.task.derive(metrics)
    here = config.data.source, getattr(config.data, "eval_split", "")
    trained = run.config.data.source, getattr(run.config.data, "train_split", "train")
    return Evaluation(
        workdir=str(run.workdir),
        update=run.update,
        source=here[0],
        split=here[1],
        asked_split=split,
        max_examples=max_examples,
        was_trained_on=here == trained,
        metric=workload.metric,
        metrics={name: metrics[name] for name in (workload.metric, *sorted(metrics))},
    )


def open_evaluation(
    run: TrainedRun, source: str, split: str, max_examples: int | None
) -> tuple[RunSpec, Workload]:
    """Returns the config of an evaluation, and its workload; see `evaluate_run`."""
    config = _evaluation_config(run, source, split, max_examples)
    workload = build(config)
    _check_same_tokens(run, workload, config.data.source)
    return config, _of_its_classes(run, workload, config.data.source)


def _of_its_classes(run: TrainedRun, workload: Workload, source: str) -> Workload:
    """Returns a workload with the model's labels, for data with some of its classes."""
    here = [*map(nfc, run.classes)]
    there = [*map(nfc, class_names(workload.task_info))]
    if here == there:
        return workload
    if unknown := [name for name in there if name not in here]:
        raise ValueError(
            f"data.source={source!r} has {len(unknown)} of {len(there)} classes that "
            f"{run.workdir} was not trained on, such as {unknown[0]!r:.80}; leave them "
            f"out, and name the others as there: {run.classes!r:.200}"
        )
    labels = np.array([here.index(name) for name in there], np.int32)
    label_there = np.full(len(here), -1)
    label_there[labels] = np.arange(len(labels))

    def batches(**shard: Any) -> Iterator[Batch]:
        for batch in workload.eval_batches(**shard):
            names = {"label", "box_labels"} & batch.keys()
            yield batch | {name: labels[batch[name]] for name in names}

    def evaluator() -> Any:
        own: Any = workload.evaluator and workload.evaluator()

        def add(batch: Batch, outputs: Any) -> None:
            found = label_there[outputs["labels"]]
            # A score of 0 means no detection.
            scores = np.where(found < 0, 0, outputs["scores"])
            own.add(batch, outputs | {"labels": np.maximum(found, 0), "scores": scores})

        return SimpleNamespace(add=add, result=own.result)

    return replace(
        workload,
        task=run.task,
        task_info=run.task_info,
        eval_batches=batches,
        evaluator=workload.evaluator and evaluator,
    )


def _evaluation_config(
    run: TrainedRun, source: str, split: str, max_examples: int | None
) -> RunSpec:
    config = run.config
    here, mesh, data = jax.local_device_count(), config.mesh, config.data
    wanted = here if mesh.data == -1 else min(here, mesh.data * mesh.fsdp)
    whole = {"batch.accumulation_steps": 1, "batch.boundaries": (), "batch.factors": ()}
    changed: dict[str, Any] = {"local": LocalSpec(), **whole}
    changed |= {"mesh.data": math.gcd(config.batch_size, wanted), "mesh.fsdp": 1}
    if max_examples is not None:
        changed["data.eval_examples"] = max_examples
    if not source:
        refuse_code(config)
    changed["data.source"] = source or data.source
    if config.workload in ("shapes", "heat"):
        if split:
            raise ValueError(f"workload {config.workload!r} makes all of its data")
    elif split or source not in ("", data.source):
        # The other data may not have the split that the run was trained on.
        judged = split or data["eval_split"]
        changed |= {"data.train_split": judged, "data.eval_split": judged}
        changed["data.train_examples"] = 0
    return config.changed(changed)


def _check_same_tokens(run: TrainedRun, workload: Workload, source: str) -> None:
    for name in ("vocab", "eod"):
        here, there = run.task_info.get(name), workload.task_info.get(name)
        if here != there:
            raise ValueError(
                f"data.source={source!r} has other {name} than {run.workdir} was "
                f"trained on: {there!r:.200}, not {here!r:.200}; prepare it with the "
                "same ones, in the same order"
            )
    if dict(run.task_files) != dict(workload.task_files):
        raise ValueError(
            f"data.source={source!r} was prepared with another tokenizer than "
            f"{run.workdir} was trained with; prepare it with --tokenizer-model="
            f"{run.workdir}/{next(iter(run.task_files), '')}"
        )
