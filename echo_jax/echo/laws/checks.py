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
from echo_jax.echo.laws.bounds import check_bounds, most_rereads
from echo_jax.echo.laws.consumers import one_consumer
from echo_jax.echo.laws.failures import all_or_nothing
from echo_jax.echo.laws.harness import (
    Record,
    Trial,
    Use,
    bits_of,
    close,
    one_more,
    uses_of,
)
from echo_jax.echo.laws.modes import batches_of, most_uses, taken_early, uses_by_item
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec
from echo_jax.echo.tree import flatten

__all__ = ["CHECKS"]

# The most bytes that an integer may add to a state's JSON: 64 bits and a sign.
_BYTES_PER_INTEGER = 20


def _exactness(trial: Trial, record: Record) -> None:
    """Law 1: each item has its exact number of uses, each with the item's own bits."""
    originals = [bits_of(trial.make_item(index)) for index in range(trial.num_items)]
    for position, use in enumerate(record.uses):
        where, index = f"at use {position}", use.fresh_index
        if not 0 <= index < trial.num_items:
            expected = f"items 0 to {trial.num_items - 1}"
            trial.fail(1, where, expected, f"item {index}")
        if use.bits != originals[index]:
            trial.fail(1, where, f"the content of item {index}", use.bits)
    if isinstance(trial.spec, StochasticSpec):
        _exact_loads(trial, trial.spec, record)
        return
    used = Counter(use.fresh_index for use in record.uses)
    for index, (least, most) in enumerate(_due(trial)):
        if not least <= used[index] <= most:
            due = f"{most}" if least == most else f"{least} to {most}"
            trial.fail(1, f"for item {index}", f"{due} uses", used[index])


def _due(trial: Trial) -> list[tuple[int, int]]:
    """Returns the least and most uses of every item of a fixed or adaptive echo."""
    spec, num_items = trial.spec, trial.num_items
    if isinstance(spec, EchoSpec):
        return [(uses, uses) for uses in uses_by_item(spec, num_items)]
    assert isinstance(spec, AdaptiveSpec)
    # After the upstream's end, batches continue until the buffered items are used up.
    held = max(0, num_items - spec.buffer)
    least, most = spec.min_uses, spec.max_uses
    return [(least if k < held else most, most) for k in range(num_items)]


def _exact_loads(trial: Trial, spec: StochasticSpec, record: Record) -> None:
    """Law 1 of a stochastic echo: its coins decide which batches are fresh."""
    uses, at, fetched = record.uses, 0, 0
    for number, (is_fetched, size) in enumerate(batches_of(spec, trial.num_items)):
        tags = [(use.fresh_index, use.repeat) for use in uses[at : at + size]]
        where = f"in batch {number}"
        if len(tags) < size:
            trial.fail(1, where, f"{size} uses", len(tags))
        if is_fetched and tags != [(k, 0) for k in range(fetched, fetched + size)]:
            expected = f"fresh items {fetched} to {fetched + size - 1}"
            trial.fail(1, where, expected, f"(item, repeat) {tags}")
        if not is_fetched and not all(repeat for _, repeat in tags):
            trial.fail(1, where, "repeats alone", f"(item, repeat) {tags}")
        fetched += size if is_fetched else 0
        at += size
    if at < len(uses):
        trial.fail(1, "at the end", f"{at} uses", len(uses))


def _identity(trial: Trial, _: Record) -> None:
    """Law 2: without repeats the output is the upstream, read only when needed."""
    what, spec = _without_repeats(trial.spec)
    trial = replace(trial, spec=spec, live=spec)
    record = trial.record()
    upstream = [
        Use(index, 0, bits_of(trial.make_item(index)))
        for index in range(trial.num_items)
    ]
    trial.compare(2, f"at {what}", upstream, record.uses)
    emitted = 0
    for position, (reads, uses) in enumerate(
        zip(record.reads, [[], *record.outputs], strict=True)
    ):
        emitted += len(uses)
        if not emitted <= reads <= emitted + trial.read_ahead + taken_early(spec):
            trial.fail(2, f"after {position} outputs", f"{emitted} reads", reads)


def _without_repeats(spec: AnySpec) -> tuple[str, AnySpec]:
    if isinstance(spec, AdaptiveSpec):
        return "max_uses=1", replace(spec, max_uses=1, min_uses=1, replay=None)
    if isinstance(spec, StochasticSpec):
        return "p = 1", replace(spec, fetch=FetchSchedule())
    return "factor 1", replace(spec, factor=1, order="consecutive", buffer=1)


def _economy(trial: Trial, record: Record) -> None:
    """Law 3: the outputs and the buffer bound the reads."""
    spec, newest, used_up = trial.spec, -1, 0
    is_fixed = isinstance(spec, EchoSpec)
    left = Counter(
        dict(enumerate(uses_by_item(spec, trial.num_items))) if is_fixed else {}
    )
    for position, (reads, uses) in enumerate(
        zip(record.reads, [[], *record.outputs], strict=True)
    ):
        for use in uses:
            newest = max(newest, use.fresh_index)
            left[use.fresh_index] -= 1
            used_up += left[use.fresh_index] == 0
        most = newest + 1 + taken_early(spec)
        if is_fixed:
            # An echo finds the end when it asks for a missing item.
            at_end = reads >= trial.num_items
            most = min(used_up + spec.buffer, math.inf if at_end else most)
        most += trial.read_ahead
        if reads > most:
            where = f"after {position} outputs"
            trial.fail(3, where, f"at most {most} upstream reads", reads)


def _restore_anywhere(trial: Trial, record: Record) -> None:
    """Law 4: a fresh echo continues from every state, and from its own states."""
    saved = trial.record(states=True)
    trial.compare(4, "when states are asked for", record.outputs, saved.outputs)
    _check_saved(trial, saved)
    if trial.decides:
        # The log of the whole run repeats the decisions after the state.
        _check_saved(*trial.decided(4, states=True))


def _check_saved(trial: Trial, saved: Record) -> None:
    """Restores the states of a run, each alone and one after the other."""
    _check_states(trial, saved.states)
    positions = range(len(saved.states))
    if trial.positions is not None:
        positions = [p for p in positions if p in trial.positions]
    for position in positions:
        _check_resumed(trial, saved, position)
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


def _check_resumed(trial: Trial, saved: Record, position: int) -> None:
    """Restores one state, and compares all later outputs."""
    echo, upstream = trial.start()
    echo.set_state(json.loads(json.dumps(saved.states[position])))
    outputs = [uses_of(output) for output in trial.limited(echo)]
    close(echo)
    what = f"after a restore at output {position}"
    trial.compare(4, what, saved.outputs[position:], outputs)
    rereads = upstream.reads - (saved.reads[-1] - saved.reads[position])
    most = trial.max_rereads
    if most is None:
        most = most_rereads(trial.spec)
    if rereads > most + trial.read_ahead:
        trial.fail(4, what, f"at most {most} items read again", rereads)


def _check_states(trial: Trial, states: list[Any]) -> None:
    """Requires states of plain JSON integers, constant structure and bounded size."""
    room, first = 0, flatten(_without_log(trial, "", states[0])) if states else []
    for position, state in enumerate(states):
        where = f"in the state after {position} outputs"
        if json.loads(json.dumps(state, default=repr)) != state:
            _check_leaves(trial, where, state)
            trial.fail(4, where, "JSON without tuples or integer keys", state)
        rest = _without_log(trial, where, state)
        _check_leaves(trial, where, rest)
        paths = [[path for path, _ in leaves] for leaves in (first, flatten(rest))]
        if paths[0] != paths[1]:
            trial.fail(4, where, f"the structure {paths[0]}", paths[1])
        num_bytes = len(json.dumps(rest))
        room = room or num_bytes + _BYTES_PER_INTEGER * len(first)
        if num_bytes > room:
            trial.fail(4, where, f"at most {room} bytes", num_bytes)


def _check_leaves(trial: Trial, where: str, state: Any) -> None:
    for path, leaf in flatten(state):
        if type(leaf) is not int:
            trial.fail(4, where, f"a plain integer at {path}", repr(leaf))


def _without_log(trial: Trial, where: str, state: Any) -> Any:
    """Returns a state without the log of an adaptive echo, which grows by bits."""
    spec = trial.spec
    if not isinstance(spec, AdaptiveSpec) or not isinstance(state, dict):
        return state
    rest = {
        key: _without_log(trial, where, value)
        for key, value in state.items()
        if key != "log"
    }
    if "log" in state:
        try:
            # It limits the length of the text that it reads.
            log = DecisionLog.from_json(state["log"])
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
                _overwrite(leaf)
                kept.append((*np.lib.array_utils.byte_bounds(leaf), position, leaf))
    close(echo)
    what = "after all earlier outputs were overwritten"
    trial.compare(5, what, record.outputs, outputs)
    kept.sort(key=lambda span: span[:3])
    # Sorted by their first byte, compare each with the span that ends farthest.
    farthest = kept[0] if kept else None
    for span in kept[1:]:
        assert farthest is not None
        if np.shares_memory(farthest[3], span[3]):
            both = sorted((farthest[2], span[2]))
            where = f"at outputs {both[0]} and {both[1]}"
            trial.fail(5, where, "writable memory of their own", "shared memory")
        farthest = max(farthest, span, key=lambda span: span[1])


def _overwrite(array: np.ndarray) -> None:
    """Changes every number of an array; zeroes other types."""
    if array.dtype.kind in "biufc":
        array[...] = array == 0
    else:
        array[...] = np.zeros((), array.dtype)


def _agreement(trial: Trial, record: Record) -> None:
    """Law 7: the tags are those of the reference plan."""
    trial.compare(7, "beside the plan", trial.plan(), _tags(record))
    if trial.decides:
        trial, record = trial.decided(7)
        what = "beside the plan, where the echo decides"
        trial.compare(7, what, trial.plan(), _tags(record))


def _tags(record: Record) -> list[tuple[int, int]]:
    return [(use.fresh_index, use.repeat) for use in record.uses]


def _independence(trial: Trial, record: Record) -> None:
    """Law 8: timing, hidden state and other builds do not change the output."""
    if trial.decides:
        _check_turns(*trial.decided(8))
    _check_turns(trial, record)


def _check_turns(trial: Trial, record: Record) -> None:
    """Runs several instances in turns, and compares each with an earlier run."""
    pairs = [
        trial.start(),
        trial.start(pause_s=0.001),
        *(trial.start(make_echo=make_echo) for make_echo in trial.others),
    ]
    echoes = [echo for echo, _ in pairs]
    uses: list[list[Use]] = [[] for _ in echoes]
    # In turns, so that shared state of instances changes the output.
    for _ in range(most_uses(trial.spec, trial.num_items) + 2):
        for number, echo in enumerate(echoes):
            for output in one_more(echo):
                uses[number] += uses_of(output)
    for number, echo in enumerate(echoes):
        close(echo)
        what = f"of instance {number + 2}, beside instance 1"
        trial.compare(8, what, record.uses, uses[number])


def _use_keys(trial: Trial, record: Record) -> None:
    """Law 9: every use has its own random key."""
    keys = _keys(trial, record.outputs)
    if len(set(keys)) < len(keys):
        double = Counter(keys).most_common(1)[0][0]
        where = f"at uses {keys.index(double)} and later"
        trial.fail(9, where, "a seed_for_use of its own", f"{double} again")
    seen: Counter[int] = Counter()
    for position, use in enumerate(record.uses):
        if use.repeat != seen[use.fresh_index]:
            expected = f"repeat {seen[use.fresh_index]} of item {use.fresh_index}"
            trial.fail(9, f"at use {position}", expected, f"repeat {use.repeat}")
        seen[use.fresh_index] += 1
    echo, _ = trial.start()
    if not callable(getattr(echo, "get_state", None)):
        close(echo)
        return
    half = len(record.outputs) // 2
    head = [uses_of(output) for output in itertools.islice(echo, half)]
    state = echo.get_state()
    close(echo)
    echo, _ = trial.start()
    echo.set_state(state)
    tail = [uses_of(output) for output in trial.limited(echo)]
    close(echo)
    what = f"with a restore at output {half}"
    trial.compare(9, what, keys, _keys(trial, head + tail))


def _keys(trial: Trial, outputs: list[list[Use]]) -> list[int]:
    uses = list(itertools.chain.from_iterable(outputs))
    index, repeat = [use.fresh_index for use in uses], [use.repeat for use in uses]
    return seed_for_use(trial.spec.seed, index, repeat).tolist()


CHECKS: dict[int, Callable[[Trial, Record], None]] = {
    1: _exactness,
    2: _identity,
    3: _economy,
    4: _restore_anywhere,
    5: _no_aliasing,
    6: check_bounds,
    7: _agreement,
    8: _independence,
    9: _use_keys,
    10: all_or_nothing,
    11: one_consumer,
}
