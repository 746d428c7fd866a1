"""`echo_jax.data.augment.ColourDistortion` on the host, for one image at a time."""

import cv2
import numpy as np

from echo_jax.data.augment import ColourDistortion
from echo_jax.echo.keys import seed_for_use


def distort_colours(
    image: np.ndarray, seed: int, strengths: ColourDistortion | None = None
) -> np.ndarray:
    """Returns the image with random colour changes, uint8[height, width, 3]."""
    strengths = strengths or ColourDistortion()
    draws = seed_for_use(seed, np.arange(4), np.zeros(4)) / 2.0**63 - 1
    brightness, contrast, saturation, hue = draws.tolist()
    return change_colours(
        image,
        brightness=255 * strengths.brightness * brightness,
        contrast=1 + strengths.contrast * contrast,
        saturation=1 + strengths.saturation * saturation,
        hue=strengths.hue * hue,
    )


def change_colours(
    image: np.ndarray,
    *,
    brightness: float,
    contrast: float,
    saturation: float,
    hue: float,
) -> np.ndarray:
    """Changes colours by `ColourFactors`; equals the device within one grey level."""
    # A byte has 256 values: compute a table for each channel.
    means = np.array(cv2.mean(image)[:3])
    values = (np.arange(256)[:, None] - means) * contrast + means + brightness
    table = (np.clip(values, 0, 255) / 255).astype(np.float32)
    changed = cv2.LUT(image, table[None])
    hsv = cv2.cvtColor(changed, cv2.COLOR_RGB2HSV)  # hue in degrees
    hsv[..., 0] = np.mod(hsv[..., 0] + 360 * hue, 360)
    hsv[..., 1] = np.minimum(hsv[..., 1] * saturation, 1)
    return cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), alpha=255)
