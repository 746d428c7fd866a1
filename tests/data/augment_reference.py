"""Augmentations of one image in plain NumPy, written for clarity alone."""

import colorsys

import jax
import numpy as np

from echo_jax.echo.keys import use_seed


def make_keys(size, seed=0):
    """Keys as an echo on the device makes them."""
    seeds = use_seed(seed, np.arange(size), np.zeros(size, np.int64))
    return jax.random.wrap_key_data(seeds.view(np.uint32).reshape(-1, 2))


def pad_crop(image, offset, padding, border):
    """Pads, and cuts out the window of the image's size at an offset."""
    around = ((padding, padding), (padding, padding), (0, 0))
    mode = {"reflect": "reflect", "zero": "constant"}[border]
    top, left = offset
    height, width = image.shape[:2]
    return np.pad(image, around, mode)[top : top + height, left : left + width]


def resized_crop(image, window, size):
    """Cuts out a window and resizes it; float64."""
    top, left, height, width = window
    return resized(image[top : top + height, left : left + width], size)


def resized(image, size):
    """Bilinear interpolation between pixel centres, pixel by pixel."""
    height, width = image.shape[:2]
    result = np.zeros((size, size, image.shape[2]))
    for row in range(size):
        for column in range(size):
            y = np.clip((row + 0.5) * height / size - 0.5, 0, height - 1)
            x = np.clip((column + 0.5) * width / size - 0.5, 0, width - 1)
            for near_y in {int(np.floor(y)), int(np.ceil(y))}:
                for near_x in {int(np.floor(x)), int(np.ceil(x))}:
                    weight = (1 - abs(y - near_y)) * (1 - abs(x - near_x))
                    result[row, column] += weight * image[near_y, near_x]
    return result


def random_window(rng, height, width, scale, ratio):
    """The window of a random resized crop, as its inventors' code draws it."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = np.exp(rng.uniform(*np.log(ratio)))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(height - h + 1), rng.integers(width - w + 1), h, w
    return centre_window(height, width, ratio)


def centre_window(height, width, ratio):
    """The largest window in the centre that keeps to the ratios."""
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def distort(image, brightness, contrast, saturation, hue):
    """Brightness, contrast, saturation and hue; float64."""
    mean = image.mean(axis=(0, 1))
    shifted = np.clip((image - mean) * contrast + mean + brightness, 0, 255)
    result = np.zeros(image.shape)
    for place in np.ndindex(image.shape[:2]):
        h, s, v = colorsys.rgb_to_hsv(*shifted[place])
        result[place] = colorsys.hsv_to_rgb((h + hue) % 1, min(1, s * saturation), v)
    return result


def cut_out(image, corner, size, fill):
    """Hides a square, of which a part may lie outside."""
    result = image.copy()
    for row in range(corner[0], corner[0] + size):
        for column in range(corner[1], corner[1] + size):
            if 0 <= row < image.shape[0] and 0 <= column < image.shape[1]:
                result[row, column] = fill
    return result


def cropped_box(box, window, height, width):
    """A box in a window's coordinates, or None if its centre is outside."""
    top, left, h, w = window
    ymin, xmin, ymax, xmax = box * [height, width, height, width] - [top, left] * 2
    if not (0 <= (ymin + ymax) / 2 < h and 0 <= (xmin + xmax) / 2 < w):
        return None
    return np.clip([ymin / h, xmin / w, ymax / h, xmax / w], 0, 1)
