"""The bounds of law 4 and law 6 for each order: rereads, and the places of uses."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from echo_jax.echo.laws.harness import Trial, Use
from echo_jax.echo.laws.modes import uses_by_item
from echo_jax.echo.orders.spread import CohortSizes
from echo_jax.echo.spec import EchoSpec

__all__ = ["ORDER_LAWS", "OrderLaws"]


@dataclass(frozen=True)
class OrderLaws:
    """The bounds of one order.

    Attributes:
      most_rereads: How many items a restore may read again (law 4).
      check_bounds: Checks the order's promises about the places of uses (law 6).
    """

    most_rereads: Callable[[EchoSpec], int]
    check_bounds: Callable[[Trial, EchoSpec, list[Use]], None]


def _consecutive_bounds(trial: Trial, spec: EchoSpec, uses: list[Use]) -> None:
    """All uses of an item are adjacent."""
    latest: dict[int, int] = {}
    for position, use in enumerate(uses):
        lag = position - latest.get(use.fresh_index, position - 1)
        if lag > 1:
            where = f"at use {position}"
            trial.fail(6, where, f"a lag of 1 for item {use.fresh_index}", lag)
        latest[use.fresh_index] = position


def _shuffle_bounds(trial: Trial, spec: EchoSpec, uses: list[Use]) -> None:
    """No use comes after one of an item that is `buffer` or more younger."""
    newest, buffer = -1, spec.buffer
    for position, use in enumerate(uses):
        newest = max(newest, use.fresh_index)
        if newest - use.fresh_index >= buffer:
            expected = f"items {newest - buffer + 1} to {newest}"
            trial.fail(6, f"at use {position}", expected, f"item {use.fresh_index}")


def _shuffle_buffer_rereads(spec: EchoSpec) -> int:
    """Returns the items from the oldest use in the buffer to the round's end."""
    # After M (ln M + c) draws some slot of M was never drawn with a probability of at
    # most M (1 - 1/M)^(M (ln M + c)) < exp(-c): 5e-18 with c = 40. So the whole buffer
    # is from that many last uses. A round is M draws or eight batches, and one item in
    # M/8 can be an anchor.
    size = spec.buffer
    age = size * (math.log(size) + 40)
    since = max(size, 8 * spec.batch_size)
    return math.ceil((age + since) / spec.schedule.min_factor) + size // 8 + 2


def _shuffle_buffer_bounds(trial: Trial, spec: EchoSpec, uses: list[Use]) -> None:
    """No use leaves the buffer before it has entered."""
    # Uses count from 0, those of an item are adjacent. Draw t takes one of the uses
    # below t + M; chance decides how late. After the end of the stream some draws find
    # nothing, but all uses have entered then.
    due = uses_by_item(spec, trial.num_items)
    first = list(itertools.accumulate(due, initial=0))
    for position, use in enumerate(uses):
        number = first[use.fresh_index] + use.repeat
        entered = position + spec.buffer
        if number >= entered:
            expected = f"one of the first {entered} uses"
            trial.fail(6, f"at use {position}", expected, f"use {number}, {use}")


def _spread_rereads(spec: EchoSpec) -> int:
    """Returns the items of the rounds that are still in use."""
    if spec.schedule.max_factor == 1:
        return 1
    # A round takes at most buffer / (e - 1) items, and at most two buffers. Its items
    # live for ceil(e) rounds. For a varying factor only the bound m is known, so its
    # rounds take buffer / (ceil(m) - 1) items.
    rounds = math.ceil(spec.schedule.max_factor)
    constant = spec.schedule.constant
    lived = rounds - 1 if constant is None else constant - 1
    return math.ceil(rounds * min(Fraction(1) / lived, 2) * spec.buffer)


def _spread_bounds(trial: Trial, spec: EchoSpec, uses: list[Use]) -> None:
    """No twins, repeats from the second batch on, an even feed, and even lags."""
    if spec.schedule.max_factor == 1:
        return  # There is nothing to spread.
    size, due = spec.batch_size, uses_by_item(spec, trial.num_items)
    sizes = CohortSizes(spec.schedule, spec.buffer, size)
    first_uses = [p for p, use in enumerate(uses) if use.repeat == 0]
    # After the last fresh item, missing items leave gaps.
    end = first_uses[-1] + 1 if first_uses else 0
    num_warm_items = sum(sizes.warm)
    warm = first_uses[num_warm_items] if num_warm_items < len(first_uses) else end
    factor = spec.schedule.constant
    for start in range(0, end - size + 1, size):
        where = f"in the batch of uses {start} to {start + size - 1}"
        batch = uses[start : start + size]
        index, count = Counter(use.fresh_index for use in batch).most_common(1)[0]
        if count > 1:
            trial.fail(6, where, f"item {index} once", f"{count} times")
        fresh = sum(use.repeat == 0 for use in batch)
        if factor is not None and start >= warm:
            least, most = math.floor(size / factor), math.ceil(size / factor)
            if not least <= fresh <= most:
                trial.fail(6, where, f"{least} to {most} fresh items", fresh)
        if start == size > 1 and min(due[:size]) > 1 and fresh == size:
            trial.fail(6, where, "the first repeats", "only fresh items")
    if factor is None:
        return
    # Merging the cohorts moves a use by at most this many places.
    slack, length = sizes.max_uses + 2, sizes.steady * factor
    latest: dict[int, int] = {}
    for position, use in enumerate(uses[:end]):
        before = latest.get(use.fresh_index, -1)
        lag = position - before
        if before >= warm and not length / 2 - slack <= lag <= length * 3 / 2 + slack:
            expected = f"half to one and a half rounds of {float(length):.4g} uses"
            trial.fail(6, f"at use {position}", expected, f"a lag of {lag}")
        latest[use.fresh_index] = position


ORDER_LAWS = {
    "consecutive": OrderLaws(lambda spec: 1, _consecutive_bounds),
    "shuffle": OrderLaws(lambda spec: 2 * spec.buffer, _shuffle_bounds),
    "shuffle_buffer": OrderLaws(_shuffle_buffer_rereads, _shuffle_buffer_bounds),
    "spread": OrderLaws(_spread_rereads, _spread_bounds),
}
