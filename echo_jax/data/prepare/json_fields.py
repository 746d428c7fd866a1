"""Reads some fields of a JSON object from a stream, in bounded memory."""

import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any

import ijson

__all__ = ["read_fields"]

_PART_BYTES = 64 * 1024
# The parser holds a complete text or number in memory before it returns it.
_MAX_VALUE_BYTES = 16 * 1024**2
_MAX_DEPTH = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Size of containers in CPython, rounded up, with the slot of one value.
_MAP_BYTES, _ARRAY_BYTES, _PLACE_BYTES = 232, 96, 48
_STARTS = {"start_map": dict, "start_array": list}
_ENDS = frozenset({"end_map", "end_array"})


def read_fields(
    chunks: Iterable[bytes],
    fields: Container[str],
    *,
    without: Container[str],
    max_bytes: int,
) -> dict[str, Any]:
    """Returns the wanted fields of an object, within `max_bytes` of memory."""
    keeper = _Keeper(fields, without, max_bytes)
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    silent_bytes = 0
    try:
        for part in _parts(chunks):
            parser.send(part)
            silent_bytes = 0 if events else silent_bytes + len(part)
            if silent_bytes > _MAX_VALUE_BYTES:
                raise ValueError(f"it holds a text of over {_MAX_VALUE_BYTES} bytes")
            keeper.take(events)
            del events[:]
        parser.close()
    except (ijson.JSONError, OverflowError) as error:
        # Later lines of the message only show the place.
        reason = str(error).partition("\n")[0]
        raise ValueError(f"it is not JSON: {reason}") from error
    keeper.take(events)
    if not isinstance(keeper.found, dict):
        raise ValueError("it is no JSON object")
    return keeper.found


def _parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    is_first = True
    for chunk in chunks:
        if is_first:
            chunk, is_first = chunk.removeprefix(_BYTE_ORDER_MARK), False
        for start in range(0, len(chunk), _PART_BYTES):
            yield chunk[start : start + _PART_BYTES]


class _Keeper:
    """Builds the wanted value from a parser's events, and counts its memory."""

    def __init__(self, fields: Container[str], without: Container[str], limit: int):
        self.found: Any = None
        self._fields, self._without = fields, without
        self._limit, self._kept_bytes = limit, 0
        self._open: list[Any] = []  # The containers around the next value.
        self._key = ""
        # Share one text among all objects with this field.
        self._keys: dict[str, str] = {}
        self._skipped_depth = 0

    def take(self, events: Iterable[tuple[str, Any]]) -> None:
        """Processes the next events."""
        for event, value in events:
            if self._skipped_depth:
                self._skipped_depth += (event in _STARTS) - (event in _ENDS)
            elif event == "map_key":
                self._key = value
            elif event in _ENDS:
                self._open.pop()
            elif not self._is_wanted():
                self._skipped_depth = int(event in _STARTS)
            else:
                self._keep(event, value)
            if self._skipped_depth + len(self._open) > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")

    def _is_wanted(self) -> bool:
        """Returns whether the next value is wanted."""
        if len(self._open) == 1:
            return self._key in self._fields
        of_entry = len(self._open) == 3 and type(self._open[-1]) is dict
        return not (of_entry and self._key in self._without)

    def _keep(self, event: str, value: Any) -> None:
        if event in _STARTS:
            value = _STARTS[event]()
            size = _MAP_BYTES if event == "start_map" else _ARRAY_BYTES
        else:
            size = sys.getsizeof(value)
        if not self._open:
            self.found = value
        elif type(self._open[-1]) is dict:
            key = self._keys.get(self._key)
            if key is None:
                key = self._keys[self._key] = self._key
                size += sys.getsizeof(key) + _MAP_BYTES
            self._open[-1][key] = value
        else:
            self._open[-1].append(value)
        if event in _STARTS:
            self._open.append(value)
        self._kept_bytes += size + _PLACE_BYTES
        if self._kept_bytes > self._limit:
            raise ValueError(f"what it holds takes more than {self._limit} bytes")
