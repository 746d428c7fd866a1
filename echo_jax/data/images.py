"""Decoding and augmenting images on the host, as pure functions.

A JPEG is decoded at a half, a quarter or an eighth of its size where that still gives
at least as many pixels as are asked for: the decoder then leaves work out, and its
averages are better pixels than those that an interpolation would skip over. What is
cut out begins at a whole pixel there, at most half a pixel of the result away. Rows
below what is cut out are not decoded at all, where the file holds its rows in order.

The orientation that a camera notes in EXIF is ignored, as by TensorFlow's decoder and
in what is published on ImageNet: boxes and sizes refer to the pixels as they are
stored. Grey images become red, green and blue; so does CMYK; transparency is dropped.
"""

import math
import struct
from typing import NamedTuple

import cv2
import numpy as np

from echo_jax.echo.keys import mix

__all__ = [
    "decode_image",
    "decode_jpeg",
    "jpeg_size",
    "pad_crop_flip",
    "random_resized_crop",
    "resize_center_crop",
]

# Readers run side by side, in threads or processes; OpenCV's own threads would only
# get into their way. Every process that decodes imports this.
cv2.setNumThreads(0)

_FULL = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
# OpenCV's names for the scales include an order of colours; the bits alone do not.
_SCALES = {
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _FULL,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _FULL,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _FULL,
    1: _FULL,
}
# Start-of-frame markers: those with the image's size. C4, C8 and CC are others.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Of these, the ones whose rows are stored in order.
_SEQUENTIAL = frozenset((0xC0, 0xC1))
_SCAN, _RESTARTS, _END = 0xDA, 0xDD, b"\xff\xd9"
# Phones say so that another picture follows.
_APP2, _MULTIPLE = 0xE2, b"MPF\0"
# More than a decoder looks ahead.
_NO_END = bytes(64)
# A row of pixels depends on the next rows of colour, which may be half as many, and a
# block of a file scaled to an eighth is 8 rows.
_ROWS_BELOW = 32
_CROP_TRIES = 10


def decode_jpeg(data: bytes) -> np.ndarray:
    """Returns the image of a JPEG file, or of another that OpenCV reads.

    Args:
      data: The file's bytes.

    Returns:
      ``uint8[height, width, 3]``, in the order red, green, blue.

    Raises:
      ValueError: If the bytes are no readable image.
    """
    return _decode(data, _FULL)


def decode_image(encoded: bytes | np.ndarray) -> np.ndarray:
    """Returns an image, whether it is encoded or decoded already.

    Args:
      encoded: A file's bytes, or ``uint8[height, width, 3 or 1]``.

    Returns:
      ``uint8[height, width, 3]``, in the order red, green, blue; an array of three
      channels is not copied.

    Raises:
      ValueError: If it is no image.
    """
    if isinstance(encoded, bytes):
        return decode_jpeg(encoded)
    if encoded.dtype != np.uint8 or encoded.ndim != 3 or encoded.shape[2] not in (1, 3):
        raise ValueError(
            f"An array of {encoded.dtype} and shape {encoded.shape} is no image; give "
            "uint8[height, width, 3], or 1 channel."
        )
    return encoded if encoded.shape[2] == 3 else np.repeat(encoded, 3, axis=2)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Returns height and width of a JPEG file from its header.

    Args:
      data: The file's bytes.

    Returns:
      The two, in pixels as they are stored; None if it is no JPEG file.
    """
    frame = _frame(data)
    return None if frame is None else (frame.height, frame.width)


def random_resized_crop(
    encoded: bytes | np.ndarray,
    seed: int,
    size: int,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> np.ndarray:
    """Returns a random part of an image, resized to a square.

    The part's share of the area is drawn evenly, and its width over its height evenly
    in the logarithm, ten times at most, until it fits into the image; if it never
    does, it is the largest part in the middle whose ratio is allowed.

    Args:
      encoded: See `decode_image`; it is not written to.
      seed: Decides everything: the ``uint64`` of `echo_jax.echo.keys.use_seed`.
      size: Height and width of the result, in pixels.
      area: The least and the largest share of the image's area.
      ratio: The least and the largest width over height.

    Returns:
      ``uint8[size, size, 3]``, in memory of its own.

    Raises:
      ValueError: If it is no image.

    Source:
      Szegedy et al. 2014, "Going deeper with convolutions", section 6.
    """
    if isinstance(encoded, bytes) and (known := jpeg_size(encoded)):
        box = _random_box(known[0], known[1], seed, area, ratio)
        return _resized(encoded, known, box, size)
    image = decode_image(encoded)
    height, width = image.shape[:2]
    box = _random_box(height, width, seed, area, ratio)
    return _resized(image, (height, width), box, size)


def resize_center_crop(
    encoded: bytes | np.ndarray, size: int, *, resize: int
) -> np.ndarray:
    """Returns the middle of an image, as a square.

    It is the middle ``size`` by ``size`` pixels of the image whose shorter side is
    resized to ``resize``.

    Args:
      encoded: See `decode_image`; it is not written to.
      size: Height and width of the result, in pixels; at most ``resize``.
      resize: The shorter side that the whole image would have.

    Returns:
      ``uint8[size, size, 3]``, in memory of its own.

    Raises:
      ValueError: If it is no image.
    """
    if not 0 < size <= resize:
        raise ValueError(
            f"size={size} must be at least 1 and at most resize={resize}, the shorter "
            "side that it is cut from."
        )
    known = jpeg_size(encoded) if isinstance(encoded, bytes) else None
    if known is None:
        encoded = decode_image(encoded)
        known = encoded.shape[:2]
    height, width = known
    side = min(height, width) * size / resize
    box = _Box((height - side) / 2, (width - side) / 2, side, side)
    return _resized(encoded, known, box, size)


def pad_crop_flip(image: np.ndarray, seed: int, *, padding: int) -> np.ndarray:
    """Returns the image shifted at random and flipped left to right half the time.

    The image is mirrored outwards by `padding` pixels on every side, and a
    window of its own size is cut out anywhere: up to `padding` pixels of shift
    in each direction, all equally likely.

    Args:
      image: ``uint8[height, width, channels]``; it is not written to.
      seed: Decides everything: the ``uint64`` of `echo_jax.echo.keys.use_seed`,
        whose bits are well mixed.
      padding: Pixels, at least 0 and less than height and width.

    Returns:
      ``uint8[height, width, channels]``, in memory of its own.

    Example:
      >>> image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
      >>> bool((pad_crop_flip(image, seed=1, padding=0) == image[:, ::-1]).all())
      True
    """
    height, width = image.shape[:2]
    # Digits of the seed, in bases so small beside 2^64 that none is favoured.
    rest, is_flipped = divmod(int(seed), 2)
    rest, top = divmod(rest, 2 * padding + 1)
    left = rest % (2 * padding + 1)
    padded = cv2.copyMakeBorder(
        image, padding, padding, padding, padding, cv2.BORDER_REFLECT_101
    )
    crop = padded[top : top + height, left : left + width]
    return np.ascontiguousarray(crop[:, ::-1] if is_flipped else crop)


class _Box(NamedTuple):
    """A part of an image, in its pixels."""

    top: float
    left: float
    height: float
    width: float


def _random_box(
    height: int,
    width: int,
    seed: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> _Box:
    """Draws the part that `random_resized_crop` cuts out."""
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
            return _Box(top, left, high, wide)
    high = min(height, max(1, round(width / ratio[0])))
    wide = min(width, max(1, round(height * ratio[1])))
    return _Box((height - high) / 2, (width - wide) / 2, high, wide)


def _resized(
    encoded: bytes | np.ndarray, known: tuple[int, int], box: _Box, size: int
) -> np.ndarray:
    """Returns a part of an image of known height and width, as a square."""
    height, width = known
    scale, image = 1, encoded
    if isinstance(image, bytes):
        room = max(min(box.height, box.width) / size, 1)
        scale = next(scale for scale in _SCALES if scale <= room)
        image = _without_rows_below(image, math.ceil(box.top + box.height))
        image = _decode(image, _SCALES[scale])
    across = math.ceil(height / scale) / height
    along = math.ceil(width / scale) / width
    top, left = _near(box.top * across), _near(box.left * along)
    # Rounded like the near end, so that a part never loses a pixel of its size.
    bottom = max(top + 1, _near((box.top + box.height) * across))
    right = max(left + 1, _near((box.left + box.width) * along))
    part = image[top:bottom, left:right]
    is_halved = min(part.shape[:2]) >= 2 * size
    how = cv2.INTER_AREA if is_halved else cv2.INTER_LINEAR
    return cv2.resize(part, (size, size), interpolation=how)


def _without_rows_below(data: bytes, bottom: int) -> bytes:
    """Returns the JPEG file of an image that ends a little below a row.

    Its header says so, and the decoder does not even unpack the rest. The rows above
    are the same to the bit: they depend on those of the next block at most. That holds
    where the file holds its rows in order, which progressive ones do not.

    Zeros take the place of the mark at its end: a decoder that finds it behind more
    data than the rows took warns on standard error, for every single image.
    """
    frame, height = _frame(data), bottom + _ROWS_BELOW
    if frame is None or not frame.is_in_order or height >= frame.height:
        return data
    # Looked for only where it is not at the end: that would take a tenth of the time.
    end = len(data) - 2 if data.endswith(_END) else data.find(_END, frame.scan)
    rest = memoryview(data)[frame.at + 2 : end if end > 0 else len(data)]
    return b"".join((data[: frame.at], struct.pack(">H", height), rest, _NO_END))


class _Frame(NamedTuple):
    """What the header of a JPEG file says.

    Attributes:
      at: Where the height stands, two bytes long; the width follows.
      scan: Where the pixels begin.
      is_in_order: Whether rows are stored from the top to the bottom, all colours of
        one together, and without marks between them or another picture behind.
      height: In pixels.
      width: In pixels.
    """

    at: int
    scan: int
    is_in_order: bool
    height: int
    width: int


def _frame(data: bytes) -> _Frame | None:
    if data[:2] != b"\xff\xd8":
        return None
    at, frame, is_in_order = 2, None, True
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
    return _Frame(place, at, is_in_order and is_whole, height, width)


def _near(place: float) -> int:
    return math.floor(place + 0.5)


def _decode(data: bytes, flags: int) -> np.ndarray:
    encoded = np.frombuffer(data, np.uint8)
    image = cv2.imdecode(encoded, flags) if encoded.size else None
    if image is None:
        raise ValueError(
            f"A record of {len(data)} bytes, beginning with {data[:8]!r}, is no "
            "readable image; write it again as JPEG."
        )
    return image
