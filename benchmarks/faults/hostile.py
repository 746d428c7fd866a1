"""F6 and F11: files that a fuzzer or a stranger has made, read by commands."""

import gzip
import io
import json
import os
import pickle
import random
import re
import shutil
import tarfile
import zipfile
from functools import partial
from pathlib import Path

from benchmarks.faults import runs
from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held_if
from benchmarks.faults.commands import Ended

_MEMORY_BYTES = 1 << 30  # that a command may take beyond its imports
_HUGE_BYTES = 3 << 29  # more than that
_SECRET = "aws_secret_access_key = 12345"
# The file of each kind that is changed, and what `prepare` is given.
_FILES = {
    "JPEG": ("images/ant/000.jpg", "images images --max-bad 50%"),
    "PNG": ("images/cat/a.png", "images images --max-bad 50%"),
    "tar": ("a.tar", "images a.tar --max-bad 50%"),
    "tar.gz": ("a.tar.gz", "images a.tar.gz --max-bad 50%"),
    "zip": ("a.zip", "images a.zip --max-bad 50%"),
    "COCO": ("a.json", "coco a.json:images --max-bad 50%"),
    "text": ("a.txt", "text a.txt --tokenizer bytes --block 16"),
    "text.gz": ("a.txt.gz", "text a.txt.gz --tokenizer bytes --block 16"),
}


def write_files(folder: Path) -> Path:
    """Writes a valid file of each kind."""
    import cv2
    import numpy as np

    images = runs.write_images(folder / "images")
    cv2.imwrite(str(images / "cat" / "a.png"), np.eye(20, dtype=np.uint8))
    for kind in ("tar", "gztar", "zip"):
        shutil.make_archive(str(folder / "a"), kind, images)
    sizes = {"height": 12, "width": 10}
    names = enumerate(("ant/000.jpg", "cat/001.jpg"))
    box = {"category_id": 3, "bbox": [1, 2, 3.5, 4], "iscrowd": 0, "area": 14}
    coco = {
        "images": [{"id": n, "file_name": name, **sizes} for n, name in names],
        "annotations": [{"id": n, "image_id": n % 2, **box} for n in range(4)],
        "categories": [{"id": 3, "name": "cat"}],
    }
    (folder / "a.json").write_text(json.dumps(coco))
    text = b"It was a dark and stormy night; the rain fell in torrents.\n" * 20
    (folder / "a.txt").write_bytes(text)
    (folder / "a.txt.gz").write_bytes(gzip.compress(text))
    return folder


def _write_bombs(folder: Path) -> Path:
    """Writes small files that become larger than the memory."""
    write_files(folder)
    chunks = [bytes(1 << 24)] * (_HUGE_BYTES >> 24)
    with (
        zipfile.ZipFile(folder / "a.zip", "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("ant/huge.jpg", "w", force_zip64=True) as member,
    ):
        member.writelines(chunks)
    with gzip.open(folder / "a.txt.gz", "wb", compresslevel=9) as file:
        file.writelines(chunks)
    # The width and height of a PNG follow its first 16 bytes.
    png = (folder / "images" / "cat" / "a.png").read_bytes()
    huge = png[:16] + (60_000).to_bytes(4, "big") * 2 + png[24:]
    (folder / "images" / "cat" / "a.png").write_bytes(huge)
    return folder


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes a file as a fuzzer does, once to four times."""
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.randint(1, 64)
        before, part, after = data[:at], data[at : at + size], data[at + size :]
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in part[:4])
        number = rng.choice((b"-1", b"0", b"1e999", b"9" * 20, b"null", b"[]"))
        changes = (
            before,
            before + after,
            before + part * rng.randint(2, 20) + after,
            after + part + before,
            before + rng.randbytes(size) + after,
            before + b"\xff" * size + after,
            before + flipped + part[4:] + after,
            before + re.sub(rb"\d+", number, part + after, count=1),
        )
        data = rng.choice(changes)
    return data


def _prepare(kind: str, folder: Path, bench: Bench) -> tuple[Ended, Outcome]:
    """Prepares a file: it is taken, skipped, or refused by name within the memory."""
    name, words = _FILES[kind]
    work = runs.Prepare(kind, lambda _: folder, f"{words} --workers 1")
    ended = runs.done(work, bench, bench.folder / "out", memory_bytes=_MEMORY_BYTES)
    if outcome := ended.failed(kind, status=None):
        return ended, outcome
    # A bad member of an archive is named with its split.
    is_named = any(each in ended.output for each in (Path(name).name, "train"))
    note = f"{kind}: {ended.line}"
    return ended, held_if(is_named or not ended.status, note, Verdict.TRACEBACK)


def fuzz(kind: str, rng: random.Random, bench: Bench) -> Outcome:
    """Prepares a file that was changed as by a fuzzer."""
    name, words = _FILES[kind]
    # A file that is refused as it is would show nothing.
    valid = partial(Bench.once, name="valid", make=write_files)
    runs.unbroken(bench, runs.Prepare(kind, valid, words))
    folder = bench.folder / "files"
    shutil.copytree(valid(bench), folder)
    data = (folder / name).read_bytes()
    if kind == "text.gz" and rng.random() < 0.5:
        data = gzip.compress(mutate(gzip.decompress(data), rng))
    else:
        data = mutate(data, rng)
    (folder / name).write_bytes(data)
    return _prepare(kind, folder, bench)[1]


def bomb(rng: random.Random, bench: Bench) -> Outcome:
    """Prepares a small file that becomes larger than the memory."""
    kind = rng.choice(("zip", "PNG", "text.gz"))
    return _prepare(kind, bench.once("bombs", _write_bombs), bench)[1]


class _Home:
    """Files of the user, which no command may change, show or run."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        (folder / ".bashrc").write_text("mine")
        (folder / "credentials").write_text(_SECRET)
        self._before = self._seen()

    def _seen(self) -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for path in self.folder.rglob("*")}

    def escaped(self, ended: Ended, made: Path) -> bool:
        """Whether a command used these files."""
        files = [path for path in made.rglob("*") if path.is_file()]
        shown = [ended.output.encode(), *(path.read_bytes() for path in files)]
        is_shown = any(_SECRET.encode() in content for content in shown)
        return is_shown or self._seen() != self._before


def archive(rng: random.Random, bench: Bench) -> Outcome:
    """Prepares an archive with a member that does not belong there."""
    home, folder = _Home(bench.folder / "home"), bench.folder / "files"
    images = runs.write_images(folder / "images")
    target = str(home.folder / rng.choice((".bashrc", "credentials")))
    changes = {
        "..": {"name": "ant/../../home/new"},
        "absolute": {"name": target},
        "control characters": {"name": "ant/\x1b]0;title\x07\n\u202e.jpg"},
        "link": {"type": tarfile.SYMTYPE, "linkname": target},
        "hard link": {"type": tarfile.LNKTYPE, "linkname": target},
        "pipe": {"type": tarfile.FIFOTYPE},
        "size": {"pax_headers": {"size": str(1 << 62)}},
    }
    what = rng.choice([*changes])
    member, content = tarfile.TarInfo("ant/evil.jpg"), b"\xff\xd8\xff"
    for name, value in changes[what].items():
        setattr(member, name, value)
    member.size = len(content) if member.isreg() else 0
    with tarfile.open(folder / "a.tar", "w") as written:
        written.add(images / "cat", "cat")
        written.addfile(member, io.BytesIO(content))
        written.add(images / "ant", "ant")
    ended, outcome = _prepare("tar", folder, bench)
    if home.escaped(ended, bench.folder / "out"):
        return Outcome(Verdict.ESCAPED, what)
    return outcome


class _Pickled:
    """Makes a folder where it is loaded."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._folder),)


def pickled(pattern: str, rng: random.Random, bench: Bench) -> Outcome:
    """Gives a run a stranger's checkpoint, or decision log, that holds code."""
    home, folder = _Home(bench.folder / "home"), bench.folder / "run"
    shutil.copytree(runs.unbroken(bench, runs.ADAPTIVE).folder, folder)
    file = rng.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
    file.write_bytes(pickle.dumps(_Pickled(home.folder / "owned")))
    run, out = runs.ADAPTIVE.changed(updates=16), folder
    if file.parent == folder:
        run, out = runs.ADAPTIVE.replay(folder), bench.folder / "replayed"
    ended = runs.done(run, bench, out)
    if home.escaped(ended, folder):
        return Outcome(Verdict.ESCAPED, file.name)
    # Damage of a checkpoint is a matter of F4; no log may be taken for another.
    is_refused = ended.status != 0 or out == folder
    outcome = ended.failed(file.name, status=None)
    return outcome or held_if(is_refused, file.name, Verdict.SILENT)


F6 = Fault(
    name="F6",
    title="users' files that a fuzzer has changed",
    trials={kind: partial(fuzz, kind) for kind in _FILES},
)
F11 = Fault(
    name="F11",
    title="strangers' archives, bombs, checkpoints and decision logs",
    trials={
        "archive": archive,
        "bomb": bomb,
        "checkpoint": partial(pickled, "checkpoints/12/**/*"),
        "decision log": partial(pickled, "decisions.json"),
    },
)
