import pickle

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.data.prepare.tokenizer import ByteTokenizer
from echo_jax.data.text.packing import (
    GroupedRecords,
    PackDocuments,
    choose_group,
    sample_documents,
)

EOD = 256


def as_text(record):
    return {"text": record}


@given(
    documents=st.lists(st.binary(max_size=8), min_size=1, max_size=20),
    size=st.integers(1, 4),
    seq_len=st.integers(1, 30),
)
def test_a_window_holds_its_documents_one_after_another(documents, size, seq_len):
    texts = [text.decode(errors="ignore").lstrip("\ufeff") for text in documents]
    source = [text.encode() for text in texts]  # A byte-order mark is not text.
    records = GroupedRecords(source, size)
    pack = PackDocuments(as_text, ByteTokenizer(), seq_len)
    assert len(records) == len(source) // size
    for index in range(len(records)):
        item = pack(records[index])
        expected = [EOD]
        for text in source[index * size : (index + 1) * size]:
            expected += [*text, EOD]
        length = int(item["length"])
        assert length == min(len(expected), seq_len + 1)
        assert item["tokens"].shape == (seq_len + 1,)
        assert item["tokens"].dtype == np.uint16
        assert item["length"].dtype == np.int32
        assert item["tokens"][:length].tolist() == expected[:length]
        assert (item["tokens"][length:] == EOD).all()


def test_grouped_records_are_bytes_and_pickle_with_their_source():
    records = GroupedRecords([b"a", b"b", b"c", b"d", b"e"], 2)
    again = pickle.loads(pickle.dumps(records))
    assert len(again) == 2
    assert again[1] == records[1] == msgpack.packb([b"c", b"d"])


def test_packing_pickles_for_worker_processes():
    pack = pickle.loads(pickle.dumps(PackDocuments(as_text, ByteTokenizer(), 4)))
    assert pack(msgpack.packb([b"a"]))["tokens"].tolist() == [256, 97, 256, 256, 256]


def test_as_many_documents_are_packed_as_fit():
    fit = choose_group([10] * 12, seq_len=32)
    # 4 documents are 40 tokens, of which 8 would be cut off.
    assert (fit.records, fit.cut, fit.sampled) == (3, 0, 12)
    assert fit.filled == pytest.approx(30 / 32)


def test_one_token_in_twenty_may_be_cut_off():
    # Of 2 documents: 100 tokens, of which 4, or 6, lie behind the end.
    assert choose_group([50] * 10, seq_len=96).records == 2
    fit = choose_group([50] * 10, seq_len=94)
    assert (fit.records, fit.cut) == (1, 0)


def test_a_document_that_is_longer_than_a_window_is_cut():
    fit = choose_group([200, 100], seq_len=50)
    assert (fit.records, fit.filled) == (1, 1)
    assert fit.cut == pytest.approx(1 - 100 / 300)


def test_samples_are_runs_of_neighbours_and_always_the_same():
    source = [str(i).encode() for i in range(10_000)]
    sampled = [int(text) for text in sample_documents(source, as_text)]
    assert sampled == [int(text) for text in sample_documents(source, as_text)]
    assert 1900 <= len(sampled) <= 2100
    runs = np.reshape(sampled[: len(sampled) // 64 * 64], (-1, 64))
    assert (np.diff(runs, axis=1) == 1).all()
    assert sample_documents(source[:100], as_text) == [*map(str, range(100))]
