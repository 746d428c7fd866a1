"""Several processes in one run: their identity and their common decisions.

Every process runs the same program on the devices of all, and makes its shards of
every batch. All processes must take the same host decisions, or they wait for each
other for ever: measured times, the update at which a run stops, logged values. So
values are gathered from all processes, or the first process decides for all.
"""

import atexit
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import DataShard
from echo_jax.terminal.notes import Notes
from echo_jax.terminal.printable import printable
from echo_jax.training.processes.stop import Interrupted

# Longer than the first process checks whether a run folder is free.
_WAIT_FOR_ALL_MS = 600_000
# What jax goes by, of Slurm, Open MPI, Kubernetes and its own.
_OF_CLUSTERS = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST")
_OF_CLUSTERS += ("OMPI_COMM_WORLD_", "KUBERNETES_SERVICE_HOST", "JAX_COORDINATOR_")


@contextlib.contextmanager
def connected(config: RunSpec) -> Iterator[None]:
    """Connects the processes of a run; enter it before any use of a device."""
    _initialize(config)
    try:
        yield
    except BaseException as error:
        # The others do not come to the barrier of a normal exit: they train on until
        # jax's runtime misses this process. After a signal all stop together.
        if jax.distributed.is_initialized() and not isinstance(error, Interrupted):
            # The last one runs first, and all before jax's own exit handlers.
            atexit.register(os._exit, getattr(error, "exit_code", 1))
            atexit.register(sys.stdout.flush)
        raise


def _initialize(config: RunSpec) -> None:
    wanted = config.distributed
    given: dict[str, Any] = {}
    if wanted.coordinator:
        given = {name: wanted[name] for name in ("num_processes", "process_id")}
        found = {f"--config.distributed.{name}": x for name, x in given.items()}
        given["coordinator_address"] = wanted.coordinator
        fix = "start all of them, with the same coordinator"
    elif wanted.detect:
        found = {n: x for n, x in os.environ.items() if n.startswith(_OF_CLUSTERS)}
        given = {"num_processes": _num_tasks(os.environ.get("SLURM_NTASKS", ""))}
        fix = "start all, or train in one with --config.distributed.detect=False"
    else:
        return
    run = printable(" ".join(f"{name}={x}" for name, x in sorted(found.items())))
    late = f"the other processes of {run} have not come; {fix}"
    with Notes().slow(f"waiting: {late}"):
        try:
            jax.distributed.initialize(**given)
        except (KeyError, RuntimeError, ValueError) as error:
            # Without a cluster, jax names the missing argument. A program that has
            # used jax already, such as a test of a command, is alone.
            alone = ("coordinator_address", "must be called before any JAX calls")
            if wanted.coordinator or not any(words in str(error) for words in alone):
                kind = RuntimeError if isinstance(error, RuntimeError) else ValueError
                what = f"the processes of {run} cannot be connected: {error}"
                raise kind(f"{what}; correct that and {fix}") from error


def _num_tasks(text: str) -> int | None:
    """Returns the sum of Slurm's short form: 7 of ``"2(x3),1"``; None of another."""
    one = r"(\d+)(?:\(x(\d+)\))?"
    if text.isdecimal() or not re.fullmatch(f"{one}(?:,{one})*", text):
        return None
    return sum(int(n) * int(times or 1) for n, times in re.findall(one, text))


def is_alone() -> bool:
    """Whether this process is not connected with others; asks for no devices."""
    return not jax.distributed.is_initialized()


def is_main_process() -> bool:
    """Whether this process writes and shows results for all."""
    return jax.process_index() == 0


def this_shard() -> DataShard:
    """Returns the data shard of this process when all share evenly."""
    return DataShard(jax.process_index(), jax.process_count())


def own_shards(num_shards: int) -> tuple[DataShard, ...]:
    """Returns the data shards that this process makes."""
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
    """Returns the JSON values of all processes, which all have to call it."""
    if jax.process_count() == 1:
        return [value]
    # This waits for all updates that were dispatched.
    data = json.dumps(value).encode()
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32))
    padded = data.ljust(sizes.max())  # JSON may end with spaces.
    rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return [json.loads(row.tobytes()) for row in rows.reshape(sizes.size, -1)]


def broadcast_from_first(value: Any) -> Any:
    """Returns the value of the first process; all have to call it."""
    return all_gather(value)[0]


def wait_for_all(what: str) -> None:
    """Waits until all processes are here, for up to `_WAIT_FOR_ALL_MS`."""
    # A first gather would fail on CPUs if one process comes half a minute late.
    ocp.multihost.get_barrier_sync_fn()(
        key=f"echo_jax_{what}", timeout_ms=_WAIT_FOR_ALL_MS
    )
