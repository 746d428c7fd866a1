"""Of all processes that want a folder, one has it, and the others say who."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from echo_jax import cli
from echo_jax.files import (
    LOCK_NAME,
    REPORT_LOCK_NAME,
    FolderError,
    FolderInUseError,
    FolderLock,
    run_folder,
)

ROOT = Path(__file__).parents[2]
ELSEWHERE = "elsewhere-7"
LONG_S = 600  # What takes longer hangs, however busy the machine is.


class OnDisk:
    """A folder on a disk, and its lock as another process sees it."""

    def __init__(self, folder):
        self.folder, self._path = run_folder(folder), folder / LOCK_NAME

    def put(self, content):
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_bytes(content)

    def found(self):
        """The content of the lock, and what changes with every version of it."""
        if not self._path.exists():
            return ()
        return self._path.read_bytes(), self._path.stat().st_mtime_ns

    def touch(self):
        os.utime(self._path, (1, 1))

    def remove(self):
        self._path.unlink()


class InBucket:
    """A folder in a bucket; see `OnDisk`."""

    def __init__(self, bucket):
        self.folder, self._bucket = run_folder("gs://bucket/runs/a"), bucket
        self._name = f"runs/a/{LOCK_NAME}"

    def put(self, content):
        self._bucket.put(self._name, content)

    def found(self):
        return self._bucket.objects.get(self._name, ())

    def touch(self):
        self.put(self.found()[0])

    def remove(self):
        del self._bucket.objects[self._name]


@pytest.fixture(params=[OnDisk, InBucket])
def place(request, tmp_path):
    if request.param is OnDisk:
        return OnDisk(tmp_path / "a")
    return InBucket(request.getfixturevalue("bucket"))


class Looks:
    """Stands for waiting: counts it, and does something at some times of it."""

    def __init__(self):
        self.number, self.on = 0, {}

    def __call__(self, seconds):
        self.number += 1
        self.on.get(self.number, lambda: None)()


@pytest.fixture
def looks(monkeypatch):
    monkeypatch.setattr(time, "sleep", looks := Looks())
    return looks


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Locks of a process that is gone, and of one on another machine."""
    folder = tmp_path_factory.mktemp("lines")
    with FolderLock(run_folder(folder)):
        line = (folder / LOCK_NAME).read_bytes()
    other = {"host": ELSEWHERE, "pid": "4711", "machine": "0" * 32}
    return [changed(line, began="1"), changed(line, **other)]


def changed(line, **fields):
    for name, value in fields.items():
        line = re.sub(rf"{name}=\S+".encode(), f"{name}={value}".encode(), line)
    return line


@pytest.mark.parametrize("is_left", [False, True])
def test_of_two_that_start_at_once_one_wins(place, looks, lines, is_left):
    barrier, wins = threading.Barrier(2), []

    def contend():
        for number in range(10):
            if is_left and barrier.wait(LONG_S) == 0:
                place.put(lines[0])
            barrier.wait(LONG_S)
            try:
                with FolderLock(place.folder):
                    wins.append(number)
                    barrier.wait(LONG_S)
            except FolderInUseError:
                barrier.wait(LONG_S)
            barrier.wait(LONG_S)  # Until the lock is gone again.

    other = threading.Thread(target=contend)
    other.start()
    contend()
    other.join()
    assert wins == [*range(10)] and not place.found()


def test_the_second_is_told_who_and_what_to_do(place):
    with FolderLock(place.folder):
        before = place.found()
        with pytest.raises(FolderInUseError) as refused, FolderLock(place.folder):
            pass
        assert place.found() == before
    said = str(refused.value)
    assert f"{place.folder} is in use by process {os.getpid()} on " in said
    assert "wait until that ends, or stop it, or name another" in said


HOLDER = """
import sys
from echo_jax.files import FolderLock, run_folder
with FolderLock(run_folder(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_is_followed_at_once(tmp_path, looks, lines):
    place, pipes = OnDisk(tmp_path), {"stdin": -1, "stdout": -1}
    holder = [sys.executable, "-c", HOLDER, str(tmp_path)]
    for is_reaped in (True, False):
        with subprocess.Popen(holder, **pipes) as process:
            assert process.stdout.readline() == b"locked\n"
            with pytest.raises(FolderInUseError, match=f"process {process.pid} on"):
                FolderLock(place.folder).__enter__()
            process.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            if is_reaped:
                process.wait()
            assert place.found()
            with FolderLock(place.folder) as mine:
                mine.check()
    # One whose process id is used again is no owner.
    place.put(lines[0])
    with FolderLock(place.folder):
        assert not looks.number


def test_another_machine_is_waited_for_and_then_followed(place, looks, lines, capsys):
    place.put(lines[1])
    told = []
    with FolderLock(place.folder, on_wait=lambda *what: told.append(what)) as mine:
        mine.check()
        assert ELSEWHERE.encode() not in place.found()[0]
    assert looks.number == len(told) == 60
    assert all(f"process 4711 on {ELSEWHERE}" in what for what, _ in told)
    assert [done for _, done in told] == [number / 60 for number in range(60)]
    place.put(lines[1])
    with FolderLock(place.folder):
        pass
    captured = capsys.readouterr()
    assert f"still in use by process 4711 on {ELSEWHERE}" in captured.err
    assert not captured.out


def test_another_machine_that_gives_a_sign_keeps_its_folder(place, looks, lines):
    place.put(lines[1])
    looks.on[59] = place.touch
    with pytest.raises(FolderInUseError, match=ELSEWHERE), FolderLock(place.folder):
        pass
    assert looks.number == 59 and place.found()[0] == lines[1]


def test_all_folders_are_had_or_none(tmp_path, looks, lines):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        OnDisk(folder).put(lines[1])
    with FolderLock(*map(run_folder, folders)):
        assert looks.number == 60  # Together.
    with FolderLock(run_folder(tmp_path / "held")):
        both = [run_folder(tmp_path / "free"), run_folder(tmp_path / "held")]
        with pytest.raises(FolderInUseError, match="held is in use"), FolderLock(*both):
            pass
    assert not (tmp_path / "free").exists()


def test_nothing_is_left_behind(tmp_path):
    def own(name):
        return FolderLock(run_folder(tmp_path / name))

    with pytest.raises(KeyboardInterrupt), own("new/a"):
        raise KeyboardInterrupt
    assert not (tmp_path / "new" / "a").exists()
    with own("new"):
        (tmp_path / "new" / "file").touch()
    (tmp_path / "empty").mkdir()
    with own("empty"):
        pass
    assert os.listdir(tmp_path / "new") == ["file"]
    assert os.listdir(tmp_path / "empty") == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_who_has_lost_a_folder_stops_and_leaves_it(place, monkeypatch, lines, is_taken):
    with FolderLock(place.folder) as mine:
        place.remove()
        if is_taken:
            place.put(lines[1])
        mine.check()  # Asks nobody: it has just given a sign.
        now = time.monotonic()  # As if it had been suspended.
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        message = ELSEWHERE if is_taken else "the lock of .* was removed, so this"
        with pytest.raises(FolderInUseError, match=message):
            mine.check()
    assert place.found()[:1] == ((lines[1],) if is_taken else ())


def test_an_owner_gives_signs_of_life(place, monkeypatch):
    monkeypatch.setattr("echo_jax.files.lock._TOUCH_EVERY_S", 0.001)
    with FolderLock(place.folder):
        content, version = place.found()
        until = time.monotonic() + LONG_S
        while place.found()[1] == version and time.monotonic() < until:
            time.sleep(0.001)
        assert place.found()[0] == content and place.found()[1] != version


@pytest.mark.parametrize(
    "change",
    [
        lambda line: b"",
        lambda line: b"\xff\0{}",
        lambda line: b"x" * 2**20,
        lambda line: changed(line, host="\x1b]0;owned\x07"),
        lambda line: changed(line, pid="0"),
    ],
    ids=["empty", "garbage", "large", "escapes", "group"],
)
def test_what_is_no_lock_is_refused_in_a_sentence(place, looks, lines, change):
    place.put(change(lines[1]))
    before = place.found()
    with pytest.raises(FolderError) as refused, FolderLock(place.folder):
        pass
    assert str(place.folder / LOCK_NAME) in str(refused.value)
    assert str(refused.value).isprintable() and place.found() == before


MADE = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling": lambda path: path.symlink_to(path.parent.parent / "planted"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_no_file_is_no_lock(tmp_path, kind):
    path = tmp_path / "a" / LOCK_NAME
    path.parent.mkdir()
    MADE[kind](path)
    before = os.lstat(path)
    with (
        pytest.raises(FolderError, match=str(path)),
        FolderLock(run_folder(tmp_path / "a")),
    ):
        pass
    assert os.lstat(path).st_ino == before.st_ino and os.listdir(tmp_path) == ["a"]


def test_a_folder_is_locked_where_the_disk_has_neither_links_nor_locks(
    tmp_path, looks, monkeypatch, lines
):
    def refuse(*args, **options):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    new, left, late = (OnDisk(tmp_path / name) for name in "abc")
    with FolderLock(new.folder):
        assert looks.number  # Until all who write at once have written.
        with pytest.raises(FolderInUseError), FolderLock(new.folder):
            pass
    assert not (tmp_path / "a").exists()
    left.put(lines[0])
    with FolderLock(left.folder):
        pass
    # Another process writes last.
    looks.number, looks.on = 0, {1: lambda: late.put(lines[1]), 9: late.touch}
    with pytest.raises(FolderInUseError, match=ELSEWHERE), FolderLock(late.folder):
        pass


TRAIN = ["train", "--config", f"{ROOT}/configs/lm.py:tiny", "--workdir"]
STUDY = ["study", "--config", f"{ROOT}/configs/quickstart.py:tiny"]
STUDY += ["--config.storage_ratio=0", "--workdir"]
REPORT = ["report", f"{ROOT}/results/fed", "--workdir"]


@pytest.mark.parametrize(
    ("command", "name"),
    [(TRAIN, LOCK_NAME), (STUDY, LOCK_NAME), (REPORT, REPORT_LOCK_NAME)],
    ids=["train", "study", "report"],
)
def test_a_command_is_refused_in_one_line_and_writes_nothing(
    tmp_path, capsys, command, name
):
    folder = tmp_path / "x"
    with FolderLock(run_folder(folder), name=name):
        assert cli.main([*command, str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{folder} is in use by process {os.getpid()} on" in line
        assert os.listdir(folder) == [name]


def test_a_folder_in_training_is_reported_on_and_an_arm_is_in_no_study(
    tmp_path, capsys
):
    with FolderLock(run_folder(tmp_path)):
        assert cli.main([*REPORT, str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    capsys.readouterr()
    with FolderLock(run_folder(tmp_path / "x" / "spread")):
        assert cli.main([*STUDY, str(tmp_path / "x")]) == 2
    assert "spread is in use by process" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
