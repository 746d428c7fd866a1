"""COCO annotations become records: hand-computed boxes, and everything bad by name."""

import gzip
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from prepare_cases import coco_json, contents, make_image, records, write
from pycocotools.coco import COCO

from echo_jax.data.prepare import PrepareError, Settings, prepare_coco
from echo_jax.data.sources import verify

IMAGES = {11: ("a.jpg", 20, 30), 5: ("b.jpg", 10, 10), 8: ("c.png", 16, 12)}
FILES = {name: make_image(i, name[-4:], size) for i, (name, *size) in IMAGES.items()}
BOXES = [
    {"id": 1, "image_id": 11, "category_id": 7, "bbox": [1, 2, 10, 5.5], "area": 44},
    {"id": 2, "image_id": 11, "category_id": 3, "bbox": [-4, 15, 10, 9], "iscrowd": 1},
    {"id": 3, "image_id": 8, "category_id": 3, "bbox": [0, 0, 12, 16], "area": 9.5},
]


def prepare(tmp_path, annotations=None, files=FILES, name="a.json", **settings):
    """Prepares one split, and returns what is in it by image id."""
    if annotations is None:
        annotations = coco_json(IMAGES, BOXES)
    (tmp_path / name).write_bytes(annotations)
    write(tmp_path / "images", files)
    out = tmp_path / "out"
    source = f"train={tmp_path}/{name}:{tmp_path}/images"
    info = prepare_coco([source], Settings(out=out, **settings))
    return info, {record["image_id"]: record for record in records(out, "train")}


def refusal(tmp_path, *args, **kwargs):
    with pytest.raises(PrepareError) as caught:
        prepare(tmp_path, *args, **kwargs)
    assert not (tmp_path / "out" / "dataset.json").exists()
    return str(caught.value)


def truth_of(out, split="train"):
    return json.loads(
        gzip.decompress((out / f"{split}-annotations.json.gz").read_bytes())
    )


def boxes_of(record):
    return np.frombuffer(record["boxes"], "<f4").reshape(-1, 4).tolist()


def test_boxes_labels_and_areas_are_those_of_the_annotations(tmp_path):
    info, found = prepare(tmp_path)
    assert info["categories"] == [{"id": 3, "name": "ant"}, {"id": 7, "name": "cat"}]
    assert info["classes"] == ["ant", "cat"]
    # x, y, width, height become ymin, xmin, ymax, xmax; what reaches out is cut.
    assert boxes_of(found[11]) == [[2, 1, 7.5, 11], [15, 0, 20, 6]]
    assert np.frombuffer(found[11]["labels"], "<i4").tolist() == [1, 0]
    assert np.frombuffer(found[11]["crowd"], "u1").tolist() == [0, 1]
    # A file without an area means the box's, as it was before it was cut.
    assert np.frombuffer(found[11]["area"], "<f4").tolist() == [44, 90]
    assert boxes_of(found[8]) == [[0, 0, 16, 12]]
    assert boxes_of(found[5]) == [] and found[5]["labels"] == b""
    assert info["clipped_boxes"] == 1 and info["skipped"]["count"] == 0
    assert [*found] == [11, 5, 8]
    for key, (name, height, width) in IMAGES.items():
        assert found[key]["image"] == FILES[name]
        assert (found[key]["height"], found[key]["width"]) == (height, width)


def test_packed_and_archived_annotations_and_images_are_the_same(tmp_path):
    prepare(tmp_path)
    expected = records(tmp_path / "out", "train")
    annotations = {
        "annotations/captions_train2017.json": b"{}",
        "annotations/instances_train2017.json": coco_json(IMAGES, BOXES),
    }
    packed = write(tmp_path / "annotations_trainval2017.zip", annotations)
    images = {f"train2017/{name}": FILES[name] for name in sorted(FILES)}
    zipped = write(tmp_path / "train2017.zip", images)
    (gz := tmp_path / "b.json.gz").write_bytes(gzip.compress(coco_json(IMAGES, BOXES)))
    tar = write(tmp_path / "x.tar.gz", images)
    member = f"{packed}/annotations/instances_train2017.json"
    for path, file, of in ((member, packed, zipped), (gz, gz, tar)):
        info = prepare_coco([f"{path}:{of}"], Settings(out=tmp_path / Path(of).stem))
        assert records(tmp_path / Path(of).stem, "train") == expected
        metadata = info["source"]["train"][0]
        assert metadata["path"] == str(path)
        assert metadata["bytes"] == Path(file).stat().st_size
    plain = write(tmp_path / "a.tar", annotations)
    as_in = rf"as in {packed}/FILE: annotations/captions_train2017\.json, ann"
    for source, message in (
        (packed, as_in),
        (f"{packed}/instances_train2017.json", as_in),
        (f"{plain}/x.json", r"lies in 'a\.tar', which is not a \.zip; unpack"),
    ):
        with pytest.raises(PrepareError, match=message):
            prepare_coco([f"{source}:{zipped}"], Settings(out=tmp_path / "no"))


def test_the_ground_truth_is_what_an_evaluator_reads(tmp_path, capsys):
    more = {"segmentation": [[1, 2, 3]], "more": {"é": [None, [True, "😀", -1.5]]}}
    outlined = [{**box, **more} for box in BOXES]
    bad = {"id": 4, "image_id": 5, "category_id": 9, "bbox": [0, 0, 1, 1]}
    annotations = coco_json(IMAGES, [*outlined, bad])
    info, _ = prepare(tmp_path, annotations, {**FILES, "c.png": b""}, max_bad="2")
    metadata = info["splits"]["train"]
    assert metadata["annotations"] == "train-annotations.json.gz"
    assert metadata["boxes"] == 2
    # Those of the images that were written, with boxes as they were found.
    (tmp_path / "truth.json").write_text(json.dumps(truth_of(tmp_path / "out")))
    truth = COCO(str(tmp_path / "truth.json"))
    assert sorted(truth.getImgIds()) == [5, 11]
    boxes = [truth.loadAnns(i)[0]["bbox"] for i in truth.getAnnIds()]
    assert boxes == [[1, 2, 10, 5.5], [-4, 15, 10, 9]]
    assert truth.getAnnIds(iscrowd=True) == [2]
    assert truth.loadCats([3, 7]) == info["categories"]
    assert truth.anns[1] == {**BOXES[0], "iscrowd": 0, "more": more["more"]}
    # It is one of the files that are checked.
    assert verify(tmp_path / "out") == 2
    capsys.readouterr()


@pytest.mark.parametrize("written", [float, lambda number: f" {float(number)}"])
def test_numbers_are_taken_as_pandas_writes_them(tmp_path, written):
    (tmp_path / "plain").mkdir()
    plain = prepare(tmp_path / "plain")
    truth = json.loads(coco_json(IMAGES, BOXES))
    for entry in (*truth["images"], *truth["annotations"], *truth["categories"]):
        for name, value in entry.items():
            if name == "bbox":
                entry[name] = [written(number) for number in value]
            elif not isinstance(value, str):
                entry[name] = written(value)
    truth["annotations"][2] |= {"iscrowd": None, "segmentation": None}
    info, found = prepare(tmp_path, json.dumps(truth).encode())
    assert found == plain[1] and info["categories"] == plain[0]["categories"]
    assert truth_of(tmp_path / "out") == truth_of(tmp_path / "plain/out")


def test_what_is_bad_is_skipped_counted_and_named(tmp_path):
    bad = [
        {"id": 1},
        {"id": None},
        {"category_id": 8},
        {"category_id": []},
        *({"bbox": bbox} for bbox in ([0, 0, 0, 1], [0, 0, 1, -1], [10, 0, 5, 5])),
        *({"bbox": bbox} for bbox in ([0, -6, 5, 5], [0, 0, 1], [0, 0, 1, "x"])),
        *({"bbox": bbox} for bbox in ([0, 0, 1, 1e300], None)),
        {"bbox": [0] * 4, "area": "x"},
        {"area": -1},
        {"iscrowd": 2},
        {"image_id": 99},
    ]
    usual = {"image_id": 5, "category_id": 7, "bbox": [0, 0, 1, 1]}
    boxes = [*BOXES, *({"id": k, **usual, **each} for k, each in enumerate(bad, 19))]
    images = {**IMAGES, 12: ("lost.jpg", 5, 5), 13: ("small.jpg", 20, 30)}
    files = {
        **FILES,
        "again/a.jpg": FILES["a.jpg"],
        "small.jpg": make_image(0),
        "other.jpg": b"not in the annotations",
    }
    # 16 boxes, and an image that is lost, one of another size, and one twice.
    content = coco_json(images, boxes)
    assert "more than 18 of 24" in refusal(tmp_path, content, files, max_bad="18")
    info, found = prepare(tmp_path, content, files, max_bad="19")
    assert sorted(found) == [5, 8, 11] and boxes_of(found[5]) == []
    assert info["skipped"]["reasons"] == {
        "box of no image": 1,
        "box of unknown category": 2,
        "box outside of the image": 2,
        "box that is not four finite numbers": 4,
        "box whose area or iscrowd is not such a number": 2,
        "box without an area": 3,
        "box without an id of its own": 2,
        "image of another size than its annotations say": 1,
        "missing image file": 1,
        "twice in the source": 1,
    }
    names = {bad["name"]: bad["reason"] for bad in info["skipped"]["first"]}
    assert names["annotation 25 of image 5"] == "box outside of the image"
    assert names["annotation 34 of image 99"] == "box of no image"
    assert names["lost.jpg"] == "missing image file"
    assert names["small.jpg"].startswith("image of another size")
    assert names["again/a.jpg"] == "twice in the source"


def test_a_box_is_clipped_to_its_image(tmp_path):
    cases = [
        ([0, 0, 10, 20], [0, 0, 20, 10]),
        ([9.5, 19.5, 0.5, 0.5], [19.5, 9.5, 20, 10]),
        # The border in float32: 9.9 + 0.1 is 10.000001 in no one's eyes.
        ([9.9, 0, 0.1, 1], [0, float(np.float32(9.9)), 1, 10]),
        # Clipped.
        ([-1, -1, 12, 22], [0, 0, 20, 10]),
        ([9, 19, 2, 0.5], [19, 9, 19.5, 10]),
    ]
    boxes = [
        {"id": k, "image_id": 1, "category_id": 3, "bbox": bbox}
        for k, (bbox, _) in enumerate(cases)
    ]
    files = {"x.jpg": make_image(0, ".jpg", (20, 10))}
    info, found = prepare(tmp_path, coco_json({1: ("x.jpg", 20, 10)}, boxes), files)
    assert boxes_of(found[1]) == [expected for _, expected in cases]
    assert info["clipped_boxes"] == 2


NO_COCO = [
    (b"{}x", "it is not JSON"),
    (b"1", "it must be a JSON object"),
    (b'{"categories": [1]}', "it needs 'categories', a list of objects; add it"),
    (coco_json(IMAGES, [], [(1, "a"), (1, "b")]), "two with one id"),
    (coco_json({}, [], [(k, "a") for k in range(65_537)]), "more than 65536 cat"),
    (coco_json(IMAGES, [], [("1.5", "a")]), "id is '1.5', not a number below"),
    (coco_json({1: ("a", 2, 2), 2: ("a", 2, 2)}, []), "one file_name"),
    (coco_json({1: ("a", 2, 2), "1": ("b", 2, 2)}, []), "two images have one id, 1"),
    (coco_json({1: ("../../a", 2, 2)}, []), "file_name '../../a' leads out"),
    (coco_json({1: ("a", 65536, 2)}, []), "height is 65536, not a number below"),
    (coco_json(IMAGES, [{"id": 77, "x": float("nan")}]), "it holds NaN, and JSON has"),
    (coco_json(IMAGES, [{"bbox": [1, float("-inf")]}]), "-Infinity, and JSON has num"),
    (b'{"images": [], "categories": []}', "images without annotations, as image_info"),
    (coco_json(IMAGES, [{"segments_info": []}]), "it holds panoptic segments, not bo"),
    (b'{"annotations": [{"caption": "a"}]}', "captions, not boxes; give an instances"),
    (b'{"other": ' + b"[" * 100_000, "nested more than 64 deep"),
    (b'{"other": "' + b"a" * 17_000_000, "it holds a text of over 16777216 bytes"),
]


@pytest.mark.parametrize(("content", "message"), NO_COCO, ids=range(len(NO_COCO)))
def test_what_is_no_coco_file_is_refused_in_one_line(tmp_path, content, message):
    said = refusal(tmp_path, content)
    assert message in said and "a.json' cannot be read as boxes in COCO's" in said
    assert len(said) < 500 + len(str(tmp_path))


def test_a_number_that_json_lacks_is_shown_with_its_place(tmp_path):
    boxes = [*BOXES, {"id": 77, "area": float("nan"), "category_id": 3}]
    said = refusal(tmp_path, coco_json(IMAGES, boxes))
    assert '"id": 77, "area": NaN, "category_id"' in said


NAMES = {
    "backslash": lambda name: f"sub\\{name}",
    "dotted": lambda name: f"./sub/{name}",
    "another form of Unicode": lambda name: f"sub/é{name}",
}


@pytest.mark.parametrize("of_json", NAMES)
@pytest.mark.parametrize("kind", ["", ".zip", ".tar"])
def test_an_image_is_found_however_its_path_is_written(tmp_path, of_json, kind):
    written = {k: (NAMES[of_json](name), *size) for k, (name, *size) in IMAGES.items()}
    (tmp_path / "a.json").write_bytes(coco_json(written, BOXES))
    accent = unicodedata.normalize("NFD", "é") * ("Unicode" in of_json)
    slash = "\\" if kind == ".zip" else "/"
    files = {f"sub{slash}{accent}{name}": FILES[name] for name in FILES}
    images = write(tmp_path / f"images{kind}", files)
    info = prepare_coco([f"{tmp_path}/a.json:{images}"], Settings(out=tmp_path / "out"))
    assert info["skipped"]["count"] == 0 and info["splits"]["train"]["examples"] == 3
    found = {r["image_id"]: r["image"] for r in records(tmp_path / "out", "train")}
    assert found == {k: FILES[name] for k, (name, *_) in IMAGES.items()}


def test_files_and_boxes_that_are_left_out_are_counted(tmp_path):
    plain = {"id": 0, "image_id": 5, "category_id": 7, "bbox": [0, 0, 1, 1]}
    many = [{**plain, "id": k} for k in range(100, 220)]
    files = {**FILES, "more/x.jpg": FILES["a.jpg"], "y": b"", "z.txt": b""}
    info, _ = prepare(tmp_path, coco_json(IMAGES, [*BOXES, *many]), files)
    assert info["notes"] == [
        "left out, as the annotations do not name them: 3 files (such as train: "
        "more/x.jpg)",
        "train: training with data.max_boxes=100 leaves out 20 boxes of 1 image",
    ]
    # One of the boxes of image 11 surrounds a crowd.
    assert info["splits"]["train"]["images_by_objects"] == {"1": 2, "120": 1}


def test_annotations_that_fill_the_memory_are_refused(tmp_path):
    limit = 2**28
    content = b'{"categories":[],"images":[],"annotations":[%s0]}'
    files = {"a": content % (b"{}," * (limit // 280))}
    path = write(tmp_path / "a.zip", files) + "/a"
    write(tmp_path / "images", FILES)
    with pytest.raises(PrepareError, match=f"takes more than {limit} bytes"):
        prepare_coco([f"{path}:{tmp_path}/images"], Settings(out=tmp_path / "out"))


def test_what_is_not_wanted_takes_no_memory(tmp_path):
    many = b"[" + b"{}," * 500_000 + b"0]"
    outlined = [{**BOXES[0], "segmentation": "many"}, *BOXES[1:]]
    content = coco_json(IMAGES, outlined).replace(b'"many"', many)
    content = content.replace(b"{", b'{"info": ' + many + b", ", 1)
    info, _ = prepare(tmp_path, gzip.compress(content, 1), name="a.json.gz")
    assert info["splits"]["train"]["boxes"] == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("train=a.json", "give one ANNOTATIONS:IMAGES"),
        ("train={0}/no.json:{0}/images", "no.json' cannot be read"),
        ("train={0}/a.json:{0}/nowhere", "does not exist; name a file"),
    ],
)
def test_a_source_that_is_incomplete_is_refused(tmp_path, source, message):
    prepare(tmp_path)
    with pytest.raises(PrepareError, match=message):
        prepare_coco([source.format(tmp_path)], Settings(out=tmp_path / "new"))


def test_the_categories_of_other_splits_are_those_of_train(tmp_path):
    prepare(tmp_path)
    few = [{"id": 1, "image_id": 11, "category_id": 7, "bbox": [0, 0, 1, 1]}]
    (tmp_path / "few.json").write_bytes(coco_json(IMAGES, few, [(7, "cat")]))
    (tmp_path / "other.json").write_bytes(coco_json(IMAGES, few, [(7, "dog")]))
    train = f"{tmp_path}/a.json:{tmp_path}/images"

    def with_validation(name):
        validation = f"validation={tmp_path}/{name}:{tmp_path}/images"
        return prepare_coco([train, validation], Settings(out=tmp_path / "new"))

    with pytest.raises(PrepareError, match="category 7 is 'cat' in split 'train' and"):
        with_validation("other.json")
    info = with_validation("few.json")
    first = records(tmp_path / "new", "validation")[0]
    assert np.frombuffer(first["labels"], "<i4").tolist() == [1]
    assert info["splits"]["validation"]["boxes"] == 1


def test_names_of_categories_in_two_forms_of_unicode_are_one(tmp_path):
    images, sources = write(tmp_path / "images", FILES), []
    for split, form in (("train", "NFD"), ("validation", "NFC")):
        name = unicodedata.normalize(form, "café")
        (tmp_path / split).write_bytes(coco_json(IMAGES, [], [(7, name)]))
        sources.append(f"{split}={tmp_path}/{split}:{images}")
    info = prepare_coco(sources, Settings(out=tmp_path / "out"))
    assert info["classes"] == [name]
    assert info["notes"] == [f"one class each, in several forms of Unicode: {name}"]
    assert truth_of(tmp_path / "out")["categories"] == [{"id": 7, "name": name}]


def test_held_out_images_take_their_boxes_along(tmp_path, monkeypatch):
    images = {i: (f"{i}.jpg", 12, 10) for i in range(20)}
    boxes = [
        {"id": i, "image_id": i, "category_id": 3, "bbox": [0, 0, i / 4 + 1, 1]}
        for i in range(20)
    ]
    files = {f"{i}.jpg": make_image(i) for i in range(20)}
    content = coco_json(images, boxes)
    _, train = prepare(tmp_path, content, files, holdout=0.3, workers=1)
    validation = {r["image_id"]: r for r in records(tmp_path / "out", "validation")}
    assert sorted([*train, *validation]) == [*range(20)] and train and validation
    for split, found in (("train", train), ("validation", validation)):
        truth = truth_of(tmp_path / "out", split)
        assert {image["id"] for image in truth["images"]} == found.keys()
        assert {box["image_id"] for box in truth["annotations"]} == found.keys()
        for key, record in found.items():
            assert boxes_of(record) == [[0, 0, 1, key / 4 + 1]]
    # Neither the workers nor the day change a byte.
    whole = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    monkeypatch.setattr("time.time", lambda: 0.0)
    prepare(tmp_path, content, files, holdout=0.3, workers=3)
    assert contents(tmp_path / "out") == whole
