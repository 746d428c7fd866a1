"""The gradient of a batch, split by hand: what is computed, and what is sent."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import slow_but_for
from tiny_workload import (
    Regression,
    compiled_update,
    make_workload,
    rows_of,
    run,
    tiny_config,
)

from echo_jax.config.check import check_config
from echo_jax.models.batch_norm import (
    GhostBatchNorm,
    statistics_axes,
    statistics_over,
)
from echo_jax.models.resnet import norm_layer
from echo_jax.training.feeds.loader import unechoed
from echo_jax.training.processes.sharding import make_mesh
from echo_jax.training.trainer import compile_functions
from echo_jax.training.update.gradients import (
    SplitGradient,
    gradient_of,
    whole_gradient,
)
from echo_jax.training.update.noise import NoiseScale, gradient_noise_scale
from echo_jax.training.window import GradientWindow
from echo_jax.training.xla.sent import collectives

pytestmark = pytest.mark.usefixtures("compiled_soon")


@dataclass(frozen=True)
class Plain(Regression):
    """Nothing random, and nothing of the batch but its losses."""

    def loss(self, variables, batch, key):
        hidden = self._hidden(variables["params"], batch["x"])
        losses = self._error(variables["params"], hidden, batch["y"])
        others = {"batch_stats": variables["batch_stats"]}
        return losses, others, {"large": ((losses > 1).sum(), losses.size)}


def batch_of(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1) - x[:, 0]}


def computed_by(gradient, task, size=16, factor=None):
    compute = jax.jit(gradient, static_argnums=0)
    return compute(
        task, task.init(jax.random.key(1)), batch_of(size), jax.random.key(2), factor
    )


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("micro", [1, 4])
def test_it_is_the_gradient_of_the_whole_batch(devices, micro):
    expected = computed_by(whole_gradient, Plain())
    mesh = make_mesh(devices, 1, 16)
    found = computed_by(SplitGradient(mesh, micro), Plain())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found._replace(noise=None),
        expected,
    )
    # Counts are exact, and the losses are those of the examples in their order.
    assert found.metrics["large"][0] == expected.metrics["large"][0]
    assert found.metrics["large"][1] == 16
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("micro", [1, 4])
def test_a_factor_of_the_loss_is_taken_out_again(micro):
    gradient = SplitGradient(make_mesh(4, 1, 16), micro)
    expected = computed_by(gradient, Plain())
    found = computed_by(gradient, Plain(), factor=jnp.float32(1024))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected
    )


@pytest.mark.parametrize("micro", [1, 4])
def test_devices_meet_once_in_an_update(micro):
    config = tiny_config(mesh__data=2, batch__micro=micro, precision__reduce="float32")
    ((kind, numbers),) = collectives(compiled_update(config, task=Plain()).as_text())
    assert kind == "all-reduce" and set(numbers) == {"f32"}
    params = jax.eval_shape(Plain().init, jax.random.key(0))["params"]
    num_params = sum(x.size for x in jax.tree.leaves(params))
    # The statistics, the metric's two sums, and in eight buckets the losses, and how
    # many examples are which repeat.
    assert num_params <= numbers["f32"] <= num_params + 32


@pytest.mark.parametrize(
    ("devices", "micro"), slow_but_for([(4, 2)], [(4, 1), (1, 4), (4, 2)])
)
def test_the_noise_is_that_of_the_parts_gradients(devices, micro):
    found = computed_by(SplitGradient(make_mesh(devices, 1, 16), micro), Plain())
    variables, batch = Plain().init(jax.random.key(1)), batch_of(16)
    parts = devices * micro

    def norm(rows):
        part = {name: x[rows] for name, x in batch.items()}
        one = whole_gradient(Plain(), variables, part, jax.random.key(2), None)
        return float(optax.tree.norm(one.gradient))

    norms = [norm(rows) for rows in np.arange(16).reshape(parts, -1)]
    expected = gradient_noise_scale(norms, norm(slice(None)), batch_size=16)
    assert found.noise == pytest.approx(expected, rel=1e-4)
    assert computed_by(SplitGradient(make_mesh(1, 1, 16)), Plain()).noise is None


@pytest.mark.slow
def test_a_row_has_the_norm_of_the_gradients_since_the_last_one(tmp_path):
    options = {"updates": 4, "log_every": 2, "mesh__data": 2, "optim__clip_norm": 1e-3}
    options |= {"optim__name": "sgd", "optim__lr": 1.0, "optim__warmup_updates": 0}
    options |= {"optim__schedule": "constant"}
    run(tmp_path / "whole", task=Plain(), **options)
    run(tmp_path / "parts", task=Plain(), batch__micro=2, **options)
    whole, parts = (
        [row for row in rows_of(tmp_path / name) if row["kind"] == "train"]
        for name in ("whole", "parts")
    )
    task = Plain()
    config = tiny_config(**options)
    workload = make_workload(config, task=task)
    compiled = compile_functions(config, workload)
    state, squares = compiled.init(compiled.init_key), []
    batches = iter(workload.train_dataset(unechoed(config)))
    for _ in range(4):
        batch = next(batches)
        items = {name: batch[name] for name in ("x", "y")}
        variables = {"params": state.params, **state.model_state}
        one = whole_gradient(task, variables, items, jax.random.key(0), None)
        squares.append(float(optax.tree.norm(one.gradient)) ** 2)
        state, _ = compiled.step_on_batch(state, batch)
    for row, part, pair in zip(whole, parts, (squares[:2], squares[2:]), strict=True):
        assert row["gradient_norm"] == pytest.approx(np.mean(pair) ** 0.5, rel=1e-4)
        assert part["gradient_norm"] == pytest.approx(row["gradient_norm"], rel=1e-4)
        assert "noise_scale" not in row
    assert any("noise_scale" in part for part in parts)


def test_the_noise_scale_of_a_row_is_the_ratio_of_the_averages():
    window = GradientWindow.empty()
    assert math.isnan(window.row()["gradient_norm"])
    for square, noise in ((9.0, NoiseScale(4.0, 20.0)), (16.0, NoiseScale(-2.0, 10.0))):
        window = window.add(square, noise)
    expected = {"gradient_norm": 12.5**0.5, "noise_scale": 15.0}
    assert jax.device_get(window).row() == pytest.approx(expected)
    window = window.add(1.0, NoiseScale(-3.0, 5.0))
    assert set(window.row()) == {"gradient_norm"}


@pytest.mark.parametrize("reduce", ["bfloat16", "float16"])
def test_gradients_are_summed_in_the_type_that_is_asked_for(reduce):
    mesh = make_mesh(4, 1, 16)
    gradient = SplitGradient(mesh, reduce=reduce)
    compute = jax.jit(gradient, static_argnums=0)
    variables = Plain().init(jax.random.key(1))
    program = compute.lower(Plain(), variables, batch_of(16), jax.random.key(2), None)
    # As it is handed to XLA: for CPUs XLA sums in float32, whatever the type.
    assert f"tensor<4x16x{ {'bfloat16': 'bf16', 'float16': 'f16'}[reduce] }>" in (
        program.as_text()
    )
    found = computed_by(gradient, Plain()).gradient
    expected = computed_by(whole_gradient, Plain()).gradient
    kept = jnp.dtype(reduce)
    for name, x in found.items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, x.astype(kept).astype(jnp.float32))
        np.testing.assert_allclose(x, expected[name], atol=0.05)
    assert not np.array_equal(found["first"], expected["first"])


def normed(make, over_devices):
    """Normalises 16 examples on 4 devices; the output, and the running statistics."""
    mesh = make_mesh(4, 1, 16)
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    x = np.random.default_rng(0).normal(2, 3, size=(16, 5)).astype(np.float32)
    variables = make().init(jax.random.key(0), x)

    def share(x):
        with statistics_over(mesh.axis_names if over_devices else ()):
            return make().apply(variables, x, mutable=["batch_stats"])

    whole = make().apply(variables, x, mutable=["batch_stats"])
    split = jax.jit(
        jax.shard_map(
            share,
            mesh=mesh,
            in_specs=spec,
            out_specs=(spec, jax.sharding.PartitionSpec()),
            check_vma=False,
        )
    )
    return whole, split(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: norm_layer("batch", jnp.float32, True, name="norm"),
        lambda: Trained(GhostBatchNorm()),
    ],
    ids=["flax", "ours"],
)
def test_batch_norm_takes_statistics_over_all_devices_where_it_is_told_to(make):
    whole, split = normed(make, over_devices=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        split,
        whole,
    )
    whole, split = normed(make, over_devices=False)
    means = np.asarray(split[0]).reshape(4, 4, 5).mean(axis=1)
    np.testing.assert_allclose(means, 0, atol=1e-5)
    assert not np.allclose(split[0], whole[0], atol=0.1)


class Trained:
    """A norm in training, to be called as flax's."""

    def __init__(self, norm):
        self._norm = norm

    def init(self, key, x):
        return self._norm.init(key, x, train=True)

    def apply(self, variables, x, mutable):
        return self._norm.apply(variables, x, train=True, mutable=mutable)


@dataclass(frozen=True)
class Centred(Plain):
    """Takes the mean of a batch from its features, as batch norm does."""

    def loss(self, variables, batch, key):
        mean = batch["x"].mean(axis=0)
        if statistics_axes():
            mean = jax.lax.pmean(mean, statistics_axes())
        return super().loss(variables, {**batch, "x": batch["x"] - mean[None]}, key)


@pytest.mark.parametrize("over_devices", [False, True])
def test_a_model_learns_whose_statistics_it_takes(over_devices):
    whole = computed_by(whole_gradient, Centred()).losses
    gradient = SplitGradient(make_mesh(4, 1, 16), over_devices=over_devices)
    found = computed_by(gradient, Centred()).losses
    assert np.allclose(found, whole, rtol=1e-4) == over_devices


@pytest.mark.parametrize("micro", [1, 2])
def test_a_state_that_is_no_batch_norms_is_averaged_once_an_update(micro):
    """The running mean of the task moves by a mean of equal shares: of all."""
    task = Regression(dropout=0.0)
    whole = computed_by(whole_gradient, task)
    gradient = SplitGradient(make_mesh(4, 1, 16), micro, over_devices=False)
    found = computed_by(gradient, task)
    np.testing.assert_allclose(
        found.model_state["batch_stats"]["mean"],
        whole.model_state["batch_stats"]["mean"],
        rtol=1e-5,
    )


def test_what_is_random_differs_from_device_to_device_and_part_to_part():
    task = Regression(dropout=0.5)
    batch = {"x": np.ones((16, 4), np.float32), "y": np.zeros(16, np.float32)}
    gradient = SplitGradient(make_mesh(4, 1, 16), micro=2)
    variables = task.init(jax.random.key(1))
    found = jax.jit(gradient, static_argnums=0)(
        task, variables, batch, jax.random.key(2), None
    )
    shares = np.asarray(found.losses).reshape(8, 2)
    assert len(np.unique(shares, axis=0)) == 8
    kept, count = found.metrics["kept"]
    assert count == 16 * task.width and 0 < kept < count


@pytest.mark.parametrize("how", slow_but_for(["scan"], ["loop", "scan"]))
def test_a_run_is_that_of_the_whole_batch(tmp_path, how):
    options = {"mesh__data": 2, "dispatch__mode": how}
    options |= {"dispatch__steps": 2} if how == "scan" else {}
    run(tmp_path / "whole", task=Plain(), **options)
    run(tmp_path / "split", task=Plain(), batch__micro=2, **options)
    for one, other in zip(
        rows_of(tmp_path / "whole"), rows_of(tmp_path / "split"), strict=True
    ):
        assert one["updates"] == other["updates"]
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_run_in_parts_is_resumed_to_the_bit(tmp_path):
    options = {"mesh__data": 2, "batch__micro": 2, "batch__statistics": "device"}
    options |= {"checkpoint_every": 4, "echo__factor": 2.0}
    whole = run(tmp_path / "whole", **options, updates=12)
    run(tmp_path / "stopped", **options, updates=8)
    resumed = run(tmp_path / "stopped", **options, updates=12)
    assert resumed["params_sha256"] == whole["params_sha256"]


def test_nothing_is_split_by_hand_where_nothing_asks_for_it():
    config = tiny_config(mesh__data=2)
    assert gradient_of(config, make_mesh(2, 1, 8)) is whole_gradient


def test_parts_that_do_not_divide_a_share_are_refused():
    config = tiny_config(mesh__data=2, batch__micro=3)
    with pytest.raises(ValueError, match=r"batch.micro=3 does not divide the 4 .*=1"):
        gradient_of(config, make_mesh(2, 1, 8))
    config = tiny_config(mesh__fsdp=2, batch__micro=2)
    with pytest.raises(ValueError, match=r"batch.micro=2 needs whole parameters .*=2"):
        check_config(config)
