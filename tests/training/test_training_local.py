"""Local updates: what replicas compute, when they meet, and what they send."""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_training_gradients import Normed, Plain, assert_close, far_apart
from tiny_workload import (
    NUM_FEATURES,
    NUM_PARAMS,
    STOCHASTIC,
    make_workload,
    rows_of,
    run,
    tiny_config,
)

import echo_jax as ej
from echo_jax.config import RunSpec, check_config
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import outputs_of
from echo_jax.training import NonFiniteLossError
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds import HostBatching, stacked
from echo_jax.training.update import Optimizer, numbers_at, numbers_of, sync_updates

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

REPLICAS = 4
SENT = NUM_PARAMS + NUM_FEATURES  # With the running mean of `Plain`.
EVERY = {"mesh__data": REPLICAS, "local__sync_schedule": "every"}
SGD = {"optim__name": "sgd", "optim__lr": 0.05, "optim__momentum": 0.9}
DILOCO = {**EVERY, "local__sync_every": 3, "local__outer": "nesterov"}


class Updates:
    """Updates on batches of noise, one by one."""

    def __init__(self, task=None, **overrides):
        config = tiny_config(**overrides)
        check_config(config)
        workload = make_workload(config, task=task or Plain())
        self.compiled = CompiledFunctions(RunSpec.of(config), workload)
        self.state: Any = self.compiled.init(self.compiled.init_key)
        self._rng = np.random.default_rng(0)

    def __call__(self, *meetings, batch=None):
        batching = HostBatching(self.compiled.mesh)
        for syncs in meetings:
            x = self._rng.normal(size=(8, 4)).astype(np.float32)
            now = batch or {"x": x, "y": x.sum(axis=1)}
            now = {**now, "repeat": np.zeros(len(now["x"]), np.int32)}
            inputs = batching.send(stacked([now]))
            program = self.compiled.program(batching, syncs)
            self.state, self.report = program(self.state, (), inputs, self.compiled.run)
        return jax.device_get(self.state)

    def model(self):
        return jax.device_get(self.compiled.model(self.state))

    def spread(self):
        return self.compiled.read(self.report).row()["replica_spread"]


def mean_of(tree):
    return jax.tree.map(lambda x: x.mean(axis=0), tree)


def test_meeting_after_every_update_is_data_parallelism():
    # With SGD, whose step is linear in the gradient, as momentum's is.
    local, whole = Updates(**EVERY, **SGD), Updates(mesh__data=REPLICAS, **SGD)
    local(*[True] * 20)
    whole(*[False] * 20)
    assert_close(local.model().params, whole.model().params, atol=1e-5)
    row = local.compiled.read(local.report).row()
    expected = jax.device_get(whole.report).row()
    del row["replica_spread"]
    # A replica's own gradient is as noisy as the few examples that it is of.
    assert row.pop("gradient_norm") > expected.pop("gradient_norm")
    assert row == pytest.approx(expected, rel=1e-4)


def test_replicas_go_apart_and_meet_at_their_mean():
    updates, apart = Updates(**EVERY, **SGD), Updates(**EVERY, **SGD)
    before = updates(False, False).replicas
    assert len(np.unique(before.params["first"], axis=0)) == REPLICAS
    # What is evaluated is the mean, and evaluating changes nothing.
    assert_close(updates.model().params, mean_of(before.params), rtol=1e-6)
    assert_close(jax.device_get(updates.state.replicas), before, rtol=0)
    after, each = updates(True).replicas, apart(False, False, False).replicas.params
    mean = mean_of(each)
    assert_close(updates.model().params, mean, rtol=1e-5)
    for x in jax.tree.leaves(after.params):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    # The optimizer's state is each replica's own.
    (momentum,) = [
        x for x in jax.tree.leaves(after.opt_state) if x.shape[1:] == (4, 16)
    ]
    assert len(np.unique(momentum, axis=0)) == REPLICAS
    # A row has how far they were apart where they met, until they meet again.
    moved = sum(((each[k] - mean[k]) ** 2).sum() for k in mean) / REPLICAS
    norm = sum((mean[k] ** 2).sum() for k in mean)
    assert apart.spread() == 0
    assert updates.spread() == pytest.approx((moved / norm) ** 0.5, rel=1e-4)
    before = updates.spread()
    updates(False)
    assert updates.spread() == before


def test_the_outer_step_is_that_of_nesterov_by_hand():
    rate, momentum = 0.5, 0.8
    options = {"local__outer_lr": rate, "local__outer_momentum": momentum}

    def after(*meetings):
        updates = Updates(**DILOCO, **SGD, **options)
        state = updates(*meetings)
        anchor = state.outer.anchor["first"]
        np.testing.assert_array_equal(updates.model().params["first"], anchor)
        return mean_of(state.replicas.params)["first"], anchor

    mean, anchor = after(False, False)
    first = anchor - mean
    assert np.abs(first).max() > 0.01
    anchor = anchor - rate * (first + momentum * first)
    mean, found = after(False, True)
    np.testing.assert_allclose(found, anchor, rtol=1e-5, atol=1e-6)
    # Replicas go on from the anchor.
    np.testing.assert_allclose(mean, anchor, rtol=1e-5, atol=1e-6)
    mean, _ = after(False, True, False, False)
    second = anchor - mean
    kept = momentum * first + second
    anchor = anchor - rate * (second + momentum * kept)
    _, found = after(False, True, False, True)
    np.testing.assert_allclose(found, anchor, rtol=1e-4, atol=1e-5)


def test_replicas_have_the_variance_of_all_their_examples():
    options = {"batch_size": 16, "optim__lr": 1e-9, "local__sync_every": 3}
    updates, batch = Updates(Normed(), **EVERY, **options), far_apart()
    # Until nothing is left of the averages before them.
    updates(*[False, False, True] * 25, batch=batch)
    stats = updates.model().model_state["batch_stats"]["norm"]
    np.testing.assert_allclose(stats["mean"], batch["x"].mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(stats["var"], batch["x"].var(axis=0), rtol=1e-3)


def meetings(updates=12, **overrides):
    config = tiny_config(updates=updates, **overrides)
    check_config(config)
    return np.flatnonzero(sync_updates(RunSpec.of(config))).tolist()


def test_they_meet_when_the_schedule_says():
    assert meetings() == []
    assert meetings(local__sync_schedule="every", local__sync_every=5) == [4, 9, 11]
    post = {
        "local__sync_schedule": "every",
        "local__sync_every": 4,
        "local__start_after": 3,
    }
    assert meetings(**post) == [0, 1, 2, 6, 10, 11]
    assert meetings(local__sync_schedule="bernoulli", local__sync_p=1.0) == list(
        range(12)
    )


def test_chance_is_of_the_seed_and_the_update_alone_and_falls_by_its_schedule():
    options = {
        "local__sync_schedule": "cosine",
        "local__sync_p": 0.9,
        "local__sync_p_end": 0.1,
    }
    options["updates"] = 4000
    found = meetings(**options)
    assert found == meetings(**options) != meetings(**options, seed=1)
    counts = np.histogram(found, bins=[0, 1000, 2000, 3000, 4000])[0]
    # The mean of 0.5 + 0.4 cos(pi t) over each quarter of 0 to 1.
    assert counts / 1000 == pytest.approx([0.8601, 0.6492, 0.3508, 0.1399], abs=0.08)


def test_load_meets_where_the_echo_loads():
    fetch = ej.FetchSchedule(start=0.4, end=0.4)
    plan = make_plan(ej.StochasticSpec(fetch, 24, batch_size=8, seed=0))
    batches = itertools.islice(outputs_of(plan, 10**9, 8), 40)
    fresh = [
        update for update, (_, uses) in enumerate(batches) if not uses.repeat.any()
    ]
    options = {**EVERY, **STOCHASTIC, "local__sync_schedule": "fetch"}
    assert set(meetings(updates=40, **options)) == {*fresh, 39}
    assert 5 < len(fresh) < 30


def test_bytes_are_counted_beside_updates(tmp_path):
    options = {**EVERY, "local__sync_every": 4, "local__start_after": 2}
    summary = run(tmp_path / "run", task=Plain(), **options)
    counted = [(row["updates"], row["bytes_sent"]) for row in rows_of(tmp_path / "run")]
    size = 4 * SENT
    # Meetings after updates 1, 2, 6, 10 and 12.
    met = {0: 0, 4: 2, 6: 3, 8: 3, 12: 5}
    assert counted == [(updates, met[updates] * size) for updates, _ in counted]
    assert summary["bytes_sent"] == 5 * size


MODES = {
    "diloco": DILOCO,
    "fetch": {
        **DILOCO,
        **STOCHASTIC,
        "local__sync_schedule": "fetch",
        "local__sync_every": 1,
    },
    # Of one model.
    "stale": {"local__staleness": 2},
}
SLOW_FETCH = pytest.param("fetch", marks=pytest.mark.slow)


class Killed(Exception):
    """Ends a run in which nothing is saved any more."""


@pytest.mark.parametrize("mode", ["diloco", SLOW_FETCH, "stale"])
def test_a_killed_run_goes_on_to_the_bit(tmp_path, mode):
    options = {"updates": 13, "checkpoint_every": 5, "eval_every": 4, **MODES[mode]}
    workload, evaluations = make_workload(tiny_config()), itertools.count()

    def eval_batches(*args, **kwargs):
        if next(evaluations) == 2:
            raise Killed  # After update 8.
        return workload.eval_batches(*args, **kwargs)

    whole = run(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        run(tmp_path / "broken", replaced={"eval_batches": eval_batches}, **options)
    resumed = run(tmp_path / "broken", **options)
    for name in ("params_sha256", "bytes_sent", "final"):
        assert resumed[name] == whole[name]
    losses, again = (
        [row["loss"] for row in rows_of(tmp_path / folder, "train")]
        for folder in ("whole", "broken")
    )
    assert losses == again


def test_a_run_goes_on_with_as_many_replicas_alone(tmp_path):
    options = {"local__sync_schedule": "every", "mesh__data": -1}
    run(tmp_path, **options, updates=1)
    environment = tmp_path / "environment.json"
    begun = json.loads(environment.read_text()) | {"replicas": 4}
    environment.write_text(json.dumps(begun))
    with pytest.raises(ValueError, match=r"4 replicas, .* has 8 now; .* on 4 devices"):
        run(tmp_path, **options, updates=4)


def test_a_loss_of_one_replica_that_is_not_finite_ends_the_run(tmp_path):
    # Item 43 is of one replica's part of the sixth batch; they meet at the eighth.
    options = {"local__sync_every": 8, "echo__stage": "decode", "optim__lr": 1e-9}
    with pytest.raises(NonFiniteLossError, match="the loss of update 6"):
        run(tmp_path, **EVERY, **options, nan_at_fresh=43)


@pytest.mark.parametrize("staleness", [0, 2])
def test_late_gradients_are_those_of_an_earlier_update(staleness):
    # On x^2 / 2, x[t + 1] = x[t] - lr x[t - staleness]; without it, SGD to the bit.
    fields = {**SGD, "optim__momentum": 0.0, "local__staleness": staleness}
    config = RunSpec.of(tiny_config(**fields))
    optimizer, numbers = Optimizer.from_config(config), numbers_of(config)
    plain, rate = optax.sgd(numbers["lr"][0]), np.float32(0.05)
    path = [jnp.ones((), jnp.float32)]
    state, kept = optimizer.init(path[0]), plain.init(path[0])
    for number in range(8):
        current = numbers_at(numbers, number)
        changes, state = optimizer.update(path[-1], state, path[-1], current)
        late = path[number - staleness] if number >= staleness else 0.0
        assert changes == pytest.approx(-rate * late)
        if not staleness:
            assert changes == plain.update(path[-1], kept)[0]
        path.append(optax.apply_updates(path[-1], changes))
