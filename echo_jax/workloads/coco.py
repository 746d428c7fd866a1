"""Detection on COCO: SSD, from records to COCO's mean average precision."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from faster_coco_eval import COCO

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import CocoData, CocoModel
from echo_jax.data.augment import ColourDistortion, Flip
from echo_jax.data.detection import anchors, coco_eval, crop, records
from echo_jax.data.detection.boxes import decode_boxes, encode_boxes
from echo_jax.data.images.decode import Encoded, decode_image
from echo_jax.data.images.host_augment import OnImage
from echo_jax.data.images.host_colour import distort_colours
from echo_jax.data.pipeline.evaluation import sample_indices
from echo_jax.data.pipeline.stages import Item, Stages
from echo_jax.data.sources.prepared import Prepared
from echo_jax.data.sources.source import Subset
from echo_jax.models.ssd import SSD, map_sizes
from echo_jax.workloads import assembly
from echo_jax.workloads.base import Batch, Sums, Variables, Workload, masked
from echo_jax.workloads.classification import Channels, ImageTask

Loss = Literal["multibox", "focal"]

# More stages would make the finest map too coarse for its default boxes.
_NUM_STAGES = 3

# From ImageNet's pixels, channel by channel; COCO's differ by a few grey levels.
_PIXEL_MEAN = (123.7, 116.3, 103.5)
_PIXEL_SCALE = (58.4, 57.1, 57.4)

# Background boxes in the loss for each matched box (Liu et al. 2016, section 2.2).
_NEGATIVES = 3

# Lin et al. 2017, section 5.1.
_FOCAL = {"alpha": 0.25, "gamma": 2.0}

# The logit of a class in a default box at the start of a focal loss.
_FOCAL_PRIOR_LOGIT = -4.6

# The names for `data.augment`: on the host, and on the devices.
_AUGMENT = {
    "ssd_crop": (crop.ssd_crop, crop.SsdCrop()),
    "flip": (crop.flip, Flip()),
    "colour": (OnImage(distort_colours), ColourDistortion()),
}


@dataclass(frozen=True)
class Detector(ImageTask):
    """Finds the objects in an image.

    A batch also holds the objects, as ``"boxes"``, ``"box_mask"`` and ``"box_labels"``
    (see `echo_jax.data.augment`). They are matched with default boxes on the device,
    after augmentation.

    Both kinds of loss add the loss of places (smooth L1 over the matched boxes) to the
    loss of classes, and divide by the number of matched boxes. ``"multibox"``
    classifies by softmax with background as class 0. It learns from only the three
    worst background boxes for each match; an image without objects has no loss.
    ``"focal"`` classifies by a sigmoid for each class, over all boxes.
    """

    pixel_mean: Channels = _PIXEL_MEAN
    pixel_scale: Channels = _PIXEL_SCALE
    loss_kind: Loss = "multibox"
    nms: anchors.NmsSettings = field(default_factory=anchors.NmsSettings)

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        del key  # Nothing in the model is random.
        predicted, new = self._trained(variables, batch)
        return self._losses(batch, *predicted), new, {}

    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns the loss as (sum over the images with mask 1, images)."""
        losses = self._losses(batch, *self._outputs(variables, batch))
        return {"loss": masked(losses, batch)}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns the detections of every image; see `Detections` for the entries."""
        offsets, scores = self._outputs(variables, batch)
        if self.loss_kind == "multibox":
            scores = jax.nn.softmax(scores)[..., 1:]
        else:
            scores = jax.nn.sigmoid(scores)
        boxes = decode_boxes(offsets, self._defaults()[None])
        detections = jax.vmap(functools.partial(anchors.detect, settings=self.nms))
        return detections(boxes, scores)._asdict()

    def decode_input(self, encoded: Encoded) -> Item:
        """Returns the item of an image of any size, without objects."""
        image = decode_image(encoded)
        return {"image": records.resize_to_square(image, self.image_size)}

    def _losses(self, batch: Batch, offsets: Any, scores: Any) -> jax.Array:
        names = ("boxes", "box_labels", "box_mask")
        objects = [jnp.asarray(batch[name]) for name in names]
        targets_of = functools.partial(make_targets, defaults=self._defaults())
        loss_of = functools.partial(detection_loss, kind=self.loss_kind)
        return jax.vmap(loss_of)(offsets, scores, jax.vmap(targets_of)(*objects))

    def _defaults(self) -> jax.Array:
        return jnp.asarray(anchors.default_boxes(map_sizes(self.image_size)))


Targets = tuple[jax.Array, jax.Array]
"""Offsets and labels of an image's default boxes, float32[A, 4] and int32[A]; the label
of background is -1."""


def make_targets(
    boxes: jax.Array, labels: jax.Array, mask: jax.Array, defaults: jax.Array
) -> Targets:
    """Returns the targets for M objects (padded, with `mask`) and A default boxes."""
    truth, is_matched = anchors.match_anchors(boxes, mask, defaults)
    # Rows of padding have size 0, whose logarithm is infinite.
    chosen = jnp.where(is_matched[:, None], boxes[truth], defaults)
    return encode_boxes(chosen, defaults), jnp.where(is_matched, labels[truth], -1)


def detection_loss(
    offsets: jax.Array, scores: jax.Array, targets: Targets, *, kind: Loss
) -> jax.Array:
    """Returns the loss of an image, float32[]; see `Detector`."""
    true_offsets, labels = targets
    is_matched = labels >= 0
    place = optax.huber_loss(offsets, true_offsets).sum(axis=-1)
    place = jnp.where(is_matched, place, 0).sum()
    of_classes = {"multibox": _mined, "focal": _focal}[kind](scores, labels)
    return (place + of_classes) / jnp.float32(jnp.maximum(is_matched.sum(), 1))


def _mined(scores: jax.Array, labels: jax.Array) -> jax.Array:
    is_matched = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels + 1)
    of_matched = jnp.where(is_matched, losses, 0).sum()
    # Losses are not negative, so matched boxes (0 here) come last and add nothing.
    worst = jnp.sort(jnp.where(is_matched, 0, losses), descending=True)
    is_learned = jnp.arange(len(losses)) < _NEGATIVES * is_matched.sum()
    return of_matched + jnp.where(is_learned, worst, 0).sum()


def _focal(scores: jax.Array, labels: jax.Array) -> jax.Array:
    # The row of background is zeros.
    truth = jax.nn.one_hot(labels, scores.shape[-1])
    return optax.sigmoid_focal_loss(scores, truth, **_FOCAL).sum()


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"mAP"``, a fraction."""
    data: CocoData = config.data
    on_host, on_device = assembly.augmentations(config, _AUGMENT)
    splits = assembly.open_splits(config, "coco")
    info = splits.evaluation_source.info
    of_train = info["splits"][splits.metadata["train"]["split"]]
    objects = of_train.get("images_by_objects", {})
    decode = records.DecodeBoxes(
        splits.decode_record, data.image_size, data.max_boxes, warns=not objects
    )
    chosen = sample_indices(len(splits.evaluation), data.eval_examples)
    evaluated = Subset(splits.evaluation, chosen)
    truth = functools.cache(functools.partial(_truth, splits, evaluated))
    return assembly.make_workload(
        config,
        task_of,
        {"categories": info["categories"]},
        metric="mAP",
        mode="max",
        stages=Stages(splits.train, decode, on_host),
        evaluated=Stages(evaluated, records.DecodeForEvaluation(decode)),
        eval_threads=max(config.pipeline.threads, 1),
        data_metadata={
            **splits.metadata,
            "categories": len(info["categories"]),
            "left_out": records.boxes_left_out(objects, data.max_boxes),
        },
        evaluator=lambda: coco_eval.CocoEvaluator(*truth()),
        augment_on_device=on_device,
    )


def _truth(splits: assembly.Splits, evaluated: Subset) -> tuple[COCO, list[int] | None]:
    """Returns the ground truth, and the images of it that are evaluated; None: all."""
    source = splits.evaluation_source
    categories = source.info["categories"]
    stored = (evaluated[index] for index in range(len(evaluated)))
    entries = map(splits.decode_record, stored)
    if not isinstance(source, Prepared):
        return coco_eval.ground_truth_of(entries, categories), None
    name = source.info["splits"][source.split]["annotations"]
    truth = coco_eval.read_ground_truth(source.read_file(name), categories, name=name)
    if len(evaluated) == len(source):
        return truth, None
    return truth, [int(each["image_id"]) for each in entries]


def task_of(config: RunSpec, task_info: Mapping[str, Any]) -> Detector:
    """Returns the task of a config, for data with these ``categories``."""
    sizes: CocoModel = config.model
    image_size = config.data.image_size
    if len(sizes.stage_sizes) != _NUM_STAGES:
        raise ValueError(
            f"model.stage_sizes={sizes.stage_sizes} must be blocks of {_NUM_STAGES} "
            'stages; set --config.model.stage_sizes="(3, 4, 6)".'
        )
    is_focal = sizes.loss == "focal"
    model = SSD(
        num_outputs=len(task_info["categories"]) + (not is_focal),
        boxes_per_cell=anchors.boxes_per_cell(map_sizes(image_size)),
        stage_sizes=sizes.stage_sizes,
        width=sizes.width,
        score_bias=_FOCAL_PRIOR_LOGIT if is_focal else 0.0,
        virtual_batch=sizes.virtual_batch,
        dtype=jnp.dtype(config.precision.compute),
    )
    return Detector(model, image_size, loss_kind=sizes.loss)
