"""Checks that an image file is complete: decodes it, within limits."""

import io
import zlib
from collections.abc import Iterator

from PIL import BmpImagePlugin, GifImagePlugin, Image

from echo_jax.data.images.decode import decode_jpeg
from echo_jax.data.images.jpeg_header import jpeg_header
from echo_jax.data.prepare.errors import BadExampleError

__all__ = ["MAX_IMAGE_BYTES", "check_image"]

MAX_IMAGE_BYTES = 64 * 1024**2
_MAX_PIXELS = 64 * 1024**2
_NO_IMAGE = "no JPEG, PNG, WebP, BMP or GIF: convert it to one"

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_BMP, _GIF, _RIFF, _WEBP = b"BM", b"GIF8", b"RIFF", b"WEBP"
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
# The last chunk of a PNG is always the same: no data, a name and a checksum.
_END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
# Values per pixel for each colour type of a PNG.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First column, first row and their steps, for each pass of an interlaced PNG.
_PNG_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
_INFLATED_BYTES = 1024**2


# The header's size is checked first: a small file may claim to be huge. A JPEG is
# decoded at 1/8, which reads every byte and is cheaper. Decoders may accept incomplete
# files, so the end mark and the rows of a PNG are checked too. Rarer formats are
# decoded by their later reader; only the first picture of an animation is.
def check_image(data: bytes) -> tuple[int, int]:
    """Decodes an image to check it; returns its stored height and width."""
    if not data:
        raise BadExampleError("empty file")
    if len(data) > MAX_IMAGE_BYTES:
        raise BadExampleError(f"file of more than {MAX_IMAGE_BYTES} bytes")
    scan = None
    if data.startswith(_JPEG):
        kind = "JPEG"
        height, width, scan = _jpeg_header(data)
    elif data.startswith(_PNG):
        kind = "PNG"
        if len(data) < 24:
            raise BadExampleError("truncated")
        width, height = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
        if _END_OF_PNG not in data:
            raise BadExampleError("truncated")
    else:
        kind, height, width = _other_header(data)
    if not 0 < height * width <= _MAX_PIXELS:
        raise BadExampleError(f"not between 1 and {_MAX_PIXELS} pixels")
    if scan is not None and data.rfind(_END_OF_IMAGE) < scan:
        raise BadExampleError("truncated")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            image.draft("L", (1, 1))
            image.load()
        if kind not in ("JPEG", "PNG"):
            decode_jpeg(data)
    # Decoders raise exceptions of all types on hostile input.
    except Exception as error:
        cut = "truncated" in str(error)
        raise BadExampleError("truncated" if cut else "corrupt") from error
    if kind == "PNG" and not _holds_all_rows(data):
        raise BadExampleError("truncated")
    return height, width


def _holds_all_rows(png: bytes) -> bool:
    """Returns whether a decodable PNG holds all of its rows."""
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
    """Returns the bytes of all rows, each with its filter byte."""
    width, height = (int.from_bytes(png[i : i + 4]) for i in (16, 20))
    depth, colour, interlaced = png[24], png[25], png[28]
    total = 0
    for column, row, across, down in _PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -((column - width) // across), -((row - height) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * depth * _PNG_CHANNELS[colour] // 8))
    return total


def _image_data(png: bytes) -> Iterator[bytes]:
    position = 8
    while position + 8 <= len(png):
        size = int.from_bytes(png[position : position + 4])
        start = position + 8
        if png[position + 4 : start] == b"IDAT":
            yield png[start : start + size]
        position = start + size + 4


def _jpeg_header(data: bytes) -> tuple[int, int, int]:
    """Returns height, width and the offset of the first scan."""
    header = jpeg_header(data)
    if header is None or not data.startswith(_START_OF_SCAN, header.scan):
        is_cut = not data.endswith(_END_OF_IMAGE)
        raise BadExampleError("truncated" if is_cut else "corrupt")
    return header.height, header.width, header.scan


def _other_header(data: bytes) -> tuple[str, int, int]:
    """Returns format, height and width of a file other than JPEG and PNG."""
    if data.startswith(_RIFF) and data[8:12] == _WEBP:
        return "WEBP", *_webp_header(data)
    # `Image.open` would warn about sizes that are refused here.
    if data.startswith(_GIF):
        kind, reader = "GIF", GifImagePlugin.GifImageFile
    elif data.startswith(_BMP):
        kind, reader = "BMP", BmpImagePlugin.BmpImageFile
    else:
        raise BadExampleError(_NO_IMAGE)
    try:
        with reader(io.BytesIO(data)) as image:
            return kind, image.height, image.width
    # A decoder raises exceptions of all types on hostile input.
    except Exception as error:
        raise BadExampleError("corrupt") from error


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
