"""Of all processes that want a folder, one has it, and the others say who."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lock_owners import (
    OTHER_HOST,
    Looks,
    contend,
    line_of_another_machine,
    line_of_the_dead,
)

from echo_jax import cli, runs
from echo_jax.config.flags import load_with_flags
from echo_jax.files import lock
from echo_jax.files.folders import FolderError, run_folder
from echo_jax.files.lock import (
    LOCK_NAME,
    REPORT_LOCK_NAME,
    FolderInUseError,
    FolderLock,
)
from echo_jax.files.lock_file import DiskFile

LONG_S = 600  # What takes longer hangs, however busy the machine is.
ROOT = Path(__file__).parents[1]
HOLDER = """
import sys
from echo_jax.files.folders import run_folder
from echo_jax.files.lock import FolderLock
with FolderLock(*map(run_folder, sys.argv[2:]), name=sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def holder_of(*folders, name=LOCK_NAME):
    """Starts a process that holds folders; it has them when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name, *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    return process


@pytest.fixture
def held(tmp_path):
    """A folder, and the process that has it."""
    folder = tmp_path / "held"
    with holder_of(folder) as process:
        yield folder, process
        process.kill()


@pytest.fixture
def looks(monkeypatch):
    """Waits in no time."""
    looks = Looks()
    monkeypatch.setattr(lock, "sleep", looks)
    return looks


def taken(folder, content):
    folder.mkdir()
    (folder / LOCK_NAME).write_bytes(content)
    return folder


def own(folder, **options):
    return FolderLock(run_folder(folder), **options)


@pytest.mark.parametrize("content", [None, line_of_the_dead()])
def test_of_two_processes_that_start_at_once_one_wins(tmp_path, content):
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders if content else ():
        taken(folder, content)
    spawn = multiprocessing.get_context("spawn")
    barrier, wins = spawn.Barrier(2), [spawn.Array("i", len(folders)) for _ in "ab"]
    processes = [
        spawn.Process(target=contend, args=(folders, barrier, mine, LONG_S))
        for mine in wins
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONG_S)
        assert process.exitcode == 0
    assert [sum(both) for both in zip(*wins, strict=True)] == [1] * len(folders)


def test_the_second_is_told_who_and_what_to_do(held):
    folder, process = held
    before = os.listdir(folder)
    with pytest.raises(FolderInUseError) as refused, own(folder):
        pass
    assert f"{folder} is in use by process {process.pid} on " in str(refused.value)
    assert "wait until that ends, or stop it, or name another" in str(refused.value)
    assert os.listdir(folder) == before


def test_one_process_has_a_folder_once(tmp_path):
    with own(tmp_path), pytest.raises(FolderInUseError), own(tmp_path):
        pass
    with own(tmp_path):
        pass


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_killed_owner_is_followed_at_once(held, looks, is_reaped):
    folder, process = held
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        process.wait()
    assert (folder / LOCK_NAME).exists()
    with own(folder) as mine:
        mine.check()
    assert not looks.number


def test_a_process_id_that_is_used_again_is_no_owner(tmp_path, looks):
    folder = taken(tmp_path / "a", line_of_the_dead())
    with own(folder):
        assert not looks.number


def test_another_machine_is_waited_for_and_then_followed(tmp_path, looks, capsys):
    folder = taken(tmp_path / "a", line_of_another_machine())
    told = []
    with own(folder, on_wait=lambda *what: told.append(what)) as mine:
        mine.check()
        assert OTHER_HOST.encode() not in (folder / LOCK_NAME).read_bytes()
    assert looks.number == len(told) == 60
    assert all(f"process 4711 on {OTHER_HOST}" in what for what, _ in told)
    assert [done for _, done in told] == [number / 60 for number in range(60)]


def test_the_wait_is_shown_on_standard_error(tmp_path, looks, capsys):
    with own(taken(tmp_path / "a", line_of_another_machine())):
        pass
    captured = capsys.readouterr()
    assert f"still in use by process 4711 on {OTHER_HOST}" in captured.err
    assert not captured.out


def test_another_machine_that_gives_a_sign_keeps_its_folder(tmp_path, looks):
    folder = taken(tmp_path / "a", line_of_another_machine())
    looks.on[59] = lambda: os.utime(folder / LOCK_NAME, (1, 1))
    with pytest.raises(FolderInUseError, match=OTHER_HOST), own(folder):
        pass
    assert looks.number == 59
    assert OTHER_HOST.encode() in (folder / LOCK_NAME).read_bytes()


def test_the_folders_of_another_machine_are_waited_for_together(tmp_path, looks):
    line = line_of_another_machine()
    folders = [run_folder(taken(tmp_path / name, line)) for name in "abc"]
    with FolderLock(*folders):
        assert looks.number == 60


def test_all_folders_are_had_or_none(held, tmp_path):
    folder, _ = held
    both = [run_folder(tmp_path / "free"), run_folder(folder)]
    with pytest.raises(FolderInUseError, match="held is in use"), FolderLock(*both):
        pass
    assert not (tmp_path / "free").exists()


def test_nothing_is_left_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), own(tmp_path / "new" / "a"):
        raise KeyboardInterrupt
    assert not (tmp_path / "new" / "a").exists()
    with own(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert os.listdir(tmp_path / "new") == ["file"]
    (tmp_path / "empty").mkdir()
    with own(tmp_path / "empty"):
        pass
    assert os.listdir(tmp_path / "empty") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "the lock of .* was removed"), (line_of_another_machine(), OTHER_HOST)],
)
def test_who_has_lost_a_folder_stops_and_leaves_it(
    tmp_path, monkeypatch, content, message
):
    path = tmp_path / LOCK_NAME
    with own(tmp_path) as mine:
        path.unlink()
        if content:
            path.write_bytes(content)
        mine.check()  # Asks nobody: it has just given a sign.
        # As if it had been suspended.
        now = lock.monotonic()
        monkeypatch.setattr(lock, "monotonic", lambda: now + 61)
        with pytest.raises(FolderInUseError, match=message):
            mine.check()
    assert path.exists() == bool(content)
    assert not content or path.read_bytes() == content


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    touch, touched = DiskFile.touch, threading.Event()

    def seen(*args):
        touch(*args)
        touched.set()

    monkeypatch.setattr(DiskFile, "touch", seen)
    monkeypatch.setattr(lock, "_TOUCH_EVERY_S", 0.001)
    with own(tmp_path):
        os.utime(tmp_path / LOCK_NAME, (1, 1))
        touched.clear()
        assert touched.wait(LONG_S)
        assert (tmp_path / LOCK_NAME).stat().st_mtime > 1


HOSTILE = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling": lambda path: path.symlink_to(path.parent.parent / "planted"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "empty": Path.touch,
    "garbage": lambda path: path.write_bytes(b"\xff\0{}"),
    "large": lambda path: path.write_bytes(b"x" * 2**20),
    "escapes": lambda path: path.write_bytes(
        line_of_another_machine().replace(b"elsewhere", b"\x1b]0;owned\x07\x1b[2J")
    ),
    "lines": lambda path: path.write_bytes(2 * line_of_another_machine()),
    "group": lambda path: path.write_bytes(
        line_of_another_machine().replace(b"pid=4711", b"pid=0")
    ),
}


def about(path):
    """What only a change changes."""
    found = os.lstat(path)
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("plant", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_lock_is_refused_in_a_sentence(tmp_path, looks, plant):
    folder = tmp_path / "stranger"
    folder.mkdir()
    plant(folder / LOCK_NAME)
    before = about(folder / LOCK_NAME)
    with pytest.raises(FolderError) as refused, own(folder):
        pass
    assert str(folder / LOCK_NAME) in str(refused.value)
    assert str(refused.value).isprintable()
    assert about(folder / LOCK_NAME) == before
    assert os.listdir(tmp_path) == ["stranger"]


def test_a_folder_is_locked_where_the_disk_has_neither_links_nor_locks(
    tmp_path, looks, monkeypatch
):
    def refuse(*args, **options):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with own(tmp_path / "a"):
        assert looks.number  # Until all who write at once have written.
        with pytest.raises(FolderInUseError), own(tmp_path / "a"):
            pass
    assert not (tmp_path / "a").exists()
    with own(taken(tmp_path / "b", line_of_the_dead())):
        pass
    # Another process writes last.
    late = line_of_another_machine()
    looks.number = 0
    looks.on[1] = lambda: (tmp_path / "c" / LOCK_NAME).write_bytes(late)
    looks.on[9] = lambda: os.utime(tmp_path / "c" / LOCK_NAME, (1, 1))
    with pytest.raises(FolderInUseError, match=OTHER_HOST), own(tmp_path / "c"):
        pass


LM = ["--config", f"{ROOT}/configs/lm.py:tiny"]
STUDY = ["--config", f"{ROOT}/configs/quickstart.py:tiny", "--config.storage_ratio=0"]
TEXT = ["text", f"{ROOT}/README.md", "--tokenizer", "bytes"]
RUN = str(ROOT / "results" / "fed")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train", *LM, "--workdir"], LOCK_NAME),
        (["study", *STUDY, "--workdir"], LOCK_NAME),
        (["prepare", *TEXT, "--out"], LOCK_NAME),
        (["report", RUN, "--workdir"], REPORT_LOCK_NAME),
    ],
    ids=lambda value: value[0],
)
def test_a_command_is_refused_in_one_line_and_writes_nothing(
    tmp_path, capsys, command, name
):
    with holder_of(tmp_path / "x", name=name) as process:
        assert cli.main([*command, str(tmp_path / "x")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / 'x'} is in use by process {process.pid} on" in line
        assert os.listdir(tmp_path / "x") == [name]
        process.kill()


def test_what_is_trained_can_be_reported_on(held):
    folder, _ = held
    assert cli.main(["report", RUN, "--workdir", str(folder)]) == 0
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_a_study_has_the_folders_of_all_its_arms(tmp_path, monkeypatch, capsys):
    trained = []

    def train(config, workload, workdir, lock):
        lock.check()
        # By hand, in the folder of an arm that is trained later or was before.
        for other in ("baseline", "spread"):
            argv = ["train", *LM, "--workdir", str(tmp_path / other)]
            trained.append((workdir.name, cli.main(argv)))
        assert f"is in use by process {os.getpid()}" in capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr("echo_jax.arms.train_checked", train)
        runs.run_study(load_with_flags(STUDY[1], STUDY[2:]), tmp_path)
    arms = ["baseline", "batch_echo", "shuffle", "spread"]
    assert trained == [(arm, 2) for arm in arms for _ in range(2)]


def test_a_study_does_not_begin_where_an_arm_is_trained_by_hand(tmp_path, capsys):
    with holder_of(tmp_path / "x" / "spread") as process:
        assert cli.main(["study", *STUDY, "--workdir", str(tmp_path / "x")]) == 2
        process.kill()
    assert "spread is in use by process" in capsys.readouterr().err
    assert os.listdir(tmp_path / "x") == ["spread"]
