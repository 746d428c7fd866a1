import itertools
import lzma
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from text_folders import DOCUMENTS, Documents, prepare

from echo_jax.data.prepare.job import Settings
from echo_jax.data.prepare.text import TextSettings, prepare_text
from echo_jax.data.prepare.tokenizer import ByteTokenizer
from echo_jax.data.sources.prepared import open_prepared
from echo_jax.data.text.sequences import open_sequences
from echo_jax.data.text.tokens import DecodeTokens, TokenWindows, unigram_nats

EOD = ByteTokenizer().eod


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def subwords(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subwords")
    return prepare(folder, tokenizer="sentencepiece", vocab=300)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The folder that TFDS_DATA_DIR is to name."""
    folder = tmp_path_factory.mktemp("tfds")
    Documents(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def stream_of(lines):
    """The tokens of a split: bytes, with one behind every document."""
    return [t for line in lines for t in (*line.removesuffix("\n").encode(), EOD)]


@pytest.mark.parametrize("seq_len", [1, 3, 8, 24])
def test_windows_predict_every_token_once(folder, seq_len):
    blocks = open_prepared(folder, "train")
    windows = TokenWindows(blocks, seq_len)
    tokens = [DecodeTokens(257)(record)["tokens"] for record in windows]
    assert len(tokens) == len(windows) == len(blocks) * 24 // seq_len
    assert {window.dtype for window in tokens} == {np.dtype("uint16")}
    stream = stream_of(DOCUMENTS)[: len(blocks) * 24 + 1]
    assert [*tokens[0][:1], *np.concatenate([w[1:] for w in tokens])] == stream
    for one, other in itertools.pairwise(tokens):
        assert one[-1] == other[0]


def test_windows_pickle_and_are_read_only(folder):
    windows = TokenWindows(open_prepared(folder, "train"), 8)
    again = pickle.loads(pickle.dumps(windows))
    assert again[5] == windows[5]
    with pytest.raises(ValueError, match="read-only"):
        DecodeTokens(257)(windows[5])["tokens"][0] = 1


def test_a_length_that_does_not_divide_the_blocks_is_refused(folder):
    with pytest.raises(ValueError, match=r"model\.seq_len=7 .* use one of 8, 12, 24"):
        TokenWindows(open_prepared(folder, "train"), 7)


def test_large_vocabularies_take_four_bytes():
    record = np.array([70_000, 3], "<u4").tobytes()
    assert DecodeTokens(70_001)(record)["tokens"].tolist() == [70_000, 3]


def test_the_loss_of_counting():
    # Counts 3, 1, 0 and one more each: 4/7, 2/7, 1/7.
    train = [np.array([0, 0]), np.array([0, 1])]
    found = unigram_nats(train, [np.array([0, 2, 2])], vocab=3)
    assert found == pytest.approx(-(math.log(4 / 7) + 2 * math.log(1 / 7)) / 3)


def test_counting_does_not_depend_on_the_parts():
    tokens = np.random.default_rng(0).integers(0, 9, 3_000_000)
    parts = np.array_split(tokens, 7)
    whole = unigram_nats([tokens], [tokens], 9)
    assert unigram_nats(parts, parts, 9) == whole
    # Nearly uniform.
    assert whole == pytest.approx(math.log(9), rel=1e-5)


def test_a_prepared_text(folder):
    text = open_sequences(str(folder), seq_len=8)
    assert (text.vocab, text.eod) == (257, EOD)
    # Every line end is a byte of the file, and every end of a document a token.
    num_bytes = sum(map(len, DOCUMENTS[:20]))
    assert text.bytes_per_token == num_bytes / len(stream_of(DOCUMENTS[:20]))
    # All tokens of a small text, the very first and the rest of a block apart.
    train, validation = (
        np.array(stream[1 : (len(stream) - 1) // 24 * 24 + 1])
        for stream in (stream_of(DOCUMENTS), stream_of(DOCUMENTS[:20]))
    )
    assert text.metadata["unigram_nats"] == unigram_nats([train], [validation], 257)
    assert text.metadata["train_examples"] == len(text.train)
    assert text.metadata["validation_examples"] == len(text.validation)
    assert len(text.metadata["sha256"]) == 64
    assert text.metadata["tokenizer"] == "bytes"


def test_documents_are_tokenised_when_they_are_read(documents, subwords, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(documents))
    model = str(subwords / "tokenizer.model")
    text = open_sequences("tfds:documents", seq_len=64, tokenizer=model)
    assert (text.vocab, text.eod) == (300, 1)
    assert text.metadata["documents_in_a_window"] > 1
    windows = [text.decode(text.train[i]) for i in range(len(text.train))]
    used = text.metadata["documents_in_a_window"] * len(windows)
    assert used <= len(DOCUMENTS) < used + text.metadata["documents_in_a_window"]
    ends = sum(
        (window["tokens"][1 : int(window["length"])] == text.eod).sum()
        for window in windows
    )
    assert 0.9 * used < ends <= used
    by_bytes = open_sequences("tfds:documents", seq_len=64, tokenizer="bytes")
    num_bytes = sum(len(line) - 1 for line in DOCUMENTS[:20])
    assert by_bytes.vocab == 257
    assert by_bytes.bytes_per_token == num_bytes / (num_bytes + 20)
    assert text.bytes_per_token > 1.5


@pytest.mark.parametrize(
    ("source", "tokenizer", "named"),
    [
        ("stdlib", "bytes", r"data\.tokenizer='bytes' goes with documents"),
        ("tfds:documents", "", r"data\.tokenizer='' cannot be used"),
        ("tfds:documents", "no.model", r"data\.tokenizer='no\.model' cannot be used"),
        ("", "", r"data\.source"),
    ],
)
def test_what_does_not_fit_is_named(documents, monkeypatch, source, tokenizer, named):
    monkeypatch.setenv("TFDS_DATA_DIR", str(documents))
    with pytest.raises(ValueError, match=named):
        open_sequences(source, 8, tokenizer)


def test_a_file_that_is_no_tokenizer_is_named(documents, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(documents))
    (tmp_path / "x.model").write_bytes(b"no model at all")
    with pytest.raises(ValueError, match=r"cannot be used: .* Name a tokenizer"):
        open_sequences("tfds:documents", 8, str(tmp_path / "x.model"))


@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="needs ECHO_JAX_DATA")
def test_the_loss_of_counting_on_wikitext_2(tmp_path):
    """Its bytes, as prepared, against a count of the bytes themselves."""
    folder = Path(os.environ["ECHO_JAX_DATA"]) / "wikitext2"
    counts = {}
    for split, file in (("train", "test"), ("validation", "valid")):
        raw = lzma.decompress((folder / f"{file}.txt.xz").read_bytes())
        (tmp_path / f"{split}.txt").write_bytes(raw[:500_000])
        counts[split] = np.bincount(np.frombuffer(raw[:500_000], np.uint8), None, 257)
    prepare_text(
        [f"{split}={tmp_path / split}.txt" for split in counts],
        Settings(out=tmp_path / "out", workers=1),
        TextSettings(tokenizer="bytes", block=1000),
    )
    seen = counts["train"] + 1
    expected = -(counts["validation"] * np.log(seen / seen.sum())).sum() / 500_000
    found = open_sequences(str(tmp_path / "out"), seq_len=100).metadata["unigram_nats"]
    assert found == pytest.approx(expected, rel=1e-4)
