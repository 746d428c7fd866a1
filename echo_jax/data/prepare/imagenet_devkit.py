"""The development kit of ImageNet 2012: the classes of its validation images."""

import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from echo_jax.data.prepare.archives import TarFiles
from echo_jax.files.plain_text import read_text

__all__ = ["is_devkit", "read_devkit"]

_META = "data/meta.mat"
_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_BYTES = 16 * 1024**2
_CLASS_NAME = re.compile(r"n\d{8}")
# A MATLAB file's header, and the start of an element that zlib has packed.
_HEADER_BYTES, _LITTLE_ENDIAN, _PACKED = 128, b"IM", 15


def is_devkit(path: Path) -> bool:
    """Returns whether a file may be a development kit, by its name."""
    return path.name.lower().endswith((".tar.gz", ".tar"))


def read_devkit(path: Path) -> dict[str, str]:
    """Returns the class of each validation image by its name without the ending."""
    files = TarFiles(path, lambda what, part: None)
    names = _class_names(_content(files, _META))
    numbers = read_text(_content(files, _TRUTH)).split()
    if unknown := {*numbers} - names.keys():
        raise ValueError(f"{_TRUTH} has {min(unknown)!r:.20}, which {_META} has not")
    return {
        f"ILSVRC2012_val_{image:08}": names[number]
        for image, number in enumerate(numbers, start=1)
    }


def _content(files: TarFiles, name: str) -> bytes:
    """Returns a file of the kit, in whatever folder the kit is."""
    for index, entry in enumerate(files.entries):
        if f"/{entry.name}".endswith(f"/{name}"):
            (read,) = files.contents([index], _MAX_BYTES)
            if len(content := read()) > _MAX_BYTES:
                raise ValueError(f"{name} is larger than {_MAX_BYTES} bytes")
            return content
    raise ValueError(f"it holds no {name}, as ImageNet's devkit does")


def _class_names(mat: bytes) -> dict[str, str]:
    """Returns the name of each class by its number, as text."""
    # This import takes seconds on a slow disk, and only ImageNet needs it.
    from scipy.io import loadmat

    try:
        found: Any = loadmat(
            io.BytesIO(_unpacked(mat)), squeeze_me=True, variable_names=["synsets"]
        )["synsets"]
        names = {str(each["ILSVRC2012_ID"]): str(each["WNID"]) for each in found}
    # It raises exceptions of all types on other files.
    except Exception as error:
        raise ValueError(f"{_META} is no list of classes ({error!r:.200})") from error
    if strange := [name for name in names.values() if not _CLASS_NAME.fullmatch(name)]:
        raise ValueError(f"{_META} has a class {strange[0]!r:.40}, and no n01440764")
    return names


def _unpacked(mat: bytes) -> bytes:
    """Returns a MATLAB file without zlib, which scipy would unpack to any size."""
    if mat[_HEADER_BYTES - 2 : _HEADER_BYTES] != _LITTLE_ENDIAN:
        raise ValueError("no MATLAB file of version 5")
    parts, at, left = [mat[:_HEADER_BYTES]], _HEADER_BYTES, _MAX_BYTES
    while at + 8 <= len(mat):
        kind, size = struct.unpack_from("<II", mat, at)
        part = mat[at : at + 8 + size]
        if kind == _PACKED:
            part = zlib.decompressobj().decompress(part[8:], left + 1)
        parts.append(part)
        at, left = at + 8 + size, left - len(part)
        if left < 0:
            raise ValueError(f"it unpacks to more than {_MAX_BYTES} bytes")
    return b"".join(parts)
