"""Turns a stored image upright by its EXIF orientation."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Box", "Turn", "turn_of"]


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: float
    left: float
    height: float
    width: float


@dataclass(frozen=True)
class Turn:
    """Makes a stored image upright: a transposition first, then mirrors.

    Attributes:
      swaps: Whether rows become columns.
      upends: Whether the last row becomes the first.
      mirrors: Whether the last column becomes the first.
    """

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
        if self == _NONE:
            return image
        if self.swaps:
            image = image.swapaxes(0, 1)
        steps = (-1 if self.upends else 1), (-1 if self.mirrors else 1)
        return np.ascontiguousarray(image[:: steps[0], :: steps[1]])


_NONE = Turn()
# In the order of EXIF's numbers, from 1 on.
_TURNS = (
    _NONE,
    Turn(mirrors=True),
    Turn(upends=True, mirrors=True),
    Turn(upends=True),
    Turn(swaps=True),
    Turn(swaps=True, mirrors=True),
    Turn(swaps=True, upends=True, mirrors=True),
    Turn(swaps=True, upends=True),
)


def turn_of(orientation: int) -> Turn:
    """Returns the turn of an EXIF orientation from 1 to 8."""
    return _TURNS[orientation - 1]
