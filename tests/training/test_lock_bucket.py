"""The lock of a run folder in a bucket: see `tests.test_lock`."""

import threading

import pytest
from lock_owners import OTHER_HOST, Looks, line_of_another_machine, line_of_the_dead
from tiny_workload import run

from echo_jax.files import lock
from echo_jax.files.folders import FolderError, run_folder
from echo_jax.files.lock import FolderInUseError, FolderLock

WORKDIR = "gs://bucket/runs/a"
LOCK = "runs/a/.lock"
LONG_S = 600  # What takes longer hangs, however busy the machine is.


@pytest.fixture
def looks(monkeypatch):
    """Waits in no time."""
    looks = Looks()
    monkeypatch.setattr(lock, "sleep", looks)
    return looks


def own():
    return FolderLock(run_folder(WORKDIR))


@pytest.mark.parametrize("content", [None, line_of_the_dead()])
def test_of_two_that_start_at_once_one_wins(bucket, looks, content):
    barrier, wins = threading.Barrier(2), []

    def contend():
        for number in range(10):
            if content and barrier.wait(LONG_S) == 0:
                bucket.put(LOCK, content)
            barrier.wait(LONG_S)
            try:
                with own():
                    wins.append(number)
                    barrier.wait(LONG_S)
            except FolderInUseError:
                barrier.wait(LONG_S)
            # Until the lock is gone again.
            barrier.wait(LONG_S)

    other = threading.Thread(target=contend)
    other.start()
    contend()
    other.join()
    assert wins == [*range(10)]
    assert not bucket.objects and not looks.number


def test_a_run_under_way_is_joined_by_no_other(bucket):
    refused = []

    def join(number):
        with pytest.raises(FolderInUseError, match=f"{WORKDIR} is in use by process"):
            run(WORKDIR)
        refused.append(number)

    run(WORKDIR, echo__factor=2.5, on_batch=join)
    assert len(refused) >= 12
    assert LOCK not in bucket.objects


def test_another_machine_is_waited_for_and_then_followed(bucket, looks, capsys):
    bucket.put(LOCK, line_of_another_machine())
    with own() as mine:
        mine.check()
        assert looks.number == 60
    assert f"process 4711 on {OTHER_HOST}" in capsys.readouterr().err


def test_another_machine_that_gives_a_sign_keeps_its_folder(bucket, looks):
    bucket.put(LOCK, line_of_another_machine())
    looks.on[59] = lambda: bucket.put(LOCK, line_of_another_machine())
    with pytest.raises(FolderInUseError, match=OTHER_HOST), own():
        pass
    assert OTHER_HOST.encode() in bucket.objects[LOCK][0]


def test_an_owner_gives_signs_of_life(bucket, monkeypatch):
    monkeypatch.setattr(lock, "_TOUCH_EVERY_S", 0.001)
    written = threading.Event()
    with own():
        bucket.on_put = lambda name: written.set()
        assert written.wait(LONG_S)
        assert {*bucket.objects} == {LOCK}


@pytest.mark.parametrize("content", [None, line_of_another_machine()])
def test_who_has_lost_a_folder_stops_and_leaves_it(bucket, monkeypatch, content):
    with own() as mine:
        del bucket.objects[LOCK]
        if content:
            bucket.put(LOCK, content)
        now = lock.monotonic()
        monkeypatch.setattr(lock, "monotonic", lambda: now + 61)
        with pytest.raises(FolderInUseError, match="so this"):
            mine.check()
    assert [kept for kept, _ in bucket.objects.values()] == [content] * bool(content)


@pytest.mark.parametrize("content", [b"\x1b]0;owned\x07", b"x" * 2**20])
def test_what_is_no_lock_is_refused_in_a_sentence(bucket, content):
    bucket.put(LOCK, content)
    with pytest.raises(FolderError) as refused, own():
        pass
    assert f"{WORKDIR}/.lock" in str(refused.value)
    assert str(refused.value).isprintable()
    assert bucket.objects[LOCK][0] == content


def test_a_bucket_that_cannot_be_written_is_named(bucket, monkeypatch):
    folder = run_folder(WORKDIR)
    monkeypatch.setattr(bucket, "is_closed", True)
    with pytest.raises(FolderError, match=f"{WORKDIR}/.lock cannot be used"):
        FolderLock(folder).__enter__()
