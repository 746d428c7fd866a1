"""The upstream, the recorder and the expectations that the laws of an echo use.

Numbers of uses are computed a second time with fractions, and fetches with Python's
integers. So a mistake in `echo_jax.echo.schedule` or in a plan cannot confirm itself.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.keys import sequence
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import outputs_of
from echo_jax.echo.schedule import FactorByItem
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, StochasticSpec
from echo_jax.echo.tree import flatten, tree_map

END = "the end of the stream"


def bounds_of(spec: AnySpec, num_items: int) -> list[tuple[int, int]]:
    """Returns the least and the largest number of uses of every item."""
    if isinstance(spec, AdaptiveSpec):
        return [(spec.min_uses, spec.max_uses)] * num_items
    if isinstance(spec, StochasticSpec):
        return [(1, len(batches_of(spec, num_items)))] * num_items
    factors = (_factor_of(spec.factor, index) for index in range(num_items))
    totals = itertools.accumulate(factors, initial=Fraction())
    uses = [math.floor(b) - math.floor(a) for a, b in itertools.pairwise(totals)]
    return list(zip(uses, uses, strict=True))


def _factor_of(factor: Any, index: int) -> Fraction:
    """Returns the factor of an item from the user's own value."""
    if isinstance(factor, FactorByItem):
        return Fraction(round(factor.function(index) * 10**6), 10**6)
    if isinstance(factor, Mapping):
        return _factor_of(factor[max(start for start in factor if start <= index)], 0)
    exact = Fraction(factor)
    return exact.limit_denominator(10**6) if isinstance(factor, float) else exact


def batches_of(spec: StochasticSpec, num_items: int) -> list[tuple[bool, int]]:
    """Returns (whether it is fetched, number of uses) of every stochastic batch."""
    batches, fetched = [], 0
    while fetched < num_items:
        number = len(batches)
        probability = spec.fetch.probability(np.array([number]))[0]
        # A coin of 32 bits for each batch, from the seed's first purpose.
        coin = sequence(spec.seed, 0, number) >> 32
        is_fetched = number == 0 or coin < int(probability * 2**32)
        size = min(spec.batch_size, num_items - fetched if is_fetched else fetched)
        fetched += size if is_fetched else 0
        batches.append((is_fetched, size))
    return batches


def plan_run(
    spec: AnySpec, num_items: int, ready: Callable[[], bool] = lambda: False
) -> tuple[list[tuple[int, int]], DecisionLog | None]:
    """Returns the (fresh index, repeat) pairs and the log of a plan without a store."""
    # `ready` tells whether optional items (`need.may`) are there.
    plan, pairs = make_plan(spec), []
    for _, uses in outputs_of(plan, num_items, spec.batch_size, ready):
        pairs += zip(uses.fresh_index[0].tolist(), uses.repeat[0].tolist(), strict=True)
    return pairs, getattr(plan, "log", None)


class CountingUpstream(Iterator[Any]):
    """A resumable iterator that counts how many items are read from it.

    A backend with its own reader takes ``items`` instead, and passes each item that it
    has read through `counted`.
    """

    def __init__(self, items: Sequence[Any], pause_s: float = 0.0):
        """Starts before the first item; every fourth read takes pause_s seconds."""
        self.items = items
        self.reads = 0  # also those that a restore makes
        self._next_item = 0
        self._pause_s = pause_s

    def __next__(self) -> Any:
        if self._next_item >= len(self.items):
            raise StopIteration
        item = self.items[self._next_item]
        self._next_item += 1
        return self.counted(item)

    def counted(self, item: Any) -> Any:
        """Counts the read of an item, and returns the item."""
        if self._pause_s and self.reads % 4 == 0:
            time.sleep(self._pause_s)
        self.reads += 1
        return item

    def get_state(self) -> dict[str, int]:
        return {"next_item": self._next_item}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._next_item = state["next_item"]


MakeEcho = Callable[[CountingUpstream, Any], Iterator[Any]]


class Use(NamedTuple):
    """One item that came out: its tags, and all its bits."""

    fresh_index: int
    repeat: int
    bits: Any

    def __repr__(self) -> str:
        return f"item {self.fresh_index} repeat {self.repeat}"


@dataclass
class Record:
    """The outputs of a run; the reads and states before the first and after each."""

    outputs: list[list[Use]]
    reads: list[int]
    states: list[Any]
    log: Any = None

    @property
    def uses(self) -> list[Use]:
        return list(itertools.chain.from_iterable(self.outputs))


@dataclass(frozen=True)
class Trial:
    """An echo under test, and how it is tested; see `assert_echo_laws`."""

    make_echo: MakeEcho
    spec: AnySpec
    num_items: int
    make_item: Callable[[int], Any]
    others: tuple[MakeEcho, ...]
    read_ahead: int
    max_rereads: int
    law: str = ""
    pause_s: float = 0.0  # of the upstream

    def start(
        self, wrap: Callable[[list[Any]], Sequence[Any]] = list
    ) -> tuple[Any, CountingUpstream]:
        """Makes an echo over a new upstream; ``wrap`` can make its items misbehave."""
        items = [self.make_item(index) for index in range(self.num_items)]
        upstream = CountingUpstream(wrap(items), self.pause_s)
        return self.make_echo(upstream, self.spec), upstream

    def contents(self) -> list[Any]:
        """Returns the content of every item, as it is found in a `Use`."""
        return [bits_of(self.make_item(index)) for index in range(self.num_items)]

    def run(
        self,
        state: Any = None,
        *,
        states: bool = False,
        consume: Callable[[Any], None] = lambda item: None,
    ) -> Record:
        """Runs an echo to its end, from its start or a state, and closes it."""
        echo, upstream = self.start()
        if state is not None:
            echo.set_state(state)
        record = Record([], [upstream.reads], [echo.get_state()] if states else [])
        # After its end, another request must not yield an output.
        for output in itertools.chain(self.limited(echo), self.limited(echo)):
            record.outputs.append(uses_of(output))
            record.reads.append(upstream.reads)
            if states:
                record.states.append(echo.get_state())
            consume(output[0])
        record.log = getattr(echo, "log", None)
        close(echo)
        return record

    def limited(self, echo: Iterator[Any]) -> Iterator[Any]:
        """Yields the outputs, with a limit in case the echo never ends."""
        most = sum(most for _, most in bounds_of(self.spec, self.num_items))
        # Without `iter` of the echo, which may warn at its end.
        return itertools.islice(iter(partial(next, echo, None), None), most + 2)

    def fail(self, where: str, expected: object, got: object) -> NoReturn:
        raise AssertionError(
            f"law {self.law} is broken {where}: expected {expected}, got {got}; "
            f"{self.spec}, num_items={self.num_items}"
        )

    def compare(self, what: str, expected: Sequence[Any], got: Sequence[Any]) -> None:
        """Fails where two sequences differ first."""
        both = itertools.zip_longest(expected, got, fillvalue=END)
        for position, (left, right) in enumerate(both):
            if left != right:
                same = repr(left) == repr(right)
                found = f"other content under the tags {right}" if same else right
                self.fail(f"at output {position} {what}", left, found)


def uses_of(output: Any) -> list[Use]:
    """Returns the uses in an output: an item or a stacked batch, with tags."""
    item, (index, repeat) = output
    if np.ndim(index) == 0:
        return [Use(int(index), int(repeat), bits_of(item))]
    return [
        Use(int(k), int(r), bits_of(tree_map(itemgetter(row), item)))
        for row, (k, r) in enumerate(zip(index, repeat, strict=True))
    ]


def bits_of(item: Any) -> list[tuple[Any, ...]]:
    """Returns the whole content of an item, as values that can be compared."""
    leaves = [(path, leaf, np.asarray(leaf)) for path, leaf in flatten(item)]
    return [
        (path, leaf if x.dtype == object else (x.dtype.str, x.shape, x.tobytes()))
        for path, leaf, x in leaves
    ]


def close(echo: Any) -> None:
    """Closes an iterator that has background work, such as workers."""
    if callable(getattr(echo, "close", None)):
        echo.close()
