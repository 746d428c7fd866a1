"""The orders themselves, use by use, and the states that name a place in them.

These values may be updated only together with `_SEQUENCE_VERSION` in
`echo_jax/echo/spec.py`, so that a checkpoint of the old order is refused rather than
resumed in another one: a state is a place in a sequence that nobody stores.

They were checked by hand when they were written.
"""

import itertools

import numpy as np
import pytest

import echo_jax as ej
from echo_jax.echo.keys import mix
from echo_jax.echo.laws import CountingUpstream
from echo_jax.echo.plans.lanes import lane_spec

# Item.repeat of the first 32 uses, two batches of four a line; then of the uses 400 to
# 407, long after the warm-up.
SEQUENCES = {
    "consecutive": """
        0.0 0.1 1.0 1.1  1.2 2.0 2.1 3.0
        3.1 3.2 4.0 4.1  5.0 5.1 5.2 6.0
        6.1 7.0 7.1 7.2  8.0 8.1 9.0 9.1
        9.2 10.0 10.1 11.0  11.1 11.2 12.0 12.1
        160.0 160.1 161.0 161.1  161.2 162.0 162.1 163.0
    """,
    "window_shuffle": """
        1.0 1.1 2.0 0.0  0.1 3.0 1.2 3.1
        3.2 2.1 5.0 6.0  4.0 7.0 5.1 7.1
        7.2 4.1 5.2 9.0  9.1 6.1 8.0 10.0
        9.2 8.1 11.0 10.1  11.1 12.0 13.0 13.1
        161.1 160.1 158.1 159.1  159.2 163.0 163.1 162.1
    """,
    "shuffle_buffer": """
        3.0 1.0 1.1 3.1  4.0 0.0 5.0 5.1
        6.0 2.0 3.2 7.0  5.2 7.1 8.0 7.2
        4.1 9.0 9.1 6.1  2.1 8.1 0.1 9.2
        12.0 10.0 11.0 13.0  10.1 11.1 11.2 15.0
        157.2 163.0 163.1 161.0  164.0 162.0 146.1 163.2
    """,
    "spread": """
        0.0 1.0 2.0 3.0  0.1 4.0 5.0 1.1
        6.0 2.1 7.0 8.0  3.1 9.0 4.1 10.0
        11.0 5.1 12.0 1.2  13.0 6.1 14.0 15.0
        7.1 16.0 17.0 8.1  18.0 3.2 19.0 9.1
        147.2 158.1 169.0 157.1  170.0 145.2 160.1 171.0
    """,
}
# The state after ten uses, and the same for all runs: checkpoints hold it.
PLACES = {
    "consecutive": (4, 0, 4, 0, 6, 4, 15934194418217),
    "window_shuffle": (0, 0, 4, 2, 6, 1, 55046142786787),
    "shuffle_buffer": (0, 0, 7, 10, 3, 0, 67389630582245),
    "spread": (0, 0, 7, 6, 3, 1, 72397352064961),
}
PLACE = ("anchor", "carry", "fresh", "position", "repeats", "round", "spec")
STATES = {
    order: {
        "plan": dict(zip(PLACE, place, strict=True), end=-1, uses=10),
        "skip": 0,
        "upstream": {"next_item": place[0]},
    }
    for order, place in PLACES.items()
}
BUFFERS = {"consecutive": 1, "window_shuffle": 6, "shuffle_buffer": 8, "spread": 24}


def spec_of(order):
    return ej.EchoSpec("5/2", BUFFERS[order], order, batch_size=4, seed=1)


def uses_of(spec, *places):
    uses = itertools.islice(ej.echo(itertools.count(), spec, tags=True), *places)
    return [f"{tags.fresh_index}.{tags.repeat}" for _, tags in uses]


@pytest.mark.parametrize("order", SEQUENCES)
def test_sequences_are_what_they_were(order):
    uses = uses_of(spec_of(order), 408)
    assert uses[:32] + uses[400:] == SEQUENCES[order].split()


def test_long_rounds_are_what_they_were():
    spec = ej.EchoSpec("5/2", 1024, "window_shuffle", seed=1)
    assert uses_of(spec, 3000, 3004) == ["783.1", "1237.0", "1439.0", "1071.1"]


@pytest.mark.parametrize("order", STATES)
def test_states_are_what_they_were_and_continued_in_their_order(order):
    echo = ej.echo(CountingUpstream(list(range(99))), spec_of(order), tags=True)
    for _ in itertools.islice(echo, 10):
        pass
    assert echo.get_state() == STATES[order]
    echo = ej.echo(CountingUpstream(list(range(99))), spec_of(order), tags=True)
    echo.set_state(STATES[order])
    uses = [f"{k}.{r}" for _, (k, r) in itertools.islice(echo, 22)]
    assert uses == SEQUENCES[order].split()[10:32]


def test_a_lane_has_the_seed_that_it_had():
    spec = ej.EchoSpec(2, 64, "spread", 16, seed=1)
    assert lane_spec(spec, 3, 4).seed == 6527249555167060369


# The uses 40 to 63: after ten batches the adaptive echo mixes fresh items and repeats.
BATCHES = {
    "adaptive": """
        28.0 29.0 30.0 18.1  31.0 13.1 15.1 12.1
        16.1 10.1 20.1 22.1  32.0 33.0 34.0 0.2
        35.0 19.1 17.1 25.1  1.2 3.2 23.1 26.1
    """,
    "stochastic": """
        13.1 23.1 19.2 16.1  24.0 25.0 26.0 27.0
        24.1 18.1 17.1 26.1  27.1 19.3 26.2 22.1
        25.1 18.2 19.4 22.2  22.3 25.2 27.2 16.2
    """,
}
MODES = {
    "adaptive": ej.AdaptiveSpec(3, 48, 4, 1, [True] * 6 + [False, True, False] * 4),
    "stochastic": ej.StochasticSpec(ej.FetchSchedule(start=0.4, end=0.4), 12, 4, 2),
}


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_the_other_modes_are_what_they_were(mode):
    echo = ej.echo(itertools.count(), MODES[mode], tags=True)
    uses = [f"{k}.{r}" for _, (k, r) in itertools.islice(echo, 40, 64)]
    assert uses == BATCHES[mode].split()


# --- The randomness behind them.


def splitmix(start, counter):
    """SplitMix64's value number ``counter`` from a start, in Python integers."""
    mask = 2**64 - 1
    z = (start + (counter + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_mixer_is_splitmix64():
    # The published first outputs of SplitMix64 from the seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert mix(1234567, np.arange(3)).tolist() == published
    assert [splitmix(1234567, k) for k in range(3)] == published


# Never to be updated: runs that are resumed, and results that are reproduced, rely
# on them. Another mixer would be another function beside `seed_for_use`.
@pytest.mark.parametrize(
    ("seed", "fresh_index", "repeat", "expected"),
    [
        (0, 0, 1, 6851773182041617869),
        (7, 10**12, 3, 1630919463431776874),
        (2**40, 5, 0, 12063764692986676684),
    ],
)
def test_golden_seeds_for_uses(seed, fresh_index, repeat, expected):
    index = np.array([[fresh_index, 2], [7, 2]])
    seeds = ej.seed_for_use(seed, index, np.array([[repeat, 0], [1, 4]], np.int32))
    assert (seeds.shape, seeds.dtype, np.unique(seeds).size) == ((2, 2), np.uint64, 4)
    assert int(seeds[0, 0]) == ej.seed_for_use(seed, fresh_index, repeat) == expected
    item = splitmix(splitmix(0, seed), fresh_index)
    assert splitmix(0, (item + repeat) % 2**64) == expected
