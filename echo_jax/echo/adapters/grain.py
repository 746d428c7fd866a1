"""Echo as a `grain.IterDataset`: checkpointable, after Grain's worker processes.

Put the echo after ``mp_prefetch``, not before it: inside the workers every repeat
would cross the process boundary and cost as much as a fresh item.
"""

from typing import Any

import grain

from echo_jax.echo.counts import Counts, Tags
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.driver import prefetched
from echo_jax.echo.echo import EchoIterator
from echo_jax.echo.plans import make_plan
from echo_jax.echo.spec import AnySpec

__all__ = ["EchoDataset", "EchoDatasetIterator", "echo", "echo_batches"]


class EchoDataset(grain.IterDataset):
    """The dataset that `echo` returns."""

    def __init__(
        self,
        parent: grain.IterDataset,
        spec: AnySpec | None,
        options: dict[str, Any],
    ):
        """See `echo`."""
        super().__init__(parent)
        self._spec = spec
        self._options = options

    def __iter__(self) -> "EchoDatasetIterator":
        """Starts an iterator of its own over the parent."""
        return EchoDatasetIterator(self._parent.__iter__(), self._spec, self._options)


class EchoDatasetIterator(grain.DatasetIterator):
    """An `EchoIterator` with the face and the life cycle of a Grain iterator.

    It is a context manager. To close it closes the stages before the echo, too.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        spec: AnySpec | None,
        options: dict[str, Any],
    ):
        """See `echo`."""
        super().__init__(parent)
        self._echo = EchoIterator(parent, spec, **options)

    @property
    def counts(self) -> Counts:
        """How many fresh items were taken, and uses and repeats made."""
        return self._echo.counts

    @property
    def log(self) -> DecisionLog | None:
        """What an adaptive echo decided so far; None in other modes."""
        return self._echo.log

    @property
    def tags(self) -> Tags | None:
        """The tags of the latest element, None before the first."""
        return self._echo.tags

    def __iter__(self) -> "EchoDatasetIterator":
        """Returns itself; warns where it has ended."""
        iter(self._echo)
        return self

    def __next__(self) -> Any:
        return next(self._echo)

    def get_state(self) -> dict[str, Any]:
        """See `echo_jax.EchoIterator.get_state`."""
        return self._echo.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `echo_jax.EchoIterator.set_state`."""
        self._echo.set_state(state)

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use."""
        self._echo.close()
        super().close()

    def __enter__(self) -> "EchoDatasetIterator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def echo(
    dataset: grain.IterDataset,
    spec: AnySpec,
    *,
    batch: bool = False,
    drop_remainder: bool = False,
    tags: bool = False,
    prefetch: int | None = None,
) -> EchoDataset:
    """Repeats the elements of a Grain dataset as a spec says.

    Args:
      dataset: The stages before the echo. A `grain.MapDataset` becomes one with
        ``to_iter_dataset()``, after which no element can be read by its index.
      spec: What the echo does: an `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`.
      batch: Whether to stack ``spec.batch_size`` uses into one element. For a dataset
        of batches use `echo_batches`.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether elements are pairs of element and `echo_jax.Tags`.
      prefetch: See `echo_jax.echo`.

    Returns:
      A dataset whose iterator's state is plain data and the parent's state. The
      iterator has ``counts``, ``tags`` and ``log``, too.

    Raises:
      TypeError: If the dataset is no `grain.IterDataset`.
      ValueError: If the spec cannot be carried out, such as a buffer that is too small
        for ``spread`` without twins.

    Example:
      >>> from echo_jax import EchoSpec
      >>> source = grain.MapDataset.range(4).to_iter_dataset()
      >>> list(echo(source, EchoSpec(factor=2)))
      [0, 0, 1, 1, 2, 2, 3, 3]
    """
    options = {"batch": batch, "drop_remainder": drop_remainder}
    return _echoed(dataset, spec, options | {"tags": tags, "prefetch": prefetch})


def echo_batches(
    dataset: grain.IterDataset,
    spec: AnySpec | None = None,
    *,
    drop_remainder: bool = False,
    tags: bool = False,
    prefetch: int | None = None,
) -> EchoDataset:
    """Repeats the examples of a Grain dataset of batches, and yields batches.

    Args:
      dataset: The stages before the echo, which yield batches.
      spec: What the echo does. None to choose it by the first batch; see
        `echo_jax.echo_batches`.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether elements are pairs of batch and `echo_jax.Tags`.
      prefetch: See `echo_jax.echo`.

    Returns:
      A dataset of batches; see `echo`.

    Raises:
      TypeError: If the dataset is not a `grain.IterDataset`.
      ValueError: If the spec cannot be carried out.

    Example:
      >>> from echo_jax import EchoSpec
      >>> batches = grain.MapDataset.range(4).batch(2).to_iter_dataset()
      >>> [x.tolist() for x in echo_batches(batches, EchoSpec(2, batch_size=4))]
      [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    options = {"stacked": True, "drop_remainder": drop_remainder}
    return _echoed(dataset, spec, options | {"tags": tags, "prefetch": prefetch})


def _echoed(
    dataset: grain.IterDataset, spec: AnySpec | None, options: dict[str, Any]
) -> EchoDataset:
    if not isinstance(dataset, grain.IterDataset):
        raise TypeError(
            f"an echo needs a grain.IterDataset, not a {type(dataset).__name__}; for a "
            "grain.MapDataset call to_iter_dataset() first: an echo by index would "
            "read every element once per use"
        )
    if spec is not None:
        # Refuses a spec that cannot be carried out, here and now.
        make_plan(spec)
        prefetched(spec, options["prefetch"])
    return EchoDataset(dataset, spec, options)
