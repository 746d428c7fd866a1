"""The echo in a tf.data graph: the laws, and the sequence of the host."""

import numpy as np
import pytest
import tensorflow as tf
from echo_cases import spec_of

import echo_jax as ej
from echo_jax.echo.laws import assert_echo_laws

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


def host_tags(spec, num_items):
    return [tags for _, tags in ej.echo(range(num_items), spec, tags=True)]


@pytest.mark.parametrize("factor", ["piecewise", "by_item"])
def test_laws(factor):
    def make_item(index):
        shape = (index % 3, 2) if index % 2 else (index % 5,)
        payload = np.full(shape, index, np.float32)
        return {"index": np.array(index), "payload": payload}

    spec = spec_of("consecutive", factor)
    options = {"num_items": 23, "make_item": make_item, "laws": [1, 2, 3, 5, 6, 7]}
    assert_echo_laws(graph_echo, spec, **options)


def test_a_long_stream_gives_the_sequence_of_the_host():
    """Numbers of uses are asked for in blocks of 1,024."""
    spec = ej.EchoSpec("1001/1000")
    dataset = tf.data.Dataset.range(1100).apply(ej.tfdata.echo(spec, tags=True))
    found = [(int(k), tags) for k, tags in dataset.as_numpy_iterator()]
    assert [k for k, _ in found] == [tags.fresh_index for _, tags in found]
    assert [tags for _, tags in found] == host_tags(spec, 1100)


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

    spec = spec_of("consecutive", "1.5")
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
    windows = tf.data.Dataset.range(9).window(2).apply(ej.tfdata.echo(ej.EchoSpec(2)))
    found = [list(w.as_numpy_iterator()) for w in windows.take(3)]
    assert found == [[0, 1], [0, 1], [2, 3]]


def test_a_graph_within_a_function_is_the_same_twice():
    """Built and run within a function, behind a prefetch, over and over."""
    spec = spec_of("consecutive", "1.5")

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


def test_a_checkpoint_of_tensorflow_continues_behind_a_shuffle(tmp_path):
    def start():
        echo = ej.tfdata.echo(spec_of("consecutive", "by_item"))
        return iter(tf.data.Dataset.range(31).apply(echo).shuffle(8, seed=1))

    expected = [int(item) for item in start()]
    assert len(expected) > 31 and expected != sorted(expected)
    iterator = start()
    for _ in range(20):
        next(iterator)
    path = tf.train.Checkpoint(iterator).write(str(tmp_path / "iterator"))
    restored = start()
    tf.train.Checkpoint(restored).read(path).assert_consumed()
    assert [int(item) for item in restored] == expected[20:]


def test_other_orders_and_modes_echo_on_the_host():
    spread = ej.EchoSpec(2, order="spread", buffer=16)
    with pytest.raises(ValueError, match=r"got 'spread'. Use echo_jax.echo_batches\("):
        ej.tfdata.echo(spread)
    with pytest.raises(TypeError, match=r"AdaptiveSpec. Use echo_jax.echo_batches\("):
        ej.tfdata.echo(ej.AdaptiveSpec())
    dataset = tf.data.Dataset.range(40).map(lambda k: {"k": k}).batch(8)
    arrays = [{"k": np.arange(first, first + 8)} for first in range(0, 40, 8)]
    found, expected = ej.echo_batches(dataset, spread), ej.echo_batches(arrays, spread)
    for _ in range(2):  # epochs
        batches = [batch["k"].tolist() for batch in found]
        assert len(batches) == 10
        assert batches == [batch["k"].tolist() for batch in expected]
