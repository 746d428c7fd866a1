"""Lists of items: one hand-over between threads for many items."""

from typing import Any

import grain

__all__ = ["FlattenLists"]


class FlattenLists(grain.IterDataset):
    """Yields the items of lists one by one."""

    def __iter__(self) -> grain.DatasetIterator:
        return _FlattenIterator(self._parent.__iter__())


class _FlattenIterator(grain.DatasetIterator):
    """Its state is the parent's state before the list, and a place in the list."""

    def __init__(self, parent: grain.DatasetIterator):
        super().__init__(parent)
        self._list: list[Any] = []
        self._num_taken = 0
        self._state_before: Any = None

    def __next__(self) -> Any:
        if self._num_taken == len(self._list):
            self._read_list()
        item = self._list[self._num_taken]
        self._num_taken += 1
        return item

    def get_state(self) -> dict[str, Any]:
        if self._num_taken == len(self._list):
            return {"parent": self._parent.get_state(), "num_taken": 0}
        return {"parent": self._state_before, "num_taken": self._num_taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._list, self._num_taken = [], 0
        if state["num_taken"]:
            self._read_list()
            self._num_taken = state["num_taken"]

    def _read_list(self) -> None:
        self._state_before = self._parent.get_state()
        self._list, self._num_taken = next(self._parent), 0
