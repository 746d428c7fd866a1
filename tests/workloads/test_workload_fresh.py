"""The fresh batches of a workload hold the items of its training data, in order."""

from contextlib import closing

import numpy as np
import pytest

from echo_jax.config import default_config
from echo_jax.data.sources.shapes import augment_shapes
from echo_jax.echo.spec import EchoSpec
from echo_jax.workloads import build

BATCHES = 12


def workload_of(name, after, **data):
    config = default_config()
    config.workload = name
    config.batch_size = 8
    config.echo.after = after
    config.data.update(data)
    with config.unlocked():
        if name == "shapes":
            config.data.source = "synthetic"
            config.data.train_examples = 40
            config.model.update(depth=8, width=8, norm="batch")
        else:
            config.data.source = "stdlib"
            config.model.update(
                seq_len=8, d_model=8, num_layers=1, num_heads=1, d_ff=8,
                dropout=0.0,
            )  # fmt: skip
    return build(config)


def take(dataset, count):
    with closing(iter(dataset)) as iterator:
        return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "after"),
    [("lm", "decode"), ("lm", "augment"), ("shapes", "augment")],
)
@pytest.mark.parametrize("threads", [0, 2])
def test_the_same_items_in_the_same_order(name, after, threads):
    workload = workload_of(name, after, threads=threads)
    fresh = take(workload.fresh_dataset(), BATCHES)
    trained = take(workload.train_dataset(EchoSpec(batch_size=8)), BATCHES)
    for ours, other in zip(fresh, trained, strict=True):
        assert ours.keys() == other.keys() - {"fresh_index", "repeat"}
        for key, value in ours.items():
            np.testing.assert_array_equal(value, other[key])
            assert value.dtype == other[key].dtype


def test_decoded_images_are_not_augmented_yet():
    workload = workload_of("shapes", "decode")
    assert workload.augment_on_device == augment_shapes
    fresh = take(workload.fresh_dataset(), 5)
    again = take(workload_of("shapes", "augment").fresh_dataset(), 5)
    same = [(a["image"] == b["image"]).all() for a, b in zip(fresh, again, strict=True)]
    assert not any(same)
    for ours, other in zip(fresh, again, strict=True):
        np.testing.assert_array_equal(ours["label"], other["label"])


def test_goes_on_from_any_batch():
    dataset = workload_of("shapes", "decode").fresh_dataset()
    with closing(iter(dataset)) as iterator:
        states = []
        seen = []
        for _ in range(BATCHES):
            states.append(iterator.get_state())
            seen.append(next(iterator)["image"])
        for number in (0, 5, 4, BATCHES - 1):
            iterator.set_state(states[number])
            np.testing.assert_array_equal(next(iterator)["image"], seen[number])


@pytest.mark.parametrize("after", ["read", "batch"])
def test_there_is_no_echo_of_records_or_batches_on_a_device(after):
    workload = workload_of("shapes", after)
    with pytest.raises(ValueError, match=f"after='{after}' has no echo on a device"):
        workload.fresh_dataset()
