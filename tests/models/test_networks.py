"""Convolutional networks, compared with their equations in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.data.detection import boxes_per_cell, default_boxes
from echo_jax.models import (
    SSD,
    GhostBatchNorm,
    ImageNetResNet,
    MobileNetV3,
    ResNet,
    map_sizes,
)

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

FLOAT32 = jnp.dtype(jnp.float32)


def images_of(size, count=2):
    return np.random.default_rng(0).normal(size=(count, size, size, 3)).astype("f4")


def shapes_of(model, size, **options):
    """The shapes of a model's variables and outputs."""
    init = functools.partial(model.init_with_output, train=False, **options)
    outputs, variables = jax.eval_shape(init, jax.random.key(0), images_of(size))
    return variables, outputs


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def dtypes(*trees):
    return {leaf.dtype for leaf in jax.tree.leaves(trees)}


def randomised(tree):
    """Variables of the same shapes whose every number matters; variances positive."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        value = rng.normal(size=leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        return np.exp(value).astype("f4") if "var" in str(path) else value.astype("f4")

    return jax.tree_util.tree_map_with_path(draw, tree)


def conv(x, kernel, stride=1):
    """Windows centred on the pixels, padded by zeros; a channel alone if depthwise."""
    size = kernel.shape[0]
    padded = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    views = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    views = views[:, ::stride, ::stride]
    if kernel.shape[2] == 1 < x.shape[-1]:
        return np.einsum("bijchw,hwc->bijc", views, kernel[:, :, 0], optimize=True)
    return np.einsum("bijchw,hwcd->bijd", views, kernel, optimize=True)


def relu(x):
    return np.maximum(x, 0)


def hard_sigmoid(x):
    return np.clip(x + 3, 0, 6) / 6


def hard_swish(x):
    return x * hard_sigmoid(x)


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


class ByHand:
    """The layers of a model by their names, with its randomised variables."""

    def __init__(self, model, size):
        self.variables = randomised(shapes_of(model, size)[0])
        self.params = self.variables["params"]
        self.stats = self.variables["batch_stats"]
        self.images = images_of(size)
        predict = jax.jit(lambda v, x: model.apply(v, x, train=False))
        self.found = np.asarray(predict(self.variables, self.images))

    def __call__(self, x, conv_name, norm_name, stride=1, *, inside=()):
        params, stats = self.params, self.stats
        for name in inside:
            params, stats = params[name], stats[name]
        y = conv(x, params[conv_name]["kernel"], stride)
        p, s = params[norm_name], stats[norm_name]
        return (y - s["mean"]) / np.sqrt(s["var"] + 1e-5) * p["scale"] + p["bias"]

    def check(self, expected):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(self.found, expected, rtol=0, atol=1e-4 * scale)


def test_a_small_resnet_by_hand():
    # Odd sizes, at which padding leaves no choice of where the windows lie.
    layer = ByHand(ResNet(num_classes=5, depth=14, width=3), 9)
    x = relu(layer(layer.images.astype(float), "stem", "stem_norm"))
    for stage in range(3):
        for block in range(2):
            inside, stride = [f"stage_{stage}_block_{block}"], 1
            if stage and not block:
                stride = 2
            y = relu(layer(x, "conv_0", "norm_0", stride, inside=inside))
            y = layer(y, "conv_1", "norm_1", inside=inside)
            # Option A: every second pixel, and zeros around the channels.
            shortcut = np.zeros_like(y)
            first = (y.shape[-1] - x.shape[-1]) // 2
            shortcut[..., first : first + x.shape[-1]] = x[:, ::stride, ::stride]
            x = relu(y + shortcut)
    layer.check(dense(x.mean(axis=(1, 2)), layer.params["head"]))


@pytest.mark.parametrize("block", ["bottleneck", "basic"])
def test_a_resnet_for_photographs_by_hand(block):
    model = ImageNetResNet(5, (1, 2), width=2, block=block)
    layer = ByHand(model, 33)
    x = relu(layer(layer.images, "stem", "stem_norm", 2, inside=["trunk"]))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    views = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    x = views[:, ::2, ::2].max(axis=(-2, -1))
    for stage, number in ((0, 0), (1, 0), (1, 1)):
        inside = ["trunk", f"stage_{stage}_block_{number}"]
        stride = 2 if (stage, number) == (1, 0) else 1
        strides = [1, stride, 1] if block == "bottleneck" else [stride, 1]
        y = x
        for k, step in enumerate(strides):
            y = layer(
                relu(y) if k else y, f"conv_{k}", f"norm_{k}", step, inside=inside
            )
        if number == 0 and y.shape != x.shape:
            x = layer(x, "shortcut", "shortcut_norm", stride, inside=inside)
        x = relu(x + y)
    layer.check(dense(x.mean(axis=(1, 2)), layer.params["head"]))


def test_a_mobilenet_by_hand():
    layer = ByHand(MobileNetV3(5, "small", small_images=True), 9)

    def step(x, *inside, stride=1):
        return layer(x, "conv", "norm", stride, inside=inside)

    x = hard_swish(step(layer.images, "stem"))
    for number in range(11):
        # Table 2 of the paper; the strides of two layers are left out.
        name, stride = f"block_{number}", 2 if number in (1, 3, 8) else 1
        active, p = relu if number < 3 else hard_swish, layer.params[name]
        y = active(step(x, name, "expand")) if number else x
        y = active(step(y, name, "depthwise", stride=stride))
        assert ("excitation" in p) == (number not in (1, 2))
        if "excitation" in p:
            squeeze, excite = (p["excitation"][n] for n in ("squeeze", "excite"))
            squeezed = relu(dense(y.mean(axis=(1, 2), keepdims=True), squeeze))
            y = y * hard_sigmoid(dense(squeezed, excite))
        y = step(y, name, "project")
        x = x + y if x.shape == y.shape else y
    x = hard_swish(step(x, "last")).mean(axis=(1, 2))
    hidden = hard_swish(dense(x, layer.params["hidden"]))
    layer.check(dense(hidden, layer.params["head"]))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # As torchvision states them for 1000 classes.
        (ImageNetResNet(1000), 25_557_032),
        (MobileNetV3(1000, "small"), 2_542_856),
        # He et al. 2016: 0.46 million, of a stem, blocks of three widths and a head.
        (ResNet(10, 32), 464_154),
        # A ResNet-34 without its last stage, five maps behind it, and six heads.
        (SSD(81, (4, 6, 6, 6, 4, 4)), 19_975_222),
    ],
    ids=["resnet50", "small", "resnet32", "ssd300"],
)
def test_the_number_of_parameters_is_the_published_one(model, expected):
    size = 300 if isinstance(model, SSD) else 32
    assert count(shapes_of(model, size)[0]["params"]) == expected


def test_a_large_mobilenet_has_the_published_parameters_and_strides():
    model = MobileNetV3(1000, "large")
    variables = shapes_of(model, 224, capture_intermediates=True)[0]
    assert count(variables["params"]) == 5_483_032
    found = variables["intermediates"]
    ends = [found[name]["__call__"][0].shape[1] for name in ("stem", "last")]
    assert ends == [112, 7]


NETWORKS = {
    "resnet": ResNet(5, depth=8, width=8),
    "imagenet": ImageNetResNet(5, (1, 1), width=8, virtual_batch=2),
    "mobilenet": MobileNetV3(5, "small", True),
    "ssd": SSD(3, (4, 6, 4, 4), (1, 1, 1), width=4),
}


def training(model, variables, images):
    return model.apply(variables, images, train=True, mutable=["batch_stats"])


@pytest.mark.parametrize(
    ("model", "mixes"),
    [
        (ResNet(5, depth=8, width=8), [True] * 4),
        (ResNet(5, depth=8, width=8, norm="group"), [False] * 3 + [True]),
        (NETWORKS["imagenet"], [False, False, True, True]),
    ],
    ids=["batch", "group", "virtual"],
)
def test_which_examples_of_a_batch_a_change_of_the_last_reaches(model, mixes):
    images = images_of(8, 4)
    variables = randomised(shapes_of(model, 8)[0])
    logits = jax.jit(lambda x: training(model, variables, x)[0])
    changed = np.concatenate([images[:3], -2 * images[3:]])
    apart = np.abs(logits(images) - logits(changed)).max(axis=1)
    assert (apart > 1e-5).tolist() == mixes and (apart[~np.array(mixes)] == 0).all()
    assert ("batch_stats" in variables) == (mixes != [False] * 3 + [True])


@pytest.mark.parametrize("name", NETWORKS)
def test_training_moves_every_statistic_and_computes_in_bfloat16_with_float32_kept(
    name,
):
    model = NETWORKS[name].copy(dtype=jnp.bfloat16)
    images = images_of(128 if name == "ssd" else 16)
    variables, outputs = shapes_of(model, len(images[0]))
    assert dtypes(variables, outputs) == {FLOAT32}
    program = jax.make_jaxpr(lambda v: training(model, v, images))(variables)
    assert {var.aval.dtype for var in program.jaxpr.outvars} == {FLOAT32}
    inputs = {id(var) for var in program.jaxpr.invars}
    moved = [var for var in program.jaxpr.outvars if id(var) not in inputs]
    assert len(moved) == len(jax.tree.leaves([outputs, variables["batch_stats"]]))
    convolutions = {
        var.aval.dtype
        for equation in program.jaxpr.eqns
        if equation.primitive.name == "conv_general_dilated"
        for var in equation.invars
    }
    assert convolutions == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ResNet(5, width=12, norm="group"), r"width=12 is not a multiple of 8"),
        (ImageNetResNet(5, block="dense"), r"'dense' is unknown; use 'bottleneck' or"),
        (SSD(5, (4, 6, 6, 6, 4, 4)), r"64 pixels .* one number for each"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        shapes_of(model, 64)


def test_ssd_predicts_for_every_default_box():
    maps = map_sizes(300)
    assert maps == (38, 19, 10, 5, 3, 1) and map_sizes(128) == (16, 8, 4, 2)
    model = SSD(5, boxes_per_cell(maps), (1, 1, 1), width=4)
    offsets, scores = shapes_of(model, 300)[1]
    assert offsets.shape == (2, 8732, 4) and scores.shape == (2, 8732, 5)


def test_predictions_lie_where_their_default_boxes_are():
    """A change in a corner changes the boxes of that corner, on the finest map."""
    model, maps = NETWORKS["ssd"], map_sizes(128)
    variables = jax.tree.map(np.abs, randomised(shapes_of(model, 128)[0]))
    images = images_of(128)
    images[1] = images[0]
    images[1, :8, -12:] += 1  # at the top, on the right
    predict = jax.jit(lambda x: model.apply(variables, x, train=False)[0])
    before, after = np.asarray(predict(images))
    finest = 4 * maps[0] ** 2
    moved = np.abs(after - before)[:finest].sum(axis=-1)
    boxes = default_boxes(maps)[:finest]
    center = (boxes[:, :2] + boxes[:, 2:]) / 2
    mean = (moved[:, None] * center).sum(axis=0) / moved.sum()
    assert moved.sum() > 0 and mean[0] < 0.3 and mean[1] > 0.7


@jax.jit
def first_values(key):
    # What is not returned is not compiled.
    model = NETWORKS["ssd"].copy(score_bias=-4.6)
    head = model.init(key, images_of(128), train=False)["params"]
    params = NETWORKS["imagenet"].init(key, images_of(16), train=False)["params"]
    block = params["trunk"]["stage_1_block_0"]
    return (
        head["scores_1"]["bias"],
        head["offsets_1"]["bias"],
        [block[f"norm_{number}"]["scale"].sum() for number in range(3)],
    )


def test_scores_start_at_their_bias_and_a_new_block_passes_its_input_on():
    scores, offsets, scales = first_values(jax.random.key(0))
    np.testing.assert_allclose(scores, np.full(18, -4.6), rtol=1e-6)
    assert not offsets.any()
    # Its last norm starts at zero; the others have 16 channels.
    assert [*map(float, scales)] == [16, 16, 0]


X = np.random.default_rng(0).normal(3, 2, size=(16, 3, 3, 4)).astype(np.float32)
PARAMS = {"scale": np.float32([1, 2, -1, 0.5]), "bias": np.float32([0, 1, 2, -3])}
STATS = {"mean": np.float32([0, 1, 2, 3]), "var": np.float32([1, 4, 9, 16])}
VARIABLES = {"params": PARAMS, "batch_stats": STATS}


def train(x, variables=VARIABLES, **fields):
    norm = GhostBatchNorm(**fields)
    y, new = jax.jit(lambda x: training(norm, variables, x))(x)
    return y, new["batch_stats"]


@pytest.mark.parametrize("virtual_batch", [4, None])
def test_virtual_batches_are_normalised_each_by_itself(virtual_batch):
    """The running statistics are those of all examples."""
    parts = X.astype(np.float64).reshape(-1, virtual_batch or 16, 3, 3, 4)
    mean, var = (f(parts, axis=(1, 2, 3), keepdims=True) for f in (np.mean, np.var))
    expected = (parts - mean) / np.sqrt(var + 1e-5) * PARAMS["scale"] + PARAMS["bias"]
    y, new = train(X, virtual_batch=virtual_batch)
    np.testing.assert_allclose(y, expected.reshape(X.shape), rtol=1e-4, atol=1e-4)
    for name in ("mean", "var"):
        of_all = getattr(np, name)(X.astype(np.float64), axis=(0, 1, 2))
        moved = 0.9 * STATS[name] + 0.1 * of_all
        np.testing.assert_allclose(new[name], moved, rtol=1e-5)
    with pytest.raises(ValueError, match=r"16 must be a multiple of virtual_batch=5"):
        train(X, virtual_batch=5)


def loss_and_gradient(mesh_size):
    """Of a sum that depends on every output, and the new statistics, on devices."""
    mesh = Mesh(np.array(jax.devices()[:mesh_size]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    norm = GhostBatchNorm(virtual_batch=2)

    def loss(params, x):
        y, new = training(norm, {**VARIABLES, "params": params}, x)
        weights = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)
        return (jnp.sin(weights) * y).mean(), new

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), in_shardings=(whole, split))
    compiled = step.lower(PARAMS, X).compile()
    return jax.device_get(compiled(PARAMS, X)), compiled.as_text()


def test_one_and_eight_devices_agree_and_activations_stay_where_they_are():
    (one, _), (eight, program) = loss_and_gradient(1), loss_and_gradient(8)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, one, eight)
    assert "all-reduce" in program
    for gathering in ("all-gather", "all-to-all", "collective-permute"):
        assert gathering not in program


def test_statistics_are_float32_whatever_the_input():
    # In bfloat16, 256 + 1 is 256: a mean there would lose these differences.
    x = (256 + 8 * (np.arange(64) % 2)).reshape(16, 2, 2, 1).astype(jnp.bfloat16)
    norm = GhostBatchNorm(dtype=jnp.bfloat16)
    variables = norm.init(jax.random.key(0), x, train=False)
    y, new = train(x, variables, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16 and dtypes(variables, new) == {FLOAT32}
    np.testing.assert_allclose(new["mean"], [26.0], rtol=1e-6)
    np.testing.assert_allclose(np.float32(y).ravel()[:2], [-1, 1], rtol=1e-2)
