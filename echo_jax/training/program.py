"""What the compiled update does beside computing: what it sends, keeps, and hands over.

It is read from the program as XLA has scheduled it for the devices of this machine. The
body of a loop counts once, however often it runs.
"""

import math
import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.training.loader import measure_loader
from echo_jax.training.measure import held_feed
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads.base import Workload

__all__ = ["Collectives", "UpdateProgram", "all_reduced", "describe_update"]

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# A start of these has what is sent in its type, before what is received.
_BOTH_IN_TYPE = ("all-gather-start", "collective-permute-start")
_TO_HOST = ("infeed", "outfeed", "recv", "send")
_FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")
# "  ROOT %name = type opcode(operands), attributes"
_OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind in a program.

    Attributes:
      kind: ``"all-reduce"``, ...
      count: How many.
      numbers: Elements that come out of them, by XLA's name of their type.
      between: Of each that has a start and an end, how many operations stand between:
        what may overlap with it.
    """

    kind: str
    count: int
    numbers: dict[str, int]
    between: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that come out of them on each device."""
        return sum(_itemsize(name) * count for name, count in self.numbers.items())


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
    collectives, host_transfers = _operations(text)
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


def all_reduced(text: str) -> Collectives:
    """Returns the all-reduces of a program, as XLA prints it."""
    found = {each.kind: each for each in _operations(text)[0]}
    return found.get("all-reduce", Collectives("all-reduce", 0, {}))


def _operations(text: str) -> tuple[tuple[Collectives, ...], int]:
    """Returns the collectives of a program, and how often it meets the host."""
    counts: Counter[str] = Counter()
    numbers: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}
    between: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    started: dict[str, tuple[str, int]] = {}
    place = host_transfers = 0
    for line in _COMMENT.sub("", text).splitlines():
        found = _OPERATION.match(line)
        if not found:
            continue
        name, shape, opcode, rest = found.groups()
        place += opcode not in _FREE
        host_transfers += opcode in _TO_HOST or _calls_host(opcode, rest)
        kind = opcode.removesuffix("-start")
        if kind in _KINDS:
            counts[kind] += 1
            numbers[kind].update(_numbers(shape, opcode))
            started[name] = kind, place
        elif opcode.endswith("-done"):
            for operand in re.findall(r"%?([\w.-]+)", rest.partition(")")[0]):
                if operand in started:
                    kind, begun = started.pop(operand)
                    between[kind].append(place - begun - 1)
    collectives = tuple(
        Collectives(kind, counts[kind], dict(numbers[kind]), tuple(between[kind]))
        for kind in _KINDS
        if counts[kind]
    )
    return collectives, host_transfers


def _calls_host(opcode: str, rest: str) -> bool:
    return opcode == "custom-call" and "callback" in rest


def _numbers(shape: str, opcode: str) -> Counter[str]:
    """Counts the elements of a type, by the types of its arrays."""
    arrays = _ARRAY.findall(shape)
    if opcode in _BOTH_IN_TYPE:
        arrays = [each for each in arrays if each != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    counts: Counter[str] = Counter()
    for dtype, dims in arrays:
        counts[dtype] += math.prod(int(each) for each in dims.split(",") if each)
    return counts


def _itemsize(dtype: str) -> int:
    """Returns the bytes of an element; XLA's names of types have their bits."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
