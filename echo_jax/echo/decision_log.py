"""Decision logs: what an adaptive echo decided, one bit for each batch.

What an adaptive echo does depends on when data was ready, which no seed can
repeat. Written down, it can be repeated: the log goes into the echo's state and, as
``tape.json``, into a run folder, and an echo that is given it does the same again.
"""

import base64
import binascii
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

__all__ = ["DecisionLog", "Recorder", "log_of"]

_VERSION = 1
_KEYS = {"version", "decisions", "bits"}
# Ten years at one batch a second. A log is packed to an eighth of it in bytes.
_MAX_DECISIONS = 1 << 28
_LEVEL = 6


class DecisionLog(Sequence[bool]):
    """Whether an adaptive echo took fresh data before each of its batches.

    It never changes, and is equal and hashed by its decisions. A log of a million
    decisions takes at most 125 kB, times 4/3 as text; regular ones take a few kB.

    Example:
      >>> log = DecisionLog([True, False, False, True])
      >>> len(log), list(log)
      (4, [True, False, False, True])
      >>> DecisionLog.from_json(log.to_json()) == log
      True
    """

    def __init__(self, decisions: Iterable[bool] = ()):
        """Takes the decisions, in their order."""
        self._decisions = bytes(bytearray(map(bool, decisions)))

    @classmethod
    def _of(cls, decisions: bytes | bytearray) -> "DecisionLog":
        log = cls()
        log._decisions = bytes(decisions)
        return log

    def __len__(self) -> int:
        return len(self._decisions)

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> "DecisionLog": ...

    def __getitem__(self, index: int | slice) -> "bool | DecisionLog":
        if isinstance(index, slice):
            return self._of(self._decisions[index])
        return bool(self._decisions[index])

    def __iter__(self) -> Iterator[bool]:
        return map(bool, self._decisions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecisionLog):
            return NotImplemented
        return self._decisions == other._decisions

    def __hash__(self) -> int:
        return hash(self._decisions)

    def __repr__(self) -> str:
        taken = sum(self._decisions)
        return f"<DecisionLog of {len(self)} decisions, {taken} of them yes>"

    def starts_with(self, other: "DecisionLog") -> bool:
        """Whether this log goes on where the other ends, after the same decisions."""
        return self._decisions.startswith(other._decisions)

    def to_json(self) -> dict[str, Any]:
        """Returns the log as JSON types.

        Returns:
          ``version``; ``decisions``, how many there are; and ``bits``, the base64
          of the zlib stream of the bits, the first decision in the highest bit.
        """
        return _record(len(self), zlib.compress(_packed(self._decisions), _LEVEL))

    @classmethod
    def from_json(cls, record: Any) -> "DecisionLog":
        """Returns the log of a record, which may come from anywhere.

        No more is decoded than the stated number of decisions takes.

        Args:
          record: What `to_json` returned.

        Raises:
          ValueError: If it is anything else.
        """
        if not isinstance(record, dict) or set(record) != _KEYS:
            raise ValueError(
                "this is not the record of a decision log; give what "
                "DecisionLog.to_json returned: "
                f"{', '.join(sorted(_KEYS))}"
            )
        if type(record["version"]) is not int or record["version"] != _VERSION:
            raise ValueError(
                f"decision log version {record['version']!r:.40} is unknown; this "
                f"version of echo_jax reads version {_VERSION}"
            )
        decisions, bits = record["decisions"], record["bits"]
        if type(decisions) is not int or not 0 <= decisions <= _MAX_DECISIONS:
            raise ValueError(
                f"a decision log of {decisions!r:.40} decisions is refused; it must "
                f"have 0 to {_MAX_DECISIONS}"
            )
        size = -(-decisions // 8)
        if not isinstance(bits, str) or len(bits) > _max_text(size):
            raise ValueError(
                f"the bits of a decision log of {decisions} decisions must be text of "
                f"at most {_max_text(size)} characters"
            )
        unpacked = np.unpackbits(np.frombuffer(_inflate(bits, size), np.uint8))
        if unpacked[decisions:].any():
            raise ValueError(
                f"a decision log has bits set after its {decisions} decisions"
            )
        return cls._of(unpacked[:decisions].tobytes())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the log to a file, whole or not at all.

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
    def load(cls, path: str | os.PathLike[str]) -> "DecisionLog":
        """Reads a decision log from a file, which may come from anywhere.

        Raises:
          OSError: If there is no such file.
          ValueError: If it is not a decision log.
        """
        with open(path, "rb") as file:
            return cls.read(file, name=os.fspath(path))

    @classmethod
    def read(cls, file: IO[bytes], *, name: str) -> "DecisionLog":
        """Reads a decision log from an open file, wherever that lies.

        Args:
          file: Positioned at its start.
          name: What it is called in an error.

        Raises:
          ValueError: If it is not a decision log.
        """
        limit = _max_text(_MAX_DECISIONS // 8) + 1000
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{name} is larger than any decision log, {limit} bytes")
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not a decision log: it is not JSON") from error
        return cls.from_json(record)


class Recorder:
    """A decision log in the making, whose JSON is cheap to ask for at any time.

    All whole bytes are compressed as they come, so that a state saved after every
    batch costs the compression of the last bits alone.

    Example:
      >>> recorder = Recorder()
      >>> for decision in (True, False, True):
      ...     recorder.append(decision)
      >>> DecisionLog.from_json(recorder.to_json()) == recorder.log
      True
    """

    def __init__(self):
        """Starts empty."""
        self._decisions = bytearray()
        self._stream = zlib.compressobj(_LEVEL)
        self._compressed = bytearray()
        self._done = 0  # decisions that are in the stream

    def __len__(self) -> int:
        return len(self._decisions)

    @property
    def log(self) -> DecisionLog:
        """The decisions so far."""
        return DecisionLog._of(self._decisions)

    def append(self, decision: bool) -> None:
        """Adds a decision at the end.

        Raises:
          ValueError: If the log is full.
        """
        if len(self._decisions) >= _MAX_DECISIONS:
            raise ValueError(
                f"a decision log holds at most {_MAX_DECISIONS} decisions; start the "
                "run anew from a checkpoint of the model alone"
            )
        self._decisions.append(bool(decision))

    def to_json(self) -> dict[str, Any]:
        """Returns the log so far as `DecisionLog.to_json` does."""
        whole = len(self._decisions) // 8 * 8
        if whole > self._done:
            fresh = _packed(self._decisions[self._done : whole])
            self._compressed += self._stream.compress(fresh)
            self._done = whole
        stream = self._stream.copy()
        tail = stream.compress(_packed(self._decisions[whole:])) + stream.flush()
        return _record(len(self), bytes(self._compressed) + tail)


def log_of(state: Mapping[str, Any]) -> DecisionLog | None:
    """Returns what an adaptive echo decided until it gave a state.

    Where a thread makes batches ahead of their use, the state of a batch says less than
    the echo itself, which is ahead.

    Args:
      state: From ``get_state`` of any echo.

    Returns:
      The decisions; None where the echo was not adaptive.
    """
    log = state["plan"].get("log")
    return None if log is None else DecisionLog.from_json(log)


def _packed(decisions: bytes | bytearray) -> bytes:
    return np.packbits(np.frombuffer(decisions, np.uint8)).tobytes()


def _record(decisions: int, stream: bytes) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "decisions": decisions,
        "bits": base64.b64encode(stream).decode(),
    }


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
        raise ValueError(
            f"the bits of a decision log cannot be decoded: {error}"
        ) from error
    if len(content) != size or not stream.eof or stream.unused_data:
        raise ValueError(
            f"the bits of a decision log must decode to exactly the {size} bytes that "
            "its number of decisions states"
        )
    return content
