"""Reads and checks COCO annotations from an untrusted file."""

import contextlib
import math
import re
import sys
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ijson
import numpy as np

from echo_jax.data.compressed import DAMAGED, unpacked_chunks
from echo_jax.data.plain_text import text_chunks
from echo_jax.data.prepare.archives import ZipFiles, plain_name, whole
from echo_jax.data.prepare.files import archive_of
from echo_jax.data.prepare.job import PrepareError

_MAX_JSON_BYTES = 4 * 1024**3
# Memory over file size: up to 30 for a plain file, and seldom 100 for a packed file. It
# is 25,000 for a file that is made to exhaust the memory.
_MAX_RATIO = 100
_ANY_RATIO_BYTES = 256 * 1024**2
# Other programs write these numbers as floats or as text.
_WHOLE = ("id", "image_id", "category_id", "height", "width", "iscrowd")
_FIELDS = ("categories", "images", "annotations")
# Outlines are most of the file, and detectors of boxes do not read them.
_UNREAD = ("segmentation",)
# Fields of COCO's other files.
_WITHOUT_BOXES = {"segments_info": "panoptic segments", "caption": "captions"}
# Python writes these for numbers that JSON does not have.
_NO_NUMBER = re.compile(r"-?(NaN|Infinity)\b")
_MAX_NAME_CHARS = 1024
_MAX_CATEGORIES = 2**16
_MAX_SIDE = 2**16
_MAX_ID = 2**63
_PART_BYTES = 64 * 1024
# The parser holds a complete text or number in memory before it returns it.
_MAX_VALUE_BYTES = 16 * 1024**2
_MAX_DEPTH = 64

# Size of containers in CPython, rounded up, and of the slot of one value.
_STARTS, _PLACE_BYTES = {"start_map": 232, "start_array": 96}, 48
_ENDS = frozenset({"end_map", "end_array"})


@dataclass(frozen=True, slots=True)
class Image:
    """An image in the annotations; `found` is its entry in the file."""

    image_id: int
    name: str
    height: int
    width: int
    found: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Box:
    """A valid box; `corners` are ymin, xmin, ymax, xmax in pixels, within the image."""

    corners: tuple[float, float, float, float]
    category_id: int
    crowd: bool
    area: float
    clipped: bool


@dataclass(frozen=True)
class Annotations:
    """The content of a COCO file, without outlines; `orphans` are of no image."""

    categories: list[dict[str, Any]]  # In the order of their ids.
    images: dict[str, Image]  # By file name.
    boxes: dict[int, list[dict[str, Any]]]  # By image id, as found.
    orphans: list[dict[str, Any]]

    @property
    def total(self) -> int:
        """The number of images and annotations in the file."""
        boxes = sum(len(of_image) for of_image in self.boxes.values())
        return len(self.images) + boxes + len(self.orphans)


def read_annotations(path: Path) -> Annotations:
    """Reads an ``instances_*.json``, plain, packed, or in a zip archive."""
    try:
        with _opened(path) as (size, chunks):
            limit = max(size * _MAX_RATIO, _ANY_RATIO_BYTES)
            content = _read_fields(_parts(text_chunks(chunks)), limit)
        _refuse_other_kinds(content)
        categories = _categories(_list(content, "categories"))
        images = [_image(found) for found in _list(content, "images")]
        _check_unique("id", [image.image_id for image in images])
        _check_unique("file_name", [image.name for image in images])
        by_name = {image.name: image for image in images}
        boxes = {image.image_id: list[dict[str, Any]]() for image in images}
        orphans = []
        for found in _list(content, "annotations"):
            of_image = boxes.get(_whole(found, "image_id"))
            (orphans if of_image is None else of_image).append(found)
    except (*DAMAGED, ValueError, TypeError) as error:
        raise PrepareError(
            f"{str(path)!r} cannot be read as boxes in COCO's format: {error}"
        ) from error
    return Annotations(categories, by_name, boxes, orphans)


def _check_unique(field: str, values: Sequence[object]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(
                f"two images have one {field}, {value!r:.80}. Give each its own."
            )
        seen.add(value)


def check_box(
    found: Mapping[str, Any], image: Image, known: Container[int], used: Container[int]
) -> Box | str:
    """Returns the box of an annotation, or the reason why it is unusable."""
    bbox, category_id = found.get("bbox"), found.get("category_id")
    if type(found.get("id")) is not int or found["id"] in used:
        return "box without an id of its own"
    if type(category_id) is not int or category_id not in known:
        return "box of unknown category"
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        return "box that is not four finite numbers"
    x, y, width, height = map(float, bbox)
    if width <= 0 or height <= 0:
        return "box without an area"
    # Check in float32, the stored type, in which a thin box may lose its area.
    limits = np.array([image.height, image.width] * 2, np.float32)
    full = np.array([y, x, y + height, x + width], np.float32)
    corners = np.clip(full, 0, limits)
    if corners[0] >= corners[2] or corners[1] >= corners[3]:
        return "box outside of the image"
    area, crowd = (
        usual if found.get(name) is None else found[name]
        for name, usual in (("area", width * height), ("iscrowd", 0))
    )
    if not _is_number(area) or area < 0 or crowd not in (0, 1):
        return "box whose area or iscrowd is not such a number"
    ymin, xmin, ymax, xmax = corners.tolist()
    return Box(
        (ymin, xmin, ymax, xmax),
        category_id,
        bool(crowd),
        float(area),
        bool((corners != full).any()),
    )


@contextlib.contextmanager
def _opened(path: Path) -> Generator[tuple[int, Iterator[bytes]]]:
    archive, name = archive_of(path)
    if archive is None or not (name or path.suffix.lower() == ".zip"):
        with contextlib.closing(unpacked_chunks(path)) as chunks:
            yield path.stat().st_size, chunks
        return
    if archive.suffix.lower() != ".zip":
        raise ValueError(f"it lies in {archive.name!r}, which is not a .zip; unpack it")
    files = ZipFiles(archive)
    names = [entry.name for entry in files.entries]
    if name not in names:
        there = ", ".join(each for each in names if each.endswith(".json"))
        raise ValueError(
            f"{archive.name!r} holds no such file; name one that it has, as in "
            f"{archive}/FILE: {there[:_MAX_NAME_CHARS] or 'there is no .json'}"
        )
    index = names.index(name)
    with contextlib.closing(files):
        yield files.packed_bytes(index), files.chunks(index)


def _parts(chunks: Iterator[bytes]) -> Iterator[bytes]:
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > _MAX_JSON_BYTES:
            raise ValueError(
                f"it is larger than {_MAX_JSON_BYTES} bytes. Split it by images, and "
                "prepare the parts as splits."
            )
        for start in range(0, len(chunk), _PART_BYTES):
            yield chunk[start : start + _PART_BYTES]


def _refuse_other_kinds(content: Mapping[str, Any]) -> None:
    found, what = content.get("annotations"), ""
    if found is None and "images" in content:
        what = "it lists images without annotations, as image_info_test*.json does"
    elif isinstance(found, list) and found and isinstance(found[0], dict):
        kinds = [kind for field, kind in _WITHOUT_BOXES.items() if field in found[0]]
        what = "".join(f"it holds {kind}" for kind in kinds)
    if what:
        raise ValueError(f"{what}, not boxes; give an instances_*.json instead")


def _list(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = content.get(name)
    if not isinstance(found, list) or not all(isinstance(e, dict) for e in found):
        raise ValueError(f"it needs {name!r}, a list of objects; add it")
    for entry in found:
        for field in _WHOLE:
            if field in entry:
                entry[field] = whole(entry[field])
        if "area" in entry:
            entry["area"] = _number(entry["area"])
        if isinstance(bbox := entry.get("bbox"), list):
            bbox[:] = map(_number, bbox)
    return found


def _number(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _whole(found: Mapping[str, Any], name: str, limit: int = _MAX_ID) -> int:
    value = found.get(name)
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{name} is {_shown(value)}, not a number below {limit}")
    return value


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME_CHARS:
        raise ValueError(f"{name} is {_shown(value)}, not a name")
    if not value.isprintable():
        raise ValueError(f"{name} is {_shown(value)}, which is not printable")
    return value


def _image(found: dict[str, Any]) -> Image:
    name = plain_name(_text(found, "file_name"))
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"file_name {_shown(name)} leads out of the folder")
    height, width = (_whole(found, side, _MAX_SIDE) for side in ("height", "width"))
    return Image(_whole(found, "id"), name, height, width, found)


def _categories(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    categories = [{"id": _whole(c, "id"), "name": _text(c, "name")} for c in found]
    categories.sort(key=lambda category: category["id"])
    if not 0 < len({category["id"] for category in categories}) == len(categories):
        raise ValueError("it has no categories, or two with one id")
    if len(categories) > _MAX_CATEGORIES:
        raise ValueError(f"it has more than {_MAX_CATEGORIES} categories")
    return categories


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31 and math.isfinite(value)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _read_fields(chunks: Iterable[bytes], max_bytes: int) -> dict[str, Any]:
    keeper = _Keeper(max_bytes)
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    silent_bytes = 0
    try:
        for part in chunks:
            parser.send(part)
            silent_bytes = 0 if events else silent_bytes + len(part)
            if silent_bytes > _MAX_VALUE_BYTES:
                raise ValueError(f"it holds a text of over {_MAX_VALUE_BYTES} bytes")
            keeper.take(events)
            del events[:]
        parser.close()
    except (ijson.JSONError, OverflowError) as error:
        # The second line shows the place.
        reason, *rest = str(error).split("\n")
        near = "".join(rest[:1]).strip()
        if found := _NO_NUMBER.search(near):
            reason = f"it holds {found[0]}, and JSON has numbers and null only"
        raise ValueError(f"it is not JSON: {reason}, near {_shown(near)}") from error
    keeper.take(events)
    if not isinstance(found := keeper.builder.value, dict):
        raise ValueError("it must be a JSON object, with images and annotations")
    return found


class _Keeper:
    """Builds the wanted value from a parser's events, and counts its memory."""

    def __init__(self, limit: int):
        self.builder: Any = ijson.ObjectBuilder()
        self._limit, self._kept_bytes = limit, 0
        self._path: list[str] = []  # The containers around the next value.
        self._key, self._skipped_depth = "", 0
        self._keys: dict[str, str] = {}

    def take(self, events: Iterable[tuple[str, Any]]) -> None:
        """Processes the next events."""
        for event, value in events:
            if self._skipped_depth:
                self._skipped_depth += (event in _STARTS) - (event in _ENDS)
            elif event == "map_key":
                self._key = value
            elif event in _ENDS:
                self._path.pop()
                self.builder.event(event, value)
            elif not self._is_wanted():
                self._skipped_depth = int(event in _STARTS)
            else:
                self._keep(event, value)
            if self._skipped_depth + len(self._path) > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")

    def _is_wanted(self) -> bool:
        if len(self._path) == 1:
            return self._key in _FIELDS
        of_entry = len(self._path) == 3 and self._path[-1] == "start_map"
        return not (of_entry and self._key in _UNREAD)

    def _keep(self, event: str, value: Any) -> None:
        size = _STARTS.get(event) or sys.getsizeof(value)
        if self._path and self._path[-1] == "start_map":
            # All objects with this field share one text.
            key = self._keys.setdefault(self._key, self._key)
            if key is self._key:
                size += sys.getsizeof(key) + _STARTS["start_map"]
            self.builder.event("map_key", key)
        self.builder.event(event, value)
        if event in _STARTS:
            self._path.append(event)
        self._kept_bytes += size + _PLACE_BYTES
        if self._kept_bytes > self._limit:
            raise ValueError(f"what it holds takes more than {self._limit} bytes")
