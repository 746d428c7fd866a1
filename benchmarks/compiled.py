"""What the programs of a device echo move on a TPU, compiled for it without having it.

It needs libtpu, which `pip install 'echo-jax[tpu]'` brings, and no TPU.
"""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import Result
from echo_jax.echo.stores.device import EchoBuffer, StepInput, jitted_write

__all__ = ["compiled"]

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


def compiled() -> list[Result]:
    """Bytes that a draw and an insertion move, over what they must move."""
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = Mesh(np.array(topology.devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    return [
        result
        for name, (item, slots, rows) in _ITEMS.items()
        for result in _programs(name, item, slots, rows, mesh)
    ]


def _programs(name: str, item: Any, slots: int, size: int, mesh: Mesh) -> list[Result]:
    batch = {
        key: np.zeros((size, *shape), dtype) for key, (shape, dtype) in item.items()
    }
    buffer = EchoBuffer.of(batch, num_slots=slots, mesh=mesh)
    of_rows, whole = buffer.sharding, NamedSharding(mesh, PartitionSpec())
    sent = jax.tree.map(lambda x: _abstract(x.shape, x.dtype, of_rows), batch)
    uses = StepInput(_abstract((1, 2, size), np.int32, whole))
    into = _abstract((1, size), np.int32, of_rows)

    arrays = jax.tree.map(
        lambda x: _abstract(x.shape, x.dtype, of_rows), jax.eval_shape(buffer.zeros)
    )
    draw = jax.jit(buffer.draw, out_shardings=of_rows).lower(arrays, uses)
    ours = {
        "draw": _cost(draw),
        "write": _cost(jitted_write(buffer).lower(arrays, sent, into)),
    }
    raw = {
        key: _abstract((slots, *x.shape[1:]), x.dtype, whole) for key, x in sent.items()
    }
    gather = jax.jit(lambda rows, at: jax.tree.map(lambda x: x[at], rows))
    peer, peer_temp = _cost(gather.lower(raw, _abstract((size,), np.int32, whole)))
    # Each byte of the batch is read once and written once.
    least = 2 * sum(x.nbytes for x in batch.values())
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
        for what, (of_bytes, temp) in ours.items()
    ]


def _abstract(shape: Any, dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _cost(lowered: Any) -> tuple[float, float]:
    """Bytes that a program moves, and those that it needs beside its arguments."""
    program = lowered.compile()
    moved = program.cost_analysis()["bytes accessed"]
    return moved, program.memory_analysis().temp_size_in_bytes
