"""Augmentation on the host: stages in turn, and the names that configs give them."""

import numpy as np
import pytest

from echo_jax.data.images.host_augment import HostAugment, OnImage, choose_stages, flip
from echo_jax.data.images.host_colour import distort_colours
from echo_jax.echo.keys import use_seed


def test_stages_work_in_turn_with_randomness_of_their_own():
    seen = []

    def stage(item, seed):
        seen.append(seed)
        return {**item, "label": 2 * item["label"] + len(seen)}

    item = {"label": 0}
    assert HostAugment((stage, stage))(item, 7) == {"label": 4}
    assert item == {"label": 0}
    assert seen == [int(use_seed(7, 0, 0)), int(use_seed(7, 1, 0))]
    assert seen[0] != seen[1]


def test_a_stage_of_images_leaves_the_rest_of_an_item_alone():
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    item = {"image": image, "boxes": np.ones((2, 4), np.float32)}
    changed = OnImage(distort_colours)(item, 5)
    np.testing.assert_array_equal(changed["image"], distort_colours(image, 5))
    assert not np.array_equal(changed["image"], image)
    assert changed["boxes"] is item["boxes"]


def test_a_flip_mirrors_half_of_the_images():
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    seeds = use_seed(0, np.arange(1000), np.zeros(1000)).tolist()
    flipped = [flip(image, seed) is not image for seed in seeds]
    np.testing.assert_array_equal(flip(image, 1), image[:, ::-1])
    assert abs(np.mean(flipped) - 0.5) < 0.05


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("crop", "box_crop"), r"config\.data\.augment: 'box_crop' is unknown here"),
        (("flip", "crop"), r"\('flip', 'crop'\) is out of order; set --config"),
        (("flip", "flip"), r"\('flip', 'flip'\) is out of order; set --config"),
    ],
)
def test_augmentations_that_do_not_fit_are_refused(names, message):
    known = {"crop": 1, "flip": 2, "colour": 3}
    assert choose_stages(("crop", "colour"), known) == (1, 3)
    with pytest.raises(ValueError, match=message):
        choose_stages(names, known)
