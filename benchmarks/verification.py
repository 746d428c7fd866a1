"""What it costs to verify what is read: a checkpoint, and prepared records."""

import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import cv2
import jax
import numpy as np

from benchmarks.harness import Result, paired, seconds
from echo_jax.data import prepare
from echo_jax.data.images.decode import decode_image
from echo_jax.data.sources.prepared import Prepared, open_prepared, unpack
from echo_jax.files.folders import run_folder
from echo_jax.training.saving import checkpoint
from echo_jax.training.saving.checkpoint import Checkpoints

_ARRAYS, _SIDE = 20, 1024
# Pixels along a side, and how many images.
_SMALL, _LARGE = (32, 2048), (384, 256)


def restore(pairs: int = 21) -> Result:
    """Time to restore a checkpoint, with its checksums verified and without."""
    params = {
        f"layer_{k}": jax.random.normal(jax.random.key(k), (_SIDE, _SIDE))
        for k in range(_ARRAYS)
    }
    shapes = jax.eval_shape(lambda: params)
    saved = checkpoint.checksums(params)
    with tempfile.TemporaryDirectory() as folder:
        path = run_folder(folder) / "checkpoints"
        saver = Checkpoints(path, keep=1)
        saver.save(1, params, {})
        saver.close()
        reader = Checkpoints(path, keep=1)

        def verified() -> float:
            return seconds(lambda: jax.block_until_ready(reader.restore(1, shapes)))

        def unverified() -> float:
            with mock.patch.object(checkpoint, "checksums", lambda _: saved):
                return verified()

        ratio, ratios = paired(unverified, verified, pairs)
        reader.close()
    megabytes = sum(leaf.nbytes for leaf in params.values()) / 1e6
    return Result(
        "restore",
        "time to restore a checkpoint with its checksums verified / without",
        ratio,
        "<= 1.1",
        "x",
        "Orbax alone, the same checkpoint",
        ratios,
        f"{megabytes:.0f} MB of parameters, in the disk's cache: a disk or a network "
        "takes longer, and verifying does not",
    )


def reading(pairs: int = 21) -> list[Result]:
    """Time to read and decode prepared images, verified once more and as they are."""
    return [_reading(side, number, pairs) for side, number in (_SMALL, _LARGE)]


def _reading(side: int, number: int, pairs: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        records = _prepared(Path(folder), side, number)
        order = np.random.default_rng(0).permutation(number).tolist()

        def plain(verify: Callable[[bytes], object] = len) -> float:
            # The time of the core: what else runs on it does not count.
            start = time.process_time()
            for index in order:
                record = records[index]
                verify(record)
                decode_image(unpack(record)["image"])
            return time.process_time() - start

        ratio, ratios = paired(plain, lambda: plain(zlib.crc32), pairs)
        size = sum(len(records[index]) for index in order) / number
    return Result(
        f"reading-{side}",
        f"time to read and decode {side}x{side} images with one more checksum / as is",
        ratio,
        "<= 1.03",
        "x",
        "the same records, each verified once",
        ratios,
        f"{size / 1e3:.1f} kB a record, in the disk's cache, seconds of processor "
        "time; ArrayRecord cannot be told to verify nothing, so that a CRC-32 of each "
        "record stands for what verifying costs",
    )


def _prepared(folder: Path, side: int, number: int) -> Prepared:
    """Prepares images of noise of two classes, squares of so many pixels."""
    rng = np.random.default_rng(0)
    for k in range(number):
        path = folder / "images" / f"noise {k % 2}" / f"{k:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 256, (side, side, 3), np.uint8))
    settings = prepare.Settings(out=folder / "prepared")
    prepare.prepare_images([f"train={folder / 'images'}"], settings)
    return open_prepared(settings.out, "train")
