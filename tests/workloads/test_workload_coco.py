"""The workload coco: its data, its loss, its metrics, and a run of it in use."""

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import echo_jax as ej
from echo_jax import cli
from echo_jax.config import RunSpec, load_config
from echo_jax.data.detection import NmsSettings, default_boxes, encode_boxes
from echo_jax.data.prepare import Settings, prepare_coco
from echo_jax.data.sources import open_prepared, unpack
from echo_jax.inference import evaluate_run, export_run, write_evaluation
from echo_jax.models import map_sizes
from echo_jax.runs import run_train
from echo_jax.training import evaluate
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.records import Progress
from echo_jax.workloads import Task, build, coco

SIZE, NUM_IMAGES, NUM_CLASSES = 64, 11, 3
CATEGORIES = [{"id": 10 + k, "name": f"grey {k}"} for k in range(NUM_CLASSES)]
ON_DEVICES = ("ssd_crop", "flip", "colour")

# Compiled as wholes: operation by operation they take ten times as long.
loss_of = jax.jit(coco.detection_loss, static_argnames="kind")
targets_for = jax.jit(coco.make_targets)
ANCHORS = np.float32(
    [[0, 0, 0.5, 0.5], [0, 0.5, 0.5, 1], [0.5, 0, 1, 0.5], [0.5, 0.5, 1, 1]]
)


def targets_of(labels, num_anchors=8):
    """Targets whose first boxes are matched with these labels, at offset 0."""
    padded = np.full(num_anchors, -1, np.int32)
    padded[: len(labels)] = labels
    return np.zeros((num_anchors, 4), np.float32), padded


def test_targets_are_the_code_of_the_matched_objects():
    boxes = np.float32([[0.5, 0.6, 0.9, 1.0], [0.1, 0.0, 0.6, 0.5], [0.0] * 4])
    mask = np.array([True, True, False])
    offsets, labels = targets_for(boxes, np.array([4, 7, 0]), mask, ANCHORS)
    assert labels.tolist() == [7, -1, -1, 4]
    for anchor, row in ((0, 1), (3, 0)):
        wanted = encode_boxes(boxes[row], ANCHORS[anchor])
        np.testing.assert_allclose(offsets[anchor], wanted, atol=1e-5)
    # Padding has no size, whose logarithm is infinite: it must not get in.
    assert not np.asarray(offsets)[1:3].any()


def test_multibox_loss_by_hand():
    # One match, of class 0; so three background boxes are learned: the worst.
    offsets = np.zeros((8, 4), np.float32)
    offsets[0] = [0.5, -2.0, 0.0, 0.0]
    offsets[5] = 100.0  # not matched: moves nothing
    scores = np.zeros((8, 3), np.float32)
    scores[4:, 0] = [5.0, 4.0, 3.0, 2.0]
    loss = loss_of(offsets, scores, targets_of([0]), kind="multibox")
    smooth_l1 = 0.5 * 0.5**2 + (2.0 - 0.5)
    # The match and the three other boxes without an opinion: log 3 each.
    np.testing.assert_allclose(loss, smooth_l1 + 4 * np.log(3), rtol=1e-6)


@pytest.mark.parametrize(("kind", "outputs"), [("multibox", 4), ("focal", 3)])
def test_an_image_without_objects_is_finite(kind, outputs):
    boxes = np.zeros((3, 4), np.float32)
    none = targets_for(boxes, np.zeros(3, int), np.zeros(3, bool), ANCHORS)
    both = jax.value_and_grad(coco.detection_loss, argnums=(0, 1))
    loss, gradients = jax.jit(both, static_argnames="kind")(
        np.ones((4, 4), np.float32), np.ones((4, outputs), np.float32), none, kind=kind
    )
    assert all(np.isfinite(g).all() for g in gradients)
    assert not gradients[0].any()
    # Nothing is learned for lack of a match, but a focal loss learns background.
    assert loss == 0 if kind == "multibox" else loss > 0


def test_focal_loss_by_hand():
    scores = np.zeros((8, 2), np.float32)
    scores[0, 1] = np.log(3)  # probability 3/4
    offsets = np.zeros((8, 4), np.float32)
    loss = loss_of(offsets, scores, targets_of([1]), kind="focal")
    right = -0.25 * (1 / 4) ** 2 * np.log(3 / 4)
    wrong = -0.75 * (1 / 2) ** 2 * np.log(1 / 2)
    np.testing.assert_allclose(loss, right + 15 * wrong, rtol=1e-5)


def draw_scenes(folder, rng):
    """COCO's JSON and images of grey rectangles; one image is empty."""
    (folder / "images").mkdir()
    truth = {"images": [], "annotations": [], "categories": CATEGORIES}
    for k in range(NUM_IMAGES):
        height, width = rng.integers(50, 120, 2).tolist()
        pixels = np.full((height, width, 3), 128, np.uint8)
        for _ in range(0 if k == 4 else rng.integers(1, 4)):
            h, w = rng.integers(12, 40, 2).tolist()
            y, x = rng.integers(0, height - h), rng.integers(0, width - w)
            label = int(rng.integers(NUM_CLASSES))
            pixels[y : y + h, x : x + w] = 40 + 80 * label
            box = {"bbox": [int(x), int(y), w, h], "area": w * h, "iscrowd": 0}
            ids = {"id": len(truth["annotations"]) + 1, "image_id": 100 + k}
            truth["annotations"].append({**ids, "category_id": 10 + label, **box})
        cv2.imwrite(str(folder / "images" / f"{k}.png"), pixels)
        size = {"height": height, "width": width}
        truth["images"].append({"id": 100 + k, "file_name": f"{k}.png", **size})
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
    fields = {
        "data.source": str(folder),
        "data.train_examples": 0,
        "data.eval_split": "validation",
        "data.image_size": SIZE,
        "model.width": 8,
        "mesh.data": 1,
    }
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("coco:tiny", {**fields, **named})


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
        is_real = batch["mask"][:, None] > 0
        mean = jnp.where(is_real, mean[:, None], 0.99)
        shift = variables["params"]["shift"] * jnp.sin(100 * mean)
        found = jnp.where(is_real, batch["box_mask"].astype(jnp.float32), 1)
        scores = found * (0.2 + 0.7 * mean)
        boxes = batch["boxes"] + shift[..., None]
        return {"boxes": boxes, "scores": scores, "labels": batch["box_labels"]}


def metrics_of(folder, *, devices=1, batch_size=4, **overrides):
    config = config_of(folder, batch_size=batch_size, mesh__data=devices, **overrides)
    workload = replace(build(config), task=Cheater())
    compiled = CompiledFunctions(RunSpec.of(config), workload)
    model = compiled.model(compiled.init(jax.random.key(0)))
    batches = workload.eval_batches()
    return evaluate(compiled, model, batches, evaluator=workload.evaluator())


@pytest.fixture(scope="module")
def whole(folder):
    return metrics_of(folder)


def test_metrics_are_the_same_for_any_batch_and_any_number_of_devices(folder, whole):
    assert 0.3 < whole["mAP"] < 0.95 and whole["AP50"] > whole["AP75"]
    for devices, batch_size in ((1, 1), (8, 16)):
        again = metrics_of(folder, devices=devices, batch_size=batch_size)
        assert again.pop("loss") != 0
        assert again == {name: whole[name] for name in again}
        assert len(again) == 12


class Plain:
    """Records from elsewhere than a prepared folder: no file of annotations."""

    splits = ("train", "validation")
    categories = CATEGORIES
    folder = ""

    def __init__(self, split):
        self.records = open_prepared(self.folder, split)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return unpack(self.records[index])


def test_without_annotations_the_records_are_the_truth_also_of_a_sample(folder, whole):
    Plain.folder = str(folder)
    plain = f"python:{__name__}:Plain"
    assert metrics_of(plain) == whole
    part = metrics_of(folder, data__eval_examples=5)
    assert metrics_of(plain, data__eval_examples=5) == part
    # What was not looked at is not missed: each class of the sample has a truth found.
    assert part["mAP"] != whole["mAP"] and part["AP50"] > 0.5


class Fixed(nn.Module):
    """Predicts its parameters."""

    num_boxes: int
    num_outputs: int

    @nn.compact
    def __call__(self, images, *, train):
        shape, zeros = (len(images), self.num_boxes), nn.initializers.zeros
        return (
            self.param("offsets", zeros, (*shape, 4)),
            self.param("scores", zeros, (*shape, self.num_outputs)),
        )


@pytest.mark.parametrize("kind", ["multibox", "focal"])
def test_predictions_that_are_the_targets_are_the_objects(kind):
    anchors = default_boxes(map_sizes(SIZE))
    objects = np.float32([[0.1, 0.2, 0.5, 0.7], [0.6, 0.1, 0.9, 0.3]])
    nms = NmsSettings(min_score=0.5, candidates=20, max_detections=6)
    num_outputs = NUM_CLASSES + (kind == "multibox")
    task = coco.Detector(
        Fixed(len(anchors), num_outputs), SIZE, loss_kind=kind, nms=nms
    )
    scores = np.full((1, len(anchors), num_outputs), -9, np.float32)
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model__stage_sizes", (3, 4), r"model\.stage_sizes=\(3, 4\) must be blocks"),
        ("model__loss", "hinge", r"model\.loss='hinge' .*multibox, focal"),
        ("data__image_size", 16, "need three maps or more, and there are 1"),
        ("data__augment", ("mixup",), "'mixup' is unknown here; use some of ssd_crop"),
    ],
)
def test_impossible_fields_are_refused(folder, field, value, message):
    with pytest.raises(ValueError, match=message):
        build(config_of(folder, **{field: value}))


def test_boxes_beyond_the_limit_are_counted(folder):
    records = [unpack(record)["labels"] for record in open_prepared(folder, "train")]
    beyond = [max(len(labels) // 4 - 1, 0) for labels in records]
    said = f"{sum(beyond)} boxes of {np.count_nonzero(beyond)} images"
    config = config_of(folder, data__max_boxes=1)
    console = Console(file=io.StringIO(), width=400)
    Progress(console, total=1).begins(config, build(config), "a model")
    assert f"; data.max_boxes=1 leaves out {said}" in console.file.getvalue()
    assert build(config_of(folder)).metadata["data"]["left_out"] == ""


class Reordered(Plain):
    """The same scenes with labels in another order, without one of the classes."""

    categories = CATEGORIES[:0:-1]

    def __getitem__(self, index):
        entries = super().__getitem__(index)
        labels = np.frombuffer(entries["labels"], "<i4")
        is_known = labels > 0
        names = {"boxes": ("<f4", (-1, 4)), "area": ("<f4", -1), "crowd": ("u1", -1)}
        for name, (dtype, shape) in names.items():
            of_each = np.frombuffer(entries[name], dtype).reshape(shape)
            entries[name] = of_each[is_known].tobytes()
        kept = NUM_CLASSES - 1 - labels[is_known]
        return {**entries, "labels": kept.astype("<i4").tobytes()}


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory, all_compiled_soon):
    config = config_of(
        folder,
        updates=2,
        eval_every=2,
        log_every=1,
        batch_size=4,
        model__stage_sizes=(1, 1, 1),
        model__virtual_batch=2,
        echo__stage="decode",
        echo__buffer_on="device",
        echo__factor=2.0,
        echo__buffer=8,
        data__augment=ON_DEVICES,
        optim__boundaries=(60,),
    )
    workdir = tmp_path_factory.mktemp("coco")
    return workdir, run_train(config, workdir)


@pytest.mark.slow
def test_a_few_updates_on_the_device_leave_a_run_that_can_be_used(
    trained, folder, tmp_path
):
    workdir, summary = trained
    assert summary["updates"] == 2 and summary["fresh"] + summary["repeats"] == 8
    assert summary["metric"] == "mAP" and 0 <= summary["final"]["mAP"] < 0.5
    run = ej.load_run(workdir)
    assert run.classes == ["grey 0", "grey 1", "grey 2"]
    found = evaluate_run(run, max_examples=4)
    Plain.folder = str(folder)
    few = evaluate_run(run, source=f"python:{__name__}:Reordered", max_examples=0)
    assert 0 <= few.metrics["mAP"] < 0.5
    page = write_evaluation(run, found, tmp_path).read_text()
    assert "score of at least 0.3" in page and page.count("<figure") == 4
    file = Path(str(export_run(run, "stablehlo", tmp_path / "m.stablehlo")))
    program = jax.export.deserialize(bytearray(file.read_bytes()))
    images = np.random.default_rng(0).integers(0, 255, (3, SIZE, SIZE, 3), np.uint8)
    found, wanted = program.call({"image": images}), run.predict({"image": images})
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_is_found_is_drawn_into_a_picture_of_each_file(trained, tmp_path, capsys):
    workdir, out = trained[0], tmp_path / "out"
    files = [tmp_path / "a.png", tmp_path / "b.jpg", tmp_path / "elsewhere/a.png"]
    files[2].parent.mkdir()
    for number, file in enumerate(files):
        pixels = np.random.default_rng(number).integers(0, 255, (40 + number, 60, 3))
        cv2.imwrite(str(file), np.uint8(pixels))
    scores = ej.load_run(workdir).predict([*map(str, files)])["scores"]
    least = float(np.sort(scores.ravel())[-3])

    def said(*options):
        with jax.transfer_guard("disallow"):
            argv = ["predict", workdir, *files, "--out", out, *options]
            assert cli.main([str(each) for each in argv]) == 0
        return capsys.readouterr().out

    shown = said("--min-score", least, "--json", tmp_path / "f.json")
    found = json.loads((tmp_path / "f.json").read_text())
    assert sum(map(len, found.values())) == (scores >= least).sum() >= 3
    # Files of one name have a picture each.
    for number, name in enumerate(("a.png", "b.png", "a-2.png")):
        with Image.open(out / name) as picture:
            assert picture.size == (60, 40 + number)
        assert name in shown
    assert "nothing found" in said("--min-score", 1.0)
