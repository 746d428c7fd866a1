import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_reference import conv, normalise, randomised, relu

from echo_jax.models import ResNet
from echo_jax.models.resnet import _Block

IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)


@functools.cache
def init(model):
    return jax.jit(lambda: model.init(jax.random.key(0), IMAGES, train=False))()


def shapes(model):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), IMAGES, train=False))


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (56, 0.85)])
def test_number_of_parameters_is_the_papers(depth, millions):
    # He et al. 2016, table 6.
    model = ResNet(num_classes=10, depth=depth)
    count = sum(x.size for x in jax.tree.leaves(shapes(model)["params"]))
    # The table cuts 0.4669 to 0.46 and rounds 0.853 to 0.85.
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


def test_number_of_parameters_by_hand():
    # depth 8: a stem and one block per stage; batch norm has 2 per channel.
    w = 4
    stem = 9 * 3 * w + 2 * w
    blocks = sum(
        9 * c_in * c + 9 * c * c + 4 * c
        for c_in, c in [(w, w), (w, 2 * w), (2 * w, 4 * w)]
    )
    model = ResNet(num_classes=5, depth=8, width=w)
    params = shapes(model)["params"]
    expected = stem + blocks + 4 * w * 5 + 5
    assert sum(x.size for x in jax.tree.leaves(params)) == expected


def test_downsamples_twice_and_widens():
    model = ResNet(num_classes=5, depth=8, width=8, norm="group")
    _, state = jax.eval_shape(
        lambda variables: model.apply(
            variables, IMAGES, train=False, capture_intermediates=True
        ),
        shapes(model),
    )
    outputs = [
        state["intermediates"][f"stage_{i}_block_0"]["__call__"][0].shape
        for i in range(3)
    ]
    assert outputs == [(4, 8, 8, 8), (4, 4, 4, 16), (4, 2, 2, 32)]


def change_of_the_first_logits(model, train):
    """Largest change of example 0 when all other examples of its batch change."""
    variables = init(model)

    @jax.jit
    def first(images):
        logits, _ = model.apply(variables, images, train=train, mutable=["batch_stats"])
        return logits[0]

    others = np.concatenate([IMAGES[:1], 2 * IMAGES[1:]])
    return float(jnp.abs(first(IMAGES) - first(others)).max())


def test_batch_norm_uses_the_batch_in_training_and_running_statistics_after():
    model = ResNet(num_classes=5, depth=8, width=4)
    assert change_of_the_first_logits(model, train=True) > 1e-3
    assert change_of_the_first_logits(model, train=False) == 0


def test_batch_norm_updates_its_running_statistics_in_training():
    model = ResNet(num_classes=5, depth=8, width=4)
    before = init(model)
    _, new = jax.jit(
        lambda images: model.apply(before, images, train=True, mutable=["batch_stats"])
    )(IMAGES)
    moved = jax.tree.map(
        lambda a, b: bool(jnp.any(a != b)), before["batch_stats"], new["batch_stats"]
    )
    assert jax.tree.all(moved)


@pytest.mark.slow
def test_group_norm_has_no_state_and_does_not_mix_examples():
    model = ResNet(num_classes=5, depth=8, width=8, norm="group")
    assert set(shapes(model)) == {"params"}
    assert change_of_the_first_logits(model, train=True) == 0


def test_computes_in_bfloat16_with_float32_parameters_and_logits():
    model = ResNet(num_classes=5, depth=8, width=8, norm="group", dtype=jnp.bfloat16)
    variables = shapes(model)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    logits, state = jax.eval_shape(
        lambda variables: model.apply(
            variables, IMAGES, train=False, capture_intermediates=True
        ),
        variables,
    )
    assert logits.dtype == jnp.float32
    block = state["intermediates"]["stage_2_block_0"]["__call__"][0]
    assert block.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 18}, r"depth=18 is not 6n \+ 2"),
        ({"depth": 2}, r"depth=2 is not 6n \+ 2"),
        ({"norm": "layer"}, r"norm='layer' is unknown"),
        ({"norm": "group", "width": 12}, r"width=12 is not a multiple of 8"),
    ],
)
def test_refuses_what_it_cannot_build(fields, message):
    with pytest.raises(ValueError, match=message):
        init(ResNet(**{"num_classes": 5, "depth": 8, **fields}))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_residual_block_by_hand(stride):
    c_in, channels = (4, 4) if stride == 1 else (2, 5)
    module = _Block(channels=channels, stride=stride, norm="batch", dtype=jnp.float32)
    # An odd size, at which padding leaves no choice of where the windows lie.
    x = np.random.default_rng(1).normal(size=(2, 7, 7, c_in)).astype(np.float32)
    made = jax.eval_shape(lambda: module.init(jax.random.key(0), x, train=False))
    variables = randomised(made)
    params, stats = variables["params"], variables["batch_stats"]
    y = conv(x, params["conv_0"]["kernel"], stride)
    y = relu(normalise(y, params["norm_0"], stats["norm_0"]))
    y = conv(y, params["conv_1"]["kernel"])
    y = normalise(y, params["norm_1"], stats["norm_1"])
    # Option A: every second pixel, and zeros around the channels.
    shortcut = np.zeros_like(y)
    first = (channels - c_in) // 2
    shortcut[..., first : first + c_in] = x[:, ::stride, ::stride]
    ours = module.apply(variables, x, train=False)
    np.testing.assert_allclose(ours, relu(y + shortcut), rtol=1e-4, atol=1e-4)
