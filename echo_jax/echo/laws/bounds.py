"""The bounds of laws 4 and 6 for each mode and order: rereads, and places of uses."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from echo_jax.echo.laws.harness import Record, Trial, Use
from echo_jax.echo.laws.modes import batches_of, taken_early, uses_by_item
from echo_jax.echo.orders.spread import CohortSizes
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec

__all__ = ["ORDER_LAWS", "check_bounds", "most_rereads"]


def most_rereads(spec: AnySpec) -> int:
    """Returns how many items a restore may read again: those still in use."""
    if isinstance(spec, AdaptiveSpec | StochasticSpec):
        return spec.buffer + taken_early(spec)
    return ORDER_LAWS[spec.order].most_rereads(spec)


def check_bounds(trial: Trial, record: Record) -> None:
    """Law 6: the promises of each mode and order about lags."""
    spec = trial.spec
    if isinstance(spec, AdaptiveSpec):
        _adaptive_bounds(trial, spec, record.uses)
    elif isinstance(spec, StochasticSpec):
        _stochastic_bounds(trial, spec, record.uses)
    else:
        ORDER_LAWS[spec.order].check_bounds(trial, spec, record.uses)


def _adaptive_bounds(trial: Trial, spec: AdaptiveSpec, uses: list[Use]) -> None:
    """Fresh items come first and in order; repeats are of waiting, held items."""
    size, at, taken = spec.batch_size, 0, 0
    used: Counter[int] = Counter()
    before: set[int] = set()
    for number, takes in enumerate(spec.replay or ()):
        where = f"in batch {number}"
        fresh = range(taken, min(taken + size, trial.num_items) if takes else taken)
        taken = fresh.stop
        oldest = max(0, taken - spec.buffer)
        waiting = [k for k in range(oldest, fresh.start) if used[k] < spec.max_uses]
        end = at + min(size, len(fresh) + len(waiting))
        batch = [use.fresh_index for use in uses[at:end]]
        at = end
        if batch[: len(fresh)] != [*fresh]:
            expected = f"fresh items {fresh.start} to {fresh.stop - 1} first"
            trial.fail(6, where, expected, f"items {batch}")
        if len(set(batch)) < len(batch):
            index, count = Counter(batch).most_common(1)[0]
            trial.fail(6, where, f"item {index} once", f"{count} times")
        repeats = batch[len(fresh) :]
        if wrong := set(repeats).difference(waiting):
            expected = (
                f"repeats of items from {oldest} on, used fewer than max_uses times"
            )
            trial.fail(6, where, expected, f"item {min(wrong)}")
        # Items are drawn from the quarter that has waited longest. An item that was
        # just used is behind the middle, or up to a batch before it.
        before = {k for k in before if used[k] >= spec.min_uses}
        if len(waiting) >= 4 * size and (twice := before.intersection(repeats)):
            expected = f"none of the batch before, as {len(waiting)} items wait"
            trial.fail(6, where, expected, f"item {min(twice)}")
        used.update(batch)
        before = set(batch)


def _stochastic_bounds(trial: Trial, spec: StochasticSpec, uses: list[Use]) -> None:
    """Repeats are distinct within a batch, and of the newest fetched items."""
    at = fetched = 0
    for number, (is_fetched, size) in enumerate(batches_of(spec, trial.num_items)):
        batch = [use.fresh_index for use in uses[at : at + size]]
        at += size
        fetched += size if is_fetched else 0
        if is_fetched or not batch:
            continue
        where = f"in batch {number}"
        index, count = Counter(batch).most_common(1)[0]
        if count > 1:
            trial.fail(6, where, f"item {index} once", f"{count} times")
        oldest = max(0, fetched - spec.buffer)
        for index in batch:
            if not oldest <= index < fetched:
                expected = f"repeats of items {oldest} to {fetched - 1}"
                trial.fail(6, where, expected, f"item {index}")


def _consecutive_bounds(trial: Trial, spec: EchoSpec, uses: list[Use]) -> None:
    """All uses of an item are adjacent."""
    latest: dict[int, int] = {}
    for position, use in enumerate(uses):
        lag = position - latest.get(use.fresh_index, position - 1)
        if lag > 1:
            where = f"at use {position}"
            trial.fail(6, where, f"a lag of 1 for item {use.fresh_index}", lag)
        latest[use.fresh_index] = position


def _window_shuffle_bounds(trial: Trial, spec: EchoSpec, uses: list[Use]) -> None:
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


class OrderLaws(NamedTuple):
    """The bounds of one order: laws 4 (``most_rereads``) and 6 (``check_bounds``)."""

    most_rereads: Callable[[EchoSpec], int]
    check_bounds: Callable[[Trial, EchoSpec, list[Use]], None]


ORDER_LAWS = {
    "consecutive": OrderLaws(lambda spec: 1, _consecutive_bounds),
    "window_shuffle": OrderLaws(lambda spec: 2 * spec.buffer, _window_shuffle_bounds),
    "shuffle_buffer": OrderLaws(_shuffle_buffer_rereads, _shuffle_buffer_bounds),
    "spread": OrderLaws(_spread_rereads, _spread_bounds),
}
