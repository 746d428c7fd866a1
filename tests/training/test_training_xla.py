"""What XLA is told, what its program sends and computes, and what is counted of it."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import (
    NUM_PARAMS,
    compiled_update,
    held_input,
    make_workload,
    tiny_config,
)

from benchmarks.collectives import overlapped
from echo_jax.config import RunSpec
from echo_jax.training import train
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.xla import (
    UpdateFlops,
    collectives,
    count_flops,
    peak_flops_per_s,
    sent_bytes,
    xla_options,
)
from echo_jax.workloads import Task

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

DEPTH, WIDTH = 3, 128


@dataclass(frozen=True)
class Matrices(Task):
    """Products with square matrices, one after another, and next to nothing else."""

    def init(self, key):
        return {"params": {str(i): jnp.ones((WIDTH, WIDTH)) for i in range(DEPTH)}}

    def loss(self, variables, batch, key):
        del key
        x = jnp.tile(batch["x"], (1, WIDTH // batch["x"].shape[1]))
        for i in range(DEPTH):
            x = x @ variables["params"][str(i)]
        return x[:, 0], {}, {}

    evaluate = None


def counted(**overrides):
    """What is counted for `Matrices` with a config."""
    overrides = {"batch_size": 1024, "optim__name": "sgd", **overrides}
    config = tiny_config(optim__momentum=0.0, **overrides)
    workload = make_workload(config, task=Matrices())
    compiled = CompiledFunctions(RunSpec.of(config), workload)
    with held_input(compiled, config, workload) as feed:
        # Shapes are enough: nothing is computed.
        return count_flops(
            compiled.trace(compiled.abstract_state, feed), compiled.mesh
        ).per_update


def test_products_of_matrices_are_counted_as_by_hand():
    # Forward, and the gradients with respect to matrices; those with respect to
    # inputs but for the first, which is data. The rest is elementwise: for every
    # number a few operations, beside 128 for every product's.
    product = 2 * 1024 * WIDTH * WIDTH
    by_hand = (DEPTH + DEPTH + DEPTH - 1) * product
    assert by_hand < counted() < 1.02 * by_hand
    assert counted(batch_size=2048) == pytest.approx(2 * counted(), rel=0.01)
    # All devices are counted together.
    assert counted(mesh__data=8) == counted()


def test_utilisation_is_work_by_time_by_peak_where_both_are_known():
    found = UpdateFlops(2e6, 1e9).rates(updates=100, seconds=0.5)
    assert found == {"flops_per_update": 2e6, "flops_per_s": 4e8, "mfu": 0.4}
    assert UpdateFlops(None, 1e12).rates(updates=4, seconds=1.0) == {}


@pytest.mark.parametrize(
    ("kinds", "tflops"),
    [
        (["NVIDIA H100 80GB HBM3"] * 4, 4 * 989.4),
        (["NVIDIA H100 PCIe"], 756.0),
        (["TPU v5 lite", "TPU v5p", "TPU v5"], 197.0 + 2 * 459.0),
        # Others, whose names begin alike; a part of a device; one that is known.
        (["NVIDIA L40S"], None),
        (["NVIDIA H200 MIG 1g.18gb"], None),
        (["NVIDIA H200", "cpu"], None),
    ],
)
def test_the_peak_of_devices(kinds, tflops):
    devices = np.array([SimpleNamespace(device_kind=kind) for kind in kinds])
    peak = peak_flops_per_s(SimpleNamespace(devices=devices))
    assert peak == (None if tflops is None else pytest.approx(1e12 * tflops))


# As XLA for GPUs prints it: starts and ends; a start of a gather has both in its type.
ASYNCHRONOUS = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %begun = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce-start(%p, %q), channel_id=1
  %between = f32[8]{0} fusion(%p), kind=kLoop
  %free = f32[8]{0} bitcast(%between)
  %more = f32[8]{0} fusion(%free), kind=kLoop
  %ended = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce-done(%begun)
  %gather = (f32[8]{0}, f32[32]{0}) all-gather-start(%more), dimensions={0}
  %gathered = f32[32]{0} all-gather-done(%gather)
  ROOT %out = f32[8]{0} fusion(%gathered), kind=kLoop
}
"""
# As XLA for TPUs prints it: tiles in the layouts, and places in long types.
TILED = (
    "  %sum.1 = (f32[64,128]{1,0:T(8,128)}, /*index=1*/bf16[256]{0:T(256)(128)(2,1)}, "
    "pred[3]{0:T(512)}) all-reduce(%a, %b, %c), replica_groups={{0,1,2,3}}"
)
# The operations in which a TPU starts, goes on with and ends a sum.
PIECE = """
%NAME (p: f32[8]) -> f32[8] {
  ROOT %all-reduce.NAME = f32[8] all-reduce(%p), channel_id=3, attributes={chain_id="0"}
}
"""
IN_PIECES = f"""{"".join(PIECE.replace("NAME", n) for n in ("begin", "beside", "end"))}
ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %async-collective-start.2 = f32[8]{{0}} fusion(%p), calls=%begin
  %fusion.1 = f32[8]{{0}} fusion(%async-collective-start.2), calls=%beside
  %copy.1 = f32[8]{{0}} copy(%p)
  %async-collective-done.2 = f32[8]{{0}} fusion(%fusion.1), calls=%end
  ROOT %all-reduce.9 = f32[4]{{0}} all-reduce(%p), channel_id=4
}}
"""


@pytest.mark.parametrize(
    ("text", "found", "num_bytes", "between"),
    [
        (
            ASYNCHRONOUS,
            [("all-reduce", {"f32": 8, "bf16": 8}), ("all-gather", {"f32": 32})],
            4 * 40 + 2 * 8,
            [2, 0],
        ),
        (TILED, [("all-reduce", {"f32": 8192, "bf16": 256, "pred": 3})], 33283, []),
        (IN_PIECES, [("all-reduce", {"f32": 8}), ("all-reduce", {"f32": 4})], 48, [2]),
    ],
    ids=["asynchronous", "tiled", "in-pieces"],
)
def test_collectives_are_counted_once(text, found, num_bytes, between):
    assert collectives(text) == found
    assert sent_bytes(SimpleNamespace(as_text=lambda: text)) == num_bytes
    assert overlapped(text) == between


def test_data_parallelism_sums_every_parameter_once_and_reuses_the_state():
    config = tiny_config(mesh__data=4, echo__buffer_on="device", echo__stage="decode")
    program = compiled_update(config)
    reduced = sum(numbers["f32"] for kind, numbers in collectives(program.as_text()))
    assert NUM_PARAMS <= reduced <= NUM_PARAMS + 64  # and some losses
    # Parameters and Adam's two moments at least take the place of the old ones.
    assert program.memory_analysis().alias_size_in_bytes > 3 * 4 * NUM_PARAMS


KNOWN = {"xla_cpu_enable_fast_min_max": True}


def options_of(preset, *where, **more):
    return dict(xla_options(tiny_config(xla__preset=preset, **more), *where))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_presets_say_how_much_is_reduced_together(platform):
    def together(preset):
        found = options_of(preset, platform).items()
        return next(value for name, value in found if "threshold" in name)

    assert options_of("default", platform) == options_of("fuse", "cpu") == {}
    assert together("fuse") > together("overlap") > together("serial") == 0
    # What is said by hand comes after.
    (name,) = options_of("fuse", platform)
    more = json.dumps({name: 7})
    assert options_of("fuse", platform, xla__options=more) == {name: 7}


def test_the_update_is_compiled_with_its_options_which_are_recorded(tmp_path):
    config = tiny_config(updates=1, xla__options=json.dumps(KNOWN))
    workload = make_workload(config)
    compiled, same = (CompiledFunctions(RunSpec.of(config), workload) for _ in range(2))
    other = CompiledFunctions(RunSpec.of(tiny_config()), workload)
    with held_input(compiled, config, workload) as feed:
        programs = [
            each.program(feed.batching, False) for each in (compiled, same, other)
        ]
    assert programs[0] is programs[1] is not programs[2]
    train(config, workload, tmp_path)
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["xla_options"] == KNOWN
