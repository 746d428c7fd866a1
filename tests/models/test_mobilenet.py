import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_reference import conv, normalise, randomised, relu

from echo_jax.models.mobilenet import MobileNetV3, _Block, _InvertedResidual


def made(model, size):
    images = jnp.zeros((2, size, size, 3))
    return jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))


@pytest.mark.parametrize(
    ("size", "expected"), [("large", 5_483_032), ("small", 2_542_856)]
)
@pytest.mark.parametrize("small_images", [False, True])
def test_number_of_parameters_is_the_published_one(size, expected, small_images):
    # As torchvision states them for 1000 classes.
    model = MobileNetV3(1000, size, small_images)
    assert sum(x.size for x in jax.tree.leaves(made(model, 64)["params"])) == expected


@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize(("pixels", "small_images"), [(224, False), (32, True)])
def test_where_the_resolution_is_halved(size, pixels, small_images):
    model = MobileNetV3(10, size, small_images)
    images = jnp.zeros((2, pixels, pixels, 3))
    _, state = jax.eval_shape(
        lambda variables: model.apply(
            variables, images, train=False, capture_intermediates=True
        ),
        made(model, pixels),
    )
    found = state["intermediates"]
    last = found["last"]["__call__"][0].shape
    assert last[1:3] == ((4, 4) if small_images else (7, 7))
    stem = found["stem"]["__call__"][0].shape
    assert stem[1] == (pixels if small_images else pixels // 2)
    assert found["__call__"][0].shape == (2, 10)


@pytest.mark.parametrize(
    "block",
    [
        _Block(3, 8, 4, False, False, 1),  # The input is added.
        _Block(5, 8, 6, True, True, 2),
        _Block(3, 4, 4, True, False, 1),  # Nothing is expanded.
    ],
)
def test_an_inverted_residual_by_hand(block):
    module = _InvertedResidual(block, "batch", jnp.float32)
    x = np.random.default_rng(1).normal(size=(2, 7, 7, 4)).astype(np.float32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, train=False))
    variables = randomised(shapes)
    params, stats = variables["params"], variables["batch_stats"]

    def hard_sigmoid(y):
        return np.clip(y + 3, 0, 6) / 6

    def active(y):
        return y * hard_sigmoid(y) if block.hard_swish else relu(y)

    def layer(y, name, stride=1):
        kernel = params[name]["conv"]["kernel"]
        if kernel.shape[2] != y.shape[-1]:  # A channel by itself.
            channels = y.shape[-1]
            kernel = kernel * np.eye(channels)[None, None]
        y = conv(y, kernel, stride)
        return normalise(y, params[name]["norm"], stats[name]["norm"])

    y = x
    if block.expanded != 4:
        y = active(layer(y, "expand"))
    y = active(layer(y, "depthwise", block.stride))
    if block.squeezes:
        dense = params["excitation"]
        means = y.mean(axis=(1, 2), keepdims=True)
        squeezed = relu(means @ dense["squeeze"]["kernel"] + dense["squeeze"]["bias"])
        y = y * hard_sigmoid(
            squeezed @ dense["excite"]["kernel"] + dense["excite"]["bias"]
        )
    y = layer(y, "project")
    expected = x + y if y.shape == x.shape else y
    ours = module.apply(variables, x, train=False)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_there_are_statistics_of_batch_norm_alone(norm):
    model = MobileNetV3(10, "small", True, norm)
    variables = made(model, 16)
    assert ("batch_stats" in variables) == (norm == "batch")
    logits, updated = jax.eval_shape(
        lambda variables: model.apply(
            variables, jnp.zeros((2, 16, 16, 3)), train=True, mutable=["batch_stats"]
        ),
        variables,
    )
    assert logits.dtype == jnp.float32
    assert updated.get("batch_stats") == variables.get("batch_stats")


def test_training_moves_the_statistics_of_a_block():
    module = _InvertedResidual(_Block(3, 8, 4, True, False, 1), "batch", jnp.float32)
    x = np.random.default_rng(1).normal(size=(2, 7, 7, 4)).astype(np.float32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, train=False))
    variables = randomised(shapes)
    _, updated = module.apply(variables, x, train=True, mutable=["batch_stats"])
    moved = jax.tree.map(
        lambda before, after: not np.array_equal(before, after),
        variables["batch_stats"],
        updated["batch_stats"],
    )
    assert len(jax.tree.leaves(moved)) == 6 and all(jax.tree.leaves(moved))


def test_another_size_is_refused():
    with pytest.raises(ValueError, match="size='medium' is unknown; use 'small' or"):
        made(MobileNetV3(10, "medium"), 32)
