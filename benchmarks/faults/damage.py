"""What a disk, a transfer or a stranger makes of a file."""

import random
from pathlib import Path

_NUMBERS = (b"-1", b"0", b"1e999", b"99999999999999999999", b"null", b'"a"', b"[]")


def flip_or_cut(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flips a bit of a file, or cuts it.

    Args:
      data: The file, not empty.
      rng: Decides where.

    Returns:
      Other bytes, and what was done.
    """
    if rng.random() < 0.25:
        # Where a line ends is where a cut is hardest to see.
        ends = [at + 1 for at, byte in enumerate(data[:-1]) if byte == ord("\n")]
        at_line = ends and rng.random() < 0.5
        length = rng.choice(ends) if at_line else rng.randrange(len(data))
        return data[:length], f"cut to {length} of {len(data)} bytes"
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed), f"bit {bit} of byte {at} of {len(data)} flipped"


def damage(file: Path, rng: random.Random) -> str:
    """Flips a bit of a file in place, or cuts it; says what was done."""
    data, what = flip_or_cut(file.read_bytes() or b"\0", rng)
    file.write_bytes(data)
    return f"{file.name}: {what}"


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes a valid file as a fuzzer does, once to four times.

    Args:
      data: The file.
      rng: Decides how.

    Returns:
      Flips, cuts, parts that are repeated, moved or overwritten, and numbers of other
      sizes in place of those that are there; perhaps the same bytes.
    """
    for _ in range(rng.randint(1, 4)):
        if data:
            data = rng.choice(_MUTATIONS)(data, rng)
    return data


def _flips(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _removed(data: bytes, rng: random.Random) -> bytes:
    start, stop = _part(data, rng)
    return data[:start] + data[stop:]


def _repeated(data: bytes, rng: random.Random) -> bytes:
    start, stop = _part(data, rng)
    return data[:stop] + data[start:stop] * rng.randint(1, 20) + data[stop:]


def _moved(data: bytes, rng: random.Random) -> bytes:
    start, stop = _part(data, rng)
    to = rng.randrange(len(data))
    return data[:to] + data[start:stop] + data[to:]


def _overwritten(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice((b"\0" * size, b"\xff" * size, rng.randbytes(size)))
    return data[:at] + value + data[at + size :]


def _other_number(data: bytes, rng: random.Random) -> bytes:
    starts = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not starts:
        return _overwritten(data, rng)
    start = stop = rng.choice(starts)
    while stop < len(data) and 48 <= data[stop] <= 57:
        stop += 1
    return data[:start] + rng.choice(_NUMBERS) + data[stop:]


def copied_lines(data: bytes, rng: random.Random) -> bytes:
    """Repeats or removes a line."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at : at + 1] = [lines[at]] * rng.choice((0, 2, 3))
    return b"".join(lines)


def _part(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.randint(1, 64))


_MUTATIONS = (
    _flips,
    _flips,
    _cut,
    _removed,
    _repeated,
    _moved,
    _overwritten,
    _other_number,
    copied_lines,
)
