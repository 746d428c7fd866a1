"""COCO detection: turns annotations and images into shards and a ground truth."""

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from echo_jax.data.detection.records import boxes_left_out
from echo_jax.data.prepare.archives import (
    counted,
    file_metadata,
    nfc,
    plain_name,
    respelt,
)
from echo_jax.data.prepare.coco_json import Image, check_box, read_annotations
from echo_jax.data.prepare.examples import Example, write_splits
from echo_jax.data.prepare.files import archive_of, open_files
from echo_jax.data.prepare.job import (
    Bad,
    PrepareError,
    Settings,
    Skipped,
    allowed,
    parse_sources,
)
from echo_jax.data.prepare.workspace import Workspace
from echo_jax.files.folders import typed_path

_FEATURES = {
    "image": "bytes of a JPEG, PNG, WebP, BMP, GIF or PPM file, as found",
    "image_id": "int, COCO's",
    "height": "int, pixels as stored: a rotation that the file asks for is not applied",
    "width": "int, pixels as stored",
    "boxes": "float32[n, 4]: ymin, xmin, ymax, xmax in pixels, within the image",
    "labels": "int32[n], the index in categories",
    "crowd": "uint8[n], 1 if the box surrounds a crowd",
    "area": "float32[n], of the object in square pixels",
}

_IGNORED = "left out, as the annotations do not name them"
_MAX_BOXES = 100  # `data.max_boxes` of the config coco.


def prepare_coco(arguments: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Makes a prepared folder of images with boxes.

    Images without boxes are kept. Boxes that reach out of their image are clipped.
    Boxes outside of the image, without an area or of an unknown category are skipped
    and counted.

    Every split gets a ground-truth file for the evaluator. It holds the written images,
    and the annotations of their boxes as found, without outlines. Reading annotations
    takes at most 256 MiB of memory, or 100 times the file's size if that is more. A
    larger file is refused.

    Args:
      arguments: ``SPLIT=ANNOTATIONS:IMAGES`` or ``ANNOTATIONS:IMAGES``, one for each
        split: a JSON file (plain, packed, or in a zip archive), and a folder or
        archive of images.
      settings: The other options of the command.

    Returns:
      The content of ``dataset.json``.

    Raises:
      PrepareError: A source is invalid, too much of it is bad, or the folder holds
        something else.

    Example:
      >>> prepare_coco(
      ...     ["train=instances_train2017.json:train2017"],
      ...     Settings(out=Path("data/coco")),
      ... )
    """
    sources = parse_sources(arguments, settings.holdout)
    options = settings.options(sources, kind="coco")
    with Workspace(settings.out, options, settings.on_progress) as work:
        opened = {
            split: _Source(split, paths, settings) for split, paths in sources.items()
        }
        metadata = {split: source.metadata for split, source in opened.items()}
        if (info := work.begin(metadata)) is not None:
            return info
        categories = _categories(opened)
        total = sum(source.annotations.total for source in opened.values())
        skipped = Skipped(allowed(settings.max_bad, total), total)
        splits = {
            split: source.examples(categories, skipped)
            for split, source in opened.items()
        }
        written = write_splits(work, splits, settings, skipped)
        truths = {id(source.files): source.truth for source in opened.values()}
        about, sources = {}, opened.values()
        notes = counted(_IGNORED, (each for s in sources for each in s.ignored))
        notes += respelt(c["name"] for s in sources for c in s.annotations.categories)
        for split, usable in written.items():
            truth = _ground_truth(categories, usable, truths)
            name = f"{split}-annotations.json.gz"
            # Store no time, so that equal annotations give equal files.
            packed = gzip.compress(json.dumps(truth).encode(), mtime=0)
            work.write_file(name, packed)
            about[split] = {"annotations": name, "boxes": len(truth["annotations"])}
            # The number of images by their number of objects: boxes but crowds.
            objects = Counter(str(e.entries["crowd"].count(0)) for e in usable)
            about[split]["images_by_objects"] = objects
            if said := boxes_left_out(objects, _MAX_BOXES):
                notes.append(f"{split}: training with {said}")
        return work.publish(
            about,
            files=[metadata["annotations"] for metadata in about.values()],
            info={
                "kind": "coco",
                "features": _FEATURES,
                "classes": [category["name"] for category in categories],
                "categories": categories,
                "clipped_boxes": sum(source.clipped for source in opened.values()),
                "notes": notes,
                "skipped": skipped.metadata(),
            },
        )


class _Source:
    """Annotations with their images; `examples` fills the last three attributes."""

    def __init__(self, split: str, paths: Sequence[str], settings: Settings):
        self._split = split
        annotations, _, images = paths[0].rpartition(":")
        if len(paths) > 1 or not annotations or not images:
            raise PrepareError(
                f"split {split!r} is {', '.join(paths)}; give one ANNOTATIONS:IMAGES, "
                f"as in {split}=instances.json.gz:images.tar"
            )
        path = typed_path(annotations)
        self.files = open_files(typed_path(images), settings.on_progress)
        try:
            file, _ = archive_of(path)
            self.metadata = [
                {**file_metadata(file or path), "path": annotations},
                self.files.metadata,
            ]
        except OSError as error:
            raise PrepareError(f"{annotations!r} cannot be read: {error}") from error
        settings.on_progress(f"reading {path.name}", 0.0)
        self.annotations = read_annotations(path)
        self.truth: dict[int, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self.clipped = 0
        self.ignored: list[tuple[str, str]] = []

    def examples(
        self, categories: Sequence[Mapping[str, Any]], skipped: Skipped
    ) -> list[Example]:
        """Returns the images in the order of their files, with their boxes."""
        labels = {c["id"]: label for label, c in enumerate(categories)}
        missing = dict(self.annotations.images)
        examples, ids = [], set()
        for found in self.annotations.orphans:
            skipped.add(Bad(self._split, _box_name(found), "box of no image"))
        for index, entry in enumerate(self.files.entries):
            if (image := self._image_of(entry.name)) is None:
                self.ignored.append(("files", f"{self._split}: {entry.name}"))
                continue
            if missing.pop(image.name, None) is None:
                skipped.add(Bad(self._split, entry.name, "twice in the source"))
                continue
            entries = self._entries(image, labels, ids, skipped)
            size = image.height, image.width
            examples.append(Example(self.files, index, entries, size))
        for name in missing:
            skipped.add(Bad(self._split, name, "missing image file"))
        return examples

    def _image_of(self, name: str) -> Image | None:
        images, name = self.annotations.images, plain_name(name)
        while name not in images and "/" in name:
            name = name.partition("/")[2]
        return images.get(name)

    def _entries(
        self, image: Image, labels: Mapping[int, int], ids: set[int], skipped: Skipped
    ) -> dict[str, Any]:
        boxes, kept = [], []
        for found in self.annotations.boxes[image.image_id]:
            box = check_box(found, image, labels, ids)
            if isinstance(box, str):
                skipped.add(Bad(self._split, _box_name(found), box))
                continue
            ids.add(found["id"])
            boxes.append(box)
            # An evaluator reads these two fields, which some files lack.
            kept.append({**found, "area": box.area, "iscrowd": int(box.crowd)})
        self.clipped += sum(box.clipped for box in boxes)
        self.truth[image.image_id] = (image.found, kept)
        return {
            "image_id": image.image_id,
            "height": image.height,
            "width": image.width,
            "boxes": np.array([box.corners for box in boxes], "<f4").tobytes(),
            "labels": np.array([labels[b.category_id] for b in boxes], "<i4").tobytes(),
            "crowd": np.array([box.crowd for box in boxes], "u1").tobytes(),
            "area": np.array([box.area for box in boxes], "<f4").tobytes(),
        }


def _box_name(found: Mapping[str, Any]) -> str:
    """Returns a name for an annotation, whose fields may hold anything."""
    return f"annotation {found.get('id')!r:.40} of image {found.get('image_id')!r:.40}"


def _categories(opened: Mapping[str, _Source]) -> list[dict[str, Any]]:
    first = "train" if "train" in opened else next(iter(opened))
    categories = opened[first].annotations.categories
    categories = [{**each, "name": nfc(each["name"])} for each in categories]
    names = {category["id"]: category["name"] for category in categories}
    for split, source in opened.items():
        for category in source.annotations.categories:
            known = names.get(category["id"], nfc(category["name"]))
            if known != nfc(category["name"]):
                raise PrepareError(
                    f"category {category['id']} is {known!r} in split {first!r} and "
                    f"{category['name']!r} in split {split!r}; they must be the same"
                )
    return categories


def _ground_truth(
    categories: Sequence[Mapping[str, Any]],
    examples: Sequence[Example],
    truths: Mapping[int, Mapping[int, tuple[dict[str, Any], list[dict[str, Any]]]]],
) -> dict[str, Any]:
    found = [truths[id(e.files)][e.entries["image_id"]] for e in examples]
    return {
        "info": {"description": "boxes as found, of the images that were prepared"},
        "images": [image for image, _ in found],
        "annotations": [box for _, boxes in found for box in boxes],
        "categories": categories,
    }
