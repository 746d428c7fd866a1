"""Decision logs: the decisions of an adaptive echo, one bit for each batch.

An adaptive echo depends on when data was ready, which no seed can repeat. The log makes
it repeatable: an echo that gets it makes the same decisions again. It is a part of the
echo's state and, as ``decisions.json``, of a run folder.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_VERSION = 2
_KEYS = {"version", "decisions", "bits", "ends"}
# Ten years at one batch a second. A log is packed to an eighth of it in bytes.
_MAX_DECISIONS = 1 << 28


class DecisionLog(Sequence[bool]):
    """Whether an adaptive echo took fresh data before each of its batches.

    A log never changes, and is compared and hashed by its content. A million decisions
    take 125 kB, and as text at most 4/3 of that; a regular log takes a few kB.

    Attributes:
      ends: For each end of the upstream, the number of batches before it was found, and
        the rows of each lane that the upstream still had.

    Example:
      >>> log = DecisionLog([True, False, False, True])
      >>> len(log), list(log)
      (4, [True, False, False, True])
      >>> DecisionLog.from_json(log.to_json()) == log
      True
    """

    def __init__(
        self, decisions: Iterable[int] = (), ends: Iterable[tuple[int, int]] = ()
    ):
        """Makes a log of decisions in their order; ValueError for more than 2^28."""
        self.ends = tuple(ends)
        # A bytearray of 0 and 1 takes a thousandth of the time.
        if not isinstance(decisions, bytearray):
            decisions = bytearray(map(bool, decisions))
        taken = np.frombuffer(bytes(decisions), bool)
        self._packed, self._length = np.packbits(taken).tobytes(), taken.size
        if self._length > _MAX_DECISIONS:
            raise ValueError(
                f"a decision log holds at most {_MAX_DECISIONS} decisions; start the "
                "run again from a checkpoint of the model alone"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice) -> Any:
        place: Any = range(self._length)[index]
        if isinstance(index, slice):
            packed = np.frombuffer(self._packed, np.uint8)
            bits = np.unpackbits(packed, count=self._length)[index]
            return DecisionLog(bits, [end for end in self.ends if end[0] in place])
        return bool(self._packed[place // 8] >> (7 - place % 8) & 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecisionLog):
            return NotImplemented
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._length, self._packed, self.ends))

    def __repr__(self) -> str:
        taken = int.from_bytes(self._packed).bit_count()
        return f"<DecisionLog of {len(self)} decisions, {taken} of them yes>"

    def to_json(self) -> dict[str, Any]:
        """Returns ``version``; ``decisions``, their number; ``bits``; and ``ends``.

        The bits are the base64 text of their zlib stream. The first decision is the
        highest bit.
        """
        bits = base64.b64encode(zlib.compress(self._packed)).decode()
        ends = [list(end) for end in self.ends]
        return {"version": _VERSION, "decisions": len(self), "bits": bits, "ends": ends}

    @classmethod
    def from_json(cls, record: Any) -> "DecisionLog":
        """Returns the log of a record of `to_json`, which may come from any source.

        It decodes at most one bit for each stated decision: 32 MiB for the longest log,
        which a record of 43 kB may hold.

        Raises:
          ValueError: The record is anything else.
        """
        if isinstance(record, dict) and record.get("version", _VERSION) != _VERSION:
            raise ValueError(
                f"a decision log of version {record['version']!r:.40} is of another "
                f"version of echo_jax, whose batches differ; this one reads version "
                f"{_VERSION}. Restore it with that version, or start again."
            )
        if not isinstance(record, dict) or set(record) != _KEYS:
            raise ValueError(
                "this is not the record of a decision log; give what "
                f"DecisionLog.to_json returned: {', '.join(sorted(_KEYS))}"
            )
        decisions, ends = record["decisions"], record["ends"]
        if type(decisions) is not int or not 0 <= decisions <= _MAX_DECISIONS:
            raise ValueError(
                f"a decision log of {decisions!r:.40} decisions is refused; it must "
                f"have 0 to {_MAX_DECISIONS}"
            )
        size, stream = -(-decisions // 8), zlib.decompressobj()
        what = f"the bits of a decision log of {size} bytes"
        try:
            bits = base64.b64decode(record["bits"], validate=True)
            # A limit of 0 would mean no limit.
            packed = stream.decompress(bits, size + 1)
        except (TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"{what} cannot be decoded: {error}") from error
        if len(packed) != size or not stream.eof or stream.unused_data:
            raise ValueError(f"{what} must decode to exactly as many")
        if packed and packed[-1] & ~(0xFF << (-decisions % 8)):
            raise ValueError(
                f"a decision log has bits set after its {decisions} decisions"
            )
        try:
            log = cls(ends=[(at, rows) for at, rows in ends])
            places = [*(at for at, _ in log.ends), decisions]
            are_counts = all(type(x) is int and x >= 0 for end in log.ends for x in end)
            if not are_counts or places != sorted(places):
                raise ValueError
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the ends {ends!r:.80} of a decision log must be pairs of integers, "
                f"the first ones ascending to at most {decisions}"
            ) from error
        log._packed, log._length = packed, decisions
        return log

    def to_text(self) -> str:
        """Returns the log as the content of a file, with a checksum."""
        record = self.to_json()
        return json.dumps(record | {"crc32": _checksum(record)})

    @classmethod
    def from_text(cls, text: str | bytes) -> "DecisionLog":
        """Returns the log of a text of `to_text`, which may come from any source.

        Raises:
          ValueError: The text is anything else, or a part of one.

        Example:
          >>> DecisionLog.from_text(DecisionLog([True, False]).to_text())
          <DecisionLog of 2 decisions, 1 of them yes>
        """
        try:
            record = json.loads(text)
            # Logs of an earlier version have no checksum.
            found = record.pop("crc32", None) if isinstance(record, dict) else None
            if found not in (None, _checksum(record)):
                raise ValueError("it does not have the checksum of its content")
            return cls.from_json(record)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not a decision log: {error}") from error


def log_of(state: Mapping[str, Any]) -> DecisionLog | None:
    """Returns the decisions of an adaptive echo up to a state; None in other modes."""
    log = state["plan"].get("log")
    return None if log is None else DecisionLog.from_json(log)


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"
