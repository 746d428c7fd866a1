"""Labelled images: from a record to an item."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.data.pipeline.stages import Item

__all__ = ["DecodeLabelled", "Encoded"]

Encoded = bytes | np.ndarray
"""An image as a record holds it: a file's bytes, or pixels."""


@dataclass(frozen=True)
class DecodeLabelled:
    """Turns a record into ``{"image": ..., "label": int32[]}``.

    Attributes:
      decode_record: Returns the dict of kind images.
      decode: Returns pixels of a fixed size, or bytes if augmentation decodes them.
    """

    decode_record: Callable[[Any], dict[str, Any]]
    decode: Callable[[Encoded], Any]

    def __call__(self, record: Any) -> Item:
        entries = self.decode_record(record)
        try:
            image = self.decode(entries["image"])
        except ValueError as error:
            raise ValueError(f"image {entries['name']!r}: {error}") from error
        return {"image": image, "label": np.asarray(entries["label"], np.int32)}
