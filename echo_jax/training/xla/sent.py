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
    """Returns each collective's kind, and its result's elements by type."""
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
    """Returns the bytes that a program's collectives give to each device."""
    # For an all-reduce, a ring of N devices sends 2(N - 1)/N times as many.
    total = 0
    for _, elements in collectives(program.as_text() or ""):
        for dtype, count in elements.items():
            bits = re.search(r"\d+", dtype)  # XLA's names of types have their bits.
            total += count * max(1, int(bits.group()) // 8 if bits else 1)
    return total
