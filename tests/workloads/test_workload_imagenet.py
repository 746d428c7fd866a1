from contextlib import closing

import jax
import numpy as np
import pytest
from compilations import compilations_by_update, counted_compilations
from image_folders import prepare

from echo_jax import runs
from echo_jax.config import load_config
from echo_jax.data.augment import Augment, ColourDistortion, Flip, RandomResizedCrop
from echo_jax.data.images.decode import resize_center_crop
from echo_jax.data.sources.prepared import open_prepared, unpack
from echo_jax.echo.spec import EchoSpec
from echo_jax.models import ImageNetResNet
from echo_jax.workloads import build

SIZES = [(60, 80), (90, 50), (64, 64), (40, 120), (33, 33)] * 4
EVERYTHING = ("crop", "flip", "colour")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("imagenet"), SIZES, SIZES[:11])


def config_of(folder, **overrides):
    fields = {
        "data.source": folder,
        "batch_size": 4,
        "data.train_examples": 0,
        "data.eval_split": "validation",
        "data.image_size": 32,
        "data.resize": 36,
        "data.augment": EVERYTHING,
        "model.stage_sizes": (1, 1),
        "model.width": 4,
        "model.virtual_batch": 2,
    }
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("configs/imagenet.py:tiny", {**fields, **named})


def take(dataset, count):
    with closing(iter(dataset)) as iterator:
        return [next(iterator) for _ in range(count)]


def test_the_default_is_resnet_50_with_ghost_batch_norm_in_bfloat16(folder):
    config = load_config("configs/imagenet.py", {"data.source": folder})
    workload = build(config)
    assert workload.task.model == ImageNetResNet(
        num_classes=3, virtual_batch=32, dtype=jax.numpy.dtype("bfloat16")
    )
    assert workload.task.image_size == 224
    assert workload.augment_on_device == Augment(
        (RandomResizedCrop(224), Flip(), ColourDistortion())
    )
    assert (
        build(config_of(folder, model__norm="batch")).task.model.virtual_batch is None
    )


@pytest.mark.parametrize(
    "pipeline", ["grain", pytest.param("tfdata", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("after", ["read", "decode", "augment", "batch"])
def test_every_placement_makes_batches_of_crops(folder, after, pipeline):
    config = config_of(folder, echo__after=after, data__pipeline=pipeline)
    spec = EchoSpec(2, batch_size=1 if after == "batch" else 4)
    uses = {}
    for batch in take(build(config).train_dataset(spec), 6):
        assert batch["image"].shape == (4, 32, 32, 3)
        assert batch["image"].dtype == np.uint8
        for row, index in enumerate(batch["fresh_index"].tolist()):
            key = (index, row) if after == "batch" else index
            uses.setdefault(key, []).append(batch["image"][row])
    same = [np.array_equal(*images) for images in uses.values()]
    assert len(same) == 12
    assert same == [after in ("augment", "batch")] * 12


@pytest.mark.parametrize(
    ("after", "augment", "size"),
    [
        ("decode", EVERYTHING, 36),
        ("decode", ("flip",), 32),
        ("augment", EVERYTHING, 32),
    ],
)
def test_a_device_gets_squares_of_the_size_that_its_crops_need(
    folder, after, augment, size
):
    config = config_of(
        folder, echo__where="device", echo__after=after, data__augment=augment
    )
    workload = build(config)
    (batch,) = take(workload.fresh_dataset(), 1)
    assert batch["image"].shape == (4, size, size, 3)
    if after == "decode":
        keys = jax.random.split(jax.random.key(0), 4)
        augmented = jax.eval_shape(workload.augment_on_device, batch, keys)
        assert augmented["image"].shape == (4, 32, 32, 3)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_evaluation_sees_the_middle_of_every_image_of_its_split(folder, split):
    workload = build(config_of(folder, data__eval_split=split))
    records = open_prepared(folder, split)
    batches = list(workload.eval_batches())
    kept = np.concatenate([batch["mask"] for batch in batches]) == 1
    assert kept.sum() == len(records) and len(kept) % 4 == 0
    images = np.concatenate([batch["image"] for batch in batches])
    labels = np.concatenate([batch["label"] for batch in batches])
    for index in range(len(records)):
        record = unpack(records[index])
        middle = resize_center_crop(record["image"], 32, resize=36)
        np.testing.assert_array_equal(images[kept][index], middle)
        assert labels[kept][index] == record["label"]
    # It is not kept, and so it is the same anew.
    np.testing.assert_array_equal(
        next(iter(workload.eval_batches()))["image"], images[:4]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_nothing_is_compiled_after_the_second_update(folder):
    sizes = {"model__stage_sizes": (1,), "precision__compute": "bfloat16"}
    counts = compilations_by_update(config_of(folder, mesh__data=1, **sizes))
    assert 0 < counts[0] <= counts[1] == counts[2] == counts[3] == counts[4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__augment": ("pad_crop_flip",)}, r"augment: 'pad_crop_flip' is unknown"),
        ({"data__augment": ("colour", "crop")}, r"is out of order; set --config"),
        ({"data__image_size": 64}, r"data\.image_size=64 must be .* data\.resize=36"),
        ({"data__image_size": 0}, r"data\.image_size=0 must be at least 1"),
        ({"model__norm": "group"}, r"model\.norm='group' is unknown; set .*norm=ghost"),
        ({"model__block": "dense"}, r"block='dense' is unknown"),
        ({"model__stage_sizes": ()}, r"every stage needs a block"),
        ({"model__label_smoothing": -0.1}, r"model\.label_smoothing=-0\.1 must be"),
    ],
)
def test_what_does_not_fit_is_refused(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        build(config_of(folder, **overrides))


@pytest.mark.parametrize(
    ("fields", "at_once", "fix"),
    [
        ({"batch_size": 6}, 6, 2),
        ({"batch_size": 8, "batch__micro": 2}, 4, 4),
    ],
)
def test_virtual_batches_that_do_not_fit_are_refused_before_anything_is_compiled(
    folder, tmp_path, fields, at_once, fix
):
    config = config_of(folder, model__virtual_batch=8, **{"mesh__data": 1} | fields)
    said = f"the {at_once} examples .* --config.model.virtual_batch={fix},"
    with (
        counted_compilations() as compiled,
        pytest.raises(runs.ConfigRefusedError, match=said),
    ):
        runs.run_train(config, tmp_path)
    assert not compiled
