"""Echo as a `grain.IterDataset`: checkpointable, after Grain's worker processes.

Put the echo after ``mp_prefetch``, not before it: inside the workers every repeat
would cross the process boundary and cost as much as a fresh item.
"""

from typing import Any

import grain

from echo_jax.echo.echo import EchoIterator
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.spec import EchoSpec

__all__ = ["EchoDataset", "echo"]


class EchoDataset(grain.IterDataset):
    """The dataset that `echo` returns."""

    def __init__(
        self,
        parent: grain.IterDataset,
        spec: EchoSpec,
        *,
        batch: bool = False,
        unbatch: bool = False,
        drop_remainder: bool = False,
        tags: bool = False,
    ):
        """See `echo`."""
        super().__init__(parent)
        self._spec = spec
        self._options = {
            "batch": batch,
            "unbatch": unbatch,
            "drop_remainder": drop_remainder,
            "tags": tags,
        }

    def __iter__(self) -> grain.DatasetIterator:
        """Starts an iterator of its own over the parent."""
        return _GrainEchoIterator(self._parent.__iter__(), self._spec, self._options)


class _GrainEchoIterator(grain.DatasetIterator):
    """An `EchoIterator` with the face and the life cycle of a Grain iterator."""

    def __init__(
        self, parent: grain.DatasetIterator, spec: EchoSpec, options: dict[str, bool]
    ):
        super().__init__(parent)
        self._echo = EchoIterator(parent, spec, **options)

    def __next__(self) -> Any:
        return next(self._echo)

    def get_state(self) -> dict[str, Any]:
        return self._echo.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._echo.set_state(state)


def echo(
    dataset: grain.IterDataset,
    spec: EchoSpec,
    *,
    batch: bool = False,
    unbatch: bool = False,
    drop_remainder: bool = False,
    tags: bool = False,
) -> EchoDataset:
    """Repeats the elements of a Grain dataset as a spec says.

    Args:
      dataset: The stages before the echo. A `grain.MapDataset` becomes one with
        ``to_iter_dataset()``, after which no element can be read by its index.
      spec: What the echo does.
      batch: Whether to stack ``spec.batch_size`` uses into one element.
      unbatch: Whether the dataset yields batches whose examples are the items.
        Goes with ``batch``; see `echo_jax.echo`.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether elements are pairs of element and `echo_jax.Tags`.

    Returns:
      A dataset whose iterator's state is plain integers and the parent's state.

    Raises:
      TypeError: If the dataset is no `grain.IterDataset`.
      ValueError: If the buffer is too small for ``spread`` without twins.

    Example:
      >>> source = grain.MapDataset.range(4).to_iter_dataset()
      >>> list(echo(source, EchoSpec(factor=2)))
      [0, 0, 1, 1, 2, 2, 3, 3]
    """
    if not isinstance(dataset, grain.IterDataset):
        raise TypeError(
            f"an echo needs a grain.IterDataset, not a {type(dataset).__name__}; for a "
            "grain.MapDataset call to_iter_dataset() first: an echo by index would "
            "read every element once per use"
        )
    rounds_of(spec)  # refuses a spec that cannot be carried out, here and now
    return EchoDataset(
        dataset,
        spec,
        batch=batch,
        unbatch=unbatch,
        drop_remainder=drop_remainder,
        tags=tags,
    )
