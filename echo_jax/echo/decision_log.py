"""Decision logs: what an adaptive echo decided, one bit for each batch.

What an adaptive echo does depends on when data was ready, which no seed can
repeat. Written down, it can be repeated: the log goes into the echo's state and, as
``tape.json``, into a run folder, and an echo that is given it does the same again.
"""

import base64
import binascii
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

__all__ = ["DecisionLog", "Recorder", "log_of"]

_VERSION = 1
_SUM = "crc32"
_KEYS = {"version", "decisions", "bits"}
# Ten years at one batch a second. A log is packed to an eighth of it in bytes.
_MAX_DECISIONS = 1 << 28
_LEVEL = 6
_UNPACKED_AT_ONCE = 1 << 16


class DecisionLog(Sequence[bool]):
    """Whether an adaptive echo took fresh data before each of its batches.

    It never changes, and is equal and hashed by its decisions. A log of a million
    decisions takes 125 kB, and as text at most 4/3 of that; regular ones a few kB.

    Example:
      >>> log = DecisionLog([True, False, False, True])
      >>> len(log), list(log)
      (4, [True, False, False, True])
      >>> DecisionLog.from_json(log.to_json()) == log
      True
    """

    def __init__(self, decisions: Iterable[bool] = ()):
        """Takes the decisions, in their order."""
        taken = bytearray(map(bool, decisions))
        self._packed, self._length = _packed(taken), len(taken)

    @classmethod
    def _of(cls, packed: bytes, length: int) -> "DecisionLog":
        log = cls()
        log._packed, log._length = packed, length
        return log

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> "DecisionLog": ...

    def __getitem__(self, index: int | slice) -> "bool | DecisionLog":
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if (start, step) == (0, 1):
                return self._first(stop)
            decisions = self._unpacked(0, self._length)[index]
            return self._of(_packed(decisions.tobytes()), decisions.size)
        place = range(self._length)[index]
        return bool(self._packed[place // 8] >> (7 - place % 8) & 1)

    def __iter__(self) -> Iterator[bool]:
        for start in range(0, self._length, _UNPACKED_AT_ONCE):
            stop = min(start + _UNPACKED_AT_ONCE, self._length)
            yield from map(bool, self._unpacked(start, stop).tobytes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecisionLog):
            return NotImplemented
        return (self._length, self._packed) == (other._length, other._packed)

    def __hash__(self) -> int:
        return hash((self._length, self._packed))

    def __repr__(self) -> str:
        return f"<DecisionLog of {len(self)} decisions, {self.count(True)} of them yes>"

    def count(self, value: Any) -> int:
        """Returns how many decisions are this one; no decision is looked at alone."""
        yes = int.from_bytes(self._packed).bit_count()
        return (self._length - yes, yes)[bool(value)] if value in (False, True) else 0

    def starts_with(self, other: "DecisionLog") -> bool:
        """Whether this log goes on where the other ends, after the same decisions."""
        return self._length >= other._length and self._first(other._length) == other

    def _first(self, count: int) -> "DecisionLog":
        """Returns so many decisions from the start on."""
        packed = bytearray(self._packed[: -(-count // 8)])
        if packed:
            packed[-1] &= 0xFF << (-count % 8) & 0xFF
        return self._of(bytes(packed), count)

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        """Returns decisions, ``uint8[stop - start]``; ``start`` is a multiple of 8."""
        packed = self._packed[start // 8 : -(-stop // 8)]
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=stop - start)

    def to_json(self) -> dict[str, Any]:
        """Returns the log as JSON types.

        Returns:
          ``version``; ``decisions``, how many there are; and ``bits``, the base64
          of the zlib stream of the bits, the first decision in the highest bit.
        """
        return _record(len(self), zlib.compress(self._packed, _LEVEL))

    @classmethod
    def from_json(cls, record: Any) -> "DecisionLog":
        """Returns the log of a record, which may come from anywhere.

        No more is decoded than the stated number of decisions takes, a bit each: 32
        MiB for the longest log, which may come out of 43 kB.

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
        packed = _inflate(bits, size)
        if size and packed[-1] & ~(0xFF << (-decisions % 8)):
            raise ValueError(
                f"a decision log has bits set after its {decisions} decisions"
            )
        return cls._of(packed, decisions)

    def to_text(self) -> str:
        """Returns the log as the content of a file, with a checksum; see `read`."""
        record = self.to_json()
        return json.dumps(record | {_SUM: _checksum(record)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the log to a file, whole or not at all.

        Raises:
          OSError: If it cannot be written; a file that was there stays as it was.
        """
        path = Path(path)
        # A name that nobody can know before, and a file that is not there yet: else a
        # link of that name would lead to a file that is overwritten.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        with temporary.open("x", encoding="ascii") as file:
            try:
                file.write(self.to_text())
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                # Ctrl-C may come when the file has its name already.
                temporary.unlink(missing_ok=True)
                raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "DecisionLog":
        """Reads a decision log from a file, which may come from anywhere.

        Raises:
          OSError: If there is no such file.
          ValueError: If it is not a decision log.
        """
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(
                    f"{os.fspath(path)} is not a decision log: it is no regular file"
                )
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
        try:
            # Those of an earlier version have no checksum.
            if isinstance(record, dict) and _SUM in record:
                found = record.pop(_SUM)
                if found != _checksum(record):
                    raise ValueError("it does not have the checksum of its content")
            return cls.from_json(record)
        except ValueError as error:
            raise ValueError(f"{name} is not a decision log: {error}") from error


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
        return DecisionLog._of(_packed(self._decisions), len(self))

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


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting, since a named pipe would wait for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _packed(decisions: bytes | bytearray) -> bytes:
    return np.packbits(np.frombuffer(decisions, np.uint8)).tobytes()


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


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
