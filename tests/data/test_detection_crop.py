import functools
import io

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from detection_reference import overlap
from PIL import Image

from echo_jax.data.augment import Augment, Flip
from echo_jax.data.detection import host_augment
from echo_jax.data.detection.crop import NUM_DRAWS, SsdCrop, choose_windows
from echo_jax.data.detection.records import DecodeBoxes, DecodeForEvaluation

SIZE = 60
# By the first of the draws, in sevenths.
LEAST_OVERLAPS = [None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9]


@functools.cache
def scenes(count=280):
    """Draws and boxes; a few images have none, and the first ones no condition."""
    rng = np.random.default_rng(0)
    draws = rng.uniform(size=(count, NUM_DRAWS)).astype(np.float32)
    size = rng.uniform(0.05, 0.7, (count, 4, 2))
    origin = rng.uniform(0, 1, (count, 4, 2)) * (1 - size)
    boxes = np.concatenate([origin, origin + size], axis=-1).astype(np.float32)
    mask = rng.uniform(size=(count, 4)) < 0.7
    mask[::20] = False
    return draws, np.where(mask[..., None], boxes, 0), mask


def windows_of(draws, boxes, mask):
    return choose_windows(draws, boxes, mask, height=SIZE, width=2 * SIZE)


@functools.cache
def chosen():
    return windows_of(*scenes())


def test_host_and_device_choose_the_same_windows():
    on_device = jax.jit(windows_of)(*map(jnp.asarray, scenes()))
    assert on_device.dtype == chosen().dtype == np.int32
    np.testing.assert_array_equal(on_device, chosen())


def test_windows_lie_inside_and_are_neither_small_nor_narrow():
    top, left, height, width = chosen().T
    assert (top >= 0).all() and (top + height <= SIZE).all()
    assert (left >= 0).all() and (left + width <= 2 * SIZE).all()
    # Sides in fractions of the image's, and within the rounding to pixels.
    tall, broad = height / SIZE, width / (2 * SIZE)
    assert (np.sqrt(tall * broad) > 0.3 - 1 / SIZE).all()
    ratio = broad / tall
    assert ratio.min() > 0.45 and ratio.max() < 2.2
    assert ratio.min() < 0.6 and ratio.max() > 1.7


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.5, 0.999])
def test_windows_have_the_drawn_area_at_any_ratio(scale, ratio):
    """A ratio at which a side would not fit is not drawn, rather than cut off."""
    draws = np.zeros((1, NUM_DRAWS), np.float32)
    draws[0, 0] = 1.5 / 7  # no condition but that it shows an object
    draws[0, 1::4], draws[0, 2::4] = scale, ratio
    boxes = np.float32([[[0.0, 0.0, 0.1, 0.1]]])
    window = choose_windows(
        draws, boxes, np.ones((1, 1), bool), height=1000, width=1000
    )
    _, _, height, width = window[0].tolist()
    side = 0.3 + 0.7 * scale
    np.testing.assert_allclose(height * width / 1e6, side**2, rtol=0.01)


def test_windows_overlap_an_object_by_what_was_drawn():
    draws, boxes, mask = scenes()
    is_whole = (chosen()[:, 2:] == [SIZE, 2 * SIZE]).all(axis=1)
    cropped = dict.fromkeys(LEAST_OVERLAPS, 0)
    for k in range(len(draws)):
        least = LEAST_OVERLAPS[int(draws[k, 0] * 7)]
        objects = boxes[k][mask[k]]
        if is_whole[k]:
            continue
        cropped[least] += 1
        top, left, height, width = chosen()[k] / np.array([SIZE, 2 * SIZE] * 2)
        window = [top, left, top + height, left + width]
        assert max(overlap(window, box) for box in objects) >= least - 1e-6
        center = (objects[:, :2] + objects[:, 2:]) / 2
        assert ((center > window[:2]) & (center < window[2:])).all(axis=1).any()
    # The whole image where it was drawn, or where nothing fits. That is so for hardly
    # any condition but the last: 50 windows seldom have one that overlaps by 0.9.
    assert not cropped[None] and is_whole[~mask.any(axis=1)].all()
    assert min(cropped[least] for least in LEAST_OVERLAPS[1:5]) > 20
    assert cropped[0.7] > 8


@pytest.fixture(scope="module")
def batch():
    _, boxes, mask = scenes(16)
    images = np.random.default_rng(1).integers(0, 256, (16, SIZE, SIZE, 3), np.uint8)
    for k in range(16):  # smooth, so that bilinear values are not all noise
        images[k] = cv2.blur(images[k], (9, 9))
    labels = np.arange(64, dtype=np.int32).reshape(16, 4)
    return {"image": images, "boxes": boxes, "box_mask": mask, "box_labels": labels}


@jax.jit
def crop_and_flip(batch, keys):
    """The windows, and what `SsdCrop` makes of them; then all of an augmentation."""
    crop = SsdCrop()
    both = Augment((crop, Flip()))
    return crop.windows(batch, keys), crop(batch, keys), both(batch, keys)


def item_of(batch, k):
    return {name: np.array(value[k]) for name, value in batch.items()}


def test_images_and_boxes_follow_the_window(batch):
    keys = jax.random.split(jax.random.key(0), 16)
    windows, cropped, _ = crop_and_flip(batch, keys)
    assert cropped["image"].dtype == jnp.uint8
    np.testing.assert_array_equal(cropped["box_labels"], batch["box_labels"])
    for k, (top, left, height, width) in enumerate(np.asarray(windows)):
        part = batch["image"][k, top : top + height, left : left + width]
        wanted = cv2.resize(part, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
        difference = np.asarray(cropped["image"][k], int) - wanted
        assert np.abs(difference).max() <= 1
        window = np.array([top, left, top, left]) / SIZE
        scale = np.array([height, width, height, width]) / SIZE
        moved = (batch["boxes"][k] - window) / scale
        center = (moved[:, :2] + moved[:, 2:]) / 2
        stays = batch["box_mask"][k] & ((center >= 0) & (center < 1)).all(axis=1)
        np.testing.assert_array_equal(cropped["box_mask"][k], stays)
        wanted = np.where(stays[:, None], np.clip(moved, 0, 1), 0)
        np.testing.assert_allclose(cropped["boxes"][k], wanted, atol=1e-5)


def test_a_use_is_augmented_alike_in_any_batch(batch):
    keys = jax.random.split(jax.random.key(3), 16)
    *_, first = crop_and_flip(batch, keys)
    places = np.random.default_rng(2).permutation(16)
    moved = {name: value[places] for name, value in batch.items()}
    *_, second = crop_and_flip(moved, keys[places])
    for name, value in second.items():
        np.testing.assert_array_equal(value, np.asarray(first[name])[places])


def test_the_host_crops_as_the_device_does(batch):
    """The same law for one item: a window of the image, and the boxes in it."""
    changed = 0
    for k in range(16):
        item = item_of(batch, k)
        before = {name: value.copy() for name, value in item.items()}
        cropped = host_augment.ssd_crop(item, seed=1000 + k)
        again = host_augment.ssd_crop(item, seed=1000 + k)
        for name, value in cropped.items():
            assert value.shape == item[name].shape and value.dtype == item[name].dtype
            np.testing.assert_array_equal(value, again[name])
            np.testing.assert_array_equal(item[name], before[name])
        changed += not np.array_equal(cropped["image"], item["image"])
        stays = cropped["box_mask"]
        assert not (stays & ~item["box_mask"]).any()
        assert not cropped["boxes"][~stays].any()
        assert stays.any() == item["box_mask"].any()
    assert changed > 6


def test_the_host_flips_half_of_the_items(batch):
    item = item_of(batch, 1)
    assert host_augment.flip(item, seed=2) is item
    flipped = host_augment.flip(item, seed=3)
    np.testing.assert_array_equal(flipped["image"], item["image"][:, ::-1])
    top, left, bottom, right = item["boxes"].T
    wanted = np.stack([top, 1 - right, bottom, 1 - left], axis=-1)
    wanted[~item["box_mask"]] = 0
    np.testing.assert_allclose(flipped["boxes"], wanted, atol=1e-7)
    assert item["box_mask"].any()


def record(boxes, *, crowd=None, labels=None, size=(40, 80)):
    pixels = np.full((*size, 3), 90, np.uint8)
    pixels[: size[0] // 2] = 200
    count = len(boxes)
    return {
        "image": cv2.imencode(".png", pixels)[1].tobytes(),
        "image_id": 17,
        "height": 40,
        "width": 80,
        "boxes": np.array(boxes, "<f4").tobytes(),
        "labels": np.array(labels or range(count), "<i4").tobytes(),
        "crowd": np.array(crowd or [0] * count, np.uint8).tobytes(),
        "area": np.ones(count, "<f4").tobytes(),
    }


def test_records_become_items_of_fixed_shapes():
    decode = DecodeBoxes(dict, size=20, max_boxes=3)
    item = decode(record([[10, 20, 30, 60], [0, 0, 40, 80]], labels=[5, 2]))
    assert item["image"].shape == (20, 20, 3) and item["image"].dtype == np.uint8
    assert (item["image"][:10] == 200).all() and (item["image"][10:] == 90).all()
    wanted = [[0.25, 0.25, 0.75, 0.75], [0, 0, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(item["boxes"], np.float32(wanted))
    assert item["box_mask"].tolist() == [True, True, False]
    assert item["box_labels"].tolist() == [5, 2, 0]
    assert item["box_labels"].dtype == np.int32
    nothing = decode(record([]))
    assert not nothing["box_mask"].any() and nothing["boxes"].shape == (3, 4)


def test_crowds_and_empty_boxes_are_left_out_and_the_largest_kept():
    boxes = [[0, 0, 5, 5], [0, 0, 40, 80], [0, 0, 9, 9], [3, 3, 3, 9], [0, 0, 20, 20]]
    item = DecodeBoxes(dict, 20, 2)(record(boxes, crowd=[0, 1, 0, 0, 0]))
    assert item["box_labels"].tolist() == [2, 4]
    item = DecodeBoxes(dict, 20, 9)(record(boxes, crowd=[0, 1, 0, 0, 0]))
    assert item["box_labels"][item["box_mask"]].tolist() == [0, 2, 4]


def test_evaluation_knows_which_image_it_is():
    decode = DecodeBoxes(dict, 20, 2)
    item = DecodeForEvaluation(decode)(record([[0, 0, 5, 5]]))
    assert (item["image_id"], item["height"], item["width"]) == (17, 40, 80)
    assert item.keys() - decode(record([])).keys() == {"image_id", "height", "width"}


def test_boxes_lie_in_the_pixels_as_stored():
    """However the camera was held: COCO's boxes know nothing of EXIF."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    pixels = np.full((40, 80, 3), 90, np.uint8)
    pixels[:20] = 200
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    turned = {**record([[0, 0, 20, 80]]), "image": file.getvalue()}
    item = DecodeBoxes(dict, 20, 1)(turned)
    assert abs(item["image"][:9].astype(int) - 200).max() < 5
    assert abs(item["image"][11:].astype(int) - 90).max() < 5
    np.testing.assert_array_equal(item["boxes"], [[0, 0, 0.5, 1]])


@pytest.mark.parametrize("name", ["boxes", "labels", "crowd"])
def test_a_record_of_more_boxes_than_labels_is_refused(name):
    scene = record([[0, 0, 5, 5], [0, 0, 9, 9]])
    scene[name] *= 2
    with pytest.raises(ValueError, match=r"17 has \d boxes, \d labels and \d flags"):
        DecodeBoxes(dict, 8, 4)(scene)


def test_other_images_than_the_record_says_are_refused():
    with pytest.raises(ValueError, match=r"image 17 has \(80, 40\) rows .*\(40, 80\)"):
        DecodeBoxes(dict, 20, 2)(record([], size=(80, 40)))
    with pytest.raises(ValueError, match="image 17: "):
        DecodeBoxes(dict, 20, 2)({**record([]), "image": b"no image"})
