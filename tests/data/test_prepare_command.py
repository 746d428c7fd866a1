"""``echo-jax prepare`` as it is typed."""

import gzip
import lzma
import os
import re
import shlex
from pathlib import Path

import pytest
from prepare_cases import (
    TINY_IMAGENET,
    class_folders,
    coco_json,
    make_image,
    write,
    write_imagenet,
    write_parquet,
)

from echo_jax import cli
from echo_jax.data.sources import read_info
from echo_jax.terminal import Countdown

SPLITS = ("train", "val")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with all files that the examples in the help name."""
    monkeypatch.chdir(tmp_path)
    write("train.tar.gz", class_folders(8))
    write("test.tar.gz", class_folders(4))
    write("photos", class_folders(80))
    tiny = "tiny-imagenet-200/"
    write("tiny-imagenet-200.zip", {tiny + k: v for k, v in TINY_IMAGENET.items()})
    for split in ("train", "test"):
        write_parquet(f"{split}-00000-of-00001.parquet", range(8))
    write_imagenet(tmp_path)
    box = {"id": 1, "image_id": 1, "category_id": 7, "bbox": [0, 0, 5, 5]}
    instances = coco_json({1: ("a.jpg", 12, 10)}, [box])
    images = {"a.jpg": make_image(1)}
    for name in ("instances", "instances_train2017", "instances_val2017"):
        Path(f"{name}.json").write_bytes(instances)
    Path("instances.json.gz").write_bytes(gzip.compress(instances))
    for name in ("train2017", "val2017"):
        write(name, images)
        write(f"{name}.zip", {f"{name}/{key}": images[key] for key in images})
    of_split = {f"annotations/instances_{s}2017.json": instances for s in SPLITS}
    write("annotations.zip", of_split)
    write("train.tar", images)
    book = b"It was a dark and stormy night. " * 50
    write("books", {f"{number}.txt": book for number in range(100)})
    Path("input.txt").write_bytes(book * 9)
    Path("train.txt.xz").write_bytes(lzma.compress(book * 9))
    Path("valid.txt.xz").write_bytes(lzma.compress(book))
    return tmp_path


def run(command, capsys):
    """Runs a line as a shell would; returns the status and what was printed."""
    status = cli.main(shlex.split(command)[1:])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("kind", ["images", "coco", "text", "verify"])
def test_every_example_in_the_help_is_true(folder, capsys, kind):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["prepare", kind, "--help"])
    said = capsys.readouterr().out.replace("\\\n", "")
    examples = re.findall(r"^  (echo-jax prepare .*)$", said, re.MULTILINE)
    assert examples
    if kind == "verify":
        run("echo-jax prepare images photos --out data/cifar10", capsys)
    for example in examples:
        if "text" in example and "--tokenizer" not in example:
            example += " --vocab 290"  # There is too little text for more.
        status, out, _ = run(example, capsys)
        assert status == 0 and out
        if "tiny-imagenet" in example:
            said = r"^folders of splits: \S+/train is train, \S+/val is validation, "
            assert re.search(said + r"\S+/test is left out", out, re.MULTILINE)
        if kind != "verify":
            read_info(re.search(r"--out (\S+)", example)[1])


def test_what_is_left_out_is_said(folder, capsys):
    write(
        "photos",
        {"cat/notes.txt": b"x", "dog/x.csv": b"", "a\u0301/1.jpg": make_image(1)},
    )
    write("photos", {"\xe1/2.jpg": make_image(2)})
    out = run("echo-jax prepare images photos --out out", capsys)[1]
    assert (
        "left out, as no images: 1 .txt (such as train: cat/notes.txt), 1 .csv "
        "(such as train: dog/x.csv), 1 folders without an image (such as train: dog)\n"
    ) in out
    assert "one class each, in several forms of Unicode: \xe1\n" in out
    box = {"image_id": 1, "category_id": 7, "bbox": [0, 0, 5, 5]}
    boxes = [{**box, "id": k} for k in range(130)]
    write(".", {"many.json": coco_json({1: ("a.jpg", 12, 10)}, boxes)})
    out = run("echo-jax prepare coco many.json:train2017 --out coco", capsys)[1]
    assert "training with data.max_boxes=100 leaves out 30 boxes of 1 image\n" in out
    write(
        "books", {"a.jsonl": b'{"text": "a"}\n' * 99, "b.csv.gz": gzip.compress(b"a,b")}
    )
    out = run("echo-jax prepare text books --tokenizer bytes --out text", capsys)[1]
    said = "read as plain text, with their braces, commas and names of fields: 1 .jsonl"
    assert f"{said} (such as train: a.jsonl), 1 .csv (such as train: b.csv.gz)\n" in out


def test_it_says_what_was_made_and_what_was_not(folder, capsys):
    write("photos", {"cat/cut.jpg": make_image(0)[:-2], "cat/empty.jpg": b""})
    command = "echo-jax prepare images photos --out out"
    status, out, err = run(command, capsys)
    assert (status, out) == (2, "")
    said = "more than 0 of 82 are bad: train: 'cat/cut.jpg' (truncated), train: 'cat/em"
    assert err.splitlines()[-1].startswith(f"echo-jax prepare: {said}")
    assert err.endswith("allow more with --max-bad=2 or, say, --max-bad=1%\n")
    status, out, _ = run(f"{command} --max-bad 3%", capsys)
    lines = out.splitlines()
    size = read_info("out")["splits"]["train"]["shards"][0]["bytes"] / 1e6
    assert status == 0 and lines == [
        f"train: 80 examples in 2 classes of 40 each, {size:.1f} MB in 1 shard",
        "skipped: 1 empty file, 1 truncated",
        "  train: cat/cut.jpg (truncated)",
        "  train: cat/empty.jpg (empty file)",
        "no validation split, which training evaluates on: add validation=SOURCE or "
        "--holdout 0.05, with another --out",
        "",
        "out/dataset.json",
    ]


def test_every_option_arrives(folder, capsys):
    said = (
        "--tokenizer bytes --document line --block 7 --holdout 0.25 --shard-mb 0.1 "
        "--workers 1 --max-bad 1"
    )
    assert run(f"echo-jax prepare text books --out out {said}", capsys)[0] == 0
    options = {"source": {"train": ["books"]}, "kind": "text", "shard_mb": 0.1}
    options |= {"tokenizer": "bytes", "document": "line", "block": 7, "holdout": 0.25}
    assert read_info("out")["options"] == options


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("images photos", "the following arguments are required: --out"),
        ("films photos --out x", "invalid choice: 'films'"),
        ("images photos --out x --colour red", "unknown option '--colour'"),
        ("coco instances.json --out x", "give one ANNOTATIONS:IMAGES"),
        ("verify photos", "'photos' is not a prepared folder"),
    ],
)
def test_what_is_mistyped_is_named_in_one_line(folder, command, message, capsys):
    try:
        status = cli.main(["prepare", *shlex.split(command)])
    except SystemExit as end:
        status = end.code
    assert status == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("echo-jax prepare") and message in line
    # A corrected command must not find the folder taken.
    assert not Path("x").exists()


def test_a_stopped_command_says_how_to_go_on(folder, capsys, monkeypatch):
    command = "echo-jax prepare images photos --shard-mb 0.005 --out 'my data'"

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        status, out, err = run(command, capsys)
    assert (status, out) == (130, "")
    assert err.splitlines()[-2:] == [
        "echo-jax prepare: interrupted; run the same command to resume",
        f"  {command}",
    ]
    assert run(command, capsys)[0] == 0 and read_info("my data")


def test_verify_finds_what_was_changed(folder, capsys):
    run("echo-jax prepare images photos --out out", capsys)
    status, out, _ = run("echo-jax prepare verify out", capsys)
    assert (status, out) == (0, "out: all 1 files are as written\n")
    (shard,) = Path("out").glob("*.arrayrecord")
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    status, _, err = run("echo-jax prepare verify out", capsys)
    assert status == 2 and "it was changed since" in err


def test_progress_is_lines_with_the_time_left_and_names_as_they_are(
    capsys, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Countdown(line_every_s=10) as shown:
        # 20 % in 10 s, and then 25 % in 3604 s.
        for seconds, what, done in (
            *((0, "reading", 0.1), (9, "reading", 0.2), (1, "reading", 0.3)),
            *((1, "writing", 0.5), (3604, "writing", 0.75), (9, "writing", 1.0)),
        ):
            now[0] += seconds
            shown.show(what, done)
    assert capsys.readouterr().err.splitlines() == [
        " 10%  reading",
        " 30%  reading  ETA 0:00:35",
        " 50%  writing",
        " 75%  writing  ETA 1:00:04",
    ]
    # On a terminal, neither markup nor escape sequences.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Countdown() as shown:
        shown.show("reading [red]a \x1b]0;b\x07", 0.5)
    err = capsys.readouterr().err
    assert "reading [red]a" in err and "\x1b]0;" not in err
