"""The orders themselves, use by use, and the states that name a place in them.

These values may be updated only together with `_SEQUENCE_VERSION` in
`echo_jax/echo/spec.py`, so that a checkpoint of the old order is refused rather than
resumed in another one: a state is a place in a sequence that nobody stores.

Checked by hand when they were written: every item comes 2, 3, 2, 3, ... times and
its repeats count from 0; `consecutive` is back to back; in `shuffle` no use comes
after one of an item that is six or more younger; in `shuffle_buffer` the first draws
take the slots 7, 4, 2, 7, 7 of eight, which hold the uses 7, 4, 2, 8 (put in by the
first draw) and 11 (by the fourth), of the items 3, 1, 1, 3 and 4; in `spread` the
first batch is fresh, the second repeats, and no batch (a line) has an item twice.
"""

import dataclasses
import itertools

import pytest

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream

# Item.repeat of the first 32 uses; then of the uses 400 to 407, long after the
# warm-up.
SEQUENCES = {
    "consecutive": """
        0.0 0.1 1.0 1.1
        1.2 2.0 2.1 3.0
        3.1 3.2 4.0 4.1
        5.0 5.1 5.2 6.0
        6.1 7.0 7.1 7.2
        8.0 8.1 9.0 9.1
        9.2 10.0 10.1 11.0
        11.1 11.2 12.0 12.1
        160.0 160.1 161.0 161.1
        161.2 162.0 162.1 163.0
    """,
    "shuffle": """
        1.0 1.1 2.0 0.0
        0.1 3.0 1.2 3.1
        3.2 2.1 5.0 6.0
        4.0 7.0 5.1 7.1
        7.2 4.1 5.2 9.0
        9.1 6.1 8.0 10.0
        9.2 8.1 11.0 10.1
        11.1 12.0 13.0 13.1
        161.1 160.1 158.1 159.1
        159.2 163.0 163.1 162.1
    """,
    "shuffle_buffer": """
        3.0 1.0 1.1 3.1
        4.0 0.0 5.0 5.1
        6.0 2.0 3.2 7.0
        5.2 7.1 8.0 7.2
        4.1 9.0 9.1 6.1
        2.1 8.1 0.1 9.2
        12.0 10.0 11.0 13.0
        10.1 11.1 11.2 15.0
        157.2 163.0 163.1 161.0
        164.0 162.0 146.1 163.2
    """,
    "spread": """
        0.0 1.0 2.0 3.0
        0.1 4.0 5.0 1.1
        6.0 2.1 7.0 8.0
        3.1 9.0 4.1 10.0
        11.0 5.1 12.0 1.2
        13.0 6.1 14.0 15.0
        7.1 16.0 17.0 8.1
        18.0 3.2 19.0 9.1
        147.2 158.1 169.0 157.1
        170.0 145.2 160.1 171.0
    """,
}
# The state after ten uses, and the same for all runs: it is what checkpoints hold.
STATES = {
    "consecutive": {
        "plan": {
            "anchor": 4,
            "carry": 0,
            "end": -1,
            "fresh": 4,
            "position": 0,
            "repeats": 6,
            "round": 4,
            "spec": 15934194418217,
            "uses": 10,
        },
        "skip": 0,
        "upstream": {"next_item": 4},
    },
    "shuffle": {
        "plan": {
            "anchor": 0,
            "carry": 0,
            "end": -1,
            "fresh": 4,
            "position": 2,
            "repeats": 6,
            "round": 1,
            "spec": 55046142786787,
            "uses": 10,
        },
        "skip": 0,
        "upstream": {"next_item": 0},
    },
    "shuffle_buffer": {
        "plan": {
            "anchor": 0,
            "carry": 0,
            "end": -1,
            "fresh": 7,
            "position": 10,
            "repeats": 3,
            "round": 0,
            "spec": 67389630582245,
            "uses": 10,
        },
        "skip": 0,
        "upstream": {"next_item": 0},
    },
    "spread": {
        "plan": {
            "anchor": 0,
            "carry": 0,
            "end": -1,
            "fresh": 7,
            "position": 6,
            "repeats": 3,
            "round": 1,
            "spec": 72397352064961,
            "uses": 10,
        },
        "skip": 0,
        "upstream": {"next_item": 0},
    },
}
BUFFERS = {"consecutive": 1, "shuffle": 6, "shuffle_buffer": 8, "spread": 24}


def spec_of(order):
    return ej.EchoSpec("5/2", BUFFERS[order], order, batch_size=4, seed=1)


@pytest.mark.parametrize("order", SEQUENCES)
def test_sequences_are_what_they_were(order):
    uses = [
        f"{tags.fresh_index}.{tags.repeat}"
        for _, tags in itertools.islice(
            ej.echo(itertools.count(), spec_of(order), tags=True), 408
        )
    ]
    assert uses[:32] + uses[400:] == SEQUENCES[order].split()


@pytest.mark.parametrize("order", STATES)
def test_states_are_what_they_were(order):
    echo = ej.echo(CountingUpstream(list(range(99))), spec_of(order))
    for _ in itertools.islice(echo, 10):
        pass
    assert echo.get_state() == STATES[order]


@pytest.mark.parametrize("order", STATES)
def test_an_old_state_is_continued_in_its_order(order):
    echo = ej.echo(CountingUpstream(list(range(99))), spec_of(order), tags=True)
    echo.set_state(STATES[order])
    uses = [f"{k}.{r}" for _, (k, r) in itertools.islice(echo, 22)]
    assert uses == SEQUENCES[order].split()[10:32]


def test_a_state_is_refused_under_every_other_spec():
    for order, state in STATES.items():
        spec = spec_of(order)
        for change in (
            {"factor": 2},
            {"buffer": spec.buffer + 1},
            {"batch_size": spec.batch_size + 1},
            {"seed": spec.seed + 1},
            {"order": "shuffle" if order != "shuffle" else "consecutive"},
        ):
            other = dataclasses.replace(spec, **change)
            echo = ej.echo(CountingUpstream(list(range(99))), other)
            with pytest.raises(ValueError, match="another spec than EchoSpec"):
                echo.set_state(state)
