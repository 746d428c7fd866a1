"""F12: what is downstream of an echo writes into what it was given."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import echo_jax as ej
from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held

ORDERS = ("consecutive", "window_shuffle", "shuffle_buffer", "spread")

_ITEMS = 60
_SHAPE = (1, 6)


class _Items:
    """Items that can be told apart, from arrays that are used again and again."""

    def __init__(self):
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == _ITEMS:
            raise StopIteration
        self._next += 1
        return {"x": np.full(_SHAPE, self._next, np.int32)}

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def random_spec(order: str, rng: random.Random) -> ej.EchoSpec:
    """Draws an echo of an order, of batches of four."""
    buffer = 1 if order == "consecutive" else rng.randint(12, 24)
    factor = rng.choice((1, 2, 2.5, 4)) if order != "spread" else rng.choice((2, 2.5))
    return ej.EchoSpec(factor, buffer, order, 4, rng.randrange(1000))


def _overwrite(array: np.ndarray, rng: random.Random) -> str:
    """Writes into an array as a careless transform does; says how it went."""
    ways: list[Callable[[], Any]] = [
        lambda: array.__imul__(7),
        lambda: array.fill(-1),
        lambda: np.add(array, 5, out=array),
        lambda: array.sort(axis=None) if array.ndim == 1 else array.__setitem__(0, 9),
        lambda: array.view(np.uint8).fill(3),
    ]
    try:
        rng.choice(ways)()
    except ValueError:
        return "refused"
    return "written"


def write(order: str, rng: random.Random, bench: Bench) -> Outcome:
    """Writes into some uses: each is refused, or no other use has changed."""
    spec = random_spec(order, rng)
    stacked = rng.random() < 0.5
    options = {"batch": stacked} if stacked else {}
    with ej.echo(_Items(), spec, **options) as echo:
        wanted = [np.array(use["x"]) for use in echo]
    kept, refused, written = [], 0, 0
    with ej.echo(_Items(), spec, **options) as echo:
        for number, use in enumerate(echo):
            if not np.array_equal(use["x"], wanted[number]):
                what = f"use {number} of {spec} changed by writing into one before it"
                return Outcome(Verdict.WRONG, what)
            if rng.random() < 0.5:
                is_refused = _overwrite(use["x"], rng) == "refused"
                refused, written = refused + is_refused, written + (not is_refused)
            else:
                kept.append((number, use["x"]))
    # Nor has one that was given out before.
    for number, use in kept:
        if not np.array_equal(use, wanted[number]):
            return Outcome(Verdict.WRONG, f"use {number} of {spec} changed later")
    return held(f"{refused} refused, {written} of own memory")


F12 = Fault(
    name="F12",
    title="A transform that writes into its input",
    holds="refused, or changes nothing that anybody else sees",
    trials={
        order: (lambda rng, bench, order=order: write(order, rng, bench))
        for order in ORDERS
    },
)
