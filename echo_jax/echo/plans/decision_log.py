"""Tapes: the decisions of an adaptive echo, one bit for each update.

What an adaptive echo does depends on when data was ready, which no seed can
repeat. Written down, it can be repeated: the tape goes into the checkpoint and the
workdir, and an echo that is given it does the same again.
"""

import base64
import binascii
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

__all__ = ["Tape"]

_VERSION = 1
_KEYS = {"version", "decisions", "bits"}
# Ten years at one update a second. A tape is packed to an eighth of it in bytes.
_MAX_DECISIONS = 1 << 28


class Tape(Sequence[bool]):
    """A sequence of decisions that grows at its end.

    A tape of a million decisions takes at most 125 kB, times 4/3 as text; regular
    ones take a few kB.

    Example:
      >>> tape = Tape([True, False, False])
      >>> tape.append(True)
      >>> len(tape), list(tape)
      (4, [True, False, False, True])
      >>> Tape.from_json(tape.to_json()) == tape
      True
    """

    def __init__(self, decisions: Iterable[bool] = ()):
        """Starts with some decisions."""
        self._decisions = bytearray(map(bool, decisions))

    def append(self, decision: bool) -> None:
        """Adds a decision at the end.

        Raises:
          ValueError: If the tape is full.
        """
        if len(self._decisions) >= _MAX_DECISIONS:
            raise ValueError(
                f"a tape holds at most {_MAX_DECISIONS} decisions; start the run "
                "anew from a checkpoint of the model alone"
            )
        self._decisions.append(bool(decision))

    def __len__(self) -> int:
        return len(self._decisions)

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> "Tape": ...

    def __getitem__(self, index: int | slice) -> "bool | Tape":
        if isinstance(index, slice):
            return Tape(map(bool, self._decisions[index]))
        return bool(self._decisions[index])

    def __iter__(self) -> Iterator[bool]:
        return map(bool, self._decisions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tape):
            return NotImplemented
        return self._decisions == other._decisions

    def __repr__(self) -> str:
        return f"<Tape of {len(self)} decisions, {sum(self._decisions)} of them yes>"

    def starts_with(self, other: "Tape") -> bool:
        """Whether this tape goes on where the other ends, after the same decisions."""
        return self._decisions.startswith(other._decisions)

    def to_json(self) -> dict[str, Any]:
        """Returns the tape as JSON types.

        Returns:
          ``version``; ``decisions``, how many there are; and ``bits``, the base64
          of the zlib stream of the bits, the first decision in the highest bit.
        """
        packed = np.packbits(np.frombuffer(self._decisions, np.uint8))
        return {
            "version": _VERSION,
            "decisions": len(self),
            "bits": base64.b64encode(zlib.compress(packed.tobytes(), 6)).decode(),
        }

    @classmethod
    def from_json(cls, record: Any) -> "Tape":
        """Returns the tape of a record, which may come from anywhere.

        No more is decoded than the stated number of decisions takes.

        Args:
          record: What `to_json` returned.

        Raises:
          ValueError: If it is anything else.
        """
        if not isinstance(record, dict) or set(record) != _KEYS:
            raise ValueError(
                "this is not the record of a tape; give what Tape.to_json returned: "
                f"{', '.join(sorted(_KEYS))}"
            )
        if type(record["version"]) is not int or record["version"] != _VERSION:
            raise ValueError(
                f"tape version {record['version']!r:.40} is unknown; this version of "
                f"echo_jax reads version {_VERSION}"
            )
        decisions, bits = record["decisions"], record["bits"]
        if type(decisions) is not int or not 0 <= decisions <= _MAX_DECISIONS:
            raise ValueError(
                f"a tape of {decisions!r:.40} decisions is refused; it must have 0 to "
                f"{_MAX_DECISIONS}"
            )
        size = -(-decisions // 8)
        if not isinstance(bits, str) or len(bits) > _max_text(size):
            raise ValueError(
                f"the bits of a tape of {decisions} decisions must be text of at most "
                f"{_max_text(size)} characters"
            )
        tape = cls()
        unpacked = np.unpackbits(np.frombuffer(_inflate(bits, size), np.uint8))
        if unpacked[decisions:].any():
            raise ValueError(f"a tape has bits set after its {decisions} decisions")
        tape._decisions = bytearray(unpacked[:decisions].tobytes())
        return tape

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tape to a file, whole or not at all.

        Raises:
          OSError: If it cannot be written; a file that was there stays as it was.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("w", encoding="ascii") as file:
                json.dump(self.to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tape":
        """Reads a tape from a file, which may come from anywhere.

        Raises:
          OSError: If there is no such file.
          ValueError: If it is not a tape.
        """
        with open(path, "rb") as file:
            return cls.read(file, name=os.fspath(path))

    @classmethod
    def read(cls, file: IO[bytes], *, name: str) -> "Tape":
        """Reads a tape from an open file, wherever that lies.

        Args:
          file: Positioned at its start.
          name: What it is called in an error.

        Raises:
          ValueError: If it is not a tape.
        """
        limit = _max_text(_MAX_DECISIONS // 8) + 1000
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{name} is larger than any tape, {limit} bytes")
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not a tape: it is not JSON") from error
        return cls.from_json(record)


def _max_text(size: int) -> int:
    """Characters that the bits of so many bytes take at most.

    A zlib stream outgrows its content by 5 bytes in 16 kB, and a frame of 6 bytes
    (zlib's own bound, ``deflateBound``, is looser for small ones).
    """
    return (size + size // 1000 + 64) * 4 // 3 + 4


def _inflate(bits: str, size: int) -> bytes:
    """Decodes text that must hold exactly so many bytes, and no more than these."""
    try:
        packed = base64.b64decode(bits, validate=True)
        stream = zlib.decompressobj()
        # With a limit of 0 it would be unlimited.
        content = stream.decompress(packed, size + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError(f"the bits of a tape cannot be decoded: {error}") from error
    if len(content) != size or not stream.eof or stream.unused_data:
        raise ValueError(
            f"the bits of a tape must decode to exactly the {size} bytes that its "
            "number of decisions states"
        )
    return content
