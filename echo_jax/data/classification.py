"""Labelled images: from a record to an item, and its augmentation on the host."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.data.stages import Item, RecordSource
from echo_jax.echo.keys import use_seed

__all__ = [
    "AugmentImage",
    "DecodeLabelled",
    "Encoded",
    "Picked",
    "check_stages",
    "flip",
]

Encoded = bytes | np.ndarray
"""An image as a record holds it: a file's bytes, or pixels."""


@dataclass(frozen=True)
class DecodeLabelled:
    """Turns a record into ``{"image": ..., "label": int32[]}``.

    Attributes:
      decode_record: Makes the dict of kind images; see `echo_jax.data.sources`.
      decode: Makes the image of the item: pixels of a fixed size, or bytes still, if
        augmentation decodes what it needs of them.
    """

    decode_record: Callable[[Any], dict[str, Any]]
    decode: Callable[[Encoded], Any]

    def __call__(self, record: Any) -> Item:
        """Decodes a record.

        Raises:
          ValueError: If its image cannot be decoded; the message names it.
        """
        entries = self.decode_record(record)
        try:
            image = self.decode(entries["image"])
        except ValueError as error:
            raise ValueError(f"image {entries['name']!r}: {error}") from error
        return {"image": image, "label": np.asarray(entries["label"], np.int32)}


@dataclass(frozen=True)
class AugmentImage:
    """Stages one after the other, each with randomness of its own.

    Attributes:
      stages: Functions of an image and a ``uint64`` seed.
    """

    stages: tuple[Callable[[Any, int], np.ndarray], ...]

    def __call__(self, item: Item, seed: int) -> Item:
        """Returns the item with another image; see `Stages`."""
        image = item["image"]
        for number, stage in enumerate(self.stages):
            image = stage(image, int(use_seed(seed, number, 0)))
        return {**item, "image": image}


@dataclass(frozen=True)
class Picked:
    """Some of the records of a source.

    Attributes:
      source: All records.
      indices: Which of them, in this order.

    Example:
      >>> Picked([b"ab", b"cd", b"ef"], (2, 0))[0]
      b'ef'
    """

    source: RecordSource
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> bytes:
        return self.source[self.indices[index]]


def flip(image: np.ndarray, seed: int) -> np.ndarray:
    """Returns the image, mirrored left to right half the time.

    Args:
      image: ``uint8[height, width, channels]``; it is not written to.
      seed: Decides it.

    Returns:
      The image itself, or its mirror image in memory of its own.

    Example:
      >>> flip(np.array([[[1], [2]]], np.uint8), seed=1).tolist()
      [[[2], [1]]]
    """
    return np.ascontiguousarray(image[:, ::-1]) if seed % 2 else image


def check_stages(names: Sequence[str], known: Collection[str]) -> None:
    """Refuses augmentations that a workload has not, or in another order.

    Args:
      names: ``config.data.augment``.
      known: Those that it has, in the order in which they work.

    Raises:
      ValueError: A name is unknown, twice there, or out of order.

    Example:
      >>> check_stages(("flip", "mixup"), ("crop", "flip"))
      Traceback (most recent call last):
      ValueError: config.data.augment: 'mixup' is unknown here; use some of crop, flip.
    """
    for name in names:
        if name not in known:
            raise ValueError(
                f"config.data.augment: {name!r} is unknown here; use some of "
                f"{', '.join(known)}."
            )
    ordered = tuple(name for name in known if name in names)
    if tuple(names) != ordered:
        raise ValueError(
            f"config.data.augment={tuple(names)} is out of order; set "
            f'--config.data.augment="{ordered}".'
        )
