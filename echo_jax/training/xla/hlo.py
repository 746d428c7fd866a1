"""What a compiled program sends, as XLA prints it: its collectives, by their kind.

The body of a loop counts once, however often it runs. On TPUs an all-reduce that runs
beside other operations is printed once at its start, once in every operation that it
runs beside, and once at its end: these are one.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

__all__ = ["Collectives", "all_reduced", "operations", "sent_bytes"]

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
# "%name (parameters) -> type {"
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLS = re.compile(r"calls=%?([\w.-]+)")
# A piece of a collective of a TPU, of all the pieces with the same numbers.
_PIECE = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
_FUSED_START, _FUSED_DONE = "async-collective-start", "async-collective-done"
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


def all_reduced(text: str) -> Collectives:
    """Returns the all-reduces of a program, as XLA prints it."""
    found = {each.kind: each for each in operations(text)[0]}
    return found.get("all-reduce", Collectives("all-reduce", 0, {}))


def sent_bytes(program: Any) -> int:
    """Returns the bytes that come out of the collectives of a compiled program.

    On each device: what a ring of N sends for an all-reduce is 2(N - 1)/N of it.

    Args:
      program: As jax compiles it.
    """
    found, _ = operations(program.as_text() or "")
    return sum(each.num_bytes for each in found)


def operations(text: str) -> tuple[tuple[Collectives, ...], int]:
    """Returns the collectives of a program, and how often it meets the host."""
    counts: Counter[str] = Counter()
    numbers: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}
    between: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    started: dict[str, tuple[str, int]] = {}
    pieces: set[tuple[str, ...]] = set()
    fused: dict[str, str] = {}
    place = host_transfers = 0
    computation = ""
    for line in _COMMENT.sub("", text).splitlines():
        found = _OPERATION.match(line)
        if not found:
            begins = _COMPUTATION.match(line)
            computation = begins[1] if begins else computation
            continue
        name, shape, opcode, rest = found.groups()
        place += opcode not in _FREE
        host_transfers += opcode in _TO_HOST or _calls_host(opcode, rest)
        kind = opcode.removesuffix("-start")
        if kind in _KINDS:
            piece = _PIECE.search(rest)
            if piece:
                fused[computation] = kind
                if piece.groups() in pieces:
                    continue
                pieces.add(piece.groups())
            counts[kind] += 1
            numbers[kind].update(_numbers(shape, opcode))
            started[name] = kind, place
        elif name.startswith(_FUSED_START) and opcode == "fusion":
            called = _CALLS.search(rest)
            started[name] = fused.get(called[1] if called else "", ""), place
        elif name.startswith(_FUSED_DONE) and opcode == "fusion":
            kind, begun = started.pop(name.replace(_FUSED_DONE, _FUSED_START), ("", 0))
            if kind:
                between[kind].append(place - begun - 1)
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
