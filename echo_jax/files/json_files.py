"""JSON files that tell when a disk has changed them.

Each object carries ``crc32``, a checksum of all else in it. One without it, of an
earlier version, is taken as it is.
"""

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from echo_jax.files.folders import RunPath

__all__ = [
    "DamagedFileError",
    "json_line",
    "missing",
    "plain",
    "read_if_whole",
    "read_json",
    "read_line",
    "seal",
    "unseal",
    "write_json",
]

_SUM = "crc32"


class DamagedFileError(ValueError):
    """A file is not what was written; the message names it.

    Attributes:
      what: What is wrong with it.
    """

    def __init__(self, path: RunPath, what: object):
        self.what = str(what)
        super().__init__(
            f"{path} is damaged: {what}; put back a copy of it, or use another "
            "--workdir"
        )


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object with its checksum.

    Args:
      content: JSON values.

    Example:
      >>> seal({"updates": 60})
      {'updates': 60, 'crc32': 'd4f0f1d1'}
    """
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return {**content, _SUM: f"{zlib.crc32(text.encode()):08x}"}


def unseal(content: Any) -> dict[str, Any]:
    """Returns an object without its checksum.

    Args:
      content: As it was read.

    Raises:
      ValueError: It is no object, or does not have the checksum of its content.
    """
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {type(content).__name__}, not an object")
    rest = {name: value for name, value in content.items() if name != _SUM}
    if _SUM in content and seal(rest) != content:
        raise ValueError("it does not have the checksum that it was written with")
    return rest


def missing(content: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Says what an object lacks; ``""`` if nothing.

    Args:
      content: The object.
      fields: Names, dotted where they lie in each other, and types; a name with a
        question mark, and what lies in it, may be left out.

    Example:
      >>> missing({"name": "a", "arms": 3}, {"name": str, "arms": list})
      "'arms' is 3"
    """
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
    """Reads a JSON file.

    Args:
      path: The file.
      fields: What it has to hold, if anything; see `missing`.

    Returns:
      Its content, or None if there is no such file.

    Raises:
      DamagedFileError: It is no JSON object, not the one that was written, or lacks
        a field.
    """
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
    """Reads a JSON file that can be made again.

    Args:
      path: The file.
      fields: See `read_json`.

    Returns:
      Its content, or None if there is no such file, or a damaged one.
    """
    try:
        return read_json(path, fields)
    except DamagedFileError:
        return None


def write_json(
    path: RunPath, content: Mapping[str, Any], *, indent: int | None = 2
) -> None:
    """Writes a JSON file so that a reader sees the old file or the new one.

    Args:
      path: The file; replaced if it exists.
      content: Plain data. NaN and infinities become null, which JSON has.
      indent: Spaces before each level; None for a single line.
    """
    path.write(json.dumps(seal(plain(content)), indent=indent) + "\n")


def read_line(line: bytes) -> dict[str, Any]:
    """Returns the object of a line of JSON.

    Args:
      line: As `json_line` has written it.

    Raises:
      ValueError: It is no JSON object, or not the one that was written.
    """
    return unseal(json.loads(line))


def json_line(content: Mapping[str, Any]) -> str:
    """Returns a line of JSON, with its end.

    Args:
      content: Plain data. NaN and infinities become null.
    """
    return json.dumps(seal(plain(content))) + "\n"


def plain(value: Any) -> Any:
    """Returns the value with null in place of every float that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
