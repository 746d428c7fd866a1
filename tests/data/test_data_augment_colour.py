"""Colour distortion against the standard library's colorsys."""

import augment_reference as reference
import jax
import numpy as np
import pytest
from augment_reference import make_keys

from echo_jax.data.augment import ColourDistortion, ColourFactors

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


@pytest.mark.parametrize(
    "one",
    [
        ColourDistortion(),
        ColourDistortion(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.5),
        ColourDistortion(brightness=0.0, contrast=0.0, saturation=1.0, hue=0.0),
        ColourDistortion(brightness=0.5, contrast=0.0, saturation=0.0, hue=0.0),
        ColourDistortion(brightness=0.0, contrast=0.9, saturation=0.0, hue=0.0),
    ],
    ids=repr,
)
def test_colours_are_those_of_colorsys(one):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 10, 14, 3), np.uint8)
    # Greys, pure colours and ties between channels: where hue is hard.
    images[:, 0] = images[:, 0, :, :1]
    images[:, 1] = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [0, 0, 0]])[
        rng.integers(0, 4, (12, 14))
    ]
    images[:, 2, :, 1] = images[:, 2, :, 0]
    keys = make_keys(12)
    result = np.asarray(jax.jit(one)({"image": images}, keys)["image"])
    factors = np.stack(jax.jit(one.factors)(keys), axis=-1)
    for image, factor, found in zip(images, factors, result, strict=True):
        expected = reference.distort(image, *factor)
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.51)


def test_no_distortion_changes_nothing():
    # Every byte, as grey and as colour.
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    image = np.stack([ramp, ramp[:, ::-1], ramp.swapaxes(1, 2)], axis=-1)
    one = ColourDistortion(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    result = jax.jit(one)({"image": image}, make_keys(1))["image"]
    np.testing.assert_array_equal(result, image)


def test_factors_are_uniform_and_independent():
    one = ColourDistortion(brightness=0.1, contrast=0.2, saturation=0.3, hue=0.05)
    factors = ColourFactors(*map(np.asarray, jax.jit(one.factors)(make_keys(8192))))
    bounds = {
        "brightness": (-25.5, 25.5),
        "contrast": (0.8, 1.2),
        "saturation": (0.7, 1.3),
        "hue": (-0.05, 0.05),
    }
    shares = []
    for name, (low, high) in bounds.items():
        share = (getattr(factors, name) - low) / (high - low)
        assert -1e-6 <= share.min() < 0.001 and 0.999 < share.max() <= 1 + 1e-6
        at = np.arange(1, 8193) / 8192
        assert np.abs(np.sort(share) - at).max() < 1.63 / np.sqrt(8192)
        shares.append(share)
    correlation = np.corrcoef(shares)
    assert np.abs(correlation - np.eye(4)).max() < 5 / np.sqrt(8192)
