"""F7 for items: NaN and infinity in what an echo is given."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import echo_jax as ej
from benchmarks.faults.aliasing import ORDERS, random_spec
from benchmarks.faults.campaign import Bench, Outcome, Verdict, held

_ITEMS = 60
_WRONG = (np.nan, np.inf, -np.inf)


class _Items(Iterator[Any]):
    """Items that can be told apart, of which some hold a value that is not finite."""

    def __init__(self, bad: dict[int, float]):
        self._bad, self._next = bad, 0

    def __next__(self) -> Any:
        if self._next == _ITEMS:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        value = self._bad.get(number, number)
        return {"number": np.int64(number), "x": np.array([0, value], np.float32)}

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _echoed(
    bad: dict[int, float], max_bad: int, spec: ej.EchoSpec, prefetch: int | None
) -> Any:
    fresh = ej.check_finite(_Items(bad), max_bad=max_bad)
    return ej.echo(fresh, spec, prefetch=prefetch)


def _seen(uses: Any) -> list[tuple[int, bytes]]:
    return [(int(use["number"]), use["x"].tobytes()) for use in uses]


def skip(order: str, rng: random.Random, bench: Bench) -> Outcome:
    """Skips bad items: none is used, resumes agree, and one too many ends it."""
    spec = random_spec(order, rng)
    prefetch = rng.choice((None, 2))
    numbers = rng.sample(range(_ITEMS), rng.randint(1, 9))
    bad = {number: rng.choice(_WRONG) for number in numbers}
    what = f"items {sorted(bad)} of {spec}, prefetch={prefetch}"
    with _echoed(bad, len(bad), spec, prefetch) as echo:
        whole = _seen(echo)
    good = set(range(_ITEMS)) - bad.keys()
    if {number for number, _ in whole} != good:
        return Outcome(Verdict.WRONG, f"{what}: other items than the good ones")
    at = rng.randrange(len(whole))
    with _echoed(bad, len(bad), spec, prefetch) as echo:
        _seen(itertools.islice(echo, at))
        state = echo.get_state()
    with _echoed(bad, len(bad), spec, prefetch) as echo:
        echo.set_state(state)
        if _seen(echo) != whole[at:]:
            return Outcome(Verdict.WRONG, f"{what}: resumed at {at} to another end")
    try:
        with _echoed(bad, len(bad) - 1, spec, prefetch) as echo:
            _seen(echo)
    except ej.BadItemError as error:
        if f"item {max(bad)} is not finite" in str(error):
            return held(f"{what}: {error}")
        return Outcome(Verdict.WRONG, f"{what}: {error}")
    return Outcome(Verdict.SILENT, f"{what}: one more than may be, and no word")


ITEM_TRIALS = {f"items, {order}": partial(skip, order) for order in ORDERS}
