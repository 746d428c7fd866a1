"""What the programs of a device echo move on accelerators, compiled without having one.

For a TPU v5e it needs libtpu, which `pip install 'echo-jax[tpu]'` brings, and no TPU;
for an H100, jax-cuda12-plugin with nvidia-cuda-nvcc-cu12, and no GPU.
"""

import functools
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import tasks
from benchmarks.harness import Result
from echo_jax.config import default_config, load_config
from echo_jax.data.augment import Augment, Flip, PadCrop, RandomResizedCrop
from echo_jax.echo.stores.device import EchoBuffer, StepInput, jitted_write
from echo_jax.training.optim import Optimizer
from echo_jax.training.program import all_reduced
from echo_jax.training.trainer import init_state, run_inputs, train_step
from echo_jax.training.xla_options import xla_options
from echo_jax.workloads import build

__all__ = ["h100", "v5e"]

# As XLA describes it; NVIDIA's data sheet of the H100 SXM.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 1 patch: 1 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""
# Task, augmentation, pixels of a stored image, slots, and rows of a batch; one chip.
_UPDATES = {
    "cifar": (tasks.cifar, Augment((PadCrop(4), Flip())), 32, 65536, 256),
    "resnet-50": (
        tasks.resnet_50,
        Augment((RandomResizedCrop(224), Flip())),
        256,
        16384,
        128,
    ),
}

# Of the 3.3 million parameters of a Transformer, 13 MB; one of them gathers the losses.
_ALL_REDUCES = {"default": "<= 2", "fuse": "<= 2", "overlap": "<= 8", "serial": ">= 37"}

# Shape and dtype of every leaf of an item, how many slots, and how many items a batch
# has: so few that no draw is a loop, whose body the compiler counts once.
_ITEMS = {
    "cifar": ({"image": ((32, 32, 3), "uint8"), "label": ((), "int32")}, 65536, 128),
    "imagenet": ({"image": ((256, 256, 3), "uint8"), "label": ((), "int32")}, 8192, 32),
    "tokens": ({"tokens": ((1025,), "int32")}, 131072, 128),
    "coco": (
        {
            "image": ((300, 300, 3), "uint8"),
            "boxes": ((100, 4), "float32"),
            "labels": ((100,), "int32"),
            "crowd": ((100,), "bool"),
        },
        16384,
        24,
    ),
}


def v5e() -> list[Result]:
    """Bytes that draws, writes and whole updates of a device echo move on a TPU v5e.

    And in which type gradients are summed, in how many all-reduces.
    """
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = _one_of(topology)
    alone = [result for name in _ITEMS for result in _moved(name, mesh)]
    updates = [_update(name, *given, mesh) for name, given in _UPDATES.items()]
    four = _all_of(topology)
    reduced = [_reduced(dtype, four) for dtype in ("float32", "bfloat16")]
    return [*alone, *updates, *reduced, *_presets("v5e", "tpu", four)]


def h100() -> list[Result]:
    """Memory that draws and writes of a device echo need on an H100.

    XLA for GPUs does not count bytes that move. And in how many all-reduces the
    gradients of four are summed.
    """
    # Nothing can be timed here, and Triton's own programs are made by timing.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x4", target_config=_H100
    )
    mesh = _one_of(topology)
    alone = [result for name in _ITEMS for result in _needed(name, mesh)]
    return [*alone, *_presets("h100", "gpu", _all_of(topology))]


def _all_of(topology: Any) -> Mesh:
    return Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))


def _one_of(topology: Any) -> Mesh:
    return Mesh(np.array(topology.devices[:1]), ("data",), axis_types=(AxisType.Auto,))


def _moved(name: str, mesh: Mesh) -> list[Result]:
    _, slots, size = _ITEMS[name]
    buffer, least, programs = _programs(name, mesh)
    costs = {what: _cost(program) for what, program in programs.items()}
    peer, peer_temp = costs.pop("gather")
    held = buffer.num_bytes
    return [
        Result(
            f"v5e-{what}-{name}",
            f"bytes that a {what} of {size} of {slots:,} {name} items moves / the "
            "least",
            of_bytes / least,
            "<= 15",
            "x",
            f"a gather from items as they are: {peer / least:.0f} times, and "
            f"{peer_temp / held:.2f} of the buffer's bytes beside it",
            [of_bytes / least],
            f"as the compiler counts; {of_bytes / 1e6:.3g} MB, and "
            f"{temp / held:.2f} of the buffer's {held / 1e9:.2g} GB beside it",
        )
        for what, (of_bytes, temp) in costs.items()
    ]


def _needed(name: str, mesh: Mesh) -> list[Result]:
    _, slots, size = _ITEMS[name]
    buffer, _, programs = _programs(name, mesh)
    held = buffer.num_bytes
    beside = {
        what: program.memory_analysis().temp_size_in_bytes / held
        for what, program in programs.items()
    }
    peer = beside.pop("gather")
    return [
        Result(
            f"h100-{what}-{name}",
            f"memory that a {what} of {size} of {slots:,} {name} items needs beside "
            "its arguments / the buffer's",
            value,
            "<= 0.01",
            "x",
            f"a gather from items as they are: {peer:.2g}",
            [value],
            f"as the compiler plans it; the buffer has {held / 1e9:.2g} GB",
        )
        for what, value in beside.items()
    ]


def _programs(name: str, mesh: Mesh) -> tuple[EchoBuffer, int, dict[str, Any]]:
    """Compiles a draw, a write, and a gather from items as they are.

    Returns:
      The buffer, the least bytes that each has to move, and the programs.
    """
    item, slots, size = _ITEMS[name]
    batch = {
        key: np.zeros((size, *shape), dtype) for key, (shape, dtype) in item.items()
    }
    buffer = EchoBuffer.of(batch, num_slots=slots, mesh=mesh)
    of_rows, whole = buffer.sharding, NamedSharding(mesh, PartitionSpec())
    sent = jax.tree.map(lambda x: _abstract(x.shape, x.dtype, of_rows), batch)
    arrays = jax.tree.map(
        lambda x: _abstract(x.shape, x.dtype, of_rows), jax.eval_shape(buffer.zeros)
    )
    raw = {
        key: _abstract((slots, *x.shape[1:]), x.dtype, whole) for key, x in sent.items()
    }
    uses = StepInput(_abstract((1, 2, size), np.int32, whole))
    into = _abstract((1, size), np.int32, of_rows)
    draw = jax.jit(buffer.draw, out_shardings=of_rows)
    gather = jax.jit(lambda rows, at: jax.tree.map(lambda x: x[at], rows))
    lowered = {
        "draw": draw.lower(arrays, uses),
        "write": jitted_write(buffer).lower(arrays, sent, into),
        "gather": gather.lower(raw, _abstract((size,), np.int32, whole)),
    }
    # Each byte of the batch is read once and written once.
    least = 2 * sum(x.nbytes for x in batch.values())
    return buffer, least, {what: each.compile() for what, each in lowered.items()}


def _update(
    name: str,
    make_task: Any,
    augment: Augment,
    pixels: int,
    slots: int,
    size: int,
    mesh: Mesh,
) -> Result:
    """Compares an update on a draw with the same on a batch that comes augmented."""
    task = make_task()
    of_rows, whole = (NamedSharding(mesh, PartitionSpec(*on)) for on in (["data"], []))
    state, update = tasks.training(task)
    state = jax.tree.map(lambda x: _abstract(x.shape, x.dtype, whole), state)

    def batch(side: int) -> Any:
        return {
            "image": np.zeros((size, side, side, 3), np.uint8),
            "label": np.zeros(size, np.int32),
        }

    buffer = EchoBuffer.of(batch(pixels), num_slots=slots, mesh=mesh)
    arrays, given = (
        jax.tree.map(lambda x: _abstract(x.shape, x.dtype, of_rows), tree)
        for tree in (jax.eval_shape(buffer.zeros), batch(task.image_size))
    )
    uses = StepInput(_abstract((1, 4, size), np.int32, whole))

    @functools.partial(jax.jit, donate_argnums=0)
    def echoed(state: Any, arrays: Any, inputs: StepInput) -> Any:
        (drawn,) = buffer.draw(arrays, inputs, augment)
        return update(state, drawn)

    moved, beside = _cost(echoed.lower(state, arrays, uses).compile())
    host = jax.jit(update, donate_argnums=0).lower(state, given)
    peer, beside_peer = _cost(host.compile())
    return Result(
        f"v5e-update-{name}",
        f"bytes that an update moves with {size} drawn and augmented, of {slots:,} / "
        "on a batch that comes augmented",
        moved / peer,
        "<= 1.1",
        "x",
        f"the update on a host batch: {peer / 1e9:.3g} GB, and {beside_peer / 1e9:.2g} "
        "GB beside its arguments",
        [moved / peer],
        f"as the compiler counts, the body of a loop once; {moved / 1e9:.3g} GB, and "
        f"{beside / 1e9:.2g} GB beside its arguments and the buffer's "
        f"{buffer.num_bytes / 1e9:.2g} GB",
    )


def _reduced(dtype: str, mesh: Mesh) -> Result:
    """In which type four chips sum the gradients of a model that computes in one."""
    lowered, num_params = _update_of_lm({"model.dtype": dtype}, mesh)
    numbers = all_reduced(lowered.compile().as_text() or "").numbers
    counts = {name: numbers.get(name, 0) for name in ("bf16", "f32")}
    share = counts["bf16"] / sum(counts.values())
    return Result(
        f"v5e-reduced-{dtype}",
        f"numbers that are summed over 4 chips in bfloat16 / in any floating-point "
        f"type, by an update of the byte LM in {dtype}",
        share,
        "<= 0",
        "x",
        f"its parameters: {num_params:,}",
        [share],
        f"in the compiled program: {counts['bf16']:,} in bfloat16 and "
        f"{counts['f32']:,} in float32",
    )


def _presets(target: str, platform: str, mesh: Mesh) -> list[Result]:
    """How many all-reduces an update has, by the preset that is asked for."""
    sizes = {"model.d_model": 256, "model.num_layers": 4, "model.d_ff": 1024}
    lowered, num_params = _update_of_lm(sizes, mesh)
    results = []
    for preset, goal in _ALL_REDUCES.items():
        config = default_config()
        config.xla.preset = preset
        options = dict(xla_options(config, platform))
        program = lowered.compile(compiler_options=options).as_text() or ""
        number = all_reduced(program).count
        results.append(
            Result(
                f"{target}-preset-{preset}",
                f"all-reduces of an update of a Transformer over 4 devices, "
                f"xla.preset={preset}",
                number,
                goal,
                "all-reduces",
                f"{num_params:,} parameters in 37 arrays",
                [number],
                f"in the compiled program; {options or 'no options'}",
            )
        )
    return results


def _update_of_lm(fields: dict[str, Any], mesh: Mesh) -> tuple[Any, int]:
    """Returns the update of a byte LM over a mesh, lowered, and its parameters."""
    config = load_config("configs/lm.py:bytes", fields)
    functions = {"task": build(config).task, "optimizer": Optimizer.from_config(config)}
    of_rows, whole = (NamedSharding(mesh, PartitionSpec(*on)) for on in (["data"], []))
    key = jax.random.key(0)
    state = jax.eval_shape(functools.partial(init_state, **functions), key)
    run = jax.eval_shape(functools.partial(run_inputs, config), key)
    state, run = (
        jax.tree.map(lambda x: _abstract(x.shape, x.dtype, whole), tree)
        for tree in (state, run)
    )
    size, length = config.batch_size, config.model.seq_len + 1
    batch = {
        "tokens": _abstract((size, length), np.int32, of_rows),
        "repeat": _abstract((size,), np.int32, of_rows),
    }
    step = jax.jit(functools.partial(train_step, **functions))
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    return step.lower(state, batch, run), num_params


def _abstract(shape: Any, dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _cost(program: Any) -> tuple[float, float]:
    """Bytes that a program moves, and those that it needs beside its arguments."""
    moved = program.cost_analysis()["bytes accessed"]
    return moved, program.memory_analysis().temp_size_in_bytes
