from contextlib import closing

import cv2
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations_by_update
from image_folders import prepare

from echo_jax.arms import checked_workload
from echo_jax.config import load_config
from echo_jax.echo.spec import EchoSpec
from echo_jax.models import ResNet
from echo_jax.models.mobilenet import MobileNetV3
from echo_jax.workloads import build
from echo_jax.workloads.cifar import _ON_DEVICE, _ON_HOST

SMALL = [(32, 32)] * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cifar"), SMALL, SMALL[:21])


def config_of(folder, **overrides):
    fields = {
        "data.source": folder,
        "batch_size": 8,
        "data.eval_examples": 0,
        "model.width": 4,
    }
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("configs/cifar.py:tiny", {**fields, **named})


def take(dataset, count):
    with closing(iter(dataset)) as iterator:
        return [next(iterator) for _ in range(count)]


def test_the_default_is_the_resnet_32_of_the_paper(folder):
    config = load_config("configs/cifar.py", {"data.source": folder})
    model = build(config).task.model
    assert model == ResNet(num_classes=3, depth=32, width=16)
    ten = ResNet(num_classes=10, depth=32, width=16)
    images = jnp.zeros((1, 32, 32, 3))
    params = jax.eval_shape(
        lambda: ten.init(jax.random.key(0), images, train=False)["params"]
    )
    # 0.46 million, as table 6 of He et al. 2016 has it.
    assert sum(x.size for x in jax.tree.leaves(params)) == 464_154


def test_a_mobilenet_keeps_the_resolution_of_small_images(folder):
    """It is traced, for to compile it takes a minute."""
    workload = build(config_of(folder, model__name="mobilenet_v3_small"))
    task = workload.task
    assert task.model == MobileNetV3(3, "small", small_images=True)
    (batch,) = take(workload.train_dataset(EchoSpec()), 1)
    del batch["repeat"]
    variables = jax.eval_shape(task.init, jax.random.key(0))
    losses, moved, _ = jax.eval_shape(task.loss, variables, batch, jax.random.key(0))
    assert losses.shape == (8,)
    assert moved == {"batch_stats": variables["batch_stats"]}


def test_another_network_is_refused(folder):
    with pytest.raises(ValueError, match=r"model.name='mobilenet' is no network of .*"):
        build(config_of(folder, model__name="mobilenet"))


def test_trains_on_one_split_and_evaluates_all_of_the_other(folder):
    workload = build(config_of(folder))
    assert (workload.name, workload.metric, workload.mode) == (
        "cifar",
        "accuracy",
        "max",
    )
    (batch,) = take(workload.train_dataset(EchoSpec(factor=2)), 1)
    assert batch["image"].shape == (8, 32, 32, 3) and batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32
    evaluated = workload.eval_batches()
    assert sum(b["mask"].sum() for b in evaluated) == 21
    assert evaluated is workload.eval_batches()
    data = workload.metadata["data"]
    assert data["train_examples"] == 30 and data["synthetic"] is False
    assert len(data["train"]["sha256"]) == len(data["evaluation"]["sha256"]) == 64
    assert data["train"]["sha256"] != data["evaluation"]["sha256"]


def test_both_splits_may_be_the_same_few_images(folder):
    config = config_of(
        folder,
        data__train_examples=8,
        data__eval_split="train",
        data__augment=(),
        data__threads=0,
    )
    workload = build(config)
    (evaluated,) = workload.eval_batches()
    (trained,) = take(workload.train_dataset(EchoSpec()), 1)
    assert workload.augment_on_device is None

    def images(batch):
        return {image.tobytes() for image in batch["image"]}

    assert images(evaluated) == images(trained) and len(images(trained)) == 8


def outcomes(images):
    """What was done to images whose every pixel is its place, as a set."""
    return {image[16, 16].tobytes() + image[16, 17].tobytes() for image in images}


def test_host_and_devices_shift_and_flip_alike():
    # No pixel's neighbourhood is that of another one, nor its own mirror image.
    rows, columns = np.mgrid[:32, :32].astype(np.uint8)
    image = np.stack([rows, columns, np.zeros_like(rows)], axis=-1)
    seeds = np.random.default_rng(0).integers(0, 2**63, 3000)
    shift = _ON_HOST["pad_crop_flip"]
    on_host = [shift({"image": image}, int(seed))["image"] for seed in seeds]
    keys = jax.random.split(jax.random.key(0), 3000)
    batch = {"image": jnp.broadcast_to(image, (3000, 32, 32, 3))}
    on_device = np.asarray(jax.jit(_ON_DEVICE["pad_crop_flip"])(batch, keys)["image"])
    # 9 x 9 places, each forth and back.
    assert len(outcomes(on_host)) == 162
    assert outcomes(on_host) == outcomes(on_device)


# TensorFlow takes ten seconds to be imported.
@pytest.mark.parametrize(
    "pipeline", ["grain", pytest.param("tfdata", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("after", ["read", "decode", "augment", "batch"])
def test_a_repeat_differs_before_augmentation_only(folder, after, pipeline):
    config = config_of(folder, echo__after=after, data__pipeline=pipeline)
    spec = EchoSpec(2, batch_size=1 if after == "batch" else 8)
    batches = take(build(config).train_dataset(spec), 4)
    uses = {}
    for batch in batches:
        for row, index in enumerate(batch["fresh_index"].tolist()):
            # Behind "batch" the index is a batch's.
            key = (index, row) if after == "batch" else index
            uses.setdefault(key, []).append(batch["image"][row])
    assert all(len(images) == 2 for images in uses.values())
    same = [np.array_equal(*images) for images in uses.values()]
    if after in ("augment", "batch"):
        assert all(same)
    else:
        assert np.mean(same) < 0.2


def test_fresh_batches_for_a_device_are_not_augmented(folder):
    config = config_of(folder, echo__where="device", echo__factor=2.0)
    workload = build(config)
    plain = {
        cv2.mean(batch["image"][row])
        for batch in take(workload.fresh_dataset(), 4)
        for row in range(8)
    }
    assert len(plain) == 30
    assert isinstance(workload.fresh_dataset(), grain.IterDataset)
    assert workload.augment_on_device is not None


def test_images_of_another_size_are_refused_by_name(tmp_path):
    folder = prepare(tmp_path, [(32, 32), (40, 30)], SMALL[:2])
    workload = build(config_of(folder, batch_size=2, data__threads=0))
    message = r"class_1/0001\.jpg': it has 30x40 pixels, and workload 'cifar' takes 32x"
    with pytest.raises(ValueError, match=message):
        take(workload.train_dataset(EchoSpec()), 1)


def test_data_that_does_not_fit_is_refused_before_anything_is_made(tmp_path):
    folder = prepare(tmp_path, [(40, 30), (32, 32)], SMALL[:2])
    with pytest.raises(ValueError, match=r"batch_size=8 is more than the 2 examples"):
        checked_workload(config_of(folder))
    fits = {"batch_size": 2, "mesh__data": 1}
    with pytest.raises(ValueError, match=r"it has 30x40 pixels, and workload 'cifar'"):
        checked_workload(config_of(folder, **fits))
    config = config_of(folder, **fits, data__train_split="validation")
    fitting = checked_workload(config)
    assert (fitting.num_examples, fitting.num_evaluated) == (2, 2)
    evaluated = {"data__train_split": "validation", "data__eval_split": "train"}
    with pytest.raises(ValueError, match=r"it has 30x40 pixels, and workload 'cifar'"):
        checked_workload(config_of(folder, **fits, **evaluated))
    # What is not evaluated is not looked at: of these two it is the second.
    one = checked_workload(
        config_of(folder, **fits, **evaluated, data__eval_examples=1)
    )
    assert one.num_evaluated == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__source": ""}, r"data\.source is empty; name a folder"),
        (
            {"data__augment": ("ssd_crop",)},
            r"data\.augment: 'ssd_crop' is unknown here",
        ),
        ({"data__train_split": "dev"}, r"has no split 'dev'; it has train, validation"),
        ({"data__train_examples": 31}, r"data\.train_examples=31 is none of 0 to 30"),
        ({"data__train_examples": -1}, r"data\.train_examples=-1 is none of 0 to 30"),
        ({"model__label_smoothing": 1.0}, r"model\.label_smoothing=1\.0 must be"),
        ({"model__depth": 9}, r"depth=9 is not 6n \+ 2"),
        ({"model__norm": "ghost"}, r"norm='ghost' is unknown"),
    ],
)
def test_what_does_not_fit_is_refused(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        build(config_of(folder, **overrides))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_nothing_is_compiled_after_the_second_update(folder):
    counts = compilations_by_update(config_of(folder, mesh__data=1))
    assert 0 < counts[0] <= counts[1] == counts[2] == counts[3] == counts[4]
