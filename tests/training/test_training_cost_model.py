"""What data parallelism costs: values by hand, and the noise of known gradients."""

import doctest
import math
import re
from pathlib import Path

import numpy as np
import pytest

from echo_jax.training import cost_model
from echo_jax.training.cost_model import (
    Scaling,
    describe_cost,
    gradient_noise_scale,
    parameter_server,
    reduce_scatter_all_gather,
    ring_all_reduce,
)


def test_examples():
    assert doctest.testmod(cost_model).failed == 0


@pytest.mark.parametrize(
    ("num_devices", "server_s", "ring_s"),
    # 2 N and 2 (N - 1)/N times 400 MB at 2 GB/s.
    [(1, 0.4, 0.0), (2, 0.8, 0.2), (8, 3.2, 0.35), (1000, 400.0, 0.3996)],
)
def test_a_server_takes_what_grows_with_the_devices_and_a_ring_does_not(
    num_devices, server_s, ring_s
):
    server = parameter_server(400e6, num_devices, 2e9)
    ring = ring_all_reduce(400e6, num_devices, 2e9)
    assert (server.seconds, ring.seconds) == pytest.approx((server_s, ring_s))
    assert server.device_bytes == 400e6
    assert server.server_bytes == num_devices * 400e6
    assert ring.device_bytes == pytest.approx(ring_s * 2e9) and not ring.server_bytes


def test_scattering_and_gathering_is_a_ring_in_two_halves():
    halves = reduce_scatter_all_gather(400e6, 8, 2e9)
    assert halves.seconds == ring_all_reduce(400e6, 8, 2e9).seconds
    # Gradients in bfloat16, parameters in float32: 7/8 of 200 + 400 MB.
    mixed = reduce_scatter_all_gather(200e6, 8, 2e9, param_bytes=400e6)
    assert mixed.device_bytes == 525e6


def test_throughput_is_one_device_times_their_number_times_the_efficiency():
    of = Scaling(16, 32, compute_s=0.08, exchange_s=0.02)
    assert of.ratio == pytest.approx(0.25)
    assert of.efficiency == pytest.approx(0.8)
    assert of.single_examples_per_s == pytest.approx(400)
    assert of.examples_per_s == pytest.approx(400 * 16 * 0.8)


def test_without_the_time_of_computation_nothing_is_said_of_throughput():
    said = describe_cost(1e6, 2, bytes_per_s=1e9, examples_per_device=4)
    assert len(said.splitlines()) == 4 and "efficiency" not in said


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


def test_the_norms_that_docs_scaling_measures_give_the_noise_that_is_true():
    """Of -2x(x·1 + e): |G|² = 16, E|g|² = 4 (4 * 6 + 4) = 112, so tr(Σ) = 96."""
    text = (Path(__file__).parents[2] / "docs/scaling.md").read_text(encoding="utf-8")
    (block,) = re.findall("(?ms)^```python\n(.*?)^```", text)
    measured: dict = {}
    exec(block, measured)
    assert measured["mean"].squared_norm == pytest.approx(16, rel=0.05)
    assert measured["mean"].variance == pytest.approx(96, rel=0.1)


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
