"""Reads the header of a JPEG file, and turns its image upright (EXIF)."""

import struct
from typing import Literal, NamedTuple

import numpy as np

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
    """Returns the orientation in an EXIF segment; 0 if there is none."""
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
