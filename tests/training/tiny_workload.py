"""A workload small enough to train in every test, with all that a real one has."""

import contextlib
import dataclasses
import functools
import io
import itertools
import signal
import types
from contextlib import closing
from dataclasses import dataclass

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import echo_jax as ej
from echo_jax.config import RunSpec, default_config
from echo_jax.data.pipeline import SINGLE
from echo_jax.files import read_line, run_folder
from echo_jax.training import measure_loader, train
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds import open_feed
from echo_jax.training.processes import Watchdog
from echo_jax.training.saving import Checkpoints
from echo_jax.workloads import WORKLOADS, Task, Workload

# Grain takes half a millisecond an item to shuffle 64, and a fiftieth of it for these.
NUM_EXAMPLES = 1000
NUM_FEATURES = 4
NUM_PARAMS = 96
ON_DEVICE = {"echo__buffer_on": "device", "echo__stage": "decode"}
ADAPTIVE = {**ON_DEVICE, "echo__mode": "adaptive", "echo__buffer": 40}
STOCHASTIC = {
    **ON_DEVICE,
    "echo__mode": "stochastic",
    "echo__buffer": 24,
    "echo__fetch__start": 0.4,
    "echo__fetch__end": 0.4,
}


@dataclass(frozen=True)
class Regression(Task):
    """A two-layer network with dropout, and a running mean as batch statistics.

    Its training metric is how many hidden units dropout has kept.
    """

    width: int = 16
    dropout: float = 0.1

    def init(self, key):
        drawn = _uniform(key, (NUM_FEATURES + 1, self.width)) - 0.5
        params = {
            "bias": jnp.zeros(self.width),
            "first": drawn[:-1],
            "second": drawn[-1:].T,
        }
        return {"params": params, "batch_stats": {"mean": jnp.zeros(NUM_FEATURES)}}

    def loss(self, variables, batch, key):
        assert set(batch) == {"x", "y"}
        mean = variables["batch_stats"]["mean"]
        mean = 0.9 * mean + 0.1 * batch["x"].mean(axis=0)
        hidden = self._hidden(variables["params"], batch["x"] - mean[None])
        kept = _uniform(key, hidden.shape) >= self.dropout
        hidden = jnp.where(kept, hidden / (1 - self.dropout), 0)
        losses = self._error(variables["params"], hidden, batch["y"])
        metrics = {"kept": (kept.sum(), kept.size)}
        return losses, {"batch_stats": {"mean": mean}}, metrics

    def evaluate(self, variables, batch):
        mean = variables["batch_stats"]["mean"]
        hidden = self._hidden(variables["params"], batch["x"] - mean[None])
        losses = self._error(variables["params"], hidden, batch["y"])
        return {"loss": ((losses * batch["mask"]).sum(), batch["mask"].sum())}

    def _hidden(self, params, x):
        params = optax.tree.cast(params, jnp.float32)
        return jnp.tanh(x @ params["first"] + params["bias"][None])

    def _error(self, params, hidden, y):
        second = params["second"].astype(jnp.float32)
        return ((hidden @ second)[:, 0] - y) ** 2


def _uniform(key, shape):
    """Draws from [0, 1). Jax's own draws take half as long to compile as an update."""
    words = jnp.arange(np.prod(shape), dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    for word in jax.random.key_data(key):
        words = (words ^ word) * np.uint32(0x85EBCA6B)
        words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
        words ^= words >> 16
    return (words >> 8).reshape(shape).astype(np.float32) * np.float32(2**-24)


@functools.lru_cache(2**12)
def _features(index):
    return np.random.default_rng(index).normal(size=NUM_FEATURES).astype(np.float32)


def example(index):
    x = _features(int(index)).copy()
    return {"x": x, "y": np.float32(x.sum() - x[0] * x[1])}


def stacked(first, size):
    items = [example(first + i) for i in range(size)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *items)


def tiny_config(**overrides):
    """A config for `make_workload`; overrides by dotted name, ``__`` for a dot."""
    config = default_config()
    with config.unlocked():
        config.workload = "regression"
    config.updates = 12
    config.batch_size = 8
    config.log_every = 4
    config.eval_every = 6
    config.checkpoint_every = 0
    config.optim.lr = 0.01
    config.mesh.data = 1
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in overrides.items()}
    )
    return config


def make_workload(config, *, task=None, nan_at_fresh=None, on_batch=None):
    """Makes the workload of a `tiny_config`.

    The label of the fresh index `nan_at_fresh` is NaN. `on_batch` is called with 1, 2,
    ... when a training batch has been made; not while speeds are measured.
    """

    def as_batch(pair):
        batch, tags = pair
        shape = (config.batch_size,)
        y = np.where(tags.fresh_index == nan_at_fresh, np.float32(np.nan), batch["y"])
        return {
            "x": batch["x"],
            "y": y.astype(np.float32),
            "fresh_index": np.broadcast_to(np.int64(tags.fresh_index), shape),
            "repeat": np.broadcast_to(np.int32(tags.repeat), shape),
        }

    def rows_of(shard, batch):
        size = shard.rows(config.batch_size)
        return {k: x[shard.index * size :][:size] for k, x in batch.items()}

    def fresh(batched, shard=SINGLE):
        items = grain.MapDataset.range(NUM_EXAMPLES).shuffle(seed=config.seed)
        items = items.repeat().map(example)
        if batched:
            items = items.batch(config.batch_size)
            items = items.map(functools.partial(rows_of, shard))
        return items.to_iter_dataset(grain.ReadOptions(0, 0))

    def train_dataset(spec, shard=SINGLE):
        batched = config.echo.stage == "batch"
        items = fresh(batched)
        batches = ej.grain.echo(items, spec, batch=not batched, tags=True).map(as_batch)
        is_training = getattr(spec, "factor", 0) == config.echo.factor != 1
        if on_batch and is_training:
            calls = itertools.count(1)
            batches = batches.map(lambda batch: (on_batch(next(calls)), batch)[1])
        return batches.map(functools.partial(rows_of, shard))

    def eval_batches(shard=SINGLE):
        # 10 examples in batches of 8: the second one has 6 of padding.
        for start in (0, 8):
            batch = stacked(1000 + start, 8)
            batch["mask"] = (np.arange(start, start + 8) < 10).astype(np.float32)
            yield {k: x[shard.index :: shard.count] for k, x in batch.items()}

    return Workload(
        name="regression",
        task=task or Regression(),
        metric="loss",
        mode="min",
        train_dataset=train_dataset,
        fresh_dataset=functools.partial(fresh, True),
        eval_batches=eval_batches,
        metadata={"synthetic_data": True},
    )


@contextlib.contextmanager
def registered(build=make_workload):
    """Lets commands and studies build the workload by its name in a config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORKLOADS, "regression", types.SimpleNamespace(build=build))
        yield


def as_synthetic(config):
    """The workload with the facts of its data that studies read."""
    metadata = {"data": {"synthetic": True}}
    return dataclasses.replace(make_workload(config), metadata=metadata)


def run(workdir, *, replaced=None, console=None, **options):
    """Trains, with fields of the workload replaced.

    Options are those of `make_workload`, and fields as in `tiny_config`.
    """
    made = {"task", "nan_at_fresh", "on_batch"} & options.keys()
    given = {name: options.pop(name) for name in made}
    config = tiny_config(**options)
    workload = make_workload(config, **given)
    workload = dataclasses.replace(workload, **replaced or {})
    with jax.transfer_guard("disallow"):
        return train(config, workload, workdir, console=console)


def said_by(workdir, **options):
    """Trains as `run` does; returns the summary, and what is printed."""
    console = Console(file=io.StringIO(), width=400)
    summary = run(workdir, console=console, **options)
    return summary, console.file.getvalue()


def functions_of(task=None, **overrides):
    config = tiny_config(**overrides)
    return CompiledFunctions(RunSpec.of(config), make_workload(config, task=task))


def batch_of(first=0, *, repeat=0, size=8):
    """A batch with tags, for `CompiledFunctions.step_on_batch`."""
    return {
        **stacked(first, size),
        "fresh_index": np.arange(size),
        "repeat": np.broadcast_to(np.int32(repeat), (size,)),
    }


def held_input(compiled, config, workload):
    """A context with a feed of a config, to hold inputs of."""
    config = RunSpec.of(config)
    watchdog = Watchdog(config, print)
    _, sample = measure_loader(config, workload, most=1, watchdog=watchdog)
    return closing(open_feed(config, workload, compiled.mesh, sample=sample))


def compiled_update(config, *, task=None, syncs=False):
    """The compiled program of one update of a config."""
    workload = make_workload(config, task=task)
    compiled = CompiledFunctions(RunSpec.of(config), workload)
    with held_input(compiled, config, workload) as feed:
        state = compiled.abstract_state
        return compiled.trace(state, feed, syncs=syncs).lower().compile()


def rows_of(workdir, *kinds):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [read_line(line) for line in lines]
    return [row for row in rows if not kinds or row["kind"] in kinds]


def saved_update(workdir):
    """The update of a run's newest checkpoint; None if there is none."""
    checkpoints = Checkpoints(run_folder(workdir / "checkpoints"), keep=2)
    latest = checkpoints.latest()
    checkpoints.close()
    return latest


def stop_at(update, signum=signal.SIGTERM):
    """An `on_batch` that sends this process a signal while it makes a batch."""

    def on_batch(number):
        if number == update:
            signal.raise_signal(signum)

    return on_batch
