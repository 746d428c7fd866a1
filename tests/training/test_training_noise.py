"""The noise of gradients: values by hand, and of gradients whose noise is known."""

import doctest
import math

import numpy as np
import pytest

from echo_jax.training.update import noise
from echo_jax.training.update.noise import gradient_noise_scale


def test_examples():
    assert doctest.testmod(noise).failed == 0


def test_the_noise_of_gradients_is_estimated_without_bias():
    """Gradients of examples are drawn: |G|² = 25 and tr(Σ) = 2 * 9 + 1 = 19."""
    rng = np.random.default_rng(0)
    shape, scale = (20_000, 4, 2), np.array([3.0, 3.0, 1.0])
    examples = np.array([3.0, 4.0, 0.0]) + scale * rng.normal(size=(*shape, 3))
    of_parts = examples.mean(axis=2)
    parts = np.linalg.norm(of_parts, axis=-1)
    whole = np.linalg.norm(of_parts.mean(axis=1), axis=-1)
    found = [
        gradient_noise_scale(each, norm, batch_size=8)
        for each, norm in zip(parts, whole, strict=True)
    ]
    squared = np.array([each.squared_norm for each in found])
    variance = np.array([each.variance for each in found])
    for values, true in ((squared, 25.0), (variance, 19.0)):
        error = values.std() / math.sqrt(len(values))
        assert abs(values.mean() - true) < 4 * error < 0.05 * true


def test_equal_gradients_have_no_noise():
    found = gradient_noise_scale([2.0, 2.0, 2.0], 2.0, batch_size=12)
    assert (found.squared_norm, found.variance, found.examples) == (4.0, 0.0, 0.0)


def test_a_squared_norm_below_zero_has_no_noise_scale():
    found = gradient_noise_scale([3.0, 3.0], 1.0, batch_size=2)
    # 2 * 1 - 1 * 9 is below zero.
    assert found.squared_norm == -7.0 and math.isnan(found.examples)


@pytest.mark.parametrize("norms", [[], [1.0], [1.0, 1.0, 1.0]])
def test_less_than_two_equal_parts_are_refused(norms):
    with pytest.raises(ValueError, match=f"has {len(norms)} norms, of a batch of 8"):
        gradient_noise_scale(norms, 1.0, batch_size=8)
