"""What the compiled update does beside computing: what it sends, keeps, and hands over.

It is read from the program as XLA has scheduled it for the devices of this machine. The
body of a loop counts once, however often it runs.
"""

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.training.hlo import Collectives, all_reduced, operations
from echo_jax.training.loader import measure_loader
from echo_jax.training.measure import held_feed
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads.base import Workload

__all__ = ["Collectives", "UpdateProgram", "all_reduced", "describe_update"]


@dataclass(frozen=True)
class UpdateProgram:
    """What a compiled update does beside computing, for each device.

    Attributes:
      devices: How many, and of which kind.
      collectives: By their kind.
      donated_bytes: Of the state, whose memory is handed over.
      reused_bytes: Of what is handed over, that the new state takes the place of.
      peak_bytes: Arguments, results and what lies beside them.
      host_transfers: Operations that send to the host or wait for it.

    Example:
      >>> summed = Collectives("all-reduce", 2, {"f32": 500_000, "bf16": 1_000_000})
      >>> print(UpdateProgram("8 cpu", (summed,), 6_000_000, 6_000_000, 9_000_000, 0))
      An update on 8 cpu devices, for each of them:
      all-reduce           2   4 MB   f32: 500,000, bf16: 1,000,000
      donated 6 MB, of which 6 MB are reused in place; at its peak 9 MB
      0 transfers to or from the host
    """

    devices: str
    collectives: tuple[Collectives, ...]
    donated_bytes: int
    reused_bytes: int
    peak_bytes: int
    host_transfers: int

    def __str__(self) -> str:
        lines = [f"An update on {self.devices} devices, for each of them:"]
        for each in self.collectives:
            of = ", ".join(f"{name}: {n:,}" for name, n in each.numbers.items())
            line = (
                f"{each.kind:18} {each.count:3}   {_megabytes(each.num_bytes)}   {of}"
            )
            if each.between:
                between = ", ".join(map(str, each.between))
                line += f"   operations from start to end: {between}"
            lines.append(line)
        if not self.collectives:
            lines.append("no collectives")
        donated, reused = map(_megabytes, (self.donated_bytes, self.reused_bytes))
        lines.append(
            f"donated {donated}, of which {reused} are reused in place; at its peak "
            f"{_megabytes(self.peak_bytes)}"
        )
        lines.append(f"{self.host_transfers} transfers to or from the host")
        return "\n".join(lines)


def describe_update(config: Config, workload: Workload) -> UpdateProgram:
    """Compiles the update of a config for the devices of this machine, and reads it.

    Args:
      config: A checked training config.
      workload: Made from this config.

    Raises:
      ValueError: The config does not fit the devices.
    """
    compiled = compile_functions(config, workload)
    loader = measure_loader(workload, config, most=1)
    with closing(held_feed(compiled, config, loader)) as feed:
        state = compiled.init(compiled.init_key)
        program = compiled.trace(state, feed).lower().compile()
    platform = compiled.mesh.devices.flat[0].platform
    devices = f"{compiled.mesh.size} {platform}"
    return _read(program, devices, compiled.abstract_state)


def _read(program: Any, devices: str, state: Any) -> UpdateProgram:
    """Reads a program to which a state is donated, of shapes and shardings."""
    text, memory = program.as_text() or "", program.memory_analysis()
    collectives, host_transfers = operations(text)
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    # On each device.
    donated = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    reused = memory.alias_size_in_bytes
    return UpdateProgram(devices, collectives, donated, reused, peak, host_transfers)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
