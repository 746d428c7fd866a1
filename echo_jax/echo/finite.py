"""Finds items that are not finite when they enter, before their first use.

One NaN makes the loss of every batch that contains it NaN, and an echo would repeat it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from echo_jax.echo.arguments import integer
from echo_jax.echo.tree import flatten
from echo_jax.echo.upstream import is_resumable, iterator_of


class BadItemError(ValueError):
    """An item holds NaN or infinity, and the limit of skipped items is reached."""


def is_finite(tree: Any) -> bool:
    """Returns whether all floating-point numbers of a pytree are finite."""
    # The common kinds first: every fresh item is checked.
    parts = tree.values() if type(tree) is dict else (tree,)
    odd = (x for x in parts if type(x) is not np.ndarray or x.dtype.kind not in "biu")
    return not any(_counted(leaf)[0] for part in odd for _, leaf in flatten(part))


def what_is_bad(tree: Any) -> str:
    """Returns a text that lists the leaves of an item that are not finite."""
    counted = [(path, *_counted(leaf)) for path, leaf in flatten(tree)]
    return ", ".join(
        f"item{path} holds NaN or infinity in {bad} of {size} values"
        for path, bad, size in counted
        if bad
    )


def _counted(leaf: Any) -> tuple[int, int]:
    """Returns how many values of a leaf are NaN or infinite, and of how many."""
    if not isinstance(leaf, float | complex) and not hasattr(leaf, "__array__"):
        return 0, 0
    try:
        array = np.asarray(leaf)
        # NumPy's own floats, and dtypes like bfloat16, which are void for it.
        if array.dtype.kind not in "fcV":
            return 0, 0
        return array.size - int(np.count_nonzero(np.isfinite(array))), array.size
    except TypeError:  # Such as random keys of jax.
        return 0, 0


class FiniteIterator(Iterator[Any]):
    """The iterator that `check_finite` returns, with its counts of items."""

    taken: int  # items taken from the upstream, skipped ones included
    skipped: int  # items that were not finite

    def __init__(self, iterator: Any, max_bad: int):
        self.taken = self.skipped = 0
        self._iterator, self._max_bad = iterator, max_bad
        if is_resumable(iterator):
            self.get_state, self.set_state = self._get_state, self._set_state
        if hasattr(iterator, "restart"):
            self.restart = iterator.restart

    def __next__(self) -> Any:
        """Returns the next finite item.

        Raises:
          BadItemError: The item is not finite, and the limit of skipped items is
            reached. The item is counted, and the next call continues after it.
        """
        while True:
            item = next(self._iterator)
            self.taken += 1
            if is_finite(item):
                return item
            self.skipped += 1
            if self.skipped > self._max_bad:
                raise BadItemError(
                    f"item {self.taken - 1} is not finite: {what_is_bad(item)}; mend "
                    "it, or skip such items with check_finite(iterable, max_bad="
                    f"{self.skipped}) or more"
                )

    def _get_state(self) -> dict[str, Any]:
        upstream = self._iterator.get_state()
        return {"skipped": self.skipped, "taken": self.taken, "upstream": upstream}

    def _set_state(self, state: dict[str, Any]) -> None:
        if set(state) != {"skipped", "taken", "upstream"}:
            raise ValueError(
                f"a state with the keys {sorted(state)} is none of check_finite; give "
                "one that it gave"
            )
        self._iterator.set_state(state["upstream"])
        self.skipped, self.taken = state["skipped"], state["taken"]


def check_finite(iterable: Iterable[Any], *, max_bad: int = 0) -> FiniteIterator:
    """Passes on the finite items only; put it before an echo.

    It checks only floating-point leaves, of any precision; integers cost nothing, and
    objects that are no containers of jax are not opened. In front of an echo that reads
    ahead, ``echo(check_finite(items), spec, prefetch=2)``, the reading thread does the
    check. The trainer checks its own pipelines: see ``config.data.check_finite``.

    Args:
      iterable: Yields pytrees. The result has a state where `echo_jax.echo` has one.
      max_bad: The number of items that are not finite that may be skipped; the next one
        is an error.

    Returns:
      An iterator of the finite items, with ``taken`` and ``skipped``.

    Raises:
      TypeError, ValueError: ``max_bad`` is not an integer, or negative.

    Example:
      >>> from echo_jax import EchoSpec, echo
      >>> items = check_finite([1.0, float("nan"), 2.0], max_bad=1)
      >>> list(echo(items, EchoSpec(2))), items.skipped
      ([1.0, 1.0, 2.0, 2.0], 1)
    """
    return FiniteIterator(iterator_of(iterable), integer("max_bad", max_bad, 0))
