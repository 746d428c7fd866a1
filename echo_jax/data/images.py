"""Decoding and augmenting images on the host, as pure functions."""

import cv2
import numpy as np

__all__ = ["decode_jpeg", "pad_crop_flip"]


def decode_jpeg(data: bytes) -> np.ndarray:
    """Returns the image of a JPEG file.

    Args:
      data: The file's bytes.

    Returns:
      ``uint8[height, width, 3]``, in the order red, green, blue.

    Raises:
      ValueError: If the bytes are no readable image.
    """
    encoded = np.frombuffer(data, np.uint8)
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB) if encoded.size else None
    if image is None:
        raise ValueError(
            f"A record of {len(data)} bytes, beginning with {data[:8]!r}, is no "
            "readable image; write it again as JPEG."
        )
    return image


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
