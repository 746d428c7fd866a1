"""The checks of the laws of an echo, one function each; see `assert_echo_laws`."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.laws.failures import all_or_nothing, one_consumer
from echo_jax.echo.laws.harness import (
    Record,
    Trial,
    Use,
    batches_of,
    bounds_of,
    close,
    plan_run,
    uses_of,
)
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.base import Broken
from echo_jax.echo.schedule import FetchSchedule
from echo_jax.echo.spec import AdaptiveSpec, EchoSpec, StochasticSpec
from echo_jax.echo.tree import flatten


def _exactness(trial: Trial, record: Record) -> None:
    """Law 1: each item has its exact number of uses, each with the item's own bits."""
    spec, num_items, uses = trial.spec, trial.num_items, record.uses
    contents = dict(enumerate(trial.contents()))
    due = [use._replace(bits=contents.get(use.fresh_index)) for use in uses]
    trial.compare(f"beside the {num_items} items", due, uses)
    if isinstance(spec, StochasticSpec):
        batches = batches_of(spec, num_items)
        coins = [is_fetched for is_fetched, size in batches for _ in range(size)]
        trial.compare("where True is fresh", coins, [not use.repeat for use in uses])
    used = Counter(use.fresh_index for use in uses)
    for index, (least, most) in enumerate(bounds_of(spec, num_items)):
        if not least <= used[index] <= most:
            expected = f"{most}" if least == most else f"{least} to {most}"
            trial.fail(f"for item {index}", f"{expected} uses", used[index])


def _identity(trial: Trial, _: Record) -> None:
    """Law 2: without repeats the output is the upstream, read only when needed."""
    if isinstance(trial.spec, AdaptiveSpec):
        once = replace(trial.spec, max_uses=1, min_uses=1, replay=None)
    elif isinstance(trial.spec, StochasticSpec):
        once = replace(trial.spec, fetch=FetchSchedule())
    else:
        once = replace(trial.spec, factor=1, order="consecutive", buffer=1)
    trial = replace(trial, spec=once)
    record = trial.run()
    upstream = [Use(index, 0, bits) for index, bits in enumerate(trial.contents())]
    trial.compare("without repeats", upstream, record.uses)
    _economy(trial, record)


def _economy(trial: Trial, record: Record) -> None:
    """Law 3: the outputs and the buffer bound the reads."""
    spec, newest, used_up = trial.spec, -1, 0
    bounds = bounds_of(spec, trial.num_items)
    left = Counter({index: most for index, (_, most) in enumerate(bounds)})
    pairs = zip(record.reads, [[], *record.outputs], strict=True)
    for number, (reads, uses) in enumerate(pairs):
        for use in uses:
            newest = max(newest, use.fresh_index)
            left[use.fresh_index] -= 1
            used_up += left[use.fresh_index] == 0
        if isinstance(spec, EchoSpec):
            # An echo finds the end when it asks for a missing item.
            at_end = reads >= trial.num_items
            most = min(used_up + spec.buffer, math.inf if at_end else newest + 1)
        else:
            most = newest + 1 + spec.batch_size  # One batch may wait.
        most += trial.read_ahead
        if reads > most:
            where = f"after {number} outputs"
            trial.fail(where, f"at most {most} upstream reads", reads)


def _restore_anywhere(trial: Trial, record: Record) -> None:
    """Law 4: a fresh echo continues from every state, and from its own states."""
    saved = record if record.states else trial.run(states=True)
    trial.compare("when states are asked for", record.outputs, saved.outputs)
    _check_states(trial, saved.states)
    for position, state in enumerate(saved.states):
        again = trial.run(json.loads(json.dumps(state)))
        what = f"after a restore at output {position}"
        trial.compare(what, saved.outputs[position:], again.outputs)
        rereads = again.reads[-1] - (saved.reads[-1] - saved.reads[position])
        if rereads > trial.max_rereads + trial.read_ahead:
            trial.fail(what, f"at most {trial.max_rereads} items read again", rereads)
    # Then one run that is interrupted before each output.
    state, outputs = saved.states[0], []
    for _ in saved.outputs:
        echo, _ = trial.start()
        echo.set_state(state)
        outputs += map(uses_of, itertools.islice(echo, 1))
        state = echo.get_state()
        close(echo)
    trial.compare("of a run restored again and again", saved.outputs, outputs)


def _check_states(trial: Trial, states: list[Any]) -> None:
    """Requires states of plain JSON integers, 64 bits each, in a constant structure."""
    first = []
    for position, state in enumerate(states):
        where = f"in the state after {position} outputs"
        text = json.dumps(state, default=repr)
        leaves = flatten(json.loads(text, object_hook=_decoded))
        for path, leaf in leaves:
            if isinstance(leaf, DecisionLog):
                # Only an adaptive echo's state has one. It grows by bits.
                replay = getattr(trial.spec, "replay", None)
                if replay is None or replay[: len(leaf)] != leaf:
                    trial.fail(where, "the decisions so far as log", leaf)
            elif type(leaf) is not int:
                trial.fail(where, f"a plain integer at {path}", repr(leaf))
            elif leaf.bit_length() > 64:
                trial.fail(where, f"at most 8 bytes at {path}", leaf)
        if json.loads(text) != state:
            trial.fail(where, "JSON without tuples or integer keys", state)
        paths = [path for path, _ in leaves]
        first = first if position else paths
        if paths != first:
            trial.fail(where, f"the structure {first}", paths)


def _decoded(part: dict[str, Any]) -> dict[str, Any] | DecisionLog:
    """Returns the `DecisionLog` that a part of a state records, or else the part."""
    try:
        return DecisionLog.from_json(part)
    except ValueError:
        return part


def _no_aliasing(trial: Trial, record: Record) -> None:
    """Law 5: a consumer that overwrites its outputs changes nothing else."""
    kept, positions = [], itertools.count()

    def overwrite(item: Any) -> None:
        position = next(positions)
        for _, leaf in flatten(item):
            if isinstance(leaf, np.ndarray) and leaf.size and leaf.flags.writeable:
                # Changes every number; other types become zero.
                is_number = leaf.dtype.kind in "biufc"
                leaf[...] = leaf == 0 if is_number else np.zeros((), leaf.dtype)
                kept.append((position, leaf))

    outputs = trial.run(consume=overwrite).outputs
    what = "after all earlier outputs were overwritten"
    trial.compare(what, record.outputs, outputs)
    for (one, leaf), (other, second) in itertools.combinations(kept, 2):
        if np.shares_memory(leaf, second):
            where = f"at outputs {one} and {other}"
            trial.fail(where, "writable memory of their own", "shared memory")


def _bounded_lag(trial: Trial, record: Record) -> None:
    """Law 6: the promises of each order and mode about lags; orders state their own."""
    spec, num_items = trial.spec, trial.num_items
    if isinstance(spec, EchoSpec):
        uses = [(use.fresh_index, use.repeat) for use in record.uses]
        due = [most for _, most in bounds_of(spec, num_items)]
        broken = rounds_of(spec).broken(uses, due)
    else:
        broken = _broken_ring(spec, num_items, [use.fresh_index for use in record.uses])
    for where, expected, got in broken:
        trial.fail(where, expected, got)


def _broken_ring(
    spec: AdaptiveSpec | StochasticSpec, num_items: int, uses: list[int]
) -> Iterator[Broken]:
    """Fresh items come first, in order and soon; repeats are of waiting, held items."""
    size, came, taken = spec.batch_size, 0, 0
    if isinstance(spec, AdaptiveSpec):
        least, most, decisions = spec.min_uses, spec.max_uses, spec.replay or ()
    else:
        least = most = math.inf
        decisions = [fetched for fetched, _ in batches_of(spec, num_items)]
    used, batch = Counter[int](), []
    for number, takes in enumerate(decisions):
        where = f"in batch {number}"
        came = min(came + size * takes, num_items)
        oldest = max(0, came - spec.buffer)
        waiting = [k for k in range(oldest, taken) if used[k] < most]
        if takes and isinstance(spec, StochasticSpec):
            waiting = []
        count = min(size, came - taken + len(waiting))
        before, batch, uses = batch, uses[:count], uses[count:]
        fresh = range(taken, taken + sum(k >= taken for k in batch))
        taken = fresh.stop
        repeats = set(batch[len(fresh) :])
        if batch[: len(fresh)] != [*fresh]:
            yield where, f"fresh items from {fresh.start} on first", f"items {batch}"
        if came - taken > size * (most > 1):
            yield where, f"at most {size} fresh items left", came - taken
        if len(set(batch)) < len(batch):
            index, times = Counter(batch).most_common(1)[0]
            yield where, f"item {index} once", f"{times} times"
        if wrong := repeats.difference(waiting):
            due = f"repeats of items from {oldest} on, used fewer than {most} times"
            yield where, due, f"item {min(wrong)}"
        # Items are drawn from the quarter that has waited longest. An item that was
        # just used is behind the middle, or up to a batch before it.
        twice = {k for k in repeats.intersection(before) if used[k] >= least}
        if len(waiting) >= 4 * size and twice:
            due = f"none of the batch before, as {len(waiting)} items wait"
            yield where, due, f"item {min(twice)}"
        used.update(batch)


def _agreement(trial: Trial, record: Record) -> None:
    """Law 7: the tags equal the reference plan's."""
    due, _ = plan_run(trial.spec, trial.num_items)
    trial.compare("beside the plan", due, [use[:2] for use in record.uses])


def _independence(trial: Trial, record: Record) -> None:
    """Law 8: timing, hidden state and other builds do not change the output."""
    trials = [trial, replace(trial, pause_s=0.001)]
    trials += [replace(trial, make_echo=make) for make in trial.others]
    echoes = [each.start()[0] for each in trials]
    uses: list[list[Use]] = [[] for _ in echoes]
    # In turns, so that shared state of instances changes the output.
    in_turns = itertools.zip_longest(*(map(uses_of, echo) for echo in echoes))
    for outputs in trial.limited(in_turns):
        for found, output in zip(uses, outputs, strict=True):
            found += output or []
    for number, (echo, found) in enumerate(zip(echoes, uses, strict=True), 2):
        close(echo)
        what = f"of instance {number}, beside instance 1"
        trial.compare(what, record.uses, found)


def _per_use_randomness(trial: Trial, record: Record) -> None:
    """Law 9: every use has its own tags, and so its own `seed_for_use`."""
    seen, due = Counter[int](), []
    for use in record.uses:
        due.append(use._replace(repeat=seen[use.fresh_index]))
        seen[use.fresh_index] += 1
    trial.compare("where repeats count from 0", due, record.uses)


# Law 1 first.
CHECKS: tuple[Callable[[Trial, Record], None], ...] = (
    _exactness,
    _identity,
    _economy,
    _restore_anywhere,
    _no_aliasing,
    _bounded_lag,
    _agreement,
    _independence,
    _per_use_randomness,
    all_or_nothing,
    one_consumer,
)
