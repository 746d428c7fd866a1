import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import cv2
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations_by_update, counted_compilations

from echo_jax import runs
from echo_jax.config import load_config
from echo_jax.data.detection.anchors import boxes_per_cell, default_boxes
from echo_jax.data.detection.boxes import encode_boxes
from echo_jax.data.detection.nms import NmsSettings
from echo_jax.data.prepare import Settings, prepare_coco
from echo_jax.data.sources.source import open_source
from echo_jax.echo.spec import EchoSpec
from echo_jax.models.ssd import SSD, map_sizes
from echo_jax.training import train
from echo_jax.training.evaluation import evaluate
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads import build, splits
from echo_jax.workloads.base import Task
from echo_jax.workloads.coco import Detector

CONFIG = Path(__file__).parents[2] / "configs" / "coco.py"
SIZE = 64
NUM_IMAGES = 11
NUM_CLASSES = 3


def draw_scenes(folder, rng):
    """COCO's JSON and images of grey rectangles; one image is empty."""
    (folder / "images").mkdir()
    images, annotations = [], []
    for k in range(NUM_IMAGES):
        height, width = rng.integers(50, 120, 2).tolist()
        pixels = np.full((height, width, 3), 128, np.uint8)
        for _ in range(0 if k == 4 else rng.integers(1, 4)):
            h, w = rng.integers(12, 40, 2).tolist()
            y, x = rng.integers(0, height - h), rng.integers(0, width - w)
            label = int(rng.integers(NUM_CLASSES))
            pixels[y : y + h, x : x + w] = 40 + 80 * label
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 100 + k,
                    "category_id": 10 + label,
                    "bbox": [int(x), int(y), w, h],
                    "area": w * h,
                    "iscrowd": 0,
                }
            )
        name = f"{k}.png"
        cv2.imwrite(str(folder / "images" / name), pixels)
        images.append(
            {"id": 100 + k, "file_name": name, "height": height, "width": width}
        )
    categories = [{"id": 10 + k, "name": f"grey {k}"} for k in range(NUM_CLASSES)]
    truth = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(truth))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    scenes = tmp_path_factory.mktemp("scenes")
    draw_scenes(scenes, np.random.default_rng(0))
    source = f"{scenes / 'instances.json'}:{scenes / 'images'}"
    out = scenes / "prepared"
    prepare_coco([f"train={source}", f"validation={source}"], Settings(out=out))
    return out


def config_of(folder, **overrides):
    return load_config(
        f"{CONFIG}:tiny",
        {
            "data.source": str(folder),
            "data.train_examples": 0,
            "data.eval_split": "validation",
            "data.image_size": SIZE,
            "model.width": 8,
            "mesh.data": 1,
            **{name.replace("__", "."): value for name, value in overrides.items()},
        },
    )


@dataclass(frozen=True)
class Cheater(Task):
    """Finds what is there, a little beside, and knows an image by its pixels."""

    def init(self, key):
        del key
        return {"params": {"shift": jnp.array(0.03)}}

    def loss(self, variables, batch, key):
        raise NotImplementedError

    def evaluate(self, variables, batch):
        return {"loss": (variables["params"]["shift"], batch["mask"].sum())}

    def predict(self, variables, batch):
        mean = batch["image"].astype(jnp.float32).mean(axis=(1, 2, 3)) / 255
        # Padding finds much, and surely: nothing of it may count.
        mean = jnp.where(batch["mask"] > 0, mean, 0.99)[:, None]
        shift = variables["params"]["shift"] * jnp.sin(100 * mean)
        return {
            "boxes": batch["boxes"] + shift[..., None],
            "scores": jnp.where(batch["mask"][:, None] > 0, batch["box_mask"], 1)
            * (0.2 + 0.7 * mean),
            "labels": batch["box_labels"],
        }


def metrics_of(folder, *, devices, batch_size, **overrides):
    config = config_of(folder, batch_size=batch_size, mesh__data=devices, **overrides)
    workload = build(config)
    workload = type(workload)(**{**vars(workload), "task": Cheater()})
    compiled = compile_functions(config, workload)
    return evaluate(
        compiled,
        compiled.model(compiled.init(jax.random.key(0))),
        workload.eval_batches(),
        evaluator=workload.evaluator(),
    )


def test_metrics_are_the_same_for_any_batch_and_any_number_of_devices(folder):
    found = metrics_of(folder, devices=1, batch_size=1)
    assert 0.3 < found["mAP"] < 0.95 and found["AP50"] > found["AP75"]
    for devices, batch_size in ((1, 4), (1, 16), (8, 8), (8, 16)):
        again = metrics_of(folder, devices=devices, batch_size=batch_size)
        assert again.pop("loss") != 0
        assert again == {name: found[name] for name in again}
        assert len(again) == 12


def test_a_sample_of_the_split_is_judged_alone(folder):
    part = metrics_of(folder, devices=1, batch_size=4, data__eval_examples=5)
    whole = metrics_of(folder, devices=1, batch_size=4)
    assert part["mAP"] != whole["mAP"]
    # What was not looked at is not missed: each class of the sample has a truth found.
    assert part["AP50"] > 0.5


class Plain:
    """Records from elsewhere than a prepared folder: no file of annotations."""

    def __init__(self, prepared):
        self.records = [prepared[k] for k in range(len(prepared))]
        categories = prepared.info["categories"]
        self.info = {"kind": "coco", "categories": categories}

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]

    def metadata(self):
        return {"examples": len(self)}


@pytest.mark.parametrize("sample", [0, 5])
def test_without_annotations_the_records_are_the_truth(folder, monkeypatch, sample):
    asked = {"devices": 1, "batch_size": 4, "data__eval_examples": sample}
    wanted = metrics_of(folder, **asked)

    def open_plain(source, split, kind):
        prepared, decode_record = open_source(source, split, kind)
        return Plain(prepared), decode_record

    monkeypatch.setattr(splits, "open_source", open_plain)
    assert metrics_of(folder, **asked) == wanted


class Fixed(nn.Module):
    """Predicts its parameters."""

    num_boxes: int
    num_outputs: int

    @nn.compact
    def __call__(self, images, *, train):
        shape = (len(images), self.num_boxes)
        zeros = nn.initializers.zeros
        return (
            self.param("offsets", zeros, (*shape, 4)),
            self.param("scores", zeros, (*shape, self.num_outputs)),
        )


@pytest.mark.parametrize("kind", ["multibox", "focal"])
def test_predictions_that_are_the_targets_are_the_objects(kind):
    anchors = default_boxes(map_sizes(SIZE))
    objects = np.float32([[0.1, 0.2, 0.5, 0.7], [0.6, 0.1, 0.9, 0.3]])
    task = Detector(
        Fixed(len(anchors), 4 if kind == "multibox" else 3),
        SIZE,
        kind,
        NmsSettings(min_score=0.5, candidates=20, max_detections=6),
    )
    scores = np.full((1, len(anchors), task.model.num_outputs), -9, np.float32)
    if kind == "multibox":
        scores[..., 0] = 9
    offsets = np.zeros((1, len(anchors), 4), np.float32)
    for k, (anchor, label) in enumerate([(3, 2), (3, 2), (9, 1), (30, 0)]):
        box = objects[k % 2]
        offsets[0, anchor + k] = encode_boxes(box, anchors[anchor + k])
        scores[0, anchor + k, label + (kind == "multibox")] = 12 - k
    variables = {"params": {"offsets": offsets, "scores": scores}}
    batch = {"image": np.zeros((1, SIZE, SIZE, 3), np.uint8)}
    found = jax.jit(task.predict)(variables, batch)
    count = int((found["scores"] > 0).sum())
    assert found["boxes"].shape == (1, 6, 4) and count == 4
    assert sorted(found["labels"][0, :count].tolist()) == [0, 1, 2, 2]
    for box, label in zip(found["boxes"][0, :count], found["labels"][0], strict=False):
        wanted = {2: objects, 1: objects[:1], 0: objects[1:]}[int(label)]
        assert np.abs(wanted - np.asarray(box)).max(axis=1).min() < 1e-5


def test_evaluation_computes_the_network_once():
    model = SSD(4, boxes_per_cell(map_sizes(SIZE)), stage_sizes=(1, 1, 1), width=8)
    task = Detector(model, SIZE)
    variables = jax.eval_shape(task.init, jax.random.key(0))
    kernels = [x for x in jax.tree.leaves(variables["params"]) if x.ndim == 4]
    batch = {
        "image": jax.ShapeDtypeStruct((2, SIZE, SIZE, 3), jnp.uint8),
        "boxes": jax.ShapeDtypeStruct((2, 3, 4), jnp.float32),
        "box_mask": jax.ShapeDtypeStruct((2, 3), bool),
        "box_labels": jax.ShapeDtypeStruct((2, 3), jnp.int32),
        "mask": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    both = jax.jit(lambda *args: (task.evaluate(*args), task.predict(*args)))
    program = both.lower(variables, batch).compile().as_text()
    assert program.count(" convolution(") == len(kernels)


@pytest.mark.parametrize("after", ["decode", "augment", "batch"])
def test_training_batches_are_fixed_shapes(folder, after):
    config = config_of(
        folder,
        echo__after=after,
        batch_size=4,
        data__augment=("ssd_crop", "flip", "colour"),
        data__max_boxes=7,
    )
    workload = build(config)
    assert (workload.name, workload.metric, workload.mode) == ("coco", "mAP", "max")
    with closing(iter(workload.train_dataset(EchoSpec(2)))) as batches:
        first, second = next(batches), next(batches)
    assert first["image"].shape == (4, SIZE, SIZE, 3)
    assert first["boxes"].shape == (4, 7, 4) and first["boxes"].dtype == np.float32
    assert first["box_mask"].dtype == bool and first["box_labels"].dtype == np.int32
    assert first["box_mask"].any(axis=1).sum() >= 3  # one image may be empty
    is_anew = not np.array_equal(first["image"], second["image"])
    assert is_anew or after == "batch"


def test_devices_augment_like_the_host(folder):
    names = ("ssd_crop", "flip", "colour")
    workload = build(config_of(folder, echo__after="decode", data__augment=names))
    stages = [type(stage).__name__ for stage in workload.augment_on_device.stages]
    assert stages == ["SsdCrop", "Flip", "ColourDistortion"]
    with closing(iter(workload.fresh_dataset())) as batches:
        batch = next(batches)
    keys = jax.random.split(jax.random.key(0), 8)
    augmented = jax.eval_shape(workload.augment_on_device, batch, keys)
    assert {name: (x.shape, x.dtype) for name, x in augmented.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items()
    }
    assert build(config_of(folder)).augment_on_device is None


def test_facts_say_what_was_read(folder):
    metadata = build(config_of(folder)).metadata["data"]
    assert metadata["categories"] == NUM_CLASSES and not metadata["synthetic"]
    assert (
        metadata["train"]["examples"]
        == metadata["evaluation"]["examples"]
        == NUM_IMAGES
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__stage_sizes": (3, 4)}, r"model\.stage_sizes=\(3, 4\) must be blocks"),
        ({"model__loss": "hinge"}, r"model\.loss='hinge' .*multibox, focal"),
        (
            {"data__image_size": 16},
            "need three maps or more, and there are 1",
        ),
        (
            {"data__augment": ("mixup",)},
            "'mixup' is unknown here; use some of ssd_crop",
        ),
        ({"data__max_boxes": 0}, r"data\.max_boxes=0 must be at least 1"),
        ({"data__eval_split": "test"}, "has no split 'test'"),
    ],
)
def test_impossible_fields_are_refused(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        build(config_of(folder, **overrides))


@pytest.mark.parametrize(
    ("fields", "at_once", "fix"),
    [
        ({"batch_size": 6}, 6, 2),
        ({"batch_size": 8, "batch__micro": 2}, 4, 4),
        ({"batch_size": 8, "mesh__data": 2, "batch__statistics": "device"}, 4, 4),
        ({"batch_size": 8, "mesh__data": 2, "local__schedule": "every"}, 4, 4),
        ({"batch_size": 8, "batch__boundaries": (2,), "batch__factors": (2,)}, 4, 4),
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


@pytest.mark.slow
def test_a_few_updates_on_the_device_leave_a_whole_run(folder, tmp_path):
    config = config_of(
        folder,
        updates=2,
        eval_every=2,
        log_every=1,
        batch_size=4,
        model__virtual_batch=2,
        echo__after="decode",
        echo__where="device",
        echo__factor=2.0,
        echo__buffer=8,
        data__augment=("ssd_crop", "flip", "colour"),
        optim__boundaries=(60,),
    )
    summary = train(config, build(config), tmp_path)
    assert summary["updates"] == 2 and summary["fresh"] + summary["repeats"] == 8
    assert summary["metric"] == "mAP" and 0 <= summary["final"]["mAP"] < 0.5
    assert np.isfinite(summary["final"]["loss"])


@pytest.mark.slow
@pytest.mark.skipif(
    "ECHO_JAX_DATA" not in os.environ,
    reason="ECHO_JAX_DATA names no folder with the real data",
)
def test_eight_photographs_are_learned_by_heart(tmp_path):
    data = Path(os.environ["ECHO_JAX_DATA"]) / "coco_mini"
    source = f"{data / 'instances_train.json.gz'}:{data / 'train.tar'}"
    prepare_coco([f"train={source}"], Settings(out=tmp_path / "data"))
    config = load_config(
        f"{CONFIG}:tiny", {"data.source": str(tmp_path / "data"), "mesh.data": 1}
    )
    summary = train(config, build(config), tmp_path / "run")
    assert summary["final"]["mAP"] >= 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_nothing_is_compiled_after_the_second_update(folder):
    counts = compilations_by_update(config_of(folder, precision__compute="bfloat16"))
    assert 0 < counts[0] <= counts[1] == counts[2] == counts[3] == counts[4]
