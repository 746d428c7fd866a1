"""Decoding and augmentation of images on the host, as pure functions.

A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that leaves enough pixels. The
decoder then does less work, and its averages are better than skipped pixels. A crop
starts at a whole decoded pixel, at most half an output pixel away. Rows below the crop
are not decoded if the file stores its rows in order.

Images are returned upright (EXIF), or as stored for detection, because boxes refer to
stored pixels. Grey and CMYK images become RGB. Transparency is dropped.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from echo_jax.data.pipeline.stages import Item
from echo_jax.echo.keys import mix

# Reader threads and processes run in parallel. OpenCV's own threads would slow them
# down. Every process that decodes imports this file.
cv2.setNumThreads(0)

_UPRIGHT = cv2.IMREAD_COLOR_RGB
_FULL = _UPRIGHT | cv2.IMREAD_IGNORE_ORIENTATION
# OpenCV's names of the scales include a colour order; these bits do not.
_SCALES = {
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _FULL,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _FULL,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _FULL,
    1: _FULL,
}
_END = b"\xff\xd9"
# Longer than a decoder's look-ahead.
_NO_END = bytes(64)
# A row of pixels depends on the next rows of colour, which may have half the
# resolution. A block is 8 rows at a scale of 1/8.
_ROWS_BELOW = 32
_CROP_TRIES = 10

# Start-of-frame markers, which hold the image size. C4, C8 and CC are other markers.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Of these, the ones whose rows are stored in order.
_SEQUENTIAL = frozenset((0xC0, 0xC1))
_SCAN, _RESTARTS = 0xDA, 0xDD
_APP1, _EXIF = 0xE1, b"Exif\0\0"
# Phones mark a second picture in the file like this.
_APP2, _MULTIPLE = 0xE2, b"MPF\0"
_BYTE_ORDERS: dict[bytes, Literal["little", "big"]] = {
    b"II*\0": "little",
    b"MM\0*": "big",
}
_ORIENTATION, _ENTRY_BYTES = 0x0112, 12


Encoded = bytes | np.ndarray
"""An image as a record holds it: a file's bytes, or pixels."""


class JpegHeader(NamedTuple):
    """Facts from the header of a JPEG file; sizes are in pixels, as stored."""

    at: int  # Offset of the height (two bytes); the width follows.
    scan: int  # Offset of the pixels.
    # Rows are stored from top to bottom, with all colours together, without restart
    # markers and without a second picture.
    is_in_order: bool
    height: int
    width: int
    orientation: int  # EXIF's, from 1 to 8.


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: float
    left: float
    height: float
    width: float


class Turn(NamedTuple):
    """Makes a stored image upright: rows become columns, then sides are mirrored."""

    swaps: bool = False
    upends: bool = False
    mirrors: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the upright height and width of a stored image."""
        return (width, height) if self.swaps else (height, width)

    def stored(self, box: Box, height: int, width: int) -> Box:
        """Returns the stored place of `box`, a part of the upright image."""
        top, left, high, wide = box
        if self.upends:
            top = height - top - high
        if self.mirrors:
            left = width - left - wide
        return Box(left, top, wide, high) if self.swaps else Box(top, left, high, wide)

    def upright(self, image: np.ndarray) -> np.ndarray:
        """Returns a stored image or a part, [height, width, channels], upright."""
        if self.swaps:
            image = image.swapaxes(0, 1)
        steps = (-1 if self.upends else 1), (-1 if self.mirrors else 1)
        return np.ascontiguousarray(image[:: steps[0], :: steps[1]])


TURNS = {
    1: Turn(),
    2: Turn(mirrors=True),
    3: Turn(upends=True, mirrors=True),
    4: Turn(upends=True),
    5: Turn(swaps=True),
    6: Turn(swaps=True, mirrors=True),
    7: Turn(swaps=True, upends=True, mirrors=True),
    8: Turn(swaps=True, upends=True),
}
"""The turn of each EXIF orientation."""


@dataclass(frozen=True)
class DecodeLabelled:
    """Turns a record into ``{"image": ..., "label": int32[]}``."""

    decode_record: Callable[[Any], dict[str, Any]]  # Returns the dict of kind images.
    # Returns pixels of a fixed size, or bytes if augmentation decodes them.
    decode: Callable[[Encoded], Any]

    def __call__(self, record: Any) -> Item:
        entries = self.decode_record(record)
        try:
            image = self.decode(entries["image"])
        except ValueError as error:
            raise ValueError(f"image {entries['name']!r}: {error}") from error
        return {"image": image, "label": np.asarray(entries["label"], np.int32)}


def decode_image(encoded: Encoded, *, as_stored: bool = False) -> np.ndarray:
    """Returns an encoded or decoded image as RGB, uint8[height, width, 3]."""
    if isinstance(encoded, bytes):
        return _decode(encoded, _FULL if as_stored else _UPRIGHT)
    if encoded.dtype != np.uint8 or encoded.ndim != 3 or encoded.shape[2] not in (1, 3):
        raise ValueError(
            f"An array of {encoded.dtype} and shape {encoded.shape} is not an image; "
            "give uint8[height, width, 3], or 1 channel."
        )
    return encoded if encoded.shape[2] == 3 else np.repeat(encoded, 3, axis=2)


def random_resized_crop(
    encoded: Encoded,
    seed: int,
    size: int,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> np.ndarray:
    """Returns a random part of an image, uint8[size, size, 3]."""
    choose = partial(_random_box, seed=seed, area=area, ratio=ratio)
    return _crop(encoded, choose, size)


def resize_center_crop(encoded: Encoded, size: int, *, resize: int) -> np.ndarray:
    """Returns the middle of the image resized to `resize`, uint8[size, size, 3]."""
    if not 0 < size <= resize:
        raise ValueError(
            f"size={size} must be at least 1 and at most resize={resize}, the shorter "
            "side that it is cut from."
        )

    def middle(height: int, width: int) -> Box:
        side = min(height, width) * size / resize
        return Box((height - side) / 2, (width - side) / 2, side, side)

    return _crop(encoded, middle, size)


def pad_crop_flip(image: np.ndarray, seed: int, *, padding: int) -> np.ndarray:
    """Returns the image shifted by up to `padding` pixels and maybe flipped."""
    height, width = image.shape[:2]
    # Digits of the seed. The bases are tiny beside 2^64, so the bias is negligible.
    rest, is_flipped = divmod(int(seed), 2)
    rest, top = divmod(rest, 2 * padding + 1)
    left = rest % (2 * padding + 1)
    padded = cv2.copyMakeBorder(
        image, padding, padding, padding, padding, cv2.BORDER_REFLECT_101
    )
    crop = padded[top : top + height, left : left + width]
    return np.ascontiguousarray(crop[:, ::-1] if is_flipped else crop)


# Szegedy et al. 2014, "Going deeper with convolutions", section 6. After ten failures
# the result is the largest middle part with an allowed ratio.
def _random_box(
    height: int,
    width: int,
    seed: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    draws = mix(int(seed), np.arange(4 * _CROP_TRIES)) >> np.uint64(11)
    uniform = (draws * 2.0**-53).tolist()
    least, most = math.log(ratio[0]), math.log(ratio[1])
    for at in range(0, len(uniform), 4):
        share = area[0] + (area[1] - area[0]) * uniform[at]
        shape = math.exp(least + (most - least) * uniform[at + 1])
        wide = round(math.sqrt(height * width * share * shape))
        high = round(math.sqrt(height * width * share / shape))
        if 0 < wide <= width and 0 < high <= height:
            top = int(uniform[at + 2] * (height - high + 1))
            left = int(uniform[at + 3] * (width - wide + 1))
            return Box(top, left, high, wide)
    high = min(height, max(1, round(width / ratio[0])))
    wide = min(width, max(1, round(height * ratio[1])))
    return Box((height - high) / 2, (width - wide) / 2, high, wide)


def _crop(encoded: Encoded, choose: Callable[[int, int], Box], size: int) -> np.ndarray:
    header = jpeg_header(encoded) if isinstance(encoded, bytes) else None
    if not isinstance(encoded, bytes) or header is None:
        image = decode_image(encoded)
        height, width = image.shape[:2]
        return _resized(image, (height, width), choose(height, width), size)
    turn, known = TURNS[header.orientation], (header.height, header.width)
    upright = turn.size(*known)
    box = turn.stored(choose(*upright), *upright)
    room = max(min(box.height, box.width) / size, 1)
    scale = next(scale for scale in _SCALES if scale <= room)
    data = _without_rows_below(encoded, header, math.ceil(box.top + box.height))
    # Turn the image after resizing, when it is small.
    part = _resized(_decode(data, _SCALES[scale]), known, box, size, scale)
    return turn.upright(part)


def _resized(
    image: np.ndarray, known: tuple[int, int], box: Box, size: int, scale: int = 1
) -> np.ndarray:
    height, width = known
    across = math.ceil(height / scale) / height
    along = math.ceil(width / scale) / width
    top, left = _near(box.top * across), _near(box.left * along)
    # Round both ends in the same way, so that a part keeps its size.
    bottom = max(top + 1, _near((box.top + box.height) * across))
    right = max(left + 1, _near((box.left + box.width) * along))
    part = image[top:bottom, left:right]
    is_halved = min(part.shape[:2]) >= 2 * size
    how = cv2.INTER_AREA if is_halved else cv2.INTER_LINEAR
    return cv2.resize(part, (size, size), interpolation=how)


# The decoder then does not unpack the rest. The rows above stay equal bit by bit, as
# they depend on the next block at most. Progressive files do not store rows in order.
# Zeros replace the end marker: after unread data it makes the decoder print a warning.
def _without_rows_below(data: bytes, header: JpegHeader, bottom: int) -> bytes:
    """Returns the JPEG file cut a little below row `bottom`."""
    height = bottom + _ROWS_BELOW
    if not header.is_in_order or height >= header.height:
        return data
    # Search only if the marker is not at the end: a search takes a tenth of the time.
    end = len(data) - 2 if data.endswith(_END) else data.find(_END, header.scan)
    rest = memoryview(data)[header.at + 2 : end if end > 0 else len(data)]
    return b"".join((data[: header.at], struct.pack(">H", height), rest, _NO_END))


def _near(place: float) -> int:
    return math.floor(place + 0.5)


def _decode(data: bytes, flags: int) -> np.ndarray:
    encoded = np.frombuffer(data, np.uint8)
    image = cv2.imdecode(encoded, flags) if encoded.size else None
    if image is None:
        raise ValueError(
            f"A record of {len(data)} bytes, beginning with {data[:8]!r}, is not a "
            "readable image; write it again as JPEG."
        )
    return image


def jpeg_header(data: bytes) -> JpegHeader | None:
    """Returns the header of a JPEG file, or None for another file."""
    if data[:2] != b"\xff\xd8":
        return None
    at, frame, is_in_order, orientation = 2, None, True, 0
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _FRAMES:
            height, width, colours = struct.unpack_from(">HHB", data, at + 5)
            if not (height and width):
                return None
            is_in_order &= marker in _SEQUENTIAL
            frame = at + 5, height, width, colours
        elif marker == _RESTARTS:
            is_in_order &= data[at + 4 : at + 6] == bytes(2)
        elif marker == _APP1 and not orientation:
            size = struct.unpack_from(">H", data, at + 2)[0]
            orientation = _orientation(data[at + 4 : at + 2 + size])
        elif marker == _APP2:
            is_in_order &= not data.startswith(_MULTIPLE, at + 4)
        elif marker == _SCAN:
            break
        # A marker may be preceded by any number of fill bytes.
        at += 1 if marker == 0xFF else 2 + struct.unpack_from(">H", data, at + 2)[0]
    if frame is None:
        return None
    place, height, width, colours = frame
    # A scan that begins with fewer colours is one of several.
    is_whole = at + 10 <= len(data) and data[at + 4] == colours
    is_in_order &= is_whole
    return JpegHeader(place, at, is_in_order, height, width, orientation or 1)


def _orientation(segment: bytes) -> int:
    tiff = segment.removeprefix(_EXIF)
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(tiff) == len(segment):
        return 0

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    first = number(4, 4)
    for entry in range(number(first, 2)):
        at = first + 2 + entry * _ENTRY_BYTES
        if at + _ENTRY_BYTES > len(tiff):
            break
        if number(at, 2) == _ORIENTATION:
            # A short number is stored in the entry itself.
            found = number(at + 8, 2)
            return found if 1 <= found <= 8 else 0
    return 0
