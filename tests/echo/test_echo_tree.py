"""Items of every container: they come out as they went in, and share nothing."""

import dataclasses
import itertools
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import flax.struct
import jax
import numpy as np
import pytest
from echo_cases import ORDERS, spec_of
from flax.core import FrozenDict

import echo_jax as ej
from echo_jax.echo import Structure, flatten, tree_map
from echo_jax.echo.laws import assert_echo_laws


class Point(NamedTuple):
    x: object
    y: object


@flax.struct.dataclass
class Frame:
    pixels: object
    label: object
    name: str = flax.struct.field(pytree_node=False, default="frame")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Boxes:
    corners: object
    scores: object
    unit: str = dataclasses.field(metadata={"static": True}, default="px")


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


class Record(Mapping):
    """A Mapping that jax does not know."""

    def __init__(self, fields):
        self._fields = dict(fields)

    def __getitem__(self, key):
        return self._fields[key]

    def __iter__(self):
        return iter(self._fields)

    def __len__(self):
        return len(self._fields)


class Example(dict):
    """A dict with a class of its own, which is a leaf to jax."""


class AttributeDict(dict):
    """The dict of many a config library: its attributes are its items."""

    def __init__(self, fields):
        super().__init__(fields)
        self.__dict__ = self


class Closed(Mapping):
    """A Mapping that cannot be made again of a dict."""

    def __init__(self, array, name):
        self.array, self.name = array, name

    def __len__(self):
        return 1

    def __getitem__(self, key):
        return self.array

    def __iter__(self):
        return iter([self.name])


# Containers of two parts, with keys that are not in order.
CONTAINERS = {
    "dict": lambda a, b: {"z": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Point,
    "none": lambda a, b: {"z": a, "none": None, "b": (None, b)},
    "ordered_dict": lambda a, b: OrderedDict(z=a, b=b),
    "defaultdict": lambda a, b: defaultdict(int, z=a, b=b),
    "flax_struct": lambda a, b: Frame(a, b, "name"),
    "dataclass": lambda a, b: Boxes(a, b, "cm"),
    "frozen_dict": lambda a, b: FrozenDict({"z": a, "b": b}),
    "frozen_mixed_keys": lambda a, b: FrozenDict({"z": a, 1: b}),
    "own_class": Swapped,
    "mapping": lambda a, b: Record({"z": a, "b": b}),
    "dict_subclass": lambda a, b: Example(z=a, b=b),
    "attribute_dict": lambda a, b: AttributeDict({"z": a, "b": b}),
    "user_dict": lambda a, b: UserDict({"z": a, "b": b}),
    "proxy": lambda a, b: MappingProxyType({"z": a, "b": b}),
    "int_keys": lambda a, b: {7: a, 1: b},
    "mixed_keys": lambda a, b: {"z": a, 1: b, None: 3},
    "empty": lambda a, b: {"z": a, "empty": {}, "list": [], "b": b, "tuple": ()},
}
STORED = ["single", "stacked", "unbatched"]


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
    """Asserts equal containers, keys in order, values and dtypes."""
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


def stack(items):
    """Stacks items of arrays, told without the code that is tested."""
    treedef = [parts_of(item) for item in items]
    if isinstance(items[0], str):
        return items[0]
    if items[0] is None:
        return None
    if treedef[0] is None:
        return np.stack(items)
    parts = [stack([part for _, part in same]) for same in zip(*treedef, strict=True)]
    kind, keys = type(items[0]), [key for key, _ in treedef[0]]
    if kind is defaultdict:
        return defaultdict(int, zip(keys, parts, strict=True))
    if isinstance(items[0], Mapping):
        return kind(dict(zip(keys, parts, strict=True)))
    return kind(parts) if kind in (list, tuple) else kind(*parts)


def uses(items, stored, factor, size):
    """Puts items through an echo, consecutive, and gives what must come out."""
    spec = ej.EchoSpec(factor, batch_size=size)
    order = [item for item in items for _ in range(factor)]
    if stored == "single":
        return list(ej.echo(items, spec)), order
    batches = [order[at : at + size] for at in range(0, len(order), size)]
    expected = [stack(batch) for batch in batches]
    if stored == "stacked":
        return list(ej.echo(items, spec, batch=True)), expected
    upstream = [stack(items[:2]), *([stack(items[2:])] if items[2:] else [])]
    return list(ej.echo_batches(upstream, spec)), expected


def item_of(kind, k):
    """An item of a container in itself, with arrays of all kinds."""
    inner = CONTAINERS[kind](np.array([f"{k:03}"]), np.full((2, 0), k, "M8[s]"))
    return CONTAINERS[kind]([np.full((2, 3), k, np.int16), inner], np.array(k / 2))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_comes_out_as_it_went_in(kind, stored):
    items = [item_of(kind, k) for k in range(5)]
    for factor in (1, 2):
        outputs, expected = uses(items, stored, factor, size=2)
        for out, item in zip(outputs, expected, strict=True):
            assert_same(out, item)


@pytest.mark.parametrize("kind", ["dict", "flax_struct"])
def test_the_laws_hold_for_items_of_containers(kind):
    def make_echo(upstream, spec):
        return ej.echo(upstream, spec, batch=True, tags=True)

    spec = spec_of("spread", "1.5")
    assert_echo_laws(make_echo, spec, num_items=7, make_item=lambda k: item_of(kind, k))


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


@pytest.mark.parametrize("order", ORDERS)
def test_a_restore_reads_rows_of_text_at_their_full_width(order):
    texts = np.array([["a"], ["bcd"], ["ef"], ["g"]] * 4)

    class Upstream:
        """One stack of rows at a time, with its place for a state."""

        place = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.place == 4:
                raise StopIteration
            self.place += 1
            rows = texts[(self.place - 1) * 4 : self.place * 4]
            return {"column": rows, "vector": rows[:, 0]}

        def get_state(self):
            return self.place

        def set_state(self, state):
            self.place = state

    def make():
        spec = spec_of(order, "2")
        return ej.echo_batches(Upstream(), spec)

    echo = make()
    next(echo)
    other, state = make(), echo.get_state()
    other.set_state(state)
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
    assert flatten(Boxes(1, Record({2: 3}))) == [(".corners", 1), (".scores[2]", 3)]
    assert flatten(7) == [("", 7)]


def test_a_mapping_that_cannot_be_made_again_is_a_leaf():
    closed = Closed(np.zeros(2), "x")
    assert flatten({"a": closed}) == [("['a']", closed)]
    assert tree_map(lambda leaf: leaf is closed, [closed]) == [True]
    decorated = Example(a=1)
    assert flatten(decorated) == [("['a']", 1)]
    decorated.source = "file"
    assert flatten(decorated) == [("", decorated)]
    counter = Counter("aab")
    assert flatten(counter) == [("['a']", 2), ("['b']", 1)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": [1]}, {"a": (1,)}),
        ({"a": 1, "b": None}, {"a": 1}),
        ({"a": 1}, Record({"a": 1})),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1, 2, 3]),
        (Frame(1, 2, "cat"), Frame(1, 2, "dog")),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(int, a=1), defaultdict(list, a=1)),
        ({"a": 1}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": 1}),
    ],
)
def test_items_of_two_structures_do_not_make_a_batch(first, second):
    assert Structure(first).leaves(second) is None
    echo = ej.echo([first, second], ej.EchoSpec(batch_size=2), batch=True)
    with pytest.raises(ValueError, match="items of one structure"):
        next(echo)


def test_dicts_of_one_structure_may_order_their_keys_as_they_like():
    items = [{"b": {"y": 1, "x": 2}, "a": 3}, {"a": 6, "b": {"x": 5, "y": 4}}]
    (batch,) = ej.echo(items, ej.EchoSpec(batch_size=2), batch=True)
    expected = {"b": {"y": [1, 4], "x": [2, 5]}, "a": [3, 6]}
    assert_same(tree_map(lambda leaf: leaf.tolist(), batch), expected)
