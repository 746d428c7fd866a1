import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_reference import conv, normalise, randomised, relu
from jax.extend.core import jaxprs_in_params

from echo_jax.models.imagenet_resnet import ImageNetResNet, ResNetStages, _ResidualBlock


def shapes(model, size=64):
    images = jnp.zeros((2, size, size, 3))
    return jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))


def intermediates(model, size):
    """Shapes of what every module returns."""
    images = jnp.zeros((2, size, size, 3))
    _, state = jax.eval_shape(
        lambda variables: model.apply(
            variables, images, train=False, capture_intermediates=True
        ),
        shapes(model, size),
    )
    return state["intermediates"]


@pytest.mark.parametrize(
    ("stage_sizes", "block", "expected"),
    [
        ((2, 2, 2, 2), "basic", 11_689_512),  # ResNet-18
        ((3, 4, 6, 3), "basic", 21_797_672),  # ResNet-34
        ((3, 4, 6, 3), "bottleneck", 25_557_032),  # ResNet-50
        ((3, 4, 23, 3), "bottleneck", 44_549_160),  # ResNet-101
    ],
)
def test_number_of_parameters_is_the_published_one(stage_sizes, block, expected):
    # As torchvision states them for 1000 classes.
    model = ImageNetResNet(1000, stage_sizes, block)
    assert sum(x.size for x in jax.tree.leaves(shapes(model)["params"])) == expected


def test_shapes_of_resnet_50():
    found = intermediates(ImageNetResNet(1000), 224)
    trunk = found["trunk"]
    assert trunk["stem"]["__call__"][0].shape == (2, 112, 112, 64)
    features = trunk["__call__"][0]
    assert [x.shape[1:] for x in features] == [
        (56, 56, 256),
        (28, 28, 512),
        (14, 14, 1024),
        (7, 7, 2048),
    ]
    # v1.5: the 1x1 before the 3x3 still sees every pixel.
    block = trunk["stage_1_block_0"]
    assert block["conv_0"]["__call__"][0].shape == (2, 56, 56, 128)
    assert block["conv_1"]["__call__"][0].shape == (2, 28, 28, 128)


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("block", ["bottleneck", "basic"])
def test_a_residual_block_by_hand(block, size):
    module = _ResidualBlock(
        block=block, channels=2, stride=2, virtual_batch=None, dtype=jnp.float32
    )
    x = np.random.default_rng(1).normal(size=(2, size, size, 3)).astype(np.float32)
    made = jax.eval_shape(lambda: module.init(jax.random.key(0), x, train=False))
    variables = randomised(made)
    params, stats = variables["params"], variables["batch_stats"]

    def layer(y, number, stride=1):
        y = conv(y, params[f"conv_{number}"]["kernel"], stride)
        return normalise(y, params[f"norm_{number}"], stats[f"norm_{number}"])

    if block == "bottleneck":
        y = layer(relu(layer(relu(layer(x, 0)), 1, stride=2)), 2)
    else:
        y = layer(relu(layer(x, 0, stride=2)), 1)
    shortcut = conv(x, params["shortcut"]["kernel"], stride=2)
    shortcut = normalise(shortcut, params["shortcut_norm"], stats["shortcut_norm"])
    ours = module.apply(variables, x, train=False)
    np.testing.assert_allclose(ours, relu(y + shortcut), rtol=1e-4, atol=1e-4)


def test_a_new_block_passes_its_input_on():
    module = _ResidualBlock(
        block="bottleneck", channels=2, stride=1, virtual_batch=None, dtype=jnp.float32
    )
    x = np.random.default_rng(1).normal(size=(4, 4, 4, 8)).astype(np.float32)
    variables = jax.jit(lambda: module.init(jax.random.key(0), x, train=False))()
    y, _ = module.apply(variables, x, train=True, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, relu(x))


def test_virtual_batches_do_not_see_each_other():
    model = ImageNetResNet(5, (1, 1), width=8, virtual_batch=2)
    images = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
    variables = randomised(shapes(model, 16))

    @jax.jit
    def logits(images):
        return model.apply(variables, images, train=True, mutable=["batch_stats"])[0]

    others = np.concatenate([images[:3], -images[3:]])
    change = np.abs(logits(images) - logits(others)).max(axis=1)
    assert (change[:2] == 0).all() and (change[2:] > 1e-3).all()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_computes_in_bfloat16_with_float32_statistics_and_logits():
    model = ImageNetResNet(5, (1, 1), width=8, virtual_batch=2, dtype=jnp.bfloat16)
    variables = shapes(model)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    images = jnp.zeros((4, 64, 64, 3))

    def loss(params, others):
        logits, new = model.apply(
            {"params": params, **others}, images, train=True, mutable=["batch_stats"]
        )
        assert logits.dtype == jnp.float32
        assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(jnp.float32)}
        return logits.sum()

    others = {"batch_stats": variables["batch_stats"]}
    program = jax.make_jaxpr(jax.grad(loss))(variables["params"], others)
    types = {"conv_general_dilated": [], "dot_general": []}
    for equation in equations(program.jaxpr):
        assert not any(v.aval.dtype == jnp.float64 for v in equation.outvars)
        if equation.primitive.name in types:
            types[equation.primitive.name] += [v.aval.dtype for v in equation.invars]
    # Forward and backward: 9 convolutions, twice as many gradients, but that of the
    # pixels. The head alone is float32.
    assert len(types["conv_general_dilated"]) == 2 * (3 * 9 - 1)
    assert set(types["conv_general_dilated"]) == {jnp.dtype(jnp.bfloat16)}
    assert set(types["dot_general"]) == {jnp.dtype(jnp.float32)}
    assert len(types["dot_general"]) == 2 * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage_sizes": (1, 0)}, r"\(1, 0\): every stage needs a block"),
        ({"stage_sizes": ()}, r"\(\): every stage needs a block"),
        ({"block": "dense"}, r"block='dense' is unknown; use 'bottleneck' or 'basic'"),
    ],
)
def test_refuses_what_it_cannot_build(fields, message):
    with pytest.raises(ValueError, match=message):
        shapes(ResNetStages(**fields))
