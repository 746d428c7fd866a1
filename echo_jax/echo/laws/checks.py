"""The checks of the laws of an echo, one function each; see `assert_echo_laws`."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.fetch_schedule import FetchSchedule
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.laws.failures import all_or_nothing, one_consumer
from echo_jax.echo.laws.harness import Record, Trial, Use, close, one_more, uses_of
from echo_jax.echo.laws.modes import batches_of, plan_run, taken_early, uses_by_item
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.spec import AdaptiveSpec, EchoSpec, StochasticSpec
from echo_jax.echo.tree import flatten

__all__ = ["CHECKS", "OF_DECISIONS"]

# The most bytes that an integer may add to a state's JSON: 64 bits and a sign.
_BYTES_PER_INTEGER = 20


def _exactness(trial: Trial, record: Record) -> None:
    """Law 1: each item has its exact number of uses, each with the item's own bits."""
    spec, num_items = trial.spec, trial.num_items
    contents = dict(enumerate(trial.contents()))
    due = [use._replace(bits=contents.get(use.fresh_index)) for use in record.uses]
    trial.compare(1, f"beside the {num_items} items", due, record.uses)
    if isinstance(spec, StochasticSpec):
        # The coins decide which uses are fresh.
        coins, taken = [], itertools.count()
        for is_fetched, size in batches_of(spec, num_items):
            coins += [next(taken) if is_fetched else None for _ in range(size)]
        fresh = [None if use.repeat else use.fresh_index for use in record.uses]
        trial.compare(1, "of fresh items and, as None, repeats", coins, fresh)
        return
    if isinstance(spec, EchoSpec):
        bounds = [(uses, uses) for uses in uses_by_item(spec, num_items)]
    else:
        # After the upstream's end, the buffered items are used up.
        held, most = num_items - spec.buffer, spec.max_uses
        bounds = [(spec.min_uses if k < held else most, most) for k in range(num_items)]
    used = Counter(use.fresh_index for use in record.uses)
    for index, (least, most) in enumerate(bounds):
        if not least <= used[index] <= most:
            expected = f"{most}" if least == most else f"{least} to {most}"
            trial.fail(1, f"for item {index}", f"{expected} uses", used[index])


def _identity(trial: Trial, _: Record) -> None:
    """Law 2: without repeats the output is the upstream, read only when needed."""
    spec = trial.spec
    if isinstance(spec, AdaptiveSpec):
        what = "max_uses=1"
        spec = replace(spec, max_uses=1, min_uses=1, replay=None)
    elif isinstance(spec, StochasticSpec):
        what, spec = "p = 1", replace(spec, fetch=FetchSchedule())
    else:
        what = "factor 1"
        spec = replace(spec, factor=1, order="consecutive", buffer=1)
    trial = replace(trial, spec=spec)
    record = trial.record()
    upstream = [Use(index, 0, bits) for index, bits in enumerate(trial.contents())]
    trial.compare(2, f"at {what}", upstream, record.uses)
    _economy(trial, record, law=2)


def _economy(trial: Trial, record: Record, law: int = 3) -> None:
    """Law 3: the outputs and the buffer bound the reads."""
    spec, newest, used_up = trial.spec, -1, 0
    is_fixed = isinstance(spec, EchoSpec)
    due = uses_by_item(spec, trial.num_items) if is_fixed else []
    left = Counter(dict(enumerate(due)))
    for number, reads, uses in record.steps():
        for use in uses:
            newest = max(newest, use.fresh_index)
            left[use.fresh_index] -= 1
            used_up += left[use.fresh_index] == 0
        most = newest + 1 + taken_early(spec)
        if is_fixed:
            # An echo finds the end when it asks for a missing item.
            at_end = reads >= trial.num_items
            most = min(used_up + spec.buffer, math.inf if at_end else most)
        if reads > most + trial.read_ahead:
            expected = f"at most {most + trial.read_ahead} upstream reads"
            trial.fail(law, f"after {number} outputs", expected, reads)


def _restore_anywhere(trial: Trial, record: Record) -> None:
    """Law 4: a fresh echo continues from every state, and from its own states."""
    saved = record if record.states else trial.record(states=True)
    trial.compare(4, "when states are asked for", record.outputs, saved.outputs)
    _check_states(trial, saved.states)
    positions = range(len(saved.states))
    if trial.positions is not None:
        positions = trial.positions.intersection(positions)
    for position in sorted(positions):
        state = json.loads(json.dumps(saved.states[position]))
        outputs, reads = trial.resumed(state)
        what = f"after a restore at output {position}"
        trial.compare(4, what, saved.outputs[position:], outputs)
        rereads = reads - (saved.reads[-1] - saved.reads[position])
        if rereads > trial.max_rereads + trial.read_ahead:
            expected = f"at most {trial.max_rereads} items read again"
            trial.fail(4, what, expected, rereads)
    # Then one run that is interrupted at each of these outputs.
    echo, _ = trial.start()
    outputs = []
    for position in range(len(saved.outputs)):
        if position in positions:
            state = echo.get_state()
            close(echo)
            echo, _ = trial.start()
            echo.set_state(state)
        outputs += [uses_of(output) for output in one_more(echo)]
    close(echo)
    trial.compare(4, "of a run restored again and again", saved.outputs, outputs)


def _check_states(trial: Trial, states: list[Any]) -> None:
    """Requires states of plain JSON integers, constant structure and bounded size."""
    room, first = 0, []
    for position, state in enumerate(states):
        where = f"in the state after {position} outputs"
        rest = _without_log(trial, where, state)
        leaves = flatten(rest)
        for path, leaf in leaves:
            if type(leaf) is not int:
                trial.fail(4, where, f"a plain integer at {path}", repr(leaf))
        text = json.dumps(rest)
        if json.loads(text) != rest:
            trial.fail(4, where, "JSON without tuples or integer keys", rest)
        paths = [path for path, _ in leaves]
        first = first if position else paths
        if paths != first:
            trial.fail(4, where, f"the structure {first}", paths)
        room = room or len(text) + _BYTES_PER_INTEGER * len(first)
        if len(text) > room:
            trial.fail(4, where, f"at most {room} bytes", len(text))


def _without_log(trial: Trial, where: str, state: Any) -> Any:
    """Returns a state without the log of an adaptive echo, which grows by bits."""
    spec = trial.spec
    if not isinstance(spec, AdaptiveSpec) or not isinstance(state, dict):
        return state
    rest = {key: _without_log(trial, where, value) for key, value in state.items()}
    if "log" in rest:
        try:
            # It limits the length of the text that it reads.
            log = DecisionLog.from_json(rest.pop("log"))
        except ValueError as error:
            trial.fail(4, where, "a decision log", error)
        if spec.replay is None or not spec.replay.starts_with(log):
            trial.fail(4, where, "the decisions so far as log", log)
    return rest


def _no_aliasing(trial: Trial, record: Record) -> None:
    """Law 5: a consumer that overwrites its outputs changes nothing else."""
    echo, _ = trial.start()
    kept, outputs = [], []
    for position, output in enumerate(trial.limited(echo)):
        outputs.append(uses_of(output))
        for _, leaf in flatten(output[0]):
            if isinstance(leaf, np.ndarray) and leaf.size and leaf.flags.writeable:
                # Changes every number; other types become zero.
                is_number = leaf.dtype.kind in "biufc"
                leaf[...] = leaf == 0 if is_number else np.zeros((), leaf.dtype)
                kept.append((*np.lib.array_utils.byte_bounds(leaf), position, leaf))
    close(echo)
    what = "after all earlier outputs were overwritten"
    trial.compare(5, what, record.outputs, outputs)
    # Sorted by their first byte, compare each with the span that ends farthest.
    farthest = None
    for span in sorted(kept, key=lambda span: span[:3]):
        if farthest and np.shares_memory(farthest[3], span[3]):
            both = sorted((farthest[2], span[2]))
            where = f"at outputs {both[0]} and {both[1]}"
            trial.fail(5, where, "writable memory of their own", "shared memory")
        farthest = max(farthest or span, span, key=lambda span: span[1])


def _bounded_lag(trial: Trial, record: Record) -> None:
    """Law 6: the promises of each order and mode about lags; orders state their own."""
    spec = trial.spec
    if not isinstance(spec, EchoSpec):
        _ring_bounds(trial, spec, record.uses)
        return
    uses = [(use.fresh_index, use.repeat) for use in record.uses]
    due = uses_by_item(spec, trial.num_items)
    for where, expected, got in rounds_of(spec).broken(uses, due):
        trial.fail(6, where, expected, got)


def _ring_bounds(
    trial: Trial, spec: AdaptiveSpec | StochasticSpec, uses: list[Use]
) -> None:
    """Fresh items come first and in order; repeats are of waiting, held items."""
    size, at, taken = spec.batch_size, 0, 0
    if isinstance(spec, AdaptiveSpec):
        least, most, decisions = spec.min_uses, spec.max_uses, spec.replay or ()
    else:
        least = most = math.inf
        decisions = [fetched for fetched, _ in batches_of(spec, trial.num_items)]
    used: Counter[int] = Counter()
    before: set[int] = set()
    for number, takes in enumerate(decisions):
        where, stop = (f"in batch {number}", min(taken + size, trial.num_items))
        fresh = range(taken, stop if takes else taken)
        taken = fresh.stop
        oldest = max(0, taken - spec.buffer)
        waiting = [k for k in range(oldest, fresh.start) if used[k] < most]
        if takes and isinstance(spec, StochasticSpec):
            waiting = []
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
                f"repeats of items from {oldest} on, used fewer than {most} times"
            )
            trial.fail(6, where, expected, f"item {min(wrong)}")
        # Items are drawn from the quarter that has waited longest. An item that was
        # just used is behind the middle, or up to a batch before it.
        before = {k for k in before if used[k] >= least}
        if len(waiting) >= 4 * size and (twice := before.intersection(repeats)):
            expected = f"none of the batch before, as {len(waiting)} items wait"
            trial.fail(6, where, expected, f"item {min(twice)}")
        used.update(batch)
        before = set(batch)


def _agreement(trial: Trial, record: Record) -> None:
    """Law 7: the tags are those of the reference plan."""
    due, _ = plan_run(trial.spec, trial.num_items)
    trial.compare(7, "beside the plan", due, [use[:2] for use in record.uses])


def _independence(trial: Trial, record: Record) -> None:
    """Law 8: timing, hidden state and other builds do not change the output."""
    echoes = [trial.start()[0], trial.start(pause_s=0.001)[0]]
    echoes += [replace(trial, make_echo=make).start()[0] for make in trial.others]
    uses: list[list[Use]] = [[] for _ in echoes]
    # In turns, so that shared state of instances changes the output.
    for _ in trial.limited(itertools.count()):
        for echo, found in zip(echoes, uses, strict=True):
            for output in one_more(echo):
                found += uses_of(output)
    for number, (echo, found) in enumerate(zip(echoes, uses, strict=True), 2):
        close(echo)
        what = f"of instance {number}, beside instance 1"
        trial.compare(8, what, record.uses, found)


def _use_keys(trial: Trial, record: Record) -> None:
    """Law 9: every use has its own random key."""
    uses, due = record.uses, []
    index, repeat = [use.fresh_index for use in uses], [use.repeat for use in uses]
    keys = seed_for_use(trial.spec.seed, index, repeat).tolist()
    if len(set(keys)) < len(keys):
        double = Counter(keys).most_common(1)[0][0]
        where = f"at uses {keys.index(double)} and later"
        trial.fail(9, where, "a seed_for_use of its own", f"{double} again")
    seen: Counter[int] = Counter()
    for use in uses:
        due.append(use._replace(repeat=seen[use.fresh_index]))
        seen[use.fresh_index] += 1
    trial.compare(9, "where repeats count from 0", due, uses)


CHECKS: dict[int, Callable[[Trial, Record], None]] = {
    1: _exactness,
    2: _identity,
    3: _economy,
    4: _restore_anywhere,
    5: _no_aliasing,
    6: _bounded_lag,
    7: _agreement,
    8: _independence,
    9: _use_keys,
    10: all_or_nothing,
    11: one_consumer,
}

# These are checked twice for an adaptive echo: also with its own decisions.
OF_DECISIONS = {4, 7, 8}
