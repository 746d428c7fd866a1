"""Decision logs: what they hold comes back, and nothing else is read."""

import base64
import contextlib
import io
import json
import os
import pickle
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.echo import decision_log
from echo_jax.echo.decision_log import DecisionLog, Recorder
from echo_jax.echo.plans.adaptive import AdaptivePlan
from echo_jax.echo.spec import AdaptiveSpec


def record(packed, count, **changes):
    bits = base64.b64encode(zlib.compress(packed)).decode()
    return {"version": 1, "decisions": count, "bits": bits} | changes


def test_the_record_is_the_packed_bits():
    found = DecisionLog(
        [True, False, False, True, False, False, False, False, True]
    ).to_json()
    assert found["version"] == 1
    assert found["decisions"] == 9
    assert zlib.decompress(base64.b64decode(found["bits"])) == bytes([0x90, 0x80])


@given(st.lists(st.booleans(), max_size=70))
def test_a_log_comes_back_from_json(decisions):
    log = DecisionLog(decisions)
    again = DecisionLog.from_json(json.loads(json.dumps(log.to_json())))
    assert again == log
    assert hash(again) == hash(log)
    assert list(again) == decisions


def test_a_log_is_a_sequence_that_never_changes():
    log = DecisionLog([True, False, True])
    assert (len(log), log[0], log[-2], log[1:]) == (
        3,
        True,
        False,
        DecisionLog([False, True]),
    )
    assert [type(decision) for decision in (log[0], *log)] == [bool] * 4
    assert log != [True, False, True]
    assert log in {DecisionLog(iter([1, 0, 1]))}
    assert pickle.loads(pickle.dumps(log)) == log
    with pytest.raises(IndexError):
        log[3]
    with pytest.raises(TypeError):
        log[0] = False


@given(st.lists(st.booleans(), max_size=9), st.lists(st.booleans(), max_size=9))
def test_a_log_starts_with_another(one, two):
    assert DecisionLog(one + two).starts_with(DecisionLog(one))
    starts = one[: len(two)] == two
    assert DecisionLog(one).starts_with(DecisionLog(two)) == starts


@given(st.lists(st.booleans(), max_size=70), st.sets(st.integers(0, 70)))
def test_a_recorder_is_a_log_at_every_length(decisions, asked):
    """Whenever it is asked, and whenever it was asked before."""
    recorder = Recorder()
    for number in range(len(decisions) + 1):
        log = DecisionLog(decisions[:number])
        assert (len(recorder), recorder.log) == (number, log)
        if number in asked or number == len(decisions):
            record = json.loads(json.dumps(recorder.to_json()))
            assert DecisionLog.from_json(record) == log
        if number < len(decisions):
            recorder.append(decisions[number])


def test_a_log_that_was_given_out_is_not_changed_by_its_recorder():
    recorder = Recorder()
    recorder.append(True)
    log, record = recorder.log, recorder.to_json()
    recorder.append(False)
    assert list(log) == list(DecisionLog.from_json(record)) == [True]


def test_a_long_random_log_is_recorded_as_it_is():
    decisions = (np.random.default_rng(0).random(300_000) < 0.4).tolist()
    recorder = Recorder()
    for number, decision in enumerate(decisions):
        recorder.append(decision)
        if number % 50_001 == 0:
            recorder.to_json()
    record = recorder.to_json()
    assert DecisionLog.from_json(record) == DecisionLog(decisions)
    whole = DecisionLog(decisions).to_json()
    assert len(record["bits"]) <= len(whole["bits"]) + 8


def test_asking_a_recorder_compresses_new_bits_alone(monkeypatch):
    """2000 decisions, and a record after each: not 2000 * 1000 / 8 bytes."""
    compressed = []

    class Watched:
        def __init__(self, stream):
            self._stream = stream

        def copy(self):
            return Watched(self._stream.copy())

        def flush(self):
            return self._stream.flush()

        def compress(self, content):
            compressed.append(len(content))
            return self._stream.compress(content)

    real = zlib.compressobj
    monkeypatch.setattr(
        decision_log.zlib, "compressobj", lambda level: Watched(real(level))
    )
    recorder = Recorder()
    for number in range(2000):
        recorder.append(number % 3 == 0)
        recorder.to_json()
    # Every whole byte once, and the bits after the last one each time.
    assert sum(compressed) <= 2000 // 8 + 2000


def test_regular_logs_are_small():
    assert (
        len(json.dumps(DecisionLog([True, False, False, False] * 250_000).to_json()))
        < 1000
    )


def test_a_log_is_full_some_day(monkeypatch):
    monkeypatch.setattr(decision_log, "_MAX_DECISIONS", 2)
    recorder = Recorder()
    recorder.append(True)
    recorder.append(True)
    with pytest.raises(ValueError, match="at most 2 decisions"):
        recorder.append(True)
    assert list(recorder.log) == [True, True]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "not the record"),
        ([], "not the record"),
        ({"version": 1, "decisions": 0}, "not the record"),
        (record(b"", 0) | {"more": 1}, "not the record"),
        (record(b"", 0, version=2), "version 2 is unknown"),
        (record(b"", 0, version=True), "version True is unknown"),
        (record(b"", 0, version="9" * 10**6), "is unknown"),
        (record(b"\x80", 1, decisions=-1), "-1 decisions is refused"),
        (record(b"\x80", 1, decisions=1.0), r"1\.0 decisions is refused"),
        (record(b"\x80", 1, decisions=True), "True decisions is refused"),
        (record(b"\x80", 1, decisions=1 << 29), "decisions is refused"),
        (record(b"\x80", 1, bits=7), "must be text"),
        (record(b"\x80", 1, bits="A" * 10_000), "at most"),
        (record(b"\x80", 1, bits="ä"), "cannot be decoded"),
        (record(b"\x80", 1, bits="AAA"), "cannot be decoded"),
        (record(b"\x80", 1, bits="AAAA"), "cannot be decoded"),
        (record(b"\x80", 9), "exactly the 2 bytes"),
        (record(b"\x80\x80", 8), "exactly the 1 bytes"),
        (record(b"\x80", 0), "exactly the 0 bytes"),
        (record(b"\x81", 7), "bits set after"),
    ],
)
def test_anything_else_is_refused(bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        DecisionLog.from_json(bad)
    assert len(str(caught.value)) < 300


def test_a_truncated_or_continued_stream_is_refused():
    stream = zlib.compress(bytes(range(100)))
    for changed in (stream[:-1], stream + b"x", stream + stream[:20]):
        bits = base64.b64encode(changed).decode()
        with pytest.raises(ValueError, match="decode"):
            DecisionLog.from_json({"version": 1, "decisions": 800, "bits": bits})


def test_a_bomb_is_not_inflated(inflated):
    """50 MB of zeros in 50 kB, said to be 400 000 decisions: 50 kB are decoded."""
    bomb = record(bytes(50_000_000), 400_000)
    with pytest.raises(ValueError, match="exactly the 50000 bytes"):
        DecisionLog.from_json(bomb)
    assert inflated == [50_001]


def longest(packed=b""):
    """The longest log there may be, of no's after some bytes: 43 kB of text."""
    most = decision_log._MAX_DECISIONS
    return record(packed + bytes(most // 8 - len(packed)), most)


def test_the_longest_log_stays_packed():
    """Of 43 kB of text there are 32 MiB in memory, and not eight times as many."""
    bomb = longest()
    assert len(bomb["bits"]) < 45_000
    limit = 3 * decision_log._MAX_DECISIONS // 8
    tracemalloc.start()
    try:
        log = DecisionLog.from_json(bomb)
        taken = log.count(True), log.count(False)
        again = log.starts_with(log[:12_345]) and not log[99_999_999]
        with pytest.raises(ValueError, match="bits set after"):
            DecisionLog.from_json(record(b"\x81", 7))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken == (0, decision_log._MAX_DECISIONS) and again
    assert peak < limit


def test_a_long_log_is_refused_without_a_look_at_each_decision(monkeypatch):
    plan = AdaptivePlan(AdaptiveSpec(cap=2, buffer=8, batch_size=4))
    state = plan.get_state()
    looked_at = []

    def one_by_one(log):
        for number in range(len(log)):
            looked_at.append(number)
            yield log[number]

    monkeypatch.setattr(DecisionLog, "__iter__", one_by_one)
    with pytest.raises(ValueError, match="its log takes 4 items"):
        plan.set_state(state | {"log": longest(b"\x80"), "fresh": 7})
    assert not looked_at
    # One item of two uses: the third batch cannot be.
    with pytest.raises(ValueError, match="too few items for its batches"):
        plan.set_state(state | {"log": longest(b"\x80"), "fresh": 1})
    assert len(looked_at) == 3


@given(st.lists(st.booleans(), max_size=30), st.data())
def test_a_log_is_sliced_and_counted_as_a_list_is(decisions, data):
    log = DecisionLog(decisions)
    part = data.draw(st.slices(len(decisions)))
    assert list(log[part]) == decisions[part]
    assert log[part] == DecisionLog(decisions[part])
    assert [log[k] for k in range(-len(log), len(log))] == decisions * 2
    for value in (True, False, 1, 2, None, "x"):
        assert log.count(value) == decisions.count(value)


def test_a_log_is_looked_through_part_by_part(monkeypatch):
    monkeypatch.setattr(decision_log, "_UNPACKED_AT_ONCE", 16)
    decisions = [number % 3 == 0 for number in range(50)]
    assert list(DecisionLog(decisions)) == decisions


def test_a_log_comes_back_from_its_file(tmp_path):
    path = tmp_path / "run.tape"
    DecisionLog([False] * 9).save(path)
    DecisionLog([True, False]).save(path)
    assert DecisionLog.load(path) == DecisionLog([True, False])
    assert os.listdir(tmp_path) == ["run.tape"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.tape"
    DecisionLog([True]).save(path)

    def disk_full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space"):
        DecisionLog([False]).save(path)
    assert DecisionLog.load(path) == DecisionLog([True])
    assert os.listdir(tmp_path) == ["run.tape"]


def test_ctrl_c_at_the_end_of_a_save_is_what_is_raised(tmp_path, monkeypatch):
    replace = os.replace

    def interrupted(*args):
        replace(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DecisionLog([True]).save(tmp_path / "run.tape")
    assert os.listdir(tmp_path) == ["run.tape"]


def test_a_log_is_written_through_no_link(tmp_path, monkeypatch):
    """A stranger's folder may hold one of the name that is used until all is there."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "run" / "tape.json"
    path.parent.mkdir()
    path.symlink_to(victim)
    (path.parent / f".tape.json.{os.getpid()}").symlink_to(victim)
    DecisionLog([True]).save(path)
    assert DecisionLog.load(path) == DecisionLog([True])
    # Not even if the name were known.
    monkeypatch.setattr(decision_log.secrets, "token_hex", lambda size: "ab" * size)
    (path.parent / f".tape.json.{'ab' * 8}.new").symlink_to(victim)
    with pytest.raises(FileExistsError):
        DecisionLog([False]).save(path)
    assert victim.read_text() == "mine"
    assert DecisionLog.load(path) == DecisionLog([True])


def test_nobody_waits_for_a_log_in_a_named_pipe(tmp_path):
    os.mkfifo(tmp_path / "tape.json")
    with pytest.raises(ValueError, match=r"tape\.json is not a decision log: it is"):
        DecisionLog.load(tmp_path / "tape.json")


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b"9" * 9999])
def test_a_file_that_is_no_json_is_refused(tmp_path, content):
    path = tmp_path / "bad.tape"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.tape is not a decision log"):
        DecisionLog.load(path)


def test_a_file_larger_than_any_log_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "_MAX_DECISIONS", 8)
    path = tmp_path / "large.tape"
    path.write_bytes(b" " * 5000)
    with pytest.raises(ValueError, match="larger than any decision log"):
        DecisionLog.load(path)


@given(st.lists(st.booleans(), max_size=40), st.data())
def test_whatever_bit_of_a_file_flips_is_seen(decisions, data):
    log = DecisionLog(decisions)
    content = bytearray(log.to_text().encode())
    flip = data.draw(st.integers(0, 8 * len(content) - 1))
    content[flip // 8] ^= 1 << flip % 8
    with contextlib.suppress(ValueError):
        assert DecisionLog.read(io.BytesIO(content), name="tape.json") == log


def test_another_number_of_decisions_is_seen():
    """Of as many bytes: the bits alone do not tell it."""
    text = DecisionLog([True, False, False]).to_text()
    changed = text.replace('"decisions": 3', '"decisions": 2').encode()
    with pytest.raises(ValueError, match=r"tape\.json is not a decision log: .* che"):
        DecisionLog.read(io.BytesIO(changed), name="tape.json")
