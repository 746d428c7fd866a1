"""The bytes that a compiled program sends between devices, read from its text."""

import math
import re
from collections import Counter
from typing import Any

__all__ = ["collectives", "sent_bytes"]

# "%name = type opcode(operands), attributes". The type of the end of a collective, of
# one that has a start and an end, is that of its result alone.
_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|ragged-all-to-all"
    r"|reduce-scatter)(?:-done)?\((.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
# On TPUs an all-reduce that runs beside other operations is printed in pieces.
_PIECE = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')


def collectives(text: str) -> list[tuple[str, Counter[str]]]:
    """Returns the collectives of a program, the body of a loop once.

    Args:
      text: The compiled program, as XLA prints it.

    Returns:
      Kind, such as ``"all-reduce"``, and the elements of its result by their type.
    """
    found: list[tuple[str, Counter[str]]] = []
    pieces: set[tuple[str, ...]] = set()
    for shape, kind, rest in _COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", text)):
        if piece := _PIECE.search(rest):
            if piece.groups() in pieces:
                continue
            pieces.add(piece.groups())
        elements: Counter[str] = Counter()
        for dtype, dims in _ARRAY.findall(shape):
            elements[dtype] += math.prod(int(each) for each in dims.split(",") if each)
        found.append((kind, elements))
    return found


def sent_bytes(program: Any) -> int:
    """Returns the bytes that come out of the collectives of a program, on each device.

    What a ring of N devices sends for an all-reduce is 2(N - 1)/N of it.

    Args:
      program: As jax compiles it.
    """
    return sum(
        count * _itemsize(dtype)
        for _, elements in collectives(program.as_text() or "")
        for dtype, count in elements.items()
    )


def _itemsize(dtype: str) -> int:
    """The names of XLA's types have their bits."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
