"""Augmentation on the host, an item at a time, as `data.augment` names it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from echo_jax.data.pipeline.stages import Item
from echo_jax.echo.keys import use_seed

__all__ = ["HostAugment", "OnImage", "choose_stages", "flip"]

T = TypeVar("T")


@dataclass(frozen=True)
class HostAugment:
    """Stages one after the other, each with randomness of its own.

    `echo_jax.data.augment.Augment` is the same for batches on the devices.

    Attributes:
      stages: Functions of an item and a ``uint64`` seed, that write to neither.
    """

    stages: tuple[Callable[[Item, int], Item], ...]

    def __call__(self, item: Item, seed: int) -> Item:
        """Returns the augmented item; see `Stages`."""
        for number, stage in enumerate(self.stages):
            item = stage(item, int(use_seed(seed, number, 0)))
        return item


@dataclass(frozen=True)
class OnImage:
    """A stage that changes nothing but the image.

    Attributes:
      change: A function of the image, as decoded so far, and a ``uint64`` seed.
    """

    change: Callable[[Any, int], np.ndarray]

    def __call__(self, item: Item, seed: int) -> Item:
        """Returns the item with another image."""
        return {**item, "image": self.change(item["image"], seed)}


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


def choose_stages(names: Sequence[str], known: Mapping[str, T]) -> tuple[T, ...]:
    """Returns the stages that a config names.

    Args:
      names: ``config.data.augment``.
      known: Those that a workload has, in the order in which they work.

    Raises:
      ValueError: A name is unknown, twice there, or out of order.

    Example:
      >>> choose_stages(("flip", "mixup"), {"crop": 1, "flip": 2})
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
    return tuple(known[name] for name in names)
