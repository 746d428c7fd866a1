import numpy as np
import pytest

from echo_jax.data.sources.shapes import (
    CLASS_NAMES,
    IMAGE_SIZE,
    ShapeRecords,
    augment_shape,
    decode_shape,
    draw_shape,
    shape_cover,
)
from echo_jax.echo.keys import use_seed


def test_records_are_jpeg_files_with_balanced_labels():
    records = ShapeRecords(24, seed=0)
    items = [decode_shape(records[i]) for i in range(len(records))]
    assert all(records[i][1:4] == b"\xff\xd8\xff" for i in range(24))
    assert [int(item["label"]) for item in items] == 3 * list(range(8))
    for item in items:
        assert item["image"].shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
        assert item["image"].dtype == np.uint8
        assert item["label"].shape == () and item["label"].dtype == np.int32


def test_record_is_a_function_of_seed_and_index():
    first, longer, other = (
        ShapeRecords(16, seed=0),
        ShapeRecords(32, seed=0),
        ShapeRecords(16, seed=1),
    )
    assert [first[i] for i in range(16)] == [longer[i] for i in range(16)]
    assert len({longer[i] for i in range(32)} | {other[i] for i in range(16)}) == 48
    assert first.metadata() == ShapeRecords(16, seed=0).metadata()
    assert first.metadata()["sha256"] != other.metadata()["sha256"]


# Areas of the outlines in the unit circle, from their geometry.
AREAS = {
    "circle": np.pi,
    "square": 2.0,
    "triangle": 3 * np.sqrt(3) / 4,
    "hexagon": 3 * np.sqrt(3) / 2,
    "star": 5 * 0.45 * np.sin(np.pi / 5),
    "ring": np.pi * (1 - 0.55**2),
    "cross": (4 * 0.72 - 0.72**2) / (1 + 0.36**2),
    "bow": 1.6 / (1 + 0.8**2),
}


@pytest.mark.parametrize("label", range(len(CLASS_NAMES)))
def test_every_class_covers_its_area_inside_the_image(label):
    area = AREAS[CLASS_NAMES[label]]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cover = shape_cover(label, rng)
        again = np.random.default_rng(seed)
        again.uniform(0, 1)  # the angle
        radius = again.uniform(0.24, 0.38) * IMAGE_SIZE
        # Pixels at the edge are averages of 16; a shape cut off would lack more.
        assert cover.sum() == pytest.approx(area * radius**2, rel=0.12)
        assert cover.min() == 0 and cover.max() == 1


def test_jpeg_keeps_what_was_drawn():
    records = ShapeRecords(8, seed=5)
    for label in range(8):
        rng = np.random.Generator(np.random.Philox(int(use_seed(5, label, 0))))
        drawn = draw_shape(label, rng).astype(float)
        decoded = decode_shape(records[label])["image"].astype(float)
        # JPEG stores colour at half the resolution: coloured noise is blurred.
        assert np.abs(decoded - drawn).mean() < 15
        assert np.abs(decoded.mean(axis=(0, 1)) - drawn.mean(axis=(0, 1))).max() < 2


def test_augmentation_keeps_the_label_and_its_input():
    item = decode_shape(ShapeRecords(4, seed=0)[3])
    before = item["image"].copy()
    images = {augment_shape(item, seed)["image"].tobytes() for seed in range(162)}
    assert len(images) == 162
    assert augment_shape(item, 5)["label"] == 3
    assert (item["image"] == before).all()


def test_empty_split_is_refused():
    with pytest.raises(ValueError, match="0 images is empty"):
        ShapeRecords(0, seed=0)
