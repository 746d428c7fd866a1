"""The echo in a tf.data graph: the laws, and the sequence of the host."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from echo_cases import host_echo, spec_of
from test_echo_device import Fetched, item_of

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream, assert_echo_laws
from echo_jax.echo.orders import ORDERS, Order, Piece

BUILT = {}  # graphs, with what feeds them


def without_prefetch(dataset):
    """By default tf.data may put a prefetch of its own behind any pipeline."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def graph_echo(upstream, spec):
    """Starts an echo over one graph of a spec: building it takes half a second."""
    key = repr(spec)
    if key not in BUILT:
        feed = {}
        dataset = tf.data.Dataset.from_generator(
            lambda: map(feed["upstream"].counted, feed["upstream"].items),
            output_signature={
                "index": tf.TensorSpec([], tf.int64),
                "payload": tf.TensorSpec(None, tf.float32),
            },
        )
        dataset = dataset.apply(ej.tfdata.echo(spec, tags=True))
        BUILT[key] = feed, without_prefetch(dataset)
    feed, dataset = BUILT[key]
    feed["upstream"] = upstream
    return dataset.as_numpy_iterator()


def read_ahead_of(spec):
    """How many elements may be read before the use that needs them."""
    if spec.order == "consecutive":
        return 0
    return math.ceil(spec.buffer / spec.schedule.max_factor) - 1


def host_tags(spec, num_items):
    return [tags for _, tags in ej.echo(range(num_items), spec, tags=True)]


def state_after(spec, num_items, uses):
    """The state of a host echo's plan after some uses."""
    echo = ej.echo(CountingUpstream(range(num_items)), spec)
    for _ in range(uses):
        next(echo)
    return echo.get_state()["plan"]


def graph_tags(batches):
    """The tags of all batches, of one size, of elements that are their own indices."""
    tags, sizes = [], []
    for element, (index, repeat) in batches.as_numpy_iterator():
        np.testing.assert_array_equal(element, index)
        sizes.append(len(index))
        tags += zip(index.tolist(), repeat.tolist(), strict=True)
    assert len({*sizes[:-1]}) <= 1
    return tags


@pytest.mark.parametrize(
    ("order", "factor", "num_items"),
    [
        ("consecutive", "piecewise", 23),
        ("window_shuffle", "1.5", 23),
        ("spread", "7.3", 23),
        ("spread", "7.3", 1),
        ("shuffle_buffer", "by_item", 23),
    ],
)
def test_laws(order, factor, num_items):
    spec = spec_of(order, factor)

    def make_item(index):
        shape = (index % 3, 2) if index % 2 else (index % 5,)
        payload = np.full(shape, index, np.float32)
        return {"index": np.array(index), "payload": payload}

    # Law 2 is of the spec without repeats, which is the same of all of these.
    laws = [1, 2, 3, 5, 7] if order == "consecutive" else [1, 3, 5, 7]
    options = {"read_ahead": read_ahead_of(spec), "make_item": make_item}
    assert_echo_laws(graph_echo, spec, num_items=num_items, laws=laws, **options)


@pytest.mark.parametrize(
    ("spec", "num_items"),
    [
        (ej.EchoSpec("1001/1000", seed=1), 1100),
        (
            ej.EchoSpec({0: 4, 277: 1, 300: "4/3"}, 64, "window_shuffle", seed=2**63),
            600,
        ),
        (ej.EchoSpec({0: 1, 200: "7/3", 400: 3}, 200, "spread", 8, seed=5), 700),
        # Rounds without a fresh item, while the buffer is full of the first ones.
        (ej.EchoSpec(7.3, 64, "spread", 32, seed=6), 500),
        # A batch has more fresh items than a chunk.
        (ej.EchoSpec(1.5, 20, "shuffle_buffer", 64, seed=7), 500),
    ],
    ids=["consecutive", "window_shuffle", "spread", "no-fresh-items", "shuffle_buffer"],
)
def test_long_streams_give_the_sequence_of_the_host(spec, num_items):
    dataset, expected = tf.data.Dataset.range(num_items), host_tags(spec, num_items)
    uses = dataset.apply(ej.tfdata.echo(spec, tags=True))
    assert graph_tags(uses.batch(512)) == expected
    batches = dataset.apply(ej.tfdata.echo(spec, batch=True, tags=True))
    assert graph_tags(batches) == expected


def test_elements_of_any_structure():
    def element(k):
        row = tf.fill([tf.cast(k, tf.int32) % 4], k)
        return {
            "text": tf.strings.as_string(k),
            "pair": (tf.cast(k, tf.uint8), None),
            "row": row,
            "ragged": tf.RaggedTensor.from_row_lengths(row, [tf.size(row)]),
            "sparse": tf.sparse.from_dense([0, k]),
            "no": tf.zeros([2, 0], tf.bfloat16),
        }

    spec = spec_of("window_shuffle", "1.5")
    dataset = tf.data.Dataset.range(15).map(element)
    items = list(dataset)
    echoed = dataset.apply(ej.tfdata.echo(spec, tags=True))
    tag_spec = ej.UseInfo(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32))
    assert echoed.element_spec == (dataset.element_spec, tag_spec)
    tags = []
    for item, tag in echoed:
        original = items[int(tag.fresh_index)]
        tf.nest.assert_same_structure(item, original, expand_composites=True)
        for part, expected in zip(
            tf.nest.flatten(item, expand_composites=True),
            tf.nest.flatten(original, expand_composites=True),
            strict=True,
        ):
            assert part is expected is None or np.array_equal(part, expected)
        tags.append((int(tag.fresh_index), int(tag.repeat)))
    assert tags == host_tags(spec, 15)


def test_batches_are_stacked_and_the_last_one_is_short_or_left_out():
    spec = ej.EchoSpec(1.5, batch_size=4)
    dataset = tf.data.Dataset.range(7).map(lambda k: {"k": k})  # 10 uses
    batches = list(
        dataset.apply(ej.tfdata.echo(spec, batch=True, tags=True)).as_numpy_iterator()
    )
    assert [batch["k"].tolist() for batch, _ in batches] == [
        [0, 1, 1, 2],
        [3, 3, 4, 5],
        [5, 6],
    ]
    assert [tags.repeat.tolist() for _, tags in batches] == [
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [1, 0],
    ]
    whole = dataset.apply(ej.tfdata.echo(spec, batch=True, drop_remainder=True))
    assert whole.element_spec["k"].shape == [4]
    assert len(list(whole)) == 2


def test_a_graph_within_a_function_is_the_same_twice():
    """Built and run within a function, behind a prefetch, over and over."""
    spec = spec_of("spread", "1.5")

    @tf.function
    def run(num_items):
        dataset = tf.data.Dataset.range(num_items).apply(ej.tfdata.echo(spec))
        seen = tf.zeros([0], tf.int64)
        for batch in dataset.prefetch(3).batch(100).repeat(2):
            tf.autograph.experimental.set_loop_options(
                shape_invariants=[(seen, tf.TensorShape([None]))]
            )
            seen = tf.concat([seen, batch], 0)
        return seen

    expected = [tags.fresh_index for tags in host_tags(spec, 31)]
    assert run(tf.constant(31, tf.int64)).numpy().tolist() == 2 * expected


@pytest.mark.parametrize(
    ("order", "factor"), [("spread", "1.5"), ("consecutive", "by_item")]
)
def test_a_checkpoint_of_tensorflow_continues(order, factor, tmp_path):
    def start():
        echo = ej.tfdata.echo(spec_of(order, factor))
        return iter(tf.data.Dataset.range(31).apply(echo))

    expected = [int(item) for item in start()]
    iterator = start()
    for _ in range(20):
        next(iterator)
    path = tf.train.Checkpoint(iterator).write(str(tmp_path / "iterator"))
    restored = start()
    tf.train.Checkpoint(restored).read(path).assert_consumed()
    assert [int(item) for item in restored] == expected[20:]


@pytest.mark.parametrize(
    ("order", "factor", "uses"),
    [
        ("consecutive", "piecewise", 58),
        ("window_shuffle", "2", 1),
        ("spread", "7.3", 61),
        ("shuffle_buffer", "by_item", 50),
        # The echo has met the end, and its state tells.
        ("spread", "7.3", 506),
    ],
)
def test_a_graph_begins_where_an_echo_stands(order, factor, uses):
    spec = spec_of(order, factor)
    state = state_after(spec, 70, uses)
    assert (state["end"] == 70) == (uses == 506)
    rest = tf.data.Dataset.range(state["anchor"], 70)
    resumed = rest.apply(ej.tfdata.echo(spec, batch=True, tags=True, state=state))
    assert graph_tags(resumed) == host_tags(spec, 70)[uses:]


def test_a_checkpoint_holds_little_more_than_the_elements_in_use(tmp_path):
    spec = ej.EchoSpec(2, 40, "shuffle_buffer", seed=1)
    state = state_after(spec, 2000, 1000)
    dataset = tf.data.Dataset.range(state["anchor"], 2000)
    dataset = dataset.map(lambda k: tf.random.stateless_uniform([1000], [k, 0]))
    echoed = dataset.apply(ej.tfdata.echo(spec, state=state))
    iterator = iter(without_prefetch(echoed))
    for _ in range(600):
        next(iterator)
    tf.train.Checkpoint(iterator).write(str(tmp_path / "iterator"))
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    # Up to 40 elements and a chunk of 20; TensorFlow saves them up to three times.
    assert size < 3 * 60 * 4 * 1000


def test_what_a_graph_cannot_echo_is_refused():
    state = state_after(ej.EchoSpec(2), 70, 0)
    with pytest.raises(ValueError, match="saved with another spec"):
        ej.tfdata.echo(ej.EchoSpec(3), state=state)
    spec = spec_of("spread", "2")
    echo = ej.tfdata.echo(spec, state=state_after(spec, 70, 61))
    with pytest.raises(tf.errors.OpError, match=r"before item 18.* from item 16 on"):
        list(tf.data.Dataset.range(2).apply(echo))
    windows = tf.data.Dataset.range(9).window(2)
    with pytest.raises(TypeError, match=r"DatasetSpec.*only order='consecutive'"):
        windows.apply(ej.tfdata.echo(spec_of("spread", "2")))
    echoed = windows.apply(ej.tfdata.echo(ej.EchoSpec(2)))
    found = [list(w.as_numpy_iterator()) for w in echoed.take(3)]
    assert found == [[0, 1], [0, 1], [2, 3]]


# --- An order of one's own.


class ReversedPairs(Order):
    """The uses of items 1, 0, 3, 2, ..."""

    name = "reversed_pairs"
    sentence = "back to back, in pairs of items, the second one first"
    stride = 2

    def __post_init__(self):
        self.num_slots = self.batch_size + 4
        self.window = self.num_slots + 1

    def pieces(self, round_, anchor, carry):
        while True:
            uses, after = self.schedule.uses(anchor, 2, carry)
            index = np.repeat([anchor + 1, anchor], uses[::-1])
            repeat = np.concatenate([np.arange(n) for n in uses[::-1]])
            last = repeat == uses[index - anchor] - 1
            yield Piece(round_, anchor, carry, index, repeat.astype(np.int32), last)
            round_, anchor, carry = round_ + 1, anchor + 2, after

    def most_rereads(self):
        return 2

    def broken(self, uses, due):
        pairs = [index // 2 for index, _ in uses]
        for position, (before, pair) in enumerate(itertools.pairwise(pairs)):
            if pair < before:
                yield f"at use {position + 1}", f"pair {before} or later", pair


def test_a_new_order_is_one_class(monkeypatch):
    with pytest.raises(ValueError, match=r"'reversed_pairs' is unknown; use one of 'c"):
        ej.EchoSpec(2.5, 4, "reversed_pairs")
    monkeypatch.setitem(ORDERS, ReversedPairs.name, ReversedPairs)
    spec = ej.EchoSpec(2.5, 4, "reversed_pairs", batch_size=4)
    assert list(ej.echo(range(4), spec)) == [1, 1, 1, 0, 0, 3, 3, 3, 2, 2]
    assert_echo_laws(host_echo, spec, num_items=14)
    # A fresh echo reads the first host batch to lay its buffer out.
    options = {"max_rereads": 3, "make_item": item_of}
    assert_echo_laws(Fetched, spec, num_items=14, **options)
    assert_echo_laws(graph_echo, spec, num_items=14, laws=[1, 3, 5, 6, 7])
    with pytest.raises(AssertionError, match=r"law 6 .* pair 1 or later, got"):
        spread = ej.EchoSpec(2.5, 8, "spread")
        assert_echo_laws(lambda up, _: host_echo(up, spread), spec, laws=[6])
