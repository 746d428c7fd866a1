"""Reports the speed and the bad items of the stages above the echo."""

from typing import Any

import grain

from echo_jax.echo.bad_items import BadItems
from echo_jax.echo.instrument.fresh_time import FreshTime

__all__ = ["TimedFresh", "WithFreshTime"]


class WithFreshTime(grain.IterDataset):
    """Its parent's elements, with `fresh_time` and `bad_items` for the trainer."""

    def __init__(
        self, parent: grain.IterDataset, fresh_time: FreshTime, bad_items: BadItems
    ):
        super().__init__(parent)
        self.fresh_time, self.bad_items = fresh_time, bad_items

    def __iter__(self) -> grain.DatasetIterator:
        return self._parent.__iter__()


class TimedFresh(WithFreshTime):
    """Times how long the echo waits for each fresh element of a dataset."""

    def __iter__(self) -> grain.DatasetIterator:
        return _TimedIterator(self._parent.__iter__(), self.fresh_time)


class _TimedIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, fresh_time: FreshTime):
        super().__init__(parent)
        self._time = fresh_time
        self._time.restart()

    def __next__(self) -> Any:
        began_s = self._time.now()
        element = next(self._parent)
        self._time.took(began_s)
        return element

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)
        self._time.restart()
