"""Several processes in one run: who is who, and what all of them agree on.

Every process runs the same program on the devices of all, and makes its shards of
every batch. What the host decides must be decided alike everywhere, or the processes
wait for each other for ever: measured times, the update at which a run stops, what is
logged. So values are gathered from all, or taken from the first process for all.
"""

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding

from echo_jax.config import Config
from echo_jax.echo.shard import DataShard
from echo_jax.training.processes import peers
from echo_jax.training.processes.interrupt import Interrupted

__all__ = [
    "all_gather",
    "broadcast_from_first",
    "call_with_host_arrays",
    "connected",
    "fetch_global",
    "is_main_process",
    "local_mesh",
    "own_shards",
    "put",
    "replicate",
    "this_shard",
    "view_with_sharding",
    "wait_for_all",
]

# Longer than the first process looks whether a run folder is free.
_WAIT_FOR_ALL_MS = 600_000
# Of jax's runtime, which sees less often who is gone than `peers` does, and says it
# worse: half of this may pass between two of its signs.
_HEARTBEAT_TIMEOUT_S = 200

_Arrays = TypeVar("_Arrays")


@contextlib.contextmanager
def connected(config: Config) -> Iterator[None]:
    """Connects the processes of a run; to be entered before any device is asked for.

    If it is left by an error, this process tells the others, and ends without waiting
    for them, which jax would do for ever, as they wait for it.

    Args:
      config: A training config.

    Raises:
      RuntimeError: The processes do not find each other.
    """
    _initialize(config)
    with peers.joined():
        try:
            yield
        except BaseException as error:
            all_stop = isinstance(error, Interrupted) and not peers.has_ended()
            if jax.distributed.is_initialized() and not all_stop:
                peers.fail(error)
                # Once the error is told, and before what jax does at the end.
                atexit.register(_leave, getattr(error, "exit_code", 1))
            raise


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    peers.leave_ended()
    os._exit(status)


def _initialize(config: Config) -> None:
    """Connects the processes.

    With an address in ``config.distributed.coordinator`` it is that of the first
    process. Without one, jax looks for a cluster that it knows in the environment
    (Cloud TPU, SLURM, Open MPI, Kubernetes); where there is none, this process is
    alone.
    """
    wanted = config.distributed
    if wanted.coordinator:
        jax.distributed.initialize(
            coordinator_address=wanted.coordinator,
            num_processes=wanted.num_processes,
            process_id=wanted.process_id,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        )
    elif wanted.detect:
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S)
        except (ValueError, RuntimeError) as error:
            # That no cluster was found is said by what is missing. And a program that
            # has used jax already, such as a test of a command, is alone.
            alone = ("coordinator_address", "must be called before any JAX calls")
            if not any(words in str(error) for words in alone):
                raise


def is_main_process() -> bool:
    """Whether this process is the one that writes and shows what all of them do."""
    return jax.process_index() == 0


def this_shard() -> DataShard:
    """Returns the data shard that is due to this process where all share evenly."""
    return DataShard(jax.process_index(), jax.process_count())


def own_shards(num_shards: int) -> tuple[DataShard, ...]:
    """Returns the data shards that this process makes.

    Args:
      num_shards: Into how many the data of the run is cut.

    Raises:
      ValueError: The processes do not divide the shards.
    """
    processes = jax.process_count()
    if num_shards % processes:
        raise ValueError(
            f"the run's data is cut into {num_shards} shards, which {processes} "
            "processes cannot share evenly; use a number of processes that divides "
            f"{num_shards}, or start another run with --config.data.shards={processes}"
        )
    each = num_shards // processes
    first = jax.process_index() * each
    return tuple(DataShard(i, num_shards) for i in range(first, first + each))


def all_gather(value: Any) -> list[Any]:
    """Returns what every process gives, in the order of processes.

    All processes have to call it. It waits for all updates that were dispatched.

    Args:
      value: Plain data, as JSON holds it.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size], np.int32)).ravel()
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def broadcast_from_first(value: Any) -> Any:
    """Returns what the first process gives; see `all_gather`."""
    return all_gather(value)[0]


def wait_for_all(what: str) -> None:
    """Waits until all processes are here, for minutes.

    Gathering would not do: where nothing was gathered before, it fails on CPUs if one
    process comes half a minute after the others.

    Args:
      what: A name for it.
    """
    ocp.multihost.get_barrier_sync_fn()(
        key=f"echo_jax_{what}", timeout_ms=_WAIT_FOR_ALL_MS
    )


def put(tree: Any, sharding: Any) -> Any:
    """Starts the transfer of host arrays to the devices.

    Args:
      tree: Arrays; of what is split over processes, this process' part.
      sharding: How they lie on the devices of all: a sharding, or a tree of them.

    Returns:
      Arrays over the devices of all processes.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def send(x: Any, sharding: Sharding) -> jax.Array:
        if isinstance(x, jax.Array):  # There already.
            return x
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    # A sharding may stand for a tree.
    shardings = jax.tree.map(lambda s, t: jax.tree.map(lambda _: s, t), sharding, tree)
    return jax.tree.map(send, tree, shardings)


def call_with_host_arrays(function: Callable[..., _Arrays], *args: Any) -> _Arrays:
    """Calls a function of jax; arrays and numbers of the host cross with the call.

    That takes less time than `put`, and ``jax_transfer_guard`` allows it.

    Args:
      function: Compiled, or of few operations.
      *args: Its arguments.
    """
    with jax.transfer_guard_host_to_device("allow"):
        return function(*args)


def replicate(make: Callable[[], _Arrays], sharding: Sharding) -> _Arrays:
    """Returns what every process computes alike, on all devices.

    Args:
      make: Computes it, a pytree; pure.
      sharding: Replicated over the devices of all.
    """
    if jax.process_count() == 1:
        return jax.device_put(call_with_host_arrays(make), sharding)
    return jax.jit(make, out_shardings=sharding)()


def fetch_global(array: jax.Array) -> np.ndarray:
    """Returns an array on the host, wherever its parts lie.

    All processes have to call it.
    """
    if jax.process_count() == 1 or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    return multihost_utils.process_allgather(array, tiled=True)


def local_mesh(mesh: Mesh) -> Mesh:
    """Returns the devices of this process, along one axis."""
    if jax.process_count() == 1:
        return mesh
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return Mesh(np.array(own), ("data",))


def view_with_sharding(tree: Any, sharding: Any, *, times: int) -> Any:
    """Returns arrays of the same memory under another sharding.

    Between the arrays of a process alone and those of all: the rows on each device
    stay there, and only the number of rows that are spoken of changes.

    Args:
      tree: Arrays whose leading axis is split over devices.
      sharding: The other one, of the same devices or more or fewer processes.
      times: Processes over which the rows are spoken of; 1 for this one alone.
    """

    def wrap(x: jax.Array) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        rows = sum(len(shard) for shard in shards)
        return jax.make_array_from_single_device_arrays(
            (rows * times, *x.shape[1:]), sharding, shards
        )

    return jax.tree.map(wrap, tree)
