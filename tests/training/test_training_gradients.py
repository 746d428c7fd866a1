"""The gradient of a batch, split by XLA or by hand; its noise; and batch norm."""

import math
from dataclasses import dataclass

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import (
    NUM_EXAMPLES,
    NUM_FEATURES,
    NUM_PARAMS,
    Regression,
    compiled_update,
    example,
    make_workload,
    rows_of,
    run,
    tiny_config,
)

from echo_jax.config import RunSpec
from echo_jax.models import GhostBatchNorm, normalise
from echo_jax.training.arrays import make_mesh
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.update import SplitGradient, gradient_noise_scale, whole_gradient
from echo_jax.training.xla import collectives
from echo_jax.workloads import Task

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


@dataclass(frozen=True)
class Plain(Regression):
    """Nothing random, and nothing of the batch but its losses."""

    def loss(self, variables, batch, key):
        hidden = self._hidden(variables["params"], batch["x"])
        losses = self._error(variables["params"], hidden, batch["y"])
        others = {"batch_stats": variables["batch_stats"]}
        return losses, others, {"large": ((losses > 1).sum(), losses.size)}


def batch_of(size, seed=0):
    x = np.random.default_rng(seed).normal(size=(size, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1) - x[:, 0]}


compute = jax.jit(
    lambda gradient, task, *args: gradient(task, *args), static_argnums=(0, 1)
)


def computed_by(gradient, task, batch=None, variables=None, factor=None):
    variables = variables or task.init(jax.random.key(1))
    batch = batch_of(16) if batch is None else batch
    return compute(gradient, task, variables, batch, jax.random.key(2), factor)


def norm_of(task, batch, rows, variables=None):
    part = {name: x[rows] for name, x in batch.items()}
    found = computed_by(whole_gradient, task, part, variables).gradient
    return math.sqrt(sum((x**2).sum() for x in found.values()))


def assert_close(found, expected, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected
    )


@pytest.mark.parametrize(("devices", "micro"), [(1, 1), (4, 2)])
def test_it_is_the_gradient_of_the_whole_batch_with_the_noise_of_its_parts(
    devices, micro
):
    expected = computed_by(whole_gradient, Plain())
    gradient = SplitGradient(make_mesh(devices, 1, 16), micro)
    found = computed_by(gradient, Plain())
    assert_close(found._replace(noise=None), expected, rtol=1e-5, atol=1e-6)
    # Counts are exact.
    assert int(found.metrics["large"][0]) == expected.metrics["large"][0]
    assert found.metrics["large"][1] == 16
    # A power of two as the scale of the loss changes no bit.
    scaled = computed_by(gradient, Plain(), factor=jnp.float32(1024))
    jax.tree.map(np.testing.assert_array_equal, scaled, found)
    if devices * micro == 1:
        assert found.noise is None
        return
    parts = np.arange(16).reshape(devices * micro, -1)
    norms = [norm_of(Plain(), batch_of(16), rows) for rows in parts]
    whole = norm_of(Plain(), batch_of(16), slice(None))
    noise = gradient_noise_scale(norms, whole, batch_size=16)
    assert found.noise == pytest.approx(noise, rel=1e-4)


def test_devices_meet_once_in_an_update():
    config = tiny_config(
        mesh__data=2, batch__accumulation_steps=4, precision__reduce="float32"
    )
    ((kind, numbers),) = collectives(compiled_update(config, task=Plain()).as_text())
    assert kind == "all-reduce" and set(numbers) == {"f32"}
    # The statistics, the metric's two sums, and in eight buckets the losses, and how
    # many examples are which repeat.
    assert NUM_PARAMS <= numbers["f32"] <= NUM_PARAMS + 32


def test_a_row_has_the_norm_and_the_noise_of_the_gradients_since_the_last_one():
    """The norm before gradients are clipped; the noise is a ratio of averages."""
    options = {"log_every": 2, "optim__clip_norm": 1e-3, "optim__name": "sgd"}
    config = tiny_config(**options, optim__lr=1.0, batch__accumulation_steps=2)
    compiled = CompiledFunctions(
        RunSpec.of(config), make_workload(config, task=Plain())
    )
    state, squares, noises = compiled.init(compiled.init_key), [], []
    for number in range(4):
        batch = batch_of(8, seed=number)
        variables = {"params": state.params, **state.model_state}
        one, other, whole = (
            norm_of(Plain(), batch, rows, variables)
            for rows in (slice(4), slice(4, 8), slice(8))
        )
        squares.append(whole**2)
        noises.append(gradient_noise_scale([one, other], whole, batch_size=8))
        batch |= {"repeat": np.zeros(8, np.int32)}
        state, report = compiled.step_on_batch(state, batch)
    row = report.row()
    assert row["gradient_norm"] == pytest.approx(np.mean(squares[2:]) ** 0.5, rel=1e-4)
    square, variance = (sum(each) for each in zip(*noises[2:], strict=True))
    assert row["noise_scale"] == pytest.approx(variance / square, rel=1e-3)


def test_equal_gradients_have_no_noise_and_a_square_below_zero_no_noise_scale():
    found = gradient_noise_scale([2.0, 2.0, 2.0], 2.0, batch_size=12)
    assert (found.squared_norm, found.variance, found.examples) == (4.0, 0.0, 0.0)
    found = gradient_noise_scale([3.0, 3.0], 1.0, batch_size=2)
    # 2 * 1 - 1 * 9 is below zero.
    assert found.squared_norm == -7.0 and math.isnan(found.examples)
    with pytest.raises(ValueError, match="has 3 norms, of a batch of"):
        gradient_noise_scale([1.0] * 3, 1.0, batch_size=8)


def test_gradients_are_summed_in_the_type_that_is_asked_for():
    gradient = SplitGradient(make_mesh(4, 1, 16), reduce="bfloat16")
    args = Plain().init(jax.random.key(1)), batch_of(16), jax.random.key(2), None
    program = compute.lower(gradient, Plain(), *args).as_text()
    # As it is handed to XLA: for CPUs XLA sums in float32, whatever the type.
    assert "tensor<4x16xbf16>" in program
    found = computed_by(gradient, Plain()).gradient
    assert_close(found, computed_by(whole_gradient, Plain()).gradient, atol=0.05)
    for x in found.values():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_state_that_is_no_batch_norms_is_averaged_once_an_update():
    task = Regression(dropout=0.0)
    gradient = SplitGradient(make_mesh(4, 1, 16), 2, over_devices=False)
    found, whole = (computed_by(each, task) for each in (gradient, whole_gradient))
    assert_close(found.model_state, whole.model_state, rtol=1e-5)


def test_what_is_random_differs_from_device_to_device_and_part_to_part():
    task = Regression(dropout=0.5)
    batch = {"x": np.ones((16, 4), np.float32), "y": np.zeros(16, np.float32)}
    gradient = SplitGradient(make_mesh(4, 1, 16), micro=2)
    found = computed_by(gradient, task, batch)
    shares = np.asarray(found.losses).reshape(8, 2)
    assert len(np.unique(shares, axis=0)) == 8
    kept, count = found.metrics["kept"]
    assert count == 16 * task.width and 0 < kept < count


class Network(nn.Module):
    """Normalises its input, which depends on no parameter."""

    norm: str

    @nn.compact
    def __call__(self, x, train):
        if self.norm == "flax":
            x = normalise(x, "batch", jnp.float32, train=train, name="norm")
        else:
            size = 2 if self.norm == "ghost" else None
            x = GhostBatchNorm(virtual_batch=size, name="norm")(x, train=train)
        return nn.Dense(1)(x)[:, 0]


@dataclass(frozen=True)
class Normed(Task):
    norm: str = "flax"

    def init(self, key):
        x = jnp.zeros((2, NUM_FEATURES))
        return dict(Network(self.norm).init(key, x, train=False))

    def loss(self, variables, batch, key):
        y, new = Network(self.norm).apply(
            variables, batch["x"], train=True, mutable=["batch_stats"]
        )
        return (y - batch["y"]) ** 2, dict(new), {}

    def evaluate(self, variables, batch):
        # What it evaluates with, instead of how good it is.
        stats, mask = variables["batch_stats"]["norm"], batch["mask"]
        return {
            f"{name}_{i}": (stats[name][i] * mask.sum(), mask.sum())
            for name in ("mean", "var")
            for i in range(NUM_FEATURES)
        } | {"loss": (mask.sum(), mask.sum())}


def far_apart():
    """A batch whose devices and parts have means of their own."""
    x = np.random.default_rng(0).normal(3, 2, (16, NUM_FEATURES)).astype(np.float32)
    x += 5 * np.arange(16, dtype=np.float32)[:, None]
    return {"x": x, "y": x[:, 0]}


def stepped(config, task):
    """The batch statistics before and after the second update on `far_apart`."""
    compiled = CompiledFunctions(RunSpec.of(config), make_workload(config, task=task))
    state, found = compiled.init(compiled.init_key), []
    batch = far_apart() | {"repeat": np.zeros(16, np.int32)}
    for _ in range(2):
        state, _ = compiled.step_on_batch(state, batch)
        stats = jax.device_get(compiled.model(state).model_state)["batch_stats"]
        found.append(stats["norm"])
    return found


PARTS = {"batch__accumulation_steps": 2}
OWN = {"batch__statistics": "device"}


@pytest.mark.parametrize(
    ("norm", "keeps", "split"),
    [
        ("flax", "last", {}),
        ("flax", "moving", {"precision__reduce": "float32"}),
        ("whole", "last", {**PARTS, **OWN}),
        ("ghost", "moving", OWN),
        ("ghost", "moving", PARTS),
    ],
)
def test_statistics_are_the_mean_and_the_variance_of_the_whole_batch(
    norm, keeps, split
):
    config = tiny_config(batch_size=16, mesh__data=4, batch__norm=keeps, **split)
    before, stats = stepped(config, Normed(norm))
    momentum = 0.9 if keeps == "moving" else 0.0
    x = far_apart()["x"]
    for name, expected in (("mean", x.mean(axis=0)), ("var", x.var(axis=0))):
        of_batch = (stats[name] - momentum * before[name]) / (1 - momentum)
        np.testing.assert_allclose(of_batch, expected, rtol=1e-3)


def test_a_model_normalises_over_all_devices_or_over_its_own():
    mesh, task, batch = make_mesh(4, 1, 16), Normed(), far_apart()
    whole = computed_by(whole_gradient, task, batch).losses
    parts = [{name: x[i : i + 4] for name, x in batch.items()} for i in (0, 4, 8, 12)]
    own = [computed_by(whole_gradient, task, part).losses for part in parts]
    for over_devices, expected in ((True, whole), (False, np.concatenate(own))):
        gradient = SplitGradient(mesh, over_devices=over_devices)
        found = computed_by(gradient, task, batch).losses
        np.testing.assert_allclose(found, expected, rtol=1e-3)


SLOW_LOCAL = pytest.param("local", marks=pytest.mark.slow)


@pytest.mark.parametrize("where", ["host", SLOW_LOCAL])
def test_recompute_evaluates_with_the_statistics_of_fresh_batches(tmp_path, where):
    options = {"batch__norm_batches": 3, "mesh__data": 2} | {
        "host": {"echo__factor": 2.0},
        # A mean of replicas has statistics of its own.
        "local": {"local__sync_schedule": "every", "local__sync_every": 5},
    }[where]
    task = Normed()
    one = run(tmp_path / "a", task=task, batch__norm="recompute", **options)
    order = grain.MapDataset.range(NUM_EXAMPLES).shuffle(seed=0).repeat()
    x = np.stack([example(order[i])["x"] for i in range(3 * 8)])
    rows = rows_of(tmp_path / "a", "eval")
    assert len(rows) == 3
    for name, expected in (("mean", x.mean(axis=0)), ("var", x.var(axis=0))):
        for row in rows:
            found = [row[f"eval_{name}_{i}"] for i in range(NUM_FEATURES)]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # Nothing else is changed by it, neither the data nor what is trained.
    other = run(tmp_path / "b", task=task, **options)
    for name in ("params_sha256", "fresh"):
        assert one[name] == other[name]


def test_a_model_without_batch_norm_is_refused_before_anything_is_written(tmp_path):
    @dataclass(frozen=True)
    class Without(Normed):
        def init(self, key):
            return {"params": super().init(key)["params"]}

    with pytest.raises(ValueError, match=r"batch\.norm='last' needs a model with"):
        run(tmp_path / "run", task=Without(), batch__norm="last")
    assert not (tmp_path / "run").exists()
