"""Learning rates over updates, against values by hand and against optax."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_workload import rows_of, run, tiny_config

from echo_jax.config.check import check_config
from echo_jax.training.start import _bent
from echo_jax.training.update.optim import Optimizer, hyperparams


def config_of(**fields):
    config = tiny_config(optim__lr=1.0, optim__end_fraction=0.2, optim__decay_updates=6)
    config.optim.update(fields)
    check_config(config)
    return config


def values(name, updates, **fields):
    config = config_of(**fields)
    optimizer, numbers = Optimizer.from_config(config), hyperparams(config)
    at = jax.jit(lambda update: optimizer.at(update, numbers)[name])
    return [float(at(jnp.int32(update))) for update in updates]


def rates(updates=range(8), **fields):
    return values("lr", updates, **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1, 1, 1, 1]),
        (
            {"schedule": "constant", "warmup_updates": 4},
            [0.25, 0.5, 0.75, 1, 1, 1, 1, 1],
        ),
        (
            {"schedule": "constant", "warmup_updates": 4, "start_fraction": 0.1},
            [0.1, 0.4, 0.7, 1, 1, 1, 1, 1],
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
        ({"schedule": "linear", "decay_updates": 1}, [1] + [0.2] * 7),
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
        (
            {"schedule": "warmup_stable_decay", "cooldown_updates": 2},
            [1, 1, 1, 1, 0.6, 0.2, 0.2, 0.2],
        ),
        (
            {
                "schedule": "warmup_stable_decay",
                "cooldown_updates": 4,
                "warmup_updates": 2,
            },
            [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        ),
        (
            {"schedule": "cyclic", "start_fraction": 0.2, "cycle_updates": 4},
            [0.2, 0.6, 1, 0.6, 0.2, 0.6, 1, 0.6],
        ),
    ],
)
def test_schedules_by_hand(fields, expected):
    np.testing.assert_allclose(rates(**fields), expected, rtol=1e-6)


def test_a_gradual_warmup_begins_at_the_rate_of_the_small_batch():
    """Goyal et al. 2017: 5 epochs from 0.1 to 3.2, here of 10 updates each."""
    found = rates(
        [0, 49, 50], lr=3.2, warmup_updates=50, start_fraction=0.1 / 3.2
    )  # fmt: skip
    np.testing.assert_allclose(found, [0.1, 3.2, 3.2], rtol=1e-6)


def test_slow_start_has_the_rates_of_its_paper():
    """Akiba et al. 2017: a batch of 32,768, 90 epochs, here of one update each."""
    config = config_of(
        schedule="slow_start", lr=0.1, scale="linear", decay_updates=90
    )  # fmt: skip
    config.batch_size = 32_768
    optimizer, numbers = Optimizer.from_config(config), hyperparams(config)
    found = [
        float(optimizer.at(epoch, numbers)["lr"])
        for epoch in (0, 39, 40, 69, 70, 84, 85, 89)
    ]
    expected = [6.4, 6.4, 0.96, 0.96, 0.128, 0.128, 0.0128, 0.0128]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # And where it is told when.
    by_hand = {"boundaries": (2, 4), "fractions": (0.5, 1.0, 0.25)}
    found = rates(schedule="slow_start", **by_hand)
    np.testing.assert_allclose(found, [0.5, 0.5, 1, 1, 0.25, 0.25, 0.25, 0.25])


ONE_CYCLE = {
    "schedule": "onecycle",
    "decay_updates": 100,
    "start_fraction": 1 / 25,
    "end_fraction": 1 / 25e4,
}


def test_one_cycle_is_that_of_optax():
    found = rates([0, 15, 30, 65, 100], **ONE_CYCLE)
    np.testing.assert_allclose(found, [0.04, 0.52, 1, 0.5, 0], atol=1e-5)
    theirs = optax.cosine_onecycle_schedule(100, 1.0)
    updates = range(101)
    expected = [float(theirs(update)) for update in updates]
    np.testing.assert_allclose(rates(updates, **ONE_CYCLE), expected, rtol=2e-4)


@pytest.mark.parametrize("name", ["momentum", "b1"])
def test_in_one_cycle_momentum_falls_as_the_rate_rises(name):
    fields = {**ONE_CYCLE, name: 0.95, "peak_momentum": 0.85}
    found = values(name, [0, 15, 30, 65, 100], **fields)
    np.testing.assert_allclose(found, [0.95, 0.9, 0.85, 0.9, 0.95], rtol=1e-6)
    # One that is lower already stays.
    assert values(name, [0, 30], **{**fields, name: 0.5}) == [0.5, 0.5]


def test_a_schedule_of_optax_is_a_part_of_the_rate():
    args = {"init_value": 1.0, "transition_steps": 2, "decay_rate": 0.5}
    found = rates(
        [0, 2, 4], lr=0.1, schedule="optax.exponential_decay",
        schedule_args=json.dumps(args),
    )  # fmt: skip
    np.testing.assert_allclose(found, [0.1, 0.05, 0.025], rtol=1e-6)


def test_decay_ends_with_the_run_unless_told_otherwise():
    assert hyperparams(tiny_config(updates=6)).by_name()["decay_updates"] == 6
    config = tiny_config(updates=6, optim__decay_updates=4)
    assert hyperparams(config).by_name()["decay_updates"] == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "step"}, "schedule='step' is no schedule of optax; use one of"),
        ({"schedule": "optax.adam"}, "schedule='optax.adam' is no schedule of optax"),
        ({"schedule": "optax._src"}, "is no schedule of optax"),
        ({"schedule": "optax.exponential_decay"}, "cannot be made of config.*missing"),
        ({"schedule_args": '{"a": 1}'}, "belongs to schedules of optax; constant has"),
        ({"schedule": "onecycle"}, "start_fraction=0.0 must be above 0 with onecycle"),
        ({"schedule": "cyclic"}, "start_fraction=0.0 must be above 0 with cyclic"),
        (
            {"schedule": "cyclic", "start_fraction": 0.1, "warmup_updates": 2},
            "warmup_updates=2 has no meaning with cyclic",
        ),
        ({**ONE_CYCLE, "peak_at": 0.0}, "peak_at=0.0 must lie between 0 and 1"),
        ({**ONE_CYCLE, "peak_at": 1.0}, "peak_at=1.0 must lie between 0 and 1"),
        (
            {"schedule": "warmup_stable_decay", "cooldown_updates": 6},
            "cooldown_updates=6 must be at most the 5 updates",
        ),
        (
            {"schedule": "slow_start", "boundaries": (3,)},
            r"must be 2 numbers .* for 1 changes; set .*fractions=\(0.5, 0.05\)",
        ),
        ({"schedule": "slow_start", "boundaries": (3, 2)}, "must be rising numbers"),
        ({"boundaries": (3,)}, "needs --config.optim.schedule=piecewise, or slow_st"),
        ({"start_fraction": 1.5}, "start_fraction=1.5 must be at most 1"),
        ({"scale": "cubic"}, "scale='cubic' must be one of none, linear, sqrt"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


def test_a_run_logs_the_rate_that_it_trains_with(tmp_path):
    fields = {f"optim__{name}": value for name, value in ONE_CYCLE.items()}
    run(tmp_path / "run", **{**fields, "optim__decay_updates": 0, "log_every": 1})
    logged = [
        row["learning_rate"]
        for row in rows_of(tmp_path / "run")
        if "learning_rate" in row
    ]
    theirs = optax.cosine_onecycle_schedule(12, 0.01, pct_start=0.3)
    # optax rounds where the peak lies to a whole update.
    assert logged[0] == pytest.approx(float(theirs(0)))
    assert max(logged) == pytest.approx(0.01, rel=0.05)
    assert len(logged) == 12


@pytest.mark.parametrize(
    ("fields", "bends"),
    [
        ({"schedule": "slow_start"}, True),
        ({"schedule": "slow_start", "boundaries": (1, 2, 3)}, False),
        ({"schedule": "warmup_stable_decay", "cooldown_updates": 2}, True),
        ({"schedule": "cyclic", "start_fraction": 0.1}, False),
    ],
)
def test_what_ends_with_the_run_bends_where_it_is_extended(fields, bends):
    config = config_of(**{**fields, "decay_updates": 0})
    assert bool(_bent(config.updates - 1, config)) is bends
    assert not _bent(config.updates, config)
