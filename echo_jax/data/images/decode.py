"""Decoding and augmenting images on the host, as pure functions.

A JPEG is decoded at a half, a quarter or an eighth of its size where that still gives
at least as many pixels as are asked for: the decoder then leaves work out, and its
averages are better pixels than those that an interpolation would skip over. What is
cut out begins at a whole pixel there, at most half a pixel of the result away. Rows
below what is cut out are not decoded at all, where the file holds its rows in order.

Images stand upright, as the camera notes in EXIF, unless they are asked for as they are
stored: the boxes of a detection data set refer to those pixels. Grey images become red,
green and blue; so does CMYK; transparency is dropped.
"""

import math
import struct
from collections.abc import Callable

import cv2
import numpy as np

from echo_jax.data.images.jpeg_header import JpegHeader, jpeg_header
from echo_jax.data.images.orientation import Box, turn_of
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

_UPRIGHT = cv2.IMREAD_COLOR_RGB
_FULL = _UPRIGHT | cv2.IMREAD_IGNORE_ORIENTATION
# OpenCV's names for the scales include an order of colours; the bits alone do not.
_SCALES = {
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _FULL,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _FULL,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _FULL,
    1: _FULL,
}
_END = b"\xff\xd9"
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
    return _decode(data, _UPRIGHT)


def decode_image(encoded: bytes | np.ndarray, *, as_stored: bool = False) -> np.ndarray:
    """Returns an image, whether it is encoded or decoded already.

    Args:
      encoded: A file's bytes, or ``uint8[height, width, 3 or 1]``.
      as_stored: Whether the turn that a file asks for is left out.

    Returns:
      ``uint8[height, width, 3]``, in the order red, green, blue; an array of three
      channels is not copied.

    Raises:
      ValueError: If it is no image.
    """
    if isinstance(encoded, bytes):
        return _decode(encoded, _FULL if as_stored else _UPRIGHT)
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
    header = jpeg_header(data)
    return None if header is None else (header.height, header.width)


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
    return _crop(
        encoded,
        lambda height, width: _random_box(height, width, seed, area, ratio),
        size,
    )


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

    def middle(height: int, width: int) -> Box:
        side = min(height, width) * size / resize
        return Box((height - side) / 2, (width - side) / 2, side, side)

    return _crop(encoded, middle, size)


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


def _random_box(
    height: int,
    width: int,
    seed: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
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
            return Box(top, left, high, wide)
    high = min(height, max(1, round(width / ratio[0])))
    wide = min(width, max(1, round(height * ratio[1])))
    return Box((height - high) / 2, (width - wide) / 2, high, wide)


def _crop(
    encoded: bytes | np.ndarray, choose: Callable[[int, int], Box], size: int
) -> np.ndarray:
    """Returns the part that is chosen by an upright height and width, as a square."""
    header = jpeg_header(encoded) if isinstance(encoded, bytes) else None
    if not isinstance(encoded, bytes) or header is None:
        image = decode_image(encoded)
        height, width = image.shape[:2]
        return _resized(image, (height, width), choose(height, width), size)
    turn, known = turn_of(header.orientation), (header.height, header.width)
    upright = turn.size(*known)
    box = turn.stored(choose(*upright), *upright)
    room = max(min(box.height, box.width) / size, 1)
    scale = next(scale for scale in _SCALES if scale <= room)
    data = _without_rows_below(encoded, header, math.ceil(box.top + box.height))
    # Turned when it is small.
    part = _resized(_decode(data, _SCALES[scale]), known, box, size, scale)
    return turn.upright(part)


def _resized(
    image: np.ndarray, known: tuple[int, int], box: Box, size: int, scale: int = 1
) -> np.ndarray:
    """Returns a part of an image as a square.

    Args:
      image: The image, or as much of it as the part takes, at 1 / `scale` of its size.
      known: Height and width of the whole.
      box: The part, in pixels of the whole.
      size: Height and width of the result.
      scale: See above.
    """
    height, width = known
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


def _without_rows_below(data: bytes, header: JpegHeader, bottom: int) -> bytes:
    """Returns the JPEG file of an image that ends a little below a row.

    Its header says so, and the decoder does not even unpack the rest. The rows above
    are the same to the bit: they depend on those of the next block at most. That holds
    where the file holds its rows in order, which progressive ones do not.

    Zeros take the place of the mark at its end: a decoder that finds it behind more
    data than the rows took warns on standard error, for every single image.
    """
    height = bottom + _ROWS_BELOW
    if not header.is_in_order or height >= header.height:
        return data
    # Looked for only where it is not at the end: that would take a tenth of the time.
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
            f"A record of {len(data)} bytes, beginning with {data[:8]!r}, is no "
            "readable image; write it again as JPEG."
        )
    return image
