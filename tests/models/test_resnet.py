import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import ResNet

IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)


@functools.cache
def init(model):
    return model.init(jax.random.key(0), IMAGES, train=False)


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
