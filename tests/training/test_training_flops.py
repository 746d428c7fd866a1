"""What is counted as the work of an update, and what is made of it."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge
from tiny_workload import make_workload, run, tiny_config

from echo_jax.files.json_files import read_line
from echo_jax.training.feeds.feed import HostFeed, JoinedBatches
from echo_jax.training.feeds.of_config import make_echo_spec
from echo_jax.training.trainer import compile_functions
from echo_jax.training.xla import flops
from echo_jax.training.xla.flops import UpdateFlops, count_flops, peak_flops_per_s
from echo_jax.workloads.base import Task

DEPTH, WIDTH = 3, 128


@dataclass(frozen=True)
class Matrices(Task):
    """Products with square matrices, one after another, and next to nothing else."""

    def init(self, key):
        keys = jax.random.split(key, DEPTH)
        draw = jax.nn.initializers.normal()
        return {"params": {str(i): draw(keys[i], (WIDTH, WIDTH)) for i in range(DEPTH)}}

    def loss(self, variables, batch, key):
        del key
        x = jnp.tile(batch["x"], (1, WIDTH // batch["x"].shape[1]))
        for i in range(DEPTH):
            x = x @ variables["params"][str(i)]
        return x[:, 0], {}, {}

    def evaluate(self, variables, batch):
        losses, _, _ = self.loss(variables, batch, None)
        return {"loss": ((losses * batch["mask"]).sum(), batch["mask"].sum())}


def counted(**overrides):
    """What is counted for `Matrices` with a config."""
    overrides = {"batch_size": 1024, "optim__name": "sgd", **overrides}
    config = tiny_config(optim__momentum=0.0, **overrides)
    workload = make_workload(config, task=Matrices())
    compiled = compile_functions(config, workload)
    dataset = workload.train_dataset(make_echo_spec(config))
    iterator = iter(dataset)
    feed = HostFeed(JoinedBatches([dataset]), compiled.mesh, sample=next(iterator))
    iterator.close()
    # Shapes are enough: nothing is computed.
    found = count_flops(compiled, compiled.abstract_state, feed)
    feed.close()
    return found.per_update


def test_products_of_matrices_are_counted_as_by_hand():
    # Forward, and the gradients with respect to matrices; those with respect to
    # inputs but for the first, which is data. The rest is elementwise: for every
    # number a few operations, beside 128 for every product's.
    product = 2 * 1024 * WIDTH * WIDTH
    by_hand = (DEPTH + DEPTH + DEPTH - 1) * product
    assert by_hand < counted() < 1.02 * by_hand
    assert counted(batch_size=2048) == pytest.approx(2 * counted(), rel=0.01)


def test_all_devices_are_counted_together():
    assert counted(mesh__data=8) == counted()


def test_gpus_and_tpus_have_their_operations_counted_too(monkeypatch):
    """Their clients are plugins, of which jax asks nothing."""
    with_its_client = counted()
    monkeypatch.setattr(xla_bridge, "using_pjrt_c_api", lambda backend=None: True)
    product = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64)))
    assert product.cost_analysis() is None
    assert flops.program_flops(product) == 2 * 64**3
    flops._counted.clear()
    assert counted() == with_its_client


def test_where_there_is_no_cpu_nothing_is_counted(monkeypatch):
    def refuse(**_):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", refuse)
    assert flops.program_flops(jax.jit(jnp.sin).lower(1.0)) is None


def test_a_program_is_counted_once(monkeypatch):
    first = counted()
    monkeypatch.setattr(flops, "program_flops", pytest.fail)
    assert counted() == first


def logged(workdir, **overrides):
    summary = run(workdir, updates=8, echo__factor=2.0, **overrides)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [read_line(line) for line in lines]
    return summary, [row for row in rows if row["kind"] == "train"]


@pytest.mark.slow
def test_a_group_of_updates_counts_as_its_updates(tmp_path):
    """The trap: XLA counts the body of a scan once, however often it runs."""
    found = {}
    for strategy, size in (("loop", 0), ("unroll", 4), ("scan", 4)):
        how = {"dispatch__mode": strategy, "dispatch__steps": size}
        summary, rows = logged(tmp_path / strategy, **how)
        assert summary["dispatch"]["mode"] == strategy
        found[strategy] = {row["flops_per_update"] for row in rows}
        assert found[strategy] == {summary["flops_per_update"]}
    assert found["loop"] == found["unroll"] == found["scan"]


def test_utilisation_is_work_by_time_by_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(flops, "_PEAK_TFLOPS", {"cpu": 2e-6})
    summary, rows = logged(tmp_path)
    before = 0.0
    for row in rows:
        # Rows lie 4 updates apart.
        per_s = 4 * row["flops_per_update"] / (row["wall_s"] - before)
        assert row["flops_per_s"] == pytest.approx(per_s, rel=1e-6)
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / 2e6)
        before = row["wall_s"]
    per_s = 8 * summary["flops_per_update"] / summary["wall_s"]
    assert summary["mfu"] == pytest.approx(per_s / 2e6)


def test_an_unknown_device_has_no_utilisation(tmp_path):
    summary, rows = logged(tmp_path)
    for row in (summary, *rows):
        assert row["flops_per_s"] > 0
        assert "mfu" not in row


def test_what_xla_does_not_count_is_left_out():
    assert UpdateFlops(None, 1e12).rates(updates=4, seconds=1.0) == {}


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("TPU v4", 275.0),
        ("TPU v5 lite", 197.0),
        ("TPU v5e", 197.0),
        ("TPU v5p", 459.0),
        ("TPU v5", 459.0),
        ("TPU v6 lite", 918.0),
        # Others, whose names begin alike; and a part of a device.
        ("NVIDIA L40S", None),
        ("NVIDIA A1000", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device(kind, tflops):
    devices = np.array([SimpleNamespace(device_kind=kind)] * 4)
    peak = peak_flops_per_s(SimpleNamespace(devices=devices))
    assert peak == (None if tflops is None else pytest.approx(4e12 * tflops))


def test_devices_of_which_one_is_unknown_have_no_peak():
    kinds = ("NVIDIA H200", "cpu")
    devices = np.array([SimpleNamespace(device_kind=kind) for kind in kinds])
    assert peak_flops_per_s(SimpleNamespace(devices=devices)) is None
