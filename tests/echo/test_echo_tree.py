"""Items of every container: they come out as they went in, and share nothing."""

import dataclasses
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import flax.struct
import jax
import numpy as np
import pytest
from echo_cases import Stacked, host_batches, host_echo, spec_of
from flax.core import FrozenDict

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream, assert_echo_laws
from echo_jax.echo.tree import Structure, flatten, tree_map


class Point(NamedTuple):
    x: object
    y: object


@flax.struct.dataclass
class Frame:
    pixels: object
    label: object
    name: str = flax.struct.field(pytree_node=False, default="frame")


@jax.tree_util.register_pytree_node_class
class Swapped:
    """A class of one's own, whose paths jax numbers."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def tree_flatten(self):
        return (self.second, self.first), "swapped"

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children[::-1])


class Example(dict):
    """A dict with a class of its own, which is a leaf to jax."""


# Containers of two parts, with keys that are not in order.
CONTAINERS = {
    "dict": lambda a, b: {"z": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Point,
    "ordered_dict": lambda a, b: OrderedDict(z=a, b=b),
    "defaultdict": lambda a, b: defaultdict(int, z=a, b=b),
    "flax_struct": lambda a, b: Frame(a, b, "name"),
    "frozen_dict": lambda a, b: FrozenDict({"z": a, "b": b}),
    "own_class": Swapped,
    "dict_subclass": lambda a, b: Example(z=a, b=b),
    "proxy": lambda a, b: MappingProxyType({"z": a, "b": b}),
    "mixed_keys": lambda a, b: {"z": a, 1: b, None: []},
    "empty": lambda a, b: {"z": a, "empty": {}, "list": [], "b": b, "tuple": ()},
}


def parts_of(tree):
    """The parts of a container, told without the code that is tested."""
    kind = type(tree)
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return list(vars(tree).items()) if kind is Swapped else None


def assert_same(out, item):
    parts = parts_of(item)
    if parts is None:
        if isinstance(item, np.ndarray):
            assert type(out) is type(item) and out.dtype == item.dtype
            np.testing.assert_array_equal(out, item)
        else:
            assert type(out) is type(item) and out == item
        return
    assert type(out) is type(item)
    assert [key for key, _ in parts_of(out)] == [key for key, _ in parts]
    for (_, part), (_, expected) in zip(parts_of(out), parts, strict=True):
        assert_same(part, expected)
    if type(item) is defaultdict:
        assert out.default_factory is item.default_factory


def item_of(kind, *ks):
    """An item of a container in itself, with arrays of all kinds; or a batch."""

    def leaf(make):
        return np.stack([make(k) for k in ks]) if len(ks) > 1 else make(*ks)

    texts, times = (
        leaf(lambda k: np.array([f"{k:03}"])),
        leaf(lambda k: np.full((2, 0), k, "M8[s]")),
    )
    numbers = leaf(lambda k: np.full((2, 3), k, np.int16))
    inner = CONTAINERS[kind](texts, times)
    return CONTAINERS[kind]([numbers, inner], leaf(lambda k: np.array(k / 2)))


@pytest.mark.parametrize("stored", ["single", "stacked", "unbatched"])
@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("factor", [1, 2])
def test_a_container_comes_out_as_it_went_in(kind, stored, factor):
    spec = ej.EchoSpec(factor, 1, "consecutive", 2)
    items = [item_of(kind, k) for k in range(4)]
    order = np.repeat(range(4), factor)
    expected = [item_of(kind, *ks) for ks in order.reshape(-1, 2)]
    if stored == "single":
        outputs, expected = ej.echo(items, spec), [items[k] for k in order]
    elif stored == "stacked":
        outputs = ej.echo(items, spec, batch=True)
    else:
        outputs = ej.echo_batches([item_of(kind, 0, 1), item_of(kind, 2, 3)], spec)
    for out, item in zip(outputs, expected, strict=True):
        assert_same(out, item)


@pytest.mark.parametrize(
    ("make_echo", "make_item"),
    [
        (host_batches, lambda k: item_of("flax_struct", k)),
        (host_echo, lambda k: {"jpeg": b"\xff\0" + bytes([k]) * k, "mask": None}),
        (host_echo, np.float32),
    ],
    ids=["arrays", "ragged", "scalar"],
)
def test_the_laws_hold_for_items_of_any_kind(make_echo, make_item):
    spec = spec_of("spread", "1.5")
    assert_echo_laws(make_echo, spec, num_items=7, make_item=make_item)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_uses_share_no_container_and_no_memory_that_can_be_written(kind):
    item = item_of(kind, 1)
    first, second = ej.echo([item], ej.EchoSpec(2))
    leaves = [[leaf for _, leaf in flatten(tree)] for tree in (first, second, item)]
    for mine, yours, upstreams in zip(*leaves, strict=True):
        if isinstance(mine, np.ndarray):
            assert not mine.flags.writeable and not yours.flags.writeable
            assert not np.shares_memory(mine, upstreams)
    for mine, yours in itertools.product(containers(first), containers(second)):
        assert mine is not yours or mine == ()
    assert_same(second, item)


def containers(tree):
    parts = parts_of(tree)
    if parts is None:
        return []
    return [tree, *(c for _, part in parts for c in containers(part))]


def test_a_restore_reads_rows_of_text_at_their_full_width():
    texts = np.array(["a", "bcd", "ef", "g"] * 4)
    items = [{"column": texts[k : k + 1], "scalar": texts[k]} for k in range(16)]

    def make():
        upstream = Stacked(CountingUpstream(items), 4)
        return ej.echo_batches(upstream, spec_of("window_shuffle", "2"))

    echo, other = make(), make()
    next(echo)
    other.set_state(echo.get_state())
    for mine, yours in zip(echo, other, strict=True):
        assert_same(yours, mine)


def test_paths_name_keys_places_and_attributes():
    item = {"a": [1, Point(2, None)], "f": Frame(3, {"b": 4}), "s": Swapped(5, 6)}
    assert flatten(item) == [
        ("['a'][0]", 1),
        ("['a'][1].x", 2),
        ("['f'].pixels", 3),
        ("['f'].label['b']", 4),
        ("['s'][<flat index 0>]", 6),
        ("['s'][<flat index 1>]", 5),
    ]
    assert flatten(Frame(1, MappingProxyType({2: 3})))[1] == (".label[2]", 3)
    # What a dict cannot make again is a leaf.
    decorated = Example(a=1)
    assert flatten(decorated) == [("['a']", 1)]
    decorated.source = "file"
    assert flatten(decorated) == [("", decorated)]


ONE = np.array(1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": [ONE]}, {"a": (ONE,)}),
        ({"a": 1}, {"b": 1}),
        ([ONE, ONE], [ONE, ONE, ONE]),
        (Frame(1, 2, "cat"), Frame(1, 2, "dog")),
        (defaultdict(int, a=1), defaultdict(list, a=1)),
        ({"a": 1}, {"a": {"b": 1}}),
    ],
)
def test_items_of_two_structures_do_not_make_a_batch(first, second):
    assert Structure(first).columns([first, second]) is None
    echo = ej.echo([first, second], ej.EchoSpec(batch_size=2), batch=True)
    with pytest.raises(ValueError, match="items of one structure"):
        next(echo)


def test_dicts_of_one_structure_may_order_their_keys_as_they_like():
    items = [{"b": {"y": 1, "x": 2}, "a": 3}, {"a": 6, "b": {"x": 5, "y": 4}}]
    (batch,) = ej.echo(items, ej.EchoSpec(batch_size=2), batch=True)
    expected = {"b": {"y": [1, 4], "x": [2, 5]}, "a": [3, 6]}
    assert_same(tree_map(lambda leaf: leaf.tolist(), batch), expected)
