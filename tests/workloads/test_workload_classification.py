import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.training.processes.sharding import make_mesh, put_batch
from echo_jax.workloads.classification import ImageClassifier, check_smoothing

MEAN, SCALE = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)


class Mirror(nn.Module):
    """Gives the pixels of the first row back as logits: what it is fed is seen."""

    @nn.compact
    def __call__(self, images, *, train):
        shift = self.param("shift", nn.initializers.zeros, (1,))
        return images[:, 0].reshape(len(images), -1) + shift[None]


TASK = ImageClassifier(Mirror(), 2, MEAN, SCALE, has_top_5=True)
VARIABLES = {"params": {"shift": np.zeros(1, np.float32)}}
# [5, 2, 2, 3]: 6 logits each.
BATCH = {
    "image": np.random.default_rng(0).integers(0, 256, (5, 2, 2, 3), dtype=np.uint8),
    "label": np.array([0, 1, 2, 3, 5], np.int32),
    "mask": np.array([1, 1, 0, 1, 1], np.float32),
}
LOGITS = ((BATCH["image"][:, 0] - np.array(MEAN)) / np.array(SCALE)).reshape(5, 6)
LOG_P = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_by_hand(smoothing):
    task = dataclasses.replace(TASK, label_smoothing=smoothing)
    losses, others, metrics = task.loss(VARIABLES, BATCH, jax.random.key(0))
    target = (1 - smoothing) * np.eye(6)[BATCH["label"]] + smoothing / 6
    np.testing.assert_allclose(losses, -(target * LOG_P).sum(axis=1), rtol=1e-5)
    right = LOGITS.argmax(axis=1) == BATCH["label"]
    assert metrics["accuracy"] == (right.sum(), 5)
    assert others == {} and losses.dtype == jnp.float32


def test_metrics_by_hand():
    sums = dataclasses.replace(TASK, label_smoothing=0.1).evaluate(VARIABLES, BATCH)
    labels, mask = BATCH["label"], BATCH["mask"]
    own = LOGITS[np.arange(5), labels]
    place = (own[:, None] < LOGITS).sum(axis=1)
    assert sums["accuracy"] == (((place == 0) * mask).sum(), 4)
    assert sums["top_5"] == (((place < 5) * mask).sum(), 4)
    # The loss that is evaluated is not smoothed.
    loss = -(LOG_P[np.arange(5), labels] * mask).sum()
    np.testing.assert_allclose(sums["loss"], (loss, 4), rtol=1e-5)


def test_top_5_of_each_place():
    # Label i stands at place i: all but the last are among the five.
    image = np.array([250, 220, 190, 160, 130, 100], np.uint8).reshape(1, 1, 2, 3)
    task = dataclasses.replace(TASK, pixel_mean=(0.0,) * 3, pixel_scale=(9.0,) * 3)
    found = []
    for label in range(6):
        batch = {
            "image": np.repeat(image, 2, axis=1),
            "label": np.array([label], np.int32),
            "mask": np.ones(1, np.float32),
        }
        sums = task.evaluate(VARIABLES, batch)
        found.append((int(sums["accuracy"][0]), int(sums["top_5"][0])))
    assert found == [(1, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 0)]


def test_what_is_not_a_number_is_no_right_answer():
    batch = {**BATCH, "image": np.full((5, 2, 2, 3), np.nan, np.float32)}
    sums = TASK.evaluate(VARIABLES, {**batch, "label": np.full(5, 5, np.int32)})
    assert sums["accuracy"][0] == 0


def test_top_5_is_left_out_unless_asked_for():
    task = dataclasses.replace(TASK, has_top_5=False)
    assert task.evaluate(VARIABLES, BATCH).keys() == {"accuracy", "loss"}


def test_one_and_eight_devices_count_the_same():
    batch = jax.tree.map(lambda x: np.concatenate([x] * 8)[:24], BATCH)
    sums = []
    for devices in (1, 8):
        split = put_batch(batch, make_mesh(devices, 1, batch_size=24))
        sums.append(jax.device_get(jax.jit(TASK.evaluate)(VARIABLES, split)))
    for name in ("accuracy", "top_5"):
        assert sums[0][name] == sums[1][name]
    np.testing.assert_allclose(sums[0]["loss"], sums[1]["loss"], rtol=1e-6)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_smoothing_that_leaves_no_label_is_refused(value):
    with pytest.raises(ValueError, match=r"model\.label_smoothing=.* below 1; set"):
        check_smoothing(value)
