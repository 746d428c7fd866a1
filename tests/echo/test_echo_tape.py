"""Tapes: what they hold comes back, and nothing else is read."""

import base64
import json
import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.echo.plans import decision_log as tape_module
from echo_jax.echo.plans.decision_log import Tape


def record(packed, count, **changes):
    bits = base64.b64encode(zlib.compress(packed)).decode()
    return {"version": 1, "decisions": count, "bits": bits} | changes


def test_the_record_is_the_packed_bits():
    found = Tape([True, False, False, True, False, False, False, False, True]).to_json()
    assert found["version"] == 1
    assert found["decisions"] == 9
    assert zlib.decompress(base64.b64decode(found["bits"])) == bytes([0x90, 0x80])


@given(st.lists(st.booleans(), max_size=70))
def test_a_tape_comes_back_from_json(decisions):
    tape = Tape(decisions)
    again = Tape.from_json(json.loads(json.dumps(tape.to_json())))
    assert again == tape
    assert list(again) == decisions
    again.append(True)
    assert list(again) == [*decisions, True]


def test_a_tape_is_a_sequence():
    tape = Tape([True, False, True])
    assert (len(tape), tape[0], tape[-2], tape[1:]) == (
        3,
        True,
        False,
        Tape([False, True]),
    )
    assert tape != [True, False, True]
    with pytest.raises(IndexError):
        tape[3]


def test_regular_tapes_are_small():
    assert len(json.dumps(Tape([True, False, False, False] * 250_000).to_json())) < 1000


def test_a_tape_is_full_some_day(monkeypatch):
    monkeypatch.setattr(tape_module, "_MAX_DECISIONS", 2)
    tape = Tape([True, True])
    with pytest.raises(ValueError, match="at most 2 decisions"):
        tape.append(True)


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
        Tape.from_json(bad)
    assert len(str(caught.value)) < 300


def test_a_truncated_or_continued_stream_is_refused():
    stream = zlib.compress(bytes(range(100)))
    for changed in (stream[:-1], stream + b"x", stream + stream[:20]):
        bits = base64.b64encode(changed).decode()
        with pytest.raises(ValueError, match="decode"):
            Tape.from_json({"version": 1, "decisions": 800, "bits": bits})


def test_a_bomb_is_not_inflated(monkeypatch):
    """50 MB of zeros in 50 kB, said to be 400 000 decisions: 50 kB are decoded."""
    inflated = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self):
            self._stream = real()

        def __getattr__(self, name):
            return getattr(self._stream, name)

        def decompress(self, *args):
            content = self._stream.decompress(*args)
            inflated.append(len(content))
            return content

    monkeypatch.setattr(tape_module.zlib, "decompressobj", Watched)
    bomb = record(bytes(50_000_000), 400_000)
    with pytest.raises(ValueError, match="exactly the 50000 bytes"):
        Tape.from_json(bomb)
    assert inflated == [50_001]


def test_a_tape_comes_back_from_its_file(tmp_path):
    path = tmp_path / "run.tape"
    Tape([False] * 9).save(path)
    Tape([True, False]).save(path)
    assert Tape.load(path) == Tape([True, False])
    assert os.listdir(tmp_path) == ["run.tape"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.tape"
    Tape([True]).save(path)

    def disk_full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space"):
        Tape([False]).save(path)
    assert Tape.load(path) == Tape([True])
    assert os.listdir(tmp_path) == ["run.tape"]


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b"9" * 9999])
def test_a_file_that_is_no_json_is_refused(tmp_path, content):
    path = tmp_path / "bad.tape"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.tape is not a tape"):
        Tape.load(path)


def test_a_file_larger_than_any_tape_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tape_module, "_MAX_DECISIONS", 8)
    path = tmp_path / "large.tape"
    path.write_bytes(b" " * 5000)
    with pytest.raises(ValueError, match="larger than any tape"):
        Tape.load(path)
