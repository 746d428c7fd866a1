import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.data.augment import ColourDistortion
from echo_jax.data.images.host_colour import change_colours, distort_colours
from echo_jax.echo.keys import use_seed

NOTHING = {"brightness": 0.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
IMAGES = np.random.default_rng(0).integers(0, 256, (32, 24, 20, 3), dtype=np.uint8)


def test_agrees_with_the_device_to_a_grey_level():
    images = IMAGES.copy()
    images[:4] = images[:4, ..., :1]  # Grey: it has no hue.
    images[4], images[5] = 0, 255
    distortion = ColourDistortion()
    keys = jax.random.split(jax.random.key(0), len(images))
    batch = {"image": jnp.asarray(images)}
    expected = np.asarray(jax.jit(distortion)(batch, keys)["image"], int)
    factors = jax.device_get(distortion.factors(keys))
    for number, image in enumerate(images):
        own = {name: float(x[number]) for name, x in factors._asdict().items()}
        difference = change_colours(image, **own) - expected[number]
        assert np.abs(difference).max() <= 1
        assert np.mean(difference != 0) < 0.01


def test_nothing_changed_is_the_image():
    np.testing.assert_array_equal(change_colours(IMAGES[0], **NOTHING), IMAGES[0])


def test_brightness_contrast_saturation_and_hue_by_hand():
    image = np.array([[[100, 50, 0], [200, 150, 100]]], np.uint8)

    def changed(**fields):
        return change_colours(image, **{**NOTHING, **fields})[0].tolist()

    assert changed(brightness=60.0) == [[160, 110, 60], [255, 210, 160]]
    # The means are 150, 100 and 50.
    assert changed(contrast=0.5) == [[125, 75, 25], [175, 125, 75]]
    assert changed(saturation=0.0) == [[100] * 3, [200] * 3]
    # A third of a turn: red becomes green, green blue, and blue red.
    assert changed(hue=1 / 3) == [[0, 100, 50], [100, 200, 150]]


def test_draws_from_the_ranges_of_the_device():
    # Of grey images of one value brightness alone is seen, of two values contrast.
    flat = np.full((2, 2, 3), 128, np.uint8)
    steps = np.array([[[118] * 3, [138] * 3]], np.uint8)
    seeds = use_seed(3, np.arange(2000), np.zeros(2000)).tolist()
    shifts = [int(distort_colours(flat, seed)[0, 0, 0]) - 128 for seed in seeds]
    assert (min(shifts), max(shifts)) == (-32, 32)
    assert abs(np.mean(shifts)) < 1.5 and np.std(shifts) == pytest.approx(
        18.5, rel=0.05
    )
    changed = [distort_colours(steps, seed)[0, :, 0].astype(int) for seed in seeds]
    spans = [(high - low) / 20 for low, high in changed]
    assert (min(spans), max(spans)) == (0.5, 1.5)
    assert abs(np.mean(spans) - 1) < 0.03


def test_strengths_of_zero_change_nothing_and_the_input_stays():
    image = IMAGES[0].copy()
    image.flags.writeable = False
    still = ColourDistortion(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    np.testing.assert_array_equal(distort_colours(image, 5, still), image)
    first = distort_colours(image, 5)
    np.testing.assert_array_equal(first, distort_colours(image, 5))
    assert (first != distort_colours(image, 6)).any()
