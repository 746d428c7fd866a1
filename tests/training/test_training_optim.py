import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_workload import tiny_config

from echo_jax.training.optim import OptimSettings, make_optimizer, make_schedule


def settings(**fields):
    config = tiny_config(optim__lr=1.0, optim__end_fraction=0.2)
    settings = OptimSettings.from_config(config)
    return dataclasses.replace(settings, **{"decay_updates": 6, **fields})


def rates(**fields):
    schedule = make_schedule(settings(**fields))
    return [float(schedule(jnp.int32(i))) for i in range(8)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1, 1, 1, 1]),
        (
            {"schedule": "constant", "warmup_updates": 4},
            [0.25, 0.5, 0.75, 1, 1, 1, 1, 1],
        ),
        ({"schedule": "linear"}, [1, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2, 0.2]),
        (
            {"schedule": "linear", "warmup_updates": 2},
            [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        ),
        (
            {"schedule": "cosine", "warmup_updates": 2},
            # 0.6 + 0.4 cos(pi k / 4)
            [0.5, 1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2, 0.2],
        ),
        ({"schedule": "linear", "decay_updates": 3}, [1, 0.6, 0.2, 0.2] + [0.2] * 4),
        (
            {"schedule": "piecewise", "boundaries": (3, 5)},
            [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01],
        ),
        (
            {
                "schedule": "piecewise",
                "warmup_updates": 2,
                "boundaries": (3, 6),
                "boundary_scale": 0.5,
            },
            [0.5, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25],
        ),
    ],
)
def test_schedules_by_hand(fields, expected):
    np.testing.assert_allclose(rates(**fields), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "decay_updates"),
    [
        ({"optim__schedule": "linear"}, 6),
        ({"optim__schedule": "cosine", "optim__decay_updates": 4}, 4),
        ({"optim__schedule": "constant", "optim__decay_updates": 4}, 0),
        ({"optim__schedule": "piecewise", "optim__boundaries": (3,)}, 0),
    ],
)
def test_decay_ends_with_the_run_unless_told_otherwise(fields, decay_updates):
    settings = OptimSettings.from_config(tiny_config(updates=6, **fields))
    assert settings.decay_updates == decay_updates


def updated(params, grads_of, steps, **fields):
    optimizer = make_optimizer(settings(**fields))
    state = optimizer.init(params)
    for _ in range(steps):
        changes, state = optimizer.update(grads_of(params), state, params)
        params = optax.apply_updates(params, changes)
    return params


def test_sgd_with_nesterov_momentum_by_hand():
    # v1 = g = 2, step 2 + .5*2 = 3; v2 = 2 + .5*2 = 3, step 2 + .5*3 = 3.5.
    params = updated(
        jnp.zeros(()), lambda _: jnp.full((), 2.0), 2, name="sgd", momentum=0.5, lr=0.1
    )
    np.testing.assert_allclose(params, -0.65, rtol=1e-6)
    plain = updated(
        jnp.zeros(()),
        lambda _: jnp.full((), 2.0),
        2,
        name="sgd",
        momentum=0.5,
        nesterov=False,
        lr=0.1,
    )
    np.testing.assert_allclose(plain, -0.5, rtol=1e-6)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_is_for_matrices_unless_vectors_are_asked_for(name, vectors):
    params = {"bias": jnp.ones(2), "matrix": jnp.ones((2, 2))}
    new = updated(
        params,
        lambda p: jax.tree.map(jnp.zeros_like, p),
        1,
        name=name,
        weight_decay=0.1,
        decay_vectors=vectors,
        lr=0.5,
        momentum=0.0,
    )
    kept = 0.95 if vectors else 1.0
    np.testing.assert_allclose(new["bias"], kept * params["bias"], rtol=1e-6)
    np.testing.assert_allclose(new["matrix"], 0.95 * params["matrix"], rtol=1e-6)


def test_clips_by_the_global_norm():
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    grads = {"a": jnp.float32(3.0), "b": jnp.float32(4.0)}
    new = updated(
        params, lambda _: grads, 1, name="sgd", momentum=0.0, lr=1.0, clip_norm=1.0
    )
    np.testing.assert_allclose([new["a"], new["b"]], [-0.6, -0.8], rtol=1e-6)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"'adam' is unknown; use adamw or sgd"):
        make_optimizer(settings(name="adam"))
    with pytest.raises(ValueError, match=r"schedule='step' is unknown"):
        make_schedule(settings(schedule="step"))
