"""Decoding real photographs on one core: ours, Pillow, and TensorFlow's own crop."""

import functools
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np

from benchmarks.harness import Result, paired
from echo_jax.data.images.decode import jpeg_header, random_resized_crop
from echo_jax.echo.keys import seed_for_use

_SIZE = 224
_SMALL_IMAGES = 20
# Of the image whose part is cut out: share of the area, width over height.
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)

Part = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""


def p21(*, small: bool = False) -> list[Result]:
    """Random resized crops to 224 of the ImageNet sample, images per second.

    A process of its own measures it, in seconds of processor time: it binds itself to
    one core before any library has started a thread.
    """
    if "ECHO_JAX_DATA" not in os.environ:
        raise SystemExit(
            "P21 decodes real photographs: set ECHO_JAX_DATA to a folder with "
            "imagenet_sample/images.tar"
        )
    command = [sys.executable, "-m", "benchmarks.decode", *(["--small"] * small)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def _measure(small: bool) -> list[Result]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    files = _files()[: _SMALL_IMAGES if small else None]
    seeds = seed_for_use(0, range(len(files)), [0] * len(files)).tolist()
    speeds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> float:
        # The time of the core, of all threads: what else runs on it does not count.
        start = time.process_time()
        work()
        spent = time.process_time() - start
        speeds.setdefault(name, []).append(len(files) / spent)
        return spent

    def ours() -> None:
        for data, seed in zip(files, seeds, strict=True):
            random_resized_crop(data, seed, _SIZE, area=_AREA, ratio=_RATIO)

    decoder = _decoder(ours)
    parts = [_part(data, seed) for data, seed in zip(files, seeds, strict=True)]
    peers = {
        "Pillow": (_pillow(files, parts), ">= 1.9", "draft, crop and bilinear resize"),
        "tf.data": (
            _tfdata(files, seeds),
            ">= 1.2",
            "sample_distorted_bounding_box, decode_and_crop_jpeg and resize to uint8, "
            "in a map of one thread",
        ),
    }
    results = []
    for letter, (name, (peer, goal, how)) in zip("ab", peers.items(), strict=True):
        ratio, ratios = paired(
            functools.partial(timed, f"ours-{name}", ours),
            functools.partial(timed, name, peer),
            repeats=1 if small else 7,
        )
        part = statistics.median(timed("decoder", decoder) for _ in range(3))
        part *= statistics.median(speeds[f"ours-{name}"][1:]) / len(files)
        mine, other = (statistics.median(speeds[n][1:]) for n in (f"ours-{name}", name))
        results.append(
            Result(
                f"P21{letter}",
                "random resized crops to 224 of real ImageNet JPEGs, on one core",
                ratio,
                goal,
                "x",
                f"{name}: {how}",
                ratios,
                f"{len(files)} images; {mine:.0f} a second against {other:.0f} "
                f"(Pillow is given the parts to cut out); {part:.0%} of our time is in "
                "libjpeg-turbo, as OpenCV calls it",
            )
        )
    return results


def _decoder(work: Callable[[], object]) -> Callable[[], object]:
    """Returns what decodes all that some work has had OpenCV decode, and no more."""
    asked = []
    decode = cv2.imdecode

    def recorded(encoded: np.ndarray, flags: int) -> Any:
        asked.append((encoded, flags))
        return decode(encoded, flags)

    def again() -> None:
        for each in asked:
            decode(*each)

    with mock.patch.object(cv2, "imdecode", recorded):
        work()
    return again


def _files() -> list[bytes]:
    """Returns the photographs, in memory."""
    path = Path(os.environ["ECHO_JAX_DATA"]) / "imagenet_sample" / "images.tar"
    with tarfile.open(path) as tar:
        opened = (tar.extractfile(member) for member in tar)
        return [file.read() for file in opened if file is not None]


def _part(data: bytes, seed: int) -> Part:
    """Returns a part of the same distribution as ours."""
    header = jpeg_header(data)
    assert header is not None, "the sample holds JPEG files alone"
    height, width = header.height, header.width
    rng = np.random.default_rng(seed)
    while True:
        share, shape = rng.uniform(*_AREA), np.exp(rng.uniform(*np.log(_RATIO)))
        wide = round(float(np.sqrt(height * width * share * shape)))
        high = round(float(np.sqrt(height * width * share / shape)))
        if 0 < wide <= width and 0 < high <= height:
            top, left = rng.integers(height - high + 1), rng.integers(width - wide + 1)
            return int(top), int(left), high, wide


def _pillow(files: list[bytes], parts: list[Part]) -> Callable[[], object]:
    from PIL import Image

    def run() -> None:
        for data, (top, left, high, wide) in zip(files, parts, strict=True):
            image = Image.open(io.BytesIO(data))
            width, height = image.size
            # As small as it may be decoded without falling below the size asked for.
            scale = max(1, min(high, wide) // _SIZE)
            image.draft("RGB", (width // scale, height // scale))
            image = image.convert("RGB")
            along, across = image.width / width, image.height / height
            box = (
                left * along,
                top * across,
                (left + wide) * along,
                (top + high) * across,
            )
            resized = image.resize((_SIZE, _SIZE), Image.Resampling.BILINEAR, box=box)
            np.asarray(resized)

    return run


def _tfdata(files: list[bytes], seeds: list[int]) -> Callable[[], object]:
    import tensorflow as tf

    def crop(data, seed):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data),
            tf.constant([0, 0, 1, 1], tf.float32, [1, 1, 4]),
            seed=tf.stack([seed, tf.zeros_like(seed)]),
            aspect_ratio_range=_RATIO,
            area_range=_AREA,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        part = tf.concat([begin[:2], extent[:2]], 0)
        image = tf.io.decode_and_crop_jpeg(data, part, channels=3)
        image = tf.image.resize(image, (_SIZE, _SIZE))
        return tf.cast(image, tf.uint8)

    dataset = tf.data.Dataset.from_tensor_slices(
        (files, np.array(seeds).astype(np.int64))
    )
    dataset = dataset.map(crop, num_parallel_calls=1)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    dataset = dataset.with_options(options)

    def count(total, image):
        return total + tf.cast(image[0, 0, 0], tf.int64)

    # Consumed in the graph: no image has to become an array of NumPy.
    return lambda: dataset.reduce(tf.constant(0, tf.int64), count)


if __name__ == "__main__":
    for result in _measure("--small" in sys.argv[1:]):
        print(json.dumps(asdict(result)))
