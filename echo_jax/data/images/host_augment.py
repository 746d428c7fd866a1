"""Augmentation of single items on the host, in the order of `config.data.augment`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from echo_jax.data.pipeline.stages import Item
from echo_jax.echo.keys import seed_for_use

T = TypeVar("T")


@dataclass(frozen=True)
class HostAugment:
    """Runs stages ``(item, uint64 seed)`` in order, each with its own seed."""

    stages: tuple[Callable[[Item, int], Item], ...]

    def __call__(self, item: Item, seed: int) -> Item:
        for number, stage in enumerate(self.stages):
            item = stage(item, int(seed_for_use(seed, number, 0)))
        return item


@dataclass(frozen=True)
class OnImage:
    """Applies ``change(image, uint64 seed)`` to the image of an item."""

    change: Callable[[Any, int], np.ndarray]

    def __call__(self, item: Item, seed: int) -> Item:
        return {**item, "image": self.change(item["image"], seed)}


def flip(image: np.ndarray, seed: int) -> np.ndarray:
    """Returns the image mirrored left to right if the seed is odd."""
    return np.ascontiguousarray(image[:, ::-1]) if seed % 2 else image


def choose_stages(names: Sequence[str], known: Mapping[str, T]) -> tuple[T, ...]:
    """Returns the named stages; `known` lists all of them in their order."""
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
