"""Evaluates a trained run again: on its own data, another split, or other data."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config.saved import refuse_code
from echo_jax.inference.run import TrainedRun
from echo_jax.training.evaluation import evaluate
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.training.saving.model import Model
from echo_jax.training.trainer import compile_functions
from echo_jax.training.update.recompute import with_recomputed_statistics
from echo_jax.workloads import Workload, build


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
      workdir: The folder of the run.
      update: The update of its checkpoint.
      source: The data, as in ``data.source``.
      split: The split; ``""`` where the workload has a single one for evaluation.
      asked_split: The requested split; ``""`` for that of the run.
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
      source: Other data, as in ``data.source``, with the same classes or tokens;
        by default that of the run.
      split: By default the split on which the run was evaluated.
      max_examples: Number of examples, always the same ones; 0 for all; by default as
        in the run.
      note: Called with a text while data takes long.

    Raises:
      ValueError: The data does not exist, or has other classes or tokens; or the
        workload has no such split.
      DataTimeoutError: The data did not come.

    Example:
      >>> evaluate_run(load_run("runs/cifar10"), split="test").metrics["accuracy"]
      0.8712
    """
    config, workload = open_evaluation(run, source, split, max_examples)
    compiled = compile_functions(config, workload)
    model: Any = Model.of(run.variables)
    with Watchdog.of_data(config, note) as watchdog:
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
    here = config.data.source, config.data.get("eval_split", "")
    trained = run.config.data.source, run.config.data.get("train_split", "train")
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
) -> tuple[Config, Workload]:
    """Returns the config of an evaluation, and its workload; see `evaluate_run`."""
    config = _evaluation_config(run, source, split, max_examples)
    workload = build(config)
    _check_same_task(run, workload, config.data.source)
    return config, workload


def _evaluation_config(
    run: TrainedRun, source: str, split: str, max_examples: int | None
) -> Config:
    """Returns the config of the run for the local devices and this data."""
    config = copy.deepcopy(run.config).unlock()
    config.local.schedule = "none"
    config.batch.micro, config.batch.boundaries, config.batch.factors = 1, (), ()
    config.mesh.data = _num_devices(config)
    config.mesh.fsdp = 1
    data = config.data
    if max_examples is not None:
        data.eval_examples = max_examples
    if not source:
        refuse_code(config)
    is_other = bool(split) or source not in ("", data.source)
    data.source = source or data.source
    if split:
        if config.workload == "shapes":
            raise ValueError("workload 'shapes' draws its images, and has no splits")
        data.eval_split = split
    if is_other:
        # The other data may not have the split that the run was trained on.
        data.train_split = data.get("eval_split", "validation")
        data.train_examples = 0
    return config.lock()


def _num_devices(config: Config) -> int:
    """Returns the number of devices: those of training, if available here."""
    here, mesh = jax.local_device_count(), config.mesh
    wanted = here if mesh.data == -1 else min(here, mesh.data * mesh.fsdp)
    return math.gcd(config.batch_size, wanted)


def _check_same_task(run: TrainedRun, workload: Workload, source: str) -> None:
    """Refuses data whose labels or tokens have another meaning."""
    for name in ("classes", "categories", "vocab", "eod"):
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
