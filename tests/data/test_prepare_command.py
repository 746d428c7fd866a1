"""``echo-jax prepare`` as it is typed."""

import gzip
import lzma
import re
import shlex
from pathlib import Path

import pytest
from prepare_cases import (
    TINY_IMAGENET,
    class_folders,
    coco_json,
    contents,
    make_image,
    write_folder,
    write_imagenet,
    write_parquet,
    write_tar,
    write_zip,
)

from echo_jax import cli
from echo_jax.data.prepare import text, workspace
from echo_jax.data.prepare.tokenizer import train_subwords
from echo_jax.data.sources.prepared import read_info
from echo_jax.terminal import countdown
from echo_jax.terminal.countdown import Countdown

SPLITS = ("train", "val")
KINDS = ("images", "coco", "text", "verify")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with all files that the examples in the help name."""
    monkeypatch.chdir(tmp_path)
    write_tar("train.tar.gz", class_folders(8), "w:gz")
    write_tar("test.tar.gz", class_folders(4), "w:gz")
    write_folder("photos", class_folders(80))
    tiny = "tiny-imagenet-200/"
    write_zip("tiny-imagenet-200.zip", {tiny + k: v for k, v in TINY_IMAGENET.items()})
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
        write_folder(name, images)
        write_zip(f"{name}.zip", {f"{name}/{key}": images[key] for key in images})
    of_split = {f"annotations/instances_{s}2017.json": instances for s in SPLITS}
    write_zip("annotations.zip", of_split)
    write_tar("train.tar", images)
    book = b"It was a dark and stormy night. " * 50
    write_folder("books", {f"{number}.txt": book for number in range(100)})
    Path("input.txt").write_bytes(book * 9)
    Path("train.txt.xz").write_bytes(lzma.compress(book * 9))
    Path("valid.txt.xz").write_bytes(lzma.compress(book))
    return tmp_path


def run(command, capsys):
    """Runs a line as a shell would; returns the status and what was printed."""
    status = cli.main(shlex.split(command)[1:])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def help_of(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_every_example_in_the_help_is_true(folder, capsys, monkeypatch, kind):
    # There is too little text for as many subwords as the default.
    monkeypatch.setattr(
        text, "train_subwords", lambda lines, vocab: train_subwords(lines, 290)
    )
    words = ["prepare", kind] if kind else ["prepare"]
    said = help_of(words, capsys).replace("\\\n", "")
    examples = re.findall(r"^  (echo-jax prepare .*)$", said, re.MULTILINE)
    assert examples
    if kind == "verify":
        run("echo-jax prepare images photos --out data/cifar10", capsys)
    for example in examples:
        status, out, _ = run(example, capsys)
        assert status == 0 and out
        if kind != "verify":
            read_info(shlex.split(example)[-1])


def test_it_says_what_was_made_and_what_was_not(folder, capsys):
    write_folder("photos", {"cat/cut.jpg": make_image(0)[:-2], "cat/empty.jpg": b""})
    command = "echo-jax prepare images photos --out out"
    status, out, err = run(command, capsys)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == (
        "echo-jax prepare: more than 0 of 82 are bad: train: 'cat/cut.jpg' (truncated)"
        ", train: 'cat/empty.jpg' (empty file). Look at them, or allow more with "
        "--max-bad=2 or, say, --max-bad=1%"
    )
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


def layout(top="", val="val", test=""):
    """Class folders in the folders of splits, around which may lie another one."""
    files = {}
    for split in filter(None, ("train", val, test)):
        files |= {f"{top}{split}/{name}": v for name, v in class_folders(4).items()}
    return files


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (layout(), {"train": "train", "validation": "val"}),
        (layout(val="valid"), {"train": "train", "validation": "valid"}),
        (layout(val="Validation"), {"train": "train", "validation": "Validation"}),
        (layout(val="test"), {"train": "train", "test": "test"}),
        (
            layout("x/", "val", "test") | {"x/notes/a.txt": b"", "words.txt": b""},
            {"train": "x/train", "validation": "x/val", "test": "x/test"},
        ),
    ],
)
@pytest.mark.parametrize("write", [write_folder, write_zip, write_tar])
def test_folders_of_splits_are_taken_as_such(
    tmp_path, capsys, monkeypatch, files, folders, write
):
    monkeypatch.chdir(tmp_path)
    data = write({write_zip: "d.zip", write_tar: "d.tar"}.get(write, "d"), files)
    status, out, _ = run(f"echo-jax prepare images {data} --out out", capsys)
    said = ", ".join(f"{data}/{path} is {split}" for split, path in folders.items())
    assert status == 0 and f"folders of splits: {said}" in out.splitlines()
    named = " ".join(f"{split}={data}/{path}" for split, path in folders.items())
    assert run(f"echo-jax prepare images {named} --out named", capsys)[0] == 0
    found = contents("out"), contents("named")
    for each in found:
        each.pop("dataset.json")
    assert found[0] == found[1] and {*read_info("out")["splits"]} == {*folders}
    # The same command finds its folder whole, and says so again.
    status, out, _ = run(f"echo-jax prepare images {data} --out out", capsys)
    assert status == 0 and f"folders of splits: {said}" in out.splitlines()


@pytest.mark.parametrize(
    ("command", "files", "says"),
    [
        # A class called test, and what may be a class or a split.
        ("images d", ["test/1.jpg", "cat/1.jpg"], "train: 2 examples in 2 classes"),
        ("images d --classes last", ["train/1.jpg", "cat/1.jpg"], "in 2 classes"),
        ("images train=d --classes first", ["train/1.jpg", "test/1.jpg"], "2 classes"),
        ("images d", ["train/1.jpg", "test/1.jpg"], "train=d --classes first"),
        ("images d", ["train/a/1.jpg", "val/a/1.jpg", "b/1.jpg"], "of several splits"),
        ("images d", ["train/a/1.jpg", "val/a/1.jpg", "1.jpg"], "of several splits"),
        ("images d", ["train/a/1.jpg", "val/a/1.jpg", "valid/a/1.jpg"], "several sp"),
        ("images train=d", ["train/a/1.jpg", "val/a/1.jpg"], "of several splits"),
        ("images d d", ["val/a/1.jpg", "test/a/1.jpg"], "of several splits"),
        (
            "images d --holdout 0.5",
            ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"],
            "makes a validation split, and one is given",
        ),
        # A list names the classes, so these need no folders.
        (
            "images d --classes of.csv",
            ["train/1.jpg", "train/2.jpg", "val/3.jpg"],
            "d/train is train, d/val is validation",
        ),
        # Nobody says what the images of a contest's test are.
        (
            "images d",
            ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "test/1.jpg"],
            "d/val is validation, d/test is left out, as nothing names its classes",
        ),
        (
            "text d --tokenizer bytes --block 2",
            ["train/a.txt", "val/a.txt"],
            "folders of splits: d/train is train, d/val is validation",
        ),
        ("text d", ["train/a.txt", "val/a.txt", "b.txt"], "of several splits"),
    ],
)
def test_what_may_be_a_split_or_a_class_is_not_guessed(
    tmp_path, capsys, monkeypatch, command, files, says
):
    monkeypatch.chdir(tmp_path)
    write_folder(
        "d", dict.fromkeys(files, make_image(0) if "jpg" in files[0] else b"abcdef")
    )
    Path("of.csv").write_text("1.jpg,a\n2.jpg,b\n3.jpg,a\n")
    status, out, err = run(f"echo-jax prepare {command} --out out", capsys)
    assert says in (err if status else out)
    assert Path("out").exists() == (status == 0)


def test_every_option_arrives(folder, capsys):
    status, _, _ = run(
        "echo-jax prepare text books --out out --tokenizer bytes --document line "
        "--block 7 --holdout 0.25 --shard-mb 0.1 --workers 1 --max-bad 1",
        capsys,
    )
    info = read_info("out")
    assert status == 0 and info["options"] == {
        "source": {"train": ["books"]},
        "holdout": 0.25,
        "shard_mb": 0.1,
        "kind": "text",
        "tokenizer": "bytes",
        "document": "line",
        "block": 7,
    }
    assert len(info["splits"]["train"]["shards"]) > 1


def test_a_tokenizer_is_used_again(folder, capsys):
    first = "echo-jax prepare text train.txt.xz --vocab 290 --out a"
    assert run(first, capsys)[0] == 0
    again = "echo-jax prepare text valid.txt.xz --out b --tokenizer-model "
    assert run(again + "a/tokenizer.model", capsys)[0] == 0
    assert contents("a")["tokenizer.model"] == contents("b")["tokenizer.model"]
    assert read_info("b")["vocab_size"] == 290


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("images photos", "the following arguments are required: --out"),
        ("images --out x", "the following arguments are required: SOURCE"),
        ("films photos --out x", "invalid choice: 'films'"),
        ("images photos --out x --colour red", "unknown option '--colour'"),
        ("images photos --out x --block 5", "unknown option '--block'"),
        ("images photos --out x --workers two", "invalid int value: 'two'"),
        ("images photos --out x --max-bad some", "--max-bad=some is neither a number"),
        ("images photos --out books", "--out=books holds '0.txt' and is no prepared"),
        ("images nothing --out x", "'nothing': there is no such file or folder"),
        ("images photos --out x --classes folder", "--classes=folder is none of auto"),
        ("images photos --out x --classes no.csv", "--classes=no.csv cannot be read"),
        ("images photos/cat --out x", "lies in a folder below its source"),
        ("text books --out x --document page", "invalid choice: 'page'"),
        ("coco instances.json --out x", "give one ANNOTATIONS:IMAGES"),
        ("verify photos", "'photos' is no prepared folder"),
        ("verify nothing", "'nothing' is no prepared folder"),
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
    write = workspace.Workspace.write_shard

    def stop(self, split, number, records, rest):
        if number == 1:
            raise KeyboardInterrupt
        return write(self, split, number, records, rest)

    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "write_shard", stop)
        status, out, err = run(command, capsys)
    assert (status, out) == (130, "")
    assert err.splitlines()[-2:] == [
        "echo-jax prepare: interrupted; run the same command to resume",
        f"  {command}",
    ]
    assert run(command, capsys)[0] == 0
    assert run(command.replace("my data", "at once"), capsys)[0] == 0
    assert contents("my data") == contents("at once")


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


def test_progress_shows_names_as_they_are(capsys, monkeypatch):
    """On a terminal as well: neither markup nor escape sequences."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name in ("[/]", "[red]a", "\x1b]0;b\x07"):
        with Countdown() as shown:
            shown.show(f"reading {name}", 0.5)
            shown.show(f"reading {name}", 0.6)
    err = capsys.readouterr().err
    assert "reading [/]" in err and "reading [red]a" in err
    assert "\x1b]0;" not in err


def test_progress_is_lines_with_the_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(countdown.time, "monotonic", lambda: now[0])
    with Countdown(line_every_s=10) as shown:
        for seconds, what, done in [
            (0, "reading", 0.1),
            (9, "reading", 0.2),
            (1, "reading", 0.3),
            (1, "writing", 0.5),
            (3, "writing", 0.6),
            (3601, "writing", 0.7),
            (9, "writing", 1.0),
        ]:
            now[0] += seconds
            shown.show(what, done)
    assert capsys.readouterr().err.splitlines() == [
        " 10%  reading",
        # 20 % in 10 s.
        " 30%  reading  ETA 0:00:35",
        " 50%  writing",
        # 20 % in 3604 s.
        " 70%  writing  ETA 1:30:06",
    ]
