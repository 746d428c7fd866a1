"""The interface between the trainer and a workload: a task, its data, its metric.

The trainer knows no workload by name; it uses only these classes.
"""

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# Wide enough for the longest row; a table is only as wide as it needs.
_TABLE_WIDTH = 400

Batch = dict[str, Any]
"""A batch: a dict of arrays with a leading batch axis of size B."""

Sums = dict[str, tuple[ArrayLike, ArrayLike]]
"""The sum and the count of each metric, scalars: means of them are merged
exactly, over batches, devices and processes."""

Variables = dict[str, Any]
"""Flax variable collections: ``{"params": ..., "batch_stats": ...}``."""


Augment = Callable[[Any, jax.Array], Any]
"""Augments a batch on the devices: a pure function of a batch and keys.

The batch has decoded items with a leading axis of size B, and the keys are a random key
for each, ``key<threefry2x32>[B]``. An augmentation is a static argument of the jitted
step. Those that are equal by value, such as frozen dataclasses, share a compilation.
"""


class Evaluator(Protocol):
    """Computes metrics of a split on the host that are not sums over examples."""

    def add(self, batch: Batch, outputs: Any) -> None:
        """Adds the host's batch, and the outputs of `Task.predict` as NumPy arrays.

        Rows with ``batch["mask"]`` 0 are padding and must not count.
        """
        ...

    def result(self) -> dict[str, float]:
        """Returns the metrics of all added batches."""
        ...


def masked(values: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the count of the values, ``float32[B]``, with mask 1."""
    return (values * batch["mask"]).sum(), batch["mask"].sum()


class Task(abc.ABC):
    """A model and its loss, as pure functions of explicit arrays.

    A task is a static argument of the jitted step, so a subclass is a frozen
    dataclass of hashable fields: equal tasks share one compilation.
    """

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Variables:
        """Returns newly initialised variables."""

    @abc.abstractmethod
    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns the training loss of every example, new variables, and metrics.

        Args:
          variables: All collections; only ``"params"`` gets gradients.
          batch: A training batch, without its echo tags.
          key: Randomness of this update (dropout); derived from (seed, update).

        Returns:
          The loss of each example, ``float32[B]``; the collections other than
          ``"params"`` after the step (batch statistics), ``{}`` if none; and
          ``{metric: (sum, count)}`` over the batch, ``{}`` if none. Metrics are
          gathered on the devices. Every logged row has the mean of each as
          ``train_METRIC``, over the updates since the last row.
        """

    @abc.abstractmethod
    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns ``{metric: (sum, count)}`` over the examples with mask 1.

        ``batch["mask"]``, ``float32[B]``, is 0 for padding.
        """

    @property
    def virtual_batch(self) -> int:
        """Examples that batch norm normalises together; 1 if any number is possible.

        The number of examples that a device computes at once must be a multiple of it.
        """
        model = getattr(self, "model", None)
        return getattr(model, "virtual_batch", None) or 1

    def table(self) -> str:
        """Returns a readable description of the model, in lines.

        By default it lists the arrays of `init` with their types and shapes, without
        compiling anything.
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
        """Returns more metrics, by name, that follow from the means over the split.

        An example is a perplexity, which is not the mean of perplexities. `means` has
        the sum divided by the count of every metric of `evaluate`.
        """
        del means
        return {}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns the model's predictions for every example, ``[B, ...]``.

        Users of a trained model and evaluators call it. For an evaluator it is compiled
        together with `evaluate`, so that common values are computed once. The batch
        has the entries that the model reads, without labels and mask.

        Raises:
          NotImplementedError: The task makes no predictions.
        """
        raise NotImplementedError(f"{type(self).__name__} predicts nothing")

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of what `predict` reads of a batch; raises as it does."""
        raise NotImplementedError(f"{type(self).__name__} predicts nothing")

    def decode_input(self, encoded: bytes | np.ndarray) -> dict[str, Any]:
        """Returns the evaluation item of an image: a file's bytes, or uint8[H, W, C].

        Raises:
          ValueError: The task does not predict from images, or this is not an image.
        """
        raise ValueError(
            f"{type(self).__name__} does not predict from images; give it a batch of "
            "its own inputs."
        )


@dataclass(frozen=True)
class ModelTask(Task):
    """A task whose model is a Flax module of one input; see `input_shapes`."""

    model: nn.Module

    def init(self, key: jax.Array) -> Variables:
        """Returns newly initialised variables."""
        return dict(self.model.init(key, jnp.zeros(*self._input()), train=False))

    def table(self) -> str:
        """Returns Flax's table of the model, which is traced but not compiled."""
        made = self.model.tabulate(
            jax.random.key(0),
            np.zeros(*self._input()),
            train=False,
            console_kwargs={"width": _TABLE_WIDTH, "force_terminal": False},
        )
        return "\n".join(line.strip() for line in made.strip().split("\n")) + "\n"

    def _input(self) -> tuple[tuple[int, ...], Any]:
        """Shape and type of an example's input; the model reads bytes as floats."""
        (array,) = self.input_shapes(1).values()
        return array.shape, np.float32 if array.dtype == np.uint8 else array.dtype


@dataclass(frozen=True)
class Workload:
    """A task with its data and its metric, and a description of the data.

    Attributes:
      name: The name that configs use.
      task: Model and loss.
      train_dataset: Makes the training pipeline with an echo in it from a spec (such
        as `EchoSpec`) and a `DataShard`, by default the only one. Its batches have the
        echo's tags: ``"fresh_index"`` (``int64[B]``) and ``"repeat"`` (``int32[B]``).
      fresh_dataset: Makes the pipeline of an echo on the devices from a `DataShard`:
        batches of fresh items, up to the stage that the echo follows, without tags.
        Datasets of both pipelines may have a ``fresh_time`` to measure a fresh batch,
        an `echo_jax.data.pipeline.grain_engine.FreshTime`.
      eval_batches: Makes one pass over the evaluation split, called with ``shard=``:
        a process' rows of batches of one constant size with ``"mask"``, the last one
        padded.
      metric: The metric of targets, from `Task.evaluate` or the evaluator.
      mode: Whether a better metric is smaller (``"min"``) or larger (``"max"``).
      evaluator: Makes the `Evaluator` of one pass over the evaluation split; None if
        `Task.evaluate` is enough.
      augment_on_device: A hashable augmentation that the devices apply to every use of
        a decoded item; None if nothing is random.
      num_examples, num_evaluated: Examples of a training and of an evaluation; None
        if unknown.
      first_items: Reads and decodes the first example of each split, so that data that
        does not fit is refused before anything is compiled. By default it does nothing.
      stage_calls: Makes functions to be timed, by stage and in order. Each does one
        stage's work of the training pipeline for one batch. By default ``{}``.
      with_seed: Makes the same workload with the order and the augmentation of another
        seed. None by default: ``probe_repeats`` is refused.
      metadata: A description of the data for ``environment.json``: corpus hash, sizes,
        and whether data or storage is synthetic or simulated.
      task_info: The inputs of the task besides the config, as plain data, such as the
        names of classes. A trained model is used with it where the data is absent.
      task_files: Files that belong to the task, such as a tokenizer's, by name.
    """

    name: str
    task: Task
    train_dataset: Callable[..., grain.IterDataset]
    fresh_dataset: Callable[..., grain.IterDataset]
    eval_batches: Callable[..., Iterable[Batch]]
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    evaluator: Callable[[], Evaluator] | None = None
    augment_on_device: Augment | None = None
    num_examples: int | None = None
    num_evaluated: int | None = None
    first_items: Callable[[], Any] = bool
    stage_calls: Callable[[], Mapping[str, Callable[[], Any]]] = dict
    with_seed: "Callable[[int], Workload] | None" = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    task_info: Mapping[str, Any] = field(default_factory=dict)
    task_files: Mapping[str, bytes] = field(default_factory=dict)
