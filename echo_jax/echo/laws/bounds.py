"""The bounds of laws 4 and 6: rereads, and places of uses. Orders state their own."""

from collections import Counter

from echo_jax.echo.laws.harness import Record, Trial, Use
from echo_jax.echo.laws.modes import batches_of, taken_early, uses_by_item
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, StochasticSpec

__all__ = ["check_bounds", "most_rereads"]


def most_rereads(spec: AnySpec) -> int:
    """Returns how many items a restore may read again: those still in use."""
    if isinstance(spec, AdaptiveSpec | StochasticSpec):
        return spec.buffer + taken_early(spec)
    return rounds_of(spec).most_rereads()


def check_bounds(trial: Trial, record: Record) -> None:
    """Law 6: the promises of each mode and order about lags."""
    spec = trial.spec
    if isinstance(spec, AdaptiveSpec):
        _adaptive_bounds(trial, spec, record.uses)
    elif isinstance(spec, StochasticSpec):
        _stochastic_bounds(trial, spec, record.uses)
    else:
        uses = [(use.fresh_index, use.repeat) for use in record.uses]
        due = uses_by_item(spec, trial.num_items)
        for where, expected, got in rounds_of(spec).broken(uses, due):
            trial.fail(6, where, expected, got)


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
