"""JSON files are strict JSON, and whatever a disk changes in one is seen."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import (
    DamagedFileError,
    json_line,
    read_if_whole,
    read_json,
    read_line,
    seal,
    unseal,
    write_json,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=5)


def strict(text):
    """Parses JSON as the standard has it, without NaN and Infinity."""

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_no_number_becomes_null(tmp_path):
    path = run_folder(tmp_path) / "a.json"
    write_json(path, {"a": [1.5, float("nan")], "b": {"c": float("inf")}, "d": 2**70})
    expected = {"a": [1.5, None], "b": {"c": None}, "d": 2**70}
    assert unseal(strict(path.read_text())) == expected
    assert read_json(path) == expected
    assert read_json(path.parent / "missing.json") is None


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = run_folder(tmp_path) / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"old": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_file_of_an_earlier_version_has_no_checksum(tmp_path):
    (tmp_path / "a.json").write_text('{"updates": 60}')
    assert read_json(run_folder(tmp_path) / "a.json") == {"updates": 60}


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"1", b"[" * 100_000, b'{"updates": 61, "crc32": "00000000"}'],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = run_folder(tmp_path) / "a.json"
    (tmp_path / "a.json").write_bytes(damage)
    with pytest.raises(DamagedFileError, match=r"a\.json is damaged: "):
        read_json(path)
    assert read_if_whole(path) is None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({}, "it lacks 'updates'"),
        ({"updates": "9"}, "'updates' is '9'"),
        ({"updates": 9, "echo": 1}, "it lacks 'echo.factor'"),
    ],
)
def test_a_file_that_lacks_what_is_needed_is_damaged(tmp_path, content, what):
    path = run_folder(tmp_path) / "a.json"
    write_json(path, content)
    fields = {"updates": int, "echo?.factor": float}
    with pytest.raises(DamagedFileError, match=rf"a\.json is damaged: {what}; put"):
        read_json(path, fields)
    assert read_if_whole(path, fields) is None
    write_json(path, {"updates": 9})
    assert read_json(path, fields) == {"updates": 9}


@given(OBJECTS, st.data())
@example({"updates": 60}, None)
def test_whatever_bit_of_a_line_flips_is_seen(content, data):
    whole = unseal(strict(json_line(content)))
    line = json_line(content).encode()
    flips = (
        range(8 * len(line))
        if data is None
        else [data.draw(st.integers(0, 8 * len(line) - 1))]
    )
    for flip in flips:
        damaged = bytearray(line)
        damaged[flip // 8] ^= 1 << flip % 8
        try:
            found = read_line(bytes(damaged))
        except ValueError:
            continue
        # Only the name of the checksum changed, or a space became another one.
        assert {name: found.get(name) for name in whole} == whole
        assert len(found) <= len(whole) + 1


@given(OBJECTS)
def test_a_checksum_does_not_depend_on_the_order(content):
    content = unseal(strict(json_line(content)))
    assert seal(dict(reversed(content.items()))) == seal(content)
