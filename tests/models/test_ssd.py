from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.data.detection.anchors import boxes_per_cell, default_boxes
from echo_jax.models.ssd import SSD, map_sizes

SMALL = partial(SSD, num_outputs=5, stage_sizes=(1, 1, 1), width=4)


def shapes_of(model, size):
    images = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    variables = jax.eval_shape(
        partial(model.init, train=False), jax.random.key(0), images
    )
    return variables, jax.eval_shape(
        partial(model.apply, train=False), variables, images
    )


def count(tree):
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def test_maps_of_300_pixels_are_those_of_the_paper():
    assert map_sizes(300) == (38, 19, 10, 5, 3, 1)
    assert map_sizes(128) == (16, 8, 4, 2)


@pytest.mark.parametrize("size", [64, 96, 160, 300, 512])
def test_there_is_a_prediction_for_every_default_box(size):
    maps = map_sizes(size)
    model = SMALL(boxes_per_cell=boxes_per_cell(maps))
    _, (offsets, scores) = shapes_of(model, size)
    num_anchors = len(default_boxes(maps))
    assert offsets.shape == (2, num_anchors, 4)
    assert scores.shape == (2, num_anchors, 5)


def test_parameters_of_the_default_size():
    variables, _ = shapes_of(
        SSD(num_outputs=81, boxes_per_cell=(4, 6, 6, 6, 4, 4)), 300
    )
    params = variables["params"]
    # A ResNet-34 of 21,797,672 parameters without its last stage (13,114,368) and
    # its classifier of 1000 classes (513,000).
    assert count(params["trunk"]) == 21_797_672 - 13_114_368 - 513_000
    maps = [(256, 512), (512, 512), (512, 256), (256, 256), (256, 256)]
    extras = sum(
        before * after // 2 + 9 * after // 2 * after + 3 * after
        for before, after in maps
    )
    channels = [256, 512, 512, 256, 256, 256]
    each = [4, 6, 6, 6, 4, 4]
    heads = sum((9 * c + 1) * n * (4 + 81) for c, n in zip(channels, each, strict=True))
    assert count(params) == count(params["trunk"]) + extras + heads


def test_predictions_lie_where_their_default_boxes_are():
    """A change in a corner changes the boxes of that corner, on the finest map."""
    size = 256
    maps = map_sizes(size)
    model = SMALL(boxes_per_cell=boxes_per_cell(maps))
    variables, _ = shapes_of(model, size)
    rng = np.random.default_rng(0)
    # Drawn here: compiling the model's own initialisation takes longer than the test.
    variables = jax.tree.map(
        lambda x: np.abs(rng.normal(scale=0.3, size=x.shape)).astype(x.dtype), variables
    )
    images = rng.normal(size=(2, size, size, 3)).astype(np.float32)
    images[1] = images[0]
    images[1, :16, -24:] += 1  # at the top, on the right
    predict = jax.jit(lambda x: model.apply(variables, x, train=False)[0])
    before, after = np.asarray(predict(images))
    finest = 4 * maps[0] ** 2
    moved = np.abs(after - before)[:finest].sum(axis=-1)
    boxes = default_boxes(maps)[:finest]
    center = (boxes[:, :2] + boxes[:, 2:]) / 2
    mean = (moved[:, None] * center).sum(axis=0) / moved.sum()
    assert moved.sum() > 0 and mean[0] < 0.2 and mean[1] > 0.8


def test_predictions_are_float32_whatever_is_computed_in():
    maps = map_sizes(64)
    model = SMALL(boxes_per_cell=boxes_per_cell(maps), dtype=jnp.bfloat16)
    variables, predictions = shapes_of(model, 64)
    assert {x.dtype for x in jax.tree.leaves((variables, predictions))} == {
        jnp.dtype("float32")
    }


def test_scores_start_at_their_bias():
    model = SMALL(boxes_per_cell=boxes_per_cell(map_sizes(64)), score_bias=-4.6)

    @jax.jit
    def biases(key):
        params = model.init(key, jnp.zeros((1, 64, 64, 3)), train=False)["params"]
        # What is not returned is not compiled.
        return {name: params[name]["bias"] for name in ("scores_1", "offsets_1")}

    found = biases(jax.random.key(0))
    np.testing.assert_allclose(found["scores_1"], -4.6)
    np.testing.assert_allclose(found["offsets_1"], 0)


def test_default_boxes_of_another_size_are_refused():
    model = SMALL(boxes_per_cell=(4, 6, 6, 6, 4, 4))
    with pytest.raises(ValueError, match=r"64 pixels .* one number for each"):
        shapes_of(model, 64)
