"""The command that compiles an update for devices that are not here."""

import importlib.util
from pathlib import Path

import jax
import pytest

from benchmarks.collectives import exchange_s, lower_update, main, target_devices
from echo_jax.config import load_config
from echo_jax.training.feeds.loader import next_batch, unechoed
from echo_jax.training.processes.sharding import make_mesh
from echo_jax.training.xla.flops import program_flops
from echo_jax.workloads import build

LM = str(Path(__file__).parents[1] / "configs/lm.py:tiny")
ON = ["--config", LM, "--config.mesh.data=4"]


def test_it_says_what_an_update_sends_and_what_that_costs(capsys):
    # Of the cost of 8 devices, with 8 examples of the 32 in 10 ms on each of 4.
    cost = ["--bandwidth=0.1", "--devices=8", "--compute-ms=10"]
    assert main(["--config", LM, "--config.mesh.data=4", *cost]) == 0
    out = capsys.readouterr().out
    assert "all-reduce" in out and "f32: 103,0" in out
    assert "An update on 4 cpu, for each of them" in out
    # 103,040 parameters, so 412,160 bytes: 2 * 7/8 of them at 0.1 GB/s are 7.21 ms, and
    # 16 times as many through a server 65.9 ms.
    assert "parameter server 65.9 ms, ring 7.21 ms" in out
    assert "efficiency 0.581 if" in out


@pytest.mark.parametrize(
    ("num_devices", "server_s", "ring_s"),
    # 2 N and 2 (N - 1)/N times 400 MB at 2 GB/s.
    [(1, 0.4, 0.0), (2, 0.8, 0.2), (8, 3.2, 0.35), (1000, 400.0, 0.3996)],
)
def test_a_server_takes_what_grows_with_the_devices_and_a_ring_does_not(
    num_devices, server_s, ring_s
):
    found = exchange_s(400e6, num_devices, 2e9)
    assert found == pytest.approx((server_s, ring_s))


def test_a_config_of_replicas_is_refused(capsys):
    with pytest.raises(SystemExit):
        main([*ON, "--config.local.schedule=every"])
    assert "set local.schedule=none" in capsys.readouterr().err


def _installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "module"),
    [("v5e:2x2", "libtpu"), ("h100x4", "jax_plugins.xla_cuda12")],
)
def test_sums_are_fused_or_not_for_devices_that_are_not_here(target, module, capsys):
    if not _installed(module):
        pytest.skip(f"{target} needs {module}, of the extra aot")
    counts = []
    for preset in ("fuse", "serial"):
        assert main([*ON, "--target", target, f"--config.xla.preset={preset}"]) == 0
        (line,) = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("all-reduce")
        ]
        counts.append(int(line.split()[1]))
    assert counts[0] == 1 < counts[1]
    # An update's operations are counted alike for all devices, but for random bits.
    config = load_config(LM, {"mesh.data": 4})
    workload = build(config)
    batch = next_batch(iter(workload.train_dataset(unechoed(config))), workload, "")
    flops = [
        program_flops(lower_update(config, make_mesh(4, 1, 32, devices=on), batch))
        for on in (jax.devices()[:4], target_devices(target))
    ]
    assert flops[0] == pytest.approx(flops[1], rel=0.01)
