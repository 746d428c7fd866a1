"""What batch norm evaluates with: averages, the last batch, or fresh batches."""

from dataclasses import dataclass

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow_but_for
from tiny_workload import (
    NUM_EXAMPLES,
    NUM_FEATURES,
    example,
    make_workload,
    rows_of,
    run,
    tiny_config,
)

from echo_jax.config.check import check_config
from echo_jax.models.batch_norm import GhostBatchNorm
from echo_jax.models.resnet import norm_layer
from echo_jax.training.evaluation import evaluate_split
from echo_jax.training.feeds.feed import HostBatching, HostInput
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.training.trainer import compile_functions
from echo_jax.training.update.gradients import gradient_of, whole_gradient
from echo_jax.workloads.base import Task

pytestmark = pytest.mark.usefixtures("compiled_soon")


class Network(nn.Module):
    """Normalises its input, which depends on no parameter."""

    norm: str

    @nn.compact
    def __call__(self, x, train):
        if self.norm == "flax":
            x = norm_layer("batch", jnp.float32, train, name="norm")(x)
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


def statistics_of(x):
    """In the order of `Normed.evaluate`."""
    return np.concatenate([x.mean(axis=0), x.var(axis=0)])


def fresh_items(count, seed=0):
    """The first fresh items of `make_workload`."""
    order = grain.MapDataset.range(NUM_EXAMPLES).shuffle(seed=seed).repeat()
    return np.stack([example(order[i])["x"] for i in range(count)])


def evaluated(row):
    names = [f"{name}_{i}" for name in ("mean", "var") for i in range(NUM_FEATURES)]
    return np.array([row[f"eval_{name}"] for name in names])


NORMS = ["flax", "whole", "ghost"]
SPLITS = {
    "one device": {},
    "by xla": {"mesh__data": 4},
    "by hand": {"mesh__data": 4, "precision__reduce": "float32"},
    "own statistics": {"mesh__data": 4, "batch__statistics": "device"},
    "parts": {"mesh__data": 4, "batch__micro": 2, "batch__statistics": "device"},
    "parts of all": {"mesh__data": 4, "batch__micro": 2},
}


def far_apart():
    """A batch whose devices and parts have means of their own."""
    x = np.random.default_rng(0).normal(3, 2, (16, NUM_FEATURES)).astype(np.float32)
    x += 5 * np.arange(16, dtype=np.float32)[:, None]
    return {"x": x, "y": x[:, 0]}


# Every norm, every split and both that are kept; the other combinations are slow.
SOON = {
    ("flax", "moving", "one device"),
    ("flax", "last", "by xla"),
    ("flax", "moving", "by hand"),
    ("whole", "last", "parts"),
    ("whole", "moving", "by xla"),
    ("whole", "moving", "parts of all"),
    ("ghost", "moving", "by xla"),
    ("ghost", "moving", "own statistics"),
    ("ghost", "moving", "parts"),
}
COMBINATIONS = [
    (norm, *kept)
    for norm in NORMS
    for kept in (
        ("last", "by xla"),
        ("last", "parts"),
        *(("moving", split) for split in SPLITS),
    )
]


@pytest.mark.parametrize(
    ("norm", "keeps", "split"),
    slow_but_for(SOON, COMBINATIONS),
)
def test_statistics_are_the_mean_and_the_variance_of_the_whole_batch(
    norm, keeps, split
):
    config = tiny_config(batch_size=16, batch__norm=keeps, **SPLITS[split])
    compiled = compile_functions(config, make_workload(config, task=Normed(norm)))
    gradient, task = gradient_of(config, compiled.mesh), Normed(norm)
    variables, batch = task.init(jax.random.key(0)), far_apart()
    found = jax.jit(gradient, static_argnums=0)(
        task, variables, batch, jax.random.key(1), None
    )
    before, stats = (
        tree["batch_stats"]["norm"] for tree in (variables, found.model_state)
    )
    momentum = 0.9 if keeps == "moving" else 0.0
    for name, expected in (
        ("mean", batch["x"].mean(axis=0)),
        ("var", batch["x"].var(axis=0)),
    ):
        of_batch = (stats[name] - momentum * before[name]) / (1 - momentum)
        np.testing.assert_allclose(of_batch, expected, rtol=1e-3)


@pytest.mark.parametrize("momentum", [0.5, 1.0])
def test_any_momentum_counts_once_an_update(momentum):
    @dataclass(frozen=True)
    class Other(Normed):
        def loss(self, variables, batch, key):
            norm = nn.BatchNorm(False, momentum=momentum)
            stats = {"batch_stats": variables["batch_stats"]["norm"]}
            params = {"params": variables["params"]["norm"]}
            y, new = norm.apply(params | stats, batch["x"], mutable=["batch_stats"])
            return y[:, 0] ** 2, {"batch_stats": {"norm": new["batch_stats"]}}, {}

    config = tiny_config(batch_size=16, **SPLITS["parts"])
    mesh = compile_functions(config, make_workload(config, task=Other())).mesh
    variables, batch = Other().init(jax.random.key(0)), far_apart()
    variables["batch_stats"]["norm"]["mean"] = jnp.full(NUM_FEATURES, 7.0)
    one, split = (
        jax.jit(gradient, static_argnums=0)(
            Other(), variables, batch, jax.random.key(1), None
        ).model_state["batch_stats"]["norm"]
        for gradient in (whole_gradient, gradient_of(config, mesh))
    )
    for name in ("mean", "var"):
        np.testing.assert_allclose(split[name], one[name], rtol=1e-4)


@pytest.mark.parametrize("norm", slow_but_for(["flax"], NORMS))
def test_replicas_have_the_variance_of_all_their_examples(norm):
    options = {"mesh__data": 4, "local__schedule": "every", "local__every": 3}
    config = tiny_config(batch_size=16, optim__lr=0.0, **options)
    compiled = compile_functions(config, make_workload(config, task=Normed(norm)))
    state, batch = compiled.init(compiled.init_key), far_apart()
    batching = HostBatching(compiled.mesh)
    inputs = HostInput.of([batch | {"repeat": np.zeros(16, np.int32)}])
    # Until nothing is left of the averages before them.
    for update in range(120):
        program = compiled.program(batching, meets=update % 3 == 2)
        state, _ = program(state, (), batching.send(inputs), compiled.run)
    stats = compiled.model(state).model_state["batch_stats"]["norm"]
    np.testing.assert_allclose(stats["mean"], batch["x"].mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(stats["var"], batch["x"].var(axis=0), rtol=1e-3)


@pytest.mark.parametrize(
    ("norm", "how"),
    slow_but_for(
        [("flax", "host")],
        [("flax", "host"), ("whole", "batch"), ("ghost", "device")],
    ),
)
def test_recompute_evaluates_with_the_statistics_of_fresh_batches(tmp_path, norm, how):
    where = {
        "host": {"echo__factor": 2.0},
        "device": {"echo__where": "device", "echo__after": "decode"},
        "batch": {"echo__after": "batch"},
    }[how]
    task, options = Normed(norm), {"batch__norm_batches": 3, "mesh__data": 2, **where}
    one = run(tmp_path / "a", task=task, batch__norm="recompute", **options)
    expected = statistics_of(fresh_items(3 * 8))
    rows = [row for row in rows_of(tmp_path / "a") if "eval_loss" in row]
    assert len(rows) == 3
    for row in rows:
        np.testing.assert_allclose(evaluated(row), expected, rtol=1e-4, atol=1e-5)
    # Nothing else is changed by it, neither the data nor what is trained.
    other = run(tmp_path / "b", task=task, **options)
    assert one["params_sha256"] == other["params_sha256"]
    assert one["fresh"] == other["fresh"]
    for row in rows_of(tmp_path / "b"):
        if "eval_loss" in row:
            assert not np.allclose(evaluated(row), expected, atol=0.01)


@pytest.mark.slow
def test_a_mean_of_replicas_has_statistics_of_its_own(tmp_path):
    options = {"mesh__data": 4, "local__schedule": "every", "local__every": 5}
    run(
        tmp_path,
        task=Normed(),
        batch__norm="recompute",
        batch__norm_batches=2,
        **options,
    )
    row = [row for row in rows_of(tmp_path) if "eval_loss" in row][1]
    expected = statistics_of(fresh_items(2 * 8))
    np.testing.assert_allclose(evaluated(row), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["last", "recompute"])
def test_a_model_without_batch_norm_is_refused_before_anything_is_written(
    tmp_path, norm
):
    @dataclass(frozen=True)
    class Plain(Normed):
        def init(self, key):
            return {"params": super().init(key)["params"]}

    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=rf"batch\.norm='{norm}' needs a model with"):
        run(folder, task=Plain(), batch__norm=norm)
    assert not folder.exists()


def test_no_fresh_batch_is_refused():
    config = tiny_config(batch__norm="recompute", batch__norm_batches=0)
    with pytest.raises(ValueError, match="norm_batches=0 must be at least 1"):
        check_config(config)


def test_a_wait_for_them_is_watched(tmp_path):
    config = tiny_config(batch__norm="recompute", batch__norm_batches=2)
    workload = make_workload(config, task=Normed())
    compiled = compile_functions(config, workload)
    waits = []

    class Watched(Watchdog):
        def waiting(self, what, *args, **kwargs):
            waits.append(what)
            return super().waiting(what, *args, **kwargs)

    watchdog = Watched()
    state = compiled.init(compiled.init_key)
    evaluate_split(config, compiled, state, workload, watchdog)
    assert waits[:2] == [f"batch {i} of 2 for batch norm" for i in (1, 2)]
