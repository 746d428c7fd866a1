"""The time that devices spend in collectives, as a trace of the profiler tells it.

A collective runs from where a device enters it until it has the result, so waiting for
the devices that enter later is part of it. That is what was seen of CPU devices, in one
process and in several, with jax 0.10 and 0.12: every operation of a device stands on
some host thread, with its name, and with the device's number within the process.

How the traces of GPUs and TPUs look is taken from what XLA and NCCL publish; none was
seen here. There a device has a plane of its own. On a GPU, kernels stand on its
streams, and those of collectives are NCCL's or belong to an operation that is a
collective; what runs within a CUDA graph may lack both. On a TPU, operations stand on
the line of XLA's operations, and those that go on behind other ones, from start to
done, on the line of asynchronous ones.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

__all__ = ["Op", "Share", "Trace", "covered", "op_of", "read_trace"]

Interval = tuple[float, float]

_HOST = "/host:CPU"
_ACCELERATOR = re.compile(r"/device:(GPU|TPU):\d+")
_ASYNC_LINE = "Async XLA Ops"

# Names of XLA, and of the jax functions that an operation may be named after.
_COLLECTIVES = {
    "all-gather",
    "all-gather-invariant",
    "all-reduce",
    "all-reduce-scatter",
    "all-to-all",
    "async-collective",
    "collective-broadcast",
    "collective-permute",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "psum-invariant",
    "ragged-all-to-all",
    "reduce-scatter",
}
# They last as long as the operations inside of them, which stand for themselves.
_CONTAINERS = {"call", "conditional", "while"}
# "%name = type opcode(operands)": how a TPU names its operations.
_OPCODE = re.compile(r" = .*? ([a-z][a-z0-9-]*)\(")


@dataclass(frozen=True)
class Op:
    """An operation on a device.

    Attributes:
      start_ns: When it started; any clock that all operations share.
      end_ns: When it ended.
      is_collective: Whether devices work together in it.
      is_behind: Whether it goes on behind the other operations, so that it keeps the
        device from nothing.
    """

    start_ns: float
    end_ns: float
    is_collective: bool
    is_behind: bool = False


@dataclass(frozen=True)
class Share:
    """How much of a time a device spent in collectives, as fractions of it.

    Attributes:
      collective: A collective ran.
      exposed: A collective ran, and no other operation of this device.
    """

    collective: float
    exposed: float


@dataclass(frozen=True)
class Trace:
    """What the profiler recorded in one process.

    Attributes:
      window: From when until when the steps ran that were marked.
      ops: The operations by device, of devices that had any.
    """

    window: Interval
    ops: Mapping[str, Sequence[Op]]

    @property
    def seconds(self) -> float:
        """How long the marked steps took."""
        return (self.window[1] - self.window[0]) / 1e9

    def shares(self) -> dict[str, Share]:
        """Returns what every device spent in collectives, of the window."""
        shares = {device: _share(ops, self.window) for device, ops in self.ops.items()}
        return {device: share for device, share in shares.items() if share}


def covered(intervals: Iterable[Interval]) -> float:
    """Returns how much time intervals cover; what several cover counts once.

    Args:
      intervals: Pairs of start and end, in any order; empty if the end is no later.

    Example:
      >>> covered([(0, 2), (5, 6), (1, 4)])
      5
    """
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total


def _share(ops: Sequence[Op], window: Interval) -> Share | None:
    """Returns what a device spent in collectives; None if it did nothing."""
    first, last = window
    inside = [
        (op, (max(op.start_ns, first), min(op.end_ns, last)))
        for op in ops
        if op.start_ns < last and op.end_ns > first
    ]
    if not inside:
        return None
    collective = [interval for op, interval in inside if op.is_collective]
    other = [
        interval for op, interval in inside if not (op.is_collective or op.is_behind)
    ]
    length = last - first
    return Share(
        collective=covered(collective) / length,
        exposed=(covered([*collective, *other]) - covered(other)) / length,
    )


def op_of(name: str) -> str | None:
    """Returns what kind of operation a name stands for, as a trace gives it.

    Args:
      name: Of an operation of XLA, such as ``all-reduce-start.3``, its whole line, or
        the name of a kernel.

    Returns:
      ``"collective"``, ``"other"``, or None if other operations stand for it.

    Example:
      >>> op_of("all-gather-done.1"), op_of("dot.7"), op_of("while.2")
      ('collective', 'other', None)
    """
    if name.startswith(("ncclDevKernel", "ncclKernel")):
        return "collective"
    line = _OPCODE.search(name)
    kinds = {_kind(name.split(" ")[0]), _kind(line[1]) if line else ""}
    if kinds & _COLLECTIVES:
        return "collective"
    return None if kinds & _CONTAINERS else "other"


def _kind(name: str) -> str:
    """Returns ``all-reduce`` for ``%all-reduce-start.3``."""
    kind = name.removeprefix("%").split(".")[0].replace("_", "-")
    return re.sub("-(start|update|done)$", "", kind)


def read_trace(file: Path, mark: str) -> Trace | None:
    """Reads what the profiler wrote.

    Args:
      file: Its ``.xplane.pb``.
      mark: The name of the annotation that surrounds every step.

    Returns:
      The trace, or None if it does not hold the annotation.
    """
    with warnings.catch_warnings():
        # From Python 3.12 on a type of jaxlib warns when it is first used, and where
        # warnings are errors that aborts the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _read_trace(file, mark)


def _read_trace(file: Path, mark: str) -> Trace | None:
    marks: list[Interval] = []
    ops: dict[str, list[Op]] = {}
    for plane in ProfileData.from_file(str(file)).planes:
        if plane.name == _HOST:
            for line in plane.lines:
                for event in line.events:
                    if event.name == mark:
                        marks.append((event.start_ns, event.end_ns))
                    stats = dict(event.stats)
                    if "hlo_op" in stats and "device_ordinal" in stats:
                        device = f"CPU:{stats['device_ordinal']}"
                        ops.setdefault(device, []).extend(_op(event, stats["hlo_op"]))
        elif _ACCELERATOR.fullmatch(plane.name):
            found = [*_accelerator_ops(plane)]
            if found:
                ops[plane.name.removeprefix("/device:")] = found
    if not marks:
        return None
    window = min(start for start, _ in marks), max(end for _, end in marks)
    return Trace(window, ops)


def _accelerator_ops(plane: Any) -> Iterator[Op]:
    """Returns the operations of a GPU or a TPU; what the host copies is none."""
    for line in plane.lines:
        if line.name in ("XLA Ops", _ASYNC_LINE):
            for event in line.events:
                yield from _op(event, event.name, is_behind=line.name == _ASYNC_LINE)
        elif line.name.startswith("Stream"):
            for event in line.events:
                if event.name.startswith("nccl"):
                    yield from _op(event, event.name)
                elif hlo_op := dict(event.stats).get("hlo_op"):
                    yield from _op(event, hlo_op)


def _op(event: Any, name: str, *, is_behind: bool = False) -> Iterator[Op]:
    kind = op_of(name)
    if kind:
        yield Op(event.start_ns, event.end_ns, kind == "collective", is_behind)
