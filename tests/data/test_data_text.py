"""Texts: files, prepared tokens, and documents that are packed when they are read."""

import gzip
import hashlib
import lzma
import math
import pickle
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_folders import DOCUMENTS, Documents, prepare

from echo_jax.data.sources import load_corpus
from echo_jax.data.text import choose_group, open_sequences, unigram_nats

EOD = 256


def is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 20 == 0


def test_files_follow_in_the_order_of_their_names(tmp_path):
    names = [f"{i}.txt" for i in range(100)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() + b"|")
    corpus = load_corpus(str(tmp_path / "*.txt"))
    parts = {False: "", True: ""}
    for name in sorted(names):
        parts[is_held_out(name)] += f"{name}|"
    assert corpus.validation.tobytes().decode() == parts[True] != ""
    assert corpus.train.tobytes().decode() == parts[False]
    # Of few files, none of which is held out, one is still.
    few = ["1.txt", "2.txt", "3.txt"]
    assert not any(map(is_held_out, few))
    metadata = load_corpus(str(tmp_path / "[1-3].txt")).metadata
    assert (metadata["train_files"], metadata["validation_files"]) == (2, 1)


def test_one_file_holds_out_its_last_twentieth(tmp_path):
    content = bytes(range(14, 214))
    (tmp_path / "one.txt").write_bytes(content)
    corpus = load_corpus(str(tmp_path / "one.txt"))
    assert corpus.train.tobytes() == content[:190]
    assert corpus.validation.tobytes() == content[190:]
    assert corpus.metadata["split"] == "last twentieth of the file"
    # Windows of bytes, of which the rest is dropped.
    text = open_sequences(str(tmp_path / "one.txt"), seq_len=8)
    assert [text.train[i] for i in range(len(text.train))] == [
        content[9 * i : 9 * i + 9] for i in range(21)
    ]
    tokens = text.decode(text.train[1])["tokens"]
    assert tokens.dtype == np.uint8 and tokens.tolist() == [*content[9:18]]
    with pytest.raises(ValueError, match="10 bytes holds no window of 11"):
        open_sequences(str(tmp_path / "one.txt"), seq_len=10)
    with pytest.raises(ValueError, match="has no split 'extra'; it has train, valid"):
        open_sequences(str(tmp_path / "one.txt"), 8, splits=("train", "extra"))


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".JSON"])
def test_files_of_fields_are_no_text_though_they_are_packed(tmp_path, ending):
    (path := tmp_path / f"x{ending}.gz").write_bytes(
        gzip.compress(b'{"text": "a"}' * 9)
    )
    with pytest.raises(ValueError, match=f"of type '{ending.lower()}'; text is read"):
        load_corpus(str(path))


PACKED = {".gz": gzip.compress, ".xz": lzma.compress}


def test_the_hash_tells_contents_and_file_borders_apart(tmp_path):
    hashes = set()
    for contents in (["ab", "c"], ["a", "bc"], ["ab", "d"]):
        for name, content in zip(("x.txt", "y.txt"), contents, strict=True):
            (tmp_path / name).write_text(content)
        source = f"{tmp_path}/x.txt, {tmp_path}/y.txt"
        hashes.add(load_corpus(source).metadata["sha256"])
    assert len(hashes) == 3


@pytest.mark.parametrize("suffix", PACKED)
def test_a_decompression_bomb_is_refused_before_it_unfolds(tmp_path, suffix):
    bomb = tmp_path / f"bomb{suffix}"
    bomb.write_bytes(PACKED[suffix](bytes(64 * 1024**2)))
    assert bomb.stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"more than 1000000 bytes.*bomb"):
            load_corpus(str(bomb), max_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()


def test_an_archive_that_asks_for_much_memory_is_refused(tmp_path):
    path = tmp_path / "greedy.xz"
    # Its header asks for a dictionary of 1.5 GiB.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0}]
    content = bytearray(lzma.compress(b"text", filters=filters))
    content[16] = 40 - 3
    content[20:24] = zlib.crc32(content[12:20]).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"greedy\.xz.*cannot be unpacked"):
        load_corpus(str(path))


def test_the_limit_holds_for_all_files_together(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(bytes(600))
    load_corpus(str(tmp_path / "*.txt"), max_bytes=1200)
    with pytest.raises(ValueError, match=r"more than 1199 bytes.*b\.txt"):
        load_corpus(str(tmp_path / "*.txt"), max_bytes=1199)


@pytest.mark.parametrize("suffix", PACKED)
def test_a_damaged_archive_is_refused_by_name(tmp_path, suffix):
    path = tmp_path / f"broken{suffix}"
    whole = PACKED[suffix](b"some text" * 1000)
    for content in (whole[: len(whole) // 2], b"no archive", whole[:-20] + bytes(20)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"broken{suffix}.*cannot be unpacked"):
            load_corpus(str(path))


@pytest.mark.parametrize(
    ("source", "error", "named"),
    [
        ("", FileNotFoundError, "Use 'stdlib'"),
        ("nowhere.txt", FileNotFoundError, r"'nowhere\.txt' matches no file"),
        ("one.zip", ValueError, r"'.zip'.*\.txt, \.gz, \.xz"),
        ("one.txt,sub/one.txt", ValueError, r"two files called 'one\.txt'"),
    ],
)
def test_a_bad_source_is_refused(tmp_path, monkeypatch, source, error, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("one.txt", "one.zip", "sub/one.txt"):
        (tmp_path / name).write_bytes(bytes(100))
    with pytest.raises(error, match=named):
        load_corpus(source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The folder that TFDS_DATA_DIR names."""
    folder = tmp_path_factory.mktemp("tfds")
    Documents(data_dir=folder, file_format="array_record").download_and_prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder))
        yield


def stream_of(lines):
    """The tokens of a split: bytes, with one behind every document."""
    return [t for line in lines for t in (*line.removesuffix("\n").encode(), EOD)]


def windows_of(split, decode):
    return [decode(split[i]) for i in range(len(split))]


@pytest.mark.parametrize("seq_len", [3, 24])
def test_windows_predict_every_token_once(folder, seq_len):
    text = pickle.loads(pickle.dumps(open_sequences(str(folder), seq_len)))
    tokens = [window["tokens"] for window in windows_of(text.train, text.decode)]
    assert {window.dtype for window in tokens} == {np.dtype("uint16")}
    assert not tokens[0].flags.writeable
    stream = stream_of(DOCUMENTS)
    count = (len(stream) - 1) // 24 * 24 // seq_len
    starts = [seq_len * i for i in range(count)]
    assert [t.tolist() for t in tokens] == [stream[s : s + seq_len + 1] for s in starts]


def test_a_prepared_text_knows_its_bytes_and_the_loss_of_counting(folder):
    text = open_sequences(str(folder), seq_len=8)
    assert (text.vocab, text.eod) == (257, EOD)
    # Every line end is a byte of the file, and every end of a document a token.
    streams = stream_of(DOCUMENTS), stream_of(DOCUMENTS[:20])
    assert text.bytes_per_token == sum(map(len, DOCUMENTS[:20])) / len(streams[1])
    # All tokens of a small text, the very first and the rest of a block apart.
    counted = [np.array(s[1 : (len(s) - 1) // 24 * 24 + 1]) for s in streams]
    nats = unigram_nats(counted[:1], counted[1:], 257)
    expected = {"unigram_nats": nats, "tokenizer": "bytes"}
    for split in ("train", "validation"):
        expected[f"{split}_examples"] = len(getattr(text, split))
    assert expected.items() <= text.metadata.items()
    assert len(text.metadata["sha256"]) == 64
    with pytest.raises(ValueError, match=r"model\.seq_len=7 .* use one of 8, 12, 24"):
        open_sequences(str(folder), seq_len=7)


def test_the_loss_of_counting_by_hand():
    # Counts 3, 1, 0 and one more each: 4/7, 2/7, 1/7.
    train = [np.array([0, 0]), np.array([0, 1])]
    found = unigram_nats(train, [np.array([0, 2, 2])], vocab=3)
    assert found == pytest.approx(-(math.log(4 / 7) + 2 * math.log(1 / 7)) / 3)


@settings(max_examples=20)
@given(
    texts=st.lists(st.text("aé\ufeff \r\n", max_size=8), min_size=1, max_size=20),
    seq_len=st.integers(1, 30),
)
def test_a_window_holds_its_documents_one_after_another(texts, seq_len, documents):
    # A byte-order mark is not text.
    text = open_sequences("tfds:documents", seq_len, tokenizer="bytes")
    decode = type(text.decode)(lambda r: {"text": r}, text.tokenizer, seq_len)
    encoded = [each.encode() for each in texts]
    records = type(text.train)(encoded, size=3)
    assert len(records) == len(texts) // 3
    for index in range(len(records)):
        item = decode(records[index])
        expected = [EOD]
        for each in texts[index * 3 : (index + 1) * 3]:
            expected += [*each.removeprefix("\ufeff").encode(), EOD]
        length = int(item["length"])
        assert length == min(len(expected), seq_len + 1)
        assert item["tokens"].shape == (seq_len + 1,)
        assert (item["tokens"].dtype, item["length"].dtype) == (np.uint16, np.int32)
        assert item["tokens"][:length].tolist() == expected[:length]
        assert (item["tokens"][length:] == EOD).all()


def test_documents_are_tokenised_when_they_are_read(documents, tmp_path):
    model = prepare(tmp_path, tokenizer="sentencepiece", vocab=300) / "tokenizer.model"
    text = open_sequences("tfds:documents", seq_len=64, tokenizer=str(model))
    text = pickle.loads(pickle.dumps(text))
    assert (text.vocab, text.eod) == (300, 1)
    each = text.metadata["documents_in_a_window"]
    assert each > 1
    windows = windows_of(text.train, text.decode)
    used = each * len(windows)
    assert used <= len(DOCUMENTS) < used + each
    cut = [window["tokens"][1 : int(window["length"])] for window in windows]
    assert 0.9 * used < (np.concatenate(cut) == text.eod).sum() <= used
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
        ("tfds:documents", __file__, r"cannot be used: .* Name a tokenizer"),
    ],
    ids=["stdlib", "none", "missing", "no_model"],
)
def test_what_does_not_fit_is_named(documents, source, tokenizer, named):
    with pytest.raises(ValueError, match=named):
        open_sequences(source, 8, tokenizer)


def test_as_many_documents_are_packed_as_lose_one_token_in_twenty():
    fit = choose_group([10] * 12, seq_len=32)
    # 4 documents are 40 tokens, of which 8 would be cut off.
    assert (fit.records, fit.cut, fit.sampled) == (3, 0, 12)
    assert fit.filled == pytest.approx(30 / 32)
    # Of 2 documents, 4 of 100 tokens lie behind the end, or 11 of 200.
    assert choose_group([50] * 10, seq_len=96).records == 2
    assert choose_group([100] * 10, seq_len=189).records == 1
    # A document that is longer than a window is cut.
    fit = choose_group([200, 100], seq_len=50)
    assert (fit.records, fit.filled) == (1, 1)
    assert fit.cut == pytest.approx(1 - 100 / 300)
