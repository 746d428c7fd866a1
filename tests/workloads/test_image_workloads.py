"""The workloads cifar, imagenet and shapes: their data, and the loss of all."""

import dataclasses
import math
from contextlib import closing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations
from image_folders import SIZES, SMALL, config_of, prepare

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.data.augment import Augment, ColourDistortion, Flip, RandomResizedCrop
from echo_jax.data.images import resize_center_crop
from echo_jax.data.sources import open_prepared, unpack
from echo_jax.models import ImageNetResNet, MobileNetV3, ResNet
from echo_jax.runs import ConfigRefusedError, run_train
from echo_jax.workloads import build, classification, make_task


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {"cifar": (SMALL, SMALL[:21]), "imagenet": (SIZES, SIZES[:11])}
    made = {
        name: prepare(tmp_path_factory.mktemp(name), *sizes)
        for name, sizes in made.items()
    }
    return {**made, "shapes": ""}


def take(dataset, count):
    with closing(iter(dataset)) as iterator:
        return [next(iterator) for _ in range(count)]


class Mirror(nn.Module):
    """Gives the pixels of the first row back as logits: what it is fed is seen."""

    normalises: bool = False

    @nn.compact
    def __call__(self, images, *, train):
        if self.normalises:
            images = nn.BatchNorm(use_running_average=not train, momentum=0.5)(images)
        shift = self.param("shift", nn.initializers.zeros, (1,))
        return images[:, 0].reshape(len(images), -1) + shift[None]


MEAN, SCALE = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)
TASK = classification.ImageClassifier(Mirror(), 2, MEAN, SCALE, has_top_5=True)
VARIABLES = {"params": {"shift": np.zeros(1, np.float32)}}
# Seven images of 6 logits each. Image k has the label of the k-th best logit.
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 2, 2, 3), dtype=np.uint8)
LOGITS = ((IMAGES[:, 0] - np.array(MEAN)) / np.array(SCALE)).reshape(7, 6)
PLACE = np.array([0, 1, 2, 3, 4, 5, 0])
LABELS = np.argsort(-LOGITS, axis=1)[np.arange(7), PLACE].astype(np.int32)
MASK = np.array([1, 1, 1, 1, 1, 1, 0], np.float32)
BATCH = {"image": IMAGES, "label": LABELS, "mask": MASK}
LOG_P = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))


def test_loss_by_hand():
    task = dataclasses.replace(TASK, label_smoothing=0.1)
    losses, others, metrics = task.loss(VARIABLES, BATCH, jax.random.key(0))
    target = 0.9 * np.eye(6)[LABELS] + 0.1 / 6
    np.testing.assert_allclose(losses, -(target * LOG_P).sum(axis=1), rtol=1e-5)
    assert metrics["accuracy"] == (2, 7)
    assert others == {} and losses.dtype == jnp.float32


def test_metrics_by_hand():
    task = dataclasses.replace(TASK, label_smoothing=0.1)
    sums = task.evaluate(VARIABLES, BATCH)
    assert sums["accuracy"] == (1, 6) and sums["top_5"] == (5, 6)
    # The loss that is evaluated is not smoothed.
    loss = -(LOG_P[np.arange(7), LABELS] * MASK).sum()
    np.testing.assert_allclose(sums["loss"], (loss, 6), rtol=1e-5)
    found = task.predict(VARIABLES, {"image": IMAGES})["probabilities"]
    np.testing.assert_allclose(found, np.exp(LOG_P), rtol=1e-4)
    nans = {**BATCH, "image": np.full((7, 2, 2, 3), np.nan, np.float32)}
    labels = np.full(7, 5, np.int32)
    assert TASK.evaluate(VARIABLES, {**nans, "label": labels})["accuracy"][0] == 0


def test_training_moves_the_statistics_and_evaluation_does_not():
    task = dataclasses.replace(TASK, model=Mirror(normalises=True))
    variables = task.init(jax.random.key(0))
    _, others, _ = task.loss(variables, BATCH, jax.random.key(0))
    assert others.keys() == {"batch_stats"}
    pixels = (IMAGES - np.array(MEAN)) / np.array(SCALE)
    (moved,) = others["batch_stats"].values()
    np.testing.assert_allclose(moved["mean"], pixels.mean((0, 1, 2)) / 2, rtol=1e-4)
    first = task.evaluate(variables, BATCH)["loss"]
    np.testing.assert_allclose(
        first[0], -(LOG_P * np.eye(6)[LABELS])[:6].sum(), rtol=1e-3
    )


@pytest.mark.parametrize(
    ("name", "evaluated"), [("cifar", 21), ("imagenet", 11), ("shapes", 20)]
)
def test_trains_on_one_split_and_evaluates_another(folders, name, evaluated):
    config = config_of(name, folders[name])
    workload = build(config)
    said = (workload.name, workload.metric, workload.mode)
    assert said == (name, "accuracy", "max")
    (batch,) = take(workload.train_dataset(ej.EchoSpec(factor=2)), 1)
    assert batch["image"].shape == (config.batch_size, 32, 32, 3)
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    first = workload.eval_batches()
    assert sum(b["mask"].sum() for b in first) == evaluated == workload.num_evaluated
    # Where there is room for it, it is decoded once; and it is the same for all seeds.
    assert (workload.eval_batches() is first) == (name != "imagenet")
    other = build(config_of(name, folders[name], seed=1)).eval_batches()
    for one, two in zip(build(config).eval_batches(), other, strict=True):
        np.testing.assert_array_equal(one["image"], two["image"])
    if name == "shapes":
        return
    data = build(config).metadata["data"]
    assert data["synthetic"] is False
    hashes = {data[split]["sha256"] for split in ("train", "evaluation")}
    assert len(hashes) == 2 and {*map(len, hashes)} == {64}


def test_the_defaults_are_the_networks_of_the_papers(folders):
    config = load_config("cifar", {"data.source": folders["cifar"]})
    assert build(config).task.model == ResNet(num_classes=3, depth=32, width=16)
    workload = build(load_config("imagenet", {"data.source": folders["imagenet"]}))
    assert workload.task.model == ImageNetResNet(
        num_classes=3, virtual_batch=32, dtype=jnp.dtype("bfloat16")
    )
    assert workload.task.image_size == 224
    stages = (RandomResizedCrop(224), Flip(), ColourDistortion())
    assert workload.augment_on_device == Augment(stages)
    config = config_of("cifar", folders["cifar"], model__name="mobilenet_v3_small")
    assert build(config).task.model == MobileNetV3(3, "small", small_images=True)


INFO = {"classes": [*"abcde"], "categories": [*"abc"], "vocab": 300, "eod": None}
INFO["bytes_per_token"] = None


@pytest.mark.parametrize("name", ["cifar", "coco", "imagenet", "lm"])
def test_a_table_counts_every_parameter_and_half_precision_is_computed(name):
    configs = [
        load_config(f"{name}:tiny", {"precision.compute": compute})
        for compute in ("float32", "float16")
    ]
    task, half = (make_task(config, INFO) for config in configs)
    variables = jax.eval_shape(task.init, jax.random.key(0))
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(variables["params"]))
    assert f" {total:,} (" in task.table().splitlines()[-4]
    for each in (task, half):
        program = jax.make_jaxpr(each.predict)(variables, each.input_shapes(2))
        assert ("f16[" in str(program)) == (each is half)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("cifar", "decode"),
        ("cifar", "batch"),
        ("imagenet", "read"),
        ("imagenet", "augment"),
    ],
)
def test_a_repeat_differs_before_augmentation_only(folders, name, after):
    config = config_of(name, folders[name], echo__stage=after)
    spec = ej.EchoSpec(2, batch_size=1 if after == "batch" else config.batch_size)
    uses = {}
    for batch in take(build(config).train_dataset(spec), 4):
        assert batch["image"].shape[1:] == (32, 32, 3)
        for row, index in enumerate(batch["fresh_index"].tolist()):
            # Behind "batch" the index is a batch's.
            key = (index, row) if after == "batch" else index
            uses.setdefault(key, []).append(batch["image"][row])
    same = [np.array_equal(*images) for images in uses.values()]
    assert len(same) == 2 * config.batch_size
    assert all(same) if after in ("augment", "batch") else np.mean(same) < 0.2


@pytest.mark.parametrize(
    ("after", "augment", "size"),
    [
        ("decode", ("crop", "flip", "colour"), 36),
        ("decode", ("flip",), 32),
        ("augment", ("crop", "flip", "colour"), 32),
    ],
)
def test_a_device_gets_squares_of_the_size_that_its_crops_need(
    folders, after, augment, size
):
    fields = {
        "echo__buffer_on": "device",
        "echo__stage": after,
        "data__augment": augment,
    }
    workload = build(config_of("imagenet", folders["imagenet"], **fields))
    (batch,) = take(workload.fresh_dataset(), 1)
    assert batch["image"].shape == (4, size, size, 3)
    if after == "decode":
        keys = jax.random.split(jax.random.key(0), 4)
        augmented = jax.eval_shape(workload.augment_on_device, batch, keys)
        assert augmented["image"].shape == (4, 32, 32, 3)


def test_fresh_batches_are_the_items_of_training_in_their_order():
    config = config_of("shapes", echo__stage="augment", data__threads=2)
    fresh = take(build(config).fresh_dataset(), 12)
    trained = take(build(config).train_dataset(ej.EchoSpec(batch_size=8)), 12)
    for ours, other in zip(fresh, trained, strict=True):
        assert ours.keys() == other.keys() - {"fresh_index", "repeat"}
        for key, value in ours.items():
            np.testing.assert_array_equal(value, other[key])
            assert value.dtype == other[key].dtype


def test_evaluation_sees_the_middle_of_every_image_of_its_split(folders):
    workload = build(config_of("imagenet", folders["imagenet"]))
    records = open_prepared(folders["imagenet"], "validation")
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


def test_data_that_does_not_fit_is_refused_before_anything_is_made(tmp_path):
    folder = prepare(tmp_path, [(40, 30), (32, 32)], SMALL[:2])
    fits = {"batch_size": 2, "mesh__data": 1}
    turned = {"data__train_split": "validation", "data__eval_split": "train"}
    size = r"it has 30x40 pixels, and workload 'cifar'"
    for fields, said in (
        ({}, r"batch_size=8 is more than the 2 examples"),
        (fits, size),
        (fits | turned, size),
    ):
        config = config_of("cifar", folder, **fields)
        with pytest.raises(ConfigRefusedError, match=said):
            run_train(config, tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()
    # What is not evaluated is not looked at: of these two it is the second.
    one = build(config_of("cifar", folder, **fits, **turned, data__eval_examples=1))
    one.first_items()
    assert one.num_evaluated == 1
    dataset = build(config_of("cifar", folder, **fits, data__threads=0)).train_dataset(
        ej.EchoSpec()
    )
    with pytest.raises(ValueError, match=rf"class_0/0000\.jpg': {size}"):
        take(dataset, 1)


@pytest.mark.parametrize(
    ("fields", "at_once", "fix"),
    [
        ({"batch_size": 6}, 6, 2),
        ({"batch_size": 8, "batch__accumulation_steps": 2}, 4, 4),
        ({"batch_size": 8, "mesh__data": 2, "local__sync_schedule": "every"}, 4, 4),
    ],
)
def test_virtual_batches_that_do_not_fit_are_refused_before_the_model_is_compiled(
    folders, tmp_path, fields, at_once, fix
):
    fields = {"model__virtual_batch": 8, "mesh__data": 1} | fields
    config = config_of("imagenet", folders["imagenet"], **fields)
    said = f"the {at_once} examples .* --config.model.virtual_batch={fix},"
    with (
        counted_compilations() as compiled,
        pytest.raises(ConfigRefusedError, match=said),
    ):
        run_train(config, tmp_path)
    names = {program["fun_name"] for program in compiled}
    assert not names & {"jit(init)", "jit(program)"}


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("cifar", "data__source", "", r"data\.source is empty; name a folder"),
        ("cifar", "data__augment", ("ssd_crop",), r"'ssd_crop' is unknown here"),
        ("cifar", "data__train_split", "dev", r"has no split 'dev'; it has train, val"),
        ("cifar", "data__train_examples", 31, r"train_examples=31 is none of 0 to 30"),
        ("cifar", "model__label_smoothing", 1.0, r"label_smoothing=1\.0 must be"),
        ("cifar", "model__depth", 9, r"depth=9 is not 6n \+ 2"),
        (
            "cifar",
            "model__name",
            "mobilenet",
            r"name='mobilenet' must be one of resnet",
        ),
        ("cifar", "workload", "chess", r"'chess' is unknown; use one of cifar, .*shap"),
        ("imagenet", "data__augment", ("colour", "crop"), r"is out of order; set --c"),
        ("imagenet", "data__image_size", 64, r"=64 must be .* data\.resize=36"),
        ("imagenet", "model__norm", "group", r"'group' must be one of .*norm=ghost"),
        ("shapes", "data__source", "stdlib", r"'stdlib'.*data\.source=synthetic"),
    ],
)
def test_what_does_not_fit_is_refused(folders, name, field, value, message):
    config = config_of(name, folders[name])
    config.unlock().update_from_flattened_dict({field.replace("__", "."): value})
    with pytest.raises(ValueError, match=message):
        build(config)
