"""Augmentation on the device: its share of a training step, and each operation."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tasks
from benchmarks.harness import Result
from echo_jax.data.augment import (
    Augment,
    ColourDistortion,
    Cutout,
    Flip,
    Mixup,
    PadCrop,
    RandomResizedCrop,
    Stage,
)

_CLASSES = 1000


def h4(*, small: bool = False, repeats: int = 5) -> Result:
    """Time of on-device augmentation / time of the training step that follows it.

    Args:
      small: Whether to shrink it to a check that runs anywhere.
      repeats: How many measurements, after one that does not count.
    """
    device = jax.devices()[0]
    task = tasks.resnet_50(small=small)
    batch, calls = (16, 2) if small else (256, 10)
    augment = Augment((RandomResizedCrop(task.image_size), Flip(), ColourDistortion()))
    # What a buffer holds is an eighth larger than what is cut out of it.
    stored, keys = _batch(batch, task.image_size * 8 // 7, task.model.num_classes)
    images = jax.jit(augment)(stored, keys)
    state, update = tasks.training(task)

    def plain(state: Any, batch: Any, keys: jax.Array) -> Any:
        del keys
        return update(state, batch)

    def fused(state: Any, batch: Any, keys: jax.Array) -> Any:
        return update(state, augment(batch, keys))

    steps = {"plain": (jax.jit(plain), images), "fused": (jax.jit(fused), stored)}
    only = jax.jit(augment)
    shares, extras = [], []
    for _ in range(repeats + 1):
        alone = _seconds(lambda: only(stored, keys), calls)
        took = {
            name: _seconds(lambda step=step, at=at: step(state, at, keys), calls)
            for name, (step, at) in steps.items()
        }
        shares.append(alone / took["plain"])
        extras.append(took["fused"] / took["plain"] - 1)
    shares, extras = shares[1:], extras[1:]
    return Result(
        "H4",
        "on-device augmentation (random resized crop, flip, colour) / training step",
        100 * statistics.median(shares),
        "<= 3",
        "%",
        "the step without augmentation, in turns",
        [100 * share for share in shares],
        f"{device.device_kind}; batch {batch} at {task.image_size} px"
        f"{', a network shrunk to a check' if small else ''}; a program of its own; "
        f"within the step it adds {100 * statistics.median(extras):.1f} %",
    )


def _batch(
    size: int, pixels: int, classes: int = _CLASSES
) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (size, pixels, pixels, 3), np.uint8),
        "label": rng.integers(0, classes, size, np.int32),
    }
    return jax.device_put(batch), jax.random.split(jax.random.key(0), size)


def _seconds(work: Callable[[], Any], calls: int) -> float:
    """Seconds of a call, of several that the device does one after the other."""
    start = time.perf_counter()
    jax.block_until_ready([work() for _ in range(calls)])
    return (time.perf_counter() - start) / calls


def operations(
    batch_size: int = 32, pixels: int = 224, repeats: int = 5
) -> list[Result]:
    """Images a second of each operation / of the obvious way to write it."""
    batch, keys = _batch(batch_size, pixels)
    results = []
    for name, (stage, naive) in _pairs(pixels).items():
        rates = []
        programs = [jax.jit(functools.partial(_images_of, stage)), jax.jit(naive)]
        for _ in range(repeats + 1):
            took = [_seconds(lambda p=p: p(batch, keys), 3) for p in programs]
            rates.append([batch_size / seconds for seconds in took])
        ratios = [mine / other for mine, other in rates[1:]]
        mine, other = np.median(rates[1:], axis=0)
        results.append(
            Result(
                f"augment-{name}",
                f"images/s of {name}, {batch_size} images of {pixels} pixels",
                statistics.median(ratios),
                ">= 1",
                "x",
                naive.__name__.strip("_").replace("_", " "),
                ratios,
                f"{mine:.0f} against {other:.0f}; {jax.devices()[0].device_kind}",
            )
        )
    return results


def _images_of(stage: Stage, batch: dict[str, jax.Array], keys: jax.Array) -> jax.Array:
    return stage(batch, keys)["image"]


def _pairs(pixels: int) -> dict[str, tuple[Stage, Callable[..., jax.Array]]]:
    """Each operation, and what one writes first."""
    crop = RandomResizedCrop(pixels)

    def _vmap_of_scale_and_translate(batch, keys):
        def one(image, window):
            scale = pixels / window[2:]
            image = jax.image.scale_and_translate(
                image.astype(jnp.float32),
                (pixels, pixels, 3),
                (0, 1),
                scale,
                -window[:2] * scale,
                "linear",
                antialias=False,
            )
            return jnp.clip(jnp.round(image), 0, 255).astype(jnp.uint8)

        windows = crop.windows(keys, pixels, pixels).astype(jnp.float32)
        return jax.vmap(one)(batch["image"], windows)

    def _pad_and_vmap_of_dynamic_slice(batch, keys):
        border = ((0, 0), (4, 4), (4, 4), (0, 0))
        padded = jnp.pad(batch["image"], border, "reflect")

        def one(image, offset):
            return jax.lax.dynamic_slice(image, (*offset, 0), (pixels, pixels, 3))

        return jax.vmap(one)(padded, PadCrop(4).offsets(keys))

    def _vmap_of_cond(batch, keys):
        def one(image, key):
            flip = jax.random.bernoulli(key)
            return jax.lax.cond(flip, lambda x: x[:, ::-1], lambda x: x, image)

        return jax.vmap(one)(batch["image"], keys)

    def _the_same_along_the_channel_axis(batch, keys):
        return _distorted_by_axis(batch["image"], ColourDistortion().factors(keys))

    def _vmap_of_dynamic_update_slice(batch, keys):
        square = jnp.full((16, 16, 3), 128, jnp.uint8)

        def one(image, corner):
            return jax.lax.dynamic_update_slice(image, square, (*corner, 0))

        corners = Cutout(16).corners(keys, pixels, pixels)
        return jax.vmap(one)(batch["image"], corners)

    def _a_partner_by_permutation(batch, keys):
        share = jax.vmap(lambda key: jax.random.beta(key, 0.2, 0.2))(keys)
        share = share[:, None, None, None]
        partner = batch["image"][jax.random.permutation(keys[0], len(share))]
        mixed = share * batch["image"] + (1 - share) * partner
        return jnp.round(mixed).astype(jnp.uint8)

    return {
        "RandomResizedCrop": (crop, _vmap_of_scale_and_translate),
        "PadCrop": (PadCrop(4), _pad_and_vmap_of_dynamic_slice),
        "Flip": (Flip(), _vmap_of_cond),
        "ColourDistortion": (ColourDistortion(), _the_same_along_the_channel_axis),
        "Cutout": (Cutout(16), _vmap_of_dynamic_update_slice),
        "Mixup": (Mixup(_CLASSES), _a_partner_by_permutation),
    }


def _distorted_by_axis(images: jax.Array, factors: Any) -> jax.Array:
    add, contrast, saturation, hue = (x[:, None, None, None] for x in factors)
    image = images.astype(jnp.float32)
    mean = image.mean(axis=(1, 2), keepdims=True)
    image = jnp.clip((image - mean) * contrast + mean + add, 0, 255)
    value, low = image.max(-1, keepdims=True), image.min(-1, keepdims=True)
    chroma = value - low
    turned = (jnp.roll(image, -1, -1) - jnp.roll(image, -2, -1)) / (chroma + 1e-6)
    sextant = jnp.arange(0, 6, 2).reshape(1, 1, 1, 3) + turned
    sextant = jnp.take_along_axis(sextant, image.argmax(-1, keepdims=True), -1)
    phase = (sextant + 6 * hue + jnp.array([[[[5, 3, 1]]]])) % 6
    chroma = jnp.minimum(chroma * saturation, value)
    image = value - chroma * jnp.clip(jnp.minimum(phase, 4 - phase), 0, 1)
    return jnp.round(image).astype(jnp.uint8)
