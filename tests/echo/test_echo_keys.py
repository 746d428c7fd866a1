"""Keys of uses: fixed for ever, and different for every use."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.orders.sorting import grouped_argsort

MASK = 2**64 - 1


def splitmix(start, counter):
    """SplitMix64's value number ``counter`` from a start, in Python integers."""
    z = (start + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_mixer_is_splitmix64():
    # The published first outputs of SplitMix64 from the seed 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert mix(1234567, np.arange(5)).tolist() == published
    assert [splitmix(1234567, k) for k in range(5)] == published


# Never to be updated: runs that are resumed, and results that are reproduced, rely
# on them. Another mixer would be another function beside `use_seed`.
@pytest.mark.parametrize(
    ("seed", "fresh_index", "repeat", "expected"),
    [
        (0, 0, 0, 16499910829880715843),
        (0, 0, 1, 6851773182041617869),
        (0, 41, 2, 16204023250955739313),
        (7, 10**12, 3, 1630919463431776874),
        (2**40, 5, 0, 12063764692986676684),
    ],
)
def test_golden_use_seeds(seed, fresh_index, repeat, expected):
    assert int(ej.use_seed(seed, fresh_index, repeat)) == expected
    item = splitmix(splitmix(0, seed), fresh_index)
    assert splitmix(0, (item + repeat) & MASK) == expected


def test_a_use_seed_has_the_shape_of_its_tags():
    scalar = ej.use_seed(1, 2, 3)
    assert scalar.shape == () and scalar.dtype == np.uint64
    index = np.array([[2, 5], [7, 2]])
    repeat = np.array([[3, 0], [1, 4]], np.int32)
    seeds = ej.use_seed(1, index, repeat)
    assert seeds.shape == (2, 2) and seeds.dtype == np.uint64
    assert seeds[0, 0] == scalar
    assert ej.use_seed(1, np.zeros(0, np.int64), np.zeros(0, np.int32)).shape == (0,)


def test_use_seeds_differ_between_all_uses_and_seeds():
    uses = np.array(list(itertools.product(range(3000), range(8))))
    seeds = np.concatenate([ej.use_seed(s, uses[:, 0], uses[:, 1]) for s in range(4)])
    assert np.unique(seeds).size == seeds.size == 96_000


def test_use_seeds_are_even():
    """Every bit of the seeds of many uses is set about as often as not."""
    uses = np.array(list(itertools.product(range(2000), range(5))))
    seeds = ej.use_seed(0, uses[:, 0], uses[:, 1])
    bits = (seeds[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    # Five standard deviations of a fair coin thrown 10^4 times.
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 100


@given(st.lists(st.integers(0, 2**40), max_size=4))
def test_a_sequence_depends_on_all_its_parts_in_order(parts):
    start = sequence(*parts)
    assert 0 <= start <= MASK
    assert sequence(*parts) == start
    for k in range(len(parts)):
        changed = [*parts[:k], parts[k] + 1, *parts[k + 1 :]]
        assert sequence(*changed) != start


@given(st.data(), st.integers(0, 200))
def test_grouped_argsort_sorts_by_group_and_then_by_key(data, size):
    groups = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    # Keys that differ in their high bits, which are the ones that count.
    key = mix(data.draw(st.integers(0, 99)), np.arange(size))
    order = grouped_argsort(np.array(groups, np.int64), key)
    assert order.tolist() == sorted(range(size), key=lambda k: (groups[k], key[k]))


def test_grouped_argsort_is_a_permutation_even_of_equal_keys():
    key = np.zeros(9, np.uint64)
    assert grouped_argsort(np.zeros(9, np.int64), key).tolist() == list(range(9))
