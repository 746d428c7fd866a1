"""JSON files with a checksum that detects changes by a disk.

Each object has the field ``crc32``, a checksum of its other fields. Objects without it,
from earlier versions, are accepted.
"""

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from echo_jax.files.folders import RunPath

_SUM = "crc32"


class DamagedFileError(ValueError):
    """A file is damaged (`what` says how); the message names it."""

    def __init__(self, path: RunPath, what: object):
        self.what = str(what)
        super().__init__(
            f"{path} is damaged: {what}; put back a copy of it, or use another "
            "--workdir"
        )


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object with its checksum."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return {**content, _SUM: f"{zlib.crc32(text.encode()):08x}"}


def unseal(content: Any) -> dict[str, Any]:
    """Returns an object without its checksum; raises ValueError if it is wrong."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {type(content).__name__}, not an object")
    rest = {name: value for name, value in content.items() if name != _SUM}
    if _SUM in content and seal(rest) != content:
        raise ValueError("it does not have the checksum that it was written with")
    return rest


# `fields` maps names to types. Dotted names are nested. A name with a question mark,
# and everything below it, may be missing.
def missing(content: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Returns the first fault of an object's fields in words, or ``""``."""
    for dotted, kind in fields.items():
        name = dotted.replace("?", "")
        first, *parts = name.split(".")
        if "?" in dotted and first not in content:
            continue
        value: Any = content
        for part in (first, *parts):
            if not isinstance(value, Mapping) or part not in value:
                return f"it lacks {name!r}"
            value = value[part]
        if not isinstance(value, kind):
            return f"{name!r} is {value!r:.60}"
    return ""


def read_json(
    path: RunPath, fields: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Reads a JSON object with these fields (see `missing`); None without a file."""
    try:
        content = unseal(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, error) from error
    if what := missing(content, fields or {}):
        raise DamagedFileError(path, what)
    return content


def read_if_whole(
    path: RunPath, fields: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Reads a JSON file that can be made again; None if missing or damaged."""
    try:
        return read_json(path, fields)
    except DamagedFileError:
        return None


def write_json(
    path: RunPath, content: Mapping[str, Any], *, indent: int | None = 2
) -> None:
    """Replaces a JSON file atomically; NaN and infinities become null."""
    path.write(json.dumps(seal(plain(content)), indent=indent) + "\n")


def read_line(line: bytes) -> dict[str, Any]:
    """Returns the object of a line from `json_line`."""
    return unseal(json.loads(line))


def json_line(content: Mapping[str, Any]) -> str:
    """Returns a line of JSON with its end; NaN and infinities become null."""
    return json.dumps(seal(plain(content))) + "\n"


def plain(value: Any) -> Any:
    """Returns the value with null for every float that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
