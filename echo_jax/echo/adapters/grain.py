"""Echo as a `grain.IterDataset`: checkpointable, after Grain's worker processes.

Put the echo after ``mp_prefetch``, not before it: inside the workers every repeat
would cross the process boundary and cost as much as a fresh item.
"""

import json
from typing import Any

import grain

from echo_jax.echo.driver import prefetched
from echo_jax.echo.echo import HostEchoIterator
from echo_jax.echo.plans import make_plan
from echo_jax.echo.spec import AnySpec, check_spec, left_out

__all__ = ["EchoDataset", "EchoDatasetIterator", "echo", "echo_batches"]


class _LoaderIterator(grain.DatasetIterator):
    """The iterator of a `grain.DataLoader`, with a dict as state."""

    def __init__(self, iterator: grain.DataLoaderIterator):
        super().__init__()
        self._iterator: Any = iterator

    def __next__(self) -> Any:
        self._assert_not_closed()
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        return json.loads(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(json.dumps(state).encode())

    def start_prefetch(self) -> None:
        self._iterator.start_prefetch()

    def close(self) -> None:
        super().close()
        self._iterator = None  # It has no close method; worker processes end with it.


class EchoDataset(grain.IterDataset):
    """The dataset that `echo` returns."""

    def __init__(self, dataset: Any, spec: AnySpec | None, **options: Any):
        if not isinstance(dataset, grain.IterDataset | grain.DataLoader):
            way = "Use ej.echo for the loaders of other libraries."
            if isinstance(dataset, grain.MapDataset):
                way = "Call its to_iter_dataset() first."
            elif hasattr(dataset, "__next__"):
                way = "Give what it was made from; call iter() on the result."
            raise TypeError(
                "dataset must be a grain.IterDataset or a grain.DataLoader, got a "
                f"{type(dataset).__name__}. {way}"
            )
        if spec is not None:
            # Raises at once for an impossible spec.
            if not (options.get("stacked") and left_out(check_spec(spec))):
                make_plan(spec)
            prefetched(spec, options["prefetch"])
        self._loader = dataset if isinstance(dataset, grain.DataLoader) else None
        super().__init__(dataset if isinstance(dataset, grain.IterDataset) else ())
        self._spec, self._options = spec, options

    def __iter__(self) -> "EchoDatasetIterator":
        """Starts an iterator of its own over the dataset."""
        loader = self._loader
        parent = _LoaderIterator(iter(loader)) if loader else self._parent.__iter__()
        return EchoDatasetIterator(parent, self._spec, **self._options)


class EchoDatasetIterator(HostEchoIterator, grain.DatasetIterator):
    """An `echo_jax.EchoIterator` with the interface of a Grain iterator."""

    def __init__(
        self, parent: grain.DatasetIterator, spec: AnySpec | None, **options: Any
    ):
        grain.DatasetIterator.__init__(self, parent)
        HostEchoIterator.__init__(self, parent, spec, **options)

    # Grain closes an iterator when Python ends, after the names of this module.
    _close_parent = grain.DatasetIterator.close

    def start_prefetch(self) -> None:
        """Starts to read ahead: a thread of the echo if it has one, else the parent."""
        if prefetched(self._spec, self._prefetch):
            # That thread is the only one that may use the parent.
            self._reader.is_ready(0)
        else:
            super().start_prefetch()

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use; also closes the parent."""
        super().close()
        self._close_parent()


def echo(
    dataset: grain.IterDataset | grain.DataLoader,
    spec: AnySpec,
    *,
    batch: bool = False,
    drop_remainder: bool = False,
    tags: bool = False,
    prefetch: int | None = None,
) -> EchoDataset:
    """Repeats the elements of a Grain dataset or data loader as a spec says.

    ``dataset`` is the stages before the echo, and elements are its items. A
    `grain.MapDataset` becomes such a dataset with ``to_iter_dataset()``, after which no
    element can be read by its index. The other arguments and errors are as in
    `echo_jax.echo`. For a dataset of batches use `echo_batches`.

    Returns:
      A dataset whose iterator's state is plain data and the parent's state, which
      Grain's checkpoint handlers for Orbax save and restore. The iterator also has
      ``counts``, ``tags`` and ``log``.

    Raises:
      TypeError: The dataset is neither a `grain.IterDataset` nor a `grain.DataLoader`.

    Example:
      >>> from echo_jax import EchoSpec
      >>> source = grain.MapDataset.range(4).to_iter_dataset()
      >>> list(echo(source, EchoSpec(factor=2)))
      [0, 0, 1, 1, 2, 2, 3, 3]
    """
    options = {"batch": batch, "drop_remainder": drop_remainder, "tags": tags}
    return EchoDataset(dataset, spec, **options, prefetch=prefetch)


def echo_batches(
    dataset: grain.IterDataset | grain.DataLoader,
    spec: AnySpec | None = None,
    *,
    drop_remainder: bool = False,
    tags: bool = False,
    prefetch: int | None = None,
) -> EchoDataset:
    """Repeats the examples of a Grain dataset or data loader of batches.

    Args and errors are as in `echo`, and the result is a dataset of batches. Without
    a spec, the first batch chooses one; see `echo_jax.echo_batches`.

    Example:
      >>> from echo_jax import EchoSpec
      >>> batches = grain.MapDataset.range(4).batch(2).to_iter_dataset()
      >>> spec = EchoSpec(2, order="consecutive", batch_size=4)
      >>> [x.tolist() for x in echo_batches(batches, spec)]
      [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    options = {"stacked": True, "drop_remainder": drop_remainder, "tags": tags}
    return EchoDataset(dataset, spec, **options, prefetch=prefetch)
