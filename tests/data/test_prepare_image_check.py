"""Whole images pass; cut, damaged, foreign and huge ones are told apart."""

import io
import itertools
import os
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image
from prepare_cases import coco_json, make_image, write

from echo_jax.data.prepare import Settings, prepare_coco

JPEG, PNG = make_image(0, ".jpg", (30, 20)), make_image(0, ".png", (30, 20))
NO_IMAGE = "no JPEG, PNG, WebP, BMP, GIF or PPM: convert it to one"
HUGE = "not between 1 and 67108864 pixels"


def faults(folder, images, sizes=()):
    """Why images are not taken, by name and (at most 100) by reason."""
    sizes = {name: (30, 20) for name in images} | dict(sizes)
    write(folder / "x", {f"{name}.jpg": each for name, each in images.items()})
    write(folder / "x", {"good.jpg": JPEG})
    named = {k: (f"{name}.jpg", *sizes[name]) for k, name in enumerate(images)}
    named[len(named)] = "good.jpg", 30, 20
    (folder / "a.json").write_bytes(coco_json(named, []))
    settings = Settings(out=folder / "out", max_bad="100%", workers=2)
    skipped = prepare_coco([f"{folder}/a.json:{folder}/x"], settings)["skipped"]
    assert skipped["count"] <= 100
    return {bad["name"].removesuffix(".jpg"): bad["reason"] for bad in skipped["first"]}


def fault(folder, image):
    return faults(folder, {"image": image}).get("image")


def encoded(suffix, channels, dtype=np.uint8, *parameters):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 20, channels), dtype)
    return cv2.imencode(suffix, pixels, parameters)[1].tobytes()


def other(kind, size=(30, 20), **options):
    rng = np.random.default_rng(0)
    first, *more = (
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for _ in range(3)
    )
    if "save_all" in options:
        options["append_images"] = more
    first.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


OTHERS = {
    "BMP": other("BMP"),
    "GIF": other("GIF"),
    "PPM": other("PPM"),
    "WEBP": other("WEBP"),
    "WEBP lossless": other("WEBP", lossless=True),
    "WEBP with more": other("WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0", lossless=True),
    "WEBP animated": other("WEBP", save_all=True),
}


def with_segment(content):
    segment = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    return JPEG[:2] + segment + JPEG[2:]


# Rotated by 90 degrees, which a size as stored does not show.
ROTATED = with_segment(
    b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
)
THUMBNAIL = with_segment(make_image(1, ".jpg", (8, 8)))
# That of OS/2, whose sides take two bytes each.
SHORT_BMP = struct.pack("<2sIHHIIHHHH8x", b"BM", 38, 0, 0, 26, 12, 2, 1, 1, 24)


def test_whole_images_pass_with_the_size_that_is_stored(tmp_path):
    assert cv2.imdecode(np.frombuffer(ROTATED, np.uint8), 1).shape == (20, 30, 3)
    parameters = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)
    images = {**OTHERS, "rotated": ROTATED, "thumbnail": THUMBNAIL, "short": SHORT_BMP}
    for channels, of in itertools.product((1, 3), parameters):
        image = encoded(".jpg", channels, np.uint8, *of)
        # Cameras and editors write after the end, and decoders do not mind.
        images |= {f"{channels} {of}": image, f"{channels} {of} more": image + b"more"}
    for channels, dtype in itertools.product((1, 3, 4), (np.uint8, np.uint16)):
        images[f"{channels} {dtype}"] = encoded(".png", channels, dtype)
    assert faults(tmp_path, images, {"short": (1, 2)}) == {}
    wrong = faults(tmp_path / "wrong", {"a": JPEG, "b": ROTATED}, {"b": (20, 30)})
    assert wrong == {"b": "image of another size than its annotations say"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", *OTHERS])
def test_no_cut_image_passes(tmp_path, kind):
    image = {"JPEG": JPEG, "PNG": PNG, **OTHERS}[kind]
    length = 900 if "animated" in kind else len(image)
    lengths = {*range(13), *range(13, length, length // 20), *range(length - 9, length)}
    if "WEBP" not in kind and kind not in ("JPEG", "PNG"):
        lengths -= {*range(length - 9, length)}
    found = faults(tmp_path, {str(n): image[:n] for n in lengths})
    assert len(found) == len(lengths)
    assert {*found.values()} <= {"empty file", "truncated", "corrupt", NO_IMAGE}
    # Their headers say how long they are, or their ends are marked.
    told = {"JPEG": 3, "PNG": 8}.get(kind, 12 if "WEBP" in kind else length)
    assert {found[str(n)] for n in lengths if n >= told} <= {"truncated"}


def put(data, at, part):
    return data[:at] + part + data[at + len(part) :]


def test_damage_and_what_is_no_image_are_named(tmp_path):
    half = len(JPEG) // 2
    images = {
        "empty file": [b""],
        NO_IMAGE: [b"<html>not found</html>", put(JPEG, 2, b"\0")],
        "corrupt": [b"GIF89a", b"BM", put(JPEG, 20, bytes(4))],
        "truncated": [b"RIFF\x22\0\0\0WEBPVP8 ", b"\xff\xd8\xff\xff", THUMBNAIL[:-2]],
        "truncated or corrupt": [put(PNG, 60, bytes(4)), put(JPEG, half, bytes(half))],
    }
    named = {f"{why}:{k}": each for why in images for k, each in enumerate(images[why])}
    found = faults(tmp_path, named)
    assert found.keys() == named.keys()
    for name, why in found.items():
        assert why in name.rpartition(":")[0]


def png_of(width, height, rows, *, depth=8, colour=0, interlaced=0):
    """A PNG of these rows, with their filters, in one piece of data or several."""

    def chunk(kind, content):
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    packed = zlib.compress(rows, 9)
    parts = [packed[at : at + 10_000] for at in range(0, len(packed), 10_000)]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    data = [chunk(b"IDAT", part) for part in parts]
    return b"".join([PNG[:8], chunk(b"IHDR", header), *data, chunk(b"IEND", b"")])


def bits(width, height, more=0):
    """A small file of a huge black image."""
    return png_of(width, height, bytes((1 + width // 8) * height + more), depth=1)


def test_huge_images_are_not_decoded(tmp_path):
    frame = JPEG.index(b"\xff\xc0")
    picture = OTHERS["GIF"].index(b",\0\0\0\0\x14\0\x1e\0") + 5
    images = {
        "PNG of no width": png_of(0, 5, b""),
        "JPEG": put(JPEG, frame + 5, b"\xff" * 4),
        "BMP": put(OTHERS["BMP"], 18, struct.pack("<ii", 20_000, -20_000)),
        "GIF": put(OTHERS["GIF"], 6, struct.pack("<HH", 20_000, 20_000)),
        # Its picture may be larger than the screen that its header begins with.
        "GIF picture": put(OTHERS["GIF"], picture, struct.pack("<HH", 9000, 9000)),
        "WEBP": put(OTHERS["WEBP"], 26, struct.pack("<HH", 16_000, 16_000)),
        "WEBP lossless": put(OTHERS["WEBP lossless"], 21, b"\xff\xff\xff\x0f"),
        "WEBP with more": put(OTHERS["WEBP with more"], 24, b"\xff\xff\0\xff\xff\0"),
        "one row too many": bits(8192, 8193),
    }
    assert faults(tmp_path, images) == dict.fromkeys(images, HUGE)


def test_the_largest_image_passes_and_a_larger_file_does_not(tmp_path):
    images = {"largest": bits(8192, 8192)}
    assert faults(tmp_path, images, {"largest": (8192, 8192)}) == {}
    write(tmp_path / "y", {"a/file.jpg": JPEG})
    os.truncate(tmp_path / "y/a/file.jpg", 2**26 + 1)
    (tmp_path / "b.json").write_bytes(coco_json({1: ("a/file.jpg", 30, 20)}, []))
    with pytest.raises(ValueError, match="file of more than 67108864 bytes"):
        prepare_coco([f"{tmp_path}/b.json:{tmp_path}/y"], Settings(out=tmp_path / "no"))


PASSES = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4)]
PASSES += [(2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]  # As PNG 8.2 has them.


@pytest.mark.parametrize("interlaced", [0, 1])
def test_the_rows_of_every_png_are_counted(tmp_path, interlaced):
    rng = np.random.default_rng(0)
    images, sizes = {}, {}
    for channels, colour in ((1, 0), (3, 2), (4, 6)):
        for height, width in ((1, 1), (5, 4), (20, 13)):
            pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
            parts = [pixels]
            if interlaced:
                parts = [pixels[y::down, x::across] for y, x, down, across in PASSES]
            rows = b"".join(
                b"\0" + row.tobytes() for part in parts if part.size for row in part
            )
            options = {"colour": colour, "interlaced": interlaced}
            whole = png_of(width, height, rows, **options)
            with Image.open(io.BytesIO(whole)) as image:
                assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)
            cut = int(rng.integers(len(rows)))
            for name, length in (("", len(rows)), (" 1", len(rows) - 1), (" cut", cut)):
                name = f"{channels} {height} {width}{name}"
                images[name] = png_of(width, height, rows[:length], **options)
                sizes[name] = height, width
    found = faults(tmp_path, images, sizes)
    cut = {name for name in images if name.count(" ") == 3}
    assert found == dict.fromkeys(cut, "truncated")


def test_rows_are_inflated_part_by_part(tmp_path, inflated):
    """8 MB of rows, and 100 MB after them that are no rows."""
    image = bits(8000, 8000, more=100_000_000)
    assert faults(tmp_path, {"a": image}, {"a": (8000, 8000)}) == {}
    assert sum(inflated) == 8000 * 1001 and max(inflated) <= 2**20
