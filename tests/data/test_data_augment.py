"""Augmentation on the device, against plain NumPy and the standard library."""

import colorsys
import functools

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import echo_jax as ej
from echo_jax.data.augment import (
    Augment,
    ColourDistortion,
    Cutout,
    Flip,
    Mixup,
    PadCrop,
    RandomResizedCrop,
    ToFloat,
)
from echo_jax.data.sources import augment_shapes

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

HEIGHT, WIDTH, BATCH = 12, 16, 8
CROP = RandomResizedCrop(size=10)
STAGES = {
    "pad_crop": PadCrop(3),
    "flip": Flip(),
    "resized_crop": CROP,
    "colour": ColourDistortion(),
    "cutout": Cutout(size=5),
    "mixup": Mixup(num_classes=4, alpha=1.0),
    "to_float": ToFloat(),
    "chain": Augment((CROP, Flip(), Cutout(size=4))),
}
each_stage = pytest.mark.parametrize("one", STAGES.values(), ids=STAGES)


def make_keys(size, seed=0):
    """Keys as an echo on the device makes them."""
    seeds = ej.seed_for_use(seed, np.arange(size), np.zeros(size, np.int64))
    return jax.random.wrap_key_data(seeds.view(np.uint32).reshape(-1, 2))


def make_images(size=BATCH, height=HEIGHT, width=WIDTH, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (size, height, width, 3), np.uint8)


def make_batch(size=BATCH, boxes=False, seed=0):
    rng = np.random.default_rng(seed)
    batch = {"image": make_images(size, seed=seed), "name": np.arange(size)}
    batch["label"] = rng.integers(0, 4, size, np.int32)
    if boxes:
        corners = np.sort(rng.uniform(0, 1, (size, 5, 2, 2)), axis=2)
        mask = np.arange(5)[None] < rng.integers(0, 6, size)[:, None]
        corners = corners.reshape(size, 5, 4) * mask[..., None]
        batch |= {"boxes": corners.astype(np.float32), "box_mask": mask}
        batch["box_labels"] = rng.integers(0, 9, (size, 5), np.int32)
    return batch


@functools.cache
def compiled(function, *static):
    return jax.jit(function, static_argnums=static)


def images_of(one, images, keys):
    return np.asarray(compiled(one)({"image": images}, keys)["image"])


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        left, right = (np.asarray(x[name], np.float64) for x in (one, other))
        tolerance = 0 if name == "image" else 1e-6
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance, err_msg=name)


def assert_uniform(values, places):
    """Every whole number below `places` is equally frequent."""
    counts = np.bincount(np.asarray(values), minlength=places)
    assert scipy.stats.chisquare(counts).pvalue > 1e-5


@each_stage
def test_a_use_depends_on_its_key_alone(one):
    is_mixup = isinstance(one, Mixup)
    batch, other = (make_batch(boxes=not is_mixup, seed=seed) for seed in (0, 1))
    keys, other_keys = make_keys(BATCH), make_keys(BATCH, seed=1)
    result = compiled(one)(batch, keys)
    assert_equal(result, compiled(one)(batch, keys))
    assert result["image"].dtype == (jnp.float32 if one == ToFloat() else jnp.uint8)
    label = ((8, 4), jnp.float32) if is_mixup else ((8,), jnp.int32)
    assert (result["label"].shape, result["label"].dtype) == label
    assert (result["name"] == batch["name"]).all()
    if one != ToFloat():
        again = compiled(one)(batch, other_keys)["image"]
        assert (np.asarray(again) != np.asarray(result["image"])).any()
    # Partners of a mixture stay together, and change places with each other.
    order = np.array([5, 4, 0, 1, 7, 6, 2, 3])
    moved = compiled(one)({name: x[order] for name, x in batch.items()}, keys[order])
    assert_equal(moved, {name: np.asarray(x)[order] for name, x in result.items()})
    mixed = {
        name: np.concatenate([x[:2], other[name][2:]]) for name, x in batch.items()
    }
    mixed_keys = jnp.where(np.arange(BATCH) < 2, keys, other_keys)
    among_others = compiled(one)(mixed, mixed_keys)
    first, found = (jax.tree.map(lambda x: x[:2], b) for b in (result, among_others))
    assert_equal(first, found)


def test_stages_of_a_chain_are_independent():
    batch, keys = make_batch(), make_keys(BATCH)
    fold_in = jax.jit(jax.vmap(jax.random.fold_in, (0, None)))
    expected = batch
    for number, one in enumerate(stages := (PadCrop(3), Flip(), Flip())):
        expected = compiled(one)(expected, fold_in(keys, number))
    assert_equal(compiled(Augment(stages))(batch, keys), expected)
    # Were their keys the same, two flips would undo each other.
    images = make_images(64)
    flipped = images_of(Augment((Flip(), Flip())), images, make_keys(64))
    assert 16 < (flipped != images).any(axis=(1, 2, 3)).sum() < 48


def test_no_stage_makes_devices_communicate():
    everything = Augment((CROP, ColourDistortion(), Mixup(num_classes=4)))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded = jax.jit(everything, in_shardings=rows, out_shardings=rows)
    batch, keys = make_batch(), make_keys(BATCH)
    program = sharded.lower(batch, keys).compile()
    text = program.as_text()
    assert "u8[2,12,16,3]" in text  # a quarter of the batch of 8
    words = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not [word for word in words if word in text]
    found, whole = program(batch, keys), compiled(everything)(batch, keys)
    for name, wanted in whole.items():
        pair = (np.asarray(each, float) for each in (found[name], wanted))
        # Two programs may round a pixel apart.
        atol = 1 if name == "image" else 1e-6
        np.testing.assert_allclose(*pair, atol=atol, rtol=1e-6)


@pytest.mark.parametrize(
    ("one", "changes", "message"),
    [
        (augment_shapes, {"image": jnp.zeros((8, 12, 16))}, r"shape \(8, 12, 16\)"),
        (PadCrop(12), {}, "padding=12 mirrors more"),
        (Mixup(4), {"image": jnp.zeros((7, 4, 4, 3))}, "batch of 7"),
        (Mixup(4), {"boxes": jnp.zeros((8, 1, 4))}, "boxes cannot be mixed"),
    ],
    ids=["shape", "padding", "odd", "boxes"],
)
def test_what_cannot_be_done_is_refused(one, changes, message):
    with pytest.raises(ValueError, match=message):
        one({**make_batch(), **changes}, make_keys(BATCH))
    raw = jax.random.key_data(make_keys(BATCH))
    for keys, found in ((make_keys(7), r"key<fry>\[7\]"), (raw, r"uint32\[8, 2\]")):
        with pytest.raises(ValueError, match=found):
            augment_shapes(make_batch(), keys)


@pytest.mark.parametrize("border", ["reflect", "zero"])
def test_pad_crop_is_a_window_of_the_padded_image(border):
    images, keys, one = make_images(32), make_keys(32), PadCrop(3, border)
    offsets = np.asarray(compiled(one.offsets)(keys))
    mode = {"reflect": "reflect", "zero": "constant"}[border]
    found = images_of(one, images, keys)
    for image, (top, left), crop in zip(images, offsets, found, strict=True):
        padded = np.pad(image, ((3, 3), (3, 3), (0, 0)), mode)
        expected = padded[top : top + HEIGHT, left : left + WIDTH]
        np.testing.assert_array_equal(crop, expected)
    assert_uniform(compiled(one.offsets)(make_keys(8192)) @ np.array([7, 1]), 49)


def test_a_flip_mirrors_half_of_the_images():
    images, keys = make_images(64), make_keys(64)
    is_flipped = np.asarray(compiled(Flip().is_flipped)(keys))[:, None, None, None]
    expected = np.where(is_flipped, images[:, :, ::-1], images)
    np.testing.assert_array_equal(images_of(Flip(), images, keys), expected)
    assert_uniform(compiled(Flip().is_flipped)(make_keys(8192)).astype(int), 2)


def windows_of(one, keys, height, width):
    return np.asarray(compiled(one.windows, 1, 2)(keys, height, width))


@pytest.mark.parametrize(("height", "width"), [(17, 30), (3, 40)])
def test_a_window_is_resized_as_by_opencv(height, width):
    images, keys = make_images(6, height, width), make_keys(6)
    found = images_of(CROP, images, keys)
    windows = windows_of(CROP, keys, height, width)
    for image, (top, left, h, w), crop in zip(images, windows, found, strict=True):
        part = image[top : top + h, left : left + w].astype(np.float32)
        expected = cv2.resize(part, (10, 10), interpolation=cv2.INTER_LINEAR)
        # At most half a level from rounding, and what float32 adds.
        np.testing.assert_allclose(crop, expected, rtol=0, atol=0.502)
    exact = compiled(Augment((ToFloat(), CROP)))({"image": images}, keys)["image"]
    assert not (exact == np.round(exact)).all()


def random_window(rng, height, width, scale, ratio):
    """The window of a random resized crop, as its inventors' code draws it."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = np.exp(rng.uniform(*np.log(ratio)))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(height - h + 1), rng.integers(width - w + 1), h, w
    raise AssertionError("ten windows did not fit")


def test_windows_are_distributed_as_in_the_reference():
    height, width, count = 60, 80, 20_000
    ours = windows_of(CROP, make_keys(count), height, width)
    rng = np.random.default_rng(0)
    draws = (height, width, CROP.scale, CROP.ratio)
    theirs = np.array([random_window(rng, *draws) for _ in range(count // 4)])
    top, left, h, w = ours.T
    assert min(top.min(), left.min()) == 0
    assert (top + h <= height).all() and (left + w <= width).all()
    drawn = ours.T, theirs.T
    quantities = [[*w[:2], w[2] * w[3], w[3] / w[2]] for w in drawn]
    for one, other in zip(*quantities, strict=True):
        assert scipy.stats.ks_2samp(one, other).pvalue > 1e-3


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(8, 80, (0, 34, 8, 11)), (80, 8, (34, 0, 11, 8)), (20, 22, (0, 0, 20, 22))],
)
def test_a_window_that_never_fits_is_the_centre(height, width, expected):
    one = RandomResizedCrop(size=8, scale=(4.0, 5.0))
    assert (windows_of(one, make_keys(4), height, width) == expected).all()


@pytest.mark.parametrize("one", [PadCrop(5), CROP], ids=["pad_crop", "resized_crop"])
def test_a_box_is_clipped_to_the_crop_or_left_out_with_its_centre(one):
    batch, keys = make_batch(64, boxes=True), make_keys(64)
    result = jax.tree.map(np.asarray, compiled(one)(batch, keys))
    if one == CROP:
        top, left, height, width = windows_of(CROP, keys, HEIGHT, WIDTH).T
    else:
        top, left = np.asarray(compiled(one.offsets)(keys)).T - 5
        height, width = HEIGHT, WIDTH
    sides = np.broadcast_to(np.stack([height, width] * 2, axis=-1), (64, 4))[:, None]
    corners = batch["boxes"] * ([HEIGHT, WIDTH] * 2)
    moved = (corners - np.stack([top, left] * 2, axis=-1)[:, None]) / sides
    centre = (moved[..., :2] + moved[..., 2:]) / 2
    kept = batch["box_mask"] & ((centre >= 0) & (centre < 1)).all(axis=-1)
    np.testing.assert_array_equal(result["box_mask"], kept)
    expected = np.where(kept[..., None], np.clip(moved, 0, 1), 0)
    np.testing.assert_allclose(result["boxes"], expected, atol=1e-5)
    assert (result["box_labels"] == batch["box_labels"]).all()
    assert 0.2 < kept.mean() < batch["box_mask"].mean()


@pytest.mark.parametrize("one", [PadCrop(2), CROP], ids=["pad_crop", "resized_crop"])
def test_the_program_for_a_tpu_makes_the_same_images_with_products(one):
    anywhere = [jax.export.DisabledSafetyCheck.platform()]
    export = jax.export.export(
        jax.jit(one), platforms=["tpu"], disabled_checks=anywhere
    )
    for dtype in (np.uint8, np.float32):
        batch, keys = {"image": make_images().astype(dtype)}, make_keys(BATCH)
        program = export(batch, keys)
        assert "stablehlo.dot_general" in program.mlir_module()
        both = (f(batch, keys)["image"] for f in (program.call, compiled(one)))
        found, expected = (np.asarray(x, np.float32) for x in both)
        # A position is rounded in two ways, and a pixel with it.
        most = (1 if dtype == np.uint8 else 1e-2) * (one == CROP)
        assert np.abs(found - expected).max() <= most


def distort(image, brightness, contrast, saturation, hue):
    """Brightness, contrast, saturation and hue in turn, in float64."""
    mean = image.mean(axis=(0, 1))
    shifted = np.clip((image - mean) * contrast + mean + brightness, 0, 255)
    result = np.zeros(image.shape)
    for place in np.ndindex(image.shape[:2]):
        h, s, v = colorsys.rgb_to_hsv(*shifted[place])
        result[place] = colorsys.hsv_to_rgb((h + hue) % 1, min(1, s * saturation), v)
    return result


@pytest.mark.parametrize(
    "strengths", [(32 / 255, 0.5, 0.5, 0.2), (0, 0, 1, 0)], ids=["all", "saturation"]
)
def test_colours_are_those_of_colorsys(strengths):
    one = ColourDistortion(*map(float, strengths))
    rng = np.random.default_rng(0)
    images = make_images(12, 10, 14)
    # Greys, pure colours and ties between channels: where hue is hard.
    images[:, 0] = images[:, 0, :, :1]
    pure = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [0, 0, 0]])
    images[:, 1] = pure[rng.integers(0, 4, (12, 14))]
    images[:, 2, :, 1] = images[:, 2, :, 0]
    keys = make_keys(12)
    factors = np.stack(compiled(one.factors)(keys), axis=-1)
    found = images_of(one, images, keys)
    for image, factor, distorted in zip(images, factors, found, strict=True):
        expected = distort(image, *factor)
        np.testing.assert_allclose(distorted, expected, rtol=0, atol=0.51)


def test_colour_factors_are_uniform_and_independent():
    one = ColourDistortion(brightness=0.1, contrast=0.2, saturation=0.3, hue=0.05)
    factors = np.array(compiled(one.factors)(make_keys(8192)))
    low = np.array([[-25.5], [0.8], [0.7], [-0.05]])
    high = np.array([[25.5], [1.2], [1.3], [0.05]])
    shares = (factors - low) / (high - low)
    assert shares.min() >= -1e-6 and shares.max() <= 1 + 1e-6
    assert scipy.stats.kstest(shares, "uniform", axis=1).pvalue.min() > 1e-3
    assert np.abs(np.corrcoef(shares) - np.eye(4)).max() < 5 / np.sqrt(8192)


@pytest.mark.parametrize("size", [4, 7])
def test_cutout_hides_a_square(size):
    images, keys, one = make_images(32), make_keys(32), Cutout(size, fill=7)
    corners = np.asarray(compiled(one.corners, 1, 2)(keys, HEIGHT, WIDTH))
    found = images_of(one, images, keys)
    for image, (top, left), hidden in zip(images, corners, found, strict=True):
        expected = image.copy()
        expected[max(top, 0) : top + size, max(left, 0) : left + size] = 7
        np.testing.assert_array_equal(hidden, expected)
    # Its centre is any pixel.
    centres = compiled(one.corners, 1, 2)(make_keys(4096), 6, 5) + size // 2
    assert_uniform(np.asarray(centres) @ [5, 1], 30)


def test_mixup_mixes_neighbours_and_their_labels():
    batch, keys, one = make_batch(10), make_keys(10), Mixup(num_classes=4, alpha=1.0)
    result = jax.tree.map(np.asarray, compiled(one)(batch, keys))
    shares = np.asarray(compiled(one.coefficients)(keys), np.float64)
    partner = np.arange(10) ^ 1
    one_hot = np.eye(4)[batch["label"]]
    for values, found, atol in (
        (batch["image"], result["image"], 0.501),
        (one_hot, result["label"], 1e-6),
    ):
        share = shares.reshape(-1, *[1] * (values.ndim - 1))
        expected = share * values + (1 - share) * values[partner]
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_shares_of_a_mixture_follow_the_beta_distribution():
    shares = np.asarray(compiled(Mixup(2, 0.2).coefficients)(make_keys(8192)))
    beta = scipy.stats.beta(0.2, 0.2).cdf
    assert scipy.stats.kstest(shares, beta).pvalue > 1e-3
