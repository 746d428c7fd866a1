"""Images on the host: decoding, crops, augmentation, and the drawn shapes."""

import io
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

import echo_jax as ej
from echo_jax.data.augment import ColourDistortion
from echo_jax.data.images import (
    HostAugment,
    change_colours,
    decode_image,
    distort_colours,
    flip,
    pad_crop_flip,
    random_resized_crop,
    resize_center_crop,
)
from echo_jax.data.sources import ShapeRecords, decode_shape


def smooth(height, width):
    """An image without fine detail, so that how it was shrunk hardly shows."""
    y, x = np.mgrid[:height, :width]
    parts = [
        127 + 100 * np.sin(x / 60 + y / 90),
        127 + 100 * np.cos(y / 70),
        255 * x / width,
    ]
    return np.stack(parts, -1).astype(np.uint8)


def places(height, width):
    """An image in which red is the row of a pixel, and green its column."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, 0 * x], -1).astype(np.uint8)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


def jpeg(image, **options):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def difference(one, other):
    return np.abs(one.astype(int) - other).mean()


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "bmp", "gif"])
def test_files_are_decoded_as_by_pillow(kind):
    file = io.BytesIO()
    Image.fromarray(smooth(30, 20)).save(file, kind)
    with Image.open(file) as other:
        pixels = np.asarray(other.convert("RGB"))
    found = decode_image(file.getvalue())
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found, pixels, atol=3 if kind == "jpeg" else 0)


def test_grey_and_cmyk_images_become_red_green_blue():
    image = smooth(40, 60)
    grey = decode_image(jpeg(image[..., 0]))
    assert grey.shape == (40, 60, 3) and difference(grey, image[..., :1]) < 2
    file = io.BytesIO()
    Image.fromarray(image).convert("CMYK").save(file, "JPEG", quality=95)
    assert difference(decode_image(file.getvalue()), image) < 4


NO_ROWS = b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 11, 8, 0, 5, 1) + b"\0" * 9


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"GIF89a, no more", NO_ROWS])
def test_a_damaged_image_or_array_is_refused(data):
    for read in (decode_image, lambda data: random_resized_crop(data, 0, 8)):
        with pytest.raises(
            ValueError, match=f"{len(data)} bytes.*not a readable image"
        ):
            read(data)
    image = smooth(4, 6)
    assert (decode_image(image[..., :1]) == image[..., :1]).all()
    for wrong in (image[..., 0], image.astype(np.float32)):
        with pytest.raises(ValueError, match="is not an image; give uint8"):
            decode_image(wrong)


@pytest.mark.parametrize("orientation", range(9))
def test_images_stand_upright_as_by_pillow(orientation):
    """Whole and in parts, with whatever is left out of a decode; 0 says nothing."""
    stored = smooth(400, 600)
    exif = Image.Exif()
    exif.endian = "<>"[orientation % 2]
    exif[0x010F], exif[0x0112] = "a camera", orientation
    data = jpeg(stored, exif=exif)
    with Image.open(io.BytesIO(data)) as other:
        upright = np.asarray(ImageOps.exif_transpose(other))
    assert difference(decode_image(data), upright) < 1
    assert difference(decode_image(data, as_stored=True), stored) < 2
    # Half a pixel apart at most, which is less than any wrong turn makes.
    for size in (20, 90):
        part = resize_center_crop(data, size, resize=100)
        assert difference(part, resize_center_crop(upright, size, resize=100)) < 5
        for seed in range(4):
            part = random_resized_crop(data, seed, size)
            assert difference(part, random_resized_crop(upright, seed, size)) < 5


@given(st.binary(max_size=60), st.sampled_from([b"", b"II*\0\x08\0\0\0", b"MM\0*"]))
def test_any_bytes_may_stand_in_exif(content, start):
    content = b"Exif\0\0" + start + content
    segment = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    data = jpeg(smooth(40, 40))
    assert random_resized_crop(data[:2] + segment + data[2:], 0, 8).shape == (8, 8, 3)


@pytest.mark.parametrize(("height", "width"), [(900, 1200), (300, 260), (40, 60)])
def test_a_crop_of_a_scaled_decode_shows_the_same_part(height, width):
    image = smooth(height, width)
    data = jpeg(image)
    for seed in range(10):
        scaled = random_resized_crop(data, seed, 32)
        assert scaled.shape == (32, 32, 3) and scaled.dtype == np.uint8
        # The part begins at a whole pixel of the scaled image.
        assert difference(scaled, random_resized_crop(image, seed, 32)) < 5
    middle = resize_center_crop(data, 28, resize=32)
    assert difference(middle, resize_center_crop(image, 28, resize=32)) < 5


@pytest.mark.parametrize("pixels", [64, 256])
def test_no_part_is_decoded_below_the_size_that_is_asked_for(pixels):
    """Stripes of two pixels of the result would become grey."""
    x = np.arange(pixels) * 32 // pixels // 2 % 2
    stripes = np.broadcast_to(x[None, :, None] * 255, (pixels, pixels, 3))
    stripes = np.ascontiguousarray(stripes, np.uint8)
    found = resize_center_crop(jpeg(stripes), 32, resize=32)
    assert difference(found, resize_center_crop(stripes, 32, resize=32)) < 8


def test_crops_have_the_area_and_the_shape_that_are_asked_for():
    image = places(250, 250)
    draws = {"area": (0.2, 0.5), "ratio": (0.5, 2.0)}
    crops = np.array([random_resized_crop(image, s, 2, **draws) for s in range(400)])
    # Its four pixels are the means of its quarters.
    ends = np.stack([crops[:, 0, 0, :2], crops[:, 1, 1, :2]], 1).astype(float)
    sides = 2 * (ends[:, 1] - ends[:, 0])
    first = ends.mean(axis=1) - sides / 2
    shares, shapes = sides.prod(axis=1) / 62500, np.log(sides[:, 1] / sides[:, 0])
    assert 0.18 < shares.min() < 0.23 and 0.47 < shares.max() < 0.52
    assert -0.75 < shapes.min() < -0.6 and 0.6 < shapes.max() < 0.75
    assert abs(shapes.mean()) < 0.07
    assert first.min() >= -2 and (first + sides).max() <= 252
    assert (first.min(axis=0) < 3).all() and len({*first[:, 0].tolist()}) > 80


def test_where_no_crop_fits_the_middle_is_taken():
    # A line of pixels has no part of an allowed shape and a half of the area.
    wide = random_resized_crop(places(4, 100), 0, 5, area=(0.5, 1.0))
    assert wide[0, :, 1].tolist() == [48, 49, 50, 51, 52]
    tall = random_resized_crop(places(100, 4), 0, 5, area=(0.5, 1.0))
    assert tall[:, 0, 0].tolist() == [48, 49, 50, 51, 52]
    for shape in ((1, 1), (1, 9), (9, 1)):
        assert random_resized_crop(smooth(*shape), 0, 8).shape == (8, 8, 3)


def test_the_middle_is_where_a_resize_and_a_crop_would_find_it():
    image = np.zeros((64, 128, 3), np.uint8)
    image[16:48, 48:80] = 200  # half of the shorter side
    assert (resize_center_crop(image, 16, resize=32) == 200).all()
    crop = resize_center_crop(image, 32, resize=32)
    assert (crop[8:24, 8:24] == 200).all() and crop[:7].max() == 0
    with pytest.raises(ValueError, match=r"size=40 must be .* at most resize=32"):
        resize_center_crop(image, 40, resize=32)


@pytest.mark.parametrize(
    "options",
    [{"subsampling": 2}, {"restart_marker_rows": 1}, {"progressive": True}],
    ids=str,
)
def test_rows_that_are_not_decoded_change_no_bit(options, capfd):
    data = jpeg(noise(311, 203), **options)
    # As phones write it: a block says that another picture follows, and a file of two
    # is decoded whole.
    phone = data[:2] + b"\xff\xe2\x00\x06MPF\0" + data[2:]
    for file in (phone + data, data + b"more"):
        for seed, size in enumerate((8, 60) * 10):
            crop = random_resized_crop(file, seed, size)
            np.testing.assert_array_equal(crop, random_resized_crop(data, seed, size))
    assert capfd.readouterr().err == ""  # The decoder warns of data it cannot place.


@pytest.mark.parametrize("width", [1, 8, 17])
def test_the_last_rows_of_a_narrow_image_are_decoded(width, capfd):
    data = jpeg(np.full((200, width, 3), 90, np.uint8))
    crops = [resize_center_crop(data, 1, resize=size) for size in range(1, 51)]
    crops += [random_resized_crop(data, seed, 4) for seed in range(50)]
    assert all(abs(crop.astype(int) - 90).max() < 3 for crop in crops)
    assert capfd.readouterr().err == ""


def test_seeds_reach_every_shift_and_flip_once():
    image = noise(8, 9)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), "reflect")
    crops = [padded[y : y + 8, x : x + 9] for y in range(5) for x in range(5)]
    expected = {crop[:, ::step].tobytes() for crop in crops for step in (1, -1)}
    seen = [pad_crop_flip(image, seed, padding=2) for seed in range(50)]
    assert {crop.tobytes() for crop in seen} == expected and len(expected) == 50
    assert all(crop.shape == image.shape for crop in seen)
    large = (2**64 - 1, np.uint64(2**64 - 1))
    one, other = (pad_crop_flip(image, seed, padding=3) for seed in large)
    assert (one == other).all()


def test_stages_work_in_turn_with_randomness_of_their_own():
    seen = []

    def stage(item, seed):
        seen.append(seed)
        return {**item, "label": 2 * item["label"] + len(seen)}

    item = {"label": 0}
    assert HostAugment((stage, stage))(item, 7) == {"label": 4}
    assert item == {"label": 0}
    assert seen == [int(ej.seed_for_use(7, number, 0)) for number in range(2)]
    image = noise(2, 2)
    np.testing.assert_array_equal(flip(image, 1), image[:, ::-1])
    assert flip(image, 2) is image


def test_colours_agree_with_the_device_to_a_grey_level():
    images = noise(32, 24, 20)
    images[:4] = images[:4, ..., :1]  # Grey: it has no hue.
    images[4], images[5] = 0, 255
    distortion = ColourDistortion()
    keys = jax.random.split(jax.random.key(0), len(images))
    batch = {"image": jnp.asarray(images)}
    expected = np.asarray(jax.jit(distortion)(batch, keys)["image"], int)
    factors = jax.device_get(jax.jit(distortion.factors)(keys))
    for number, image in enumerate(images):
        own = {name: float(x[number]) for name, x in factors._asdict().items()}
        apart = change_colours(image, **own) - expected[number]
        assert np.abs(apart).max() <= 1 and np.mean(apart != 0) < 0.01


def test_colours_are_drawn_from_the_ranges_of_the_device():
    # Of grey images of one value brightness alone is seen, of two values contrast.
    flat = np.full((2, 2, 3), 128, np.uint8)
    flat.flags.writeable = False
    steps = np.array([[[118] * 3, [138] * 3]], np.uint8)
    seeds = ej.seed_for_use(3, np.arange(2000), np.zeros(2000)).tolist()
    shifts = [int(distort_colours(flat, seed)[0, 0, 0]) - 128 for seed in seeds]
    assert (min(shifts), max(shifts)) == (-32, 32) and abs(np.mean(shifts)) < 1.5
    assert np.std(shifts) == pytest.approx(18.5, rel=0.05)
    changed = [distort_colours(steps, seed)[0, :, 0].astype(int) for seed in seeds]
    spans = [(high - low) / 20 for low, high in changed]
    assert (min(spans), max(spans)) == (0.5, 1.5) and abs(np.mean(spans) - 1) < 0.03
    still = ColourDistortion(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    np.testing.assert_array_equal(distort_colours(flat, 5, still), flat)


def test_a_shape_is_a_jpeg_file_and_a_function_of_seed_and_index():
    sizes = ((16, 0), (24, 0), (16, 1))
    first, longer, other = (ShapeRecords(size, seed=seed) for size, seed in sizes)
    items = [decode_shape(longer[i]) for i in range(24)]
    assert all(longer[i][1:4] == b"\xff\xd8\xff" for i in range(24))
    assert [int(item["label"]) for item in items] == 3 * list(range(8))
    for item in items:
        assert (item["image"].shape, item["image"].dtype) == ((32, 32, 3), np.uint8)
        assert (item["label"].shape, item["label"].dtype) == ((), np.int32)
    assert [first[i] for i in range(16)] == [longer[i] for i in range(16)]
    assert len({longer[i] for i in range(24)} | {other[i] for i in range(16)}) == 40
    assert first.metadata() == ShapeRecords(16, seed=0).metadata()
    assert first.metadata()["sha256"] != other.metadata()["sha256"]
