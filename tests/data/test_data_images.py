import io
import os
import struct
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from echo_jax.data.images import decode
from echo_jax.data.images.decode import (
    decode_image,
    decode_jpeg,
    jpeg_size,
    pad_crop_flip,
    random_resized_crop,
    resize_center_crop,
)
from echo_jax.data.images.jpeg_header import jpeg_header


def test_decodes_jpeg_to_red_green_blue():
    image = np.zeros((16, 24, 3), np.uint8)
    image[:, :12] = (200, 100, 30)
    image[:, 12:] = (20, 60, 220)
    _, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    decoded = decode_jpeg(data.tobytes())
    assert decoded.shape == image.shape and decoded.dtype == np.uint8
    assert np.abs(decoded[:, 2:8].astype(int) - image[:, 2:8]).max() < 8
    assert np.abs(decoded[:, 16:22].astype(int) - image[:, 16:22]).max() < 8


@pytest.mark.parametrize("kind", ["png", "webp", "bmp", "gif"])
def test_other_formats_are_decoded_as_by_pillow(kind):
    file = io.BytesIO()
    Image.fromarray(smooth(30, 20)).save(file, kind)
    with Image.open(file) as other:
        pixels = np.asarray(other.convert("RGB"))
    np.testing.assert_array_equal(decode_image(file.getvalue()), pixels)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"GIF89a, but not really"])
def test_damaged_image_is_refused(data):
    with pytest.raises(ValueError, match=f"{len(data)} bytes.*no readable image"):
        decode_jpeg(data)


def test_seeds_reach_every_shift_and_flip_once():
    padding = 2
    image = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
    image.flags.writeable = False
    padded = np.pad(image, ((padding,) * 2, (padding,) * 2, (0, 0)), "reflect")
    expected = set()
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[top : top + 8, left : left + 9]
            expected |= {crop.tobytes(), crop[:, ::-1].tobytes()}
    num_ways = 2 * (2 * padding + 1) ** 2
    assert len(expected) == num_ways
    seen = [pad_crop_flip(image, s, padding=padding) for s in range(num_ways)]
    assert {crop.tobytes() for crop in seen} == expected
    assert all(crop.shape == image.shape for crop in seen)


def test_augmented_image_has_memory_of_its_own():
    image = np.full((4, 4, 3), 7, np.uint8)
    for seed in range(4):
        pad_crop_flip(image, seed, padding=0)[:] = 0
    assert (image == 7).all()


def test_large_seeds_are_taken_whole():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    same = pad_crop_flip(image, 2**64 - 1, padding=3)
    assert (same == pad_crop_flip(image, np.uint64(2**64 - 1), padding=3)).all()


def smooth(height, width):
    """An image without fine detail, so that how it was shrunk hardly shows."""
    y, x = np.mgrid[:height, :width]
    parts = [
        127 + 100 * np.sin(x / 60 + y / 90),
        127 + 100 * np.cos(y / 70),
        255 * x / width,
    ]
    return np.stack(parts, -1).astype(np.uint8)


def jpeg(image, **options):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def difference(one, other):
    return np.abs(one.astype(int) - other).mean()


def test_grey_cmyk_and_turned_images_become_red_green_blue():
    image = smooth(40, 60)
    grey = decode_jpeg(jpeg(image[..., 0]))
    assert grey.shape == (40, 60, 3) and difference(grey, image[..., :1]) < 2
    file = io.BytesIO()
    Image.fromarray(image).convert("CMYK").save(file, "JPEG", quality=95)
    assert difference(decode_jpeg(file.getvalue()), image) < 4


def turned(image, orientation, order="<"):
    exif = Image.Exif()
    exif.endian = order
    exif[0x010F] = "a camera"
    exif[0x0112] = orientation
    return jpeg(image, exif=exif)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright(orientation, order):
    """As Pillow says, whole and in parts, with whatever is left out of a decode."""
    stored = smooth(400, 600)
    data = turned(stored, orientation, order)
    with Image.open(io.BytesIO(data)) as other:
        upright = np.asarray(ImageOps.exif_transpose(other))
    assert jpeg_header(data).orientation == orientation
    assert jpeg_size(data) == (400, 600)
    assert difference(decode_jpeg(data), upright) < 1
    assert difference(decode_image(data, as_stored=True), stored) < 2
    # Half a pixel apart at most, which is less than any wrong turn makes.
    for size in (20, 90):
        part = resize_center_crop(data, size, resize=100)
        assert difference(part, resize_center_crop(upright, size, resize=100)) < 5
        for seed in range(10):
            part = random_resized_crop(data, seed, size)
            assert difference(part, random_resized_crop(upright, seed, size)) < 5


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_no_known_orientation_is_none(orientation):
    data = turned(smooth(40, 60), orientation)
    assert jpeg_header(data).orientation == 1
    assert decode_jpeg(data).shape == (40, 60, 3)


@given(st.binary(max_size=60), st.sampled_from([b"", b"II*\0\x08\0\0\0", b"MM\0*"]))
def test_any_bytes_may_stand_in_exif(content, start):
    content = b"Exif\0\0" + start + content
    segment = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    data = jpeg(smooth(40, 60))
    header = jpeg_header(data[:2] + segment + data[2:])
    assert (header.height, header.width) == (40, 60)
    assert 1 <= header.orientation <= 8


def test_arrays_are_images_already():
    image = smooth(4, 6)
    assert decode_image(image) is image
    assert (decode_image(image[..., :1]) == image[..., :1]).all()
    assert decode_image(image[..., :1]).shape == (4, 6, 3)
    for wrong in (image[..., 0], image.astype(np.float32)):
        with pytest.raises(ValueError, match="is no image; give uint8"):
            decode_image(wrong)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": b"Exif" * 99}])
def test_the_size_of_a_jpeg_is_in_its_header(options):
    data = jpeg(smooth(123, 45), **options)
    assert jpeg_size(data) == (123, 45)
    # Fill bytes may stand before any marker.
    assert jpeg_size(data[:2] + b"\xff\xff" + data[2:]) == (123, 45)
    for end in range(0, 200):
        assert jpeg_size(data[:end]) in (None, (123, 45))


def test_what_is_no_jpeg_has_no_size_in_a_header():
    assert jpeg_size(b"") is jpeg_size(b"\x89PNG") is None
    empty = b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 11, 8, 0, 5, 1) + b"\0" * 9
    assert jpeg_size(empty) is None


@pytest.mark.parametrize(("height", "width"), [(900, 1200), (300, 260), (40, 60)])
def test_a_crop_of_a_scaled_decode_shows_the_same_part(height, width):
    image = smooth(height, width)
    data = jpeg(image)
    for seed in range(20):
        scaled = random_resized_crop(data, seed, 32)
        whole = random_resized_crop(image, seed, 32)
        assert scaled.shape == (32, 32, 3) and scaled.dtype == np.uint8
        # The part begins at a whole pixel of the scaled image.
        assert difference(scaled, whole) < 5
        middle = resize_center_crop(data, 28, resize=32)
        assert difference(middle, resize_center_crop(image, 28, resize=32)) < 5


def test_no_part_is_decoded_below_the_size_that_is_asked_for(monkeypatch):
    """And none could have been decoded smaller: each scale halves the sides."""
    parts = []
    resize = cv2.resize
    monkeypatch.setattr(
        decode.cv2,
        "resize",
        lambda part, *a, **k: (parts.append(part.shape), resize(part, *a, **k))[1],
    )
    data = jpeg(smooth(701, 1003))
    for size in (16, 50, 100, 224):
        for seed in range(40):
            random_resized_crop(data, seed, size)
            least = min(parts[-1][:2])
            box = decode._random_box(701, 1003, seed, (0.08, 1), (3 / 4, 4 / 3))
            full = min(box.height, box.width)
            assert least >= min(size, full)
            assert least < 2 * size + 1 or full / least > 7.5


def test_crops_have_the_area_and_the_shape_that_are_asked_for():
    area, ratio = (0.2, 0.5), (0.5, 2.0)
    boxes = [decode._random_box(250, 250, s, area, ratio) for s in range(400)]
    shares = np.array([b.height * b.width / 62500 for b in boxes])
    shapes = np.log([b.width / b.height for b in boxes])
    assert 0.19 < shares.min() < 0.23 and 0.47 < shares.max() < 0.51
    assert -0.72 < shapes.min() < -0.6 and 0.6 < shapes.max() < 0.72
    assert abs(shapes.mean()) < 0.07
    for box in boxes:
        assert 0 <= box.top <= 250 - box.height and 0 <= box.left <= 250 - box.width
    tops = {box.top for box in boxes}
    assert 0 in tops and len(tops) > 80


def test_where_no_crop_fits_the_middle_is_taken():
    # A line of pixels has no part of an allowed shape and a half of the area.
    box = decode._random_box(4, 100, 0, (0.5, 1.0), (3 / 4, 4 / 3))
    assert box == (0, (100 - 5) / 2, 4, 5)
    box = decode._random_box(100, 4, 0, (0.5, 1.0), (3 / 4, 4 / 3))
    assert box == ((100 - 5) / 2, 0, 5, 4)
    for shape in ((1, 1), (1, 9), (9, 1)):
        assert random_resized_crop(smooth(*shape), 0, 8).shape == (8, 8, 3)


def test_the_middle_is_where_a_resize_and_a_crop_would_find_it():
    image = np.zeros((64, 128, 3), np.uint8)
    image[16:48, 48:80] = 200  # half of the shorter side
    crop = resize_center_crop(image, 16, resize=32)
    assert (crop == 200).all()
    crop = resize_center_crop(image, 32, resize=32)
    assert (crop[8:24, 8:24] == 200).all() and crop[:7].max() == 0
    with pytest.raises(ValueError, match=r"size=40 must be .* at most resize=32"):
        resize_center_crop(image, 40, resize=32)


def test_inputs_stay_and_outputs_are_of_their_own():
    image = smooth(32, 32)
    image.flags.writeable = False
    for out in (
        random_resized_crop(image, 5, 32),
        resize_center_crop(image, 32, resize=32),
    ):
        out[...] = 0
    assert (image == smooth(32, 32)).all()


def test_a_damaged_image_cannot_be_cropped():
    data = jpeg(smooth(64, 64))
    for broken in (b"", data[:100], b"GIF89a, but not really"):
        with pytest.raises(ValueError, match="no readable image"):
            random_resized_crop(broken, 0, 8)
        with pytest.raises(ValueError, match="no readable image"):
            resize_center_crop(broken, 8, resize=8)


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2},
        {"subsampling": 2, "restart_marker_rows": 1},
        {"progressive": True},
    ],
    ids=str,
)
def test_rows_that_are_not_decoded_change_no_bit(options, monkeypatch, capfd):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (311, 203, 3), np.uint8)
    data = jpeg(noise, **options)
    decoded = []
    original = decode._decode
    monkeypatch.setattr(
        decode, "_decode", lambda d, f: (decoded.append(original(d, f)), decoded[-1])[1]
    )
    cut = [random_resized_crop(data, seed, s) for s in (8, 60) for seed in range(30)]
    rows = [len(image) for image in decoded]
    monkeypatch.setattr(decode, "_without_rows_below", lambda data, *rest: data)
    decoded.clear()
    whole = [random_resized_crop(data, seed, s) for s in (8, 60) for seed in range(30)]
    for ours, other in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(ours, other)
    saved = sum(r < len(d) for r, d in zip(rows, decoded, strict=True))
    has_marks = "progressive" in options or "restart_marker_rows" in options
    assert saved == 0 if has_marks else saved > 20
    assert capfd.readouterr().err == ""  # The decoder warns of data it cannot place.


@pytest.mark.parametrize("behind", ["text", "picture"])
def test_what_stands_behind_an_image_is_no_part_of_it(behind, capfd):
    data = jpeg(smooth(400, 40))
    file = data + b"more"
    if behind == "picture":
        # As phones write it: a block of the header says so.
        block = b"\xff\xe2\x00\x06MPF\0"
        file = data[:2] + block + data[2:] + data
    for seed in range(30):
        crop = random_resized_crop(file, seed, 16)
        np.testing.assert_array_equal(crop, random_resized_crop(data, seed, 16))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("width", [1, 8, 17])
def test_the_last_rows_of_a_narrow_image_are_decoded(width, capfd):
    data = jpeg(np.full((200, width, 3), 90, np.uint8))
    for size in range(150, 200):
        middle = resize_center_crop(data, 1, resize=200 - size + 1)
        assert abs(middle.astype(int) - 90).max() < 3
    for seed in range(50):
        crop = random_resized_crop(data, seed, 4)
        assert abs(crop.astype(int) - 90).max() < 3
    assert capfd.readouterr().err == ""


@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="ECHO_JAX_DATA is unset")
def test_real_photographs_are_decoded_as_by_pillow():
    path = Path(os.environ["ECHO_JAX_DATA"]) / "imagenet_sample" / "images.tar"
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.isfile()][:500:10]
        photographs = [tar.extractfile(member).read() for member in members]
    for data in photographs:
        image = decode_jpeg(data)
        assert jpeg_size(data) == image.shape[:2]
        with Image.open(io.BytesIO(data)) as other:
            assert difference(image, np.asarray(other.convert("RGB"))) < 3
        # Fine detail is where a scaled decode and an interpolation differ.
        crops = [random_resized_crop(x, 7, 96) for x in (data, image)]
        assert difference(*crops) < 12
