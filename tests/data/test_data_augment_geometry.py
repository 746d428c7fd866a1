"""Crops and flips against plain NumPy, pixels and boxes."""

import augment_reference as reference
import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from augment_reference import make_keys

from echo_jax.data.augment import Flip, PadCrop, RandomResizedCrop, geometry

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def make_images(size, height, width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (size, height, width, 3), np.uint8)


def windows_of(one, keys, height, width):
    draw = jax.jit(one.windows, static_argnums=(1, 2))
    return np.asarray(draw(keys, height, width))


def assert_uniform(values, bounds):
    """Every whole number is equally frequent: chi-squared within five sigma."""
    counts = np.bincount(np.asarray(values) - bounds[0])
    places = bounds[1] - bounds[0]
    assert counts.size == places
    expected = len(values) / places
    distance = ((counts - expected) ** 2 / expected).sum()
    assert distance < places - 1 + 5 * np.sqrt(2 * (places - 1))


@pytest.mark.parametrize("border", ["reflect", "zero"])
def test_pad_crop(border):
    images, keys = make_images(32, 9, 12), make_keys(32)
    one = PadCrop(3, border)
    result = np.asarray(jax.jit(one)({"image": images}, keys)["image"])
    for image, offset, found in zip(
        images, np.asarray(jax.jit(one.offsets)(keys)), result, strict=True
    ):
        expected = reference.pad_crop(image, offset, 3, border)
        np.testing.assert_array_equal(found, expected)


def test_offsets_are_uniform():
    offsets = np.asarray(jax.jit(PadCrop(4).offsets)(make_keys(8192)))
    assert_uniform(offsets[:, 0], (0, 9))
    assert_uniform(offsets[:, 1], (0, 9))
    assert_uniform(offsets @ [9, 1], (0, 81))


def test_flip():
    images, keys = make_images(64, 5, 6), make_keys(64)
    is_flipped = np.asarray(jax.jit(Flip().is_flipped)(keys))
    result = np.asarray(jax.jit(Flip())({"image": images}, keys)["image"])
    for image, flipped, found in zip(images, is_flipped, result, strict=True):
        np.testing.assert_array_equal(found, image[:, ::-1] if flipped else image)
    assert_uniform(jax.jit(Flip().is_flipped)(make_keys(8192)).astype(int), (0, 2))


@pytest.mark.parametrize(("height", "width"), [(24, 24), (17, 30), (3, 40)])
def test_resized_crop(height, width):
    images, keys = make_images(6, height, width), make_keys(6)
    one = RandomResizedCrop(size=11)
    result = np.asarray(jax.jit(one)({"image": images}, keys)["image"])
    windows = windows_of(one, keys, height, width)
    for image, window, found in zip(images, windows, result, strict=True):
        expected = reference.resized_crop(image, window, 11)
        # At most half a level from rounding, and what float32 adds.
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.501)


def test_resizing_is_that_of_opencv():
    image = make_images(1, 20, 31)[0].astype(np.float32)
    expected = cv2.resize(image, (14, 14), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(reference.resized(image, 14), expected, atol=1e-3)


def test_windows_are_distributed_as_in_the_reference():
    height, width, count = 60, 80, 20_000
    one = RandomResizedCrop(size=8)
    ours = windows_of(one, make_keys(count), height, width)
    rng = np.random.default_rng(0)
    theirs = np.array(
        [
            reference.random_window(rng, height, width, one.scale, one.ratio)
            for _ in range(count)
        ]
    )
    for windows in (ours, theirs):
        top, left, h, w = windows.T
        assert (windows[:, :2] >= 0).all()
        assert (top + h <= height).all() and (left + w <= width).all()
        assert 0.075 < (h * w / (height * width)).min() < 0.09
        assert (w / h).min() > 0.70 and (w / h).max() < 1.42
    # Kolmogorov and Smirnov: 2 would be exceeded by one in a thousand.
    critical = 2 * np.sqrt(2 / count)
    quantities = {
        "height": lambda w: w[:, 2],
        "width": lambda w: w[:, 3],
        "area": lambda w: w[:, 2] * w[:, 3],
        "top": lambda w: w[:, 0],
        "left": lambda w: w[:, 1],
        "shape": lambda w: w[:, 3] / w[:, 2],
    }
    for name, quantity in quantities.items():
        values = [np.sort(quantity(windows)) for windows in (ours, theirs)]
        at = np.concatenate(values)
        shares = [np.searchsorted(v, at, "right") / count for v in values]
        assert np.abs(shares[0] - shares[1]).max() < critical, name


@pytest.mark.parametrize(("height", "width"), [(8, 80), (80, 8), (20, 22)])
def test_a_window_that_never_fits_is_the_centre(height, width):
    one = RandomResizedCrop(size=8, scale=(4.0, 5.0))
    windows = windows_of(one, make_keys(4), height, width)
    expected = reference.centre_window(height, width, one.ratio)
    assert (windows == expected).all()


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_products_pick_what_gathers_pick(axis, dtype):
    """The TPU's path, run here."""
    images = make_images(4, 40, 50).astype(dtype)
    if dtype == np.float32:
        images *= np.float32(np.pi)
    index = np.random.default_rng(1).integers(0, images.shape[axis], (4, 30), np.int32)
    for take in (geometry._take_by_product, geometry._take_by_gather):
        taken = take(jnp.asarray(images), jnp.asarray(index), axis=axis)
        assert taken.dtype == dtype
        for image, places, found in zip(images, index, np.asarray(taken), strict=True):
            np.testing.assert_array_equal(found, np.take(image, places, axis=axis - 1))


@pytest.mark.parametrize(("platform", "gathers"), [("tpu", 0), ("cuda", 2)])
def test_each_platform_gets_its_path(platform, gathers):
    traced = jax.jit(PadCrop(2)).trace(
        {"image": jnp.zeros((4, 8, 8, 3), jnp.uint8)}, make_keys(4)
    )
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert program.count('"stablehlo.gather"') == gathers
    assert program.count("stablehlo.dot_general") == 2 - gathers


HEIGHT, WIDTH = 40, 56


def make_rectangles(size, seed=0):
    """Images of one bright rectangle on black, and its box; a padded row follows."""
    rng = np.random.default_rng(seed)
    images = np.zeros((size, HEIGHT, WIDTH, 3), np.uint8)
    boxes = np.zeros((size, 2, 4), np.float32)
    for image, box in zip(images, boxes, strict=True):
        top, left = rng.integers(0, HEIGHT - 8), rng.integers(0, WIDTH - 8)
        bottom, right = (
            rng.integers(top + 8, HEIGHT + 1),
            rng.integers(left + 8, WIDTH + 1),
        )
        image[top:bottom, left:right] = 255
        box[0] = [top / HEIGHT, left / WIDTH, bottom / HEIGHT, right / WIDTH]
    mask = np.tile([True, False], (size, 1))
    return {"image": images, "boxes": boxes, "box_mask": mask}


@pytest.mark.parametrize(
    "one", [PadCrop(9, "zero"), Flip(), RandomResizedCrop(size=48)], ids=repr
)
def test_boxes_stay_on_their_pixels(one):
    batch, keys = make_rectangles(64), make_keys(64)
    result = jax.tree.map(np.asarray, jax.jit(one)(batch, keys))
    images, boxes, mask = result["image"], result["boxes"], result["box_mask"]
    assert boxes.dtype == np.float32 and mask.dtype == bool
    assert not boxes[~mask].any() and not mask[:, 1].any()
    assert 20 < mask[:, 0].sum() <= 64
    for image, (box, _) in zip(images[mask[:, 0]], boxes[mask[:, 0]], strict=True):
        # Half of a pixel's brightness is where interpolation puts an edge.
        rows, columns = (
            np.flatnonzero((image[..., 0] > 127).any(axis=i)) for i in (1, 0)
        )
        found = [rows[0], columns[0], rows[-1] + 1, columns[-1] + 1]
        sides = [image.shape[0], image.shape[1]] * 2
        np.testing.assert_allclose(box * sides, found, atol=1)


def test_boxes_of_a_crop():
    """Clipped to the window; left out if their centre is."""
    rng = np.random.default_rng(0)
    boxes = np.sort(rng.uniform(0, 1, (64, 6, 2, 2)), axis=2).reshape(64, 6, 4)
    mask = rng.uniform(size=(64, 6)) < 0.8
    batch = {
        "image": np.zeros((64, HEIGHT, WIDTH, 3), np.uint8),
        "boxes": (boxes * mask[..., None]).astype(np.float32),
        "box_mask": mask,
        "box_labels": rng.integers(0, 9, (64, 6), np.int32),
    }
    one, keys = RandomResizedCrop(size=16), make_keys(64)
    result = jax.tree.map(np.asarray, jax.jit(one)(batch, keys))
    windows = windows_of(one, keys, HEIGHT, WIDTH)
    for example, row in np.ndindex(64, 6):
        expected = reference.cropped_box(
            boxes[example, row], windows[example], HEIGHT, WIDTH
        )
        kept = mask[example, row] and expected is not None
        assert result["box_mask"][example, row] == kept
        found = result["boxes"][example, row]
        np.testing.assert_allclose(found, expected if kept else 0, atol=1e-5)
    assert (result["box_labels"] == batch["box_labels"]).all()
    assert 0.2 < result["box_mask"].mean() < mask.mean()
