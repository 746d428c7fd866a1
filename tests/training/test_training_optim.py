"""Optimizers and learning rates, against values by hand and against optax."""

import ast
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_workload import tiny_config

from echo_jax.config import RunSpec, check_config
from echo_jax.training.update import Optimizer, numbers_at, numbers_of

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

WEIGHTS = {"w": jnp.array([[3.0, 4.0]])}
GRADS = {"w": jnp.array([[0.0, 0.5]])}


# Optax itself promotes types.
OPTAX = functools.partial(jax.numpy_dtype_promotion, "standard")


def config_of(**fields):
    config = tiny_config(optim__lr=1.0, optim__end_fraction=0.2, optim__decay_updates=6)
    config.optim.update(fields)
    check_config(config)
    return config


def steps(params, grads, count=1, **fields):
    """Returns what an optimizer adds to parameters in each of some updates."""
    config = RunSpec.of(config_of(**fields))
    optimizer, numbers = Optimizer.from_config(config), numbers_of(config)

    @jax.jit
    def changes(params, grads):
        state, added = optimizer.init(params), []
        for update in range(count):
            current = numbers_at(numbers, update)
            change, state = optimizer.update(grads, state, params, current)
            with OPTAX():
                params = optax.apply_updates(params, change)
            added.append(change)
        return added

    return jax.device_get(changes(params, grads))


def values(wanted, updates, **fields):
    number = numbers_of(RunSpec.of(config_of(**fields)))[wanted]
    assert number.dtype == np.float32
    return number[np.array(updates)]


def assert_close(found, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol), found, expected)


def assert_steps_as(theirs, params, grads, found, rtol):
    state, update = theirs.init(params), jax.jit(theirs.update)
    for change in found:
        with OPTAX():
            expected, state = update(grads, state, params)
        params = optax.apply_updates(params, expected)
        assert_close(change, expected, rtol)


@pytest.mark.parametrize(("nesterov", "expected"), [(True, -0.65), (False, -0.5)])
def test_sgd_with_momentum_by_hand(nesterov, expected):
    # v1 = g = 2, step 2 + .5*2 = 3; v2 = 2 + .5*2 = 3, step 2 + .5*3 = 3.5.
    fields = {"name": "sgd", "momentum": 0.5, "lr": 0.1, "nesterov": nesterov}
    added = steps(jnp.zeros(()), jnp.float32(2), 2, **fields)
    assert_close(sum(added), expected)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_is_for_matrices_unless_vectors_are_asked_for(name, vectors):
    params = {"bias": jnp.ones(2), "matrix": jnp.ones((2, 2))}
    fields = {"weight_decay": 0.1, "decay_vectors": vectors, "lr": 0.5, "momentum": 0.0}
    (step,) = steps(params, jax.tree.map(jnp.zeros_like, params), name=name, **fields)
    assert_close(step["bias"], np.full(2, -0.05 if vectors else 0.0))
    assert_close(step["matrix"], np.full((2, 2), -0.05))


def test_clips_by_the_global_norm():
    grads = {"a": jnp.float32(3.0), "b": jnp.float32(4.0)}
    fields = {"name": "sgd", "momentum": 0.0, "clip_norm": 1.0}
    (step,) = steps(jax.tree.map(jnp.zeros_like, grads), grads, **fields)
    assert_close(step, {"a": -0.6, "b": -0.8})


@pytest.mark.parametrize(
    ("name", "args"),
    [("optax.lion", {"b1": 0.8}), ("optax.contrib.muon", {"weight_decay": 0.1})],
)
def test_an_optimizer_of_optax_steps_as_optax_does(name, args):
    params = {"bias": jnp.ones(3), "matrix": jnp.arange(6.0).reshape(3, 2)}
    grads = jax.tree.map(jnp.cos, params)
    with OPTAX():
        found = steps(params, grads, 2, name=name, args=json.dumps(args), lr=0.02)
    module = optax.contrib if "contrib" in name else optax
    optimizer = getattr(module, name.rpartition(".")[2])(0.02, **args)
    assert_steps_as(optimizer, params, grads, found, 1e-4)


def test_lars_by_hand():
    fields = {"name": "lars", "lr": 2.0, "weight_decay": 0.1, "momentum": 0.0}
    (step,) = steps(WEIGHTS, GRADS, **fields)
    # 0.001 * 5 / (0.5 + 0.1 * 5) times (0.3, 0.9), times 2
    assert_close(step["w"], np.array([[-0.003, -0.009]]))


def test_lars_gathers_momentum_without_the_rate():
    # At a constant rate that is algorithm 1 of the paper: v = m v + gamma lambda g.
    fields = {"name": "lars", "momentum": 0.5, "trust_coefficient": 0.1, "lr": 0.01}
    constant = steps(WEIGHTS, GRADS, 3, **fields)
    weights, buffer = np.array([[3.0, 4.0]]), np.zeros((1, 2))
    for change in constant:
        rate = 0.01 * 0.1 * np.linalg.norm(weights) / 0.5
        buffer = 0.5 * buffer + rate * np.array([[0.0, 0.5]])
        weights = weights - buffer
        assert_close(change["w"], -buffer)
    # Where the rate falls, what was gathered falls with it (Goyal et al. 2017).
    fallen = steps(WEIGHTS, GRADS, 2, schedule="piecewise", boundaries=(1,), **fields)
    assert_close(fallen[1]["w"][0, 1] / constant[1]["w"][0, 1], 0.1)


def test_lamb_is_that_of_optax_where_all_is_adapted_and_no_norm_is_cut_off():
    params = {"w": jnp.array([[0.6, -0.8], [2.0, 0.1]]), "b": jnp.array([0.5, 0.2])}
    grads = jax.tree.map(lambda x: 0.3 * x + 0.1, params)
    fields = {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "weight_decay": 0.01}
    ours = steps(params, grads, 3, name="lamb", lr=0.1, decay_vectors=True, **fields)
    assert_steps_as(optax.lamb(0.1, **fields), params, grads, ours, 1e-5)


def test_lamb_cuts_off_the_norm_of_large_arrays():
    params = {"w": jnp.full((1, 4), 30.0)}  # its norm is 60
    for clip, norm in ((10.0, 10.0), (100.0, 60.0)):
        step = steps(params, params, name="lamb", lr=1.0, trust_clip=clip)[0]["w"]
        assert_close(np.linalg.norm(step), norm)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_vectors_are_neither_adapted_nor_decayed_unless_asked_for(name):
    params = {"w": jnp.full((2, 2), 3.0), "b": jnp.full(4, 3.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    fields = {"name": name, "momentum": 0.0, "weight_decay": 0.1}
    (plain,) = steps(params, grads, **fields)
    assert_close(plain["b"], -np.ones(4))
    # 0.001 * 6 / (2 + 0.6) times 1.3; a step as long as the weights.
    assert_close(plain["w"], np.full((2, 2), {"lars": -0.003, "lamb": -3.0}[name]))
    (alike,) = steps(params, grads, decay_vectors=True, **fields)
    assert_close(alike["b"], alike["w"].ravel())


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_an_array_of_zeros_begins_to_train(name):
    params = {"w": jnp.zeros((2, 2))}
    (change,) = steps(params, {"w": jnp.full((2, 2), 0.5)}, name=name, lr=0.1)
    assert (np.asarray(change["w"]) < 0).all()


def test_norms_of_half_precision_are_those_of_single_precision():
    """In float16 the square of 1e-4 is 0, and 512 x 512 ones have an infinite norm."""
    size, ratio = 1e-4, 10
    weights = {"w": jnp.ones((512, 512), jnp.float16)}
    grads = {"w": jnp.full((512, 512), size, jnp.float16)}
    (ours,) = steps(weights, grads, name="lars", momentum=0.0)
    assert ours["w"].dtype == jnp.float32
    # 0.001 * 512 / (512 size).
    found = np.asarray(ours["w"]) / np.float32(grads["w"])
    assert_close(found, np.full_like(found, -ratio), 1e-3)
    # Adam's first step is of ones; it becomes as long as the weights.
    (step,) = steps(grads, weights, name="lamb", trust_clip=1000.0)
    assert_close(step["w"], np.full((512, 512), -size), 0.01)


def test_rmsprop_warmup_by_hand():
    """Two updates of a transition of 10, at a rate of 0.2."""
    shares = [0.5 * np.exp(2 * (epoch - 10) / 5) for epoch in (0, 1)]
    mean, buffer, expected = 0.0, 0.0, []
    for share in shares:
        mean = 0.99 * mean + 0.01 * 0.5**2
        rms = (1 - share) * 3e-4 / 0.2
        buffer = 0.9 * buffer - (share + rms / (np.sqrt(mean) + 1e-8)) * 0.5
        expected.append(0.2 * buffer)
    fields = {"name": "rmsprop_warmup", "lr": 0.2, "momentum": 0.9}
    found = steps(jnp.zeros(()), jnp.float32(0.5), 2, **fields, transition_updates=10)
    assert_close(found, expected)


def test_the_share_of_sgd_grows_as_in_the_paper():
    epochs = (0, 5, 10, 11, 12, 13, 20)
    fields = {"name": "rmsprop_warmup", "transition_updates": 10}
    expected = [0.0092, 0.0677, 0.5, 0.7, 0.9, 1, 1]
    np.testing.assert_allclose(
        values("sgd_share", epochs, **fields), expected, atol=5e-5
    )


def test_the_learning_rate_follows_the_batch():
    def found(**fields):
        config = config_of(lr=0.1, b2=0.999, reference_batch=256, **fields)
        config.batch_size = 8192
        numbers = numbers_of(RunSpec.of(config))
        return [numbers["lr"][0], *(numbers[name] for name in ("b1", "b2", "eps"))]

    assert_close(found(), [0.1, 0.9, 0.999, 1e-8])
    # Goyal et al. 2017: 0.1 at 256 is 3.2 at 8,192.
    assert_close(found(scale="linear"), [3.2, 0.9, 0.999, 1e-8])
    # 1 - 32 (1 - b), and over the root of 32.
    expected = [0.1 * 32**0.5, 0.68, 0.968, 1e-8 / 32**0.5]
    assert_close(found(scale="sqrt", b1=0.99), expected)


def rates(updates=range(8), **fields):
    return values("lr", updates, **fields)


SCHEDULES = {
    "constant warmup_updates=4": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1],
    "constant warmup_updates=4 start_fraction=0.1": [0.1, 0.4, 0.7, 1, 1, 1, 1, 1],
    "linear": [1, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2, 0.2],
    "linear warmup_updates=2": [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
    # It ends with the run, after 12 updates.
    "linear decay_updates=0": 1 - 0.8 * np.arange(8) / 11,
    "linear decay_updates=1": [1] + [0.2] * 7,
    # 0.6 + 0.4 cos(pi k / 4)
    "cosine warmup_updates=2": [0.5, 1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2, 0.2],
    "piecewise boundaries=3,5": [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01],
    "piecewise warmup_updates=2 boundaries=3,6 boundary_scale=0.5": [
        *(0.5, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25)
    ],
    "warmup_stable_decay cooldown_updates=2": [1, 1, 1, 1, 0.6, 0.2, 0.2, 0.2],
    "cyclic start_fraction=0.2 cycle_updates=4": [0.2, 0.6, 1, 0.6, 0.2, 0.6, 1, 0.6],
    "slow_start boundaries=2,4 fractions=0.5,1.0,0.25": [
        *(0.5, 0.5, 1, 1, 0.25, 0.25, 0.25, 0.25)
    ],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_by_hand(schedule):
    name, *given = schedule.split()
    pairs = (each.split("=") for each in given)
    fields = {field: ast.literal_eval(value) for field, value in pairs}
    assert_close(rates(schedule=name, **fields), np.array(SCHEDULES[schedule]))


def test_slow_start_has_the_rates_of_its_paper():
    """Akiba et al. 2017: a batch of 32,768, 90 epochs, here of one update each."""
    fields = {"schedule": "slow_start", "lr": 0.1 * 128, "decay_updates": 90}
    found = rates([0, 39, 40, 69, 70, 84, 85, 89], **fields)
    expected = [6.4, 6.4, 0.96, 0.96, 0.128, 0.128, 0.0128, 0.0128]
    assert_close(found, np.array(expected))


ONE_CYCLE = {
    "schedule": "onecycle",
    "decay_updates": 100,
    "start_fraction": 1 / 25,
    "end_fraction": 1 / 25e4,
}


def test_one_cycle_is_that_of_optax():
    updates = range(0, 101, 5)
    theirs = optax.cosine_onecycle_schedule(100, 1.0)
    with OPTAX():
        expected = np.array([float(theirs(update)) for update in updates])
    assert_close(rates(updates, **ONE_CYCLE), expected, 2e-4)


@pytest.mark.parametrize(
    ("optimizer", "name"), [("sgd", "momentum"), ("lars", "momentum"), ("lamb", "b1")]
)
def test_in_one_cycle_momentum_falls_as_the_rate_rises(optimizer, name):
    fields = {**ONE_CYCLE, "name": optimizer, name: 0.95, "peak_momentum": 0.85}
    found = values(name, [0, 15, 30, 65, 100], **fields)
    assert_close(found, np.array([0.95, 0.9, 0.85, 0.9, 0.95]))
    # One that is lower already stays.
    assert_close(values(name, [0, 30], **{**fields, name: 0.5}), np.full(2, 0.5))


def test_a_schedule_of_optax_is_a_part_of_the_rate():
    args = {"init_value": 1.0, "transition_steps": 2, "decay_rate": 0.5}
    fields = {"schedule": "optax.exponential_decay", "schedule_args": json.dumps(args)}
    assert_close(rates([0, 2, 4], lr=0.1, **fields), np.array([0.1, 0.05, 0.025]))


def test_the_rate_follows_a_batch_that_grows():
    config = config_of(lr=0.8, scale="linear", reference_batch=8)
    config.batch.update({"boundaries": (8, 12), "factors": (2, 4)})
    found = numbers_of(RunSpec.of(config))["lr"][[0, 7, 8, 11, 12, 13]]
    assert_close(found, np.array([0.1, 0.1, 0.2, 0.2, 0.8, 0.8]))


@pytest.mark.parametrize(
    ("updates", "schedule", "length"),
    [(3, "linear", 2**10), (10**6, "cosine", 2**20), (10**9, "constant", 2**21)],
)
def test_all_updates_have_a_rate_in_few_bytes(updates, schedule, length):
    config = config_of(schedule=schedule, decay_updates=0, lr=0.5)
    config.updates = updates
    numbers = numbers_of(RunSpec.of(config))
    assert numbers["lr"].shape == (length,)
    end = 0.5 if schedule == "constant" else 0.1
    assert_close(numbers_at(numbers, updates - 1)["lr"], end)
