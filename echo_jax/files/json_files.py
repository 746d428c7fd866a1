"""JSON files and lines, without numbers that JSON lacks."""

import json
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from echo_jax.files.folders import write


class DamagedFileError(ValueError):
    """A file is damaged (`what` says how); the message names it."""

    def __init__(self, path: epath.Path, what: object):
        self.what = str(what)
        super().__init__(
            f"{path} is damaged: {what}; put back a copy of it, or use another "
            "--workdir"
        )


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
    path: epath.Path, fields: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Reads a JSON object with these fields (see `missing`); None without a file."""
    try:
        content = read_line(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, error) from error
    if what := missing(content, fields or {}):
        raise DamagedFileError(path, what)
    return content


def read_if_whole(
    path: epath.Path, fields: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Reads a JSON file that can be made again; None if missing or damaged."""
    try:
        return read_json(path, fields)
    except DamagedFileError:
        return None


def write_json(
    path: epath.Path, content: Mapping[str, Any], *, indent: int | None = 2
) -> None:
    """Replaces a JSON file atomically; NaN and infinities become null."""
    write(path, json_line(content, indent=indent))


def read_line(line: bytes) -> dict[str, Any]:
    """Returns the object of a line from `json_line`."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {type(content).__name__}, not an object")
    content.pop("crc32", None)  # Earlier versions wrote it.
    return content


def json_line(content: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Returns JSON with the end of its line; NaN and infinities become null."""
    return json.dumps(plain(content), indent=indent, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Returns the value with null for every float that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
