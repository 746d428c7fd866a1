"""The class of an image is what its user meant, or it is refused in a sentence."""

import struct
import unicodedata
import zlib
from pathlib import Path

import pytest
from prepare_cases import (
    TINY_IMAGENET,
    contents,
    make_image,
    records,
    write,
    write_devkit,
    write_imagenet,
)
from prepare_cases import prepare as made
from prepare_cases import refusal as refused

from echo_jax.data.prepare import PrepareError, Settings, TextSettings, prepare_text

IMAGE = make_image(0)


def prepare(tmp_path, *sources, **more):
    """The classes, and by split the class of each image by name."""
    out = tmp_path / "out"
    info = made(out, *sources, **more)
    return info["classes"], {
        split: {r["name"]: info["classes"][r["label"]] for r in records(out, split)}
        for split in info["splits"]
    }


def refusal(tmp_path, *sources, **more):
    said = refused(tmp_path / "out", *sources, **more)
    assert not (tmp_path / "out").exists()
    return said


def folder(tmp_path, *names, at="x"):
    return write(tmp_path / at, dict.fromkeys(names, IMAGE))


def test_class_folders_in_two_forms_of_unicode_are_one_class(tmp_path):
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    train = write(tmp_path / "train", {f"{composed}/0.jpg": IMAGE, "tea/1.jpg": IMAGE})
    other = write(tmp_path / "other", {f"{apart}/0.jpg": IMAGE, "tea/1.jpg": IMAGE})
    for sources in ((train, f"validation={other}"), (other, f"validation={train}")):
        out = tmp_path / f"out of {Path(sources[0]).name}"
        info = made(out, *sources)
        assert info["classes"] == [composed, "tea"]
        said = f"one class each, in several forms of Unicode: {composed}"
        assert info["notes"] == [said]
        assert [r["label"] for r in records(out, "validation")] == [0, 1]
    # A list may have another form, of files and of classes.
    (table := tmp_path / "of.csv").write_text(f"x/{apart}.jpg,{apart}\nx/1.jpg,tea\n")
    files = {f"x/{composed}.jpg": IMAGE, "x/1.jpg": IMAGE}
    info = made(tmp_path / "out", write(tmp_path / "plain", files), classes=table)
    assert info["classes"] == [composed, "tea"] and info["notes"] == []


@pytest.mark.parametrize("kind", ["folder", "x.zip"])
def test_tiny_imagenet_is_read_as_it_is_downloaded(tmp_path, kind):
    files = {f"tiny-imagenet-200/{k}": v for k, v in TINY_IMAGENET.items()}
    path = write(tmp_path / kind, files)
    top = f"{path}/tiny-imagenet-200"
    sources = f"train={top}/train", f"validation={top}/val"
    words = Path(f"{top}/words.txt")
    named, _ = prepare(tmp_path / "named", *sources, names=words)
    assert named == ["goldfish", "dugong"]
    classes, found = prepare(tmp_path, *sources)
    assert classes == ["n01", "n02"]
    train = {f"n{k % 2 + 1:02}/images/n{k % 2 + 1:02}_{k}.JPEG" for k in range(6)}
    assert found["train"] == {name: name[:3] for name in train}
    assert [*found["validation"].items()] == [
        ("images/val_0.JPEG", "n02"),
        ("images/val_1.JPEG", "n01"),
        ("images/val_2.JPEG", "n02"),
    ]
    assert prepare(tmp_path / "whole", path) == (classes, found)
    said = refusal(tmp_path / "one", f"train={path}")
    assert f"train={top}/train validation={top}/val test={top}/test, or say" in said
    # Nobody says what these are.
    said = refusal(tmp_path / "test", f"train={top}/train", f"test={top}/test")
    assert "has 2 images of 1 classes that train has not, such as 'images'" in said


def test_images_of_one_class_are_refused(tmp_path):
    path = folder(tmp_path, "images/a.jpg", "images/b.jpg")
    Path(path, "val_annotations.txt").write_text("a.jpg\tcat\n")
    said = refusal(tmp_path, path, max_bad="1")
    assert "are of one class, 'cat', by val_annotations.txt" in said


@pytest.mark.parametrize(
    ("names", "how", "expected"),
    [
        ("t/cat/1.jpg t/ant/2.jpg", "auto", "cat ant"),
        ("cat/x/y/1.jpg ant/x/y/2.jpg", "auto", "cat ant"),
        ("cat/x/y/1.jpg ant/x/y/2.jpg", "last", "y y"),
        ("pet/cat/1.jpg pet/dog/2.jpg wild/ant/3.jpg", "auto", "cat dog ant"),
        ("pet/cat/1.jpg pet/dog/2.jpg wild/ant/3.jpg", "first", "pet pet wild"),
        ("cat/1.jpg cat/old/2.jpg ant/3.jpg", "first", "cat cat ant"),
        ("cat/1.jpg cat/2.jpg", "last", "cat cat"),
        ("t/cat/1.jpg t/cat/2.jpg", "first", "cat cat"),
    ],
)
def test_folders_name_classes(tmp_path, names, how, expected):
    names = names.split()
    _, found = prepare(tmp_path, folder(tmp_path, *names), classes=how)
    assert found["train"] == dict(zip(names, expected.split(), strict=True))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("1.jpg 2.jpg", "no image of split 'train' lies in a folder below its source"),
        ("cat/a/1.jpg cat/b/2.jpg ant/a/3.jpg", "are 'ant/a' and 'cat/a': --class"),
        ("cat/1.jpg cat/old/2.jpg ant/3.jpg", "there are 'cat' and 'cat/old'"),
        ("d/Train/cat/1.jpg d/test/ant/2.jpg d/x/a/1.jpg", "train="),
    ],
)
def test_what_looks_wrong_is_refused(tmp_path, names, message):
    assert message in refusal(tmp_path, folder(tmp_path, *names.split()))


def test_a_list_names_classes(tmp_path):
    train = folder(tmp_path, "cat/1.jpg", "ant/2.jpg", at="train")
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 4)]
    val = write(tmp_path / "val.tar", {f"val/{name}": IMAGE for name in names})
    table = tmp_path / "val.csv"
    sources = train, f"validation={val}"
    # With and without endings and folders, and a row of titles.
    table.write_text(
        f"file,class\n{names[0]},ant\n{names[1][:-5]},cat\nval/{names[2]},ant\n"
    )
    classes, found = prepare(tmp_path, *sources, classes=str(table))
    assert classes == ["ant", "cat"]
    assert found["train"] == {"ant/2.jpg": "ant", "cat/1.jpg": "cat"}
    assert [*found["validation"].values()] == ["ant", "cat", "ant"]
    table.write_text(f"{names[0]},ant\n{names[1]},cat\n")
    with pytest.raises(PrepareError, match="the source has changed"):
        prepare(tmp_path, *sources, classes=str(table))
    said = refusal(tmp_path / "two", *sources, classes=str(table))
    assert f"'val/{names[2]}' (not in val.csv)" in said
    # A column of numbers, where the folders of train have names.
    table = tmp_path / "val.tsv"
    table.write_text("".join(f"{name}\t{k}\n" for k, name in enumerate(names)))
    said = refusal(tmp_path / "three", *sources, classes=str(table))
    assert "such as '0', by val.tsv, and train has 2, such as 'ant'; say with" in said
    # One as pandas writes it where a number is missing.
    numbered = folder(tmp_path, "0/1.jpg", "1/2.jpg", at="numbered")
    table.write_text(f"{names[0]}\t0.0\n{names[1]}\t1.0\n")
    (of := tmp_path / "names.csv").write_text("class,name\n0.0,ant\n1.0,cat\n")
    more = {"classes": str(table), "names": of, "max_bad": "1"}
    classes, found = prepare(tmp_path / "numbers", numbered, sources[1], **more)
    assert classes == ["ant", "cat"] == [*found["validation"].values()]


@pytest.mark.parametrize("packed", [True, False])
def test_imagenet_is_read_as_it_is_downloaded(tmp_path, packed):
    train, val, kit = write_imagenet(tmp_path, packed=packed)
    classes, found = prepare(tmp_path, train, f"validation={val}", classes=kit)
    assert classes == ["n01000001", "n02000002"]
    names = {f"{of}/{of}_{k}.JPEG" for of in classes for k in range(2)}
    assert found["train"] == {name: name[:9] for name in names}
    assert [*found["validation"].values()] == ["n01000001", "n02000002", "n01000001"]


KNOWN = {1: "n01000001", 3: "n01000003"}
CUT = b"x" * 126 + b"IM" + b"\x0f\0\0\0\xff\0\0\0x"
BOMB = zlib.compress(bytes(2**24 + 1))
PACKED = b"x" * 126 + b"IM" + struct.pack("<II", 15, len(BOMB)) + BOMB


@pytest.mark.parametrize(
    ("known", "truth", "meta", "message"),
    [
        (KNOWN, b"1\n2\n", None, "has the class '2', which data/meta.mat does not"),
        ({1: "n1", 3: "../etc"}, b"1\n", None, "has a class 'n1', and no n01440"),
        (KNOWN, b"1\n", CUT, "meta.mat is not a list of classes"),
        (KNOWN, b"1\n", PACKED, "unpacks to more than"),
        (KNOWN, b"1\n" * (2**23 + 1), None, "is larger than 16777216 bytes"),
    ],
    ids=range(5),
)
def test_a_devkit_that_is_none_is_refused(tmp_path, known, truth, meta, message):
    more = {"data/meta.mat": meta} if meta else {}
    kit = write_devkit(tmp_path / "kit.tar.gz", known, truth, **more)
    path = folder(tmp_path, "cat/1.jpg")
    said = refusal(tmp_path, path, classes=kit)
    assert message in said and f"--classes={kit} cannot be read" in said
    images = write(tmp_path / "images.tar.gz", {"cat/1.jpg": IMAGE})
    said = refusal(tmp_path, path, classes=images)
    assert "it holds no data/meta.mat, as ImageNet's devkit does" in said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "it is empty"),
        ("a.csv", b"1.jpg,\n", "line 1 needs two columns; add the missing"),
        ("a.csv", b"1.jpg,cat\n1.jpg,ant\n", "'1.jpg' is 'cat' and, in line 2, 'ant'"),
        ("a.csv", b"1.jpg,\x1b[2J\n", "line 1 has '\\x1b[2J'; use printable"),
        ("a.csv", b'"1.jpg,cat', "cannot be read"),
        ("a.csv", b"9.jpg,cat\n", "its first file is '9.jpg', and the first image 'ca"),
        ("a.txt", b"1.jpg,cat", "give one of auto, first, last, a .csv or .tsv"),
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    path = folder(tmp_path, "cat/1.jpg", "cat/2.jpg")
    said = refusal(tmp_path, path, classes=f"{tmp_path}/{name}")
    assert message in said and f"--classes={tmp_path}/{name}" in said


NAMED = ("n01/1.jpg", "n02/2.jpg", "n03/3.jpg")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"n00\tbeing\nn03\tcrane, lift\n\nn01  gold fish, C\nn02 crane"),
        ("a.csv", b"class,name\nn01,gold fish\nn02,crane\nn03,crane\n"),
        ("a.tsv", b"n03\tcrane\tmore\nn01\tgold fish\nn02\tcrane\n"),
    ],
)
def test_classes_are_called_what_a_file_says(tmp_path, name, content):
    path, file = folder(tmp_path, *NAMED), tmp_path / name
    file.write_bytes(content)
    classes, of = prepare(tmp_path, path, names=file)
    # Labels are those of the folders, and two of one name are told apart.
    assert classes == ["gold fish", "crane (n02)", "crane (n03)"]
    assert of["train"] == dict(zip(NAMED, classes, strict=True))
    with pytest.raises(PrepareError, match="--names was"):
        prepare(tmp_path, path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"n01 a\nn02 b\n", "has no name for 1 of 3 classes, such as 'n03'"),
        ("a.txt", b"n01 , Carassius\n", "line 1 needs two columns; add the missing"),
        ("a.txt", b"\xff", "cannot be read"),
        ("a.json", b"{}", "must be a .txt, .csv or .tsv file"),
        ("gone.txt", None, "cannot be read"),
        ("x.zip/b.txt", None, "/x.zip' has no 'b.txt'; name a file in it"),
    ],
)
def test_names_that_are_none_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    path = folder(tmp_path, *NAMED)
    write(tmp_path / "x.zip", {"a.txt": b"n01 ant\n"})
    said = refusal(tmp_path, path, names=tmp_path / name)
    assert message in said and f"--names={tmp_path}/{name}" in said


def layout(top="", val="val", test=""):
    """Class folders in the folders of splits, around which may lie another one."""
    names = ("cat/0.jpg", "ant/1.jpg", "cat/2.jpg")
    splits = filter(None, ("train", val, test))
    return {f"{top}{split}/{name}": IMAGE for split in splits for name in names}


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (layout(val="Validation"), {"train": "train", "validation": "Validation"}),
        (layout(val="test"), {"train": "train", "test": "test"}),
        (
            layout("x/", "val", "test") | {"x/notes/a.txt": b"", "words.txt": b""},
            {"train": "x/train", "validation": "x/val", "test": "x/test"},
        ),
    ],
    ids=range(3),
)
@pytest.mark.parametrize("kind", ["d", "d.zip"])
def test_folders_of_splits_are_taken_as_such(tmp_path, files, folders, kind):
    data = write(tmp_path / kind, files)
    info = made(tmp_path / "out", data)
    assert info["layout"] == {f"{data}/{path}": of for of, path in folders.items()}
    made(tmp_path / "named", *(f"{of}={data}/{path}" for of, path in folders.items()))
    found = contents(tmp_path / "out"), contents(tmp_path / "named")
    for each in found:
        each.pop("dataset.json")
    assert found[0] == found[1] and {*info["splits"]} == {*folders}


TWO_AND_ONE = {"train": 2, "validation": 1}
CSV = "1.jpg,a\n2.jpg,b\n3.jpg,a\n"


@pytest.mark.parametrize(
    ("names", "prefix", "more", "says"),
    [
        # A class called test, and what may be a class or a split.
        ("test/1 cat/1", "", {}, ({"train": 2}, 2)),
        ("train/1 test/1", "train=", {"classes": "first"}, ({"train": 2}, 2)),
        ("train/1 test/1", "", {}, "train={} --classes first"),
        ("train/a/1 val/a/1 valid/a/1", "", {}, "of several splits"),
        ("train/a/1 val/a/1", "train=", {}, "of several splits"),
        ("train/a/1 train/b/1 val/a/1", "", {"holdout": 0.5}, "and one is given"),
        # A list names the classes, so these need no folders.
        ("train/1 train/2 val/3", "", {"classes": CSV}, (TWO_AND_ONE, 2)),
        # Nobody says what the images of a contest's test are, which is left out.
        ("train/a/1 train/b/1 val/a/1 test/1", "", {}, (TWO_AND_ONE, 2)),
    ],
)
def test_what_may_be_a_split_or_a_class_is_not_guessed(
    tmp_path, names, prefix, more, says
):
    path = folder(tmp_path, *(f"{name}.jpg" for name in names.split()))
    if more.get("classes") == CSV:
        lists = write(tmp_path / "lists.zip", {"of.csv": CSV.encode()})
        more = {"classes": f"{lists}/of.csv"}
    if isinstance(says, str):
        assert says.format(path) in refusal(tmp_path, prefix + path, **more)
    else:
        info = made(tmp_path / "out", prefix + path, **more)
        splits = {split: of["examples"] for split, of in info["splits"].items()}
        assert (splits, len(info["classes"])) == says


def test_folders_of_splits_are_taken_as_such_with_text(tmp_path):
    files = {"train/a.txt": b"abcdef", "val/a.txt": b"ghijkl"}
    path, text = write(tmp_path / "x", files), {"tokenizer": "bytes", "block": 2}
    settings = Settings(out=tmp_path / "out")
    info = prepare_text([path], settings, TextSettings(**text))
    assert info["layout"] == {f"{path}/train": "train", f"{path}/val": "validation"}
    assert {*info["splits"]} == {"train", "validation"}
    write(path, {"b.txt": b"mno"})
    with pytest.raises(PrepareError, match="of several splits"):
        prepare_text([path], Settings(out=tmp_path / "no"), TextSettings(**text))
