import cv2
import numpy as np
import pytest

from echo_jax.data.images import decode_jpeg, pad_crop_flip


def test_decodes_jpeg_to_red_green_blue():
    image = np.zeros((16, 24, 3), np.uint8)
    image[:, :12] = (200, 100, 30)
    image[:, 12:] = (20, 60, 220)
    _, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    decoded = decode_jpeg(data.tobytes())
    assert decoded.shape == image.shape and decoded.dtype == np.uint8
    assert np.abs(decoded[:, 2:8].astype(int) - image[:, 2:8]).max() < 8
    assert np.abs(decoded[:, 16:22].astype(int) - image[:, 16:22]).max() < 8


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
