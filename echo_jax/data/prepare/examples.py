"""From files to records: threads check images whole, which are written in order."""

import contextlib
import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import BmpImagePlugin, GifImagePlugin, Image, PpmImagePlugin

from echo_jax.data.images.decode import decode_image, jpeg_header
from echo_jax.data.prepare.archives import Files
from echo_jax.data.prepare.job import (
    HELD_OUT,
    Bad,
    BadExampleError,
    PrepareError,
    Progress,
    Settings,
    Skipped,
    is_held_out,
    ordered_map,
)
from echo_jax.data.prepare.workspace import Workspace
from echo_jax.data.sources.prepared import pack
from echo_jax.data.sources.shard_files import TOO_MANY_FILES

_READ = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
# These are images too, so that they are counted and named, not ignored.
_UNREAD = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl")

_MAX_IMAGE_BYTES = 64 * 1024**2
_MAX_PIXELS = 64 * 1024**2
_NO_IMAGE = "no JPEG, PNG, WebP, BMP, GIF or PPM: convert it to one"

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# A file that begins with these bytes is an image, whatever its name.
_SURELY = (_JPEG, _PNG, b"GIF8")
_HEAD_BYTES = 16
# `Image.open` would warn about sizes that are refused here.
_READERS = (
    (b"GIF8", "GIF", GifImagePlugin.GifImageFile),
    (b"BM", "BMP", BmpImagePlugin.BmpImageFile),
    *((b"P%d" % n, "PPM", PpmImagePlugin.PpmImageFile) for n in range(1, 7)),
)
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
# The last chunk of a PNG is always the same: no data, a name and a checksum.
_END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
# Values per pixel for each colour type of a PNG.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First column, first row and their steps, for each pass of an interlaced PNG.
_PNG_PASSES = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
_INFLATED_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Example:
    """An image file (an entry of a source), and its record without the image."""

    files: Files
    index: int
    entries: dict[str, Any]
    size: tuple[int, int] | None = None  # Height and width that it must have.

    @property
    def name(self) -> str:
        return self.files.entries[self.index].name

    @property
    def bytes(self) -> int:
        return self.files.entries[self.index].bytes


def is_image(name: str) -> bool:
    """Returns whether a file should be an image, by its name."""
    # Downloaded files may keep the query of their address: 8.jpg?size=large.
    return name.lower().partition("?")[0].endswith((*_READ, *_UNREAD))


def images_of(files: Files) -> list[int]:
    """Returns the indices of the images of a source, by their names or contents."""
    is_named = [is_image(entry.name) for entry in files.entries]
    others = [index for index, named in enumerate(is_named) if not named]
    for index, read in zip(others, files.contents(others, _HEAD_BYTES), strict=True):
        with contextlib.suppress(OSError):
            head = read()
            is_named[index] = _is_webp(head) or head.startswith(_SURELY)
    return [index for index, named in enumerate(is_named) if named]


def _is_webp(head: bytes) -> bool:
    return head.startswith(b"RIFF") and head[8:12] == b"WEBP"


def write_splits(
    work: Workspace,
    splits: dict[str, list[Example]],
    settings: Settings,
    skipped: Skipped,
) -> dict[str, list[Example]]:
    """Holds out, and writes the missing shards; returns the usable images by split."""
    skipped.check()
    if settings.holdout:
        parts: tuple[list[Example], list[Example]] = [], []
        for example in splits["train"]:
            parts[is_held_out(example.name, settings.holdout)].append(example)
        splits = {**splits, "train": parts[0], HELD_OUT: parts[1]}
    total = sum(example.bytes for examples in splits.values() for example in examples)
    progress = Progress(settings.on_progress, "checking and writing images", total)
    usable = {}
    for split, examples in splits.items():
        num_written, unusable = 0, set()
        for note in _notes(work, split, examples, settings, progress):
            num_written += note["shard"]["examples"]
            for bad in note["bad"]:
                unusable.add(bad["name"])
                skipped.add(Bad(**bad))
            skipped.check()
        if not num_written:
            raise PrepareError(f"no image is left for split {split!r}: {skipped}")
        usable[split] = [each for each in examples if each.name not in unusable]
    return usable


def _notes(
    work: Workspace,
    split: str,
    examples: Sequence[Example],
    settings: Settings,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    shards = _cut(examples, settings.shard_bytes)
    missing = itertools.chain.from_iterable(
        shard for k, shard in enumerate(shards) if work.note(split, k) is None
    )
    results = ordered_map(
        _record,
        _with_contents(missing),
        num_bytes=lambda job: job[0].bytes,
        workers=settings.num_threads,
    )
    with contextlib.closing(results):
        for number, shard in enumerate(shards):
            if (note := work.note(split, number)) is not None:
                progress.advance(sum(example.bytes for example in shard))
                yield note
                continue
            bad: list[dict[str, str]] = []

            def records(shard=shard, bad=bad) -> Iterator[bytes]:
                for example in shard:
                    result = next(results)
                    progress.advance(example.bytes)
                    if isinstance(result, bytes):
                        yield result
                    else:
                        bad.append(vars(Bad(split, example.name, str(result))))

            yield work.write_shard(split, number, records(), {"bad": bad})


def _cut(examples: Sequence[Example], shard_bytes: float) -> list[list[Example]]:
    total = sum(example.bytes for example in examples)
    number = max(1, round(total / shard_bytes))
    shards: list[list[Example]] = [[] for _ in range(number)]
    before = 0
    for example in examples:
        shards[min(number - 1, before * number // max(1, total))].append(example)
        before += example.bytes
    return shards


def _with_contents(
    examples: Iterable[Example],
) -> Iterator[tuple[Example, Callable[[], bytes]]]:
    for _, group in itertools.groupby(examples, lambda example: id(example.files)):
        of_one = list(group)
        indices = [example.index for example in of_one]
        contents = of_one[0].files.contents(indices, _MAX_IMAGE_BYTES)
        yield from zip(of_one, contents, strict=True)


def _record(job: tuple[Example, Callable[[], bytes]]) -> bytes | BadExampleError:
    example, read = job
    try:
        image = read()
        size = check_image(image)
    except OSError as error:
        if error.errno in TOO_MANY_FILES:  # It says nothing about this file.
            raise
        return BadExampleError("unreadable file")
    except BadExampleError as error:
        return error
    if example.size not in (None, size):
        return BadExampleError("image of another size than its annotations say")
    return pack({"image": image, **example.entries})


# The header's size is checked first: a small file may claim to be huge. A JPEG is
# decoded at 1/8, which reads every byte and is cheaper. Decoders may accept incomplete
# files, so the end mark and the rows of a PNG are checked too. Rarer formats are
# decoded by their later reader; only the first picture of an animation is.
def check_image(data: bytes) -> tuple[int, int]:
    """Decodes an image to check it; returns its stored height and width."""
    if not data:
        raise BadExampleError("empty file")
    if len(data) > _MAX_IMAGE_BYTES:
        raise BadExampleError(f"file of more than {_MAX_IMAGE_BYTES} bytes")
    is_cut = False
    if data.startswith(_JPEG):
        kind, header = "JPEG", jpeg_header(data)
        if header is None or not data.startswith(_START_OF_SCAN, header.scan):
            is_cut = not data.endswith(_END_OF_IMAGE)
            raise BadExampleError("truncated" if is_cut else "corrupt")
        height, width = header.height, header.width
        is_cut = data.rfind(_END_OF_IMAGE) < header.scan
    elif data.startswith(_PNG):
        kind = "PNG"
        if len(data) < 24 or _END_OF_PNG not in data:
            raise BadExampleError("truncated")
        width, height = struct.unpack_from(">II", data, 16)
    else:
        kind, height, width = _other_header(data)
    if not 0 < height * width <= _MAX_PIXELS:
        raise BadExampleError(f"not between 1 and {_MAX_PIXELS} pixels")
    if is_cut:
        raise BadExampleError("truncated")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            image.draft("L", (1, 1))
            image.load()
        if kind not in ("JPEG", "PNG"):
            decode_image(data)
    # Decoders raise exceptions of all types on hostile input.
    except Exception as error:
        cut = "truncated" in str(error)
        raise BadExampleError("truncated" if cut else "corrupt") from error
    if kind == "PNG" and not _holds_all_rows(data):
        raise BadExampleError("truncated")
    return height, width


def _holds_all_rows(png: bytes) -> bool:
    left, decoder = _row_bytes(png), zlib.decompressobj()
    for packed in _image_data(png):
        while packed and left > 0 and not decoder.eof:
            left -= len(decoder.decompress(packed, min(left, _INFLATED_BYTES)))
            packed = decoder.unconsumed_tail
    # The input that the decoder has not consumed yet.
    while left > 0 and (rest := decoder.decompress(b"", min(left, _INFLATED_BYTES))):
        left -= len(rest)
    return left <= 0


def _row_bytes(png: bytes) -> int:
    width, height, depth, colour, interlaced = struct.unpack_from(">IIBB2xB", png, 16)
    total = 0
    for column, row, across, down in _PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -((column - width) // across), -((row - height) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * depth * _PNG_CHANNELS[colour] // 8))
    return total


def _image_data(png: bytes) -> Iterator[bytes]:
    position = 8
    while position + 8 <= len(png):
        size, kind = struct.unpack_from(">I4s", png, position)
        if kind == b"IDAT":
            yield png[position + 8 : position + 8 + size]
        position += size + 12


def _other_header(data: bytes) -> tuple[str, int, int]:
    if _is_webp(data):
        return "WEBP", *_webp_header(data)
    for start, kind, reader in _READERS:
        if data.startswith(start):
            try:
                with reader(io.BytesIO(data)) as image:
                    return kind, image.height, image.width
            # A decoder raises exceptions of all types on hostile input.
            except Exception as error:
                raise BadExampleError("corrupt") from error
    raise BadExampleError(_NO_IMAGE)


def _webp_header(data: bytes) -> tuple[int, int]:
    """Returns height and width; Pillow needs memory for the image to know them."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    if len(data) < max(30, 8 + number(4, 4)):
        raise BadExampleError("truncated")
    match data[12:16]:
        case b"VP8X":
            return 1 + number(27, 3), 1 + number(24, 3)
        case b"VP8L":
            sides = number(21, 4)
            return 1 + (sides >> 14 & 0x3FFF), 1 + (sides & 0x3FFF)
        case b"VP8 ":
            return number(28, 2) & 0x3FFF, number(26, 2) & 0x3FFF
    raise BadExampleError(_NO_IMAGE)
