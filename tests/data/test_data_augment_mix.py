"""Cutout and mixup against plain NumPy."""

import augment_reference as reference
import jax
import numpy as np
import pytest
from augment_reference import make_keys

from echo_jax.data.augment import Cutout, Mixup

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def corners_of(one, keys, height, width):
    draw = jax.jit(one.corners, static_argnums=(1, 2))
    return np.asarray(draw(keys, height, width))


@pytest.mark.parametrize("size", [1, 4, 7, 40])
def test_cutout(size):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (32, 9, 12, 3), np.uint8)
    keys, one = make_keys(32), Cutout(size, fill=7)
    result = np.asarray(jax.jit(one)({"image": images}, keys)["image"])
    corners = corners_of(one, keys, 9, 12)
    for image, corner, found in zip(images, corners, result, strict=True):
        expected = reference.cut_out(image, corner, size, 7)
        np.testing.assert_array_equal(found, expected)


def test_the_centre_of_a_square_is_any_pixel():
    corners = corners_of(Cutout(4), make_keys(4096), 6, 5)
    counts = np.zeros((6, 5))
    np.add.at(counts, tuple((corners + 2).T), 1)
    expected = 4096 / 30
    distance = ((counts - expected) ** 2 / expected).sum()
    assert distance < 29 + 5 * np.sqrt(2 * 29)


def test_mixup():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 5, 6, 3), np.uint8)
    labels = rng.integers(0, 4, 10, np.int32)
    keys, one = make_keys(10), Mixup(num_classes=4, alpha=1.0)
    result = jax.jit(one)({"image": images, "label": labels}, keys)
    result = jax.tree.map(np.asarray, result)
    shares = np.asarray(jax.jit(one.coefficients)(keys), np.float64)
    for i, share in enumerate(shares):
        j = i + 1 if i % 2 == 0 else i - 1
        expected = share * images[i] + (1 - share) * images[j]
        np.testing.assert_allclose(result["image"][i], expected, rtol=0, atol=0.501)
        weights = np.zeros(4)
        weights[labels[i]] += share
        weights[labels[j]] += 1 - share
        np.testing.assert_allclose(result["label"][i], weights, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_follow_the_beta_distribution(alpha):
    shares = np.asarray(jax.jit(Mixup(2, alpha).coefficients)(make_keys(8192)))
    assert (shares >= 0).all() and (shares <= 1).all()
    theirs = np.sort(np.random.default_rng(0).beta(alpha, alpha, 200_000))
    at = np.searchsorted(theirs, np.sort(shares)) / theirs.size
    assert np.abs(at - np.arange(1, 8193) / 8192).max() < 1.7 / np.sqrt(8192)
