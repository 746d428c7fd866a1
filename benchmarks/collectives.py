"""What XLA makes of an update for devices that are not here, and what sums cost.

``python -m benchmarks.collectives --config FILE.py --target v5e:2x2`` compiles the
update of a config for TPUs or GPUs and prints what it sends, which sums run beside
other operations, and its memory. ``--config.xla.preset=fuse``, ``overlap`` or
``serial`` changes how gradients are summed. Nothing is run: this says nothing of speed.
With ``--bandwidth`` it prints by arithmetic what a parameter server and a ring take.
It needs the extra ``aot``, and leaves out the echo.
"""

import argparse
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from echo_jax.cli.command_end import Exit, typed_config
from echo_jax.config import RunSpec
from echo_jax.training.arrays import (
    batch_sharding,
    make_mesh,
    param_shardings,
    replicated,
)
from echo_jax.training.feeds.loader import next_batch, unechoed
from echo_jax.training.step import init_state, run_inputs, train_step
from echo_jax.training.update.gradients import gradient_of
from echo_jax.training.update.loss_scale import Precision
from echo_jax.training.update.optim import Optimizer
from echo_jax.training.xla import collectives, sent_bytes, xla_options
from echo_jax.workloads import build
from echo_jax.workloads.base import Batch

# Without a GPU nothing can be timed, and Triton's own programs are made by timing.
_UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# As XLA describes it; NVIDIA's data sheet of the H100 SXM.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 1 patch: 1 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 shared_memory_per_core: 233472
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""
_FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")
_OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = .*? ([a-z][a-z0-9-]*)\((.*)")


def target_devices(name: str) -> Sequence[Any]:
    """Returns devices to compile for: ``v5e:2x2``, ``h100x4``; "" means those here."""
    if not name:
        return jax.devices()
    if number := re.fullmatch(r"h100x(\d+)", name):
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="h100",
            topology=f"1x1x{number[1]}",
            target_config=_H100,
        ).devices
    # libtpu would ask the cloud's metadata which hosts there are, and refuse to be on
    # one machine with another, as two that use a TPU must not be.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def compile_for(mesh: Mesh, lowered: Any) -> Any:
    """Compiles for devices that need not be here; jax's cache could not load it."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        is_gpu = mesh.devices.flat[0].platform in ("cuda", "gpu")
        return lowered.compile(compiler_options=_UNTIMED if is_gpu else None)
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def lower_update(config: RunSpec, mesh: Mesh, batch: Batch) -> Any:
    """Returns the program of an update on a host batch before XLA compiles it."""
    fixed = {
        "task": build(config).task,
        "optimizer": Optimizer.from_config(config),
        "precision": Precision.from_config(config),
    }
    key, whole = jax.random.key(0), replicated(mesh)
    state: Any = jax.eval_shape(lambda: init_state(key, {}, **fixed))
    layout = jax.tree.map(lambda _: whole, state).replace(
        params=param_shardings(state.params, mesh),
        opt_state=param_shardings(state.opt_state, mesh),
    )
    device: Any = mesh.devices.flat[0]
    platform = "gpu" if device.platform == "cuda" else device.platform
    options = dict(xla_options(config, platform, device.device_kind))
    step = jax.jit(
        functools.partial(train_step, **fixed, gradient=gradient_of(config, mesh)),
        in_shardings=(layout, batch_sharding(mesh), whole),
        out_shardings=(layout, whole),
        donate_argnums=0,
        compiler_options=options or None,
    )
    arrays = {name: x for name, x in batch.items() if name != "fresh_index"}
    shapes = jax.eval_shape(lambda: (arrays, run_inputs(config, key)))
    return step.lower(state, *shapes)


def overlapped(text: str) -> list[int]:
    """Returns how many operations are between start and end of each that has both."""
    between, started, place = [], {}, 0
    for line in text.splitlines():
        if not (match := _OPERATION.match(re.sub(r"/\*.*?\*/", "", line))):
            continue
        name, opcode, rest = match.groups()
        place += opcode not in _FREE
        is_sum = re.match("all-|collective-|reduce-scatter|ragged", opcode)
        if is_sum and opcode.endswith("-start"):
            started[name] = place
        elif name.startswith("async-collective-start"):  # Of a TPU.
            started[name.replace("start", "done")] = place
        elif name in started:
            between.append(place - started.pop(name) - 1)
        elif is_sum and opcode.endswith("-done"):
            operands = re.findall(r"%?([\w.-]+)", rest.partition(")")[0])
            begun = next(each for each in operands if each in started)
            between.append(place - started.pop(begun) - 1)
    return between


def _describe(program: Any, mesh: Mesh) -> str:
    text, memory = program.as_text() or "", program.memory_analysis()
    counts: Counter[str] = Counter()
    elements: dict[str, Counter[str]] = {}
    for kind, found in collectives(text):
        counts[kind] += 1
        elements.setdefault(kind, Counter()).update(found)
    kind = mesh.devices.flat[0].device_kind
    lines = [f"An update on {mesh.size} {kind}, for each of them:"]
    for kind, count in counts.items():
        numbers = ", ".join(f"{name}: {n:,}" for name, n in elements[kind].items())
        lines.append(f"{kind:18} {count:3}   {numbers}")
    lines += [
        f"sends {sent_bytes(program) / 1e6:.3g} MB; operations from start to end: "
        f"{', '.join(map(str, overlapped(text))) or 'no collective has both'}",
        f"reuses {memory.alias_size_in_bytes / 1e6:.3g} MB of its state in place",
    ]
    beside, reused = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + beside - reused
    lines.append(f"at its peak {peak / 1e6:.3g} MB, {beside / 1e6:.3g} MB temporary")
    return "\n".join(lines)


def exchange_s(gradient_bytes: float, num_devices: int, bytes_per_s: float) -> Any:
    """Returns the seconds of a server's link and of a ring, without latencies.

    All N devices send their G bytes to a server and get the sum back: 2 N G by its one
    link. In a ring each sends 2 (N - 1)/N G; less cannot be sent (Patarasuk and Yuan
    2009). To scatter sums and gather parameters (ZeRO) sends as much as a ring.

    Example:
      >>> exchange_s(100e6, 4, 1e9)
      (0.8, 0.15)
    """
    server = 2 * num_devices * gradient_bytes / bytes_per_s
    return server, server * (num_devices - 1) / num_devices**2


def _describe_cost(
    num_bytes: float, num_devices: int, gb_per_s: float, compute_ms: float, rows: float
) -> str:
    server, ring = exchange_s(num_bytes, num_devices, gb_per_s * 1e9)
    efficiency = compute_ms / (compute_ms + ring * 1e3)
    one = rows / compute_ms * 1e3
    return (
        f"By arithmetic, not measured: {num_bytes / 1e6:.3g} MB of gradients, "
        f"{num_devices} devices, {gb_per_s:g} GB/s from each:\n"
        f"parameter server {server * 1e3:.3g} ms, ring {ring * 1e3:.3g} ms\n"
        f"ring to {compute_ms:g} ms of computation: efficiency {efficiency:.3f} if "
        f"nothing overlaps\nT = S N efficiency = {one:,.0f} x {num_devices} x "
        f"{efficiency:.3f} = {one * num_devices * efficiency:,.0f} examples/s"
    )


def main(argv: list[str] | None = None) -> int:
    """Compiles an update, and prints what it sends and costs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives")
    parser.add_argument("--config", required=True, metavar="CONFIG[:VARIANT]")
    parser.add_argument("--target", default="", help="v5e:2x2, h100x4, ...")
    parser.add_argument("--bandwidth", type=float, help="GB/s that a device can send")
    parser.add_argument("--devices", type=int, help="for its cost: on so many")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="of a device")
    args, extras = parser.parse_known_args(argv)
    try:
        typed = typed_config(args.config, extras)
    except Exit as error:
        parser.error(str(error))
    config = RunSpec.of(typed)
    if config.local.sync_schedule != "none":
        parser.error("local updates have two programs; set local.sync_schedule=none")
    workload, devices = build(config), target_devices(args.target)
    data, fsdp = config.mesh.data, config.mesh.fsdp
    mesh = make_mesh(data, fsdp, config.batch_size, devices=devices)
    batches = iter(workload.train_dataset(unechoed(config)))
    batch = next_batch(batches, workload, "before its first batch")
    program = compile_for(mesh, lower_update(config, mesh, batch))
    print(_describe(program, mesh))
    if args.bandwidth:
        params = jax.eval_shape(workload.task.init, jax.random.key(0))["params"]
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        number, rows = args.devices or mesh.size, config.batch_size / mesh.size
        cost = _describe_cost(size, number, args.bandwidth, args.compute_ms, rows)
        print(cost)
    return 0


if __name__ == "__main__":
    sys.exit(main())
