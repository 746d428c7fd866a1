"""Of all processes that want a folder, one has it, and the others say who."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
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
        """The content of the lock; in a bucket, its generation too."""
        return (self._path.read_bytes(),) if self._path.exists() else ()

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


@pytest.fixture
def remote(bucket):
    return InBucket(bucket)


@pytest.fixture(params=[OnDisk, InBucket])
def place(request, tmp_path):
    if request.param is OnDisk:
        return OnDisk(tmp_path / "a")
    return request.getfixturevalue("remote")


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
def line(tmp_path_factory):
    """The lock of a process on another machine."""
    folder = tmp_path_factory.mktemp("line")
    with FolderLock(run_folder(folder)):
        line = (folder / LOCK_NAME).read_bytes()
    return line.replace(f"{os.getpid()} on".encode(), b"4711 on " + ELSEWHERE.encode())


HOLDER = """
import os, sys
from echo_jax.files import FolderInUseError, FolderLock, run_folder
while sys.stdin.readline():
    try:
        with FolderLock(run_folder(sys.argv[1])):
            print("has it", flush=True)
            if sys.stdin.readline() == "fork\\n":
                if not os.fork():
                    print("forked", flush=True)
                sys.stdin.read()
    except FolderInUseError as error:
        print(error, flush=True)
        sys.stdin.readline()
    print("ended", flush=True)
"""


@pytest.fixture
def holders(tmp_path):
    """Two processes that each take the folder, and let it go, as they are told."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)]
    with contextlib.ExitStack() as stack:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        opened = [subprocess.Popen(command, **options) for _ in range(2)]
        yield [stack.enter_context(process) for process in opened]


def tell(processes, line):
    for process in processes:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return sorted(process.stdout.readline() for process in processes)


def test_of_two_processes_that_start_at_once_one_wins(tmp_path, holders, line):
    place = OnDisk(tmp_path)
    for is_left in 5 * [False, True]:
        if is_left:
            place.put(line)
        refused, has = tell(holders, "take")
        assert f"{tmp_path} is in use by" in refused and has == "has it\n"
        assert tell(holders, "end") == 2 * ["ended\n"] and not place.found()


def test_a_killed_owner_is_followed_at_once(tmp_path, looks, holders):
    place, owner = OnDisk(tmp_path), holders[0]
    tell([owner], "take")
    before = place.found()
    with pytest.raises(FolderInUseError) as refused, FolderLock(place.folder):
        pass
    said = f"{tmp_path} is in use by process {owner.pid} on \\S+, since \\S+ \\S+ UTC; "
    said += "wait until that ends, or stop it, or name another folder"
    assert re.fullmatch(said, str(refused.value)) and place.found() == before
    tell([owner], "fork")  # A child that lives on does not keep the lock.
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    assert place.found() == before
    with FolderLock(place.folder) as mine:
        mine.check()
    place.put(b"")  # It was killed before it wrote its line.
    with FolderLock(place.folder):
        assert not looks.number


def test_only_a_silent_owner_in_a_bucket_is_followed(remote, looks, line):
    remote.put(line)
    with FolderLock(remote.folder) as mine:
        mine.check()
        assert ELSEWHERE.encode() not in remote.found()[0]
    assert looks.number == 6 and not remote.found()
    remote.put(line)
    for sign in (3, 6):
        looks.number, looks.on = 0, {sign: remote.touch}
        in_use = pytest.raises(FolderInUseError, match=f"process 4711 on {ELSEWHERE}")
        with in_use, FolderLock(remote.folder):
            pass
        assert looks.number == sign and remote.found()[0] == line
    looks.number, looks.on = 0, {2: remote.remove}  # It ends.
    with FolderLock(remote.folder):
        assert looks.number == 6


def test_of_two_that_follow_a_silent_owner_in_a_bucket_one_wins(
    remote, monkeypatch, line
):
    remote.put(line)
    both, ends = threading.Barrier(2), []
    monkeypatch.setattr(time, "sleep", lambda seconds: both.wait(LONG_S))

    def take():
        try:
            with FolderLock(remote.folder):
                both.wait(LONG_S)  # Holds it until the other one is refused.
                ends.append("had it")
        except FolderInUseError:
            ends.append("refused")
            both.wait(LONG_S)

    started = [threading.Thread(target=take) for _ in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert ends == ["refused", "had it"] and not remote.found()


def test_all_folders_are_had_or_none(tmp_path, bucket, looks, line):
    names = [f"runs/{name}" for name in "abc"]
    folders = [run_folder(f"gs://bucket/{name}") for name in names]
    for name in names[1:]:
        bucket.put(f"{name}/{LOCK_NAME}", line)
    with FolderLock(*folders):
        assert looks.number == 6  # Together.
    bucket.put(f"{names[1]}/{LOCK_NAME}", line)

    def interrupt():
        raise KeyboardInterrupt

    looks.on[9] = interrupt
    with pytest.raises(KeyboardInterrupt), FolderLock(*folders):
        pass
    assert list(bucket.objects) == [f"{names[1]}/{LOCK_NAME}"]
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
    with own("new"):
        (tmp_path / "new" / "file").touch()
    assert os.listdir(tmp_path / "new") == ["file"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_who_has_lost_a_folder_in_a_bucket_stops_and_leaves_it(
    remote, monkeypatch, line, is_taken
):
    with FolderLock(remote.folder) as mine:
        remote.remove()
        if is_taken:
            remote.put(line)
        mine.check()  # Asks nobody: it has just given a sign.
        clock = itertools.count(time.monotonic() + 61, 61)  # It is suspended.
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        message = ELSEWHERE if is_taken else "is in use by another; wait"
        for _ in range(2):
            with pytest.raises(FolderInUseError, match=message):
                mine.check()
    assert remote.found()[:1] == ((line,) if is_taken else ())


def test_an_owner_in_a_bucket_gives_signs_of_life(remote, monkeypatch):
    monkeypatch.setattr("echo_jax.files.lock._RENEW_EVERY_S", 0.001)
    with FolderLock(remote.folder):
        content, version = remote.found()
        until = time.monotonic() + LONG_S
        while remote.found()[1] == version and time.monotonic() < until:
            time.sleep(0.001)
        assert remote.found()[0] == content and remote.found()[1] != version


def test_whatever_a_lock_holds_is_said_in_a_line(tmp_path, holders):
    tell(holders[:1], "take")
    for content in (b"\xff\0{}", b"x" * 2**20, b"\x1b]0;owned\x07"):
        (tmp_path / LOCK_NAME).write_bytes(content)
        with (
            pytest.raises(FolderInUseError) as refused,
            FolderLock(run_folder(tmp_path)),
        ):
            pass
        assert str(refused.value).isprintable() and len(str(refused.value)) < 500


def test_a_disk_without_flock_is_refused(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    refused = pytest.raises(FolderError, match="has no flock; mount it with flock, or")
    with refused, FolderLock(run_folder(tmp_path / "a")):
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
    assert not (tmp_path / "x" / "study.json").exists()
