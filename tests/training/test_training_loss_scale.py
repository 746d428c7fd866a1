"""Loss scales: what moves them, and what a skipped update leaves as it was."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import (
    ON_DEVICE,
    Regression,
    batch_of,
    functions_of,
    rows_of,
    run,
    tiny_config,
)

from echo_jax.training import NonFiniteLossError
from echo_jax.training.update import LossScale, adjust, scale_numbers

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

# A first scale that overflows the gradients of the tiny workload in float16, twice.
TWICE = {
    "precision__params": "float16",
    "precision__loss_scale": "dynamic",
    "precision__init": 2.0**17,
    "precision__growth": 3,
}
adjusted = jax.jit(adjust, static_argnames="is_dynamic")


def moved(pattern, *, kind="dynamic", init=8.0, growth=2, min_scale=1.0):
    """The scales after updates that are used (True) or skipped, and who failed."""
    config = tiny_config(precision__loss_scale=kind)
    config.precision.update(init=init, growth=growth, min_scale=min_scale)
    numbers = scale_numbers(config)
    state, factors, failures = LossScale.at_start(), [], []
    for is_used in pattern:
        state, failed = adjusted(
            state, numbers, jnp.asarray(is_used), is_dynamic=kind == "dynamic"
        )
        factors.append(float(state.factor(numbers)))
        failures.append(bool(failed))
    return state, factors, failures


def test_a_dynamic_scale_grows_and_is_halved():
    assert moved([True] * 6)[1] == [8, 8, 16, 16, 16, 32]
    state, factors, failures = moved([True, True, False, True, True, True])
    assert factors == [8, 8, 4, 4, 4, 8]
    assert not any(failures)
    assert (state.skipped_updates, state.skipped_in_a_row) == (1, 0)
    # It does not become infinite.
    largest = [2.0**126] + [2.0**127] * 3
    assert moved([True] * 4, init=2.0**126, growth=1)[1] == largest


def test_an_overflow_at_the_smallest_scale_fails_and_so_do_many_in_a_row():
    _, factors, failures = moved([False] * 4, init=5.0, min_scale=2.0)
    assert factors == [2.5, 2, 2, 2]
    assert failures == [False, False, True, True]
    # A static scale never moves.
    pattern = [False] * 19 + [True] + [False] * 20
    state, factors, failures = moved(pattern, kind="static", init=4.0)
    assert set(factors) == {4.0}
    assert failures == [False] * 39 + [True]
    assert (state.skipped_updates, state.skipped_in_a_row) == (39, 20)


def test_a_skipped_update_counts_and_leaves_all_else_as_it_was():
    fields = {**TWICE, "precision__init": 256.0, "precision__growth": 2000}
    compiled = functions_of(mesh__data=2, log_every=3, **fields)
    state, _ = compiled.step_on_batch(compiled.init(compiled.init_key), batch_of())
    before = jax.device_get(state)
    batch = batch_of(8)
    batch["y"][5] = 60000.0  # of one device, of two
    state, report = compiled.step_on_batch(state, batch)
    after = jax.device_get(state)
    assert float(report.loss_scale.loss_scale) == 256
    scale = LossScale(*map(np.float32, (128, 0, 1, 1)))
    expected = before.replace(update=np.int32(2), loss_scale=scale)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    # The next one trains on, and ends the window.
    state, report = compiled.step_on_batch(state, batch_of(16))
    assert int(report.window.count.sum()) == 16
    assert (np.asarray(state.params["first"]) != before.params["first"]).any()


@dataclass(frozen=True)
class Faint(Regression):
    """Its gradients are below the smallest number of float16."""

    def loss(self, variables, batch, key):
        losses, *rest = super().loss(variables, batch, key)
        return losses * 2.0**-34, *rest


def test_a_scale_keeps_what_float16_rounds_to_zero():
    def step_of(**fields):
        fields |= {"precision__params": "float16", "optim__name": "sgd"}
        compiled = functions_of(Faint(), optim__lr=0.01 * 2.0**34, **fields)
        state = compiled.init(compiled.init_key)
        before = np.asarray(state.params["second"], np.float32)
        state, _ = compiled.step_on_batch(state, batch_of())
        return np.asarray(state.params["second"], np.float32) - before

    assert (step_of() == 0).all()
    assert 0.01 < np.abs(step_of(precision__loss_scale="dynamic")).max() < 1


def test_parameters_are_stored_as_they_are_asked_for():
    compiled = functions_of(precision__params="bfloat16")
    state = compiled.init(compiled.init_key)
    state, _ = compiled.step_on_batch(state, batch_of())
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    others = jax.tree.leaves((state.model_state, state.opt_state))
    assert "bfloat16" not in {x.dtype.name for x in others}


def test_what_is_not_finite_is_skipped_and_counted(tmp_path):
    fields = {"precision__loss_scale": "dynamic", "precision__init": 8.0}
    summary = run(tmp_path, nan_at_fresh=1, log_every=1, **fields)
    assert (summary["updates"], summary["skipped_updates"]) == (12, 1)
    assert summary["final"]["loss"] < 100
    rows = rows_of(tmp_path, "train")
    assert [row["skipped_updates"] for row in rows] == [0] + [1] * 11
    assert [row["loss_scale"] for row in rows] == [8, 8] + [4] * 10
    assert [row["loss"] is None for row in rows] == [False, True] + [False] * 10


@dataclass(frozen=True)
class Overflows(Regression):
    """Its batch statistics overflow, and its gradient does not."""

    def loss(self, variables, batch, key):
        losses, model_state, metrics = super().loss(variables, batch, key)
        return losses, jax.tree.map(lambda x: x + jnp.inf, model_state), metrics


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    message = "the state after update 1 is not finite; use another"
    with pytest.raises(NonFiniteLossError, match=message):
        run(tmp_path, task=Overflows(), updates=1)
    assert [*(tmp_path / "checkpoints").iterdir()] == []


def test_a_run_that_can_only_skip_ends_in_a_sentence(tmp_path):
    fields = {"precision__loss_scale": "dynamic", "precision__init": 4.0}
    with pytest.raises(NonFiniteLossError, match=r"update 3 .* to 1;"):
        run(tmp_path, task=Overflows(), updates=40, eval_every=40, **fields)
    assert not (tmp_path / "summary.json").exists()


def test_a_stopped_run_is_resumed_to_the_bit(tmp_path):
    fields = {**TWICE, **ON_DEVICE, "dispatch__steps": 2, "echo__factor": 2.0}
    whole = run(tmp_path / "whole", **fields)
    run(tmp_path / "parts", updates=5, **fields)
    resumed = run(tmp_path / "parts", **fields)
    for name in ("params_sha256", "skipped_updates", "updates"):
        assert resumed[name] == whole[name], name
    assert whole["final"]["loss"] < 0.9 * rows_of(tmp_path / "whole")[0]["eval_loss"]
    assert whole["skipped_updates"] >= 2
