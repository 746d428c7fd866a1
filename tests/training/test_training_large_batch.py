"""LARS, LAMB and RMSProp warm-up, against values by hand and against optax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_workload import run, tiny_config

from echo_jax.config.check import check_config
from echo_jax.training.update import large_batch
from echo_jax.training.update.optim import Optimizer, hyperparams

WEIGHTS = {"w": jnp.array([[3.0, 4.0]])}
GRADS = {"w": jnp.array([[0.0, 0.5]])}


def steps(params, grads, count=1, **fields):
    """What an optimizer adds to parameters in each of some updates."""
    config = tiny_config(optim__lr=1.0)
    config.optim.update(fields)
    check_config(config)
    optimizer, numbers = Optimizer.from_config(config), hyperparams(config)
    state, added = optimizer.init(params), []
    for update in range(count):
        current = optimizer.at(update, numbers)
        change, state = optimizer.update(grads, state, params, current)
        params = optax.apply_updates(params, change)
        added.append(change)
    return added


def test_lars_is_that_of_the_paper_and_not_that_of_optax():
    (ours,) = steps(
        WEIGHTS, GRADS, name="lars", lr=2.0, weight_decay=0.1, momentum=0.0
    )  # fmt: skip
    # 0.001 * 5 / (0.5 + 0.1 * 5) times (0.3, 0.9), times 2
    np.testing.assert_allclose(ours["w"], [[-0.003, -0.009]], rtol=1e-6)
    theirs = optax.lars(
        2.0, weight_decay=0.1, trust_coefficient=0.001, momentum=0.0
    )  # fmt: skip
    change, _ = theirs.update(GRADS, theirs.init(WEIGHTS), WEIGHTS)
    np.testing.assert_allclose(change["w"] / ours["w"], 1.0541, rtol=1e-4)


def test_lars_gathers_momentum_without_the_rate():
    """At a constant rate that is algorithm 1 of the paper: v = m v + gamma lambda g."""
    fields = {"name": "lars", "momentum": 0.5, "trust_coefficient": 0.1}
    constant = steps(WEIGHTS, GRADS, 3, lr=0.01, **fields)
    weights, buffer = np.array([[3.0, 4.0]]), np.zeros((1, 2))
    for change in constant:
        rate = 0.01 * 0.1 * np.linalg.norm(weights) / 0.5
        buffer = 0.5 * buffer + rate * np.array([[0.0, 0.5]])
        weights = weights - buffer
        np.testing.assert_allclose(change["w"], -buffer, rtol=1e-5)
    # Where the rate falls, what was gathered falls with it (Goyal et al. 2017).
    fallen = steps(
        WEIGHTS, GRADS, 2, lr=0.01, schedule="piecewise", boundaries=(1,), **fields
    )
    ratio = fallen[1]["w"][0, 1] / constant[1]["w"][0, 1]
    np.testing.assert_allclose(ratio, 0.1, rtol=1e-5)


def test_lamb_is_that_of_optax_where_all_is_adapted_and_no_norm_is_cut_off():
    params = {"w": jnp.array([[0.6, -0.8], [2.0, 0.1]]), "b": jnp.array([0.5, 0.2])}
    grads = jax.tree.map(lambda x: 0.3 * x + 0.1, params)
    fields = {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "weight_decay": 0.01}
    ours = steps(
        params, grads, 3, name="lamb", lr=0.1, decay_vectors=True, **fields
    )  # fmt: skip
    theirs = optax.lamb(0.1, **fields)
    state = theirs.init(params)
    for change in ours:
        expected, state = theirs.update(grads, state, params)
        params = optax.apply_updates(params, expected)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), change, expected
        )


def test_lamb_cuts_off_the_norm_of_large_arrays():
    params = {"w": jnp.full((1, 4), 30.0)}  # its norm is 60
    step = steps(params, params, name="lamb", lr=1.0, trust_clip=10.0)[0]["w"]
    np.testing.assert_allclose(np.linalg.norm(step), 10.0, rtol=1e-5)
    step = steps(params, params, name="lamb", lr=1.0, trust_clip=100.0)[0]["w"]
    np.testing.assert_allclose(np.linalg.norm(step), 60.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_vectors_are_neither_adapted_nor_decayed_unless_asked_for(name):
    params = {"w": jnp.full((2, 2), 3.0), "b": jnp.full(4, 3.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    fields = {"name": name, "momentum": 0.0, "weight_decay": 0.1}
    (plain,) = steps(params, grads, **fields)
    np.testing.assert_allclose(plain["b"], -np.ones(4), rtol=1e-5)
    # 0.001 * 6 / (2 + 0.6) times 1.3; a step as long as the weights.
    expected = {"lars": -0.003, "lamb": -3.0}[name]
    np.testing.assert_allclose(plain["w"], np.full((2, 2), expected), rtol=1e-5)
    (alike,) = steps(params, grads, decay_vectors=True, **fields)
    np.testing.assert_allclose(alike["b"], alike["w"].ravel(), rtol=1e-6)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_an_array_of_zeros_begins_to_train(name):
    params = {"w": jnp.zeros((2, 2))}
    (change,) = steps(params, {"w": jnp.full((2, 2), 0.5)}, name=name, lr=0.1)
    assert (np.asarray(change["w"]) < 0).all()
    (still,) = steps({"w": jnp.ones((2, 2))}, params, name=name, lr=0.1)
    np.testing.assert_array_equal(still["w"], np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("size", "ratio", "of_optax", "unconverted"),
    [(1e-4, 10, 1, 1), (1e-3, 1, np.inf, np.nan)],
)
def test_norms_of_half_precision_are_those_of_single_precision(
    size, ratio, of_optax, unconverted
):
    """In float16 the square of 1e-4 is 0, and 512 x 512 ones have an infinite norm."""
    weights = {"w": jnp.ones((512, 512), jnp.float16)}
    grads = {"w": jnp.full((512, 512), size, jnp.float16)}

    def assert_ratio(change, expected):
        found = np.asarray(change["w"], np.float32) / np.float32(grads["w"])
        np.testing.assert_allclose(found, np.full_like(found, -expected), rtol=1e-3)

    # 0.001 * 512 / (512 size).
    (ours,) = steps(weights, grads, name="lars", momentum=0.0)
    assert ours["w"].dtype == jnp.float32
    assert_ratio(ours, ratio)
    theirs = optax.lars(1.0, weight_decay=0.0, trust_coefficient=0.001, momentum=0.0)
    assert_ratio(theirs.update(grads, theirs.init(weights), weights)[0], of_optax)
    raw = large_batch.lars(
        1.0,
        momentum=None,
        weight_decay=0.0,
        trust_coefficient=0.001,
        adapted=lambda params: jax.tree.map(lambda x: True, params),
    )
    assert_ratio(raw.update(grads, raw.init(weights), weights)[0], unconverted)


def test_lamb_of_half_precision_is_that_of_single_precision():
    def step_of(dtype):
        weights = {"w": jnp.ones((512, 512), dtype)}
        # The square of the first is 0 in float16.
        grads = {"w": jnp.tile(jnp.array([1e-4, 1e-2], dtype), (512, 256))}
        return steps(weights, grads, 2, name="lamb", lr=0.1)[1]["w"]

    half = step_of(jnp.float16)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, step_of(jnp.float32), rtol=0.01)


def test_rmsprop_warmup_by_hand():
    """Two updates of a transition of 10, at a rate of 0.2."""
    shares = [0.5 * np.exp(2 * (epoch - 10) / 5) for epoch in (0, 1)]
    assert [round(share, 4) for share in shares] == [0.0092, 0.0137]
    mean, buffer, expected = 0.0, 0.0, []
    for share in shares:
        mean = 0.99 * mean + 0.01 * 0.5**2
        rms = (1 - share) * 3e-4 / 0.2
        buffer = 0.9 * buffer - (share + rms / (np.sqrt(mean) + 1e-8)) * 0.5
        expected.append(0.2 * buffer)
    found = steps(
        {"w": jnp.zeros(())}, {"w": jnp.full((), 0.5)}, 2, name="rmsprop_warmup",
        lr=0.2, momentum=0.9, transition_updates=10,
    )  # fmt: skip
    np.testing.assert_allclose([each["w"] for each in found], expected, rtol=1e-5)


def test_the_share_of_sgd_grows_as_in_the_paper():
    found = [float(large_batch.sgd_share(epoch, 10)) for epoch in (0, 5, 10, 11, 12)]
    np.testing.assert_allclose(found, [0.0092, 0.0677, 0.5, 0.7, 0.9], atol=5e-5)


def test_rmsprop_warmup_ends_as_sgd():
    assert float(large_batch.sgd_share(12.49, 10)) < 1
    assert float(large_batch.sgd_share(12.5, 10)) == 1
    late = steps(WEIGHTS, GRADS, 4, name="rmsprop_warmup", transition_updates=1, lr=0.1)
    # From the third update on, what momentum gathers is the gradient.
    gathered = [-np.asarray(change["w"]) / 0.1 for change in late]
    for before, after in itertools.pairwise(gathered[1:]):
        np.testing.assert_allclose(after, 0.9 * before + GRADS["w"], rtol=1e-5)
    assert abs(gathered[1] - 0.9 * gathered[0] - GRADS["w"]).max() > 0.01


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_clipping_before_a_layerwise_rate_is_refused(name):
    with pytest.raises(ValueError, match=f"clip_norm=1.0 has no meaning with {name}"):
        steps(WEIGHTS, GRADS, name=name, clip_norm=1.0)


@pytest.mark.slow
def test_a_run_whose_optimizer_follows_updates_is_resumed_to_the_bit(tmp_path):
    fields = {"optim__name": "rmsprop_warmup", "optim__transition_updates": 6}
    whole = run(tmp_path / "whole", **fields)
    run(tmp_path / "parts", updates=6, **fields)
    resumed = run(tmp_path / "parts", **fields)
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert whole["updates"] == 12
