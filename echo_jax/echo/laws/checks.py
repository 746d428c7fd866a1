"""The nine laws of an echo, one check each; see `echo_jax.testing`.

The numbers of uses are computed in `Trial` once more, with fractions, so that a
mistake in `echo_jax.echo.schedule` does not vouch for itself.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.keys import use_seed
from echo_jax.echo.laws.harness import Record, Trial, Use, bits_of, close, uses_of
from echo_jax.echo.laws.orders import ORDER_LAWS
from echo_jax.echo.tree import flatten

__all__ = ["CHECKS"]

# What an integer of a state may add to its JSON: 64 bits in decimal, and a sign.
_BYTES_PER_INTEGER = 20


def _exactness(trial: Trial, record: Record) -> None:
    """Law 1: n_k uses of every item, each with the item's own bits."""
    originals = [bits_of(trial.make_item(index)) for index in range(trial.num_items)]
    for position, use in enumerate(record.uses):
        where, index = f"at use {position}", use.fresh_index
        if not 0 <= index < trial.num_items:
            expected = f"items 0 to {trial.num_items - 1}"
            trial.fail(1, where, expected, f"item {index}")
        if use.bits != originals[index]:
            trial.fail(1, where, f"the content of item {index}", use.bits)
    used = Counter(use.fresh_index for use in record.uses)
    for index, expected in enumerate(trial.uses_by_item()):
        if used[index] != expected:
            trial.fail(1, f"for item {index}", f"{expected} uses", used[index])


def _identity(trial: Trial, _: Record) -> None:
    """Law 2: at factor 1 the output is the upstream, read when it is wanted."""
    spec = replace(trial.spec, factor=1, order="consecutive", buffer=1)
    trial = replace(trial, spec=spec)
    record = trial.record()
    upstream = [
        Use(index, 0, bits_of(trial.make_item(index)))
        for index in range(trial.num_items)
    ]
    trial.compare(2, "at factor 1", upstream, record.uses)
    emitted = 0
    for position, (reads, uses) in enumerate(
        zip(record.reads, [[], *record.outputs], strict=True)
    ):
        emitted += len(uses)
        if not emitted <= reads <= emitted + trial.read_ahead:
            trial.fail(2, f"after {position} outputs", f"{emitted} reads", reads)


def _economy(trial: Trial, record: Record) -> None:
    """Law 3: reads are bounded by the outputs and the buffer."""
    left = Counter(dict(enumerate(trial.uses_by_item())))
    newest, used_up = -1, 0
    for position, (reads, uses) in enumerate(
        zip(record.reads, [[], *record.outputs], strict=True)
    ):
        for use in uses:
            newest = max(newest, use.fresh_index)
            left[use.fresh_index] -= 1
            used_up += left[use.fresh_index] == 0
        most = used_up + trial.spec.buffer
        # An echo finds the end when it asks for an item that is not there.
        if reads < trial.num_items:
            most = min(most, newest + 1)
        most += trial.read_ahead
        if reads > most:
            where = f"after {position} outputs"
            trial.fail(3, where, f"at most {most} upstream reads", reads)


def _restore_anywhere(trial: Trial, record: Record) -> None:
    """Law 4: a fresh echo continues from every state, and again from its own."""
    saved = trial.record(states=True)
    trial.compare(4, "when states are asked for", record.outputs, saved.outputs)
    _check_states(trial, saved.states)
    positions = range(len(saved.states))
    if trial.positions is not None:
        positions = [p for p in positions if p in trial.positions]
    for position in positions:
        _check_resumed(trial, saved, position)
    # Once more as a run that is interrupted at each of these outputs.
    echo, _ = trial.start()
    outputs = []
    for position in range(len(saved.outputs)):
        if position in positions:
            state = echo.get_state()
            close(echo)
            echo, _ = trial.start()
            echo.set_state(state)
        outputs += [uses_of(output) for output in itertools.islice(echo, 1)]
    close(echo)
    trial.compare(4, "of a run restored again and again", saved.outputs, outputs)


def _check_resumed(trial: Trial, saved: Record, position: int) -> None:
    """Restores one state, and compares all that follows."""
    echo, upstream = trial.start()
    echo.set_state(json.loads(json.dumps(saved.states[position])))
    outputs = [uses_of(output) for output in trial.limited(echo)]
    close(echo)
    what = f"after a restore at output {position}"
    trial.compare(4, what, saved.outputs[position:], outputs)
    rereads = upstream.reads - (saved.reads[-1] - saved.reads[position])
    most = trial.max_rereads
    if most is None:
        most = ORDER_LAWS[trial.spec.order].most_rereads(trial.spec)
    if rereads > most + trial.read_ahead:
        trial.fail(4, what, f"at most {most} items read again", rereads)


def _check_states(trial: Trial, states: list[Any]) -> None:
    """JSON of integers, always of the same structure, and small."""
    room, first = 0, flatten(states[0])
    for position, state in enumerate(states):
        where = f"in the state after {position} outputs"
        for path, leaf in flatten(state):
            if type(leaf) is not int:
                trial.fail(4, where, f"a plain integer at {path}", repr(leaf))
        if json.loads(json.dumps(state)) != state:
            trial.fail(4, where, "JSON without tuples or integer keys", state)
        paths = [[path for path, _ in leaves] for leaves in (first, flatten(state))]
        if paths[0] != paths[1]:
            trial.fail(4, where, f"the structure {paths[0]}", paths[1])
        num_bytes = len(json.dumps(state))
        room = room or num_bytes + _BYTES_PER_INTEGER * len(first)
        if num_bytes > room:
            trial.fail(4, where, f"at most {room} bytes", num_bytes)


def _no_aliasing(trial: Trial, record: Record) -> None:
    """Law 5: a consumer that overwrites all it gets does no harm."""
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
    # In order of their first bytes, each against the one that reaches farthest.
    farthest = kept[0] if kept else None
    for span in kept[1:]:
        assert farthest is not None
        if np.shares_memory(farthest[3], span[3]):
            both = sorted((farthest[2], span[2]))
            where = f"at outputs {both[0]} and {both[1]}"
            trial.fail(5, where, "writable memory of their own", "shared memory")
        farthest = max(farthest, span, key=lambda span: span[1])


def _overwrite(array: np.ndarray) -> None:
    """Changes every number of an array; empties other things."""
    if array.dtype.kind in "biufc":
        array[...] = array == 0
    else:
        array[...] = np.zeros((), array.dtype)


def _order_bounds(trial: Trial, record: Record) -> None:
    """Law 6: what each order promises about lags."""
    ORDER_LAWS[trial.spec.order].check_bounds(trial, record.uses)


def _agreement(trial: Trial, record: Record) -> None:
    """Law 7: the tags are those of the reference plan."""
    tags = [(use.fresh_index, use.repeat) for use in record.uses]
    trial.compare(7, "beside the plan", trial.plan(), tags)


def _independence(trial: Trial, record: Record) -> None:
    """Law 8: neither timing nor hidden state nor another build shows."""
    pairs = [
        trial.start(),
        trial.start(pause_s=0.001),
        *(trial.start(make_echo=make_echo) for make_echo in trial.others),
    ]
    echoes = [echo for echo, _ in pairs]
    uses: list[list[Use]] = [[] for _ in echoes]
    # In turns, so that state that instances share would show.
    for _ in range(sum(trial.uses_by_item()) + 2):
        for number, echo in enumerate(echoes):
            for output in itertools.islice(echo, 1):
                uses[number] += uses_of(output)
    for number, echo in enumerate(echoes):
        close(echo)
        what = f"of instance {number + 2}, beside instance 1"
        trial.compare(8, what, record.uses, uses[number])


def _use_keys(trial: Trial, record: Record) -> None:
    """Law 9: tags that make a random key of its own for every use."""
    keys = _keys(trial, record.outputs)
    if len(set(keys)) < len(keys):
        double = Counter(keys).most_common(1)[0][0]
        where = f"at uses {keys.index(double)} and later"
        trial.fail(9, where, "a use_seed of its own", f"{double} again")
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
    return use_seed(trial.spec.seed, index, repeat).tolist()


CHECKS: dict[int, Callable[[Trial, Record], None]] = {
    1: _exactness,
    2: _identity,
    3: _economy,
    4: _restore_anywhere,
    5: _no_aliasing,
    6: _order_bounds,
    7: _agreement,
    8: _independence,
    9: _use_keys,
}
