"""Whole images pass; cut, damaged, foreign and huge ones are told apart."""

import io
import os
import struct
import tarfile
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prepare_cases import make_image

from echo_jax.data.prepare import image_check
from echo_jax.data.prepare.errors import BadExampleError
from echo_jax.data.prepare.image_check import _NO_IMAGE, check_image

JPEG, PNG = make_image(0, ".jpg", (30, 20)), make_image(0, ".png", (30, 20))


def reason(data):
    with pytest.raises(BadExampleError) as caught:
        check_image(data)
    return str(caught.value)


@pytest.mark.parametrize(
    "parameters",
    [
        [],
        [cv2.IMWRITE_JPEG_PROGRESSIVE, 1],
        [cv2.IMWRITE_JPEG_RST_INTERVAL, 2],
        [cv2.IMWRITE_JPEG_QUALITY, 5],
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_whole_jpeg_passes(parameters, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 20, channels), np.uint8)
    data = cv2.imencode(".jpg", pixels, parameters)[1].tobytes()
    assert check_image(data) == (30, 20)
    # Cameras and editors write after the end, and decoders do not mind.
    assert check_image(data + b"more") == (30, 20)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_whole_png_passes(channels, dtype):
    data = cv2.imencode(".png", np.ones((30, 20, channels), dtype))[1].tobytes()
    assert check_image(data) == (30, 20)


OTHERS = {
    "BMP": {},
    "GIF": {},
    "WEBP": {},
    "WEBP lossless": {"lossless": True},
    "WEBP with more": {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0", "lossless": True},
    "GIF animated": {"save_all": True},
    "WEBP animated": {"save_all": True},
}


def other(name, size=(30, 20)):
    rng = np.random.default_rng(0)
    first, *more = (
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for _ in range(3)
    )
    file = io.BytesIO()
    options = {**OTHERS[name]}
    if "save_all" in options:
        options["append_images"] = more
    first.save(file, name.partition(" ")[0], **options)
    return file.getvalue()


@pytest.mark.parametrize("name", OTHERS)
def test_whole_files_of_other_formats_pass_and_cut_ones_do_not(name):
    data = other(name)
    assert check_image(data) == (30, 20)
    known = {"empty file", "truncated", "corrupt", _NO_IMAGE}
    for length in range(0, len(data) if "animated" not in name else 900, 7):
        found = reason(data[:length])
        assert found in known
        # Its header says how long it is.
        assert "WEBP" not in name or length < 12 or found == "truncated"


@pytest.mark.parametrize(
    ("name", "at", "sides"),
    [
        ("BMP", 18, struct.pack("<ii", 20_000, -20_000)),
        ("GIF", 6, struct.pack("<HH", 20_000, 20_000)),
        ("WEBP", 26, struct.pack("<HH", 16_000, 16_000)),
        ("WEBP lossless", 21, b"\xff\xff\xff\x0f"),
        ("WEBP with more", 24, b"\xff\xff\0\xff\xff\0"),
    ],
)
def test_huge_files_of_other_formats_are_not_decoded(monkeypatch, name, at, sides):
    data = other(name)
    monkeypatch.setattr(image_check.Image, "open", None)
    huge = data[:at] + sides + data[at + len(sides) :]
    assert reason(huge) == "not between 1 and 67108864 pixels"


def test_a_gif_is_as_large_as_its_picture(monkeypatch):
    """Which may be larger than the screen that its header begins with."""
    data = other("GIF", (40, 30))
    data = data[:6] + struct.pack("<HH", 1, 1) + data[10:]
    monkeypatch.setattr(image_check, "_MAX_PIXELS", 40 * 30 - 1)
    monkeypatch.setattr(image_check.Image, "open", None)
    assert reason(data) == "not between 1 and 1199 pixels"


def test_the_short_header_of_a_bmp_is_known():
    """That of OS/2, whose sides take two bytes each."""
    header = struct.pack("<2sIHHI", b"BM", 38, 0, 0, 26)
    header += struct.pack("<IHHHH", 12, 2, 1, 1, 24)
    assert check_image(header + bytes(8)) == (1, 2)


def test_the_size_is_before_rotation():
    # An EXIF segment that says: rotated by 90 degrees.
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    rotated = JPEG[:2] + segment + JPEG[2:]
    # The reader that does rotate sees it.
    assert cv2.imdecode(np.frombuffer(rotated, np.uint8), 1).shape == (20, 30, 3)
    assert check_image(rotated) == (30, 20)


@given(st.integers(0, len(JPEG) - 1))
@settings(max_examples=200)
def test_no_cut_jpeg_passes(length):
    known = {"empty file", _NO_IMAGE, "truncated"}
    assert reason(JPEG[:length]) in known
    assert length < 3 or reason(JPEG[:length]) == "truncated"


@given(st.integers(0, len(PNG) - 1))
@settings(max_examples=100)
def test_no_cut_png_passes(length):
    # Also one that lacks no more than the end mark, with which a decoder is content.
    known = {"empty file", _NO_IMAGE, "truncated"}
    assert reason(PNG[:length]) in known
    assert length < 8 or reason(PNG[:length]) == "truncated"


def test_a_thumbnail_within_hides_no_cut():
    inner = make_image(1, ".jpg", (8, 8))
    segment = b"\xff\xe1" + struct.pack(">H", len(inner) + 2) + inner
    data = JPEG[:2] + segment + JPEG[2:]
    assert check_image(data) == (30, 20)
    assert reason(data[:-2]) == "truncated"


def test_zeros_in_place_of_the_rest_do_not_pass():
    half = len(JPEG) // 2
    assert reason(JPEG[:half] + bytes(len(JPEG) - half)) in ("truncated", "corrupt")


def test_damage_is_found():
    assert reason(PNG[:60] + b"\0\0\0\0" + PNG[64:]) in ("corrupt", "truncated")
    assert reason(JPEG[:2] + b"\0" + JPEG[3:]) == _NO_IMAGE
    assert reason(JPEG[:20] + b"\0" * 4 + JPEG[24:]) == "corrupt"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty file"),
        (b"II*\0" + bytes(100), _NO_IMAGE),
        (b"GIF89a", "corrupt"),
        (b"BM", "corrupt"),
        (b"GIF89a\x01\0\x01\0" + bytes(100), "corrupt"),
        (b"RIFF\x22\0\0\0WEBPVP8 ", "truncated"),
        (b"<html>not found</html>", _NO_IMAGE),
        (b"\xff\xd8\xff", "truncated"),
        (b"\xff\xd8\xff\xff" * 100, "truncated"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
    ],
)
def test_what_is_no_image_is_named(data, expected):
    assert reason(data) == expected


def png_of(width, height, rows, *, depth=8, colour=0, interlaced=0):
    """A PNG of these rows, with their filters, in one piece of data or several."""

    def chunk(kind, content):
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    packed = zlib.compress(rows, 9)
    parts = [packed[at : at + 10_000] for at in range(0, len(packed), 10_000)]
    return b"".join(
        [
            PNG[:8],
            chunk(
                b"IHDR",
                struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced),
            ),
            *[chunk(b"IDAT", part) for part in parts],
            chunk(b"IEND", b""),
        ]
    )


def huge_png(width, height):
    """A small file that claims, truly, to be a huge black image."""
    rows = bytes((1 + (width + 7) // 8) * min(height, 20_000))
    return png_of(width, height, rows, depth=1)


def test_a_png_that_lacks_rows_is_not_whole():
    """All chunks and the end mark are there, and a decoder makes the rest black."""
    rows = bytes(8190 + 1) * 2000
    assert reason(png_of(8190, 8190, rows)) == "truncated"
    assert check_image(png_of(8190, 2000, rows)) == (2000, 8190)
    assert check_image(png_of(8190, 1999, rows)) == (1999, 8190)
    assert reason(png_of(8190, 2000, rows[:-1])) == "truncated"


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 3, 4]), st.data())
@settings(max_examples=100, deadline=None)
def test_the_rows_of_every_png_are_counted(height, width, channels, data):
    pixels = np.random.default_rng(0).integers(
        0, 256, (height, width, channels), np.uint8
    )
    passes = [pixels]
    if interlaced := data.draw(st.booleans()):
        # From the specification of PNG, 8.2.
        passes = [
            pixels[0::8, 0::8],
            pixels[0::8, 4::8],
            pixels[4::8, 0::4],
            pixels[0::4, 2::4],
            pixels[2::4, 0::2],
            pixels[0::2, 1::2],
            pixels[1::2, 0::1],
        ]
    rows = b"".join(
        b"\0" + row.tobytes() for part in passes if part.size for row in part
    )
    colour = {1: 0, 3: 2, 4: 6}[channels]
    options = {"colour": colour, "interlaced": interlaced}
    whole = png_of(width, height, rows, **options)
    # It is the image that was meant.
    with image_check.Image.open(io.BytesIO(whole)) as image:
        found = np.asarray(image).reshape(pixels.shape)
    assert np.array_equal(found, pixels)
    assert check_image(whole) == (height, width)
    cut = rows[: data.draw(st.integers(0, len(rows) - 1))]
    assert reason(png_of(width, height, cut, **options)) == "truncated"


def test_rows_are_inflated_part_by_part(inflated):
    """64 MB of rows in 65 kB, and 100 MB after them that are no rows."""
    size = 8000 * 8001
    assert check_image(png_of(8000, 8000, bytes(size + 100_000_000))) == (8000, 8000)
    assert sum(inflated) == size
    assert max(inflated) <= 1024**2


def test_a_huge_image_is_not_decoded(monkeypatch):
    bomb = huge_png(20_000, 20_000)
    assert len(bomb) < 60_000
    monkeypatch.setattr(image_check.Image, "open", None)
    assert reason(bomb) == "not between 1 and 67108864 pixels"
    frame = JPEG.index(b"\xff\xc0")
    jpeg = JPEG[: frame + 5] + b"\xff\xff\xff\xff" + JPEG[frame + 9 :]
    assert reason(jpeg) == "not between 1 and 67108864 pixels"
    assert reason(huge_png(0, 5)) == "not between 1 and 67108864 pixels"


def test_the_largest_image_passes(monkeypatch):
    monkeypatch.setattr(image_check, "_MAX_PIXELS", 600)
    assert check_image(JPEG) == (30, 20)
    monkeypatch.setattr(image_check, "_MAX_PIXELS", 599)
    assert "pixels" in reason(JPEG)


def test_a_large_file_is_refused(monkeypatch):
    monkeypatch.setattr(image_check, "MAX_IMAGE_BYTES", len(JPEG))
    assert check_image(JPEG) == (30, 20)
    monkeypatch.setattr(image_check, "MAX_IMAGE_BYTES", len(JPEG) - 1)
    assert reason(JPEG) == f"file of more than {len(JPEG) - 1} bytes"


@pytest.mark.skipif(
    "ECHO_JAX_DATA" not in os.environ,
    reason="ECHO_JAX_DATA names no folder with the real data",
)
def test_real_images_pass_whole_and_never_cut():
    rng = np.random.default_rng(0)
    folder = Path(os.environ["ECHO_JAX_DATA"])
    with tarfile.open(folder / "imagenet_sample" / "images.tar") as archive:
        members = [member for member in archive if member.isreg()][::10]
        images = [archive.extractfile(member).read() for member in members]
    assert len(images) == 50
    for image in images:
        check_image(image)
        assert reason(image[:-1]) == "truncated"
        assert reason(image[: rng.integers(3, len(image))]) == "truncated"
