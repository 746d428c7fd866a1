"""What a workload is to the trainer: a task, its data, its metric.

The trainer knows no workload by name; it sees these classes only.
"""

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import grain
import jax
from jax.typing import ArrayLike

from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.echo.spec import AnySpec

__all__ = ["Augment", "Batch", "Evaluator", "Sums", "Task", "Variables", "Workload"]

Batch = dict[str, Any]
"""A batch: a dict of arrays with a leading batch axis of size B."""

Sums = dict[str, tuple[ArrayLike, ArrayLike]]
"""The sum and the count of each metric, scalars: means of them are merged
exactly, over batches, devices and processes."""

Variables = dict[str, Any]
"""Flax variable collections: ``{"params": ..., "batch_stats": ...}``."""


class Augment(Protocol):
    """An augmentation on the devices: a pure function of a batch and keys.

    It is a static argument of the jitted step, so that one that is equal by value,
    such as a frozen dataclass, shares a compilation.
    """

    def __call__(self, batch: Any, keys: jax.Array) -> Any:
        """Returns the augmented batch.

        Args:
          batch: Decoded items, with a leading axis of size B.
          keys: A random key for each of them, ``key<threefry2x32>[B]``.
        """
        ...


class MakesTraining(Protocol):
    """Makes the training pipeline; see `Workload`."""

    def __call__(self, spec: AnySpec, shard: DataShard = SINGLE) -> grain.IterDataset:
        """Makes a shard of it, which a process trains on."""
        ...


class MakesFresh(Protocol):
    """Makes the pipeline of fresh batches; see `Workload`."""

    def __call__(self, shard: DataShard = SINGLE) -> grain.IterDataset:
        """Makes a shard of it, which a process echoes."""
        ...


class MakesEvaluation(Protocol):
    """Makes a pass over the evaluation split; see `Workload`."""

    def __call__(self, *, shard: DataShard = SINGLE) -> Iterable[Batch]:
        """Makes the rows of every batch that a process evaluates."""
        ...


class Evaluator(Protocol):
    """Judges a split by more than sums over its examples, on the host."""

    def add(self, batch: Batch, outputs: Any) -> None:
        """Takes a batch and what the task predicts of it.

        Args:
          batch: The host's batch, with ``"mask"``: 0 for padding, which must not count.
          outputs: From `Task.predict`, as NumPy arrays.
        """
        ...

    def result(self) -> dict[str, float]:
        """Returns the metrics of all that was added."""
        ...


class Task(abc.ABC):
    """A model and its loss, as pure functions of explicit arrays.

    A task is a static argument of the jitted step, so a subclass is a frozen
    dataclass of hashable fields: equal tasks share one compilation.
    """

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Variables:
        """Returns freshly initialised variables."""

    @abc.abstractmethod
    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns the training loss of every example, new variables, and metrics.

        Args:
          variables: All collections; gradients are taken of ``"params"`` alone.
          batch: A training batch, without its echo tags.
          key: Randomness of this update (dropout); derived from (seed, update).

        Returns:
          The loss of each example, ``float32[B]``; the collections other than
          ``"params"`` after the step (batch statistics), ``{}`` if none; and
          ``{metric: (sum, count)}`` over the batch, ``{}`` if none. Metrics are
          gathered on the devices, and every logged row has a mean of each, over the
          updates since the last one, as ``train_METRIC``.
        """

    @abc.abstractmethod
    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns ``{metric: (sum, count)}`` over the examples with mask 1.

        Args:
          variables: All collections.
          batch: An evaluation batch; ``batch["mask"]`` is ``float32[B]``, 0 for
            padding.
        """

    @property
    def virtual_batch(self) -> int:
        """Examples that batch norm normalises together; 1 if any number will do.

        What a device computes at once must be a multiple.
        """
        model = getattr(self, "model", None)
        return getattr(model, "virtual_batch", None) or 1

    def table(self) -> str:
        """Returns what the model consists of, as lines to be read by people.

        By default these are the arrays of `init`, with their types and shapes. Nothing
        is compiled for it.
        """
        arrays = jax.tree.leaves_with_path(
            jax.eval_shape(lambda: self.init(jax.random.key(0)))
        )
        return "".join(
            f"{jax.tree_util.keystr(path, simple=True, separator='/')}  {array.dtype}"
            f"[{','.join(map(str, array.shape))}]\n"
            for path, array in arrays
        )

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns metrics that follow from the means over the whole split.

        Such as a perplexity, which is no mean of perplexities.

        Args:
          means: Of every metric of `evaluate`: its sum divided by its count.

        Returns:
          By name, what is reported beside them; nothing by default.
        """
        del means
        return {}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns what the model says of every example, ``[B, ...]``.

        For who uses a trained model, and for an evaluator. For the latter it is
        compiled together with `evaluate`, so that what both compute is computed once.

        Args:
          variables: All collections.
          batch: What the model sees of a batch is enough: no labels, and no mask.

        Raises:
          NotImplementedError: The task has nothing to say.
        """
        raise NotImplementedError(f"{type(self).__name__} predicts nothing")

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what `predict` sees of a batch of so many examples.

        Raises:
          NotImplementedError: The task has nothing to say.
        """
        raise NotImplementedError(f"{type(self).__name__} predicts nothing")


@dataclass(frozen=True)
class Workload:
    """A task with its data, the metric that is judged, and what it ran on.

    Attributes:
      name: The name that configs use.
      task: Model and loss.
      metric: The metric that targets refer to: of `Task.evaluate` or the evaluator.
      mode: Whether a better metric is smaller (``"min"``) or larger.
      train_dataset: Makes the training pipeline with an echo in it. Elements
        are batches with two extra entries, ``"fresh_index"`` (``int64[B]``) and
        ``"repeat"`` (``int32[B]``): the echo's tags of every example.
      fresh_dataset: Makes the pipeline of an echo on the devices: batches of fresh
        items, up to the stage that the echo follows, without tags. Datasets of both
        may have a ``fresh_time``, an `echo_jax.echo.instrument.fresh_time.FreshTime`
        by which their echo times what is fresh, and ``bad_items``, an
        `echo_jax.echo.bad_items.BadItems` of fresh items that others are used for.
      eval_batches: Makes one pass over the evaluation split: batches of one
        constant size, the last one padded, with ``"mask"``.
      evaluator: Makes what judges one pass over the evaluation split, in addition to
        `Task.evaluate`; None if that is all.
      augment_on_device: What is done on the devices to every use of a decoded item;
        hashable. None if nothing is random.
      num_examples: How many examples are trained on; None by default, where it is not
        known.
      num_evaluated: How many an evaluation looks at; as above.
      first_items: Reads and decodes the first example of each split, so that data that
        does not fit is refused before anything is compiled; by default nothing is
        looked at.
      stage_calls: Makes functions that do what each stage of the training pipeline
        does for one batch, by the stage's name and in order, to be timed. None by
        default: ``{}``.
      with_threads: Makes the same workload, read by so many threads; None by default,
        where ``data.threads`` cannot be left open.
      with_seed: Makes the same workload, whose training data comes in the order, and
        is augmented as, of another seed; None by default, where ``probe_repeats`` is
        refused.
      metadata: What was read, for ``environment.json`` (corpus hash, sizes, and
        whether data or storage is synthetic or simulated).
      task_info: What the task was made with beside the config, as plain data: what its
        outputs mean, such as the names of classes. A trained model is used with it
        where the data is not.
      task_files: Files that belong to it, such as a tokenizer's, by name.
    """

    name: str
    task: Task
    metric: str
    mode: Literal["min", "max"]
    train_dataset: MakesTraining
    fresh_dataset: MakesFresh
    eval_batches: MakesEvaluation
    evaluator: Callable[[], Evaluator] | None = None
    augment_on_device: Augment | None = None
    num_examples: int | None = None
    num_evaluated: int | None = None
    first_items: Callable[[], Any] = bool
    stage_calls: Callable[[], Mapping[str, Callable[[], Any]]] = dict
    with_threads: "Callable[[int], Workload] | None" = None
    with_seed: "Callable[[int], Workload] | None" = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    task_info: Mapping[str, Any] = field(default_factory=dict)
    task_files: Mapping[str, bytes] = field(default_factory=dict)
