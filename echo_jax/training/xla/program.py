"""What the compiled update does beside computing: what it sends, keeps, and hands over.

It is read from the program as XLA has scheduled it, for the devices of this machine or
for others that are not here. The program is made of shapes alone, and never run. The
body of a loop counts once, however often it runs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from echo_jax.config import Config
from echo_jax.config.echo import largest_factor
from echo_jax.echo.stores.device import jitted_write
from echo_jax.training.feeds.device_feed import DeviceBatching
from echo_jax.training.feeds.loader import take_sample
from echo_jax.training.feeds.of_config import outline_feed
from echo_jax.training.processes.sharding import (
    abstract,
    make_mesh,
    several_devices,
)
from echo_jax.training.trainer import compile_functions
from echo_jax.training.xla.hlo import Collectives, all_reduced, operations
from echo_jax.training.xla.target import Target
from echo_jax.workloads.base import Batch, Workload

__all__ = [
    "Collectives",
    "UpdateProgram",
    "all_reduced",
    "describe_update",
    "lower_update",
]


@dataclass(frozen=True)
class UpdateProgram:
    """What a compiled update does beside computing, for each device.

    Attributes:
      num_devices: How many there are.
      kind: Of which kind they are.
      examples: Of an update, over all devices.
      gradient_bytes: Of all gradients, in the types of the parameters.
      collectives: By their kind; with local updates those of an update after which
        replicas do not meet, as all of the numbers below.
      donated_bytes: Of the state, whose memory is handed over.
      reused_bytes: Of memory that the new state takes over from the old one, with what
        fills up tiles on a TPU.
      buffer_bytes: Of the buffer of an echo on the devices, which the update reads; 0
        without one.
      rewritten_bytes: Of that buffer, in whose place the program that writes a fresh
        batch leaves the new one.
      write_temporary_bytes: What that program needs beside its arguments and results.
      temporary_bytes: Beside arguments and results. A copy of the buffer would be here.
      peak_bytes: Arguments, results and what lies beside them.
      host_transfers: Operations that send to the host or wait for it.
      meeting: With local updates, the collectives of an update after which replicas
        meet; None without.

    Example:
      >>> summed = Collectives("all-reduce", 2, {"f32": 500_000, "bf16": 1_000_000})
      >>> print(UpdateProgram(8, "cpu", 64, 4e6, (summed,), 6e6, 6e6, 1e6, 9e6, 0))
      An update on 8 cpu devices, for each of them:
      all-reduce           2   4 MB   f32: 500,000, bf16: 1,000,000
      donated 6 MB; 6 MB of memory are reused in place
      at its peak 9 MB, of which 1 MB beside arguments and results
      0 transfers to or from the host
    """

    num_devices: int
    kind: str
    examples: int
    gradient_bytes: int
    collectives: tuple[Collectives, ...]
    donated_bytes: int
    reused_bytes: int
    temporary_bytes: int
    peak_bytes: int
    host_transfers: int
    buffer_bytes: int = 0
    rewritten_bytes: int = 0
    write_temporary_bytes: int = 0
    meeting: tuple[Collectives, ...] | None = None

    def __str__(self) -> str:
        on = f"{self.num_devices} {self.kind} device"
        if self.num_devices == 1:
            lines = [f"An update on {on}:"]
            fix = several_devices(jax.device_count())
            lines += [f"no collectives, for there is 1 device; {fix}"]
        else:
            lines = [
                f"An update on {on}s, for each of them:",
                *_lines(self.collectives),
            ]
        if self.meeting is not None:
            lines += ["and where replicas meet after it:", *_lines(self.meeting)]
        donated, reused = map(_megabytes, (self.donated_bytes, self.reused_bytes))
        peak, temporary = map(_megabytes, (self.peak_bytes, self.temporary_bytes))
        lines += [
            f"donated {donated}; {reused} of memory are reused in place",
            f"at its peak {peak}, of which {temporary} beside arguments and results",
        ]
        if self.buffer_bytes:
            rewritten = _megabytes(self.rewritten_bytes)
            lines.append(
                f"it reads a buffer of {_megabytes(self.buffer_bytes)}; a write of a "
                f"fresh batch reuses {rewritten} of it in place, and needs "
                f"{_megabytes(self.write_temporary_bytes)} beside it"
            )
        lines.append(f"{self.host_transfers} transfers to or from the host")
        return "\n".join(lines)


def _lines(collectives: tuple[Collectives, ...]) -> list[str]:
    lines = []
    for each in collectives:
        of = ", ".join(f"{name}: {n:,}" for name, n in each.numbers.items())
        line = f"{each.kind:18} {each.count:3}   {_megabytes(each.num_bytes)}   {of}"
        if each.between:
            between = ", ".join(map(str, each.between))
            line += f"   operations from start to end: {between}"
        lines.append(line)
    return lines or ["no collectives"]


def describe_update(
    config: Config, workload: Workload, target: Target | None = None
) -> UpdateProgram:
    """Compiles the update of a config, and reads it; reads one batch of the data.

    Args:
      config: A checked training config.
      workload: Made from this config.
      target: Devices that are not here, to compile for; by default those of this
        machine.

    Raises:
      ValueError: The config does not fit the devices.
    """
    devices = target.devices if target else None
    sample = take_sample(workload, config)
    mesh = make_mesh(
        config.mesh.data, config.mesh.fsdp, config.batch_size, devices=devices
    )
    absent = mesh if target else None
    compiled = compile_functions(config, workload, absent=absent)
    outline = outline_feed(
        config, workload, mesh, factor=largest_factor(config), sample=sample
    )

    def compile_lowered(lowered: Any) -> Any:
        return target.compile(lowered) if target else lowered.compile()

    program = compile_lowered(compiled.lower(*outline))
    memory = program.memory_analysis()
    collectives, host_transfers = operations(program.as_text() or "")
    meeting = None
    if compiled.local:
        meets = compile_lowered(compiled.lower(*outline, meets=True))
        meeting, _ = operations(meets.as_text() or "")
    model = jax.eval_shape(compiled.model, compiled.abstract_state)
    params = jax.tree.leaves(model.params)
    device = mesh.devices.flat[0]
    found = UpdateProgram(
        num_devices=mesh.size,
        kind=device.device_kind if target else device.platform,
        examples=config.batch_size,
        gradient_bytes=sum(x.size * x.dtype.itemsize for x in params),
        collectives=collectives,
        donated_bytes=_bytes_of_each(compiled.abstract_state),
        reused_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=_peak_bytes(memory),
        host_transfers=host_transfers,
        meeting=meeting,
    )
    batching, slots, _ = outline
    if not isinstance(batching, DeviceBatching):
        return found
    buffer = batching.buffer
    slots, fresh = (abstract(tree, buffer.sharding) for tree in (slots, sample))
    rows = config.batch_size // buffer.num_lanes
    into = jax.ShapeDtypeStruct((buffer.num_lanes, rows), jnp.int32)
    jitted: Any = jitted_write(buffer)
    write = jitted.lower(slots, fresh, abstract(into, buffer.sharding))
    memory = compile_lowered(write).memory_analysis()
    return replace(
        found,
        buffer_bytes=_bytes_of_each(slots),
        rewritten_bytes=memory.alias_size_in_bytes,
        write_temporary_bytes=memory.temp_size_in_bytes,
    )


def lower_update(
    config: Config, workload: Workload, sample: Batch, absent: Mesh
) -> Any:
    """Returns the program of an update before XLA compiles it.

    Args:
      config: A checked training config.
      workload: Made from this config.
      sample: A batch of what is upstream of the feed.
      absent: Devices that are not here; see `echo_jax.training.xla.target`.
    """
    compiled = compile_functions(config, workload, absent=absent)
    factor = largest_factor(config)
    return compiled.lower(
        *outline_feed(config, workload, absent, factor=factor, sample=sample)
    )


def _peak_bytes(memory: Any) -> int:
    """Returns what a program takes at most; what is reused in place counts once."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _bytes_of_each(tree: Any) -> int:
    """Returns the bytes that each device holds of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
