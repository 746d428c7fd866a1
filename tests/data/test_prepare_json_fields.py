"""Fields of a JSON object come out as they are, and never take more than is said."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_but_for

from echo_jax.data.prepare import coco_json
from echo_jax.data.prepare.coco_json import read_annotations
from echo_jax.data.prepare.errors import PrepareError
from echo_jax.data.prepare.json_fields import read_fields

TEXT = st.text('aé😀"\\\n/', max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)
ENTRIES = st.dictionaries(st.sampled_from(["id", "name", "outline"]), VALUES)
DOCUMENTS = st.dictionaries(
    st.sampled_from(["images", "boxes", "info", "outline"]),
    VALUES | st.lists(ENTRIES, max_size=3),
)


def read(text, fields=("images", "boxes"), without=("outline",), max_bytes=2**20):
    return read_fields([text], fields, without=without, max_bytes=max_bytes)


@given(DOCUMENTS, st.integers(1, 20), st.booleans())
def test_fields_are_those_of_a_reader_of_all(document, size, is_marked):
    """In chunks of any size, and behind a mark of the byte order."""
    text = json.dumps(document).encode()
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    if is_marked:
        chunks[0] = b"\xef\xbb\xbf" + chunks[0]
    expected = {
        name: [
            {key: entry[key] for key in entry if key != "outline"}
            if isinstance(entry, dict)
            else entry
            for entry in value
        ]
        if isinstance(value, list)
        else value
        for name, value in document.items()
        if name in ("images", "boxes")
    }
    found = read_fields(
        chunks, ("images", "boxes"), without=("outline",), max_bytes=2**20
    )
    assert found == expected
    assert json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"{}x", b"1", b"null", b"[]", b'{"images": [}', b"\xff"]
)
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ValueError, match=r"it is no(t JSON: .*| JSON object)$"):
        read(text)


BOMBS = {
    "empty lists": b"[],",
    "empty objects": b"{},",
    "objects": b'{"id":1,"image_id":2},',
    "lists of lists": b"[[[]]],",
    "numbers": b"0,",
    "large numbers": b"1234567,",
    "floats": b"1.5,",
    "texts": b'"ab",',
    "wide texts": b'"a\xf0\x9f\x98\x80",',
}


SOON = ("empty lists", "objects", "floats", "wide texts")


@pytest.mark.parametrize("name", slow_but_for(SOON, BOMBS))
def test_what_is_kept_takes_no_more_than_is_said(name):
    limit = 10_000_000
    text = b'{"images":[' + BOMBS[name] * 1_000_000 + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 10000000 bytes"):
            read(text, max_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The events of one part of the text come on top.
    assert peak < limit + 8_000_000


def test_texts_of_fields_are_counted():
    pieces = ",".join(f'"{number}":0' for number in range(100_000))
    text = f'{{"images":[{{{pieces}}}]}}'.encode()
    with pytest.raises(ValueError, match="more than 10000000 bytes"):
        read(text, max_bytes=10_000_000)


@pytest.mark.parametrize("name", ["images", "other"])
def test_what_is_deep_or_endless_is_refused_before_all_of_it_is_read(name):
    start = f'{{"{name}": '.encode()
    read_parts = []

    def chunks(piece):
        yield start
        for number in range(1000):
            read_parts.append(number)
            yield piece

    with pytest.raises(ValueError, match="nested more than 64 deep"):
        read_fields(chunks(b"[" * 65_536), ["images"], without=(), max_bytes=2**30)
    assert len(read_parts) == 1
    start += b'"'
    with pytest.raises(ValueError, match="text of over 16777216 bytes"):
        read_fields(chunks(b"a" * 65_536), ["images"], without=(), max_bytes=2**30)
    assert len(read_parts) < 300


def test_what_is_not_wanted_takes_no_memory():
    text = b'{"info":[' + b"[]," * 200_000 + b'0],"images":[{"outline":['
    text += b"[]," * 200_000 + b'0],"id":7}]}'
    tracemalloc.start()
    try:
        assert read(text) == {"images": [{"id": 7}]}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


def test_annotations_that_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(coco_json, "_ANY_RATIO_BYTES", 2**24)
    path = tmp_path / "bomb.json.gz"
    text = b'{"categories":[],"images":[],"annotations":[' + b"{}," * 500_000 + b"{}]}"
    path.write_bytes(gzip.compress(text, 9))
    assert path.stat().st_size < 2_500
    tracemalloc.start()
    try:
        with pytest.raises(PrepareError, match="takes more than 16777216 bytes"):
            read_annotations(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 17_500_000
