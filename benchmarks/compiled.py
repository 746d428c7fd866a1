"""What the programs of a device echo move on accelerators, compiled without having one.

It needs the extra `aot`, and neither a TPU nor a GPU.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import tasks
from benchmarks.collectives import compile_for, lower_update, target_devices
from benchmarks.harness import Result
from echo_jax.config import load_config
from echo_jax.data.augment import Augment, Flip, PadCrop, RandomResizedCrop
from echo_jax.echo.stores.device import EchoBuffer, jitted_write
from echo_jax.training.arrays import make_mesh
from echo_jax.training.xla import collectives
from echo_jax.workloads import build

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
    devices = target_devices("v5e:2x2")
    mesh = _one_of(devices)
    alone = [result for name in _ITEMS for result in _moved(name, mesh)]
    updates = [_update(name, *given, mesh) for name, given in _UPDATES.items()]
    reduced = [_reduced(dtype, devices) for dtype in ("float32", "bfloat16")]
    return [*alone, *updates, *reduced, *_presets("v5e", devices)]


def h100() -> list[Result]:
    """Memory that draws and writes of a device echo need on an H100.

    XLA for GPUs does not count bytes that move. And in how many all-reduces the
    gradients of four are summed.
    """
    devices = target_devices("h100x4")
    mesh = _one_of(devices)
    alone = [result for name in _ITEMS for result in _needed(name, mesh)]
    return [*alone, *_presets("h100", devices)]


def _one_of(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices[:1]), ("data",), axis_types=(AxisType.Auto,))


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
    uses = _abstract((1, 2, size), np.int32, whole)
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
    programs = {what: compile_for(mesh, each) for what, each in lowered.items()}
    return buffer, least, programs


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
    uses = _abstract((1, 4, size), np.int32, whole)

    @functools.partial(jax.jit, donate_argnums=0)
    def echoed(state: Any, arrays: Any, inputs: Any) -> Any:
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


def _reduced(dtype: str, devices: Sequence[Any]) -> Result:
    """In which type four chips sum the gradients of a model that computes in one."""
    found, num_params = _all_reduces({"precision.compute": dtype}, devices)
    counts = {name: sum(each[name] for each in found) for name in ("bf16", "f32")}
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


def _presets(name: str, devices: Sequence[Any]) -> list[Result]:
    """How many all-reduces an update has, by the preset that is asked for."""
    sizes = {"model.d_model": 256, "model.num_layers": 4, "model.d_ff": 1024}
    results = []
    for preset, goal in _ALL_REDUCES.items():
        fields = {**sizes, "xla.preset": preset}
        found, num_params = _all_reduces(fields, devices)
        number = len(found)
        results.append(
            Result(
                f"{name}-preset-{preset}",
                f"all-reduces of an update of a Transformer over 4 devices, "
                f"xla.preset={preset}",
                number,
                goal,
                "all-reduces",
                f"{num_params:,} parameters in 37 arrays",
                [number],
                "in the compiled program",
            )
        )
    return results


def _all_reduces(
    fields: dict[str, Any], devices: Sequence[Any]
) -> tuple[list[Counter[str]], int]:
    """Returns those of the update of a byte LM, and its number of parameters."""
    config = load_config("configs/lm.py:bytes", fields)
    shape = (config.batch_size, config.model.seq_len + 1)
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "repeat": np.zeros(config.batch_size, np.int32),
    }
    mesh = make_mesh(-1, 1, config.batch_size, devices=devices)
    program = compile_for(mesh, lower_update(config, mesh, batch))
    found = collectives(program.as_text() or "")
    params = jax.eval_shape(build(config).task.init, jax.random.key(0))["params"]
    num_params = sum(x.size for x in jax.tree.leaves(params))
    return [each for kind, each in found if kind == "all-reduce"], num_params


def _abstract(shape: Any, dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _cost(program: Any) -> tuple[float, float]:
    """Bytes that a program moves, and those that it needs beside its arguments."""
    moved = program.cost_analysis()["bytes accessed"]
    return moved, program.memory_analysis().temp_size_in_bytes
