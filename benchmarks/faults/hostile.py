"""F11: links, pipes, pickles and names that lead elsewhere, in files of strangers."""

import dataclasses
import io
import os
import pickle
import random
import shutil
import tarfile
from pathlib import Path

from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held
from benchmarks.faults.files import write_images
from benchmarks.faults.parsed_files import read_shard, some_shard
from benchmarks.faults.processes import Ended, command, isolated
from benchmarks.faults.runs import HOST, last_saved, source_of, trained, unbroken

_LIMIT_S = 120.0
_SEARCH = Path(__file__).parents[2] / "results" / "s3"
_SECRET = "aws_secret_access_key = 12345"
_FILES = ("config.json", "environment.json", "metrics.jsonl", "summary.json")
_REPORT = ("table.md", "figure.png", "figure.svg", "report.html")
_MAX_BYTES = 1 << 28  # of a run folder's file that is read


class _Home:
    """Files of the user's: nothing may change in them, nor show in what is made."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "kept" / "9").mkdir(parents=True)
        (folder / "kept" / "9" / "file").write_text("mine")
        (folder / ".bashrc").write_text("mine")
        (folder / "credentials").write_text(f'{{"updates": "{_SECRET}"}}')
        self.look()

    def look(self) -> None:
        """Takes the files as they are for what they have to be."""
        self._before = self._seen()

    def _seen(self) -> dict[Path, tuple[int, ...]]:
        found = {path: path.stat() for path in sorted(self.folder.rglob("*"))}
        return {
            path: (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            for path, stat in found.items()
        }

    def judge(self, ended: Ended, what: str, made: Path) -> Outcome:
        """How a trial ended: what has changed here, or is to be read elsewhere."""
        if self._seen() != self._before:
            return Outcome(Verdict.ESCAPED, f"{what}: changed files of the user's")
        if (self.folder / "owned").exists():
            return Outcome(Verdict.ESCAPED, f"{what}: ran code")
        shown = [ended.output.encode(), *map(_read, made.rglob("*"))]
        if any(_SECRET.encode() in content for content in shown):
            return Outcome(Verdict.ESCAPED, f"{what}: showed a file of the user's")
        if unsaid := ended.unsaid():
            return Outcome(Verdict.TRACEBACK, f"{what}: {unsaid}")
        return held(f"{what}: exit {ended.status}: {ended.line}")


def _read(path: Path) -> bytes:
    is_plain = path.is_file() and not path.is_symlink()
    return path.read_bytes() if is_plain and path.stat().st_size < _MAX_BYTES else b""


class _Pickled:
    """Makes a file where it is loaded."""

    def __init__(self, file: Path):
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._file),)


def _plant(path: Path, home: _Home, rng: random.Random) -> str:
    """Puts something in the place of a file or a folder; says what."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    what = rng.choice(
        ("link", "link to a folder", "no target", "pipe", "pickle", "big")
    )
    if what == "link":
        os.symlink(home.folder / rng.choice((".bashrc", "credentials")), path)
    elif what == "link to a folder":
        os.symlink(home.folder / "kept", path)
    elif what == "no target":
        os.symlink(home.folder / "made", path)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "pickle":
        path.write_bytes(pickle.dumps(_Pickled(home.folder / "owned")))
    else:
        with path.open("wb") as file:
            file.truncate(_MAX_BYTES + 1)
    return f"{path.name}: {what}"


def _linked(path: Path, home: _Home) -> str:
    """Puts a link to a file of the same content in the place of a file."""
    shutil.move(path, home.folder / path.name)
    os.symlink(home.folder / path.name, path)
    home.look()
    return f"{path.name}: link to a file like it"


def _stranger(bench: Bench) -> tuple[Path, _Home]:
    whole = unbroken(bench, HOST).folder
    return (
        Path(shutil.copytree(whole, bench.folder / "run")),
        _Home(bench.folder / "home"),
    )


def report(rng: random.Random, bench: Bench) -> Outcome:
    """Reports on a stranger's run folder."""
    folder, home = _stranger(bench)
    name = rng.choice([*_FILES, *_REPORT, *(f".{name}.new" for name in _REPORT)])
    what = _plant(folder / name, home, rng)
    ended = command(["report", str(folder)], bench.folder / "log.txt", _LIMIT_S)
    return home.judge(ended, what, folder)


def train(rng: random.Random, bench: Bench) -> Outcome:
    """Goes on in a stranger's run folder."""
    folder, home = _stranger(bench)
    (folder / "summary.json").unlink()
    saved = folder / "checkpoints" / str(last_saved(folder))
    inside = [path for path in sorted(saved.rglob("*")) if path != saved]
    names = [*(folder / name for name in _FILES), folder / "checkpoints", saved]
    path = rng.choice(names if rng.random() < 0.5 else inside)
    what = _plant(path, home, rng)
    ended = trained(bench, HOST, folder, more={"updates": HOST.updates + HOST.every})
    return home.judge(ended, what, folder)


def predict(rng: random.Random, bench: Bench) -> Outcome:
    """Uses the model in a stranger's run folder."""
    return _used(["predict", "--text", "It was", "--tokens", "2"], (), rng, bench)


def export(rng: random.Random, bench: Bench) -> Outcome:
    """Exports the model in a stranger's run folder, into that folder."""
    made = ("model.safetensors", ".model.safetensors.new")
    return _used(["export", "--to", "safetensors"], made, rng, bench)


def _used(
    words: list[str], made: tuple[str, ...], rng: random.Random, bench: Bench
) -> Outcome:
    """Gives a command a stranger's run folder, with something in it or in its place.

    Args:
      words: The command and its options.
      made: What it writes there.
      rng: Decides what lies where.
      bench: Where.
    """
    folder, home = _stranger(bench)
    saved = folder / "checkpoints" / str(last_saved(folder))
    inside = [path for path in sorted(saved.rglob("*")) if path != saved]
    names = ("config.json", "task.json", "checkpoints", *made)
    path = rng.choice([*(folder / name for name in names), saved, rng.choice(inside)])
    what = _plant(path, home, rng)
    argv = [words[0], str(folder), *words[1:]]
    return home.judge(command(argv, bench.folder / "log.txt", _LIMIT_S), what, folder)


def search(rng: random.Random, bench: Bench) -> Outcome:
    """Reports on a stranger's search."""
    folder = Path(shutil.copytree(_SEARCH, bench.folder / "search"))
    home = _Home(bench.folder / "home")
    trials = sorted((folder / "trials").iterdir())
    names = ("study.json", "trials", *_REPORT, *(f".{name}.new" for name in _REPORT))
    path = rng.choice([*(folder / name for name in names), *rng.sample(trials, 4)])
    what = _plant(path, home, rng)
    ended = command(["report", str(folder)], bench.folder / "log.txt", _LIMIT_S)
    return home.judge(ended, what, folder)


def shards(rng: random.Random, bench: Bench) -> Outcome:
    """Reads a stranger's shards of WebDataset."""
    folder = bench.folder / "data"
    folder.mkdir()
    (folder / "train-0.tar").write_bytes(bench.once("shard", some_shard))
    (folder / "classes.txt").write_text("ant\ncat\n")
    home = _Home(bench.folder / "home")
    names = ("train-0.tar", "train-1.tar", "classes.txt")
    what = _plant(folder / rng.choice(names), home, rng)
    read = isolated(read_shard, str(folder / "train-0.tar"), limit_s=_LIMIT_S)
    if read.verdict is not Verdict.HELD:
        return dataclasses.replace(read, note=f"{what}: {read.note}")
    return home.judge(Ended(0, read.note, writes=0), what, folder)


def prepared(rng: random.Random, bench: Bench) -> Outcome:
    """Reads a stranger's prepared folder."""

    def make(folder: Path) -> Path:
        from echo_jax.data.prepare import Settings, prepare_images

        source, out = write_images(folder / "photos", 8), folder / "out"
        prepare_images([str(source)], Settings(out=out))
        return out

    folder = bench.folder / "data"
    shutil.copytree(bench.once("prepared", make), folder)
    home = _Home(bench.folder / "home")
    path = rng.choice(sorted(folder.iterdir()))
    what = _linked(path, home) if rng.random() < 0.3 else _plant(path, home, rng)
    argv = ["prepare", "verify", str(folder)]
    ended = command(argv, bench.folder / "log.txt", _LIMIT_S)
    return home.judge(ended, what, folder)


def archive(rng: random.Random, bench: Bench) -> Outcome:
    """Prepares a stranger's archive."""
    home = _Home(bench.folder / "home")
    images = bench.once("images", lambda folder: write_images(folder / "photos", 6))
    members = [
        _named(path.relative_to(images).as_posix(), path.read_bytes())
        for path in sorted(images.rglob("*.jpg"))
    ]
    what, member, content = _evil(home, rng)
    members.insert(rng.randrange(len(members) + 1), (member, content))
    with tarfile.open(bench.folder / "a.tar", "w") as written:
        for member, content in members:
            written.addfile(member, io.BytesIO(content))
    out = bench.folder / "out"
    argv = ["prepare", "images", str(bench.folder / "a.tar"), "--out", str(out)]
    options = ["--max-bad", rng.choice(("0", "2"))]
    ended = command([*argv, *options], bench.folder / "log.txt", _LIMIT_S)
    return home.judge(ended, what, out)


def _named(name: str, content: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def _evil(home: _Home, rng: random.Random) -> tuple[str, tarfile.TarInfo, bytes]:
    """A member of an archive that should not be there."""
    what = rng.choice(("..", "absolute", "link", "hard link", "pipe", "huge", "name"))
    target = str(home.folder / rng.choice((".bashrc", "credentials")))
    if what == "..":
        return what, *_named(f"ant/../../home/{rng.choice(('.bashrc', 'new'))}", b"x")
    if what == "absolute":
        return what, *_named(target, b"x")
    if what == "name":
        return what, *_named("ant/\x1b]0;title\x07\n\u202e.jpg", b"x")
    member, content = _named("ant/evil.jpg")
    if what == "huge":
        content = b"\xff\xd8\xff" + bytes(1000)
        member.size = len(content)
        member.pax_headers = {"size": str(1 << 62)}
        return what, member, content
    kinds = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE}
    member.type, member.linkname = kinds.get(what, tarfile.FIFOTYPE), target
    return what, member, content


def tape(rng: random.Random, bench: Bench) -> Outcome:
    """Replays a stranger's log of decisions."""
    home = _Home(bench.folder / "home")
    file = bench.folder / "run" / "tape.json"
    file.parent.mkdir()
    what = _plant(file, home, rng)
    more = {"echo__replay": str(file), "echo__mode": "adaptive", "echo__factor": 1.0}
    more |= {"echo__order": "consecutive", "echo__where": "device"}
    folder = bench.folder / "replayed"
    source_of(bench)
    ended = trained(bench, HOST, folder, more=more)
    if not ended.status:
        return Outcome(Verdict.SILENT, f"{what}: was taken for a log")
    return home.judge(ended, what, bench.folder / "replayed")


F11 = Fault(
    name="F11",
    title="Links, pipes, pickles, files that are too large, names with ..",
    holds="refused in a sentence, or taken without leaving the folder",
    trials={
        "report": report,
        "train": train,
        "predict": predict,
        "export": export,
        "search": search,
        "shards of WebDataset": shards,
        "prepared folder": prepared,
        "archive": archive,
        "decision log": tape,
    },
    limit_s=3 * _LIMIT_S,
)
