"""Decision logs: what they hold comes back, and nothing else is read."""

import base64
import contextlib
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax import DecisionLog

MOST = 1 << 28  # decisions of a log


STREAM = zlib.compress(b"\x80")


def encoded(stream):
    return base64.b64encode(stream).decode()


def record(packed, count, **changes):
    bits = encoded(zlib.compress(packed))
    whole = {"version": 2, "decisions": count, "bits": bits, "ends": []}
    return whole | changes


def test_the_record_is_the_packed_bits():
    bits = [True, False, False, True, False, False, False, False, True]
    found = DecisionLog(bits, [(2, 5), (9, 0)]).to_json()
    assert (found["version"], found["decisions"]) == (2, 9)
    assert found["ends"] == [[2, 5], [9, 0]]
    assert zlib.decompress(base64.b64decode(found["bits"])) == bytes([0x90, 0x80])


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=70), st.data())
def test_a_log_is_a_sequence_that_comes_back_from_json(decisions, data):
    places = st.lists(st.integers(0, len(decisions)), max_size=3).map(sorted)
    ended = DecisionLog(decisions, [(at, 7) for at in data.draw(places)])
    assert DecisionLog.from_json(json.loads(json.dumps(ended.to_json()))) == ended
    assert ended[:1].ends == tuple(x for x in ended.ends if x[0] < len(ended[:1]))
    assert (ended == DecisionLog(decisions)) == (not ended.ends)
    log = DecisionLog(decisions)
    again = DecisionLog.from_json(json.loads(json.dumps(log.to_json())))
    assert again == log
    assert list(again) == decisions
    part = data.draw(st.slices(len(decisions)))
    assert list(log[part]) == decisions[part]
    assert log[part] == DecisionLog(decisions[part])
    assert [log[k] for k in range(-len(log), len(log))] == decisions * 2
    for value in (True, False, 1, 2, None, "x"):
        assert log.count(value) == decisions.count(value)
    assert log != decisions and log in {DecisionLog(iter(decisions))}
    assert log == DecisionLog(bytearray(decisions))
    with pytest.raises(IndexError):
        log[len(decisions)]


def test_a_long_log_that_is_regular_is_small():
    regular = DecisionLog([True, False, False, False] * 250_000)
    assert len(json.dumps(regular.to_json())) < 1000


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"version": 2, "decisions": 0}, "not the record"),
        (record(b"", 0, version=1), "version 1 is of another version of echo_jax"),
        (record(b"", 0) | {"more": 1}, "not the record"),
        (record(b"", 0, version="9" * 10**6), "is of another"),
        (record(b"\x80", 1, decisions=True), "True decisions is refused"),
        (record(b"\x80", 1, decisions=1 << 29), "decisions is refused"),
        (record(b"\x80", 1, bits="A" * 10_000), "cannot be decoded"),
        (record(b"\x80", 1, bits="ä"), "cannot be decoded"),
        (record(b"\x80", 9), "2 bytes must decode"),
        (record(b"\x80", 0), "0 bytes must decode"),
        (record(b"", 8, bits=encoded(STREAM[:-1])), "1 bytes must decode"),
        (record(b"", 8, bits=encoded(STREAM + b"x")), "1 bytes must decode"),
        (record(b"\x81", 7), "bits set after"),
        (record(b"\x80", 1, ends=[[2, 0]]), "ascending to at most 1"),
        (record(b"\x80", 1, ends=[[1, 0], [0, 0]]), "must be pairs"),
        (record(b"\x80", 1, ends=[[True, 0]]), "must be pairs"),
        (record(b"\x80", 1, ends=[[1, -1]]), "must be pairs"),
        (record(b"\x80", 1, ends=[3]), "must be pairs"),
    ],
)
def test_anything_else_is_refused(bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        DecisionLog.from_json(bad)
    assert len(str(caught.value)) < 300


def test_bombs_are_not_inflated_and_the_longest_log_stays_packed(inflated):
    """50 MB of zeros in 50 kB, said to be 400 000 decisions: 50 kB are decoded."""
    with pytest.raises(ValueError, match="50000 bytes must decode"):
        DecisionLog.from_json(record(bytes(50_000_000), 400_000))
    assert inflated == [50_001]
    # Of 43 kB of text there are 32 MiB in memory, and not eight times as many.
    longest = record(bytes(MOST // 8), MOST)
    assert len(longest["bits"]) < 45_000
    tracemalloc.start()
    try:
        log = DecisionLog.from_json(longest)
        assert "0 of them yes" in repr(log) and not log[99_999_999]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * MOST // 8


@pytest.mark.parametrize("text", ["", b"\xff\x00", "[" * 100_000, "9" * 9999])
def test_a_text_that_is_no_log_is_refused(text):
    with pytest.raises(ValueError, match="this is not a decision log"):
        DecisionLog.from_text(text)


@settings(max_examples=60)
@given(st.lists(st.booleans(), max_size=40), st.data())
def test_whatever_bit_of_a_file_flips_is_seen(decisions, data):
    log = DecisionLog(decisions)
    content = bytearray(log.to_text().encode())
    flip = data.draw(st.integers(0, 8 * len(content) - 1))
    content[flip // 8] ^= 1 << flip % 8
    with contextlib.suppress(ValueError):
        assert DecisionLog.from_text(bytes(content)) == log


def test_another_number_of_decisions_is_seen():
    text = DecisionLog([True, False, False]).to_text()
    with pytest.raises(ValueError, match=r"this is not a decision log: .* che"):
        DecisionLog.from_text(text.replace('"decisions": 3', '"decisions": 2'))
