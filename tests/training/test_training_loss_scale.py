"""Loss scales: what moves them, and what a skipped update leaves as it was."""

import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from slow_cases import slow_but_for
from test_training_step import batch_of, functions_of
from tiny_workload import (
    Regression,
    make_workload,
    rows_of,
    run,
    stop_at,
    tiny_config,
)

from echo_jax.config.check import check_config
from echo_jax.training.finite import OverflowsError
from echo_jax.training.processes.interrupt import Interrupted
from echo_jax.training.trainer import compile_functions
from echo_jax.training.update.loss_scale import (
    MOST_IN_A_ROW,
    LossScale,
    adjust,
    scale_numbers,
)

pytestmark = pytest.mark.usefixtures("compiled_soon")

# A first scale that overflows the gradients of the tiny workload in float16, twice.
TWICE = {
    "precision__params": "float16",
    "precision__loss_scale": "dynamic",
    "precision__init": 2.0**17,
    "precision__growth": 3,
}


def moved(pattern, *, kind="dynamic", init=8.0, growth=2, min_scale=1.0):
    """The scales after updates that are used (True) or skipped, and who failed."""
    config = tiny_config(precision__loss_scale=kind)
    config.precision.update(init=init, growth=growth, min_scale=min_scale)
    numbers = scale_numbers(config)
    state, factors, failures = LossScale.at_start(), [], []
    for is_used in pattern:
        state, failed = adjust(
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


def test_a_dynamic_scale_moves_as_that_of_flax():
    pattern = np.random.default_rng(0).random(60) < 0.8
    reference = DynamicScale(growth_interval=2, scale=jnp.float32(2.0**20))
    expected = []
    for is_used in pattern:
        value = jnp.float32(1.0 if is_used else np.inf)
        reference, *_ = reference.value_and_grad(lambda x, y=value: x * y)(1.0)
        expected.append(float(reference.scale))
    assert moved(pattern, init=2.0**20)[1] == expected


def test_an_overflow_at_the_smallest_scale_fails():
    _, factors, failures = moved([False] * 4, init=5.0, min_scale=2.0)
    assert factors == [2.5, 2, 2, 2]
    assert failures == [False, False, True, True]


def test_many_in_a_row_fail_and_a_static_scale_never_moves():
    pattern = [False] * 19 + [True] + [False] * 20
    state, factors, failures = moved(pattern, kind="static", init=4.0)
    assert set(factors) == {4.0}
    assert failures == [False] * 39 + [True]
    assert (state.skipped_updates, state.skipped_in_a_row) == (39, MOST_IN_A_ROW)


def test_a_scale_does_not_become_infinite():
    assert moved([True] * 4, init=2.0**126, growth=1)[1] == [2.0**126] + [2.0**127] * 3


@pytest.mark.parametrize("data", [1, 8])
def test_a_skipped_update_counts_and_leaves_all_else_as_it_was(data):
    fields = {**TWICE, "precision__init": 256.0, "precision__growth": 2000}
    compiled = functions_of(mesh__data=data, log_every=3, **fields)
    state, _ = compiled.step_on_batch(compiled.init(compiled.init_key), batch_of())
    before = jax.device_get(state)
    batch = batch_of(8)
    batch["y"][5] = 60000.0  # of one device, of eight
    state, report = compiled.step_on_batch(state, batch)
    after = jax.device_get(state)
    assert float(report.loss_scale.factor) == 256
    expected = before.replace(
        update=np.int32(2),
        loss_scale=before.loss_scale.replace(
            changed=np.float32(128),
            finite_in_a_row=np.int32(0),
            skipped_in_a_row=np.int32(1),
            skipped_updates=np.int32(1),
        ),
    )
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    assert after.first_bad_update == 0
    # The next one trains on, and ends the window.
    state, report = compiled.step_on_batch(state, batch_of(16))
    assert int(report.window.count.sum()) == 16
    assert (np.asarray(state.params["first"]) != before.params["first"]).any()


@pytest.mark.optimized
def test_a_power_of_two_changes_no_bit(tmp_path):
    plain = run(tmp_path / "plain", optim__name="sgd")
    scaled = run(
        tmp_path / "scaled",
        optim__name="sgd",
        precision__loss_scale="static",
        precision__init=1024.0,
    )
    assert scaled["params_sha256"] == plain["params_sha256"]
    assert scaled["skipped_updates"] == plain["skipped_updates"] == 0
    rows = [[row.get("loss_scale") for row in rows_of(tmp_path / name)
             if row["kind"] == "train"] for name in ("plain", "scaled")]  # fmt: skip
    assert rows == [[None] * 3, [1024.0] * 3]


def test_a_scale_keeps_what_float16_rounds_to_zero():
    def step_of(**fields):
        config = tiny_config(
            precision__params="float16",
            optim__name="sgd",
            optim__lr=0.01 * 2.0**34,
            **fields,
        )
        workload = make_workload(config, task=Faint())
        compiled = compile_functions(config, workload)
        state = compiled.init(compiled.init_key)
        before = np.asarray(state.params["second"], np.float32)
        state, _ = compiled.step_on_batch(state, batch_of())
        return np.asarray(state.params["second"], np.float32) - before

    assert (step_of() == 0).all()
    kept = step_of(precision__loss_scale="dynamic")
    assert 0.01 < np.abs(kept).max() < 1


@dataclass(frozen=True)
class Faint(Regression):
    """Its gradients are below the smallest number of float16."""

    def loss(self, variables, batch, key):
        losses, *rest = super().loss(variables, batch, key)
        return losses * 2.0**-34, *rest


def test_what_is_not_finite_is_skipped_and_counted(tmp_path):
    """A run whose label is a NaN, once: without a scale that ends it."""
    summary = run(
        tmp_path,
        nan_at_fresh=1,
        log_every=1,
        precision__loss_scale="dynamic",
        precision__init=8.0,
    )
    assert (summary["updates"], summary["skipped_updates"]) == (12, 1)
    assert summary["final"]["loss"] < 100
    assert json.loads((tmp_path / "summary.json").read_text())["skipped"] == 0
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    assert [row["skipped_updates"] for row in rows] == [0] + [1] * 11
    assert [row["loss_scale"] for row in rows] == [8, 8] + [4] * 10
    assert [row["loss"] is None for row in rows] == [False, True] + [False] * 10


@dataclass(frozen=True)
class Overflows(Regression):
    """Its loss, or its batch statistics, overflow, and its gradient does not."""

    where: str = "loss"

    def loss(self, variables, batch, key):
        losses, model_state, metrics = super().loss(variables, batch, key)
        if self.where == "loss":
            return losses + jnp.inf, model_state, metrics
        return losses, jax.tree.map(lambda x: x + jnp.inf, model_state), metrics


@pytest.mark.parametrize("where", ["loss", "statistics"])
def test_it_is_not_the_gradient_alone_that_is_looked_at(where):
    config = tiny_config(precision__loss_scale="dynamic")
    workload = make_workload(config, task=Overflows(where=where))
    compiled = compile_functions(config, workload)
    state, report = compiled.step_on_batch(compiled.init(compiled.init_key), batch_of())
    assert int(report.loss_scale.skipped_updates) == 1
    assert compiled.is_finite(state)


@dataclass(frozen=True)
class Hopeless(Regression):
    """Its loss becomes infinite, whatever it is multiplied by."""

    def loss(self, variables, batch, key):
        losses, *rest = super().loss(variables, batch, key)
        return losses / 0.0, *rest


@pytest.mark.parametrize(
    ("fields", "update", "factor"),
    [
        ({"loss_scale": "dynamic", "init": 4.0}, 3, "1"),
        ({"loss_scale": "static"}, 20, "32768"),
    ],
)
def test_a_run_that_can_only_skip_ends_in_a_sentence(tmp_path, fields, update, factor):
    fields = {f"precision__{name}": value for name, value in fields.items()}
    with pytest.raises(OverflowsError, match=f"update {update} .* down to {factor};"):
        run(tmp_path, task=Hopeless(), updates=40, eval_every=40, **fields)
    assert not (tmp_path / "summary.json").exists()


MODES = {
    "masters": {"precision__loss_scale": "dynamic", "nan_at_fresh": 3},
    "float16": TWICE,
    "float16 on the device": {
        **TWICE, "echo__where": "device", "echo__after": "decode",
    },
    "bfloat16": {"precision__params": "bfloat16"},
    "static": {"precision__params": "bfloat16", "precision__loss_scale": "static"},
}  # fmt: skip


@pytest.mark.parametrize(
    "mode", slow_but_for(["masters", "float16 on the device"], MODES)
)
def test_a_stopped_run_is_resumed_to_the_bit(tmp_path, mode):
    fields = {**MODES[mode], "echo__factor": 2.0}
    whole = run(tmp_path / "whole", **fields)
    if "echo__where" in fields:
        run(tmp_path / "parts", updates=1, **fields)
    else:
        with pytest.raises(Interrupted):
            run(tmp_path / "parts", on_batch=stop_at(5), **fields)
    resumed = run(tmp_path / "parts", **fields)
    for name in ("params_sha256", "skipped_updates", "updates"):
        assert resumed[name] == whole[name], name
    assert whole["final"]["loss"] < 0.9 * rows_of(tmp_path / "whole")[0]["eval_loss"]
    skipped = {"masters": 1, "float16": 2, "float16 on the device": 2}
    assert whole["skipped_updates"] >= skipped.get(mode, 0)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("dispatch", ["scan", "unroll"])
def test_a_group_skips_as_the_loop_does(tmp_path, dispatch):
    loop = run(tmp_path / "loop", **TWICE)
    group = run(
        tmp_path / "group", dispatch__mode=dispatch, dispatch__steps=4, **TWICE
    )  # fmt: skip
    assert group["skipped_updates"] == loop["skipped_updates"] > 0
    assert group["final"]["loss"] == pytest.approx(loop["final"]["loss"], rel=1e-2)
    scales = [
        [
            row["loss_scale"]
            for row in rows_of(tmp_path / name)
            if row["kind"] == "train"
        ]
        for name in ("loop", "group")
    ]
    assert scales[0] == scales[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "fp16"}, r"compute='fp16' must be one of float32, bfloat16, fl"),
        ({"params": "int8"}, r"precision\.params='int8' must be one of float32"),
        ({"loss_scale": "auto"}, r"loss_scale='auto' must be one of none, static, dy"),
        ({"init": 8.0}, r"init=8\.0 needs .*loss_scale=static or dynamic; set"),
        ({"growth": 5, "loss_scale": "static"}, r"growth=5 needs .*loss_scale=dynamic"),
        ({"min_scale": 2.0}, r"min_scale=2\.0 needs --config\.precision\.loss_scale"),
        ({"loss_scale": "dynamic", "init": 0.0}, r"init=0\.0 must be above 0; set"),
        ({"loss_scale": "dynamic", "growth": 0}, r"growth=0 must be at least 1"),
        ({"loss_scale": "dynamic", "init": 0.5}, r"must be at least .*min_scale=1\.0"),
    ],
)
def test_an_impossible_precision_is_refused(fields, message):
    config = tiny_config()
    config.precision.update(fields)
    with pytest.raises(ValueError, match=message):
        check_config(config)
