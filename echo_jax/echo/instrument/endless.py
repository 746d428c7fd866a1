"""An upstream without end, for a consumer that must not run out of batches."""

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Endless"]


class Endless(Iterator[Any]):
    """Yields the items of an iterable again and again; an iterator must not end."""

    def __init__(self, upstream: Iterable[Any]):
        self._upstream = upstream
        self._iterator = iter(upstream)
        # The caller's iterator is not closed here, and cannot start again.
        self._owned = self._iterator is not upstream
        self._taken = 0

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            return self._again()
        self._taken += 1
        return batch

    def _again(self) -> Any:
        """Returns the first batch of another pass."""
        if not self._owned:
            raise ValueError(
                f"the upstream, an iterator, ended after {self._taken} batches; give "
                "the iterable that it is from, which can be started again"
            )
        self.close()
        self._iterator = iter(self._upstream)
        for batch in self._iterator:
            self._taken += 1
            return batch
        raise ValueError("the upstream is empty; give an iterable of batches")

    def close(self) -> None:
        """Closes an iterator that this class has made."""
        if self._owned and hasattr(self._iterator, "close"):
            self._iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
